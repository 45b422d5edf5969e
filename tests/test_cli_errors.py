"""What the command line refuses: (arguments, exit code, text). Always a few lines, never a traceback, nothing left behind."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchctl.cli_docs import markdown
from tests.command_line import call, rows, write_trace

ROOT = Path(__file__).parents[1]
OK = "replay {trace} --engine null --no-report --out {out} "

# {trace} three small rows, {out} a folder that does not exist, {run} a run of {trace}, {other} another trace, {text} one of text.
ERRORS = [
    ("replay", 2, "Missing argument"),
    ("replay nowhere.jsonl --engine null", 2, "no such trace: nowhere.jsonl"),
    ("replay {trace} --nonsense", 2, "No such option"),
    (OK + "-s sjf", 2, "no scheduler named 'sjf'"),
    (OK + "-s nano -s nano", 2, "a scheduler is named twice"),
    (OK + "-s nano --watermark 0.1", 2, "--watermark is no setting of nano\n  try: leave it out, or add --scheduler vllm"),
    (OK + "-s nano --no-enable-chunked-prefill", 2, "--enable-chunked-prefill is no setting of nano"),
    (OK + "--num-blocks 10", 2, "block sizes differ (nano 256, vllm 16)\n  try: --kv-cache-tokens N"),
    (OK + "-s vllm --num-blocks 10 --kv-cache-tokens 160", 2, "both set the pool"),
    (OK + "--kv-cache-tokens 1000", 2, "--kv-cache-tokens 1000 is no multiple of the block size 256\n  try: --kv-cache-tokens 768"),
    (OK + "--kv-cache-tokens 0", 2, "--kv-cache-tokens is 0\n  try: give 1 or more"),
    (OK + "-s vllm --num-gpu-blocks-override 1", 2, "leaves vllm no usable block"),
    (OK + "-s vllm --num-blocks 999999999999", 2, "a pool of 999999999999 blocks is beyond what is kept in memory"),
    (OK + "-s nano --block-size 1", 2, "nano needs --block-size 2 or more"),
    (OK + "--block-size 0", 2, "--block-size is 0"),
    (OK + "--max-num-seqs 0", 2, "--max-num-seqs is 0"),
    (OK + "--max-num-batched-tokens 8 --max-num-seqs 9", 2, "vllm needs --max-num-batched-tokens (8) >= --max-num-seqs (9)"),
    (OK + "-s vllm --max-model-len 64 --no-enable-chunked-prefill --max-num-batched-tokens 32 --max-num-seqs 4", 2, "without chunked prefill"),
    (OK + "-s vllm --long-prefill-token-threshold -1", 2, "--long-prefill-token-threshold is -1"),
    (OK + "-s vllm --scheduling-policy lifo", 2, "--scheduling-policy is 'lifo'\n  try: one of fcfs, priority"),
    (OK + "-s vllm --watermark 1.5", 2, "--watermark is 1.5"),
    (OK + "-s vllm --max-loras 0", 2, "--max-loras is 0"),
    (OK + "--clock sundial", 2, "--clock is 'sundial'"),
    (OK + "--clock recorded", 2, "--clock recorded needs the run whose admissions it repeats\n  try: --from RUN"),
    (OK + "--from {run} --set max_num_seq=4", 2, "a run has no setting 'max_num_seq'\n  in --set\n  try: did you mean max_num_seqs?"),
    (OK + "--set seed=1", 2, "--set changes a recorded run, and none is named"),
    (OK + "--clock recorded --from {out}/none", 2, "no run at"),
    (OK + "--clock recorded --from {run} --request-rate 3", 2, "--request-rate changes arrivals"),
    (OK + "--time-scale 2 --speedup 2", 2, "--time-scale multiplies the gaps and --speedup divides them"),
    (OK + "--speedup 0", 2, "--speedup is 0.0"),
    (OK + "--request-rate fast", 2, "--request-rate is 'fast'"),
    (OK + "--request-rate 0", 2, "--request-rate is '0'"),
    (OK + "--request-rate 3 --speedup 2", 2, "--request-rate replaces the gaps"),
    (OK + "--burstiness 2", 2, "--burstiness shapes the gaps of --request-rate"),
    (OK + "--warm-cache", 2, "there are none\n  try: --num-warmups N"),
    (OK + "--num-repeats 0", 2, "--num-repeats is 0"),
    (OK + "--round-cost 1,2", 2, "--round-cost is '1,2'\n  try: three numbers of seconds"),
    (OK + "--round-cost 1,-2,0", 2, "a round cost is three finite numbers"),
    (OK + "--round-cost 1e300,0,0", 2, "far beyond any device\n  try: at most 10000 s a round, 1 a token, 0.001 a token of context"),
    (OK + "--round-cost 0,0,inf", 2, "--round-cost is '0,0,inf', far beyond any device"),
    (OK + "--round-seconds 0", 2, "--round-seconds is 0.0"),
    (OK + "--goodput ttft=3", 2, "no SLO: 'ttft=3'"),
    (OK + "--goodput ttft:3 --goodput ttft:4", 2, "two SLOs for ttft"),
    (OK + "--metric-percentiles 50,100", 2, "--metric-percentiles is '50,100'"),
    (OK + "--percentile-metrics ttft,speed", 2, "no metric named 'speed'"),
    (OK + "--over-length shrink", 2, "--over-length is 'shrink'"),
    (OK + "--records some", 2, "--records is 'some'"),
    (OK + "--outputs sampled", 2, "the null engine chooses no tokens"),
    ("replay {trace} --engine simulated --out {out}", 2, "which device is to be simulated?\n  in --engine\n  try: --profile FILE, made by benchctl calibrate RUN... -o FILE"),
    ("replay {trace} --engine simulated --profile {full} --out {out}", 2, "full is a folder; a profile is one JSON file, or a name\n  in --profile\n  try: h200-"),
    ("replay {trace} --engine vroom --out {out}", 2, "--engine is 'vroom'"),
    ("replay {trace} --engine torch --round-cost 1,1,1 --out {out}", 2, "--round-cost is what a round of the null engine takes"),
    ("replay {text} --engine null --out {out}", 2, "the trace has text, and the null engine has no tokenizer"),
    ("replay {text} --engine torch --model tiny --out {out}", 2, "the trace has text, and tiny has no tokenizer"),
    ("replay {ticks} --engine null --out {out}", 2, "arrival_round, which only a clock of rounds knows"),
    ("replay {trace} --engine null --out {run}/.. -s nano", 2, "holds an earlier run\n  in --out\n  try: name another --out, or pass --force"),
    ("replay {trace} --engine null --out {full} -s nano --force", 2, "is not empty, and holds no run"),
    ("replay {other} --engine null --clock recorded --from {run} --out {out}", 2, "the earlier run replayed another trace"),
    ("replay {broken} --engine null --out {out}", 2, "line 2"),
    ("replay {limits} --engine null --out {out}", 2, "limits.max_num_seqs is 'many'\n  in the trace's header line"),
    ("report {out}", 2, "no run at"),
    ("report {full}", 2, "is not a run folder"),
    ("frobnicate", 2, "No such command"),
]  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("cli")
    found = {
        "trace": write_trace(base / "trace.jsonl", rows((0, 8, 2), (0, 9, 2), (1, 8, 3))),
        "other": write_trace(base / "other.jsonl", rows((0, 8, 2))),
        "text": write_trace(base / "text.jsonl", [{"arrival_s": 0, "prompt": "hello", "output_length": 2}]),
        "ticks": write_trace(base / "ticks.jsonl", [{"arrival_round": 1, "input_length": 4, "output_length": 2}]),
        "limits": write_trace(base / "limits.jsonl", rows((0, 8, 2)), limits={"common": {"max_num_seqs": "many"}}),
        "full": base / "full",
        "run": base / "runs" / "nano",
    }
    found["broken"] = base / "broken.jsonl"
    found["broken"].write_text(
        '{"arrival_s": 0, "input_length": 4, "output_length": 1}\n{"arrival_s": 0, "input_length": 0}\n'
    )
    (found["full"] / "nano").mkdir(parents=True)
    (found["full"] / "nano" / "thesis.txt").write_text("do not lose me")
    argv = ["replay", str(found["trace"]), "--engine", "null", "--no-report", "--out", str(base / "runs"), "-s", "nano"]
    subprocess.run([sys.executable, "-m", "benchctl", *argv], check=True, capture_output=True)
    return found


@pytest.mark.parametrize(("line", "code", "text"), ERRORS, ids=[f"{i}-{e[2][:40]}" for i, e in enumerate(ERRORS)])
def test_it_refuses(
    capfd: pytest.CaptureFixture[str], places: dict[str, Path], tmp_path: Path, line: str, code: int, text: str
) -> None:
    out = tmp_path / "out"
    answer = call(capfd, *shlex.split(line.format(out=out, **places)))
    assert answer.code == code, answer
    assert text in answer.err, answer.err
    assert "Traceback" not in answer.err and answer.out == ""
    assert not out.exists(), "a refused command leaves nothing behind"
    assert (places["full"] / "nano" / "thesis.txt").exists()


def test_the_console_script_prints_an_error_on_stderr_and_exits_with_its_code(places: dict[str, Path]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchctl", "replay", "nowhere.jsonl", "--engine", "null"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("Error: no such trace: nowhere.jsonl\n")


def test_force_replaces_a_run_and_only_that(
    places: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = ["replay", places["trace"], "--engine", "null", "--no-report", "-s", "nano", "--out", tmp_path / "o"]
    assert call(capfd, *argv).code == 0
    (tmp_path / "o" / "notes.txt").write_text("mine")
    first = (tmp_path / "o" / "nano" / "manifest.json").read_text()
    assert call(capfd, *argv, "--force").code == 0
    assert (tmp_path / "o" / "nano" / "manifest.json").read_text() != first
    assert (tmp_path / "o" / "notes.txt").read_text() == "mine"


def test_json_is_the_only_thing_on_stdout(
    places: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    answer = call(
        capfd, "replay", places["trace"], "--engine", "null", "--no-report", "--json", "-s", "vllm", "--out", tmp_path / "o",
        "--metric-percentiles", "50,99.9", "--percentile-metrics", "ttft",
    )  # fmt: skip
    found = json.loads(answer.out)
    assert found["completed"] == 3 and found["total_output_tokens"] == 7
    assert "p99.9_ttft_ms" in found and "p50_tpot_ms" not in found
    assert found["benchctl"]["path"] == str(tmp_path / "o" / "vllm")


def test_flags_of_one_policy_are_said_to_apply_to_it(
    places: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    answer = call(
        capfd,
        "replay",
        places["trace"],
        "--engine",
        "null",
        "--no-report",
        "--watermark",
        "0.1",
        "--out",
        tmp_path / "o",
    )
    assert answer.code == 0 and "--watermark applies to vllm only" in answer.err
    assert "watermark 0.1 (flag)" in answer.err and "max_num_seqs 512 (default)" in answer.err


def test_the_round_table_is_printed_for_short_runs_of_rounds(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    answer = call(
        capfd, "replay", ROOT / "traces" / "walkthrough.jsonl", "-s", "nano", "--engine", "null", "--clock", "rounds",
        "--no-report", "--out", tmp_path / "o",
    )  # fmt: skip
    assert answer.code == 0
    for text in ("R1 R2 R3 R4", "11 → 6", "6 → 1", "1 → 0", "0 → 1 → 0"):
        assert text in answer.out


def test_doctor_says_what_is_there(capfd: pytest.CaptureFixture[str]) -> None:
    found = json.loads(call(capfd, "doctor", "--json").out)
    assert found["versions"]["polars"] and found["hardware"]["cores"] >= 1
    assert not any(problem["required"] for problem in found["problems"])
    text = call(capfd, "doctor").out
    assert "benchctl" in text and "--engine auto" in text


def test_no_color_is_honoured() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchctl", "replay", "--help"], capture_output=True, text=True,
        env={"NO_COLOR": "1", "FORCE_COLOR": "1", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0 and "\x1b[" not in done.stdout


def test_docs_cli_is_what_help_says() -> None:
    assert (ROOT / "docs" / "cli.md").read_text() == markdown(), "run `make docs`"
