"""The checks: each found where it is true, absent where it is not, with its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.interface import NewRequest, SchedulerConfig
from reports.checks import Check, checks
from reports.checks_across import checks_across
from reports.run import Run, open_run
from tests.fake_run import record_golden, record_run, request_of
from tests.laws import assert_laws

CONFIG = SchedulerConfig(num_blocks=40, block_size=4, max_num_seqs=4, max_num_batched_tokens=32)


def run_of(
    path: Path,
    arrivals: list[tuple[int, NewRequest]],
    policy: str = "nano",
    config: SchedulerConfig = CONFIG,
    **manifest: Any,
) -> Run:
    return assert_laws(record_run(path, policy, config, arrivals, manifest=manifest))


def found(run: Run, what: str) -> Check | None:
    return next((check for check in checks(run) if what in check.what), None)


def steady(count: int, every: int = 4) -> list[tuple[int, NewRequest]]:
    return [(1 + i * every, request_of(i, f"r{i}", 8, 3)) for i in range(count)]


def test_a_quiet_run_has_only_the_note_that_its_times_are_ticks(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steady(100, 5))
    assert [check.what for check in checks(run)] == ["times are ticks, not measurements"]


def test_a_queue_that_grows_until_the_last_arrival(tmp_path: Path) -> None:
    growing = run_of(tmp_path / "growing", steady(90, 1))
    check = found(growing, "still growing")
    assert check is not None and check.level == "warn" and "waiting" in check.evidence
    assert found(run_of(tmp_path / "calm", steady(90, 5)), "still growing") is None


def test_arrivals_in_ticks(tmp_path: Path) -> None:
    ticking = [(1 + 3 * (i // 5), request_of(i, f"r{i}", 8, 1)) for i in range(40)]
    check = found(run_of(tmp_path / "ticks", ticking, clock="virtual"), "coarse grid")
    assert check is not None and check.evidence == "40 requests arrive at 8 moments, all multiples of 3 s"
    assert found(run_of(tmp_path / "rounds", ticking), "coarse grid") is None
    assert found(run_of(tmp_path / "single", steady(40), clock="virtual"), "coarse grid") is None


def test_the_concurrency_cap(tmp_path: Path) -> None:
    burst = [(1, request_of(i, f"r{i}", 8, 3)) for i in range(4)]
    reached = found(run_of(tmp_path / "a", burst, config=CONFIG, max_concurrency=4), "cap was reached")
    assert reached is not None and reached.evidence == "--max-concurrency 4, peak 4"
    assert found(run_of(tmp_path / "b", burst, max_concurrency=5), "load loop is closed") is not None
    assert found(run_of(tmp_path / "c", burst), "cap") is None


def test_too_few_samples_for_a_percentile(tmp_path: Path) -> None:
    check = found(run_of(tmp_path / "few", steady(12)), "too few samples")
    assert check is not None and (check.what, check.evidence) == (
        "too few samples for p95, p99 of request metrics",
        "12 finished requests; p95 needs 20",
    )


def test_the_recorders_share_counts_on_the_wall_clock_only(tmp_path: Path) -> None:
    # The writer of these tests says 1 µs a round; rounds of 10 µs make that a tenth of the run.
    options: dict[str, Any] = {"duration_of": lambda _: 1e-5}
    wall = open_run(record_golden(tmp_path / "wall", "nano", "article_rounds", manifest={"clock": "wall"}, **options))
    check = found(wall, "recording took")
    assert check is not None and check.evidence == "10.0% of the wall time, limit 3%"
    slow = open_run(record_golden(tmp_path / "slow", "nano", "article_rounds", manifest={"clock": "wall"}))
    assert found(slow, "recording took") is None
    assert (
        found(open_run(record_golden(tmp_path / "ticks", "nano", "article_rounds", **options)), "recording took")
        is None
    )


def test_refused_requests_with_the_numbers_that_refused_them(tmp_path: Path) -> None:
    arrivals = [(1, request_of(0, "ok", 8, 3)), (1, request_of(1, "huge", 400, 3))]
    check = found(run_of(tmp_path / "run", arrivals), "refused")
    assert check is not None
    assert check.evidence == "1 × exceeds_pool of 2 requests; first: huge needs 101 blocks, 40 at most"


def test_ghost_hits(tmp_path: Path) -> None:
    check = found(open_run(record_golden(tmp_path / "ghost", "vllm", "priority_ghost_hit")), "never computed")
    assert check is not None and check.evidence.startswith(
        "1 prefix hit on ghost blocks, first in round 8: R1 hits block"
    )
    assert found(open_run(record_golden(tmp_path / "clean", "vllm", "priority_preempt")), "never computed") is None


@pytest.mark.parametrize(
    ("status", "level", "what"),
    [
        ("running", "warn", "still going on, or was killed"),
        ("interrupted", "warn", "was interrupted"),
        ("failed", "error", "the run failed"),
    ],
)
def test_a_run_that_did_not_complete(tmp_path: Path, status: str, level: str, what: str) -> None:
    run = open_run(
        record_golden(
            tmp_path / status, "nano", "article_rounds", manifest={"status": status, "error": "the pool leaks"}
        )
    )
    first = checks(run)[0]
    assert first.level == level and what in first.what
    assert ("the pool leaks" in first.evidence) == (status == "failed")


def test_constants_of_the_null_engine_are_no_measurements(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steady(3), clock="virtual", round_cost="0.005,2e-05,2e-09")
    check = found(run, "constants, not measured")
    assert check is not None and "--round-cost 0.005,2e-05,2e-09" in check.evidence
    assert found(run_of(tmp_path / "torch", steady(3), engine="torch", clock="wall"), "not measured") is None


def test_outputs_cut_at_the_model_length(tmp_path: Path) -> None:
    run = open_run(record_golden(tmp_path / "vllm", "vllm", "mml_truncates"))
    capped = (run.read("requests")["reason"] == "length_capped").sum()
    check = found(run, "cut at max_model_len")
    assert capped and check is not None and check.evidence == f"{capped} requests finished as length_capped"


def test_runs_that_cannot_be_laid_side_by_side(tmp_path: Path) -> None:
    one = run_of(tmp_path / "one", steady(3))
    same = run_of(tmp_path / "same", steady(3), policy="vllm", config=SchedulerConfig(41, 4, 4, 32))
    assert checks_across([one, same]) == [] == checks_across([one])
    wide = SchedulerConfig(num_blocks=60, block_size=4, max_num_seqs=4, max_num_batched_tokens=32)
    other = run_of(tmp_path / "other", steady(3), config=wide, trace={"name": "b"}, clock="virtual")
    levels = {check.what: check for check in checks_across([one, other])}
    assert set(levels) == {"the runs replayed different traces", "the KV pools are unequal", "the runs differ in clock"}
    assert "one 160 (40 blocks of 4), other 240 (60 blocks of 4)" in levels["the KV pools are unequal"].evidence
    alike = run_of(tmp_path / "x" / "one", steady(3), config=wide, trace={"name": "a"})  # of one name: told apart
    told = {check.what: check.evidence for check in checks_across([one, alike])}
    assert told["the KV pools are unequal"].endswith("0/one 160 (40 blocks of 4), x/one 240 (60 blocks of 4)")


def test_a_check_needs_no_numpy_scalars_in_json(tmp_path: Path) -> None:
    for check in checks(run_of(tmp_path / "run", steady(90, 1))):
        assert all(type(value) is str for value in check.as_dict().values()) and not isinstance(
            check.evidence, np.generic
        )


def test_a_saturated_system(tmp_path: Path) -> None:
    crowded = run_of(tmp_path / "crowded", [(1 + i // 3, request_of(i, f"r{i}", 8, 3)) for i in range(300)])
    check = found(crowded, "saturated")
    assert (
        check is not None
        and check.level == "warn"
        and "rounds between the first and the last arrival" in check.evidence
    )
    assert "admission stopped most often for max_num_seqs" in check.evidence or "blocks" in check.evidence
    assert found(run_of(tmp_path / "calm", steady(90, 5)), "saturated") is None


def test_rounds_that_ran_cold(tmp_path: Path) -> None:
    arrivals = [(1 + 8 * i, request_of(i, f"r{i}", 8, 3)) for i in range(12)]

    def run(name: str, first: float, **manifest: Any) -> Run:
        spent = iter([first])
        return open_run(
            record_run(
                tmp_path / name,
                "nano",
                CONFIG,
                arrivals,
                duration_of=lambda _: next(spent, 0.01),
                manifest={"clock": "wall"} | manifest,
            )
        )

    check = found(run("cold", 0.5, engine="torch"), "ran cold")
    # The first round, a prefill of 8 tokens, takes 500 ms where the other prefills of 8 take 10.
    assert check is not None and check.evidence == (
        "1 shape took 4 times their median or more at their first use, 490.0 ms lost in all; worst: prefill of 8 tokens, 500.0 ms against 10.0"
    )
    assert found(run("warm", 0.01, engine="torch"), "ran cold") is None
    assert found(run("null", 0.5, engine="null"), "ran cold") is None
