"""What a round's own time was spent on: the device, the host, launching the round after it, or none of these.

From the rounds alone. A hiccup is what neither the device nor the recorded host work explains: the machine was doing something
else (another process, garbage collection, a part of the records being written).
"""

from __future__ import annotations

import polars as pl

from reports.own_time import own_time
from reports.run import Run

HALF = 0.5  # of a round's own time: what took more of it made it long


def round_causes(run: Run) -> pl.DataFrame:
    """`rounds` in order with own_s, host_s and cause.

    own_s: the round's own time (`own_time`). host_s: recorded host work inside it; where rounds overlap that is recording the
    round before last and scheduling, launching and updating the next one, while the device works; else the round's own.
    cause: device where the device worked for at least half of own_s; else host where host_s is at least half of it; else
    launch where rounds overlap and the next one has no CUDA graph: its kernels are launched one by one, which no column
    records, before this round's tokens are collected; else hiccup. unknown where device_s was not measured.
    """
    frame = run.read("rounds").sort("round").with_columns(own_time().alias("own_s"))
    overlapped = bool(run.manifest.get("overlapped"))
    worked = pl.sum_horizontal(pl.col("schedule_s", "prepare_s", "update_s").fill_null(0.0))
    if overlapped:
        worked = worked.shift(-1, fill_value=0.0) + pl.col("record_s").fill_null(0.0).shift(2, fill_value=0.0)
    long = HALF * pl.col("own_s")
    measured = pl.col("device_s").is_not_null() & (pl.col("own_s") > 0) & (run.clock == "wall")
    return frame.with_columns(worked.alias("host_s")).with_columns(
        pl.when(~measured).then(pl.lit("unknown"))
        .when(pl.col("device_s") >= long).then(pl.lit("device"))
        .when(pl.col("host_s") >= long).then(pl.lit("host"))
        .when((pl.col("mode").shift(-1) == "eager") & overlapped).then(pl.lit("launch"))
        .otherwise(pl.lit("hiccup")).alias("cause")
    )  # fmt: skip
