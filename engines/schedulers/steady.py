"""Sequences that all decode one token in every round, and a calendar of what happens to them.

While they move on together nobody has to be touched but those whose next token opens a block, those whose block is full and
those that end: each is found by the round, so a round costs what happens in it and not what runs. Must not know a policy.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from functools import cached_property
from typing import Any

import numpy as np

from engines.interface import BoolArray, Int64Array, ScheduledBatch
from engines.schedulers.sequence import BlockTables, Columns, Sequence, TokenIds, slots_of

NOBODY: list[Sequence] = []
ROUNDS_OF_EDGES = 4  # free blocks have to last for so many rounds of a steady list before its calendar is worth making


class Steady:
    """The leading sequences of a running list, in its order. Mutable; owned by one scheduler.

    `age` counts the rounds that they have decoded together. A member's `base` is such that `base + age` of its tokens are
    computed, and one more is known. The scheduler's columns are not kept up for members: `settle` writes them back.
    """

    __slots__ = ("_buckets", "_data", "_end_ages", "_ends", "_next_serial", "_serials", "age", "base_sum", "block_size")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.age = 0
        self.base_sum = 0
        self._serials: list[int] = []
        self._next_serial = 0
        self._buckets: dict[int, list[Sequence]] = {}  # base modulo the block size -> members
        self._ends: dict[int, list[Sequence]] = {}  # age of its last round -> members
        self._end_ages: list[int] = []  # heap of the keys of `_ends`
        self._data: Int64Array = np.empty((2, 64), dtype=np.int64)  # request, base; never changed where a batch may look

    def __len__(self) -> int:
        return len(self._serials)

    @property
    def requests(self) -> Int64Array:
        """[n] rows of the trace; stays as it is."""
        return self._data[0, : len(self._serials)]

    @property
    def bases(self) -> Int64Array:
        return self._data[1, : len(self._serials)]

    def join(self, seq: Sequence) -> None:
        """`seq` follows the members in the running list, and has one known token that is not computed."""
        n = len(self._serials)
        base = seq.base = seq.num_computed_tokens - self.age
        if n == self._data.shape[1]:
            self._data = np.concatenate([self._data, np.empty_like(self._data)], axis=1)
        self._data[0, n], self._data[1, n] = seq.new.request, base
        self.base_sum += base
        seq.serial = self._next_serial
        self._next_serial += 1
        self._serials.append(seq.serial)
        self._buckets.setdefault(base % self.block_size, []).append(seq)
        # Decoding at `start` makes start + 2 tokens known.
        end = seq.num_final_tokens - 2 - base
        ending = self._ends.get(end)
        if ending is None:
            self._ends[end] = [seq]
            heapq.heappush(self._end_ages, end)
        else:
            ending.append(seq)

    def remove(self, seq: Sequence) -> int:
        """A member ended, in the round just stepped. Returns its place in the running list."""
        place = bisect_left(self._serials, seq.serial)
        n = len(self._serials)
        assert place < n and self._serials[place] == seq.serial, seq.new.id
        del self._serials[place]
        fresh = np.empty_like(self._data)
        fresh[:, :place] = self._data[:, :place]
        fresh[:, place : n - 1] = self._data[:, place + 1 : n]
        self._data = fresh
        self.base_sum -= seq.base
        self._buckets[seq.base % self.block_size].remove(seq)
        return place

    def opening(self) -> list[Sequence]:
        """Members whose token of this round is the first of a block."""
        return self._buckets.get(-self.age % self.block_size, NOBODY)

    def filling(self) -> list[Sequence]:
        """Members whose token of this round is the last of a block."""
        return self._buckets.get((-1 - self.age) % self.block_size, NOBODY)

    def step(self) -> list[Sequence]:
        """A round is over. Returns those that it ended, in order; they are members until removed."""
        ended = self._ends.pop(self.age, NOBODY)
        if ended:
            heapq.heappop(self._end_ages)
        self.age += 1
        return ended

    def rounds_to_end(self) -> int:
        """Rounds up to and with the first that ends somebody; at least one member."""
        return self._end_ages[0] - self.age + 1

    def settle(self, columns: Columns, running: list[Sequence]) -> None:
        """Write the members' counters into the columns."""
        seqs = running[: len(self)]
        slots = slots_of(seqs)
        computed = self.bases + self.age
        columns.num_computed_tokens[slots] = computed
        columns.num_tokens[slots] = computed + 1
        for seq in seqs:
            seq.count_blocks()
        # A hit, or a round's caching, never leaves a full block out, so it is all or nothing.
        hashed = columns.num_hashed_blocks[slots]
        columns.num_hashed_blocks[slots] = np.maximum(hashed, computed // self.block_size)


def in_order(first: list[Sequence], second: list[Sequence]) -> Iterator[tuple[Sequence, bool, bool]]:
    """Members of either list in running order: (member, in the first, in the second)."""
    at, end = 0, len(second)
    for seq in first:
        while at < end and second[at].serial < seq.serial:
            yield second[at], False, True
            at += 1
        both = at < end and second[at] is seq
        at += both
        yield seq, True, both
    while at < end:
        yield second[at], False, True
        at += 1


class SteadyBatch(ScheduledBatch):
    """Members decode; behind them stand the round's admissions, if any. Columns are made when they are read.

    `num_decodes` members with `requests` and `bases` at `age`; `context` is the sum of their starts. The extra rows are
    [m] columns (request, start, num_tokens, cached_tokens, yields_token, num_blocks).
    """

    def __init__(self, steady: Steady, running: list[Sequence], extra: ExtraRows | None) -> None:
        n = len(steady)
        self.__dict__.update(
            steady=steady,
            requests=steady.requests,
            bases=steady.bases,
            age=steady.age,
            num_decodes=n,
            context=steady.base_sum + n * steady.age,
            extra=extra,
            _block_size=steady.block_size,
            _running=running,
        )

    steady: Steady
    requests: Int64Array
    bases: Int64Array
    age: int
    num_decodes: int
    context: int
    extra: ExtraRows | None
    _block_size: int
    _running: list[Sequence]

    @property
    def num_seqs(self) -> int:
        return self.num_decodes + (0 if self.extra is None else len(self.extra.request))

    @property
    def num_yields(self) -> int:
        return self.num_decodes + (0 if self.extra is None else int(self.extra.yields_token.sum()))

    def _with(self, decodes: Any, name: str) -> Any:
        return decodes if self.extra is None else np.concatenate([decodes, getattr(self.extra, name)])

    @cached_property
    def request(self) -> Int64Array:  # type: ignore[override]
        return self._with(self.requests, "request")  # type: ignore[no-any-return]

    @cached_property
    def start(self) -> Int64Array:  # type: ignore[override]
        return self._with(self.bases + self.age, "start")  # type: ignore[no-any-return]

    @cached_property
    def num_tokens(self) -> Int64Array:  # type: ignore[override]
        return self._with(np.ones(self.num_decodes, dtype=np.int64), "num_tokens")  # type: ignore[no-any-return]

    @cached_property
    def is_decode(self) -> BoolArray:  # type: ignore[override]
        out = np.ones(self.num_seqs, dtype=np.bool_)
        out[self.num_decodes :] = False
        return out

    @cached_property
    def yields_token(self) -> BoolArray:  # type: ignore[override]
        return self._with(np.ones(self.num_decodes, dtype=np.bool_), "yields_token")  # type: ignore[no-any-return]

    @cached_property
    def cached_tokens(self) -> Int64Array:  # type: ignore[override]
        return self._with(np.full(self.num_decodes, -1, dtype=np.int64), "cached_tokens")  # type: ignore[no-any-return]

    @cached_property
    def num_blocks(self) -> Int64Array:  # type: ignore[override]
        return self._with((self.bases + self.age) // self._block_size + 1, "num_blocks")  # type: ignore[no-any-return]

    @cached_property
    def block_tables(self) -> Seq[list[int]]:  # type: ignore[override]
        return BlockTables(self._running[: self.num_seqs])

    @cached_property
    def token_ids(self) -> Seq[Int64Array]:  # type: ignore[override]
        return TokenIds(self._running[: self.num_seqs])


class ExtraRows:
    """Columns of the rows behind the decodes: a round's admissions."""

    __slots__ = ("cached_tokens", "num_blocks", "num_tokens", "request", "start", "yields_token")

    def __init__(self, seqs: list[Sequence], num_new: list[int], cached: list[int]) -> None:
        self.request: Int64Array = np.array([seq.new.request for seq in seqs], dtype=np.int64)
        self.start: Int64Array = np.array(cached, dtype=np.int64)
        self.cached_tokens = self.start
        self.num_tokens: Int64Array = np.array(num_new, dtype=np.int64)
        self.num_blocks: Int64Array = np.array([len(seq.block_table) for seq in seqs], dtype=np.int64)
        known = np.array([seq.num_tokens for seq in seqs], dtype=np.int64)
        self.yields_token: BoolArray = self.start + self.num_tokens == known
