"""Sequences that all decode one token in every round, and a calendar of what happens to them.

While they move on together nobody has to be touched but those whose next token opens a block, those whose block is full and
those that end: each is found by the round, so a round costs what happens in it and not what runs. Must not know a policy.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator

import numpy as np

from engines.interface import Int64Array
from engines.schedulers.decisions import RUN_WIDTH, RoundLog
from engines.schedulers.sequence import NO_MEMBER, Columns, Sequence, slots_of
from engines.steady_batch import ExtraRows, SteadyBatch, Stretch

NOBODY: list[Sequence] = []
_NONE: Int64Array = np.empty(0, dtype=np.int64)
ROUNDS_OF_EDGES = 4  # free blocks have to last for so many rounds of a steady list before its calendar is worth making


class Steady:
    """The leading sequences of a running list, in its order. Mutable; owned by one scheduler.

    `age` counts the rounds that they have decoded together. A member's `base` is such that `base + age` of its tokens are
    computed, and one more is known. The scheduler's columns are not kept up for members: `settle` writes them back.
    """

    __slots__ = (
        "_base_max",
        "_buckets",
        "_data",
        "_end_ages",
        "_ends",
        "_filling",
        "_next_serial",
        "_serials",
        "age",
        "base_sum",
        "block_size",
        "filled",
    )

    def __init__(self, block_size: int, names_all: bool) -> None:
        """`names_all`: a full block is told of everybody, not only where others may hit it."""
        self.block_size = block_size
        self.age = 0
        self.filled = 0  # rounds whose full blocks are findable: `age`, or one more while a round is scheduled
        self.base_sum = 0
        self._base_max: int | None = None  # None: to be found
        self._serials: list[int] = []
        self._next_serial = 0
        self._buckets: dict[int, list[Sequence]] = {}  # base modulo the block size -> members
        self._filling = (
            self._buckets if names_all else dict[int, list[Sequence]]()
        )  # the same of those that are told of
        self._ends: dict[int, list[Sequence]] = {}  # age of its last round -> members
        self._end_ages: list[int] = []  # heap of the keys of `_ends`
        self._data: Int64Array = np.empty(
            (2, 64), dtype=np.int64
        )  # request, base; never changed where a batch may look

    def __len__(self) -> int:
        return len(self._serials)

    @property
    def requests(self) -> Int64Array:
        """[n] rows of the trace; stays as it is."""
        return self._data[0, : len(self._serials)]

    @property
    def bases(self) -> Int64Array:
        return self._data[1, : len(self._serials)]

    @property
    def base_max(self) -> int:
        if self._base_max is None:
            self._base_max = int(self.bases.max(initial=-self.age))
        return self._base_max

    def join(self, seq: Sequence) -> None:
        """`seq` follows the members in the running list, and has one known token that is not computed."""
        n = len(self._serials)
        base = seq.base = seq.num_computed_tokens - self.age
        if n == self._data.shape[1]:
            self._data = np.concatenate([self._data, np.empty_like(self._data)], axis=1)
        self._data[0, n], self._data[1, n] = seq.new.request, base
        self.base_sum += base
        if self._base_max is not None and base > self._base_max:
            self._base_max = base
        seq.serial = self._next_serial
        self._next_serial += 1
        self._serials.append(seq.serial)
        self._buckets.setdefault(base % self.block_size, []).append(seq)
        if self._filling is not self._buckets and seq.hidden_from > seq.num_computed_tokens // self.block_size:
            self._filling.setdefault(base % self.block_size, []).append(seq)
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
        if seq.base == self._base_max:
            self._base_max = None
        residue = seq.base % self.block_size
        self._buckets[residue].remove(seq)
        if self._filling is not self._buckets and seq in self._filling.get(residue, NOBODY):
            self._filling[residue].remove(seq)
        seq.num_hashed_blocks = (seq.base + self.age) // self.block_size
        seq.serial = NO_MEMBER
        return place

    def batch(self, running: list[Sequence], extra: ExtraRows | None = None) -> SteadyBatch:
        """This round's: the members, who lead `running`, and the admissions, who follow them there."""
        return SteadyBatch(
            requests=self.requests,
            bases=self.bases,
            age=self.age,
            base_sum=self.base_sum,
            base_max=self.base_max,
            block_size=self.block_size,
            rows=running,
            extra=extra,
        )

    def opening(self) -> list[Sequence]:
        """Members whose token of this round is the first of a block."""
        return self._buckets.get(-self.age % self.block_size, NOBODY)

    def filling(self) -> list[Sequence]:
        """Members whose token of this round is the last of a block: all, or those whose block others may hit."""
        return self._filling.get((-1 - self.age) % self.block_size, NOBODY)

    def quiet_rounds(self, most: int) -> int:
        """Rounds to come, at most so many, in which no member's token opens or fills a block."""
        opening, filling, size, age = self._buckets, self._filling, self.block_size, self.age
        for quiet in range(most):
            if opening.get((-age - quiet) % size) or filling.get((-1 - age - quiet) % size):
                return quiet
        return most

    def holds(self, seq: Sequence) -> bool:
        return seq.serial >= 0

    def drop(self, seq: Sequence) -> None:
        """A member leaves before its end, its counters written back."""
        end = seq.num_final_tokens - 2 - seq.base
        self._ends[end].remove(seq)
        if not self._ends[end]:
            del self._ends[end]
            self._end_ages.remove(end)
            heapq.heapify(self._end_ages)
        seq.num_computed_tokens = seq.base + self.age
        seq.num_tokens = seq.base + self.age + 1
        self.remove(seq)

    def step(self) -> list[Sequence]:
        """A round is over. Returns those that it ended, in order; they are members until removed."""
        ended = self._ends.pop(self.age, NOBODY)
        if ended:
            heapq.heappop(self._end_ages)
        self.age = self.filled = self.age + 1
        return ended

    def skip(self, rounds: int) -> None:
        """So many quiet rounds are over."""
        self.age = self.filled = self.age + rounds

    def rounds_to_end(self) -> int:
        """Rounds up to and with the first that ends somebody; at least one member."""
        return self._end_ages[0] - self.age + 1

    def count_hashed(self, running: list[Sequence]) -> None:
        """Write how many of the members' blocks are findable, for who looks in."""
        for seq in running[: len(self)]:
            seq.num_hashed_blocks = (seq.base + self.filled) // self.block_size

    def settle(self, columns: Columns, running: list[Sequence]) -> None:
        """Write the members' counters into the columns."""
        seqs = running[: len(self)]
        slots = slots_of(seqs)
        computed = self.bases + self.age
        columns.num_computed_tokens[slots] = computed
        columns.num_tokens[slots] = computed + 1
        for seq in seqs:
            seq.count_blocks()
            seq.serial = NO_MEMBER
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


