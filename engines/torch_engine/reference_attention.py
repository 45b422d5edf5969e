"""Paged attention in plain torch: runs on any device, and is what every kernel is checked against.

Sequences that feed one token are attended together, in buckets of similar context; the others one by one, in tiles of
queries. Only slots that hold a fed token are ever read: what a block held before, or holds beyond a sequence's end, cannot
reach a result, not even as 0 * NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engines.interface import Int64Array
from engines.torch_engine.inputs import BatchInputs

# Contexts of one bucket are at least this share of its longest, so under 30 % of what it reads is padding.
SHORTEST_IN_BUCKET = 0.7
# Most K or V values gathered at once, and most (query, key, head) scores of a tile: what bounds the memory of a pass. On a
# CPU small enough that what was gathered is still in its cache when it is attended; on a card so that one of 8 GB will do.
MAX_GATHERED_VALUES = {"cpu": 1 << 18, "cuda": 1 << 26}
MAX_SCORES = {"cpu": 1 << 24, "cuda": 1 << 26}


@dataclass(frozen=True, slots=True)
class DecodeBucket:
    """Sequences [begin, end) of the decodes in order of context, padded to one context length."""

    begin: int
    end: int
    slots: Tensor  # [(end - begin) * longest]; a row beyond its context repeats its first slot, which is masked
    mask: Tensor | None  # [end - begin, 1, 1, longest]: 0 or -inf, added to the scores; None: no padding


@dataclass(frozen=True, slots=True)
class Chunk:
    """Sequence whose `num_tokens` > 1 tokens from row `row` attend to `start` tokens before them."""

    row: int
    num_tokens: int
    start: int
    slots: Tensor  # [start + num_tokens]


class ReferenceAttention:
    """The backend of one engine. `k_cache` and `v_cache`: [layers, num_blocks, block_size, num_kv_heads, head_dim]."""

    def __init__(self, k_cache: Tensor, v_cache: Tensor) -> None:
        self.k_slots = k_cache.flatten(1, 2)  # [layers, slots, num_kv_heads, head_dim]
        self.v_slots = v_cache.flatten(1, 2)
        self.device = k_cache.device
        # Gathered K and V of decodes, kept between rounds: on a CPU fresh pages cost more than the copy into them.
        self._scratch = (k_cache.new_empty(0), k_cache.new_empty(0))

    @property
    def values_per_token(self) -> int:
        return self.k_slots.shape[2] * self.k_slots.shape[3]

    def prepare(self, inputs: BatchInputs) -> BatchAttention:
        """The attention of one batch over all layers: an `Attention` of `engines.model.transformer`."""
        return BatchAttention(self, inputs)

    def gather_for_decodes(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """K and V at `slots` [s] -> [s, num_kv_heads, head_dim] each; valid until the next call."""
        k_slots, v_slots = self.k_slots[layer], self.v_slots[layer]
        if self.device.type != "cpu":
            return k_slots.index_select(0, slots), v_slots.index_select(0, slots)
        shape = (len(slots), *k_slots.shape[1:])
        num_values = len(slots) * self.values_per_token
        if self._scratch[0].numel() < num_values:
            self._scratch = (k_slots.new_empty(num_values), k_slots.new_empty(num_values))
        k, v = (scratch[:num_values].view(shape) for scratch in self._scratch)
        return torch.index_select(k_slots, 0, slots, out=k), torch.index_select(v_slots, 0, slots, out=v)


class BatchAttention:
    """The attention of one batch; called once a layer."""

    def __init__(self, backend: ReferenceAttention, inputs: BatchInputs) -> None:
        self.backend = backend
        self.device = backend.device
        self.slot_mapping = self._to_device(inputs.slot_mapping)
        num_tokens = np.diff(inputs.cu_seqlens_q)
        self.decode_rows: Tensor | None = None
        self.buckets: list[DecodeBucket] = []
        single = np.flatnonzero(num_tokens == 1)
        if len(single):
            order = single[np.argsort(inputs.context_lens[single], kind="stable")[::-1]]
            self.decode_rows = self._to_device(inputs.cu_seqlens_q[order])
            self.buckets = self._make_buckets(inputs, order)
        self.chunks = [self._make_chunk(inputs, i) for i in np.flatnonzero(num_tokens > 1).tolist()]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.backend.k_slots[layer].index_copy_(0, self.slot_mapping, k)
        self.backend.v_slots[layer].index_copy_(0, self.slot_mapping, v)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if self.decode_rows is not None:
            out.index_copy_(0, self.decode_rows, self._decode(layer, q.index_select(0, self.decode_rows)))
        for chunk in self.chunks:
            self._prefill(layer, chunk, q, out)
        return out

    def _decode(self, layer: int, q: Tensor) -> Tensor:
        """One query a sequence, q [n, num_heads, head_dim] in bucket order -> the same shape."""
        _, _, num_kv_heads, head_dim = self.backend.k_slots.shape
        parts = []
        for bucket in self.buckets:
            size = bucket.end - bucket.begin
            k, v = (
                gathered.view(size, -1, num_kv_heads, head_dim).transpose(1, 2)
                for gathered in self.backend.gather_for_decodes(layer, bucket.slots)
            )
            # The query heads of a group stand where the queries of a sequence do: they read the same keys, none is copied.
            grouped = q[bucket.begin : bucket.end].view(size, num_kv_heads, -1, head_dim)
            attended = F.scaled_dot_product_attention(grouped, k, v, attn_mask=bucket.mask)
            parts.append(attended.reshape(size, -1, head_dim))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _prefill(self, layer: int, chunk: Chunk, q: Tensor, out: Tensor) -> None:
        k_slots, v_slots = self.backend.k_slots[layer], self.backend.v_slots[layer]
        num_heads = q.shape[1]
        group = num_heads // k_slots.shape[1]
        k = k_slots.index_select(0, chunk.slots).repeat_interleave(group, dim=1).transpose(0, 1)[None]
        v = v_slots.index_select(0, chunk.slots).repeat_interleave(group, dim=1).transpose(0, 1)[None]
        rows = slice(chunk.row, chunk.row + chunk.num_tokens)
        queries = q[rows].transpose(0, 1)[None]  # [1, num_heads, num_tokens, head_dim]
        if chunk.start == 0:
            out[rows] = F.scaled_dot_product_attention(queries, k, v, is_causal=True)[0].transpose(0, 1)
            return
        context = chunk.start + chunk.num_tokens
        tile = max(16, MAX_SCORES[self.device.type] // (context * num_heads))
        keys = torch.arange(context, device=self.device)
        for begin in range(0, chunk.num_tokens, tile):
            end = min(begin + tile, chunk.num_tokens)
            seen = chunk.start + end  # keys that the tile's last query attends to
            mask = keys[:seen] <= keys[chunk.start + begin : seen, None]
            attended = F.scaled_dot_product_attention(
                queries[:, :, begin:end], k[:, :, :seen], v[:, :, :seen], attn_mask=mask
            )
            out[chunk.row + begin : chunk.row + end] = attended[0].transpose(0, 1)

    def _make_buckets(self, inputs: BatchInputs, order: Int64Array) -> list[DecodeBucket]:
        """`order`: indices of sequences that feed one token, the longest context first."""
        context_lens = inputs.context_lens[order]
        buckets = []
        begin = 0
        while begin < len(order):
            longest = int(context_lens[begin])
            similar = int(np.count_nonzero(context_lens >= longest * SHORTEST_IN_BUCKET))
            fits = max(1, MAX_GATHERED_VALUES[self.device.type] // (longest * self.backend.values_per_token))
            end = min(similar, begin + fits)
            buckets.append(self._make_bucket(inputs, order, begin, end, longest))
            begin = end
        return buckets

    def _make_bucket(self, inputs: BatchInputs, order: Int64Array, begin: int, end: int, longest: int) -> DecodeBucket:
        members = order[begin:end]
        slots = slots_of_tables(inputs.block_tables[members], inputs.block_size, longest)
        padding = np.arange(longest) >= inputs.context_lens[members, None]
        if not padding.any():
            return DecodeBucket(begin, end, self._to_device(slots.reshape(-1)), None)
        slots = np.where(padding, slots[:, :1], slots)
        mask = np.where(padding, np.float32(-np.inf), np.float32(0))[:, None, None, :]
        return DecodeBucket(
            begin, end, self._to_device(slots.reshape(-1)), self._to_device(mask).to(self.backend.k_slots.dtype)
        )

    def _make_chunk(self, inputs: BatchInputs, index: int) -> Chunk:
        row, next_row = inputs.cu_seqlens_q[index : index + 2].tolist()
        context = int(inputs.context_lens[index])
        slots = slots_of_tables(inputs.block_tables[index : index + 1], inputs.block_size, context)[0]
        return Chunk(row, next_row - row, context - (next_row - row), self._to_device(slots))

    def _to_device(self, array: np.ndarray) -> Tensor:
        return to_device(array, self.device)


def slots_of_tables(block_tables: Int64Array, block_size: int, num_tokens: int) -> Int64Array:
    """Block tables [n, blocks] -> slots [n, num_tokens] of positions 0, 1, …; meaningless beyond a table's end."""
    blocks = block_tables[:, : -(-num_tokens // block_size)]
    return (blocks[:, :, None] * block_size + np.arange(block_size)).reshape(len(blocks), -1)[:, :num_tokens]


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array as a tensor; to a card through pinned memory, so that the host goes on at once."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
