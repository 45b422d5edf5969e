"""Every request's life in phases, from the tables: queued, prefill, decode, and inside them stalled and preempted stretches."""

from __future__ import annotations

import polars as pl

from reports.own_time import own_scheduled, own_start
from reports.run import Run

PHASES = ("queued", "prefill", "decode", "stalled", "preempted")


def phases(run: Run) -> pl.DataFrame:
    """request, phase, begin_s, end_s of every stretch that took time, requests in order of arrival. Refused ones have none.

    Stalled: between two rows of a request without a preemption, where rounds passed it by. Preempted: from the round that
    took its blocks to the round that gave it new ones, each from when it takes effect (`own_time`). Both need batches and
    decisions, and lie inside prefill or decode.
    """
    end = run.duration_s
    ended = run.scan("requests").select("request", "status", "first_scheduled_s", "first_token_s", "finished_s")
    seen = (
        run.scan("admissions").select("request", "arrival_s").join(ended, on="request", how="left")
        .filter(pl.col("status").ne_missing("rejected")).collect()
    )  # fmt: skip
    out = []
    for phase, begin, stop in (
        ("queued", "arrival_s", "first_scheduled_s"),
        ("prefill", "first_scheduled_s", "first_token_s"),
        ("decode", "first_token_s", "finished_s"),
    ):
        there = seen.filter(pl.col(begin).is_not_null())
        out.append(
            there.select("request", pl.lit(phase).alias("phase"), pl.col(begin).alias("begin_s"), pl.col(stop).fill_null(end).alias("end_s"))
        )  # fmt: skip
    rounds = run.scan("rounds").sort("round").select(
        "round", own_start().alias("start_s"), own_scheduled().alias("at_s"), "t_end_s", pl.int_range(pl.len()).alias("place")
    )  # fmt: skip
    rows = (
        run.scan("batches")
        .select("request", "round", "cached_tokens")
        .join(rounds, on="round")
        .sort("request", "round")
    )
    gaps = rows.with_columns(
        pl.col("place").shift(1).over("request").alias("before"),
        pl.col("t_end_s").shift(1).over("request").alias("begin_s"),
    ).filter((pl.col("place") - pl.col("before") > 1) & pl.col("cached_tokens").is_null())
    out.append(
        gaps.select("request", pl.lit("stalled").alias("phase"), "begin_s", pl.col("start_s").alias("end_s")).collect()
    )
    changes = (
        run.scan("decisions").filter(pl.col("kind").is_in(["preempt", "resume"])).select("request", "round", "kind", "order")
        .join(rounds, on="round").sort("request", "round", "order")
        .with_columns(pl.col("at_s").shift(-1).over("request").fill_null(end).alias("end_s"))
    )  # fmt: skip
    out.append(
        changes.filter(pl.col("kind") == "preempt")
        .select("request", pl.lit("preempted").alias("phase"), pl.col("at_s").alias("begin_s"), "end_s")
        .collect()
    )
    order = seen.select("request", "arrival_s")
    rank = pl.col("phase").replace_strict(PHASES, range(len(PHASES)), return_dtype=pl.Int64)
    return (
        pl.concat(out).filter(pl.col("end_s") > pl.col("begin_s")).join(order, on="request")
        .with_columns(rank.alias("rank")).sort("arrival_s", "request", "begin_s", "rank").select("request", "phase", "begin_s", "end_s")
    )  # fmt: skip
