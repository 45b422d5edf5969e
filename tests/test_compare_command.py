"""`benchctl compare` as a user meets it: sides, refusals, verdicts, the three outputs, and that its figures are the runs'."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from reports.compare import compare
from reports.compare_head import make_sides
from reports.run import open_run
from reports.summary import summarize
from tests.command_line import call, rows, write_trace

ROWS = rows(*((0.4 * i, 60 + 37 * (i % 7), 5 + 3 * (i % 4)) for i in range(40)))
POOL = ("--kv-cache-tokens", 1024, "--block-size", 16, "--max-num-seqs", 8, "--max-num-batched-tokens", 256)


def replay(capfd: pytest.CaptureFixture[str], trace: Path, out: Path, *more: object) -> Path:
    answer = call(
        capfd, "replay", trace, "--engine", "null", "--round-cost", "0.05,1e-3,0", "--no-report", "--out", out, *POOL, *more
    )  # fmt: skip
    assert answer.code == 0, answer.err
    return out


@pytest.fixture(autouse=True)
def fewer_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reports.compare_stats.RESAMPLES", 200)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A paired run of a small trace, made once."""
    import subprocess
    import sys

    folder = tmp_path_factory.mktemp("compare")
    trace = write_trace(folder / "t.jsonl", ROWS)
    argv = [
        "replay",
        trace,
        "--engine",
        "null",
        "--round-cost",
        "0.05,1e-3,0",
        "--no-report",
        "--out",
        folder / "out",
        *POOL,
    ]
    subprocess.run([sys.executable, "-m", "benchctl", *map(str, argv)], check=True, capture_output=True)
    return folder


