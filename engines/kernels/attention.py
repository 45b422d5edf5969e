"""Paged attention in Triton: one kernel for prefill chunks and decodes, and the combine of split KV.

Work is cut into tiles. A tile is a run of query tokens of one sequence; its rows are those tokens times the query heads of
one KV head's group, so that K and V are read once for the whole group. Decodes are tiles of one token. A tile's keys are
the sequence's positions 0 .. position of its last token, read through the block table. With `num_splits` > 1 each tile's
keys are shared out over that many programs, and `combine` puts the partial results together.

The grid depends on sizes alone, never on values, so a CUDA graph can hold a launch: programs beyond `num_tiles` return.
Method: online softmax (Milakov and Gimelshein 2018), FlashAttention-2 (Dao 2023), Flash-Decoding (Dao et al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engines.kernels.launch import launch

LOG2_E = 1.4426950408889634


@triton.jit
def _attend(
    q, q_pos, k_ptr, v_ptr, table_ptr, acc, row_max, row_sum, first, last, head_offset, stride_block, stride_slot, scale,
    MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, DOT_F32: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys first .. last-1, in steps of BLOCK_N from `first`. MASKED: keys may lie beyond a row."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, HEAD_PAD)
    for n in range(first, last, BLOCK_N):
        keys = n + offs_n
        if BLOCK_SIZE % BLOCK_N == 0:
            # The whole step lies in one block: one table entry, contiguous slots.
            block = tl.load(table_ptr + n // BLOCK_SIZE).to(tl.int64)
            slots = block * stride_block + (n % BLOCK_SIZE + offs_n) * stride_slot + head_offset
            inside = keys < last
        else:
            inside = keys < last
            block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            slots = block * stride_block + (keys % BLOCK_SIZE) * stride_slot + head_offset
        if MASKED or HEAD_PAD != HEAD_DIM:
            seen = inside[:, None] & (offs_d < HEAD_DIM)[None, :]
            k = tl.load(k_ptr + slots[:, None] + offs_d[None, :], mask=seen, other=0.0)
            v = tl.load(v_ptr + slots[:, None] + offs_d[None, :], mask=seen, other=0.0)
        else:
            k = tl.load(k_ptr + slots[:, None] + offs_d[None, :])
            v = tl.load(v_ptr + slots[:, None] + offs_d[None, :])
        if DOT_F32:
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        else:
            scores = tl.dot(q, tl.trans(k)) * scale
        if MASKED:
            scores = tl.where((keys[None, :] <= q_pos[:, None]) & inside[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        if MASKED:
            # A row that has seen no key yet keeps -inf; subtracting it would give NaN.
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        else:
            shift = new_max
        p = tl.math.exp2(scores - shift[:, None])
        fade = tl.math.exp2(row_max - shift)
        row_sum = row_sum * fade + tl.sum(p, 1)
        acc = acc * fade[:, None]
        if DOT_F32:
            acc = tl.dot(p, v.to(tl.float32), acc, input_precision="ieee")
        else:
            acc = tl.dot(p.to(v.dtype), v, acc)
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, part_ptr, lse_ptr, tables_ptr, tile_seq_ptr, tile_query_ptr, tile_pos_ptr, tile_len_ptr, num_tiles_ptr,
    scale, stride_q, stride_out, stride_block, stride_slot, stride_head, stride_table,
    GROUP: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_SPLITS: tl.constexpr, DOT_F32: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_tiles = tl.load(num_tiles_ptr)
    seq = tl.load(tile_seq_ptr + tile)
    query = tl.load(tile_query_ptr + tile).to(tl.int64)  # row of q of the tile's first token
    pos = tl.load(tile_pos_ptr + tile)  # its position in the sequence
    length = tl.load(tile_len_ptr + tile)  # tokens in the tile
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if tile >= num_tiles:
        return
    end = pos + length

    rows = tl.arange(0, BLOCK_M)
    token = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    valid = (token < length) & (rows < (BLOCK_M // GROUP) * GROUP)
    offs_d = tl.arange(0, HEAD_PAD)
    q_pos = pos + token
    q_mask = valid[:, None] & (offs_d < HEAD_DIM)[None, :]
    q = tl.load(
        q_ptr + (query + token)[:, None] * stride_q + head[:, None] * HEAD_DIM + offs_d[None, :], mask=q_mask, other=0.0
    )

    per_split = tl.cdiv(tl.cdiv(end, BLOCK_N), NUM_SPLITS) * BLOCK_N
    first = split * per_split
    last = tl.minimum(first + per_split, end)
    acc = tl.zeros([BLOCK_M, HEAD_PAD], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    table_ptr = tables_ptr + seq.to(tl.int64) * stride_table
    head_offset = kv_head * stride_head
    # Every row sees all keys up to the tile's first position: no mask there.
    whole = tl.maximum(first, tl.minimum(last, (pos + 1) // BLOCK_N * BLOCK_N))
    acc, row_max, row_sum = _attend(
        q, q_pos, k_ptr, v_ptr, table_ptr, acc, row_max, row_sum, first, whole, head_offset, stride_block, stride_slot, scale,
        False, HEAD_DIM, HEAD_PAD, BLOCK_SIZE, BLOCK_N, DOT_F32,
    )  # fmt: skip
    acc, row_max, row_sum = _attend(
        q, q_pos, k_ptr, v_ptr, table_ptr, acc, row_max, row_sum, whole, last, head_offset, stride_block, stride_slot, scale,
        True, HEAD_DIM, HEAD_PAD, BLOCK_SIZE, BLOCK_N, DOT_F32,
    )  # fmt: skip
    if NUM_SPLITS == 1:
        out = acc / row_sum[:, None]
        where = out_ptr + (query + token)[:, None] * stride_out + head[:, None] * HEAD_DIM + offs_d[None, :]
        tl.store(where, out.to(out_ptr.dtype.element_ty), mask=q_mask)
    else:
        # Partial results of (query row, head, split); a split without keys says -inf and is left out by the combine.
        at = ((query + token) * NUM_HEADS + head) * NUM_SPLITS + split
        tl.store(lse_ptr + at, row_max + tl.math.log2(row_sum), mask=valid)
        if first < last:
            tl.store(part_ptr + at[:, None] * HEAD_DIM + offs_d[None, :], acc / row_sum[:, None], mask=q_mask)


@triton.jit
def _combine_kernel(
    part_ptr, lse_ptr, out_ptr, tile_query_ptr, num_tiles_ptr, stride_out,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, NUM_SPLITS: tl.constexpr, SPLIT_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    head = tl.program_id(1)
    num_tiles = tl.load(num_tiles_ptr)
    query = tl.load(tile_query_ptr + tile).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if tile >= num_tiles:
        return
    offs_s = tl.arange(0, SPLIT_PAD)
    offs_d = tl.arange(0, HEAD_PAD)
    at = (query * NUM_HEADS + head) * NUM_SPLITS + offs_s
    lse = tl.load(lse_ptr + at, mask=offs_s < NUM_SPLITS, other=float("-inf"))
    weight = tl.math.exp2(lse - tl.max(lse, 0))
    used = (lse > float("-inf"))[:, None] & (offs_d < HEAD_DIM)[None, :]
    part = tl.load(part_ptr + at[:, None] * HEAD_DIM + offs_d[None, :], mask=used, other=0.0)
    out = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(
        out_ptr + query * stride_out + head * HEAD_DIM + offs_d,
        out.to(out_ptr.dtype.element_ty),
        mask=offs_d < HEAD_DIM,
    )


@dataclass(frozen=True, slots=True)
class Config:
    """Shape of a launch: rows and keys of a step, splits of the keys, warps, pipeline stages."""

    block_m: int
    block_n: int
    num_splits: int = 1
    num_warps: int = 4
    num_stages: int = 3


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    block_tables: torch.Tensor,
    tile_seq: torch.Tensor,
    tile_query: torch.Tensor,
    tile_pos: torch.Tensor,
    tile_len: torch.Tensor,
    num_tiles: torch.Tensor,
    max_tiles: int,
    scale: float,
    config: Config,
    partial: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """Causal attention of every tile, into `out`.

    q, out: [num_tokens, num_heads, head_dim], rows strided; k_cache, v_cache: [num_blocks, block_size, num_kv_heads,
    head_dim] (any strides but the last); block_tables: int32 [num_seqs, max_blocks]; tile_*: int32 [>= max_tiles]; num_tiles:
    int32 [1]. A tile has at most block_m // group tokens. With splits: partial f32 [num_tokens, num_heads, num_splits,
    head_dim], lse f32 [num_tokens, num_heads, num_splits], and every tile has one token.
    """
    num_heads, head_dim = q.shape[1], q.shape[2]
    block_size, kv_heads = k_cache.shape[1], k_cache.shape[2]
    group = num_heads // kv_heads
    head_pad = max(16, triton.next_power_of_2(head_dim))  # a matrix unit takes no less
    splits = config.num_splits
    launch(
        _attention_kernel, (max_tiles, kv_heads, splits),
        q, k_cache, v_cache, out, partial, lse, block_tables, tile_seq, tile_query, tile_pos, tile_len, num_tiles,
        scale * LOG2_E, q.stride(0), out.stride(0), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), block_tables.stride(0),
        GROUP=group, NUM_HEADS=num_heads, HEAD_DIM=head_dim, HEAD_PAD=head_pad, BLOCK_SIZE=block_size,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, NUM_SPLITS=splits, DOT_F32=q.dtype == torch.float32,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if splits > 1:
        launch(
        _combine_kernel, (max_tiles, num_heads),
            partial, lse, out, tile_query, num_tiles, out.stride(0),
            NUM_HEADS=num_heads, HEAD_DIM=head_dim, HEAD_PAD=head_pad, NUM_SPLITS=splits, SPLIT_PAD=triton.next_power_of_2(splits),
            num_warps=1,
        )  # fmt: skip


def reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    spans: list[tuple[int, int, int, int]],
    scale: float,
) -> torch.Tensor:
    """The same in plain torch, float32. spans: (sequence, first row of q, position of it, tokens)."""
    out = torch.zeros_like(q, dtype=torch.float32)
    group = q.shape[1] // k_cache.shape[2]
    block_size = k_cache.shape[1]
    for seq, row, pos, length in spans:
        end = pos + length
        blocks = block_tables[seq, : -(-end // block_size)].long()
        k = k_cache[blocks].flatten(0, 1)[:end].float().repeat_interleave(group, 1)
        v = v_cache[blocks].flatten(0, 1)[:end].float().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q[row : row + length].float(), k) * scale
        ahead = torch.arange(end, device=q.device)[None, :] > torch.arange(pos, end, device=q.device)[:, None]
        weights = scores.masked_fill(ahead, float("-inf")).softmax(-1)
        out[row : row + length] = torch.einsum("hqk,khd->qhd", weights, v)
    return out
