"""A plain writer of run folders for the tests of reports: drives a real scheduler, one tick a round, and writes what it says.

Row by row and slow, so that every line can be read against the schema; it shares nothing with the recorder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from engines.interface import NewRequest, Round, SchedulerConfig
from engines.schedulers.registry import SCHEDULERS
from reports import records
from tests.golden_cases import config_of, load_case, new_request

Rows = dict[str, list[dict[str, Any]]]


@dataclass
class Ledger:
    """What one request has gone through so far."""

    new: NewRequest
    admitted_round: int
    row: dict[str, Any] = field(default_factory=dict)
    computed: int = 0
    high_water: int = 0
    preempted_at: float | None = None


def request_of(row: int, name: str, prompt: int, output: int, **more: Any) -> NewRequest:
    """A request whose ids are all its own: row * 10**6 upwards."""
    ids = np.arange(row * 10**6, row * 10**6 + prompt + output, dtype=np.int64)
    return NewRequest(row, name, prompt, output, lambda: ids, **more)


def record_run(
    path: Path,
    scheduler: str,
    config: SchedulerConfig,
    arrivals: Sequence[tuple[int, NewRequest]],
    *,
    stop_after: int | None = None,
    part_rounds: int = 10**9,
    compact: bool = False,
    duration_of: Callable[[Round], float] = lambda _: 1.0,
    manifest: dict[str, Any] | None = None,
) -> Path:
    """Replay `arrivals` (round, request) and write a run folder at `path`. `duration_of` gives a round's seconds."""
    path.mkdir(parents=True)
    policy = SCHEDULERS[scheduler]
    engine = policy.build(config)
    out: Rows = {table: [] for table in records.TABLES}
    ledgers: dict[int, Ledger] = {}
    part, number, now, due = 0, 0, 0.0, sorted(arrivals, key=lambda pair: pair[0])
    while due or engine.has_unfinished():
        number += 1
        while due and due[0][0] <= number:
            _admit(out, ledgers, engine, due.pop(0)[1], number, now)
        if engine.has_unfinished():
            round = engine.schedule()
            running = set(engine.running_requests())
            engine.update(round, None)
            end = now + duration_of(round)
            _record(out, ledgers, engine, round, number, now, end, running, config)
            now = end
        else:
            now += 1.0
        if number % part_rounds == 0:
            _flush(path, part, out, compact)
            part += 1
        if number == stop_after:
            break
    for request, ledger in ledgers.items():
        if ledger.row["status"] == "unfinished":
            out["requests"].append(ledger.row | {"request": request})
    _flush(path, part, out, compact)
    settings = {
        name: {"value": getattr(config, name), "source": "test"}
        for name in config.__dataclass_fields__
        if name in policy.knobs
    }
    (path / "manifest.json").write_text(
        json.dumps(
            {
                "schema_version": records.SCHEMA_VERSION,
                "status": "complete" if not due and not engine.has_unfinished() else "interrupted",
                "scheduler": scheduler,
                "policy": policy.policy,
                "engine": "null",
                "clock": "rounds",
                "records": "compact" if compact else "full",
                "command": ["benchctl", "replay", "a-test"],
                "trace": {"name": "a-test", "num_requests": len(arrivals)},
                "config": settings,
                "limits": {
                    "num_blocks": config.num_blocks,
                    "usable_blocks": config.num_blocks - policy.null_blocks,
                    "block_size": config.block_size,
                },
            }
            | (manifest or {})
        )
    )
    return path


def record_golden(path: Path, policy: str, name: str, **options: Any) -> Path:
    """A logged case as a run folder."""
    case = load_case(policy, name)
    arrivals = [(entry["arrival_round"], new_request(row, entry)) for row, entry in enumerate(case["requests"])]
    return record_run(path, policy, config_of(case), arrivals, **options)


def _admit(out: Rows, ledgers: dict[int, Ledger], engine: Any, new: NewRequest, number: int, now: float) -> None:
    common = {
        "request": new.request,
        "id": new.id,
        "arrival_s": now,
        "admitted_s": now,
        "prompt_tokens": new.num_prompt_tokens,
    }
    rejection = engine.add(new)
    row = common | {
        "status": "unfinished", "reason": None, "first_scheduled_s": None, "first_token_s": None, "finished_s": None, "emitted_tokens": 0,
        "cached_tokens": None, "discarded_tokens": 0, "recomputed_tokens": 0, "preemptions": 0, "stalled_s": 0.0, "preempted_s": 0.0,
    }  # fmt: skip
    if rejection is not None:
        out["requests"].append(row | {"status": "rejected", "reason": rejection.reason, "admitted_s": None})
        out["decisions"].append(
            {
                "round": number, "order": -1 - sum(d["round"] == number and d["kind"] == "reject" for d in out["decisions"]),
                "kind": "reject", "request": new.request, "reason": rejection.reason, "needed": rejection.needed,
                "available": rejection.available, "unit": rejection.unit,
            }
        )  # fmt: skip
        return
    ledgers[new.request] = Ledger(new, number, row)
    out["admissions"].append(
        common
        | {
            "admitted_round": number,
            "output_tokens": new.num_output_tokens,
            "priority": new.priority,
            "adapter": new.adapter,
        }
    )


