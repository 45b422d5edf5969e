"""From rounds to table columns: batch rows gathered by column, decisions and block events turned from rows into columns.

Must not know files or time. The same integer columns feed the digest and the tables, so what is written is what was hashed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import polars as pl

from benchctl.digest import NULL, word
from engines.interface import BoolArray, Int64Array, ScheduledBatch
from engines.schedulers.decisions import (
    ALLOCATE,
    BLOCK_EVENTS,
    DECISION_KINDS,
    EVICT,
    REASONS,
    RUN_EVENTS,
    RUN_WIDTH,
    UNITS,
    BlockEvents,
    BlockRow,
    RoundLog,
)
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


def _ints(values: Iterable[int]) -> Int64Array:
    # array() reads plain ints about twice as fast as numpy does.
    return np.frombuffer(array("q", values), dtype=np.int64)


# A plain dict and a comprehension are the fastest way from words to codes. A word outside the vocabularies is a bug.
_CODES: dict[str | None, int] = {
    text: word(text) for words in (DECISION_KINDS, REASONS, UNITS, BLOCK_EVENTS, (None,)) for text in words
}


class RowBuffer:
    """Rows of `decisions`, kept as int64 columns: round, then those of the rows, the order first.

    Rows are turned into columns as they come, while they are in the processor's cache, and their tuples go at once.
    `words` and `nullable` are the places of words and of ints that may be None within a row. Owned by one recorder.
    """

    def __init__(self, width: int, words: tuple[int, ...], nullable: tuple[int, ...]) -> None:
        self._width, self._words, self._nullable = width, frozenset(words), frozenset(nullable)
        self.clear()

    def clear(self) -> None:
        # New arrays: the old ones' memory is still looked at by whoever has their columns.
        self._columns = [array("q") for _ in range(self._width + 1)]

    def extend(self, number: int, shift: int, rows: list[tuple[Any, ...]]) -> None:
        """Rows of round `number`; `shift` is added to their order."""
        columns = self._columns
        columns[0].fromlist([number] * len(rows))
        for place, values in enumerate(zip(*rows, strict=True)):
            if place in self._words:
                columns[place + 1].fromlist([_CODES[value] for value in values])
            elif place in self._nullable and None in values:
                columns[place + 1].fromlist([NULL if value is None else value for value in values])
            elif place == 0 and shift:
                columns[1].fromlist([value + shift for value in values])
            else:
                columns[place + 1].fromlist(list(values))

    def columns(self) -> list[Int64Array]:
        """Canonical columns: words as codes, null as NULL."""
        return [np.frombuffer(column, dtype=np.int64) for column in self._columns]


def decision_buffer() -> RowBuffer:
    """For rows (order, kind, request, other, reason, needed, available, unit)."""
    return RowBuffer(8, words=(1, 4, 7), nullable=(3, 5, 6))


class EventBuffer:
    """Block events of a part, kept by runs (`engines.schedulers.decisions.BlockEvents`). Owned by one recorder.

    A run costs the loop the same however long it is; rows are made all at once when the part is written.
    """

    def __init__(self) -> None:
        self._runs = array("q")
        self._blocks = array("q")
        self._flags = bytearray()
        self._rounds: list[tuple[int, int, int]] = []  # (round, shift of its orders, runs)

    def extend(self, number: int, shift: int, events: BlockEvents) -> int:
        """Events of round `number`; `shift` is added to their order. Returns how many rows they are, about."""
        if events.runs:
            self._runs.fromlist(events.runs)
            self._blocks.fromlist(events.blocks)
            self._flags += events.flags
            self._rounds.append((number, shift, len(events.runs) // RUN_WIDTH))
        return len(events.blocks)

    def extend_rows(self, number: int, shift: int, rows: Iterable[BlockRow]) -> None:
        """The same from plain rows, as a policy of the user's own may give them."""
        log = RoundLog()
        for order, block, event, request, index in rows:
            log.order = order
            log.block(event, block, request, index)
        self.extend(number, shift, log.blocks)

    def columns(self) -> tuple[list[Int64Array], list[Int64Array]]:
        """(canonical columns of `blocks`, those of the evictions among `decisions`)."""
        runs = np.frombuffer(self._runs, dtype=np.int64).reshape(-1, RUN_WIDTH)
        blocks = np.frombuffer(self._blocks, dtype=np.int64)
        flags = np.frombuffer(bytes(self._flags), dtype=np.uint8)
        what, order, request, first, step, count = runs.T
        per_round = np.array(self._rounds, dtype=np.int64).reshape(-1, 3)
        number = np.repeat(per_round[:, 0], per_round[:, 2])
        order = order + np.repeat(per_round[:, 1], per_round[:, 2])
        # One row a block; then an `evict` row in front of each that lost its content.
        run = np.repeat(np.arange(len(runs)), count)
        place = np.arange(len(blocks)) - np.repeat(np.cumsum(count) - count, count)
        lost = (flags != 0) & (what[run] == ALLOCATE)
        lost_so_far = np.cumsum(lost)
        lost_before = np.concatenate([[0], lost_so_far])[np.cumsum(count) - count]  # [runs]
        order = order[run] + place + 2 * (lost_so_far - lost_before[run])
        index = np.where(first[run] == NULL, NULL, first[run] + place * step[run])
        event = _RUN_CODES[what[run], flags]
        columns = [number[run], order, blocks, event, request[run], index]
        evictions = np.flatnonzero(lost | (what[run] == EVICT))
        # The decision follows the event: by two orders before the block is allocated.
        decided = order[evictions] - lost[evictions] + (what[run][evictions] == EVICT)
        if len(lost) and lost_so_far[-1]:
            columns = [np.repeat(column, 1 + lost) for column in columns]
            at = np.flatnonzero(lost) + np.arange(lost_so_far[-1])
            columns[1][at] -= 2
            columns[3][at] = word("evict")
            columns[5][at] = NULL
        n = len(evictions)
        null, zero = np.full(n, NULL), np.zeros(n, dtype=np.int64)
        of = request[run][evictions]
        decisions = [number[run][evictions], decided, zero + word("evict"), of, null, zero + word("reused")]
        return columns, [*decisions, null, null, zero + word(None)]


