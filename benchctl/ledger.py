"""What each request has gone through so far, kept by columns so that a round of hundreds of decodes costs microseconds.

The recorder feeds it admissions, rounds and preemptions; it answers with the rows of the `requests` table. A request has a
few bytes by its trace row, and a slot of counters from the round that first schedules it to its end. Must not know a policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan, nan
from typing import Any

import numpy as np
import numpy.typing as npt

from engines.interface import Int64Array, ScheduledBatch
from engines.steady_batch import ExtraRows, SteadyBatch

Float64Array = npt.NDArray[np.float64]
RequestRow = tuple[Any, ...]  # in the order of the `requests` table's columns


@dataclass(slots=True)
class RoundSpan:
    """The times of one round that requests are charged with, seconds.

    Of rounds that overlap each is charged from the end of the one before: then no time counts twice.
    """

    t_start_s: float
    t_scheduled_s: float
    t_end_s: float


class Ledger:
    """Mutable; owned by one recorder."""

    _FLOATS = ("first_scheduled_s", "first_token_s", "stalled_s", "preempted_s", "preempted_at", "seen", "stall_before")
    _INTS = ("computed", "high_water", "discarded", "recomputed", "preemptions", "cached", "emitted", "base", "steady")

    first_scheduled_s: Float64Array
    first_token_s: Float64Array  # nan: none yet
    stalled_s: Float64Array
    preempted_s: Float64Array
    preempted_at: Float64Array  # nan: not preempted now
    seen: Float64Array  # the sum of all rounds' own spans when it was last computed
    computed: Int64Array  # tokens computed and still held
    high_water: Int64Array  # tokens computed before its last preemption
    discarded: Int64Array
    recomputed: Int64Array
    preemptions: Int64Array
    cached: Int64Array
    emitted: Int64Array  # output tokens at its last preemption
    steady: (
        Int64Array  # 1: it is counted with the steady decodes, by the three below, and its `computed` and `seen` rest
    )
    base: Int64Array  # computed = base + `_steady_age`
    stall_before: Float64Array  # `_steady_stall` when it joined them

    def __init__(self, capacity: int = 256) -> None:
        self.slot_of: Int64Array = np.full(0, -1, dtype=np.int64)
        self.arrival_s: Float64Array = np.zeros(0)
        self.admitted_s: Float64Array = np.zeros(0)
        self.prompt_tokens: Int64Array = np.zeros(0, dtype=np.int64)
        self.asked_tokens: Int64Array = np.zeros(
            0, dtype=np.int64
        )  # output asked for, where less will be given; else 0
        self.ids: npt.NDArray[Any] = np.empty(0, dtype=object)
        self.live: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)  # handed over and not ended
        self._cells: dict[str, Any] = {}  # a memoryview of each column: cheap to read and write one value of
        for name in self._FLOATS:
            self._set(name, np.zeros(capacity))
        for name in self._INTS:
            self._set(name, np.zeros(capacity, dtype=np.int64))
        self._free_slots = list(range(capacity - 1, -1, -1))
        self._recomputing: set[int] = set()  # slots that may be scheduled at positions computed before
        self.elapsed_s = 0.0  # the sum of all rounds' own spans
        self.ended_s = 0.0  # t_end_s of the round counted last: from then on the next one is charged
        # All steady decodes (`engines.steady_batch`) are computed in the same rounds, so most is known of them together.
        self._num_steady = 0
        self._steady_age = 0  # after their last round
        self._steady_seen = 0.0  # `seen` of all of them
        self._steady_stall = 0.0  # time in rounds that computed none of them

    # -- one request

    def admit(
        self, row: int, name: str, arrival_s: float, admitted_s: float, prompt_tokens: int, asked_tokens: int
    ) -> None:
        """A request was handed to the scheduler. `asked_tokens`: 0 unless its output was cut."""
        if row >= len(self.slot_of):
            self._grow_rows(row + 1)
        self.arrival_s[row], self.admitted_s[row] = arrival_s, admitted_s
        self.prompt_tokens[row], self.asked_tokens[row] = prompt_tokens, asked_tokens
        self.ids[row] = name
        self.live[row] = True

    def schedule_first(self, row: int, cached: int, t_scheduled_s: float) -> None:
        """An admission's row stands in the batch: a first one, or one after a preemption."""
        slot = int(self.slot_of[row])
        if slot < 0:
            slot = self._take_slot(row)
            cells = self._cells
            cells["first_scheduled_s"][slot], cells["first_token_s"][slot] = t_scheduled_s, nan
            cells["cached"][slot] = cached
        else:
            cells = self._cells
            cells["preempted_s"][slot] += max(t_scheduled_s, self.ended_s) - cells["preempted_at"][slot]
            if cells["high_water"][slot] > cached:
                self._recomputing.add(slot)
        cells["preempted_at"][slot] = nan
        cells["seen"][slot] = self.elapsed_s

    def preempt(self, row: int, t_scheduled_s: float) -> None:
        """It lost its blocks. Called before the round's batch is counted: this round's tokens are not among the lost."""
        slot = int(self.slot_of[row])
        self._leave_steady(slot)
        assert slot >= 0 and np.isnan(self.preempted_at[slot]), (row, slot, "preempted while it held nothing")
        computed = int(self.computed[slot])
        self.emitted[slot] = self._emitted(row, slot)
        self.discarded[slot] += computed
        self.high_water[slot] = max(int(self.high_water[slot]), computed)
        self.computed[slot] = 0
        self.preemptions[slot] += 1
        # With overlap the round before may still compute on those blocks: without them it is from its end on.
        self.preempted_at[slot] = max(t_scheduled_s, self.ended_s)
        self.stalled_s[slot] += self.elapsed_s - self.seen[slot]

    def finish(self, row: int, reason: str, t_end_s: float) -> RequestRow:
        """Its last token came out in the round just counted. Frees its slot."""
        self._leave_steady(int(self.slot_of[row]))
        if self.asked_tokens[row] and reason == "max_tokens":
            reason = "length_capped"  # it got all that the scheduler was asked for, which was less than the trace asks
        return self._close(row, "finished", reason, t_end_s)

    def unfinished(self, row: int, now_s: float) -> RequestRow:
        """The run ends with this request waiting or running."""
        slot = int(self.slot_of[row])
        if slot >= 0:
            self._leave_steady(slot)
            if np.isnan(self.preempted_at[slot]):
                self.stalled_s[slot] += self.elapsed_s - self.seen[slot]
            else:
                self.preempted_s[slot] += now_s - self.preempted_at[slot]
        return self._close(row, "unfinished", None, None)

    def _emitted(self, row: int, slot: int) -> int:
        # Between rounds the newest token is known but not computed, so computed + 1 tokens are known after a prefill.
        cells = self._cells
        emitted: int = max(cells["emitted"][slot], cells["computed"][slot] + 1 - int(self.prompt_tokens[row]), 0)
        return emitted

    def _close(self, row: int, status: str, reason: str | None, finished_s: float | None) -> RequestRow:
        slot = int(self.slot_of[row])
        known = (row, self.ids[row], status, reason, float(self.arrival_s[row]), float(self.admitted_s[row]))
        prompt = int(self.prompt_tokens[row])
        self.live[row] = False
        self.ids[row] = None
        if slot < 0:
            return (*known, None, None, None, prompt, 0, None, 0, 0, 0, 0.0, 0.0)
        cells = self._cells
        first_token_s = cells["first_token_s"][slot]
        out = (
            *known,
            cells["first_scheduled_s"][slot],
            None if isnan(first_token_s) else first_token_s,
            finished_s,
            prompt,
            self._emitted(row, slot),
            cells["cached"][slot],
            cells["discarded"][slot],
            cells["recomputed"][slot],
            cells["preemptions"][slot],
            cells["stalled_s"][slot],
            cells["preempted_s"][slot],
        )
        self._recomputing.discard(slot)
        self._free_slots.append(slot)
        self.slot_of[row] = -1
        return out

    # -- one round

    def count(self, batch: ScheduledBatch, all_decode: bool, span: RoundSpan) -> None:
        """Charge a round to the requests of its batch."""
        before = self.elapsed_s
        self._pass(span.t_start_s, span.t_end_s)
        if isinstance(batch, SteadyBatch):
            if batch.num_decodes:
                self._count_steady(batch, before)
            if batch.extra is not None:
                self._count_extra(batch.extra, before, span.t_end_s)
        elif len(batch.request):
            self._count_rows(batch.request, batch.start, batch.num_tokens, before)
            if not all_decode:
                self._first_tokens(batch.request[batch.yields_token], span.t_end_s)

    def count_stretch(self, batch: SteadyBatch, t_start_s: list[float], t_end_s: list[float]) -> None:
        """The same of several rounds of steady decodes, one after the other."""
        before = elapsed_s = self.elapsed_s
        ended_s = self.ended_s
        for start, end in zip(t_start_s, t_end_s, strict=True):  # `_pass`, without a call for each
            elapsed_s += end - (start if start > ended_s else ended_s)
            ended_s = end
        self.elapsed_s, self.ended_s = elapsed_s, ended_s
        self._count_steady(batch, before)
        self._steady_age += len(t_end_s) - 1

    def _pass(self, t_start_s: float, t_end_s: float) -> None:
        self.elapsed_s += t_end_s - max(t_start_s, self.ended_s)
        self.ended_s = t_end_s

    def _count_steady(self, batch: SteadyBatch, before: float) -> None:
        if self._num_steady and self._steady_seen != before:
            self._steady_stall += before - self._steady_seen
        if batch.num_decodes != self._num_steady:
            # Newcomers stand at the end.
            first, cells, slot_of = self._num_steady, self._cells, self.slot_of
            rows, bases = batch.requests[first:].tolist(), batch.bases[first:].tolist()
            for row, base in zip(rows, bases, strict=True):
                slot = slot_of[row]
                seen = cells["seen"][slot]
                if seen != before:
                    cells["stalled_s"][slot] += before - seen
                cells["base"][slot] = base
                cells["stall_before"][slot] = self._steady_stall
                cells["steady"][slot] = 1
            self._num_steady = batch.num_decodes
        self._steady_age = batch.age + 1
        self._steady_seen = self.elapsed_s

    def _leave_steady(self, slot: int) -> None:
        """What was counted for all is written down for one, if it was among them."""
        cells = self._cells
        if slot >= 0 and cells["steady"][slot]:
            cells["steady"][slot] = 0
            cells["computed"][slot] = cells["base"][slot] + self._steady_age
            cells["seen"][slot] = self._steady_seen
            cells["stalled_s"][slot] += self._steady_stall - cells["stall_before"][slot]
            self._num_steady -= 1

    def _count_extra(self, extra: ExtraRows, before: float, t_end_s: float) -> None:
        """As `_count_rows` and `_first_tokens`, of few."""
        cells, again = self._cells, self._recomputing
        for row, start, count, yields in zip(
            extra.request, extra.start, extra.num_tokens, extra.yields_token, strict=True
        ):
            slot, end = int(self.slot_of[row]), start + count
            seen = cells["seen"][slot]
            if seen != before:
                cells["stalled_s"][slot] += before - seen
            cells["seen"][slot] = self.elapsed_s
            cells["computed"][slot] = end
            if slot in again:
                high = cells["high_water"][slot]
                cells["recomputed"][slot] += max(min(end, high) - start, 0)
                if end >= high:
                    again.discard(slot)
            if yields and isnan(cells["first_token_s"][slot]):
                cells["first_token_s"][slot] = t_end_s

    def _count_rows(self, rows: Int64Array, start: Int64Array, num_tokens: Int64Array, before: float) -> None:
        slots = self.slot_of[rows]
        if self._num_steady and self.steady[slots].any():
            for slot in np.flatnonzero(self.steady).tolist():
                self._leave_steady(slot)
        end = start + num_tokens
        seen = self.seen[slots]
        # Equal to the bit unless rounds passed without it: the same float was stored.
        missed = np.flatnonzero(seen != before)
        if len(missed):
            self.stalled_s[slots[missed]] += before - seen[missed]
        self.seen[slots] = self.elapsed_s
        if self._recomputing:
            again = np.minimum(end, self.high_water[slots]) - start
            self.recomputed[slots] += np.maximum(again, 0)
        self.computed[slots] = end
        if self._recomputing:
            done = [s for s in self._recomputing if self.computed[s] >= self.high_water[s]]
            self._recomputing.difference_update(done)

    def _first_tokens(self, rows: Int64Array, t_end_s: float) -> None:
        """Rows that gave a token."""
        slots = self.slot_of[rows]
        first = slots[np.isnan(self.first_token_s[slots])]
        self.first_token_s[first] = t_end_s

    # -- storage

    def _grow_rows(self, needed: int) -> None:
        size = max(needed, 2 * len(self.slot_of), 256)
        for name, fill in (
            ("slot_of", -1),
            ("arrival_s", 0),
            ("admitted_s", 0),
            ("prompt_tokens", 0),
            ("asked_tokens", 0),
            ("live", 0),
        ):
            old = getattr(self, name)
            new = np.full(size, fill, dtype=old.dtype)
            new[: len(old)] = old
            setattr(self, name, new)
        ids = np.empty(size, dtype=object)
        ids[: len(self.ids)] = self.ids
        self.ids = ids

    def _set(self, name: str, column: npt.NDArray[Any]) -> None:
        setattr(self, name, column)
        self._cells[name] = memoryview(column)  # type: ignore[arg-type]

    def _take_slot(self, row: int) -> int:
        if not self._free_slots:
            old = len(self.computed)
            for name in (*self._FLOATS, *self._INTS):
                column = getattr(self, name)
                self._set(name, np.concatenate([column, np.zeros(old, dtype=column.dtype)]))
            self._free_slots = list(range(2 * old - 1, old - 1, -1))
        slot = self._free_slots.pop()
        for cell in self._cells.values():
            cell[slot] = 0
        self.slot_of[row] = slot
        return slot
