"""`doctor --measure`: figures of the device, kept by device, in later manifests and under their rooflines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from benchctl import measure
from reports.roofline import CEILINGS, ceilings_of, device_use, measured
from reports.run import open_run
from tests.command_line import call
from traces.errors import BenchctlError

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Sizes that take no time, and a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(measure, "CPU_COPY_BYTES", 4 << 20)
    return tmp_path / "cache" / "benchctl" / "ceilings"


def replay(capfd: Capture, out: Path) -> dict[str, Any]:
    answer = call(
        capfd, "replay", "traces/walkthrough.jsonl", "--engine", "torch", "--model", "tiny", "-s", "vllm", "--no-report", "--out", out
    )  # fmt: skip
    assert answer.code == 0, answer.err
    manifest: dict[str, Any] = json.loads((out / "vllm" / "manifest.json").read_text())
    return manifest


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a card measures the card")
def test_what_is_measured_is_kept_and_stands_in_later_manifests(capfd: Capture, small: Path, tmp_path: Path) -> None:
    assert replay(capfd, tmp_path / "before")["ceilings"] is None
    assert "not measured on this device; try: benchctl doctor --measure" in call(capfd, "doctor").out
    answer = call(capfd, "doctor", "--measure", "--json")
    assert answer.code == 0 and "measuring: copy within memory, 1 threads" in answer.err
    found = json.loads(answer.out)["ceilings"]
    for name in ("copy", "gemm_float32_1024", "gemm_float32_2048", "launch_host"):
        values = found[name]["raw"]
        assert len(values) == measure.REPEATS and min(values) <= found[name]["value"] <= max(values) and min(values) > 0
    assert 1e8 < found["copy"]["value"] < 1e13 and 1e8 < found["gemm_float32_2048"]["value"] < 1e14
    assert found["copy"]["size_bytes"] == 4 << 20
    assert len(list(small.glob("*.json"))) == len({1, torch.get_num_threads()})
    assert "copy within the device, read and written" in call(capfd, "doctor").out

    manifest = replay(capfd, tmp_path / "after")
    assert manifest["ceilings"]["device"] == found["device"] and manifest["ceilings"]["type"] == "cpu"
    roof = ceilings_of(open_run(tmp_path / "after" / "vllm"))
    assert roof is not None and roof.bytes_per_s == manifest["ceilings"]["copy"]["value"]
    uses = device_use(open_run(tmp_path / "after" / "vllm"))
    assert uses and all(use.flops_share is not None and 0 < use.flops_share < 10 for use in uses)


def test_a_rounds_operations_are_counted_on_the_cpu_too(capfd: Capture, tmp_path: Path) -> None:
    replay(capfd, tmp_path)
    rounds = open_run(tmp_path / "vllm").scan("rounds").filter(pl.col("num_seqs") > 0).collect()
    first = rounds.row(0, named=True)
    # tiny: two layers of 128 × (512 + 128) + 3 × 128 × 256 parameters in matrices, a head of 2048 × 128, float32.
    matrices = 2 * (128 * (256 + 128) + 3 * 128 * 256)
    assert first["bytes"] > 4 * (matrices + 2048 * 128)
    # Of the last layer, what follows attention is needed for the rows that yield a token alone.
    needed = matrices - 128 * (128 + 3 * 256)
    assert 2 * needed * first["prefill_tokens"] < first["flops"] < 2 * matrices * first["prefill_tokens"]
    assert rounds["flops"].null_count() == rounds["bytes"].null_count() == 0


def test_the_roof_is_that_of_the_runs_own_device_and_dtype() -> None:
    def entry(value: float) -> dict[str, Any]:
        return {"value": value, "unit": "FLOP/s", "raw": [value]}

    found = {
        "device": "NVIDIA H200", "measured": "2026-11-30", "copy": {"value": 4.2e12, "size_bytes": 4 << 30},
        "gemm_bfloat16_4096": entry(780e12), "gemm_bfloat16_8192": entry(760e12), "gemm_float32_8192": entry(50e12),
    }  # fmt: skip
    roof = measured({"ceilings": found, "dtype": "bfloat16"})
    assert roof is not None and (roof.flops_per_s, roof.bytes_per_s) == (780e12, 4.2e12)
    assert "4096 × 4096" in roof.source and "4 GiB" in roof.source
    wide = measured({"ceilings": found, "dtype": "float32"})
    assert wide is not None and wide.flops_per_s == 50e12 < CEILINGS["NVIDIA H200"].flops_per_s
    for broken in (None, {}, {"copy": 3}, found | {"copy": {"value": "x"}}):
        assert measured({"ceilings": broken, "dtype": "bfloat16"}) is None
    assert measured({"ceilings": found, "dtype": "float16"}) is None


def test_a_folder_that_cannot_be_written_is_one_clear_line(capfd: Capture, small: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    answer = call(capfd, "doctor", "--measure")
    assert answer.code == 1 and "what was measured cannot be kept" in answer.err and "XDG_CACHE_HOME" in answer.err


def test_restless_figures_are_said() -> None:
    rest = {"value": 100.0, "unit": "s", "raw": [99.0, 100.0, 101.0]}
    told = dict(measure.lines({"launch_host": rest, "copy": rest | {"unit": "bytes/s", "raw": [50.0, 100.0, 101.0]}}))
    assert "restless" not in told["host time of a launch"]
    assert "restless: did something else run?" in told["copy within the device, read and written"]


@pytest.mark.gpu
def test_a_card_is_measured(capfd: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    answer = call(capfd, "doctor", "--measure", "--json")
    found = json.loads(answer.out)["ceilings"]
    assert found["device"] == torch.cuda.get_device_name(0) and found["driver"]
    assert found["copy"]["value"] > 1e11 and found["gemm_bfloat16_8192"]["value"] > 1e13
    assert found["graph_kernel"]["value"] < found["launch_and_wait"]["value"]
    assert call(capfd, "doctor").code == 0


def test_a_card_too_full_to_be_measured_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 140 << 30))
    with pytest.raises(BenchctlError, match="measuring needs 1.50 GiB of the card; 1.00 GiB are free") as refused:
        measure.measure_card(lambda text: None)
    assert refused.value.where == "--measure"
