"""`benchctl trace …` as a user types it: what is printed, the exit code, and one clear line for each mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command_line import call, rows, write_trace
from traces.load import open_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,109"


def test_import_says_the_format_the_sums_and_where_it_went(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.csv").write_text(AZURE)
    answer = call(capfd, "trace", "import", tmp_path / "a.csv", "-o", tmp_path / "o.jsonl.gz")
    assert answer.code == 0
    assert "azure (Azure LLM inference traces, 2023 to 2025 (CSV))" in answer.out
    assert "770 input tokens, 153 output tokens" in answer.out and "span 4.314579 s" in answer.out
    assert open_trace(tmp_path / "o.jsonl.gz").num_requests == 2
    found = json.loads(call(capfd, "trace", "import", tmp_path / "a.csv", "-o", tmp_path / "o.jsonl", "--json").out)
    assert found["num_requests"] == 2 and found["header"]["time_origin"] == "2023-11-16T18:15:46.68059"


def test_a_log_of_ones_own_becomes_a_replay_with_one_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.csv").write_text("ts,prompt_tokens,gen,who\n1700000000.5,50,4,a\n1700000001,70,3,b\n")
    answer = call(
        capfd, "replay", tmp_path / "log.csv", "--map", "arrival=ts,input=prompt_tokens,output=gen", "--engine", "null", "--no-report",
        "--out", tmp_path / "runs",
    )  # fmt: skip
    assert answer.code == 0, answer.err
    assert "imported" in answer.err and (tmp_path / "runs" / "nano" / "manifest.json").exists()
    assert open_trace(tmp_path / "runs" / "log.trace.jsonl").span_s == 0.5


def test_replay_imports_a_named_or_told_format_first(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.csv").write_text(AZURE)
    answer = call(
        capfd,
        "replay",
        tmp_path / "a.csv",
        "--format",
        "auto",
        "--engine",
        "null",
        "--no-report",
        "--out",
        tmp_path / "r",
    )
    assert answer.code == 0 and "as azure: 2 requests" in answer.err


def test_info_is_text_or_json_or_a_page(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = call(capfd, "trace", "info", "traces/sharegpt.jsonl", "--html", tmp_path / "i.html")
    assert text.code == 0 and "256 requests, 52 sessions" in text.out and "0.8547" in text.out
    page = (tmp_path / "i.html").read_text()
    assert "Prefix cache" in page and "https://cdn" not in page.split("<script>")[0] and len(page) < 10_000_000
    found = json.loads(call(capfd, "trace", "info", "traces/sharegpt.jsonl", "--json").out)
    assert (
        found["num_requests"] == 256
        and round(found["prefix"]["token_rate"], 4) == 0.8547
        and len(found["sha256"]) == 64
    )


def test_the_page_has_its_numbers_in_tiles_and_a_table_and_steps_of_whole_ticks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_trace(tmp_path / "t.jsonl", rows(*((3 * (i // 10), 5 + i % 9, 2) for i in range(1200))))
    answer = call(capfd, "trace", "info", path, "--html", tmp_path / "i.html")
    assert "ticks" in answer.err + answer.out and (answer.err + answer.out).count("gaps are zero") == 1
    page = (tmp_path / "i.html").read_text()
    assert "<dt>requests</dt><dd>1,200<" in page and "<dt>CV of the gaps</dt>" in page
    assert "<th scope=row>input</th>" in page and "steps of 6 s" in page
    figures = json.loads(page.split("<script type=application/json id=figures>")[1].split("</script>")[0])
    assert sum(figures["f0"]["data"][0]["y"]) * 6 == pytest.approx(1200)
    low, high = figures["f1"]["x"]["range"]  # all gaps are 3 s: shown within a decade and more
    assert 10**low < 1 and 10**high > 9


def test_nothing_from_a_trace_becomes_markup_on_the_page(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    evil = "</script><script>alert(1)</script><b>"
    path = write_trace(tmp_path / "t.jsonl", rows((0, 5, 2), (1, 6, 3)), name=evil, source=evil)
    assert call(capfd, "trace", "info", path, "--html", tmp_path / "i.html").code == 0
    assert "alert(1)</script>" not in (tmp_path / "i.html").read_text()


def test_validate_prints_every_fault_and_exits_2(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert call(capfd, "trace", "validate", "traces/burst.jsonl").code == 0
    (tmp_path / "bad.jsonl").write_text(
        '{"input_length": 5, "output_length": 1}\n{"input_length": 0, "output_length": 1}\nnope\n'
    )
    answer = call(capfd, "trace", "validate", tmp_path / "bad.jsonl")
    assert (
        answer.code == 2
        and "line 2, key `input_length`" in answer.out
        and "line 3: not JSON" in answer.out
        and "2 faults" in answer.out
    )
    found = json.loads(call(capfd, "trace", "validate", tmp_path / "bad.jsonl", "--json").out)
    assert [fault["line"] for fault in found["faults"]] == [2, 3]


CHANGES = [
    ("slice traces/sharegpt.jsonl --start 10 --end 20", "97 requests"),
    ("slice traces/sharegpt.jsonl --first 7", "7 requests"),
    ("scale traces/burst.jsonl --rate 10", "span 11.900000 s"),
    ("scale traces/burst.jsonl --speedup 2", "span 12.721000 s"),
    ("sort traces/burst.jsonl", "120 requests"),
    ("merge traces/burst.jsonl traces/long-prompts.jsonl", "216 requests"),
    ("shuffle-arrivals traces/burst.jsonl", "120 requests"),
    ("export traces/burst.jsonl --to mooncake", "120 requests"),
    ("export traces/burst.jsonl --to vllm-custom --vocab-size 1000", "120 requests"),
    ("synth azure-conv -n 50", "50 requests"),
    ("synth like:traces/sharegpt.jsonl -n 50", "50 requests in"),
    ("synth generated-shared-prefix --num-groups 3 --per-group 2", "6 requests"),
    ("synth rag -n 20 --burstiness 0.5 --course onoff --on 5 --off 5 --rate 3 --priorities 0:0.9,5:0.1", "20 requests"),
]


@pytest.mark.parametrize(("line", "said"), CHANGES)
def test_a_change_says_what_it_wrote_and_writes_a_valid_trace(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    answer = call(capfd, "trace", *line.split(), "-o", tmp_path / "o.jsonl")
    assert answer.code == 0 and said in answer.out, answer.err
    if "vllm-custom" not in line:
        assert call(capfd, "trace", "validate", tmp_path / "o.jsonl", "--strict").code == 0


MISTAKES = [
    ("import nope.csv -o o.jsonl", "no such trace: nope.csv"),
    ("import {azure} -o o.jsonl --format azur", "no format named 'azur'"),
    ("import {azure} -o o.jsonl --map input", "--map has 'input'"),
    ("import {azure} -o o.jsonl --map size=ContextTokens", "--map names 'size'"),
    ("import {azure} -o o.jsonl --map arrival=TIMESTAMP", "--map says nothing of the prompt"),
    ("import {azure} -o o.jsonl --format mapped", "--format mapped needs --map"),
    ("import {azure} -o o.jsonl --failed maybe", "--failed is 'maybe'"),
    ("import {azure} -o o.jsonl --on-descent fold", "--on-descent is 'fold'"),
    ("import {azure} -o o.jsonl --time-unit h", "--time-unit is 'h'"),
    ("import {azure} -o o.jsonl --block-size 0", "--block-size is 0"),
    ("import {azure} -o o.jsonl --tokenizer nowhere", "nowhere is no folder"),
    ("import {azure} -o {azure}", "the file to write is the file to read"),
    ("info nope", "no such trace: nope"),
    ("slice traces/burst.jsonl -o o.jsonl --keep 2", "--keep is 2.0"),
    ("slice traces/burst.jsonl -o o.jsonl --start 5 --end 5", "--end 5 is not after --start 5"),
    ("slice traces/burst.jsonl -o o.jsonl --session x", "no request is left"),
    ("scale traces/burst.jsonl -o o.jsonl", "no scale given"),
    ("scale traces/burst.jsonl -o o.jsonl --rate 1 --speedup 2", "--speedup and --rate given"),
    ("merge traces/burst.jsonl -o o.jsonl", "one trace is nothing to merge"),
    ("merge traces/burst.jsonl traces/burst.jsonl -o o.jsonl --align origin", "not every trace has a time_origin"),
    ("export traces/burst.jsonl -o o.jsonl --to csv", "--to is 'csv'"),
    ("export traces/burst.jsonl -o o.jsonl --to vllm-custom", "has a length and no text"),
    ("synth nonsense -o o.jsonl", "no shape named 'nonsense'"),
    ("synth rag -o o.jsonl --priorities 0:x", "--priorities has '0:x'"),
    ("synth rag -o o.jsonl --gap poisson --burstiness 2", "--burstiness says nothing of poisson gaps"),
]


@pytest.mark.parametrize(("line", "said"), MISTAKES)
def test_a_mistake_is_one_clear_error_and_exit_2(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str, said: str
) -> None:
    (tmp_path / "a.csv").write_text(AZURE)
    monkeypatch.chdir(tmp_path)
    answer = call(capfd, "trace", *line.format(azure="a.csv").split())
    assert answer.code == 2 and said in answer.err and "Traceback" not in answer.err
    assert not (tmp_path / "o.jsonl").exists() and not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize(
    "words",
    [
        "replay walkthrough --engine null --no-report --out r",
        "sweep walkthrough --set scheduler=vllm --set engine=null --out s",
        "shrink lessons/05-chunking --where rounds>3 --scheduler nano -o o.jsonl",
        "trace info walkthrough",
        "trace validate walkthrough",
        "trace slice walkthrough --first 2 -o o.jsonl",
        "trace scale walkthrough --speedup 2 -o o.jsonl",
        "trace sort walkthrough -o o.jsonl",
        "trace shuffle-arrivals walkthrough -o o.jsonl",
        "trace merge walkthrough burst -o o.jsonl",
        "trace export walkthrough --to mooncake -o o.jsonl",
        "trace synth like:walkthrough -o o.jsonl",
    ],
)
def test_every_command_that_takes_a_trace_takes_a_bundled_ones_name(
    words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = call(capfd, *words.split())
    assert answer.code == 0, answer.err
