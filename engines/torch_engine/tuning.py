"""Launch configurations, chosen beforehand on an H200 (benchmarks/attention.py, benchmarks/linear.py); none is tried in a run.

Other cards run them too (tests/test_other_cards.py compiles them): what would need more than a card has is made smaller here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from engines.kernels.attention import Config
from engines.kernels.linear import FewRowsConfig


@dataclass(frozen=True, slots=True)
class Card:
    """What shapes depend on. `copy_engine`: tiles described once are fetched by it; `shared_bytes`: that a program may have."""

    copy_engine: bool
    shared_bytes: int


H200 = Card(True, 227 << 10)


def card_of(device: torch.device) -> Card:
    """Off a card, an H200: what is compiled there is interpreted here."""
    if device.type != "cuda":
        return H200
    properties = torch.cuda.get_device_properties(device)
    return Card(properties.major >= 9, properties.shared_memory_per_block_optin)


def decode_attention(num_seqs: int, num_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Config:
    """Enough programs to draw the memory's bandwidth: keys are split where sequences times KV heads are too few."""
    rows = max(16, triton.next_power_of_2(num_heads // kv_heads))
    splits = max(1, min(16, 512 // triton.next_power_of_2(num_seqs * kv_heads)))
    if head_dim > 128 or dtype == torch.float32:
        return Config(rows, 32, splits, num_warps=4, num_stages=2)
    if num_seqs * kv_heads < 64:
        return Config(rows, 128, splits, num_warps=4, num_stages=3)
    if num_seqs * kv_heads >= 1024:  # as quick as two warps where lengths are equal, and quicker where they differ
        return Config(rows, 64, splits, num_warps=4, num_stages=4)
    return Config(rows, 64, splits, num_warps=4 if splits > 1 else 2, num_stages=3)


def chunk_attention(
    num_heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, card: Card = H200
) -> Config:
    """Rows are tokens times the heads of a group."""
    rows = max(16, triton.next_power_of_2(num_heads // kv_heads))
    if head_dim > 128 or dtype == torch.float32:
        return _wide_tiles(rows, head_dim, dtype, card)
    if block_size % 64 == 0:
        return Config(max(rows, 128), 64, num_warps=4, num_stages=3)
    return Config(max(rows, 256), 64, num_warps=8, num_stages=3)


def own_chunk_attention(
    num_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, card: Card = H200
) -> Config | None:
    """Small tiles, several a processor: one's softmax runs beside another's products. None: the copy engine is not there, or
    cannot take such a head out of a row."""
    if head_dim not in (16, 32, 64, 128, 256) or not card.copy_engine:
        return None
    rows = max(16, triton.next_power_of_2(num_heads // kv_heads))
    if head_dim > 128 or dtype == torch.float32:
        return _wide_tiles(rows, head_dim, dtype, card)
    return Config(max(rows, 64), 64, num_warps=4, num_stages=3)


def _wide_tiles(rows: int, head_dim: int, dtype: torch.dtype, card: Card) -> Config:
    """Rows of a tile that are 512 bytes and more: fewer of them where shared memory is small."""
    if head_dim * dtype.itemsize > 512 and card.shared_bytes < 160 << 10:
        return Config(max(rows, 16), 16, num_warps=4, num_stages=2)
    return Config(max(rows, 64), 32, num_warps=4, num_stages=2)


# Rows at which the library's product is slower than with some more, on an H200: (n, k) -> {rows of a captured size: rows to run}.
MORE_ROWS = {
    (6144, 4096): {224: 256, 288: 304, 320: 384, 352: 384},
    (4096, 4096): {160: 192, 224: 256, 288: 320, 352: 368, 416: 432},
    (4096, 12288): {192: 256, 224: 256, 288: 320, 416: 432},
    (24576, 4096): {448: 480},
    (28672, 4096): {448: 464},
    (4096, 14336): {416: 432},
}


def product_rows(num_rows: int, n: int, k: int) -> int:
    """How many rows to run [num_rows, k] x [n, k] with."""
    return MORE_ROWS.get((n, k), {}).get(num_rows, num_rows)


MAX_FEW_ROWS = 128


def few_rows(num_rows: int, n: int, k: int, dtype: torch.dtype, card: Card = H200) -> FewRowsConfig | None:
    """A split product for [num_rows, k] x [n, k], or None where the library's is as fast or its kernel can't be had."""
    tiles, small = -(-n // 64), n * k < 8 << 20
    if dtype == torch.float32 or n > 8192:
        most = 16
    elif n > 4096:
        most = 64 if small else 32
    else:
        most = 64 if small and n > 1024 else MAX_FEW_ROWS
    if num_rows > most or n * k > 128 << 20 or k * dtype.itemsize % 16 or not card.copy_engine:
        return None
    rows = max(16, triton.next_power_of_2(num_rows))
    splits = max(1, min(128 // tiles, k // 512))
    if dtype == torch.float32:
        return FewRowsConfig(rows, 64, 64, splits)
    several = tiles * splits > 132  # programs a processor
    step = 64 if several or rows == 128 else 128
    wanted = min(8 if rows == 128 else 6, max(3, k // splits // step))
    if several and tiles * splits > 3 * 132:
        wanted = 4
    # A step more than there are stages lies in shared memory, with some barriers.
    stages = min(wanted, (card.shared_bytes - 1024) // ((64 + rows) * step * dtype.itemsize) - 1)
    return FewRowsConfig(rows, 64, step, splits, num_stages=stages) if stages >= 2 else None


def partial_sums(shapes: list[tuple[int, int]], dtype: torch.dtype, card: Card = H200) -> int:
    """Numbers that the partial sums of one product take at most; shapes: (n, k)."""
    configs = [(rows, n, few_rows(rows, n, k, dtype, card)) for n, k in shapes for rows in (16, 32, 64, MAX_FEW_ROWS)]
    return max((c.splits * rows * n for rows, n, c in configs if c is not None), default=1)
