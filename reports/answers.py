"""The two questions that a reader brings, answered in words made from the tables: why first tokens came late, and which
rounds made the longest gaps between tokens. Every sentence stands on figures of the page; each answer names rounds to look at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from reports import glossary
from reports.first_tokens import first_tokens, mechanism, slowest_rounds
from reports.gap_causes import causes_text, gap_causes
from reports.numbers import plural, share
from reports.run import Run
from reports.spikes import SLOWEST, SlowStart, Spike
from reports.summary import Summary
from reports.units import Unit
from reports.verdict import highest_percentile, latency, unit_for

ROUNDS_NAMED = 3  # of each run
NEAR = 0.01  # relative difference below which first tokens are called as early


@dataclass(frozen=True, slots=True)
class Pointer:
    """A round to look at: `place` of its run, its number, and what it shows."""

    place: int
    round: int
    text: str


@dataclass(frozen=True, slots=True)
class Answer:
    question: str
    paragraphs: tuple[str, ...]
    rounds: tuple[Pointer, ...]


def answers(
    runs: Sequence[Run],
    names: Sequence[str],
    summaries: Sequence[Summary],
    slow: Sequence[SlowStart | None],
    longest: Sequence[Sequence[Spike]],
    gaps: Sequence[pl.DataFrame],
) -> list[Answer]:
    """At most two. `slow`, `longest`: of each run (`spikes`); `gaps`: `metrics.itl`, collected."""
    unit = unit_for(summaries)
    found = [_first_tokens(runs, names, summaries, slow, unit), _gaps(runs, names, longest, gaps, unit)]
    return [answer for answer in found if answer is not None]


# -- first tokens


def _later(summaries: Sequence[Summary]) -> tuple[int, str] | None:
    """Of two runs the one whose first tokens came later, and the statistic that says so; None where they came as early."""
    for stat in (highest_percentile(summaries, "ttft"), "mean"):
        if stat is None:
            continue
        values = [latency(summary, "ttft", stat) or 0.0 for summary in summaries]
        if abs(values[1] - values[0]) > NEAR * max(values):
            return (0 if values[0] > values[1] else 1), stat
    return None


def _first_tokens(
    runs: Sequence[Run],
    names: Sequence[str],
    summaries: Sequence[Summary],
    slow: Sequence[SlowStart | None],
    unit: Unit,
) -> Answer | None:
    if len(runs) == 1:
        if slow[0] is None:
            return None
        said, pointers = _slowest(runs[0], "", summaries[0], slow[0], 0, unit)
        return Answer("What did the slowest first tokens wait for?", tuple(said), tuple(pointers))
    if len(runs) > 2 or any(one is None for one in slow):
        return None
    later = _later(summaries)
    if later is None:
        text = f"The means are {' and '.join(unit.said(_mean(s, 'ttft')) for s in summaries)}."
        return Answer(f"Did first tokens come later under {names[0]} or {names[1]}? Neither.", (text,), ())
    place, stat = later
    other = 1 - place
    values = [latency(summary, "ttft", stat) or 0.0 for summary in summaries]
    how = "the mean TTFT" if stat == "mean" else f"TTFT {stat}"
    said = [
        f"{_capital(how)} is {unit.said(values[place])} under {names[place]} and {unit.said(values[other])} under {names[other]}. "
        + _apart(summaries[place], summaries[other], names[place], names[other], unit)
    ]
    how_given = [first_tokens(runs[k]) for k in (place, other)]
    if how_given[0] is not None and how_given[1] is not None:
        said += mechanism(how_given[0], how_given[1], (names[place], names[other]), unit)
    found = slow[place]
    assert found is not None
    more, pointers = _slowest(runs[place], names[place], summaries[place], found, place, unit)
    said += more
    if found.stops:
        said.append(_stops_of_both(summaries, names, found.stops[0][0], place))
    return Answer(f"Why did first tokens come later under {names[place]}?", tuple(said), tuple(pointers))


def _mean(summary: Summary, metric: str) -> float:
    return float(summary["benchctl"]["latency"][metric]["mean_ms"] or 0.0)


def _apart(late: Summary, early: Summary, late_name: str, early_name: str, unit: Unit) -> str:
    """Mean TTFT = mean queue + mean prefill exactly, so the difference has two parts."""
    queue, prefill = (_mean(late, metric) - _mean(early, metric) for metric in ("queue", "prefill"))
    whole = _mean(late, "ttft") - _mean(early, "ttft")
    queued = f"requests queued for {unit.said(_mean(late, 'queue'))} on average, under {early_name} for {unit.said(_mean(early, 'queue'))}"
    begun = f"from its first round to its first token a request took {unit.said(_mean(late, 'prefill'))}, under {early_name} {unit.said(_mean(early, 'prefill'))}"
    if whole <= 0:
        return f"The mean is not: {unit.said(_mean(late, 'ttft'))} against {unit.said(_mean(early, 'ttft'))}, so it is the slow ones alone that came later."
    if prefill <= 0.1 * whole:
        return f"They came later because {queued}; once begun they were {'as fast' if prefill > -0.1 * whole else 'faster'}."
    if queue <= 0.1 * whole:
        return f"It was not the queue: {begun}."
    return f"Both parts are longer: {queued}, and {begun}."


def _slowest(
    run: Run, name: str, summary: Summary, found: SlowStart, place: int, unit: Unit
) -> tuple[list[str], list[Pointer]]:
    """What the slowest tenth waited for, and the round in which the slowest of all was held first."""
    under = f" under {name}" if name else ""
    one = found.num_requests == 1
    who = f"The slowest first token{under}" if one else f"The slowest {found.num_requests:,} first tokens{under}"
    said = f"{who} queued for {unit.figure(found.queue_s * 1000)} of {'its' if one else 'their'} {unit.said(found.ttft_s * 1000)}{'' if one else ' on average'}"
    if not found.stops:
        said += "; no round passed them by, so they waited for the end of the round before and for their own prefill"
    else:
        reason, rounds = found.stops[0]
        often = (
            "in every round" if rounds == found.num_rounds else f"in {share(rounds / found.num_rounds)} of the rounds"
        )
        meaning = f" ({glossary.STOPS[reason]})" if reason in glossary.STOPS else ""
        what = "the waiting loop did not run" if reason == "did not run" else f"admission stopped for {reason}{meaning}"
        said += f": {what} {often} that passed {'it' if one else 'them'} by"
    held = _first_hold(run, found.worst[0]) if found.worst else None
    label = run.labels.get(found.worst[0], f"#{found.worst[0]}") if found.worst else ""
    pointers = [Pointer(place, held[0], f"{label}, the slowest of all, {held[1]}")] if held else []
    out = [said + "."]
    slowest, everyone = first_tokens(run, SLOWEST), first_tokens(run)
    if not one and slowest is not None and everyone is not None:
        longer = slowest_rounds(slowest, everyone, unit)
        out[0] += f" {longer}" if longer else ""
    return out, pointers


def _first_hold(run: Run, request: int) -> tuple[int, str] | None:
    if not run.has("decisions"):
        return None
    held = (
        run.scan("decisions").filter((pl.col("request") == request) & pl.col("kind").is_in(["hold", "skip", "admit"]))
        .sort("round", "order").collect()
    )  # fmt: skip
    if not held.height:
        return None
    row = held.row(0, named=True)
    if row["kind"] == "admit":
        return int(row["round"]), "is admitted here"
    rounds = held.filter(pl.col("kind") != "admit")["round"].n_unique()
    numbers = (
        f": needs {row['needed']:,} {row['unit']}, {row['available']:,} there" if row["needed"] is not None else ""
    )
    first = f", for the first of {rounds:,} rounds" if rounds > 1 else ""
    return int(row["round"]), f"is held here{first}{numbers}"


def _stops_of_both(summaries: Sequence[Summary], names: Sequence[str], reason: str, place: int) -> str:
    told = []
    for k in (place, 1 - place):
        ours = summaries[k]["benchctl"]
        count, total = ours["stops"]["waiting"].get(reason, 0), ours["rounds"]["rounds"]["total"]
        told.append(f"{count:,} of {plural(total, 'round')} under {names[k]}")
    return f"Over the whole run admission stopped for {reason} in {' and in '.join(told)}."


# -- gaps


def _gaps(
    runs: Sequence[Run],
    names: Sequence[str],
    longest: Sequence[Sequence[Spike]],
    gaps: Sequence[pl.DataFrame],
    unit: Unit,
) -> Answer | None:
    if not any(frame.height for frame in gaps):
        return None
    said, pointers = [], []
    for place, (run, name, spikes, frame) in enumerate(zip(runs, names, longest, gaps, strict=True)):
        under = f"{name}: " if len(runs) > 1 else ""
        causes = gap_causes(run, frame)
        if causes is None:
            if frame.height:
                said.append(f"{under}{'no' if under else 'No'} gap is much longer than the median; none is a spike.")
            continue
        said.append(causes_text(causes, under, unit))
        for spike in _chosen(spikes):
            label = run.labels.get(spike.request, f"#{spike.request}")
            pointers.append(Pointer(place, spike.round, f"{unit.said(spike.gap_s * 1000)} for {label}: {spike.why}"))
    return Answer("Which rounds made the longest gaps between tokens?", tuple(said), tuple(pointers))


def _chosen(spikes: Sequence[Spike]) -> list[Spike]:
    """A few of the longest, the longest of each cause among them."""
    first = {spike.cause: spike for spike in reversed(spikes)}  # the longest of a cause comes last and stays
    kept = list(first.values())
    kept += [spike for spike in spikes if spike not in kept][: max(ROUNDS_NAMED - len(kept), 0)]
    return sorted(kept, key=lambda spike: -spike.gap_s)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
