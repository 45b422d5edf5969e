"""Each lesson's fact, worked out by hand from the two policies' rules and asserted on what the command line records.

All but lesson 15 run on the clock of rounds. Blocks hold 16 tokens (256 in lesson 3), a round at most 64 (lessons say so
where it is another number).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import traces
from reports import metrics
from reports.run import Run
from tests.command_line import call
from tests.laws import assert_laws
from traces.errors import BenchctlError
from traces.files import bundled_lessons
from traces.load import open_trace

FOLDER = Path(traces.__file__).parent
DOCS = FOLDER.parent / "docs"

Replay = Callable[..., dict[str, Run]]


@pytest.fixture
def replay(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Replay:
    """`replay(5)`: the runs of lesson 5 by policy; further arguments are flags. The laws hold on all of them."""

    def run(number: int, *flags: object, clock: str = "rounds") -> dict[str, Run]:
        (name,) = [name for name in bundled_lessons() if name.startswith(f"lessons/{number:02d}-")]
        out = tmp_path / f"{number}-{'-'.join(map(str, flags))}"
        answer = call(
            capfd, "replay", FOLDER / name, "--engine", "null", "--clock", clock, "--no-report", "--out", out, *flags
        )  # fmt: skip
        assert answer.code == 0, answer.err
        return {path.name: assert_laws(path) for path in sorted(out.iterdir()) if path.is_dir()}

    return run


def batches(run: Run) -> dict[int, str]:
    """Round -> its batch in order: `R1` decodes, `R2[0:64]` computes a part of the known sequence, from and to."""
    out: dict[int, list[str]] = {}
    columns = ("round", "request", "start", "num_tokens", "phase")
    for number, request, start, count, phase in run.read("batches").sort("round", "order").select(columns).iter_rows():
        text = run.ids[request] if phase == "decode" else f"{run.ids[request]}[{start}:{start + count}]"
        out.setdefault(number, []).append(text)
    return {number: " ".join(texts) for number, texts in out.items()}


def kinds(run: Run) -> str:
    """One letter a round: Prefill, Decode, Mixed, Empty."""
    return "".join(kind[0].upper() for kind in run.read("rounds")["kind"])


def column(run: Run, name: str) -> dict[int, Any]:
    """Round -> a column of `rounds`."""
    return dict(run.read("rounds").select("round", name).iter_rows())


def decided(run: Run, *of_kinds: str) -> list[tuple[Any, ...]]:
    """(round, kind, id, id of the other, reason, needed, available) of the decisions of these kinds, in order."""
    rows = run.read("decisions").filter(pl.col("kind").is_in(of_kinds)).sort("round", "order")
    columns = ("round", "kind", "request", "other", "reason", "needed", "available")
    return [
        (number, kind, run.ids[request], run.ids.get(other), *rest)
        for number, kind, request, other, *rest in rows.select(columns).iter_rows()
    ]


def admissions(run: Run) -> list[str]:
    return [entry[2] for entry in decided(run, "admit", "resume")]


def token_rounds(run: Run, id: str) -> list[int]:
    """The rounds that gave this request's tokens."""
    (row,) = [row for row, name in run.ids.items() if name == id]
    return run.read("tokens").filter(pl.col("request") == row).sort("index")["round"].to_list()


def of_request(run: Run, id: str) -> dict[str, Any]:
    return run.read("requests").filter(pl.col("id") == id).row(0, named=True)


# -- 1 to 6: rounds, budget, chunks


