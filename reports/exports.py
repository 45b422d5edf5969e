"""Runs as Markdown for a pull request, as JSON under vLLM bench's keys, and as CSV of their requests."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

import polars as pl

from reports import metrics
from reports.answers import answers
from reports.document import Element, Grid, Heading, Items, Text, to_markdown
from reports.page_pair import deltas, differing_settings, judge, refuse_other_traces, single_measured
from reports.page_view import trace_name
from reports.rounds import round_texts
from reports.run import Run
from reports.spikes import slow_starts, spikes
from reports.summary import Summary, summarize
from reports.terminal import check_texts
from reports.units import unit_of
from reports.verdict import lines, sentences
from reports.verified import verified

SHORT_RUN = 40  # rounds of a run whose round table is part of the Markdown


def markdown(runs: Sequence[Run], names: Sequence[str]) -> str:
    """Verdict, checks, what differs, the main figures, longest gaps, and how it was made."""
    refuse_other_traces(runs, names)
    return to_markdown(document(runs, names))


def document(runs: Sequence[Run], names: Sequence[str]) -> list[Element]:
    summaries = [summarize(run) for run in runs]
    longest = [spikes(run) for run in runs]
    out: list[Element] = [Heading(f"Replay of {trace_name(runs[0])}: {' and '.join(names)}")]
    out += [Text(sentence) for sentence in sentences(summaries, names, single_measured(runs))]
    slow = [slow_starts(run) for run in runs]
    for answer in answers(runs, names, summaries, slow, longest, [metrics.itl(run).collect() for run in runs]):
        out += [Heading(answer.question), *(Text(paragraph) for paragraph in answer.paragraphs)]
        if answer.rounds:
            which = [
                f"{names[p.place]}, round {p.round:,}" if len(names) > 1 else f"round {p.round:,}"
                for p in answer.rounds
            ]
            out.append(Items(tuple(f"{where}: {p.text}" for where, p in zip(which, answer.rounds, strict=True))))
    found = check_texts([summary["benchctl"]["checks"] for summary in summaries], names)
    if found:
        out += [Heading("Before you read the figures"), Items(tuple(f"{level}: {text}" for level, text in found))]
    settings = differing_settings(runs)
    if settings:
        rows = tuple((setting.name, *setting.values) for setting in settings)
        out += [Heading("Settings that differ"), Grid(("setting", *names), rows)]
    out += _figures(runs, summaries, names)
    if (checked := verified(runs)) is not None:
        rows = tuple((label, *values) for label, values in checked.rows)
        out += [
            Heading("Verified against float32"),
            Grid(("figure", *names), rows),
            Text(f"{checked.formula}.", note=True),
        ]
    out += _gaps(runs, names, longest)
    for run, name in zip(runs, names, strict=True):
        if 0 < run.read("rounds").height <= SHORT_RUN:
            out += [Heading(f"{name}: rounds"), _rounds(run)]
    commands = dict.fromkeys(_command(run) for run in runs)
    out += [Heading("Made by"), Items(tuple(command for command in commands if command))]
    return out


def _figures(runs: Sequence[Run], summaries: Sequence[Summary], names: Sequence[str]) -> list[Element]:
    flush = frozenset(range(1, len(names) + 2))
    if len(summaries) > 1:
        rows = tuple(
            (
                f"{delta.label}{', ' + delta.unit if delta.unit else ''}",
                *delta.values,
                *([delta.change] if len(names) == 2 else []),
                delta.verdict if delta.best is None else names[delta.best],
            )
            for delta in deltas(summaries, judge(runs, summaries))
        )
        head = ("figure", *names, *([f"{names[1]} against {names[0]}"] if len(names) == 2 else []), "better")
        return [Heading("Differences"), Grid(head, rows, flush - {len(head) - 1})]
    rows = tuple((line.label, *line.values) for line in lines(summaries))
    return [Heading("Figures"), Grid(("figure", *names), rows, flush)]


def _gaps(runs: Sequence[Run], names: Sequence[str], longest: Sequence[Sequence[Any]]) -> list[Element]:
    unit = unit_of(run.clock for run in runs)
    rows = [
        (name, unit.figure(spike.gap_s * 1000), unit.figure(spike.t_s * 1000) if unit.ticks else f"{spike.t_s:.3f}", run.labels.get(spike.request, f"#{spike.request}"), f"{spike.round:,}", spike.why)
        for run, name, found in zip(runs, names, longest, strict=True)
        for spike in found[:4]
    ]  # fmt: skip
    if not rows:
        return []
    head = ("run", f"gap, {unit.latency}", "at tick" if unit.ticks else "at, s", "request", "round to blame", "why")
    return [Heading("Longest gaps between tokens"), Grid(head, tuple(rows), frozenset({1, 2, 4}))]


def _rounds(run: Run) -> Grid:
    rows = tuple((str(t.round), t.waiting, t.running, t.batch, t.why, t.free) for t in round_texts(run))
    head = ("round", "waiting before", "running before", "batch", "why it stopped", "free blocks")
    return Grid(head, rows, frozenset({0}))


def _command(run: Run) -> str:
    command = run.manifest.get("command")
    return " ".join(map(str, command)) if isinstance(command, list) else str(command or "")


def json_summary(runs: Sequence[Run]) -> dict[str, Any]:
    """What `replay --json` prints: one summary, or {"runs": [summary, …]}."""
    summaries = [summarize(run) for run in runs]
    return summaries[0] if len(summaries) == 1 else {"runs": summaries}


COLUMNS = (
    "request", "id", "status", "reason", "prompt_tokens", "emitted_tokens", "cached_tokens", "discarded_tokens", "recomputed_tokens",
    "preemptions", "arrival_s", "admitted_s", "first_scheduled_s", "first_token_s", "finished_s",
)  # fmt: skip


def requests_csv(runs: Sequence[Run], names: Sequence[str]) -> str:
    """A line for each request of each run, in order of arrival: its counts and times in seconds, its latencies in milliseconds.

    Empty cells are what was not measured. A text that a spreadsheet would read as a formula gets an apostrophe before it.
    """
    latencies = [(f"{name}_ms", expression()) for name, expression in metrics.PER_REQUEST.items()]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["run", *COLUMNS, *(name for name, _ in latencies)])
    for run, name in zip(runs, names, strict=True):
        done = pl.col("status") == "finished"
        frame = (
            run.scan("requests").sort("arrival_s", "request")
            .select(*COLUMNS, *(pl.when(done).then(expression * 1000).alias(key) for key, expression in latencies)).collect()
        )  # fmt: skip
        for row in frame.iter_rows():
            writer.writerow([_safe(name), *(_safe(cell) for cell in row)])
    return out.getvalue()


def _safe(cell: Any) -> Any:
    if isinstance(cell, float):
        return float(f"{cell:.9g}")
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@", "\t", "\r") else cell
