"""Where rounds overlap, no moment is charged twice: to rounds, to requests, to phases."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import polars as pl
import pytest

from engines.interface import SchedulerConfig
from reports import metrics
from reports.checks import checks
from reports.decision_work import STANDING, step_table, wait_table
from reports.own_time import charged, own_start, own_time
from reports.perfetto import events
from reports.phases import phases
from reports.run import Run, open_run
from reports.spikes import spikes
from tests.command_line import call, rows, write_trace
from tests.fake_run import record_run, request_of

Capture = pytest.CaptureFixture[str]
NANOSECOND = 1e-9


@pytest.fixture
def overlapped(capfd: Capture, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Sixty requests on a modelled H200 whose rounds overlap, in a pool so small that both policies preempt.

    Recorded once, a copy for each test.
    """
    once = tmp_path_factory.getbasetemp() / "own-time-once"
    if not once.exists():
        once.mkdir()
        trace = write_trace(once / "t.jsonl", rows(*((0.004 * i, 150 + 7 * i % 300, 60 + i % 50) for i in range(60))))
        answer = call(
            capfd, "replay", trace, "--scheduler", "nano", "--scheduler", "vllm", "--engine", "simulated", "--profile", "h200-qwen3-0.6b",
            "--num-blocks", 257, "--block-size", 16, "--max-num-batched-tokens", 512, "--no-report", "--out", once / "runs",
        )  # fmt: skip
        assert answer.code == 0, answer.err
    shutil.copytree(once / "runs", tmp_path / "runs")
    runs = {policy: open_run(tmp_path / "runs" / policy) for policy in ("nano", "vllm")}
    for run in runs.values():
        assert run.manifest["overlapped"]
        began_early = run.read("rounds").filter(pl.col("t_start_s") < pl.col("t_end_s").shift(1))
        assert began_early.height > 100, "rounds overlap"
        assert run.read("requests")["preemptions"].sum() > 0
    return runs


def test_own_times_by_hand() -> None:
    """Rounds 2 and 3 start before the one before them ends; round 4 after an idle second."""
    frame = pl.DataFrame({"round": [1, 2, 3, 4], "t_start_s": [0.0, 1.0, 3.0, 8.0], "t_end_s": [2.0, 5.0, 7.0, 9.0]})
    told = frame.with_columns(own_start().alias("start"), own_time().alias("own"))
    assert told["start"].to_list() == [0.0, 2.0, 5.0, 8.0]
    assert told["own"].to_list() == [2.0, 3.0, 2.0, 1.0]


def test_no_request_stands_still_for_longer_than_it_lives(overlapped: dict[str, Run]) -> None:
    for run in overlapped.values():
        frame = metrics.per_request(run).collect()
        assert frame.height == 60
        parts = frame.select(total=pl.col("queue") + pl.col("prefill") + pl.col("decode"))["total"]
        assert (parts - frame["e2el"]).abs().max() < NANOSECOND  # type: ignore[operator]
        inside = frame.select(
            left=pl.col("prefill") + pl.col("decode") - pl.col("stalled") - pl.col("preempted"), early=pl.min_horizontal("stalled", "preempted")
        )  # fmt: skip
        assert inside["left"].min() > -NANOSECOND  # type: ignore[operator]
        assert inside["early"].min() >= 0  # type: ignore[operator]
    paid = {policy: metrics.per_request(run).collect()["stalled"].sum() for policy, run in overlapped.items()}
    assert paid["nano"] > 0.1, "nano makes running requests wait, so the bound says something"


def test_a_life_is_its_own_rounds_and_those_that_passed_it_by(overlapped: dict[str, Run]) -> None:
    """From its first round's own time to its last token: no moment is left out, and none counts twice."""
    for run in overlapped.values():
        rounds = run.read("rounds").sort("round").with_columns(own_time().alias("own_s"), own_start().alias("from_s"))
        idle = float((rounds["from_s"] - rounds["t_end_s"].shift(1)).sum())
        computed = (
            run.scan("batches").join(rounds.lazy(), on="round").group_by("request")
            .agg(pl.col("own_s").sum(), pl.col("from_s").min()).collect()
        )  # fmt: skip
        both = run.read("requests").filter(pl.col("preemptions") == 0).join(computed, on="request")
        left = both["finished_s"] - both["from_s"] - both["own_s"] - both["stalled_s"]
        assert both.height > 10 and left.min() > -NANOSECOND and left.max() < idle + NANOSECOND  # type: ignore[operator]


def test_the_recorder_and_the_tables_agree(overlapped: dict[str, Run]) -> None:
    for run in overlapped.values():
        told = run.read("requests").sort("request")
        again = charged(told, *(run.scan(table) for table in ("rounds", "batches", "decisions")))
        for column in ("stalled_s", "preempted_s"):
            assert (told[column] - again[column]).abs().max() < NANOSECOND, column  # type: ignore[operator]
        standing = (
            wait_table(run, step_table(run))
            .filter(pl.col("what") == STANDING)
            .group_by("request")
            .agg(pl.col("seconds").sum())
        )
        both = told.join(standing, on="request", how="left").with_columns(pl.col("seconds").fill_null(0.0))
        never_lost = both.filter(pl.col("preemptions") == 0)
        assert (never_lost["seconds"] - never_lost["stalled_s"]).abs().max() < NANOSECOND  # type: ignore[operator]


