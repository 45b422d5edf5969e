"""Whole replays on the null engine: who is admitted when, what is refused or cut, and what the record and manifest say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from reports.run import Run, open_run
from tests.command_line import Answer, call, rows, write_trace
from tests.laws import assert_laws

Capture = pytest.CaptureFixture[str]
# Rounds of one second: no cost a token, so that times can be counted.
SECONDS = ("--engine", "null", "--round-cost", "1,0,0", "--no-report")


def replay(
    capfd: Capture, folder: Path, trace: Path, *flags: object, expect: int = 0, laws: bool = True
) -> tuple[dict[str, Run], Answer]:
    """Run it, check the laws on every run folder, and give the runs by name."""
    answer = call(capfd, "replay", trace, "--out", folder, *flags)
    assert answer.code == expect, answer.err
    runs = {
        path.parent.name: (assert_laws if laws else open_run)(path.parent)
        for path in sorted(folder.glob("*/manifest.json"))
    }
    return runs, answer


def admissions(run: Run) -> list[tuple[Any, ...]]:
    return run.read("admissions").select("id", "arrival_s", "admitted_s", "admitted_round").rows()


def ends(run: Run) -> dict[str, tuple[str, str | None, int]]:
    return {row[0]: row[1:] for row in run.read("requests").select("id", "status", "reason", "emitted_tokens").rows()}


def digests(runs: dict[str, Run]) -> dict[str, str]:
    return {name: run.manifest["digest"] for name, run in runs.items()}


# -- admission order and clocks


def test_latency_counts_from_the_intended_arrival(tmp_path: Path, capfd: Capture) -> None:
    trace = write_trace(tmp_path / "t.jsonl", rows((0, 8, 2), (0.5, 8, 1), (5, 8, 1)))
    runs, _ = replay(capfd, tmp_path / "o", trace, "-s", "nano", *SECONDS)
    # Round 1 lasts from 0 to 1 with R1 alone; R2 waits for its end; then both are idle until 5.
    assert admissions(runs["nano"]) == [("R1", 0.0, 0.0, 1), ("R2", 0.5, 1.0, 2), ("R3", 5.0, 5.0, 4)]


def test_rounds_clock_admits_by_round_then_file_order(tmp_path: Path, capfd: Capture) -> None:
    trace = write_trace(
        tmp_path / "t.jsonl",
        [
            {"id": "late", "arrival_round": 3, "input_length": 4, "output_length": 1},
            {"id": "b", "arrival_round": 1, "input_length": 4, "output_length": 1},
            {"id": "a", "arrival_round": 1, "input_length": 4, "output_length": 1},
            {"id": "far", "arrival_round": 9, "input_length": 4, "output_length": 1},
        ],
    )
    runs, _ = replay(capfd, tmp_path / "o", trace, "--engine", "null", "--clock", "rounds", "--no-report")
    for run in runs.values():
        assert [row[0] for row in admissions(run)] == ["b", "a", "late", "far"]
        assert [row[3] for row in admissions(run)] == [1, 1, 3, 9]
        assert run.read("rounds")["round"].to_list() == [1, 3, 9]  # idle ticks count and write nothing


def test_rounds_clock_puts_times_into_rounds_of_round_seconds(tmp_path: Path, capfd: Capture) -> None:
    trace = write_trace(tmp_path / "t.jsonl", rows((0, 4, 1), (0.3, 4, 1), (0.31, 4, 1), (0.99, 4, 1)))
    runs, _ = replay(
        capfd,
        tmp_path / "o",
        trace,
        "-s",
        "vllm",
        "--engine",
        "null",
        "--clock",
        "rounds",
        "--round-seconds",
        "0.1",
        "--no-report",
    )
    assert [row[3] for row in admissions(runs["vllm"])] == [1, 4, 4, 10]


def test_time_scale_and_speedup_are_inverse(tmp_path: Path, capfd: Capture) -> None:
    trace = write_trace(tmp_path / "t.jsonl", rows((0, 4, 1), (8, 4, 1)))
    for name, flags in {"a": ("--time-scale", 0.25), "b": ("--speedup", 4)}.items():
        runs, answer = replay(capfd, tmp_path / name, trace, "-s", "nano", *SECONDS, *flags)
        assert admissions(runs["nano"])[1][1] == 2.0
        assert "arrivals over 2.000 s" in answer.err


def test_request_rate_replaces_arrivals_by_seed(tmp_path: Path, capfd: Capture) -> None:
    trace = write_trace(tmp_path / "t.jsonl", rows(*[(0, 4, 1)] * 200))
    times = {}
    for name, flags in {"a": (), "b": (), "c": ("--seed", 1), "smooth": ("--burstiness", 1000)}.items():
        runs, _ = replay(capfd, tmp_path / name, trace, "-s", "nano", *SECONDS, "--request-rate", 10, *flags)
        times[name] = runs["nano"].read("admissions")["arrival_s"]
    assert times["a"].equals(times["b"]) and not times["a"].equals(times["c"])
    assert times["a"][0] == 0.0 and 14 < times["a"][-1] < 28  # 199 gaps of 0.1 s, standard deviation 1.4 s
    gaps = times["smooth"].diff().drop_nulls()
    assert gaps.std() < 0.01 < times["a"].diff().drop_nulls().std()


def test_request_rate_inf_is_all_at_once(tmp_path: Path, capfd: Capture) -> None:
    trace = write_trace(tmp_path / "t.jsonl", rows((0, 4, 1), (100, 4, 1)))
    runs, _ = replay(capfd, tmp_path / "o", trace, "-s", "nano", *SECONDS, "--request-rate", "inf")
    assert [row[2] for row in admissions(runs["nano"])] == [0.0, 0.0]


def test_max_concurrency_holds_the_next_until_one_ends(tmp_path: Path, capfd: Capture) -> None:
    trace = write_trace(tmp_path / "t.jsonl", rows((0, 4, 3), (0, 4, 3), (0, 4, 1)))
    runs, _ = replay(capfd, tmp_path / "o", trace, "-s", "vllm", *SECONDS, "--max-concurrency", 2)
    run = runs["vllm"]
    assert admissions(run) == [("R1", 0.0, 0.0, 1), ("R2", 0.0, 0.0, 1), ("R3", 0.0, 3.0, 4)]
    assert run.manifest["load"] == "closed" and run.manifest["counts"]["rounds_capped"] == 3


def test_num_prompts_takes_the_first(tmp_path: Path, capfd: Capture) -> None:
    trace = write_trace(tmp_path / "t.jsonl", rows((0, 4, 1), (1, 4, 1), (2, 4, 1)))
    runs, answer = replay(capfd, tmp_path / "o", trace, "-s", "nano", *SECONDS, "--num-prompts", 2)
    assert "2 of 3 requests" in answer.err and "arrivals over 1.000 s" in answer.err
    assert [row[0] for row in admissions(runs["nano"])] == ["R1", "R2"]


SESSIONS = [
    {"id": "a", "arrival_s": 0, "input_length": 4, "output_length": 2, "session": "s"},
    {"id": "b", "arrival_s": 0, "input_length": 4, "output_length": 5},
    {
        "id": "a2",
        "arrival_s": 0.1,
        "think_s": 3,
        "parents": ["a"],
        "input_length": 8,
        "output_length": 1,
        "session": "s",
    },
    {"id": "join", "arrival_s": 0.2, "think_s": 0.5, "parents": ["a", "b"], "input_length": 4, "output_length": 1},
]


def test_session_arrivals_wait_for_the_last_parent_and_think(tmp_path: Path, capfd: Capture) -> None:
    trace = write_trace(tmp_path / "t.jsonl", SESSIONS)
    runs, _ = replay(capfd, tmp_path / "o", trace, "-s", "vllm", *SECONDS, "--arrivals", "session")
    # a ends at 2, b at 5: a2 is due at 2 + 3, join at 5 + 0.5, after the round that began at 5.
    assert admissions(runs["vllm"]) == [
        ("a", 0.0, 0.0, 1),
        ("b", 0.0, 0.0, 1),
        ("a2", 5.0, 5.0, 6),
        ("join", 5.5, 6.0, 7),
    ]
    assert runs["vllm"].manifest["arrivals"] == "session"


def test_trace_arrivals_do_not_wait_for_parents(tmp_path: Path, capfd: Capture) -> None:
    runs, _ = replay(capfd, tmp_path / "o", write_trace(tmp_path / "t.jsonl", SESSIONS), "-s", "vllm", *SECONDS)
    assert [row[1] for row in admissions(runs["vllm"])] == [0.0, 0.0, 0.1, 0.2]


# -- what can never fit


def test_a_request_that_can_never_fit_is_rejected_with_its_children_and_the_run_exits_1(
    tmp_path: Path, capfd: Capture
) -> None:
    trace = write_trace(
        tmp_path / "t.jsonl",
        [
            {"id": "huge", "arrival_s": 0, "input_length": 900, "output_length": 5},
            {"id": "ok", "arrival_s": 0, "input_length": 10, "output_length": 2},
            {"id": "child", "arrival_s": 1, "parents": ["huge"], "input_length": 10, "output_length": 2},
            {"id": "grandchild", "arrival_s": 2, "parents": ["child"], "input_length": 10, "output_length": 2},
        ],
    )
    for mode in ("trace", "session"):
        runs, answer = replay(
            capfd, tmp_path / mode, trace, *SECONDS, "--kv-cache-tokens", 512, "--arrivals", mode, expect=1
        )
        for run in runs.values():
            found = ends(run)
            assert found["ok"] == ("finished", "max_tokens", 2)
            assert found["huge"] == ("rejected", "exceeds_pool", 0)
            assert found["child"] == found["grandchild"] == ("rejected", "parent_rejected", 0)
            refused = run.read("decisions").filter(pl.col("kind") == "reject").sort("round", "order")
            size = run.block_size
            assert size is not None
            first = refused.row(0, named=True)
            assert (first["needed"], first["available"], first["unit"]) == (-(-904 // size), 512 // size, "blocks")
            assert refused["reason"].to_list()[1:] == ["parent_rejected"] * 2
            assert refused["needed"].to_list()[1:] == [None, None]
            assert run.status == "complete" and run.manifest["counts"]["rejected"] == 3


def test_everything_rejected_leaves_a_readable_run_without_rounds(tmp_path: Path, capfd: Capture) -> None:
    trace = write_trace(tmp_path / "t.jsonl", rows((0, 900, 5), (3, 901, 5)))
    runs, _ = replay(capfd, tmp_path / "o", trace, *SECONDS, "--kv-cache-tokens", 512, expect=1)
    for run in runs.values():
        assert run.read("rounds").height == 0 and run.read("requests").height == 2
        assert run.read("decisions")["order"].to_list() == [0, 1]  # both before the first round, which never came


def test_over_length_skip_leaves_out_counts_and_exits_0(tmp_path: Path, capfd: Capture) -> None:
    trace = write_trace(tmp_path / "t.jsonl", rows((0, 900, 5), (0, 10, 2)))
    runs, _ = replay(capfd, tmp_path / "o", trace, *SECONDS, "--kv-cache-tokens", 512, "--over-length", "skip")
    for run in runs.values():
        assert set(ends(run)) == {"R2"}
        assert run.manifest["counts"]["skipped_over_length"] == 1 and "R1" in run.manifest["counts"]["first_skipped"]


def test_over_length_error_stops_at_the_first_such_row_with_exit_2(tmp_path: Path, capfd: Capture) -> None:
    trace = write_trace(tmp_path / "t.jsonl", rows((0, 10, 2), (4, 900, 5)))
    runs, answer = replay(
        capfd,
        tmp_path / "o",
        trace,
        "-s",
        "vllm",
        *SECONDS,
        "--kv-cache-tokens",
        512,
        "--over-length",
        "error",
        expect=2,
    )
    assert "request R2 needs 57 KV blocks; the engine has 32" in answer.err and "line 2" in answer.err
    assert runs["vllm"].status == "failed" and ends(runs["vllm"])["R1"][0] == "finished"


def test_over_length_truncate_keeps_the_leading_part_and_its_sharing(tmp_path: Path, capfd: Capture) -> None:
    trace = write_trace(
        tmp_path / "t.jsonl",
        [
            {"id": "a", "arrival_s": 0, "input_length": 64, "segments": [{"id": "x", "len": 64}], "output_length": 1},
            {"id": "b", "arrival_s": 5, "input_length": 900, "segments": [{"id": "x", "len": 64}], "output_length": 13},
        ],
    )
    runs, _ = replay(
        capfd, tmp_path / "o", trace, "-s", "vllm", *SECONDS, "--kv-cache-tokens", 512, "--over-length", "truncate"
    )
    run = runs["vllm"]
    assert run.read("admissions")["prompt_tokens"].to_list() == [64, 500]  # 500 + 13 - 1 computed tokens fill the pool
    assert run.read("requests").sort("request")["cached_tokens"].to_list() == [0, 64]
    assert run.manifest["counts"]["prompts_truncated"] == 1 and run.manifest["counts"]["prompt_tokens_truncated"] == 400


def test_max_model_len_cuts_nanos_outputs_exactly_where_vllm_stops(tmp_path: Path, capfd: Capture) -> None:
    trace = write_trace(tmp_path / "t.jsonl", rows((0, 10, 30), (0, 19, 5), (0, 10, 10), (0, 20, 1), (0, 5, 3)))
    runs, _ = replay(capfd, tmp_path / "o", trace, *SECONDS, "--max-model-len", 20, "--block-size", 4, expect=1)
    for run in runs.values():
        assert ends(run) == {
            "R1": ("finished", "length_capped", 10),
            "R2": ("finished", "length_capped", 1),
            "R3": ("finished", "max_tokens", 10),
            "R4": ("rejected", "prompt_too_long", 0),
            "R5": ("finished", "max_tokens", 3),
        }
        assert run.read("admissions")["output_tokens"].to_list() == [30, 5, 10, 3]  # as asked
        assert run.manifest["counts"]["outputs_length_capped"] == 2
        assert run.manifest["counts"]["output_tokens_length_capped"] == 24


# -- warm-ups, repeats, records


def test_warm_ups_leave_the_decisions_as_they_are_unless_the_cache_stays_warm(tmp_path: Path, capfd: Capture) -> None:
    trace = write_trace(tmp_path / "t.jsonl", rows(*[(i * 0.5, 60 + i, 20) for i in range(12)]))
    flags = (*SECONDS, "--kv-cache-tokens", 512, "--block-size", 16)
    cold, _ = replay(capfd, tmp_path / "cold", trace, *flags)
    warmed, _ = replay(capfd, tmp_path / "warmed", trace, *flags, "--num-warmups", 5)
    warm, _ = replay(
        capfd, tmp_path / "warm", trace, *flags, "--num-warmups", 5, "--warm-cache", laws=False
    )  # hits on blocks of before
    assert digests(cold) == digests(warmed)
    assert {run.manifest["cache"] for run in warmed.values()} == {"cold"}
    for name, run in warm.items():
        assert run.manifest["cache"] == "warm" and run.manifest["digest"] != cold[name].manifest["digest"]
        assert (run.read("admissions")["request"] >= 0).all()


def test_repeats_are_interleaved_and_decide_the_same(tmp_path: Path, capfd: Capture) -> None:
    trace = write_trace(tmp_path / "t.jsonl", rows((0, 40, 9), (1, 30, 9)))
    runs, _ = replay(capfd, tmp_path / "o", trace, *SECONDS, "--num-repeats", 2)
    started = sorted(runs, key=lambda name: runs[name].manifest["started"])
    assert started == ["nano-1", "vllm-1", "vllm-2", "nano-2"]
    assert runs["nano-1"].manifest["digest"] == runs["nano-2"].manifest["digest"]


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 requests that share prefixes in memory so tight that both policies preempt."""
    return write_trace(
        tmp_path_factory.mktemp("tight") / "t.jsonl",
        [
            {"id": f"R{i}", "arrival_s": i * 0.7, "input_length": 30 + i % 7 * 11, "output_length": 20 + i % 5 * 9}
            | {"segments": [{"id": i % 3, "len": 24}], "priority": i % 2}
            for i in range(40)
        ],
    )


