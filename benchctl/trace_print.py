"""What `benchctl trace` prints: results to stdout, warnings to stderr."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from traces.errors import printable
from traces.importing import ImportReport


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
