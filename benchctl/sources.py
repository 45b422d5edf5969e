"""Which arrivals a command's options mean: the trace's times, times by rate, sessions, or those of an earlier run.

Reads the trace, and of an earlier run its tables; must not know a policy or an engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Literal

import polars as pl

from benchctl.arrivals import Arrivals, CappedArrivals, Due, OpenArrivals, SessionArrivals, rate_times
from benchctl.clock import RoundTimes
from benchctl.config import ReplayOptions
from reports.run import Run
from traces.errors import BenchctlError
from traces.load import Trace, due_round, open_trace
from traces.request import Request
from traces.streamed import is_large, open_stream

MAX_AT = 4e12  # seconds or rounds: in microseconds, as reports count, still inside int64


def open_for(options: ReplayOptions) -> Trace:
    """The trace of a command: checked whole, or its head alone, where it is large and can be replayed as it is read.

    Raises BenchctlError.
    """
    wanted = options.validate_first is False or (options.validate_first is None and is_large(options.trace))
    if not wanted or options.from_run is not None or options.outputs == "sampled" or options.arrivals == "session":
        return open_trace(options.trace, skip_bad=options.skip_bad)
    trace = open_stream(options.trace, skip_bad=options.skip_bad)
    by_round = options.clock == "rounds"
    timed = by_round or options.request_rate is not None or trace.all_have_arrival_s
    if not timed or not trace.head_in_order("round" if by_round else "time", options.round_seconds):
        # Sessions wait for their parents, and rows out of order have to be sorted: both need all rows.
        return open_trace(options.trace, skip_bad=options.skip_bad)
    return trace


def num_to_replay(options: ReplayOptions, trace: Trace) -> int | None:
    """None as long as the trace was not read to its end, but for one that is known to have enough."""
    wanted = options.num_prompts
    if wanted is not None and wanted <= trace.num_requests:
        return wanted
    return trace.num_requests if trace.complete else None


def check_arrivals(trace: Trace, options: ReplayOptions, clock: str) -> str:
    """`trace` or `session`: how requests get their times. Raises BenchctlError where some get none."""
    if options.arrivals is not None:
        kind = options.arrivals
    else:
        kind = (
            "trace"
            if trace.all_have_arrival_s or clock in ("rounds", "recorded") or options.request_rate
            else "session"
        )
    if (
        trace.any_arrival_round
        and clock in ("wall", "virtual")
        and not options.request_rate
        and not trace.all_have_arrival_s
    ):
        raise BenchctlError(
            "the trace gives arrival_round, which only a clock of rounds knows",
            where=str(trace.path),
            fix="--clock rounds, or give every row arrival_s, or --request-rate",
        )
    return kind


def requests_of(trace: Trace, options: ReplayOptions, clock: str) -> Iterator[Request]:
    """The requests of this command in the order in which they are due."""
    order: Literal["time", "round"] = "round" if clock == "rounds" else "time"
    return islice(trace.requests(order=order, round_seconds=options.round_seconds), options.num_prompts)


def build_arrivals(trace: Trace, options: ReplayOptions, kind: str, clock: str, notes: list[str]) -> Arrivals:
    """A fresh source for one run on a clock `wall`, `virtual` or `rounds`."""
    times = Times(options, clock)
    source: Arrivals
    if kind == "session":
        source = _sessions(trace, options, clock, times, notes)
    else:
        source = OpenArrivals(times.due(request) for request in requests_of(trace, options, clock))
    return source if options.max_concurrency is None else CappedArrivals(source, options.max_concurrency)


class Times:
    """Gives a request that waits for nobody its time. Mutable (the rate's generator); one for each run."""

    def __init__(self, options: ReplayOptions, clock: str) -> None:
        self.scale = 1.0 if options.time_scale is None else options.time_scale
        self._round_seconds = options.round_seconds
        self._ticks = clock == "rounds"
        rate = options.request_rate
        self._rate = None if rate is None else rate_times(rate, options.burstiness, options.seed)

    def due(self, request: Request) -> Due:
        at = request.arrival_s if self._rate is None else next(self._rate)
        if self._ticks:
            if self._rate is None and self.scale == 1.0:
                tick = due_round(request, self._round_seconds) - 1
            elif self._rate is None and request.arrival_round is not None:
                tick = int((request.arrival_round - 1) * self.scale)
            else:
                rounds = (at or 0.0) * self.scale / self._round_seconds
                within(rounds, f"request {request.id} would arrive before round {rounds:g}")
                tick = int((at or 0.0) * self.scale // self._round_seconds)
            within(tick, f"request {request.id} would arrive before round {tick:g}")
            return Due(tick, float(tick), request, float(tick) if request.arrival_s is None else request.arrival_s)
        if at is None:
            raise BenchctlError(
                f"request {request.id} has no arrival_s and no parent to wait for",
                where=f"line {request.line}",
                fix="give it arrival_s, or pass --arrivals session, or --request-rate R (inf: all at once)",
            )
        if self._rate is None:
            at *= self.scale
        within(at, f"request {request.id} would arrive at {at:g} s")
        return Due(at, at, request, at)

    def after(self, seconds: float) -> float:
        """A gap of the trace on the run's clock."""
        gap = seconds * self.scale / (self._round_seconds if self._ticks else 1.0)
        within(gap, f"a think time would be {gap:g} {'rounds' if self._ticks else 's'}")
        return gap

    def position(self, at_s: float) -> float:
        within(at_s, f"a turn would arrive at {at_s:g}")
        return math.ceil(at_s) if self._ticks else at_s


def within(at: float, what: str) -> None:
    """Raises BenchctlError where a time, in seconds or rounds, is beyond MAX_AT."""
    if not at <= MAX_AT:
        raise BenchctlError(
            f"{what}, beyond {MAX_AT:g}",
            where="the arrivals",
            fix="a smaller --time-scale, a larger --speedup or --request-rate, or larger --round-seconds",
        )


def observed_s(request: Request) -> float:
    """How long the request took in production, seconds; 0 where its `observed` does not say so as a number."""
    value = (request.observed or {}).get("e2e_s")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        return 0.0
    return float(value)


def _sessions(trace: Trace, options: ReplayOptions, clock: str, times: Times, notes: list[str]) -> SessionArrivals:
    """Roots by their time, children by their parents. Reads the trace once beforehand, for who waits for whom."""
    rows: dict[str, int] = {}
    began: dict[int, tuple[float | None, float]] = {}  # row -> (arrival_s, observed end to end, seconds)
    waiting: set[int] = set()
    children: list[tuple[int, float, tuple[int, ...]]] = []
    guessed = 0
    for request in requests_of(trace, options, clock):
        rows[request.id] = request.index
        began[request.index] = (request.arrival_s, observed_s(request))
        parents = tuple(rows[parent] for parent in request.parents if parent in rows)
        if not parents:
            continue
        think_s = request.think_s
        if think_s is None:
            arrival_s, (parent_s, e2e_s) = request.arrival_s, began[parents[-1]]
            gap = 0.0 if arrival_s is None or parent_s is None else max(arrival_s - parent_s, 0.0)
            think_s = max(gap - e2e_s, 0.0)
            guessed += e2e_s == 0.0
        waiting.add(request.index)
        children.append((request.index, times.after(think_s), parents))
    if guessed:
        notes.append(
            f"{guessed} turns have neither think_s nor an observed latency of their parent: the gap between arrivals is taken "
            "as the think time, which is too long by the parent's latency"
        )
    roots = (times.due(r) for r in requests_of(trace, options, clock) if r.index not in waiting)
    return SessionArrivals(roots, children, trace.by_row, times.position)


def recorded_times(run: Run) -> dict[int, RoundTimes]:
    """The four times of each round of an earlier run."""
    rounds = run.scan("rounds").select("round", "t_start_s", "t_scheduled_s", "t_executed_s", "t_end_s").collect()
    return {row[0]: row[1:] for row in rounds.iter_rows()}


def recorded_admissions(run: Run) -> dict[int, float]:
    """Round -> the latest time at which a request was handed over, or refused, before it."""
    refused = (
        run.scan("decisions")
        .filter(pl.col("kind") == "reject")
        .join(run.scan("requests").select("request", "arrival_s"), on="request")
        .select("round", pl.col("arrival_s").alias("at"))
    )
    admitted = run.scan("admissions").select(pl.col("admitted_round").alias("round"), pl.col("admitted_s").alias("at"))
    return dict(pl.concat([admitted, refused]).group_by("round").agg(pl.col("at").max()).collect().iter_rows())


def recorded_arrivals(trace: Trace, run: Run) -> OpenArrivals:
    """The requests of an earlier run before the same rounds, in the same order, those that it refused among them."""
    ticks = run.clock == "rounds"
    seen = run.read("admissions").select("admitted_round", "arrival_s", "request", "admitted_s").rows()
    refused = (
        run.scan("decisions")
        .filter(pl.col("kind") == "reject")
        .select("round", "order", "request")
        .join(run.scan("requests").select("request", "arrival_s"), on="request")
        .sort("round", "order")
        .select("round", "arrival_s", "request", pl.lit(None, dtype=pl.Float64))
        .collect()
        .rows()
    )
    entries = _merge(seen, refused)

    def due() -> Iterator[Due]:
        for number, arrival_s, row, admitted_s in entries:
            request = trace.by_row(row)
            tie_s = request.arrival_s if ticks and request.arrival_s is not None else arrival_s
            yield Due(number - 1, arrival_s, request, tie_s, admitted_s)

    return OpenArrivals(due())


Entry = tuple[int, float, int, float | None]  # round, arrival_s, row, admitted_s


def _merge(seen: list[Entry], refused: list[Entry]) -> list[Entry]:
    """Both in their own order, put together by (round, arrival, row): they came in one stream."""
    out, at = [], 0
    for entry in seen:
        while at < len(refused) and refused[at][:3] < entry[:3]:
            out.append(refused[at])
            at += 1
        out.append(entry)
    return out + refused[at:]
