"""The page in a real browser: what it holds against the tables, what it draws, and what clicks and keys do to it."""

from __future__ import annotations

import json
import random
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from engines.interface import SchedulerConfig
from reports.blocks import pool_at
from reports.page import write_report
from reports.queues import walk
from reports.rounds import round_texts
from reports.run import Run, open_run
from tests.browser import CHROMIUM, Browser, Tab
from tests.command_line import call, rows, write_trace
from tests.fake_run import record_golden, record_run, request_of
from tests.test_reports_page import HOSTILE_IDS, hostile_run

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")

DARK = """[...document.querySelectorAll('canvas')].filter((canvas) => canvas.width > 0 && canvas.height > 0).map((canvas) => {
  const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  const colours = new Set();
  for (let i = 0; i < data.length; i += 4) if (data[i + 3] > 200) colours.add(data[i] << 16 | data[i + 1] << 8 | data[i + 2]);
  return colours.size;
})"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both policies on the worked example, and their page."""
    folder = tmp_path_factory.mktemp("pair")
    for policy, case in (("nano", "article_rounds"), ("vllm", "worked_example")):
        record_golden(folder / policy, policy, case, manifest={"trace": {"name": "walkthrough"}})
    write_report([folder], folder / "report.html")
    return folder


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A longer run with preemptions, hits and evictions, and its page."""
    folder = tmp_path_factory.mktemp("busy")
    record_golden(folder / "vllm", "vllm", "stress_fcfs_a")
    write_report([folder], folder / "report.html")
    return folder


def whole(tab: Tab) -> None:
    """Bring every picture before the eye, so that it is drawn."""
    tab.evaluate(
        "(async () => { for (let y = 0; y < document.body.scrollHeight; y += 500) { scrollTo(0, y); await new Promise((done) => setTimeout(done, 25)); } scrollTo(0, 0); })()"
    )
    tab.settle()


# -- what it holds


def exact(run: Run, tab: Tab, place: int, rng: random.Random, number: int = 200) -> None:
    """Batches, decisions and evictions of random rounds are those of the tables."""
    rounds = run.read("rounds")["round"].to_list()
    chosen = rng.sample(range(len(rounds)), min(number, len(rounds)))
    found = tab.evaluate(
        f"(() => {{ const run = benchctl.runs[{place}]; return {json.dumps(chosen)}.map((i) => [run.batch(i), run.decisions(i), run.evictions(i)]); }})()"
    )
    batches = run.read("batches").sort("round", "order").partition_by("round", as_dict=True)
    decisions = run.read("decisions").sort("round", "order", maintain_order=True).partition_by("round", as_dict=True)
    nobody: list[dict[str, Any]] = []
    for i, (batch, decided, evicted) in zip(chosen, found, strict=True):
        key = (rounds[i],)
        rows = batches[key].to_dicts() if key in batches else nobody
        assert [row["request"] for row in batch] == [row["request"] for row in rows], rounds[i]
        for mine, row in zip(batch, rows, strict=True):
            for column in ("start", "num_tokens", "cached_tokens", "yields_token"):
                assert mine[column] == row[column], (rounds[i], column, mine, row)
            assert mine["decode"] == (row["phase"] == "decode")
            assert mine["num_blocks"] in (None, row["num_blocks"])
        told = decisions[key].to_dicts() if key in decisions else nobody
        kept = ("kind", "request", "other", "reason", "needed", "available", "unit")
        assert [{k: row[k] for k in kept} for row in decided] == [
            {k: row[k] for k in kept} for row in told if row["kind"] != "evict"
        ], rounds[i]
        lost: dict[int, int] = {}
        for row in told:
            if row["kind"] == "evict":
                lost[row["request"]] = lost.get(row["request"], 0) + 1
        assert {row["request"]: row["count"] for row in evicted} == lost, rounds[i]


CASES = [
    ("nano", "article_rounds"),
    ("nano", "stress_b16_very_tight"),
    ("vllm", "stress_fcfs_a"),
    ("vllm", "priority_preempt"),
    ("vllm", "lora_stress_a"),
]


@pytest.mark.parametrize("policy, case", CASES)
def test_any_round_in_the_page_is_the_recorded_one(browser: Browser, tmp_path: Path, policy: str, case: str) -> None:
    run = open_run(record_golden(tmp_path / policy, policy, case))
    write_report([run.path], tmp_path / "r.html")
    with browser.page(tmp_path / "r.html") as tab:
        exact(run, tab, 0, random.Random(4))
        views = list(walk(run))
        queues = tab.evaluate(
            "benchctl.runs[0].round.length && [...benchctl.runs[0].round].map((_, i) => benchctl.runs[0].queues(i))"
        )
        for view, queue in zip(views, queues, strict=True):
            assert queue == {"waiting": view.waiting, "running": view.running}, view.round
        texts = [asdict(text) for text in round_texts(run)]
        said = tab.evaluate("[...benchctl.runs[0].round].map((_, i) => benchctl.roundText(benchctl.runs[0], i))")
        assert said == texts
        if tab.evaluate("benchctl.runs[0].facts.map"):
            for i in random.Random(5).sample(range(len(views)), min(30, len(views))):
                pool = pool_at(run, views[i].round)
                cells = tab.evaluate(f"benchctl.runs[0].pool({i})")
                told = views[i].row["hashed_blocks"]  # null where the raw pool has 65 blocks
                hashed = pool.cached if told is None else set(told)
                for cell in cells:
                    owners = {owner["request"]: owner["index"] for owner in cell["owners"]}
                    assert owners == pool.owners.get(cell["block"], {}), (views[i].round, cell)
                    assert cell["cached"] == (cell["block"] in hashed)
        assert tab.trouble() == []


def test_rounds_whose_order_is_not_that_of_admissions_keep_it(browser: Browser, tmp_path: Path) -> None:
    path = record_golden(tmp_path / "vllm", "vllm", "stress_fcfs_a")
    run = open_run(path)
    batches = run.read("batches")
    turned = batches.with_columns(
        pl.when(pl.col("round") % 3 == 0)
        .then(pl.col("order").max().over("round") - pl.col("order"))
        .otherwise("order")
        .alias("order")
    )
    turned.sort("round", "order").write_parquet(path / "batches-00000.parquet")
    run = open_run(path)
    write_report([path], tmp_path / "r.html")
    with browser.page(tmp_path / "r.html") as tab:
        assert tab.evaluate("benchctl.runs[0].explicit.size") > 5
        exact(run, tab, 0, random.Random(6))


def test_phases_of_a_request_add_up_to_what_was_recorded(browser: Browser, pair: Path) -> None:
    run = open_run(pair / "nano")
    with browser.page(pair / "report.html") as tab:
        phases = tab.evaluate("[0, 1, 2, 3, 4].map((row) => benchctl.phases(benchctl.runs[0], row))")
    for row, mine in zip(run.read("requests").sort("request").iter_rows(named=True), phases, strict=True):
        spent: dict[str, float] = {}
        for phase, begin, end, _ in mine:
            spent[phase] = spent.get(phase, 0) + end - begin
        assert spent.get("stalled", 0) == pytest.approx(row["stalled_s"]), row["id"]
        assert spent.get("preempted", 0) == pytest.approx(row["preempted_s"]), row["id"]
        assert spent.get("queued", 0) == pytest.approx(row["first_scheduled_s"] - row["arrival_s"]), row["id"]
    # R5 loses its block in round 6 and gets one again in round 10.
    assert [piece[1:] for piece in phases[4] if piece[0] == "preempted"] == [[5.0, 9.0, 5]]


def test_where_rounds_overlap_the_timeline_counts_no_moment_twice(
    browser: Browser, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "t.jsonl", rows(*((0.004 * i, 150 + 7 * i % 300, 60 + i % 50) for i in range(60))))
    command = ["replay", trace, "--scheduler", "nano", "--engine", "simulated", "--profile", "h200-qwen3-0.6b", "--num-blocks", 257, "--block-size", 16]  # fmt: skip
    assert call(capfd, *command, "--max-num-batched-tokens", 512, "--out", tmp_path / "runs").code == 0
    run = open_run(tmp_path / "runs" / "nano")
    told = run.read("requests").sort("request")
    assert run.manifest["overlapped"] and told["preemptions"].sum() and told["stalled_s"].sum()
    with browser.page(tmp_path / "runs" / "report.html") as tab:
        lives = tab.evaluate("Array.from({ length: 60 }, (_, row) => benchctl.phases(benchctl.runs[0], row))")
        assert "Rounds overlap: decisions are those of a synchronous scheduler" in tab.evaluate("document.querySelector('#rounds').textContent")  # fmt: skip
        assert not tab.trouble()
    for row, mine in zip(told.iter_rows(named=True), lives, strict=True):
        spent: dict[str, float] = {}
        for phase, begin, end, _ in mine:
            spent[phase] = spent.get(phase, 0) + end - begin
        # Idle time between rounds is drawn as stalled, too; here there is none. Times of the page are microseconds.
        assert spent.get("stalled", 0) == pytest.approx(row["stalled_s"], abs=2e-4), row["id"]
        assert spent.get("preempted", 0) == pytest.approx(row["preempted_s"], abs=2e-5), row["id"]


# -- what it draws and does


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_picture_is_drawn_without_an_error_or_a_request(browser: Browser, pair: Path, theme: str) -> None:
    with browser.page(pair / "report.html", query=f"?theme={theme}") as tab:
        whole(tab)
        assert tab.evaluate("document.documentElement.dataset.theme") == theme
        for place in range(tab.evaluate("document.querySelectorAll('.plot').length")):
            box = f"document.querySelectorAll('.plot')[{place}]"
            tab.evaluate(f"{box}.scrollIntoView({{ behavior: 'instant' }})")
            tab.wait(f"{box}.querySelector('.main-svg')")
        colours = tab.evaluate(DARK)
        assert len(colours) == 2 * 7 + 2 and min(colours) >= 2, colours  # seven lanes and a timeline for each run
        assert tab.trouble() == []
        assert tab.requests() == [f"{(pair / 'report.html').resolve().as_uri()}?theme={theme}"]


def test_pointing_reads_a_round_and_a_click_opens_it(browser: Browser, pair: Path) -> None:
    with browser.page(pair / "report.html") as tab:
        left, top, width, height = tab.place(".lanes[data-run='0'] .plane")
        low, high = tab.evaluate("[benchctl.view.lo, benchctl.view.hi]")
        share = (54 + (width - 64) * (6 - low) / (high - low)) / width  # of round 6, between the margins
        tab.mouse("mouseMoved", left + width * share, top + height / 2)
        tab.settle()
        text = tab.evaluate("document.querySelector('.lanes[data-run=\"0\"] .readout').textContent")
        assert text.startswith("Round 6 decode, 4 sequences") and "R5, the newest, is preempted for it" in text
        other = tab.evaluate("document.querySelector('.lanes[data-run=\"1\"] .readout').textContent")
        assert other.startswith("Round 6 "), other  # one cursor through both runs
        assert tab.evaluate("[...document.querySelectorAll('.lane .cursor')].every((line) => !line.hidden)")
        tab.click(".lanes[data-run='0'] .plane", dx=share)
        assert tab.evaluate("document.querySelector('.inspector h3').textContent") == "Round 6 of nano"
        body = tab.evaluate("document.querySelector('.inspector .body').innerText")
        assert "preempt" in body and "R3 crosses a block edge with none free" in body
        assert tab.trouble() == []


def test_dragging_zooms_every_run_and_escape_shows_all(browser: Browser, busy: Path) -> None:
    with browser.page(busy / "report.html") as tab:
        before = tab.evaluate("[benchctl.view.lo, benchctl.view.hi]")
        tab.drag(".lanes .plane", 0.3, 0.5)
        low, high = tab.evaluate("[benchctl.view.lo, benchctl.view.hi]")
        assert high - low == pytest.approx((before[1] - before[0]) * 0.2 * 1, rel=0.12)
        assert tab.evaluate("!document.querySelector('#window-reset').hidden")
        tab.evaluate("document.querySelector('.lanes').focus()")
        tab.key("Escape")
        assert tab.evaluate("[benchctl.view.lo, benchctl.view.hi]") == before
        tab.click("input[name='axis'][value='time']")
        assert tab.evaluate("benchctl.view.axis") == "time"
        assert tab.trouble() == []


def test_arrow_keys_step_through_the_rounds(browser: Browser, busy: Path) -> None:
    with browser.page(busy / "report.html") as tab:
        tab.evaluate("document.querySelector('.lanes').focus()")
        for _ in range(3):
            tab.key("ArrowRight")
        tab.key("ArrowLeft")
        assert tab.evaluate("benchctl.chosen.i") == 2
        assert tab.evaluate("document.querySelector('#why-number').value") == str(
            tab.evaluate("benchctl.runs[0].round[2]")
        )
        tab.evaluate("document.querySelector('.vlist').focus()")
        tab.key("ArrowDown")
        assert tab.evaluate("benchctl.chosen.i") == 3
        assert tab.trouble() == []


def test_search_finds_rounds_by_request_reason_and_event(browser: Browser, busy: Path) -> None:
    run = open_run(busy / "vllm")
    rounds, decisions = run.read("rounds"), run.read("decisions")
    number = {round: i for i, round in enumerate(rounds["round"])}
    label = run.labels[7]
    with browser.page(busy / "report.html") as tab:
        tab.type("#why-find", label)
        mine = set(run.read("batches").filter(pl.col("request") == 7)["round"])
        mine |= set(decisions.filter((pl.col("request") == 7) | (pl.col("other") == 7))["round"])
        assert (
            tab.evaluate("document.querySelector('#why-count').textContent")
            == f"{len(mine):,} of {rounds.height:,} rounds"
        )
        found = tab.evaluate(f"benchctl.search(benchctl.runs[0], {{ text: {json.dumps(label)} }})")
        assert found == sorted(number[round] for round in mine)
        preempted = tab.evaluate("benchctl.search(benchctl.runs[0], { text: 'preempted' })")
        stops = rounds.filter(
            pl.col("stop_waiting").is_in(["preemption"])
            | (pl.col("stop_running") == "self_preempted")
            | (pl.col("preempted") > 0)
        )
        assert preempted == [number[round] for round in stops["round"]] and preempted
        evicted = tab.evaluate("benchctl.search(benchctl.runs[0], { event: 'evicted', kind: 'mixed' })")
        assert evicted == [
            number[r] for r in rounds.filter((pl.col("evicted") > 0) & (pl.col("kind") == "mixed"))["round"]
        ]
        held = tab.evaluate("benchctl.search(benchctl.runs[0], { event: 'held' })")
        assert held == sorted({number[r] for r in decisions.filter(pl.col("kind").is_in(["hold", "skip"]))["round"]})
        tab.evaluate("document.querySelector('.vrow').click()")
        assert tab.evaluate("benchctl.chosen.i") == found[0]
        tab.click("#why-next-found")
        assert tab.evaluate("benchctl.chosen.i") == found[1]
        assert tab.trouble() == []


def test_the_slider_shows_who_owns_each_block(browser: Browser, pair: Path) -> None:
    with browser.page(pair / "report.html") as tab:
        for value, first, last in ((0, "R1.0", ""), (4, "R1.0", "R5.0"), (5, "R1.0", "R3.1")):
            tab.evaluate(
                f"(() => {{ const slider = document.querySelector('.blockcanvas input'); slider.value = {value}; slider.dispatchEvent(new Event('input')); }})()"
            )
            cells = tab.evaluate(
                "[...document.querySelectorAll('.blockcanvas .cells')[0].children].map((cell) => cell.children[1].textContent)"
            )
            assert (cells[0], cells[-1], len(cells)) == (first, last, 11)
        assert tab.evaluate("document.querySelector('.inspector h3').textContent") == "Round 6 of nano"
        here = tab.evaluate("[...document.querySelectorAll('.blockmap th.here')].map((cell) => cell.textContent)")
        assert here[0] == "6"


def test_a_long_run_s_map_is_drawn(browser: Browser, busy: Path) -> None:
    with browser.page(busy / "report.html") as tab:
        tab.evaluate("document.querySelector('#blocks').scrollIntoView()")
        tab.settle()
        colours = tab.evaluate(
            "(() => { const canvas = document.querySelector('.mapbox canvas'), data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data, seen = new Set();"
            " for (let i = 0; i < data.length; i += 4) seen.add(data.slice(i, i + 4).join()); return seen.size; })()"
        )
        assert colours > 10 and tab.trouble() == []


def test_a_click_on_a_request_tells_its_life(browser: Browser, pair: Path) -> None:
    with browser.page(pair / "report.html") as tab:
        left, top, width, height = tab.place(".gantt[data-run='0'] .gantt-view")
        tab.click(".gantt[data-run='0'] .gantt-view", dx=0.5, dy=(4.5 * 18) / height)
        text = tab.evaluate("document.querySelector('#life-0').innerText")
        assert (
            text.startswith("Request R5")
            and "preempted for R3" in text
            and "resumed" in text
            and "finishes: max_tokens" in text
        )
        tab.evaluate(
            "[...document.querySelectorAll('#life-0 button.link')].find((link) => link.textContent === '6').click()"
        )
        assert tab.evaluate("document.querySelector('.inspector h3').textContent") == "Round 6 of nano"
        tab.evaluate("document.querySelector('.gantt[data-run=\"0\"] .gantt-scroll').focus()")
        tab.key("ArrowUp")
        assert tab.evaluate("document.querySelector('#life-0 h4').textContent").startswith("Request R4")
        assert tab.trouble() == []


def test_the_theme_button_goes_round_and_pictures_follow(browser: Browser, pair: Path) -> None:
    with browser.page(pair / "report.html") as tab:
        seen = []
        for _ in range(3):
            tab.click("#theme")
            seen.append(
                tab.evaluate(
                    "[document.querySelector('#theme').textContent, getComputedStyle(document.body).backgroundColor]"
                )
            )
        assert [name for name, _ in seen] in (
            ["Light", "Dark", "Auto"],
            ["Dark", "Auto", "Light"],
            ["Auto", "Light", "Dark"],
        )
        assert len({colour for _, colour in seen}) == 2
        tab.evaluate("try { localStorage.clear() } catch {}")


def test_figures_open_their_tables(browser: Browser, pair: Path) -> None:
    with browser.page(pair / "report.html") as tab:
        tab.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
        tab.wait("[...document.querySelectorAll('details.data')].every((details) => details.querySelector('table'))")
        rows = tab.evaluate("document.querySelectorAll('details.lane-data tbody tr').length")
        assert rows == 24 + open_run(pair / "vllm").read("rounds").height
        assert (
            tab.evaluate("document.querySelectorAll('details.request-data')[0].querySelectorAll('tbody tr').length")
            == 5
        )


@pytest.mark.parametrize("width", [360, 900, 2560])
def test_nothing_sticks_out_at_any_width(browser: Browser, busy: Path, pair: Path, width: int) -> None:
    folder = busy if width == 900 else pair
    with browser.page(folder / "report.html", width=width, height=900, touch=width < 600) as tab:
        whole(tab)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.trouble() == []


def test_hostile_texts_stay_texts(browser: Browser, tmp_path: Path) -> None:
    hostile_run(tmp_path / "nano")
    with browser.page(write_report([tmp_path / "nano"], tmp_path / "r.html")) as tab:
        whole(tab)
        tab.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
        for row in range(len(HOSTILE_IDS)):
            tab.evaluate(f"benchctl.showRequest(benchctl.runs[0], {row})")
            assert HOSTILE_IDS[row] in tab.evaluate("document.querySelector('#life-0 h4').textContent")
        tab.settle()
        assert tab.evaluate("document.querySelectorAll('main img, main script, main u').length") == 0
        assert tab.trouble() == [] and len(tab.requests()) == 1


def test_a_run_with_refused_requests_draws_them(browser: Browser, tmp_path: Path) -> None:
    config = SchedulerConfig(num_blocks=4, block_size=4, max_num_seqs=4, max_num_batched_tokens=8)
    arrivals = [(1, request_of(0, "fits", 5, 2)), (2, request_of(1, "huge", 50, 2)), (3, request_of(2, "later", 5, 2))]
    record_run(tmp_path / "nano", "nano", config, arrivals)
    with browser.page(write_report([tmp_path / "nano"], tmp_path / "r.html")) as tab:
        whole(tab)
        lives = tab.evaluate("[0, 1, 2].map((row) => benchctl.life(benchctl.runs[0], row).map((line) => line[2]))")
        assert any("refused: exceeds_pool" in what for life in lives for what in life)
        assert tab.evaluate("benchctl.runs[0].rowOf.size") == 3 and tab.trouble() == []


def test_contrast_of_texts_is_at_least_4_5(browser: Browser, pair: Path) -> None:
    code = """(() => {
      const parse = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
      const light = (rgb) => { const [r, g, b] = rgb.map((v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
      const behind = (node) => { for (; node; node = node.parentElement) { const c = getComputedStyle(node).backgroundColor; if (!/, 0\\)$|transparent|color\\(/.test(c)) return parse(c); } return [255, 255, 255]; };
      const bad = [];
      for (const node of document.querySelectorAll('main *')) {
        if (!node.offsetParent || node.closest('.plot, svg, canvas, .visually-hidden') || ![...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim())) continue;
        const style = getComputedStyle(node), a = light(parse(style.color)), b = light(behind(node)), ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) bad.push([node.className, node.textContent.slice(0, 30), +ratio.toFixed(2)]);
      }
      return bad.slice(0, 12);
    })()"""
    for theme in ("light", "dark"):
        with browser.page(pair / "report.html", query=f"?theme={theme}") as tab:
            tab.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
            tab.settle()
            assert tab.evaluate(code) == [], theme


def test_every_picture_is_on_paper_without_scrolling(browser: Browser, pair: Path) -> None:
    """What is printed at once after loading has all pictures, as wide as the paper and no wider."""
    with browser.page(pair / "report.html", width=1600) as tab:
        tab.call("Page.printToPDF")  # fires beforeprint and afterprint
        tab.evaluate("dispatchEvent(new Event('beforeprint'))")
        tab.call("Emulation.setEmulatedMedia", media="print")
        try:
            drawn = tab.evaluate("[...document.querySelectorAll('.plot .main-svg:first-child')].map((svg) => svg.getBoundingClientRect().width)")  # fmt: skip
            assert len(drawn) == tab.evaluate("document.querySelectorAll('.plot').length") and max(drawn) <= 690
            assert min(tab.evaluate(DARK)) >= 2
            assert tab.evaluate("document.documentElement.dataset.theme") == "light"
        finally:
            tab.call("Emulation.setEmulatedMedia", media="screen")
            tab.evaluate("dispatchEvent(new Event('afterprint'))")
        tab.settle()
        assert tab.evaluate("benchctl.paper") is None and tab.trouble() == []


def test_a_clock_of_rounds_is_read_in_rounds(browser: Browser, tmp_path: Path) -> None:
    record_golden(tmp_path / "nano", "nano", "article_rounds")
    with browser.page(write_report([tmp_path / "nano"], tmp_path / "r.html")) as tab:
        whole(tab)
        tab.evaluate("benchctl.showRequest(benchctl.runs[0], 4)")
        tab.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
        tab.settle()
        said = tab.evaluate("document.querySelector('#life-0').innerText")
        assert "TTFT 1 round" in said and "preempted 4 rounds" in said
        for part in (".head", "#summary", "#requests", "#latency"):
            words = tab.evaluate(f"document.querySelector('{part}').innerText")
            assert not re.search(r"[\d,] ms\b|\d s\b", words), part
        assert tab.trouble() == []


@pytest.mark.parametrize(("width", "height"), [(1200, 900), (390, 700)])
def test_a_round_s_link_brings_its_row_and_its_detail_into_view(
    browser: Browser, busy: Path, width: int, height: int
) -> None:
    with browser.page(busy / "report.html", width=width, height=height, touch=width < 600) as tab:
        # A search that leaves the round out does not hide it.
        tab.evaluate(
            "{ const find = document.querySelector('#why-find'); find.value = 'nosuchthing'; find.dispatchEvent(new Event('input')); }"
        )
        links = tab.evaluate("[...document.querySelectorAll('.pointers [data-goto]')].map((link) => link.dataset.goto)")
        assert links
        for k, target in enumerate(links):
            tab.evaluate(f"document.querySelectorAll('.pointers [data-goto]')[{k}].click()")
            tab.settle()
            number = int(target.split(":")[1])
            row, box, inside = tab.evaluate(
                "[document.querySelector('.vrow.chosen'), document.querySelector('.inspector'), document.querySelector('.vlist')]"
                ".map((one) => { const at = one.getBoundingClientRect(); return [at.top, at.bottom, one.firstElementChild.textContent]; })"
            )
            assert row[2] == f"{number:,}"
            assert max(inside[0], 0) <= row[0] and row[1] <= min(inside[1], height), (row, inside)
            assert (
                0 < box[0] < height / 2
                and tab.evaluate("document.querySelector('.inspector h3').textContent") == f"Round {number:,}"
            )
        assert tab.trouble() == []


def test_what_is_the_same_in_every_round_is_a_line_and_not_a_strip(browser: Browser, busy: Path, pair: Path) -> None:
    strips = {"kind": "Kind", "stop_waiting": "Waiting loop stopped for", "stop_running": "Running loop stopped for"}
    told = set()
    for page, folders in ((busy, ["vllm"]), (pair, ["nano", "vllm"])):
        with browser.page(page / "report.html") as tab:
            for place, folder in enumerate(folders):
                rounds = open_run(page / folder).read("rounds")
                box = f"document.querySelector('.lanes[data-run=\"{place}\"]')"
                lanes = dict(
                    tab.evaluate(
                        f"[...{box}.querySelectorAll('.lane')].map((lane) => [lane.dataset.lane, [...lane.querySelectorAll('.key')].map((key) => key.textContent)])"
                    )
                )
                line = tab.evaluate(f"{box}.querySelector('.same')?.textContent || ''")
                for column, title in strips.items():
                    words = rounds[column].unique().to_list()
                    if len(words) > 1:
                        assert set(lanes[title]) == {word or "did not run" for word in words}
                        told.add(None in words)
                    else:
                        assert title not in lanes
                        assert words == [None] or f"{title[0].lower()}{title[1:]} {words[0]}" in line
    assert told == {True, False}  # a loop that did not run in some rounds has a key of its own
