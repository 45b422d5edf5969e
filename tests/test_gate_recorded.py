"""Recorded admissions: a run on the wall clock, with the real engine, decided again by the null engine, digest for digest."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from reports.decision_diff import diff_decisions
from reports.run import open_run
from tests.command_line import call, rows, write_trace
from tests.laws import assert_laws

KEPT = ("admissions", "rounds", "requests", "decisions")  # of the earlier run, what --from reads
POOL = ("--kv-cache-tokens", 512, "--max-num-seqs", 6, "--max-num-batched-tokens", 256)


@pytest.fixture(scope="module")
def walled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both policies on the CPU engine, on the wall clock, in memory that is tight."""
    import os
    import subprocess
    import sys

    folder = tmp_path_factory.mktemp("recorded")
    trace = write_trace(folder / "t.jsonl", rows(*((0.02 * i, 40 + 31 * (i % 6), 8 + 5 * (i % 4)) for i in range(24))))
    argv = ["replay", trace, "--engine", "torch", "--model", "tiny", "--no-report", "--out", folder / "wall", *POOL]
    subprocess.run(
        [sys.executable, "-m", "benchctl", *map(str, argv)],
        check=True,
        capture_output=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return folder


@pytest.mark.parametrize("scheduler", ["nano", "vllm"])
def test_a_wall_clock_run_is_decided_again_without_an_engine(
    walled: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], scheduler: str
) -> None:
    """Only the manifest and four tables of the first run are kept, as one would commit them."""
    whole = open_run(walled / "wall" / scheduler)
    assert whole.clock == "wall" and whole.engine == "torch"
    kept = tmp_path / "kept"
    kept.mkdir()
    for file in ("manifest.json", *(f"{table}-00000.parquet" for table in KEPT)):
        shutil.copy(whole.path / file, kept / file)
    argv = [
        "replay",
        walled / "t.jsonl",
        "--scheduler",
        scheduler,
        "--engine",
        "null",
        "--clock",
        "recorded",
        "--from",
        kept,
    ]
    answer = call(capfd, *argv, "--no-report", "--out", tmp_path / "again")
    assert answer.code == 0, answer.err
    again = assert_laws(tmp_path / "again" / scheduler)
    assert again.manifest["digest"] == whole.manifest["digest"] is not None
    assert diff_decisions(whole, again, ("card", "again")).equal


def test_with_another_policy_it_is_a_what_if(walled: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    argv = [
        "replay",
        walled / "t.jsonl",
        "--scheduler",
        "nano",
        "--engine",
        "null",
        "--clock",
        "recorded",
        "--from",
        walled / "wall/vllm",
    ]
    assert call(capfd, *argv, "--no-report", "--out", tmp_path / "o").code == 0
    run = assert_laws(tmp_path / "o/nano")
    source = open_run(walled / "wall/vllm")
    columns = ["request", "admitted_round"]
    assert run.read("admissions").select(columns).equals(source.read("admissions").select(columns))
    assert run.manifest["digest"] != source.manifest["digest"]