_RUN_CODES = np.array([[word(plain), word(flagged)] for plain, flagged in RUN_EVENTS], dtype=np.int64)


def merge(first: list[Int64Array], second: list[Int64Array]) -> list[Int64Array]:
    """Two tables that begin with round and order, each in that order, as one."""
    if not len(second[0]):
        return first
    number, order = (np.concatenate(pair) for pair in zip(first[:2], second[:2], strict=True))
    at = np.lexsort((order, number))
    return [np.concatenate(pair)[at] for pair in zip(first, second, strict=True)]


def _nullable(column: Int64Array) -> pl.Series:
    series = pl.Series(column)
    return series.set(series == NULL, None) if (column == NULL).any() else series


class BatchBuffer:
    """Rows of `batches`, column by column, of one part. Owned by one recorder until it is handed to be written."""

    _COLUMNS = ("request", "start", "num_tokens", "is_decode", "cached", "yields", "num_blocks", "prompt")

    def __init__(self, capacity: int = 4096) -> None:
        self._data: Int64Array = np.empty((len(self._COLUMNS), capacity), dtype=np.int64)
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
        counts = _ints(count for _, count, _ in self._rounds)
        numbers = _ints(number for number, _, _ in self._rounds)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        order = np.arange(self._size, dtype=np.int64) - first
        data = self._data[:, : self._size]
        cached = np.where(data[4] < 0, NULL, data[4])
        return [np.repeat(numbers, counts), order, data[0], data[1], data[2], data[3], cached, data[5], data[6]]

    def frames(self, columns: list[Int64Array]) -> tuple[pl.DataFrame, pl.DataFrame]:
        """The tables `batches` and `tokens` of `columns()`."""
        number, order, request, start, num_tokens, phase, cached, yields, num_blocks = columns
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
            _ints(count for _, count, _ in self._rounds),
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

    def compact_frames(self, columns: list[Int64Array]) -> tuple[pl.DataFrame, pl.DataFrame]:
        """The same tables with stretches of equal decode rows folded into one row each (`reports.records.COMPACT`)."""
        batches, tokens = self.frames(columns)
        number, order, request, start, num_tokens, phase, cached, yields, num_blocks = columns
        # A decode feeds one token and yields one, so the rest is the same once these are.
        rows, counts = fold(request, number, start, (order, num_blocks), may_grow=phase == 1)
        folded = batches[rows].with_columns(pl.Series("num_rounds", counts))
        if tokens["token_id"].null_count() < tokens.height:
            return folded, tokens.with_columns(pl.lit(1, dtype=pl.Int64).alias("num_rounds"))
        index = tokens["index"].to_numpy()
        rows, counts = fold(
            tokens["request"].to_numpy(),
            tokens["round"].to_numpy(),
            index,
            (),
            may_grow=np.ones(len(index), dtype=np.bool_),
        )
        return folded, tokens[rows].with_columns(pl.Series("num_rounds", counts))

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


def fold(
    request: Int64Array, number: Int64Array, counter: Int64Array, same: tuple[Int64Array, ...], *, may_grow: BoolArray
) -> tuple[Int64Array, Int64Array]:
    """Stretches of rows of one request in consecutive rounds whose `counter` grows by one a round and `same` stay equal.

    All arrays are [n]; rows where `may_grow` is false stand alone. Returns (the first row of each stretch, in row order, how
    many rows it stands for).
    """
    n = len(request)
    if n == 0:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    at = np.lexsort((number, request))
    before, after = at[:-1], at[1:]
    joined = may_grow[before] & may_grow[after] & (request[before] == request[after])
    joined &= (number[after] == number[before] + 1) & (counter[after] == counter[before] + 1)
    for column in same:
        joined &= column[before] == column[after]
    begins = np.flatnonzero(np.concatenate([[True], ~joined]))
    counts = np.diff(np.append(begins, n))
    rows = at[begins]
    in_order = np.argsort(rows)
    return rows[in_order], counts[in_order]


def rows_frame(table: str, rows: list[tuple[Any, ...]]) -> pl.DataFrame:
    """A table from rows in the order of its columns."""
    schema = records.schema(table)
    if not rows:
        return pl.DataFrame(schema=schema)
    return pl.DataFrame(dict(zip(schema, zip(*rows, strict=True), strict=True)), schema=schema)
