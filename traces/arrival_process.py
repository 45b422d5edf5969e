"""When requests arrive in a made trace: renewal processes, and their rate changed over time.

A process gives gaps of mean 1; the rate's integral turns them into times, so every shape of gap goes with every course of the rate.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from traces.draws import draw_exponential, draw_gamma, draw_weibull
from traces.errors import BenchctlError
from traces.quantiles import Table

GAPS = ("poisson", "gamma", "weibull", "constant", "empirical")
COURSES = ("steady", "ramp", "diurnal", "onoff")


@dataclass(frozen=True, slots=True)
class ArrivalProcess:
    """`rate`: mean requests/s (of a ramp, its end). `shape`: of gamma and Weibull gaps, 1 = Poisson, smaller is burstier.

    `ramp`: from `rate_from` to `rate` over `period_s`, then steady. `diurnal`: rate x (1 + amplitude sin(2 pi t / period_s)).
    `onoff`: `rate` for `on_s`, nothing for `off_s`. `gaps`: the table of empirical gaps, scaled to mean 1.
    """

    rate: float
    gap: str = "poisson"
    shape: float = 1.0
    course: str = "steady"
    rate_from: float = 0.0
    period_s: float = 86_400.0
    amplitude: float = 0.8
    on_s: float = 60.0
    off_s: float = 60.0
    gaps: Table | None = None  # in any unit: only their form counts

    def check(self) -> None:
        """Raises BenchctlError."""
        for name, value, allowed in (("--gap", self.gap, GAPS), ("--course", self.course, COURSES)):
            if value not in allowed:
                raise BenchctlError(f"{name} is {value!r}", fix=f"one of {', '.join(allowed)}")
        if self.gap == "empirical" and self.gaps is None:
            raise BenchctlError(
                "this shape has no gaps of its own", where="--gap empirical", fix="poisson, gamma, weibull or constant"
            )
        for flag, number in (
            ("--rate", self.rate),
            ("--burstiness", self.shape),
            ("--period", self.period_s),
            ("--on", self.on_s),
        ):
            if not 0 < number < math.inf:
                raise BenchctlError(f"{flag} is {number}", fix="give a number above 0")
        if not 0 <= self.amplitude < 1:
            raise BenchctlError(f"--amplitude is {self.amplitude}", fix="a share from 0 up to, not including, 1")
        if not 0 <= self.rate_from < math.inf or not 0 <= self.off_s < math.inf:
            raise BenchctlError("--rate-from and --off must not be negative", fix="give 0 or more")

    def statement(self) -> str:
        """For the header."""
        shape = f" with shape {self.shape:g}" if self.gap in ("gamma", "weibull") else ""
        course = {
            "steady": f"{self.rate:g}/s",
            "ramp": f"from {self.rate_from:g} to {self.rate:g}/s over {self.period_s:g} s",
            "diurnal": f"{self.rate:g}/s x (1 + {self.amplitude:g} sin(2 pi t / {self.period_s:g} s))",
            "onoff": f"{self.rate:g}/s for {self.on_s:g} s, none for {self.off_s:g} s",
        }[self.course]
        return f"{self.gap} gaps{shape}, {course}"

    def times(self, rng: random.Random) -> Iterator[float]:
        """Seconds from 0, without end; the first is 0 where the rate begins steady."""
        work = 0.0  # the rate's integral up to now
        first = True
        while True:
            if not (first and self.course == "steady"):
                work += self._gap(rng)
            first = False
            yield self._when(work)

    def _gap(self, rng: random.Random) -> float:
        if self.gap == "gamma":
            return draw_gamma(rng, self.shape)
        if self.gap == "weibull":
            return draw_weibull(rng, self.shape)
        if self.gap == "constant":
            return 1.0
        if self.gap == "empirical":
            assert self.gaps is not None
            return self.gaps.draw(rng) / self.gaps.mean()
        return draw_exponential(rng, 1.0)

    def _when(self, work: float) -> float:
        """The time at which the rate's integral reaches `work`."""
        if self.course == "ramp":
            return self._when_ramp(work)
        if self.course == "diurnal":
            return self._when_diurnal(work)
        if self.course == "onoff":
            whole, rest = divmod(work, self.rate * self.on_s)
            return whole * (self.on_s + self.off_s) + rest / self.rate
        return work / self.rate

    def _when_ramp(self, work: float) -> float:
        climb = (self.rate - self.rate_from) / self.period_s
        done = (self.rate_from + self.rate) / 2 * self.period_s
        if work >= done:
            return self.period_s + (work - done) / self.rate
        if climb == 0:
            return work / self.rate
        # rate_from t + climb t^2 / 2 = work, in the form that does not cancel.
        return 2 * work / (self.rate_from + math.sqrt(self.rate_from**2 + 2 * climb * work))

    def _when_diurnal(self, work: float) -> float:
        swing = self.amplitude * self.period_s / (2 * math.pi)
        low, high = work / self.rate - 2 * swing, work / self.rate + 2 * swing
        for _ in range(60):  # the integral only rises: halving finds it to the last bit
            middle = (low + high) / 2
            if self.rate * (middle + swing * (1 - math.cos(2 * math.pi * middle / self.period_s))) < work:
                low = middle
            else:
                high = middle
        return max(high, 0.0)
