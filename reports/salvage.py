"""Opens what can be opened of broken, half-written or newer run folders, and says what is wrong with them.

A whole folder opens as it is. Of a damaged one the parts up to the first that cannot be read are taken, the way a killed
run is; what is wrong stands in the manifest of the opened run under `damage`, where the checks find it.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl

from reports import records
from reports.numbers import plural
from reports.packed import origin_of
from reports.run import MANIFEST_FILE, Run, find_runs, open_run
from reports.segments import SEGMENTS
from traces.errors import BenchctlError


@contextmanager
def open_all(paths: Iterable[str | Path]) -> Iterator[tuple[list[Run], list[str]]]:
    """(runs, what is wrong with them) of all folders, each path a run folder or a folder of runs.

    Raises BenchctlError where a folder holds nothing that can be shown. Copies made of damaged runs live until the end.
    """
    with tempfile.TemporaryDirectory(prefix="benchctl-report-") as scratch:
        runs: list[Run] = []
        wrong: list[str] = []
        for path in paths:
            for folder in find_runs(path) or _without_manifest(Path(path)):
                if origin_of(folder) in {run.origin for run in runs if run.origin != folder}:
                    continue  # several parts of one pack were named
                run = _open(folder, Path(scratch) / str(len(runs)))
                runs.append(run)
                wrong += [f"{run.shown}: {text}" for text in run.manifest.get("damage", [])]
        yield runs, wrong


def _without_manifest(folder: Path) -> list[Path]:
    if folder.is_dir() and records.parts(folder):
        return [folder]
    open_run(folder)  # says what is wrong, or which folders to give
    return [folder]


def _open(folder: Path, scratch: Path) -> Run:
    manifest, damage = _manifest(folder)
    damage += _missing(folder, manifest)
    tables: tuple[str, ...] = (*records.TABLES, SEGMENTS)
    good, bad = _readable_parts(folder, tables)
    if bad is not None and good:
        damage.append(f"{bad}; shown {'are' if len(good) > 1 else 'is'} the {plural(len(good), 'part')} before it")
    elif bad is not None:
        # Without a whole part the smaller tables may still tell how the run went.
        tables = (*records.RECORDED["summary"], SEGMENTS)
        good, _ = _readable_parts(folder, tables)
        damage.append(f"{bad}; shown is what {', '.join(records.RECORDED['summary'])} tell" if good else bad)
        manifest |= {"records": "summary"}
    if not damage:
        return Run(folder, manifest, origin_of(folder))
    if not good:
        raise BenchctlError(
            f"nothing of this run can be shown: {'; '.join(damage)}", where=str(origin_of(folder)), fix="replay again"
        )
    manifest |= {"damage": damage}
    if bad is None:
        return Run(folder, manifest, origin_of(folder))
    copy = scratch / folder.name
    copy.mkdir(parents=True)
    for part in good:
        for table in tables:
            file = folder / f"{table}-{part}.parquet"
            if file.exists():
                shutil.copyfile(file, copy / file.name)
    return Run(copy, manifest, origin_of(folder))


def _missing(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """Files that a run which has ended must have: every part has every table that was recorded. A killed run may lack some."""
    if manifest.get("status") in (None, "running") or manifest.get("records") not in records.RECORDED:
        return []
    there = {file.name for file in folder.glob("*.parquet")}
    tables = records.RECORDED[manifest["records"]]
    version = manifest.get("schema_version")
    if manifest["records"] == "compact" and isinstance(version, int) and version >= 3:
        tables = (*tables, SEGMENTS)
    numbers = {name.rsplit("-", 1)[-1].removesuffix(".parquet") for name in there}
    lost = sorted(name for n in numbers for table in tables if (name := f"{table}-{n}.parquet") not in there)
    if not lost:
        return []
    more = f" and {len(lost) - 1:,} more are" if len(lost) > 1 else " is"
    return [f"the run has ended, and {lost[0]}{more} missing"]


def _manifest(folder: Path) -> tuple[dict[str, Any], list[str]]:
    file = folder / MANIFEST_FILE
    try:
        manifest = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}, [f"it has no {MANIFEST_FILE}"]
    except (OSError, ValueError) as error:
        return {}, [f"{MANIFEST_FILE} cannot be read ({error})"]
    if not isinstance(manifest, dict):
        return {}, [f"{MANIFEST_FILE} is not a JSON object"]
    version = manifest.get("schema_version", records.SCHEMA_VERSION)
    if not isinstance(version, int) or version > records.SCHEMA_VERSION:
        return manifest, [
            f"it has schema version {version}, and this benchctl knows up to {records.SCHEMA_VERSION}: columns that it does not know are left out"
        ]
    return manifest, []


def _readable_parts(folder: Path, tables: tuple[str, ...]) -> tuple[list[str], str | None]:
    """Parts up to the first of which one of the tables cannot be read whole, and what is wrong with that one."""
    good: list[str] = []
    for part in records.parts(folder):
        for table in tables:
            file = folder / f"{table}-{part}.parquet"
            if not file.exists():
                continue
            try:
                # Every page is read, as damage lies anywhere; the sum of nothing keeps no column in memory.
                pl.scan_parquet(file, glob=False).select(pl.all().null_count()).collect()
            except (pl.exceptions.PolarsError, OSError) as error:
                return good, f"{file.name} cannot be read ({str(error).splitlines()[0][:160]})"
        good.append(part)
    return good, None
