"""When the rows of an imported trace arrive: origin, descents, folds, drawn times, ticks. All in integer nanoseconds.

Knows drafts and the user's policies, no format. Seeded draws, one generator a purpose.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from traces.draws import draw_gamma, draw_lognormal
from traces.errors import BenchctlError
from traces.formats.base import Draft, ImportOptions, Reader
from traces.rows import Row
from traces.writing import BodyWriter, Line, with_arrival

SMALL_DESCENT_NS = 10**9
ANSWER_NS_PER_TOKEN = 20 * 10**6  # stands in for the answer's time where neither times nor latencies are known
THINK = (3.8, 1.1)  # lognormal, s: gaps between turns of a published retrieval service (RAGPulse)
MANY_GAPS = 100


class GapStats:
    """Rate and variation of arrivals, fed in order. Mutable."""

    def __init__(self) -> None:
        self.num = 0
        self.num_zero = 0
        self.smallest_positive: int | None = None
        self.first: int | None = None
        self.last = 0
        self.longest = 0
        self._mean = 0.0
        self._spread = 0.0

    def add(self, ns: int) -> None:
        if self.first is None:
            self.first = self.last = ns
            return
        gap = ns - self.last
        self.last = ns
        self.num += 1
        self.num_zero += gap == 0
        if gap > 0 and (self.smallest_positive is None or gap < self.smallest_positive):
            self.smallest_positive = gap
        if gap > self.longest:
            self.longest = gap
        # Welford's update: the sum of squares of nanoseconds would lose the variance.
        delta = gap - self._mean
        self._mean += delta / self.num
        self._spread += delta * (gap - self._mean)

    @property
    def span_s(self) -> float:
        return 0.0 if self.first is None else (self.last - self.first) / 1e9

    @property
    def rate(self) -> float | None:
        """Gaps a second; None without a span."""
        return self.num / self.span_s if self.span_s > 0 else None

    @property
    def cv(self) -> float | None:
        """Coefficient of variation of the gaps (population)."""
        if not self.num or self._mean <= 0:
            return None
        return math.sqrt(self._spread / self.num) / self._mean

    @property
    def zero_share(self) -> float:
        return self.num_zero / self.num if self.num else 0.0

    def summary(self) -> dict[str, Any]:
        return {"requests": self.num + (self.first is not None), "rate": _short(self.rate), "cv": _short(self.cv)}


class Timeline:
    """Gives each draft its arrival, then settles what only the whole file tells. Mutable, one import."""

    def __init__(self, options: ImportOptions, reader: Reader) -> None:
        self._options = options
        self._reader = reader
        self._fold_ns = _fold(options.on_descent)
        self._folded = 0  # ns added so far
        self.origin_ns: int | None = None
        self._last: int | None = None  # on the source's clock, folds added
        self._written = -1 << 100  # last arrival handed out
        self._smallest = 0
        self._unordered = False
        self._num_descents = 0
        self._num_small = 0
        self._num_drawn = 0
        self._num_think = 0
        self._largest = 0
        self._fractions = False
        self.stats = GapStats()
        self.assumed: list[str] = []
        self._starts = random.Random(f"{options.seed} arrivals")
        self._thinks = random.Random(f"{options.seed} think")
        self._clock = 0.0  # s, of the drawn starts
        self._chat: dict[str, tuple[int, int]] = {}  # id → arrival and output length, of the conversation being read
        rate = options.request_rate if options.request_rate is not None else reader.default_rate
        self._rate = rate

    def arrival(self, draft: Draft, path: Path, where: str) -> int | None:
        """ns from the trace's origin, may be negative until `settle`; None: the row has no time. Raises BenchctlError."""
        time = draft.time_ns
        if time is None:
            if not self._reader.synthesizes_times:
                return None
            arrival = self._draw(draft.row)
            self.origin_ns = 0
        else:
            if time > self._largest:
                self._largest = time
            self._fractions = self._fractions or time % 10**6 != 0
            if not self._reader.sorts:
                time = self._in_order(time + self._folded, path, where)
            if self.origin_ns is None:
                self.origin_ns = 0 if self._reader.origin == "zero" else time
            arrival = time - self.origin_ns
        return arrival

    def keep(self, arrival: int) -> None:
        """The row of this arrival is written."""
        if arrival < self._written:
            self._unordered = True
        self._written = arrival
        if arrival < self._smallest:
            self._smallest = arrival
        self.stats.add(arrival)

    def _in_order(self, time: int, path: Path, where: str) -> int:
        last = self._last
        if last is not None and time < last:
            drop = last - time
            if drop < SMALL_DESCENT_NS:
                self._num_small += 1
                return time
            self._num_descents += 1
            if self._fold_ns is not None:
                time += self._fold_ns
                self._folded += self._fold_ns
                if time < last:
                    raise self._descent(path, where, last, time, f"after a fold of {self._fold_ns / 1e9:g} s still")
            elif self._options.on_descent == "error":
                raise self._descent(path, where, last, time, "")
        self._last = time
        return time

    def _descent(self, path: Path, where: str, last: int, time: int, more: str) -> BenchctlError:
        origin = self.origin_ns or 0
        what = f"time goes back from {(last - origin) / 1e9:.6f} to {(time - origin) / 1e9:.6f} s {more}".rstrip()
        return BenchctlError(
            what,
            where=f"{path}, {where} (data row {self.stats.num + (self.stats.first is not None)})",
            fix="--on-descent fold=SECONDS where the clock began anew (604800 for a week), or --on-descent sort",
        )

    def _draw(self, row: Row) -> int:
        """A start by rate, or a later turn after its parent's answer and a think time."""
        self._num_drawn += 1
        parents = [self._chat[parent] for parent in row.parents or () if parent in self._chat]
        if parents:
            if row.think_s is None:
                row.think_s = round(draw_lognormal(self._thinks, *THINK), 3)
                self._num_think += 1
            ends = max(at + ANSWER_NS_PER_TOKEN * output for at, output in parents)
            arrival = ends + round(row.think_s * 1e9)
        else:
            self._chat.clear()
            arrival = round(self._clock * 1e9)
            if self._rate != math.inf:
                self._clock = round(self._clock + draw_gamma(self._starts, self._options.burstiness) / self._rate, 6)
        if row.id is not None:
            self._chat[row.id] = (arrival, row.output_length or row.max_tokens or 0)
        return arrival

    def settle(self, body: BodyWriter) -> dict[str, Any]:
        """Sort, shift and spread the lines written; what was done, for the header, with `span_s`."""
        notes: dict[str, Any] = {}
        if self._num_descents:
            notes["descents"] = {"policy": self._options.on_descent, "count": self._num_descents}
        if self._num_small:
            notes["descents_below_1_s_sorted"] = self._num_small
        if self._unordered:
            body.sort()
            notes["sorted"] = True
        if self._smallest < 0:
            shift = self._smallest
            assert self.origin_ns is not None
            self.origin_ns += shift
            # The lines hold seconds as floats: far from 0 the earliest one is the shift but for its rounding.
            body.replace(with_arrival(line, max(ns - shift, 0)) for ns, line in body.lines())
        if self._unordered or self._smallest < 0:
            self.stats = _stats_of(body)
        if self.origin_ns and self._reader.clock_has_zone is None:
            notes["time_offset_s"] = self.origin_ns / 1e9
        if self._options.spread == "uniform":
            notes["spread"] = self._spread(body)
        if self._num_drawn:
            self._state_draws()
        if self.stats.first is not None:
            notes["span_s"] = self.stats.span_s
        return notes

    def _state_draws(self) -> None:
        if self._rate == math.inf:
            self.assumed.append("arrivals: all at 0, a batch")
        else:
            shape = self._options.burstiness
            process = "Poisson" if shape == 1 else f"gamma with shape {shape:g}"
            self.assumed.append(f"arrivals: {process}, {self._rate:g}/s, seed {self._options.seed}")
        if self._num_think:
            self.assumed.append(
                f"think_s of {self._num_think} turns: lognormal{THINK} s, seed {self._options.seed}; in arrival_s an answer takes "
                f"{ANSWER_NS_PER_TOKEN / 1e9:g} s a token"
            )

    def _spread(self, body: BodyWriter) -> dict[str, Any]:
        """Equal times become uniform ones inside their tick, so the count of a tick stays what it was."""
        tick = self.stats.smallest_positive
        if tick is None or not self.stats.num_zero:
            return {"kind": "uniform", "tick_s": None, "moved": 0}
        before = self.stats.num_zero
        rng = random.Random(f"{self._options.seed} spread")
        body.replace(_spread_lines(body.lines(), tick, rng))
        self.stats = _stats_of(body)
        return {"kind": "uniform", "tick_s": tick / 1e9, "seed": self._options.seed, "zero_gaps_before": before}

    def warnings(self, name: str) -> list[str]:
        """Sentences for the user: what was seen, and the flag that changes it."""
        stats, out = self.stats, []
        drawn = self._num_drawn > 0
        if not drawn and stats.num >= MANY_GAPS and 2 * stats.num_zero > stats.num:
            tick = (
                ""
                if stats.smallest_positive is None
                else f", the smallest other gap is {stats.smallest_positive / 1e9:g} s"
            )
            out.append(
                f"{stats.num_zero} of {stats.num} gaps between arrivals are zero{tick}: the clock ticks, and its batches read as bursts; "
                "--spread uniform draws times inside each tick"
            )
        rate = stats.rate
        if not drawn and self._reader.unit is not None and rate is not None and stats.num >= 10:
            if not 1 / 3600 <= rate <= 1000:
                out.append(
                    f"a mean rate of {rate:.3g} requests/s with times in {self._reader.unit}: if that is not so, --time-unit s|ms|us|ns"
                )
            elif self._reader.unit == "ms" and self._fractions and self._largest < 10 * 10**6:
                out.append("every time is below 10 ms and has a fraction: if they are seconds, --time-unit s")
        if self._options.time_unit is not None and self._reader.unit is None:
            out.append("--time-unit changed nothing: this format's times are moments of a calendar, or there are none")
        return out


