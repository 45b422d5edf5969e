"""Scheduling a round while the one before it runs decides nothing else, and its record keeps every law."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchctl.build import build_command, build_run
from benchctl.clock import WallClock
from benchctl.config import ReplayOptions
from benchctl.runner import run_one
from engines.interface import EngineLimits, ScheduledBatch, StepResult
from engines.null_engine import NullEngine
from tests.command_line import call, write_trace
from tests.laws import assert_laws

Capture = pytest.CaptureFixture[str]
TINY = (
    "--engine",
    "torch",
    "--model",
    "tiny",
    "--no-report",
    "--kv-cache-tokens",
    "2048",
    "--max-num-seqs",
    "16",
    "--block-size",
    "16",
    "--overlap",
)


def manifests(capfd: Capture, tmp_path: Path, name: str, *flags: Any) -> dict[str, dict[str, Any]]:
    answer = call(
        capfd,
        "replay",
        "traces/shared-system-prompt.jsonl",
        *TINY,
        "--num-prompts",
        "24",
        "--out",
        tmp_path / name,
        *flags,
    )
    assert answer.code == 0, answer.err
    out = {}
    for policy in ("nano", "vllm"):
        run = assert_laws(tmp_path / name / policy)
        out[policy] = dict(run.manifest)
    return out


def test_digests_are_equal_with_and_without(capfd: Capture, tmp_path: Path) -> None:
    flags = ("--clock", "rounds", "--round-seconds", "0.05")
    on = manifests(capfd, tmp_path, "on", *flags)
    off = manifests(capfd, tmp_path, "off", *flags, "--no-overlap")
    for policy in ("nano", "vllm"):
        assert on[policy]["overlapped"] and not off[policy]["overlapped"]
        assert on[policy]["digest"] == off[policy]["digest"]


def test_a_wall_clock_run_overlaps_and_its_admissions_can_be_repeated(capfd: Capture, tmp_path: Path) -> None:
    wall = manifests(capfd, tmp_path, "wall", "--speedup", "50")
    for policy in ("nano", "vllm"):
        assert wall[policy]["overlapped"]
        answer = call(
            capfd, "replay", "traces/shared-system-prompt.jsonl", "--scheduler", policy, "--engine", "null", "--clock", "recorded",
            "--from", tmp_path / "wall" / policy, "--no-report", "--out", tmp_path / "again" / policy,
        )  # fmt: skip
        assert answer.code == 0, answer.err
        again = json.loads((tmp_path / "again" / policy / policy / "manifest.json").read_text())
        assert again["digest"] == wall[policy]["digest"]


@pytest.mark.parametrize(
    "flags",
    [
        ("--clock", "virtual"),
        ("--outputs", "sampled"),
        ("--num-blocks", "65", "--block-size", "32", "--scheduler", "vllm"),
    ],
)
def test_where_a_decision_could_depend_on_it_rounds_follow_each_other(
    capfd: Capture, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    base = ("--engine", "torch", "--model", "tiny", "--no-report", "--overlap")
    answer = call(capfd, "replay", "traces/walkthrough.jsonl", *base, "--out", tmp_path / "o", *flags)
    assert answer.code == 0, answer.err
    for path in (tmp_path / "o").glob("*/manifest.json"):
        assert json.loads(path.read_text())["overlapped"] is False


class InTwoSteps:
    """An engine without a model that offers `launch` in two steps, every third round eager; keeps what was called, and when."""

    def __init__(self, limits: EngineLimits, clock: list[WallClock]) -> None:
        self.null, self.limits, self.name, self.clock = NullEngine(limits), limits, "two steps", clock
        self.calls: list[tuple[str, int]] = []
        self.started_s: dict[int, float] = {}
        self.number = 0

    def prepare(self, batch: ScheduledBatch) -> Any:
        self.number += 1
        self.calls.append(("prepare", self.number))
        return SimpleNamespace(number=self.number, batch=batch, eager=self.number % 3 == 0)

    def start(self, prepared: Any) -> Any:
        self.calls.append(("start", prepared.number))
        self.started_s[prepared.number] = self.clock[0].now()
        return prepared.number, self.null.launch(prepared.batch)

    def collect(self, handle: Any) -> StepResult:
        self.calls.append(("collect", handle[0]))
        return self.null.collect(handle[1])

    def close(self) -> None: ...


def replay_in_two_steps(tmp_path: Path, overlap: bool) -> tuple[InTwoSteps, Any]:
    trace = write_trace(
        tmp_path / "t.jsonl",
        [{"id": f"R{i}", "arrival_s": 0.0, "input_length": 8, "output_length": 6} for i in range(2)],
    )
    command = build_command(
        ReplayOptions(trace=str(trace), schedulers=("vllm",), engine="null", clock="wall", report=False)
    )
    folder = tmp_path / f"run-{overlap}"
    folder.mkdir()
    parts = build_run(command, command.policies[0], folder)
    clock: list[WallClock] = []

    def start_clock(stop: threading.Event) -> WallClock:
        clock.append(WallClock(stop))
        return clock[0]

    engine = InTwoSteps(parts.engine.limits, clock)
    result = run_one(replace(parts, engine=engine, start_clock=start_clock, overlap=overlap), None, threading.Event())
    assert result.error is None and result.outcome.finished == 2
    return engine, assert_laws(folder)


def test_a_round_is_seen_before_the_launch_of_one_that_keeps_the_host_busy(tmp_path: Path) -> None:
    engine, run = replay_in_two_steps(tmp_path, overlap=True)
    assert engine.calls == [
        ("prepare", 1), ("start", 1),
        ("prepare", 2), ("start", 2), ("collect", 1),
        ("prepare", 3), ("collect", 2), ("start", 3),  # without a graph: what was under way is collected first
        ("prepare", 4), ("start", 4), ("collect", 3),
        ("prepare", 5), ("start", 5), ("collect", 4),
        ("prepare", 6), ("collect", 5), ("start", 6), ("collect", 6),
    ]  # fmt: skip
    ends = run.read("rounds")["t_end_s"].to_list()
    seen_first = [ends[number - 1] <= engine.started_s[number + 1] for number in range(1, 6)]
    assert seen_first == [False, True, False, False, True]


def test_rounds_in_two_steps_decide_the_same_with_and_without_overlap(tmp_path: Path) -> None:
    on, off = replay_in_two_steps(tmp_path, overlap=True)[1], replay_in_two_steps(tmp_path, overlap=False)[1]
    assert on.manifest["digest"] == off.manifest["digest"]
