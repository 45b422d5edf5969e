"""Matrix products with few rows, in Triton: the weights are streamed once, their inputs shared out over `splits` programs.

With 1 to 16 rows a product only reads weights. A library's kernel gives each output column block one program, too few to
draw the memory's bandwidth from a small matrix; here the sum over inputs is split too, and the partial sums (float32) are
left for the next kernel to add up (engines/kernels/norms.py, rope.py, activation.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engines.kernels.launch import launch


@triton.jit
def _weight_tile(w_ptr, cols, ks, N: tl.constexpr, K: tl.constexpr, WHOLE: tl.constexpr):
    # Every weight is read once and never again.
    if WHOLE:
        return tl.load(w_ptr + cols.to(tl.int64)[:, None] * K + ks[None, :], eviction_policy="evict_first")
    return tl.load(
        w_ptr + cols.to(tl.int64)[:, None] * K + ks[None, :], mask=(cols < N)[:, None] & (ks < K)[None, :], other=0.0
    )


@triton.jit
def _input_tile(x_ptr, rows, ks, num_rows, stride_x, K: tl.constexpr, WHOLE: tl.constexpr):
    mask = (rows < num_rows)[None, :] if WHOLE else (rows < num_rows)[None, :] & (ks < K)[:, None]
    return tl.load(x_ptr + rows[None, :] * stride_x + ks[:, None], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["num_rows", "stride_part"])
def _few_rows_kernel(
    x_ptr, w_ptr, out_ptr, num_rows, stride_x, stride_part, N: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, DOT_F32: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    rows = tl.arange(0, BLOCK_M)
    per_split: tl.constexpr = ((K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K)) * BLOCK_K
    first = split * per_split
    # No tile hangs over an edge, and no split is left without inputs.
    whole: tl.constexpr = N % BLOCK_N == 0 and K % BLOCK_K == 0 and (SPLITS - 1) * per_split < K
    precision: tl.constexpr = "ieee" if DOT_F32 else "tf32"
    ks = first + tl.arange(0, BLOCK_K)
    # Weights are nobody's output: the first are on their way before the kernel that makes `x` has ended.
    w = _weight_tile(w_ptr, cols, ks, N, K, whole)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.dot(w, _input_tile(x_ptr, rows, ks, num_rows, stride_x, K, whole), input_precision=precision)
    for k in range(first + BLOCK_K, min(first + per_split, K), BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        w = _weight_tile(w_ptr, cols, ks, N, K, whole)
        acc = tl.dot(w, _input_tile(x_ptr, rows, ks, num_rows, stride_x, K, whole), acc, input_precision=precision)
    where = out_ptr + split * stride_part + rows[None, :] * N + cols[:, None]
    tl.store(where, acc.to(out_ptr.dtype.element_ty), mask=(rows < num_rows)[None, :] & (cols < N)[:, None])


@dataclass(frozen=True, slots=True)
class FewRowsConfig:
    """Shape of a launch: outputs and inputs of a step, splits of the inputs, warps, pipeline stages."""

    block_n: int
    block_k: int
    splits: int
    num_warps: int = 4
    num_stages: int = 3


MAX_FEW_ROWS = 16


def few_rows_linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, config: FewRowsConfig) -> None:
    """out[s] = the s-th share of x @ weight.T. x [rows <= 16, K]; weight [N, K] contiguous; out [splits, rows, N], float32 or
    (one split) any type."""
    assert x.shape[0] <= MAX_FEW_ROWS and out.shape[0] == config.splits, (x.shape, out.shape, config)
    n, k = weight.shape
    launch(
        _few_rows_kernel, (triton.cdiv(n, config.block_n), config.splits),
        x, weight, out, x.shape[0], x.stride(0), out.stride(0), N=n, K=k,
        BLOCK_M=MAX_FEW_ROWS, BLOCK_N=config.block_n, BLOCK_K=config.block_k, SPLITS=config.splits,
        DOT_F32=x.dtype == torch.float32, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
