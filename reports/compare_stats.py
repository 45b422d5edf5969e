"""Intervals for differences between two runs or two sets of repeats. Numpy only; knows no run folder.

Two runs of one trace are compared request by request, so the bootstrap draws the *same* requests for both (paired). Latencies
of neighbours in a queue rise and fall together; drawing requests one by one would give intervals that are too narrow, so
blocks of consecutive arrivals are drawn (circular moving-block bootstrap, blocks of about the cube root of n).
Repeats are compared run by run, by Student's t: a bootstrap of three or five values promises too much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

RESAMPLES = 1000
MAX_WORK = 60_000_000  # samples looked at in one bootstrap; more samples get fewer resamples
MIN_RESAMPLES = 200
MIN_REQUESTS = 20  # below that the interval of anything is a guess
SEED = 20260801

# Two-sided 95 % points of Student's t for 1 to 30 degrees of freedom; a test integrates the density to check them.
T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Interval:
    """A 95 % interval of a difference B - A, in the unit of what was compared. `n`: requests or pairs it stands on."""

    low: float
    high: float
    n: int


@dataclass(frozen=True, slots=True)
class Samples:
    """Values of one metric in one run, each belonging to a request. `owner[i]`: place of its request, from 0."""

    values: Floats
    owner: Ints

    def sorted(self) -> Samples:
        order = np.argsort(self.values, kind="stable")
        return Samples(self.values[order], self.owner[order])


def t95(degrees: float) -> float:
    """The 95 % point; between whole degrees the one below (wider), beyond 30 the expansion around the normal's 1.96."""
    whole = int(degrees)
    if whole < 1:
        return math.inf
    if whole <= len(T95):
        return T95[whole - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def paired_interval(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Of the mean of b[i] - a[i], by Student's t. Needs two pairs or more."""
    difference = np.asarray(b, dtype=np.float64) - np.asarray(a, dtype=np.float64)
    n = len(difference)
    half = t95(n - 1) * float(difference.std(ddof=1)) / math.sqrt(n)
    mean = float(difference.mean())
    return Interval(mean - half, mean + half, n)


def welch_interval(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Of mean(b) - mean(a) of two independent sets, by Welch's t. Needs two values or more in each."""
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    vx, vy = float(x.var(ddof=1)) / len(x), float(y.var(ddof=1)) / len(y)
    mean = float(y.mean() - x.mean())
    if vx + vy == 0:
        return Interval(mean, mean, min(len(x), len(y)))
    degrees = (vx + vy) ** 2 / (vx**2 / (len(x) - 1) + vy**2 / (len(y) - 1))
    half = t95(degrees) * math.sqrt(vx + vy)
    return Interval(mean - half, mean + half, min(len(x), len(y)))


def bootstrap_differences(
    a: Samples, b: Samples, num_requests: int, percents: Sequence[float], *, seed: int = SEED
) -> dict[str, Interval]:
    """Intervals for the difference of the mean (`"mean"`) and of each percentile (`"p95"`).

    The samples' owners count the same requests, 0 … num_requests - 1, in order of arrival. Percentiles of a resample are the
    values at rank ceil(p · n): with samples that stand several times in a resample interpolation would add nothing.
    """
    if num_requests < MIN_REQUESTS or not len(a.values) or not len(b.values):
        return {}
    generator = np.random.default_rng(seed)
    length = max(1, round(num_requests ** (1 / 3)))
    blocks = -(-num_requests // length)
    resamples = max(MIN_RESAMPLES, min(RESAMPLES, MAX_WORK // (len(a.values) + len(b.values))))
    sides = (_Ranked(a, num_requests), _Ranked(b, num_requests))
    offsets = np.arange(length)
    names = ["mean", *(f"p{percent:g}" for percent in percents)]
    found = np.empty((resamples, len(names)))
    for i in range(resamples):
        starts = generator.integers(0, num_requests, blocks)
        drawn = ((starts[:, None] + offsets) % num_requests).ravel()[:num_requests]
        weight = np.bincount(drawn, minlength=num_requests)
        first, second = (side.statistics(weight, percents) for side in sides)
        found[i] = second - first
    found = found[~np.isnan(found).any(axis=1)]
    low, high = np.percentile(found, (2.5, 97.5), axis=0)
    return {name: Interval(float(low[j]), float(high[j]), num_requests) for j, name in enumerate(names)}


class _Ranked:
    """Samples of one side, ready for many resamples: sorted, cut into stretches, and counted by request and stretch.

    A resample's percentile is looked for in the one stretch that holds its rank, so its cost does not grow with the samples.
    """

    MOST_STRETCHES = 256

    def __init__(self, samples: Samples, num_requests: int) -> None:
        ordered = samples.sorted()
        self.values, self.owner = ordered.values, ordered.owner
        # Looking into a stretch and adding the stretches up should cost about the same.
        stretches = min(max(len(self.values) // (4 * num_requests), 1), self.MOST_STRETCHES)
        self.size = -(-len(self.values) // stretches)
        stretch = np.arange(len(self.values)) // self.size
        shape = (num_requests, int(stretch[-1]) + 1)
        cells = np.bincount(self.owner * shape[1] + stretch, minlength=shape[0] * shape[1])
        self.counts = cells.reshape(shape).astype(np.float64)  # [requests, stretches]; whole numbers, exact
        self.sums = np.bincount(self.owner, weights=self.values, minlength=num_requests)

    def statistics(self, weight: Ints, percents: Sequence[float]) -> Floats:
        """Mean and percentiles of the samples, each counted as often as its request was drawn; nan where none was."""
        total = np.cumsum((weight.astype(np.float64) @ self.counts).astype(np.int64))
        n = int(total[-1])
        if not n:
            return np.full(1 + len(percents), np.nan)
        out = [float(weight @ self.sums) / n]
        for percent in percents:
            rank = max(math.ceil(percent / 100 * n - 1e-9), 1)
            stretch = int(np.searchsorted(total, rank, side="left"))
            low = stretch * self.size
            within = np.cumsum(weight[self.owner[low : low + self.size]])
            before = int(total[stretch - 1]) if stretch else 0
            out.append(float(self.values[low + np.searchsorted(within, rank - before, side="left")]))
        return np.array(out)
