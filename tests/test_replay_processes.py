"""Replays in processes of their own: killed, interrupted, under other hash seeds, on the tiny model."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest

from reports import records
from reports.run import Run, open_run
from tests.command_line import write_trace
from tests.laws import assert_laws

ENV = os.environ | {"OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"}
NULL = ("--engine", "null", "--no-report")


def start(*argv: object, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "benchctl", *map(str, argv)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV | env,
    )  # fmt: skip


def run(*argv: object, **env: str) -> tuple[int, str]:
    process = start(*argv, **env)
    out, err = process.communicate(timeout=100)
    return process.returncode, out + err


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sessions over shared prefixes in tight memory."""
    rows = [
        {"id": f"R{i}", "arrival_s": i * 0.02, "input_length": 48 + i % 9 * 16, "output_length": 8 + i % 7 * 6}
        | {"segments": [{"id": i % 5, "len": 32}], "session": f"s{i % 11}"}
        for i in range(60)
    ]
    return write_trace(tmp_path_factory.mktemp("busy") / "t.jsonl", rows)


TIGHT = ("--kv-cache-tokens", 512, "--block-size", 16, "--max-num-batched-tokens", 256, "--max-num-seqs", 16)


def test_digests_do_not_depend_on_the_process_or_its_hash_seed(busy: Path, tmp_path: Path) -> None:
    found = []
    for seed in ("0", "1", "4711"):
        code, text = run(
            "replay", busy, *NULL, *TIGHT, "--clock", "rounds", "--out", tmp_path / seed, PYTHONHASHSEED=seed
        )
        assert code == 0, text
        found.append([assert_laws(tmp_path / seed / name).manifest["digest"] for name in ("nano", "vllm")])
    assert found[0] == found[1] == found[2] and found[0][0] != found[0][1]


KILLS = 50
# For every folder named on stdin, a fork that replays into it again and again, with a part after every 40 rows, so that a
# kill often falls into the writing of one. It forks before polars has threads, so a replay starts at once and safely.
SERVER = """
import os, sys
from benchctl import recorder
import benchctl.command
from benchctl.cli import app
recorder.FileRecorder.__init__.__kwdefaults__["flush_rows"] = 40
for line in sys.stdin:
    pid = os.fork()
    if pid:
        print(pid, flush=True)
        continue
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    for k in range(10**6):
        app(["replay", sys.argv[1], "--engine", "null", "--no-report", "--clock", "rounds", "--out", f"{line.strip()}/{k}",
             "-s", "nano", "--kv-cache-tokens", "512", "--block-size", "16", "--json"], standalone_mode=False)
"""


def test_a_run_killed_at_any_moment_is_readable_up_to_there(busy: Path, tmp_path: Path) -> None:
    """SIGKILL at 50 random moments: the last run is a consistent beginning of the whole one and says running."""
    code, text = run("replay", busy, *NULL, *TIGHT[:4], "--clock", "rounds", "-s", "nano", "--out", tmp_path / "whole")
    assert code == 0, text
    whole = open_run(tmp_path / "whole" / "nano")
    chance, cut_short = random.Random(7), 0
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(busy)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENV
    )
    assert server.stdin is not None and server.stdout is not None
    try:
        for kill in range(KILLS):
            folder = tmp_path / f"k{kill}"
            server.stdin.write(f"{folder}\n")
            server.stdin.flush()
            pid = int(server.stdout.readline())
            deadline = time.monotonic() + 30
            while not (folder / "0" / "nano" / "manifest.json").exists():
                assert time.monotonic() < deadline, "no run began"
                time.sleep(0.002)
            time.sleep(chance.random() * 0.12)
            os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)  # until it is gone
            last = max(folder.iterdir(), key=lambda path: int(path.name)) / "nano"
            if (last / "manifest.json").exists():
                cut_short += assert_beginning_of(whole, open_run(last))
    finally:
        server.kill()
        server.wait()
    assert cut_short > KILLS // 4  # else the kills fell between the runs and this test tests nothing


