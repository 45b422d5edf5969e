"""From rounds to table columns: batch rows gathered by column, decisions and block events turned from rows into columns.

Must not know files or time. The same integer columns feed the digest and the tables, so what is written is what was hashed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import polars as pl

from benchctl.digest import NULL, word
from engines.interface import Int64Array, ScheduledBatch
from engines.schedulers.decisions import BLOCK_EVENTS, DECISION_KINDS, REASONS, UNITS
from reports import records


def _decoder(words: Sequence[str]) -> tuple[Int64Array, pl.Series]:
    """Sorted word codes, and the words in that order."""
    ordered = sorted(words, key=word)
    return np.array([word(w) for w in ordered], dtype=np.int64), pl.Series([*ordered, None], dtype=pl.String)


def _words(codes: Int64Array, table: tuple[Int64Array, pl.Series]) -> pl.Series:
    """The words of an int64 column of codes; null for NULL."""
    known, words = table
    at = np.searchsorted(known, codes)
    at = np.where(codes == NULL, len(known), at)
    return words.gather(pl.Series(at))


_KINDS = _decoder(tuple(DECISION_KINDS))
_REASONS = _decoder(tuple(REASONS))
_UNITS = _decoder(UNITS)
_EVENTS = _decoder(tuple(BLOCK_EVENTS))


def _ints(values: Any, count: int) -> Int64Array:
    return np.fromiter(values, dtype=np.int64, count=count)


def _nullable(column: Int64Array) -> pl.Series:
    series = pl.Series(column)
    return series.set(series == NULL, None) if (column == NULL).any() else series


class BatchBuffer:
    """Rows of `batches`, column by column, until they are written. Owned by one recorder."""

    _COLUMNS = ("request", "start", "num_tokens", "is_decode", "cached", "yields", "num_blocks", "prompt")

    def __init__(self, compact: bool) -> None:
        self._compact = compact
        self._data: Int64Array = np.empty((len(self._COLUMNS), 4096), dtype=np.int64)
        self.clear()

    def clear(self) -> None:
        self._size = 0
        self._rounds: list[tuple[int, int, float]] = []  # (round, rows, t_end_s)
        self._sampled: list[Int64Array | None] = []  # one entry a round with rows

    def append(
        self, number: int, batch: ScheduledBatch, prompt: Int64Array, t_end_s: float, sampled: Int64Array | None
    ) -> None:
        """Copy one round's columns: they are the scheduler's live state. `prompt`: [num_seqs] prompt lengths."""
        count = len(batch.request)
        if count == 0:
            return
        begin, end = self._size, self._size + count
        if end > self._data.shape[1]:
            grown = np.empty((len(self._COLUMNS), max(end, 2 * self._data.shape[1])), dtype=np.int64)
            grown[:, :begin] = self._data[:, :begin]
            self._data = grown
        data = self._data
        data[0, begin:end] = batch.request
        data[1, begin:end] = batch.start
        data[2, begin:end] = batch.num_tokens
        data[3, begin:end] = batch.is_decode
        data[4, begin:end] = batch.cached_tokens
        data[5, begin:end] = batch.yields_token
        data[6, begin:end] = batch.num_blocks
        data[7, begin:end] = prompt
        self._size = end
        self._rounds.append((number, count, t_end_s))
        self._sampled.append(None if sampled is None else sampled.copy())

    def columns(self) -> list[Int64Array]:
        """The canonical columns of `batches`: round, order, request, start, num_tokens, phase, cached, yields, num_blocks."""
        counts = _ints((count for _, count, _ in self._rounds), len(self._rounds))
        numbers = _ints((number for number, _, _ in self._rounds), len(self._rounds))
        first = np.repeat(np.cumsum(counts) - counts, counts)
        order = np.arange(self._size, dtype=np.int64) - first
        data = self._data[:, : self._size]
        cached = np.where(data[4] < 0, NULL, data[4])
        return [np.repeat(numbers, counts), order, data[0], data[1], data[2], data[3], cached, data[5], data[6]]

    def frames(self) -> tuple[pl.DataFrame, pl.DataFrame]:
        """The tables `batches` and `tokens`."""
        number, order, request, start, num_tokens, phase, cached, yields, num_blocks = self.columns()
        batches = pl.DataFrame(
            {
                "round": number,
                "order": order,
                "request": request,
                "start": start,
                "num_tokens": num_tokens,
                "phase": pl.Series(["prefill", "decode"]).gather(pl.Series(phase)),
                "cached_tokens": _nullable(cached),
                "yields_token": yields.astype(np.bool_),
                "num_blocks": num_blocks,
            }
        )
        rows = np.flatnonzero(yields)
        t_end = np.repeat(
            np.fromiter((t for _, _, t in self._rounds), dtype=np.float64, count=len(self._rounds)),
            _ints((count for _, count, _ in self._rounds), len(self._rounds)),
        )
        # A row that yields has fed all known tokens: the prompt and the tokens before this one.
        index = start[rows] + num_tokens[rows] - self._data[7, : self._size][rows]
        tokens = pl.DataFrame(
            {
                "request": request[rows],
                "index": index,
                "round": number[rows],
                "t_s": t_end[rows],
                "token_id": self._token_ids(yields, len(rows)),
            }
        )
        return batches, tokens

    def _token_ids(self, yields: Int64Array, count: int) -> pl.Series:
        if all(sampled is None for sampled in self._sampled):
            return pl.Series([None], dtype=pl.Int64).new_from_index(0, count)
        at, pieces = 0, []
        for (_, rows, _), sampled in zip(self._rounds, self._sampled, strict=True):
            expected = int(np.count_nonzero(yields[at : at + rows]))
            at += rows
            assert sampled is None or len(sampled) == expected, (len(sampled), expected, "sampled tokens of a round")
            pieces.append(np.full(expected, NULL, dtype=np.int64) if sampled is None else sampled.astype(np.int64))
        return _nullable(np.concatenate(pieces))


def decision_columns(rounds: list[tuple[int, int, list[tuple[Any, ...]]]]) -> list[Int64Array]:
    """Canonical columns of `decisions` from (round, order shift, rows): words as codes, null as NULL."""
    rows = list(chain.from_iterable(r[2] for r in rounds))
    n = len(rows)
    columns = [_per_row(rounds, 0), _ints((r[0] for r in rows), n) + _per_row(rounds, 1)]
    columns.append(_ints((word(r[1]) for r in rows), n))
    columns.append(_ints((r[2] for r in rows), n))
    columns.append(_ints((NULL if r[3] is None else r[3] for r in rows), n))
    columns.append(_ints((word(r[4]) for r in rows), n))
    columns.append(_ints((NULL if r[5] is None else r[5] for r in rows), n))
    columns.append(_ints((NULL if r[6] is None else r[6] for r in rows), n))
    columns.append(_ints((word(r[7]) for r in rows), n))
    return columns


def decision_frame(columns: list[Int64Array]) -> pl.DataFrame:
    number, order, kind, request, other, reason, needed, available, unit = columns
    return pl.DataFrame(
        {
            "round": number,
            "order": order,
            "kind": _words(kind, _KINDS),
            "request": request,
            "other": _nullable(other),
            "reason": _words(reason, _REASONS),
            "needed": _nullable(needed),
            "available": _nullable(available),
            "unit": _words(unit, _UNITS),
        },
        schema=records.schema("decisions"),
    )


def block_columns(rounds: list[tuple[int, int, list[tuple[int, int, str, int, int | None]]]]) -> list[Int64Array]:
    """Canonical columns of `blocks` from (round, order shift, rows)."""
    rows = list(chain.from_iterable(r[2] for r in rounds))
    n = len(rows)
    return [
        _per_row(rounds, 0),
        _ints((r[0] for r in rows), n) + _per_row(rounds, 1),
        _ints((r[1] for r in rows), n),
        _ints((word(r[2]) for r in rows), n),
        _ints((r[3] for r in rows), n),
        _ints((NULL if r[4] is None else r[4] for r in rows), n),
    ]


def block_frame(columns: list[Int64Array]) -> pl.DataFrame:
    number, order, block, event, request, index = columns
    return pl.DataFrame(
        {
            "round": number,
            "order": order,
            "block": block,
            "event": _words(event, _EVENTS),
            "request": request,
            "index": _nullable(index),
        },
        schema=records.schema("blocks"),
    )


def rows_frame(table: str, rows: list[tuple[Any, ...]]) -> pl.DataFrame:
    """A table from rows in the order of its columns."""
    schema = records.schema(table)
    if not rows:
        return pl.DataFrame(schema=schema)
    return pl.DataFrame(dict(zip(schema, zip(*rows, strict=True), strict=True)), schema=schema)


def _per_row(rounds: list[tuple[int, int, list[Any]]], which: int) -> Int64Array:
    """Entry `which` (0 round, 1 order shift) of each round, once for each of its rows."""
    return np.repeat(_ints((r[which] for r in rounds), len(rounds)), _ints((len(r[2]) for r in rounds), len(rounds)))
