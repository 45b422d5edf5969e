"""What made the longest gaps between tokens, and what the slowest first tokens waited for: rounds and reasons, from the tables."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from reports import metrics
from reports.numbers import number, plural
from reports.round_causes import round_causes
from reports.run import Run

SPIKES = 8
# What else took the time of a round in which the device worked for less than half.
REST = {
    "host": "",
    "launch": "; the rest went to launching the next round, which has no CUDA graph",
    "hiccup": "; the rest is a hiccup",
}
WORTH_SAYING = 0.2  # of a gap: the share from which on the other part of it is told too
SLOWEST = 0.1  # share of the finished requests, by TTFT, whose waiting is explained


@dataclass(frozen=True, slots=True)
class Spike:
    """One of the longest gaps between two tokens of a request. `round`: the one to blame, and `why` in words.

    `cause`: preempted (it lost its blocks), passed (rounds that did not compute it took most of the gap) or own (its own did).
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
    """The longest gaps, one for each round to blame, longest first. `gaps`: `metrics.itl(run)` collected, if at hand.

    A gap is the own times of the rounds that passed its request by and of the one that gave the token: the larger of the two
    sums is its cause, and the longest round of it is to blame.
    """
    if not run.has("tokens"):
        return []
    frame = metrics.itl(run).collect() if gaps is None else gaps
    rounds = round_causes(run)
    if not frame.height or not rounds.height:
        return []
    numbers, own, ends = (rounds[name].to_numpy() for name in ("round", "own_s", "t_end_s"))
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
        passed = first < last and own[first:last].sum() >= own[last]
        blamed = first + int(np.argmax(own[first:last])) if passed else last
        if blamed in seen:
            continue
        seen.add(blamed)
        lost, why = _why(run, rounds, row["request"], first, last, blamed)
        to_blame = int(numbers[blamed]) if lost is None else lost
        cause = "preempted" if lost is not None else "passed" if passed else "own"
        out.append(Spike(row["request"], row["index"], row["t_s"], row["itl"], to_blame, why, cause))
        if len(out) == limit:
            break
    return out


def _why(run: Run, rounds: pl.DataFrame, request: int, first: int, last: int, blamed: int) -> tuple[int | None, str]:
    """(the round in which it lost its blocks, if it did; why the gap is so long)."""
    numbers = rounds["round"]
    within = pl.col("round").is_between(int(numbers[first]), int(numbers[last]))
    mine = (
        run.scan("decisions")
        .filter(within & (pl.col("request") == request) & pl.col("kind").is_in(["preempt", "resume"]))
        .sort("round", "order")
        .collect()
    )
    lost = mine.filter(pl.col("kind") == "preempt")
    if lost.height:
        other = lost["other"][0]
        whom = f" for {run.labels.get(other, f'#{other}')}" if other is not None and other != request else ""
        back = mine.filter(pl.col("kind") == "resume")
        until = f", resumed in round {back['round'][-1]:,}" if back.height else ""
        what = "it preempted itself" if other is None or other == request else "preempted"
        return lost["round"][0], f"{what} in round {lost['round'][0]:,}{whom}{until}"
    told = _Told(ticks=run.clock == "rounds", graphs=bool((rounds["mode"] == "graph").any()))
    row, passed = rounds.row(blamed, named=True), rounds[first:last]
    if blamed < last:
        why = f"{told.passing(passed)}{told.of_them(row, last - first)}"
        own = rounds.row(last, named=True)
        if not told.ticks and own["own_s"] >= WORTH_SAYING * (own["own_s"] + passed["own_s"].sum()):
            why += f"; its own round of {_batch(own)} took {_ms(own['own_s'])}{told.odd(own)}"
        return None, why
    took = "" if told.ticks else f" took {_ms(row['own_s'])}"
    why = f"its own round of {_batch(row)}{took}{told.odd(row)}"
    return None, why + (f"; {told.passing(passed)}" if first < last else "")


@dataclass(frozen=True, slots=True)
class _Told:
    """Words about rounds. `ticks`: on a clock of equal ticks no round is longer, and its length says nothing. `graphs`: the run has CUDA graphs."""

    ticks: bool
    graphs: bool

    def passing(self, passed: pl.DataFrame) -> str:
        """How many rounds did not compute the request, what they did instead, and for how long."""
        count = passed.height
        what = "prefilled others" if (passed["prefill_tokens"] > 0).all() else "did not compute it"
        time = "" if self.ticks else f" for {_ms(float(passed['own_s'].sum()))}"
        return f"{count:,} round{'' if count == 1 else 's'} {what}{time}"

    def of_them(self, row: dict[str, Any], count: int) -> str:
        """The longest of `count` rounds."""
        which = f"{row['round']:,} with {_batch(row)}{self.odd(row)}"
        if count == 1:
            return f": {which}"
        return f"; the first, {which}" if self.ticks else f"; the longest, {which}, {_ms(row['own_s'])}"

    def odd(self, row: dict[str, Any]) -> str:
        """What is not as in most rounds: no graph, or a device that waited."""
        parts = ["eager"] if self.graphs and row["mode"] == "eager" else []
        if row["cause"] in REST:
            parts.append(
                f"the device worked for {_ms(row['device_s'])} of it, the host for {_ms(row['host_s'])}{REST[row['cause']]}"
            )
        return f" ({', '.join(parts)})" if parts else ""


def _ms(seconds: float) -> str:
    return f"{number(seconds * 1000)} ms"


def _batch(row: dict[str, Any]) -> str:
    """What a round fed."""
    decodes, fed = row["decode_tokens"], row["prefill_tokens"]
    both = [(fed, "prefill token"), (decodes, "decode")]
    return " and ".join(plural(count, what) for count, what in both if count) or "nobody"


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