def assert_beginning_of(whole: Run, cut: Run) -> bool:
    """Whether `cut` was running; asserts that its tables are the first rows of the whole run's, all up to one round."""
    assert cut.status in ("running", "complete")
    numbers = cut.read("rounds")["round"]
    assert numbers.equals(whole.read("rounds")["round"].head(numbers.len()))
    last = numbers.max() or 0
    host = ["schedule_s", "update_s", "record_s", "prepare_s"]
    for table in records.TABLES:
        found = cut.read(table).drop(host, strict=False)
        expected = whole.read(table).drop(host, strict=False).head(found.height)
        assert found.equals(expected), table
        if table in ("batches", "decisions", "blocks", "tokens"):
            # Admissions and refusals may belong to the round after the last recorded one.
            assert found.filter(pl.col("round") > last).height == 0, table
            assert whole.read(table).filter(pl.col("round") <= last).height == found.height, table
    return cut.status == "running"


def test_ctrl_c_ends_the_run_keeps_its_rounds_and_exits_130(tmp_path: Path) -> None:
    rows = [{"arrival_s": i * 0.01, "input_length": 20, "output_length": 10} for i in range(20_000)]
    trace = write_trace(tmp_path / "t.jsonl", rows)
    process = start("replay", trace, *NULL, "--clock", "wall", "--out", tmp_path / "o")
    manifest = tmp_path / "o" / "nano" / "manifest.json"
    deadline = time.monotonic() + 60
    while not manifest.exists():
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.02)
    time.sleep(0.7)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    found = assert_laws(tmp_path / "o" / "nano")
    assert found.status == "interrupted" and found.read("rounds").height > 10
    assert "interrupted" in out
    assert not (tmp_path / "o" / "vllm").exists()  # the rest of the command is not run


def test_the_tiny_model_decides_as_the_null_engine(busy: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    common = ("--clock", "rounds", "--max-model-len", 256, *TIGHT, "--no-report")
    code, text = run("replay", busy, "--engine", "torch", "--model", "tiny", *common, "--out", tmp_path / "tiny")
    assert code == 0, text
    code, text = run("replay", busy, "--engine", "null", *common, "--out", tmp_path / "null")
    assert code == 0, text
    for name in ("nano", "vllm"):
        tiny, null = assert_laws(tmp_path / "tiny" / name), assert_laws(tmp_path / "null" / name)
        assert tiny.manifest["counts"]["preemptions"] > 0
        # Ids differ, lengths and sharing do not: neither do decisions.
        assert tiny.manifest["digest"] == null.manifest["digest"]
        assert tiny.read("tokens")["token_id"].null_count() == 0
        assert null.read("tokens")["token_id"].null_count() == null.read("tokens").height


def test_a_wall_clock_run_of_the_tiny_model_is_repeated_by_the_null_engine(busy: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    first = ("--engine", "torch", "--model", "tiny", *TIGHT, "--no-report")
    code, text = run("replay", busy, *first, "--out", tmp_path / "wall", "--records", "compact")
    assert code == 0, text
    for name in ("nano", "vllm"):
        wall = assert_laws(tmp_path / "wall" / name)
        assert wall.clock == "wall"
        again = ("--engine", "null", "--clock", "recorded", "--from", wall.path, "--no-report", "-s", name)
        code, text = run("replay", busy, *again, "--out", tmp_path / "again")
        assert code == 0, text
        assert assert_laws(tmp_path / "again" / name).manifest["digest"] == wall.manifest["digest"]


def test_sampled_outputs_are_what_the_model_said(busy: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    flags = (
        "--engine",
        "torch",
        "--model",
        "tiny",
        "--clock",
        "rounds",
        "--outputs",
        "sampled",
        "--num-prompts",
        12,
        "--no-report",
    )
    code, text = run("replay", busy, *flags, "--out", tmp_path / "a", "--json")
    assert code == 0, text
    runs = {name: assert_laws(tmp_path / "a" / name) for name in ("nano", "vllm")}
    said = {
        n: r.read("tokens").sort("request", "index").select("request", "index", "token_id") for n, r in runs.items()
    }
    assert said["nano"].equals(said["vllm"])  # greedy, the same prompts: no policy changes what a model says
    assert said["nano"]["token_id"].null_count() == 0
    assert json.loads(text[text.index("{") : text.rindex("}") + 1])["runs"][0]["completed"] == 12
