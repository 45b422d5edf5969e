"""The decision log's digest: xxh3 over `batches`, `decisions` and `blocks` in canonical form.

Two runs took the same decisions exactly when their digests are equal, whatever the engine, the clock and the parts in
which they were written. Canonical: each column without times as a stream of little-endian int64, a word as the xxh64 of its
UTF-8, null as the lowest int64; a stream a column, so that rows are hashed as they are stored, and one hash over all of them.
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

    _COLUMNS = {"batches": 9, "decisions": 9, "blocks": 6}

    def __init__(self) -> None:
        self._streams = {table: [xxhash.xxh3_128() for _ in range(count)] for table, count in self._COLUMNS.items()}

    def update(self, table: str, columns: list[Int64Array]) -> None:
        """Add rows: one int64 array [n] a column, in the order of the table's columns."""
        for stream, column in zip(self._streams[table], columns, strict=True):
            stream.update(np.ascontiguousarray(column, dtype="<i8").data)

    def hexdigest(self) -> str:
        whole = xxhash.xxh3_128()
        for stream in (stream for streams in self._streams.values() for stream in streams):
            whole.update(stream.digest())
        digest: str = whole.hexdigest()
        return digest
