"""Two sides of one trace in numbers: every metric of both, the difference, its interval, and whether it means anything.

Plain dataclasses for whoever prints or draws them. The sides and their settings come from `compare_head`, intervals from
`compare_stats`, decisions from `decision_diff` and `decision_work`. Differences are B - A throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from reports import metrics
from reports.compare_head import SettingDifference, Side, is_deterministic, setting_differences, warnings
from reports.compare_stats import (
    MIN_REQUESTS,
    Interval,
    Samples,
    bootstrap_differences,
    paired_interval,
    welch_interval,
)
from reports.decision_diff import DecisionDiff, diff_decisions
from reports.decision_work import WorkDiff, diff_work
from reports.request_diff import RequestDifference, diff_requests
from reports.run import Run
from reports.summary import Summary, summarize

PERCENTS = (50.0, 90.0, 95.0, 99.0)
LATENCIES = ("ttft", "tpot", "itl", "e2el")
MIN_EFFECT = 0.01  # relative; what is less is called the same
MIN_REPEATS = 3
COUNTED = ("rounds", "memory")  # groups of metrics
ONE_MEASURED = "one run of each on a clock that measures"

BETTER, WORSE, SAME, UNKNOWN, OTHER = "better", "worse", "same", "can't tell", "differs"


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric of both sides. Means over the repeats where a side has several.

    `better`: "lower", "higher" or None where neither is. `interval`: of the difference, None where samples do not allow one.
    `verdict`: B is better or worse, the same, differs (where neither direction is better), or can't tell; `why` says why not.
    """

    key: str  # ttft.p95, rounds.mixed, …
    group: str
    unit: str
    better: str | None
    a: float | int | None
    b: float | int | None
    interval: Interval | None
    verdict: str
    why: str

    @property
    def difference(self) -> float | int | None:
        return None if self.a is None or self.b is None else self.b - self.a

    @property
    def relative(self) -> float | None:
        """(B - A) / A; null where A is 0."""
        return None if self.difference is None or not self.a else self.difference / abs(self.a)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything `benchctl compare` says. `decisions` and `work` are None where a run kept no decision log."""

    a: Side
    b: Side
    settings: list[SettingDifference]
    warnings: list[str]
    metrics: list[MetricRow]
    decisions: DecisionDiff | None
    work: WorkDiff | None
    requests: list[RequestDifference]
    method: str


@dataclass(frozen=True, slots=True)
class Metric:
    """Where a metric stands in a summary. `sampled`: a statistic of requests, which the bootstrap can give an interval."""

    key: str
    group: str
    unit: str
    better: str | None
    of: Callable[[Summary], Any]
    sampled: bool = False


def _metrics(same_blocks: bool) -> list[Metric]:
    out: list[Metric] = []
    for name in LATENCIES:
        for stat in ("mean", *(f"p{percent:g}" for percent in PERCENTS)):
            key = f"{stat}_ms"
            out.append(Metric(f"{name}.{stat}", name, "ms", "lower", _path("latency", name, key), sampled=True))
    for name in ("queue", "stalled", "preempted"):
        out.append(Metric(f"{name}.mean", "waiting", "ms", "lower", _path("latency", name, "mean_ms"), sampled=True))
    for key, unit in (("request", "/s"), ("output", "tokens/s"), ("total_token", "tokens/s")):
        out.append(Metric(f"{key}_throughput", "throughput", unit, "higher", lambda s, k=key: s[f"{k}_throughput"]))  # type: ignore[misc]
    out.append(Metric("request_goodput", "throughput", "/s", "higher", lambda s: s["request_goodput"]))
    out.append(Metric("duration", "throughput", "s", "lower", lambda s: s["duration"]))
    out.append(Metric("finished", "throughput", "requests", "higher", _path("requests", "finished")))
    for kind in ("total", "prefill", "decode", "mixed", "empty"):
        out.append(Metric(f"rounds.{kind}", "rounds", "", None, _path("rounds", "rounds", kind)))
    out.append(Metric("rounds.tokens_mean", "rounds", "tokens", None, _path("rounds", "tokens_per_round", "mean")))
    out.append(Metric("rounds.budget_use", "rounds", "share", None, _path("rounds", "budget_use")))
    out.append(Metric("preemptions", "memory", "", "lower", _path("counters", "preemptions")))
    out.append(Metric("discarded_tokens", "memory", "tokens", "lower", _path("counters", "discarded_tokens")))
    out.append(Metric("recomputed_tokens", "memory", "tokens", "lower", _path("counters", "recomputed_tokens")))
    out.append(Metric("hit_tokens", "memory", "tokens", "higher", _path("prefix_cache", "hit_tokens")))
    out.append(Metric("hit_rate", "memory", "share", "higher", _path("prefix_cache", "hit_rate")))
    # Blocks of two sizes are no measure of each other. What is evicted is full, so its tokens are known; which size
    # keeps more to be evicted is another matter, so neither is called better.
    if same_blocks:
        out.append(Metric("evictions", "memory", "blocks", "lower", _path("counters", "evictions")))
    else:
        out.append(Metric("evictions", "memory", "tokens", None, _evicted_tokens))
    out.append(Metric("peak_use", "memory", "share", None, _peak_use))
    out.append(Metric("schedule_us", "host", "µs a round", "lower", _schedule_us))
    return out


def _path(*keys: str) -> Callable[[Summary], Any]:
    def of(summary: Summary) -> Any:
        found: Any = summary["benchctl"]
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        return found

    return of


def _peak_use(summary: Summary) -> float | None:
    ours = summary["benchctl"]
    peak, usable = ours["counters"]["peak_blocks"], ours["run"]["usable_blocks"]
    return None if peak is None or not usable else peak / usable


def _evicted_tokens(summary: Summary) -> int | None:
    ours = summary["benchctl"]
    blocks, size = ours["counters"]["evictions"], ours["run"]["block_size"]
    return None if blocks is None or size is None else blocks * size


def _schedule_us(summary: Summary) -> float | None:
    ours = summary["benchctl"]
    seconds, rounds = ours["host"]["schedule_s"], ours["rounds"]["rounds"]["total"]
    return None if seconds is None or not rounds else seconds / rounds * 1e6


def compare(a: Side, b: Side, *, min_effect: float = MIN_EFFECT, num_requests: int = 10) -> Comparison:
    """The whole comparison. `num_requests`: how many of the requests that differ most are listed."""
    settings = setting_differences(a.first, b.first)
    logged = all(side.first.has("batches") and side.first.has("decisions") for side in (a, b))
    judge = _Judge(a, b, min_effect)
    return Comparison(
        a=a,
        b=b,
        settings=settings,
        warnings=warnings(a, b, settings),
        metrics=judge.rows(),
        decisions=diff_decisions(a.first, b.first, (a.name, b.name)) if logged else None,
        work=diff_work(a.first, b.first) if logged else None,
        requests=diff_requests(a.first, b.first, num_requests),
        method=judge.method(),
    )


def judge_runs(a: Run, b: Run, summaries: Sequence[Summary]) -> dict[str, MetricRow]:
    """Every metric of one run each, key -> row: what `compare A B` says, for whoever has the summaries already."""
    judge = _Judge(Side("A", (a,)), Side("B", (b,)), MIN_EFFECT, summaries)
    return {row.key: row for row in judge.rows()}


class _Judge:
    """Puts every metric of the two sides side by side and says what the difference is worth."""

    def __init__(self, a: Side, b: Side, min_effect: float, known: Sequence[Summary] | None = None) -> None:
        self.a, self.b, self.min_effect = a, b, min_effect
        self.exact = all(is_deterministic(run) for side in (a, b) for run in side.runs)
        # Repeats that must be equal say nothing more than one of them.
        runs = ((a.first,), (b.first,)) if self.exact else (a.runs, b.runs)
        self.repeats = min(len(side) for side in runs)
        self.paired = len(runs[0]) == len(runs[1])
        if known is not None:  # of one run each, at PERCENTS
            self.summaries = [[summary] for summary in known]
        else:
            self.summaries = [[summarize(run, percentiles=PERCENTS) for run in side] for side in runs]
        self.same_blocks = a.first.block_size == b.first.block_size
        self._intervals: dict[str, Interval] | None = None
        self.num_common = 0

    def method(self) -> str:
        """How the intervals were made, in a sentence."""
        if self.repeats >= 2:
            how = f"{self.repeats} pairs of runs, Student's t" if self.paired else "runs of each side, Welch's t"
            return f"95% intervals over {how}; a verdict needs {MIN_REPEATS} repeats or more and {self.min_effect:.0%}"
        if self._intervals:
            return (
                f"95% intervals by a paired bootstrap over the {self.num_common} requests that both finished, in blocks of "
                f"neighbouring arrivals; a verdict on latency needs an interval without 0 and {self.min_effect:.0%}"
                + (
                    ""
                    if self.exact
                    else "; they were measured once on each side: what a repeat would change is not in it"
                )
            )
        return (
            f"no intervals: {self.num_common} requests finished on both sides, {MIN_REQUESTS} are needed to say more than what "
            "happened to these"
        )

    def rows(self) -> list[MetricRow]:
        if self.repeats < 2:
            self._intervals = self._bootstrap()
        return [row for metric in _metrics(self.same_blocks) if (row := self._row(metric)) is not None]

    def _row(self, metric: Metric) -> MetricRow | None:
        values = [[metric.of(summary) for summary in side] for side in self.summaries]
        if any(value is None for side in values for value in side):
            if all(value is None for side in values for value in side):
                return None
            first, second = (_mean([v for v in side if v is not None]) for side in values)
            why = "not measured, or too few samples, on one side"
            return MetricRow(metric.key, metric.group, metric.unit, metric.better, first, second, None, UNKNOWN, why)
        first, second = (_mean(side) for side in values)
        interval = self._interval(metric, values)
        verdict, why = self._verdict(metric, first, second, interval)
        return MetricRow(metric.key, metric.group, metric.unit, metric.better, first, second, interval, verdict, why)

    def _interval(self, metric: Metric, values: list[list[float]]) -> Interval | None:
        if self.repeats >= 2:
            return (paired_interval if self.paired else welch_interval)(values[0], values[1])
        return (self._intervals or {}).get(metric.key) if metric.sampled else None

    def _verdict(self, metric: Metric, a: Any, b: Any, interval: Interval | None) -> tuple[str, str]:
        if a is None or b is None:
            return UNKNOWN, "not measured"
        hosted = metric.group == "host"  # measured time, whatever the run's clock is
        if self.repeats < 2 and self.exact and not metric.sampled and not hosted:
            if a == b:
                return SAME, ""
            # Exact, and yet too little to call one better: a count without a better side just differs.
            if metric.better is not None and abs(b - a) < abs(a) * self.min_effect:
                return SAME, f"less than {self.min_effect:.0%}"
            return _direction(metric, b - a), ""
        of_requests = metric.sampled and interval is not None and not hosted
        if self.repeats < 2 and (hosted or not self.exact) and not of_requests:
            if a == b and not hosted:
                return SAME, ""
            if hosted and self.exact:
                return UNKNOWN, "host time is measured whatever the clock, and once on each side"
            # What was counted is so, but what is scheduled together hangs on when things were done.
            counted = metric.group in COUNTED or metric.key == "finished"
            why = f"{ONE_MEASURED}, and timing alone may move a count" if counted else ONE_MEASURED
            return UNKNOWN, f"{why}: {MIN_REPEATS} repeats are needed"
        if a == b and self.exact:
            return SAME, ""
        if interval is None:
            return UNKNOWN, f"{self.num_common} requests: too few for an interval"
        if self.repeats >= 2 and interval.n < MIN_REPEATS:
            return UNKNOWN, f"{interval.n} repeats: {MIN_REPEATS} are needed"
        small = abs(a) * self.min_effect
        if -small <= interval.low and interval.high <= small:
            return SAME, f"less than {self.min_effect:.0%}"
        if interval.low <= 0 <= interval.high:
            return UNKNOWN, "the interval holds 0"
        if abs(b - a) < small:
            return SAME, f"less than {self.min_effect:.0%}"
        return _direction(metric, b - a), ""

    def _bootstrap(self) -> dict[str, Interval]:
        """Intervals of every sampled metric, key -> interval in the metric's unit."""
        a, b = self.a.first, self.b.first
        frames = [
            metrics.per_request(run).select("request", "arrival_s", *metrics.PER_REQUEST).collect() for run in (a, b)
        ]
        common = frames[0].select("request", "arrival_s").join(frames[1].select("request"), on="request", how="semi")
        common = common.sort("arrival_s", "request").select("request").with_row_index("owner")
        self.num_common = common.height
        out: dict[str, Interval] = {}
        gaps = [metrics.itl(run).select("request", "itl").collect() for run in (a, b)]
        for name in (*LATENCIES, "queue", "stalled", "preempted"):
            tables = gaps if name == "itl" else frames
            first, second = (_samples(table, name, common) for table in tables)
            if len(first.values) == 0 or len(second.values) == 0:
                continue
            n = min(len(first.values), len(second.values))
            percents = [percent for percent in PERCENTS if metrics.carries(n, percent)]
            for stat, interval in bootstrap_differences(first, second, common.height, percents).items():
                out[f"{name}.{stat}"] = Interval(interval.low * 1000, interval.high * 1000, interval.n)
        return out


def _samples(frame: pl.DataFrame, name: str, common: pl.DataFrame) -> Samples:
    known = frame.select("request", name).drop_nulls().join(common, on="request", how="inner", maintain_order="left")
    return Samples(known[name].to_numpy().astype(np.float64), known["owner"].to_numpy().astype(np.int64))


def _direction(metric: Metric, difference: float) -> str:
    if metric.better is None:
        return OTHER
    return BETTER if (difference < 0) == (metric.better == "lower") else WORSE


def _mean(values: Sequence[Any]) -> Any:
    """The value itself where all are the same, so that counts stay whole."""
    if not values:
        return None
    return values[0] if all(value == values[0] for value in values) else sum(values) / len(values)
