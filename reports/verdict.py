"""The head of the page in words and cards: what happened, how runs differ, and what it came from. Made from summaries alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reports.summary import Summary
from reports.terminal import METRIC_NAMES, NOT_MEASURED, number, share

WORTH_SAYING = 0.005  # share of all latency below which a phase is left out of the sentences
PERCENTS = ("p99", "p95", "p90", "p50")


@dataclass(frozen=True, slots=True)
class Card:
    """One figure of every run. `values` in the order of the runs, text."""

    title: str
    unit: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Line:
    """A row of the summary table; a heading where `values` is empty. `change`: second run against the first, where there are two."""

    label: str
    values: tuple[str, ...] = ()
    change: str = ""


def highest_percentile(summaries: Sequence[Summary], metric: str) -> str | None:
    """The highest percentile that every run's samples carry."""
    for percent in PERCENTS:
        if all(summary["benchctl"]["latency"][metric].get(f"{percent}_ms") is not None for summary in summaries):
            return percent
    return None


def latency(summary: Summary, metric: str, stat: str) -> float | None:
    value = summary["benchctl"]["latency"][metric].get(f"{stat}_ms")
    return None if value is None else float(value)


def sentences(summaries: Sequence[Summary], names: Sequence[str]) -> list[str]:
    """What finished and how fast; where latency differs; what the scheduler paid."""
    out = [_finished(summaries, names)]
    if len(summaries) == 2:
        differences = [text for metric in ("ttft", "itl") if (text := _difference(summaries, names, metric))]
        if differences:
            out.append("; ".join(differences) + ".")
    else:
        for summary, name in zip(summaries, names, strict=True):
            parts = [
                f"{METRIC_NAMES[m]} {p} {number(latency(summary, m, p))} ms"
                for m in ("ttft", "itl")
                if (p := highest_percentile([summary], m))
            ]
            if parts:
                out.append(f"{name}: {', '.join(parts)}.")
    costs = [text for summary, name in zip(summaries, names, strict=True) if (text := _costs(summary, name))]
    return out + costs


def _finished(summaries: Sequence[Summary], names: Sequence[str]) -> str:
    parts = []
    for summary, name in zip(summaries, names, strict=True):
        requests = summary["benchctl"]["requests"]
        rate = summary["output_throughput"]
        speed = f", {number(rate)} output tokens/s" if rate is not None else ""
        parts.append(
            f"{name} finished {requests['finished']:,} of {requests['total']:,} requests in {number(summary['duration'])} s{speed}"
        )
    return "; ".join(parts) + "."


def _difference(summaries: Sequence[Summary], names: Sequence[str], metric: str) -> str | None:
    percent = highest_percentile(summaries, metric)
    if percent is None:
        return None
    values = [latency(summary, metric, percent) or 0.0 for summary in summaries]
    title = f"{METRIC_NAMES[metric]} {percent}"
    if values[0] == values[1]:
        return f"{title} is the same, {number(values[0])} ms"
    low = 0 if values[0] < values[1] else 1
    by = (
        f"{values[1 - low] / values[low]:.1f} times"
        if values[low] > 0 and values[1 - low] >= 2 * values[low]
        else f"{1 - values[low] / values[1 - low]:.0%}"
    )
    return f"{title} is {by} lower under {names[low]}: {number(values[low])} ms against {number(values[1 - low])}"


def _costs(summary: Summary, name: str) -> str | None:
    ours = summary["benchctl"]
    parts = []
    for phase, words in (
        ("stalled", "running requests stood still for"),
        ("preempted", "preempted requests were without blocks for"),
    ):
        spread, whole = ours["latency"][phase], ours["latency"]["e2el"]
        if spread["n"] and spread["mean_ms"] >= WORTH_SAYING * whole["mean_ms"] > 0:
            total = spread["mean_ms"] * spread["n"] / 1000
            parts.append(
                f"{words} {number(total)} s in all ({share(spread['mean_ms'] / whole['mean_ms'])} of all latency)"
            )
    counters = ours["counters"]
    if counters["preemptions"]:
        times = "once" if counters["preemptions"] == 1 else f"{counters['preemptions']:,} times"
        parts.append(
            f"the scheduler preempted {times}, and {counters['recomputed_tokens']:,} tokens were computed again"
        )
    stops = {reason: count for reason, count in ours["stops"]["waiting"].items() if reason != "waiting_empty"}
    if stops:
        reason = max(stops, key=lambda key: stops[key])
        parts.append(
            f"admission stopped most often for {reason} ({stops[reason]:,} round{'' if stops[reason] == 1 else 's'})"
        )
    return f"Under {name}, " + "; ".join(parts) + "." if parts else None


