"""QK-norm, RoPE and the write of K and V into their blocks, in one kernel over the merged product.

Where chunks attend to their own rows (engines/kernels/chunk_attention.py), turned keys and values go back there too.

The slot of a token is looked up in the block table on the device, so the host never makes slot mappings.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engines.kernels.launch import launch


@triton.jit
def _head(
    qkv_ptr, at, bias_ptr, bias_at, mask, stride_part, PARTS: tl.constexpr, BIAS: tl.constexpr, DTYPE: tl.constexpr
):
    x = tl.load(qkv_ptr + at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(qkv_ptr + part * stride_part + at, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        x += tl.load(bias_ptr + bias_at, mask=mask, other=0.0).to(tl.float32)
    return x.to(DTYPE)


@triton.jit
def _rope_store_kernel(
    qkv_ptr, bias_ptr, q_out_ptr, k_ptr, v_ptr, own_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, positions_ptr, rows_ptr, tables_ptr,
    num_tokens_ptr, eps, stride_qkv, stride_part, stride_block, stride_slot, stride_head, stride_table,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF_PAD: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PARTS: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, OWN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a token and HEADS heads, counted through queries, keys and values as they lie in a row."""
    token = tl.program_id(0)
    dtype = q_out_ptr.dtype.element_ty
    half: tl.constexpr = HEAD_DIM // 2
    offs = tl.arange(0, HALF_PAD)
    num_tokens = tl.load(num_tokens_ptr)
    real = token < num_tokens  # what stands in a row of padding is no position
    position = tl.where(real, tl.load(positions_ptr + token), 0)
    table_row = tl.where(real, tl.load(rows_ptr + token), 0).to(tl.int64)
    cos = tl.load(cos_ptr + position.to(tl.int64) * half + offs, mask=offs < half, other=0.0)
    sin = tl.load(sin_ptr + position.to(tl.int64) * half + offs, mask=offs < half, other=0.0)
    block = tl.load(tables_ptr + table_row * stride_table + position // BLOCK_SIZE).to(tl.int64)
    slot = block * stride_block + (position % BLOCK_SIZE) * stride_slot
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if token >= num_tokens:
        return

    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    key_head = head - NUM_HEADS
    value_head = key_head - NUM_KV_HEADS
    keep = (offs < half)[None, :]
    mask = (value_head < NUM_KV_HEADS)[:, None] & keep
    is_query, is_value = (key_head < 0)[:, None], (value_head >= 0)[:, None]
    low = head[:, None] * HEAD_DIM + offs[None, :]
    base = token.to(tl.int64) * stride_qkv
    first = _head(qkv_ptr, base + low, bias_ptr, low, mask, stride_part, PARTS, BIAS, dtype)
    second = _head(qkv_ptr, base + low + half, bias_ptr, low + half, mask, stride_part, PARTS, BIAS, dtype)
    x, y = first, second
    if NORM:
        wide_x, wide_y = x.to(tl.float32), y.to(tl.float32)
        square = tl.sum(wide_x * wide_x, 1) + tl.sum(wide_y * wide_y, 1)
        inverse = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
        weight_x = tl.where(
            is_query,
            tl.load(q_norm_ptr + offs, mask=offs < half, other=0.0)[None, :],
            tl.load(k_norm_ptr + offs, mask=offs < half, other=0.0)[None, :],
        )
        weight_y = tl.where(
            is_query,
            tl.load(q_norm_ptr + half + offs, mask=offs < half, other=0.0)[None, :],
            tl.load(k_norm_ptr + half + offs, mask=offs < half, other=0.0)[None, :],
        )
        x, y = (wide_x * inverse).to(dtype) * weight_x, (wide_y * inverse).to(dtype) * weight_y
    wide_x, wide_y = x.to(tl.float32), y.to(tl.float32)
    turned_x = (wide_x * cos[None, :] - wide_y * sin[None, :]).to(dtype)
    turned_y = (wide_y * cos[None, :] + wide_x * sin[None, :]).to(dtype)

    q_at = token.to(tl.int64) * NUM_HEADS * HEAD_DIM + low
    tl.store(q_out_ptr + q_at, turned_x, mask=mask & is_query)
    tl.store(q_out_ptr + q_at + half, turned_y, mask=mask & is_query)
    k_at = slot + (key_head * stride_head)[:, None] + offs[None, :]
    k_mask = keep & ((key_head >= 0) & (value_head < 0))[:, None]
    tl.store(k_ptr + k_at, turned_x, mask=k_mask)
    tl.store(k_ptr + k_at + half, turned_y, mask=k_mask)
    v_at = slot + (value_head * stride_head)[:, None] + offs[None, :]
    tl.store(v_ptr + v_at, first, mask=mask & is_value)
    tl.store(v_ptr + v_at + half, second, mask=mask & is_value)
    if OWN:
        tl.store(own_ptr + base + low, turned_x, mask=k_mask)
        tl.store(own_ptr + base + low + half, turned_y, mask=k_mask)
        if BIAS or PARTS > 1:
            tl.store(own_ptr + base + low, first, mask=mask & is_value)
            tl.store(own_ptr + base + low + half, second, mask=mask & is_value)


def rope_and_store(
    qkv: torch.Tensor,
    bias: torch.Tensor | None,
    q_out: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    table_rows: torch.Tensor,
    block_tables: torch.Tensor,
    num_tokens: torch.Tensor,
    eps: float,
    own: torch.Tensor | None = None,
) -> None:
    """Norm and turn queries into q_out and keys into the cache, and copy values into the cache.

    qkv [T, (H + 2 KV) * D] or partial sums [parts, T, …]; q_out [T, H, D]; caches [num_blocks, block_size, KV, D]; cos, sin
    f32 [positions, D / 2]; positions, table_rows int32 [T]: token t lies at positions[t] of block_tables[table_rows[t]].
    own: rows as qkv's, or qkv itself, whose key and value columns become those of the cache.
    """
    parts = qkv.shape[0] if qkv.dim() == 3 else 1
    num_heads, head_dim = q_out.shape[1], q_out.shape[2]
    block_size, kv_heads = k_cache.shape[1], k_cache.shape[2]
    # Few tokens: many programs, each short. Many tokens: the card is full anyway, so that each does more.
    heads = 8 if len(q_out) <= 256 else 16
    launch(
        _rope_store_kernel, (len(q_out), triton.cdiv(num_heads + 2 * kv_heads, heads)),
        qkv, bias, q_out, k_cache, v_cache, own, q_norm, k_norm, cos, sin, positions, table_rows, block_tables, num_tokens, eps,
        qkv.stride(-2), qkv.stride(0) if parts > 1 else 0, k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), block_tables.stride(0),
        NUM_HEADS=num_heads, NUM_KV_HEADS=kv_heads, HEAD_DIM=head_dim, HALF_PAD=triton.next_power_of_2(head_dim // 2), HEADS=heads,
        BLOCK_SIZE=block_size, PARTS=parts, NORM=q_norm is not None, BIAS=bias is not None, OWN=own is not None,
        num_warps=2 if heads == 8 else 4,
    )  # fmt: skip
