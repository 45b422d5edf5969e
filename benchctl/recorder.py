"""The append-only record of a run: takes each round as it ends, and writes it out in parts.

Reads what the loop hands it and never asks the engine; of the scheduler it only looks at the free list of small pools. Cheap
because it copies columns and keeps the round's own lists: rows are made when a part is written, at least every 5 s or
500,000 rows. What it costs the loop stands in the record (`record_s`; handing a part over counts in the round after it).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from math import nan
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchctl.digest import DecisionDigest
from benchctl.ledger import Ledger, RoundSpan
from benchctl.parts import Part, PartWriter
from engines.interface import NewRequest, Rejection, Round, ScheduledBatch, Scheduler, StepResult
from engines.schedulers.decisions import DecisionRow, Decisions, RoundLog
from engines.steady_batch import Costs, SteadyBatch, Stretch
from reports.records import RECORDED
from traces.request import Request

FLUSH_SECONDS = 5.0
FLUSH_ROWS = 500_000
MANY_ROUNDS = 4096  # of a stretch: between them nobody looks whether the run is to stop
SMALL_POOL = 64  # blocks: up to here each round keeps the free list and the hashed blocks


@dataclass(slots=True)
class Timing:
    """One round's times: four on the run's clock, then host times, all in seconds."""

    t_start_s: float
    t_scheduled_s: float
    t_executed_s: float
    t_end_s: float
    schedule_s: float
    update_s: float


@dataclass(slots=True)
class StretchTimes:
    """Times of the rounds of a stretch on the run's clock, seconds; each [rounds]. A round is scheduled when it starts."""

    t_start_s: list[float]
    t_executed_s: list[float]
    t_end_s: list[float]


class Recorder(Protocol):
    """What the loop tells about a run. Rounds come in order, admissions before the round that sees them."""

    def admit(
        self, request: Request, new: NewRequest, arrival_s: float, admitted_s: float, round_number: int
    ) -> None: ...

    def reject(
        self, request: Request, rejection: Rejection, arrival_s: float, round_number: int, prompt_tokens: int
    ) -> None: ...

    def record(self, number: int, round: Round, result: StepResult | None, timing: Timing) -> None: ...

    def record_stretch(
        self, first: int, stretch: Stretch, costs: Costs, times: StretchTimes, schedule_s: float
    ) -> None:
        """Many rounds at once, `first` the number of the first. Only of recorders with an attribute `rounds_at_once` > 0:
        the most that they take."""

    def tick(self) -> None:
        """Nothing happened for a while: write out what is due."""

    def close(self, now_s: float) -> None:
        """Write what is left, the unfinished requests among it."""


class NoRecorder:
    """`--records none`: counts, and keeps nothing."""

    record_s = 0.0
    rounds_at_once = MANY_ROUNDS

    def admit(
        self, request: Request, new: NewRequest, arrival_s: float, admitted_s: float, round_number: int
    ) -> None: ...

    def reject(
        self, request: Request, rejection: Rejection, arrival_s: float, round_number: int, prompt_tokens: int
    ) -> None: ...

    def record(self, number: int, round: Round, result: StepResult | None, timing: Timing) -> None: ...

    def record_stretch(
        self, first: int, stretch: Stretch, costs: Costs, times: StretchTimes, schedule_s: float
    ) -> None: ...

    def tick(self) -> None: ...

    def close(self, now_s: float) -> None: ...