def cards(summaries: Sequence[Summary]) -> list[Card]:
    """The main figures, with the highest percentile that all runs carry."""

    def card(title: str, unit: str, values: Sequence[str]) -> Card:
        return Card(title, unit, tuple(values))

    out = [card("Output throughput", "tokens/s", [number(s["output_throughput"]) for s in summaries])]
    for metric in ("ttft", "itl", "e2el"):
        percent = highest_percentile(summaries, metric)
        if percent:
            out.append(
                card(
                    f"{METRIC_NAMES[metric]} {percent}", "ms", [number(latency(s, metric, percent)) for s in summaries]
                )
            )
    ours = [summary["benchctl"] for summary in summaries]
    out.append(card("Preemptions", "", [number(o["counters"]["preemptions"]) for o in ours]))
    out.append(card("Prefix hit rate", "", [share(o["prefix_cache"]["hit_rate"]) for o in ours]))
    out.append(
        card(
            "Peak blocks",
            "of usable",
            [f"{number(o['counters']['peak_blocks'])} of {number(o['run']['usable_blocks'])}" for o in ours],
        )
    )
    out.append(card("Rounds", "", [number(o["rounds"]["rounds"]["total"]) for o in ours]))
    return out


def _change(values: Sequence[float | None]) -> str:
    if len(values) != 2:
        return ""
    first, second = values
    if first is None or second is None:
        return ""
    if first == second:
        return "same"
    if not first:
        return ""
    return f"{(second - first) / first:+.1%}"


def lines(summaries: Sequence[Summary]) -> list[Line]:
    """The summary table, every figure that the terminal prints and the split of latency."""
    ours = [summary["benchctl"] for summary in summaries]
    out: list[Line] = []

    def row(label: str, values: Sequence[float | int | None], as_share: bool = False) -> None:
        text = tuple(share(value) if as_share else number(value) for value in values)
        if any(value != NOT_MEASURED for value in text):
            out.append(Line(label, text, _change(values)))

    def of(*keys: str) -> list[Any]:
        found: list[Any] = list(ours)
        for key in keys:
            found = [entry.get(key) if isinstance(entry, dict) else None for entry in found]
        return found

    out.append(Line("Requests"))
    for status in ("finished", "rejected", "unfinished"):
        row(status, of("requests", status))
    row("duration, s", [s["duration"] for s in summaries])
    for metric in ("ttft", "tpot", "itl", "e2el"):
        out.append(Line(f"{METRIC_NAMES[metric]}, ms"))
        for stat in ("mean", "p50", "p90", "p95", "p99"):
            row(stat, of("latency", metric, f"{stat}_ms"))
        row("n", of("latency", metric, "n"))
    out.append(Line("Where a request's time went, mean ms"))
    for metric in ("queue", "prefill", "decode", "stalled", "preempted", "dispatch"):
        row(metric, of("latency", metric, "mean_ms"))
    out.append(Line("Throughput"))
    for key, label in (
        ("request_throughput", "requests/s"),
        ("output_throughput", "output tokens/s"),
        ("total_token_throughput", "total tokens/s"),
    ):
        row(label, [s[key] for s in summaries])
    row("output tokens/s, steady window", of("steady", "output_throughput"))
    row("steady window begins, s", of("steady", "begin_s"))
    row("steady window ends, s", of("steady", "end_s"))
    row("peak concurrency", [s["max_concurrent_requests"] for s in summaries])
    row("goodput, requests/s", [s["request_goodput"] for s in summaries])
    row("SLO attainment", of("slo", "attainment"), as_share=True)
    out.append(Line("Rounds"))
    for kind in ("total", "prefill", "decode", "mixed", "empty"):
        row(kind, of("rounds", "rounds", kind))
    row("tokens a round, mean", of("rounds", "tokens_per_round", "mean"))
    row("budget use", of("rounds", "budget_use"), as_share=True)
    out.append(Line("Memory and cache"))
    row("usable blocks", of("run", "usable_blocks"))
    row("block size, tokens", of("run", "block_size"))
    for key, label in (
        ("peak_blocks", "peak blocks"),
        ("preemptions", "preemptions"),
        ("discarded_tokens", "discarded tokens"),
        ("recomputed_tokens", "recomputed tokens"),
        ("evictions", "evictions"),
    ):
        row(label, of("counters", key))
    row("prefix tokens looked up", of("prefix_cache", "queried_tokens"))
    row("prefix tokens hit", of("prefix_cache", "hit_tokens"))
    row("prefix hit rate", of("prefix_cache", "hit_rate"), as_share=True)
    row("its upper bound", of("prefix_cache", "upper_bound", "hit_rate"), as_share=True)
    out.append(Line("Host time, s"))
    for key in ("schedule_s", "prepare_s", "device_s", "update_s", "record_s"):
        row(key.removesuffix("_s"), of("host", key))
    row("recorder's share", of("counters", "record_share"), as_share=True)
    return [line for i, line in enumerate(out) if line.values or (i + 1 < len(out) and out[i + 1].values)]
