"""A recorded run, opened for reading: its manifest and its tables.

Must not know how a run is made; works on folders of running, killed and finished runs alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from reports import records
from reports.own_time import charged
from reports.packed import folder_of, origin_of
from traces.errors import BenchctlError

MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True)
class Run:
    """One run folder. Tables read whole are kept, so that several reports of one run read each file once.

    `name` tells runs of one command apart: the folder's name. `origin`: where it came from, if it was read from a copy.
    """

    path: Path
    manifest: dict[str, Any]
    origin: Path | None = None
    _frames: dict[str, pl.DataFrame] = field(default_factory=dict, repr=False, compare=False)

    def scan(self, table: str) -> pl.LazyFrame:
        """The logical table, lazily (`records.scan`)."""
        if table == "requests" and self._charged_twice:
            return self.read(table).lazy()
        if table in self._frames:
            return self._frames[table].lazy()
        try:
            return records.scan(self.path, table)
        except (pl.exceptions.PolarsError, OSError) as error:
            raise self._damaged(table, error) from None

    def read(self, table: str) -> pl.DataFrame:
        """The whole logical table in memory."""
        if table not in self._frames:
            try:
                frame = records.scan(self.path, table).collect()
                if table == "requests" and self._charged_twice:
                    frame = self._charge_once(frame)
                self._frames[table] = frame
            except (pl.exceptions.PolarsError, OSError) as error:
                raise self._damaged(table, error) from None
        return self._frames[table]

    def _damaged(self, table: str, error: Exception) -> BenchctlError:
        return BenchctlError(
            f"table {table} cannot be read: {str(error).splitlines()[0]}",
            where=self.shown,
            fix="the folder is damaged; replay again",
        )

    @property
    def _charged_twice(self) -> bool:
        """Whether stalled_s and preempted_s were summed from the whole durations of rounds that overlap (schema 1)."""
        version = self.manifest.get("schema_version", records.SCHEMA_VERSION)
        return bool(self.manifest.get("overlapped")) and isinstance(version, int) and version < 2

    def _charge_once(self, requests: pl.DataFrame) -> pl.DataFrame:
        """In own times, as schema 2 has them; null where the run did not record what that takes."""
        if not self.has("batches"):
            return requests.with_columns(pl.lit(None, pl.Float64).alias(name) for name in ("stalled_s", "preempted_s"))
        return charged(requests, *(self.scan(table) for table in ("rounds", "batches", "decisions")))

    def has(self, table: str) -> bool:
        """Whether this run recorded the table (it may still have no rows)."""
        mode = self.manifest.get("records")
        if mode in records.RECORDED:
            return table in records.RECORDED[mode]
        return any(self.path.glob(f"{table}-*.parquet"))

    @property
    def name(self) -> str:
        return self.path.name or str(self.path)

    @property
    def shown(self) -> str:
        """The path as a reader knows it, PACK/run for a run of a pack."""
        return str(self.origin or self.path)

    @property
    def status(self) -> str:
        """running (also: killed), complete, interrupted or failed."""
        return str(self.manifest.get("status") or "running")

    @property
    def scheduler(self) -> str:
        return str(self.manifest.get("scheduler") or self.manifest.get("policy") or "?")

    @property
    def family(self) -> str | None:
        """nano or vllm: by whose rules of order its records are read. None: a policy with rules of its own."""
        value = self.manifest.get("family", self.scheduler)
        return value if value in ("nano", "vllm") else None

    @property
    def engine(self) -> str:
        engine = self.manifest.get("engine")
        if isinstance(engine, dict):
            engine = engine.get("name")
        return str(engine or "?")

    @property
    def clock(self) -> str:
        return str(self.manifest.get("clock") or "?")

    def setting(self, name: str, default: Any = None) -> Any:
        """A setting's value by its flag's name (`max_num_seqs`), whether or not the manifest gives its source."""
        for place in (self.manifest.get("limits"), self.manifest.get("config"), self.manifest):
            if isinstance(place, dict) and place.get(name) is not None:
                entry = place[name]
                value = entry["value"] if isinstance(entry, dict) and "value" in entry else entry
                if value is not None:
                    return value
        return default

    @property
    def block_size(self) -> int | None:
        return self.setting("block_size")  # type: ignore[no-any-return]

    @property
    def max_num_seqs(self) -> int | None:
        return self.setting("max_num_seqs")  # type: ignore[no-any-return]

    @property
    def token_budget(self) -> int | None:
        """max_num_batched_tokens; from the rounds where the manifest does not say."""
        value = self.setting("max_num_batched_tokens")
        if value is None and self.read("rounds").height:
            first = self.read("rounds").row(0, named=True)
            value = first["budget_left"] + first["prefill_tokens"] + first["decode_tokens"]
        return value  # type: ignore[no-any-return]

    @cached_property
    def usable_blocks(self) -> int | None:
        """Blocks that requests can hold, the null block not counted: all are free before the first round."""
        rounds = self.scan("rounds").select("free_blocks_start").head(1).collect()
        return int(rounds.item()) if rounds.height else self.setting("usable_blocks")

    @cached_property
    def duration_s(self) -> float:
        """From the run's beginning to the end of its last round, seconds; 0 without rounds."""
        end = self.scan("rounds").select(pl.col("t_end_s").max()).collect().item()
        return float(end or 0.0)

    @cached_property
    def ids(self) -> dict[int, str]:
        """Row of the trace -> the request's id, for every request that was seen."""
        frames = [self.scan(table).select("request", "id") for table in ("admissions", "requests")]
        return dict(pl.concat(frames).unique("request", keep="first", maintain_order=True).collect().iter_rows())

    @cached_property
    def labels(self) -> dict[int, str]:
        """Row of the trace -> a short name for tables and figures: the id where all ids are short, else `#row`."""
        if all(len(name) <= 8 and name.isprintable() and " " not in name for name in self.ids.values()):
            return self.ids
        return {row: f"#{row}" for row in self.ids}


