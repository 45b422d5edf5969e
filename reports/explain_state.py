"""The state before one round, taken from the tables by filters, without replaying what came before.

`view_at` gives what `queues.walk` gives for that round (a test holds them equal), at the cost of a few scans, so any round of
a long run is a second away. Knows the two policies' rules of order, as `queues` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl

from reports.queues import RoundView
from reports.run import Run
from traces.errors import BenchctlError

Row = dict[str, Any]

HELD_ROWS = 2_000_000


def need_log(run: Run) -> None:
    """Raises BenchctlError where the run kept no decision log."""
    if not (run.has("batches") and run.has("decisions") and run.has("blocks")):
        raise BenchctlError(
            f"the run kept no decisions (--records {run.manifest.get('records')})",
            where=run.shown,
            fix="replay with --records full or compact",
        )


def hold(run: Run) -> None:
    """Keep the log's tables in memory where they are small, for a reader that comes back to them many times."""
    counts = (run.manifest.get("record") or {}).get("rows") or {}
    if sum(counts.values()) <= HELD_ROWS:
        for table in ("admissions", "rounds", "batches", "decisions", "blocks"):
            run.read(table)


def rows_of(run: Run, table: str, number: int) -> list[Row]:
    """The rows of one round, in order."""
    frame = run.scan(table).filter(pl.col("round") == number).sort("order", maintain_order=True).collect()
    return list(frame.iter_rows(named=True))


def round_row(run: Run, number: int) -> Row:
    """The row of `rounds`. Raises BenchctlError where the run has no such round, naming the nearest ones."""
    found = run.scan("rounds").filter(pl.col("round") == number).collect()
    if found.height:
        return dict(found.row(0, named=True))
    rounds = run.scan("rounds").select("round")
    least, most = rounds.select(pl.col("round").min(), pl.col("round").max().alias("most")).collect().row(0)
    if least is None:
        raise BenchctlError("the run has no rounds", where=run.shown, fix="replay again")
    near = sorted(
        each
        for each in (
            rounds.filter(pl.col("round") < number).max().collect().item(),
            rounds.filter(pl.col("round") > number).min().collect().item(),
        )
        if each is not None
    )
    raise BenchctlError(
        f"the run has no round {number}: its rounds go from {least} to {most}, and idle ones leave no record",
        where=run.shown,
        fix=" or ".join(f"--round {each}" for each in near),
    )


def view_at(run: Run, number: int) -> RoundView:
    """The round with its rows, and both queues before it. Raises BenchctlError where there is no such round."""
    row = round_row(run, number)
    waiting, running = queues_before(run, number)
    return RoundView(row, waiting, running, rows_of(run, "batches", number), rows_of(run, "decisions", number))


def queues_before(run: Run, number: int) -> tuple[list[int], list[int]]:
    """(waiting, running) before `schedule()` of round `number`, its own arrivals among the waiting, in the policy's order."""
    decisions = run.scan("decisions").filter(pl.col("round") <= number)
    refused = decisions.filter(pl.col("kind") == "reject").select("request")
    arrived = (
        run.scan("admissions").filter(pl.col("admitted_round") <= number)
        .join(refused, on="request", how="anti")
        .select("request", "priority", "arrival_s", "id")
        .with_row_index("place")
    )  # fmt: skip
    last = (
        decisions.filter((pl.col("round") < number) & pl.col("kind").is_in(["admit", "resume", "preempt", "finish"]))
        .sort("round", "order")
        .group_by("request", maintain_order=True)
        .agg(pl.col("kind").last(), pl.col("round").last(), pl.col("order").last())
    )
    known = arrived.join(last, on="request", how="left").filter(pl.col("kind").ne_missing("finish"))
    if run.family == "nano":
        known = _with_completion(run, number, known)
    else:
        started = pl.col("kind").is_in(["admit", "resume"]).fill_null(False)
        known = known.with_columns(
            started.alias("started"), pl.col("round").alias("begin"), pl.col("order").alias("place_in")
        )
    frame = known.collect()
    running = frame.filter("started").sort("begin", "place_in")["request"].to_list()
    waiting = frame.filter(~pl.col("started"))
    if run.setting("scheduling_policy") == "priority" and run.family != "nano":
        waiting = waiting.sort(pl.col("priority").fill_null(0), pl.col("arrival_s").fill_null(0.0), "id")
        return waiting["request"].to_list(), running
    # Whoever was preempted last stands in front; a partly prefilled one has not left the head since; arrivals in order.
    waiting = waiting.with_columns(pl.col("kind").is_null().alias("fresh")).sort(
        ["fresh", "round", "order", "place"], descending=[False, True, True, False], nulls_last=True
    )
    return waiting["request"].to_list(), running


