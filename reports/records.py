"""The run folder's schema: tables, columns, units, and how to read them. Needs polars only.

The recorder writes by this schema, every report reads by it through `scan`. Column names are a contract: other tools
read them. Must not know who writes or draws.
Times are float64 seconds since the run began on the run's clock, except `schedule_s`, `prepare_s`, `update_s`,
`record_s`, which are always host time. null means not measured or not applicable, never 0.

Schema history (SCHEMA_VERSION):
1 (2026-11-30): first version.
2 (2026-11-30): where rounds overlap, stalled_s and preempted_s count each moment once (`own_time`); the columns are the same.
3 (2026-12-01): compact runs keep stretches of rounds as segments and decodes by request (`segments`); the logical tables are the same.
"""

from __future__ import annotations

import re
from pathlib import Path

import polars as pl

from reports.segments import SEGMENTS, expand_rows, expand_segments, segment_schema

SCHEMA_VERSION = 3

# table -> column -> (dtype, meaning with unit and when it is null)
TABLES: dict[str, dict[str, tuple[type[pl.DataType], str]]] = {
    "admissions": {
        "request": (pl.Int64, "0-based row of the trace"),
        "id": (pl.String, "the request's id in the trace"),
        "session": (pl.String, "conversation or agent run; null: none"),
        "turn": (pl.Int64, "order inside the session, from 1; null: none"),
        "priority": (pl.Int64, "lower is more urgent"),
        "adapter": (pl.String, "LoRA adapter; null: the base model"),
        "arrival_s": (pl.Float64, "intended arrival, seconds"),
        "admitted_s": (pl.Float64, "when the loop handed it to the scheduler, seconds"),
        "admitted_round": (pl.Int64, "the round whose schedule() saw it first"),
        "prompt_tokens": (pl.Int64, "prompt length, tokens"),
        "output_tokens": (pl.Int64, "output asked for, tokens"),
    },
    "requests": {
        "request": (pl.Int64, "0-based row of the trace"),
        "id": (pl.String, "the request's id in the trace"),
        "status": (pl.String, "finished, rejected or unfinished"),
        "reason": (pl.String, "why it ended so; null: still unfinished"),
        "arrival_s": (pl.Float64, "intended arrival, seconds"),
        "admitted_s": (pl.Float64, "when the loop handed it to the scheduler, seconds; null: it never was"),
        "first_scheduled_s": (pl.Float64, "t_scheduled_s of the round that first scheduled it; null: never"),
        "first_token_s": (pl.Float64, "t_end_s of the round that gave its first token; null: none"),
        "finished_s": (pl.Float64, "t_end_s of the round that gave its last token; null: not finished"),
        "prompt_tokens": (pl.Int64, "prompt length, tokens"),
        "emitted_tokens": (pl.Int64, "output tokens emitted"),
        "cached_tokens": (pl.Int64, "prefix-cache hit of its first admission, tokens; null: never admitted"),
        "discarded_tokens": (pl.Int64, "computed tokens lost to preemption"),
        "recomputed_tokens": (pl.Int64, "tokens scheduled at positions that had been computed before"),
        "preemptions": (pl.Int64, "times it was preempted"),
        "stalled_s": (
            pl.Float64,
            "own time of the rounds in which it was running and that did not compute it, seconds",
        ),
        "preempted_s": (pl.Float64, "time without blocks after preemptions, seconds"),
    },
    "rounds": {
        "round": (pl.Int64, "number of the round, from 1"),
        "t_start_s": (pl.Float64, "start of schedule(), seconds"),
        "t_scheduled_s": (pl.Float64, "end of schedule(), seconds"),
        "t_executed_s": (pl.Float64, "end of the forward pass, seconds"),
        "t_end_s": (pl.Float64, "end of update(): when this round's tokens are out, seconds"),
        "kind": (pl.String, "prefill, decode, mixed or empty"),
        "mode": (pl.String, "eager, graph, simulated or null"),
        "padded_tokens": (pl.Int64, "tokens the device computed, padding included"),
        "num_seqs": (pl.Int64, "sequences in the batch"),
        "prefill_tokens": (pl.Int64, "tokens fed by prefill rows"),
        "decode_tokens": (pl.Int64, "tokens fed by decode rows"),
        "cached_tokens": (pl.Int64, "prefix-cache hits of this round's admissions, tokens"),
        "queried_tokens": (pl.Int64, "known tokens of this round's admissions: the base of the hit rate"),
        "budget_left": (pl.Int64, "max_num_batched_tokens less the tokens scheduled"),
        "waiting": (pl.Int64, "requests waiting after the update, the skipped among them"),
        "running": (pl.Int64, "requests running after the update"),
        "skipped": (pl.Int64, "waiting requests passed over and not admitted since"),
        "free_blocks_start": (pl.Int64, "free blocks before schedule(); the null block is never counted"),
        "free_blocks_scheduled": (pl.Int64, "free blocks after schedule()"),
        "free_blocks_end": (pl.Int64, "free blocks after update()"),
        "cached_free_blocks": (pl.Int64, "free blocks that still hold reusable KV, after update()"),
        "admitted": (pl.Int64, "requests admitted or resumed"),
        "preempted": (pl.Int64, "requests preempted"),
        "finished": (pl.Int64, "requests finished"),
        "evicted": (pl.Int64, "cached blocks whose content was lost"),
        "stop_waiting": (pl.String, "why the waiting loop stopped; null: it did not run"),
        "stop_running": (pl.String, "why the running loop stopped; null: it did not run"),
        "schedule_s": (pl.Float64, "host time of schedule(), seconds"),
        "prepare_s": (pl.Float64, "host time of building the device's inputs, seconds"),
        "device_s": (pl.Float64, "device time of the forward pass, seconds; null: not measured"),
        "update_s": (pl.Float64, "host time of update(), seconds"),
        "record_s": (pl.Float64, "host time of recording this round, seconds"),
        "flops": (pl.Float64, "floating-point operations of the round; null: not counted"),
        "bytes": (pl.Float64, "device memory traffic of the round, bytes; null: not counted"),
        "free_list": (
            pl.List(pl.Int64),
            "free block ids after update(), next to be taken first; null: pool over 64 blocks",
        ),  # type: ignore[dict-item]
        "hashed_blocks": (pl.List(pl.Int64), "blocks that a lookup can find after update(); null: pool over 64 blocks"),  # type: ignore[dict-item]
    },
    "batches": {
        "round": (pl.Int64, "number of the round"),
        "order": (pl.Int64, "place in the batch, from 0"),
        "request": (pl.Int64, "0-based row of the trace"),
        "start": (pl.Int64, "computed tokens before the round"),
        "num_tokens": (pl.Int64, "tokens fed"),
        "phase": (pl.String, "decode: was running and feeds exactly its newest, generated token; else prefill"),
        "cached_tokens": (pl.Int64, "prefix-cache hit of the admission, tokens; null: not an admission's first row"),
        "yields_token": (pl.Boolean, "a token came out of this row"),
        "num_blocks": (pl.Int64, "blocks in its table after the round's allocations"),
    },
    "decisions": {
        "round": (pl.Int64, "number of the round"),
        "order": (pl.Int64, "place among the round's decisions and block events"),
        "kind": (pl.String, "admit, resume, chunk, hold, skip, preempt, evict, finish or reject"),
        "request": (pl.Int64, "whom it is about"),
        "other": (pl.Int64, "for whom (preempt); null: nobody"),
        "reason": (pl.String, "why"),
        "needed": (pl.Int64, "how much it needed, in `unit`; null: no number decided it"),
        "available": (pl.Int64, "how much there was, in `unit`; null: no number decided it"),
        "unit": (pl.String, "tokens, blocks, seats or adapters; null: no number decided it"),
    },
    "blocks": {
        "round": (pl.Int64, "number of the round"),
        "order": (pl.Int64, "place among the round's decisions and block events"),
        "block": (pl.Int64, "block id"),
        "event": (pl.String, "allocate, share, cache, release, free or evict"),
        "request": (pl.Int64, "on whose behalf"),
        "index": (pl.Int64, "logical index in its table; null: in no table"),
    },
    "tokens": {
        "request": (pl.Int64, "0-based row of the trace"),
        "index": (pl.Int64, "output token, from 0"),
        "round": (pl.Int64, "number of the round that gave it"),
        "t_s": (pl.Float64, "t_end_s of that round, seconds"),
        "token_id": (pl.Int64, "what the model chose, also where a forced id was appended; null: no model"),
    },
}

