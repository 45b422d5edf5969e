"""The clocks a replay can run on: what time it is, and how far a round moves it.

A clock must not know a policy, an engine or a queue. It has a `position`, in which arrivals are due: seconds for `wall` and
`virtual`, ticks for `rounds` and `recorded` (the number of the next round less one). Host times are handed in by the loop.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from engines.interface import StepResult
from engines.steady_batch import Costs

NAP_S = 1.0  # the longest sleep of a wall clock
RoundTimes = tuple[float, float, float, float]  # t_start_s, t_scheduled_s, t_executed_s, t_end_s


class Clock(Protocol):
    """Time of a run. `round` is the number of the round that comes next, or is under way."""

    name: str
    round: int
    overlaps: bool  # a round may begin before the one before it has ended: `launched` and `landed` stand for its end

    def now(self) -> float:
        """Seconds since the run began."""

    def position(self) -> float:
        """Where the clock stands, in the unit in which arrivals are due."""

    def idle(self, until: float) -> None:
        """Nothing to run before position `until`: go there. May come back early, when the run is to stop."""

    def stalled(self, until: float) -> None:
        """A round scheduled nothing and nothing changes before position `until`."""

    def start_round(self) -> float:
        """Time at which schedule() begins."""

    def scheduled(self, schedule_s: float) -> float:
        """Time after schedule(), which took `schedule_s` of host time."""

    def executed(self, result: StepResult | None, elapsed_s: float) -> float:
        """Time after the forward pass, which took `elapsed_s` of host time; None: there was nothing to execute."""

    def end_round(self, update_s: float) -> float:
        """Time after update(): when the round's tokens are out. The next round's number is one higher."""

    def launched(self) -> None:
        """Overlapping: the round is under way and the next one may be scheduled; its number is one higher."""

    def landed(self, number: int) -> tuple[float, float]:
        """Overlapping: (end of the forward pass, when its tokens are out) of round `number`, just collected."""


@dataclass(slots=True)
class Plan:
    """When the rounds of a stretch take place, as far as they begin before somebody is due. Lists are [rounds].

    `landed_s`: where rounds overlap, when the round before each was seen to end (nan: there was none); the last round's end is
    then not known yet. `t_end_s` where they don't. `states`: the clock's own, after each round.
    """

    t_start_s: list[float]
    t_end_s: list[float]
    landed_s: list[float] = field(default_factory=list)
    states: list[tuple[float, float, float]] = field(default_factory=list)


class StridingClock(Protocol):
    """A clock that knows beforehand when rounds of known costs will take place."""

    def plan(self, costs: Costs, due: float | None, before: int | None) -> Plan:
        """Of `costs` as many rounds as begin before position `due`, one at least. Changes nothing.

        `before`: the number of a round that has not landed yet.
        """

    def take(self, plan: Plan, num_rounds: int) -> None:
        """So many of the planned rounds were run."""


class WallClock:
    """Real time. Idle time is slept; setting `stop` wakes it."""

    name = "wall"
    overlaps = True

    def __init__(self, stop: threading.Event | None = None) -> None:
        self.round = 1
        self._stop = stop or threading.Event()
        self._zero = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._zero

    position = now

    def idle(self, until: float) -> None:
        # In short naps: the loop comes back to write out what was recorded, and asks again who is due.
        if (left := until - self.now()) > 0:
            self._stop.wait(min(left, NAP_S))

    stalled = idle

    def start_round(self) -> float:
        return self.now()

    def scheduled(self, schedule_s: float) -> float:
        return self.now()

    def executed(self, result: StepResult | None, elapsed_s: float) -> float:
        return self.now()

    def end_round(self, update_s: float) -> float:
        self.round += 1
        return self.now()

    def launched(self) -> None:
        self.round += 1

    def landed(self, number: int) -> tuple[float, float]:
        now = self.now()
        return now, now


class NeverOverlaps:
    """For clocks that a round's duration moves: the next round cannot be scheduled before it is known."""

    overlaps = False

    def launched(self) -> None:
        raise AssertionError(f"{type(self).__name__} does not overlap rounds")

    def landed(self, number: int) -> tuple[float, float]:
        raise AssertionError(f"{type(self).__name__} does not overlap rounds")


