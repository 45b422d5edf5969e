"""A comparison as a document, and as JSON. Words and numbers only; the figures themselves come from `compare`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from reports.compare import MIN_REPEATS, UNKNOWN, Comparison, MetricRow
from reports.compare_head import Side
from reports.decision_diff import DecisionDiff, Divergence
from reports.decision_work import STANDING, WAITING, WorkDiff, WorkRow
from reports.document import Element, Grid, Heading, Items, Text
from reports.glossary import REASONS, STOPS
from reports.terminal import METRIC_NAMES, NOT_MEASURED, number, share
from reports.units import Unit, unit_of

JSON_VERSION = 1
# Words of `decision_work` beyond the scheduler's own.
MEANINGS = REASONS | STOPS | {
    "prefill_first": "a round that prefills decodes nobody",
    "preemption": "a request was preempted in the round, so nobody was admitted",
    "not said": "the records do not say why",
}  # fmt: skip


LABELS = {
    "request_throughput": "requests/s", "output_throughput": "output tokens/s", "total_token_throughput": "total tokens/s",
    "request_goodput": "goodput, requests/s", "duration": "duration, s", "finished": "finished requests",
    "rounds.tokens_mean": "tokens a round", "rounds.budget_use": "budget use", "discarded_tokens": "discarded tokens",
    "recomputed_tokens": "recomputed tokens", "hit_tokens": "prefix hit tokens", "hit_rate": "prefix hit rate",
    "peak_use": "peak use of pool", "schedule_us": "schedule(), µs",
    "queue.mean": "queue, mean, ms", "stalled.mean": "stalled, mean, ms", "preempted.mean": "preempted, mean, ms",
}  # fmt: skip


def document(comparison: Comparison) -> list[Element]:
    """Head, metrics, decisions, divergences by reason, requests."""
    a, b = comparison.a, comparison.b
    out: list[Element] = [Heading(f"{a.name} (A) against {b.name} (B)")]
    out += _head(comparison)
    out += [Heading("Metrics"), _metric_grid(comparison.metrics, a, b, _unit(comparison))]
    out += [Text(note, note=True) for note in _metric_notes(comparison)]
    if comparison.decisions is None:
        out += [
            Heading("Decisions"),
            Text("not compared: a run kept no decision log (--records full or compact keeps one)"),
        ]
    else:
        out += _decisions(comparison.decisions, a, b)
    if comparison.work is not None:
        out += _work(comparison.work, a, b, _unit(comparison))
    out += _requests(comparison)
    return out


def _head(comparison: Comparison) -> list[Element]:
    a, b = comparison.a, comparison.b
    out: list[Element] = []
    for mark, side in (("A", a), ("B", b)):
        more = f" and {len(side.runs) - 1} more" if len(side.runs) > 1 else ""
        out.append(
            Text(
                f"{mark}  {side.first.shown}{more}, {side.first.status}, digest {side.first.manifest.get('digest') or 'none (--records summary)'}"
            )
        )
    if comparison.warnings:
        out += [Heading("Before you read the figures"), Items(tuple(comparison.warnings))]
    out.append(Heading("Settings that differ"))
    if comparison.settings:
        rows = tuple((d.name, d.a, d.b) for d in comparison.settings)
        out.append(Grid(("", a.name, b.name), rows))
    else:
        out.append(Text("none: the same policy, pool, engine, clock and settings"))
    return out


def _value(row: MetricRow, value: float | int | None, unit: Unit) -> str:
    return share(value) if row.unit == "share" else unit.figure(value) if row.unit == "ms" else number(value)


def _signed(row: MetricRow, value: float | int | None, unit: Unit) -> str:
    if value is None:
        return NOT_MEASURED
    if row.unit == "share":
        return signed(f"{abs(value) * 100:.1f} pp", value)
    return signed(_value(row, abs(value), unit), value)


def _unit(comparison: Comparison) -> Unit:
    return unit_of(side.first.clock for side in (comparison.a, comparison.b))


def _label(row: MetricRow, unit: Unit) -> str:
    name = row.key.removeprefix(f"{row.group}.")
    if row.key == "evictions":
        return f"evicted {row.unit}"
    text = LABELS.get(row.key) or f"{name}{f', {row.unit}' if row.unit else ''}"
    if unit.ticks and row.group != "host":  # a second of this clock is a round
        for measured, counted in ((", ms", ", rounds"), (", s", ", rounds"), ("/s", "/round")):
            text = text.removesuffix(measured) + counted if text.endswith(measured) else text
    return text


def signed(text: str, value: float) -> str:
    """A magnitude with its sign; the minus is a real one, as wide as the plus."""
    return ("+" if value > 0 else "−" if value < 0 else "") + text


def _metric_grid(rows: Sequence[MetricRow], a: Side, b: Side, unit: Unit) -> Grid:
    out: list[tuple[str, ...]] = []
    group = ""
    for row in rows:
        if row.group != group:
            group = row.group
            out.append((METRIC_NAMES.get(group, group),))
        interval = ""
        if row.interval is not None:
            interval = f"{_signed(row, row.interval.low, unit)} … {_signed(row, row.interval.high, unit)}"
        relative = "" if row.relative is None or not row.difference else f"{abs(row.relative):.1%}"
        if relative not in ("", "0.0%"):
            relative = signed(relative, row.relative or 0)
        values = (_value(row, row.a, unit), _value(row, row.b, unit), _signed(row, row.difference, unit))
        out.append((f"  {_label(row, unit)}", *values, relative, interval, row.verdict))
    columns = ("", a.name, b.name, "B − A", "", "95% interval", "B is")
    return Grid(columns, tuple(out), frozenset({1, 2, 3, 4, 5}))


def _metric_notes(comparison: Comparison) -> list[str]:
    """How to read the verdicts: the method, and each reason for a `can't tell` with what it is about."""
    why: dict[str, list[str]] = {}
    for row in comparison.metrics:
        if row.verdict == UNKNOWN:
            why.setdefault(row.why, []).append(row.key)
    out = [comparison.method[:1].upper() + comparison.method[1:] + "."]
    for reason, keys in why.items():
        shown = ", ".join(keys[:6]) + (f" and {len(keys) - 6} more" if len(keys) > 6 else "")
        out.append(f"Can't tell, {reason}: {shown}.")
    return out


def _decisions(diff: DecisionDiff, a: Side, b: Side) -> list[Element]:
    out: list[Element] = [Heading("Decisions")]
    if diff.equal:
        what = "every batch, decision and block event is the same" if diff.comparable else "every batch is the same"
        out.append(Text(f"{what}: {diff.rounds_a:,} rounds"))
        return out
    out.append(Text("What differs first, and what followed:"))
    for number_, divergence in enumerate(diff.chain, 1):
        out.append(Text(f"{number_}. {divergence.text}"))
        out += [Text(f"   {detail}", note=True) for detail in _details(divergence, a, b)]
    shared = min(diff.rounds_a, diff.rounds_b)
    out.append(
        Text(
            f"{diff.differing_rounds:,} of {max(diff.rounds_a, diff.rounds_b):,} rounds differ, laid side by side "
            f"({diff.rounds_a:,} in {a.name}, {diff.rounds_b:,} in {b.name}, {shared:,} compared).",
            note=True,
        )
    )
    if not diff.comparable:
        out.append(
            Text("Policies or block sizes differ, so only arrivals and batches are compared row by row.", note=True)
        )
    return out


def _details(divergence: Divergence, a: Side, b: Side) -> list[str]:
    if divergence.level != "batch":
        return []
    return [
        f"before it: {divergence.situation}",
        f"{a.name} ran {divergence.batch_a}; {b.name} ran {divergence.batch_b}",
    ]


def _work(work: WorkDiff, a: Side, b: Side, unit: Unit) -> list[Element]:
    out: list[Element] = [
        Heading("Divergences by reason, at equal work"),
        Text(
            f"{work.matched:,} steps start at the same work in both (the same tokens of the request computed; "
            f"{work.unmatched_a:,} steps of {a.name} and {work.unmatched_b:,} of {b.name} start where the other never stood). "
            f"Of the matched, {work.longer_a:,} came after more rounds of waiting in {a.name}, {work.longer_b:,} in {b.name}; "
            f"{work.other_size:,} got another number of tokens; {work.hits_more:,} admissions found more cached tokens in {b.name} "
            f"and {work.hits_less:,} fewer ({work.hit_tokens:+,} tokens)."
        ),
    ]
    if not work.rows:
        return out
    rows: list[tuple[str, ...]] = []
    group = ""
    for row in work.rows:
        if row.what != group:
            group = row.what
            rows.append(
                (
                    f"{group}{(', request-rounds' + ('' if unit.ticks else ' (and seconds)')) if group in (WAITING, STANDING) else ''}",
                )
            )
        rows.append(
            (
                f"  {row.reason}",
                _amount(row.a, None if unit.ticks else row.a_s),
                _amount(row.b, None if unit.ticks else row.b_s),
                signed(f"{abs(row.b - row.a):,}", row.b - row.a),
                f"{row.steps:,}",
            )
        )
    out.append(Grid(("", a.name, b.name, "B − A", "steps apart"), tuple(rows), frozenset({1, 2, 3, 4})))
    out.append(Items(tuple(_sentence(row, a, b) for row in _largest(work.rows))))
    return out


def _amount(count: int, seconds: float | None) -> str:
    return f"{count:,}" if not seconds else f"{count:,} ({number(seconds)} s)"


def _largest(rows: Sequence[WorkRow], most: int = 6) -> list[WorkRow]:
    """Rows that the two sides do not share, those with most seconds or counts first."""
    differing = [row for row in rows if row.a != row.b]
    return sorted(differing, key=lambda row: -abs((row.b_s or row.b) - (row.a_s or row.a)))[:most]


def _sentence(row: WorkRow, a: Side, b: Side) -> str:
    """`nano let running requests stand still for 13 request-rounds, vllm for 0: a round that prefills decodes nobody`."""
    meaning = MEANINGS.get(row.reason, row.reason)
    more, less, counts = (a, b, (row.a, row.b)) if row.a > row.b else (b, a, (row.b, row.a))
    if row.what == WAITING:
        head = f"{more.name} kept requests waiting for {_plural(counts[0], 'request-round')}, {less.name} for {counts[1]:,}"
    elif row.what == STANDING:
        head = f"{more.name} let running requests stand still for {_plural(counts[0], 'request-round')}, {less.name} for {counts[1]:,}"
    elif row.what == "preempted":
        head = f"{more.name} preempted {_times(counts[0])}, {less.name} {_times(counts[1])}"
    elif row.what == "refused":
        head = f"{more.name} refused {_plural(counts[0], 'request')}, {less.name} {counts[1]:,}"
    else:
        head = f"{more.name} cut {_plural(counts[0], 'step')} short, {less.name} {counts[1]:,}"
    return f"{head}: {meaning} ({row.reason})"


def _plural(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _times(count: int) -> str:
    return "never" if not count else "once" if count == 1 else f"{count:,} times"


def _requests(comparison: Comparison) -> list[Element]:
    if not comparison.requests:
        return [Heading("Requests"), Text("every request that both finished took the same time")]
    unit, rows = _unit(comparison), []

    def said(seconds: float, with_sign: bool = False) -> str:
        text = unit.figure(abs(seconds) * 1000)
        return signed(text, seconds) if with_sign else text

    for each in comparison.requests:
        rows.append(
            (
                each.id if each.id.isprintable() and len(each.id) <= 24 else f"#{each.request}",
                f"{each.prompt_tokens:,} + {each.output_tokens:,}",
                said(each.e2el_a),
                said(each.e2el_b),
                said(each.e2el_difference, True),
                said(each.ttft_difference, True),
                f"{each.phase} {said(each.phase_difference, True)}",
                f"{each.preemptions_a} / {each.preemptions_b}",
            )
        )
    columns = ("", "tokens", f"E2E {comparison.a.name}", comparison.b.name, "B − A", "TTFT", "mostly in", "preempted")
    return [
        Heading(f"Requests that differ most, {unit.latency}"),
        Grid(columns, tuple(rows), frozenset({1, 2, 3, 4, 5})),
    ]


def as_json(comparison: Comparison) -> dict[str, Any]:
    """The comparison for machines; docs/compare.md gives the schema. Milliseconds in `metrics`, seconds elsewhere."""

    def side(each: Side) -> dict[str, Any]:
        return {
            "name": each.name,
            "runs": [run.shown for run in each.runs],
            "scheduler": each.first.scheduler,
            "digests": [run.manifest.get("digest") for run in each.runs],
        }

    metrics = [
        {
            "key": row.key, "unit": row.unit, "better": row.better, "a": row.a, "b": row.b, "difference": row.difference,
            "relative": row.relative,
            "interval": None if row.interval is None else [row.interval.low, row.interval.high],
            "verdict": row.verdict, "why": row.why or None,
        }
        for row in comparison.metrics
    ]  # fmt: skip
    trace = comparison.a.first.manifest.get("trace")
    return {
        "benchctl_compare": JSON_VERSION,
        "trace": trace if isinstance(trace, dict) else {"name": trace},
        "a": side(comparison.a),
        "b": side(comparison.b),
        "settings": [asdict(each) for each in comparison.settings],
        "warnings": comparison.warnings,
        "method": comparison.method,
        "min_repeats": MIN_REPEATS,
        "metrics": metrics,
        "decisions": None if comparison.decisions is None else asdict(comparison.decisions),
        "work": None if comparison.work is None else asdict(comparison.work),
        "requests": [
            asdict(each) | {"e2el_difference": each.e2el_difference, "ttft_difference": each.ttft_difference}
            for each in comparison.requests
        ],
    }
