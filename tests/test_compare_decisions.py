"""The decision diff on the article's example, and on runs that differ by one rule, word for word."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.interface import SchedulerConfig
from engines.schedulers import nano_blocks
from reports.decision_diff import diff_decisions
from reports.decision_work import diff_work, step_table, wait_table
from reports.run import Run, open_run
from tests.fake_run import record_golden, record_run, request_of

ARTICLE = [
    (1, request_of(0, "R1", 300, 12)), (1, request_of(1, "R2", 400, 10)), (1, request_of(2, "R3", 255, 20)),
    (1, request_of(3, "R4", 1200, 6)), (5, request_of(4, "R5", 200, 9)),
]  # fmt: skip
LIMITS = SchedulerConfig(num_blocks=11, block_size=256, max_num_seqs=4, max_num_batched_tokens=1024)


@pytest.fixture
def article(tmp_path: Path) -> tuple[Run, Run]:
    nano = record_run(tmp_path / "nano", "nano", LIMITS, ARTICLE)
    vllm = record_run(tmp_path / "vllm", "vllm", replace(LIMITS, num_blocks=12), ARTICLE)
    return open_run(nano), open_run(vllm)


def test_the_first_difference_of_the_article_is_who_may_be_chunked(article: tuple[Run, Run]) -> None:
    diff = diff_decisions(*article, ("nano", "vllm"))
    assert not diff.equal and not diff.comparable
    first = diff.chain[0]
    assert (first.round_a, first.round_b, first.level) == (1, 1, "batch")
    assert first.text == (
        "round 1: vllm admitted R4 as a chunk of 69 of 1,200 tokens: what was left of the budget; "
        "nano held R4: not first in its round, 69 tokens of budget left < 1,200; free 11 = 11 blocks"
    )
    assert first.situation == "waiting R1 R2 R3 R4; running –"
    assert [each.label for each in first.differences] == ["R4"]


def test_what_followed_is_told_once_each(article: tuple[Run, Run]) -> None:
    chain = diff_decisions(*article, ("nano", "vllm")).chain
    texts = {divergence.round_a: divergence.text for divergence in chain}
    assert "nano admitted R5 whole, 200 tokens; vllm left R5 waiting: no seat is left" in texts[5]
    assert "nano preempted R5, the newest running, for R3: 1 block needed, none was free" in texts[6]
    stalls = next(d for d in chain if d.round_a == 2).differences
    told = {each.label: (each.a.text, each.b.text) for each in stalls}
    assert told["R1"] == ("let R1 stand still: a round that prefills decodes nobody", "decoded R1")


def test_the_article_s_divergences_summed_by_reason(article: tuple[Run, Run]) -> None:
    work = diff_work(*article)
    rows = {(row.what, row.reason): (row.a, row.b) for row in work.rows}
    # R1 R2 R3 stand still in rounds 2, 3, 5 and 10, R4 in round 5: 4 x 3 + 1. R5 waits 3 rounds for a block under nano,
    # 4 for a seat under vllm; R4 waits a round for the budget under nano only.
    assert rows == {
        ("running, not computed", "prefill_first"): (13, 0),
        ("waiting", "blocks"): (3, 0),
        ("waiting", "not_first"): (1, 0),
        ("waiting", "max_num_seqs"): (0, 4),
        ("steps cut short", "token_budget"): (1, 2),
        ("preempted", "newest"): (1, 0),
    }


def test_request_rounds_add_up_to_the_stalled_time(article: tuple[Run, Run]) -> None:
    """Two ways to one number: the recorder's `stalled_s` and the request-rounds of the diff, ticks of one second."""
    for run in article:
        waits = wait_table(run, step_table(run))
        standing = waits.filter(waits["what"] == "running, not computed")["seconds"].sum()
        assert standing == pytest.approx(run.read("requests")["stalled_s"].sum())


@pytest.mark.parametrize(
    ("policy", "case"),
    [("nano", "stress_b16_tight"), ("vllm", "stress_fcfs_a"), ("vllm", "stress_prio_a"), ("vllm", "lora_stress_a")],
)
def test_every_waiting_round_has_one_reason(tmp_path: Path, policy: str, case: str) -> None:
    run = open_run(record_golden(tmp_path / "run", policy, case))
    steps = step_table(run)
    assert steps["ready"].null_count() == 0 and (steps["wait"] >= 0).all()
    waits = wait_table(run, steps)
    assert (waits["rounds"] > 0).all() and not (waits["reason"] == "not said").any()
    assert waits["rounds"].sum() == steps["wait"].sum()


