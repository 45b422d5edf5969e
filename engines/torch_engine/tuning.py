"""Launch configurations, chosen beforehand on an H200 (benchmarks/attention.py, benchmarks/linear.py); none is tried in a run.

Other cards run them too: none needs more than an Ampere card has, and shapes that would are made smaller here.
"""

from __future__ import annotations

import torch
import triton

from engines.kernels.attention import Config
from engines.kernels.linear import MAX_FEW_ROWS, FewRowsConfig


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


def chunk_attention(num_heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> Config:
    """Rows are tokens times the heads of a group."""
    rows = max(16, triton.next_power_of_2(num_heads // kv_heads))
    if head_dim > 128 or dtype == torch.float32:
        return Config(max(rows, 64), 32, num_warps=4, num_stages=2)
    if block_size % 64 == 0:
        return Config(max(rows, 128), 64, num_warps=4, num_stages=3)
    return Config(max(rows, 256), 64, num_warps=8, num_stages=3)


def own_chunk_attention(
    num_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Config | None:
    """Small tiles, several a processor: one's softmax runs beside another's products. None: the copy engine is not there, or
    cannot take such a head out of a row."""
    if head_dim not in (16, 32, 64, 128, 256) or (
        device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 9
    ):
        return None
    rows = max(16, triton.next_power_of_2(num_heads // kv_heads))
    if head_dim > 128 or dtype == torch.float32:
        return Config(max(rows, 64), 32, num_warps=4, num_stages=2)
    return Config(max(rows, 64), 64, num_warps=4, num_stages=3)


# Rows at which the library's product is slower than with some more, on an H200: (n, k) -> {rows of a captured size: rows to run}.
MORE_ROWS = {
    (6144, 4096): {224: 256, 288: 304, 320: 384, 352: 384},
    (4096, 4096): {96: 104, 112: 128, 160: 192, 224: 256, 288: 320, 352: 368, 416: 432},
    (4096, 12288): {192: 256, 224: 256, 288: 320, 416: 432},
    (24576, 4096): {448: 480},
    (28672, 4096): {448: 464},
    (4096, 14336): {416: 432},
}


def product_rows(num_rows: int, n: int, k: int) -> int:
    """How many rows to run [num_rows, k] x [n, k] with."""
    return MORE_ROWS.get((n, k), {}).get(num_rows, num_rows)


def few_rows(num_rows: int, n: int, k: int) -> FewRowsConfig | None:
    """A split product for [num_rows, k] x [n, k], or None where the library's is as fast."""
    if num_rows > MAX_FEW_ROWS or n * k > 128 << 20 or (n * k > 64 << 20 and num_rows > 8):
        return None
    if n >= 4096 and k <= 4096 and n < 16384:
        return FewRowsConfig(block_n=32, block_k=128, splits=2, num_stages=4)
    if n * k < 8 << 20:
        return FewRowsConfig(block_n=32, block_k=256, splits=4)
    return FewRowsConfig(block_n=32, block_k=256, splits=2)
