"""A designed calibration: which rounds it runs, that it runs them, and that a profile comes out of its file."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from benchctl.calibrate import issue_of
from benchctl.calibrate_fit import Rates
from benchctl.calibrate_grid import GridLimits, chunks, decodes, design
from benchctl.calibrate_points import Point, Points, load_points, measured_points, save_points
from benchctl.calibrate_rounds import shape_of
from benchctl.profiles import load_profile
from engines.model.config import PRESETS
from engines.simulated.features import graph_sizes
from engines.simulated.profile import Graphs
from tests.command_line import call, rows, write_trace
from traces.errors import BenchctlError

H200_8B = GridLimits(
    kv_cache_tokens=775_680, block_size=16, max_num_seqs=512, max_num_batched_tokens=16_384, max_model_len=40_960
)


def test_the_design_covers_the_range_and_fits_the_pool() -> None:
    passes = design(H200_8B, graph_sizes(512, 16_384).decode)
    cases = [case for part in passes for case in part]
    assert len(cases) == len(set(cases)) > 200
    assert all(H200_8B.admit(case) for case in cases)
    alone = {(case[0].count, case[0].start + 1) for case in passes[0] if len(case) == 1 and case[0].decode}
    for batch in (1, 8, 64, 512):
        fitting = [c for c in (128, 512, 2_048, 8_192, 32_768) if batch * c <= 775_680]
        assert {context for n, context in alone if n == batch} == set(fitting)
    lengths = {case[0].num_tokens for case in passes[0] if len(case) == 1 and not case[0].decode}
    assert {16, 16_384} <= lengths
    assert any(case[0].decode and not case[-1].decode for case in passes[0])
    # Every padded size is met.
    sizes = {case[0].count for part in passes for case in part if len(case) == 1 and case[0].decode}
    assert sizes >= set(graph_sizes(512, 16_384).decode)


def test_a_small_pool_leaves_out_what_does_not_fit() -> None:
    small = GridLimits(4_096, 256, 8, 2_048, 4_096)
    cases = [case for part in design(small, ()) for case in part]
    assert cases and all(small.admit(case) for case in cases)
    assert not small.admit((decodes(9, 16),))  # seats
    assert not small.admit((chunks(1, 4_000),))  # budget
    assert not small.admit((decodes(2, 2_049),))  # blocks: 2 x 9 of 256
    assert small.admit((decodes(2, 2_048),))
    assert design(small, ()) == design(small, ())


def test_measured_rounds_become_a_profile(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ["calibrate", "--measure", "--model", "tiny", "--block-size", 16, "--kv-cache-tokens", 4_096, "--max-num-seqs", 32,
            "--max-num-batched-tokens", 1_024, "--max-model-len", 4_096, "-o", tmp_path / "points.json"]  # fmt: skip
    answer = call(capfd, *argv)
    assert answer.code == 0, answer.err
    assert "block size 16" in answer.err and "left out" not in answer.err
    points = load_points(tmp_path / "points.json")
    assert points.complete and points.device == "CPU" and points.model == "tiny"
    (setup,) = points.setups
    assert setup.measured == setup.planned == len(points.points) > 30
    assert all(len(p.device_s) >= 2 and min(p.device_s) > 0 for p in points.points)
    found = measured_points(points, "points.json", 16)
    assert set(found.kind.tolist()) == {"decode", "prefill", "mixed"}
    # A round of few decodes is faster than a long chunk, whatever the machine.
    few = found.device_s[(found.kind == "decode") & (found.features.num_seqs == 1)]
    assert np.median(few) < found.device_s[found.features.num_tokens == 1_024].min()

    again = call(capfd, *argv)
    assert again.code == 2 and "exists" in again.err
    alone = call(capfd, "calibrate", tmp_path / "points.json", "-o", tmp_path / "p.json")
    assert alone.code == 2 and "add a run folder" in alone.err
    trace = write_trace(tmp_path / "t.jsonl", rows(*[(i * 0.01, 20 + i, 12) for i in range(30)]))
    run = call(capfd, "replay", trace, "-s", "vllm", "--engine", "torch", "--model", "tiny", "--kv-cache-tokens", 2_048,
               "--max-num-seqs", 16, "--max-num-batched-tokens", 512, "--max-model-len", 1_024, "--no-report", "--out",
               tmp_path / "run")  # fmt: skip
    assert run.code == 0, run.err
    answer = call(capfd, "calibrate", tmp_path / "points.json", tmp_path / "run", "-o", tmp_path / "p.json")
    assert answer.code == 0, answer.err
    profile = load_profile(str(tmp_path / "p.json"))
    fit = profile.fits[0]
    assert {s.trace for s in fit.sources} == {"designed rounds", "t"}
    assert max(r.greatest for r in fit.ranges if r.feature == "num_seqs") == 32
    answer = call(capfd, "replay", trace, "-s", "vllm", "--engine", "simulated", "--profile", tmp_path / "p.json",
                  "--no-report", "--out", tmp_path / "sim")  # fmt: skip
    assert answer.code == 0, answer.err


def test_a_measurement_that_runs_out_of_time_says_so(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    answer = call(capfd, "calibrate", "--measure", "--model", "tiny", "--block-size", 16, "--kv-cache-tokens", 1_024,
                  "--max-seconds", 0.05, "-o", tmp_path / "points.json")  # fmt: skip
    assert answer.code == 0 and "left out for want of time" in answer.err
    points = load_points(tmp_path / "points.json")
    assert not points.complete and 0 < points.setups[0].measured < points.setups[0].planned


def test_long_and_short_times_of_a_round_give_their_median(tmp_path: Path) -> None:
    raw = json.dumps({"benchctl_points": 1})
    (tmp_path / "bare.json").write_text(raw)
    with pytest.raises(BenchctlError, match="missing required field"):
        load_points(tmp_path / "bare.json")
    points = some_points(device_s=(2e-3, 9e-3, 1e-3))
    save_points(points, tmp_path / "p.json")
    found = measured_points(load_points(tmp_path / "p.json"), "p.json", 16)
    assert found.device_s.tolist() == [2e-3]
    assert (found.features.num_seqs[0], found.features.context_tokens[0], found.features.padded_tokens[0]) == (3, 30, 4)
    assert len(measured_points(points, "p.json", 256).device_s) == 0


def some_points(device_s: tuple[float, ...]) -> Points:
    point = Point(
        block_size=16, seqs=((9, 1, True, 3),), mode="graph", padded_tokens=4, device_s=device_s, step_s=device_s, prepare_s=device_s
    )  # fmt: skip
    return Points(
        created="2026-01-01T00:00:00+00:00", benchctl="0", versions={}, hardware={}, device="Card X", model="tiny",
        dtype="float32", attention_backend="triton", enforce_eager=False, max_num_seqs=512, max_num_batched_tokens=16_384,
        max_model_len=4_096, seed=0, complete=True, setups=(), points=(point,),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"benchctl_points": 7}, "no points of format 1"),
        ({"points": [{"block_size": 16, "seqs": [], "mode": "", "padded_tokens": 1, "device_s": [1], "step_s": [], "prepare_s": []}]},
         "has sequences"),
        ({"points": [{"block_size": 16, "seqs": [[0, 1, True, 1]], "mode": "", "padded_tokens": 1, "device_s": [-1], "step_s": [],
                      "prepare_s": []}]}, "point 1 has times"),
        ({"points": 3}, "no points"),
    ],
)  # fmt: skip
def test_a_broken_file_of_points_is_refused_in_words(tmp_path: Path, change: dict[str, object], says: str) -> None:
    raw = msgspec.to_builtins(some_points((1.0,))) | change
    (tmp_path / "p.json").write_text(json.dumps(raw))
    with pytest.raises(BenchctlError, match=says):
        load_points(tmp_path / "p.json")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("calibrate --measure", "no file is named"),
        ("calibrate --measure runs/x -o {w}/p.json", "reads nothing"),
        ("calibrate --model tiny -o {w}/p.json", "--model is for --measure"),
        ("calibrate -o {w}/p.json", "nothing is given to fit"),
        ("calibrate --measure --model nobody -o {w}/p.json", "neither a preset nor a folder"),
        ("calibrate --measure --model tiny --block-size 0 -o {w}/p.json", "--block-size is 0"),
        ("calibrate --measure --model tiny --block-size 16 --block-size 16 -o {w}/p.json", "given twice"),
        ("calibrate --measure --model tiny --kv-cache-tokens 16 -o {w}/p.json", "no round worth measuring"),
        ("calibrate --measure --model tiny --max-seconds 0 -o {w}/p.json", "--max-seconds is 0"),
        ("calibrate --measure --model tiny -o {w}", "is a folder"),
    ],
)
def test_mistakes_are_one_clear_line(capfd: pytest.CaptureFixture[str], tmp_path: Path, argv: str, says: str) -> None:
    answer = call(capfd, *[word.format(w=tmp_path) for word in argv.split()])
    assert answer.code == 2, (answer.out, answer.err)
    assert says in answer.err and "Traceback" not in answer.err


def test_what_launching_without_a_graph_takes_is_the_median_of_rounds_that_wait_for_it() -> None:
    def run(*rounds: tuple[int, float]) -> Any:
        """Of (tokens, device ms)."""
        tokens = np.array([n for n, _ in rounds], dtype=np.float64)
        features = SimpleNamespace(
            padded_tokens=tokens, padded_seqs=np.ones(len(rounds)), num_tokens=tokens, has_prefill=tokens > 1
        )
        return SimpleNamespace(features=features, device_s=np.array([ms * 1e-3 for _, ms in rounds]))

    model, graphs = shape_of("qwen3-0.6b", PRESETS["qwen3-0.6b"], 2), graph_sizes(256, 8192)
    rates = Rates(4.26e12, 795e12)
    slow = (2700, 30.0)  # the first of its run: left out where there are others
    found = [run(slow, (3000, 13.0), (3100, 15.0), (500, 2.0), (16_000, 40.0)), run(slow, (2800, 14.0), (2900, 3.2))]
    assert issue_of(model, graphs, rates, found) == pytest.approx(14e-3)
    assert issue_of(model, graphs, rates, [run(slow)]) == pytest.approx(30e-3)
    assert issue_of(model, graphs, rates, [run((2900, 3.2))]) == 0  # the device was busy for all of it
    assert issue_of(model, Graphs(), rates, found) == 0
