"""Intervals checked against a hand integration, known distributions and what they must say of no difference."""

from __future__ import annotations

import math

import numpy as np
import pytest

from reports.compare_stats import (
    MIN_REQUESTS,
    T95,
    Samples,
    bootstrap_differences,
    paired_interval,
    t95,
    welch_interval,
)


def tail_beyond(point: float, degrees: int) -> float:
    """Two-sided tail of Student's t, by integrating its density."""
    x = np.linspace(-point, point, 200_001)
    density = (1 + x**2 / degrees) ** (-(degrees + 1) / 2)
    constant = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
    return 1 - constant * float(np.trapezoid(density, x))


@pytest.mark.parametrize("degrees", range(1, len(T95) + 1))
def test_the_table_of_student_s_t_leaves_five_percent(degrees: int) -> None:
    assert tail_beyond(T95[degrees - 1], degrees) == pytest.approx(0.05, abs=3e-4)


@pytest.mark.parametrize("degrees", [31, 40, 100, 1000])
def test_beyond_the_table_the_expansion_holds(degrees: int) -> None:
    assert tail_beyond(t95(degrees), degrees) == pytest.approx(0.05, abs=1e-4)


def test_one_pair_has_no_bound() -> None:
    assert t95(0) == math.inf


def test_the_paired_interval_by_hand() -> None:
    # Differences 1, 2, 3: mean 2, standard deviation 1, half-width 4.303 / sqrt(3).
    interval = paired_interval([10, 10, 10], [11, 12, 13])
    assert interval.n == 3
    assert interval.low == pytest.approx(2 - 4.303 / math.sqrt(3))
    assert interval.high == pytest.approx(2 + 4.303 / math.sqrt(3))


def test_pairing_takes_out_what_both_share() -> None:
    drift = [0.0, 50.0, 100.0, 150.0]
    a, b = [100 + d for d in drift], [101 + d + 0.1 * i for i, d in enumerate(drift)]
    assert paired_interval(a, b).low > 0
    assert welch_interval(a, b).low < 0 < welch_interval(a, b).high


def test_welch_of_two_constants_is_a_point() -> None:
    interval = welch_interval([1.0, 1.0], [3.0, 3.0, 3.0])
    assert (interval.low, interval.high, interval.n) == (2.0, 2.0, 2)


def samples(values: np.ndarray) -> Samples:
    return Samples(np.asarray(values, dtype=np.float64), np.arange(len(values), dtype=np.int64))


def test_a_shift_of_every_request_is_found_exactly() -> None:
    values = np.random.default_rng(1).lognormal(size=100)
    found = bootstrap_differences(samples(values), samples(values + 0.5), 100, (50, 95))
    for name in ("mean", "p50", "p95"):
        assert found[name].low == pytest.approx(0.5) and found[name].high == pytest.approx(0.5)


def test_noise_alone_gives_an_interval_around_zero() -> None:
    generator = np.random.default_rng(2)
    values = generator.lognormal(size=200)
    found = bootstrap_differences(samples(values), samples(values + generator.normal(0, 0.3, 200)), 200, (50,))
    assert found["mean"].low < 0 < found["mean"].high


def test_pairs_and_not_sides_are_drawn() -> None:
    """A difference far below the spread of the requests is seen because both sides draw the same requests."""
    generator = np.random.default_rng(3)
    values = generator.lognormal(sigma=2, size=200)
    found = bootstrap_differences(samples(values), samples(values + generator.normal(0.05, 0.02, 200)), 200, ())
    assert 0 < found["mean"].low < found["mean"].high < 0.1


def test_neighbours_that_move_together_widen_the_interval() -> None:
    """Blocks of neighbouring requests: a difference that comes in runs is known less well than one that comes singly."""
    n = 216
    runs = np.repeat(np.random.default_rng(4).normal(size=n // 12), 12)
    shuffled = np.random.default_rng(5).permutation(runs)
    base = samples(np.zeros(n))
    width = {
        name: (lambda i: i.high - i.low)(bootstrap_differences(base, samples(values), n, ())["mean"])
        for name, values in (("runs", runs), ("shuffled", shuffled))
    }
    assert width["runs"] > 1.5 * width["shuffled"]


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    covered = 0
    for trial in range(60):
        generator = np.random.default_rng(100 + trial)
        difference = generator.normal(1.0, 1.0, 120)
        found = bootstrap_differences(samples(np.zeros(120)), samples(difference), 120, (), seed=trial)["mean"]
        covered += found.low <= 1.0 <= found.high
    assert 50 <= covered <= 60


def test_too_few_requests_have_no_interval() -> None:
    few = samples(np.arange(MIN_REQUESTS - 1, dtype=np.float64))
    assert bootstrap_differences(few, few, MIN_REQUESTS - 1, (50,)) == {}


def test_gaps_are_drawn_with_their_request() -> None:
    """Several samples of one request come together: with one request holding all the slow gaps, p99 is uncertain."""
    owner = np.repeat(np.arange(40, dtype=np.int64), 10)
    values = np.where(owner == 7, 9.0, 1.0)
    found = bootstrap_differences(Samples(np.ones(400), owner), Samples(values, owner), 40, (95,))["p95"]
    assert found.low == 0.0 and found.high == 8.0


def test_equal_inputs_give_equal_intervals_every_time() -> None:
    values = np.random.default_rng(6).lognormal(size=50)
    first = bootstrap_differences(samples(values), samples(values[::-1].copy()), 50, (50, 90))
    assert first == bootstrap_differences(samples(values), samples(values[::-1].copy()), 50, (50, 90))
