"""A request's life in words, and the worst spike of a run taken apart round by round.

Waits come from `decision_work`, clauses from `treatment`. Made from the tables alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import polars as pl

from reports import metrics
from reports.decision_work import STANDING, step_table, wait_table
from reports.document import Element, Grid, Heading, Items, Text
from reports.explain import RoundExplanation, explain_round
from reports.explain import document as round_document
from reports.explain_state import hold, need_log, view_at
from reports.glossary import REASONS, STOPS
from reports.own_time import own_start
from reports.run import Run
from reports.terminal import number
from reports.treatment import held, label, numbers, preempted, tokens, treatment
from reports.units import Unit, counted, unit_of, whole
from traces.errors import BenchctlError

JSON_VERSION = 1
MEANINGS = REASONS | STOPS | {"prefill_first": "a round that prefills decodes nobody"}
MOST_ROUNDS = 60  # of a spike, told one by one

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to the request. `round`, `last_round`: from which to which round; null before any round."""

    round: int | None
    last_round: int | None
    t_s: float
    what: str  # arrive, wait, stand, admit, resume, prefill, decode, preempt, finish, reject
    text: str


@dataclass(frozen=True, slots=True)
class Life:
    """`summary`: the row of `requests`, or what is known where it has not ended."""

    run: str
    request: int
    id: str
    label: str
    summary: dict[str, Any]
    events: tuple[Event, ...]
    clock: str


@dataclass(frozen=True, slots=True)
class SpikeRound:
    """A round inside the spike. `duration_s`: its own time there (`own_time`); `share`: of the spike's time."""

    round: int
    kind: str
    duration_s: float
    share: float
    tokens: int
    text: str


@dataclass(frozen=True, slots=True)
class Spike:
    """The largest inter-token gap or time to first token of a run, and the rounds it is made of."""

    run: str
    metric: str
    request: int
    label: str
    seconds: float
    token: int | None  # of an inter-token gap: the later token, from 0
    median_s: float
    idle_s: float  # of the spike: time in no round
    reasons: tuple[tuple[str, str, int, float], ...]  # what, reason, rounds, seconds
    num_rounds: int
    rounds: tuple[SpikeRound, ...]
    longest: RoundExplanation | None
    clock: str


def find_request(run: Run, name: str) -> int:
    """The trace row of an id, or of `#row`. Raises BenchctlError."""
    rows = {text: row for row, text in run.ids.items()}
    if name in rows:
        return rows[name]
    if name.startswith("#") and name[1:].isdigit() and int(name[1:]) in run.ids:
        return int(name[1:])
    close = [text for text in rows if name and text.startswith(name)][:4] or list(rows)[:4]
    raise BenchctlError(
        f"the run has no request {name!r}",
        where=run.shown,
        fix=f"an id such as {', '.join(close)}, or its trace row as '#0'" if close else "the run has no requests",
    )


def explain_request(run: Run, request: int) -> Life:
    """Everything the records say of one request, in order."""
    need_log(run)
    hold(run)
    mine = pl.col("request") == request
    summary = run.scan("requests").filter(mine).collect()
    admission = run.scan("admissions").filter(mine).collect()
    known: dict[str, Any] = summary.row(0, named=True) if summary.height else {"status": "unfinished"}
    events = sorted(_events(run, request, admission), key=lambda event: (event.t_s, event.round or 0))
    return Life(run.shown, request, run.ids.get(request, ""), label(run, request), known, tuple(events), run.clock)


