"""Flags of a replay as a user gives them: folders of earlier runs, other spellings, what has no effect, the forms of --json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchctl.app import as_typed
from benchctl.build import without_effect
from benchctl.engine_choice import EngineChoice
from reports.run import open_run
from tests.command_line import call, rows, write_trace
from traces.errors import BenchctlError
from traces.load import open_trace

NULL = ("--engine", "null", "--no-report")
SPF = "examples.shortest_prompt_first:ShortestPromptFirst"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "t.jsonl", rows((0.0, 40, 8), (0.001, 300, 4), (0.002, 20, 12)))


def digests(folder: Path) -> dict[str, Any]:
    return {run.name: open_run(run).manifest["digest"] for run in sorted(folder.iterdir())}


def test_from_a_folder_of_both_policies_each_takes_its_own(
    trace: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    limits = ("--kv-cache-tokens", 512)
    assert call(capfd, "replay", trace, *NULL, *limits, "--out", tmp_path / "a").code == 0
    again = ("replay", trace, *NULL, "--clock", "recorded", "--from", tmp_path / "a")
    assert call(capfd, *again, "--out", tmp_path / "b").code == 0
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert {name: open_run(tmp_path / "b" / name).manifest["from"] for name in ("nano", "vllm")} == {
        name: str(tmp_path / "a" / name) for name in ("nano", "vllm")
    }
    # The pool is that of the earlier runs; one of two may be asked for.
    assert open_run(tmp_path / "b" / "nano").manifest["limits"]["usable_tokens"] == 512
    assert call(capfd, *again, "--out", tmp_path / "c", "-s", "vllm").code == 0
    assert digests(tmp_path / "c") == {"vllm": digests(tmp_path / "a")["vllm"]}


def test_from_a_folder_that_leaves_a_choice_is_one_line(
    trace: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    call(capfd, "replay", trace, *NULL, "--out", tmp_path / "a")
    again = ("replay", trace, *NULL, "--clock", "recorded", "--from", tmp_path / "a", "--out", tmp_path / "b")
    answer = call(capfd, *again, "-s", SPF)
    assert answer.code == 2 and "holds runs of nano and vllm, none of shortest-prompt-first" in answer.err
    assert f"--from {tmp_path / 'a' / 'nano'}" in answer.err
    shutil.copytree(tmp_path / "a" / "nano", tmp_path / "a" / "nano-2")
    answer = call(capfd, *again)
    assert answer.code == 2 and "holds 2 runs of nano: nano, nano-2" in answer.err
    shutil.rmtree(tmp_path / "a" / "nano-2")
    manifest = json.loads((tmp_path / "a" / "nano" / "manifest.json").read_text())
    manifest["config"]["seed"]["value"] = 7
    (tmp_path / "a" / "nano" / "manifest.json").write_text(json.dumps(manifest))
    answer = call(capfd, *again)
    assert answer.code == 2 and "differ in seed: nano 7, vllm 0" in answer.err


def test_a_policy_of_ones_own_is_repeated_from_its_run(
    trace: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert call(capfd, "replay", trace, *NULL, "-s", SPF, "--out", tmp_path / "a").code == 0
    again = ("replay", trace, *NULL, "--clock", "recorded", "--from", tmp_path / "a", "--out", tmp_path / "b")
    assert call(capfd, *again).code == 0
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


def test_json_is_one_object_for_one_run_and_a_list_for_several(
    trace: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one = call(capfd, "replay", trace, *NULL, "-s", "nano", "--json", "--out", tmp_path / "one")
    two = call(capfd, "replay", trace, *NULL, "--json", "--out", tmp_path / "two")
    first, both = json.loads(one.out), json.loads(two.out)
    assert first["benchctl"]["run"]["scheduler"] == "nano" and first["completed"] == 3
    assert set(both) == {"runs"}
    assert [run["benchctl"]["run"]["scheduler"] for run in both["runs"]] == ["nano", "vllm"]
    assert set(both["runs"][0]) == set(first)
    repeated = call(capfd, "replay", trace, *NULL, "-s", "nano", "--num-repeats", 2, "--json", "--out", tmp_path / "r")
    assert len(json.loads(repeated.out)["runs"]) == 2
    # What `report --format json` prints of the same runs has the same form.
    assert set(json.loads(call(capfd, "report", tmp_path / "two", "--format", "json").out)) == {"runs"}
    assert json.loads(call(capfd, "report", tmp_path / "one", "--format", "json").out)["completed"] == 3


@pytest.mark.parametrize(
    ("asked", "code", "text"),
    [
        ("vLLM", 0, ""),
        ("NANO", 0, ""),
        ("vlm", 2, "no scheduler named 'vlm'; did you mean vllm?"),
        ("nano-vllm", 2, "did you mean nano?"),
        ("sjf", 2, "no scheduler named 'sjf'\n"),
    ],
)
def test_schedulers_may_be_spelled_as_they_spell_themselves(
    trace: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], asked: str, code: int, text: str
) -> None:
    answer = call(capfd, "replay", trace, *NULL, "-s", asked, "--out", tmp_path / "o")
    assert answer.code == code and text in answer.err, answer.err


def test_flags_without_effect_are_said(trace: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    answer = call(
        capfd, "replay", trace, *NULL, "--gpu-memory-utilization", 0.5, "--dtype", "float16", "--out", tmp_path / "o"
    )
    said = "--gpu-memory-utilization, --dtype: without effect, the null engine has no model and no card here"
    assert answer.code == 0 and said in answer.err
    assert said in open_run(tmp_path / "o" / "nano").manifest["notes"]


def test_a_model_without_effect_is_said_and_one_whose_tokenizer_is_used_is_not(
    trace: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    answer = call(
        capfd, "replay", trace, *NULL, "--model", "zz", "--temperature", 0.5, "--overlap", "--out", tmp_path / "o"
    )
    said = "--model, --temperature, --overlap: without effect, the null engine has no model and no card here"
    assert answer.code == 0 and said in answer.err
    assert said in open_run(tmp_path / "o" / "nano").manifest["notes"]
    answer = call(capfd, "replay", trace, *NULL, "--no-overlap", "--out", tmp_path / "p")
    assert "without effect" not in answer.err
    from benchctl.commands_shrink import replay_options_of

    text = write_trace(tmp_path / "text.jsonl", [{"arrival_s": 0, "prompt": "hello", "output_length": 2}])
    options = replay_options_of(str(text), ["--model", "folder"])
    assert without_effect(options, EngineChoice("null", "asked for"), open_trace(str(text))) == []


def test_a_refusal_names_the_flag_that_was_typed() -> None:
    error = BenchctlError("--num-blocks is 0", where="--num-blocks", fix="a smaller --num-blocks")
    assert "num-gpu" not in str(as_typed(error, ["replay", "--num-blocks", "0"]))
    for words in (["--num-gpu-blocks-override", "0"], ["--num-gpu-blocks-override=0"]):
        assert str(as_typed(error, words)).count("--num-gpu-blocks-override") == 3
