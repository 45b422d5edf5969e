"""A virtual clock on which a round is scheduled while the one before it still runs, as on a card.

It must not know an engine: `pop_cost` gives what the last launch costs. Host work (schedule, prepare, update, record) is
done one round after another, device work too, and the two run side by side:

    launched = scheduled at + host launch time        begins = max(launched, end of the round before)
    end = begins + device time                        seen   = max(end, host time)

So a round that the host prepares longer than the device works leaves the device idle, as it does on a card.
"""

from __future__ import annotations

from collections.abc import Callable
from math import nan

from benchctl.clock import Plan
from engines.interface import StepResult
from engines.simulated.engine import LaunchCost
from engines.steady_batch import Costs


class OverlappedClock:
    """Virtual time for overlapped rounds; jumps over idle time."""

    name = "virtual"
    overlaps = True

    def __init__(self, pop_cost: Callable[[], LaunchCost | None], arrive_s: float = 0.0) -> None:
        self.round = 1
        self._pop_cost = pop_cost
        self._arrive_s = arrive_s  # a sleeping loop's way from an arrival to the start of a round
        self._now = 0.0  # of the host
        self._slept = False
        self._device_free = 0.0  # when the device has done everything launched so far
        self._ends: dict[int, float] = {}  # round -> when the device ends it; those not landed

    def now(self) -> float:
        return self._now

    position = now

    def idle(self, until: float) -> None:
        if until > self._now:
            self._now = until + self._arrive_s
            self._slept = True

    stalled = idle

    def start_round(self) -> float:
        return self._now

    def scheduled(self, schedule_s: float) -> float:
        return self._now

    def launched(self) -> None:
        cost = self._pop_cost()
        if cost is None:  # an empty round: nothing for the device
            self._ends[self.round] = self._now
        else:
            launched = self._now + cost.launch_s
            begins = max(self._device_free + cost.gap_s, launched)
            if self._slept:  # a device left idle for a moment, between two rounds, need not be woken
                begins += cost.wake_s
                self._slept = False
            self._device_free = self._ends[self.round] = begins + cost.device_s
            self._now = launched + cost.after_s
        self.round += 1

    strides = True

    def plan(self, costs: Costs, due: float | None, before: int | None) -> Plan:
        """As `launched` and `landed` of each round in turn."""
        assert costs.device_s is not None, costs.mode
        now, free, slept = self._now, self._device_free, self._slept
        previous = None if before is None else self._ends[before]
        plan = Plan([], [])
        for device_s in costs.device_s:
            if due is not None and due <= now and plan.t_start_s:
                break
            plan.t_start_s.append(now)
            launched = now + costs.launch_s
            begins = max(free + costs.gap_s, launched)
            if slept:
                begins += costs.wake_s
                slept = False
            free = end = begins + device_s
            now = launched + costs.after_s
            if previous is not None:
                now = max(now, previous)
            plan.landed_s.append(now if previous is not None else nan)
            plan.states.append((now, free, end))
            previous = end
        return plan

    def take(self, plan: Plan, num_rounds: int) -> None:
        self._now, self._device_free, end = plan.states[num_rounds - 1]
        self._slept = False
        self.round += num_rounds
        self._ends = {self.round - 1: end}

    def landed(self, number: int) -> tuple[float, float]:
        self._now = max(self._now, self._ends.pop(number))
        return self._now, self._now

    def executed(self, result: StepResult | None, elapsed_s: float) -> float:
        raise AssertionError("rounds overlap: landed() stands for executed()")

    def end_round(self, update_s: float) -> float:
        raise AssertionError("rounds overlap: landed() stands for end_round()")