def _record(
    out: Rows,
    ledgers: dict[int, Ledger],
    engine: Any,
    round: Round,
    number: int,
    start: float,
    end: float,
    running: set[int],
    config: SchedulerConfig,
) -> None:
    batch = round.batch
    for order, kind, request, other, reason, needed, available, unit in round.decisions:
        out["decisions"].append(
            {"round": number, "order": order, "kind": kind, "request": request, "other": other, "reason": reason}
            | {"needed": needed, "available": available, "unit": unit}
        )
        if kind == "preempt":
            ledger = ledgers[request]
            ledger.row["preemptions"] += 1
            ledger.row["discarded_tokens"] += ledger.computed
            ledger.computed, ledger.preempted_at = 0, start
    for order, block, event, request, index in round.blocks:
        out["blocks"].append(
            {"round": number, "order": order, "block": block, "event": event, "request": request, "index": index}
        )
    prefill = decode = cached = 0
    finished = dict(round.finished)
    rows = zip(
        *(column.tolist() for column in (batch.request, batch.start, batch.num_tokens, batch.is_decode, batch.yields_token, batch.cached_tokens, batch.num_blocks)),
        strict=True,
    )  # fmt: skip
    for order, (request, first, count, is_decode, yields, hit, num_blocks) in enumerate(rows):
        ledger = ledgers[request]
        out["batches"].append(
            {
                "round": number,
                "order": order,
                "request": request,
                "start": first,
                "num_tokens": count,
                "phase": "decode" if is_decode else "prefill",
            }
            | {"cached_tokens": None if hit < 0 else hit, "yields_token": yields, "num_blocks": num_blocks}
        )
        prefill, decode, cached = prefill + count * (not is_decode), decode + count * is_decode, cached + max(hit, 0)
        if ledger.row["first_scheduled_s"] is None:
            ledger.row["first_scheduled_s"] = start
        if ledger.row["cached_tokens"] is None:
            ledger.row["cached_tokens"] = hit
        if ledger.preempted_at is not None:
            ledger.row["preempted_s"] += start - ledger.preempted_at
            ledger.preempted_at = None
        ledger.row["recomputed_tokens"] += max(min(ledger.high_water, first + count) - first, 0)
        ledger.computed = first + count
        ledger.high_water = max(ledger.high_water, first + count)
        if yields:
            out["tokens"].append(
                {
                    "request": request,
                    "index": ledger.row["emitted_tokens"],
                    "round": number,
                    "t_s": end,
                    "token_id": None,
                }
            )
            ledger.row["emitted_tokens"] += 1
            if ledger.row["first_token_s"] is None:
                ledger.row["first_token_s"] = end
        if request in finished:
            ledger.row |= {"status": "finished", "reason": finished[request], "finished_s": end}
            out["requests"].append(ledger.row)
    for request in running - set(batch.request.tolist()):
        ledgers[request].row["stalled_s"] += end - start
    small = config.num_blocks <= 64
    out["rounds"].append(
        {
            "round": number, "t_start_s": start, "t_scheduled_s": start, "t_executed_s": end, "t_end_s": end,
            "kind": "empty" if not batch.num_seqs else "mixed" if prefill and decode else "prefill" if prefill else "decode",
            "mode": "null", "padded_tokens": prefill + decode, "num_seqs": batch.num_seqs, "prefill_tokens": prefill, "decode_tokens": decode,
            "cached_tokens": cached, "queried_tokens": round.queried_tokens, "budget_left": round.budget_left, "waiting": round.waiting,
            "running": round.running, "skipped": round.skipped, "free_blocks_start": round.free_blocks_start,
            "free_blocks_scheduled": round.free_blocks_scheduled, "free_blocks_end": round.free_blocks_end,
            "cached_free_blocks": round.cached_free_blocks, "admitted": round.num_admitted, "preempted": round.num_preempted,
            "finished": len(round.finished), "evicted": round.num_evicted, "stop_waiting": round.stop_waiting, "stop_running": round.stop_running,
            "schedule_s": 1e-5, "prepare_s": None, "device_s": None, "update_s": 1e-5, "record_s": 1e-6, "flops": None, "bytes": None,
            "free_list": engine.free_list() if small else None, "hashed_blocks": engine.hashed_blocks() if small else None,
        }
    )  # fmt: skip


def _flush(path: Path, part: int, out: Rows, compact: bool) -> None:
    for table in sorted(out, key=lambda name: name == "rounds"):
        frame = pl.DataFrame(out[table], schema=records.schema(table))
        if compact and table in records.COMPACT:
            frame = _compact(frame, "start" if table == "batches" else "index")
        frame.write_parquet(path / f"{table}-{part:05d}.parquet")
        out[table].clear()


def _compact(frame: pl.DataFrame, counter: str) -> pl.DataFrame:
    """Fold consecutive rounds of one request into one row, by the rules of `records.COMPACT`."""
    rows: list[dict[str, Any]] = []
    open_rows: dict[int, dict[str, Any]] = {}
    for row in frame.iter_rows(named=True):
        last = open_rows.get(row["request"])
        grown = last and {"round": last["round"] + last["num_rounds"], counter: last[counter] + last["num_rounds"]}
        moving = {"round", counter, "t_s", "num_rounds"}
        if last and row.get("phase", "decode") == "decode" and all(row[key] == value for key, value in grown.items()) and all(
            row[key] == last[key] for key in row if key not in moving
        ):  # fmt: skip
            last["num_rounds"] += 1
        else:
            open_rows[row["request"]] = row | {"num_rounds": 1}
            rows.append(open_rows[row["request"]])
    return pl.DataFrame(rows, schema=frame.schema | {"num_rounds": pl.Int64()})
