"""vLLM V1's block rules: blocks for this chunk only, chained prefix hashes, a least-recently-released free queue.

Source: vllm 0.33.0, vllm/v1/core/{kv_cache_manager,single_type_kv_cache_manager,block_pool}.py, for one full-attention
group, without connectors and speculative tokens. Method names are those of KVCacheManager.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

from engines.schedulers.block_pool import BLANK, HIDDEN, KEYED, BlockPool
from engines.schedulers.decisions import RoundLog
from engines.schedulers.sequence import NOT_HIDDEN, Sequence

Key = Any

NULL_BLOCK = 0  # taken out of the pool at the start, and never given to anybody


class VllmBlockManager:
    """Free queue, reference counts, and the map hash -> cached copies. Mutable; owned by one VllmScheduler."""

    def __init__(
        self, num_blocks: int, block_size: int, max_model_len: int | None, enable_caching: bool, log: RoundLog
    ) -> None:
        self.pool = BlockPool(num_blocks, first_free=NULL_BLOCK + 1)
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.caching = enable_caching
        self.log = log
        self.hash: list[Key | None] = [None] * num_blocks
        self.cached: dict[Key, int] = {}  # of copies of equal content the one cached first
        self.twins: dict[Key, list[int]] = {}  # the other copies, as they came
        self.cached_free_blocks = 0

    def get_computed_blocks(self, seq: Sequence) -> list[int]:
        """The longest cached prefix, its last token left out: that one is always computed. Changes nothing."""
        hits: list[int] = []
        if self.caching and seq.hidden_from:
            num_blocks, find = (seq.num_tokens - 1) // self.block_size, self.cached.get
            keys = seq.hashes_xxh128(num_blocks, self.block_size)
            for key in keys[: min(num_blocks, seq.hidden_from)]:
                block = find(key)
                if block is None:
                    break
                hits.append(block)
        return hits

    def clip(self, num_tokens: int) -> int:
        return num_tokens if self.max_model_len is None else min(num_tokens, self.max_model_len)

    def blocks_needed(self, seq: Sequence, num_tokens: int, hits: Seq[int] = ()) -> int:
        """Free blocks it takes to hold the first `num_tokens` tokens: new ones, and hits that lie in the free queue."""
        new = -(-self.clip(num_tokens) // self.block_size) - len(seq.block_table) - len(hits)
        return max(new, 0) + list(map(self.pool.ref_count.__getitem__, hits)).count(0)

    def allocate_slots(self, seq: Sequence, num_tokens: int, hits: Seq[int] = ()) -> None:
        """Give `seq` the slots of its first `num_tokens` tokens. The caller has checked `blocks_needed`.

        Full blocks become findable here, before the model has run: a later admission of the same round can hit them.
        """
        if hits:
            for block in hits:
                self.cached_free_blocks -= self.pool.touch(block)
            seq.grow_table(hits)
            seq.num_hashed_blocks = len(hits)
            self.log.blocks_in_table("share", seq.block_table, seq.request, 0, len(hits))
        missing = -(-self.clip(num_tokens) // self.block_size) - len(seq.block_table)
        if missing > 0:
            self._take(seq, missing)
        if self.caching:
            self._cache_full_blocks(seq, min(num_tokens, seq.num_tokens) // self.block_size)

    def decode_edges(self, opening: list[Sequence], filling: list[Sequence], age: int) -> None:
        """What one more token of each steady member does to its blocks: a new one at an edge, a full one findable.

        In running order, as `allocate_slots` of each would. The caller has checked that there are blocks for all.
        """
        log, size = self.log, self.block_size
        # Who takes and who caches are looked at together only for the log's sake: neither changes what the other does.
        taken, evicted = self._take_from_pool(len(opening))
        for seq, block in zip(opening, taken, strict=True):
            table = seq.block_table
            if len(table) < seq.hidden_from:
                self.pool.hold([block])
            table.append(block)
        for seq in filling:
            index = (seq.base + age) // size
            if index < seq.hidden_from:
                self._register(seq.block_table[index], seq.hashes_xxh128(index + 1, size)[index])
            seq.num_hashed_blocks = index + 1
        log.edges(opening, taken, evicted, filling, age, size)

    def _take(self, seq: Sequence, count: int) -> None:
        """`count` blocks from the head of the free queue to the end of the table; what they held is lost."""
        first = len(seq.block_table)
        taken, evicted = self._take_from_pool(count)
        if first < seq.hidden_from:
            self.pool.hold(taken[: seq.hidden_from - first])
        seq.grow_table(taken)
        self.log.take(taken, seq.request, first, evicted)

    def _take_from_pool(self, count: int) -> tuple[list[int], bytes | None]:
        """(blocks, a 1 for each that still held reusable KV; None: no one of them)."""
        taken, evicted = self.pool.take(count, self._forget)
        if evicted is not None:
            self.cached_free_blocks -= evicted.count(1)
        return taken, evicted

    def _forget(self, blocks: list[int]) -> bytes | None:
        """What `blocks` held is lost: a 1 for each that could still be found until now; None: no one of them."""
        hashes, cached, twins = self.hash, self.cached, self.twins
        keys = [hashes[block] for block in blocks]
        if keys.count(None) == len(keys):
            return None
        for block, key in zip(blocks, keys, strict=True):
            if key is not None:
                hashes[block] = None
                if twins and key in twins:
                    self._forget_copy(block, key)
                else:
                    del cached[key]
        return bytes([key is not None for key in keys])

    def _forget_copy(self, block: int, key: Key) -> None:
        """One of several copies goes; if it was the first, the next takes its place."""
        twins = self.twins[key]
        if self.cached[key] == block:
            self.cached[key] = twins.pop(0)
        else:
            twins.remove(block)
        if not twins:
            del self.twins[key]

    def _cache_full_blocks(self, seq: Sequence, full: int) -> None:
        first = seq.num_hashed_blocks
        if full <= first:
            return
        table = seq.block_table
        keys = seq.hashes_xxh128(full, self.block_size) if seq.hidden_from else []
        split = max(first, min(full, seq.hidden_from))
        blocks, keys = table[first:split], keys[first:split]
        if self.cached.keys().isdisjoint(keys):
            for block, key in zip(blocks, keys, strict=True):
                self.hash[block] = key
            self.cached.update(zip(keys, blocks, strict=True))
        else:
            for block, key in zip(blocks, keys, strict=True):
                self._register(block, key)
        self.log.blocks_in_table("cache", table, seq.request, first, full)
        seq.num_hashed_blocks = full

    def reveal(self, seq: Sequence) -> None:
        """`seq` is to be preempted, and may hit its own blocks when it comes back: they get their entries."""
        first, full = seq.hidden_from, seq.num_hashed_blocks if self.caching else 0
        self.pool.hold(seq.block_table[first:])
        if first < full:
            keys = seq.hashes_xxh128(full, self.block_size)[first:full]
            for block, key in zip(seq.block_table[first:full], keys, strict=True):
                self._register(block, key)
        seq.hidden_from = NOT_HIDDEN

    def hashed(self, seqs: Iterable[Sequence]) -> list[int]:
        """Blocks that hold reusable KV, ascending: keyed ones, those that `seqs`, who hold blocks, hide, and free ones nobody looks for."""
        if not self.caching:
            return []
        hidden = [block for seq in seqs for block in seq.block_table[seq.hidden_from : seq.num_hashed_blocks]]
        keyed = [block for block, key in enumerate(self.hash) if key is not None]
        return sorted(keyed + hidden + self.pool.hidden())

    def _register(self, block: int, key: Key) -> None:
        self.hash[block] = key
        if self.cached.setdefault(key, block) != block:
            self.twins.setdefault(key, []).append(block)

    def free(self, seq: Sequence) -> None:
        """Release in reverse table order. Blocks with a hash go to the back of the queue, those without to the front."""
        pool, table = self.pool, seq.block_table
        first = min(seq.hidden_from, len(table))
        full = max(first, seq.num_hashed_blocks) if self.caching else first
        unhashed = table[: full - 1 : -1] if full else table[::-1]
        if first < full:
            pool.put_back(table[first:full][::-1], HIDDEN)
            self.cached_free_blocks += full - first
        still_held = None
        if first:
            keyed, hashes = table[:first][::-1], self.hash
            still_held, freed = pool.drop_all(keyed), keyed
            if still_held is not None:
                freed = [block for block, held in zip(keyed, still_held, strict=True) if not held]
            hashed = [block for block in freed if hashes[block] is not None]
            pool.put_back(hashed, KEYED)
            self.cached_free_blocks += len(hashed)
            if len(hashed) < len(freed):
                unhashed += [block for block in freed if hashes[block] is None]
        pool.put_front(unhashed, BLANK)
        if self.log.enabled:
            self.log.leave(table[::-1], seq.request, still_held and bytes(len(table) - first) + still_held)
        seq.clear_blocks()
