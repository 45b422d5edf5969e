"""A wall-clock run on an H200, repeated here without a card: the same decisions, digest for digest.

tests/data/h200-sharegpt holds the manifests and admissions of `benchctl replay traces/sharegpt.jsonl` with qwen3-0.6b (Triton
kernels, CUDA graphs, rounds scheduled while the device works), the other tables left empty.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from benchctl.calibrate_rounds import shape_of
from benchctl.profiles import save_profile
from engines.model.config import PRESETS
from tests.command_line import call
from tests.simulated_profile import make_profile

DATA = Path(__file__).parent / "data" / "h200-sharegpt"


@pytest.mark.parametrize("engine", ["null", "simulated"])
@pytest.mark.parametrize("policy", ["nano", "vllm"])
def test_its_decisions_come_out_of_its_admissions(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, policy: str, engine: str
) -> None:
    more: list[object] = []
    if engine == "simulated":  # decisions need no error bar: any durations will do
        profile = replace(make_profile(16, 256), model=shape_of("qwen3-0.6b", PRESETS["qwen3-0.6b"], 2))
        save_profile(profile, tmp_path / "profile.json")
        more = ["--profile", tmp_path / "profile.json"]
    answer = call(
        capfd, "replay", "traces/sharegpt.jsonl", "--scheduler", policy, "--engine", engine, "--clock", "recorded",
        "--from", DATA / policy, "--no-report", "--out", tmp_path, *more,
    )  # fmt: skip
    assert answer.code == 0, answer.err
    measured = json.loads((DATA / policy / "manifest.json").read_text())
    repeated = json.loads((tmp_path / policy / "manifest.json").read_text())
    assert measured["device"] == "NVIDIA H200" and measured["overlapped"] and measured["clock"] == "wall"
    assert repeated["engine"] == engine and repeated["digest"] == measured["digest"]
    assert repeated["counts"]["rounds"] == measured["counts"]["rounds"] > 19_000
