"""The page of a sweep: what it says without a browser, and what a browser draws of it and lets one do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from reports.sweep_page import MAX_SETTINGS, kept_settings, write_sweep_page
from reports.sweep_view import make_view
from tests.browser import CHROMIUM, Browser, Tab
from tests.test_sweep_view import SLO, cell, frame

NAMES = ("scheduler", "max-num-seqs", "trace")
HOSTILE = "</script><img src=x onerror=alert(1)>"


def small(trace: str = "t.jsonl", **more: Any) -> pl.DataFrame:
    cells = [
        cell(who, seats, goodput, trace=trace, ttft=ttft, p99_itl_ms=ttft / 10, p50_ttft_ms=ttft / 2)
        for who, seats, goodput, ttft in (
            ("nano", "8", 3.0, 900.0), ("nano", "64", 8.0, 150.0), ("vllm", "8", 4.0, 800.0), ("vllm", "64", 10.0, 120.0),
        )
    ]  # fmt: skip
    return frame(
        *cells, cell("vllm", "0", 0.0, trace=trace, status="failed", reason=f"no {HOSTILE}"), names=NAMES, **more
    )


def write(folder: Path, table: pl.DataFrame, **more: Any) -> Path:
    return write_sweep_page(
        table,
        NAMES,
        folder / "sweep.html",
        slo=SLO,
        attainment=0.99,
        command=["benchctl", "sweep", HOSTILE],
        spec=HOSTILE,
        **more,
    )


def test_the_page_answers_first_and_lists_every_setting_without_javascript(tmp_path: Path) -> None:
    page = write(tmp_path, small()).read_text()
    body = page[: page.index('<script type="application/json"')]
    assert (
        body.index("Use scheduler vllm, max-num-seqs 64") < body.index("The best setting") < body.index('id="settings"')
    )
    assert len(re.findall(r'<tr data-id="', body)) == 5
    assert "1 of 5 cells failed" in body and "stated for" not in body


def test_nothing_of_a_spec_becomes_markup(tmp_path: Path) -> None:
    page = write(tmp_path, small(trace=f"/data/{HOSTILE}")).read_text()
    assert "<img" not in page and page.count("</script>") == 3
    assert not re.search(r'(src|href)="(?!#)', page)


def test_of_very_many_settings_the_best_are_drawn_and_it_says_so() -> None:
    cells = [cell("vllm", str(seats), float(seats)) for seats in range(MAX_SETTINGS + 50)]
    view = make_view(frame(*cells), ("scheduler", "max-num-seqs"), SLO, 0.99)
    kept, note = kept_settings(view)
    assert len(kept) == MAX_SETTINGS and kept[0].values["max-num-seqs"] == str(MAX_SETTINGS + 49)
    assert note is not None and f"{MAX_SETTINGS + 50:,}" in note


def test_a_sweep_that_failed_wholly_has_a_page_too(tmp_path: Path) -> None:
    table = frame(cell("vllm", "8", 0.0, status="failed", reason="no such trace"), names=NAMES)
    page = write(tmp_path, table).read_text()
    assert "nothing to recommend" in page and "no such trace" in page and 'id="heat-table"' not in page


# -- in a browser

pytestmark_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")


def whole(tab: Tab) -> None:
    tab.evaluate(
        "(async () => { for (let y = 0; y < document.body.scrollHeight; y += 400) { scrollTo(0, y); await new Promise((done) => setTimeout(done, 40)); } scrollTo(0, 0); })()"
    )
    tab.wait("document.querySelectorAll('.plot .main-svg').length >= 4")


@pytestmark_browser
@pytest.mark.parametrize("width", [360, 1280])
def test_every_picture_is_drawn_offline_and_fits(browser: Browser, tmp_path: Path, width: int) -> None:
    path = write(tmp_path, small(trace=HOSTILE.replace("/", "")))
    with browser.page(path, width=width) as tab:
        whole(tab)
        assert tab.trouble() == []
        assert [url for url in tab.requests() if not url.startswith(("file:", "data:", "blob:"))] == []
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.evaluate("document.querySelectorAll('#parallel-box path').length") == 4
        assert tab.evaluate("document.querySelector('#trouble').hidden")


@pytestmark_browser
def test_the_heat_map_shows_the_table_and_the_front_what_nothing_beats(browser: Browser, tmp_path: Path) -> None:
    path = write(tmp_path, small())
    with browser.page(path) as tab:
        cells = "Object.fromEntries([...document.querySelectorAll('#heat-table td:not(.none)')].map((td) => [td.title, td.textContent]))"
        assert tab.evaluate(cells) == {
            "scheduler nano, max-num-seqs 8": "3.00", "scheduler nano, max-num-seqs 64": "8.00",
            "scheduler vllm, max-num-seqs 8": "4.00", "scheduler vllm, max-num-seqs 64": "10.00",
        }  # fmt: skip
        choose = "((id, text) => { const s = document.querySelector(id); s.value = [...s.options].find((o) => o.textContent === text).value; s.dispatchEvent(new Event('change')); })"
        tab.evaluate(f"{choose}('#heat-figure', 'TTFT p99, ms')")
        assert tab.evaluate(f"{cells}['scheduler nano, max-num-seqs 8']") == "900.0"
        assert tab.evaluate("document.querySelector('#heat-table td.peak').title") == "scheduler vllm, max-num-seqs 64"
        front = tab.evaluate("benchctl.meta.figures['pareto-p99_ttft_ms'].data[0].y")
        assert front == [120.0]
        tab.evaluate(f"{choose}('#colour-by', 'max-num-seqs')")
        names = tab.evaluate("benchctl.meta.figures['pareto-p99_ttft_ms'].data.map((trace) => trace.name)")
        assert names == ["not beaten", "max-num-seqs 8", "max-num-seqs 64", "best"]


@pytestmark_browser
def test_choosing_a_value_keeps_its_lines_and_rows_and_columns_sort(browser: Browser, tmp_path: Path) -> None:
    with browser.page(write(tmp_path, small())) as tab:
        shown = "[...document.querySelectorAll('#settings-table tbody tr')].filter((tr) => !tr.hidden).map((tr) => tr.cells[0].textContent + tr.cells[1].textContent)"
        tab.evaluate(
            "document.querySelector('g.value[aria-label=\"scheduler nano\"]').dispatchEvent(new MouseEvent('click'))"
        )
        assert tab.evaluate(shown) == ["nano64", "nano8"]
        assert tab.evaluate("document.querySelectorAll('#parallel-box path.off').length") == 2
        tab.click("#parallel-reset")
        assert len(tab.evaluate(shown)) == 5
        tab.click("#settings-table th:nth-child(2) button")
        assert [text[4:] for text in tab.evaluate(shown)] == ["0", "8", "8", "64", "64"]


def test_numbers_of_the_page_are_those_of_the_table(tmp_path: Path) -> None:
    page = write(tmp_path, small()).read_text()
    data = json.loads(re.search(r'id="figures">(.*?)</script>', page).group(1))["sweep"]  # type: ignore[union-attr]
    keys = [figure["key"] for figure in data["figures"]]
    best = next(row for row in data["rows"] if row["id"] in data["picks"])
    assert best["f"][keys.index("request_goodput")] == [10.0] and best["f"][keys.index("p99_ttft_ms")] == [120.0]
    assert [axis["name"] for axis in data["axes"]] == ["scheduler", "max-num-seqs"]
    assert data["axes"][1]["values"] == ["0", "8", "64"]


def test_rates_tried_are_drawn_with_their_intervals(tmp_path: Path) -> None:
    probes = pl.DataFrame(
        {
            "cell": ["a"] * 3, "setting": [f"scheduler={HOSTILE}"] * 3, "rate": [4.0, 2.0, 8.0], "seeds": [3, 3, 12],
            "attainment": [0.99, 1.0, 0.5], "low": [0.98, 0.995, 0.4], "high": [1.0, 1.0, 0.6], "verdict": ["open", "holds", "fails"],
        }
    )  # fmt: skip
    page = write(tmp_path, small(), probes=probes).read_text()
    assert 'id="probes"' in page and "<img" not in page and "Rates with less than 92% lie under the picture" in page
    figure = json.loads(re.search(r'id="figures">(.*?)</script>', page).group(1))["figures"]["probes"]  # type: ignore[union-attr]
    marks = figure["data"][1]
    assert marks["x"] == [2.0, 4.0, 8.0] and marks["y"] == [100.0, 99.0, 50.0]
    assert marks["error_y"]["arrayminus"] == [0.5, 1.0, 10.0] and marks["error_y"]["array"] == [0.0, 1.0, 10.0]
    assert figure["layout"]["shapes"][0]["y0"] == 99.0
