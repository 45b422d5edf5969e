"""The decision log that stands beside a baseline: one zip for each entry, so that a failing gate can name the first decision that differs.

The baseline's JSON says *that* something changed; for *what*, the old decisions are needed, and the code that made them is gone.
A log is a run folder without what can be left out: no token times, no host times, one time a round, batches as steps.
It opens as a run, so `compare` and `explain` work on it.
"""

from __future__ import annotations

import io
import json
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import polars as pl

from reports.run import MANIFEST_FILE, Run, open_run
from traces.errors import BenchctlError

TABLES = ("admissions", "requests", "rounds", "batches", "decisions", "blocks")
LEFT_OUT = (
    "t_start_s", "t_scheduled_s", "t_executed_s", "schedule_s", "prepare_s", "device_s", "update_s", "record_s", "flops", "bytes",
    "padded_tokens", "mode",
)  # fmt: skip
EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip knows: equal runs give equal files
KEPT = (
    "schema_version", "scheduler", "policy", "engine", "clock", "arrivals", "config", "limits", "trace", "num_requests", "digest",
    "status", "family",
)  # fmt: skip


def write_log(run: Run, path: Path) -> None:
    """Replace the log at `path`. Raises BenchctlError where it cannot be written."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(temporary, "w") as archive:
            manifest = {key: run.manifest[key] for key in KEPT if key in run.manifest} | {"records": "compact"}
            _add(archive, MANIFEST_FILE, json.dumps(manifest, indent=1, ensure_ascii=False).encode())
            for table in TABLES:
                buffer = io.BytesIO()
                _packed(run, table).write_parquet(buffer, compression="zstd", compression_level=19, statistics=False)
                _add(archive, f"{table}-00000.parquet", buffer.getvalue())
        temporary.replace(path)
    except OSError as error:
        raise BenchctlError(
            f"the decision log cannot be written: {error.strerror}",
            where=str(path),
            fix="pass --no-log, or another --baseline",
        ) from None


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    info = zipfile.ZipInfo(name, EPOCH)
    info.compress_type = zipfile.ZIP_DEFLATED  # what Parquet leaves: its footers
    archive.writestr(info, data, compresslevel=9)


def _packed(run: Run, table: str) -> pl.DataFrame:
    frame = run.read(table)
    if table == "requests":
        return frame.select("request", "id", "status", "reason")  # for the names of those who were refused
    if table == "rounds":
        return frame.drop(LEFT_OUT)
    if table == "batches":
        # Steps of one request follow each other by one round and one token nearly always: as differences they all but vanish.
        previous = pl.col("round", "start").shift(1).over("request").fill_null(0)
        return frame.sort("request", "round").with_columns(pl.col("round", "start") - previous)
    return frame


@contextmanager
def open_log(path: Path) -> Iterator[Run]:
    """The log as a run, unpacked in a folder that is gone afterwards. Raises BenchctlError where it is no log."""
    with tempfile.TemporaryDirectory(prefix="benchctl-log-") as folder:
        yield unpack_log(path, Path(folder) / path.name.removesuffix(".zip"))


def unpack_log(path: Path, folder: Path) -> Run:
    """Unpack to a new run folder."""
    folder.mkdir(parents=True)
    try:
        with zipfile.ZipFile(path) as archive:
            for name in (MANIFEST_FILE, *(f"{table}-00000.parquet" for table in TABLES)):
                with archive.open(name) as source, (folder / name).open("wb") as target:
                    shutil.copyfileobj(source, target)
        _unpack_tables(folder)
    except (OSError, KeyError, zipfile.BadZipFile, pl.exceptions.PolarsError) as error:
        raise BenchctlError(
            f"this is no decision log of a baseline: {error}",
            where=str(path),
            fix="write it again: benchctl gate RUN --baseline FILE --update",
        ) from None
    return open_run(folder)


def _unpack_tables(folder: Path) -> None:
    rounds = pl.read_parquet(folder / "rounds-00000.parquet")
    begin = pl.col("t_end_s").shift(1).fill_null(0.0)
    rounds.with_columns(
        begin.alias("t_start_s"), begin.alias("t_scheduled_s"), pl.col("t_end_s").alias("t_executed_s")
    ).write_parquet(folder / "rounds-00000.parquet")
    batches = pl.read_parquet(folder / "batches-00000.parquet")
    batches = batches.with_columns(pl.col("round", "start").cum_sum().over("request")).sort("round", "order")
    batches.write_parquet(folder / "batches-00000.parquet")
