"""The batches and the times of a part's rounds, kept as they come and turned into columns when the part is written.

A round of steady decodes is kept as what it shares with those before and after it, a stretch of them like one. Must not know
files or time.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np
import polars as pl

from benchctl.buffers import nullable
from benchctl.digest import NULL
from engines.interface import Int64Array, ScheduledBatch
from engines.steady_batch import ExtraRows, SteadyBatch
from reports import records
from reports.segments import DERIVED, LISTS, segment_schema

FOLD_ATTEMPTS = 8
PHASES = pl.Series(["prefill", "decode"], dtype=pl.Enum(["prefill", "decode"]))

# (batch, rounds) of steady decodes; (columns, 1) of any other round: int64 [7, n] as in `_COLUMNS`
Piece = tuple[SteadyBatch | Int64Array, int]


def _joined(values: Iterable[int]) -> Int64Array:
    return np.frombuffer(array("q", values), dtype=np.int64)


def _fill(columns: list[Int64Array], rows: Int64Array, values: list[Int64Array]) -> None:
    """`values`: [len(rows)] of num_tokens, phase, cached_tokens (-1: null), yields and num_blocks."""
    values[2] = np.where(values[2] < 0, NULL, values[2])
    for column, given in zip(columns, values, strict=True):
        column[rows] = given


class BatchBuffer:
    """Rows of `batches`, of one part. Owned by one recorder until it is handed to be written."""

    _COLUMNS = ("request", "start", "num_tokens", "is_decode", "cached_tokens", "yields_token", "num_blocks")

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._size = 0
        self._numbers = array("q")  # a round each, as the two below
        self._rows = array("q")
        self._t_end_s = array("d")
        self._sampled: list[Int64Array | None] = []
        self._any_sampled = False
        self._counts: Int64Array = np.empty(0, dtype=np.int64)  # `_rows`, when the part is written
        self._block_size = 0  # of steady batches; 0: there was none
        self.prompt_tokens: Int64Array = np.empty(0, dtype=np.int64)  # by row of the trace; set before it is written

    def append(self, number: int, batch: ScheduledBatch, t_end_s: float, sampled: Int64Array | None) -> None:
        """Keep one round. What is not steady is copied: it is the scheduler's live state."""
        count = batch.num_seqs
        if count == 0:
            return
        if isinstance(batch, SteadyBatch):
            self._pieces.append((batch, 1))
        else:
            self._pieces.append((np.array([getattr(batch, name) for name in self._COLUMNS], dtype=np.int64), 1))
        self._size += count
        self._numbers.append(number)
        self._rows.append(count)
        self._t_end_s.append(t_end_s)
        self._sampled.append(None if sampled is None else sampled.copy())
        self._any_sampled = self._any_sampled or sampled is not None

    def extend(self, first: int, batch: SteadyBatch, t_end_s: list[float]) -> None:
        """Keep a stretch of rounds from number `first` on."""
        rounds = len(t_end_s)
        self._pieces.append((batch, rounds))
        self._size += rounds * batch.num_decodes
        self._numbers.extend(range(first, first + rounds))
        self._rows.extend([batch.num_decodes] * rounds)
        self._t_end_s.extend(t_end_s)
        self._sampled.extend([None] * rounds)

    def columns(self) -> list[Int64Array]:
        """The canonical columns of `batches`: round, order, request, start, num_tokens, phase, cached, yields, num_blocks."""
        counts = self._counts = np.frombuffer(self._rows, dtype=np.int64)
        numbers = np.frombuffer(self._numbers, dtype=np.int64)
        size = self._size
        order = np.arange(size) - np.repeat(np.cumsum(counts) - counts, counts)
        request, start = np.empty(size, dtype=np.int64), np.empty(size, dtype=np.int64)
        rest: list[tuple[int, Int64Array]] = []  # (first row, columns from num_tokens on) of what is not steady
        extras: list[tuple[int, ExtraRows]] = []  # (first row, admissions)
        at, block_size = 0, 0
        for piece, rounds in self._pieces:
            if isinstance(piece, np.ndarray):
                end = at + piece.shape[1]
                request[at:end], start[at:end] = piece[0], piece[1]
                rest.append((at, piece[2:]))
                at = end
                continue
            block_size, n = piece.block_size, piece.num_decodes
            end = at + rounds * n
            if rounds == 1:
                request[at:end] = piece.requests
                np.add(piece.bases, piece.age, out=start[at:end])
            else:
                request[at:end].reshape(rounds, n)[:] = piece.requests
                ages = np.arange(piece.age, piece.age + rounds)
                np.add(piece.bases[None, :], ages[:, None], out=start[at:end].reshape(rounds, n))
            at = end
            if piece.extra is not None:
                extras.append((at, piece.extra))
                at += len(piece.extra.request)
        assert at == size, (at, size)
        self._block_size = block_size
        one = np.ones(size, dtype=np.int64)
        others = [one, one.copy(), np.full(size, NULL, dtype=np.int64), one.copy(), start // max(block_size, 1) + 1]
        if extras:
            rows = _joined(first for at, extra in extras for first in range(at, at + len(extra.request)))
            request[rows] = _joined(value for _, extra in extras for value in extra.request)
            start[rows] = _joined(value for _, extra in extras for value in extra.start)
            num_tokens = _joined(value for _, extra in extras for value in extra.num_tokens)
            cached = _joined(value for _, extra in extras for value in extra.cached_tokens)
            yields = _joined(value for _, extra in extras for value in extra.yields_token)
            num_blocks = _joined(value for _, extra in extras for value in extra.num_blocks)
            _fill(others, rows, [num_tokens, np.zeros(len(rows), dtype=np.int64), cached, yields, num_blocks])
        if rest:
            firsts = np.array([first for first, _ in rest])
            lengths = np.array([columns.shape[1] for _, columns in rest])
            rows = np.repeat(firsts - (np.cumsum(lengths) - lengths), lengths) + np.arange(int(lengths.sum()))
            _fill(others, rows, list(np.concatenate([columns for _, columns in rest], axis=1)))
        return [np.repeat(numbers, counts), order, request, start, *others]

    def frames(self, columns: list[Int64Array], chosen: Int64Array | None = None) -> tuple[pl.DataFrame, pl.DataFrame]:
        """The tables `batches` and `tokens` of `columns()`, or of the rows `chosen` among them, whose columns these are then."""
        number, order, request, start, num_tokens, phase, cached, yields, num_blocks = columns
        batches = pl.DataFrame(
            {
                "round": number,
                "order": order,
                "request": request,
                "start": start,
                "num_tokens": num_tokens,
                "phase": PHASES.gather(pl.Series(phase)),
                "cached_tokens": nullable(cached),
                "yields_token": yields.astype(np.bool_),
                "num_blocks": num_blocks,
            }
        )
        rows = np.flatnonzero(yields)
        t_end = np.repeat(np.frombuffer(self._t_end_s, dtype=np.float64), self._counts)
        if chosen is not None:
            t_end = t_end[chosen]
        # A row that yields has fed all known tokens: the prompt and the tokens before this one.
        index = start[rows] + num_tokens[rows] - self.prompt_tokens[request[rows]]
        tokens = pl.DataFrame(
            {
                "request": request[rows],
                "index": index,
                "round": number[rows],
                "t_s": t_end[rows],
                "token_id": self._token_ids(yields, len(rows)) if chosen is None else _no_ids(len(rows)),
            }
        )
        return batches, tokens

    def compact_frames(self, columns: list[Int64Array]) -> tuple[pl.DataFrame, pl.DataFrame]:
        """The same tables with the decodes of one request in successive rounds folded into one row (`reports.segments`)."""
        rows, counts = fold(columns, self._block_size)
        whole = len(rows) == self._size
        first = columns if whole else [column[rows] for column in columns]
        batches, tokens = self.frames(first, None if whole else rows)
        num_rows = pl.Series("num_rows", counts)
        if not self._any_sampled:
            tokens = tokens.with_columns(num_rows.filter(batches["yields_token"]))
        else:
            tokens = self.frames(columns)[1].with_columns(pl.lit(1, dtype=pl.Int64).alias("num_rows"))
        block_size = pl.lit(self._block_size, dtype=pl.Int64).alias("block_size")
        return batches.with_columns(num_rows, block_size), tokens

    def _token_ids(self, yields: Int64Array, count: int) -> pl.Series:
        if not self._any_sampled:
            return _no_ids(count)
        at, pieces = 0, []
        for rows, sampled in zip(self._counts.tolist(), self._sampled, strict=True):
            expected = int(np.count_nonzero(yields[at : at + rows]))
            at += rows
            assert sampled is None or len(sampled) == expected, (len(sampled), expected, "sampled tokens of a round")
            pieces.append(np.full(expected, NULL, dtype=np.int64) if sampled is None else sampled.astype(np.int64))
        return nullable(np.concatenate(pieces))


INTS, FLOATS = LISTS[4:], LISTS[:4]  # what each round of a stretch has of its own
# What an entry is, a round or a stretch: the columns that all its rounds share, then of its own.
OWN = ("round", "running", "free_blocks_end", "finished", "t_scheduled_s", "t_executed_s", "record_s")
SHARED = tuple(name for name in records.schema("rounds") if name not in (*OWN, *LISTS))


class RoundBuffer:
    """Rows of `rounds`, of one part: what all rounds of an entry share, and what each has of its own."""

    def __init__(self) -> None:
        self._own: dict[str, array[Any]] = {name: array("d") for name in FLOATS}
        self._own |= {name: array("q") for name in INTS}
        self._entries: list[tuple[Any, ...]] = []
        self._counts: list[int] = []
        self._before: dict[int, int] = {}  # entry -> `running` after each of its rounds but the last
        self._record_s = array("d")

    def append(self, shared: tuple[Any, ...], own: tuple[Any, ...], values: tuple[Any, ...]) -> None:
        """One round. `shared`, `own`: values in the order of `SHARED` and of `OWN` without record_s, which comes later, by `took`;
        `values`: in that of `LISTS`. A float that is nan is null."""
        self._entries.append(shared + own)
        self._counts.append(1)
        for column, value in zip(self._own.values(), values, strict=True):
            column.append(value)

    def extend(self, shared: tuple[Any, ...], own: tuple[Any, ...], values: tuple[Any, ...], before: int) -> None:
        """The rounds of a stretch. `own`: of the first its number, of the last the rest; `values`: sequences; `before`: how many
        run after each but the last. In it `t_scheduled_s` is `t_start_s`, and `t_executed_s` is `t_end_s`."""
        self._before[len(self._counts)] = before
        self._entries.append(shared + own)
        self._counts.append(len(values[0]))
        for column, value in zip(self._own.values(), values, strict=True):
            column.extend(value)

    def took(self, record_s: float) -> None:
        """Of each round of the entry appended last."""
        self._record_s.append(record_s)

    def compact_frames(self) -> tuple[pl.DataFrame, pl.DataFrame]:
        """(rounds that were run singly, those of stretches as segments): `reports.segments`."""
        frame, counts = self.frame(), np.array(self._counts, dtype=np.int64)
        schema = segment_schema(records.schema("rounds"))
        stretches = counts > 1
        if not stretches.any():
            return frame, pl.DataFrame(schema=schema)
        counts_of = np.repeat(counts, counts)
        many = pl.Series(counts_of > 1)
        group = pl.Series("_stretch", np.repeat(np.arange(len(counts)), counts)).filter(many).set_sorted()
        rounds = frame.filter(many).drop(DERIVED).with_columns(group)
        last = ("running", "finished", "free_blocks_end")
        lists, own = pl.col(LISTS), pl.col(last).last()
        rest = pl.exclude("_stretch", *LISTS, *last).first()
        segments = rounds.group_by("_stretch", maintain_order=True).agg(
            lists,
            own,
            rest,
            pl.col("running").first().alias("running_before"),
            pl.len().cast(pl.Int64).alias("num_rounds"),
        )
        return frame.filter(~many), segments.select(pl.col(name).cast(dtype) for name, dtype in schema.items())

    def frame(self) -> pl.DataFrame:
        schema = records.schema("rounds")
        if not self._entries:
            return pl.DataFrame(schema=schema)
        counts = np.array(self._counts, dtype=np.int64)
        at = np.repeat(np.arange(len(counts)), counts)
        last = np.cumsum(counts) - 1
        gather = pl.Series(at)
        columns: dict[str, pl.Series] = {}
        for name, values in zip((*SHARED, *OWN[:-1]), zip(*self._entries, strict=True), strict=True):
            columns[name] = pl.Series(name, values, dtype=schema[name]).gather(gather)
        for name in LISTS:
            dtype: Any = np.float64 if name in FLOATS else np.int64
            columns[name] = pl.Series(name, np.frombuffer(self._own[name], dtype=dtype)).fill_nan(None)
        record_s = np.frombuffer(self._record_s, dtype=np.float64)
        columns["record_s"] = pl.Series("record_s", record_s[at])
        if not self._before:
            return pl.DataFrame([columns[name] for name in schema])
        # Within stretches most follows from the rest.
        first, is_last = last - counts + 1, np.zeros(len(at), dtype=np.bool_)
        is_last[last] = True
        entries = np.array(list(self._before), dtype=np.int64)
        before = np.zeros(len(counts), dtype=np.int64)
        before[entries] = list(self._before.values())
        stretched = np.zeros(len(counts), dtype=np.bool_)
        stretched[entries] = True
        free = columns["free_blocks_start"].to_numpy()
        derived = {
            "round": columns["round"].to_numpy() + np.arange(len(at)) - first[at],
            "running": np.where(is_last, columns["running"].to_numpy(), before[at]),
            "finished": np.where(is_last, columns["finished"].to_numpy(), 0),
            "free_blocks_end": np.where(is_last, columns["free_blocks_end"].to_numpy(), np.append(free[1:], 0)),
            "t_scheduled_s": np.where(
                stretched[at], columns["t_start_s"].to_numpy(), columns["t_scheduled_s"].to_numpy()
            ),
            "t_executed_s": np.where(stretched[at], columns["t_end_s"].to_numpy(), columns["t_executed_s"].to_numpy()),
        }
        columns |= {name: pl.Series(name, values) for name, values in derived.items()}
        return pl.DataFrame([columns[name] for name in schema])


def _no_ids(count: int) -> pl.Series:
    return pl.Series([None], dtype=pl.Int64).new_from_index(0, count)


def fold(columns: list[Int64Array], block_size: int) -> tuple[Int64Array, Int64Array]:
    """Decodes of one request in successive rounds with decodes, as `reports.segments` has them.

    `columns`: those of `BatchBuffer.columns`, [n]. Returns (the first row of each fold, in row order, how many rows it stands
    for). A row that is no plain decode stands alone.
    """
    number, _, request, start, num_tokens, phase, cached, yields, num_blocks = columns
    n = len(request)
    if n == 0:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    begins = np.concatenate([[True], number[1:] != number[:-1]])
    firsts = np.flatnonzero(begins)
    round_of = np.cumsum(begins) - 1
    place = np.cumsum(np.maximum.reduceat(phase, firsts))[round_of]  # among the rounds with decodes
    plain = (phase == 1) & (num_tokens == 1) & (yields == 1) & (cached == NULL)
    key = request - request.min()
    # Sixteen bits are sorted by their digits, in a fifth of the time.
    at = np.argsort(key.astype(np.uint16) if key.max() < 2**16 else key, kind="stable")
    by_request, by_place, by_start, by_blocks = request[at], place[at], start[at], num_blocks[at]
    edges = by_start // block_size if block_size else 0
    by_plain, offset = plain[at], by_blocks - edges
    joined = by_plain[1:] & by_plain[:-1] & (by_request[1:] == by_request[:-1]) & (offset[1:] == offset[:-1])
    joined &= (by_place[1:] == by_place[:-1] + 1) & (by_start[1:] == by_start[:-1] + 1)
    # Within a round rows are read in the order of their first rows. Where that is not how they stood, the round begins anew.
    first = np.empty(n, dtype=np.int64)
    for attempt in range(FOLD_ATTEMPTS + 1):
        if attempt == FOLD_ATTEMPTS:
            joined[:] = False
        heads = np.flatnonzero(np.concatenate([[True], ~joined]))
        counts = np.diff(np.append(heads, n))
        first[at] = np.repeat(at[heads], counts)
        wrong = (first[1:] <= first[:-1]) & ~begins[1:]
        if not wrong.any():
            break
        anew = np.zeros(len(firsts), dtype=np.bool_)
        anew[round_of[1:][wrong]] = True
        if attempt < FOLD_ATTEMPTS // 2:
            anew[1:] &= ~anew[:-1]  # those after it may be right then
        joined &= ~anew[round_of[at[1:]]]
    rows = at[heads]
    in_order = np.argsort(rows)
    return rows[in_order], counts[in_order]
