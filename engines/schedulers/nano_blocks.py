"""nano-vLLM's block rules: whole-prompt reservation, xxh64 prefix hashes, a first-in first-out free list.

Source: nano-vllm bb823b3, nanovllm/engine/block_manager.py; the methods have its names. Where it differs: the hash of a
refused head is kept instead of made again each round, and taking a block out of the free list is O(1); no decision changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from engines.schedulers.block_pool import BLANK, HIDDEN, KEYED, BlockPool
from engines.schedulers.decisions import RoundLog
from engines.schedulers.sequence import NOT_HIDDEN, Sequence


class NanoBlockManager:
    """Blocks, their hashes, and the table hash -> block. Mutable; owned by one NanoScheduler."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool, log: RoundLog) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.caching = enable_prefix_caching
        self.log = log
        self.hash: list[Any] = [None] * num_blocks
        # Ids of a hashed block, to tell a collision from a hit; None where the hash is a key, which stands for them.
        self.content: list[Any] = [None] * num_blocks
        self.hash_to_block: dict[int, int] = {}
        self.disowned: set[int] = set()  # hashed blocks whose entry a twin took over
        self.cached_free_blocks = 0  # free blocks that the table names

    # -- lookup and reservation of a whole prompt

    def can_allocate(self, seq: Sequence) -> tuple[int, int]:
        """(blocks found in the prefix cache, free blocks needed to reserve all of `seq`).

        The last block is never looked up, even when it is full, so that at least one token is computed. A hit in the free
        list saves computing but still uses up a free block.
        """
        num_blocks = -(-seq.num_tokens // self.block_size)
        num_cached, needed = 0, num_blocks
        if not seq.hidden_from:
            return num_cached, needed
        if self.caching:
            find, content, ref_count = self.hash_to_block.get, self.content, self.pool.ref_count
            keyed = seq.new.make_block_keys is not None
            keys = seq.hashes_xxh64(num_blocks - 1, self.block_size)
            for index, key in enumerate(keys[: min(num_blocks - 1, seq.hidden_from)]):
                block = find(key)
                # Only this block's own ids are compared, as in the source: a prefix that collides is not noticed.
                if block is None or content[block] != (None if keyed else seq.block_content(index, self.block_size)):
                    break
                num_cached += 1
                if ref_count[block] > 0:
                    needed -= 1
        return num_cached, needed

    def allocate(self, seq: Sequence, num_cached: int) -> None:
        """Hits first, in order, then new blocks from the head of the free list, up to the whole of `seq`."""
        assert not seq.block_table, seq.new.id
        if num_cached:
            hits = [self.hash_to_block[key] for key in seq.hashes_xxh64(num_cached, self.block_size)[:num_cached]]
            for block in hits:
                self.cached_free_blocks -= self.pool.touch(block)
            seq.grow_table(hits)
            self.log.blocks_in_table("share", seq.block_table, seq.request, 0, num_cached)
        self._allocate_blocks(seq, -(-seq.num_tokens // self.block_size) - num_cached)
        seq.num_hashed_blocks = num_cached
        seq.num_computed_tokens = num_cached * self.block_size

    # -- one more token

    def can_append(self, seq: Sequence) -> bool:
        return self.pool.num_free >= (seq.num_tokens % self.block_size == 1)

    def may_append(self, seq: Sequence) -> None:
        """The newest token opens a block: take one for it."""
        if seq.num_tokens % self.block_size == 1:
            self._allocate_blocks(seq, 1)

    def open_blocks(self, opening: list[Sequence]) -> None:
        """`may_append` of each, in order. The caller has checked that there are blocks for all."""
        taken, evicted = self._take_from_pool(len(opening))
        for seq, block in zip(opening, taken, strict=True):
            table = seq.block_table
            if len(table) < seq.hidden_from:
                self.pool.hold([block])
            table.append(block)
        if evicted is not None or self.log.enabled:
            self.log.edges(opening, taken, evicted, [], 0, self.block_size)

    def _allocate_blocks(self, seq: Sequence, count: int) -> None:
        """`count` blocks from the head of the free list to the end of the table; what they held is lost."""
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
        hashes, content, entries = self.hash, self.content, self.hash_to_block
        keys = [hashes[block] for block in blocks]
        if keys.count(None) == len(keys):
            return None
        lost = bytearray(len(blocks))
        for i, (block, key) in enumerate(zip(blocks, keys, strict=True)):
            if key is None:
                continue
            hashes[block] = content[block] = None
            # A twin that holds the same content may own the entry; then it stays.
            if entries.get(key) != block:
                self.disowned.discard(block)
                continue
            del entries[key]
            lost[i] = 1
        return bytes(lost)

    # -- after the forward pass

    def hash_blocks(self, seq: Sequence, num_computed: int) -> None:
        """Register the blocks that are full now that `num_computed` tokens are computed.

        An entry that exists is overwritten: of two sequences that computed the same block the later owns it.
        """
        if not self.caching:
            return
        first, full = seq.num_hashed_blocks, num_computed // self.block_size
        if full <= first:
            return
        table = seq.block_table
        keys = seq.hashes_xxh64(full, self.block_size) if seq.hidden_from else []
        split = max(first, min(full, seq.hidden_from))
        if first < split:
            self._register_all(seq, table[first:split], first, keys[first:split])
        self.log.blocks_in_table("cache", table, seq.request, first, full)
        seq.num_hashed_blocks = full

    def fill_block(self, seq: Sequence, index: int) -> None:
        """`hash_blocks` of a steady member whose token was the last of block `index`."""
        if index < seq.hidden_from:
            key = seq.hashes_xxh64(index + 1, self.block_size)[index]
            self._register(seq, seq.block_table[index], index, key)
        seq.num_hashed_blocks = index + 1
        if self.log.enabled:
            self.log.fill_block(seq.block_table[index], seq.new.request, index)

    def reveal(self, seq: Sequence) -> None:
        """`seq` is to be preempted, and may hit its own blocks when it comes back: they get their entries."""
        first, full = seq.hidden_from, seq.num_hashed_blocks if self.caching else 0
        self.pool.hold(seq.block_table[first:])
        if first < full:
            self._register_all(
                seq, seq.block_table[first:full], first, seq.hashes_xxh64(full, self.block_size)[first:full]
            )
        seq.hidden_from = NOT_HIDDEN

    def hidden(self, seqs: Iterable[Sequence]) -> list[int]:
        """Hashed blocks that are in no table of hashes: those that `seqs`, who hold blocks, hide, and free ones."""
        if not self.caching:
            return []
        return self.pool.hidden() + [
            block for seq in seqs for block in seq.block_table[seq.hidden_from : seq.num_hashed_blocks]
        ]

    def _register_all(self, seq: Sequence, blocks: list[int], first: int, keys: list[int]) -> None:
        """`_register` of each, in order."""
        if seq.new.make_block_keys is None or not self.hash_to_block.keys().isdisjoint(keys):
            for index, (block, key) in enumerate(zip(blocks, keys, strict=True), first):
                self._register(seq, block, index, key)
            return
        hashes = self.hash
        for block, key in zip(blocks, keys, strict=True):
            hashes[block] = key
        self.hash_to_block.update(zip(keys, blocks, strict=True))

    def _register(self, seq: Sequence, block: int, index: int, key: int) -> None:
        owner = self.hash_to_block.get(key)
        if owner is not None:
            self.disowned.add(owner)
            if self.pool.ref_count[owner] == 0:
                self.cached_free_blocks -= 1  # a free twin can no longer be found
        self.hash[block] = key
        if seq.new.make_block_keys is None:
            self.content[block] = seq.block_content(index, self.block_size)
        self.hash_to_block[key] = block

    def deallocate(self, seq: Sequence) -> None:
        """Release in reverse table order, so that a prefix outlives its tail. Hashes stay until a block is taken again."""
        table = seq.block_table
        first = min(seq.hidden_from, len(table))
        hashed = max(first, seq.num_hashed_blocks) if self.caching else first
        self.pool.put_back(table[: hashed - 1 : -1] if hashed else table[::-1], BLANK)
        if first < hashed:
            self.pool.put_back(table[first:hashed][::-1], HIDDEN)
            self.cached_free_blocks += hashed - first
        still_held = self._deallocate_keyed(table[:first][::-1]) if first else None
        if self.log.enabled:
            self.log.leave(table[::-1], seq.request, still_held and bytes(len(table) - first) + still_held)
        seq.clear_blocks()

    def _deallocate_keyed(self, blocks: list[int]) -> bytes | None:
        """Of blocks that a lookup may find: a 1 for each that others hold; None: no one of them."""
        still_held = self.pool.drop_all(blocks)
        freed = blocks
        if still_held is not None:
            freed = [block for block, held in zip(blocks, still_held, strict=True) if not held]
        self.pool.put_back(freed, KEYED)
        hashes, disowned = self.hash, self.disowned
        self.cached_free_blocks += sum([hashes[block] is not None for block in freed])
        if disowned:
            self.cached_free_blocks -= sum([block in disowned for block in freed])
        return still_held
