"""What one round did with one request, and why, as a clause: `held R4: not first in its round, 69 tokens of budget left < 1200`.

One place for these words, used by the decision diff and by `explain`. Reads a `RoundView`; must not know a second run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from reports.glossary import STOPS
from reports.queues import RoundView
from reports.run import Run

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Treatment:
    """`kind`: admit, resume, prefill, decode, hold, skip, preempt, wait, stall, absent. `text`: a clause in the past tense."""

    kind: str
    reason: str | None
    text: str


def tokens(count: int) -> str:
    return f"{count:,} token{'' if count == 1 else 's'}"


def blocks(count: int) -> str:
    return f"{count:,} block{'' if count == 1 else 's'}"


def label(run: Run, request: int | None) -> str:
    return "?" if request is None else run.labels.get(request, f"#{request}")


def treatment(run: Run, view: RoundView, request: int) -> Treatment:
    """What `view`'s round did with `request`."""
    name = label(run, request)
    own = [row for row in view.decisions if row["request"] == request and row["kind"] not in ("evict", "finish")]
    row = next((row for row in view.batch if row["request"] == request), None)
    if row is not None:
        return _fed(run, view, name, row, own)
    for decision in own:
        if decision["kind"] == "preempt":
            return Treatment("preempt", decision["reason"], preempted(run, name, decision))
        if decision["kind"] == "reject":
            return Treatment("reject", decision["reason"], f"refused {name}: {decision['reason']}{numbers(decision)}")
    for decision in own:
        if decision["kind"] == "hold":
            return Treatment("hold", decision["reason"], f"held {name}: {held(decision, view)}")
        if decision["kind"] == "skip":
            full = f"all {decision['available']} adapter places are taken by others"
            return Treatment("skip", decision["reason"], f"passed over {name}: {full}")
    if request in view.waiting:
        stop = view.row["stop_waiting"]
        return Treatment("wait", stop, f"left {name} waiting: {waiting_stop(view, stop)}")
    if request in view.running:
        return _stalled(run, view, name)
    return Treatment("absent", None, f"did not have {name}: it had not arrived, or had finished")


def _fed(run: Run, view: RoundView, name: str, row: Row, own: list[Row]) -> Treatment:
    chunk = next((decision for decision in own if decision["kind"] == "chunk"), None)
    admission = next((decision for decision in own if decision["kind"] in ("admit", "resume")), None)
    hit = f" after a prefix hit of {tokens(row['cached_tokens'])}" if row["cached_tokens"] else ""
    if admission is None:
        if row["phase"] == "decode":
            return Treatment("decode", None, f"decoded {name}")
        span = f"[{row['start']}:{row['start'] + row['num_tokens']}]"
        return Treatment("prefill", chunk["reason"] if chunk else None, f"fed {name} {span}{_cut(chunk)}")
    verb = "admitted" if admission["kind"] == "admit" else "resumed"
    if chunk is None:
        what = f"{verb} {name} whole, {tokens(row['num_tokens'])}{hit}"
    else:
        what = f"{verb} {name} as a chunk of {chunk['available']:,} of {tokens(chunk['needed'])}{hit}{_why_cut(chunk)}"
    return Treatment(admission["kind"], chunk["reason"] if chunk else admission["reason"], what)


def _cut(chunk: Row | None) -> str:
    if chunk is None:
        return ""
    return f", {chunk['available']:,} of {tokens(chunk['needed'])}{_why_cut(chunk)}"


def _why_cut(chunk: Row) -> str:
    if chunk["reason"] == "token_budget":
        return ": what was left of the budget"
    return f": {chunk['reason']}"


def preempted(run: Run, name: str, decision: Row) -> str:
    """Why a victim lost its blocks."""
    free = "none was free" if not decision["available"] else f"{blocks(decision['available'])} were free"
    need = f"{blocks(decision['needed'])} needed, {free}"
    if decision["reason"] == "self" or decision["other"] is None:
        return f"had {name} preempt itself: {need}"
    rank = {"newest": "the newest running", "lowest_priority": "the last by (priority, arrival)"}
    return f"preempted {name}, {rank.get(decision['reason'], decision['reason'])}, for {label(run, decision['other'])}: {need}"


def held(decision: Row, view: RoundView) -> str:
    """Why a loop that looked at a request could not schedule it, with the numbers that decided it."""
    needed, available = decision["needed"], decision["available"]
    reason = decision["reason"]
    if reason == "not_first":
        return f"not first in its round, {tokens(available)} of budget left < {needed:,}"
    if reason == "blocks":
        return f"needs {blocks(needed)}, {available:,} free"
    if reason == "chunking_disabled":
        return f"{tokens(available)} of budget left < {needed:,}, and chunked prefill is off"
    if reason == "reserve_full_isl":
        return f"its whole sequence needs {blocks(needed)}, {available:,} free (scheduler_reserve_full_isl)"
    if reason == "watermark":
        return f"needs {blocks(needed)} with the watermark, {available:,} free"
    if reason == "max_model_len":
        return "its next token would lie beyond max_model_len"
    return f"{reason}{numbers(decision)}"


def numbers(decision: Row) -> str:
    """` (needed 3, available 1 blocks)`, or nothing where no number decided it."""
    if decision["needed"] is None:
        return ""
    unit = f" {decision['unit']}" if decision["unit"] else ""
    return f" (needed {decision['needed']:,}, available {decision['available']:,}{unit})"


def waiting_stop(view: RoundView, stop: str | None) -> str:
    """Why the waiting loop did not come to somebody, naming the one it stopped at."""
    head = next((row for row in view.decisions if row["kind"] == "hold" and row["request"] in view.waiting), None)
    if head is not None:
        return f"the loop stopped before it ({stop})"
    if stop is None:
        return "the waiting loop did not run"
    return STOPS.get(stop, stop)


def _stalled(run: Run, view: RoundView, name: str) -> Treatment:
    stop = view.row["stop_running"]
    if stop is None and view.row["kind"] == "prefill":
        return Treatment("stall", "prefill_first", f"let {name} stand still: a round that prefills decodes nobody")
    return Treatment("stall", stop, f"did not reach {name}: {STOPS.get(stop, stop)}")
