"""Attention of prefill chunks in Triton: keys of this round from the round's own rows, older ones through the block table.

A chunk's own keys and values lie side by side in the merged product (engines/kernels/rope.py leaves them there, turned), so
they come as whole tiles through the card's copy engine, described once for all layers and rounds. What an earlier round or
the prefix cache left is read from its blocks, as in engines/kernels/attention.py, whose tiles and softmax these are. A
fresh prompt never reads a block.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from engines.kernels.attention import LOG2_E, Config, _attend
from engines.kernels.launch import launch


@triton.jit
def _attend_own(
    q, local, kv_desc, acc, row_max, row_sum, base, first, last, k_column, v_column, scale,
    MASKED: tl.constexpr, BLOCK_N: tl.constexpr, DOT_F32: tl.constexpr,
):  # fmt: skip
    """Online softmax over the chunk's keys first .. last-1, counted from its first token, in steps of BLOCK_N.

    A step may reach beyond the chunk, into other rows: MASKED hides them, as no row sees a key after itself.
    """
    for n in range(first, last, BLOCK_N):
        k = kv_desc.load([base + n, k_column])
        if DOT_F32:
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        else:
            scores = tl.dot(q, tl.trans(k))
        if MASKED:
            keys = n + tl.arange(0, BLOCK_N)
            scores = tl.where(keys[None, :] <= local[:, None], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
        p = tl.math.exp2(scores * scale - new_max[:, None])
        fade = tl.math.exp2(row_max - new_max)
        row_sum = row_sum * fade + tl.sum(p, 1)
        acc = acc * fade[:, None]
        v = kv_desc.load([base + n, v_column])
        if DOT_F32:
            acc = tl.dot(p, v.to(tl.float32), acc, input_precision="ieee")
        else:
            acc = tl.dot(p.to(v.dtype), v, acc)
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def _chunk_kernel(
    q_ptr, kv_desc, k_ptr, v_ptr, out_ptr, tables_ptr, tile_seq_ptr, tile_query_ptr, tile_pos_ptr, tile_len_ptr, tile_base_ptr, num_tiles_ptr,
    scale, stride_q, stride_out, stride_block, stride_slot, stride_head, stride_table,
    GROUP: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FRESH: tl.constexpr, DOT_F32: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # Heads first: the tiles that read the same keys run at the same time.
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    num_tiles = tl.load(num_tiles_ptr)
    seq = tl.load(tile_seq_ptr + tile)
    query = tl.load(tile_query_ptr + tile)  # row of q of the tile's first token
    pos = tl.load(tile_pos_ptr + tile)  # its position in the sequence
    length = tl.load(tile_len_ptr + tile)
    base = tl.load(tile_base_ptr + tile)  # row of the chunk's first token
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if tile >= num_tiles:
        return
    rows = tl.arange(0, BLOCK_M)
    token = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    valid = (token < length) & (rows < (BLOCK_M // GROUP) * GROUP)
    offs_d = tl.arange(0, HEAD_DIM)
    at = (query + token).to(tl.int64)
    q = tl.load(
        q_ptr + at[:, None] * stride_q + head[:, None] * HEAD_DIM + offs_d[None, :], mask=valid[:, None], other=0.0
    )
    acc = tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)

    before = query - base  # the chunk's tokens before the tile
    if not FRESH:
        known = pos - before  # keys that are in blocks already: seen by every row
        table_ptr = tables_ptr + seq.to(tl.int64) * stride_table
        whole = known // BLOCK_N * BLOCK_N
        acc, row_max, row_sum = _attend(
            q, pos + token, k_ptr, v_ptr, table_ptr, acc, row_max, row_sum, 0, whole, kv_head * stride_head, stride_block, stride_slot, scale,
            False, HEAD_DIM, HEAD_DIM, BLOCK_SIZE, BLOCK_N, DOT_F32,
        )  # fmt: skip
        acc, row_max, row_sum = _attend(
            q, pos + token, k_ptr, v_ptr, table_ptr, acc, row_max, row_sum, whole, known, kv_head * stride_head, stride_block, stride_slot, scale,
            True, HEAD_DIM, HEAD_DIM, BLOCK_SIZE, BLOCK_N, DOT_F32,
        )  # fmt: skip
    local = before + token
    k_column = (NUM_HEADS + kv_head) * HEAD_DIM
    v_column = (NUM_HEADS + NUM_KV_HEADS + kv_head) * HEAD_DIM
    whole = (before + 1) // BLOCK_N * BLOCK_N
    acc, row_max, row_sum = _attend_own(
        q, local, kv_desc, acc, row_max, row_sum, base, 0, whole, k_column, v_column, scale, False, BLOCK_N, DOT_F32
    )
    acc, row_max, row_sum = _attend_own(
        q, local, kv_desc, acc, row_max, row_sum, base, whole, before + length, k_column, v_column, scale, True, BLOCK_N, DOT_F32,
    )  # fmt: skip
    where = out_ptr + at[:, None] * stride_out + head[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(where, (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty), mask=valid[:, None])


def own_rows(qkv: torch.Tensor, head_dim: int, config: Config) -> Any:
    """The description of qkv's rows that `chunk_attention` reads through; made once for a buffer."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(qkv, [config.block_n, head_dim])


def chunk_attention(
    q: torch.Tensor,
    own: Any,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    block_tables: torch.Tensor,
    tile_seq: torch.Tensor,
    tile_query: torch.Tensor,
    tile_pos: torch.Tensor,
    tile_len: torch.Tensor,
    tile_base: torch.Tensor,
    num_tiles: torch.Tensor,
    max_tiles: int,
    scale: float,
    config: Config,
    fresh: bool = False,
) -> None:
    """Causal attention of every tile, into `out`.

    As `paged_attention`, and: `own` describes the merged product, [num_tokens, (heads + 2 kv heads) * head_dim], whose key
    columns hold turned keys; tile_base: int32, the row of the first token of the tile's chunk. Head dims are powers of 2.
    `fresh`: every chunk begins its sequence, so that nothing is in blocks yet (a kernel without those loops: it takes fewer
    registers and less shared memory).
    A card without a copy engine reads the same rows through pointers.
    """
    num_heads, head_dim = q.shape[1], q.shape[2]
    block_size, kv_heads = k_cache.shape[1], k_cache.shape[2]
    launch(
        _chunk_kernel, (kv_heads, max_tiles),
        q, own, k_cache, v_cache, out, block_tables, tile_seq, tile_query, tile_pos, tile_len, tile_base, num_tiles,
        scale * LOG2_E, q.stride(0), out.stride(0), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), block_tables.stride(0),
        GROUP=num_heads // kv_heads, NUM_HEADS=num_heads, NUM_KV_HEADS=kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, FRESH=fresh, DOT_F32=q.dtype == torch.float32,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
