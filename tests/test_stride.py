"""Many rounds at once decide, record and take what the same rounds decide, record and take one by one."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest

import benchctl.build as build
import benchctl.replay
from benchctl.build import build_command, build_run
from benchctl.config import ReplayOptions
from benchctl.profiles import save_profile
from benchctl.runner import RunResult, run_one
from engines.simulated.engine import SimulatedEngine
from reports import records
from reports.run import open_run
from tests.command_line import call, write_trace
from tests.golden_cases import case_names, load_case
from tests.simulated_profile import make_profile
from tests.test_replay_goldens import flags_of, trace_of

HOST_TIMES = {"schedule_s", "prepare_s", "update_s", "record_s"}
# So many random traces; BENCHCTL_STRIDE_TRACES=10000 for the whole campaign.
NUM_TRACES = int(os.environ.get("BENCHCTL_STRIDE_TRACES", "240"))
GROUP = 20


class Counted:
    """How many rounds were run in stretches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rounds = self.stretches = 0
        make = benchctl.replay.make_strider
        self.on = True

        def make_counted(*args: Any) -> Any:
            strider = make(*args) if self.on else None
            if strider is not None:
                run = strider.run

                def counted(*args: Any) -> Any:
                    flight = run(*args)
                    if flight is not None:
                        self.stretches += 1
                        self.rounds += flight.stretch.num_rounds
                    return flight

                strider.run = counted  # type: ignore[method-assign]
            return strider

        monkeypatch.setattr(benchctl.replay, "make_strider", make_counted)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def tables(run: Path) -> dict[str, pl.DataFrame]:
    """Every table, without what the host's clock says."""
    frames = {table: records.scan(run, table).collect() for table in records.TABLES}
    return {table: frame.drop(HOST_TIMES & set(frame.columns)) for table, frame in frames.items()}


def replayed(options: ReplayOptions, folder: Path) -> list[tuple[RunResult, Any]]:
    command = build_command(options)
    out = []
    for policy in command.policies:
        run = folder / policy.name
        run.mkdir(parents=True)
        parts = build_run(command, policy, run)
        out.append((run_one(parts, None, threading.Event()), parts.engine))
    return out


def assert_equal(options: ReplayOptions, folder: Path, counted: Counted, what: object) -> None:
    counted.on = True
    at_once = replayed(options, folder / "stride")
    counted.on = False
    singly = replayed(options, folder / "step")
    for (mine, engine), (its, other) in zip(at_once, singly, strict=True):
        assert mine.error is None and its.error is None, (what, mine.error, its.error)
        assert mine.manifest["digest"] == its.manifest["digest"], what
        assert mine.outcome == its.outcome, what
        if isinstance(engine, SimulatedEngine):
            assert engine.account == other.account, what
        assert mine.folder is not None and its.folder is not None
        left, right = tables(mine.folder), tables(its.folder)
        for table in records.TABLES:
            assert left[table].equals(right[table]), (what, mine.name, table)