DECISION_LOG = ("batches", "decisions", "blocks")  # equal tables = equal decisions; no time column in them

# Tables that exist under each value of `--records`.
RECORDED: dict[str, tuple[str, ...]] = {
    "none": (),
    "summary": ("admissions", "requests", "rounds"),
    "compact": tuple(TABLES),
    "full": tuple(TABLES),
}

# Extra columns on disk under `--records compact` of schema 2; `scan` expands them away (schema 3: `reports.segments`). A row
# with num_rounds = k stands for the k rows of rounds round, round + 1, …, round + k - 1 (all of them in the `rounds` table of
# the same part):
# - batches: start + i for the i-th; order, request, num_tokens (1), phase (decode), cached_tokens (null), yields_token and
#   num_blocks are the same in all, so a stretch ends where one of them would change.
# - tokens: index + i for the i-th, and t_s is the t_end_s of its round; token_id is null in all, so that with a model
#   every row has num_rounds 1.
COMPACT: dict[str, tuple[str, ...]] = {"batches": ("num_rounds",), "tokens": ("num_rounds",)}

# Keys of manifest.json that reports read; a writer may add any other. Missing or null: not known.
MANIFEST: dict[str, str] = {
    "schema_version": "the SCHEMA_VERSION of the tables",
    "status": "running, complete, interrupted or failed; a killed run still says running",
    "scheduler": "nano, vllm, or the name of a policy of the user's own",
    "family": "nano or vllm: by whose rules of order the records are read; null: a policy with rules of its own",
    "policy": "which version of which policy, in words",
    "policy_differs": "{setting: text}: where the defaults of this run differ from the real system's",
    "engine": "null, torch or simulated",
    "clock": "wall, virtual, rounds or recorded",
    "arrivals": "trace or session",
    "records": "none, summary, compact or full",
    "command": "the command line that made the run, a string or a list of arguments",
    "config": "{name: {value, source}}: every setting under its flag's name with underscores, and where its value came from",
    "limits": "{num_blocks (raw), usable_blocks, block_size, max_model_len}: what the pool really was",
    "trace": "{name, path, sha256, num_requests}",
    "num_requests": "requests that the run was to replay",
    "goodput": "{ttft | tpot | itl | e2el: milliseconds}: the SLOs of --goodput",
    "prefix_upper_bound": "{queried_tokens, hit_tokens}: what an unbounded prefix cache would have hit on this trace",
    "ceilings": "what `benchctl doctor --measure` found on this device: {device, measured, copy, gemm_<dtype>_<n>, …: {value, unit, raw}}",
    "digest": "xxh3 over the decision log; null where none was recorded",
    "notes": "[text]: what the run wants to be known",
    "error": "text: why it failed",
}