class FileRecorder:
    """Mutable; owned by one replay. `mode`: summary, compact or full (`reports.records.RECORDED`).

    Parts are written by a thread of its own: Parquet is encoded outside the interpreter's lock, so the loop goes on meanwhile.
    """

    def __init__(
        self,
        folder: Path,
        scheduler: Scheduler,
        num_usable_blocks: int,
        mode: str = "full",
        *,
        flush_seconds: float = FLUSH_SECONDS,
        flush_rows: int = FLUSH_ROWS,
        clock: Callable[[], float] = time.perf_counter,
        rehearses: bool = False,
    ) -> None:
        if not rehearses:
            rehearse(mode)
        self.ledger = Ledger()
        self.digest = DecisionDigest()
        self.record_s = 0.0  # time that the loop spent here, all of it
        self.write_s = 0.0  # time of writing parts, beside the loop
        self._part = Part()
        self._writer = PartWriter(folder, mode)
        self.keeps_log = "batches" in RECORDED[mode]  # and so has a digest
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="parts")
        self._pending: Future[None] | None = None
        self._scheduler = scheduler if num_usable_blocks <= SMALL_POOL else None
        # The free list of a small pool is looked at after every round.
        self.rounds_at_once = MANY_ROUNDS if self._scheduler is None else 1
        self._perf = clock
        self._flush_seconds, self._flush_rows = flush_seconds, flush_rows
        self._last_flush = clock()
        # Reject decisions by the round before which they were made, until that is recorded.
        self._rejects: dict[int, list[DecisionRow]] = {}

    # -- what happened

    def admit(self, request: Request, new: NewRequest, arrival_s: float, admitted_s: float, round_number: int) -> None:
        asked = request.output_length or 0
        cut = asked if asked > new.num_output_tokens else 0
        self._part.admissions.append(
            (new.request, new.id, request.session, request.turn, new.priority, new.adapter, arrival_s, admitted_s)
            + (round_number, new.num_prompt_tokens, cut or new.num_output_tokens)
        )
        self.ledger.admit(new.request, new.id, arrival_s, admitted_s, new.num_prompt_tokens, cut)
        self._part.num_rows += 1

    def reject(
        self, request: Request, rejection: Rejection, arrival_s: float, round_number: int, prompt_tokens: int
    ) -> None:
        rejects = self._rejects.setdefault(round_number, [])
        numbers = (
            (None, None, None)
            if rejection.reason == "parent_rejected"
            else (rejection.needed, rejection.available, rejection.unit)
        )
        rejects.append((len(rejects), "reject", rejection.request, None, rejection.reason, *numbers))
        self._part.requests.append(
            (rejection.request, request.id, "rejected", rejection.reason, arrival_s, None, None, None, None)
            + (prompt_tokens, 0, None, 0, 0, 0, 0.0, 0.0)
        )
        self._part.num_rows += 2

    def record(self, number: int, round: Round, result: StepResult | None, timing: Timing) -> None:
        began = self._perf()
        self._flush_if_due(began)
        batch, ledger = round.batch, self.ledger
        num_seqs = batch.num_seqs
        # Decisions of the round stand behind the rejections that came before it.
        shift = self._write_rejects(number) if self._rejects else 0
        num_rows = 2 * num_seqs + self._write_log(number, shift, round) if self.keeps_log else 0
        if round.num_preempted:
            for row in round.decisions:
                if row[1] == "preempt":
                    ledger.preempt(row[2], timing.t_scheduled_s)
        steady = batch if isinstance(batch, SteadyBatch) else None
        cached_tokens = 0
        if steady is None:
            num_tokens = int(batch.num_tokens.sum())
            num_decode = int(np.count_nonzero(batch.is_decode))  # one token each
            admitted = (
                zip(batch.request.tolist(), batch.cached_tokens.tolist(), strict=True) if round.num_admitted else ()
            )
        else:
            num_tokens = num_decode = steady.num_decodes
            admitted = ()
            if (extra := steady.extra) is not None:
                num_tokens += sum(extra.num_tokens)
                admitted = zip(extra.request, extra.cached_tokens, strict=True)
        for request, cached in admitted:
            if cached >= 0:
                cached_tokens += cached
                ledger.schedule_first(request, cached, timing.t_scheduled_s)
        ledger.count(batch, num_decode == num_seqs, RoundSpan(timing.t_start_s, timing.t_scheduled_s, timing.t_end_s))
        sampled = None if result is None else result.token_ids
        if self.keeps_log:
            self._part.log.batch.append(number, batch, timing.t_end_s, sampled)
        for request, reason in round.finished:
            self._part.requests.append(ledger.finish(request, reason, timing.t_end_s))
        kind = "empty" if not num_seqs else "decode" if num_decode == num_seqs else "mixed" if num_decode else "prefill"
        mode, padded, prepare_s, device_s, flops, num_bytes = (None, None, None, None, None, None) if result is None else (
            result.mode, result.padded_tokens, result.prepare_s, result.device_s, result.flops, result.bytes
        )  # fmt: skip
        scheduler = self._scheduler
        self._part.rounds.append(
            (kind, mode, padded, num_seqs, num_tokens - num_decode, num_decode, cached_tokens, round.queried_tokens)
            + (round.budget_left, round.waiting, round.skipped, round.num_admitted, round.num_preempted)
            + (round.stop_waiting, round.stop_running, timing.schedule_s, prepare_s, device_s, timing.update_s)
            + ((None, None) if scheduler is None else (scheduler.free_list(), scheduler.hashed_blocks())),
            (number, round.running, round.free_blocks_end, len(round.finished), timing.t_scheduled_s, timing.t_executed_s),
            (timing.t_start_s, timing.t_end_s, nan if flops is None else flops, nan if num_bytes is None else num_bytes)
            + (round.free_blocks_start, round.free_blocks_scheduled, round.cached_free_blocks, round.num_evicted),
        )  # fmt: skip
        self._part.num_rows += num_rows + 1
        took = self._perf() - began
        self._part.rounds.took(took)
        self.record_s += took

    def record_stretch(
        self, first: int, stretch: Stretch, costs: Costs, times: StretchTimes, schedule_s: float
    ) -> None:
        """Rounds `first`, `first + 1`, …; `schedule_s` is the host time of all of them."""
        began = self._perf()
        self._flush_if_due(began)
        batch, ledger, part, rounds = stretch.batch, self.ledger, self._part, stretch.num_rounds
        shift = self._write_rejects(first) if self._rejects else 0
        if self.keeps_log:
            part.num_rows += self._write_stretch(first, shift, stretch, times.t_end_s)
        ledger.count_stretch(batch, times.t_start_s, times.t_end_s)
        last_s = times.t_end_s[-1]
        for request, reason in stretch.finished:
            part.requests.append(ledger.finish(request, reason, last_s))
        n, scheduler = batch.num_decodes, self._scheduler
        none = () if costs.flops and costs.bytes else [nan] * rounds
        shared = (
            ("decode", costs.mode, costs.padded_tokens, n, 0, n, 0, 0, stretch.budget_left, stretch.waiting)
            + (stretch.skipped, 0, 0, stretch.stop_waiting, stretch.stop_running, schedule_s / rounds, 0.0, None, 0.0)
            + ((None, None) if scheduler is None else (scheduler.free_list(), scheduler.hashed_blocks()))
        )  # fmt: skip
        own = (first, stretch.running, stretch.free_blocks_end, len(stretch.finished))
        values: tuple[Any, ...] = (
            (times.t_start_s, times.t_end_s, costs.flops[:rounds] if costs.flops else none)
            + (costs.bytes[:rounds] if costs.bytes else none, stretch.free_blocks_start, stretch.free_blocks_scheduled)
            + (stretch.cached_free_blocks, stretch.evicted)
        )  # fmt: skip
        if rounds == 1:
            whole = (*own, times.t_start_s[0], times.t_end_s[0])
            part.rounds.append(shared, whole, tuple(column[0] for column in values))
        else:
            part.rounds.extend(shared, (*own, nan, nan), values, stretch.running_before)
        part.num_rows += rounds
        took = self._perf() - began
        part.rounds.took(took / rounds)
        self.record_s += took

    def _write_log(self, number: int, shift: int, round: Round) -> int:
        """Decisions and block events of a round; about how many rows they are."""
        decisions, blocks, part = round.decisions, round.blocks, self._part
        if isinstance(decisions, Decisions) and decisions.events is blocks and not decisions.whole:
            if decisions.plain:
                part.log.decisions.extend(number, shift, decisions.plain)
            return len(decisions.plain) + part.log.blocks.extend(number, shift, decisions.events)
        # A policy of the user's own: plain rows, evictions among them.
        if rows := list(decisions):
            part.log.decisions.extend(number, shift, rows)
        part.log.blocks.extend_rows(number, shift, blocks)
        return len(rows) + len(blocks)

    def _write_stretch(self, first: int, shift: int, stretch: Stretch, t_end_s: list[float]) -> int:
        """Decisions, block events and batches of a stretch; about how many rows they are."""
        log, rounds = self._part.log, stretch.num_rounds
        at, plain = 0, stretch.decisions.plain
        for number, count in enumerate(stretch.num_plain, first):
            if count:
                # Nobody is turned away within a stretch, so only its first round may have rejections in front.
                log.decisions.extend(number, shift if number == first else 0, plain[at : at + count])
                at += count
        log.batch.extend(first, stretch.batch, t_end_s)
        return (
            log.blocks.extend_stretch(first, shift, stretch.blocks, stretch.runs)
            + 2 * rounds * stretch.batch.num_decodes
        )

    def _write_rejects(self, up_to: int | None) -> int:
        """Hand over the rejections made before round `up_to` (None: all), oldest first; how many were made right before it."""
        shift = 0
        for number in [n for n in self._rejects if up_to is None or n <= up_to]:
            rows = self._rejects.pop(number)
            self._part.log.decisions.extend(number, 0, rows)
            shift = len(rows) if number == up_to else 0
        return shift

    def tick(self) -> None:
        if self._part.num_rows and self._perf() - self._last_flush >= self._flush_seconds:
            self._timed_flush()

    def close(self, now_s: float) -> None:
        self._write_rejects(None)
        for row in np.flatnonzero(self.ledger.live).tolist():
            self._part.requests.append(self.ledger.unfinished(row, now_s))
        self._timed_flush()
        began = self._perf()
        try:
            self._wait()
        finally:
            self._thread.shutdown()
            self.record_s += self._perf() - began

    # -- writing

    @property
    def counts(self) -> dict[str, int]:
        """Rows written, by table."""
        return dict(self._writer.num_rows)

    @property
    def num_parts(self) -> int:
        return self._writer.num_parts

    @property
    def num_bytes(self) -> int:
        return self._writer.num_bytes

    def _flush_if_due(self, now: float) -> None:
        if now - self._last_flush >= self._flush_seconds or self._part.num_rows >= self._flush_rows:
            self.flush()

    def _timed_flush(self) -> None:
        began = self._perf()
        self.flush()
        self.record_s += self._perf() - began

    def flush(self) -> None:
        """Hand everything gathered so far over to be written as one part, while the next one is gathered.

        Waits for the part before it, so at most two are in memory. Raises what the writing of that one raised.
        """
        self._wait()
        part, self._part = self._part, Part()
        part.log.batch.prompt_tokens = self.ledger.prompt_tokens
        self._pending = self._thread.submit(self._write, part)
        self._last_flush = self._perf()

    def _write(self, part: Part) -> None:
        began = self._perf()
        if self.keeps_log:
            part.log.add_to(self.digest)
        self._writer.write(part)
        self.write_s += self._perf() - began

    def _wait(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()


@cache
def rehearse(mode: str) -> None:
    """Record a round of each sort and write them, to a folder that is thrown away; once a process, before anybody's clock starts.

    The first part takes tens of milliseconds more than the next ones: polars starts its threads, modules are loaded, expressions
    are compiled. A measured run would meet that in its middle.
    """
    log, one = RoundLog(), np.ones(1, dtype=np.int64)
    log.decide("admit", 0, "fits", needed=1, available=1, unit="blocks")
    log.take([1], 0, 0, b"\x01")
    yes = np.ones(1, dtype=np.bool_)
    admitted = ScheduledBatch(
        request=one - 1, start=one - 1, num_tokens=one, is_decode=~yes, yields_token=yes, cached_tokens=one - 1, num_blocks=one,
        block_tables=[[1]], token_ids=[],
    )  # fmt: skip
    decoding = SteadyBatch(requests=one - 1, bases=one, age=0, base_sum=1, base_max=1, block_size=16, rows=[])
    none = RoundLog()
    new = NewRequest(0, "0", 1, 3, lambda: one)
    with tempfile.TemporaryDirectory(prefix="benchctl-") as folder:
        recorder = FileRecorder(Path(folder), None, SMALL_POOL + 1, mode, rehearses=True)  # type: ignore[arg-type]
        recorder.admit(Request(index=0, line=1, id="0", arrival_s=0.0), new, 0.0, 0.0, 1)
        for number, batch, made in ((1, admitted, log), (2, decoding, none), (3, decoding, none)):
            round = Round(
                batch=batch, decisions=made.decisions, blocks=made.blocks, free_blocks_start=1, free_blocks_scheduled=0, budget_left=1,
                queried_tokens=0, stop_waiting="waiting_empty", stop_running=None, num_admitted=int(number == 1),
                num_evicted=made.num_evicted, running=1,
            )  # fmt: skip
            at = float(number)
            recorder.record(number, round, None, Timing(at, at, at, at, 0.0, 0.0))
        recorder.close(4.0)
