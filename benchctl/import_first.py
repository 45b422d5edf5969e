"""A replay of a file that is no trace yet: `--map` or `--format` import it first, and the trace that came of it is kept."""

from __future__ import annotations

import sys
from pathlib import Path

from benchctl.trace_options import columns_of
from traces.errors import BenchctlError, printable
from traces.formats.base import ImportOptions
from traces.importing import import_trace


def import_first(
    source: str, format: str | None, map: list[str] | None, *, skip_bad: bool, seed: int, out: str | None
) -> str:
    """The path of the imported trace: in the folder of the runs, or runs/imported/. What was done goes to stderr.

    `format` auto: told from the content. Raises BenchctlError.
    """
    columns = columns_of(map or [])
    if columns and format not in (None, "auto", "mapped"):
        raise BenchctlError("--map names columns and --format a known layout", fix="give one of the two")
    path = Path(source)
    stem = path.name.removesuffix(".gz").rsplit(".", 1)[0] or "trace"
    target = (Path("runs") / "imported" if out is None else Path(out)) / f"{stem}.trace.jsonl"
    options = ImportOptions(format=None if format == "auto" else format, columns=columns, skip_bad=skip_bad, seed=seed)
    report = import_trace(path, target, options)
    print(f"imported {source} as {report.format}: {report.num_requests:,} requests → {target}", file=sys.stderr)
    for reason, count in report.dropped.items():
        print(f"  left out, {reason}: {count:,}", file=sys.stderr)
    for text in (*report.assumed, *report.warnings):
        print(f"  {printable(text)}", file=sys.stderr)
    return str(target)
