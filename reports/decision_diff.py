"""Where two runs of one trace first decide differently, what each did there, and why.

Rounds are aligned by their place among the recorded rounds: up to the first difference both runs are in the same state, so
there the alignment is exact; what follows is the chain of its consequences. `decision_work` compares beyond it, by work done.
Decisions are compared in what they do (the batch: request, start, tokens, in order); between runs of one policy and block
size also word by word (decisions with their numbers, then block events).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl

from reports.explain_state import hold, rows_of, view_at
from reports.queues import RoundView
from reports.rounds import batch_text, names
from reports.run import Run
from reports.treatment import Treatment, blocks, label, treatment

LEVELS = ("arrivals", "batch", "decisions", "blocks")
FIRST_WINDOW = 2_000  # rounds read at first; each further reading is four times as long
CHAIN = 5  # differences that are told
LOOKED_AT = 60  # rounds after the first difference that are looked at for differences of another kind
TOLD = 8  # requests told in one round

# Of requests treated differently, the one that the headline names: what was refused or lost says more than what was fed.
SALIENCE = ("reject", "preempt", "hold", "skip", "admit", "resume", "prefill", "stall", "wait", "absent", "decode")

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Difference:
    """A request that two runs treated differently in one round."""

    request: int
    label: str
    a: Treatment
    b: Treatment


@dataclass(frozen=True, slots=True)
class Divergence:
    """One aligned round in which the runs differ. `level`: the first of LEVELS in which they do.

    `round_a`, `round_b`: round numbers; None where that run had ended. `text`: the headline. `rows`: for the levels
    `decisions` and `blocks` the first row that differs, of A and of B, in words (None: no such row).
    """

    place: int
    level: str
    round_a: int | None
    round_b: int | None
    text: str
    situation: str
    batch_a: str
    batch_b: str
    differences: tuple[Difference, ...]
    rows: tuple[str | None, str | None] | None = None


@dataclass(frozen=True, slots=True)
class DecisionDiff:
    """`equal`: in everything that was compared. `levels`: level -> place of its first difference, None where it has none.

    `comparable`: one policy, or two of one family, and one block size, so that words and block events were compared too. `chain` begins with the
    first difference of all: each level once, then the next rounds in which a request is treated differently in a way not told yet.
    """

    equal: bool
    comparable: bool
    rounds_a: int
    rounds_b: int
    levels: dict[str, int | None]
    differing_rounds: int  # aligned rounds whose batches differ, those that only one run has among them
    chain: tuple[Divergence, ...]

    @property
    def first(self) -> Divergence | None:
        return self.chain[0] if self.chain else None


def diff_decisions(a: Run, b: Run, sides: tuple[str, str]) -> DecisionDiff:
    """Compare two runs of one trace. `sides`: how the text calls them. Both need batches, decisions and blocks."""
    hold(a)
    hold(b)
    alike = a.scheduler == b.scheduler or (a.family is not None and a.family == b.family)
    comparable = alike and a.block_size == b.block_size
    numbers = [run.scan("rounds").select("round").sort("round").collect()["round"] for run in (a, b)]
    levels: dict[str, int | None] = dict.fromkeys(LEVELS if comparable else LEVELS[:2])
    for level in levels:
        levels[level] = _first_difference(a, b, level, numbers)
    differing = _differing_rounds(a, b, numbers)
    chain = _chain(a, b, sides, numbers, levels, differing)
    return DecisionDiff(
        equal=not chain,
        comparable=comparable,
        rounds_a=len(numbers[0]),
        rounds_b=len(numbers[1]),
        levels=levels,
        differing_rounds=len(differing) + abs(len(numbers[0]) - len(numbers[1])),
        chain=tuple(chain),
    )


COLUMNS = {
    "arrivals": ("admissions", ("request",)),
    "batch": ("batches", ("request", "start", "num_tokens")),
    "decisions": ("decisions", ("kind", "request", "other", "reason", "needed", "available", "unit")),
    "blocks": ("blocks", ("block", "event", "request", "index")),
}


def _level_frame(run: Run, level: str, first: int, last: int) -> pl.LazyFrame:
    """round, then one list a column: the rows of that level in rounds first..last. A round without rows is absent."""
    table, columns = COLUMNS[level]
    frame = run.scan(table)
    if level == "arrivals":
        frame = frame.rename({"admitted_round": "round"}).with_columns(pl.int_range(pl.len()).alias("order"))
    frame = frame.filter(pl.col("round").is_between(first, last))
    if level == "decisions":
        frame = frame.filter(pl.col("kind") != "evict")  # told with the block that is lost
    return frame.sort("round", "order").group_by("round", maintain_order=True).agg(columns)


def _first_difference(a: Run, b: Run, level: str, numbers: list[pl.Series]) -> int | None:
    """Place (from 0) of the first aligned round that differs in `level`; the shorter run's end counts as a difference of its batch."""
    shared, begin, width = min(len(each) for each in numbers), 0, FIRST_WINDOW
    while begin < shared:
        end = min(begin + width, shared)
        sides = []
        for run, rounds in zip((a, b), numbers, strict=True):
            places = pl.DataFrame({"round": rounds[begin:end], "place": range(begin, end)})
            rows = _level_frame(run, level, rounds[begin], rounds[end - 1]).collect()
            sides.append(rows.join(places, on="round").drop("round"))
        columns = COLUMNS[level][1]
        both = sides[0].join(sides[1], on="place", how="full", coalesce=True, suffix="_b")
        unequal = pl.any_horizontal(pl.col(column).ne_missing(pl.col(f"{column}_b")) for column in columns)
        found = both.filter(unequal)["place"].min()
        if found is not None:
            return int(found)  # type: ignore[arg-type]
        begin, width = end, width * 4
    if level == "batch" and len(numbers[0]) != len(numbers[1]):
        return shared
    return None


