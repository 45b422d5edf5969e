"""SiLU-gated product in Triton: silu(gate) * up over the merged gate/up product, whose columns are gate and up in turn."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engines.kernels.launch import launch


@triton.jit
def gated_silu(gate_up, ROWS: tl.constexpr, COLS: tl.constexpr, DTYPE: tl.constexpr):
    """[ROWS, 2 * COLS] float32, gate and up in turn -> silu(gate) * up, [ROWS, COLS]. Rounded where the reference has a tensor."""
    gate, up = tl.split(tl.reshape(gate_up, (ROWS, COLS, 2)))
    gate = gate.to(DTYPE).to(tl.float32)
    return (gate / (1.0 + tl.exp(-gate))).to(DTYPE) * up.to(DTYPE)


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr, out_ptr, num_tokens_ptr, stride_row, stride_part, INNER: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    num_tokens = tl.load(num_tokens_ptr)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if row >= num_tokens:
        return
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < INNER
    dtype = out_ptr.dtype.element_ty
    both = tl.program_id(1) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
    at = row.to(tl.int64) * stride_row + both
    gate_up = tl.load(gate_up_ptr + at, mask=both < 2 * INNER, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        gate_up += tl.load(gate_up_ptr + part * stride_part + at, mask=both < 2 * INNER, other=0.0).to(tl.float32)
    gated = gated_silu(gate_up, 1, BLOCK, dtype)
    tl.store(out_ptr + row.to(tl.int64) * INNER + cols, tl.reshape(gated, (BLOCK,)), mask=mask)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor, num_tokens: torch.Tensor) -> None:
    """out [T, inner] = silu(gate) * up; gate_up [T, 2 * inner], gate and up in turn, or partial sums [parts, T, 2 * inner]; num_tokens int32 [1]."""
    parts = gate_up.shape[0] if gate_up.dim() == 3 else 1
    inner = out.shape[1]
    block = min(1024, triton.next_power_of_2(inner))
    launch(
        _silu_mul_kernel, (len(out), triton.cdiv(inner, block)),
        gate_up, out, num_tokens, gate_up.stride(-2), gate_up.stride(0) if parts > 1 else 0,
        INNER=inner, BLOCK=block, PARTS=parts, num_warps=4,
    )  # fmt: skip