TIGHT = (*SECONDS, "--kv-cache-tokens", 256, "--block-size", 8, "--max-num-batched-tokens", 128, "--max-num-seqs", 12)


def test_every_kind_of_records_tells_the_same(tight: Path, tmp_path: Path, capfd: Capture) -> None:
    full, _ = replay(capfd, tmp_path / "full", tight, *TIGHT)
    compact, _ = replay(capfd, tmp_path / "compact", tight, *TIGHT, "--records", "compact")
    summary, _ = replay(capfd, tmp_path / "summary", tight, *TIGHT, "--records", "summary")
    host = ["schedule_s", "update_s", "record_s", "prepare_s"]
    for name, run in full.items():
        assert run.manifest["counts"]["preemptions"] > 0
        for table, keys in {
            "batches": ["round", "order"], "tokens": ["request", "index"], "decisions": ["round", "order"],
            "blocks": ["round", "order"], "rounds": ["round"], "requests": ["request"], "admissions": ["request"],
        }.items():  # fmt: skip
            want = run.read(table).sort(keys).drop(host, strict=False)
            assert compact[name].read(table).sort(keys).drop(host, strict=False).equals(want), table
            if table in ("rounds", "requests", "admissions"):
                assert summary[name].read(table).sort(keys).drop(host, strict=False).equals(want), table
        assert not list((tmp_path / "summary" / name).glob("batches-*"))
        stored = pl.scan_parquet(compact[name].path / "batches-*.parquet").select(pl.len()).collect().item()
        assert stored < run.read("batches").height / 2
        assert compact[name].manifest["digest"] == run.manifest["digest"]
        assert summary[name].manifest["digest"] is None  # nothing was gathered that it could be of


