"""Empirical distributions as tables of quantiles: caps, spikes and tails as they are, where a fitted curve would smooth them away.

Drawing needs one uniform number, so two quantities can be given a rank correlation by a Gaussian copula.
"""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Table:
    """(percent, value) in rising order, from 0 to 100; values between are interpolated. Two equal values make a spike."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        percents = [p for p, _ in self.points]
        values = [v for _, v in self.points]
        assert percents[0] == 0 and percents[-1] == 100 and sorted(percents) == percents, self
        assert sorted(values) == values, self

    def at(self, share: float) -> float:
        """The value that `share` (0 to 1) of all lie below."""
        percent = 100 * share
        place = bisect.bisect_right(self.points, (percent, math.inf))
        if place >= len(self.points):
            return self.points[-1][1]
        (p0, v0), (p1, v1) = self.points[place - 1], self.points[place]
        return v0 + (v1 - v0) * (percent - p0) / (p1 - p0)

    def draw(self, rng: random.Random) -> float:
        return self.at(rng.random())

    def mean(self) -> float:
        """Exact for the interpolated distribution."""
        pairs = zip(self.points, self.points[1:], strict=False)
        return sum((p1 - p0) / 100 * (v0 + v1) / 2 for (p0, v0), (p1, v1) in pairs)

    def scaled(self, factor: float) -> Table:
        return Table(tuple((p, v * factor) for p, v in self.points))


def table(*points: tuple[float, float]) -> Table:
    return Table(points)


def fit(values: Sequence[float]) -> Table:
    """The table of observed values, with every spike of 1 % or more kept as one. `values` must not be empty."""
    ordered = sorted(values)
    last = len(ordered) - 1
    # A fixed grid, dense in the tail; a grid point lies on an observed value, so caps survive.
    grid = [*range(0, 95), *(95 + i / 4 for i in range(16)), *(99 + i / 10 for i in range(10)), 100]
    points = [(float(p), float(ordered[min(round(p / 100 * last), last)])) for p in grid]
    return Table(tuple(points))


def draw_pair(rng: random.Random, first: Table, second: Table, correlation: float) -> tuple[float, float]:
    """One value of each, with this rank (Spearman) correlation."""
    u = max(rng.random(), 2**-54)
    v = max(rng.random(), 2**-54)
    if correlation == 0:
        return first.at(u), second.at(v)
    # Pearson's r of the normals that has this Spearman correlation.
    r = 2 * math.sin(math.pi * correlation / 6)
    x, z = _NORMAL.inv_cdf(u), _NORMAL.inv_cdf(v)
    return first.at(u), second.at(_NORMAL.cdf(r * x + math.sqrt(1 - r * r) * z))
