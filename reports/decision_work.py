"""Two runs compared at equal work: how each treated a request when the same tokens of it were computed.

Round numbers stop meaning the same after the first difference, so steps are matched by (request, admission, computed
tokens): the k-th admission of a request, or a further step that starts where the other run's step started too. For each
step the rounds in which the request was ready and not computed are counted, by reason. Everything comes from the tables
by joins and cumulative counts; no policy is replayed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from reports.own_time import own_time
from reports.run import Run

WAITING = "waiting"
STANDING = "running, not computed"

# What was found, as `WorkRow.what`.
WHATS: dict[str, str] = {
    WAITING: "request-rounds that a request waited without blocks, by what stopped the waiting loop",
    STANDING: "request-rounds that a running request was not computed",
    "steps cut short": "steps that gave a request fewer tokens than it wanted",
    "preempted": "preemptions, by why that request was the victim",
    "refused": "requests refused on arrival",
}


@dataclass(frozen=True, slots=True)
class WorkRow:
    """One reason, summed over each run. `steps`: matched steps at which the two runs differ in it."""

    what: str
    reason: str
    a: int
    b: int
    a_s: float | None  # seconds, for request-rounds: Σ over requests of the rounds' own times
    b_s: float | None
    steps: int
    example: int | None  # the request with the largest difference


@dataclass(frozen=True, slots=True)
class WorkDiff:
    """`matched`: steps at equal work. Of those: `longer_a` waited longer in A, `longer_b` in B, `other_size` got another number of tokens.

    `hits`: admissions matched, of which `hits_less` found fewer cached tokens in B and `hits_more` more; `hit_tokens` is the sum
    of B - A. `unmatched_a`, `unmatched_b`: steps that start where the other run never stood.
    """

    rows: tuple[WorkRow, ...]
    matched: int
    unmatched_a: int
    unmatched_b: int
    longer_a: int
    longer_b: int
    other_size: int
    hits_less: int
    hits_more: int
    hit_tokens: int


def diff_work(a: Run, b: Run) -> WorkDiff:
    """Sum what the two runs did at equal work. Both need batches and decisions."""
    steps, waits = [], []
    for run in (a, b):
        table = step_table(run)
        steps.append(table)
        waits.append(wait_table(run, table))
    key = ["request", "admission", "from"]
    first, second = steps
    both = first.join(second, on=key, suffix="_b")
    sums = both.select(
        pl.len().alias("matched"),
        (pl.col("wait") > pl.col("wait_b")).sum().alias("longer_a"),
        (pl.col("wait") < pl.col("wait_b")).sum().alias("longer_b"),
        (
            (pl.col("num_tokens") != pl.col("num_tokens_b"))
            & (pl.col("hit").fill_null(0) == pl.col("hit_b").fill_null(0))
        )
        .sum()
        .alias("other_size"),
        (pl.col("hit_b") < pl.col("hit")).sum().alias("hits_less"),
        (pl.col("hit_b") > pl.col("hit")).sum().alias("hits_more"),
        (pl.col("hit_b") - pl.col("hit")).sum().alias("hit_tokens"),
    ).row(0, named=True)
    rows = _wait_rows(waits[0], waits[1], both)
    for what, kind in (("steps cut short", "chunk"), ("preempted", "preempt"), ("refused", "reject")):
        rows += _decision_rows(a, b, what, kind)
    return WorkDiff(
        rows=tuple(rows),
        unmatched_a=first.height - sums["matched"],
        unmatched_b=second.height - sums["matched"],
        **{name: int(value or 0) for name, value in sums.items()},
    )


def step_table(run: Run, request: int | None = None) -> pl.DataFrame:
    """A row for each row of `batches` (of one request, if given), with its work state.

    `admission`: the request's how-many-eth, from 1. `from`: computed tokens at which the step starts, -1 for an admission (its
    hit is `hit`). `place`: the round's place among the recorded. `ready`: the place from which on the request could have been
    computed; `wait` = rounds between. `was_running`: whether it held blocks meanwhile.
    """
    places = (
        run.scan("rounds")
        .select("round")
        .sort("round")
        .with_row_index("place")
        .with_columns(pl.col("place").cast(pl.Int64))
    )
    mine = pl.lit(True) if request is None else pl.col("request") == request
    admissions = run.scan("admissions").filter(mine).select("request", "admitted_round")
    lost = (
        run.scan("decisions")
        .filter((pl.col("kind") == "preempt") & mine)
        .select("request", pl.col("round").alias("lost_round"))
    )
    admitted = pl.col("cached_tokens").is_not_null()
    frame = (
        run.scan("batches")
        .filter(mine)
        .select("round", "request", "start", "num_tokens", "cached_tokens")
        .join(places, on="round")
        .sort("request", "round")
        .with_columns(
            admitted.cast(pl.Int64).cum_sum().over("request").alias("admission"),
            pl.when(admitted).then(-1).otherwise("start").alias("from"),
            pl.col("cached_tokens").alias("hit"),
            (~admitted).alias("was_running"),
            pl.col("place").shift(1).over("request").alias("before"),
        )
        .collect()
    )
    ready = _admission_ready(frame.filter(pl.col("from") == -1), places.collect(), admissions.collect(), lost.collect())
    frame = frame.join(ready, on=["request", "admission"], how="left").with_columns(
        pl.when(pl.col("was_running")).then(pl.col("before") + 1).otherwise("ready").alias("ready")
    )
    return frame.select(
        "request", "admission", "from", "hit", "num_tokens", "place", "ready", "was_running",
        (pl.col("place") - pl.col("ready")).alias("wait"),
    )  # fmt: skip


def _admission_ready(
    first: pl.DataFrame, places: pl.DataFrame, admissions: pl.DataFrame, lost: pl.DataFrame
) -> pl.DataFrame:
    """request, admission, ready: from its arrival for the first admission, from the round after the preemption for the others.

    A request preempted k times and taken back has its k-th preemption before its (k + 1)-th admission.
    """
    arrived = (
        admissions.sort("admitted_round")
        .join_asof(places.rename({"round": "admitted_round"}), on="admitted_round", strategy="forward")
        .select("request", pl.lit(1, dtype=pl.Int64).alias("admission"), pl.col("place").alias("ready"))
    )
    back = (
        lost.join(places.rename({"round": "lost_round"}), on="lost_round")
        .sort("request", "lost_round")
        .select(
            "request",
            (pl.int_range(pl.len()).over("request") + 2).cast(pl.Int64).alias("admission"),
            (pl.col("place") + 1).alias("ready"),
        )
    )
    return first.select("request", "admission").join(
        pl.concat([arrived, back]), on=["request", "admission"], how="left"
    )


def wait_table(run: Run, steps: pl.DataFrame) -> pl.DataFrame:
    """request, admission, from, what, reason, rounds, seconds: why each step came as late as it did; steps without a wait are absent.

    The reason of a round is the request's own `hold` or `skip` where it has one, else what stopped the loop it stood in.
    """
    rounds = (
        run.scan("rounds")
        .sort("round")
        .select("round", "kind", "stop_waiting", "stop_running", own_time().alias("own_s"))
        .collect()
    )
    waited = steps.filter(pl.col("wait") > 0)
    span = rounds["own_s"].to_numpy()
    standing = (
        pl.when(pl.col("stop_running").is_null() & (pl.col("kind") == "prefill")).then(pl.lit("prefill_first"))
        .otherwise(pl.col("stop_running").fill_null("not said"))
    )  # fmt: skip
    reasons = rounds.select(pl.col("stop_waiting").fill_null("not said").alias(WAITING), standing.alias(STANDING))
    parts = []
    for what, running in ((WAITING, False), (STANDING, True)):
        group = waited.filter(pl.col("was_running") == running)
        for reason in sorted(reasons[what].unique()):
            mark = (reasons[what] == reason).to_numpy()
            counts = _between(mark.astype(np.int64), group)
            if not counts.any():
                continue
            parts.append(
                group.select("request", "admission", "from").with_columns(
                    pl.lit(what).alias("what"),
                    pl.lit(reason).alias("reason"),
                    pl.Series("rounds", counts),
                    pl.Series("seconds", _between(mark * span, group)),
                ).filter(pl.col("rounds") > 0)
            )  # fmt: skip
    schema: dict[str, type[pl.DataType]] = {
        "request": pl.Int64, "admission": pl.Int64, "from": pl.Int64, "what": pl.String, "reason": pl.String,
        "rounds": pl.Int64, "seconds": pl.Float64,
    }  # fmt: skip
    if not parts:
        return pl.DataFrame(schema=schema)
    return _own_reasons(run, pl.concat(parts), waited, rounds.with_row_index("place"), schema)


def _between(per_round: npt.NDArray[np.generic], group: pl.DataFrame) -> npt.NDArray[np.generic]:
    """Σ of `per_round` over places ready .. place - 1 of each step."""
    total = np.concatenate([np.zeros(1, dtype=per_round.dtype), np.cumsum(per_round)])
    out: npt.NDArray[np.generic] = total[group["place"].to_numpy()] - total[group["ready"].to_numpy()]
    return out


def _own_reasons(
    run: Run, waits: pl.DataFrame, waited: pl.DataFrame, rounds: pl.DataFrame, schema: dict[str, type[pl.DataType]]
) -> pl.DataFrame:
    """Move the rounds in which a request has a word of its own that is not the loop's stop (a skip) to that reason."""
    own = (
        run.scan("decisions").filter(pl.col("kind").is_in(["skip", "hold"])).select("round", "request", pl.col("reason").alias("own"))
        .collect().join(rounds.with_columns(pl.col("place").cast(pl.Int64)), on="round")
        .filter(pl.col("own") != pl.col("stop_waiting").fill_null("not said"))
    )  # fmt: skip
    if not own.height:
        return waits
    keys = ["request", "admission", "from"]
    steps = waited.filter(~pl.col("was_running"))
    moved = steps.join(own, on="request", suffix="_own").filter(
        (pl.col("place_own") >= pl.col("ready")) & (pl.col("place_own") < pl.col("place"))
    )
    seconds = pl.col("own_s").alias("seconds")
    common = [*(pl.col(key) for key in keys), pl.lit(WAITING).alias("what")]
    gained = moved.select(*common, pl.col("own").alias("reason"), pl.lit(1, pl.Int64).alias("rounds"), seconds)
    taken = moved.select(
        *common,
        pl.col("stop_waiting").fill_null("not said").alias("reason"),
        pl.lit(-1, pl.Int64).alias("rounds"),
        -seconds,
    )
    whole = pl.concat([frame.cast({name: kind for name, kind in schema.items()}) for frame in (waits, gained, taken)])
    summed = whole.group_by(*keys, "what", "reason").agg(pl.col("rounds").sum(), pl.col("seconds").sum())
    return summed.filter(pl.col("rounds") > 0)


