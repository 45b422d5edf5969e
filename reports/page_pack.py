"""Tables of whole numbers as one compressed text, for a script in a page to unfold: the format, and nothing about runs.

Layout, before zlib and base64: uint32 length of the header, the header (JSON), then the columns one after the other. A
column is 1 to 6 byte planes, lowest first; a plane holds one byte of every value, so that the compressor sees equal bytes
side by side. `reports/assets/data.js` is the reader; `unpack` here is its twin for tests.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

Ints = np.ndarray[Any, np.dtype[np.int64]]

PLAIN, DELTA, NULLABLE, FLOAT = "plain", "delta", "nullable", "float"


@dataclass(slots=True)
class Pack:
    """Tables being collected. Mutable, owned by whoever fills it; `text` gives the whole."""

    extra: dict[str, Any] = field(default_factory=dict)  # goes into the header as it is
    _tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    _planes: list[bytes] = field(default_factory=list)

    def add(self, table: str, columns: Mapping[str, Any], how: Mapping[str, str] | None = None) -> None:
        """A table of equally long columns: numpy arrays or Polars series of whole numbers.

        `how`: DELTA for columns that change little from row to row, NULLABLE for those with nulls (Polars), FLOAT for
        float32 with NaN for null; PLAIN otherwise. Values must lie within ± 2**46.
        """
        described: dict[str, Any] = {}
        size = 0
        for name, values in columns.items():
            kind = (how or {}).get(name, PLAIN)
            size = len(values)
            coded = _coded(values, kind)
            width = max(1, (int(coded.max()).bit_length() + 7) // 8) if size else 1
            described[name] = [kind, width]
            for plane in range(width):
                self._planes.append(((coded >> np.uint64(8 * plane)) & np.uint64(255)).astype(np.uint8).tobytes())
        self._tables[table] = {"rows": size, "columns": described}

    def text(self) -> str:
        """base64 of everything."""
        header = json.dumps({"tables": self._tables, **self.extra}, ensure_ascii=True, separators=(",", ":")).encode()
        data = struct.pack("<I", len(header)) + header + b"".join(self._planes)
        return base64.b64encode(zlib.compress(data, 6)).decode("ascii")


def _coded(values: Any, kind: str) -> np.ndarray[Any, np.dtype[np.uint64]]:
    if kind == FLOAT:
        floats = values.cast(pl.Float32).fill_null(float("nan")).to_numpy()
        return np.ascontiguousarray(floats, dtype="<f4").view("<u4").astype(np.uint64)
    if kind == NULLABLE:
        series = values if isinstance(values, pl.Series) else pl.Series(values)
        numbers = series.fill_null(0).to_numpy().astype(np.int64)
        return np.where(series.is_null().to_numpy(), np.uint64(0), _zigzag(numbers) + np.uint64(1))
    numbers = np.asarray(values.to_numpy() if isinstance(values, pl.Series) else values).astype(np.int64)
    return _zigzag(np.diff(numbers, prepend=0) if kind == DELTA else numbers)


def _zigzag(values: Ints) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """0, -1, 1, -2 … -> 0, 1, 2, 3 …"""
    return ((values << 1) ^ (values >> 63)).view(np.uint64)


def micros(values: pl.Series) -> pl.Series:
    """Seconds -> whole microseconds, null stays null."""
    return (values * 1e6).round(0).cast(pl.Int64)


def unpack(text: str) -> tuple[dict[str, Any], dict[str, dict[str, list[Any]]]]:
    """(header, table -> column -> values), None for nulls. What the page's script does, for tests."""
    data = zlib.decompress(base64.b64decode(text))
    (length,) = struct.unpack_from("<I", data)
    header = json.loads(data[4 : 4 + length])
    at = 4 + length
    tables: dict[str, dict[str, list[Any]]] = {}
    for table, about in header["tables"].items():
        rows = about["rows"]
        tables[table] = {}
        for name, (kind, width) in about["columns"].items():
            coded = np.zeros(rows, dtype=np.uint64)
            for plane in range(width):
                coded |= np.frombuffer(data, np.uint8, rows, at).astype(np.uint64) << np.uint64(8 * plane)
                at += rows
            tables[table][name] = list(_decoded(coded, kind))
    return header, tables


def _decoded(coded: np.ndarray[Any, np.dtype[np.uint64]], kind: str) -> Iterable[Any]:
    if kind == FLOAT:
        return [None if np.isnan(value) else float(value) for value in coded.astype("<u4").view("<f4")]
    if kind == NULLABLE:
        plain = _unzigzag(coded - np.uint64(1))
        return [None if not c else int(v) for c, v in zip(coded, plain, strict=True)]
    values = _unzigzag(coded)
    return list((np.cumsum(values) if kind == DELTA else values).tolist())


def _unzigzag(coded: np.ndarray[Any, np.dtype[np.uint64]]) -> Ints:
    return (coded >> np.uint64(1)).view(np.int64) ^ -(coded & np.uint64(1)).view(np.int64)