def _with_completion(run: Run, number: int, known: pl.LazyFrame) -> pl.LazyFrame:
    """nano: who is admitted keeps the head of `waiting` until its last prefill chunk, and runs from then on."""
    done = (
        run.scan("batches")
        .filter((pl.col("round") < number) & (pl.col("phase") == "prefill") & pl.col("yields_token"))
        .sort("round", "order")
        .group_by("request", maintain_order=True)
        .agg(pl.col("round").last().alias("begin"), pl.col("order").last().alias("place_in"))
    )
    admitted = pl.col("kind").is_in(["admit", "resume"]).fill_null(False)
    return known.join(done, on="request", how="left").with_columns(
        (admitted & (pl.col("begin") >= pl.col("round")).fill_null(False)).alias("started")
    )


def computed_before(run: Run, number: int, requests: list[int]) -> dict[int, int]:
    """request -> computed tokens it holds before the round; 0 for those that hold nothing."""
    rows = (
        run.scan("batches")
        .filter((pl.col("round") < number) & pl.col("request").is_in(requests))
        .sort("round")
        .group_by("request", maintain_order=True)
        .agg(pl.col("round").last(), (pl.col("start") + pl.col("num_tokens")).last().alias("computed"))
    )
    lost = (
        run.scan("decisions")
        .filter((pl.col("round") < number) & (pl.col("kind") == "preempt") & pl.col("request").is_in(requests))
        .group_by("request")
        .agg(pl.col("round").max().alias("lost"))
    )
    held = rows.join(lost, on="request", how="left").filter(pl.col("lost").fill_null(-1) < pl.col("round")).collect()
    return dict.fromkeys(requests, 0) | dict(held.select("request", "computed").iter_rows())


def known_before(run: Run, number: int, requests: list[int]) -> dict[int, int]:
    """request -> tokens known before the round: its prompt and what it has emitted."""
    prompts = run.scan("admissions").filter(pl.col("request").is_in(requests)).select("request", "prompt_tokens")
    emitted = (
        run.scan("batches")
        .filter((pl.col("round") < number) & pl.col("request").is_in(requests) & pl.col("yields_token"))
        .group_by("request")
        .len("emitted")
    )
    total = pl.col("prompt_tokens") + pl.col("emitted").fill_null(0).cast(pl.Int64)
    return dict(prompts.join(emitted, on="request", how="left").select("request", total).collect().iter_rows())


@dataclass(frozen=True, slots=True)
class BlockOwners:
    """Who holds which block at one moment: block -> {request: logical index}; absent where free."""

    owners: dict[int, dict[int, int]]

    def tables(self) -> dict[int, list[int]]:
        """request -> its block table."""
        found: dict[int, dict[int, int]] = {}
        for block, held in self.owners.items():
            for request, index in held.items():
                found.setdefault(request, {})[index] = block
        return {request: [found[request][i] for i in sorted(found[request])] for request in sorted(found)}


def owners_after(run: Run, number: int, blocks: list[int] | None = None) -> BlockOwners:
    """Owners after round `number` (of `blocks` alone, if given): for each block and request the last change that tells."""
    events = run.scan("blocks").filter(
        (pl.col("round") <= number) & pl.col("event").is_in(["allocate", "share", "release", "free"])
    )
    if blocks is not None:
        events = events.filter(pl.col("block").is_in(blocks))
    last = (
        events.sort("round", "order")
        .group_by("block", "request", maintain_order=True)
        .agg(pl.col("event").last(), pl.col("index").last())
        .filter(pl.col("event").is_in(["allocate", "share"]))
        .sort("block", "request")
        .collect()
    )
    owners: dict[int, dict[int, int]] = {}
    for block, request, _, index in last.iter_rows():
        owners.setdefault(block, {})[request] = index
    return BlockOwners(owners)
