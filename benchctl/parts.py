"""Writes the Parquet parts of a run folder: all tables under one number, `rounds` last, each complete from the moment it has its name.

A part is written under a temporary name and renamed, so a run killed at any moment leaves whole files; a reader uses the parts
up to the last that has `rounds`, so no table is ahead of another.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import polars as pl

from reports import records


class PartWriter:
    """Owned by one recorder. `tables`: those that this run records."""

    def __init__(self, folder: Path, tables: tuple[str, ...]) -> None:
        self.folder = folder
        self.tables = sorted(tables, key=lambda table: table == "rounds")
        self.num_parts = 0
        self.num_rows = dict.fromkeys(tables, 0)
        self.num_bytes = 0

    def write(self, frames: Mapping[str, pl.DataFrame]) -> None:
        """Write one part. Every recorded table has a file in every part, also where it has no rows."""
        for table in self.tables:
            frame = frames[table]
            name = f"{table}-{self.num_parts:05d}.parquet"
            temporary = self.folder / f".{name}.tmp"
            frame.write_parquet(temporary, compression="zstd", compression_level=1, statistics=False)
            self.num_bytes += temporary.stat().st_size
            os.replace(temporary, self.folder / name)
            self.num_rows[table] += frame.height
        self.num_parts += 1


def empty(table: str) -> pl.DataFrame:
    return pl.DataFrame(schema=records.schema(table))
