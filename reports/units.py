"""In what times are said: milliseconds and seconds, or rounds where every run's clock counts rounds (`--clock rounds`).

Recorded times are seconds throughout, and a round of that clock counts as one; as milliseconds they would pretend a measurement.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from reports.numbers import number


@dataclass(frozen=True, slots=True)
class Unit:
    """`latency`: what a latency is counted in; `per_ms`: so many of them are a millisecond. `span`: of durations."""

    latency: str
    per_ms: float
    span: str
    per_second: str  # of rates: requests/s, requests/round

    def figure(self, ms: float | None) -> str:
        """A latency without its unit."""
        return number(self.of_ms(ms))

    def said(self, ms: float) -> str:
        """A latency with its unit: `19.7 ms`, `1 round`, `12.5 rounds`."""
        return counted(self.figure(ms), self.latency)

    def duration(self, seconds: float) -> str:
        return counted(number(whole(seconds) if self.ticks else seconds), self.span)

    def of_ms(self, ms: float | None) -> float | int | None:
        if ms is None or not self.ticks:
            return ms
        return whole(ms * self.per_ms)

    @property
    def ticks(self) -> bool:
        return self.latency == "rounds"


MEASURED = Unit("ms", 1.0, "s", "s")
ROUNDS = Unit("rounds", 1e-3, "rounds", "round")


def unit_of(clocks: Iterable[str | None]) -> Unit:
    """Rounds where all runs' clocks count them."""
    known = list(clocks)
    return ROUNDS if known and all(clock == "rounds" for clock in known) else MEASURED


def counted(figure: str, unit: str) -> str:
    return f"{figure} {unit.removesuffix('s') if figure == '1' and unit == 'rounds' else unit}"


def whole(value: float) -> float | int:
    """A whole number as one, so that it is printed without decimals."""
    return round(value) if abs(value - round(value)) < 1e-6 else value
