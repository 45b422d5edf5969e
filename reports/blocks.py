"""Who owned which KV block when, rebuilt from the `blocks` events of a run.

Reads recorded events only: it knows no policy, so it can be held against what the scheduler itself reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

import polars as pl

from reports.run import Run
from traces.errors import BenchctlError

Event = tuple[int, str, int, int | None]  # block, event, request, index


@dataclass(slots=True)
class Pool:
    """The state of every block between two events. Mutable, owned by whoever replays.

    `owners[block]` = {request: logical index}, absent where the block is free; `cached` = blocks whose content was announced
    by `cache` and not lost since (nano: an equal block cached later may have taken over the entry).
    """

    total: int
    owners: dict[int, dict[int, int]] = field(default_factory=dict)
    tables: dict[int, dict[int, int]] = field(default_factory=dict)  # request -> logical index -> block
    cached: set[int] = field(default_factory=set)

    @property
    def num_free(self) -> int:
        return self.total - len(self.owners)

    def block_table(self, request: int) -> list[int]:
        table = self.tables.get(request, {})
        return [table[index] for index in sorted(table)]

    def apply(self, block: int, event: str, request: int, index: int | None) -> None:
        """One event. Raises AssertionError where the events contradict each other: a bug of whoever recorded them."""
        if event in ("allocate", "share"):
            assert index is not None, (block, event, request)
            owners = self.owners.setdefault(block, {})
            assert event == "share" or not owners, f"block {block} allocated to {request} while owned by {owners}"
            assert request not in owners, f"block {block} given twice to {request}"
            table = self.tables.setdefault(request, {})
            assert len(table) == index, f"request {request} takes block {block} as its {index}-th, but has {len(table)}"
            owners[request] = index
            table[index] = block
            if event == "allocate":
                self.cached.discard(block)
        elif event in ("free", "release"):
            owners = self.owners.get(block, {})
            assert request in owners, f"request {request} gives back block {block}, owned by {owners}"
            del self.tables[request][owners.pop(request)]
            if not self.tables[request]:
                del self.tables[request]
            assert bool(owners) == (event == "release"), f"{event} of block {block}, still owned by {owners}"
            if not owners:
                del self.owners[block]
        elif event == "cache":
            self.cached.add(block)
        elif event == "evict":
            assert block in self.cached, f"block {block} evicted, but nothing was cached in it"
            assert block not in self.owners, f"block {block} evicted while owned by {self.owners[block]}"
            self.cached.discard(block)


def events_by_round(run: Run, last_round: int | None = None) -> Iterator[tuple[int, list[Event]]]:
    """(round, its events in order) for every round up to `last_round` that has events."""
    frame = run.scan("blocks").select("round", "order", "block", "event", "request", "index")
    if last_round is not None:
        frame = frame.filter(pl.col("round") <= last_round)
    for round, rows in groupby(frame.sort("round", "order").collect().iter_rows(), key=lambda row: row[0]):
        yield round, [row[2:] for row in rows]


def replay(run: Run, last_round: int | None = None) -> Iterator[tuple[int, Pool]]:
    """(round, the pool after its update) for every recorded round up to `last_round`. It is the same object each time."""
    pool = Pool(run.usable_blocks or 0)
    pending = events_by_round(run, last_round)
    ahead = next(pending, None)
    for round in run.scan("rounds").select("round").sort("round").collect()["round"]:
        if last_round is not None and round > last_round:
            return
        if ahead is not None and ahead[0] == round:
            for event in ahead[1]:
                pool.apply(*event)
            ahead = next(pending, None)
        yield round, pool


def pool_at(run: Run, round: int) -> Pool:
    """The pool after `round`. Raises BenchctlError where the run has no blocks table or no such round."""
    if not run.has("blocks"):
        raise BenchctlError(f"the run {run.path} has no block events", fix="replay with --records full or compact")
    for number, pool in replay(run, round):
        if number == round:
            return pool
    raise BenchctlError(
        f"the run {run.path} has no round {round}", fix="rounds without anybody waiting or running leave no record"
    )


def block_tables_at(run: Run, round: int) -> dict[int, list[int]]:
    """request -> its block table after `round`, for every request that holds blocks."""
    pool = pool_at(run, round)
    return {request: pool.block_table(request) for request in sorted(pool.tables)}


def free_at(run: Run, round: int) -> int:
    """Free blocks after `round`."""
    return pool_at(run, round).num_free


def free_moments(run: Run, last_round: int | None = None) -> dict[int, list[int]]:
    """round -> free blocks before it and at each turning point up to its end, so [11, 6] or [0, 1, 0]."""
    pool = Pool(run.usable_blocks or 0)
    moments: dict[int, list[int]] = {}
    for round, events in events_by_round(run, last_round):
        counts = [pool.num_free]
        for event in events:
            pool.apply(*event)
            counts.append(pool.num_free)
        moments[round] = turning_points(counts)
    return moments


def turning_points(counts: list[int]) -> list[int]:
    """First, last and every local extreme of a series, without repeats: [3, 3, 2, 1, 1, 4] -> [3, 1, 4]."""
    out: list[int] = []
    for count in counts:
        if out and count == out[-1]:
            continue
        if len(out) > 1 and (out[-1] > out[-2]) == (count > out[-1]):
            out[-1] = count
        else:
            out.append(count)
    return out


def free_counts(run: Run) -> pl.LazyFrame:
    """round, least_free: the fewest free blocks at any moment of a round in which a block changed hands.

    A `share` takes a block out of the free list exactly when the block's last change before was a `free`.
    """
    previous = pl.col("event").shift(1).over("block", order_by=["round", "order"])
    delta = (
        pl.when(pl.col("event") == "allocate").then(-1)
        .when((pl.col("event") == "share") & (previous == "free")).then(-1)
        .when(pl.col("event") == "free").then(1)
        .otherwise(0)
    )  # fmt: skip
    return (
        run.scan("blocks")
        .filter(pl.col("event").is_in(["allocate", "share", "release", "free"]))
        .select("round", "order", "block", "event")
        .with_columns(delta.alias("delta"))
        .sort("round", "order")
        .with_columns((pl.lit(run.usable_blocks or 0) + pl.col("delta").cum_sum()).alias("free"))
        .group_by("round", maintain_order=True)
        .agg(pl.col("free").min().alias("least_free"))
    )


def ghost_hits(run: Run) -> pl.DataFrame:
    """round, request, block, cached_round, cached_by: prefix hits on blocks whose KV was never computed.

    A block is a ghost where it was cached for a request of which no batch row, in that round, computes up to the block's end:
    the request was preempted later in the same round (vLLM with priorities). It stays one until it is allocated again.
    """
    nothing = pl.DataFrame(schema=dict.fromkeys(("round", "request", "block", "cached_round", "cached_by"), pl.Int64))
    size = run.block_size
    if not size or not run.has("blocks") or not run.has("batches"):
        return nothing
    computed = run.scan("batches").select("round", "request", (pl.col("start") + pl.col("num_tokens")).alias("end"))
    ghosts = (
        run.scan("blocks")
        .filter(pl.col("event") == "cache")
        .join(computed, on=["round", "request"], how="left")
        .filter(pl.col("end").fill_null(0) < (pl.col("index") + 1) * size)
        .select("round", "order", "block")
        .collect()
    )
    if not ghosts.height:
        return nothing
    marks = set(ghosts.iter_rows())
    events = (
        run.scan("blocks")
        .filter(pl.col("block").is_in(ghosts["block"].unique().to_list()))
        .sort("round", "order")
        .collect()
    )
    living: dict[int, tuple[int, int]] = {}
    hits: list[tuple[int, int, int, int, int]] = []
    for round, order, block, event, request in events.select("round", "order", "block", "event", "request").iter_rows():
        if (round, order, block) in marks:
            living[block] = (round, request)
        elif event == "allocate":
            living.pop(block, None)
        elif event == "share" and block in living:
            hits.append((round, request, block, *living[block]))
    return pl.DataFrame(hits, schema=nothing.schema, orient="row")
