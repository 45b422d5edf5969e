"""From decisions and block events to table columns.

Must not know files or time. The same integer columns feed the digest and the tables, so what is written is what was hashed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import polars as pl

from benchctl.digest import NULL, word
from engines.interface import Int64Array
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
    # An enum is written three times as fast as strings are; readers see strings (`reports.records.scan`).
    return np.array([word(w) for w in ordered], dtype=np.int64), pl.Series([*ordered, None], dtype=pl.Enum(ordered))


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

    `words` and `nullable` are the places of words and of ints that may be None within a row. Owned by one recorder.
    """

    def __init__(self, width: int, words: tuple[int, ...], nullable: tuple[int, ...]) -> None:
        self._width, self._words, self._nullable = width, frozenset(words), frozenset(nullable)
        self._rows: list[tuple[Any, ...]] = []
        self._rounds: list[tuple[int, int, int]] = []  # (round, shift of its orders, rows)

    def extend(self, number: int, shift: int, rows: list[tuple[Any, ...]]) -> None:
        """Rows of round `number`; `shift` is added to their order."""
        self._rows += rows
        self._rounds.append((number, shift, len(rows)))

    def columns(self) -> list[Int64Array]:
        """Canonical columns: words as codes, null as NULL."""
        per_round = np.array(self._rounds, dtype=np.int64).reshape(-1, 3)
        out = [np.repeat(per_round[:, 0], per_round[:, 2])]
        values: Any
        for place, values in enumerate(zip(*self._rows, strict=True) if self._rows else [()] * self._width):
            if place in self._words:
                values = [_CODES[value] for value in values]
            elif place in self._nullable and None in values:
                values = [NULL if value is None else value for value in values]
            out.append(_ints(values))
        out[1] = out[1] + np.repeat(per_round[:, 1], per_round[:, 2])
        return out


def decision_buffer() -> RowBuffer:
    """For rows (order, kind, request, other, reason, needed, available, unit)."""
    return RowBuffer(8, words=(1, 4, 7), nullable=(3, 5, 6))