def test_the_terminal_reads_at_80_columns(
    made: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    answer = call(capfd, "compare", made / "out/nano", made / "out/vllm")
    assert answer.code == 0 and answer.err == ""
    assert all(len(line) <= 80 for line in answer.out.splitlines())
    for heading in (
        "Settings that differ",
        "Metrics",
        "Decisions",
        "Divergences by reason",
        "Requests that differ most",
    ):
        assert heading in answer.out


def test_one_folder_of_two_schedulers_is_two_sides(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    one = json.loads(call(capfd, "compare", made / "out", "--json").out)
    two = json.loads(call(capfd, "compare", made / "out/nano", made / "out/vllm", "--json").out)
    assert one == two
    assert (one["a"]["name"], one["b"]["name"]) == ("nano", "vllm")


def test_the_json_has_its_documented_keys(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = json.loads(call(capfd, "compare", made / "out", "--json").out)
    assert list(found) == [
        "benchctl_compare", "trace", "a", "b", "settings", "warnings", "method", "min_repeats", "metrics", "decisions", "work",
        "requests",
    ]  # fmt: skip
    assert list(found["metrics"][0]) == [
        "key", "unit", "better", "a", "b", "difference", "relative", "interval", "verdict", "why",
    ]  # fmt: skip
    documented = Path(__file__).parent.parent.joinpath("docs/compare.md").read_text()
    for key in (
        *found,
        *found["metrics"][0],
        *found["decisions"],
        *found["decisions"]["chain"][0],
        *found["work"],
        *found["requests"][0],
    ):
        assert f"`{key}`" in documented, key


def test_every_figure_is_the_run_s_own(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = {row["key"]: row for row in json.loads(call(capfd, "compare", made / "out", "--json").out)["metrics"]}
    a, b = make_sides([made / "out"], [])
    for side, run in (("a", a.first), ("b", b.first)):
        summary = summarize(run)
        assert found["ttft.p90"][side] == summary["p90_ttft_ms"]
        assert found["itl.mean"][side] == summary["mean_itl_ms"]
        assert found["output_throughput"][side] == summary["output_throughput"]
        assert found["preemptions"][side] == run.read("rounds")["preempted"].sum()
        assert found["rounds.mixed"][side] == (run.read("rounds")["kind"] == "mixed").sum()
    for row in found.values():
        assert row["difference"] == (None if row["a"] is None or row["b"] is None else row["b"] - row["a"])


def test_a_verdict_follows_its_interval(made: Path) -> None:
    for row in compare(*make_sides([made / "out"], [])).metrics:
        if row.verdict in ("better", "worse") and row.interval is not None:
            assert row.interval.low * row.interval.high > 0, row
            assert (row.verdict == "better") == ((row.difference < 0) == (row.better == "lower")), row
        if row.verdict == "differs":
            assert row.better is None and row.difference, row
        if row.verdict == "can't tell":
            assert row.why, row


def test_a_run_against_itself_is_the_same_in_everything(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = json.loads(call(capfd, "compare", made / "out/nano", made / "out/nano", "--json").out)
    assert found["settings"] == [] and found["warnings"] == [] and found["requests"] == []
    assert found["decisions"]["equal"] is True and found["decisions"]["differing_rounds"] == 0
    assert {row["verdict"] for row in found["metrics"] if row["key"] != "schedule_us"} == {"same"}


def test_another_trace_is_refused(made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    other = replay(capfd, write_trace(tmp_path / "other.jsonl", ROWS[:-1]), tmp_path / "other", "--scheduler", "nano")
    answer = call(capfd, "compare", made / "out/nano", other / "nano")
    assert answer.code == 2 and "the runs replayed different traces: t (" in answer.err
    assert "try: replay the same trace under both" in answer.err


def test_another_workload_is_a_warning_at_the_head(
    made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = replay(capfd, made / "t.jsonl", tmp_path / "o", "--scheduler", "nano", "--num-prompts", 20, "--speedup", 2)
    found = json.loads(call(capfd, "compare", made / "out/nano", out / "nano", "--json").out)
    assert found["warnings"][0] == "the sides did not get the same work: time_scale none / 0.5, num_prompts none / 20"
    assert found["warnings"][1].startswith(
        "the policies saw different arrivals: 19 of 20 requests arrived at other times"
    )
    assert [each["name"] for each in found["settings"][:2]] == ["time_scale", "num_prompts"]


def test_sessions_move_arrivals_and_compare_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    turns: list[dict[str, Any]] = []
    for s in range(6):
        turns.append(
            {
                "id": f"s{s}a",
                "arrival_s": 0.1 * s,
                "session": f"s{s}",
                "turn": 1,
                "input_length": 100,
                "output_length": 6,
            }
        )
        turns.append(
            {
                "id": f"s{s}b",
                "session": f"s{s}",
                "turn": 2,
                "parents": [f"s{s}a"],
                "think_s": 0.3,
                "input_length": 50,
                "output_length": 4,
            }
        )
    out = replay(capfd, write_trace(tmp_path / "t.jsonl", turns), tmp_path / "o", "--arrivals", "session")
    warnings = json.loads(call(capfd, "compare", out, "--json").out)["warnings"]
    assert len(warnings) == 1 and "a turn comes after its parent finished" in warnings[0]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], "no runs are given"),
        (["a", "b", "c"], "3 runs are given by place; two are compared"),
        (["--a", "x"], "one side has no run"),
        (["x", "--a", "x", "--b", "y"], "sides are given both by place and by --a or --b"),
        (["x", "y", "--json", "--md"], "--json and --md are two outputs"),
        (["x", "y", "--min-effect", "lots"], "--min-effect is 'lots'"),
        (["x", "y", "--requests", "-1"], "--requests is -1"),
        (["no-such-run", "y"], "no run at no-such-run"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(capfd: pytest.CaptureFixture[str], argv: list[str], text: str) -> None:
    answer = call(capfd, "compare", *argv)
    assert (answer.code, answer.out) == (2, "") and text in answer.err and "try: " in answer.err


def test_a_folder_of_one_scheduler_has_no_other_side(
    made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(made / "out/nano", tmp_path / "o/nano")
    answer = call(capfd, "compare", tmp_path / "o")
    assert answer.code == 2 and "holds runs of nano only: two sides are needed" in answer.err


def test_markdown_and_html_say_what_the_terminal_says(
    made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "deep/er/c.html"
    text = call(capfd, "compare", made / "out", "--md", "--html", page).out
    assert text.startswith("## nano (A) against vllm (B)\n") and "| ---" in text.replace("|---", "| ---")
    html = page.read_text()
    assert '<section id="comparison"' in html and "Divergences by reason, at equal work" in html
    first = json.loads(call(capfd, "compare", made / "out", "--json").out)["decisions"]["chain"][0]["text"]
    assert first.replace("<", "&lt;") in html and first.split(";")[0][:60].replace("[", "\\[") in text


def test_summary_records_compare_without_decisions(
    made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = replay(capfd, made / "t.jsonl", tmp_path / "o", "--records", "summary")
    answer = call(capfd, "compare", out)
    assert answer.code == 0 and "not compared: a run kept no decision log" in answer.out
    found = json.loads(call(capfd, "compare", out, "--json").out)
    assert found["decisions"] is None and found["work"] is None


def with_times(run: Path, folder: Path, factor: float, started: str) -> Path:
    """A copy of a run on a `wall` clock whose times are all `factor` longer: a repeat on a machine of another speed."""
    import polars as pl

    shutil.copytree(run, folder)
    for part in folder.glob("*.parquet"):
        frame = pl.read_parquet(part)
        times = [name for name in frame.columns if name.endswith("_s") and name != "arrival_s"]
        frame.with_columns(pl.col(times) * factor).write_parquet(part)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest |= {"clock": "wall", "started": started}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_repeats_are_judged_by_pairs(made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Three interleaved pairs; B is 10 % slower each time, and both drift by more than that."""
    argv: list[object] = []
    for i, drift in enumerate((1.0, 1.3, 1.6)):
        for side, factor in (("a", drift), ("b", drift * 1.1 + 0.001 * i)):
            started = f"2026-01-01T00:00:{2 * i + (side == 'b'):02}"
            argv += [f"--{side}", with_times(made / "out/vllm", tmp_path / f"{side}{i}", factor, started)]
    found = json.loads(call(capfd, "compare", *argv, "--json").out)
    rows = {row["key"]: row for row in found["metrics"]}
    assert found["method"].startswith("95% intervals over 3 pairs of runs, Student's t")
    assert rows["itl.mean"]["verdict"] == "worse" and rows["duration"]["verdict"] == "worse"
    assert rows["preemptions"]["verdict"] == "same" and rows["preemptions"]["interval"] == [0.0, 0.0]
    assert not any("interleaved" in warning for warning in found["warnings"])
    two = json.loads(call(capfd, "compare", *argv[:8], "--json").out)
    assert {row["verdict"] for row in two["metrics"] if row["key"] == "itl.mean"} == {"can't tell"}


def test_single_runs_on_the_wall_clock_tell_of_requests_alone(
    made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    a = with_times(made / "out/vllm", tmp_path / "a", 1.0, "2026-01-01T00:00:00")
    b = with_times(made / "out/vllm", tmp_path / "b", 2.0, "2026-01-01T00:00:01")
    found = json.loads(call(capfd, "compare", a, b, "--json").out)
    rows = {row["key"]: row for row in found["metrics"]}
    # Every gap is twice as long, whichever requests are drawn; how runs vary is another question, and said.
    assert rows["itl.p50"]["verdict"] == "worse" and rows["itl.p50"]["interval"][0] > 0
    assert "measured once on each side: what a repeat would change is not in it" in found["method"]
    assert rows["duration"]["verdict"] == "can't tell" and "3 repeats are needed" in rows["duration"]["why"]


def test_repeats_run_one_side_after_the_other_are_warned_of(
    made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv: list[object] = []
    for i, side in enumerate("aabb"):
        argv += [f"--{side}", with_times(made / "out/vllm", tmp_path / f"{side}{i}", 1.0, f"2026-01-01T00:00:0{i}")]
    warnings = json.loads(call(capfd, "compare", *argv, "--json").out)["warnings"]
    assert any("the repeats were not interleaved" in warning for warning in warnings)


def test_repeats_must_be_of_one_thing(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    answer = call(capfd, "compare", "--a", made / "out/nano", "--a", made / "out/vllm", "--b", made / "out/nano")
    assert answer.code == 2 and "side A is no set of repeats" in answer.err and "differ in policy" in answer.err


def test_a_clock_of_rounds_is_told_in_rounds(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "w"
    argv = ("replay", "traces/walkthrough.jsonl", "--engine", "null", "--clock", "rounds", "--no-report", "--out", out)
    assert call(capfd, *argv).code == 0
    told = " ".join(call(capfd, "compare", out, "--md").out.split())
    assert "| mean, rounds | 1.40 | 2.20 | +0.80 |" in told and "| requests/round |" in told
    assert "| R3 | 255 + 20 | 24 | 20 | −4 | 0 | decode −4 | 0 / 0 |" in told
    assert "kept requests waiting for 1 request-round, vllm for 0" in told
    life = call(capfd, "explain", out / "nano", "--request", "R5").out
    spike = call(capfd, "explain", out / "nano", "--spike").out
    assert "TTFT 1 round, E2E" in life and ": 5 rounds, R5" in " ".join(spike.split())
    assert not re.search(r"\d ms\b|\d s\b", told.replace("schedule(), µs", "") + life + spike)


def test_evictions_of_unequal_blocks_are_told_in_tokens(
    made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "unequal"
    argv = ("--kv-cache-tokens", "512", "--engine", "null", "--no-report", "--out", out)
    assert call(capfd, "replay", made / "t.jsonl", "--scheduler", "nano", "--block-size", "16", *argv).code == 0
    assert call(capfd, "replay", made / "t.jsonl", "--scheduler", "vllm", "--block-size", "8", *argv).code == 0
    found = {row["key"]: row for row in json.loads(call(capfd, "compare", out, "--json").out)["metrics"]}["evictions"]
    counts = [open_run(out / policy).read("rounds")["evicted"].sum() for policy in ("nano", "vllm")]
    assert (found["a"], found["b"], found["unit"]) == (counts[0] * 16, counts[1] * 8, "tokens") and min(counts) > 0
    assert found["better"] is None and found["verdict"] == "differs"
    assert "evicted tokens" in call(capfd, "compare", out).out
    same = {row["key"]: row for row in json.loads(call(capfd, "compare", made / "out", "--json").out)["metrics"]}[
        "evictions"
    ]
    assert same["unit"] == "blocks" and "evicted blocks" in call(capfd, "compare", made / "out").out


@pytest.mark.parametrize("table", ["rounds", "requests", "blocks", "batches"])
@pytest.mark.parametrize("cut", [True, False], ids=["cut off", "overwritten"])
def test_a_damaged_run_is_one_error(capfd: pytest.CaptureFixture[str], tmp_path: Path, table: str, cut: bool) -> None:
    run = replay(capfd, write_trace(tmp_path / "t.jsonl", ROWS), tmp_path / "o", "-s", "vllm") / "vllm"
    shutil.copytree(run, tmp_path / "whole")
    file = run / f"{table}-00000.parquet"
    whole = file.read_bytes()
    # Without its footer a file fails where it is opened, with a wrong page where its rows are read.
    file.write_bytes(whole[:100] if cut else whole[:4] + b"\x5a" * 200 + whole[204:])
    for words in (["compare", run, tmp_path / "whole"], ["explain", run, "--round", "2"]):
        answer = call(capfd, *words)
        assert answer.code == 2 and "cannot be read: parquet" in answer.err and "Traceback" not in answer.err
