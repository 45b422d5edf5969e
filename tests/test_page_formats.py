"""`benchctl report`: Markdown, JSON, CSV and Perfetto of recorded runs, and what it makes of broken folders."""

from __future__ import annotations

import csv
import gzip
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from rich.console import Console

from reports import records
from reports.exports import json_summary, markdown, requests_csv
from reports.perfetto import write_perfetto
from reports.run import open_run
from reports.salvage import open_all
from reports.summary import summarize
from reports.terminal import advice, sparkline, sparklines
from tests.fake_run import record_golden
from tests.test_reports_page import Page, hostile_run
from traces.errors import BenchctlError


def benchctl(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "benchctl", *argv], capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out")
    for policy, case in (("nano", "article_rounds"), ("vllm", "worked_example")):
        record_golden(folder / policy, policy, case, part_rounds=6)
    return folder


# -- Markdown, JSON, CSV


def test_markdown_says_the_verdict_the_differences_and_every_round(pair: Path) -> None:
    runs = [open_run(pair / name) for name in ("nano", "vllm")]
    text = markdown(runs, ["nano", "vllm"])
    assert text.startswith("## Replay of a-test: nano and vllm\n\nnano finished 5 of 5 requests in 24 rounds")
    assert "| ITL p95, rounds | 3 | 1 | −66.7% | can't tell beyond these few requests |" in text
    assert (
        "| 6 | – | R1 … R5 | decode R1 R2 R3 R4 | R3 crosses a block edge with none free → R5, the newest, is preempted for it | 0 → 1 → 0 |"
        in text
    )
    assert "| nano | 5 | 10 | R5 | 6 | preempted in round 6 for R3, resumed in round 10 |" in text
    for line in text.splitlines():
        if line.startswith("|"):
            table = line.replace("\\|", "").count("|")
            assert table >= 3


def test_markdown_of_hostile_texts_holds_no_markup(tmp_path: Path) -> None:
    run = open_run(hostile_run(tmp_path / "nano"))
    text = markdown([run], ["nano"])
    assert "<script" not in text and "<b>" not in text and "<!--" not in text and "&lt;/script" in text


def test_json_is_what_replay_prints(pair: Path) -> None:
    one = open_run(pair / "nano")
    assert json_summary([one]) == summarize(one)
    both = json.loads(benchctl("report", str(pair), "--format", "json").stdout)
    assert [entry["benchctl"]["run"]["name"] for entry in both["runs"]] == ["nano", "vllm"]
    assert both["runs"][0]["completed"] == 5 and both["runs"][0]["p50_ttft_ms"] == 1000.0


def test_csv_has_a_line_for_each_request_with_its_latencies(pair: Path, tmp_path: Path) -> None:
    run = open_run(pair / "nano")
    rows = list(csv.DictReader(io.StringIO(requests_csv([run], ["nano"]))))
    assert [row["id"] for row in rows] == ["R1", "R2", "R3", "R4", "R5"]
    fifth = rows[4]
    # R5 arrives with round 5 at 4 s, has its first token at 5 s, its last of nine at 17 s, and lost its blocks for 4 s.
    assert (fifth["ttft_ms"], fifth["preempted_ms"], fifth["emitted_tokens"]) == ("1000.0", "4000.0", "9")
    assert sum(float(fifth[f"{name}_ms"]) for name in ("queue", "prefill", "decode")) == float(fifth["e2el_ms"])
    named = open_run(shutil.copytree(pair / "nano", tmp_path / "nano"))
    for file in named.path.glob("requests-*.parquet"):
        pl.read_parquet(file).with_columns(pl.lit("=1+1").alias("id")).write_parquet(file)
    assert {row["id"] for row in csv.DictReader(io.StringIO(requests_csv([named], ["nano"])))} == {"'=1+1"}


# -- Perfetto