def _events(run: Run, request: int, admission: pl.DataFrame) -> Iterator[Event]:
    rounds = run.scan("rounds").select("round", "t_start_s", "t_end_s").sort("round").collect()
    start: dict[int, float] = dict(rounds.select("round", "t_start_s").iter_rows())
    end: dict[int, float] = dict(rounds.select("round", "t_end_s").iter_rows())
    name = label(run, request)
    decisions = list(
        run.scan("decisions")
        .filter(pl.col("request") == request)
        .sort("round", "order")
        .collect()
        .iter_rows(named=True)
    )
    if admission.height:
        row = admission.row(0, named=True)
        late = row["admitted_s"] - row["arrival_s"]
        handed = f", handed over {number(late * 1000)} ms later" if late > 1e-9 else ""
        asked = f"{tokens(row['prompt_tokens'])} of prompt, {row['output_tokens']:,} of output asked for"
        yield Event(
            row["admitted_round"],
            None,
            row["arrival_s"],
            "arrive",
            f"arrived with {asked}{handed}; first seen in round {row['admitted_round']}",
        )
    for row in decisions:
        number_, at = row["round"], start.get(row["round"], 0.0)
        if row["kind"] == "reject":
            yield Event(
                number_, None, at, "reject", f"refused: {REASONS.get(row['reason'], row['reason'])}{numbers(row)}"
            )
        elif row["kind"] == "preempt":
            yield Event(number_, None, at, "preempt", f"{preempted(run, name, row)}; everything computed was given up")
        elif row["kind"] == "finish":
            yield Event(
                number_, None, end.get(number_, at), "finish", f"finished: {REASONS.get(row['reason'], row['reason'])}"
            )
    yield from _steps(run, request, rounds, start, decisions)


def _steps(
    run: Run, request: int, rounds: pl.DataFrame, start: dict[int, float], decisions: list[Row]
) -> Iterator[Event]:
    """Waits and steps; decodes in a row are one event."""
    steps = step_table(run, request).sort("place")
    waits = wait_table(run, steps)
    numbers_ = rounds["round"]
    batches = {
        row["round"]: row
        for row in run.scan("batches").filter(pl.col("request") == request).collect().iter_rows(named=True)
    }
    first_held = {row["round"]: row for row in decisions if row["kind"] == "hold"}
    streak: list[Row] = []
    for step in steps.iter_rows(named=True):
        number_ = int(numbers_[step["place"]])
        row = batches[number_]
        if row["phase"] == "decode" and not step["wait"]:
            streak.append(row)
            continue
        if streak:
            yield _decodes(streak, start)
            streak = []
        if step["wait"]:
            yield _wait(run, step, waits, numbers_, start, first_held)
        if row["phase"] == "decode":
            streak.append(row)
            continue
        what = treatment(run, view_at(run, number_), request)
        yield Event(number_, None, start[number_], what.kind, what.text)
    if streak:
        yield _decodes(streak, start)


def _decodes(streak: list[Row], start: dict[int, float]) -> Event:
    first, last = streak[0]["round"], streak[-1]["round"]
    count = len(streak)
    text = f"decoded {tokens(count)}, one a round" if count > 1 else "decoded 1 token"
    return Event(first, last if count > 1 else None, start[first], "decode", text)


def _wait(
    run: Run,
    step: Row,
    waits: pl.DataFrame,
    numbers_: pl.Series,
    start: dict[int, float],
    first_held: dict[int, Row],
) -> Event:
    mine = waits.filter((pl.col("admission") == step["admission"]) & (pl.col("from") == step["from"]))
    first, last = int(numbers_[step["ready"]]), int(numbers_[step["place"] - 1])
    parts = []
    for row in mine.sort(["rounds", "reason"], descending=[True, False]).iter_rows(named=True):
        parts.append(f"{row['reason']} × {row['rounds']} ({MEANINGS.get(row['reason'], 'the records do not say')})")
    verb = "stood still" if step["was_running"] else "waited"
    text = f"{verb} for {step['wait']:,} round{'' if step['wait'] == 1 else 's'}: {'; '.join(parts)}"
    own = first_held.get(first)
    if own is not None and not step["was_running"]:
        view = view_at(run, first)
        text += f"; at first held: {held(own, view)}"
    return Event(first, last if last != first else None, start[first], "stand" if step["was_running"] else "wait", text)


# -- spikes


