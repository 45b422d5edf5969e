"""The terminal summary and the round table, as rich renderables. Needs neither plotly nor jinja2; reads at 80 columns, and without colour."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from reports.findings import Finding, merge
from reports.numbers import NOT_MEASURED as NOT_MEASURED
from reports.numbers import number as number
from reports.numbers import share as share
from reports.rounds import round_texts
from reports.run import Run
from reports.summary import DEFAULT_METRICS, Summary
from reports.units import unit_of, whole

MAX_ROUNDS = 200
METRIC_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}
MARKS = {"error": ("✗", "red"), "warn": ("!", "yellow"), "info": ("·", "dim")}


def summary_table(
    summaries: Sequence[Summary], *, percentile_metrics: Sequence[str] = DEFAULT_METRICS
) -> RenderableType:
    """Runs side by side, one column each, with what a reader has to know below.

    A percentile that its n does not carry is a dash; what is a dash in every run has no row.
    """
    ours = [summary["benchctl"] for summary in summaries]
    unit = unit_of(entry["run"]["clock"] for entry in ours)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False, header_style="bold")
    table.add_column("")
    for name in column_names([entry["run"] for entry in ours]):
        table.add_column(escape(name), justify="right", overflow="fold")

    def row(label: str, cell: Callable[[Summary, dict[str, Any]], str]) -> bool:
        """Whether any run has it."""
        cells = [cell(summary, entry) for summary, entry in zip(summaries, ours, strict=True)]
        known = any(text != NOT_MEASURED for text in cells)
        if known:
            table.add_row(label, *cells)
        return known

    def section(title: str) -> None:
        table.add_row(f"[bold]{title}[/bold]")

    row("status", lambda s, b: str(b["run"]["status"]))
    row(f"duration, {unit.span}", lambda s, b: number(whole(s["duration"])) if unit.ticks else number(s["duration"], 3))
    section("requests")
    for status in ("finished", "rejected", "unfinished"):
        row(f"  {status}", lambda s, b, status=status: number(b["requests"][status]))  # type: ignore[misc]
    percents = _percents(ours)
    for metric in percentile_metrics:
        section(f"{METRIC_NAMES.get(metric, metric)}, {unit.latency}")
        few = [
            percent
            for percent in percents
            if not row(f"  {percent}", lambda s, b, m=metric, p=percent: unit.figure(b["latency"][m][f"{p}_ms"]))  # type: ignore[misc]
        ]
        label = f"  n (too few for {', '.join(few)})" if few else "  n"
        row(label, lambda s, b, m=metric: number(b["latency"][m]["n"]))  # type: ignore[misc]
    section("throughput")
    row(f"  requests/{unit.per_second}", lambda s, b: number(s["request_throughput"]))
    row(f"  output tokens/{unit.per_second}", lambda s, b: number(s["output_throughput"]))
    row(f"  total tokens/{unit.per_second}", lambda s, b: number(s["total_token_throughput"]))
    row(
        f"  output tokens/{unit.per_second}, steady",
        lambda s, b: number(b["steady"]["output_throughput"] if b["steady"] else None),
    )
    row(
        f"  steady window, {unit.span}",
        lambda s, b: (
            f"{unit.figure(b['steady']['begin_s'] * 1000) if unit.ticks else number(b['steady']['begin_s'])}–{unit.figure(b['steady']['end_s'] * 1000) if unit.ticks else number(b['steady']['end_s'])}"
            if b["steady"]
            else NOT_MEASURED
        ),
    )
    row("  peak concurrency", lambda s, b: number(s["max_concurrent_requests"]))
    if any(entry["slo"] for entry in ours):
        row(f"  goodput, requests/{unit.per_second}", lambda s, b: number(s["request_goodput"]))
        row("  SLO attainment", lambda s, b: share(b["slo"]["attainment"] if b["slo"] else None))
    section("rounds")
    for kind in ("total", "prefill", "decode", "mixed", "empty"):
        row(f"  {kind}", lambda s, b, k=kind: number(b["rounds"]["rounds"][k]))  # type: ignore[misc]
    row("  tokens a round, mean", lambda s, b: number(b["rounds"]["tokens_per_round"]["mean"]))
    row("  budget use", lambda s, b: share(b["rounds"]["budget_use"]))
    section("memory")
    row(
        "  peak blocks of usable",
        lambda s, b: f"{number(b['counters']['peak_blocks'])} of {number(b['run']['usable_blocks'])}",
    )
    row("  preemptions", lambda s, b: number(b["counters"]["preemptions"]))
    row("  recomputed tokens", lambda s, b: number(b["counters"]["recomputed_tokens"]))
    row("  evictions", lambda s, b: number(b["counters"]["evictions"]))
    row("  prefix hit rate", lambda s, b: share(b["prefix_cache"]["hit_rate"]))
    row("  its upper bound", lambda s, b: share((b["prefix_cache"]["upper_bound"] or {}).get("hit_rate")))
    for loop in ("waiting", "running"):
        reasons = sorted(
            {reason for entry in ours for reason in entry["stops"][loop]},
            key=lambda r: -max(entry["stops"][loop].get(r, 0) for entry in ours),
        )
        if reasons:
            section(f"{loop} loop stopped, rounds")
        for reason in reasons:
            row(f"  {escape(reason)}", lambda s, b, p=loop, r=reason: number(b["stops"][p].get(r, 0)))  # type: ignore[misc]
    notes = check_lines([entry["checks"] for entry in ours], column_names([entry["run"] for entry in ours]))
    return Group(table, *([Text()] if notes else []), *notes)


def check_lines(found: Sequence[Sequence[dict[str, str]]], names: Sequence[str]) -> list[Text]:
    """One paragraph a finding: mark, runs it is about (where there are several), what, evidence, cure."""
    lines = []
    for finding in merge(found, names):
        mark, style = MARKS[finding.level]
        line = Text(f"{mark} ", style=style)
        line.append(_whose(finding, names), style="default")
        line.append(finding.what, style="bold default")
        line.append(f": {finding.evidence}. {_capital(finding.cure)}.", style="default")
        lines.append(line)
    return lines


def check_texts(found: Sequence[Sequence[dict[str, str]]], names: Sequence[str]) -> list[tuple[str, str]]:
    """(level, the finding as one text), the gravest first."""
    return [(f.level, f"{_whose(f, names)}{f.what}: {f.evidence}. {_capital(f.cure)}.") for f in merge(found, names)]


def _whose(finding: Finding, names: Sequence[str]) -> str:
    return f"{', '.join(finding.runs)}: " if len(names) > 1 else ""


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def advice(found: Sequence[Sequence[dict[str, str]]], names: Sequence[str]) -> Text | None:
    """One line: what to do about the gravest finding. None where nothing is graver than a note."""
    grave = [finding for finding in merge(found, names) if finding.level in ("error", "warn")]
    if not grave:
        return None
    line = Text("advice  ", style="bold")
    line.append(f"{_whose(grave[0], names)}{grave[0].what}: {grave[0].cure}.")
    return line


TICKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 46


def sparkline(values: Sequence[float], most: float, width: int = SPARK_WIDTH, keep: Callable[..., float] = max) -> str:
    """At most `width` columns; each shows the `keep` (max or min) of its values, so that a spike of one round is seen."""
    if not values:
        return ""
    columns = min(width, len(values))
    edges = [len(values) * k // columns for k in range(columns + 1)]
    parts = [keep(values[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    top = most or 1
    return "".join(TICKS[min(int(part / top * (len(TICKS) - 1) + 0.5), len(TICKS) - 1)] for part in parts)


def sparklines(runs: Sequence[Run]) -> RenderableType:
    """Over the rounds of each run: the fewest free blocks, the largest batch, the longest waiting queue, each with its range."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", overflow="fold")
    names = column_names([{"name": run.name, "path": run.shown} for run in runs])
    for run, name in zip(runs, names, strict=True):
        rounds = run.read("rounds").sort("round")
        if not rounds.height:
            continue
        if len(runs) > 1:
            table.add_row(f"[bold]{escape(name)}[/bold]")
        batch = (rounds["prefill_tokens"] + rounds["decode_tokens"]).to_list()
        free, waiting = rounds["free_blocks_end"].to_list(), rounds["waiting"].to_list()
        total = run.usable_blocks or max(free)
        table.add_row("  free blocks", sparkline(free, total, keep=min), f"{min(free):,}–{max(free):,} of {total:,}")
        table.add_row("  batch, tokens", sparkline(batch, max(batch)), f"up to {max(batch):,}")
        if max(waiting):
            table.add_row("  waiting", sparkline(waiting, max(waiting)), f"up to {max(waiting):,}")
    return table