def trace_events(path: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


@pytest.mark.parametrize(
    "policy, case", [("nano", "article_rounds"), ("vllm", "stress_fcfs_a"), ("nano", "stress_b16_tight")]
)
def test_a_perfetto_trace_holds_every_round_and_nests(tmp_path: Path, policy: str, case: str) -> None:
    run = open_run(record_golden(tmp_path / policy, policy, case))
    write_perfetto([run], [policy], tmp_path / "t.json.gz")
    events = trace_events(tmp_path / "t.json.gz")
    rounds = run.read("rounds")
    slices = [event for event in events if event["ph"] == "X" and event.get("cat") == "round"]
    assert [event["args"]["round"] for event in slices] == rounds["round"].to_list()
    assert [event["ts"] for event in slices] == [round(t * 1e6, 3) for t in rounds["t_start_s"]]
    assert all(event["name"] == kind for event, kind in zip(slices, rounds["kind"], strict=True))
    # The format: every event has a phase and a process; slices on a track either follow or lie within each other.
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        assert event["ph"] in ("M", "X", "C", "i") and isinstance(event["pid"], int), event
        assert event["ph"] == "M" or event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
    for spans in tracks.values():
        open_until: list[float] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= begin + 1e-3:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-3, (begin, end, open_until)
            open_until.append(end)
    names = [event["name"] for event in events if event["ph"] == "i"]
    assert names.count("preempt") == rounds["preempted"].sum()
    assert sum(event["args"]["blocks"] for event in events if event["name"] == "evict") == rounds["evicted"].sum()
    free = [event["args"]["free blocks"] for event in events if event["ph"] == "C" and event["name"] == "free blocks"]
    assert free == rounds["free_blocks_end"].to_list()


def test_phases_of_the_article_s_r5_in_perfetto(pair: Path, tmp_path: Path) -> None:
    runs = [open_run(pair / name) for name in ("nano", "vllm")]
    write_perfetto(runs, ["nano", "vllm"], tmp_path / "t.json.gz")
    events = trace_events(tmp_path / "t.json.gz")
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        "nano engine",
        "nano requests",
        "vllm engine",
        "vllm requests",
    }
    fifth = [
        (event["name"], event["ts"] / 1e6, event["dur"] / 1e6)
        for event in events
        if event["ph"] == "X" and event["pid"] == 2 and event["args"] == {"request": 4}
    ]
    assert ("preempted", 5.0, 4.0) in fifth and ("prefill", 4.0, 1.0) in fifth and fifth[0][0] == "prefill"
    write_perfetto(runs, ["nano", "vllm"], tmp_path / "again.json.gz")
    assert (tmp_path / "again.json.gz").read_bytes() == (tmp_path / "t.json.gz").read_bytes()


# -- the command


def test_the_command_writes_beside_the_runs_or_where_it_is_told(pair: Path, tmp_path: Path) -> None:
    done = benchctl("report", str(pair / "nano"), str(pair / "vllm"), "--format", "perfetto")
    assert done.returncode == 0 and done.stdout.strip() == str(pair / "report.perfetto.json.gz")
    assert benchctl("report", str(pair), "-o", str(tmp_path / "a" / "page.html")).stdout.strip().endswith("page.html")
    assert (tmp_path / "a" / "page.html").stat().st_size > 1_000_000
    assert benchctl("report", str(pair), "-f", "md").stdout.startswith("## Replay of a-test")


@pytest.mark.parametrize(
    "more, text",
    [
        (["--format", "pdf"], "--format is 'pdf'"),
        (["--format", "md", "--open"], "--open opens a page, and --format is md"),
        (["--format", "csv", "-o", "/proc/none/x.csv"], "/proc/none/x.csv cannot be written"),
        (["--format", "perfetto", "-o", "/proc/none/x.gz"], "/proc/none/x.gz cannot be written"),
    ],
)
def test_the_command_s_refusals(pair: Path, more: list[str], text: str) -> None:
    done = benchctl("report", str(pair), *more)
    assert done.returncode == 2 and text in done.stderr and "Traceback" not in done.stderr


# -- broken folders


def broken(pair: Path, to: Path) -> Path:
    return Path(shutil.copytree(pair / "nano", to / "nano"))


def test_a_whole_folder_is_opened_as_it_is(pair: Path) -> None:
    with open_all([pair]) as (runs, wrong):
        assert [run.path for run in runs] == [pair / "nano", pair / "vllm"] and wrong == []


