"""One round in full: the queues before it, who was looked at in order, the arithmetic that decided it, the blocks, what changed.

Made from the tables alone, for any recorded round. The clauses come from `treatment`, the state from `explain_state`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import polars as pl

from reports.document import Block, Element, Grid, Heading, Items, Text
from reports.explain_blocks import BlockPicture, block_picture
from reports.explain_state import computed_before, known_before, need_log, owners_after, rows_of, view_at
from reports.glossary import STOPS
from reports.queues import RoundView
from reports.run import Run
from reports.terminal import number
from reports.treatment import blocks, label, tokens, treatment
from reports.units import unit_of, whole

JSON_VERSION = 1
LISTED = 40  # candidates told one by one; more are counted

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Waiter:
    """A request in a queue before the round."""

    request: int
    label: str
    computed: int  # tokens computed and still held
    known: int  # prompt and output so far


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request that a loop came to, in order. `budget`: tokens left when it came; `free`: blocks then; None: not said by the records."""

    request: int
    label: str
    loop: str  # waiting or running
    outcome: str  # of Treatment.kind
    reason: str | None
    budget: int | None
    free: int
    text: str


@dataclass(frozen=True, slots=True)
class RoundExplanation:
    """Everything about one round. `events`: each block event in words, in order."""

    run: str
    scheduler: str
    round: int
    kind: str
    t_start_s: float
    t_end_s: float
    own_s: float  # t_end_s less the later of t_start_s and the end of the round before
    budget: int | None
    budget_left: int
    free: tuple[int, int, int]  # before, after schedule(), after update()
    usable_blocks: int | None
    block_size: int | None
    waiting: tuple[Waiter, ...]
    running: tuple[Waiter, ...]
    candidates: tuple[Candidate, ...]
    untold: int  # candidates beyond LISTED: decodes
    stop_waiting: str | None
    stop_running: str | None
    before: BlockPicture
    after: BlockPicture
    changes: tuple[str, ...]
    clock: str


def explain_round(run: Run, round_number: int) -> RoundExplanation:
    """Raises BenchctlError where the run has no such round, or kept no decision log."""
    need_log(run)
    view = view_at(run, round_number)
    row = view.row
    before = run.scan("rounds").filter(pl.col("round") < round_number).select(pl.col("t_end_s").max()).collect().item()
    everyone = [*view.waiting, *view.running]
    computed, known = computed_before(run, round_number, everyone), known_before(run, round_number, everyone)

    def queue(requests: list[int]) -> tuple[Waiter, ...]:
        return tuple(Waiter(r, label(run, r), computed[r], known.get(r, 0)) for r in requests)

    candidates = _candidates(run, view, computed, known)
    return RoundExplanation(
        run=run.shown,
        clock=run.clock,
        scheduler=run.scheduler,
        round=round_number,
        kind=row["kind"],
        t_start_s=row["t_start_s"],
        t_end_s=row["t_end_s"],
        own_s=row["t_end_s"] - max(row["t_start_s"], before or 0.0),
        budget=run.token_budget,
        budget_left=row["budget_left"],
        free=(row["free_blocks_start"], row["free_blocks_scheduled"], row["free_blocks_end"]),
        usable_blocks=run.usable_blocks,
        block_size=run.block_size,
        waiting=queue(view.waiting),
        running=queue(view.running),
        candidates=tuple(candidates[:LISTED]),
        untold=max(len(candidates) - LISTED, 0),
        stop_waiting=row["stop_waiting"],
        stop_running=row["stop_running"],
        before=block_picture(run, round_number, after=False),
        after=block_picture(run, round_number, after=True),
        changes=tuple(_changes(run, view)),
    )


def _candidates(run: Run, view: RoundView, computed: dict[int, int], known: dict[int, int]) -> list[Candidate]:
    """Who was looked at, in the order of the loops, with budget and free blocks at that moment."""
    free = _FreeBlocks(run, view)
    order = _order(run, view)
    fed = {row["request"]: row for row in view.batch}
    # A victim that had been scheduled in this round gives its tokens back; the records do not say how many.
    known_budget = not (
        run.setting("scheduling_policy") == "priority" and any(row["kind"] == "preempt" for row in view.decisions)
    )
    budget = run.token_budget
    out = []
    for loop, request in order:
        what = treatment(run, view, request)
        counts = loop == "waiting" or run.family != "nano"  # nano's decodes do not look at the budget
        left = budget if known_budget and counts else None
        free_then = free.when(request)
        text = _arithmetic(run, view, request, left, free_then, computed, known, what.text)
        out.append(Candidate(request, label(run, request), loop, what.kind, what.reason, left, free_then, text))
        if request in fed and budget is not None and counts:
            budget -= fed[request]["num_tokens"]
    return out


