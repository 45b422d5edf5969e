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
from benchctl.shrink_where import GROWING, OF_BATCHES, STATISTICS, STOPS, TIMED, Observed, Where
from engines.interface import NewRequest, Rejection, Round, StepResult
from traces.errors import BenchctlError
from traces.header import Header
from traces.request import Request

PATIENCE, ROUNDS_SPARED = 3, 100
FIRST_ROUNDS = 256  # of two runs held against each other


class Tally(NoRecorder):
    """Counts a run as it goes. Mutable; owned by one replay.

    Only what `names` asks for is counted where counting costs: millions of rounds pass through here in a minute.
    """

    rounds_at_once = 0  # each is looked at

    def __init__(
        self,
        usable_blocks: int,
        names: frozenset[str],
        *,
        ledger: bool,
        batches: bool,
        against: list[int] | None,
        stop: threading.Event,
        max_rounds: float,
        deadline: float,
    ) -> None:
        self.seen = Observed(dict.fromkeys(GROWING, 0))
        self.until: Callable[[], bool] | None = None  # asked after each round; true ends the run
        self._usable, self._stop, self._against = usable_blocks, stop, against
        self._batches = batches or against is not None
        self._ledger = Ledger() if ledger else None
        self._sums, self._stops = bool(names & OF_BATCHES), any(name.startswith(STOPS) for name in names)
        self._each_token = any(name.startswith("itl_") for name in names)
        self._ended: list[Any] = []  # rows of `requests`
        self._last_token: dict[int, float] = {}
        self._gaps: list[float] = []
        self._max_rounds, self._deadline = max_rounds, deadline

    def admit(self, request: Request, new: NewRequest, arrival_s: float, admitted_s: float, round_number: int) -> None:
        self._hand(request)
        if self._ledger is not None:
            self._ledger.admit(new.request, new.id, arrival_s, admitted_s, new.num_prompt_tokens, 0)

    def reject(
        self, request: Request, rejection: Rejection, arrival_s: float, round_number: int, prompt_tokens: int
    ) -> None:
        self._hand(request)
        self.seen.values["rejected"] += 1

    def _hand(self, request: Request) -> None:
        self.seen.values["requests"] += 1
        self.seen.latest = max(self.seen.latest, request.index)

    def _measure(self, metric: str, request: int, seconds: float) -> None:
        values, name = self.seen.values, f"{metric}_max"
        if seconds * 1000 > values.get(name, -math.inf):
            values[name] = seconds * 1000
            self.seen.worst[metric] = request

    def record(self, number: int, round: Round, result: StepResult | None, timing: Timing) -> None:
        batch, values = round.batch, self.seen.values
        values["rounds"] += 1
        values["finished"] += len(round.finished)
        values["preemptions"] += round.num_preempted
        values["evictions"] += round.num_evicted
        values["queried_tokens"] += round.queried_tokens
        used = self._usable - min(round.free_blocks_scheduled, round.free_blocks_start)
        if used > values["peak_blocks"]:
            values["peak_blocks"] = used
        if round.waiting > values["max_waiting"]:
            values["max_waiting"] = round.waiting
        if round.running > values["max_running"]:
            values["max_running"] = round.running
        # Own time: where rounds overlap, what lies before the end of the round before is that one's.
        span = timing.t_end_s - max(timing.t_start_s, values.get("duration_s", 0.0))
        if span > values["max_round_s"]:
            values["max_round_s"] = span
        values["duration_s"] = timing.t_end_s
        if self._sums:
            self._sum(round)
        if self._stops:
            for loop, stop in (("waiting", round.stop_waiting), ("running", round.stop_running)):
                if stop is not None:
                    values[f"stop_{loop}.{stop}"] = values.get(f"stop_{loop}.{stop}", 0) + 1
        if self._ledger is not None:
            self._count_requests(round, bool(batch.is_decode.all()), timing)
        if self._batches:
            self._compare(batch.request, batch.start, batch.num_tokens)
        if self.until is not None and self.until():
            self._stop.set()
        elif values["rounds"] >= self._max_rounds or (number % 256 == 0 and time.monotonic() > self._deadline):
            self.seen.cut = True
            self._stop.set()

    def _sum(self, round: Round) -> None:
        """What only a batch's columns tell."""
        batch, values = round.batch, self.seen.values
        decode, tokens = int(np.count_nonzero(batch.is_decode)), int(batch.num_tokens.sum())
        if not batch.num_seqs:
            values["rounds_empty"] += 1
        elif decode == batch.num_seqs:
            values["rounds_decode"] += 1
        else:
            values["rounds_mixed" if decode else "rounds_prefill"] += 1
        values["scheduled_tokens"] += tokens
        values["decode_tokens"] += decode
        values["prefill_tokens"] += tokens - decode
        values["output_tokens"] += int(np.count_nonzero(batch.yields_token))
        if round.num_admitted:
            values["cached_tokens"] += int(batch.cached_tokens.clip(0).sum())

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
        if self._each_token:
            for request in batch.request[batch.yields_token].tolist():
                if request in self._last_token:
                    self._gaps.append(timing.t_end_s - self._last_token[request])
                    self._measure("itl", request, self._gaps[-1])
                self._last_token[request] = timing.t_end_s
        for request, reason in round.finished:
            ended = ledger.finish(request, reason, timing.t_end_s)
            self._ended.append(ended)
            for name, seconds in latencies(ended):
                self._measure(name, request, seconds)
            self.seen.values["discarded_tokens"] += ended[12]
            self.seen.values["recomputed_tokens"] += ended[13]

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
        self.rounds = 0  # of all replays
        self.deadline = math.inf  # of time.monotonic(): a replay that passes it is given up

    def holds(self, rows: Rows) -> bool:
        seen = self.observe(rows)
        if seen is None or time.monotonic() > self.deadline or not self._decided(seen) or not self._where.holds(seen):
            return False
        self.expect(seen)
        return True

    def _decided(self, seen: dict[str, Observed]) -> bool:
        """Of a run that was cut only what stays true is known."""
        return self._where.growing or self._where.differs is not None or not any(each.cut for each in seen.values())

    def expect(self, seen: dict[str, Observed]) -> None:
        """A smaller trace that needs many times the rounds of one that held is not worth its time."""
        # Of two runs held against each other the second one ends where they differ.
        least_or_most = max if self._where.differs is None else min
        rounds = least_or_most(each.values["rounds"] for each in seen.values())
        self._max_rounds = min(self._max_rounds, ROUNDS_SPARED + PATIENCE * rounds)

    def near(self, seen: dict[str, Observed]) -> int | None:
        """The row of the trace at which it happened: of latencies the worst one, else the last that had arrived; None: not known."""
        where, runs = self._where, list(seen.values())
        metrics = [metric for metric in TIMED if any(name.startswith(metric + "_") for name in where.names)]
        for metric in metrics:
            worst = [(each.values[f"{metric}_max"], -each.worst[metric]) for each in runs if metric in each.worst]
            if worst:
                return -max(worst)[1]
        if where.differs is not None:
            return min(each.latest for each in runs)
        return max(each.latest for each in runs) if where.growing or any(e.error for e in runs) else None

    def observe(self, rows: Rows) -> dict[str, Observed] | None:
        """Name -> what its replay came to; None where the rows are no trace that these options can replay."""
        write_rows(self._path, self._header, rows)
        try:
            command = build_command(replace(self._options, trace=str(self._path)))
            if self._where.differs is None:
                return self._observe(command, self._max_rounds)
            # Two runs are held against each other from the beginning: the first is replayed only as far as it takes.
            rounds: float = FIRST_ROUNDS
            while True:
                seen = self._observe(command, min(rounds, self._max_rounds))
                if (
                    seen is None
                    or rounds >= self._max_rounds
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
            seen.setdefault(name, Observed(dict.fromkeys(GROWING, 0)))
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
        where, stop, against = self._where, threading.Event(), None
        if last and where.differs is not None and len(before) and where.differs[0] in before:
            against = before[where.differs[0]].batches
        tally = Tally(
            policy.usable_blocks,
            where.names,
            ledger=where.needs_ledger,
            batches=where.needs_batches,
            against=against,
            stop=stop,
            max_rounds=max_rounds,
            deadline=self.deadline,
        )
        if last and where.growing:
            tally.until = partial(where.holds, before | dict.fromkeys(called, tally.seen))
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
        self.rounds += int(tally.seen.values["rounds"])
        if against is not None and not tally.seen.cut and len(tally.seen.batches) != len(against):
            tally.seen.differed = True
        return tally.finish()
