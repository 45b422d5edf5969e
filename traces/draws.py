"""Seeded draws from a few distributions, the same on every platform and Python.

Only `random.Random.random()` is drawn, whose sequence Python guarantees for a seed; the rest is arithmetic in sight.
"""

from __future__ import annotations

import math
import random
from statistics import NormalDist

_NORMAL = NormalDist()


def draw_uniform_int(rng: random.Random, low: int, high: int) -> int:
    """From low to high, both included."""
    return low + int(rng.random() * (high - low + 1))


def draw_exponential(rng: random.Random, mean: float) -> float:
    return -mean * math.log(1 - rng.random())


def draw_lognormal(rng: random.Random, mu: float, sigma: float) -> float:
    """exp of a normal with mean `mu` and standard deviation `sigma`."""
    # random() may be 0, where the normal's inverse has no value.
    return math.exp(mu + sigma * _NORMAL.inv_cdf(max(rng.random(), 2**-54)))


def draw_geometric(rng: random.Random, p: float) -> int:
    """Trials up to the first success, from 1."""
    return 1 + int(math.log(1 - rng.random()) / math.log(1 - p))


def draw_beta(rng: random.Random, a: float, b: float) -> float:
    """By rejection under the density's peak; a and b above 1."""
    mode = (a - 1) / (a + b - 2)
    peak = mode ** (a - 1) * (1 - mode) ** (b - 1)
    while True:
        x = rng.random()
        if rng.random() * peak <= x ** (a - 1) * (1 - x) ** (b - 1):
            return x


def draw_gamma(rng: random.Random, shape: float) -> float:
    """Gamma with this shape and mean 1 (Marsaglia and Tsang 2000); shape 1 is an exponential."""
    if shape == 1:
        return draw_exponential(rng, 1.0)
    # Below 1 the method draws at shape + 1 and scales by a power of a uniform number.
    boosted = shape if shape >= 1 else shape + 1
    d = boosted - 1 / 3
    c = 1 / math.sqrt(9 * d)
    while True:
        x = _NORMAL.inv_cdf(max(rng.random(), 2**-54))
        v = (1 + c * x) ** 3
        if v > 0 and math.log(max(rng.random(), 2**-54)) < 0.5 * x * x + d - d * v + d * math.log(v):
            break
    value = d * v
    if shape < 1:
        value *= (1 - rng.random()) ** (1 / shape)
    return value / shape


def draw_weibull(rng: random.Random, shape: float) -> float:
    """Weibull with this shape and mean 1."""
    return float((-math.log(1 - rng.random())) ** (1 / shape) / math.gamma(1 + 1 / shape))
