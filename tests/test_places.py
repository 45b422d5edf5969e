"""Where results are to go is asked before the work: an empty name, a read-only folder, a file where a folder is needed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchctl.places import check_file, check_folder
from tests.command_line import call, rows, write_trace
from traces.errors import BenchctlError

# Every command that writes where an option says, with its words up to the name.
WRITERS = [
    "replay {trace} --engine null --out",
    "replay --from {run} --set max_num_seqs=2 --out",
    "sweep {trace} --set scheduler=vllm --set engine=null --out",
    "shrink {trace} --where 'rounds > 1' -s nano --out",
    "check-scheduler nano --cases 1 --out",
    "report {run} --out",
    "compare {run} {run} --html",
    "gate {run} --baseline {base}/b.json --junit",
    "gate {run} --baseline {base}/b.json --benchmark",
    "pack {run} --out",
    "unpack {base}/nano.tar.gz --out",
    "validate h200-qwen3-8b {run} --copy",
    "trace sort {trace} --out",
    "trace info {trace} --html",
    "trace synth azure-conv --out",
]
LATE = [  # those that do their work before they write
    "replay {trace} --engine null --out",
    "sweep {trace} --set scheduler=vllm --set engine=null --out",
    "shrink {trace} --where 'rounds > 1' -s nano --out",
    "check-scheduler nano --cases 1 --out",
    "report {run} --out",
    "compare {run} {run} --html",
    "gate {run} --update --baseline",
    "validate h200-qwen3-8b {run} --copy",
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("places")
    trace = write_trace(base / "trace.jsonl", rows((0, 8, 2), (0, 9, 2), (1, 8, 3)))
    argv = ["replay", str(trace), "--engine", "null", "--no-report", "--out", str(base / "runs"), "-s", "nano"]
    subprocess.run([sys.executable, "-m", "benchctl", *argv], check=True, capture_output=True)
    return {"base": base, "trace": trace, "run": base / "runs" / "nano"}


def words(line: str, places: dict[str, Path]) -> list[str]:
    import shlex

    return shlex.split(line.format(**places))


@pytest.mark.parametrize("line", WRITERS)
def test_an_empty_name_is_refused_and_nothing_is_written_here(
    capfd: pytest.CaptureFixture[str], places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    answer = call(capfd, *words(line, places), "")
    assert answer.code == 2 and "is empty and names no" in answer.err, answer
    assert answer.out == "" and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("line", LATE)
def test_a_read_only_folder_is_found_before_the_work(places: dict[str, Path], tmp_path: Path, line: str) -> None:
    # Root writes wherever it likes, unless it gives that right up.
    prefix: list[str] = []
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root writes into read-only folders")
        prefix = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"]
        if subprocess.run([*prefix, "true"], capture_output=True).returncode:
            pytest.skip("root cannot give up its rights here")
    (tmp_path / "ro").mkdir(mode=0o555)
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "benchctl", *words(line, places), "ro/x/y"],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2 and "cannot be written: Permission denied" in done.stderr, done.stderr
    # Nothing came before the refusal: no trace was announced, no round was run.
    assert done.stderr.startswith("Error: ") and done.stdout == "", done.stderr
    assert list((tmp_path / "ro").iterdir()) == []


@pytest.mark.parametrize("line", LATE)
def test_a_file_where_a_folder_is_needed_is_found_before_the_work(
    capfd: pytest.CaptureFixture[str], places: dict[str, Path], tmp_path: Path, line: str
) -> None:
    (tmp_path / "file").write_text("mine")
    answer = call(capfd, *words(line, places), tmp_path / "file" / "x")
    assert answer.code == 2 and answer.err.startswith("Error: ") and "Not a directory" in answer.err, answer
    assert answer.out == "" and (tmp_path / "file").read_text() == "mine"


def test_a_place_that_is_good_is_left_as_it_was(tmp_path: Path) -> None:
    before = tmp_path.stat().st_mtime_ns
    check_folder(tmp_path / "a" / "b")
    check_file(tmp_path / "a" / "b.json", "-o")
    check_file(Path("/dev/null"), "-o", in_place=True)
    assert list(tmp_path.iterdir()) == [] and tmp_path.stat().st_mtime_ns == before
    with pytest.raises(BenchctlError, match="is a folder"):
        check_file(tmp_path, "-o")


def test_a_replay_that_records_nothing_needs_no_place(
    capfd: pytest.CaptureFixture[str], places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").write_text("in the way")
    monkeypatch.chdir(tmp_path)
    assert call(capfd, "replay", places["trace"], "--engine", "null", "--records", "none").code == 0
    answer = call(capfd, "replay", places["trace"], "--engine", "null")
    assert answer.code == 2 and "runs cannot be written: Not a directory" in answer.err
