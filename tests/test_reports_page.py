"""The report page: nothing from a trace becomes markup, everything drawn is what was recorded, and it stays small."""

from __future__ import annotations

import json
import re
import shutil
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from engines.interface import SchedulerConfig
from reports import figures, records
from reports.blockmap import block_grid
from reports.page import MAX_BYTES, render, script_json, write_report
from reports.page_pack import unpack
from reports.run import open_run
from tests.fake_run import record_golden, record_run, request_of
from traces.errors import BenchctlError

HOSTILE = "</script><script>alert(1)</script>"
HOSTILE_IDS = (HOSTILE, "<b>x", "&lt;i", "<img src=x onerror=alert(2)>", "{{ 7 * 7 }}", "<!--")


class Page(HTMLParser):
    """Elements of a page: tags with attributes, and the text inside each script."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text: list[str] = []
        self._inside: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        else:
            self.text.append(data)

    @property
    def figures(self) -> dict[str, Any]:
        return json.loads(self.scripts[0])["figures"]


def page_words(text: str) -> str:
    return " ".join(" ".join(Page(text).text).split())


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both policies on the worked example, as one replay leaves them."""
    folder = tmp_path_factory.mktemp("out")
    for policy, case in (("nano", "article_rounds"), ("vllm", "worked_example")):
        record_golden(
            folder / policy, policy, case, manifest={"prefix_upper_bound": {"queried_tokens": 2000, "hit_tokens": 500}}
        )
    return folder


@pytest.fixture(scope="module")
def page(pair: Path) -> Page:
    return Page(write_report([pair], pair / "report.html").read_text())


