"""Why, round by round: the reasons of the worked example, written by hand, under both policies."""

from __future__ import annotations

from typing import Any

from tests.golden_cases import build, load_case, rounds_of

# round -> (decisions, stop of the waiting loop, stop of the running loop);
# a decision: (kind, request, other, reason, needed, available, unit)
NANO = {
    1: (
        [
            ("admit", "R1", None, "fits", 2, 11, "blocks"),
            ("admit", "R2", None, "fits", 2, 9, "blocks"),
            ("admit", "R3", None, "fits", 1, 7, "blocks"),
            ("hold", "R4", None, "not_first", 1200, 69, "tokens"),
        ],
        "not_first",
        None,
    ),
    2: (
        [("admit", "R4", None, "fits", 5, 6, "blocks"), ("chunk", "R4", None, "token_budget", 1200, 1024, "tokens")],
        "token_budget",
        None,
    ),
    3: ([], "waiting_empty", None),
    4: ([], "waiting_empty", "running_empty"),
    5: ([("admit", "R5", None, "fits", 1, 1, "blocks")], "waiting_empty", None),
    6: ([("preempt", "R5", "R3", "newest", 1, 0, "blocks")], "waiting_empty", "running_empty"),
    7: ([("hold", "R5", None, "blocks", 1, 0, "blocks")], "blocks", "running_empty"),
    8: ([("hold", "R5", None, "blocks", 1, 0, "blocks")], "blocks", "running_empty"),
    9: (
        [("hold", "R5", None, "blocks", 1, 0, "blocks"), ("finish", "R4", None, "max_tokens", None, None, None)],
        "blocks",
        "running_empty",
    ),
    # Its 200 tokens and the one it had generated; block 9 held R4's tail, which was never full, so nothing is evicted.
    10: ([("resume", "R5", None, "fits", 1, 5, "blocks")], "waiting_empty", None),
}

VLLM = {
    1: (
        [
            ("admit", "R1", None, "fits", 2, 11, "blocks"),
            ("admit", "R2", None, "fits", 2, 9, "blocks"),
            ("admit", "R3", None, "fits", 1, 7, "blocks"),
            ("admit", "R4", None, "fits", 1, 6, "blocks"),
            ("chunk", "R4", None, "token_budget", 1200, 69, "tokens"),
        ],
        "token_budget",
        "running_empty",
    ),
    2: ([("chunk", "R4", None, "token_budget", 1131, 1021, "tokens")], "waiting_empty", "token_budget"),
    3: ([], "waiting_empty", "running_empty"),
    4: ([], "waiting_empty", "running_empty"),
    5: ([], "max_num_seqs", "running_empty"),
    6: ([], "max_num_seqs", "running_empty"),
    7: ([], "max_num_seqs", "running_empty"),
    8: ([("finish", "R1", None, "max_tokens", None, None, None)], "max_num_seqs", "running_empty"),
    9: ([("admit", "R5", None, "fits", 1, 2, "blocks")], "waiting_empty", "running_empty"),
}


def reasons(policy: str, name: str, last: int) -> dict[int, Any]:
    case = load_case(policy, name)
    ids = [entry["id"] for entry in case["requests"]]
    out = {}
    for logged, round, _ in rounds_of(case, build(case)):
        decisions = [
            (kind, ids[request], None if other is None else ids[other], *rest)
            for _, kind, request, other, *rest in round.decisions
        ]
        out[logged["round"]] = (decisions, round.stop_waiting, round.stop_running)
        if logged["round"] == last:
            return out
    raise AssertionError(f"{name} ended before round {last}")


def test_nano_says_why_in_each_round_of_the_worked_example() -> None:
    assert reasons("nano", "article_rounds", 10) == NANO


def test_vllm_says_why_in_each_round_of_the_worked_example() -> None:
    got = reasons("vllm", "worked_example", 9)
    for number, expected in VLLM.items():
        assert got[number] == expected, number
