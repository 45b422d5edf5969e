"""`benchctl report`, behind its flags: runs as a page, Markdown, JSON, CSV or a Perfetto trace. Heavy imports stand inside."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchctl.app import app, exit_with, out_opt
from benchctl.places import check_file
from traces.errors import BenchctlError

if TYPE_CHECKING:
    from reports.run import Run

# format -> name of the file that is written where --out names none; None: printed
FORMATS: dict[str, str | None] = {
    "html": "report.html",
    "md": None,
    "json": None,
    "csv": None,
    "perfetto": "report.perfetto.json.gz",
}


@app.command()
def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Run folders, folders of runs, or what `benchctl pack` made of them.",
            show_default=False,
        ),
    ],
    out: Annotated[
        str | None,
        out_opt(
            "--out",
            "-o",
            help="The file to write. Default: report.html (perfetto: report.perfetto.json.gz) beside the first run; md, json and csv are printed.",
        ),
    ] = None,
    format: Annotated[
        str,
        typer.Option(
            "--format",
            "-f",
            help="html; md for a pull request; json with vLLM bench's keys; csv of the requests; perfetto for ui.perfetto.dev.",
        ),
    ] = "html",
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Show recorded runs: one offline HTML page, or the same as text or data.

    A broken or half-written folder is shown as far as it can be read; what is wrong is said, and the exit code is 1.

    Example: benchctl report runs/sharegpt-20261130-101500 -o report.html
    """

    def run() -> int:
        if format not in FORMATS:
            raise BenchctlError(f"--format is {format!r}", fix=f"one of {', '.join(FORMATS)}")
        if open_page and format != "html":
            raise BenchctlError(f"--open opens a page, and --format is {format}", fix="leave out one of them")
        from reports.salvage import open_all

        if out is not None:
            check_file(Path(out), "--out", in_place=format != "html")
        with open_all(runs) as (found, wrong):
            written = write(found, format, target(runs, found, out, format))
        for text in wrong:
            print(f"Warning: {text}", file=sys.stderr)
        if open_page and written is not None:
            import webbrowser

            if not webbrowser.open(written.resolve().as_uri()):
                print(f"Warning: no browser could be opened; the page is {written}", file=sys.stderr)
        return 1 if wrong else 0

    exit_with(run)


def target(paths: list[str], found: list[Run], out: str | None, format: str) -> Path | None:
    """Where the result goes: --out, or beside the first run; None: stdout."""
    from reports.pack import is_pack

    name = FORMATS[format]
    if out is not None:
        return Path(out)
    if name is None:
        return None
    first = Path(paths[0])
    first = first.parent if is_pack(first.parent) else first  # PACK/run: a file holds no page
    inside = is_pack(first) or (first / "manifest.json").exists() or any(first.glob("rounds-*.parquet"))
    return (first.parent if inside else first) / name


def write(found: list[Run], format: str, path: Path | None) -> Path | None:
    """Make the result and write or print it. Raises BenchctlError where a package is missing or the place is no good."""
    from reports.terminal import column_names

    names = column_names([{"name": run.name, "path": run.shown} for run in found])
    if format == "html":
        assert path is not None
        write_page(found, path)
    elif format == "perfetto":
        assert path is not None
        from reports.perfetto import write_perfetto

        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_perfetto(found, names, path)
        except OSError as error:
            raise no_place(path, error) from None
    else:
        text = as_text(found, names, format)
        if path is None:
            sys.stdout.write(text)
            return None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise no_place(path, error) from None
    print(path)
    return path


def as_text(found: list[Run], names: list[str], format: str) -> str:
    from reports import exports

    if format == "md":
        return exports.markdown(found, names)
    if format == "csv":
        return exports.requests_csv(found, names)
    return json.dumps(exports.json_summary(found), indent=1, default=str) + "\n"


def write_page(found: list[Run], path: Path) -> None:
    try:
        from reports.page import write_runs
    except ImportError as error:
        raise BenchctlError(
            f"the page needs {error.name}, which is not installed", fix="pip install plotly jinja2", exit_code=1
        ) from None
    write_runs(found, path)


def no_place(path: Path, error: OSError) -> BenchctlError:
    return BenchctlError(f"{path} cannot be written: {error.strerror}", where="--out", fix="name another file")