def explain_spike(run: Run, metric: str) -> Spike:
    """The worst `itl` or `ttft` of the finished requests. Raises BenchctlError where there is none."""
    need_log(run)
    hold(run)
    if metric == "itl":
        gaps = metrics.itl(run).select("request", "index", "round", "t_s", "itl").collect()
        if not gaps.height:
            raise BenchctlError("no request emitted two tokens", where=run.shown, fix="--spike ttft")
        worst = gaps.sort(["itl", "request", "index"], descending=[True, False, False]).row(0, named=True)
        request, seconds, last = worst["request"], worst["itl"], worst["round"]
        before = run.scan("tokens").filter((pl.col("request") == request) & (pl.col("index") == worst["index"] - 1))
        first = int(before.select("round").collect().item()) + 1
        begin, end, token, median = worst["t_s"] - seconds, worst["t_s"], worst["index"], gaps["itl"].median()
    else:
        frame = metrics.per_request(run).select("request", "ttft", "arrival_s", "first_token_s").collect()
        if not frame.height:
            raise BenchctlError("no request finished", where=run.shown, fix="replay to its end")
        worst = frame.sort(["ttft", "request"], descending=[True, False]).row(0, named=True)
        request, seconds, token = worst["request"], worst["ttft"], None
        begin, end, median = worst["arrival_s"], worst["first_token_s"], frame["ttft"].median()
        seen = run.scan("admissions").filter(pl.col("request") == request).select("admitted_round").collect().item()
        # The round during which it arrived counts too: the loop was inside it.
        spans = run.scan("rounds").filter(pl.col("t_end_s") > begin).select(pl.col("round").min()).collect().item()
        first = min(int(spans), int(seen))
        token_rows = run.scan("tokens").filter((pl.col("request") == request) & (pl.col("index") == 0))
        last = int(token_rows.select("round").collect().item())
    return _spike(run, metric, request, float(seconds), token, float(median or 0.0), (first, last), (begin, end))  # type: ignore[arg-type]


def _spike(
    run: Run,
    metric: str,
    request: int,
    seconds: float,
    token: int | None,
    median_s: float,
    numbers_: tuple[int, int],
    span: tuple[float, float],
) -> Spike:
    inside = (
        run.scan("rounds").sort("round").with_columns(own_start().alias("start_s"))
        .filter(pl.col("round").is_between(*numbers_))
        .select("round", "kind", "start_s", "t_end_s", (pl.col("prefill_tokens") + pl.col("decode_tokens")).alias("tokens"))
        .collect()
    )  # fmt: skip
    begin, end = (pl.lit(each) for each in span)
    part = (pl.min_horizontal("t_end_s", end) - pl.max_horizontal("start_s", begin)).clip(lower_bound=0)
    inside = inside.with_columns(part.alias("part"))
    told = (
        inside if inside.height <= MOST_ROUNDS else inside.sort("part", descending=True).head(MOST_ROUNDS).sort("round")
    )
    rounds = tuple(
        SpikeRound(
            row["round"], row["kind"], row["part"], row["part"] / seconds if seconds else 0.0, row["tokens"],
            treatment(run, view_at(run, row["round"]), request).text,
        )
        for row in told.iter_rows(named=True)
    )  # fmt: skip
    steps = step_table(run, request)
    places = run.scan("rounds").select("round").sort("round").with_row_index("place").collect()
    last_place = places.filter(pl.col("round") == numbers_[1])["place"][0]
    chosen = steps.filter(pl.col("place") <= last_place)
    if metric == "itl":
        chosen = chosen.filter(pl.col("place") == last_place)
    found = wait_table(run, chosen).group_by("what", "reason").agg(pl.col("rounds").sum(), pl.col("seconds").sum())
    reasons = tuple(found.sort(["seconds", "reason"], descending=[True, False]).iter_rows())
    longest = None
    if inside.height:
        longest = explain_round(run, int(inside.sort(["part", "round"], descending=[True, False])["round"][0]))
    return Spike(
        run=run.shown,
        metric=metric,
        request=request,
        label=label(run, request),
        seconds=seconds,
        token=token,
        median_s=median_s,
        idle_s=max(seconds - float(inside["part"].sum()), 0.0),
        reasons=reasons,
        num_rounds=inside.height,
        rounds=rounds,
        longest=longest,
        clock=run.clock,
    )