def test_records_none_writes_nothing_and_still_counts(tight: Path, tmp_path: Path, capfd: Capture) -> None:
    runs, answer = replay(capfd, tmp_path / "o", tight, *TIGHT, "--records", "none", "--json")
    assert not runs and not (tmp_path / "o").exists()
    found = json.loads(answer.out)["runs"]
    assert [entry["completed"] for entry in found] == [40, 40]


def test_the_manifest_says_where_every_value_came_from(tmp_path: Path, capfd: Capture) -> None:
    limits = {"common": {"max_num_seqs": 3}, "vllm": {"max_num_seqs": 4, "block_size": 8}}
    trace = write_trace(tmp_path / "t.jsonl", rows((0, 8, 1)), limits=limits, name="small")
    runs, _ = replay(
        capfd,
        tmp_path / "o",
        trace,
        *SECONDS,
        "--max-num-batched-tokens",
        99,
        "--kv-cache-tokens",
        1024,
        "--goodput",
        "ttft:2s",
    )
    nano, vllm = runs["nano"].manifest, runs["vllm"].manifest
    assert nano["config"]["max_num_seqs"] == {"value": 3, "source": "trace header"}
    assert vllm["config"]["max_num_seqs"] == {"value": 4, "source": "trace header"}
    assert vllm["config"]["max_num_batched_tokens"] == {"value": 99, "source": "flag"}
    assert nano["config"]["block_size"] == {"value": 256, "source": "default"}
    assert (nano["limits"]["num_blocks"], vllm["limits"]["num_blocks"]) == (4, 129)  # vllm's null block is one of them
    assert nano["limits"]["usable_tokens"] == vllm["limits"]["usable_tokens"] == 1024
    assert vllm["policy"] == "vllm 0.33.0, synchronous" and "scheduler_reserve_full_isl" in vllm["policy_differs"]
    assert nano["policy"] == "nano-vllm bb823b3" and nano["policy_differs"] == {}
    assert vllm["trace"]["name"] == "small" and len(vllm["trace"]["sha256"]) == 64
    assert vllm["goodput"] == {"ttft": 2000.0} and vllm["config"]["seed"] == {"value": 0, "source": "default"}
    assert vllm["hardware"]["cores"] >= 1 and vllm["versions"]["polars"]


