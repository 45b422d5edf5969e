"""vLLM V1's block rules: blocks for this chunk only, chained prefix hashes, a least-recently-released free queue.

Source: vllm 0.33.0, vllm/v1/core/{kv_cache_manager,single_type_kv_cache_manager,block_pool}.py, for one full-attention
group, without connectors and speculative tokens. Method names are those of KVCacheManager.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engines.schedulers.block_pool import BlockPool
from engines.schedulers.decisions import RoundLog
from engines.schedulers.sequence import Sequence

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
        self.hash: list[bytes | None] = [None] * num_blocks
        self.cached: dict[bytes, list[int]] = {}  # copies of equal content, the one cached first in front
        self.cached_free_blocks = 0

    def get_computed_blocks(self, seq: Sequence) -> list[int]:
        """The longest cached prefix, its last token left out: that one is always computed. Changes nothing."""
        hits: list[int] = []
        if self.caching:
            for index in range((seq.num_tokens - 1) // self.block_size):
                copies = self.cached.get(seq.hash_of_block_xxh128(index, self.block_size))
                if copies is None:
                    break
                hits.append(copies[0])
        return hits

    def clip(self, num_tokens: int) -> int:
        return num_tokens if self.max_model_len is None else min(num_tokens, self.max_model_len)

    def blocks_needed(self, seq: Sequence, num_tokens: int, hits: Seq[int] = ()) -> int:
        """Free blocks it takes to hold the first `num_tokens` tokens: new ones, and hits that lie in the free queue."""
        new = -(-self.clip(num_tokens) // self.block_size) - len(seq.block_table) - len(hits)
        return max(new, 0) + sum(self.pool.ref_count[block] == 0 for block in hits)

    def allocate_slots(self, seq: Sequence, num_tokens: int, hits: Seq[int] = ()) -> None:
        """Give `seq` the slots of its first `num_tokens` tokens. The caller has checked `blocks_needed`.

        Full blocks become findable here, before the model has run: a later admission of the same round can hit them.
        """
        for index, block in enumerate(hits):
            if self.pool.touch(block):
                self.cached_free_blocks -= 1
            seq.append_block(block)
            self.log.block("share", block, seq.request, index)
        if hits:
            seq.num_hashed_blocks = len(hits)
        for _ in range(-(-self.clip(num_tokens) // self.block_size) - len(seq.block_table)):
            self._take(seq)
        if self.caching:
            self._cache_full_blocks(seq, min(num_tokens, seq.num_tokens) // self.block_size)

    def _take(self, seq: Sequence) -> None:
        block = self.pool.take_head()
        old = self.hash[block]
        if old is not None:
            copies = self.cached[old]
            copies.remove(block)
            if not copies:
                del self.cached[old]
            self.hash[block] = None
            self.cached_free_blocks -= 1
            self.log.block("evict", block, seq.request, None)
            self.log.decide("evict", seq.request, "reused")
        self.log.block("allocate", block, seq.request, len(seq.block_table))
        seq.append_block(block)

    def _cache_full_blocks(self, seq: Sequence, full: int) -> None:
        for index in range(seq.num_hashed_blocks, full):
            block = seq.block_table[index]
            key = seq.hash_of_block_xxh128(index, self.block_size)
            self.hash[block] = key
            self.cached.setdefault(key, []).append(block)
            self.log.block("cache", block, seq.request, index)
        if full > seq.num_hashed_blocks:
            seq.num_hashed_blocks = full

    def free(self, seq: Sequence) -> None:
        """Release in reverse table order. Blocks with a hash go to the back of the queue, those without to the front."""
        unhashed: list[int] = []
        for index in range(len(seq.block_table) - 1, -1, -1):
            block = seq.block_table[index]
            if not self.pool.drop(block):
                self.log.block("release", block, seq.request, index)
                continue
            self.log.block("free", block, seq.request, index)
            if self.hash[block] is None:
                unhashed.append(block)
            else:
                self.pool.put_back(block)
                self.cached_free_blocks += 1
        self.pool.put_front(unhashed)
        seq.clear_blocks()
