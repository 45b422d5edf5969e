"""A request inside a scheduler, and the columns that hold the counters of all of them.

A policy reads like the real one (`seq.num_tokens - seq.num_computed_tokens`), while a round of hundreds of decodes touches
whole columns at once: `Sequence` is a view of one slot of `Columns`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import xxhash

from engines.interface import BoolArray, Int64Array, NewRequest, ScheduledBatch

ID_BYTES = 8
NO_MEMBER = -1
NOT_HIDDEN = 1 << 62


class Columns:
    """Counters of every live sequence of one scheduler: one int64 array a counter, one slot a sequence.

    Owned by one scheduler. `cells` holds a memoryview of each array, since it reads single values as plain ints, cheaply.
    """

    NAMES = (
        "request",
        "num_tokens",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_final_tokens",
        "num_blocks",
        "num_hashed_blocks",
    )
    __slots__ = (*NAMES, "_free_slots", "cells")

    request: Int64Array
    num_tokens: Int64Array  # known tokens: prompt and generated
    num_computed_tokens: Int64Array  # tokens whose K and V are, or are being, computed
    num_prompt_tokens: Int64Array
    num_final_tokens: Int64Array  # known tokens at which it is finished
    num_blocks: Int64Array  # length of its block table
    num_hashed_blocks: Int64Array  # leading blocks of its table that are registered in the prefix cache

    def __init__(self, capacity: int = 256) -> None:
        self.cells: dict[str, memoryview[int]] = {}
        for name in self.NAMES:
            self._set(name, np.zeros(capacity, dtype=np.int64))
        self._free_slots = list(range(capacity - 1, -1, -1))

    def _set(self, name: str, column: Int64Array) -> None:
        setattr(self, name, column)
        self.cells[name] = memoryview(column)  # type: ignore[arg-type]

    def take_slot(self) -> int:
        if not self._free_slots:
            old = len(self.request)
            for name in self.NAMES:
                self._set(name, np.concatenate([getattr(self, name), np.zeros(old, dtype=np.int64)]))
            self._free_slots = list(range(2 * old - 1, old - 1, -1))
        return self._free_slots.pop()

    def give_back(self, slot: int) -> None:
        self._free_slots.append(slot)


class Sequence:
    """One request in a scheduler. Mutable; owned by that scheduler.

    `block_table` empty is the only mark of "not admitted". Token ids are made when they are first looked at.
    """

    __slots__ = (
        "_token_ids",
        "base",
        "block_hashes",
        "block_table",
        "cells",
        "finish_reason",
        "hidden_from",
        "new",
        "num_preemptions",
        "serial",
        "slot",
    )

    def __init__(self, new: NewRequest, columns: Columns, num_final_tokens: int) -> None:
        self.new = new
        self.cells = columns.cells
        self.slot = slot = columns.take_slot()
        self.block_table: list[int] = []
        self.block_hashes: list[Any] = []  # of its leading full blocks, as far as they were asked for
        self.num_preemptions = 0
        self.base, self.serial = 0, NO_MEMBER  # as a member of `steady.Steady`
        self.finish_reason: str | None = None
        # Nobody else can hit its blocks from this index on, and it cannot itself before it was preempted: they need no entries
        # until then.
        self.hidden_from = 0 if new.make_block_keys is not None and new.make_block_keys.shares_nothing else NOT_HIDDEN
        self._token_ids: Int64Array | None = None
        cells = columns.cells
        cells["request"][slot] = new.request
        cells["num_tokens"][slot] = cells["num_prompt_tokens"][slot] = new.num_prompt_tokens
        cells["num_computed_tokens"][slot] = cells["num_blocks"][slot] = cells["num_hashed_blocks"][slot] = 0
        cells["num_final_tokens"][slot] = num_final_tokens

    @property
    def request(self) -> int:
        return self.new.request

    @property
    def num_tokens(self) -> int:
        return self.cells["num_tokens"][self.slot]

    @num_tokens.setter
    def num_tokens(self, value: int) -> None:
        self.cells["num_tokens"][self.slot] = value

    @property
    def num_final_tokens(self) -> int:
        return self.cells["num_final_tokens"][self.slot]

    @num_final_tokens.setter
    def num_final_tokens(self, value: int) -> None:
        self.cells["num_final_tokens"][self.slot] = value

    @property
    def num_computed_tokens(self) -> int:
        return self.cells["num_computed_tokens"][self.slot]

    @num_computed_tokens.setter
    def num_computed_tokens(self, value: int) -> None:
        self.cells["num_computed_tokens"][self.slot] = value

    @property
    def num_hashed_blocks(self) -> int:
        return self.cells["num_hashed_blocks"][self.slot]

    @num_hashed_blocks.setter
    def num_hashed_blocks(self, value: int) -> None:
        self.cells["num_hashed_blocks"][self.slot] = value

    def grow_table(self, blocks: Iterable[int]) -> None:
        self.block_table.extend(blocks)
        self.cells["num_blocks"][self.slot] = len(self.block_table)

    def take_sampled(self, token: int) -> None:
        """What the model chose, before it is counted. Of no account where outputs are forced."""
        if not self.new.forced:
            self.token_ids[self.num_tokens] = token
            if token in self.new.eos_token_ids:
                self.finish_reason = "eos"
                self.num_final_tokens = self.num_tokens + 1

    def count_blocks(self) -> None:
        """The table was grown without its column."""
        self.cells["num_blocks"][self.slot] = len(self.block_table)

    def clear_blocks(self) -> None:
        self.block_table = []
        self.cells["num_blocks"][self.slot] = self.cells["num_hashed_blocks"][self.slot] = 0

    @property
    def token_ids(self) -> Int64Array:
        """int64 [prompt + most outputs]; entries from `num_tokens` on are not known yet unless outputs are forced."""
        if self._token_ids is None:
            ids = self.new.make_token_ids()
            if not self.new.forced:
                ids = np.concatenate([ids, np.full(self.new.num_output_tokens, -1, dtype=np.int64)])
            assert len(ids) == self.new.num_prompt_tokens + self.new.num_output_tokens, (self.new.id, len(ids))
            self._token_ids = np.ascontiguousarray(ids, dtype=np.int64)
        return self._token_ids

    def block_content(self, index: int, block_size: int) -> Any:
        """What tells the content of logical block `index` from any other, by ==: its ids, or its key where it has one."""
        if self.new.make_block_keys is not None:
            return self.block_hashes[index]
        size = block_size * ID_BYTES
        return bytes(self._bytes[index * size : (index + 1) * size])

    @property
    def _bytes(self) -> memoryview[int]:
        return memoryview(self.token_ids).cast("B")  # type: ignore[arg-type]

    def hashes_xxh64(self, num_blocks: int, block_size: int) -> list[int]:
        """nano-vLLM's hashes of the first `num_blocks` full blocks, and perhaps of more.

        xxh64 over the previous block's hash (8 bytes, little endian; none for block 0) and the block's ids.
        """
        hashes: list[int] = self.block_hashes
        if len(hashes) < num_blocks:
            if self.new.make_block_keys is not None:
                return self._make_keys(block_size, None)
            data, size, digest = self._bytes, block_size * ID_BYTES, xxhash.xxh64_intdigest
            previous = hashes[-1].to_bytes(8, "little") if hashes else b""
            for at in range(len(hashes) * size, num_blocks * size, size):
                key = digest(previous + data[at : at + size])
                hashes.append(key)
                previous = key.to_bytes(8, "little")
        return hashes

    def hashes_xxh128(self, num_blocks: int, block_size: int) -> list[Any]:
        """Chained 128-bit hashes of the first `num_blocks` full blocks, and perhaps of more; the adapter is part of them.

        vLLM lets one choose the function; only equality matters here, so any without collisions decides the same.
        """
        hashes: list[Any] = self.block_hashes
        if len(hashes) < num_blocks:
            if self.new.make_block_keys is not None:
                return self._make_keys(block_size, self.new.adapter)
            data, size, digest = self._bytes, block_size * ID_BYTES, xxhash.xxh3_128_digest
            previous = hashes[-1] if hashes else (self.new.adapter or "").encode()
            for at in range(len(hashes) * size, num_blocks * size, size):
                previous = digest(previous + data[at : at + size])
                hashes.append(previous)
        return hashes

    def _make_keys(self, block_size: int, adapter: str | None) -> list[Any]:
        """All keys at once: they cost next to nothing."""
        new = self.new
        assert new.make_block_keys is not None and not self.block_hashes, new.id
        keys, hidden_from = new.make_block_keys(
            new.request, new.num_prompt_tokens, (new.num_prompt_tokens + new.num_output_tokens) // block_size
        )
        if not self.block_table:  # those that it holds already are counted as ones that can be found
            self.hidden_from = hidden_from
        if adapter:
            keys = [(adapter, key) for key in keys]
        self.block_hashes = keys
        return keys


class BlockTables(Seq[list[int]]):
    """The block tables of a batch, looked up when read, since an engine without a device never reads them."""

    __slots__ = ("_seqs",)

    def __init__(self, seqs: list[Sequence]) -> None:
        self._seqs = seqs

    def __len__(self) -> int:
        return len(self._seqs)

    def __getitem__(self, index: int) -> list[int]:  # type: ignore[override]
        return self._seqs[index].block_table

    def __iter__(self) -> Iterator[list[int]]:
        return (seq.block_table for seq in self._seqs)


class TokenIds(Seq[Int64Array]):
    """The token ids of a batch, made when read: a run that never looks at an id never makes one."""

    __slots__ = ("_seqs",)

    def __init__(self, seqs: list[Sequence]) -> None:
        self._seqs = seqs

    def __len__(self) -> int:
        return len(self._seqs)

    def __getitem__(self, index: int) -> Int64Array:  # type: ignore[override]
        return self._seqs[index].token_ids

    def __iter__(self) -> Iterator[Int64Array]:
        return (seq.token_ids for seq in self._seqs)


def slots_of(seqs: list[Sequence]) -> Int64Array:
    return np.fromiter((seq.slot for seq in seqs), dtype=np.int64, count=len(seqs))


def build_batch(
    columns: Columns,
    seqs: list[Sequence],
    slots: Int64Array,
    start: Int64Array,
    num_new: Int64Array,
    was_running: BoolArray | bool,
    cached: Int64Array,
) -> ScheduledBatch:
    """Columns of one round. `start`, `num_new`, `cached`: int64 [len(seqs)]; `slots` are those of `seqs`."""
    num_tokens = columns.num_tokens[slots]
    reaches_end = start + num_new == num_tokens
    return ScheduledBatch(
        request=columns.request[slots],
        start=start,
        num_tokens=num_new,
        is_decode=was_running & reaches_end & (num_new == 1) & (num_tokens > columns.num_prompt_tokens[slots]),
        yields_token=reaches_end,
        cached_tokens=cached,
        num_blocks=columns.num_blocks[slots],
        block_tables=BlockTables(seqs),
        token_ids=TokenIds(seqs),
    )


def append_tokens(
    columns: Columns, seqs: list[Sequence], slots: Int64Array, batch: ScheduledBatch, sampled: Int64Array | None
) -> list[int]:
    """Append one token to each sequence that yields one; return the rows of those that it finishes, in batch order.

    Forced outputs are known already, so appending is counting; `sampled` is written for the others, and may end them early.
    """
    rows = None if batch.yields_token.all() else np.flatnonzero(batch.yields_token)
    yielding = slots if rows is None else slots[rows]
    if sampled is not None:
        indices = range(len(slots)) if rows is None else rows.tolist()
        for token, i in zip(sampled.tolist(), indices, strict=True):
            seqs[i].take_sampled(token)
    columns.num_tokens[yielding] += 1
    done = np.flatnonzero(columns.num_tokens[yielding] >= columns.num_final_tokens[yielding])
    done_rows: list[int] = (done if rows is None else rows[done]).tolist()
    return done_rows
