"""Rounds in which the running sequences all decode one token: a batch whose columns are made when somebody reads them.

An engine that only needs sums reads the sums. A `Stretch` is several such rounds after each other, with nothing but block
edges in between. No torch, no clock, no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from engines.interface import BoolArray, Int64Array, ScheduledBatch


class Row(Protocol):
    """What a batch's row is read from."""

    block_table: list[int]

    @property
    def token_ids(self) -> Int64Array: ...


@dataclass(slots=True)
class ExtraRows:
    """Columns of the rows behind the decodes, as in `ScheduledBatch`: a round's admissions. Few, so plain lists, [m]."""

    request: list[int]
    start: list[int]
    num_tokens: list[int]
    cached_tokens: list[int]
    yields_token: list[bool]
    num_blocks: list[int]


class SteadyBatch(ScheduledBatch):
    """n sequences that decode, and behind them `extra`, if any.

    Of sequence i `bases[i] + age` tokens are computed before the round, and one more is known. `requests` and `bases`
    ([n]) never change, so a batch can be kept; `rows`, from which tables and ids are read, is live, as of any batch.
    """

    requests: Int64Array
    bases: Int64Array
    age: int
    base_sum: int
    base_max: int
    block_size: int
    extra: ExtraRows | None
    _rows: Sequence[Any]

    def __init__(
        self,
        *,
        requests: Int64Array,
        bases: Int64Array,
        age: int,
        base_sum: int,
        base_max: int,
        block_size: int,
        rows: Sequence[Any],
        extra: ExtraRows | None = None,
    ) -> None:
        # The base class is frozen: its columns are cached properties here.
        self.__dict__.update(
            requests=requests,
            bases=bases,
            age=age,
            base_sum=base_sum,
            base_max=base_max,
            block_size=block_size,
            extra=extra,
            _rows=rows,
        )

    @property
    def num_decodes(self) -> int:
        return len(self.requests)

    @property
    def decode_context(self) -> int:
        """The sum of the decodes' starts."""
        return self.base_sum + len(self.requests) * self.age

    @property
    def longest_start(self) -> int:
        """The largest of the decodes' starts."""
        return self.base_max + self.age

    @property
    def num_seqs(self) -> int:
        return len(self.requests) + (0 if self.extra is None else len(self.extra.request))

    @property
    def num_yields(self) -> int:
        return len(self.requests) + (0 if self.extra is None else sum(self.extra.yields_token))

    def _with(self, decodes: Any, name: str) -> Any:
        return decodes if self.extra is None else np.concatenate([decodes, getattr(self.extra, name)])

    @cached_property
    def request(self) -> Int64Array:
        out: Int64Array = self._with(self.requests, "request")
        return out

    @cached_property
    def start(self) -> Int64Array:
        out: Int64Array = self._with(self.bases + self.age, "start")
        return out

    @cached_property
    def num_tokens(self) -> Int64Array:
        out: Int64Array = self._with(np.ones(len(self.requests), dtype=np.int64), "num_tokens")
        return out

    @cached_property
    def is_decode(self) -> BoolArray:
        out = np.ones(self.num_seqs, dtype=np.bool_)
        out[len(self.requests) :] = False
        return out

    @cached_property
    def yields_token(self) -> BoolArray:
        out: BoolArray = self._with(np.ones(len(self.requests), dtype=np.bool_), "yields_token")
        return out

    @cached_property
    def cached_tokens(self) -> Int64Array:
        out: Int64Array = self._with(np.full(len(self.requests), -1, dtype=np.int64), "cached_tokens")
        return out

    @cached_property
    def num_blocks(self) -> Int64Array:
        out: Int64Array = self._with((self.bases + self.age) // self.block_size + 1, "num_blocks")
        return out

    @property
    def block_tables(self) -> Sequence[list[int]]:
        return [row.block_table for row in self._rows[: self.num_seqs]]

    @property
    def token_ids(self) -> Sequence[Int64Array]:
        return [row.token_ids for row in self._rows[: self.num_seqs]]


@dataclass(slots=True)
class Stretch:
    """Rounds that differ by block edges alone: the same decodes, no admission, nobody waiting who could be admitted.

    Somebody may end in the last one. Lists are [num_rounds], counts as in `Round`. `decisions` and `blocks` are those of
    all rounds, each round's orders from 0; `num_plain` says how many decisions each round has, evictions left out, and
    `runs` how many runs of block events.
    """

    batch: SteadyBatch  # of the first round; each later one is one `age` older
    num_rounds: int
    decisions: Any  # Decisions: evictions, the head's hold, and in the last round who finished
    blocks: Any  # BlockEvents
    num_plain: list[int]
    runs: list[int]
    free_blocks_start: list[int]
    free_blocks_scheduled: list[int]
    evicted: list[int]
    cached_free_blocks: list[int]
    budget_left: int
    stop_waiting: str | None
    stop_running: str | None
    free_blocks_end: int  # after the last; after any other what is free when the next begins
    waiting: int  # after each
    running: int  # after the last; before, `running_before`
    running_before: int
    skipped: int
    finished: list[tuple[int, str]] = field(default_factory=list)  # in the last


@dataclass(slots=True)
class Costs:
    """What a stretch takes by an engine's formula. Arrays and lists are [rounds], seconds.

    `device_s` beside the host times `launch_s` and `after_s`, for a clock on which rounds overlap; None: there is no such
    thing, `duration_s` is all.
    """

    duration_s: list[float]
    mode: str
    padded_tokens: int
    flops: list[float] | None = None
    bytes: list[float] | None = None
    device_s: list[float] | None = None
    launch_s: float = 0.0
    after_s: float = 0.0
    gap_s: float = 0.0
    wake_s: float = 0.0