def test_a_run_recorded_before_is_read_in_own_times(overlapped: dict[str, Run]) -> None:
    run = overlapped["nano"]
    file = run.path / "manifest.json"
    told = run.read("requests")
    parts = sorted(run.path.glob("requests-*.parquet"))
    for part in parts:
        pl.read_parquet(part).with_columns(pl.col("stalled_s") * 2 + 1, pl.col("preempted_s") + 1).write_parquet(part)
    file.write_text(json.dumps(run.manifest | {"schema_version": 1}))
    old = open_run(run.path)
    assert (old.read("requests")["stalled_s"] - told["stalled_s"]).abs().max() < NANOSECOND  # type: ignore[operator]
    assert (old.scan("requests").collect()["preempted_s"] - told["preempted_s"]).abs().max() < NANOSECOND
    for table in ("batches", "tokens", "decisions", "blocks"):
        for part in run.path.glob(f"{table}-*.parquet"):
            part.unlink()
    file.write_text(json.dumps(run.manifest | {"schema_version": 1, "records": "summary"}))
    assert open_run(run.path).read("requests")["stalled_s"].null_count() == told.height, "not known is not 0"


def test_stretches_of_a_life_lie_inside_it(overlapped: dict[str, Run]) -> None:
    for run in overlapped.values():
        told = phases(run).join(run.read("requests").select("request", "first_scheduled_s", "finished_s"), on="request")
        inner = told.filter(pl.col("phase").is_in(["stalled", "preempted"])).sort("request", "begin_s")
        assert inner.height
        assert not inner.filter(
            (pl.col("begin_s") < pl.col("first_scheduled_s")) | (pl.col("end_s") > pl.col("finished_s"))
        ).height
        one_after_another = (pl.col("begin_s") - pl.col("end_s").shift(1).over("request")) < -NANOSECOND
        assert not inner.filter(one_after_another).height


def test_no_round_takes_longer_than_the_gap_it_explains(overlapped: dict[str, Run]) -> None:
    for run in overlapped.values():
        rounds = run.read("rounds").sort("round").with_columns(own_time().alias("own_s"))
        own = dict(rounds.select("round", "own_s").iter_rows())
        found = spikes(run)
        assert found
        for spike in found:
            if spike.cause != "preempted":
                assert own[spike.round] <= spike.gap_s + NANOSECOND
                times = [float(text.replace(",", "")) for text in re.findall(r"([\d.,]+) ms", spike.why)]
                assert times and max(times) <= spike.gap_s * 1000 * 1.01, (spike.gap_s, spike.why)


def test_slices_of_the_timeline_follow_each_other(overlapped: dict[str, Run]) -> None:
    run = overlapped["vllm"]
    slices = [event for event in events(run, "vllm") if event.get("cat") == "round"]
    for before, after in zip(slices, slices[1:], strict=False):
        assert after["ts"] >= before["ts"] + before["dur"] - 0.002  # microseconds, rounded


def test_a_round_behind_a_long_one_is_not_cold(tmp_path: Path) -> None:
    """Prefills of 4 tokens, the first scheduled 90 ms before the round under way ended: only its own 10 ms count."""
    config = SchedulerConfig(num_blocks=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=64)
    arrivals = [(3 * k + 1, request_of(k, f"r{k}", 4, 2)) for k in range(8)]
    made = {"clock": "wall", "engine": "torch", "overlapped": True}
    path = record_run(tmp_path / "nano", "nano", config, arrivals, duration_of=lambda _: 0.01, manifest=made)
    early = pl.when(pl.col("round") == pl.col("round").min()).then(0.09).otherwise(0.0)
    for part in path.glob("rounds-*.parquet"):
        frame = pl.read_parquet(part)
        shifted = frame.with_columns(pl.col("t_start_s", "t_scheduled_s", "t_executed_s", "t_end_s") + 1.0)
        before = shifted.head(1).with_columns(
            pl.lit(0).alias("round"), pl.lit("decode").alias("kind"), pl.lit(0.5).alias("t_start_s"), pl.lit(0.5).alias("t_scheduled_s"),
            pl.lit(1.0).alias("t_executed_s"), pl.lit(1.0).alias("t_end_s"),
        )  # fmt: skip
        late = shifted.with_columns(pl.col("t_start_s") - early, pl.col("t_scheduled_s") - early)
        pl.concat([before, late], how="vertical_relaxed").write_parquet(part)
    cold = [check for check in checks(open_run(path)) if "cold" in check.what]
    assert not cold, cold
