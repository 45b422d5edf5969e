"""Sweeps: which cells a spec makes, what a failed one leaves, and that a sweep goes on where it stood."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from benchctl.sweep import front
from benchctl.sweep_spec import cells_of, from_flags
from tests.command_line import call, rows, write_trace
from traces.errors import BenchctlError

BASE = {"trace": "t.jsonl", "engine": "null", "scheduler": "vllm"}


def test_a_grid_makes_every_combination_and_a_list_adds_its_own() -> None:
    spec = {"base": BASE, "grid": {"max-num-seqs": [1, 2], "block-size": [16, 32]}, "list": [{"max-num-seqs": 9}]}
    cells = cells_of(spec, "s.toml")
    assert [(c.settings["max-num-seqs"], c.settings.get("block-size")) for c in cells] == [
        (1, 16), (1, 32), (2, 16), (2, 32), (9, None),
    ]  # fmt: skip
    assert len({c.key for c in cells}) == 5
    assert cells[0].argv() == ["replay", "t.jsonl", "--block-size", "16", "--engine", "null", "--max-num-seqs", "1",
                               "--scheduler", "vllm"]  # fmt: skip


def test_a_list_alone_makes_no_bare_cell_and_equal_cells_are_one() -> None:
    assert len(cells_of({"base": BASE, "list": [{"seed": 1}, {"seed": 1}]}, "s")) == 1


def test_repeats_have_seeds_one_apart_and_a_sample_is_drawn_by_seed() -> None:
    cells = cells_of({"base": BASE | {"seed": 7}, "repeat": 3}, "s")
    assert [c.settings["seed"] for c in cells] == [7, 8, 9]
    spec = {"base": BASE, "grid": {"max-num-seqs": list(range(1, 101))}, "sample": 5, "seed": 1}
    first, again = cells_of(spec, "s"), cells_of(spec, "s")
    assert len(first) == 5 and [c.key for c in first] == [c.key for c in again]
    assert [c.key for c in cells_of(spec | {"seed": 2}, "s")] != [c.key for c in first]


def test_switches_and_numbers_of_the_command_line() -> None:
    sets = ["scheduler=vllm", "enable-prefix-caching=true,false", "watermark=0.5"]
    cells = cells_of(from_flags("t.jsonl", sets, 1), "--set")
    assert ["--no-enable-prefix-caching" in c.argv() for c in cells] == [False, True]
    assert all(c.settings["watermark"] == 0.5 for c in cells)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"bse": {}}, "a key 'bse'"),
        ({"base": {"trace": "t"}}, "names no scheduler"),
        ({"base": BASE | {"max-seqs": 3}}, "no flag --max-seqs"),
        ({"base": BASE | {"out": "x"}}, "sweep's own"),
        ({"base": BASE, "grid": {"seed": 3}}, "grid.seed is 3"),
        ({"base": BASE, "grid": {"seed": [[1]]}}, "seed is"),
        ({"base": BASE, "repeat": 0}, r"repeat is 0[\s\S]*a whole number from 1"),
        ({"base": BASE, "grid": {"seed": [1] * 400, "block-size": [1] * 400}}, "160,000 cells"),
    ],
)
def test_a_broken_spec_is_refused_in_words(spec: dict[str, object], says: str) -> None:
    with pytest.raises(BenchctlError, match=says):
        cells_of(spec, "s.toml")


@pytest.mark.parametrize(
    "sets", [["max-num-seqs=1", "max_num_seqs=2"], ["seed=1,2", "seed=3"], ["seed=3", "--seed=1,2"]]
)
def test_an_axis_given_twice_is_refused(sets: list[str]) -> None:
    with pytest.raises(BenchctlError, match="is set twice"):
        from_flags("t.jsonl", sets, 1)


HEAD = '[base]\ntrace = "{trace}"\nscheduler = "vllm"\nengine = "null"\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sample = 2\n" + HEAD + "[random]\nmax-num-seqs = { min = 9, max = 3 }", "random.max-num-seqs goes from min 9 to max 3, which is less\n  in {spec}, line 7"),
        ("sample = 2\n" + HEAD + "[random]\nmax_num_seqs = { min = 0, max = 3 }", "--max-num-seqs is 0\n  in {spec}, line 7"),
        ("sample = 2\n" + HEAD + "[random]\nmax-num-seqs = { min = 1.5, max = 3 }", "max-num-seqs is 1.5: Input should be a valid integer"),
        ("sample = 2\n" + HEAD + "[random]\nmax-num-seqs = [1, [2]]", "max-num-seqs is [2]\n  in {spec}, line 7"),
        ("random = 4\n" + HEAD, "random is 4\n  in {spec}, line 1\n  try: a table: [random]"),
        ("list = 3\n" + HEAD, "list is 3\n  in {spec}, line 1\n  try: a table a cell"),
        ("list = [3]\n" + HEAD, "list is [3]\n  in {spec}, line 1"),
        ('goodput = "ttfx:3"\n' + HEAD, "no SLO: 'ttfx:3'\n  in {spec}, line 1"),
        (HEAD + 'goodput = "ttft:soon"', "no SLO: 'ttft:soon'\n  in {spec}, line 5"),
        (HEAD + '[grid]\ngoodput = ["ttft:3"]', "goodput judges all cells\n  in {spec}, line 6"),
        ('[base]\ntrace = "{trace}"\nscheduler = "vllm"\n[[list]]\ntrace = "nowhere.jsonl"', "no such trace: nowhere.jsonl\n  in {spec}, line 5"),
        (HEAD + '[[list]]\ntrace = "{broken}"', "must be a number, got the text \"x\"\n  in {spec}, line 6 ({broken}, line 1"),
        (HEAD + '[[list]]\nscheduler = "sjf"', "no scheduler named 'sjf'\n  in {spec}, line 6"),
        (HEAD + '[grid]\nclock = ["virtual", "sundial"]', "--clock is 'sundial'\n  in {spec}, line 6"),
        (HEAD + 'profile = "nobody"', "no profile 'nobody'"),
        ("repeat = 2\n" + HEAD + 'seed = "x"', "seed is 'x': Input should be a valid integer"),
        (HEAD + 'burstiness = 1e-9', "--burstiness is 1e-09\n  in {spec}, line 5"),
        (HEAD + 'records = true', "records is True: Option '--records' requires an argument"),
    ],
)  # fmt: skip
def test_a_fault_of_the_spec_is_found_before_the_first_cell(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    trace = write_trace(tmp_path / "t.jsonl", rows((0.0, 20, 5)))
    broken, spec = write_trace(tmp_path / "broken.jsonl", [{"arrival_s": "x"}]), tmp_path / "s.toml"
    named = {"{trace}": trace, "{broken}": broken, "{spec}": spec}
    for word, path in named.items():
        text, says = text.replace(word, str(path)), says.replace(word, str(path))
    spec.write_text(text)
    answer = call(capfd, "sweep", spec, "--out", tmp_path / "o")
    assert answer.code == 2 and says in answer.err, answer
    assert answer.err.startswith("Error: ") and len(answer.err.splitlines()) <= 3 and answer.out == ""
    assert not (tmp_path / "o").exists()


def test_a_fault_of_set_names_the_flag_and_a_missing_trace_itself(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = write_trace(tmp_path / "t.jsonl", rows((0.0, 20, 5)))
    words = ("--set", "engine=null", "--out", tmp_path / "o")
    answer = call(capfd, "sweep", trace, "--set", "scheduler=vllm,sjf", *words)
    assert answer.code == 2 and "no scheduler named 'sjf'\n  in --set\n" in answer.err
    answer = call(capfd, "sweep", tmp_path / "none.jsonl", "--set", "scheduler=vllm", *words)
    assert answer.code == 2 and f"Error: no such trace: {tmp_path}/none.jsonl\n  try: check" in answer.err
    assert not (tmp_path / "o").exists()


def test_a_switch_without_a_word_for_off_is_left_out() -> None:
    off = {"skip-bad": False, "enforce-eager": False, "enable-prefix-caching": False}
    (cell,) = cells_of({"base": BASE | off}, "s")
    assert [word for word in cell.argv() if word.startswith("--no-")] == ["--no-enable-prefix-caching"]
    assert not {"--skip-bad", "--enforce-eager"} & set(cell.argv())


def test_the_front_holds_what_nothing_beats() -> None:
    frame = pl.DataFrame(
        {
            "status": ["complete"] * 4 + ["failed"],
            "output_throughput": [10.0, 20.0, 15.0, 20.0, 99.0],
            "p99_ttft_ms": [1.0, 3.0, 4.0, 3.0, 0.1],
        }
    )
    assert front(frame, "p99_ttft_ms") == [True, True, False, True, False]


def test_a_failed_cell_is_recorded_and_the_sweep_goes_on_and_is_resumed(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = write_trace(tmp_path / "t.jsonl", rows((0.0, 20, 5), (0.0, 30, 5)))
    spec = tmp_path / "s.toml"
    # nano refuses a block size of 1; the others run.
    spec.write_text(
        f'[base]\ntrace = "{trace}"\nengine = "null"\n[grid]\nscheduler = ["nano", "vllm"]\nblock-size = [1, 16]\n'
    )
    answer = call(capfd, "sweep", spec, "--out", tmp_path / "o", "--workers", "2")
    assert answer.code == 1, answer.err
    frame = pl.read_parquet(tmp_path / "o" / "sweep.parquet")
    assert frame["status"].to_list() == ["failed", "complete", "complete", "complete"]
    assert "block" in frame["reason"][0] and frame["reason"].to_list()[1:] == [None] * 3
    assert frame["completed"].to_list() == [None, 2, 2, 2]
    assert frame.filter(pl.col("status") == "complete")["p50_ttft_ms"].null_count() == 0
    assert "failed: scheduler=nano block-size=1" in answer.out
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "o" / "runs").glob("*/*/manifest.json")}
    assert len(before) == 3
    again = call(capfd, "sweep", spec, "--out", tmp_path / "o", "--json")
    assert again.code == 1
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert [row["status"] for row in json.loads(again.out)] == frame["status"].to_list()
