"""Shrinking: the algorithm on plain oracles, the predicate's language, and the command from a trace to a handful of requests."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchctl.recorder import Timing
from benchctl.shrink import ddmin, shrink
from benchctl.shrink_rows import Rows, families, length_of, repaired
from benchctl.shrink_run import Tally
from benchctl.shrink_where import Observed, parse_where
from engines.interface import NewRequest, SchedulerConfig
from engines.schedulers.nano import NanoScheduler
from tests.command_line import call, write_trace
from traces.errors import BenchctlError


def plain(count: int) -> Rows:
    return [{"id": f"r{i}", "arrival_s": float(i), "input_length": 10 + i, "output_length": 5} for i in range(count)]


@pytest.mark.parametrize("wanted", [{3}, {0, 99}, {7, 8, 41, 77}, set(range(0, 100, 9))])
def test_ddmin_finds_exactly_what_is_needed(wanted: set[int]) -> None:
    found = ddmin([[i] for i in range(100)], lambda units: wanted <= {u[0] for u in units})
    assert {unit[0] for unit in found} == wanted


def test_a_trace_is_cut_to_the_two_requests_and_their_needed_lengths() -> None:
    def holds(rows: Rows) -> bool:
        lengths = {row["id"]: length_of(row, "prompt") for row in rows}
        return lengths.get("r17", 0) >= 9 and lengths.get("r60", 0) >= 21

    found = shrink(plain(200), holds)
    assert found.complete and [row["id"] for row in found.rows] == ["r17", "r60"]
    assert [length_of(row, "prompt") for row in found.rows] == [9, 21]
    assert [row["output_length"] for row in found.rows] == [1, 1]
    assert [row["arrival_s"] for row in found.rows] == [0.0, 0.0]


def test_arrivals_that_matter_stay_apart() -> None:
    found = shrink(plain(50), lambda rows: rows[-1].get("arrival_s", 0) - rows[0].get("arrival_s", 0) >= 3)
    assert len(found.rows) == 2 and found.rows[1]["arrival_s"] - found.rows[0]["arrival_s"] == 3.0


def test_what_is_tried_first_lies_where_it_happens() -> None:
    sizes: list[int] = []

    def holds(rows: Rows) -> bool:
        sizes.append(len(rows))
        return {"r700", "r703"} <= {row["id"] for row in rows}

    found = shrink(plain(2000), holds, near=703)
    assert [row["id"] for row in found.rows] == ["r700", "r703"]
    assert sizes[:3] == [1, 2, 2] and max(sizes) <= 8, "never more than twice what is needed"
    assert found.asked == len(sizes) <= 30


def test_time_that_is_up_leaves_the_smallest_so_far() -> None:
    def slow(rows: Rows) -> bool:
        time.sleep(0.01)
        return {"r3", "r90", "r41"} <= {row["id"] for row in rows} and len(rows) % 2 == 1

    found = shrink(plain(101), slow, limit_s=0.15)
    assert not found.complete and slow(found.rows)


def test_links_to_rows_that_went_are_cut_and_shared_tokens_fit() -> None:
    rows: Rows = [
        {"id": "a", "input_length": 10, "output_length": 5},
        {
            "id": "b",
            "input_length": 40,
            "output_length": 5,
            "parents": ["a", "gone"],
            "carry": {"from": "a", "tokens": 30},
        },
        {
            "id": "c",
            "input_length": 40,
            "output_length": 5,
            "parents": ["gone"],
            "carry": {"from": "gone", "tokens": 30},
        },
        {"id": "d", "input_length": 6, "output_length": 5, "segments": [{"id": 1, "len": 4}, {"id": 2, "len": 9}]},
    ]
    a, b, c, d = repaired(rows)
    assert b["parents"] == ["a"] and b["carry"] == {"from": "a", "tokens": 15}
    assert "parents" not in c and "carry" not in c
    assert d["segments"] == [{"id": 1, "len": 4}, {"id": 2, "len": 2}]
    assert a == rows[0]


def test_sessions_and_prefixes_are_families() -> None:
    rows: Rows = [
        {"id": "a", "session": "s"}, {"id": "b", "segments": [{"id": 1, "len": 4}]}, {"id": "c", "session": "s"},
        {"id": "d", "segments": [{"id": 1, "len": 9}], "parents": ["c"]},
    ]  # fmt: skip
    assert families(rows, prefixes=False) == [[0, 2, 3], [1]]
    assert families(rows, prefixes=True) == [[0, 1, 2, 3]]


def seen(**values: float) -> dict[str, Observed]:
    return {"": Observed(values)}


@pytest.mark.parametrize(
    ("text", "values", "expected"),
    [
        ("preemptions > 5", {"preemptions": 6}, True),
        ("preemptions > 5", {"preemptions": 5}, False),
        ("preemptions > 5", {}, False),
        ("5 < preemptions", {"preemptions": 6}, True),
        ("1 <= preemptions < 3", {"preemptions": 2}, True),
        ("preemptions > 5 and rounds_mixed == 0", {"preemptions": 6, "rounds_mixed": 1}, False),
        ("not preemptions > 5 or finished == 2", {"preemptions": 6, "finished": 2}, True),
        ("recomputed_tokens / scheduled_tokens > 0.1", {"recomputed_tokens": 2, "scheduled_tokens": 10}, True),
        ("ttft_p99 > 200", {}, False),
        ("ttft_p99 > -1", {"ttft_p99": 0.0}, True),
        ('stop_waiting("blocks") >= 2', {"stop_waiting.blocks": 2}, True),
    ],
)
def test_predicates_mean_what_they_say(text: str, values: dict[str, float], expected: bool) -> None:
    assert parse_where(text).holds(seen(**values)) is expected


@pytest.mark.parametrize(
    ("text", "growing"),
    [
        ("preemptions > 5", True), ("preemptions >= 5 and rounds > 3", True), ("5 < preemptions", True), ("preemptions < 5", False),
        ("preemptions == 5", False), ("not preemptions > 5", False), ("ttft_p99 > 5", False), ("hit_rate > 0.1", False),
        ("preemptions > rounds", False), ('stop_waiting("blocks") > 1', True),
    ],
)  # fmt: skip
def test_only_what_stays_true_ends_a_replay_early(text: str, growing: bool) -> None:
    assert parse_where(text).growing is growing


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("preemptions >", "is no expression"),
        ("preemptions", "says nothing that is true or false"),
        ("preemption > 5", "'preemption' is no figure of a run"),
        ("__import__('os').system('x')", "says nothing that is true or false"),
        ("open('x') > 1", "is no figure"),
        ("preemptions in 5", "compared in a way that is not known"),
        ("differs(nano)", "says nothing that is true or false"),
        ("[x for x in y] > 1", "is no figure"),
        ("gate('no-such.json')", "there is no baseline yet"),
    ],
)
def test_what_is_no_predicate_is_named(text: str, what: str) -> None:
    with pytest.raises(BenchctlError, match=".*") as caught:
        parse_where(text)
    assert what in str(caught.value)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Sixty requests; R20 and R21 are long, and fill a pool of 16 blocks of 16 together."""
    long = {19: (100, 60), 20: (100, 60)}
    return write_trace(
        tmp_path / "t.jsonl",
        [
            {
                "id": f"R{i + 1}",
                "arrival_s": 0.2 * i,
                "input_length": long.get(i, (20, 3))[0],
                "output_length": long.get(i, (20, 3))[1],
            }
            for i in range(60)
        ],
        name="many",
    )


