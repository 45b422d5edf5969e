"""What a gate writes for machines: JUnit XML, GitHub's forms, benchmark JSON, and its documented JSON."""

# ruff: noqa: F811 - `made` is a fixture of the other file

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.command_line import call
from tests.test_gate_baseline import edit, gate, made  # noqa: F401

DOCS = Path(__file__).parent.parent / "docs" / "gate.md"


@pytest.fixture
def changed(made: Path) -> Path:
    """A baseline of nano with another number of preemptions and a comma in its name."""
    data = json.loads((made / "b.json").read_text())
    data["entries"][0]["counters"]["preemptions"] += 1
    data["entries"][0]["name"] = "t, with: signs/nano"
    (made / "b.json").write_text(json.dumps(data))
    return made


def test_junit_has_a_case_for_each_figure(changed: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert gate(capfd, changed, changed / "out/nano", "--junit", changed / "deep/j.xml").code == 3
    root = ElementTree.parse(changed / "deep/j.xml").getroot()
    suites = {suite.get("name"): suite for suite in root}
    assert suites["t, with: signs/nano"].get("failures") == "1"
    cases = {case.get("name"): case for case in suites["t, with: signs/nano"]}
    assert int(suites["t, with: signs/nano"].get("tests", 0)) == len(cases)
    failure = cases["preemptions"].find("failure")
    assert failure is not None and "allowed: equal" in str(failure.get("message"))
    assert cases["evictions"].find("failure") is None
    # The other entry was given no run: it is there and skipped.
    assert suites["t/vllm"].get("skipped") == "1" and suites["t/vllm"][0].find("skipped") is not None


def test_github_gets_a_summary_and_an_annotation(
    changed: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = changed / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    answer = gate(capfd, changed, changed / "out/nano", "--github")
    assert answer.code == 3
    assert summary.read_text().startswith("before\n## gate against ") and "| preemptions |" in summary.read_text()
    lines = [line for line in answer.out.splitlines() if line.startswith("::")]
    assert len(lines) == 1 and lines[0].startswith("::error file=")
    assert "title=t%2C with%3A signs/nano changed::preemptions: " in lines[0] and "\n" not in lines[0]


def test_github_without_its_variable_says_so_and_goes_on(
    made: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    answer = gate(capfd, made, made / "out", "--github")
    assert answer.code == 0 and "GITHUB_STEP_SUMMARY is not set" in answer.err


def test_benchmark_json_is_the_form_of_github_action_benchmark(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    gate(capfd, made, made / "out", "--benchmark", made / "bm.json")
    found = json.loads((made / "bm.json").read_text())
    assert all(set(each) == {"name", "unit", "value"} and isinstance(each["value"], (int, float)) for each in found)
    names = {each["name"] for each in found}
    assert "t/nano: preemptions" in names and "t/nano: cached_tokens" not in names  # more hits are not worse


def test_the_json_is_documented(changed: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = json.loads(gate(capfd, changed, changed / "out", "--json").out)
    text = DOCS.read_text()
    entry = found["entries"][0]
    for key in (*found, *entry, *entry["findings"][0]):
        assert f"`{key}`" in text, key
    for key in json.loads((changed / "b.json").read_text())["entries"][0]:
        assert f"`{key}`" in text, key


def test_the_output_is_the_same_each_time(changed: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert gate(capfd, changed, changed / "out").out == gate(capfd, changed, changed / "out").out


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--timing"], "--timing says what --update keeps"),
        (["--update", "--json"], "--update writes the baseline and gates nothing"),
        (["--github", "--json"], "--github prints annotations among which JSON is lost"),
    ],
)
def test_flags_that_do_not_go_together(
    made: Path, capfd: pytest.CaptureFixture[str], argv: list[str], text: str
) -> None:
    answer = gate(capfd, made, made / "out", *argv)
    assert answer.code == 2 and text in answer.err


def test_without_a_log_the_gate_says_what_would_give_one(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = json.loads((made / "b.json").read_text())["entries"][0]
    edit(made, counters=data["counters"] | {"preemptions": 0}, log=None)
    answer = gate(capfd, made, made / "out/nano")
    assert answer.code == 3 and "--against RUN gives one" in " ".join(answer.out.split())
    other = call(
        capfd, "replay", made / "t.jsonl", "--engine", "null", "--scheduler", "nano", "--no-report", "--out", made / "other",
        "--block-size", 16, "--kv-cache-tokens", 1024,
    )  # fmt: skip
    assert other.code == 0
    answer = gate(capfd, made, made / "out/nano", "--against", made / "other/nano")
    assert answer.code == 3 and "The first decision that differs" in answer.out
