"""`benchctl sweep`: many replays, each in a process of its own, and one table of what came out.

A cell's result is written as soon as it is there, so a sweep that was killed goes on where it stood. A cell that fails is
recorded with its reason and the sweep goes on. Results are ordered by the spec, whatever ended first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import polars as pl

from benchctl.sweep_spec import Cell
from traces.errors import BenchctlError

TABLE = "sweep.parquet"
FIGURES = (
    "duration", "completed", "failed", "request_throughput", "request_goodput", "output_throughput",
    *(f"p{p}_{metric}_ms" for metric in ("ttft", "tpot", "itl", "e2el") for p in (50, 90, 99)),
)  # fmt: skip
LATENCIES = ("p99_ttft_ms", "p99_itl_ms")  # against output_throughput, for the fronts


def sweep(
    cells: Sequence[Cell], out: Path, workers: int, saw: Callable[[int, Cell, dict[str, Any]], None]
) -> pl.DataFrame:
    """Run what is not yet done and write DIR/sweep.parquet. `saw` (number done, cell, result) follows it.

    Raises BenchctlError where `out` cannot be written, KeyboardInterrupt on Ctrl-C, when running cells were ended.
    """
    try:
        (out / "cells").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchctlError(
            f"{out} cannot be made: {error.strerror}", where="--out", fix="name another folder"
        ) from None
    results: dict[str, dict[str, Any]] = {}
    for cell in cells:
        if (done := load(out, cell)) is not None:
            results[cell.key] = done
            saw(len(results), cell, done)
    running: dict[Future[dict[str, Any]], Cell] = {}
    children, lock = set[subprocess.Popen[str]](), threading.Lock()
    with ThreadPoolExecutor(workers) as pool:
        try:
            running = {
                pool.submit(run_cell, cell, out, children, lock): cell for cell in cells if cell.key not in results
            }
            left = set(running)
            while left:
                ended, left = wait(left, return_when=FIRST_COMPLETED)
                for future in ended:
                    cell, result = running[future], future.result()
                    results[cell.key] = result
                    save(out, cell, result)
                    saw(len(results), cell, result)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            with lock:
                for child in children:
                    child.terminate()
            raise
    frame = table([(cell, results[cell.key]) for cell in cells])
    temporary = out / f".{TABLE}.tmp"
    frame.write_parquet(temporary)
    os.replace(temporary, out / TABLE)
    return frame


def run_cell(cell: Cell, out: Path, children: set[subprocess.Popen[str]], lock: threading.Lock) -> dict[str, Any]:
    """One replay, in a process. Never raises for what the replay does."""
    folder = out / "runs" / cell.key
    words = [sys.executable, "-m", "benchctl", *cell.argv(), "--json", "--no-report", "--force", "--out", str(folder)]
    if "records" not in cell.settings:
        words += ["--records", "compact"]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with lock:
        children.add(child)
    try:
        stdout, stderr = child.communicate()
    finally:
        with lock:
            children.discard(child)
    try:
        summary = json.loads(stdout)
    except ValueError:
        summary = None
    if not isinstance(summary, dict):
        lines = stderr.strip().splitlines()
        at = next((i for i, text in enumerate(lines) if text.startswith("Error:")), max(len(lines) - 1, 0))
        reason = " ".join(text.strip() for text in lines[at : at + 3]).removeprefix("Error: ")
        return {"status": "failed", "reason": reason or f"exit code {child.returncode}", "figures": {}}
    status = "complete" if child.returncode in (0, 1) and not summary.get("failed") else "incomplete"
    why = None if status == "complete" else f"{summary.get('failed')} requests did not finish"
    figures = {name: summary.get(name) for name in FIGURES}
    return {
        "status": status,
        "reason": why,
        "figures": figures,
        "path": str(folder / str(cell.settings["scheduler"])),
    }


def load(out: Path, cell: Cell) -> dict[str, Any] | None:
    """The result of an earlier call; a cell that failed is run again."""
    try:
        found = json.loads((out / "cells" / f"{cell.key}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("status") in ("complete", "incomplete") else None


def save(out: Path, cell: Cell, result: dict[str, Any]) -> None:
    path = out / "cells" / f"{cell.key}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(result | {"settings": dict(cell.settings)}, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def table(results: Sequence[tuple[Cell, dict[str, Any]]]) -> pl.DataFrame:
    """A row for each cell: its settings (as text), status, reason, figures, whether it stands on a front, its run folder.

    `front_ttft`, `front_itl`: no complete cell has more output tokens a second at a p99 that is no higher.
    """
    names = sorted({name for cell, _ in results for name in cell.settings})
    frame = pl.DataFrame(
        [
            {"cell": cell.key}
            | {name: None if name not in cell.settings else str(cell.settings[name]) for name in names}
            | {"status": result["status"], "reason": result.get("reason")}
            | {name: as_float(result["figures"].get(name)) for name in FIGURES}
            | {"path": result.get("path")}
            for cell, result in results
        ],
        schema={"cell": pl.String}
        | dict.fromkeys(names, pl.String)
        | {"status": pl.String, "reason": pl.String}
        | dict.fromkeys(FIGURES, pl.Float64)
        | {"path": pl.String},
    )
    return frame.with_columns(
        pl.Series("front_" + latency.split("_")[1], front(frame, latency)) for latency in LATENCIES
    )


def as_float(value: Any) -> float | None:
    return None if value is None else float(value)


def front(frame: pl.DataFrame, latency: str) -> list[bool]:
    points = [
        (throughput, seconds) if status == "complete" and throughput is not None and seconds is not None else None
        for status, throughput, seconds in frame.select("status", "output_throughput", latency).iter_rows()
    ]
    known = [point for point in points if point is not None]
    return [
        point is not None
        and not any(t >= point[0] and s <= point[1] and (t > point[0] or s < point[1]) for t, s in known)
        for point in points
    ]
