"""The round table, word for word, and the block map of the worked example."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.interface import SchedulerConfig
from reports.blocks import block_tables_at, free_at, ghost_hits, pool_at, replay, turning_points
from reports.rounds import round_texts
from reports.run import open_run
from tests.fake_run import record_golden, record_run, request_of
from tests.golden_cases import load_case
from traces.errors import BenchctlError

ARTICLE = [
    (1, "R1 R2 R3 R4", "–", "prefill R1 R2 R3 = 955", "69 tokens of budget left < R4's 1,200, and only a round's first may be chunked", "11 → 6"),
    (2, "R4", "R1 R2 R3", "prefill R4[0:1024]", "budget used up; R4 stays at the head; all 5 of its blocks are reserved at once", "6 → 1"),
    (3, "R4", "R1 R2 R3", "prefill R4[1024:1200]", "waiting empty", "1"),
    (4, "–", "R1 R2 R3 R4", "decode × 4", "nothing left to run; 4 sequences", "1"),
    (5, "R5", "R1 R2 R3 R4", "prefill R5 = 200", "the newcomer stops every decode for a round", "1 → 0"),
    (6, "–", "R1 … R5", "decode R1 R2 R3 R4", "R3 crosses a block edge with none free → R5, the newest, is preempted for it", "0 → 1 → 0"),
    (7, "R5", "R1 R2 R3 R4", "decode × 4", "R5 does not fit (needs 1 block, 0 free), and that does not stop the decodes", "0"),
]  # fmt: skip


def test_the_article_s_seven_rounds_read_as_in_the_article(tmp_path: Path) -> None:
    run = open_run(record_golden(tmp_path / "nano", "nano", "article_rounds"))
    texts = [(t.round, t.waiting, t.running, t.batch, t.why, t.free) for t in round_texts(run, 7)]
    assert texts == ARTICLE


def test_the_same_requests_under_vllm(tmp_path: Path) -> None:
    run = open_run(record_golden(tmp_path / "vllm", "vllm", "worked_example"))
    texts = {t.round: (t.waiting, t.running, t.batch, t.why, t.free) for t in round_texts(run, 10)}
    assert texts[1] == (
        "R1 R2 R3 R4",
        "–",
        "prefill R1 R2 R3 R4[0:69] = 1,024",
        "budget used up; R4 gets 69 of its 1,200 tokens",
        "11 → 5",
    )
    assert texts[2] == (
        "–",
        "R1 R2 R3 R4",
        "decode R1 R2 R3 + prefill R4[69:1090]",
        "budget used up; R4 gets 1,021 of its 1,131 tokens",
        "5 → 1",
    )
    assert texts[5] == ("R5", "R1 R2 R3 R4", "decode × 4", "no seat left: max_num_seqs 4", "0")
    assert texts[9] == ("R5", "R2 R3 R4", "decode × 3 + prefill R5 = 200", "waiting empty", "2 → 1")


@pytest.mark.parametrize(
    ("policy", "case", "round", "why"),
    [
        ("nano", "seqs_limit_prefill", 4, "max_num_seqs 3 reached, R4 … R9 not decoded"),
        ("nano", "preempt_self", 5, "R2 crosses a block edge with none free → it preempts itself"),
        (
            "vllm",
            "preempt_self",
            3,
            "R2 crosses a block edge with none free → it preempts itself; no admissions after a preemption: R3 waits",
        ),
        (
            "vllm",
            "priority_ghost_hit",
            5,
            "R2 crosses a block edge with none free → R1, the last by priority, is preempted for it",
        ),
        ("vllm", "lora_skip_order", 1, "R3 R4 R5 passed over, every adapter place is taken (2 of 2); waiting empty"),
        ("vllm", "chunk_off", 1, "100 tokens of budget left < R2's 150, and chunked prefill is off"),
        (
            "vllm",
            "reserve_isl_on",
            4,
            "the whole of R2 does not fit (needs 13 blocks, 9 free): scheduler_reserve_full_isl",
        ),
        ("vllm", "watermark_first", 10, "the watermark holds R4 back (needs 17 blocks with it, 15 free)"),
        (
            "vllm",
            "threshold_basic",
            4,
            "R1 gets 64 of its 108 tokens: long_prefill_token_threshold; nothing left to run; 4 sequences",
        ),
    ],
)
def test_each_reason_is_said_with_its_numbers(tmp_path: Path, policy: str, case: str, round: int, why: str) -> None:
    run = open_run(record_golden(tmp_path / policy, policy, case))
    assert {t.round: t.why for t in round_texts(run, round)}[round] == why


@pytest.mark.parametrize(
    ("policy", "case"), [("nano", "stress_b16_very_tight"), ("vllm", "stress_prio_a"), ("vllm", "lora_stress_a")]
)
def test_no_round_is_left_without_a_reason(tmp_path: Path, policy: str, case: str) -> None:
    run = open_run(record_golden(tmp_path / policy, policy, case))
    texts = list(round_texts(run))
    assert len(texts) == run.read("rounds").height
    for text in texts:
        assert text.why and text.batch, text


def test_counts_stand_in_for_names_where_batches_were_not_recorded(tmp_path: Path) -> None:
    path = record_golden(tmp_path / "nano", "nano", "article_rounds", manifest={"records": "summary"})
    first = next(iter(round_texts(open_run(path))))
    assert (first.batch, first.free) == ("prefill 955 tokens", "11 → 6")
    assert first.why == "the head wants more tokens than the budget has left, and only a round's first may be chunked"


def test_the_block_map_is_the_article_s(tmp_path: Path) -> None:
    run = open_run(record_golden(tmp_path / "nano", "nano", "article_rounds"))
    R1, R2, R3, R4, R5 = range(5)
    assert block_tables_at(run, 1) == {R1: [0, 1], R2: [2, 3], R3: [4]}
    assert block_tables_at(run, 2) == {R1: [0, 1], R2: [2, 3], R3: [4], R4: [5, 6, 7, 8, 9]}
    assert block_tables_at(run, 5)[R5] == [10]
    assert block_tables_at(run, 6) == {R1: [0, 1], R2: [2, 3], R3: [4, 10], R4: [5, 6, 7, 8, 9]}
    assert [sorted(pool_at(run, n).cached) for n in (1, 2, 4)] == [[0, 2], [0, 2, 5, 6, 7, 8], [0, 2, 4, 5, 6, 7, 8]]
    assert [free_at(run, n) for n in range(1, 8)] == [6, 1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("policy", "case"),
    [
        ("nano", "preempt_under_sharing"),
        ("nano", "multi_turn_256"),
        ("vllm", "worked_example"),
        ("vllm", "priority_ghost_hit"),
    ],
)
def test_block_tables_rebuilt_from_events_equal_the_log_s(tmp_path: Path, policy: str, case: str) -> None:
    golden = load_case(policy, case)
    run = open_run(record_golden(tmp_path / policy, policy, case))
    logged = {entry["round"]: entry for entry in golden["rounds"]}
    ids = {entry["id"]: row for row, entry in enumerate(golden["requests"])}
    compared = 0
    for round, pool in replay(run):
        finished = set(logged[round]["finished"])
        # vllm's log gives the tables after schedule(), so those that finished are gone by the round's end.
        expected = {
            ids[name]: table for name, table in logged[round]["block_tables"].items() if table and name not in finished
        }
        assert {request: pool.block_table(request) for request in pool.tables} == expected, round
        compared += len(expected)
    assert compared > 10


def test_a_hit_on_kv_that_was_never_computed_is_found(tmp_path: Path) -> None:
    run = open_run(record_golden(tmp_path / "vllm", "vllm", "priority_ghost_hit"))
    # R1 had computed 160 tokens when it lost its blocks, yet resumes at 176: one block of 16 is a ghost.
    assert ghost_hits(run).select("round", "request", "cached_round", "cached_by").rows() == [(8, 0, 5, 0)]
    clean = open_run(record_golden(tmp_path / "nano", "nano", "preempt_under_sharing"))
    assert ghost_hits(clean).height == 0


def test_turning_points_keep_the_way_there_and_back() -> None:
    assert turning_points([11, 10, 9, 6]) == [11, 6]
    assert turning_points([0, 1, 0]) == [0, 1, 0]
    assert turning_points([3, 3, 2, 1, 1, 4]) == [3, 1, 4]
    assert turning_points([5]) == [5]


def test_asking_for_a_round_or_a_table_that_is_not_there_says_so(tmp_path: Path) -> None:
    run = open_run(record_golden(tmp_path / "nano", "nano", "article_rounds"))
    with pytest.raises(BenchctlError, match="has no round 999"):
        pool_at(run, 999)
    summary = open_run(record_golden(tmp_path / "summary", "nano", "article_rounds", manifest={"records": "summary"}))
    with pytest.raises(BenchctlError, match="has no block events"):
        pool_at(summary, 1)


def test_thousands_are_separated(tmp_path: Path) -> None:
    path = record_run(
        tmp_path / "large", "nano", SchedulerConfig(num_blocks=2000, block_size=4, max_num_batched_tokens=6000),
        [(1, request_of(0, "R1", 1200, 2)), (1, request_of(1, "R2", 4400, 2)), (1, request_of(2, "R3", 1100, 2))],
    )  # fmt: skip
    first = next(iter(round_texts(open_run(path))))
    assert (first.batch, first.free) == ("prefill R1 R2 = 5,600", "2,000 → 600")
    assert first.why == "400 tokens of budget left < R3's 1,100, and only a round's first may be chunked"
