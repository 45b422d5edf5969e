"""What `--records compact` stores instead of every row, and how the rows come out of it again. Needs polars only.

Three things, since schema 3; everything else is stored as under `full`:

- `segments`, one row for each stretch of rounds that the simulator ran at once: the same sequences decode, and nothing but block
  edges happens in between. What the rounds share stands once, what differs is a list (`LISTS`). The `rounds` table holds the
  rest of the rounds. Within a segment `t_scheduled_s` is `t_start_s` and `t_executed_s` is `t_end_s`; `free_blocks_end` is the
  next round's `free_blocks_start` and, of the last round, the column's value; `running` is `running_before` but after the last;
  `finished` is 0 but in the last.
- `batches` and `tokens` with `num_rows` = k: the row stands for the k rows of one request in k successive rounds with decodes
  (those whose `decode_tokens` is not 0), its own the first. `start`, or `index`, grows by one a round; `num_blocks` by one
  wherever `start` passes a multiple of `block_size` (0: never); `round` and `t_s` are the round's. The rest is the same in all.
  Within a round rows stand in the order of their rows on disk, and `order` counts them.
- Rows that are no such decodes have `num_rows` 1. Where a model chose the tokens every row of `tokens` has.

Compact runs of schema 2 have `num_rounds` in place of `num_rows`: k consecutive rounds, equal `order` and `num_blocks`, and no
segments.
"""

from __future__ import annotations

import polars as pl

SEGMENTS = "segments"
LISTS = ("t_start_s", "t_end_s", "flops", "bytes", "free_blocks_start", "free_blocks_scheduled", "cached_free_blocks", "evicted")  # fmt: skip
# Columns of `rounds` that a segment does not have: they follow from others.
DERIVED = ("t_scheduled_s", "t_executed_s")


def segment_schema(rounds: dict[str, pl.DataType | type[pl.DataType]]) -> dict[str, pl.DataType | type[pl.DataType]]:
    """Column -> dtype on disk. `rounds`: the schema of that table."""
    own = {name: pl.List(dtype) if name in LISTS else dtype for name, dtype in rounds.items() if name not in DERIVED}
    return own | {"num_rounds": pl.Int64, "running_before": pl.Int64}


def expand_segments(frame: pl.LazyFrame, columns: list[str]) -> pl.LazyFrame:
    """One row a round, with `columns` of the `rounds` table."""
    steps = frame.with_columns(pl.int_ranges(0, pl.col("num_rounds")).alias("_step")).explode("_step", *LISTS)
    last = pl.col("_step") == pl.col("num_rounds") - 1
    return steps.with_columns(
        pl.col("round") + pl.col("_step"),
        pl.col("t_start_s").alias("t_scheduled_s"),
        pl.col("t_end_s").alias("t_executed_s"),
        pl.when(last).then("running").otherwise("running_before").alias("running"),
        pl.when(last).then("finished").otherwise(0).alias("finished"),
        pl.when(last).then("free_blocks_end").otherwise(pl.col("free_blocks_start").shift(-1)).alias("free_blocks_end"),
    ).select(columns)


def expand_rows(frame: pl.LazyFrame, table: str, rounds: pl.LazyFrame) -> pl.LazyFrame:
    """Rows of `batches` or `tokens` as under `full`, still with the columns of the folding. `rounds`: the whole table."""
    decoding = (
        rounds.filter(pl.col("decode_tokens") > 0)
        .select(pl.col("round").alias("_round"), pl.col("t_end_s").alias("_end_s"))
        .with_row_index("_at")
        .with_columns(pl.col("_at").cast(pl.Int64))
    )
    first = decoding.select(pl.col("_round").alias("round"), pl.col("_at").alias("_first"))
    step, later = pl.col("_step"), pl.col("_step") > 0
    frame = (
        frame.with_row_index("_row")
        .join(first, on="round", how="left", maintain_order="left")
        .with_columns(pl.int_ranges(0, pl.col("num_rows")).alias("_step"))
        .explode("_step")
        .with_columns((pl.col("_first") + step).alias("_at"))
        .join(decoding, on="_at", how="left", maintain_order="left")
        .with_columns(pl.when(later).then("_round").otherwise("round").alias("round"))
    )
    if table == "tokens":
        frame = frame.with_columns(
            pl.col("index") + step, pl.when(later).then("_end_s").otherwise("t_s").alias("t_s")
        ).sort("round", "_row")
        return frame.drop("_row", "_first", "_step", "_at", "_round", "_end_s", "num_rows")
    size = pl.col("block_size")
    edges = (pl.col("start") + step) // size - pl.col("start") // size
    frame = frame.with_columns(
        pl.col("start") + step, pl.when(size > 0).then(pl.col("num_blocks") + edges).otherwise("num_blocks")
    ).sort("round", "_row")
    frame = frame.with_columns(pl.int_range(pl.len(), dtype=pl.Int64).over("round").alias("order"))
    return frame.drop("_row", "_first", "_step", "_at", "_round", "_end_s", "num_rows", "block_size")
