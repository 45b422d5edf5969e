"""The head of the page in words and cards: what happened, how runs differ, and what it came from. Made from summaries alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reports.numbers import NOT_MEASURED, change, number, plural, share, unequal
from reports.summary import STEADY_LEAST, Summary
from reports.terminal import METRIC_NAMES
from reports.units import Unit, unit_of, whole

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


def unit_for(summaries: Sequence[Summary]) -> Unit:
    return unit_of(summary["benchctl"]["run"]["clock"] for summary in summaries)


def sentences(summaries: Sequence[Summary], names: Sequence[str], unsure: bool = False) -> list[str]:
    """Up to three: what finished and how fast; first tokens and their queue; gaps between tokens and what running requests paid.

    Why they are so is said by `answers`. `unsure`: single runs on a clock that measures, so that a repeat may turn a
    difference round; it is said.
    """
    unit = unit_for(summaries)
    out = [_finished(summaries, names, unit)]
    first = [_compared(summaries, names, "ttft", unit), _queues(summaries, names, unit)]
    gaps = [_compared(summaries, names, "itl", unit), *_paid(summaries, names, unit)]
    for parts in (first, gaps):
        said = [part for part in parts if part]
        if said:
            out.append(_capital("; ".join(said)) + ".")
    if unsure and len(summaries) > 1:
        out[-1] += (
            " Each policy ran once and its times were measured, so a repeat may turn differences round: replay with --num-repeats 5."
        )
    return out


def _capital(text: str) -> str:
    """The sentence begins with a capital, unless with the name of a metric or a run."""
    return text[0].upper() + text[1:] if text.startswith(("under ", "running ", "both ", "the ")) else text


def _finished(summaries: Sequence[Summary], names: Sequence[str], unit: Unit) -> str:
    if all(summary["benchctl"]["load"]["kept_up"] for summary in summaries):
        return _kept_up(summaries, names, unit)
    parts = []
    for summary, name in zip(summaries, names, strict=True):
        requests, slo = summary["benchctl"]["requests"], summary["benchctl"]["slo"]
        rate = summary["output_throughput"]
        speed = f", {number(rate)} output tokens a {'round' if unit.ticks else 'second'}" if rate is not None else ""
        met = f", {share(slo['attainment'])} of all within the SLOs" if slo and slo["attainment"] is not None else ""
        parts.append(
            f"{name} finished {requests['finished']:,} of {plural(requests['total'], 'request')} in {unit.duration(summary['duration'])}{speed}{met}"
        )
    return "; ".join(parts) + "."


def _kept_up(summaries: Sequence[Summary], names: Sequence[str], unit: Unit) -> str:
    """Of an open load that every run finished as it came: throughput is that of the arrivals, and says nothing of the policies."""
    load = summaries[0]["benchctl"]["load"]
    count = plural(summaries[0]["benchctl"]["requests"]["total"], "request")
    after = [unit.duration(summary["benchctl"]["load"]["after_last_arrival_s"]) for summary in summaries]
    when = after[0] if len(set(after)) == 1 else " and ".join(after)
    rates = [number(summary["output_throughput"]) for summary in summaries]
    per = "round" if unit.ticks else "second"
    who = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    slos = [(summary["benchctl"]["slo"] or {}).get("attainment") for summary in summaries]
    met = "" if None in slos else f" {' and '.join(share(one) for one in slos)} of all were within the SLOs."
    return (
        f"Arrivals set the throughput: {who} finished all {count} as fast as they came, {number(load['offered_request_rate'])} a {per} for "
        f"{unit.duration(load['arrivals_s'])}, and ended {when} after the last; {' and '.join(rates)} output tokens a {per} are no limit of "
        f"{'the policy' if len(names) == 1 else 'any policy'}.{met}"
    )


def _compared(summaries: Sequence[Summary], names: Sequence[str], metric: str, unit: Unit) -> str | None:
    """One metric at the highest percentile that all carry: the value of one run, the difference of two, the order of more."""
    percent = highest_percentile(summaries, metric)
    if percent is None:
        return None
    title = f"{METRIC_NAMES[metric]} {percent}"
    if len(summaries) == 2:
        return _difference(summaries, names, metric, unit)
    values = [latency(summary, metric, percent) or 0.0 for summary in summaries]
    if len(summaries) == 1:
        return f"{title} is {unit.said(values[0])}"
    order = sorted(range(len(values)), key=values.__getitem__)
    return f"{title}, lowest first: " + ", ".join(f"{names[i]} {unit.said(values[i])}" for i in order)


def _queues(summaries: Sequence[Summary], names: Sequence[str], unit: Unit) -> str | None:
    """Mean time in the queue of each run."""
    means = [summary["benchctl"]["latency"]["queue"]["mean_ms"] for summary in summaries]
    if any(mean is None for mean in means):
        return None
    if len(names) == 1:
        return f"requests queued for {unit.said(means[0])} on average"
    return "requests queued for " + ", ".join(
        f"{unit.said(mean)} {'on average ' if not place else ''}under {name}"
        for place, (mean, name) in enumerate(zip(means, names, strict=True))
    )


def _paid(summaries: Sequence[Summary], names: Sequence[str], unit: Unit) -> list[str]:
    """What running requests paid, for each run."""
    out = []
    for summary, name in zip(summaries, names, strict=True):
        costs = _costs(summary, unit)
        if costs:
            out.append(f"under {name} " + " and ".join(costs) if len(names) > 1 else " and ".join(costs))
    return out


def _difference(summaries: Sequence[Summary], names: Sequence[str], metric: str, unit: Unit) -> str | None:
    percent = highest_percentile(summaries, metric)
    if percent is None:
        return None
    values = [latency(summary, metric, percent) or 0.0 for summary in summaries]
    title = f"{METRIC_NAMES[metric]} {percent}"
    if unit.figure(values[0]) == unit.figure(values[1]):
        return f"{title} is the same, {unit.said(values[0])}"
    low = 0 if values[0] < values[1] else 1
    if values[low] > 0 and values[1 - low] >= 2 * values[low]:
        by = f"{values[1 - low] / values[low]:.1f} times"
    else:
        less = 1 - values[low] / values[1 - low]
        by = f"{less:.0%}" if less >= 0.01 else "less than 1%"
    return f"{title} is {by} lower under {names[low]}: {unit.said(values[low])} against {unit.figure(values[1 - low])}"


def _costs(summary: Summary, unit: Unit) -> list[str]:
    ours = summary["benchctl"]
    parts = []
    spread, everything = ours["latency"]["stalled"], ours["latency"]["e2el"]
    if spread["n"] and spread["mean_ms"] >= WORTH_SAYING * everything["mean_ms"] > 0:
        total = spread["mean_ms"] * spread["n"] / 1000
        parts.append(
            f"running requests stood still for {unit.duration(total)} in all ({share(spread['mean_ms'] / everything['mean_ms'])} of all latency)"
        )
    counters = ours["counters"]
    if counters["preemptions"]:
        times = "one preemption" if counters["preemptions"] == 1 else f"{counters['preemptions']:,} preemptions"
        parts.append(f"{times} made {plural(counters['recomputed_tokens'], 'token')} be computed again")
    return parts


def cards(summaries: Sequence[Summary]) -> list[Card]:
    """The main figures, with the highest percentile that all runs carry."""

    def card(title: str, unit: str, values: Sequence[str]) -> Card:
        return Card(title, unit, tuple(values))

    unit = unit_for(summaries)
    out = [card("Output throughput", f"tokens/{unit.per_second}", [number(s["output_throughput"]) for s in summaries])]
    for metric in ("ttft", "itl", "e2el"):
        percent = highest_percentile(summaries, metric)
        if percent:
            values = [unit.figure(latency(s, metric, percent)) for s in summaries]
            out.append(card(f"{METRIC_NAMES[metric]} {percent}", unit.latency, values))
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


def lines(summaries: Sequence[Summary]) -> list[Line]:
    """The summary table, every figure that the terminal prints and the split of latency."""
    ours = [summary["benchctl"] for summary in summaries]
    unit = unit_for(summaries)
    out: list[Line] = []

    def row(label: str, values: Sequence[float | int | None], as_share: bool = False, against: bool = True) -> None:
        text = tuple(share(value) if as_share else number(value) for value in values)
        if any(value != NOT_MEASURED for value in text):
            out.append(Line(label, text, change(values, as_share) if against else ""))

    def of(*keys: str) -> list[Any]:
        found: list[Any] = list(ours)
        for key in keys:
            found = [entry.get(key) if isinstance(entry, dict) else None for entry in found]
        return found

    out.append(Line("Requests"))
    for status in ("finished", "rejected", "unfinished"):
        row(status, of("requests", status))

    def spans(label: str, seconds: Sequence[float | None]) -> None:
        row(label, [whole(value) if unit.ticks and value is not None else value for value in seconds])

    spans(f"duration, {unit.span}", [s["duration"] for s in summaries])
    for metric in ("ttft", "tpot", "itl", "e2el"):
        out.append(Line(f"{METRIC_NAMES[metric]}, {unit.latency}"))
        for stat in ("mean", "p50", "p90", "p95", "p99"):
            row(stat, [unit.of_ms(value) for value in of("latency", metric, f"{stat}_ms")])
        row("n", of("latency", metric, "n"))
    out.append(Line(f"Where a request's time went, mean {unit.latency}"))
    for metric in ("queue", "prefill", "decode", "stalled", "preempted", "dispatch"):
        row(metric, [unit.of_ms(value) for value in of("latency", metric, "mean_ms")])
    out.append(Line("Throughput"))
    for key, label in (
        ("request_throughput", f"requests/{unit.per_second}"),
        ("output_throughput", f"output tokens/{unit.per_second}"),
        ("total_token_throughput", f"total tokens/{unit.per_second}"),
    ):
        row(label, [s[key] for s in summaries])
    if not any(of("steady")) and any(s["duration"] for s in summaries):
        least = f"under {STEADY_LEAST:.0%} of the run"
        out.append(Line("steady window", tuple(least for _ in summaries)))
    row(f"output tokens/{unit.per_second}, steady window", of("steady", "output_throughput"))
    spans(f"steady window begins, {unit.span}", of("steady", "begin_s"))
    spans(f"steady window ends, {unit.span}", of("steady", "end_s"))
    row("peak concurrency", [s["max_concurrent_requests"] for s in summaries])
    row(f"goodput, requests/{unit.per_second}", [s["request_goodput"] for s in summaries])
    row("SLO attainment", of("slo", "attainment"), as_share=True)
    out.append(Line("Rounds"))
    for kind in ("total", "prefill", "decode", "mixed", "empty"):
        row(kind, of("rounds", "rounds", kind))
    row("tokens a round, mean", of("rounds", "tokens_per_round", "mean"))
    row("budget use", of("rounds", "budget_use"), as_share=True)
    out.append(Line("Memory and cache"))
    sizes = of("run", "block_size")
    unlike = unequal(sizes)  # then blocks are no common measure, and what is evicted or held is said in tokens
    row("usable blocks", of("run", "usable_blocks"), against=not unlike)
    row("block size, tokens", of("run", "block_size"))
    for key, label in (
        ("peak_blocks", "peak blocks"),
        ("preemptions", "preemptions"),
        ("discarded_tokens", "discarded tokens"),
        ("recomputed_tokens", "recomputed tokens"),
        ("evictions", "evictions"),
    ):
        counts = of("counters", key)
        if unlike and key in ("peak_blocks", "evictions"):
            counts = [None if n is None else n * size for n, size in zip(counts, sizes, strict=True)]
            label += ", in tokens"
        row(label, counts)
    row("prefix tokens looked up", of("prefix_cache", "queried_tokens"))
    row("prefix tokens hit", of("prefix_cache", "hit_tokens"))
    row("prefix hit rate", of("prefix_cache", "hit_rate"), as_share=True)
    row("its upper bound", of("prefix_cache", "upper_bound", "hit_rate"), as_share=True)
    out.append(Line("Host time, s"))
    for key in ("schedule_s", "prepare_s", "device_s", "update_s", "record_s"):
        row(key.removesuffix("_s"), of("host", key))
    row("recorder's share", of("counters", "record_share"), as_share=True)
    return [line for i, line in enumerate(out) if line.values or (i + 1 < len(out) and out[i + 1].values)]
