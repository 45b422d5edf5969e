"""Several runs beside each other: which settings differ, and how the main figures do, with a direction.

Made from manifests and summaries; a run that replayed another trace is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reports.compare import BETTER, ONE_MEASURED, OTHER, SAME, UNKNOWN, WORSE, MetricRow, judge_runs
from reports.compare_head import is_deterministic
from reports.numbers import change, number, share, unequal
from reports.run import Run
from reports.summary import Summary
from reports.terminal import METRIC_NAMES
from reports.units import whole
from reports.verdict import highest_percentile, latency, unit_for
from traces.errors import BenchctlError

SILENT = ("from_run", "num_repeats", "seed", "records")  # of `config`: no figure of a page depends on them
FACTS = ("policy", "engine", "model", "dtype", "device", "clock", "arrivals", "records", "load", "cache", "benchctl")


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting in which the runs differ. `values` in the order of the runs, text."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """One figure of every run. `best`: place of the better run, None where `compare` would not call one better.

    `bars`: each value's share of the largest; `change`: the second against the first, where there are two.
    `verdict`: what stands beside it: which way is better, or why none is.
    """

    label: str
    unit: str
    values: tuple[str, ...]
    bars: tuple[float, ...]
    change: str
    best: int | None
    verdict: str


def refuse_other_traces(runs: Sequence[Run], names: Sequence[str]) -> None:
    """Raises BenchctlError where the runs did not replay the same trace."""
    keys = []
    for run in runs:
        trace = run.manifest.get("trace")
        keys.append((trace.get("sha256") or trace.get("name")) if isinstance(trace, dict) else trace)
    known = {str(key) for key in keys if key is not None}
    if len(known) > 1:
        each = ", ".join(f"{name}: {_trace_text(run)}" for run, name in zip(runs, names, strict=True))
        raise BenchctlError(
            f"the runs replayed different traces: {each}",
            fix="report on runs of one trace together, and write a page for each trace",
        )


def _trace_text(run: Run) -> str:
    trace = run.manifest.get("trace")
    if not isinstance(trace, dict):
        return str(trace)
    return f"{trace.get('name') or trace.get('path') or '?'} (sha256 {str(trace.get('sha256') or '?')[:12]})"


def plain(value: Any) -> str:
    """A setting's value as one would say it."""
    if value is None or value == "":
        return "not set"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return ", ".join(plain(part) for part in value) or "none"
    if isinstance(value, dict):
        return str(value.get("name") or ", ".join(f"{key} {plain(part)}" for key, part in value.items()) or "none")
    return str(value)


def differing_settings(runs: Sequence[Run]) -> list[Setting]:
    """Every setting and fact of the manifests in which the runs differ; one that not all policies have is `does not apply`."""
    if len(runs) < 2:
        return []
    out: list[Setting] = []

    def add(name: str, values: Sequence[str]) -> None:
        if len(set(values)) > 1 and all(setting.name != name for setting in out):
            out.append(Setting(name, tuple(values)))

    add("scheduler", [run.scheduler for run in runs])
    for fact in FACTS:
        add(fact, [plain(run.manifest.get(fact)) for run in runs])
    usable = [(run.usable_blocks or 0) * (run.block_size or 0) for run in runs]
    add("usable KV tokens", [plain(tokens) for tokens in usable])
    hardware = [run.manifest.get("hardware") for run in runs]
    add("hardware", [_machine(one) for one in hardware])
    configs = [run.manifest.get("config") for run in runs]
    settings = [config if isinstance(config, dict) else {} for config in configs]
    for name in dict.fromkeys(key for config in settings for key in config):
        if name in SILENT:
            continue
        values = [plain(_value(config[name])) if name in config else "does not apply" for config in settings]
        if name == "num_blocks":
            values = [
                f"{value}, one of them the null block" if has_null_block(run) else value
                for run, value in zip(runs, values, strict=True)
            ]
        # What one policy alone has, and leaves at its default, is no difference of the runs but of the policies.
        if "does not apply" in values and all(
            _source(config[name]) == "default" for config in settings if name in config
        ):
            continue
        add(name, values)
    return out


def has_null_block(run: Run) -> bool:
    """Whether `num_blocks` counts a block that no request can hold, vLLM's null block."""
    total = run.setting("num_blocks")
    return isinstance(total, int) and run.usable_blocks == total - 1


def _value(entry: Any) -> Any:
    return entry["value"] if isinstance(entry, dict) and "value" in entry else entry


def _source(entry: Any) -> str:
    return str(entry.get("source", "")) if isinstance(entry, dict) else ""


def _machine(hardware: Any) -> str:
    if not isinstance(hardware, dict):
        return "not known"
    gpu = hardware.get("gpu")
    parts = (hardware.get("cpu"), hardware.get("cores"), gpu.get("name") if isinstance(gpu, dict) else None)
    return ", ".join(str(part) for part in parts if part)


LOWER, HIGHER, NEITHER = "lower is better", "higher is better", ""


