"""What `benchctl trace` prints: results to stdout, warnings to stderr."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traces.errors import printable

if TYPE_CHECKING:  # each command loads its own part alone
    from traces.exporting import ExportReport
    from traces.importing import ImportReport
    from traces.info import TraceInfo
    from traces.synthesis import SynthReport
    from traces.transform import Change
    from traces.validation import Validation


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def warn(text: str) -> None:
    print(f"warning: {printable(text)}", file=sys.stderr)


def print_import(report: ImportReport, as_json: bool) -> int:
    """The exit code: 0."""
    for text in report.warnings:
        warn(text)
    if as_json:
        print_json(dataclasses.asdict(report))
        return 0
    print(f"{report.source}: {report.format} ({report.title})")
    print(f"{report.num_requests:,} requests of {report.num_records:,} records → {report.out}")
    if report.num_text:
        print(
            f"  {report.num_text:,} with text, which a tokenizer counts on replay; {report.output_tokens:,} output tokens"
        )
    if report.num_text < report.num_requests:
        print(f"  {report.input_tokens:,} input tokens, {report.output_tokens:,} output tokens")
    if report.span_s is not None:
        rate = f", {(report.num_requests - 1) / report.span_s:.4g} requests/s" if report.span_s > 0 else ""
        print(f"  span {report.span_s:.6f} s{rate}")
    for reason, count in report.dropped.items():
        print(f"  left out, {reason}: {count:,}")
    failed = report.header.get("on_import", {}).get("failed") if report.dropped.get("failed") else None
    if failed:
        before, after = failed["arrivals_before"], failed["arrivals_after"]
        print(
            f"  arrivals with the failed: {before['rate']}/s, CV {before['cv']}; without: {after['rate']}/s, CV {after['cv']}"
        )
    for example in report.examples:
        print(f"    {printable(example)}")
    for what, count in report.counts.items():
        print(f"  {what}: {count:,}")
    for text in report.assumed:
        print(f"  not in the source: {printable(text)}")
    return 0


def print_change(change: Change) -> int:
    span = "" if change.span_s is None else f", span {change.span_s:.6f} s"
    print(f"{change.num_requests:,} requests → {change.out}{span}")
    for what, count in change.counts.items():
        print(f"  {what}: {count:,}")
    return 0


def print_export(report: ExportReport) -> int:
    print(f"{report.num_requests:,} requests → {report.out} ({report.format})")
    for key, count in report.left_out.items():
        print(f"  {key} has no place there: {count:,} rows")
    return 0


def print_synth(report: SynthReport) -> int:
    sessions = f" in {report.num_sessions:,} sessions" if report.num_sessions else ""
    print(f"{report.num_requests:,} requests{sessions} → {report.out}")
    print(f"  {report.input_tokens:,} input tokens, {report.output_tokens:,} output tokens, span {report.span_s:.3f} s")
    print(f"  arrivals: {report.header['on_import']['arrivals']}")
    return 0


def print_validation(found: Validation, as_json: bool) -> int:
    """The exit code: 2 where there is a fault."""
    if as_json:
        print_json(dataclasses.asdict(found))
    else:
        for fault in found.faults:
            key = f", key `{fault.key}`" if fault.key else ""
            print(f"{found.path}, line {fault.line}{key}: {printable(fault.what)}")
        for note in found.notes:
            print(f"note: {printable(note)}", file=sys.stderr)
        faults = "1 fault" if len(found.faults) == 1 else f"{len(found.faults):,} faults"
        verdict = faults if found.faults else f"no fault; sha256 {found.sha256}"
        print(f"{found.path}: {found.num_requests:,} good requests, {verdict}")
    return 2 if found.faults else 0


def print_info(info: TraceInfo, as_json: bool, html: Path | None) -> int:
    if as_json:
        body = dataclasses.asdict(dataclasses.replace(info, series=None))
        if info.prefix is not None:
            body["prefix"] |= {"block_rate": info.prefix.block_rate, "token_rate": info.prefix.token_rate}
        print_json({key: value for key, value in body.items() if key != "series"})
        return 0
    for note in info.notes:
        print(f"note: {printable(note)}", file=sys.stderr)
    for line in info_lines(info):
        print(line)
    for warning in info.warnings:
        print(f"warning: {warning.what}\n  {warning.evidence}\n  {warning.cure}")
    if html is not None:
        print(f"page: {html}")
    return 0


def info_lines(info: TraceInfo) -> Iterator[str]:
    yield f"{printable(info.name)}: {info.num_requests:,} requests" + (
        f", {info.num_sessions:,} sessions" if info.num_sessions else ""
    )
    shapes = ", ".join(f"{name} {count:,}" for name, count in sorted(info.shapes.items(), key=lambda item: -item[1]))
    yield f"  prompts given by: {shapes}"
    a = info.arrivals
    if a.get("rate") is not None:
        yield f"  span {info.span_s:.3f} s, {a['rate']:.4g} requests/s, CV of the gaps {a['cv']:.3f}, {100 * a['zero_share']:.1f} % of them zero, longest {a['longest_gap_s']:.3f} s"
        idc = "" if a["idc60"] is None else f", index of dispersion of minutes {a['idc60']:.1f}"
        yield f"  at most {a['peak_in_1_s']:,} within 1 s{idc}"
    names = [key for key in next(iter(info.lengths.values())) if key.startswith("p")]
    yield f"  {'tokens':<8}{'mean':>10}" + "".join(f"{name:>9}" for name in names)
    for side, values in info.lengths.items():
        yield f"  {side:<8}{values['mean']:>10,.1f}" + "".join(f"{values[name]:>9,.0f}" for name in names)
    if info.context:
        yield "  context needed (input + output): " + ", ".join(
            f"{100 * float(q):g} % {value:,}" for q, value in info.context.items()
        )
    s = info.sessions
    if s:
        yield f"  turns: mean {s['turns_mean']:.2f}, p50 {s['turns_p50']}, p90 {s['turns_p90']}, max {s['turns_p100']}; {100 * s['single_turn_share']:.1f} % single"
        if "think_s" in s:
            t = s["think_s"]
            yield f"  think time, s: p10 {t['p10']:.3g}, p50 {t['p50']:.3g}, p90 {t['p90']:.3g}, p99 {t['p99']:.3g}, mean {t['mean']:.3g}"
    p = info.prefix
    if p is not None:
        yield f"  prefix cache without bound: {p.tokens_hit:,} of {p.prompt_tokens:,} prompt tokens, {p.token_rate:.4f}, in blocks of {p.block_size}"
        yield f"  blocks of {p.own_block_size}: {p.blocks_hit:,} of {p.blocks:,} hit, {p.block_rate:.4f}; {p.unique_blocks:,} distinct; {p.repeated_prompts:,} prompts hit whole, {100 * p.hit_beyond_first / max(p.measured, 1):.1f} % hit more than their first"
        if p.left_out:
            yield f"  {p.left_out:,} requests took no part: text, or beyond the limit of made tokens"
        part = "" if p.curve_requests == p.measured else f" (first {p.curve_requests:,} requests)"
        yield f"  LRU hit rate by capacity{part}: " + ", ".join(
            f"{blocks:,} blocks {rate:.3f}" for blocks, _, rate in p.curve
        )
    yield f"  sha256 {info.sha256}"