def open_run(path: str | Path) -> Run:
    """Open one run folder, the run of a pack that holds one, or PACK/run.

    Raises BenchctlError where `path` is no run folder, its manifest is unreadable or its schema is newer than this reader.
    """
    folder = folder_of(Path(path)) or Path(path)
    if folder != Path(path) and len(found := find_runs(path)) == 1:
        (folder,) = found
    if not folder.is_dir():
        what = f"{path} is not a folder" if folder.exists() else f"no run at {path}"
        raise BenchctlError(what, fix="give the folder that `benchctl replay --out DIR` wrote: DIR/<scheduler>")
    file = folder / MANIFEST_FILE
    if not file.exists():
        inside = find_runs(folder)
        hint = f"it holds runs: {', '.join(p.name for p in inside[:4])}" if inside else f"it has no {MANIFEST_FILE}"
        fix = (
            f"give one of them, e.g. {origin_of(inside[0])}"
            if inside
            else "give the folder that `benchctl replay --out DIR` wrote: DIR/<scheduler>"
        )
        raise BenchctlError(f"{path} is not a run folder: {hint}", fix=fix)
    try:
        manifest = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise BenchctlError(
            f"the manifest cannot be read: {error}", where=str(file), fix="the folder is damaged; replay again"
        ) from None
    if not isinstance(manifest, dict):
        raise BenchctlError(
            "the manifest is not a JSON object", where=str(file), fix="the folder is damaged; replay again"
        )
    version = manifest.get("schema_version", records.SCHEMA_VERSION)
    if not isinstance(version, int) or version > records.SCHEMA_VERSION:
        raise BenchctlError(
            f"the run has schema version {version}; this benchctl reads up to {records.SCHEMA_VERSION}",
            where=str(file),
            fix="read it with the benchctl that wrote it, or a newer one",
        )
    return Run(folder, manifest, origin_of(folder))


def find_runs(path: str | Path) -> list[Path]:
    """The run folders at `path`: itself, or those directly inside it, by name. Empty if there are none.

    Of a pack the folders of its copy, unpacked for the life of this process (`packed`).
    """
    folder = folder_of(Path(path)) or Path(path)
    if (folder / MANIFEST_FILE).is_file():
        return [folder]
    if not folder.is_dir():
        return []
    return sorted(entry.parent for entry in folder.glob(f"*/{MANIFEST_FILE}"))


def open_runs(paths: Iterable[str | Path]) -> list[Run]:
    """Every run at the given paths, each path a run folder or a folder of runs. Raises BenchctlError where one has none."""
    return [open_run(found) for path in paths for found in (find_runs(path) or [Path(path)])]
