"""The run folder's schema: tables, columns, units, and how to read them. Needs polars only.

The recorder writes by this schema, every report reads by it. Column names are a contract: other tools read them.
Times are float64 seconds since the run began on the run's clock, except `schedule_s`, `prepare_s`, `update_s`,
`record_s`, which are always host time. null means not measured or not applicable, never 0.

Schema history (SCHEMA_VERSION):
1 (2026-11-30): first version.
"""

from __future__ import annotations

import polars as pl

SCHEMA_VERSION = 1

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
        "stalled_s": (pl.Float64, "time it was running in rounds that did not compute it, seconds"),
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
        "free_list": (pl.List(pl.Int64), "free block ids after update(), next to be taken first; null: pool over 64 blocks"),  # type: ignore[dict-item]
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