def admissions_alone(seqs: list[Sequence], num_new: list[int], cached: list[int], block_size: int) -> SteadyBatch:
    """A round of nobody but these, admitted now or earlier, who feed so many tokens."""
    return SteadyBatch(
        requests=_NONE, bases=_NONE, age=0, base_sum=0, base_max=0, block_size=block_size, rows=seqs,
        extra=extra_rows(seqs, num_new, cached, [seq.num_computed_tokens for seq in seqs]),
    )  # fmt: skip


def extra_rows(
    seqs: list[Sequence], num_new: list[int], cached: list[int], start: list[int] | None = None
) -> ExtraRows:
    """Columns of admissions, before `num_new` tokens of each are counted as computed. `start`: where others are among them."""
    start = cached if start is None else start
    return ExtraRows(
        request=[seq.new.request for seq in seqs],
        start=start,
        num_tokens=num_new,
        cached_tokens=cached,
        yields_token=[had + new == seq.num_tokens for had, new, seq in zip(start, num_new, seqs, strict=True)],
        num_blocks=[len(seq.block_table) for seq in seqs],
    )


class StretchLog:
    """A stretch while it is run. Mutable; made by a policy's `advance`."""

    def __init__(
        self,
        log: RoundLog,
        steady: Steady,
        running: list[Sequence],
        budget_left: int,
        stop_waiting: str | None,
        stop_running: str,
    ) -> None:
        log.clear()
        self._log = log
        self._batch = steady.batch(running)
        self._running_before = len(running)
        self._common = (budget_left, stop_waiting, stop_running)
        self._starts: list[int] = []
        self._scheduled: list[int] = []
        self._evicted: list[int] = []
        self._cached: list[int] = []
        self._runs: list[int] = []
        self._runs_before = 0
        self._plain: list[int] = []
        self._plain_before = 0
        self.finished: list[tuple[int, str]] = []

    def quiet(self, rounds: int, num_free: int, cached_free_blocks: int) -> None:
        """So many rounds in which nothing happens."""
        self._starts += [num_free] * rounds
        self._scheduled += [num_free] * rounds
        self._cached += [cached_free_blocks] * rounds
        nothing = [0] * rounds
        self._evicted += nothing
        self._runs += nothing
        self._plain += nothing

    def round(self, started: int, scheduled: int, cached_free_blocks: int) -> None:
        """A round is over; free blocks when it began and when it was scheduled."""
        log, runs = self._log, len(self._log.blocks.runs)
        self._starts.append(started)
        self._scheduled.append(scheduled)
        self._evicted.append(log.num_evicted)
        log.order = log.num_evicted = 0
        self._cached.append(cached_free_blocks)
        self._runs.append((runs - self._runs_before) // RUN_WIDTH)
        self._runs_before = runs
        plain = len(log.decisions.plain)
        self._plain.append(plain - self._plain_before)
        self._plain_before = plain

    def stretch(self, num_free: int, waiting: int, running: int, skipped: int) -> Stretch | None:
        """What was run; None: no round was."""
        if not self._starts:
            return None
        budget_left, stop_waiting, stop_running = self._common
        return Stretch(
            batch=self._batch,
            num_rounds=len(self._starts),
            decisions=self._log.decisions,
            blocks=self._log.blocks,
            num_plain=self._plain,
            runs=self._runs,
            free_blocks_start=self._starts,
            free_blocks_scheduled=self._scheduled,
            evicted=self._evicted,
            cached_free_blocks=self._cached,
            budget_left=budget_left,
            stop_waiting=stop_waiting,
            stop_running=stop_running,
            free_blocks_end=num_free,
            waiting=waiting,
            running=running,
            running_before=self._running_before,
            skipped=skipped,
            finished=self.finished,
        )
