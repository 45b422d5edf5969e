"""The summary and the round table as they are printed: what they say, at 80 and at 140 columns."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from reports.run import open_run
from reports.summary import summarize
from reports.terminal import check_texts, number, round_table, summary_table
from tests.fake_run import record_golden, record_run, request_of
from tests.test_reports_metrics import two_requests


def printed(renderable: RenderableType, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(renderable)
    return out.getvalue()


def rows_of(text: str) -> dict[str, list[str]]:
    return {
        cells[0].strip(): cells[1:]
        for line in text.splitlines()
        if len(cells := [c for c in line.strip().split("  ") if c.strip()]) > 1
    }


@pytest.mark.parametrize("width", [80, 140])
def test_two_runs_stand_side_by_side(tmp_path: Path, width: int) -> None:
    bound = {"prefix_upper_bound": {"queried_tokens": 2000, "hit_tokens": 500}}
    runs = [
        open_run(record_golden(tmp_path / policy, policy, case, manifest=bound))
        for policy, case in (("nano", "article_rounds"), ("vllm", "worked_example"))
    ]
    text = printed(summary_table([summarize(run) for run in runs]), width)
    assert all(len(line) <= width for line in text.splitlines())
    rows = {name: [cell.strip() for cell in cells] for name, cells in rows_of(text).items()}
    assert text.splitlines()[0].split() == ["nano", "vllm"]
    assert rows["finished"] == ["5", "5"] and rows["mixed"] == ["0", "3"] and rows["preemptions"] == ["1", "0"]
    assert rows["recomputed tokens"] == ["200", "0"] and rows["its upper bound"] == ["25.0%", "25.0%"]
    assert rows["peak blocks of usable"] == ["11 of 11", "11 of 11"]
    assert rows["not_first"] == ["1", "0"]
    assert "too few samples for p90, p95, p99" in " ".join(text.split())
    assert text.count("times are ticks") == 1  # said once for both


def test_percentiles_that_no_run_carries_are_named_beside_n(tmp_path: Path) -> None:
    text = printed(summary_table([summarize(two_requests(tmp_path / "nano"))]), 80)
    section = text[text.index("TTFT, rounds") :].splitlines()[1:3]
    assert [line.split("  ")[1].strip() for line in section] == ["p50", "n (too few for p90, p95, p99)"]
    assert [line.split()[-1] for line in section] == ["1", "2"]
    assert not [line for line in text.splitlines() if line.split() and set(line.split()[1:]) == {"–"}]


@pytest.mark.parametrize("width", [80, 140])
def test_the_round_table_shows_every_word(tmp_path: Path, width: int) -> None:
    run = open_run(record_golden(tmp_path / "nano", "nano", "article_rounds"))
    text = printed(round_table(run), width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "0 → 1 → 0" in text and "R1 … R5" in text
    if width == 140:
        assert "R5 does not fit (needs 1 block, 0 free), and that does not stop the" in text
        assert "prefill R4[1024:1200]" in text
    shown = [line[:5].strip() for line in text.splitlines() if line[:5].strip().isdigit()]
    assert shown == [str(n) for n in range(1, 25)]


def test_a_longer_run_is_cut_and_says_so(tmp_path: Path) -> None:
    run = open_run(record_golden(tmp_path / "nano", "nano", "article_rounds"))
    assert "19 more rounds are recorded" in printed(round_table(run, 5), 100)


def test_names_from_a_trace_are_never_read_as_markup(tmp_path: Path) -> None:
    from engines.interface import SchedulerConfig

    config = SchedulerConfig(num_blocks=8, block_size=4, max_num_seqs=4, max_num_batched_tokens=8)
    run = open_run(record_run(tmp_path / "run", "nano", config, [(1, request_of(0, "[red]x", 6, 2))]))
    assert "prefill [red]x = 6" in printed(round_table(run), 140)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0"),
        (1234567, "1,234,567"),
        (0.0, "0"),
        (0.01234, "0.0123"),
        (12.345, "12.35"),
        (123.456, "123.5"),
        (4321.9, "4,322"),
    ],
)
def test_numbers_keep_about_four_digits(value: Any, text: str) -> None:
    assert number(value) == text


def test_the_terminal_needs_neither_plotly_nor_jinja2_nor_torch() -> None:
    code = "import sys, reports.terminal, reports.summary, reports.checks; print(sorted({'plotly', 'jinja2', 'torch', 'engines'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_what_is_found_of_several_runs_is_said_once_with_the_evidence_of_each() -> None:
    early = {"level": "warn", "what": "turns ran at once", "cure": "use --arrivals session"}
    ticks = {"level": "info", "what": "times are ticks", "evidence": "--clock rounds", "cure": "use another"}
    a, b = early | {"evidence": "30 of 204"}, early | {"evidence": "23 of 204"}
    assert check_texts([[ticks, a], [ticks, b]], ["nano", "vllm"]) == [
        ("warn", "nano, vllm: turns ran at once: nano: 30 of 204. vllm: 23 of 204. Use --arrivals session."),
        ("info", "nano, vllm: times are ticks: --clock rounds. Use another."),
    ]
    assert check_texts([[a], [b], [a]], ["n-1", "v-1", "n-2"])[0][1] == (
        "n-1, v-1, n-2: turns ran at once: n-1, n-2: 30 of 204. v-1: 23 of 204. Use --arrivals session."
    )
    assert check_texts([[ticks], [a]], ["nano", "vllm"])[1] == (
        "info",
        "nano: times are ticks: --clock rounds. Use another.",
    )
    assert check_texts([[a]], ["nano"])[0][1] == "turns ran at once: 30 of 204. Use --arrivals session."