def test_the_page_is_one_offline_file(page: Page) -> None:
    assert len(page.scripts) == 5  # figures, two runs, plotly, the page's own
    for tag, attrs in page.tags:
        assert tag not in ("link", "iframe", "img", "object", "embed", "base"), (tag, attrs)
        for name in ("src", "href", "action", "data"):
            assert (attrs.get(name) or "#").startswith("#"), (tag, attrs)
    policy = next(attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'") and "connect-src" not in policy


def test_every_section_stands_with_its_words(page: Page) -> None:
    text = " ".join(" ".join(page.text).split())
    assert "nano finished 5 of 5 requests in 24 rounds, 2.38 output tokens a round" in text
    assert "ITL p95 is 3.0 times lower under vllm: 1 round against 3" in text
    assert "Times are ticks, not measurements" in text
    assert "(t_n − t_1) / (n − 1); null where n = 1" in text
    assert '"policy": "nano-vllm bb823b3"' in text and "benchctl replay a-test" in text
    ids = {attrs.get("id") for _, attrs in page.tags}
    assert {"summary", "rounds", "why", "blocks", "requests", "latency", "cache-section", "reference"} <= ids


def test_every_figure_has_its_place_and_a_table(page: Page) -> None:
    drawn = {attrs["id"] for tag, attrs in page.tags if tag == "div" and attrs.get("class") == "plot"}
    assert (
        drawn
        == set(page.figures)
        == {"cache", "split", "itl-time", *(f"ecdf-{m}" for m in ("ttft", "tpot", "itl", "e2el"))}
    )
    tables = {attrs["data-figure"] for tag, attrs in page.tags if tag == "details" and attrs.get("class") == "data"}
    assert tables == drawn


def test_headings_go_down_one_level_at_a_time_and_every_link_leads_somewhere(page: Page) -> None:
    level, ids = 1, {attrs.get("id") for _, attrs in page.tags}
    for tag, attrs in page.tags:
        if tag in ("h1", "h2", "h3", "h4"):
            assert int(tag[1]) <= level + 1, (tag, attrs)
            level = int(tag[1])
        if tag == "a":
            assert (attrs["href"] or "")[1:] in ids, attrs
        if tag == "canvas" or attrs.get("role") in ("img", "group", "region", "table"):
            assert attrs.get("aria-label"), (tag, attrs)


def test_the_embedded_run_holds_every_recorded_round(page: Page, pair: Path) -> None:
    for script, folder in zip(page.scripts[1:3], ("nano", "vllm"), strict=True):
        header, tables = unpack(script)
        rounds = open_run(pair / folder).read("rounds")
        assert tables["rounds"]["round"] == rounds["round"].to_list()
        for column in ("prefill_tokens", "decode_tokens", "cached_tokens", "free_blocks_end", "waiting", "running"):
            assert tables["rounds"][column] == rounds[column].to_list(), column
        words = header["words"]["stop_waiting"]
        assert [words[code] for code in tables["rounds"]["stop_waiting"]] == rounds["stop_waiting"].to_list()


def test_settings_that_differ_are_listed_and_the_better_run_named(page: Page) -> None:
    text = " ".join(" ".join(page.text).split())
    assert re.search(r"The runs differ in \d settings", text) and "scheduler nano vllm" in text
    assert "policy nano-vllm bb823b3 vllm 0.33.0, synchronous" in text
    assert re.search(r"ITL p95, rounds 3 1 −66.7% can.t tell beyond these few requests", text)
    assert re.search(r"preemptions 1 0 −100.0% vllm lower is better", text)
    assert re.search(r"rounds 24 \d+ \S+ neither", text)


def test_runs_of_different_traces_are_refused(tmp_path: Path, pair: Path) -> None:
    other = record_golden(
        tmp_path / "vllm", "vllm", "worked_example", manifest={"trace": {"name": "other", "sha256": "ab" * 32}}
    )
    with pytest.raises(
        BenchctlError, match="the runs replayed different traces: nano: a-test .*, vllm: other .sha256 abababababab"
    ):
        write_report([pair / "nano", other], tmp_path / "r.html")


def test_the_block_grid_is_the_article_s(pair: Path) -> None:
    found = block_grid(open_run(pair / "nano"))
    assert found is not None
    columns = {round: [row[i].label for row in found.rows] for i, round in enumerate(found.rounds)}
    free = ""
    assert columns[1] == ["R1.0", "R1.1", "R2.0", "R2.1", "R3.0", free, free, free, free, free, free]
    assert columns[2] == ["R1.0", "R1.1", "R2.0", "R2.1", "R3.0", "R4.0", "R4.1", "R4.2", "R4.3", "R4.4", free]
    assert columns[5][10] == "R5.0" and columns[6][10] == "R3.1" == columns[7][10]
    cached = {
        round: [block for block, row in zip(found.blocks, found.rows, strict=True) if row[i].cached]
        for i, round in enumerate(found.rounds)
    }
    assert cached[1] == [0, 2] and cached[2] == [0, 2, 5, 6, 7, 8] and cached[4] == [0, 2, 4, 5, 6, 7, 8]


def test_large_pools_long_runs_and_summaries_have_no_grid(tmp_path: Path) -> None:
    assert block_grid(open_run(record_golden(tmp_path / "big", "nano", "stress_b16_light"))) is None
    assert block_grid(open_run(record_golden(tmp_path / "long", "vllm", "stress_fcfs_a"))) is None
    summary = record_golden(tmp_path / "summary", "nano", "article_rounds", manifest={"records": "summary"})
    assert block_grid(open_run(summary)) is None


def test_a_summary_run_still_has_its_page(tmp_path: Path) -> None:
    path = record_golden(tmp_path / "run", "nano", "article_rounds", manifest={"records": "summary"})
    for table in ("batches", "decisions", "blocks", "tokens"):
        for file in path.glob(f"{table}-*.parquet"):
            file.unlink()
    page = Page(write_report([path], tmp_path / "r.html").read_text())
    header, tables = unpack(page.scripts[1])
    assert header["facts"]["batches"] is False and set(tables) == {"rounds", "requests"}
    assert len(tables["rounds"]["round"]) == 24


def hostile_run(path: Path) -> Path:
    """Ids, a trace name and a command that would be script if any of them were read as HTML."""
    config = SchedulerConfig(num_blocks=8, block_size=4, max_num_seqs=4, max_num_batched_tokens=8)
    arrivals = [(1 + i, request_of(i, name, 5, 2)) for i, name in enumerate(HOSTILE_IDS)]
    manifest = {
        "trace": {"name": HOSTILE},
        "command": ["benchctl", HOSTILE],
        "error": HOSTILE,
        "status": "failed",
        "policy": "<u>mine</u>",
    }
    return record_run(path, "nano", config, arrivals, manifest=manifest)


def test_nothing_from_a_trace_is_read_as_html_or_script(tmp_path: Path) -> None:
    path = hostile_run(tmp_path / "<u>nano")
    text = write_report([path], tmp_path / "r.html").read_text()
    page = Page(text)
    assert HOSTILE not in text and "<img" not in text and "<!--" not in text.replace(text[text.index("<script>") :], "")
    assert len(page.scripts) == 4 and page.figures
    assert {tag for tag, _ in page.tags} <= {
        "html", "head", "meta", "title", "style", "body", "a", "header", "div", "span", "nav", "button", "main", "section", "p", "h1", "h2", "h3",
        "dl", "dt", "dd", "ul", "li", "strong", "details", "summary", "table", "thead", "tbody", "tr", "th", "td", "figure", "figcaption", "fieldset",
        "legend", "label", "input", "select", "option", "code", "pre", "script", "b", "noscript", "article", "h4", "i", "ol",
    }  # fmt: skip
    assert sum(tag == "b" for tag, _ in page.tags) == text.count("<b>")
    assert any(HOSTILE in part for part in page.text)  # it is shown, as text
    assert unpack(page.scripts[1])[0]["ids"] == list(HOSTILE_IDS)


def test_labels_in_figures_are_escaped_for_plotly_s_own_markup(tmp_path: Path) -> None:
    config = SchedulerConfig(num_blocks=8, block_size=4, max_num_seqs=4, max_num_batched_tokens=8)
    run = open_run(record_run(tmp_path / "<b>run", "nano", config, [(1, request_of(0, "<b>x", 5, 2))]))
    ecdf = figures.ecdf_figure([run], ["<b>run"], "ttft")
    assert ecdf is not None and ecdf["data"][0]["name"] == "&lt;b&gt;run, n 1"


def test_embedded_json_closes_no_script() -> None:
    value = {"a": [HOSTILE, "<!--", "\u2028", "&amp;"], HOSTILE: None}
    text = script_json(value)
    assert not re.search(r"[<>&\u2028]", text) and json.loads(text) == value


def big_run(path: Path, rounds: int, seqs: int) -> Path:
    """A long run's folder made column by column: `seqs` requests at a time, 20 decodes each. For sizes, not for laws."""
    path.mkdir()
    rng = np.random.default_rng(7)
    length = 20
    requests = rounds // length * seqs
    number = np.arange(1, rounds + 1)
    waiting = np.abs(np.cumsum(rng.integers(-3, 4, rounds)))
    columns: dict[str, Any] = {name: None for name in records.schema("rounds")}
    columns |= {
        "round": number, "t_start_s": (number - 1) * 0.01, "t_scheduled_s": (number - 1) * 0.01, "t_executed_s": number * 0.01, "t_end_s": number * 0.01,
        "kind": "mixed", "mode": "null", "num_seqs": seqs, "prefill_tokens": rng.integers(0, 900, rounds), "decode_tokens": seqs, "cached_tokens": rng.integers(0, 64, rounds),
        "queried_tokens": 900, "budget_left": 100, "waiting": waiting, "running": seqs, "skipped": 0, "free_blocks_start": 5000, "free_blocks_scheduled": 4000,
        "free_blocks_end": rng.integers(0, 5000, rounds), "cached_free_blocks": 0, "admitted": 1, "preempted": 0, "finished": 1, "evicted": 0,
        "stop_waiting": "blocks", "stop_running": "running_empty",
    }  # fmt: skip
    request = np.arange(requests)
    begin = request // seqs * length
    name = [f"request-{i:06d}-{'x' * 40}" for i in range(requests)]
    arrival = begin * 0.01
    done = {
        "request": request, "id": name, "status": "finished", "reason": "max_tokens", "arrival_s": arrival, "admitted_s": arrival, "first_scheduled_s": arrival,
        "first_token_s": arrival + 0.01, "finished_s": arrival + length * 0.01, "prompt_tokens": 100, "emitted_tokens": length, "cached_tokens": 0,
        "discarded_tokens": 0, "recomputed_tokens": 0, "preemptions": 0, "stalled_s": 0.0, "preempted_s": 0.0,
    }  # fmt: skip
    admitted = {key: done[key] for key in ("request", "id", "arrival_s", "admitted_s", "prompt_tokens")} | {
        "session": None, "turn": None, "priority": 0, "adapter": None, "admitted_round": begin + 1, "output_tokens": length,
    }  # fmt: skip
    each = np.repeat(request, length)
    at = np.repeat(begin, length) + np.tile(np.arange(length), requests) + 1
    index = np.tile(np.arange(length), requests)
    batches = {
        "round": at, "order": each % seqs, "request": each, "start": np.where(index, 100 + index - 1, 0), "num_tokens": np.where(index, 1, 100),
        "phase": pl.Series(np.where(index, "decode", "prefill")), "cached_tokens": pl.Series(np.where(index, -1, 0)).replace(-1, None), "yields_token": True, "num_blocks": 8,
    }  # fmt: skip
    tokens = {"request": each, "index": index, "round": at, "t_s": at * 0.01, "token_id": None}
    holds = {
        "round": number,
        "order": 0,
        "kind": "hold",
        "request": requests - 1,
        "other": None,
        "reason": "blocks",
        "needed": 9,
        "available": 3,
        "unit": "blocks",
    }
    frames = {
        "rounds": columns,
        "requests": done,
        "admissions": admitted,
        "batches": batches,
        "tokens": tokens,
        "decisions": holds,
    }
    for table, data in frames.items():
        pl.DataFrame(data).select(pl.col(column).cast(dtype) for column, dtype in records.schema(table).items()).sort(
            "round" if "round" in data else "request"
        ).write_parquet(path / f"{table}-00000.parquet")
    pl.DataFrame(schema=records.schema("blocks")).write_parquet(path / "blocks-00000.parquet")
    manifest = {
        "schema_version": 1,
        "status": "complete",
        "scheduler": "vllm",
        "engine": "null",
        "clock": "virtual",
        "records": "full",
        "trace": {"name": "big"},
    }
    (path / "manifest.json").write_text(json.dumps(manifest | {"limits": {"block_size": 16, "usable_blocks": 5000}}))
    return path


def test_a_run_of_100000_rounds_and_10000_requests_stays_small_and_whole(tmp_path: Path) -> None:
    run = open_run(big_run(tmp_path / "vllm", 100_000, 2))
    began = time.process_time()
    text = render([run])
    took = time.process_time() - began  # of the processor: other work on the machine does not count
    assert len(text.encode()) <= 5_000_000 and took < 15, (len(text), took)
    header, tables = unpack(Page(text).scripts[1])
    assert len(tables["rounds"]["round"]) == 100_000 and len(tables["requests"]["request"]) == 10_000
    assert header["facts"]["batches"] and sum(tables["stretches"]["count"]) + len(tables["singles"]["at"]) == 200_000
    assert tables["rounds"]["waiting"] == run.read("rounds")["waiting"].to_list()


def test_many_runs_share_a_page_that_says_what_it_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = record_golden(tmp_path / "a", "vllm", "stress_fcfs_a")
    folders = [path] + [Path(shutil.copytree(path, tmp_path / name)) for name in "bc"]
    runs = [open_run(folder) for folder in folders]
    whole = render(runs)
    assert MAX_BYTES == 10_000_000 and "left out to keep" not in page_words(whole)
    most = "block events, host times of each round, batches and decisions of each round"
    for less, what in ((1, "block events"), (16_000, most)):
        monkeypatch.setattr("reports.page.MAX_BYTES", len(whole.encode()) - less)
        smaller = render(runs)
        assert len(smaller.encode()) <= len(whole.encode()) - less
        assert f"left out to keep the page small: {what} (in the run" in page_words(smaller)
    monkeypatch.setattr("reports.page.MAX_BYTES", 100_000)
    with pytest.raises(BenchctlError, match=r"3 runs of [\d,]+ rounds do not fit one page"):
        render(runs)


def test_thinning_keeps_short_frames_and_every_extreme() -> None:
    short = pl.DataFrame({"a": [1, 2, 3]})
    assert figures.thin(short, ("a",), 10) == (short, None)
    rng = np.random.default_rng(3)
    long = pl.DataFrame({"a": rng.normal(size=5000), "b": rng.normal(size=5000), "row": range(5000)})
    kept, note = figures.thin(long, ("a", "b"), 400)
    assert note is not None and kept.height <= 402 and kept["row"].is_sorted()
    buckets = [long[i : i + 50] for i in range(0, 5000, 50)]
    rows = set(kept["row"])
    for part in buckets:
        for name in ("a", "b"):
            assert part["row"][part[name].arg_max()] in rows and part["row"][part[name].arg_min()] in rows


def test_a_run_that_has_hardly_begun_still_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").write_text(
        json.dumps({"schema_version": 1, "status": "running", "scheduler": "nano", "records": "full"})
    )
    page = Page(write_report([tmp_path / "run"], tmp_path / "r.html").read_text())
    assert page.figures == {} and "No request has finished." in " ".join(page.text)


def test_where_there_is_nothing_to_report_or_to_write_the_error_says_so(tmp_path: Path, pair: Path) -> None:
    with pytest.raises(BenchctlError, match="no run at"):
        write_report([tmp_path / "absent"], tmp_path / "r.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchctlError, match="cannot be written"):
        write_report([pair], tmp_path / "file" / "r.html")