def test_both_policies_get_the_same_usable_tokens_at_odd_block_sizes(tmp_path: Path, capfd: Capture) -> None:
    limits = {"nano": {"block_size": 48}, "vllm": {"block_size": 20}}
    trace = write_trace(tmp_path / "t.jsonl", rows((0, 8, 1)), limits=limits)
    runs, _ = replay(capfd, tmp_path / "o", trace, *SECONDS)
    tokens = {run.manifest["limits"]["usable_tokens"] for run in runs.values()}
    assert len(tokens) == 1 and tokens.pop() % 240 == 0


# -- recorded clock


def test_a_recorded_clock_repeats_decisions_and_times(tight: Path, tmp_path: Path, capfd: Capture) -> None:
    for arrivals in ("trace", "session"):
        first, _ = replay(
            capfd, tmp_path / f"{arrivals}-1", tight, *TIGHT, "--arrivals", arrivals, "--max-concurrency", 9
        )
        for name, run in first.items():
            again, _ = replay(
                capfd, tmp_path / f"{arrivals}-2-{name}", tight, "-s", name, "--engine", "null", "--clock", "recorded",
                "--from", run.path, "--no-report",
            )  # fmt: skip
            assert again[name].manifest["digest"] == run.manifest["digest"]
            times = ["round", "t_start_s", "t_scheduled_s", "t_executed_s", "t_end_s"]
            assert again[name].read("rounds").select(times).equals(run.read("rounds").select(times))
            assert again[name].read("admissions").equals(run.read("admissions"))
            assert again[name].manifest["config"]["max_num_seqs"] == {"value": 12, "source": "recorded run"}