def _spread_lines(lines: Iterator[Line], tick: int, rng: random.Random) -> Iterator[bytes]:
    """`lines` in order of time; each group of equal times lies in [time, time + tick) afterwards, in file order."""
    group: list[bytes] = []
    at = 0

    def spread() -> Iterator[bytes]:
        offsets = sorted(int(rng.random() * tick) for _ in group)
        # A group of one stays where it is: there is nothing to tell apart.
        for offset, line in zip(offsets if len(group) > 1 else [0], group, strict=False):
            yield with_arrival(line, at + offset)

    for ns, line in lines:
        if group and ns != at:
            yield from spread()
            group.clear()
        at = ns
        group.append(line)
    yield from spread()


def _stats_of(body: BodyWriter) -> GapStats:
    stats = GapStats()
    for ns, _ in body.lines():
        stats.add(ns)
    return stats


def _fold(policy: str) -> int | None:
    if policy in ("error", "sort"):
        return None
    word, _, seconds = policy.partition("=")
    try:
        value = float(seconds)
    except ValueError:
        value = math.nan
    if word != "fold" or not 0 < value < 1e12:
        raise BenchctlError(f"--on-descent is {policy!r}", fix="error, sort or fold=SECONDS, such as fold=604800")
    return round(value * 1e9)


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
