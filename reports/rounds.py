"""Rounds in words: who waited and ran before each, what was fed, why it stopped, and how the free blocks went.

Made from the tables alone, for both policies. The seven rounds of the worked example read as in the article.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from reports.blocks import free_moments, turning_points
from reports.glossary import STOPS
from reports.numbers import plural
from reports.queues import RoundView, walk
from reports.run import Run

NOBODY = "–"
LISTED = 4  # so many requests are named before a list is shortened

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RoundText:
    """One line of the round table, all text but the number and the raw kind."""

    round: int
    kind: str
    waiting: str
    running: str
    batch: str
    why: str
    free: str


def round_texts(run: Run, last_round: int | None = None) -> Iterator[RoundText]:
    """A line for each recorded round up to `last_round`. Without batches and decisions (`--records summary`) counts stand in their place."""
    if not run.has("batches"):
        yield from (
            _counts_only(row)
            for row in run.scan("rounds").collect().iter_rows(named=True)
            if last_round is None or row["round"] <= last_round
        )
        return
    moments = free_moments(run, last_round)
    for view in walk(run, last_round):
        row = view.row
        free = moments.get(view.round, [row["free_blocks_start"]])
        yield RoundText(
            round=view.round,
            kind=row["kind"],
            waiting=names(view.waiting, run.labels),
            running=names(view.running, run.labels),
            batch=batch_text(view, run.labels),
            why=why_text(view, run),
            free=" → ".join(f"{count:,}" for count in free),
        )


def _counts_only(row: Row) -> RoundText:
    free = turning_points([row["free_blocks_start"], row["free_blocks_scheduled"], row["free_blocks_end"]])
    parts = [f"{kind} {row[f'{kind}_tokens']:,} tokens" for kind in ("decode", "prefill") if row[f"{kind}_tokens"]]
    stops = [STOPS[stop] for stop in (row["stop_running"], row["stop_waiting"]) if stop in STOPS]
    return RoundText(
        row["round"],
        row["kind"],
        "",
        "",
        " + ".join(parts) or NOBODY,
        "; ".join(stops),
        " → ".join(f"{count:,}" for count in free),
    )


def names(requests: list[int], labels: dict[int, str]) -> str:
    """`R1 R2 R3`; longer lists are shortened: `R1 … R5` where the rows of the trace are consecutive, else the first and a count."""
    if not requests:
        return NOBODY
    named = [labels.get(request, f"#{request}") for request in requests]
    if len(named) <= LISTED:
        return " ".join(named)
    if requests == list(range(requests[0], requests[0] + len(requests))):
        return f"{named[0]} … {named[-1]}"
    return f"{' '.join(named[:LISTED])} +{len(named) - LISTED:,}"


def batch_text(view: RoundView, labels: dict[int, str]) -> str:
    """`prefill R1 R2 = 700`, `prefill R4[0:1024]`, `decode × 4`, and both joined by ` + ` in a mixed round.

    A prefill of the whole known sequence stands with its name alone; a part of it, or what a cache hit left, with [from:to].
    Decodes are counted where all that ran before the round decode in it, and named where some are left out.
    """
    decodes = [row for row in view.batch if row["phase"] == "decode"]
    prefills = [row for row in view.batch if row["phase"] != "decode"]
    parts: list[str] = []
    if decodes:
        ids = [row["request"] for row in decodes]
        everybody = len(decodes) == len(view.running)
        if everybody or len(ids) > LISTED:
            parts.append(f"decode × {len(ids):,}" + ("" if everybody else f" of {len(view.running):,}"))
        else:
            parts.append(f"decode {names(ids, labels)}")
    if prefills:
        whole = all(_is_whole(row) for row in prefills)
        spans = [_span(row, labels) for row in prefills[:LISTED]]
        if len(prefills) > LISTED:
            spans.append(f"+{len(prefills) - LISTED:,}")
        total = sum(row["num_tokens"] for row in prefills)
        parts.append(f"prefill {' '.join(spans)}" + (f" = {total:,}" if whole or len(prefills) > 1 else ""))
    return " + ".join(parts) or NOBODY


def _is_whole(row: Row) -> bool:
    return bool(row["start"] == 0 and row["yields_token"])


def _span(row: Row, labels: dict[int, str]) -> str:
    name = labels.get(row["request"], f"#{row['request']}")
    return name if _is_whole(row) else f"{name}[{row['start']}:{row['start'] + row['num_tokens']}]"


def why_text(view: RoundView, run: Run) -> str:
    """Why the round is what it is and no more: preemptions, then what the loops stopped for, with the numbers that decided it."""
    words = _Words(view, run)
    holds = words.holds()
    clauses = [*words.preemptions(), *words.capped(), *words.skips(), *holds]
    return "; ".join(dict.fromkeys(clauses if holds else clauses + words.stops()))


class _Words:
    """The clauses about one round."""

    def __init__(self, view: RoundView, run: Run) -> None:
        self.view = view
        self.nano = run.family == "nano"
        self.max_num_seqs = run.max_num_seqs or len(view.batch)
        self.block_size = run.block_size
        self.labels = run.labels
        self.fed = {row["request"]: row for row in view.batch}

    def label(self, request: int) -> str:
        return self.labels.get(request, f"#{request}")

    def of_kind(self, *kinds: str) -> list[Row]:
        return [row for row in self.view.decisions if row["kind"] in kinds]

    def preemptions(self) -> list[str]:
        out = []
        for row in self.of_kind("preempt"):
            victim = self.label(row["request"])
            wanter = row["request"] if row["reason"] == "self" or row["other"] is None else row["other"]
            free = "none" if not row["available"] else f"only {row['available']:,}"
            fed = self.fed.get(wanter)
            one = row["needed"] == 1 and (fed is None or fed["phase"] == "decode")
            need = (
                f"{self.label(wanter)} crosses a block edge"
                if one
                else f"{self.label(wanter)} needs {plural(row['needed'], 'block')}"
            )
            if row["reason"] == "self":
                out.append(f"{need} with {free} free → it preempts itself")
            else:
                rank = {"newest": "the newest", "lowest_priority": "the last by priority"}.get(
                    row["reason"], row["reason"]
                )
                out.append(f"{need} with {free} free → {victim}, {rank}, is preempted for it")
        return out

    def capped(self) -> list[str]:
        """Requests given less than they want, where the end of the budget is not the reason."""
        return [
            f"{self.label(row['request'])} gets {row['available']:,} of its {row['needed']:,} tokens: long_prefill_token_threshold"
            for row in self.of_kind("chunk")
            if row["reason"] == "long_prefill_token_threshold" and row["request"] in self.fed
        ]

    def skips(self) -> list[str]:
        rows = self.of_kind("skip")
        if not rows:
            return []
        first = rows[0]
        taken = (
            f"every adapter place is taken ({first['available']:,} of {first['available']:,})"
            if first["available"] is not None
            else "no adapter place is free"
        )
        return [f"{names([row['request'] for row in rows], self.labels)} passed over, {taken}"]

    def holds(self) -> list[str]:
        return [
            HOLDS[row["reason"]](self, row)
            if row["reason"] in HOLDS
            else f"{self.label(row['request'])} held: {row['reason']}"
            for row in self.of_kind("hold")
        ]

    def stops(self) -> list[str]:
        """What ended the loops. A cut chunk says it for both; else the running loop's end, then the waiting loop's."""
        view, row = self.view, self.view.row
        waiting, running = row["stop_waiting"], row["stop_running"]
        cut = self._cut()
        if cut:
            return ["budget used up", *cut]
        left = [request for request in view.running if request not in self.fed]
        if running == "token_budget":
            return ["budget used up", *([f"{names(left, self.labels)} not reached"] if left else [])]
        if running == "max_num_seqs" and left:
            return [f"max_num_seqs {self.max_num_seqs:,} reached, {names(left, self.labels)} not decoded"]
        if waiting == "preemption":
            behind = names(view.waiting, self.labels)
            return (
                [f"no admissions after a preemption: {behind} {'wait' if len(view.waiting) > 1 else 'waits'}"]
                if view.waiting
                else []
            )
        if waiting == "token_budget":
            return ["budget used up"]
        if waiting == "max_num_seqs":
            return [f"no seat left: max_num_seqs {self.max_num_seqs:,}"]
        if self.of_kind("preempt"):
            return []  # that was said
        if waiting == "waiting_empty" and (row["admitted"] or running is None):
            return [self._newcomers() or "waiting empty"]
        if waiting in (None, "waiting_empty"):
            return [f"nothing left to run; {plural(len(self.fed), 'sequence')}"] if self.fed else []
        return [STOPS.get(waiting, str(waiting))]

    def _cut(self) -> list[str]:
        """Who got less than it wants because the budget ended."""
        out = []
        for row in self.of_kind("chunk"):
            name, request = self.label(row["request"]), row["request"]
            fed = self.fed.get(request)
            if row["reason"] != "token_budget" or fed is None:
                continue
            if not self.nano:
                out.append(f"{name} gets {row['available']:,} of its {row['needed']:,} tokens")
                continue
            out.append(f"{name} stays at the head")
            admitted = any(other["request"] == request for other in self.of_kind("admit", "resume"))
            if admitted and self.block_size and fed["num_blocks"] * self.block_size > fed["start"] + fed["num_tokens"]:
                out.append(f"all {fed['num_blocks']:,} of its blocks are reserved at once")
        return out

    def _newcomers(self) -> str | None:
        """nano's price of prefill first, named in the round in which newcomers cause it."""
        new = self.of_kind("admit", "resume")
        if not (self.nano and new and self.view.running):
            return None
        return f"the newcomer{'s' if len(new) > 1 else ''} stop{'' if len(new) > 1 else 's'} every decode for a round"

    def not_first(self, row: Row) -> str:
        return f"{plural(row['available'], 'token')} of budget left < {self.label(row['request'])}'s {row['needed']:,}, and only a round's first may be chunked"

    def no_blocks(self, row: Row) -> str:
        fit = f"{self.label(row['request'])} does not fit (needs {plural(row['needed'], 'block')}, {row['available']:,} free)"
        decodes = any(entry["phase"] == "decode" for entry in self.view.batch)
        return fit + (", and that does not stop the decodes" if decodes else "")

    def chunking_disabled(self, row: Row) -> str:
        return f"{plural(row['available'], 'token')} of budget left < {self.label(row['request'])}'s {row['needed']:,}, and chunked prefill is off"

    def reserve_full_isl(self, row: Row) -> str:
        return f"the whole of {self.label(row['request'])} does not fit (needs {plural(row['needed'], 'block')}, {row['available']:,} free): scheduler_reserve_full_isl"

    def watermark(self, row: Row) -> str:
        return f"the watermark holds {self.label(row['request'])} back (needs {plural(row['needed'], 'block')} with it, {row['available']:,} free)"

    def max_model_len(self, row: Row) -> str:
        return f"{self.label(row['request'])} stands at max_model_len"


HOLDS: dict[str, Callable[[_Words, Row], str]] = {
    "not_first": _Words.not_first,
    "blocks": _Words.no_blocks,
    "chunking_disabled": _Words.chunking_disabled,
    "reserve_full_isl": _Words.reserve_full_isl,
    "watermark": _Words.watermark,
    "max_model_len": _Words.max_model_len,
}
