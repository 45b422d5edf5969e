"""The report page: nothing from a trace becomes markup, everything drawn is what was recorded, and it stays small."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from engines.interface import SchedulerConfig
from reports import figures, records
from reports.blockmap import block_map
from reports.page import MAX_BYTES, render, script_json, write_report
from reports.run import open_run
from tests.fake_run import record_golden, record_run, request_of
from traces.errors import BenchctlError

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = "</script><script>alert(1)</script>"


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
        return json.loads(self.scripts[0])


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
    assert len(page.scripts) == 3
    for tag, attrs in page.tags:
        assert tag not in ("link", "iframe", "img", "object", "embed", "base"), (tag, attrs)
        for name in ("src", "href", "action", "data"):
            assert (attrs.get(name) or "#").startswith("#"), (tag, attrs)
    policy = next(attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'") and "connect-src" not in policy


def test_every_section_stands_with_its_words(page: Page) -> None:
    text = " ".join(" ".join(page.text).split())
    assert "nano finished 5 of 5 requests in 24.00 s, 2.38 output tokens/s" in text
    assert "ITL p95 is 3.0 times lower under vllm: 1,000 ms against 3,000" in text
    assert "R3 crosses a block edge with none free → R5, the newest, is preempted for it" in text
    assert "Times are ticks, not measurements" in text
    assert "(t_n − t_1) / (n − 1); null where n = 1" in text
    assert '"policy": "nano-vllm bb823b3"' in text and "benchctl replay a-test" in text
    ids = {attrs.get("id") for _, attrs in page.tags}
    assert {"summary", "rounds", "why", "blocks", "latency", "requests", "reference"} <= ids


def test_every_figure_has_a_table(page: Page) -> None:
    drawn = {attrs["id"] for tag, attrs in page.tags if tag == "div" and attrs.get("class") == "plot"}
    assert drawn == set(page.figures) and len(drawn) == 9
    tables = {attrs["data-figure"] for tag, attrs in page.tags if tag == "details" and attrs.get("class") == "data"}
    timelines = {name for name in drawn if (name or "").startswith("timeline-")}  # their table is that of the requests
    assert tables | timelines == drawn


def test_figures_hold_the_recorded_rounds_exactly(page: Page, pair: Path) -> None:
    rounds = open_run(pair / "nano").read("rounds")
    figure = page.figures["rounds-0"]
    series = {trace["name"]: trace["y"] for trace in figure["data"]}
    assert figure["by_round"] == rounds["round"].to_list() and figure["by_time"] == rounds["t_end_s"].to_list()
    for name, column in {
        "decode": "decode_tokens",
        "prefill": "prefill_tokens",
        "cached": "cached_tokens",
        "running": "running",
        "waiting": "waiting",
    }.items():
        assert series[name] == rounds[column].to_list(), name
    assert series["used"] == (11 - rounds["free_blocks_end"]).to_list()
    assert series["free, cached"] == rounds["cached_free_blocks"].to_list()
    assert [sum(parts) for parts in zip(series["used"], series["free, cached"], series["free"], strict=True)] == [
        11
    ] * 24


def test_the_timeline_shows_r5_s_preemption_and_the_stalls_it_caused(pair: Path) -> None:
    spans, shown, total = figures.timeline(open_run(pair / "nano"))
    assert (shown, total) == ([0, 1, 2, 3, 4], 5)
    of = {(r, p): (b, e) for r, p, b, e in spans.filter(pl.col("phase").is_in(["preempted", "queued"])).iter_rows()}
    assert of[4, "preempted"] == (5.0, 9.0)  # round 6 takes its block, round 10 gives it one again
    assert of[3, "queued"] == (0.0, 1.0)
    stalled = spans.filter((pl.col("phase") == "stalled") & (pl.col("request") == 0)).select("begin_s", "end_s").rows()
    assert stalled == [(1.0, 3.0), (4.0, 5.0), (9.0, 10.0)]  # rounds 2 and 3, 5, 10 prefill others


def test_the_block_map_is_the_article_s(pair: Path) -> None:
    found = block_map(open_run(pair / "nano"))
    assert found is not None and found.grid is not None
    columns = {round: [row[i].label for row in found.grid] for i, round in enumerate(found.rounds)}
    free = ""
    assert columns[1] == ["R1.0", "R1.1", "R2.0", "R2.1", "R3.0", free, free, free, free, free, free]
    assert columns[2] == ["R1.0", "R1.1", "R2.0", "R2.1", "R3.0", "R4.0", "R4.1", "R4.2", "R4.3", "R4.4", free]
    assert columns[5][10] == "R5.0" and columns[6][10] == "R3.1" == columns[7][10]
    cached = {
        round: [block for block, row in zip(found.blocks, found.grid, strict=True) if row[i].cached]
        for i, round in enumerate(found.rounds)
    }
    assert cached[1] == [0, 2] and cached[2] == [0, 2, 5, 6, 7, 8] and cached[4] == [0, 2, 4, 5, 6, 7, 8]


def test_a_longer_run_s_map_is_a_heat_map_with_the_same_owners(tmp_path: Path) -> None:
    run = open_run(record_golden(tmp_path / "vllm", "vllm", "stress_fcfs_a"))
    found = block_map(run)
    assert found is not None and found.heatmap is not None and found.blocks == list(range(1, 49))
    trace = found.heatmap["data"][0]
    owned = [sum(row[i] is not None for row in trace["customdata"]) for i in range(len(found.rounds))]
    assert owned == (48 - run.read("rounds")["free_blocks_end"]).to_list()
    cached_free = [sum(row[i] == -1 for row in trace["z"]) for i in range(len(found.rounds))]
    assert cached_free == run.read("rounds")["cached_free_blocks"].to_list()


def test_every_run_of_many_keeps_its_own_map(tmp_path: Path) -> None:
    path = record_golden(tmp_path / "a", "vllm", "stress_fcfs_a")
    folders = [path] + [Path(shutil.copytree(path, tmp_path / name)) for name in "bcdefgh"]
    page = Page(write_report(folders, tmp_path / "r.html").read_text())
    places = [attrs["id"] for tag, attrs in page.tags if (attrs.get("id") or "").startswith("blocks-")]
    assert places == [f"blocks-{i}" for i in range(8)] and set(places) <= set(page.figures)


def test_large_pools_and_summary_runs_have_no_map(tmp_path: Path) -> None:
    assert block_map(open_run(record_golden(tmp_path / "big", "nano", "stress_b16_light"))) is None
    assert (
        block_map(
            open_run(record_golden(tmp_path / "summary", "nano", "article_rounds", manifest={"records": "summary"}))
        )
        is None
    )


def hostile_run(path: Path) -> Path:
    """Ids, a trace name and a command that would be script if any of them were read as HTML."""
    config = SchedulerConfig(num_blocks=8, block_size=4, max_num_seqs=4, max_num_batched_tokens=8)
    names = [HOSTILE, "<b>x", "&lt;i", "<img src=x onerror=alert(2)>", "{{ 7 * 7 }}", "<!--"]
    arrivals = [(1 + i, request_of(i, name, 5, 2)) for i, name in enumerate(names)]
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
    assert len(page.scripts) == 3 and page.figures
    assert {tag for tag, _ in page.tags} <= {
        "html", "head", "meta", "title", "style", "body", "a", "header", "div", "span", "nav", "button", "main", "section", "p", "h1", "h2", "h3",
        "dl", "dt", "dd", "ul", "li", "strong", "details", "summary", "table", "thead", "tbody", "tr", "th", "td", "figure", "figcaption", "fieldset",
        "legend", "label", "input", "select", "option", "code", "pre", "script", "b",
    }  # fmt: skip
    assert sum(tag == "b" for tag, _ in page.tags) == text.count("<b>")
    assert any(HOSTILE in part for part in page.text)  # it is shown, as text
    assert "{{ 7 * 7 }}" in " ".join(page.text)


def test_labels_in_figures_are_escaped_for_plotly_s_own_markup(tmp_path: Path) -> None:
    config = SchedulerConfig(num_blocks=8, block_size=4, max_num_seqs=4, max_num_batched_tokens=8)
    run = open_run(record_run(tmp_path / "<b>run", "nano", config, [(1, request_of(0, "<b>x", 5, 2))]))
    timeline = figures.timeline_figure(run)
    assert timeline is not None and timeline["layout"]["yaxis"]["ticktext"] == ["&lt;b&gt;x"]
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


def test_a_long_run_stays_small_and_says_what_is_thinned(tmp_path: Path) -> None:
    path = big_run(tmp_path / "vllm", 20_000, 16)
    run = open_run(path)
    began = time.perf_counter()
    text = render([run])
    took = time.perf_counter() - began
    assert len(text.encode()) <= 7_000_000 and took < 20, (len(text), took)
    page = Page(text)
    words = " ".join(" ".join(page.text).split())
    assert "The first 2,000 of 20,000 rounds are listed" in words
    assert re.search(
        r"[\d,]+ of 20,000 rounds are drawn: of every \d+ those with the least and the most of each series", words
    )
    assert "250 of 16,000 requests are drawn" in words
    drawn, rounds = page.figures["rounds-0"], run.read("rounds")
    assert len(drawn["by_round"]) < 4_000
    series = {trace["name"]: trace["y"] for trace in drawn["data"]}
    for name, column in (("prefill", "prefill_tokens"), ("cached", "cached_tokens"), ("waiting", "waiting")):
        assert max(series[name]) == rounds[column].max() and min(series[name]) == rounds[column].min(), name
        at = dict(zip(rounds["round"], rounds[column], strict=True))
        assert series[name] == [at[number] for number in drawn["by_round"]], name


def test_many_runs_share_one_page_within_the_limit(tmp_path: Path) -> None:
    path = big_run(tmp_path / "a", 3_000, 4)
    folders = [path] + [Path(shutil.copytree(path, tmp_path / name)) for name in "bcdefgh"]
    text = write_report(folders, tmp_path / "r.html").read_text()
    assert len(text.encode()) <= MAX_BYTES
    assert len({attrs.get("id") for tag, attrs in Page(text).tags if attrs.get("class") == "plot"}) == 8 * 2 + 1 + 4


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


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_browser_draws_every_figure_without_an_error(tmp_path: Path, theme: str) -> None:
    hostile_run(tmp_path / "nano")
    out = write_report([tmp_path / "nano"], tmp_path / "r.html")
    command = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--enable-logging=stderr",
    ]
    command += [
        f"--user-data-dir={tmp_path / 'profile'}",
        "--window-size=1200,9000",
        "--virtual-time-budget=10000",
        "--dump-dom",
        f"{out.as_uri()}?theme={theme}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert "CONSOLE" not in done.stderr, done.stderr
    dom = Page(done.stdout)
    boxes = [attrs for _, attrs in dom.tags if "plot" in (attrs.get("class") or "").split()]
    assert boxes and all("js-plotly-plot" in (attrs.get("class") or "") for attrs in boxes), boxes
    assert next(attrs["data-theme"] for tag, attrs in dom.tags if tag == "html") == theme
    assert not any(tag == "img" for tag, _ in dom.tags)
    assert " of 8 rounds" in " ".join(" ".join(dom.text).split())
