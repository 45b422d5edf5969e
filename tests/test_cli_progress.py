"""The live line: what it shows, and that it is silent where stderr is no terminal."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from benchctl.progress import BAR, Progress
from tests.test_replay_failures import empty_round


def round_with(**values: Any) -> Any:
    found = empty_round()
    for name, value in values.items():
        setattr(found, name, value)
    return found


def test_the_line_shows_rates_queues_and_the_pool_as_a_bar() -> None:
    progress = Progress(Console(file=io.StringIO()), "nano", usable_blocks=40)
    text = progress.line(1234, 5.5, round_with(running=7, waiting=3, free_blocks_end=10), 100.0, 2000.0).plain
    for part in ("nano", "5.50 s", "round 1,234", "100 rounds/s", "2,000 tok/s", "running 7", "waiting 3", "10 free"):
        assert part in text
    assert text.count("█") == BAR * 3 // 4 and text.count("·") == BAR // 4


def test_the_bar_is_full_and_empty_at_the_ends_only() -> None:
    progress = Progress(Console(file=io.StringIO()), "nano", usable_blocks=1000)
    bars = [
        progress.line(1, 0.0, round_with(free_blocks_end=free), 0, 0).plain.count("█") for free in (1000, 999, 1, 0)
    ]
    assert bars == [0, 0, BAR - 1, BAR]


def test_nothing_is_drawn_where_stderr_is_no_terminal() -> None:
    out = io.StringIO()
    with Progress(Console(file=out), "nano", 40) as progress:
        for number in range(100):
            progress.saw(number, 0.0, round_with(), 1)
    assert out.getvalue() == ""


def test_a_terminal_sees_the_line_and_keeps_nothing_of_it() -> None:
    out = io.StringIO()
    with Progress(Console(file=out, force_terminal=True, width=200), "nano", 40) as progress:
        progress.saw(1, 0.0, round_with(stop_waiting="max_num_seqs"), 1)
    assert "round 1" in out.getvalue() and "max_num_seqs" in out.getvalue()
