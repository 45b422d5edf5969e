"""One part of a run folder: what was gathered since the last one, and how it becomes Parquet files.

All tables of a part stand under one number, each is written under a temporary name and renamed, `rounds` last. So a run
killed at any moment leaves whole files; a reader uses the parts up to the last that has `rounds`, and no table is ahead of
another.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from benchctl.buffers import EventBuffer, block_frame, decision_buffer, decision_frame, merge, rows_frame
from benchctl.digest import DecisionDigest
from benchctl.manifest import unwritable
from benchctl.round_buffers import BatchBuffer, RoundBuffer
from engines.interface import Int64Array
from reports import records
from reports.segments import SEGMENTS


class Log:
    """The decision log of some rounds: gathered row by row or run by run, then turned into columns once."""

    def __init__(self) -> None:
        self.batch = BatchBuffer()
        self.decisions = decision_buffer()
        self.blocks = EventBuffer()

    @cached_property
    def columns(self) -> dict[str, list[Int64Array]]:
        """Canonical columns. Asked for when it is full."""
        blocks, evictions = self.blocks.columns()
        return {
            "batches": self.batch.columns(),
            "decisions": merge(self.decisions.columns(), evictions),
            "blocks": blocks,
        }

    def add_to(self, digest: DecisionDigest) -> None:
        for table, columns in self.columns.items():
            digest.update(table, columns)


class Part:
    """Rows of all tables until they are written. Filled by one recorder, then handed over whole."""

    def __init__(self) -> None:
        self.admissions: list[tuple[Any, ...]] = []
        self.requests: list[tuple[Any, ...]] = []
        self.rounds = RoundBuffer()
        self.log = Log()
        self.num_rows = 0  # about; says when to write

    def frame(self, table: str) -> pl.DataFrame:
        """A table that is kept by rows or by codes."""
        if table == "rounds":
            return self.rounds.frame()
        if table == "decisions":
            return decision_frame(self.log.columns[table])
        if table == "blocks":
            return block_frame(self.log.columns[table])
        return rows_frame(table, self.admissions if table == "admissions" else self.requests)


def disk_fault(error: Exception) -> OSError:
    """What the system said when a file could not be written; polars has it in its text, or says "transport error"."""
    if isinstance(error, OSError):
        return error
    found = re.search(r"os error (\d+)", str(error))
    number = errno.EIO if found is None else int(found[1])
    return OSError(number, str(error).splitlines()[0] if found is None else os.strerror(number))


class PartWriter:
    """Writes parts into a run folder, in order. `mode`: of `reports.records.RECORDED`. Owned by one recorder."""

    def __init__(self, folder: Path, mode: str) -> None:
        self.folder, self.mode = folder, mode
        tables = (*records.RECORDED[mode], SEGMENTS) if mode == "compact" else records.RECORDED[mode]
        self.tables = sorted(tables, key=lambda table: table == "rounds")
        self.num_parts = 0
        self.num_rows = dict.fromkeys(self.tables, 0)  # as stored: a compact row may stand for many
        self.num_bytes = 0

    def write(self, part: Part) -> None:
        """Every recorded table has a file in every part, also where it has no rows. Raises BenchctlError where the disk is full."""
        made: dict[str, pl.DataFrame] = {}
        if "batches" in self.tables:
            make = part.log.batch.compact_frames if self.mode == "compact" else part.log.batch.frames
            made["batches"], made["tokens"] = make(part.log.columns["batches"])
        if self.mode == "compact":
            made["rounds"], made[SEGMENTS] = part.rounds.compact_frames()
        for table in self.tables:
            frame = made.pop(table) if table in made else part.frame(table)
            name = f"{table}-{self.num_parts:05d}.parquet"
            temporary = self.folder / f".{name}.tmp"
            try:
                frame.write_parquet(temporary, compression="zstd", compression_level=1, statistics=False)
                self.num_bytes += temporary.stat().st_size
                os.replace(temporary, self.folder / name)
            except (OSError, pl.exceptions.ComputeError) as error:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                raise unwritable(self.folder, disk_fault(error)) from None
            self.num_rows[table] += frame.height
        self.num_parts += 1