def test_01_nano_has_phases_and_vllm_lets_computed_tokens_chase_known_ones(replay: Replay) -> None:
    runs = replay(1)
    assert kinds(runs["nano"]) == "PDPPDD"
    assert batches(runs["nano"]) == {
        1: "R1[0:48]", 2: "R1", 3: "R2[0:64]", 4: "R2[64:96]", 5: "R1 R2", 6: "R1 R2",
    }  # fmt: skip
    assert kinds(runs["vllm"]) == "PDMMDD"
    assert batches(runs["vllm"]) == {
        1: "R1[0:48]", 2: "R1", 3: "R1 R2[0:63]", 4: "R1 R2[63:96]", 5: "R2", 6: "R2",
    }  # fmt: skip
    # The one rule of vllm: everyone gets what is known and not computed, as far as the budget goes.
    emitted: dict[int, int] = {}
    prompts = dict(runs["vllm"].read("requests").select("request", "prompt_tokens").iter_rows())
    for rows in runs["vllm"].read("batches").sort("round", "order").partition_by("round", maintain_order=True):
        budget = 64
        for row in rows.iter_rows(named=True):
            known = prompts[row["request"]] + emitted.get(row["request"], 0)
            assert row["num_tokens"] == min(known - row["start"], budget), row
            budget -= row["num_tokens"]
        for request in rows.filter("yields_token")["request"]:
            emitted[request] = emitted.get(request, 0) + 1
    # In nano one loop keeps the other from running: the stop of the running loop is null wherever there was prefill.
    rounds = runs["nano"].read("rounds")
    assert ((rounds["stop_running"].is_null()) == (rounds["kind"] == "prefill")).all()


def test_02_nano_serves_the_waiting_first_and_vllm_the_running(replay: Replay) -> None:
    runs = replay(2)
    got = batches(runs["nano"])
    assert [got[number] for number in (2, 3, 4)] == ["R2[0:64]", "R3[0:64]", "R4[0:64]"]
    assert token_rounds(runs["nano"], "R1") == [1, 5, 6, 7, 8, 9]
    got = batches(runs["vllm"])
    assert [got[number] for number in (2, 3, 4, 5)] == [
        "R1 R2[0:63]", "R1 R2[63:64] R3[0:62]", "R1 R2 R3[62:64] R4[0:60]", "R1 R3 R4[60:64]",
    ]  # fmt: skip
    assert token_rounds(runs["vllm"], "R1") == [1, 2, 3, 4, 5, 6]
    first = {name: [token_rounds(run, id)[0] for id in ("R2", "R3", "R4")] for name, run in runs.items()}
    assert first == {"nano": [2, 3, 4], "vllm": [3, 4, 5]}


def test_03_a_mixed_batch_of_two_decodes_a_last_chunk_and_a_first_chunk(replay: Replay) -> None:
    runs = replay(3)
    assert batches(runs["vllm"])[3] == "R1 R2 R4[1024:1200] R5[0:846]"
    assert column(runs["vllm"], "decode_tokens")[3] == 2 and column(runs["vllm"], "prefill_tokens")[3] == 176 + 846
    assert column(runs["vllm"], "budget_left")[3] == 0
    assert batches(runs["nano"])[3] == "R4[1024:1200]"
    assert "M" not in kinds(runs["nano"])
    # What the newcomers cost those who run: three whole rounds, or nothing.
    assert token_rounds(runs["nano"], "R1") == token_rounds(runs["nano"], "R2") == [1, 5, 6, 7, 8, 9]
    assert token_rounds(runs["vllm"], "R1") == token_rounds(runs["vllm"], "R2") == [1, 2, 3, 4, 5, 6]
    assert {name: of_request(run, "R1")["stalled_s"] for name, run in runs.items()} == {"nano": 3.0, "vllm": 0.0}


def test_04_only_vllms_decodes_are_paid_from_the_budget(replay: Replay) -> None:
    runs = replay(4)
    assert batches(runs["nano"])[3] == "R9[0:64]"
    eight = "R1 R2 R3 R4 R5 R6 R7 R8"
    got = batches(runs["vllm"])
    assert [got[3], got[4], got[5]] == [f"{eight} R9[0:56]", f"{eight} R9[56:112]", f"{eight} R9[112:128]"]
    # With a budget of 4 nano's prompts are cut to 4 tokens a round, and its decode rounds still feed all eight.
    tight = replay(4, "--scheduler", "nano", "--max-num-batched-tokens", 4)["nano"]
    rounds = tight.read("rounds")
    assert rounds.filter(pl.col("kind") == "prefill")["prefill_tokens"].max() == 4
    assert batches(tight)[50] == eight and column(tight, "budget_left")[50] == 4 - 8


