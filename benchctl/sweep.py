"""`benchctl sweep`: many replays, and one table of what came out.

A cell's result is written as soon as it is there, so a sweep that was killed goes on where it stood. A cell that fails is
recorded with its reason and the sweep goes on. Results are ordered by the spec, whatever ended first. Where cells run is the
business of `sweep_workers` and `sweep_ray`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from benchctl.sweep_slo import LARGEST_GAPS, judge, judged_by, simulation_of
from benchctl.sweep_spec import Cell
from benchctl.sweep_workers import DONE, FIGURES, Result, Workers
from traces.errors import BenchctlError

TABLE = "sweep.parquet"
PROBES = "probes.parquet"  # of --find-rate
LATENCIES = ("p99_ttft_ms", "p99_itl_ms")  # against output_throughput, for the fronts
JUDGED = ("request_goodput", "attainment", *LARGEST_GAPS)  # null without SLOs, the gaps without one of ITL
WORTH = ("error", "error_worst", "outside_share")  # of simulated cells
RATE = ("rate", "rate_low", "rate_high", "fails_at", "attainment_low", "attainment_high", "probes")  # of --find-rate


@dataclass(frozen=True, slots=True)
class Store:
    """Results of cells under `out`, judged by `slo` (metric -> ms)."""

    out: Path
    slo: Mapping[str, float] = field(default_factory=dict)

    def prepare(self) -> None:
        """Make the folder. Raises BenchctlError where it cannot be written."""
        try:
            (self.out / "cells").mkdir(parents=True, exist_ok=True)
            probe = self.out / "cells" / ".probe"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise BenchctlError(
                f"{self.out} cannot be written: {error.strerror}", where="--out", fix="name another folder"
            ) from None

    def load(self, cell: Cell) -> Result | None:
        """The result of an earlier call. A cell that failed, or that other SLOs cannot be held against, is run again."""
        try:
            found = json.loads(self._file(cell).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(found, dict) or found.get("status") not in DONE or not isinstance(found.get("figures"), dict):
            return None
        if self.slo and not judged_by(found.get("judged"), self.slo):
            found["judged"] = judge(str(found.get("path")), self.slo)
            if found["judged"] is None:
                return None
            self.save(cell, found)
        return found

    def finished(self, cell: Cell, result: Result) -> Result:
        """Judge a cell that just ended, and keep it."""
        if result["status"] in DONE:
            result["judged"] = judge(str(result["path"]), self.slo)
            result["simulation"] = simulation_of(str(result["path"]))
        self.save(cell, result)
        return result

    def save(self, cell: Cell, result: Result) -> None:
        temporary = self._file(cell).with_suffix(".tmp")
        try:
            temporary.write_text(
                json.dumps(result | {"settings": dict(cell.settings)}, indent=1) + "\n", encoding="utf-8"
            )
            os.replace(temporary, self._file(cell))
        except OSError as error:
            raise BenchctlError(
                f"{self.out} cannot be written: {error.strerror}",
                where="--out",
                fix="make room there; the same command goes on from here",
                exit_code=1,
            ) from None

    def _file(self, cell: Cell) -> Path:
        return self.out / "cells" / f"{cell.key}.json"


def sweep(
    cells: Sequence[Cell], store: Store, workers: Workers, saw: Callable[[Cell, Result, bool], None]
) -> list[Result]:
    """Run what is not yet done. `saw` (cell, result, whether from an earlier call) follows it. Results in order of `cells`.

    Raises BenchctlError where a result cannot be written; the workers stay the caller's.
    """
    results: dict[str, Result] = {}
    for cell in cells:
        if (done := store.load(cell)) is not None:
            results[cell.key] = done
            saw(cell, done, True)
    running = {workers.submit(cell): cell for cell in cells if cell.key not in results}
    for future in as_done(running):
        cell = running[future]
        results[cell.key] = store.finished(cell, future.result())
        saw(cell, results[cell.key], False)
    return [results[cell.key] for cell in cells]


def as_done(futures: Mapping[Future[Result], Cell]) -> Any:
    """Futures as they end; never blocks for long, so that Ctrl-C is heard."""
    left = set(futures)
    while left:
        ended, left = wait(left, timeout=0.5, return_when=FIRST_COMPLETED)
        yield from ended


def write_table(frame: pl.DataFrame, out: Path) -> Path:
    """DIR/sweep.parquet, replaced at once. Raises BenchctlError."""
    temporary = out / f".{TABLE}.tmp"
    try:
        frame.write_parquet(temporary)
        os.replace(temporary, out / TABLE)
    except OSError as error:
        raise BenchctlError(
            f"{out / TABLE} cannot be written: {error.strerror}", where="--out", fix="make room there", exit_code=1
        ) from None
    return out / TABLE


def setting_names(cells: Sequence[Cell]) -> list[str]:
    """In order of appearance, the policy first."""
    names = dict.fromkeys(name for cell in cells for name in cell.settings)
    return sorted(names, key=lambda name: name != "scheduler")


def table(cells: Sequence[Cell], results: Sequence[Result], *, searched: bool = False) -> pl.DataFrame:
    """A row for each cell: its settings (as text), status, reason, figures, whether it stands on a front, its run folder.

    `front_ttft`, `front_itl`: no complete cell has more output tokens a second at a p99 that is no higher. `error`: the
    stated error of the profile of a simulated cell, `outside_share`: of its rounds beyond what the profile was fitted on.
    `searched`: with the columns of RATE, which are null where no rate was found.
    """
    names = setting_names(cells)
    of_rate = RATE if searched else ()
    numbers = (*FIGURES, *JUDGED, *WORTH, *of_rate)
    frame = pl.DataFrame(
        [
            {"cell": cell.key}
            | {name: as_text(cell.settings.get(name)) for name in names}
            | {"status": result["status"], "reason": result.get("reason")}
            | {name: as_float(result["figures"].get(name)) for name in FIGURES}
            | {name: as_float((result.get("judged") or {}).get(name)) for name in JUDGED}
            | {name: as_float((result.get("simulation") or {}).get(name)) for name in WORTH}
            | {name: as_float((result.get("rate") or {}).get(name)) for name in of_rate}
            | {"path": result.get("path")}
            for cell, result in zip(cells, results, strict=True)
        ],
        schema={"cell": pl.String}
        | dict.fromkeys(names, pl.String)
        | {"status": pl.String, "reason": pl.String}
        | dict.fromkeys(numbers, pl.Float64)
        | {"path": pl.String},
    )
    return frame.with_columns(
        pl.Series("front_" + latency.split("_")[1], front(frame, latency), dtype=pl.Boolean) for latency in LATENCIES
    )


def as_text(value: Any) -> str | None:
    """As the spec writes it."""
    return None if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def as_float(value: Any) -> float | None:
    return None if value is None else float(value)


def front(frame: pl.DataFrame, latency: str) -> list[bool]:
    """Which complete rows no other one beats: more output tokens a second at a latency that is no higher."""
    rows = list(frame.select("status", "output_throughput", latency).iter_rows())
    known = sorted(
        ((-throughput, ms, i) for i, (status, throughput, ms) in enumerate(rows)
         if status == "complete" and throughput is not None and ms is not None)
    )  # fmt: skip
    on, least, at = [False] * len(rows), float("inf"), float("-inf")
    for negative, ms, i in known:
        # Sorted by throughput, then latency: on the front is who has the least latency so far; equals stand together.
        if ms < least or (ms == least and negative == at):
            on[i], least, at = True, ms, negative
    return on
