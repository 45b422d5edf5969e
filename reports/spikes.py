"""What made the longest gaps between tokens, and what the slowest first tokens waited for: rounds and reasons, from the tables."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import polars as pl

from reports import metrics
from reports.run import Run

SPIKES = 8
SLOWEST = 0.1  # share of the finished requests, by TTFT, whose waiting is explained


@dataclass(frozen=True, slots=True)
class Spike:
    """One of the longest gaps between two tokens of a request. `round`: the one to blame, and `why` in words.

    `cause`: preempted (it lost its blocks), passed (rounds did not compute it) or own (its own round was long).
    """

    request: int
    index: int  # of the later token
    t_s: float
    gap_s: float
    round: int
    why: str
    cause: str


@dataclass(frozen=True, slots=True)
class SlowStart:
    """What the slowest tenth of the first tokens waited for. Seconds are means over those requests.

    `stops`: (reason of the waiting loop, rounds) over the rounds they queued through, most frequent first.
    """

    num_requests: int
    least_ttft_s: float
    ttft_s: float
    queue_s: float
    prefill_s: float
    preempted_s: float
    stops: tuple[tuple[str, int], ...]
    worst: tuple[int, ...]  # requests, slowest first

    @property
    def num_rounds(self) -> int:
        return sum(count for _, count in self.stops)


def spikes(run: Run, limit: int = SPIKES, gaps: pl.DataFrame | None = None) -> list[Spike]:
    """The longest gaps, one for each round to blame, longest first. `gaps`: `metrics.itl(run)` collected, if at hand."""
    if not run.has("tokens"):
        return []
    frame = metrics.itl(run).collect() if gaps is None else gaps
    rounds = run.read("rounds").sort("round")
    if not frame.height or not rounds.height:
        return []
    numbers = rounds["round"].to_numpy()
    lasting = (rounds["t_end_s"] - rounds["t_start_s"]).to_numpy()
    ends = rounds["t_end_s"].to_numpy()
    out: list[Spike] = []
    seen: set[int] = set()
    usual = float(frame["itl"].median() or 0.0)  # type: ignore[arg-type]
    # Of those that one round ended the longest alone: a round ends a gap of every sequence that decodes in it.
    order = frame.sort("itl", "t_s", descending=[True, False], maintain_order=True)
    for row in order.unique("round", keep="first", maintain_order=True).head(400).iter_rows(named=True):
        if row["itl"] <= 1.5 * usual:
            break
        last = int(np.searchsorted(numbers, row["round"]))
        # Rounds that ended after the earlier token (a difference of floats), up to the one that gave the later.
        first = int(np.searchsorted(ends, row["t_s"] - row["itl"], side="right"))
        if first < last and ends[first] - (row["t_s"] - row["itl"]) < 1e-9:
            first += 1
        first = min(first, last)
        blamed = first + int(np.argmax(lasting[first : last + 1]))
        if blamed in seen:
            continue
        seen.add(blamed)
        lost, why = _why(run, rounds, row["request"], first, last, blamed)
        to_blame = int(numbers[blamed]) if lost is None else lost
        cause = "preempted" if lost is not None else "own" if why.startswith("its own round") else "passed"
        out.append(Spike(row["request"], row["index"], row["t_s"], row["itl"], to_blame, why, cause))
        if len(out) == limit:
            break
    return out


def _why(run: Run, rounds: pl.DataFrame, request: int, first: int, last: int, blamed: int) -> tuple[int | None, str]:
    """(the round in which it lost its blocks, if it did; why the gap is so long)."""
    row = rounds.row(blamed, named=True)
    numbers = rounds["round"]
    within = pl.col("round").is_between(int(numbers[first]), int(numbers[last]))
    mine = (
        run.scan("decisions")
        .filter(within & (pl.col("request") == request) & pl.col("kind").is_in(["preempt", "resume"]))
        .sort("round", "order")
        .collect()
    )
    lost = mine.filter(pl.col("kind") == "preempt")
    decodes = f"{row['decode_tokens']:,} decode{'' if row['decode_tokens'] == 1 else 's'}"
    fed = row["prefill_tokens"]
    tokens = f"{fed:,} prefill token{'' if fed == 1 else 's'}" if fed else decodes
    # On a clock of equal ticks no round is the longest, and its length says nothing.
    took = "" if run.clock == "rounds" else f", took {(row['t_end_s'] - row['t_start_s']) * 1000:,.1f} ms"
    if lost.height:
        other = lost["other"][0]
        whom = f" for {run.labels.get(other, f'#{other}')}" if other is not None and other != request else ""
        back = mine.filter(pl.col("kind") == "resume")
        until = f", resumed in round {back['round'][-1]:,}" if back.height else ""
        what = "it preempted itself" if other is None or other == request else "preempted"
        return lost["round"][0], f"{what} in round {lost['round'][0]:,}{whom}{until}"
    passed = last - first
    if passed > 0 and row["round"] != numbers[last]:
        if passed == 1:
            return None, f"1 round did not compute it: a {row['kind']} round of {tokens}{took}"
        which = "the first" if run.clock == "rounds" else "the longest"
        return None, f"{passed:,} rounds did not compute it; {which}, a {row['kind']} round of {tokens}{took}"
    own = f"its own round of {decodes}" if row["kind"] == "decode" else f"its own round, {row['kind']} with {tokens}"
    return None, f"{own}{took}" + (f"; {passed:,} more did not compute it" if passed else "")


def slow_starts(run: Run) -> SlowStart | None:
    """Where the slowest tenth of the first tokens lost their time, and why nobody admitted them earlier."""
    frame = metrics.per_request(run).filter(pl.col("ttft").is_not_null()).sort("ttft", descending=True).collect()
    if not frame.height:
        return None
    slow = frame.head(max(round(frame.height * SLOWEST), 1))
    rounds = run.read("rounds").sort("t_start_s")
    starts = rounds["t_start_s"].to_numpy()
    codes = rounds["stop_waiting"].fill_null("did not run")
    counted: Counter[str] = Counter()
    covered = np.zeros(rounds.height + 1, dtype=np.int64)
    for begin, end in slow.select("admitted_s", "first_scheduled_s").iter_rows():
        # Rounds that began while it waited and did not schedule it: the one that did began before `end`.
        low = int(np.searchsorted(starts, begin, side="left"))
        high = int(np.searchsorted(starts, end, side="right")) - 1
        if high > low:
            covered[low] += 1
            covered[high] -= 1
    weight = np.cumsum(covered[:-1])
    for reason, rounds_of in zip(codes.to_list(), weight.tolist(), strict=True):
        if rounds_of:
            counted[reason] += rounds_of
    means = slow.select(pl.col("ttft", "queue", "prefill", "preempted").mean()).row(0)
    return SlowStart(
        num_requests=slow.height,
        least_ttft_s=float(slow["ttft"][-1]),
        ttft_s=float(means[0]),
        queue_s=float(means[1]),
        prefill_s=float(means[2]),
        preempted_s=float(means[3] or 0.0),
        stops=tuple(sorted(counted.items(), key=lambda item: (-item[1], item[0]))),
        worst=tuple(slow["request"].head(5).to_list()),
    )