def test_a_skip_is_its_own_reason(tmp_path: Path) -> None:
    """R2's adapter has no place while R1 runs; the waiting loop goes on and ends because nobody is left."""
    config = SchedulerConfig(num_blocks=20, block_size=4, max_num_seqs=4, max_num_batched_tokens=64, max_loras=1)
    arrivals = [(1, request_of(0, "R1", 4, 4, adapter="x")), (1, request_of(1, "R2", 4, 2, adapter="y"))]
    run = open_run(record_run(tmp_path / "run", "vllm", config, arrivals))
    waits = wait_table(run, step_table(run))
    # R1 gives its four tokens in rounds 1 to 4.
    assert waits.select("request", "what", "reason", "rounds").rows() == [(1, "waiting", "max_loras", 4)]


def test_a_run_equals_itself(tmp_path: Path) -> None:
    runs = [open_run(record_golden(tmp_path / name, "vllm", "stress_fcfs_a")) for name in "ab"]
    diff = diff_decisions(*runs, ("A", "B"))
    assert diff.equal and diff.comparable and diff.chain == () and diff.differing_rounds == 0
    work = diff_work(*runs)
    assert work.matched == runs[0].read("batches").height
    assert (work.unmatched_a, work.longer_a, work.longer_b, work.other_size, work.hit_tokens) == (0, 0, 0, 0, 0)
    assert all(row.a == row.b and row.steps == 0 for row in work.rows)


def two_turns(tmp_path: Path, name: str) -> Run:
    """R2 begins like R1: its first block of 4 can be hit once R1 has computed it."""
    import numpy as np

    from engines.interface import NewRequest

    ids = np.arange(16, dtype=np.int64)
    arrivals = [(1, NewRequest(0, "R1", 6, 2, lambda: ids[:8])), (4, NewRequest(1, "R2", 7, 2, lambda: ids[:9]))]
    config = SchedulerConfig(num_blocks=8, block_size=4, max_num_seqs=4, max_num_batched_tokens=16)
    return open_run(record_run(tmp_path / name, "nano", config, arrivals))


def test_a_skipped_hash_shows_first_in_the_blocks_and_then_in_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = two_turns(tmp_path, "before")
    monkeypatch.setattr(nano_blocks.NanoBlockManager, "hash_blocks", lambda self, seq, computed: None)
    after = two_turns(tmp_path, "after")
    diff = diff_decisions(before, after, ("before", "after"))
    assert diff.comparable and [divergence.level for divergence in diff.chain[:2]] == ["blocks", "batch"]
    # The hash is written in the update of round 1; R1 ends in round 2.
    assert (
        diff.chain[0].text
        == "round 1: before: block 0 cache, R1 as its block 0; after: nothing more; free 8 = 8 blocks"
    )
    assert diff.chain[1].text == (
        "round 4: before admitted R2 whole, 3 tokens after a prefix hit of 4 tokens; after admitted R2 whole, 7 tokens; "
        "free 8 = 8 blocks"
    )
    assert diff.levels["batch"] == 2  # the third recorded round
    work = diff_work(before, after)
    assert (work.hits_less, work.hit_tokens) == (1, -4)


def test_other_arrivals_are_the_first_difference(tmp_path: Path) -> None:
    config = SchedulerConfig(num_blocks=8, block_size=4, max_num_seqs=4, max_num_batched_tokens=16)
    requests = request_of(0, "R1", 6, 4), request_of(1, "R2", 4, 2)
    a = open_run(record_run(tmp_path / "a", "vllm", config, [(1, requests[0]), (2, requests[1])]))
    b = open_run(record_run(tmp_path / "b", "vllm", config, [(1, requests[0]), (3, requests[1])]))
    first = diff_decisions(a, b, ("A", "B")).chain[0]
    assert (first.level, first.round_a) == ("arrivals", 2)
    assert first.text.startswith("round 2: A was handed R2; B was handed nobody: the requests came before other rounds")


def test_a_shorter_run_is_said_to_have_ended(tmp_path: Path) -> None:
    config = SchedulerConfig(num_blocks=8, block_size=4, max_num_seqs=4, max_num_batched_tokens=16)
    long = open_run(record_run(tmp_path / "a", "vllm", config, [(1, request_of(0, "R1", 6, 4))]))
    short = open_run(record_run(tmp_path / "b", "vllm", config, [(1, request_of(0, "R1", 6, 4))], stop_after=2))
    diff = diff_decisions(long, short, ("A", "B"))
    assert [d.text for d in diff.chain] == ["round 3: B had ended; A went on with decode × 1"]
    assert diff.differing_rounds == 2


def test_an_early_difference_of_a_long_run_is_found_through_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import reports.decision_diff as module

    runs: list[Any] = [open_run(record_golden(tmp_path / "a", "nano", "stress_b16_light"))]
    runs.append(open_run(record_golden(tmp_path / "b", "vllm", "stress_fcfs_a")))
    whole = diff_decisions(*runs, ("A", "B")).levels
    monkeypatch.setattr(module, "FIRST_WINDOW", 3)
    assert diff_decisions(*runs, ("A", "B")).levels == whole
