"""Many rounds at once: where the next rounds differ by block edges alone, and what each costs is known beforehand.

The policy says whether that is so (`upcoming`) and runs the rounds (`advance`); the engine says what they cost; the clock says
which of them begin before the next request is due. The loop goes on exactly as if it had gone through them one by one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

from benchctl.arrivals import Arrivals, CappedArrivals, OpenArrivals
from benchctl.clock import Clock, Plan
from benchctl.recorder import StretchTimes
from engines.interface import Engine, Scheduler
from engines.steady_batch import Costs, SteadyBatch, Stretch

FIRST_GUESS = 4  # rounds, before any stretch has said how long a round takes


class Policy(Protocol):
    """The part of a policy that offers stretches."""

    def upcoming(self) -> tuple[SteadyBatch, int] | None: ...

    def advance(self, max_rounds: int) -> Stretch | None: ...


class CostingEngine(Protocol):
    """An engine whose rounds take what a formula says."""

    def costs(self, batch: SteadyBatch, num_rounds: int) -> Costs: ...

    def took(self, batch: SteadyBatch, num_rounds: int) -> None: ...


@dataclass(slots=True)
class StretchFlight:
    """A stretch that was run; where rounds overlap its last round has not landed yet."""

    first: int
    stretch: Stretch
    costs: Costs
    plan: Plan
    host_s: float

    @property
    def number(self) -> int:
        """Of its last round."""
        return self.first + self.stretch.num_rounds - 1

    @property
    def finished(self) -> list[tuple[int, str]]:
        return self.stretch.finished

    @property
    def under_way(self) -> bool:
        return bool(self.plan.landed_s)

    def times(self, clock: Clock, landed_s: float | None) -> StretchTimes:
        """Once its last round may land, or was seen to end at `landed_s`."""
        rounds, plan = self.stretch.num_rounds, self.plan
        if self.under_way:
            ends = [*plan.landed_s[1:rounds], clock.landed(self.number)[1] if landed_s is None else landed_s]
        else:
            ends = plan.t_end_s[:rounds]
        return StretchTimes(plan.t_start_s[:rounds], ends, ends)


class Strider:
    """Owned by one replay."""

    def __init__(self, policy: Policy, engine: CostingEngine, clock: Any, arrivals: Arrivals, most: int) -> None:
        self._policy, self._engine, self._clock, self._arrivals = policy, engine, clock, arrivals
        self._most = most
        self._round_s = 0.0  # how long a round took lately, in units of the clock; 0: not known

    def run(self, due: float | None, before: int | None, before_ended: bool) -> StretchFlight | None:
        """The next rounds up to the one that would see the request due at `due`; None: they have to be gone through singly.

        `before`: the number of a round that has not landed yet; `before_ended`: somebody ended in it.
        """
        if before_ended and not isinstance(self._arrivals, OpenArrivals):
            return None  # its landing may let others arrive
        begun = time.perf_counter()
        found = self._policy.upcoming()
        if found is None:
            return None
        batch, most = found
        clock = self._clock
        most = min(most, self._most)
        if due is not None:
            most = min(most, FIRST_GUESS if not self._round_s else int((due - clock.position()) / self._round_s) + 2)
        costs = self._engine.costs(batch, max(most, 1))
        plan = clock.plan(costs, due, before)
        stretch = self._policy.advance(len(plan.t_start_s))
        if stretch is None:
            return None
        first, rounds = clock.round, stretch.num_rounds
        self._engine.took(batch, rounds)
        if isinstance(self._arrivals, CappedArrivals):
            for number in range(1, rounds):
                self._arrivals.note(plan.t_start_s[number], first + number)
        began_at = plan.t_start_s[0]
        clock.take(plan, rounds)
        self._round_s = (clock.position() - began_at) / rounds
        return StretchFlight(first, stretch, costs, plan, time.perf_counter() - begun)


def make_strider(
    scheduler: Scheduler, engine: Engine, clock: Clock, arrivals: Arrivals, recorder: Any, observer: Any
) -> Strider | None:
    """None where one of them has to see every round, or cannot tell beforehand."""
    most = getattr(recorder, "rounds_at_once", 0)
    if not most or not getattr(clock, "strides", False) or not hasattr(engine, "costs"):
        return None
    if observer is not None and not getattr(observer, "takes_stretches", False):
        return None
    if not offers_stretches(scheduler):
        return None
    policy: Any = scheduler
    costing: Any = engine
    return Strider(policy, costing, clock, arrivals, most)


def offers_stretches(scheduler: Scheduler) -> bool:
    """Whether `advance` is of the very class that says what a round is: a subclass may have changed that."""
    kind = type(scheduler)
    owner = next((base for base in kind.__mro__ if "advance" in vars(base)), None)
    if owner is None:
        return False
    changed = kind.__mro__[: kind.__mro__.index(owner)]
    return not any(
        callable(value) and name != "__init__" and hasattr(owner, name)
        for base in changed
        for name, value in vars(base).items()
    )
