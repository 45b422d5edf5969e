"""The decision log's digest: xxh3 over the canonical rows of `batches`, `decisions` and `blocks`.

Two runs took the same decisions exactly when their digests are equal, whatever the engine, the clock and the parts in
which they were written. A row is its columns in schema order without times, as little-endian int64: a word is the xxh64
of its UTF-8, null is the lowest int64.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import xxhash

from engines.interface import Int64Array

NULL = -(2**63)


@cache
def word(text: str | None) -> int:
    """A word of the closed vocabularies as a signed 64-bit integer."""
    if text is None:
        return NULL
    unsigned: int = xxhash.xxh64_intdigest(text.encode())
    return unsigned - 2**64 if unsigned >= 2**63 else unsigned


class DecisionDigest:
    """Fed with rows in the order of the run, in pieces of any size. Mutable; owned by one recorder."""

    def __init__(self) -> None:
        self._tables = {name: xxhash.xxh3_128() for name in ("batches", "decisions", "blocks")}

    def update(self, table: str, columns: list[Int64Array]) -> None:
        """Add rows: one int64 array [n] a column."""
        if len(columns[0]):
            self._tables[table].update(np.ascontiguousarray(np.stack(columns, axis=1)).astype("<i8", copy=False).data)

    def hexdigest(self) -> str:
        whole = xxhash.xxh3_128()
        for table in self._tables.values():
            whole.update(table.digest())
        digest: str = whole.hexdigest()
        return digest
