"""`explain --request` and `--spike` on the article's example: each number follows from seven rounds that one can count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reports.explain_life import (
    as_json,
    explain_request,
    explain_spike,
    find_request,
    spike_json,
)
from reports.run import Run, open_run
from tests.command_line import call
from tests.fake_run import record_golden, record_run
from tests.test_compare_decisions import ARTICLE, LIMITS


@pytest.fixture
def nano(tmp_path: Path) -> Run:
    return open_run(record_run(tmp_path / "nano", "nano", LIMITS, ARTICLE))


def events(run: Run, name: str) -> list[tuple[int | None, int | None, str, str]]:
    life = explain_request(run, find_request(run, name))
    return [(e.round, e.last_round, e.what, e.text) for e in life.events]


def test_the_life_of_r5_that_was_admitted_and_lost_its_block(nano: Run) -> None:
    assert events(nano, "R5") == [
        (5, None, "arrive", "arrived with 200 tokens of prompt, 9 of output asked for; first seen in round 5"),
        (5, None, "admit", "admitted R5 whole, 200 tokens"),
        (6, None, "preempt", "preempted R5, the newest running, for R3: 1 block needed, none was free; everything computed was given up"),
        (7, 9, "wait", "waited for 3 rounds: blocks × 3 (the head of the queue needs more blocks than are free); at first held: needs 1 block, 0 free"),
        (10, None, "resume", "resumed R5 whole, 201 tokens"),
        (11, 17, "decode", "decoded 7 tokens, one a round"),
        (17, None, "finish", "finished: all output tokens asked for were emitted"),
    ]  # fmt: skip


def test_the_life_of_r1_that_stood_still_for_others(nano: Run) -> None:
    told = events(nano, "R1")
    assert (2, 3, "stand", "stood still for 2 rounds: prefill_first × 2 (a round that prefills decodes nobody)") in told
    assert [(e[0], e[1]) for e in told if e[2] == "decode"] == [(4, None), (6, 9), (11, 16)]


def test_chunks_and_cached_tokens_are_told(nano: Run, tmp_path: Path) -> None:
    assert [e[3] for e in events(nano, "R4")][2:4] == [
        "admitted R4 as a chunk of 1,024 of 1,200 tokens: what was left of the budget",
        "fed R4 [1024:1200]",
    ]
    hit = open_run(record_golden(tmp_path / "hit", "nano", "article_r7_hit"))
    assert any("after a prefix hit of 256 tokens" in e[3] for e in events(hit, "R7"))


def test_the_worst_gap_is_r5_s_and_its_rounds_are_all_of_it(nano: Run) -> None:
    spike = explain_spike(nano, "itl")
    # R5's tokens come at the ends of rounds 5 and 10.
    assert (spike.label, spike.token, spike.seconds) == ("R5", 1, 5.0)
    assert [r.round for r in spike.rounds] == [6, 7, 8, 9, 10]
    assert sum(r.duration_s for r in spike.rounds) + spike.idle_s == pytest.approx(spike.seconds)
    assert spike.reasons == (("waiting", "blocks", 3, 3.0),)
    assert spike.longest is not None and spike.longest.round == 6


def test_the_worst_first_token_is_r4_s(nano: Run) -> None:
    spike = explain_spike(nano, "ttft")
    assert (spike.label, spike.seconds, [r.round for r in spike.rounds]) == ("R4", 3.0, [1, 2, 3])
    assert spike.reasons == (("waiting", "not_first", 1, 1.0),)


@pytest.mark.parametrize(("policy", "case"), [("nano", "stress_b16_tight"), ("vllm", "stress_prio_a")])
def test_every_life_accounts_for_every_token(tmp_path: Path, policy: str, case: str) -> None:
    run = open_run(record_golden(tmp_path / "run", policy, case))
    rows = run.read("batches")
    for request in run.read("requests").filter(run.read("requests")["status"] == "finished")["request"].to_list()[:12]:
        life = explain_request(run, request)
        steps = rows.filter(rows["request"] == request)
        decodes = sum((e.last_round or e.round) - e.round + 1 for e in life.events if e.what == "decode" and e.round)
        # A streak of decodes has no gap, so its rounds are its tokens.
        assert decodes == (steps["phase"] == "decode").sum()
        prefills = sum(e.what in ("admit", "resume", "prefill") for e in life.events)
        assert prefills == (steps["phase"] == "prefill").sum()
        assert sum(e.what == "preempt" for e in life.events) == life.summary["preemptions"]


def test_a_request_is_found_by_its_row_too(nano: Run) -> None:
    assert find_request(nano, "#4") == find_request(nano, "R5") == 4


def test_the_json_is_documented(nano: Run) -> None:
    text = Path(__file__).parent.parent.joinpath("docs/compare.md").read_text()
    life, spike = as_json(explain_request(nano, 4)), spike_json(explain_spike(nano, "itl"))
    for key in (*life, *life["events"][0], *spike, *spike["rounds"][0]):
        assert f"`{key}`" in text, key
    assert json.loads(json.dumps(spike))["longest"]["round"] == 6


def test_the_command_prints_all_three_ways(nano: Run, capfd: pytest.CaptureFixture[str]) -> None:
    plain = call(capfd, "explain", nano.path, "--request", "R5")
    assert plain.code == 0 and "resumed R5 whole, 201 tokens" in plain.out
    assert call(capfd, "explain", nano.path, "--spike", "itl", "--md").out.startswith(
        "## The worst inter-token gap of "
    )
    assert json.loads(call(capfd, "explain", nano.path, "--spike", "ttft", "--json").out)["what"] == "spike"


def test_a_refused_request_has_a_short_life(tmp_path: Path) -> None:
    from engines.interface import SchedulerConfig
    from tests.fake_run import request_of

    config = SchedulerConfig(num_blocks=4, block_size=4, max_num_seqs=4, max_num_batched_tokens=64)
    arrivals = [(1, request_of(0, "R1", 4, 2)), (1, request_of(1, "R2", 40, 2))]
    run = open_run(record_run(tmp_path / "run", "nano", config, arrivals))
    assert events(run, "R2") == [
        (
            1,
            None,
            "reject",
            "refused: prompt and output need more blocks than the engine has (needed 11, available 4 blocks)",
        )
    ]


def test_the_command_takes_spike_without_a_word(nano: Run, capfd: pytest.CaptureFixture[str]) -> None:
    itl = call(capfd, "explain", nano.path, "--spike", "itl")
    assert itl.code == 0 and "5.0 × the" in itl.out
    for argv in (("explain", nano.path, "--spike"), ("explain", "--spike", nano.path), ("explain", "--spike", "--md", nano.path)):  # fmt: skip
        answer = call(capfd, *argv)
        assert answer.code == 0 and ("--md" in argv or answer.out == itl.out)
    assert "--spike is 'foo'" in call(capfd, "explain", nano.path, "--spike", "foo").err