def random_case(number: int) -> tuple[list[dict[str, Any]], ReplayOptions]:
    """Small worlds of every kind: tight pools, prefix hits, chunks, preemption, sessions, closed loops, both kinds of clock."""
    draw = np.random.default_rng([77, number])

    def between(low: int, high: int) -> int:
        return int(draw.integers(low, high + 1))

    def chance(share: float) -> bool:
        return bool(draw.random() < share)

    block_size = int(draw.choice([2, 4, 16]))
    blocks = between(8, 40) if chance(0.6) else between(70, 160)
    seats = between(1, 8)
    pool = blocks * block_size
    knobs: dict[str, Any] = {
        "block_size": block_size,
        "max_num_seqs": seats,
        "max_num_batched_tokens": max(seats, between(1, 12) * block_size),
        "enable_prefix_caching": chance(0.8),
    }
    policy = "vllm" if chance(0.5) else "nano"
    if policy == "vllm":
        if chance(0.2):
            knobs["scheduling_policy"] = "priority"
        if chance(0.2):
            knobs["long_prefill_token_threshold"] = between(1, 3) * block_size
        if chance(0.2):
            knobs["scheduler_reserve_full_isl"] = True
        if chance(0.15):
            knobs["max_loras"] = 1
        if chance(0.15):
            knobs["max_model_len"] = max(4, pool // 2)
    sessions = chance(0.25)
    rows: list[dict[str, Any]] = []
    at = 0.0
    scale = float(draw.choice([0.002, 0.02, 0.2]))
    for i in range(between(2, 14)):
        prompt = between(1, max(2, pool // 3))
        at += float(draw.exponential(scale)) if chance(0.7) else 0.0
        row: dict[str, Any] = {"id": f"R{i}", "arrival_s": round(at, 4), "input_length": prompt, "output_length": between(1, max(2, pool // 4))}  # fmt: skip
        kind = draw.random()
        if kind < 0.25:
            row["segments"] = [{"id": between(0, 1), "len": between(1, prompt)}]
        elif kind < 0.5:
            row["hash_ids"] = [between(0, 2) if j == 0 else between(0, 1) for j in range(-(-prompt // 16))]
        if knobs.get("scheduling_policy") == "priority":
            row["priority"] = between(0, 2)
        if "max_loras" in knobs and chance(0.5):
            row["adapter"] = f"a{between(1, 2)}"
        if sessions:
            row["session"] = f"s{between(0, 2)}"
            if chance(0.5):
                row["think_s"] = float(draw.exponential(scale))
        rows.append(row)
    simulated = chance(0.6)
    clock = "rounds" if chance(0.3) else "virtual"
    options: dict[str, Any] = {
        "schedulers": (policy,),
        "engine": "simulated" if simulated else "null",
        "overlap": chance(0.6) if simulated else None,
        "clock": clock,
        "round_seconds": 0.01,
        "knobs": knobs,
        "num_blocks": blocks + (policy == "vllm"),
        "records": "compact" if chance(0.3) else "full",
        "report": False,
    }
    if sessions:
        options["arrivals"] = "session"
    if chance(0.2):
        options["max_concurrency"] = between(1, 4)
    return rows, ReplayOptions(trace="", **options)


def cases() -> Iterator[range]:
    for first in range(0, NUM_TRACES, GROUP):
        yield range(first, min(first + GROUP, NUM_TRACES))


@pytest.mark.parametrize("group", list(cases()), ids=lambda group: f"{group.start}-{group.stop - 1}")
def test_stretches_are_what_their_rounds_are_on_random_traces(tmp_path: Path, counted: Counted, group: range) -> None:
    profile = tmp_path / "profile.json"
    save_profile(make_profile(2, 4, 16), profile)
    for number in group:
        rows, options = random_case(number)
        trace = write_trace(tmp_path / f"{number}.jsonl", [{"benchctl_trace": 1, "block_size": 16}, *rows])
        options = replace(options, trace=str(trace))
        if options.engine == "simulated":
            options = replace(options, profile=str(profile))
        assert_equal(options, tmp_path / str(number), counted, (number, options))
    assert counted.rounds > counted.stretches > 0


@pytest.mark.parametrize("group", list(cases()), ids=lambda group: f"{group.start}-{group.stop - 1}")
def test_keys_decide_as_the_ids_they_stand_for(
    tmp_path: Path, counted: Counted, group: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that nobody else can hit are hidden from lookups, and not counted: every hit, miss and eviction stays the same."""
    counted.on = True
    hits = 0
    for number in group:
        rows, options = random_case(number)
        trace = write_trace(tmp_path / f"{number}.jsonl", [{"benchctl_trace": 1, "block_size": 16}, *rows])
        options = replace(options, trace=str(trace), engine="null", overlap=None, profile=None)
        found = []
        for spelled in (False, True):
            with monkeypatch.context() as patch:
                if spelled:
                    patch.setattr(build, "block_keys", lambda *_: SimpleNamespace(of=lambda request: None))
                ((result, _),) = replayed(options, tmp_path / f"{number}-{spelled}")
            assert result.error is None and result.folder is not None, (number, result.error)
            found.append(tables(result.folder))
        for table in records.TABLES:
            assert found[0][table].equals(found[1][table]), (number, table)
        # Without a log nobody is told what fills a block that is hidden.
        ((result, _),) = replayed(replace(options, records="summary"), tmp_path / f"{number}-summary")
        assert result.error is None and result.folder is not None, (number, result.error)
        for table in records.RECORDED["summary"]:
            assert tables(result.folder)[table].equals(found[0][table]), (number, table)
        hits += found[0]["blocks"].filter(pl.col("event") == "share").height
    assert hits


def test_compact_records_read_as_full_ones_row_for_row(tmp_path: Path, counted: Counted) -> None:
    profile = tmp_path / "profile.json"
    save_profile(make_profile(2, 4, 16), profile)
    segments = 0
    for number in range(12):
        rows, options = random_case(number)
        trace = write_trace(tmp_path / f"{number}.jsonl", [{"benchctl_trace": 1, "block_size": 16}, *rows])
        options = replace(options, trace=str(trace), profile=str(profile) if options.engine == "simulated" else None)
        found = {}
        for kept, stride in (("full", True), ("compact", True), ("compact", False)):
            counted.on = stride
            ((result, _),) = replayed(replace(options, records=kept), tmp_path / f"{number}-{kept}-{stride}")
            assert result.folder is not None
            found[kept, stride] = tables(result.folder)
            stored = sum(pl.read_parquet(file).height for file in result.folder.glob("segments-*.parquet"))
            assert stride or not stored
            segments += stored
        for table in records.TABLES:
            for way in (True, False):
                assert found["compact", way][table].equals(found["full", True][table]), (number, table, way)
    assert segments > 20


CASES = [(policy, name) for policy in ("nano", "vllm") for name in case_names(policy)]


@pytest.mark.parametrize(("policy", "name"), CASES)
def test_stretches_are_what_their_rounds_are_on_logged_cases(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], counted: Counted, policy: str, name: str
) -> None:
    case = load_case(policy, name)
    trace = trace_of(case, tmp_path / "t.jsonl")
    flags = flags_of(case["config"])
    found = {}
    for way in ("stride", "step"):
        counted.on = way == "stride"
        call(capfd, "replay", trace, "--scheduler", policy, "--engine", "null", "--clock", "rounds", "--no-report", "--json", "--out", tmp_path / way, *flags)  # fmt: skip
        found[way] = tables(tmp_path / way / policy)
    for table in records.TABLES:
        assert found["stride"][table].equals(found["step"][table]), table
    digests = {open_run(tmp_path / way / policy).manifest["digest"] for way in found}
    assert len(digests) == 1