_PART = re.compile(r"^rounds-(\d{5,})\.parquet$")


def schema(table: str) -> dict[str, pl.DataType | type[pl.DataType]]:
    """Column -> dtype of a logical table."""
    return {name: dtype for name, (dtype, _) in TABLES[table].items()}


def parts(run: Path) -> list[str]:
    """Numbers of the finished parts, as they stand in the file names, in order.

    A part counts from the moment its `rounds` file has its final name, since that is written last: the tables that belong
    to a later number are left-overs of a killed run and are never read.
    """
    found = [m[1] for entry in run.iterdir() if (m := _PART.match(entry.name))]
    return sorted(found, key=int)


def scan(run: Path, table: str) -> pl.LazyFrame:
    """A logical table of the run folder, row for row, with every column of the schema.

    A table that was not recorded, or holds nothing yet, gives no rows. Columns that the writer did not know are null, extra ones are kept.
    Rows come in the order in which they were written, except in compact runs: those are sorted by round (and order).
    """
    columns = schema(table)
    frame = _scan(run, table, columns)
    if frame is None:
        return pl.LazyFrame(schema=columns)
    present = frame.collect_schema()
    if table == "rounds" and (segments := _scan(run, SEGMENTS, segment_schema(columns))) is not None:
        frame = pl.concat([frame, expand_segments(segments, list(columns))], how="diagonal").sort("round")
    elif "num_rows" in present:
        frame = expand_rows(frame, table, scan(run, "rounds"))
    elif "num_rounds" in present:
        frame = _expand(run, table, frame)
    kept = ("num_rounds", "num_rows", "block_size")
    return frame.select(*columns, *(name for name in present if name not in columns and name not in kept))


def _scan(run: Path, table: str, columns: dict[str, pl.DataType | type[pl.DataType]]) -> pl.LazyFrame | None:
    """The rows on disk, `columns` first among theirs; None: there is no file."""
    files = [file for part in parts(run) if (file := run / f"{table}-{part}.parquet").exists()]
    if not files:
        return None
    frame = pl.scan_parquet(files, glob=False, missing_columns="insert", extra_columns="ignore")
    present = frame.collect_schema()
    return frame.with_columns(
        *(pl.lit(None, dtype=dtype).alias(name) for name, dtype in columns.items() if name not in present),
        *(pl.col(name).cast(dtype) for name, dtype in columns.items() if name in present and present[name] != dtype),
    )


def _expand(run: Path, table: str, frame: pl.LazyFrame) -> pl.LazyFrame:
    """Undo `COMPACT`: one row a round again."""
    step = pl.col("_step")
    frame = frame.with_columns(pl.int_ranges(0, pl.col("num_rounds").fill_null(1)).alias("_step")).explode("_step")
    frame = frame.with_columns(pl.col("round") + step, pl.col("start" if table == "batches" else "index") + step)
    if table == "batches":
        return frame.sort("round", "order", maintain_order=True)
    ends = scan(run, "rounds").select("round", "t_end_s")
    frame = frame.join(ends, on="round", how="left", maintain_order="left")
    return (
        frame.with_columns(pl.when(step == 0).then("t_s").otherwise("t_end_s").alias("t_s"))
        .sort("round", maintain_order=True)
        .drop("t_end_s")
    )