def judge(runs: Sequence[Run], summaries: Sequence[Summary]) -> dict[str, MetricRow] | None:
    """What `compare` says of two runs, key -> row; None for more than two."""
    return judge_runs(runs[0], runs[1], summaries) if len(runs) == 2 else None


def single_measured(runs: Sequence[Run]) -> bool:
    """Whether times or decisions hang on a clock that measures, so that a difference of single runs proves little."""
    return not all(is_deterministic(run) for run in runs)


def deltas(summaries: Sequence[Summary], judged: dict[str, MetricRow] | None) -> list[Delta]:
    """The figures that decide between runs, at the highest percentile that all of them carry.

    `judged`: of two runs (`judge`). Of more none is called better: `compare` takes two sides, each with its repeats.
    """
    ours = [summary["benchctl"] for summary in summaries]
    unit = unit_for(summaries)
    out: list[Delta] = []

    def add(
        label: str, in_unit: str, values: Sequence[float | int | None], key: str, wanted: str, as_share: bool = False
    ) -> None:
        known = [value for value in values if value is not None]
        if len(known) < len(values) or not any(known):
            return
        most = max(abs(value) for value in known)
        text = tuple(share(value) if as_share else number(value) for value in values)
        best, verdict = _best(judged, key, wanted)
        bars = tuple(abs(value) / most for value in known)
        out.append(Delta(label, in_unit, text, bars, change(known, as_share), best, verdict))

    def times(values: Sequence[float | None]) -> list[float | int | None]:
        return [unit.of_ms(value) for value in values]

    for metric in ("ttft", "tpot", "itl", "e2el"):
        percents = ["p50", *([high] if (high := highest_percentile(summaries, metric)) not in (None, "p50") else [])]
        for percent in percents:
            values = times([latency(s, metric, str(percent)) for s in summaries])
            add(f"{METRIC_NAMES[metric]} {percent}", unit.latency, values, f"{metric}.{percent}", LOWER)
    for phase in ("queue", "stalled", "preempted"):
        means = times([o["latency"][phase]["mean_ms"] for o in ours])
        add(f"{phase} time of a request, mean", unit.latency, means, f"{phase}.mean", LOWER)
    add(
        "output throughput",
        f"tokens/{unit.per_second}",
        [s["output_throughput"] for s in summaries],
        "output_throughput",
        HIGHER,
    )
    if any(o["slo"] for o in ours):
        goodput = [s["request_goodput"] for s in summaries]
        add("goodput", f"requests/{unit.per_second}", goodput, "request_goodput", HIGHER)
        attained = [o["slo"]["attainment"] if o["slo"] else None for o in ours]
        add("SLO attainment", "", attained, "request_goodput", HIGHER, as_share=True)
    spans = [whole(s["duration"]) if unit.ticks else s["duration"] for s in summaries]
    add("duration", unit.span, spans, "duration", LOWER)
    add("rounds", "", [o["rounds"]["rounds"]["total"] for o in ours], "rounds.total", NEITHER)
    add("mixed rounds", "", [o["rounds"]["mixed_share"] for o in ours], "rounds.mixed", NEITHER, as_share=True)
    add("preemptions", "", [o["counters"]["preemptions"] for o in ours], "preemptions", LOWER)
    add("recomputed tokens", "", [o["counters"]["recomputed_tokens"] for o in ours], "recomputed_tokens", LOWER)
    sizes = [o["run"]["block_size"] for o in ours]
    evicted = [o["counters"]["evictions"] for o in ours]
    if unequal(sizes):  # blocks of unlike size are no common measure
        evicted = [count * size for count, size in zip(evicted, sizes, strict=True)]
        add("evictions", "tokens", evicted, "", LOWER)
    else:
        add("evictions", "blocks", evicted, "evictions", LOWER)
    add("prefix hit rate", "", [o["prefix_cache"]["hit_rate"] for o in ours], "hit_rate", HIGHER, as_share=True)
    add("refused or unfinished", "requests", [s["failed"] for s in summaries], "finished", LOWER)
    return out


def _best(judged: dict[str, MetricRow] | None, key: str, wanted: str) -> tuple[int | None, str]:
    """The better of two runs, and the words beside it."""
    if judged is None:
        return None, wanted
    row = judged.get(key)
    if row is None:
        return None, "not judged" if key else "not judged: counted in blocks of unequal size"
    if row.verdict in (BETTER, WORSE):
        return (1 if row.verdict == BETTER else 0), wanted
    if row.verdict == SAME:
        return None, f"no difference{f': {row.why}' if row.why else ''}"
    if row.verdict == OTHER:
        return None, "neither"
    assert row.verdict == UNKNOWN, row.verdict
    few = row.why.endswith("too few for an interval")
    return None, "can't tell" + (
        " beyond these few requests" if few else f": {SHORTER.get(row.why.split(':')[0], row.why)}"
    )


# Why compare can't tell, for a narrow column; the page says it in full above the table.
SHORTER = {
    ONE_MEASURED: "one measured run of each",
    f"{ONE_MEASURED}, and timing alone may move a count": "one measured run of each; timing alone may move a count",
    "the interval holds 0": "too few requests for so small a difference",
}
