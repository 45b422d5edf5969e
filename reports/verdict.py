"""The head of the page in words and cards: what happened, how runs differ, and what it came from. Made from summaries alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reports.spikes import SlowStart, Spike
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


def sentences(
    summaries: Sequence[Summary],
    names: Sequence[str],
    slow: Sequence[SlowStart | None] = (),
    longest: Sequence[Sequence[Spike]] = (),
) -> list[str]:
    """Up to three: what finished and how fast; first tokens and what held them up; gaps between tokens and what made them.

    `slow`, `longest`: for each run what its slowest first tokens waited for, and its longest gaps; without them no causes are given.
    """
    slow = list(slow) or [None] * len(summaries)
    longest = list(longest) or [[] for _ in summaries]
    out = [_finished(summaries, names)]
    first = [_compared(summaries, names, "ttft"), *_waits(summaries, names, slow)]
    gaps = [_compared(summaries, names, "itl"), *_gap_causes(summaries, names, longest)]
    for parts in (first, gaps):
        said = [part for part in parts if part]
        if said:
            out.append(_capital("; ".join(said)) + ".")
    return out


def _capital(text: str) -> str:
    """The sentence begins with a capital, unless with the name of a metric or a run."""
    return text[0].upper() + text[1:] if text.startswith(("under ", "running ", "both ")) else text


def _finished(summaries: Sequence[Summary], names: Sequence[str]) -> str:
    parts = []
    for summary, name in zip(summaries, names, strict=True):
        requests, slo = summary["benchctl"]["requests"], summary["benchctl"]["slo"]
        rate = summary["output_throughput"]
        speed = f", {number(rate)} output tokens/s" if rate is not None else ""
        met = f", {share(slo['attainment'])} of all within the SLOs" if slo and slo["attainment"] is not None else ""
        parts.append(
            f"{name} finished {requests['finished']:,} of {requests['total']:,} requests in {number(summary['duration'])} s{speed}{met}"
        )
    return "; ".join(parts) + "."


def _compared(summaries: Sequence[Summary], names: Sequence[str], metric: str) -> str | None:
    """One metric at the highest percentile that all carry: the value of one run, the difference of two, the order of more."""
    percent = highest_percentile(summaries, metric)
    if percent is None:
        return None
    title = f"{METRIC_NAMES[metric]} {percent}"
    if len(summaries) == 2:
        return _difference(summaries, names, metric)
    values = [latency(summary, metric, percent) or 0.0 for summary in summaries]
    if len(summaries) == 1:
        return f"{title} is {number(values[0])} ms"
    order = sorted(range(len(values)), key=values.__getitem__)
    return f"{title}, lowest first: " + ", ".join(f"{names[i]} {number(values[i])} ms" for i in order)


def _worst(summaries: Sequence[Summary], metric: str) -> int | None:
    """The run whose figure is the largest; None where they are equal."""
    percent = highest_percentile(summaries, metric)
    values = [latency(summary, metric, percent) or 0.0 for summary in summaries] if percent else []
    if not values or (len(values) > 1 and len(set(values)) == 1):
        return None
    return max(range(len(values)), key=values.__getitem__)


def _waits(summaries: Sequence[Summary], names: Sequence[str], slow: Sequence[SlowStart | None]) -> list[str]:
    """What held the first tokens up in the run where they came latest."""
    worst = _worst(summaries, "ttft")
    found = slow[worst] if worst is not None else None
    if worst is None or found is None:
        return []
    under = f" under {names[worst]}" if len(names) > 1 else ""
    text = f"the slowest {found.num_requests:,} first tokens{under} queued for {number(found.queue_s * 1000)} of their {number(found.ttft_s * 1000)} ms on average"
    if found.stops and found.queue_s > 0.2 * found.ttft_s:
        reason, rounds = found.stops[0]
        text += f", while admission stopped for {reason} in {share(rounds / found.num_rounds)} of the rounds that passed them by"
    return [text]


def _gap_causes(summaries: Sequence[Summary], names: Sequence[str], longest: Sequence[Sequence[Spike]]) -> list[str]:
    """What running requests paid, for each run, and the round that made the longest gap of the worst one."""
    out = []
    for summary, name in zip(summaries, names, strict=True):
        costs = _costs(summary)
        if costs:
            out.append(f"under {name} " + " and ".join(costs) if len(names) > 1 else " and ".join(costs))
    tops = [(spikes[0].gap_s, place) for place, spikes in enumerate(longest) if spikes]
    if tops:
        gap, place = max(tops)
        spike = longest[place][0]
        under = f" under {names[place]}" if len(names) > 1 else ""
        out.append(
            f"the longest gap{under}, {number(gap * 1000)} ms, is the work of round {spike.round:,}: {spike.why}"
        )
    return out


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


def _costs(summary: Summary) -> list[str]:
    ours = summary["benchctl"]
    parts = []
    spread, whole = ours["latency"]["stalled"], ours["latency"]["e2el"]
    if spread["n"] and spread["mean_ms"] >= WORTH_SAYING * whole["mean_ms"] > 0:
        total = spread["mean_ms"] * spread["n"] / 1000
        parts.append(
            f"running requests stood still for {number(total)} s in all ({share(spread['mean_ms'] / whole['mean_ms'])} of all latency)"
        )
    counters = ours["counters"]
    if counters["preemptions"]:
        times = "one preemption" if counters["preemptions"] == 1 else f"{counters['preemptions']:,} preemptions"
        parts.append(f"{times} made {counters['recomputed_tokens']:,} tokens be computed again")
    return parts


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
