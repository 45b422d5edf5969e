"""Matrix products with few rows, in Triton: the weights are streamed once, their inputs shared out over `splits` programs.

With 1 to 128 rows a product mostly reads weights. A library's kernel gives each output column block one program, too few to
draw the memory's bandwidth from a small matrix; here the sum over inputs is split too, and the partial sums (float32) are
left for the next kernel to add up (engines/kernels/norms.py, rope.py, activation.py). Tiles of both come through the card's
copy engine; the first weights are on their way before the kernel that makes the inputs has ended.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engines.kernels.launch import launch


@triton.jit(do_not_specialize=["num_rows", "stride_part"])
def _few_rows_kernel(
    x_desc, w_desc, w_ptr, out_ptr, num_rows, stride_part, N: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, AHEAD: tl.constexpr, DOT_F32: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK_N
    split = tl.program_id(1)
    per_split: tl.constexpr = ((K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K)) * BLOCK_K
    first = split * per_split
    rows, cols = tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    precision: tl.constexpr = "ieee" if DOT_F32 else "tf32"
    # Weights are nobody's output: the first are loaded, those after them called into the L2 cache, before the wait.
    w = w_desc.load([column, first])
    if PDL:
        line: tl.constexpr = 128 // (4 if DOT_F32 else 2)
        ks = first + BLOCK_K + tl.arange(0, AHEAD) * line
        at = w_ptr + tl.minimum(cols, N - 1).to(tl.int64)[:, None] * K + tl.minimum(ks, K - 1)[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # The units take 64 rows of their first operand at the least: with fewer tokens than that it is the weights.
    # What lies beyond an edge is loaded as zeros.
    if BLOCK_M < 64:
        acc = tl.dot(w, x_desc.load([0, first]).T, input_precision=precision)
        for k in range(first + BLOCK_K, min(first + per_split, K), BLOCK_K):
            acc = tl.dot(w_desc.load([column, k]), x_desc.load([0, k]).T, acc, input_precision=precision)
        where = out_ptr + split * stride_part + rows[None, :] * N + cols[:, None]
        mask = (rows < num_rows)[None, :] & (cols < N)[:, None]
    else:
        acc = tl.dot(x_desc.load([0, first]), w.T, input_precision=precision)
        for k in range(first + BLOCK_K, min(first + per_split, K), BLOCK_K):
            acc = tl.dot(x_desc.load([0, k]), w_desc.load([column, k]).T, acc, input_precision=precision)
        where = out_ptr + split * stride_part + rows[:, None] * N + cols[None, :]
        mask = (rows < num_rows)[:, None] & (cols < N)[None, :]
    tl.store(where, acc.to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class FewRowsConfig:
    """Shape of a launch: rows, outputs and inputs of a step, splits of the inputs, warps, pipeline stages."""

    block_m: int
    block_n: int
    block_k: int
    splits: int
    num_warps: int = 4
    num_stages: int = 3


AHEAD = 4  # lines of 128 bytes of each output's weights that are fetched ahead, beyond the first step's


def few_rows_linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, config: FewRowsConfig) -> None:
    """out[s] = the s-th share of x @ weight.T, for as many rows as `out` has. x [rows or more, K]; weight [N, K]; out [splits,
    rows <= block_m, N], float32 or (one split) any type. Rows of x and weight begin at multiples of 16 bytes.

    Quickest where x goes on to block_m rows: what such rows hold is read and left out.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    n, k = weight.shape
    assert out.shape[1] <= min(len(x), config.block_m) and out.shape[0] == config.splits, (x.shape, out.shape, config)
    launch(
        _few_rows_kernel, (triton.cdiv(n, config.block_n), config.splits),
        TensorDescriptor.from_tensor(x, [config.block_m, config.block_k]),
        TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k]),
        weight, out, out.shape[1], out.stride(0), N=n, K=k,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, SPLITS=config.splits, AHEAD=AHEAD,
        DOT_F32=x.dtype == torch.float32, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