def _order(run: Run, view: RoundView) -> list[tuple[str, int]]:
    """(loop, request) of everybody a loop came to: nano waiting first, vllm running first."""
    fed = [row["request"] for row in view.batch]
    was_running = set(view.running)
    held = {row["request"] for row in view.decisions if row["kind"] in ("hold", "skip")}
    victims = [row["request"] for row in view.decisions if row["kind"] == "preempt"]
    passed = [row["request"] for row in view.decisions if row["kind"] == "skip"]
    waiting = [request for request in dict.fromkeys([*passed, *fed]) if request not in was_running]
    waiting = sorted(waiting, key=_places(view).__getitem__)
    waiting += [request for request in view.waiting if request in held and request not in waiting]
    running = [request for request in view.running if request in (set(fed) | held) - set(victims)]
    for row in view.decisions:
        if row["kind"] == "preempt":  # told just before the one that needed its blocks; by itself: where the loop ended
            at = running.index(row["other"]) if row["other"] in running else len(running)
            running.insert(at, row["request"])
    loops = [("waiting", request) for request in waiting], [("running", request) for request in running]
    return [*loops[0], *loops[1]] if run.family == "nano" else [*loops[1], *loops[0]]


def _places(view: RoundView) -> dict[int, int]:
    """request -> when the round decided about it: the place of its first decision, the batch's order for those without."""
    first: dict[int, int] = {}
    for row in view.decisions:
        if row["kind"] != "evict":
            first.setdefault(row["request"], row["order"])
    following = 0
    places = {}
    for row in view.batch:
        following = max(following, first.get(row["request"], following))
        places[row["request"]] = following
    return first | places


class _FreeBlocks:
    """Free blocks when the round came to each request, from the order of its decisions and block events."""

    def __init__(self, run: Run, view: RoundView) -> None:
        events = rows_of(run, "blocks", view.round)
        shared = [row["block"] for row in events if row["event"] == "share"]
        owned = set(owners_after(run, view.round - 1, shared).owners) if shared else set()
        self.start = int(view.row["free_blocks_start"])
        self._first: dict[int, int] = {}
        count = self.start
        marks = sorted(
            [(row["order"], "decision", row) for row in view.decisions]
            + [(row["order"], "event", row) for row in events],
            key=lambda mark: mark[0],
        )
        self._last_before_update = count
        self._steps: list[tuple[int, int]] = []
        for order, what, row in marks:
            kind = row["kind"] if what == "decision" else row["event"]
            if what == "decision" and kind not in ("evict", "finish"):
                self._first.setdefault(row["request"], count)
            elif what == "event":
                if kind in ("allocate", "share"):
                    self._first.setdefault(row["request"], count)
                if kind == "allocate" or (kind == "share" and row["block"] not in owned):
                    count -= 1
                    owned.add(row["block"])
                elif kind == "free":
                    count += 1
                    owned.discard(row["block"])
            self._steps.append((order, count))
        self._before: dict[int, int] = {}
        last = self.start
        for row in view.batch:
            last = self._first.get(row["request"], last)
            self._before[row["request"]] = last

    def when(self, request: int) -> int:
        return self._first.get(request, self._before.get(request, self.start))


