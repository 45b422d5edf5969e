"""Where first tokens come from: the rounds that gave them, what those fed, and what came before; means over a run's first tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from reports.numbers import number, share
from reports.own_time import own_start, own_time
from reports.run import Run
from reports.units import Unit

APART = 0.05  # relative difference below which two means are as good as equal
POINTS = 0.01  # of a share


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """Means over the first tokens of finished requests; seconds and tokens. `own_s`: of the round that gave it (`own_time`).

    `tail_s`: the part of prefill (t_1 - f) before the first round's own time, while the round before ran. `mixed`, `eager`:
    shares of first tokens whose round decoded others too, or ran without a CUDA graph in a run that has graphs.
    """

    num: int
    own_s: float
    prefill_tokens: float
    decodes: float
    mixed: float
    eager: float
    tail_s: float
    dispatch_s: float
    waiting_s: float  # from admission to the first round


def first_tokens(run: Run, part: float = 1.0) -> FirstTokens | None:
    """Of the slowest `part` of the finished requests, by TTFT. None where none finished, or the run kept no rounds."""
    rounds = run.read("rounds").sort("round").with_columns(own_time().alias("own_s"), own_start().alias("own_start_s"))
    done = (
        run.scan("requests").filter(pl.col("status") == "finished")
        .select("arrival_s", "admitted_s", "first_scheduled_s", "first_token_s").drop_nulls()
        .sort(pl.col("first_token_s") - pl.col("arrival_s"), descending=True, maintain_order=True).collect()
    )  # fmt: skip
    if not done.height or not rounds.height:
        return None
    done = done.head(max(round(done.height * part), 1))
    # Both times are those of a round, to the bit.
    gave = np.searchsorted(rounds["t_end_s"].to_numpy(), done["first_token_s"].to_numpy())
    began = np.searchsorted(rounds["t_scheduled_s"].to_numpy(), done["first_scheduled_s"].to_numpy())
    last = rounds.height - 1
    of = rounds[np.minimum(gave, last)]
    tail = rounds["own_start_s"].to_numpy()[np.minimum(began, last)] - done["first_scheduled_s"].to_numpy()
    graphs = bool((rounds["mode"] == "graph").any())

    def mean(frame: pl.DataFrame, value: pl.Expr) -> float:
        return float(frame.select(value.cast(pl.Float64).mean()).item() or 0.0)

    return FirstTokens(
        num=done.height,
        own_s=mean(of, pl.col("own_s")),
        prefill_tokens=mean(of, pl.col("prefill_tokens")),
        decodes=mean(of, pl.col("decode_tokens")),
        mixed=mean(of, pl.col("decode_tokens") > 0),
        eager=mean(of, pl.col("mode").eq_missing("eager")) if graphs else 0.0,
        tail_s=float(np.maximum(tail, 0.0).mean()),
        dispatch_s=mean(done, pl.col("admitted_s") - pl.col("arrival_s")),
        waiting_s=mean(done, pl.col("first_scheduled_s") - pl.col("admitted_s")),
    )


def mechanism(late: FirstTokens, early: FirstTokens, names: Sequence[str], unit: Unit) -> list[str]:
    """How the rounds that gave first tokens differ, and of what the queue is made. `names`: of the later run, of the other.

    Nothing on a clock of ticks, where every round lasts alike.
    """
    if unit.ticks:
        return []

    def ms(seconds: float) -> str:
        return unit.said(seconds * 1000)

    told = [
        f"{ms(found.own_s)} under {name}, where {_fed(found)}" for found, name in zip((late, early), names, strict=True)
    ]
    if late.own_s > (1 + APART) * early.own_s:
        said = f"The rounds that gave first tokens took longer: {told[0]}, against {told[1]}"
    elif early.own_s > (1 + APART) * late.own_s:
        said = f"The rounds that gave first tokens were no longer: {told[0]}, against {told[1]}"
    else:
        said = f"The rounds that gave first tokens took as long: {told[0]}, and {told[1]}"
    if abs(late.eager - early.eager) > POINTS:
        said += f"; {share(late.eager)} of the first tokens under {names[0]} came from rounds without a CUDA graph (eager), {share(early.eager)} under {names[1]}"
    out = [said]
    if max(late.tail_s, early.tail_s) > 0:
        out.append(
            f"Before them the round under way had to end: {ms(late.tail_s)} under {names[0]}, {ms(early.tail_s)} under {names[1]} (rounds overlap, and prefill counts from when a request is scheduled)"
        )
    out.append(
        f"Of the queue, {ms(late.dispatch_s)} under {names[0]} and {ms(early.dispatch_s)} under {names[1]} are dispatch, before the loop had handed the request to the scheduler; "
        f"{ms(late.waiting_s)} and {ms(early.waiting_s)} are waiting there"
    )
    return [f"{text}." for text in out]


def slowest_rounds(found: FirstTokens, everyone: FirstTokens, unit: Unit) -> str | None:
    """What the rounds of the slowest first tokens were, beside those of all; None where they were not longer."""
    if unit.ticks or found.own_s <= (1 + APART) * everyone.own_s:
        return None
    eager = (
        f", {share(found.eager)} of them without a CUDA graph (eager; {share(everyone.eager)} of all)"
        if found.eager - everyone.eager > POINTS
        else ""
    )
    return f"Their rounds took {unit.said(found.own_s * 1000)} against {unit.said(everyone.own_s * 1000)} for all first tokens, with {_tokens(found)}{eager}."


def _fed(found: FirstTokens) -> str:
    """What those rounds fed, in the mean."""
    if not found.mixed:
        return f"they prefill alone ({_tokens(found)})"
    of = "all" if found.mixed == 1 else "nearly all" if found.mixed > 0.995 else share(found.mixed)
    return f"{of} decode others too ({_tokens(found)})"


def _tokens(found: FirstTokens) -> str:
    fed = f"{_count(found.prefill_tokens)} prefill tokens"
    return f"{fed} and {_count(found.decodes)} decodes in the mean" if found.decodes else f"{fed} in the mean"


def _count(mean: float) -> str:
    return f"{mean:,.0f}" if mean >= 10 else number(mean)
