"""RMSNorm in Triton: of embedded tokens, of the residual stream with what a layer adds to it, of chosen rows.

A product with few rows leaves its result in `parts` partial sums (engines/kernels/linear.py); they are summed here, in
float32, by whoever reads them next, so that no kernel exists for the sum alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engines.kernels.launch import launch


@triton.jit
def _normalize(x, weight, eps, HIDDEN: tl.constexpr, DTYPE: tl.constexpr):
    """The quotient in float32, rounded, then the product: the order of the reference."""
    inverse = tl.rsqrt(tl.sum(x * x, 0) / HIDDEN + eps)
    return (x * inverse).to(DTYPE) * weight


@triton.jit
def _embed_norm_kernel(
    ids_ptr, embedding_ptr, weight_ptr, residual_ptr, out_ptr, num_tokens_ptr, eps, vocab_first, vocab_last,
    HIDDEN: tl.constexpr, PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    cols = tl.arange(0, PAD)
    mask = cols < HIDDEN
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0)
    num_tokens = tl.load(num_tokens_ptr)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if row >= num_tokens:
        return
    token = tl.load(ids_ptr + row)
    here = (token >= vocab_first) & (token < vocab_last)
    x = tl.load(embedding_ptr + (token - vocab_first).to(tl.int64) * HIDDEN + cols, mask=mask & here, other=0.0)
    tl.store(residual_ptr + row.to(tl.int64) * HIDDEN + cols, x, mask=mask)
    y = _normalize(x.to(tl.float32), weight, eps, HIDDEN, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row.to(tl.int64) * HIDDEN + cols, y, mask=mask)


@triton.jit
def _add_norm_kernel(
    added_ptr, residual_ptr, weight_ptr, out_ptr, num_tokens_ptr, rows_ptr, stride_part, eps,
    HIDDEN: tl.constexpr, PAD: tl.constexpr, PARTS: tl.constexpr, ADD: tl.constexpr, GATHER: tl.constexpr, STORE_RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    out_row = tl.program_id(0)
    cols = tl.arange(0, PAD)
    mask = cols < HIDDEN
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0)
    num_tokens = tl.load(num_tokens_ptr)
    row = tl.load(rows_ptr + out_row) if GATHER else out_row
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if out_row >= num_tokens:
        return
    at = row.to(tl.int64) * HIDDEN + cols
    x = tl.load(residual_ptr + at, mask=mask, other=0.0)
    if ADD:
        added = tl.load(added_ptr + at, mask=mask, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            added += tl.load(added_ptr + part * stride_part + at, mask=mask, other=0.0).to(tl.float32)
        # What a product gives is rounded before it is added, as where it stands in a tensor of its own.
        x = added.to(x.dtype) + x
    if STORE_RESIDUAL:
        tl.store(residual_ptr + at, x, mask=mask)
    y = _normalize(x.to(tl.float32), weight, eps, HIDDEN, out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_row.to(tl.int64) * HIDDEN + cols, y, mask=mask)


def _warps(pad: int) -> int:
    return max(1, min(16, pad // 512))


def embed_norm(
    token_ids: torch.Tensor,
    embedding: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    out: torch.Tensor,
    num_tokens: torch.Tensor,
    eps: float,
    vocab_first: int = 0,
) -> None:
    """residual = embedding[token_ids]; out = its RMSNorm. int32 ids [T]; residual, out [T, hidden]; num_tokens int32 [1].

    `embedding` holds the rows from `vocab_first` on; ids outside give zeros (a rank's share of the vocabulary).
    """
    hidden = embedding.shape[1]
    pad = triton.next_power_of_2(hidden)
    launch(
        _embed_norm_kernel, (len(out),),
        token_ids, embedding, weight, residual, out, num_tokens, eps, vocab_first, vocab_first + embedding.shape[0],
        HIDDEN=hidden, PAD=pad, num_warps=_warps(pad),
    )  # fmt: skip


def add_norm(
    added: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    num_tokens: torch.Tensor,
    eps: float,
    rows: torch.Tensor | None = None,
) -> None:
    """residual += added; out = RMSNorm(residual).

    added [T, hidden], or partial sums [parts, T, hidden], or None: the residual has it already. With `rows` int32 [n]: out row i from row rows[i], the residual
    left as it was. num_tokens int32 [1] says how many rows of `out` are real.
    """
    parts = added.shape[0] if added is not None and added.dim() == 3 else 1
    hidden = out.shape[1]
    pad = triton.next_power_of_2(hidden)
    launch(
        _add_norm_kernel, (len(out),),
        added, residual, weight, out, num_tokens, rows, added.stride(0) if added is not None and parts > 1 else 0, eps,
        HIDDEN=hidden, PAD=pad, PARTS=parts, ADD=added is not None, GATHER=rows is not None, STORE_RESIDUAL=rows is None and added is not None, num_warps=_warps(pad),
    )  # fmt: skip