LIMITS = ("--kv-cache-tokens", 256, "--block-size", 16, "--round-cost", "0.01,1e-4,0")


def test_a_round_takes_its_own_time_where_rounds_overlap() -> None:
    tally = Tally(
        8, frozenset({"max_round_s"}), ledger=False, batches=False, against=None,
        stop=threading.Event(), max_rounds=math.inf, deadline=math.inf,
    )  # fmt: skip
    scheduler = NanoScheduler(SchedulerConfig(num_blocks=8, block_size=4))
    scheduler.add(NewRequest(0, "R1", 4, 3, lambda: np.arange(7)))
    for number, (start, end) in enumerate([(0.0, 1.0), (0.5, 1.75), (3.0, 3.5)], 1):
        round = scheduler.schedule()
        tally.record(number, round, None, Timing(start, start, end, end, 0.0, 0.0))
        scheduler.update(round, None)
    # The second was launched while the first one ran: 0.75 s are its own, though it lasted 1.25 s.
    assert tally.seen.values["max_round_s"] == 1.0


@pytest.mark.parametrize(
    ("where", "most", "check"),
    [
        ("preemptions > 0", 2, lambda f: f["nano"]["preemptions"] >= 1),
        ("ttft_p99 > 100", 3, lambda f: f["nano"]["ttft_p99"] > 100),
        ("max_waiting >= 3", 4, lambda f: f["nano"]["max_waiting"] >= 3),
    ],
)
def test_the_command_writes_a_trace_that_still_shows_it(
    trace: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], where: str, most: int, check: Callable[[dict], bool]
) -> None:
    small = tmp_path / "small.jsonl"
    answer = call(capfd, "shrink", trace, "--where", where, "-o", small, "--json", "--scheduler", "nano", *LIMITS)
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    assert found["requests_before"] == 60 and found["requests"] <= most and found["complete"], found
    assert check(found["figures"])
    shown = call(capfd, *found["command"].split()[1:], "--out", tmp_path / "o", "--no-report", "--json")
    assert shown.code == 0, shown.err
    if where == "preemptions > 0":
        assert json.loads(shown.out)["benchctl"]["counters"]["preemptions"] >= 1
    again = call(
        capfd,
        "shrink",
        small,
        "--where",
        where,
        "-o",
        tmp_path / "again.jsonl",
        "--json",
        "--scheduler",
        "nano",
        *LIMITS,
    )
    assert json.loads(again.out)["requests"] <= found["requests"]