def test_04_vllm_refuses_a_budget_below_its_seats(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    answer = call(
        capfd, "replay", FOLDER / "lessons" / "04-token-budget.jsonl", "--scheduler", "vllm", "--engine", "null",
        "--max-num-batched-tokens", 4, "--no-report", "--out", tmp_path / "o",
    )  # fmt: skip
    assert answer.code == 2 and "--max-num-batched-tokens (4) >= --max-num-seqs (16)" in answer.err


def test_05_nano_cuts_only_a_rounds_first_and_vllm_anyone(replay: Replay) -> None:
    runs = replay(5)
    got = batches(runs["nano"])
    assert [got[number] for number in (1, 2, 3, 4)] == ["R1[0:48]", "R2[0:40]", "R3[0:64]", "R3[64:100]"]
    left = column(runs["nano"], "budget_left")
    assert [left[number] for number in (1, 2, 3)] == [16, 24, 0]
    assert decided(runs["nano"], "hold") == [
        (1, "hold", "R2", None, "not_first", 40, 16),
        (2, "hold", "R3", None, "not_first", 100, 24),
    ]
    got = batches(runs["vllm"])
    assert [got[1], got[2], got[3]] == ["R1[0:48] R2[0:16]", "R1 R2[16:40] R3[0:39]", "R1 R2 R3[39:100]"]
    left = column(runs["vllm"], "budget_left")
    assert (left[1], left[2], left[3]) == (0, 0, 1)


def test_05_without_chunked_prefill_vllm_leaves_the_budget_too(replay: Replay) -> None:
    run = replay(5, "--scheduler", "vllm", "--no-enable-chunked-prefill", "--num-prompts", 2)["vllm"]
    assert (batches(run)[1], batches(run)[2]) == ("R1[0:48]", "R1 R2[0:40]")
    assert decided(run, "hold") == [(1, "hold", "R2", None, "chunking_disabled", 40, 16)]
    assert decided(run, "chunk") == []


def test_06_the_threshold_lets_short_prompts_in_beside_a_long_one(replay: Replay) -> None:
    runs = replay(6)
    got = batches(runs["nano"])
    assert [got[1], got[2], got[3]] == ["R1[0:64]", "R1[64:128]", "R1[128:160] R2[0:16] R3[0:16]"]
    got = batches(runs["vllm"])
    assert [got[number] for number in (1, 2, 3, 4)] == [
        "R1[0:32] R2[0:16] R3[0:16]", "R1[32:64] R2 R3", "R1[64:96] R2 R3", "R1[96:160]",
    ]  # fmt: skip
    # In round 4 R1 is alone, so the threshold is off.
    assert [(entry[0], entry[4]) for entry in decided(runs["vllm"], "chunk")] == [
        (number, "long_prefill_token_threshold") for number in (1, 2, 3)
    ]
    first = {name: [token_rounds(run, id)[0] for id in ("R1", "R2", "R3")] for name, run in runs.items()}
    assert first == {"nano": [3, 3, 3], "vllm": [4, 1, 1]}


# -- 7 to 12: blocks and preemption


def test_07_nano_takes_all_blocks_of_a_prompt_at_once_and_vllm_a_chunks(replay: Replay) -> None:
    runs = replay(7)
    # nano: not a block until all 12 are there, then all in one round; 64 tokens of 192 are computed in it.
    assert [entry[:7] for entry in decided(runs["nano"], "hold")] == [
        (2, "hold", "R2", None, "blocks", 12, 10),
        *((number, "hold", "R2", None, "blocks", 12, 9) for number in (3, 4, 5, 6)),
    ]
    assert batches(runs["nano"])[7] == "R2[0:64]"
    assert column(runs["nano"], "free_blocks_start")[7] == 14 and column(runs["nano"], "free_blocks_scheduled")[7] == 2
    assert decided(runs["nano"], "preempt") == []
    # vllm: 4 blocks a chunk, beside R1's one; in round 4 the third chunk's are not there.
    free = column(runs["vllm"], "free_blocks_scheduled")
    assert [free[number] for number in (1, 2, 3)] == [10, 5, 1]
    assert decided(runs["vllm"], "preempt") == [(4, "preempt", "R2", None, "self", 4, 1)]
    # Preempted half way: 126 computed tokens given up, of which the 7 full blocks come back from the cache.
    lost = of_request(runs["vllm"], "R2")
    assert (lost["discarded_tokens"], lost["recomputed_tokens"]) == (126, 126 - 7 * 16)
    assert batches(runs["vllm"])[7] == "R2[112:176]"


def test_07_without_the_prefix_cache_all_of_it_is_computed_again(replay: Replay) -> None:
    lost = of_request(replay(7, "--no-enable-prefix-caching")["vllm"], "R2")
    assert (lost["discarded_tokens"], lost["recomputed_tokens"]) == (126, 126)


def test_07_reserving_the_full_sequence_is_a_check_not_a_reservation(replay: Replay) -> None:
    run = replay(7, "--scheduler", "vllm", "--scheduler-reserve-full-isl")["vllm"]
    # R1's decode has taken its block before R2 is looked at: 9 are free in every round.
    assert [entry[:7] for entry in decided(run, "hold")] == [
        (number, "hold", "R2", None, "reserve_full_isl", 12, 9) for number in (2, 3, 4, 5, 6)
    ]
    assert decided(run, "preempt") == []
    # Admitted where nano admits it, but the blocks still go chunk by chunk.
    free = column(run, "free_blocks_scheduled")
    assert [free[number] for number in (7, 8, 9)] == [10, 6, 2]


def test_08_both_state_the_same_need_and_a_refusal_takes_nothing(replay: Replay) -> None:
    runs = replay(8)
    assert decided(runs["nano"], "hold") == [
        (1, "hold", "R2", None, "blocks", 3, 2),
        (2, "hold", "R2", None, "blocks", 3, 2),  # asked before R1's decode took its block
        (3, "hold", "R2", None, "blocks", 3, 1),
    ]
    assert decided(runs["vllm"], "hold") == [
        (1, "hold", "R2", None, "blocks", 3, 2),
        (2, "hold", "R2", None, "blocks", 3, 1),  # asked after it
        (3, "hold", "R2", None, "blocks", 3, 1),
    ]
    for run in runs.values():
        assert decided(run, "admit") == [(1, "admit", "R1", None, "fits", 6, 8), (4, "admit", "R2", None, "fits", 3, 8)]
        (row,) = [row for row, name in run.ids.items() if name == "R2"]
        assert run.read("blocks").filter((pl.col("request") == row) & (pl.col("round") < 4)).is_empty()


def test_09_vllm_passes_over_one_but_stops_where_a_resource_is_spent(replay: Replay) -> None:
    runs = replay(9)
    assert admissions(runs["nano"]) == ["R1", "R2", "R3", "R4", "R5"]
    assert admissions(runs["vllm"]) == ["R1", "R3", "R2", "R4", "R5"]
    # R3 passes R2, for whose adapter there is no place. R5 passes nobody, though its one block is free in every round.
    assert decided(runs["nano"], "skip") == []
    assert decided(runs["vllm"], "skip") == [(n, "skip", "R2", None, "max_loras", 2, 1) for n in (1, 2, 3, 4)]
    held = {"nano": [(2, 7, 6), (3, 7, 3), (4, 7, 6)], "vllm": [(2, 7, 6), (3, 7, 6), (4, 7, 6)]}
    for name, run in runs.items():
        holds = decided(run, "hold")
        assert {(entry[2], entry[4]) for entry in holds} == {("R4", "blocks")}
        assert [(entry[0], *entry[5:]) for entry in holds] == held[name]
        assert [column(run, "stop_waiting")[number] for number in (2, 3, 4)] == ["blocks"] * 3


def test_10_the_victim_is_the_newest_or_by_priority_the_last(replay: Replay) -> None:
    runs = replay(10)
    assert decided(runs["nano"], "preempt") == [(4, "preempt", "R3", "R1", "newest", 1, 0)]
    # R2 has priority 9 and sits in the middle of the running list.
    assert decided(runs["vllm"], "preempt") == [(3, "preempt", "R2", "R1", "lowest_priority", 1, 0)]
    assert batches(runs["vllm"])[3] == "R1 R3"
    fcfs = replay(10, "--scheduler", "vllm", "--scheduling-policy", "fcfs")["vllm"]
    assert decided(fcfs, "preempt") == [(3, "preempt", "R3", "R1", "newest", 1, 0)]


def test_11_both_recompute_from_the_head_of_the_queue(replay: Replay) -> None:
    for run in replay(11).values():
        assert decided(run, "preempt") == [(2, "preempt", "R2", "R1", "newest", 1, 0)]
        # R3 came before the preemption and needs one block of the two that are free; R2 is ahead of it and needs three.
        assert [entry[:3] + entry[5:] for entry in decided(run, "hold") if entry[0] > 2] == [
            (number, "hold", "R2", 3, 2) for number in range(3, 9)
        ]
        assert decided(run, "resume") == [(9, "resume", "R2", None, "fits", 3, 6)]
        assert admissions(run) == ["R1", "R2", "R2", "R3"]
        # All 36 computed tokens are given up; two full blocks are hit on return, and five tokens are computed: four of
        # them again, and the one that was generated before.
        again = of_request(run, "R2")
        assert (again["discarded_tokens"], again["recomputed_tokens"], again["preemptions"]) == (36, 4, 1)
        assert batches(run)[9] == "R2[32:37] R3[0:16]"
        assert token_rounds(run, "R2") == [1, 9, 10, 11, 12, 13]


def test_12_nano_admits_one_for_a_round_only_and_vllm_nobody_after_a_preemption(replay: Replay) -> None:
    runs = replay(12)
    # nano gives R3 the last block in round 3 and takes it back in round 4: ten tokens computed for nothing.
    assert decided(runs["nano"], "admit")[-1][:3] == (3, "admit", "R3")
    assert decided(runs["nano"], "preempt") == [
        (4, "preempt", "R3", "R1", "newest", 1, 0),
        (5, "preempt", "R2", None, "self", 1, 0),
    ]
    assert of_request(runs["nano"], "R3")["discarded_tokens"] == 10
    # vllm serves R1 first, so R3 is not let in; in round 4 its waiting loop does not even look at it.
    assert decided(runs["vllm"], "preempt") == [(4, "preempt", "R2", None, "self", 1, 0)]
    assert [entry[:3] for entry in decided(runs["vllm"], "hold") if entry[2] == "R3"] == [(3, "hold", "R3")]
    assert of_request(runs["vllm"], "R3")["discarded_tokens"] == 0
    assert column(runs["vllm"], "stop_waiting")[4] == "preemption"
    assert column(runs["vllm"], "admitted")[4] == 0


def test_12_vllm_keeps_out_even_one_that_would_fit(replay: Replay) -> None:
    run = replay(12, "--scheduler", "vllm", "--scheduling-policy", "priority")["vllm"]
    # R3 heads the queue by priority and needs one block; two are left after R2 took its own.
    assert decided(run, "preempt") == [(4, "preempt", "R1", "R2", "lowest_priority", 1, 0)]
    assert column(run, "free_blocks_scheduled")[4] == 2
    assert column(run, "stop_waiting")[4] == "preemption"
    assert decided(run, "admit")[-1] == (5, "admit", "R3", None, "fits", 1, 2)


# -- 13 to 16: seats, queues, latency, cache


def test_13_nano_seats_a_round_and_vllm_the_running_list(replay: Replay) -> None:
    runs = replay(13)
    assert batches(runs["nano"])[2] == "R3[0:16] R4[0:16]"
    running = column(runs["nano"], "running")
    assert running[2] == 4  # with max_num_seqs 2
    # The tail starves: prefilled in round 2, and then nothing until both of the older ones are done.
    assert token_rounds(runs["nano"], "R1") == token_rounds(runs["nano"], "R2") == [1, 3, 4, 5, 6, 7]
    assert token_rounds(runs["nano"], "R3") == token_rounds(runs["nano"], "R4") == [2, 8, 9]
    assert of_request(runs["nano"], "R3")["stalled_s"] == 5.0
    assert max(column(runs["vllm"], "running").values()) == 2
    assert [column(runs["vllm"], "stop_waiting")[number] for number in range(2, 7)] == ["max_num_seqs"] * 5
    assert token_rounds(runs["vllm"], "R3") == token_rounds(runs["vllm"], "R4") == [7, 8, 9]
    assert of_request(runs["vllm"], "R3")["stalled_s"] == 0.0


def test_14_one_deque_a_queue_with_skipped_ones_and_a_queue_by_priority(replay: Replay) -> None:
    runs = replay(14)
    assert admissions(runs["nano"]) == ["R1", "R2", "R3", "R4", "R5"]
    # R2's adapter has no place beside R1's, so R3, of R1's adapter, passes; R2 keeps its place at the head.
    assert admissions(runs["vllm"]) == ["R1", "R3", "R2", "R4", "R5"]
    assert [entry[:3] for entry in decided(runs["vllm"], "skip")] == [(1, "skip", "R2")]
    assert column(runs["vllm"], "skipped") == {1: 1, 2: 1, 3: 0, 4: 0, 5: 0, 6: 0}
    assert batches(runs["vllm"])[3] == "R2[0:16] R4[0:16]"
    priority = replay(14, "--scheduler", "vllm", "--scheduling-policy", "priority")["vllm"]
    assert admissions(priority) == ["R4", "R5", "R1", "R3", "R2"]
    assert [entry[:3] for entry in decided(priority, "skip")] == [(3, "skip", "R2")]


def test_15_nano_buys_ttft_with_spikes_of_itl(replay: Replay) -> None:
    runs = replay(15, clock="virtual")
    ttft, longest, stalled = {}, {}, {}
    for name, run in runs.items():
        decoders = [row for row, id in run.ids.items() if id.startswith("D")]
        ttft[name] = metrics.per_request(run).filter(pl.col("id").str.starts_with("L")).collect()["ttft"].to_list()
        longest[name] = metrics.itl(run).filter(pl.col("request").is_in(decoders)).collect()["itl"].max()
        requests = run.read("requests").filter(pl.col("request").is_in(decoders))
        stalled[name] = requests["stalled_s"].to_list()
    # nano gives a prompt of 8,192 tokens four whole rounds of 2,048; vllm, after eight decodes, four of 2,040 and one of 32.
    chunks = {
        name: run.read("batches").filter(pl.col("request") == 8)["num_tokens"].to_list() for name, run in runs.items()
    }
    assert chunks["nano"][:4] == [2048] * 4 and chunks["vllm"][:5] == [2040] * 4 + [32]
    assert sum(ttft["nano"]) < sum(ttft["vllm"]) < 1.1 * sum(ttft["nano"])
    # nano's four rounds: 4 x 5 ms, 8,192 x 20 us, and 2 ns for each of the 8,192 x 8,193 / 2 pairs of tokens.
    prompt_s = 4 * 5e-3 + 8192 * 20e-6 + 2e-9 * 8192 * 8193 / 2
    assert stalled["nano"] == pytest.approx([4 * prompt_s] * 8) and stalled["vllm"] == [0.0] * 8
    # The longest gap of all: those four rounds and a decode round of a good 5 ms.
    assert prompt_s + 5e-3 < longest["nano"] < prompt_s + 6e-3
    # vllm's: the fourth chunk's round, 2,040 tokens from position 6,120 beside eight decodes of at most 264 tokens.
    chunk_s = 5e-3 + 2048 * 20e-6 + 2e-9 * (2040 * 6120 + 2040 * 2041 / 2)
    assert chunk_s < longest["vllm"] < chunk_s + 2e-9 * 8 * 264


def test_16_hits_on_used_and_freed_blocks_and_what_is_evicted_when(replay: Replay) -> None:
    runs = replay(16)
    hits = {
        name: {
            run.ids[request]: count
            for request, count in run.read("batches").filter(pl.col("cached_tokens") > 0)
            .select("request", "cached_tokens").iter_rows()
        }
        for name, run in runs.items()
    }  # fmt: skip
    # R2 hits R1's two full blocks in use (not its tail of 8 tokens, which is never full), R3 the same two after both are
    # freed. R5 has R2's prompt: nano has reused R2's third block for R4, vllm took R4's blocks from those that held nothing.
    assert hits["nano"] == {"R2": 32, "R3": 32, "R5": 32, "R7": 16}
    assert hits["vllm"] == {"R2": 32, "R3": 32, "R5": 48, "R7": 16}
    # Block ids, by the two free lists worked out by hand; in both the tail of a prefix goes first and its head last.
    evicted = {
        name: [tuple(row) for row in run.read("blocks").filter(pl.col("event") == "evict").sort("round", "order")
               .select("round", "block").iter_rows()]
        for name, run in runs.items()
    }  # fmt: skip
    assert evicted["nano"] == [(8, 3), (9, 5), *((10, block) for block in (2, 3, 4, 7, 6, 1)), (11, 6)]
    assert evicted["vllm"] == [(9, 3), *((10, block) for block in (8, 7, 6, 5, 4, 2)), (11, 4)]
    lists = {name: column(run, "free_list") for name, run in runs.items()}
    assert lists["nano"][3] == [5, 6, 7, 4, 3] and lists["nano"][7] == [7, 4, 3, 2, 6, 5, 1, 0]
    # vllm: what holds nothing goes to the front, what can still be hit to the back.
    assert lists["vllm"][3] == [5, 6, 7, 8, 4] and lists["vllm"][7] == [5, 6, 7, 8, 4, 3, 2, 1]
    shares = {
        name: run.read("blocks").filter((pl.col("event") == "share") & (pl.col("round") == 2))["block"].to_list()
        for name, run in runs.items()
    }
    assert shares == {"nano": [0, 1], "vllm": [1, 2]}
    # A hit in use costs no free block, a freed one does: R2 needs 1 of its 3, R3 all 4.
    for run in runs.values():
        needs = {entry[2]: entry[5] for entry in decided(run, "admit")}
        assert (needs["R2"], needs["R3"]) == (1, 4)


# -- the files and the page


def test_there_are_sixteen_lessons_each_valid_small_and_with_its_limits() -> None:
    names = bundled_lessons()
    assert [name[len("lessons/") :][:3] for name in names] == [f"{number:02d}-" for number in range(1, 17)]
    for name in names:
        trace = open_trace(FOLDER / name, strict=True)
        assert trace.notes == [] and trace.all_have_arrival_s and trace.num_requests <= 12, name
        assert trace.name == trace.header.salt == Path(name).stem
        assert {"max_num_batched_tokens", "max_num_seqs", "block_size", "kv_cache_tokens"} == set(
            trace.header.limits["common"]
        )
        assert trace.header.licence == "Apache-2.0" and trace.header.source


def test_a_lesson_is_found_by_its_name_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("lessons/05-chunking", "lessons/05-chunking.jsonl", "traces/lessons/05-chunking.jsonl"):
        assert open_trace(name).name == "05-chunking"
    with pytest.raises(BenchctlError, match="no such trace: lessons/05.jsonl") as refused:
        open_trace("lessons/05.jsonl")
    assert all(name.removesuffix(".jsonl") in str(refused.value.fix) for name in bundled_lessons())
    for name in ("05-chunking.jsonl", "elsewhere/lessons/05-chunking.jsonl", "lessons", "lessons/../walkthrough.jsonl"):
        with pytest.raises(BenchctlError, match="no such trace"):
            open_trace(name)


def test_the_page_shows_every_lesson_and_its_tables_are_those_of_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER.parent)
    spec = importlib.util.spec_from_file_location("make_lessons", DOCS / "make_lessons.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (DOCS / "lessons.md").read_text(encoding="utf-8")
    for name in bundled_lessons():
        assert f"replay traces/{name} --scheduler nano --scheduler vllm --engine null --clock " in page, name
    assert module.remade(page) == page
