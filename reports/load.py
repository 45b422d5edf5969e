"""How the requests of a run came: how arrivals were made, whether throughput was theirs, and turns that came before their time.

Looks only at recorded files.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import polars as pl

from reports.numbers import number
from reports.run import Run

KEPT_UP_SHARE = 0.9  # arrivals that last so much of the run set its throughput, not the policy
LEAST_REQUESTS = 50  # of fewer the tail of the last request is most of the run


class EarlyTurns(NamedTuple):
    """Turns admitted before the turn before them had ended. `first`: the row of the trace of the earliest admitted."""

    num_early: int
    later_turns: int  # turns that have a turn before them
    first: int
    admitted_s: float
    parent_ended_s: float | None  # None: the turn before never ended


def arrivals_text(run: Run) -> str | None:
    """How the arrivals were made, the loop's kind with it: `--request-rate 170 (Poisson), … · open loop`."""
    arrivals, load = run.manifest.get("arrivals"), run.manifest.get("load")
    rate, scale = run.setting("request_rate"), run.setting("time_scale")
    turns = arrivals == "session"  # then only conversations begin so, and their span is not that of the trace
    text = str(arrivals) if arrivals else ""
    if rate is not None and math.isinf(float(rate)):
        text = "all at once (--request-rate inf)"
    elif rate is not None:
        shape = run.setting("burstiness", 1.0)
        gaps = "Poisson" if shape == 1 else f"gamma gaps of shape {shape:g}"
        text = f"drawn anew by --request-rate {rate:g} ({gaps})" + ("" if turns else _squeezed(run))
    elif scale is not None:
        text = f"the trace's, gaps × {scale:g}" + ("" if turns else _squeezed(run))
    elif text in ("trace", "session"):
        text = "at the trace's own times"
    if turns:
        text = f"of conversations {text}; a later turn after the turn before it has ended (--arrivals session)"
    cap = run.setting("max_concurrency")
    loop = f"{load} loop" + (f", at most {cap} at once" if cap else "") if load else None
    return " · ".join(part for part in (text, loop) if part) or None


def _squeezed(run: Run) -> str:
    """`: 10,470 s of trace in 58.4 s`, where both are known."""
    trace = run.manifest.get("trace")
    span = trace.get("span_s") if isinstance(trace, dict) else None
    first, last = arrival_span(run)
    if run.clock == "rounds" or not span or last is None or first is None or last <= first:
        return ""
    return f": {number(float(span))} s of trace in {number(last - first)} s"


def retimed(run: Run) -> bool:
    """Whether gaps between arrivals are not those of the trace."""
    scale = run.setting("time_scale")
    return run.setting("request_rate") is not None or (scale is not None and scale != 1)


def arrival_span(run: Run) -> tuple[float | None, float | None]:
    """The first and the last intended arrival, seconds."""
    first, last = (
        run.scan("admissions")
        .select(pl.col("arrival_s").min(), pl.col("arrival_s").max().alias("last"))
        .collect()
        .row(0)
    )
    return first, last


def load_facts(run: Run) -> dict[str, Any]:
    """For the summary. `kept_up`: an open load that was finished as fast as it came, so that throughput is that of the arrivals.

    Arrivals must last KEPT_UP_SHARE of the run: then throughput is at least that share of what was offered. False where
    arrivals wait for the run (a cap, turns after their parents), and of runs too short to say.
    """
    first, last = arrival_span(run)
    count = run.scan("admissions").select(pl.len()).collect().item()
    span = (last or 0.0) - (first or 0.0)
    open_load = run.manifest.get("load", "open") == "open" and run.manifest.get("arrivals") != "session"
    finished = run.scan("requests").filter(pl.col("status") == "finished").select(pl.len()).collect().item()
    kept_up = (
        open_load
        and run.status == "complete"
        and count >= LEAST_REQUESTS
        and finished == count
        and span >= KEPT_UP_SHARE * run.duration_s > 0
    )
    return {
        "arrivals_s": span,
        "offered_request_rate": (count - 1) / span if span > 0 else None,
        "after_last_arrival_s": max(run.duration_s - last, 0.0) if last is not None else None,
        "kept_up": kept_up,
    }


def early_turns(run: Run) -> EarlyTurns | None:
    """Turns of a session that the scheduler had before the session's turn before them was finished; None without sessions."""
    turns = run.scan("admissions").filter(pl.col("session").is_not_null() & pl.col("turn").is_not_null())
    ended = run.scan("requests").select("request", "finished_s")
    before = pl.col("finished_s").shift(1).over("session")
    frame = (
        turns.select("request", "session", "turn", "admitted_s")
        .join(ended, on="request", how="left")
        .sort("session", "turn", "admitted_s")
        .with_columns(before.alias("parent_ended_s"), pl.col("turn").shift(1).over("session").alias("turn_before"))
        .filter(pl.col("turn_before") < pl.col("turn"))
        .collect()
    )
    if not frame.height:
        return None
    early = frame.filter(pl.col("parent_ended_s").is_null() | (pl.col("admitted_s") < pl.col("parent_ended_s"))).sort(
        "admitted_s", "request"
    )
    if not early.height:
        return EarlyTurns(0, frame.height, -1, 0.0, None)
    row = early.row(0, named=True)
    return EarlyTurns(early.height, frame.height, row["request"], row["admitted_s"], row["parent_ended_s"])
