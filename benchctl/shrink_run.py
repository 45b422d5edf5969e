"""One replay of candidate rows in this process, counted and not recorded: what a predicate of `--where` is asked about.

The very parts of a replay (trace, admission, scheduler, loop), with a tally in the recorder's place.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from benchctl.build import Command, build_command, build_run
from benchctl.config import PolicySettings, ReplayOptions
from benchctl.ledger import Ledger, RoundSpan
from benchctl.recorder import NoRecorder, Timing
from benchctl.replay import replay
from benchctl.shrink_rows import Rows, write_rows
from benchctl.shrink_where import STATISTICS, Observed, Where
from engines.interface import NewRequest, Rejection, Round, StepResult
from traces.errors import BenchctlError
from traces.header import Header
from traces.request import Request

PATIENCE, ROUNDS_SPARED = 3, 100
FIRST_ROUNDS = 256  # of two runs held against each other


class Tally(NoRecorder):
    """Counts a run as it goes. Mutable; owned by one replay. `until` ends it once it is true."""

    def __init__(
        self,
        usable_blocks: int,
        *,
        ledger: bool,
        batches: bool,
        against: list[int] | None,
        stop: threading.Event,
        until: Callable[[Observed], bool] | None,
        max_rounds: float,
        deadline: float,
    ) -> None:
        self.seen = Observed()
        self._usable, self._stop, self._until, self._against = usable_blocks, stop, until, against
        self._batches = batches or against is not None
        self._ledger = Ledger() if ledger else None
        self._ended: list[Any] = []  # rows of `requests`
        self._last_token: dict[int, float] = {}
        self._gaps: list[float] = []
        self._max_rounds, self._deadline = max_rounds, deadline

    def admit(self, request: Request, new: NewRequest, arrival_s: float, admitted_s: float, round_number: int) -> None:
        self._add("requests", 1)
        if self._ledger is not None:
            self._ledger.admit(new.request, new.id, arrival_s, admitted_s, new.num_prompt_tokens, 0)

    def reject(
        self, request: Request, rejection: Rejection, arrival_s: float, round_number: int, prompt_tokens: int
    ) -> None:
        self._add("requests", 1)
        self._add("rejected", 1)

    def _add(self, name: str, count: float) -> None:
        self.seen.values[name] = self.seen.values.get(name, 0) + count

    def _raise_to(self, name: str, value: float) -> None:
        self.seen.values[name] = max(self.seen.values.get(name, value), value)

    def record(self, number: int, round: Round, result: StepResult | None, timing: Timing) -> None:
        batch = round.batch
        decode = int(np.count_nonzero(batch.is_decode))
        tokens = int(batch.num_tokens.sum())
        kind = (
            "empty"
            if not batch.num_seqs
            else "decode"
            if decode == batch.num_seqs
            else "mixed"
            if decode
            else "prefill"
        )
        self._add("rounds", 1)
        self._add(f"rounds_{kind}", 1)
        self._add("scheduled_tokens", tokens)
        self._add("decode_tokens", decode)
        self._add("prefill_tokens", tokens - decode)
        self._add("output_tokens", int(batch.yields_token.sum()))
        self._add("finished", len(round.finished))
        self._add("preemptions", round.num_preempted)
        self._add("evictions", round.num_evicted)
        self._add("queried_tokens", round.queried_tokens)
        if round.num_admitted:
            self._add("cached_tokens", int(batch.cached_tokens.clip(0).sum()))
        self._raise_to("peak_blocks", self._usable - min(round.free_blocks_scheduled, round.free_blocks_start))
        self._raise_to("max_waiting", round.waiting)
        self._raise_to("max_running", round.running)
        self._raise_to("max_round_s", timing.t_end_s - timing.t_start_s)
        for loop, stop in (("waiting", round.stop_waiting), ("running", round.stop_running)):
            if stop is not None:
                self._add(f"stop_{loop}.{stop}", 1)
        self.seen.values["duration_s"] = timing.t_end_s
        if self._ledger is not None:
            self._count_requests(round, decode == batch.num_seqs, timing)
        if self._batches:
            self._compare(batch.request, batch.start, batch.num_tokens)
        if self._until is not None and self._until(self.seen):
            self._stop.set()
        elif self.seen.values["rounds"] >= self._max_rounds or (
            number % 256 == 0 and time.monotonic() > self._deadline
        ):
            self.seen.cut = True
            self._stop.set()

    def _compare(self, *columns: Any) -> None:
        self.seen.batches.append(xxhash.xxh3_64_intdigest(b"".join(column.tobytes() for column in columns)))
        place = len(self.seen.batches) - 1
        if self._against is not None and (place >= len(self._against) or self._against[place] != self.seen.batches[-1]):
            # Beyond the end of a run that was cut there is nothing to be held against.
            self.seen.differed = True
            self._stop.set()

    def _count_requests(self, round: Round, all_decode: bool, timing: Timing) -> None:
        ledger, batch = self._ledger, round.batch
        assert ledger is not None
        for row in round.decisions:
            if row[1] == "preempt":
                ledger.preempt(row[2], timing.t_scheduled_s)
        for i in np.flatnonzero(batch.cached_tokens >= 0).tolist():
            ledger.schedule_first(int(batch.request[i]), int(batch.cached_tokens[i]), timing.t_scheduled_s)
        ledger.count(batch, all_decode, RoundSpan(timing.t_start_s, timing.t_scheduled_s, timing.t_end_s))
        for request in batch.request[batch.yields_token].tolist():
            if request in self._last_token:
                self._gaps.append(timing.t_end_s - self._last_token[request])
                self._raise_to("itl_max", self._gaps[-1] * 1000)
            self._last_token[request] = timing.t_end_s
        for request, reason in round.finished:
            ended = ledger.finish(request, reason, timing.t_end_s)
            self._ended.append(ended)
            for name, seconds in latencies(ended):
                self._raise_to(f"{name}_max", seconds * 1000)
            self._add("discarded_tokens", ended[12])
            self._add("recomputed_tokens", ended[13])

    def finish(self) -> Observed:
        """Figures that exist only at the end, milliseconds."""
        values = self.seen.values
        if values.get("queried_tokens"):
            values["hit_rate"] = values.get("cached_tokens", 0) / values["queried_tokens"]
        samples: dict[str, list[float]] = {"itl": self._gaps}
        for row in self._ended:
            for name, seconds in latencies(row):
                samples.setdefault(name, []).append(seconds)
        for name, found in samples.items():
            if found:
                at = np.percentile(found, (50, 90, 95, 99))
                figures = (float(np.mean(found)), max(found), *at.tolist())
                values |= {f"{name}_{what}": value * 1000 for what, value in zip(STATISTICS, figures, strict=True)}
        return self.seen


def latencies(row: Any) -> Iterator[tuple[str, float]]:
    """(metric, seconds) of a finished request, from its row of `requests`."""
    arrival, scheduled, first, last, emitted = row[4], row[6], row[7], row[8], row[10]
    yield "ttft", first - arrival
    yield "e2el", last - arrival
    yield "queue", scheduled - arrival
    yield "stalled", row[15]
    yield "preempted", row[16]
    if emitted > 1:
        yield "tpot", (last - first) / (emitted - 1)


def _holds_by_now(where: Where, before: dict[str, Observed], called: list[str], now: Observed) -> bool:
    seen = dict(before)
    for name in called:
        seen[name] = now
    return where.holds(seen)


class Candidates:
    """Asks a predicate about rows. Mutable (a file that is written anew each time); owned by one shrink.

    `options` names the schedulers; `names` says what the predicate calls each of them.
    """

    def __init__(
        self, options: ReplayOptions, header: Header, where: Where, names: dict[str, str], folder: Path
    ) -> None:
        self._options, self._header, self._where, self._names = options, header, where, names
        self._path = folder / "candidate.jsonl"
        self._max_rounds = math.inf
        self.deadline = math.inf  # of time.monotonic(): a replay that passes it is given up

    def holds(self, rows: Rows) -> bool:
        seen = self.observe(rows)
        if seen is None or time.monotonic() > self.deadline or not self._where.holds(seen):
            return False
        if self._where.growing:
            # What is found on the way is found early: a candidate that needs many times the rounds is not worth its time.
            rounds = max(each.values.get("rounds", 0) for each in seen.values())
            self._max_rounds = min(self._max_rounds, ROUNDS_SPARED + PATIENCE * rounds)
        return True

    def observe(self, rows: Rows) -> dict[str, Observed] | None:
        """Name -> what its replay came to; None where the rows are no trace that these options can replay."""
        write_rows(self._path, self._header, rows)
        try:
            command = build_command(replace(self._options, trace=str(self._path)))
            if self._where.differs is None:
                return self._observe(command, self._max_rounds)
            # Two runs are held against each other from the beginning: the first is replayed only as far as it takes.
            rounds = FIRST_ROUNDS
            while True:
                seen = self._observe(command, rounds)
                if (
                    seen is None
                    or any(each.differed for each in seen.values())
                    or not any(e.cut for e in seen.values())
                ):
                    return seen
                rounds *= 4
        except BenchctlError as error:
            if error.exit_code == 2:
                return None  # refused before anything ran: no trace for these limits
            raise

    def _observe(self, command: Command, max_rounds: float) -> dict[str, Observed] | None:
        seen: dict[str, Observed] = {}
        for i, policy in enumerate(command.policies):
            called = [name for name, real in self._names.items() if real == policy.name]
            found = self._replay(command, policy, seen, called, i == len(command.policies) - 1, max_rounds)
            seen |= dict.fromkeys(called, found)
            if found.error is not None:
                if not self._where.expects_error:
                    return None
                break
        for name in self._names:
            seen.setdefault(name, Observed())
        return seen

    def _replay(
        self,
        command: Command,
        policy: PolicySettings,
        before: dict[str, Observed],
        called: list[str],
        last: bool,
        max_rounds: float,
    ) -> Observed:
        where, stop = self._where, threading.Event()
        until = None
        if last and where.growing:
            until = partial(_holds_by_now, where, before, called)
        against = None
        if last and where.differs is not None and len(before) and where.differs[0] in before:
            against = before[where.differs[0]].batches
        tally = Tally(
            policy.usable_blocks,
            ledger=where.needs_ledger,
            batches=where.needs_batches,
            against=against,
            stop=stop,
            until=until,
            max_rounds=max_rounds,
            deadline=self.deadline,
        )
        try:
            parts = build_run(command, policy, None)
            scheduler = policy.info.build(policy.config, log_decisions=where.needs_ledger)
            replay(
                parts.arrivals, parts.admission, scheduler, parts.engine, parts.start_clock(stop), tally, stop=stop
            )  # fmt: skip
        except BenchctlError as error:
            if error.exit_code == 2:
                raise
            tally.seen.error = ("stuck", str(error))
        except Exception as error:  # what the policy raises is what is looked for
            tally.seen.error = (type(error).__name__, str(error))
        if against is not None and not tally.seen.cut and len(tally.seen.batches) != len(against):
            tally.seen.differed = True
        return tally.finish()