def test_a_recorded_clock_repeats_refusals_too(tmp_path: Path, capfd: Capture) -> None:
    trace = write_trace(tmp_path / "t.jsonl", rows((0, 900, 5), (0, 10, 2), (1, 901, 5), (1, 20, 3), (9, 902, 5)))
    first, _ = replay(capfd, tmp_path / "a", trace, "-s", "vllm", *SECONDS, "--kv-cache-tokens", 512, expect=1)
    flags = ("-s", "vllm", "--engine", "null", "--clock", "recorded", "--from", tmp_path / "a" / "vllm", "--no-report")
    again, _ = replay(capfd, tmp_path / "b", trace, *flags, expect=1)
    assert digests(again) == digests(first)
    larger, _ = replay(capfd, tmp_path / "c", trace, *flags, "--kv-cache-tokens", 4096)  # what if the pool were larger
    assert {row[1] for row in ends(larger["vllm"]).values()} == {"max_tokens"}
    assert [row[0] for row in admissions(larger["vllm"])] == ["R1", "R2", "R3", "R4", "R5"]


def test_a_recorded_clock_repeats_what_was_cut_and_left_out(tmp_path: Path, capfd: Capture) -> None:
    trace = write_trace(tmp_path / "t.jsonl", rows((0, 900, 5), (0, 10, 2), (1, 70, 30), (2, 20, 3)))
    for rule in ("truncate", "skip"):
        flags = ("-s", "vllm", *SECONDS, "--kv-cache-tokens", 64, "--over-length", rule, "--num-prompts", 3)
        first, _ = replay(capfd, tmp_path / f"{rule}-1", trace, *flags)
        again, _ = replay(
            capfd, tmp_path / f"{rule}-2", trace, "-s", "vllm", "--engine", "null", "--clock", "recorded", "--from",
            first["vllm"].path, "--no-report",
        )  # fmt: skip
        assert digests(again) == digests(first) and ends(again["vllm"]) == ends(first["vllm"])