@pytest.mark.parametrize(
    ("where", "scheduler", "most"),
    [("preemptions > 5", "nano", 230_000), ("ttft_p99 > 3000", "nano", 220_000)],
)
def test_a_long_trace_becomes_a_handful_in_a_bounded_number_of_rounds(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], where: str, scheduler: str, most: int
) -> None:
    long = tmp_path / "long.jsonl"
    assert call(capfd, "trace", "synth", "sharegpt", "-n", 300, "--rate", 2, "-o", long).code == 0
    limits = ("--kv-cache-tokens", 4096, "--scheduler", scheduler)
    answer = call(capfd, "shrink", long, "--where", where, "-o", tmp_path / "s.jsonl", "--json", *limits)
    found = json.loads(answer.out)
    assert answer.code == 0 and found["complete"] and found["requests"] <= 10, answer.err
    assert found["replays"] <= 300 and found["rounds"] <= most, found


def test_two_policies_differ_on_two_requests(trace: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    answer = call(
        capfd, "shrink", trace, "--where", "differs(nano, vllm)", "-o", tmp_path / "s.jsonl", "--json", *LIMITS
    )
    found = json.loads(answer.out)
    assert answer.code == 0 and found["requests"] == 2, answer.err
    assert found["command"].endswith("--scheduler nano --scheduler vllm --engine null")
    again = call(
        capfd,
        "shrink",
        trace,
        "--where",
        "differs(nano, vllm)",
        "-o",
        tmp_path / "s.jsonl",
        "--json",
        "--force",
        *LIMITS,
    )
    assert again.out == answer.out, "nothing in it is measured"


def test_a_failing_gate_is_shrunk_by_its_limits(trace: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert (
        call(
            capfd, "replay", trace, "--scheduler", "nano", "--engine", "null", *LIMITS, "--no-report", "--out", run
        ).code
        == 0
    )
    baseline = tmp_path / "b.json"
    call(capfd, "gate", run, "--baseline", baseline, "--update", "--no-log")
    data = json.loads(baseline.read_text())
    argv = [
        "shrink",
        trace,
        "--where",
        f"gate('{baseline}')",
        "-o",
        tmp_path / "s.jsonl",
        "--json",
        "--scheduler",
        "nano",
        *LIMITS,
    ]
    assert "has no counter with max_increase" in call(capfd, *argv).err
    data["entries"][0]["counters"]["preemptions"] = 0
    data["entries"][0]["tolerances"] = {"preemptions": {"max_increase": 0}}
    baseline.write_text(json.dumps(data))
    answer = call(capfd, *argv)
    assert answer.code == 0 and json.loads(answer.out)["requests"] <= 2, answer.err


def test_an_exception_is_shrunk(
    trace: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from engines.schedulers.nano import NanoScheduler

    schedule = NanoScheduler.schedule

    def crowded(self: NanoScheduler):  # type: ignore[no-untyped-def]
        if len(self.waiting) + len(self.running) > 2:
            raise KeyError("three is a crowd")
        return schedule(self)

    monkeypatch.setattr(NanoScheduler, "schedule", crowded)
    argv = [
        "shrink",
        trace,
        "--where",
        "raises('KeyError')",
        "-o",
        tmp_path / "s.jsonl",
        "--json",
        "--scheduler",
        "nano",
    ]
    answer = call(capfd, *argv, *LIMITS)
    assert answer.code == 0 and json.loads(answer.out)["requests"] == 3, answer.err


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], "nothing to look for is given"),
        (["--where", "preemptions > 1"], "it is not clear of which scheduler --where speaks"),
        (["--where", "preemptions > 999", "--scheduler", "nano"], "it does not happen in the whole trace"),
        (["--where", "preemptions > 1", "--scheduler", "nano", "--engine", "torch"], "which --engine torch is not for"),
        (["--where", "preemptions > 1", "--scheduler", "nano", "--limit-s", "0"], "--limit-s is 0"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    trace: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], argv: list[str], text: str
) -> None:
    answer = call(capfd, "shrink", trace, *argv, "-o", tmp_path / "s.jsonl")
    assert answer.code == 2 and text in answer.err and not (tmp_path / "s.jsonl").exists()


def test_a_file_that_is_there_is_not_replaced(trace: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s.jsonl").write_text("mine")
    argv = ["shrink", trace, "--where", "preemptions > 0", "--scheduler", "nano", *LIMITS, "-o", tmp_path / "s.jsonl"]
    assert call(capfd, *argv).code == 2 and (tmp_path / "s.jsonl").read_text() == "mine"