def _differing_rounds(a: Run, b: Run, numbers: list[pl.Series]) -> list[int]:
    """Places of all aligned rounds that both runs have and whose batches differ: by a hash of the rows, so that runs of any length fit."""
    shared = min(len(each) for each in numbers)
    sides = []
    for run, rounds in zip((a, b), numbers, strict=True):
        places = pl.DataFrame({"round": rounds[:shared], "place": range(shared)}).lazy()
        row = pl.struct("order", "request", "start", "num_tokens").hash(seed=0)
        rows = run.scan("batches").group_by("round").agg(row.sum().alias("hash"), pl.len().alias("count"))
        sides.append(places.join(rows, on="round", how="left").select("place", "hash", "count"))
    both = sides[0].join(sides[1], on="place", suffix="_b")
    unequal = pl.col("hash").ne_missing(pl.col("hash_b")) | pl.col("count").ne_missing(pl.col("count_b"))
    return both.filter(unequal).sort("place").select("place").collect()["place"].to_list()


def _chain(
    a: Run,
    b: Run,
    sides: tuple[str, str],
    numbers: list[pl.Series],
    levels: dict[str, int | None],
    differing: list[int],
) -> list[Divergence]:
    """The first difference of each level in order of time, then later ones of other kinds.

    Most rounds after the first difference differ only in that one run is a step ahead: those say nothing new.
    """
    starts = sorted((place, LEVELS.index(level), level) for level, place in levels.items() if place is not None)
    told: dict[int, str] = {}
    for place, _, level in starts:
        told.setdefault(place, level)
        if level == "batch":
            break  # from here on the states differ, so words and blocks must
    out = [_divergence(a, b, sides, numbers, place, level) for place, level in told.items()]
    seen = {_signature(divergence) for divergence in out}
    begin = max(told, default=0)
    for place in [place for place in differing if place > begin][:LOOKED_AT]:
        if len(out) >= CHAIN:
            break
        divergence = _divergence(a, b, sides, numbers, place, "batch")
        signature = _signature(divergence)
        if signature is not None and signature not in seen:
            seen.add(signature)
            out.append(divergence)
    return out


def _signature(divergence: Divergence) -> tuple[str | None, ...] | None:
    """What kind of difference the headline tells; None where it tells no other treatment, or somebody who is not there."""
    if not divergence.differences:
        return None
    a, b = divergence.differences[0].a, divergence.differences[0].b
    if (a.kind, a.reason) == (b.kind, b.reason) or "absent" in (a.kind, b.kind):
        return None
    return a.kind, a.reason, b.kind, b.reason


def _divergence(a: Run, b: Run, sides: tuple[str, str], numbers: list[pl.Series], place: int, level: str) -> Divergence:
    rounds = [int(each[place]) if place < len(each) else None for each in numbers]
    if None in rounds:
        return _ended(a, b, sides, rounds, place)
    views = [view_at(run, number) for run, number in zip((a, b), rounds, strict=True) if number is not None]
    differences = _differences(a, b, views)
    head = (
        f"round {rounds[0]}"
        if rounds[0] == rounds[1]
        else f"round {rounds[0]} of {sides[0]}, {rounds[1]} of {sides[1]}"
    )
    rows = None
    if level == "arrivals":
        text = _arrivals(a, b, sides, views)
    elif level == "batch" and differences:
        text = _headline(sides, differences)
    elif level == "batch":
        text = f"{sides[0]} ran {_ids(a, views[0])}; {sides[1]} the same work as {_ids(b, views[1])}: another order"
    else:
        rows = _first_rows(a, b, rounds, level)
        text = f"{sides[0]}: {rows[0] or 'nothing more'}; {sides[1]}: {rows[1] or 'nothing more'}"
    return Divergence(
        place=place,
        level=level,
        round_a=rounds[0],
        round_b=rounds[1],
        text=f"{head}: {text}; {_free(a, b, views)}",
        situation=_situation(a, views[0]),
        batch_a=batch_text(views[0], a.labels),
        batch_b=batch_text(views[1], b.labels),
        differences=tuple(differences[:TOLD]),
        rows=rows,
    )