def test_a_recorded_clock_asks_what_the_other_policy_had_done(tight: Path, tmp_path: Path, capfd: Capture) -> None:
    first, _ = replay(capfd, tmp_path / "a", tight, "-s", "nano", *TIGHT)
    flags = (
        "--engine",
        "null",
        "--clock",
        "recorded",
        "--from",
        tmp_path / "a" / "nano",
        "--no-report",
        "--block-size",
        8,
    )
    other, _ = replay(capfd, tmp_path / "b", tight, "-s", "vllm", *flags)
    assert admissions(other["vllm"]) == admissions(first["nano"])
    assert other["vllm"].manifest["limits"]["usable_tokens"] == first["nano"].manifest["limits"]["usable_tokens"]


def test_priority_ties_are_broken_by_the_traces_times_on_a_clock_of_rounds(tmp_path: Path, capfd: Capture) -> None:
    trace = write_trace(
        tmp_path / "t.jsonl",
        [
            {"id": "x", "arrival_round": 1, "arrival_s": 9, "input_length": 4, "output_length": 2},
            {"id": "y", "arrival_round": 1, "arrival_s": 1, "input_length": 4, "output_length": 2},
        ],
    )
    runs, _ = replay(
        capfd, tmp_path / "o", trace, "-s", "vllm", "--engine", "null", "--clock", "rounds", "--scheduling-policy", "priority",
        "--no-report",
    )  # fmt: skip
    order = runs["vllm"].read("batches").filter(pl.col("round") == 1)["request"].to_list()
    assert order == [1, 0]