class EventBuffer:
    """Block events of a part, kept by runs (`engines.schedulers.decisions.BlockEvents`). Owned by one recorder.

    A run costs the loop the same however long it is; rows are made all at once when the part is written.
    """

    def __init__(self) -> None:
        self._events: list[BlockEvents] = []
        self._rounds: list[tuple[int, int, int]] = []  # (round, shift of its orders, runs)

    def extend(self, number: int, shift: int, events: BlockEvents) -> int:
        """Events of round `number`; `shift` is added to their order. Returns how many rows they are, about."""
        if events.runs:
            self._events.append(events)
            self._rounds.append((number, shift, len(events.runs) // RUN_WIDTH))
        return len(events.blocks)

    def extend_stretch(self, first: int, shift: int, events: BlockEvents, runs: list[int]) -> int:
        """Events of rounds from `first` on, `runs` of each; `shift` is for the first."""
        if events.runs:
            self._events.append(events)
            for number, count in enumerate(runs, first):
                if count:
                    self._rounds.append((number, shift if number == first else 0, count))
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
        all_runs, all_blocks, all_flags = array("q"), array("q"), bytearray()
        for events in self._events:
            all_runs.fromlist(events.runs)
            all_blocks.fromlist(events.blocks)
            all_flags += events.flags
        runs = np.frombuffer(all_runs, dtype=np.int64).reshape(-1, RUN_WIDTH)
        blocks = np.frombuffer(all_blocks, dtype=np.int64)
        flags = np.frombuffer(bytes(all_flags), dtype=np.uint8)
        what, order, request, first, step, count = runs.T
        per_round = np.array(self._rounds, dtype=np.int64).reshape(-1, 3)
        number = np.repeat(per_round[:, 0], per_round[:, 2])
        order = order + np.repeat(per_round[:, 1], per_round[:, 2])
        # One row a block, and an `evict` row in front of each that lost its content. What is the same in a run is repeated:
        # runs are long, flags are few.
        begins = np.cumsum(count) - count
        flagged = np.flatnonzero(flags)
        flagged_run = np.searchsorted(begins, flagged, side="right") - 1
        is_lost = what[flagged_run] == ALLOCATE
        lost, lost_run = flagged[is_lost], flagged_run[is_lost]  # places among the blocks, and their runs
        num_lost = np.bincount(lost_run, minlength=len(runs))
        rows = count + num_lost
        starts = np.cumsum(rows) - rows
        at = np.arange(len(blocks) + len(lost))
        evict_at = lost + np.arange(len(lost))
        orders = np.repeat(order - starts - (np.cumsum(num_lost) - num_lost), rows) + at
        index = np.repeat(first - starts * step, rows) + at * np.repeat(
            step, rows
        )  # a step of 0 where there is no index
        event = np.repeat(_RUN_CODES[what, 0], rows)
        if len(flagged):
            event[flagged + np.searchsorted(lost, flagged, side="right")] = _RUN_CODES[what[flagged_run], 1]
        if len(lost):
            # The decision stands between: the orders of an eviction, its decision and the block's new use follow each other.
            seen = np.zeros(len(at), dtype=np.int64)
            seen[evict_at + 1] = 1
            orders += np.cumsum(seen)
            seen[evict_at + 1], seen[evict_at] = 0, 1
            index -= np.cumsum(seen) - np.repeat(np.cumsum(num_lost) - num_lost, rows)
            kept = seen == 0
            given, blocks = blocks, np.empty(len(at), dtype=np.int64)
            blocks[kept], blocks[evict_at] = given, given[lost]
            event[evict_at], index[evict_at] = word("evict"), NULL
        columns = [np.repeat(number, rows), orders, blocks, event, np.repeat(request, rows), index]
        singles = np.flatnonzero(what == EVICT)  # runs of one block: the event and the decision after it
        evictions = np.sort(np.concatenate([evict_at, starts[singles]])) if len(singles) else evict_at
        n = len(evictions)
        null, zero = np.full(n, NULL), np.zeros(n, dtype=np.int64)
        decisions = [columns[0][evictions], orders[evictions] + 1, zero + word("evict"), columns[4][evictions], null]
        return columns, [*decisions, zero + word("reused"), null, null, zero + word(None)]


_RUN_CODES = np.array([[word(plain), word(flagged)] for plain, flagged in RUN_EVENTS], dtype=np.int64)


def merge(first: list[Int64Array], second: list[Int64Array]) -> list[Int64Array]:
    """Two tables that begin with round and order, each in that order, as one."""
    if not len(second[0]):
        return first
    number, order = (np.concatenate(pair) for pair in zip(first[:2], second[:2], strict=True))
    # One key, and a stable sort: of two tables in order it only has to merge.
    at = np.argsort(number * (int(order.max()) + 1) + order, kind="stable")
    return [np.concatenate(pair)[at] for pair in zip(first, second, strict=True)]


def nullable(column: Int64Array) -> pl.Series:
    """NULL becomes null."""
    series = pl.Series(column)
    return series.set(series == NULL, None) if (column == NULL).any() else series


def decision_frame(columns: list[Int64Array]) -> pl.DataFrame:
    number, order, kind, request, other, reason, needed, available, unit = columns
    return pl.DataFrame(
        {
            "round": number,
            "order": order,
            "kind": _words(kind, _KINDS),
            "request": request,
            "other": nullable(other),
            "reason": _words(reason, _REASONS),
            "needed": nullable(needed),
            "available": nullable(available),
            "unit": _words(unit, _UNITS),
        }
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
            "index": nullable(index),
        }
    )


def rows_frame(table: str, rows: list[tuple[Any, ...]]) -> pl.DataFrame:
    """A table from rows in the order of its columns."""
    schema = records.schema(table)
    if not rows:
        return pl.DataFrame(schema=schema)
    return pl.DataFrame(dict(zip(schema, zip(*rows, strict=True), strict=True)), schema=schema)
