"""What `trace info` computes, on traces whose figures can be worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.command_line import write_trace
from traces.info import TraceInfo, describe
from traces.load import open_trace


def info_of(
    tmp_path: Path, rows: list[dict[str, Any]], *, options: dict[str, Any] | None = None, **header: Any
) -> TraceInfo:
    return describe(open_trace(write_trace(tmp_path / "t.jsonl", rows, **header)), **(options or {}))


def at(*times: float, **more: Any) -> list[dict[str, Any]]:
    return [{"arrival_s": t, "input_length": 10, "output_length": 2, **more} for t in times]


def test_arrivals_rate_variation_ties_and_peaks(tmp_path: Path) -> None:
    found = info_of(tmp_path, at(0, 0, 0.5, 2.5, 3.4)).arrivals
    # gaps 0, 0.5, 2, 0.9: mean 0.85, squares from it 0.7225 + 0.1225 + 1.3225 + 0.0025 = 2.17, over 4
    assert found["rate"] == pytest.approx(4 / 3.4) and found["cv"] == pytest.approx((2.17 / 4) ** 0.5 / 0.85)
    assert (found["zero_gaps"], found["longest_gap_s"], found["peak_in_1_s"]) == (1, 2.0, 3)
    assert found["smallest_gap_s"] == pytest.approx(0.5)


def test_a_window_of_a_second_does_not_count_its_end(tmp_path: Path) -> None:
    assert info_of(tmp_path, at(0, 1, 2)).arrivals["peak_in_1_s"] == 1


def test_dispersion_of_minutes_is_that_of_whole_ones(tmp_path: Path) -> None:
    # Minutes with 3, 1, 2 requests, and a last one that is not whole.
    found = info_of(tmp_path, at(0, 10, 20, 70, 130, 140, 185)).arrivals
    assert found["idc60"] == pytest.approx((1 + 1 + 0) / 3 / 2)


def test_lengths_are_observed_values(tmp_path: Path) -> None:
    rows = [{"arrival_s": i, "input_length": n, "output_length": 1} for i, n in enumerate([1, 2, 3, 4, 100])]
    found = info_of(tmp_path, rows)
    assert (found.lengths["input"]["p50"], found.lengths["input"]["p90"], found.lengths["input"]["mean"]) == (
        3,
        100,
        22,
    )
    assert found.context["0.5"] == 4 and found.context["1"] == 101


def test_turns_and_think_times(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "arrival_s": 0, "session": "s", "input_length": 4, "output_length": 1},
        {
            "id": "b",
            "arrival_s": 5,
            "session": "s",
            "parents": ["a"],
            "think_s": 3.0,
            "input_length": 8,
            "output_length": 1,
        },
        {"id": "c", "arrival_s": 6, "session": "t", "input_length": 4, "output_length": 1},
    ]
    found = info_of(tmp_path, rows).sessions
    assert found["turns_mean"] == 1.5 and found["single_turn_share"] == 0.5 and found["think_s"]["p50"] == 3.0
    assert found["rows_with_parents"] == 1


def hashed(*ids: list[int]) -> list[dict[str, Any]]:
    return [{"arrival_s": i, "input_length": 4 * len(k), "output_length": 1, "hash_ids": k} for i, k in enumerate(ids)]


def test_the_bound_counts_blocks_and_tokens_but_never_the_last_token(tmp_path: Path) -> None:
    use = info_of(tmp_path, hashed([1, 2], [1, 3], [1, 2]), options={"block_size": 4}, block_size=4).prefix
    assert use is not None
    # Blocks hit: 0, 1, 2. In tokens the last request's second block holds the last token, which is always computed.
    assert (use.blocks_hit, use.blocks, use.unique_blocks, use.repeated_prompts) == (3, 6, 3, 1)
    assert (use.tokens_hit, use.prompt_tokens) == (8, 24)


def test_an_lru_cache_too_small_hits_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traces.prefix_curve.CAPACITIES", (1, 2, 3, 10))
    # A, B, A, C, A: with one block nothing is hit; with two A is there each time, since B and C are older than it.
    use = info_of(tmp_path, hashed([1], [2], [1], [3], [1]), options={"block_size": 4}, block_size=4).prefix
    assert use is not None
    assert [(blocks, rate) for blocks, _, rate in use.curve] == [(1, 0.0), (2, 0.4), (3, 0.4)]


def test_carried_and_shared_tokens_are_counted_by_their_tokens(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "arrival_s": 0, "input_length": 32, "segments": [{"id": "s", "len": 20}], "output_length": 17},
        {"id": "b", "arrival_s": 1, "input_length": 32, "segments": [{"id": "s", "len": 20}], "output_length": 1},
        {"id": "c", "arrival_s": 2, "input_length": 60, "carry": {"from": "a", "tokens": 49}, "output_length": 1},
    ]
    use = info_of(tmp_path, rows).prefix
    # b shares 20 tokens: one block of 16. c carries 49, of which 48 were computed: three blocks.
    assert use is not None and (use.tokens_hit, use.prompt_tokens) == (16 + 48, 124)


def test_text_takes_no_part_and_is_said(tmp_path: Path) -> None:
    found = info_of(tmp_path, [{"arrival_s": 0, "prompt": "hi", "output_length": 2}, *hashed([1])], block_size=4)
    assert found.num_text == 1 and found.prefix is not None and found.prefix.left_out == 1
    assert any(w.what == "prompts as text" for w in found.warnings)


def test_warnings_name_evidence_and_cure(tmp_path: Path) -> None:
    ticks = info_of(tmp_path, at(*(3 * (i // 10) for i in range(200)))).warnings
    assert ticks[0].evidence.startswith("180 of 199 gaps are zero") and "--spread" in ticks[0].cure
    capped = info_of(
        tmp_path, [{"arrival_s": i, "input_length": min(50 + i, 120), "output_length": 1 + i % 50} for i in range(200)]
    ).warnings
    assert any("cap of the source" in w.what and "130 rows" in w.evidence for w in capped)
    batch = info_of(tmp_path, at(0, 0, 0)).warnings
    assert batch[0].what == "a batch"
    none = info_of(tmp_path, [{"input_length": 4, "output_length": 1}]).warnings
    assert none[0].what == "no arrival times"
