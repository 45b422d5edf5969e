"""From logits to tokens: the largest, or a draw that depends on nothing but the seed, the request and the position.

Gumbel's trick: argmax(logits / temperature + noise) is a draw from the softmax. The noise is a hash of (seed, request,
position, token), not a generator's state, so a token is the same whatever else was in the batch, in whatever order, and on
any device.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engines.interface import Int64Array
from engines.torch_engine.reference_attention import to_device

# SplitMix64's step and multipliers (Steele, Lea, Flood 2014).
GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
MASK_32 = 0xFFFFFFFF
MAX_NOISE_VALUES = {"cpu": 1 << 20, "cuda": 1 << 24}  # drawn at once: what bounds the memory of sampling


def sample(logits: Tensor, temperature: float, seed: int, requests: Int64Array, positions: Int64Array) -> Tensor:
    """float32 logits [n, vocab] -> int64 [n]; temperature 0 takes the largest. `positions`: those of the tokens drawn."""
    if temperature == 0 or not len(requests):
        return logits.argmax(dim=-1)
    keys = to_device(row_keys(seed, requests, positions), logits.device)
    rows = max(1, MAX_NOISE_VALUES[logits.device.type] // logits.shape[1])
    drawn = [
        (logits[i : i + rows] / temperature + gumbel_noise(keys[i : i + rows], logits.shape[1])).argmax(dim=-1)
        for i in range(0, len(logits), rows)
    ]
    return torch.cat(drawn)


def row_keys(seed: int, requests: Int64Array, positions: Int64Array) -> Int64Array:
    """int64 [n]: one well-mixed key for each (seed, request, position)."""
    key = np.full(len(requests), seed & (2**64 - 1), dtype=np.uint64)
    for values in (requests, positions):
        # Mixed before the next is added, so that (request 1, position 2) and (2, 1) part.
        key = _mix_numpy(key + (values.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN))
    return key.view(np.int64)


def gumbel_noise(keys: Tensor, vocab_size: int) -> Tensor:
    """int64 keys [n] -> float32 [n, vocab_size] of the standard Gumbel distribution.

    MurmurHash3's finalizer (Appleby 2011) over the token, each half of the key mixed in before one of two rounds: 32-bit
    arithmetic, which a card does at full rate; here in int64, cut to 32 bits after every product and sum.
    """
    low, high = keys[:, None] & MASK_32, (keys[:, None] >> 32) & MASK_32
    token = torch.arange(vocab_size, device=keys.device)
    h = _murmur_round((token * 0x9E3779B1 + low) & MASK_32)
    h = _murmur_round((h + high) & MASK_32)
    # The top 23 bits, centred in their cells: strictly between 0 and 1 in float32 too, so both logarithms are finite.
    uniform = ((h >> 9).to(torch.float32) + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def _murmur_round(h: Tensor) -> Tensor:
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & MASK_32
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & MASK_32
    return h ^ (h >> 16)


def _mix_numpy(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MIX_2)
    return x ^ (x >> np.uint64(31))