class VirtualClock(NeverOverlaps):
    """Jumps over idle time; a round takes what the engine says it took.

    With `count_host` (an engine that really computes) the host time of scheduling, preparing and updating counts too.
    Recording never does. Where an engine states no duration, the elapsed time of launch and collect is its duration.
    """

    name = "virtual"

    def __init__(self, *, count_host: bool) -> None:
        self.round = 1
        self._now = 0.0
        self._count_host = count_host

    def now(self) -> float:
        return self._now

    position = now

    def idle(self, until: float) -> None:
        self._now = max(self._now, until)

    stalled = idle

    def start_round(self) -> float:
        return self._now

    def scheduled(self, schedule_s: float) -> float:
        return self._host(schedule_s)

    def executed(self, result: StepResult | None, elapsed_s: float) -> float:
        if result is not None and result.duration_s is None:
            self._now += elapsed_s
        elif result is not None and result.duration_s is not None:
            self._host(result.prepare_s)
            self._now += result.duration_s
        return self._now

    def end_round(self, update_s: float) -> float:
        self.round += 1
        return self._host(update_s)

    @property
    def strides(self) -> bool:
        return not self._count_host

    def plan(self, costs: Costs, due: float | None, before: int | None) -> Plan:
        now, starts, ends = self._now, list[float](), list[float]()
        for duration_s in costs.duration_s:
            if due is not None and due <= now and starts:
                break
            starts.append(now)
            now += duration_s
            ends.append(now)
        return Plan(starts, ends)

    def take(self, plan: Plan, num_rounds: int) -> None:
        self._now = plan.t_end_s[num_rounds - 1]
        self.round += num_rounds

    def _host(self, seconds: float) -> float:
        if self._count_host:
            self._now += seconds
        return self._now


class RoundClock:
    """One tick a round, ticks go on while idle, a tick counts as one second: round n lasts from n - 1 to n."""

    name = "rounds"
    overlaps = True

    def __init__(self) -> None:
        self.round = 1

    def now(self) -> float:
        return float(self.round - 1)

    position = now

    def idle(self, until: float) -> None:
        self.round = max(self.round, int(until) + 1)

    def stalled(self, until: float) -> None:
        """Empty rounds are rounds: each is counted and recorded."""

    def start_round(self) -> float:
        return self.now()

    def scheduled(self, schedule_s: float) -> float:
        return self.now()

    def executed(self, result: StepResult | None, elapsed_s: float) -> float:
        return float(self.round)

    def end_round(self, update_s: float) -> float:
        self.round += 1
        return self.now()

    def launched(self) -> None:
        self.round += 1

    def landed(self, number: int) -> tuple[float, float]:
        return float(number), float(number)

    strides = True

    def plan(self, costs: Costs, due: float | None, before: int | None) -> Plan:
        first, rounds = self.round, len(costs.duration_s)
        if due is not None:
            rounds = max(1, min(rounds, math.ceil(due) - (first - 1)))
        return Plan(
            [float(r - 1) for r in range(first, first + rounds)], [float(r) for r in range(first, first + rounds)]
        )

    def take(self, plan: Plan, num_rounds: int) -> None:
        self.round += num_rounds


class RecordedClock(NeverOverlaps):
    """Rounds are numbered as in an earlier run, and take place at its times.

    `times` maps a round's number to its four times there, `admitted_s` to the latest time at which somebody was handed over
    before it. A round that the earlier run did not have (under another policy or pool) follows the last one and takes the
    engine's duration. Time never goes back.
    """

    name = "recorded"

    def __init__(self, times: Mapping[int, RoundTimes], admitted_s: Mapping[int, float]) -> None:
        self.round = 1
        self._times, self._admitted_s = times, admitted_s
        self._now = admitted_s.get(1, 0.0)

    def now(self) -> float:
        return self._now

    def position(self) -> float:
        return float(self.round - 1)

    def idle(self, until: float) -> None:
        self._enter(max(self.round, int(until) + 1))

    def stalled(self, until: float) -> None:
        """Empty rounds are rounds."""

    def start_round(self) -> float:
        return self._to(0)

    def scheduled(self, schedule_s: float) -> float:
        return self._to(1)

    def executed(self, result: StepResult | None, elapsed_s: float) -> float:
        if self.round not in self._times and result is not None:
            self._now += elapsed_s if result.duration_s is None else result.duration_s
        return self._to(2)

    def end_round(self, update_s: float) -> float:
        now = self._to(3)
        self._enter(self.round + 1)
        return now

    def _enter(self, number: int) -> None:
        self.round = number
        self._now = max(self._now, self._admitted_s.get(number, 0.0))

    def _to(self, which: int) -> float:
        times = self._times.get(self.round)
        if times is not None:
            self._now = max(self._now, times[which])
        return self._now
