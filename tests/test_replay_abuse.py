"""Replays under abuse: numbers out of range, a full disk, closed streams, paths that cannot be. Each was a traceback or a hang."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from benchctl import parts
from benchctl.manifest import TEMPORARY
from reports.run import open_run
from tests.command_line import call, rows, write_trace
from tests.laws import assert_laws
from traces.errors import BenchctlError

NULL = ("--engine", "null", "--no-report", "-s", "vllm")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "t.jsonl", rows((0, 8, 3), (0.3, 9, 2), (2.5, 8, 3)))


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--max-num-batched-tokens", 10**30), f"--max-num-batched-tokens is {10**30}\n  try: give {2**60} or less"),
        (("--block-size", 2**63), f"--block-size is {2**63}"),
        (("--long-prefill-token-threshold", 10**30), f"--long-prefill-token-threshold is {10**30}"),
        (("--num-prompts", 10**30), f"--num-prompts is {10**30}"),
        (("--num-warmups", 10**30), f"--num-warmups is {10**30}"),
        (("--seed", 2**63), f"--seed is {2**63}"),
        (("--speedup", "5e-324"), "--speedup is 5e-324\n  try: give 1e-12 or more"),  # 0 s × inf is no time: it hung
        (("--time-scale", "1e308"), "--time-scale is 1e+308\n  try: give 1e+12 or less"),
        (("--request-rate", "5e-324"), "--request-rate is '5e-324'"),
        (("--request-rate", 3, "--burstiness", "5e-324"), "--burstiness is 5e-324"),
        (("--out", "bad\udcff"), "the bytes of 'bad\\udcff' are no UTF-8\n  in --out"),
        (("--out", "x" * 300), "File name too long\n  in --out"),
    ],
)
def test_it_refuses(capfd: pytest.CaptureFixture[str], trace: Path, flags: tuple[object, ...], text: str) -> None:
    out = () if "--out" in flags else ("--out", trace.parent / "o")
    answer = call(capfd, "replay", trace, *NULL, *out, *flags)
    assert answer.code == 2 and text in answer.err, answer
    assert "Traceback" not in answer.err and [path.name for path in trace.parent.iterdir()] == ["t.jsonl"]


@pytest.mark.parametrize(
    ("row", "flags"),
    [
        ({"arrival_s": 1e15}, ("--time-scale", 1e12)),
        ({"arrival_s": 1e15}, ("--time-scale", 1e12, "--clock", "rounds")),
        ({"arrival_s": 1e15}, ("--round-seconds", 1e-9, "--clock", "rounds", "--time-scale", 2)),
        ({"arrival_round": 2**53}, ("--time-scale", 3, "--clock", "rounds")),
        ({"arrival_s": 9.0, "parents": ["a"], "think_s": 1e15}, ("--arrivals", "session", "--time-scale", 1e12)),
    ],
)
def test_a_time_beyond_what_a_clock_tells_apart_is_refused(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, row: dict[str, Any], flags: tuple[object, ...]
) -> None:
    first = {"id": "a", "arrival_s": 0, "input_length": 4, "output_length": 2}
    trace = write_trace(tmp_path / "t.jsonl", [first, {"input_length": 4, "output_length": 2, **row}])
    answer = call(capfd, "replay", trace, *NULL, "--out", tmp_path / "o", *flags)
    assert answer.code == 2 and "beyond 9.0072e+15" in answer.err and "Traceback" not in answer.err, answer


def test_a_limit_of_the_header_is_bounded_as_its_flag(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    limits = {"common": {"long_prefill_token_threshold": 10**18 * 10}}
    trace = write_trace(tmp_path / "t.jsonl", rows((0, 8, 2)), limits=limits)
    answer = call(capfd, "replay", trace, *NULL, "--out", tmp_path / "o")
    assert answer.code == 2 and "limits.long_prefill_token_threshold is 10000000000000000000" in answer.err


@pytest.mark.parametrize("seen", ["x", [1], -5, True])
def test_an_observed_latency_that_is_no_number_counts_as_none(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, seen: object
) -> None:
    made = rows((0, 8, 2), (4, 8, 2))
    made[0]["observed"] = {"e2e_s": seen}
    made[1]["parents"] = ["R1"]
    trace = write_trace(tmp_path / "t.jsonl", made)
    answer = call(capfd, "replay", trace, *NULL, "--arrivals", "session", "--out", tmp_path / "o")
    assert answer.code == 0, answer
    run = assert_laws(tmp_path / "o" / "vllm")
    assert run.read("admissions")["arrival_s"].to_list()[1] == pytest.approx(run.read("rounds")["t_end_s"][1] + 4)


def test_warm_ups_that_no_memory_holds_are_left_out(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", rows((0, 2**60, 1), (0, 5, 3)))
    answer = call(capfd, "replay", trace, *NULL, "--num-warmups", 2, "--out", tmp_path / "o")
    assert answer.code == 1 and "Traceback" not in answer.err  # the first request is refused as ever
    assert assert_laws(tmp_path / "o" / "vllm").manifest["counts"]["finished"] == 1


def test_ctrl_c_ends_warm_ups(trace: Path) -> None:
    from benchctl.build import build_command, build_run
    from benchctl.config import ReplayOptions

    command = build_command(
        ReplayOptions(trace=str(trace), engine="null", schedulers=("vllm",), num_warmups=2, warm_cache=True)
    )
    stop = threading.Event()
    stop.set()
    assert build_run(command, command.policies[0], None, stop).scheduler.has_unfinished()
    assert not build_run(command, command.policies[0], None).scheduler.has_unfinished()


# -- a full disk


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("table", ["admissions", "rounds"])
def test_a_disk_that_fills_up_is_said_in_a_few_lines(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], trace: Path, table: str
) -> None:
    honest = pl.DataFrame.write_parquet

    def write(frame: pl.DataFrame, path: Path, **more: Any) -> None:
        honest(frame, path, **more)
        if path.name.startswith(f".{table}"):
            full()

    monkeypatch.setattr(parts.pl.DataFrame, "write_parquet", write)
    out = trace.parent / "o"
    answer = call(capfd, "replay", trace, *NULL, "--out", out)
    assert answer.code == 1 and "Traceback" not in answer.err
    assert "Error: vllm: the record cannot be written: No space left on device" in answer.err
    run = open_run(out / "vllm")
    assert run.status == "failed" and "No space left" in run.manifest["error"]
    assert not list(run.path.glob("*.tmp")) and not list(run.path.glob(".*.tmp"))


@pytest.mark.parametrize("which", [1, 2, 3])
def test_a_manifest_that_cannot_be_written_leaves_the_one_before_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], trace: Path, which: int
) -> None:
    honest, seen = os.replace, []

    def replace(source: Path, target: Path) -> None:
        if target.name == "manifest.json":
            seen.append(target)
            if len(seen) >= which:
                full()
        honest(source, target)

    monkeypatch.setattr("benchctl.manifest.os.replace", replace)
    folder = trace.parent / "o" / "vllm"
    answer = call(capfd, "replay", trace, *NULL, "--out", trace.parent / "o")
    assert answer.code == 1 and "No space left on device" in answer.err and "Traceback" not in answer.err
    assert not (folder / TEMPORARY).exists()
    if which == 1:  # nothing ran, and the folder can be used again
        monkeypatch.undo()
        assert call(capfd, "replay", trace, *NULL, "--out", trace.parent / "o").code == 0
    else:
        assert assert_laws(folder).status == ("running" if which == 2 else "complete")


def test_a_page_that_cannot_be_written_costs_the_page_alone(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], trace: Path
) -> None:
    def refuse(*_: object) -> None:
        raise BenchctlError("the report cannot be written: [Errno 28] No space left on device")

    monkeypatch.setattr("benchctl.command.write_page", refuse)
    argv = ("replay", trace, "--engine", "null", "-s", "vllm", "--json", "--out", trace.parent / "o")
    answer = call(capfd, *argv)
    assert answer.code == 1 and "Error: the report cannot be written" in answer.err
    assert json.loads(answer.out)["completed"] == 3


# -- places


def test_a_folder_left_by_a_run_that_was_killed_before_its_manifest_stood_is_free(
    capfd: pytest.CaptureFixture[str], trace: Path
) -> None:
    folder = trace.parent / "o" / "vllm"
    folder.mkdir(parents=True)
    (folder / TEMPORARY).write_text("{")
    assert call(capfd, "replay", trace, *NULL, "--out", trace.parent / "o").code == 0
    assert_laws(folder)


def test_a_trace_of_a_long_name_gets_a_folder(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    trace = write_trace(tmp_path / "t.jsonl", rows((0, 8, 2)), name="n" * 5000)
    assert call(capfd, "replay", trace, *NULL).code == 0
    assert_laws(next((tmp_path / "runs").iterdir()) / "vllm")


# -- streams


def shell(line: str, trace: Path, **env: str) -> subprocess.CompletedProcess[bytes]:
    replay = f"{sys.executable} -m benchctl replay {trace} --engine null --no-report -s nano --clock rounds"
    return subprocess.run(
        ["sh", "-c", line.format(replay=f"{replay} --out {trace.parent / 'o'}", python=sys.executable)],
        capture_output=True, timeout=100, cwd=Path(__file__).parents[1], env=os.environ | env,
    )  # fmt: skip


def test_a_closed_stderr_sends_no_error_to_stdout(trace: Path) -> None:
    done = shell("{replay} --max-num-seqs 0 2>&-", trace)
    assert (done.returncode, done.stdout) == (2, b"")
    done = shell("{replay} --json 2>&-", trace)
    assert done.returncode == 0 and json.loads(done.stdout)["completed"] == 3
    assert_laws(trace.parent / "o" / "nano")


def test_a_full_disk_behind_stdout_is_one_line(trace: Path) -> None:
    done = shell("{replay} --json > /dev/full", trace)
    assert done.returncode == 1 and b"Traceback" not in done.stderr
    assert b"Error: No space left on device: standard output" in done.stderr
    assert assert_laws(trace.parent / "o" / "nano").status == "complete"


def test_a_locale_without_our_characters_gets_question_marks(trace: Path) -> None:
    done = shell("{replay}", trace, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert b"?" in done.stdout