def _wait_rows(a: pl.DataFrame, b: pl.DataFrame, matched: pl.DataFrame) -> list[WorkRow]:
    keys = ["request", "admission", "from", "what", "reason"]
    both = a.join(b, on=keys, how="full", coalesce=True, suffix="_b").with_columns(
        pl.col("rounds", "rounds_b").fill_null(0), pl.col("seconds", "seconds_b").fill_null(0.0)
    )
    at_equal_work = both.join(matched.select(keys[:3]), on=keys[:3], how="semi")
    steps = dict(
        ((what, reason), count)
        for what, reason, count in at_equal_work.filter(pl.col("rounds") != pl.col("rounds_b"))
        .group_by("what", "reason").len("n").iter_rows()
    )  # fmt: skip
    per_request = both.group_by("what", "reason", "request").agg(
        pl.col("rounds", "rounds_b", "seconds", "seconds_b").sum()
    )
    out = []
    for what, reason in sorted(per_request.select("what", "reason").unique().iter_rows()):
        mine = per_request.filter((pl.col("what") == what) & (pl.col("reason") == reason)).sort("request")
        sums = mine.select(pl.col("rounds", "rounds_b", "seconds", "seconds_b").sum()).row(0)
        size = (mine["rounds_b"] - mine["rounds"]).abs()
        example = mine["request"][int(size.arg_max() or 0)] if size.max() else None
        out.append(WorkRow(what, reason, sums[0], sums[1], sums[2], sums[3], steps.get((what, reason), 0), example))
    return sorted(out, key=lambda row: (row.what != WAITING, -abs(row.b - row.a), row.reason))


def _decision_rows(a: Run, b: Run, what: str, kind: str) -> list[WorkRow]:
    """Decisions of one kind, counted by reason and request."""
    sides = [
        run.scan("decisions").filter(pl.col("kind") == kind).group_by("reason", "request").len("n").collect()
        for run in (a, b)
    ]
    both = (
        sides[0].join(sides[1], on=["reason", "request"], how="full", coalesce=True, suffix="_b")
        .with_columns(pl.col("n", "n_b").fill_null(0).cast(pl.Int64)).sort("request")
    )  # fmt: skip
    out = []
    for reason in sorted(both["reason"].unique()):
        mine = both.filter(pl.col("reason") == reason)
        differ = mine.filter(pl.col("n") != pl.col("n_b"))
        size = (differ["n_b"] - differ["n"]).abs()
        example = differ["request"][int(size.arg_max() or 0)] if differ.height else None
        out.append(
            WorkRow(what, reason, int(mine["n"].sum()), int(mine["n_b"].sum()), None, None, differ.height, example)
        )
    return sorted(out, key=lambda row: (-abs(row.b - row.a), row.reason))
