"""Rows of two tensors picked by one list, in Triton: what the last layer still computes for the rows that yield a token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engines.kernels.launch import launch


@triton.jit
def _take_rows_kernel(
    a_ptr, out_a_ptr, b_ptr, out_b_ptr, rows_ptr, num_rows_ptr,
    WIDTH_A: tl.constexpr, WIDTH_B: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    out_row = tl.program_id(0)
    num_rows = tl.load(num_rows_ptr)
    row = tl.load(rows_ptr + out_row).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if out_row >= num_rows:  # what its entry holds is no row
        return
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(a_ptr + row * WIDTH_A + cols, mask=cols < WIDTH_A, other=0.0)
    b = tl.load(b_ptr + row * WIDTH_B + cols, mask=cols < WIDTH_B, other=0.0)
    tl.store(out_a_ptr + out_row.to(tl.int64) * WIDTH_A + cols, a, mask=cols < WIDTH_A)
    tl.store(out_b_ptr + out_row.to(tl.int64) * WIDTH_B + cols, b, mask=cols < WIDTH_B)


def take_rows(
    a: torch.Tensor,
    out_a: torch.Tensor,
    b: torch.Tensor,
    out_b: torch.Tensor,
    rows: torch.Tensor,
    num_rows: torch.Tensor,
) -> None:
    """out_a[i] = a[rows[i]], out_b[i] = b[rows[i]], for i below num_rows (int32 [1]). a, out_a [., A] and b, out_b [., B] contiguous."""
    width_a, width_b = a.shape[1], b.shape[1]
    block = 1024
    launch(
        _take_rows_kernel, (len(out_a), triton.cdiv(max(width_a, width_b), block)),
        a, out_a, b, out_b, rows, num_rows, WIDTH_A=width_a, WIDTH_B=width_b, BLOCK=block, num_warps=4,
    )  # fmt: skip