def document(life: Life) -> list[Element]:
    """The life of a request in words."""
    s, said = life.summary, partial(_said, unit_of([life.clock]))
    out: list[Element] = [Heading(f"Request {life.label} of {life.run}: {s.get('status')}")]
    if life.label != life.id and life.id.isprintable():
        out.append(Text(f"id {life.id}, trace row {life.request}", note=True))
    facts = []
    if s.get("finished_s") is not None:
        facts.append(f"TTFT {said(s['first_token_s'] - s['arrival_s'])}, E2E {said(s['finished_s'] - s['arrival_s'])}")
        phases = [
            f"queue {said(s['first_scheduled_s'] - s['arrival_s'])}",
            f"prefill {said(s['first_token_s'] - s['first_scheduled_s'])}",
            f"decode {said(s['finished_s'] - s['first_token_s'])}",
        ]
        facts.append(f"{' + '.join(phases)}; of it stalled {said(s['stalled_s'])}, preempted {said(s['preempted_s'])}")
        facts.append(
            f"{tokens(s['prompt_tokens'])} of prompt ({s['cached_tokens'] or 0:,} from the prefix cache at first), {s['emitted_tokens']:,} emitted; "
            f"preempted {s['preemptions']:,}×, {s['discarded_tokens']:,} computed tokens lost, {s['recomputed_tokens']:,} computed again"
        )
        out.append(Items(tuple(facts)))
    ticks = unit_of([life.clock]).ticks
    times = (number(whole(event.t_s)) if ticks else f"{event.t_s:.6f}" for event in life.events)
    rows = tuple((_rounds(event), at, event.what, event.text) for at, event in zip(times, life.events, strict=True))
    out.append(Grid(("round", "clock" if ticks else "t, s", "", ""), rows, frozenset({0, 1})))
    return out


def _rounds(event: Event) -> str:
    if event.round is None:
        return ""
    return str(event.round) if event.last_round is None else f"{event.round}–{event.last_round}"


def _said(unit: Unit, seconds: float) -> str:
    """A time with its unit."""
    return unit.said(float(seconds) * 1000)


def as_json(life: Life) -> dict[str, Any]:
    """docs/compare.md gives the schema."""
    return {"benchctl_explain": JSON_VERSION, "what": "request"} | asdict(life)


def spike_document(spike: Spike) -> list[Element]:
    """A spike taken apart."""
    name = "TTFT" if spike.metric == "ttft" else "inter-token gap"
    unit = unit_of([spike.clock])
    said = partial(_said, unit)
    where = "" if spike.token is None else f" before token {spike.token}"
    times = f", {spike.seconds / spike.median_s:.1f} × the median" if spike.median_s else ""
    out: list[Element] = [
        Heading(f"The worst {name} of {spike.run}: {said(spike.seconds)}, {spike.label}{where}{times}"),
    ]
    facts = [f"{counted(f'{spike.num_rounds:,}', 'rounds')} and {said(spike.idle_s)} in no round"]
    if unit.ticks:
        facts = [counted(f"{spike.num_rounds:,}", "rounds")]
    for what, reason, count, seconds in spike.reasons:
        verb = "stood still" if what == STANDING else "waited"
        meaning = MEANINGS.get(reason, "the records do not say why")
        facts.append(f"{verb} {said(seconds)} in {count:,} round{'' if count == 1 else 's'}: {meaning} ({reason})")
    out.append(Items(tuple(facts)))
    if spike.num_rounds > len(spike.rounds):
        out.append(Text(f"the {len(spike.rounds)} longest of its {spike.num_rounds:,} rounds", note=True))
    rows = tuple(
        (
            str(r.round),
            r.kind,
            unit.figure(r.duration_s * 1000) if unit.ticks else f"{r.duration_s * 1000:.3f}",
            f"{r.share:.0%}",
            f"{r.tokens:,}",
            r.text,
        )
        for r in spike.rounds
    )
    out.append(
        Grid(
            ("round", "", unit.latency, "share", "tokens", f"what it did with {spike.label}"),
            rows,
            frozenset({0, 2, 3, 4}),
        )
    )
    if spike.longest is not None:
        out += round_document(spike.longest)
    return out


def spike_json(spike: Spike) -> dict[str, Any]:
    """docs/compare.md gives the schema."""
    return {"benchctl_explain": JSON_VERSION, "what": "spike"} | asdict(spike)
