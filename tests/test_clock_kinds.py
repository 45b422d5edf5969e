"""Clocks: what time it is after each step of a round, and how idle time passes."""

from __future__ import annotations

import threading
import time

from benchctl.clock import NAP_S, Clock, RecordedClock, RoundClock, VirtualClock, WallClock
from engines.interface import StepResult


def step(duration_s: float | None, prepare_s: float = 0.0) -> StepResult:
    return StepResult(None, None, duration_s, "null", 1, prepare_s=prepare_s)


def one_round(clock: Clock, result: StepResult | None) -> tuple[int, list[float]]:
    """A round with 1 ms of scheduling, 50 ms of launch and collect, 2 ms of updating."""
    number = clock.round
    times = [clock.start_round(), clock.scheduled(1e-3), clock.executed(result, 50e-3), clock.end_round(2e-3)]
    return number, times


def test_virtual_clock_advances_by_the_engines_duration_alone_without_a_model() -> None:
    clock = VirtualClock(count_host=False)
    assert one_round(clock, step(0.25, prepare_s=0.1)) == (1, [0.0, 0.0, 0.25, 0.25])
    clock.idle(3.0)
    assert one_round(clock, step(0.5)) == (2, [3.0, 3.0, 3.5, 3.5])


def test_virtual_clock_counts_schedule_prepare_and_update_of_a_real_engine() -> None:
    clock = VirtualClock(count_host=True)
    number, times = one_round(clock, step(0.25, prepare_s=0.1))
    assert number == 1
    assert [round(t, 9) for t in times] == [0.0, 0.001, 0.351, 0.353]


def test_virtual_clock_takes_the_elapsed_time_where_the_engine_knows_no_duration() -> None:
    clock = VirtualClock(count_host=True)
    assert [round(t, 9) for t in one_round(clock, step(None, prepare_s=9.0))[1]] == [0.0, 0.001, 0.051, 0.053]


def test_virtual_clock_never_goes_back_while_idle() -> None:
    clock = VirtualClock(count_host=False)
    clock.idle(5.0)
    clock.idle(4.0)
    assert clock.now() == 5.0


def test_round_clock_ticks_once_a_round_and_while_idle() -> None:
    clock = RoundClock()
    assert one_round(clock, step(0.25)) == (1, [0.0, 0.0, 1.0, 1.0])
    clock.idle(4.0)  # somebody is due before round 5
    assert clock.round == 5
    assert one_round(clock, None) == (5, [4.0, 4.0, 5.0, 5.0])


def test_round_clock_counts_every_empty_round() -> None:
    clock = RoundClock()
    clock.stalled(10.0)
    assert clock.round == 1


def test_recorded_clock_repeats_the_times_of_an_earlier_run_and_goes_on_after_it() -> None:
    clock = RecordedClock({1: (0.5, 0.6, 0.9, 1.0)}, {1: 0.4, 7: 3.0})
    assert one_round(clock, step(0.25)) == (1, [0.5, 0.6, 0.9, 1.0])
    assert one_round(clock, step(0.25)) == (2, [1.0, 1.0, 1.25, 1.25])
    clock.idle(6.0)  # somebody was handed over before round 7, at 3 s
    assert one_round(clock, step(0.25)) == (7, [3.0, 3.0, 3.25, 3.25])


def test_wall_clock_sleeps_until_the_next_arrival_or_for_a_nap() -> None:
    clock = WallClock()
    clock.idle(0.05)
    assert 0.05 <= clock.now() < NAP_S
    clock.idle(clock.now() + 100)
    assert NAP_S <= clock.now() < 10


def test_wall_clock_wakes_up_when_the_run_is_to_stop() -> None:
    stop = threading.Event()
    clock = WallClock(stop)
    threading.Timer(0.05, stop.set).start()
    began = time.perf_counter()
    clock.idle(30.0)
    assert time.perf_counter() - began < 5.0


def test_wall_clock_numbers_rounds_from_one() -> None:
    clock = WallClock()
    assert one_round(clock, step(None))[0] == 1
    number, times = one_round(clock, step(None))
    assert number == 2 and times == sorted(times)
