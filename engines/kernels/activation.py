"""SiLU-gated product in Triton: silu(gate) * up over the merged gate/up product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engines.kernels.launch import launch


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
    at = row.to(tl.int64) * stride_row + cols
    gate = tl.load(gate_up_ptr + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + at + INNER, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        gate += tl.load(gate_up_ptr + part * stride_part + at, mask=mask, other=0.0).to(tl.float32)
        up += tl.load(gate_up_ptr + part * stride_part + at + INNER, mask=mask, other=0.0).to(tl.float32)
    gate = gate.to(dtype).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype)
    tl.store(out_ptr + row.to(tl.int64) * INNER + cols, silu * up.to(dtype), mask=mask)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor, num_tokens: torch.Tensor) -> None:
    """out [T, inner] = silu(gate) * up; gate_up [T, 2 * inner] or partial sums [parts, T, 2 * inner]; num_tokens int32 [1]."""
    parts = gate_up.shape[0] if gate_up.dim() == 3 else 1
    inner = out.shape[1]
    block = min(1024, triton.next_power_of_2(inner))
    launch(
        _silu_mul_kernel, (len(out), triton.cdiv(inner, block)),
        gate_up, out, num_tokens, gate_up.stride(-2), gate_up.stride(0) if parts > 1 else 0,
        INNER=inner, BLOCK=block, PARTS=parts, num_warps=4,
    )  # fmt: skip
