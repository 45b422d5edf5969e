"""A round's own time, and what requests paid in it. Where rounds overlap, every sum over rounds has to be one of own times.

With `--overlap` a round is scheduled and launched before the tokens of the one before it are collected, so it starts before
that one ends and t_end_s - t_start_s counts the time in between twice. Its own time begins where the round before ended.
"""

from __future__ import annotations

import polars as pl


def own_start() -> pl.Expr:
    """max(t_start_s, t_end_s of the round before), seconds: t_start_s where rounds do not overlap. Rows in order of rounds."""
    return pl.max_horizontal("t_start_s", pl.col("t_end_s").shift(1))


def own_time() -> pl.Expr:
    """t_end_s - max(t_start_s, t_end_s of the round before), seconds. Rows in order of rounds."""
    return pl.col("t_end_s") - own_start()


def own_scheduled() -> pl.Expr:
    """max(t_scheduled_s, t_end_s of the round before), seconds: from when on its schedule takes effect. Rows in order of rounds."""
    return pl.max_horizontal("t_scheduled_s", pl.col("t_end_s").shift(1))


def charged(requests: pl.DataFrame, rounds: pl.LazyFrame, batches: pl.LazyFrame, decisions: pl.LazyFrame) -> pl.DataFrame:  # fmt: skip
    """`requests` with stalled_s and preempted_s from the other tables, in own times.

    For runs of schema 1 whose rounds overlapped: there both were summed from whole durations.
    """
    places = rounds.sort("round").select(
        "round", pl.int_range(pl.len()).alias("place"), own_time().cum_sum().alias("until"), own_scheduled().alias("at_s")
    )  # fmt: skip
    begins = places.with_columns(pl.col("until").shift(1, fill_value=0.0).alias("since"))
    last = places.select(pl.col("until").max()).collect().item() or 0.0
    end = rounds.select(pl.col("t_end_s").max()).collect().item() or 0.0
    # Rows and preemptions of each request in order; of one round the preemption comes first.
    rows = batches.select("request", "round", pl.lit(1).alias("what"), pl.col("cached_tokens").is_not_null().alias("admitted"))  # fmt: skip
    lost = decisions.filter(pl.col("kind") == "preempt").select("request", "round", pl.lit(0).alias("what"), pl.lit(False).alias("admitted"))  # fmt: skip
    steps = (
        pl.concat([rows, lost]).join(begins, on="round").sort("request", "round", "what")
        .with_columns(
            pl.col("until").shift(1).over("request").alias("seen"),
            pl.col("at_s").shift(1).over("request").alias("lost_s"),
            pl.col("what").shift(1).over("request").alias("before"),
        )
    )  # fmt: skip
    held = ~pl.col("admitted") & (pl.col("before") == 1)
    sums = steps.group_by("request").agg(
        (pl.col("since") - pl.col("seen")).filter(held).sum().alias("stalled_s"),
        (pl.col("at_s") - pl.col("lost_s")).filter(pl.col("admitted") & (pl.col("before") == 0)).sum().alias("preempted_s"),
        pl.col("what").last().alias("final"), pl.col("until").last().alias("final_until"), pl.col("at_s").last().alias("final_at"),
    ).collect()  # fmt: skip
    open_end = pl.col("status") == "unfinished"
    return (
        requests.drop("stalled_s", "preempted_s").join(sums, on="request", how="left", maintain_order="left")
        .with_columns(
            pl.col("stalled_s").fill_null(0.0) + pl.when(open_end & (pl.col("final") == 1)).then(last - pl.col("final_until")).otherwise(0.0),
            pl.col("preempted_s").fill_null(0.0) + pl.when(open_end & (pl.col("final") == 0)).then(end - pl.col("final_at")).otherwise(0.0),
        )
        .select(requests.columns)
    )  # fmt: skip
