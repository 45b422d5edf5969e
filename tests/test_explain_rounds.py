"""`explain --round`: the article's rounds with their arithmetic, and the state of any round against a replay of the tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engines.interface import SchedulerConfig
from reports.blocks import replay
from reports.explain import as_json, document, explain_round
from reports.explain_state import computed_before, known_before, owners_after, queues_before
from reports.queues import walk
from reports.run import Run, open_run
from tests.command_line import call
from tests.fake_run import record_golden, record_run, request_of
from tests.test_compare_decisions import ARTICLE, LIMITS


@pytest.fixture
def nano(tmp_path: Path) -> Run:
    return open_run(record_run(tmp_path / "nano", "nano", LIMITS, ARTICLE))


@pytest.fixture
def vllm(tmp_path: Path) -> Run:
    return open_run(record_run(tmp_path / "vllm", "vllm", replace(LIMITS, num_blocks=12), ARTICLE))


def told(run: Run, number: int) -> list[tuple[str, str, str]]:
    return [(c.loop, c.label, c.text) for c in explain_round(run, number).candidates]


def test_round_1_of_the_article_with_its_arithmetic(nano: Run) -> None:
    assert told(nano, 1) == [
        ("waiting", "R1", "wants 300 tokens, 1,024 left in the budget; ⌈300 / 256⌉ = 2 blocks; 11 free → admitted R1 whole, 300 tokens"),
        ("waiting", "R2", "wants 400 tokens, 724 left in the budget; ⌈400 / 256⌉ = 2 blocks; 9 free → admitted R2 whole, 400 tokens"),
        ("waiting", "R3", "wants 255 tokens, 324 left in the budget; ⌈255 / 256⌉ = 1 block; 7 free → admitted R3 whole, 255 tokens"),
        ("waiting", "R4", "wants 1,200 tokens, 69 left in the budget → held R4: not first in its round, 69 tokens of budget left < 1,200"),
    ]  # fmt: skip
    explanation = explain_round(nano, 1)
    assert explanation.free == (11, 6, 6) and explanation.budget_left == 69
    assert explanation.stop_waiting == "not_first" and explanation.stop_running is None


def test_round_2_reserves_the_whole_prompt_and_feeds_a_chunk(nano: Run) -> None:
    assert told(nano, 2) == [
        ("waiting", "R4", "wants 1,200 tokens, 1,024 left in the budget; ⌈1,200 / 256⌉ = 5 blocks; 6 free → admitted R4 as a chunk of 1,024 of 1,200 tokens: what was left of the budget")
    ]  # fmt: skip
    assert "no token yet from R4: the prompt is not whole" in explain_round(nano, 2).changes


def test_round_6_preempts_the_newest_for_a_block_edge(nano: Run) -> None:
    assert told(nano, 6) == [
        ("running", "R1", "token 302 lies in its block 2 → decoded R1"),
        ("running", "R2", "token 402 lies in its block 2 → decoded R2"),
        ("running", "R5", "preempted R5, the newest running, for R3: 1 block needed, none was free"),
        ("running", "R3", "token 257 opens its block 2; 1 free → decoded R3"),
        ("running", "R4", "token 1,202 lies in its block 5 → decoded R4"),
    ]
    explanation = explain_round(nano, 6)
    before, after = ("\n".join(picture.lines) for picture in (explanation.before, explanation.after))
    assert "10 R5.0" in before and "10 R3.1" in after
    assert [(w.label, w.computed, w.known) for w in explanation.running][-1] == ("R5", 200, 201)


def test_vllm_feeds_the_running_first_and_the_decodes_pay(vllm: Run) -> None:
    texts = told(vllm, 2)
    assert [(loop, name) for loop, name, _ in texts] == [("running", f"R{i}") for i in (1, 2, 3, 4)]
    assert texts[3][2].startswith(
        "wants 1,131 tokens, 1,021 left in the budget; it holds 5 blocks with this step; 5 free"
    )
    document_text = str(document(explain_round(vllm, 5)))
    assert "no seat is left: max_num_seqs (max_num_seqs)" in document_text and "not looked at: R5" in document_text


def test_a_hit_is_part_of_the_arithmetic(tmp_path: Path) -> None:
    run = open_run(record_golden(tmp_path / "run", "nano", "article_r7_hit"))
    rows = run.read("batches")
    hit = rows.filter(rows["cached_tokens"] > 0).row(0, named=True)
    candidate = next(c for c in explain_round(run, hit["round"]).candidates if c.request == hit["request"])
    # The article's R7: 600 tokens, the first 256 equal to R1's. One block is shared, two are new, 344 tokens are left.
    assert (
        "wants 344 tokens" in candidate.text
        and "⌈600 / 256⌉ = 3 blocks, 1 of them hit, 2 to come from the free list" in candidate.text
    )
    assert "after a prefix hit of 256 tokens" in candidate.text


@pytest.mark.parametrize(
    ("policy", "case"),
    [("nano", "article_rounds"), ("nano", "stress_b16_tight"), ("vllm", "stress_fcfs_a"), ("vllm", "stress_prio_a"), ("vllm", "lora_stress_a")],
)  # fmt: skip
def test_the_state_before_a_round_is_what_a_replay_of_the_tables_gives(tmp_path: Path, policy: str, case: str) -> None:
    run = open_run(record_golden(tmp_path / "run", policy, case))
    for table in ("admissions", "rounds", "batches", "decisions", "blocks"):
        run.read(table)
    pools = {number: {b: dict(o) for b, o in pool.owners.items()} for number, pool in replay(run)}
    computed: dict[int, int] = {}
    emitted: dict[int, int] = {}
    prompts = dict(run.read("admissions").select("request", "prompt_tokens").iter_rows())
    for view in walk(run):
        everyone = [*view.waiting, *view.running]
        if view.round % 7 == 1 or view.round < 12:
            assert queues_before(run, view.round) == (view.waiting, view.running), view.round
            assert owners_after(run, view.round).owners == pools[view.round], view.round
            assert computed_before(run, view.round, everyone) == {r: computed.get(r, 0) for r in everyone}
            assert known_before(run, view.round, everyone) == {r: prompts[r] + emitted.get(r, 0) for r in everyone}
        for row in view.decisions:
            if row["kind"] == "preempt":
                computed.pop(row["request"], None)
        for row in view.batch:
            computed[row["request"]] = row["start"] + row["num_tokens"]
            emitted[row["request"]] = emitted.get(row["request"], 0) + row["yields_token"]


@pytest.mark.parametrize(
    ("policy", "case"),
    [("nano", "stress_b16_tight"), ("nano", "preempt_self"), ("vllm", "stress_fcfs_a"), ("vllm", "stress_prio_a"), ("vllm", "lora_stress_a")],
)  # fmt: skip
def test_whoever_was_fed_held_or_preempted_is_told_once_and_the_blocks_add_up(
    tmp_path: Path, policy: str, case: str
) -> None:
    run = open_run(record_golden(tmp_path / "run", policy, case))
    for table in ("admissions", "rounds", "batches", "decisions", "blocks"):
        run.read(table)
    for view in list(walk(run))[:60]:
        explanation = explain_round(run, view.round)
        named = [candidate.request for candidate in explanation.candidates]
        assert len(named) == len(set(named))
        touched = {row["request"] for row in view.batch} | {
            row["request"] for row in view.decisions if row["kind"] in ("hold", "skip", "preempt")
        }
        assert set(named) == touched or explanation.untold, view.round
        for row in view.decisions:
            if row["kind"] in ("admit", "resume") or (
                row["kind"] == "hold" and row["unit"] == "blocks" and row["reason"] != "watermark"
            ):
                candidate = next(c for c in explanation.candidates if c.request == row["request"])
                assert candidate.free == row["available"], (view.round, candidate)


def test_large_pools_are_summed(tmp_path: Path) -> None:
    config = SchedulerConfig(num_blocks=101, block_size=4, max_num_seqs=4, max_num_batched_tokens=64)
    run = open_run(
        record_run(tmp_path / "run", "vllm", config, [(1, request_of(0, "R1", 40, 3)), (1, request_of(1, "R2", 9, 3))])
    )
    picture = explain_round(run, 1).after
    assert not picture.drawn
    assert picture.lines == ("13 of 100 used by 2 requests, 0 shared, 87 free", "R1 10  R2 3")


def test_the_json_is_documented(nano: Run) -> None:
    text = Path(__file__).parent.parent.joinpath("docs/compare.md").read_text()
    found = as_json(explain_round(nano, 1))
    assert json.loads(json.dumps(found))["round"] == 1
    for key in (*found, *found["candidates"][0], *found["waiting"][0], *found["after"]):
        assert f"`{key}`" in text, key


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], "nothing to explain is named"),
        (["--round", "1", "--spike", "itl"], "--round and --spike ask for different things"),
        (["--round", "999"], "the run has no round 999: its rounds go from 1 to 24"),
        (["--request", "R9"], "the run has no request 'R9'"),
        (["--spike", "tpot"], "--spike is 'tpot'"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    nano: Run, capfd: pytest.CaptureFixture[str], argv: list[str], text: str
) -> None:
    answer = call(capfd, "explain", nano.path, *argv)
    assert answer.code == 2 and text in answer.err and "try: " in answer.err


def test_a_run_without_a_log_says_how_to_get_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = record_run(tmp_path / "run", "nano", LIMITS, ARTICLE, manifest={"records": "summary"})
    answer = call(capfd, "explain", path, "--round", 1)
    assert answer.code == 2 and "the run kept no decisions (--records summary)" in answer.err
    assert "replay with --records full or compact" in answer.err


def test_explain_needs_no_torch(nano: Run) -> None:
    import subprocess
    import sys

    code = (
        "import sys, atexit\n"
        "atexit.register(lambda: print('LOADED', sorted({'torch', 'plotly', 'jinja2', 'engines'} & set(sys.modules))))\n"
        f"sys.argv = ['benchctl', 'explain', {str(nano.path)!r}, '--round', '6']\n"
        "from benchctl.cli import main\nmain()\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "LOADED []" in out.stdout, out.stdout[-200:] + out.stderr