def test_a_damaged_part_is_left_out_with_those_behind_it(pair: Path, tmp_path: Path) -> None:
    folder = broken(pair, tmp_path)
    file = folder / "batches-00002.parquet"
    data = bytearray(file.read_bytes())
    data[: len(data) // 2] = b"\0" * (len(data) // 2)
    file.write_bytes(data)
    with open_all([folder]) as (runs, wrong):
        assert (
            len(wrong) == 1
            and "batches-00002.parquet cannot be read" in wrong[0]
            and "the 2 parts before it" in wrong[0]
        )
        assert runs[0].read("rounds")["round"].to_list() == list(range(1, 13))
    done = benchctl("report", str(folder), "-o", str(tmp_path / "r.html"))
    assert done.returncode == 1 and "batches-00002.parquet cannot be read" in done.stderr
    words = " ".join(Page((tmp_path / "r.html").read_text()).text)
    assert "The run folder is damaged or not understood whole" in words


def test_a_folder_without_a_manifest_or_with_half_of_one_is_shown(pair: Path, tmp_path: Path) -> None:
    for damage, text in (
        ("", "manifest.json cannot be read"),
        (None, "it has no manifest.json"),
        ("[1]", "is not a JSON object"),
    ):
        folder = broken(pair, tmp_path / str(damage))
        if damage is None:
            (folder / "manifest.json").unlink()
        else:
            (folder / "manifest.json").write_text(damage)
        done = benchctl("report", str(folder), "-f", "md")
        assert done.returncode == 1 and text in done.stderr, done.stderr
        assert "5 of 5 requests" in done.stdout


def test_a_newer_schema_is_shown_with_a_warning(pair: Path, tmp_path: Path) -> None:
    folder = broken(pair, tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text()) | {"schema_version": records.SCHEMA_VERSION + 1}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    done = benchctl("report", str(folder), "-f", "md")
    assert done.returncode == 1 and "schema version" in done.stderr and "5 of 5 requests" in done.stdout


def test_a_folder_of_which_nothing_can_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").write_text("{")
    with (
        pytest.raises(BenchctlError, match="nothing of this run can be shown: manifest.json cannot be read"),
        open_all([tmp_path / "run"]),
    ):
        pass
    assert benchctl("report", str(tmp_path / "absent")).returncode == 2


def test_of_a_run_whose_only_part_is_damaged_its_rounds_and_requests_are_shown(tmp_path: Path) -> None:
    folder = record_golden(tmp_path / "nano", "nano", "article_rounds")
    (folder / "batches-00000.parquet").write_bytes(b"PAR1")
    done = benchctl("report", str(folder), "-f", "md")
    assert done.returncode == 1 and "5 of 5 requests" in done.stdout
    assert "batches-00000.parquet cannot be read" in done.stderr
    assert "shown is what admissions, requests, rounds tell" in done.stderr


def test_a_run_that_has_ended_misses_no_file(tmp_path: Path) -> None:
    manifest = {"status": "complete", "records": "full"}
    folder = record_golden(tmp_path / "nano", "nano", "article_rounds", manifest=manifest)
    with open_all([folder]) as (_, wrong):
        assert wrong == []
    (folder / "tokens-00000.parquet").unlink()
    with open_all([folder]) as (_, wrong):
        assert wrong == [f"{folder}: the run has ended, and tokens-00000.parquet is missing"]
    (folder / "rounds-00000.parquet").unlink()
    with pytest.raises(BenchctlError, match="the run has ended, and rounds-00000.parquet and 1 more are missing"), open_all([folder]):  # fmt: skip
        pass
    half = manifest | {"status": "running"}  # killed: what its last part lacks was never written
    (folder / "manifest.json").write_text(json.dumps(json.loads((folder / "manifest.json").read_text()) | half))
    with open_all([folder]) as (runs, wrong):
        assert wrong == [] and runs[0].read("rounds").height == 0


# -- the terminal


def test_a_sparkline_keeps_the_spike_of_one_round() -> None:
    assert sparkline([0, 0, 0, 8, 0, 0, 0, 0], 8, width=4) == "▁█▁▁"
    assert sparkline([8, 8, 0, 8], 8, width=2, keep=min) == "█▁"
    assert sparkline([], 1) == "" and sparkline([1, 2], 0) != ""


def test_sparklines_fit_80_columns_without_colour(pair: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, no_color=True, highlight=False)
    console.print(sparklines([open_run(pair / "nano"), open_run(pair / "vllm")]))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and "0–11 of 11" in out.getvalue() and "up to 1,024" in out.getvalue()
    assert lines[0].startswith("nano") and any("█" in line for line in lines)


def test_advice_is_the_cure_of_the_gravest_finding(pair: Path) -> None:
    check = {"level": "warn", "what": "requests were refused", "evidence": "3 of 9. Of them", "cure": "raise the limit"}
    note = check | {"level": "info", "what": "times are ticks"}
    line = advice([[note, check], []], ["nano", "vllm"])
    assert line is not None and line.plain == "advice  nano: requests were refused: raise the limit."
    assert advice([[note], []], ["nano", "vllm"]) is None