def column_names(identities: Sequence[dict[str, Any]]) -> list[str]:
    """Short names that tell the runs apart: the folder, with its parent where folders are called the same."""
    names = [str(identity["name"]) for identity in identities]
    if len(set(names)) == len(names):
        return names
    return ["/".join(str(identity["path"]).rstrip("/").split("/")[-2:]) for identity in identities]


def _percents(ours: Sequence[dict[str, Any]]) -> list[str]:
    keys = ours[0]["latency"]["ttft"] if ours else {}
    return [key.removesuffix("_ms") for key in keys if key.startswith("p") and key.endswith("_ms")]


def round_table(run: Run, max_rounds: int = MAX_ROUNDS) -> RenderableType:
    """Round, waiting before, running before, batch, why it stopped, free blocks: a row for each recorded round, `max_rounds` at most."""
    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        show_edge=False,
        header_style="bold",
        title=f"{escape(run.name)}: rounds",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("round", justify="right", no_wrap=True)
    table.add_column("waiting\nbefore", ratio=3)
    table.add_column("running\nbefore", ratio=3)
    table.add_column("batch", ratio=6)
    table.add_column("why it stopped", ratio=9)
    table.add_column("free blocks", justify="left", min_width=10)
    total = run.read("rounds").height
    numbers = run.read("rounds")["round"].to_list()[:max_rounds]
    for text in round_texts(run, numbers[-1] if numbers else 0):
        table.add_row(
            str(text.round), escape(text.waiting), escape(text.running), escape(text.batch), escape(text.why), text.free
        )
    if total > max_rounds:
        return Group(
            table,
            Text(
                f"{total - max_rounds:,} more rounds are recorded; the report's page shows more of them.", style="dim"
            ),
        )
    return table
