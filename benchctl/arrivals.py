"""When each request of a trace is due: the trace's own times, times by rate, after its parents, or as in an earlier run.

Rows are taken from the trace lazily, one ahead of what is due. Must not know a policy or an engine. A source hands out
`Due` entries in the order in which the scheduler is to see them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

import numpy as np

from traces.errors import BenchctlError
from traces.request import Request


class Due(NamedTuple):
    """A request whose turn comes at `position` of the clock (seconds, or round - 1 on a clock of rounds)."""

    position: float
    arrival_s: float  # intended arrival on the run's clock
    request: Request
    tie_s: float  # the arrival time that breaks ties of priority
    admitted_s: float | None = None  # where an earlier run says when; None: when the loop hands it over


class Arrivals(Protocol):
    """A source of arrivals."""

    def next_position(self) -> float | None:
        """Where the next request is due; None: none has a known time now (or none is left)."""

    def pop(self) -> Due:
        """The next request. Only when `next_position()` is not None."""

    def ended(self, row: int, now_s: float) -> None:
        """The request of trace row `row` finished, or will never run: those that wait for it are timed from now on."""

    def num_left_behind(self) -> int:
        """Requests that can get no time any more, once nothing is running."""


class OpenArrivals:
    """Requests at times that do not depend on the run. `due` yields them in order; it is read one entry ahead.

    A fault of the entry ahead is raised when it is asked for: who stands above it is handed out.
    """

    def __init__(self, due: Iterable[Due]) -> None:
        self._due = iter(due)
        self._next = next(self._due, None)
        self._fault: BenchctlError | None = None

    def next_position(self) -> float | None:
        if self._fault is not None:
            raise self._fault
        return None if self._next is None else self._next.position

    def pop(self) -> Due:
        due = self._next
        assert due is not None, "pop() with nothing left"
        try:
            self._next = next(self._due, None)
        except BenchctlError as fault:
            self._next, self._fault = None, fault
        return due

    def ended(self, row: int, now_s: float) -> None:
        """Nobody waits for another."""

    def num_left_behind(self) -> int:
        return 0


class SessionArrivals:
    """First turns at their own times, every other request `think_s` after the last of its parents ended.

    Only (row, number of parents, think time) of a waiting child is held, not its request. `by_row` reads a row of the trace;
    `position_of` turns a time into a position of the clock.
    """

    def __init__(
        self,
        roots: Iterable[Due],
        children: Iterable[tuple[int, float, tuple[int, ...]]],
        by_row: Callable[[int], Request],
        position_of: Callable[[float], float],
    ) -> None:
        self._roots = OpenArrivals(roots)
        self._by_row, self._position_of = by_row, position_of
        self._open_parents: dict[int, int] = {}
        self._think_s: dict[int, float] = {}
        self._children: dict[int, list[int]] = {}
        self._timed: list[tuple[float, int, float]] = []  # heap of (position, row, arrival_s)
        for row, think_s, parents in children:
            self._open_parents[row], self._think_s[row] = len(parents), think_s
            for parent in parents:
                self._children.setdefault(parent, []).append(row)

    def next_position(self) -> float | None:
        root = self._roots.next_position()
        if self._timed and (root is None or self._timed[0][0] <= root):
            return self._timed[0][0]
        return root

    def pop(self) -> Due:
        root = self._roots.next_position()
        if self._timed and (root is None or self._timed[0][0] <= root):
            position, row, arrival_s = heapq.heappop(self._timed)
            return Due(position, arrival_s, self._by_row(row), arrival_s)
        return self._roots.pop()

    def ended(self, row: int, now_s: float) -> None:
        for child in self._children.pop(row, ()):
            self._open_parents[child] -= 1
            if self._open_parents[child] == 0:
                del self._open_parents[child]
                arrival_s = now_s + self._think_s.pop(child)
                heapq.heappush(self._timed, (self._position_of(arrival_s), child, arrival_s))

    def num_left_behind(self) -> int:
        return len(self._open_parents)


class CappedArrivals:
    """A closed loop: at most `max_concurrency` requests are in the scheduler; who is due meanwhile waits in the trace.

    The intended arrival stays what it was, so the wait outside counts as latency.
    """

    def __init__(self, source: Arrivals, max_concurrency: int) -> None:
        self._source, self.max_concurrency = source, max_concurrency
        self._inside: set[int] = set()
        self.rounds_capped = 0  # rounds before which a request was due and found no place
        self.first_capped_round: int | None = None

    def next_position(self) -> float | None:
        return self._source.next_position() if len(self._inside) < self.max_concurrency else None

    def note(self, position: float, round_number: int) -> None:
        """Called before each round: was somebody due kept outside?"""
        if len(self._inside) < self.max_concurrency:
            return
        due = self._source.next_position()
        if due is not None and due <= position:
            self.rounds_capped += 1
            if self.first_capped_round is None:
                self.first_capped_round = round_number

    def pop(self) -> Due:
        due = self._source.pop()
        self._inside.add(due.request.index)
        return due

    def ended(self, row: int, now_s: float) -> None:
        self._inside.discard(row)
        self._source.ended(row, now_s)

    def num_left_behind(self) -> int:
        """Only asked when nothing runs; then there is room, so nobody is left here."""
        return self._source.num_left_behind()


def rate_times(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Arrival times, seconds, of a renewal process with gamma gaps of mean 1/rate and shape `burstiness`; the first is at 0.

    `rate` inf: all at 0. They are not renormalised: the span of N arrivals varies with the seed.
    """
    if rate == float("inf"):
        while True:
            yield 0.0
    generator, now = np.random.default_rng(seed), 0.0
    while True:
        yield now
        now += float(generator.gamma(burstiness, 1.0 / (rate * burstiness)))


def round_of(request: Request, round_seconds: float, arrival_s: float | None = None) -> int:
    """The round before which a request is admitted under `--clock rounds`."""
    if request.arrival_round is not None and arrival_s is None:
        return request.arrival_round
    at = request.arrival_s if arrival_s is None else arrival_s
    if at is None:
        raise BenchctlError(
            f"request {request.id} has neither arrival_round nor arrival_s",
            where=f"line {request.line}",
            fix="give it one, or pass --request-rate",
        )
    return 1 + int(at // round_seconds)