def _arithmetic(
    run: Run,
    view: RoundView,
    request: int,
    budget: int | None,
    free: int,
    computed: dict[int, int],
    known: dict[int, int],
    outcome: str,
) -> str:
    """What it wanted against what there was, then what came of it."""
    own = [row for row in view.decisions if row["request"] == request]
    fed = next((row for row in view.batch if row["request"] == request), None)
    admission = next((row for row in own if row["kind"] in ("admit", "resume")), None)
    size = run.block_size or 1
    wants = known.get(request, 0) - computed.get(request, 0)
    if fed is not None and fed["cached_tokens"]:
        wants -= fed["cached_tokens"]
    has = []
    if budget is not None:
        has.append(f"wants {tokens(wants)}, {budget:,} left in the budget")
    if admission is not None:
        end = known.get(request, 0) if run.family == "nano" else (fed["start"] + fed["num_tokens"] if fed else 0)
        shared = fed["cached_tokens"] // size if fed and fed["cached_tokens"] else 0
        total = -(-end // size)
        need = f"⌈{end:,} / {size}⌉ = {blocks(total)}"
        if shared:
            need += f", {shared} of them hit, {admission['needed']} to come from the free list"
        has.append(f"{need}; {admission['available']:,} free")
    elif fed is not None and fed["phase"] == "decode":
        held = -(-fed["start"] // size)
        new = fed["num_blocks"] - held
        edge = (
            f"token {fed['start'] + 1:,} opens its block {fed['num_blocks']}"
            if new > 0
            else f"token {fed['start'] + 1:,} lies in its block {fed['num_blocks']}"
        )
        has.append(f"{edge}; {free:,} free" if new > 0 else edge)
    elif fed is not None:
        has.append(f"it holds {blocks(fed['num_blocks'])} with this step; {free:,} free")
    return f"{'; '.join(has)} → {outcome}" if has else outcome


def _changes(run: Run, view: RoundView) -> list[str]:
    """What the round left behind."""
    out = []
    emitted = [row["request"] for row in view.batch if row["yields_token"]]
    if emitted:
        out.append(f"{tokens(len(emitted))} came out: {_some(run, emitted)}")
    silent = [row["request"] for row in view.batch if not row["yields_token"]]
    if silent:
        out.append(f"no token yet from {_some(run, silent)}: the prompt is not whole")
    for kind, text in (("admit", "admitted"), ("resume", "taken back"), ("preempt", "preempted")):
        found = [row["request"] for row in view.decisions if row["kind"] == kind]
        if found:
            out.append(f"{text}: {_some(run, found)}")
    finished = [f"{label(run, row['request'])} ({row['reason']})" for row in view.decisions if row["kind"] == "finish"]
    if finished:
        out.append(f"finished: {', '.join(finished)}")
    row = view.row
    if row["evicted"]:
        out.append(f"{blocks(row['evicted'])} lost reusable KV (evicted)")
    out.append(
        f"free blocks {row['free_blocks_start']:,} → {row['free_blocks_scheduled']:,} (scheduled) → {row['free_blocks_end']:,} (after the update), "
        f"{row['cached_free_blocks']:,} of them still hold reusable KV; waiting {row['waiting']:,}, running {row['running']:,}"
    )
    return out


def _some(run: Run, requests: list[int], most: int = 12) -> str:
    names = [label(run, request) for request in requests]
    return " ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def document(explanation: RoundExplanation) -> list[Element]:
    """The explanation in words."""
    e = explanation
    span = f"{number(e.own_s * 1000)} ms, from {e.t_end_s - e.own_s:.6f} s"
    if (early := e.t_end_s - e.t_start_s - e.own_s) > 1e-9:  # rounds overlap
        span += f" (scheduled {number(early * 1000)} ms earlier, while the round before ran)"
    if unit_of([e.clock]).ticks:
        span = f"clock {number(whole(e.t_start_s))} → {number(whole(e.t_end_s))}"
    # A policy of one's own keeps its queue in an order that no record tells.
    waiting = (
        "waiting" if e.scheduler in ("nano", "vllm") else "waiting (in order of arrival; the policy may have another)"
    )
    out: list[Element] = [
        Heading(f"Round {e.round} of {e.run}: {e.kind}"),
        Text(
            f"{e.scheduler}; {span}; budget {number(e.budget)} tokens, blocks of {e.block_size}, {number(e.usable_blocks)} usable"
        ),
        Heading("Before it"),
        Items((f"{waiting}: {_queue(e.waiting)}", f"running: {_queue(e.running)}", f"free blocks: {e.free[0]:,}")),
        Heading("Who was looked at, in order"),
    ]
    rows: list[tuple[str, ...]] = []
    loop = None
    for candidate in e.candidates:
        rows.append((f"{candidate.loop} loop" if candidate.loop != loop else "", candidate.label, candidate.text))
        loop = candidate.loop
    if rows:
        out.append(Grid(("", "", "the arithmetic → what was decided"), tuple(rows)))
    if e.untold:
        out.append(Text(f"and {e.untold:,} more that were computed or held in the same way", note=True))
    stops = []
    for loop_name, stop in (("waiting", e.stop_waiting), ("running", e.stop_running)):
        why = "it did not run" if stop is None else f"{STOPS.get(stop, stop)} ({stop})"
        stops.append(f"the {loop_name} loop stopped: {why}" if stop is not None else f"the {loop_name} loop: {why}")
    met = {candidate.request for candidate in e.candidates}
    behind = [waiter.label for waiter in e.waiting if waiter.request not in met]
    if behind and not e.untold:
        more = f" and {len(behind) - 12} more" if len(behind) > 12 else ""
        stops.append(f"not looked at: {' '.join(behind[:12])}{more}")
    out.append(Items(tuple(stops)))
    out.append(Heading("Blocks"))
    out += [Text("before"), Block(e.before.lines), Text("after"), Block(e.after.lines)]
    if e.after.note:
        out.append(Text(e.after.note, note=True))
    out += [Heading("What changed"), Items(e.changes)]
    return out


def _queue(queue: tuple[Waiter, ...], most: int = 12) -> str:
    if not queue:
        return "nobody"
    texts = [f"{w.label} ({w.computed:,} of {w.known:,} computed)" for w in queue[:most]]
    return ", ".join(texts) + (f" and {len(queue) - most:,} more" if len(queue) > most else "")


def as_json(explanation: RoundExplanation) -> dict[str, Any]:
    """docs/compare.md gives the schema."""
    return {"benchctl_explain": JSON_VERSION, "what": "round"} | asdict(explanation)
