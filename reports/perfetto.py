"""A run as Trace Event JSON, gzip: opens in Perfetto's viewer and in chrome://tracing.

Of each run a process "engine" (a slice a round, its record as arguments; counters of free blocks, running, waiting and
tokens; instants for preemptions and evictions) and a process "requests" (a track a request, with its phases; stalled and
preempted stretches lie inside prefill and decode). Times in microseconds.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from reports.own_time import own_scheduled, own_start
from reports.phases import phases
from reports.run import Run

Event = dict[str, Any]
LEFT_OUT = ("free_list", "hashed_blocks")  # of a round's arguments


def micros(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def events(run: Run, name: str, place: int = 0) -> Iterator[Event]:
    """Every event of one run; `place` keeps the processes of several runs apart."""
    engine, requests = 2 * place + 1, 2 * place + 2
    for pid, what in ((engine, "engine"), (requests, "requests")):
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"{name} {what}"}}
        yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
    yield {"ph": "M", "pid": engine, "tid": 0, "name": "thread_name", "args": {"name": "rounds"}}
    # Slices of one track may not overlap: where rounds do, a slice begins where the one before ends; t_start_s is an argument.
    rounds = run.scan("rounds").sort("round").with_columns(own_start().alias("_start"))
    for row in rounds.collect().iter_rows(named=True):
        begin = micros(row.pop("_start"))
        end = micros(row["t_end_s"])
        arguments = {key: value for key, value in row.items() if value is not None and key not in LEFT_OUT}
        yield {"ph": "X", "pid": engine, "tid": 0, "name": row["kind"], "cat": "round", "ts": begin, "dur": round(end - begin, 3), "args": arguments}  # fmt: skip
        fed = {"prefill": row["prefill_tokens"], "decode": row["decode_tokens"]}
        yield {"ph": "C", "pid": engine, "name": "tokens", "ts": begin, "args": fed}
        for counter in ("free_blocks_end", "running", "waiting"):
            label = "free blocks" if counter == "free_blocks_end" else counter
            yield {"ph": "C", "pid": engine, "name": label, "ts": end, "args": {label: row[counter]}}
    yield from _instants(run, engine)
    tracks: dict[int, int] = {}
    for request, phase, start, stop in phases(run).iter_rows():
        if request not in tracks:
            tracks[request] = len(tracks) + 1
            yield {"ph": "M", "pid": requests, "tid": tracks[request], "name": "thread_name", "args": {"name": run.ids[request]}}  # fmt: skip
            yield {"ph": "M", "pid": requests, "tid": tracks[request], "name": "thread_sort_index", "args": {"sort_index": tracks[request]}}  # fmt: skip
        yield {"ph": "X", "pid": requests, "tid": tracks[request], "name": phase, "cat": "request", "ts": micros(start), "dur": round(micros(stop) - micros(start), 3), "args": {"request": request}}  # fmt: skip


def _instants(run: Run, pid: int) -> Iterator[Event]:
    """Preemptions one by one; evictions as one instant for each round and request, with their number."""
    at = run.scan("rounds").sort("round").select("round", own_scheduled().alias("at_s"))
    told = run.scan("decisions").filter(pl.col("kind").is_in(["preempt", "evict"])).join(at, on="round")
    lost = told.filter(pl.col("kind") == "preempt").sort("round", "order").collect()
    for row in lost.iter_rows(named=True):
        arguments = {
            key: row[key] for key in ("round", "reason", "needed", "available", "unit") if row[key] is not None
        }
        arguments |= {"request": run.ids[row["request"]]}
        if row["other"] is not None:
            arguments["for"] = run.ids[row["other"]]
        yield {"ph": "i", "s": "p", "pid": pid, "tid": 0, "name": "preempt", "ts": micros(row["at_s"]), "args": arguments}  # fmt: skip
    gone = told.filter(pl.col("kind") == "evict").group_by("round", "request", "at_s").len("blocks").sort("round", "request").collect()  # fmt: skip
    for row in gone.iter_rows(named=True):
        arguments = {"round": row["round"], "request": run.ids[row["request"]], "blocks": row["blocks"]}
        yield {"ph": "i", "s": "p", "pid": pid, "tid": 0, "name": "evict", "ts": micros(row["at_s"]), "args": arguments}  # fmt: skip


def write_perfetto(runs: Sequence[Run], names: Sequence[str], path: Path) -> None:
    """Write all runs to one file, event by event. Equal runs give equal bytes. Raises OSError."""
    with path.open("wb") as raw, gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0) as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        first = True
        for place, (run, name) in enumerate(zip(runs, names, strict=True)):
            for event in events(run, name, place):
                file.write((b"" if first else b",\n") + json.dumps(event, separators=(",", ":")).encode())
                first = False
        file.write(b"\n]}\n")
