"""Scheduling a round while the one before it runs decides nothing else, and its record keeps every law."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import call
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