def _ended(a: Run, b: Run, sides: tuple[str, str], rounds: list[int | None], place: int) -> Divergence:
    over = 0 if rounds[0] is None else 1
    run, number = (a, b)[1 - over], rounds[1 - over]
    assert number is not None, (place, "beyond both runs")
    view = view_at(run, number)
    batch = batch_text(view, run.labels)
    text = f"round {number}: {sides[over]} had ended; {sides[1 - over]} went on with {batch}"
    batches = ("–", batch) if over == 0 else (batch, "–")
    return Divergence(place, "batch", rounds[0], rounds[1], text, _situation(run, view), *batches, ())


def _differences(a: Run, b: Run, views: list[RoundView]) -> list[Difference]:
    """Requests treated differently, the most telling first."""
    spans = [{row["request"]: (row["start"], row["num_tokens"]) for row in view.batch} for view in views]
    touched = [
        {row["request"] for row in view.decisions if row["kind"] in ("preempt", "hold", "skip", "reject")}
        for view in views
    ]
    order = dict.fromkeys(
        [*spans[0], *spans[1], *views[0].waiting, *views[0].running, *sorted(touched[0] | touched[1])]
    )
    out = []
    for request in order:
        if spans[0].get(request) == spans[1].get(request) and request not in touched[0] ^ touched[1]:
            continue
        out.append(
            Difference(request, label(a, request), treatment(a, views[0], request), treatment(b, views[1], request))
        )
    return sorted(out, key=lambda each: min(SALIENCE.index(each.a.kind), SALIENCE.index(each.b.kind)))


def _headline(sides: tuple[str, str], differences: list[Difference]) -> str:
    """What was done first, what was withheld after it: `vllm admitted R4 …; nano held R4 …`."""
    first = differences[0]
    told = [(sides[0], first.a), (sides[1], first.b)]
    told.sort(key=lambda pair: pair[1].kind not in ("admit", "resume", "prefill", "decode"))
    return "; ".join(f"{side} {what.text}" for side, what in told)


def _arrivals(a: Run, b: Run, sides: tuple[str, str], views: list[RoundView]) -> str:
    texts = []
    for run, side, view in zip((a, b), sides, views, strict=True):
        seen = (
            run.scan("admissions").filter(pl.col("admitted_round") == view.round).select("request").collect()["request"]
        )
        texts.append(f"{side} was handed {names(seen.to_list(), run.labels) if len(seen) else 'nobody'}")
    return "; ".join(texts) + ": the requests came before other rounds"


def _first_rows(a: Run, b: Run, rounds: list[int | None], level: str) -> tuple[str | None, str | None]:
    """The first row of the level that differs, of each run."""
    table, columns = COLUMNS[level]
    lists = []
    for run, number in zip((a, b), rounds, strict=True):
        assert number is not None
        lists.append([row for row in rows_of(run, table, number) if row.get("kind") != "evict"])
    keys = [[tuple(row[column] for column in columns) for row in rows] for rows in lists]
    at = next(
        (i for i in range(max(map(len, keys))) if keys[0][i : i + 1] != keys[1][i : i + 1]),
        0,
    )
    words = decision_words if level == "decisions" else block_words
    first, second = (words(run, rows[at]) if at < len(rows) else None for run, rows in zip((a, b), lists, strict=True))
    return first, second


def decision_words(run: Run, row: Row) -> str:
    """A row of `decisions`: `hold R4, not_first, needed 1,200, available 69 tokens`."""
    parts = [f"{row['kind']} {label(run, row['request'])}", str(row["reason"])]
    if row["other"] is not None:
        parts.append(f"for {label(run, row['other'])}")
    if row["needed"] is not None:
        parts.append(f"needed {row['needed']:,}, available {row['available']:,} {row['unit'] or ''}".rstrip())
    return ", ".join(parts)


def block_words(run: Run, row: Row) -> str:
    """A row of `blocks`: `block 5 cache, R1's block 0`."""
    place = "" if row["index"] is None else f" as its block {row['index']}"
    return f"block {row['block']} {row['event']}, {label(run, row['request'])}{place}"


def _ids(run: Run, view: RoundView) -> str:
    return names([row["request"] for row in view.batch], run.labels)


def _situation(run: Run, view: RoundView) -> str:
    """What both runs had before the round: the queues of A, which are B's too at the first difference."""
    return f"waiting {names(view.waiting, run.labels)}; running {names(view.running, run.labels)}"


def _free(a: Run, b: Run, views: list[RoundView]) -> str:
    """Free blocks before the round on both sides, in tokens where the block sizes differ."""
    free = [view.row["free_blocks_start"] for view in views]
    if a.block_size == b.block_size:
        return f"free {free[0]} = {blocks(free[1])}" if free[0] == free[1] else f"free {free[0]} / {blocks(free[1])}"
    held = [f"{count} × {run.block_size}" for count, run in zip(free, (a, b), strict=True)]
    totals = [count * (run.block_size or 0) for count, run in zip(free, (a, b), strict=True)]
    sign = "=" if totals[0] == totals[1] else "/"
    return f"free {held[0]} {sign} {held[1]} tokens"
