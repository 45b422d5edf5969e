"""`benchctl sweep`, behind its flags. Heavy imports stand inside."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from benchctl.app import app, exit_with, opt
from traces.errors import BenchctlError

CELLS, OUTPUT = "Cells", "Output"


@app.command()
def sweep(
    spec: Annotated[
        str, typer.Argument(metavar="SPEC", help="A TOML file of cells, or a trace with --set.", show_default=False)
    ],
    set: Annotated[
        list[str] | None,
        opt("--set", panel=CELLS, help="A flag of replay and its values: max-num-seqs=64,256. Repeat it for several."),
    ] = None,
    repeat: Annotated[
        int, opt("--repeat", panel=CELLS, help="With --set: each cell N times, seeds one apart. Default 1.")
    ] = 1,
    workers: Annotated[int | None, opt("--workers", panel=CELLS, help="Replays at a time. Default: the cores.")] = None,
    out: Annotated[
        str, opt("--out", "-o", panel=OUTPUT, help="Folder; a sweep begun there goes on. Default sweep/.")
    ] = "sweep",
    as_json: Annotated[bool, opt("--json", panel=OUTPUT, help="Print the table as JSON.")] = False,
) -> None:
    """Replay every combination of settings, each in a process of its own, and lay the results side by side.

    A cell that fails is recorded with its reason, the others go on, and the exit code is 1.

    Example: benchctl sweep traces/burst.jsonl --set scheduler=nano,vllm --set engine=null --set max-num-seqs=64,256
    """
    exit_with(lambda: run_sweep(spec, set or [], repeat, workers, out, as_json))


def run_sweep(spec: str, sets: list[str], repeat: int, workers: int | None, out: str, as_json: bool) -> int:
    import os

    if workers is not None and workers < 1:
        raise BenchctlError(f"--workers is {workers}", fix="give 1 or more")
    if repeat < 1:
        raise BenchctlError(f"--repeat is {repeat}", fix="give 1 or more")
    from benchctl.sweep import sweep as run_cells
    from benchctl.sweep_spec import Cell, cells_of, from_flags, read_spec

    if sets:
        cells = cells_of(from_flags(spec, sets, repeat), "--set")
    else:
        cells = cells_of(read_spec(Path(spec)), spec)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def saw(done: int, cell: Cell, result: dict[str, Any]) -> None:
        text = " ".join(f"{name}={value}" for name, value in cell.settings.items() if name != "trace")
        print(f"{done}/{len(cells)} {result['status']}: {text}", file=sys.stderr)

    frame = run_cells(cells, Path(out), workers or cores, saw)
    if as_json:
        print(frame.write_json())
    else:
        show(frame, Path(out))
    return 0 if (frame["status"] == "complete").all() else 1


def show(frame: Any, out: Path) -> None:
    """The settings that vary, the main figures, and who stands on a front; failures with their reasons."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from benchctl.sweep import FIGURES, TABLE

    other = {"cell", "status", "reason", "path", "front_ttft", "front_itl", *FIGURES}
    varied = [name for name in frame.columns if name not in other and frame[name].n_unique() > 1]
    figures = ("output_throughput", "request_goodput", "p50_ttft_ms", "p99_ttft_ms", "p99_itl_ms", "p99_e2el_ms")
    shown = [name for name in figures if frame[name].null_count() < frame.height]
    grid = Table(*varied, *shown, "best at", title="sorted by output tokens/s")
    for row in frame.sort("output_throughput", descending=True, nulls_last=True).iter_rows(named=True):
        if row["status"] == "failed":
            continue
        best = " ".join(word for word, key in (("TTFT", "front_ttft"), ("ITL", "front_itl")) if row[key])
        numbers = ["" if row[name] is None else f"{row[name]:,.2f}" for name in shown]
        grid.add_row(*(Text(row[name] or "") for name in varied), *numbers, best)
    console = Console(highlight=False, soft_wrap=True)
    console.print(grid)
    console.print(Text("best at: no cell gives more output tokens/s at a p99 TTFT, or ITL, that is no higher"))
    for row in frame.filter(frame["status"] != "complete").iter_rows(named=True):
        console.print(Text(f"{row['status']}: " + " ".join(f"{n}={row[n]}" for n in varied) + f": {row['reason']}"))
    console.print(Text(str(out / TABLE)))
