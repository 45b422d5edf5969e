"""Every logged case of the real schedulers, every logged field."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.golden_cases import build, case_names, config_of, is_refused, load_case, new_request, rounds_of

CASES = [(policy, name) for policy in ("nano", "vllm") for name in case_names(policy)]


def check_case(case: dict[str, Any], **options: Any) -> None:
    """Raises AssertionError at the first field that differs."""
    scheduler = build(case, **options)
    ids = [entry["id"] for entry in case["requests"]]
    nano = case["scheduler"] == "nano"
    counts: Counter[str] = Counter()
    tables_before: dict[str, list[int]] = {}
    for logged, round, tables in rounds_of(case, scheduler):
        batch = round.batch
        where = (case["name"], logged["round"])
        named = [ids[request] for request in batch.request.tolist()]
        scheduled = [
            {"id": i, "start": s, "num_tokens": n}
            for i, s, n in zip(named, batch.start.tolist(), batch.num_tokens.tolist(), strict=True)
        ]
        assert scheduled == logged["scheduled"], where
        assert [ids[row[2]] for row in round.decisions if row[1] == "preempt"] == logged["preempted"], where
        cached = {i: c for i, c in zip(named, batch.cached_tokens.tolist(), strict=True) if c >= 0}
        assert cached == logged["cached_tokens"], where
        assert round.free_blocks_scheduled == logged["free_blocks"], where
        assert [ids[request] for request, _ in round.finished] == logged["finished"], where
        assert round.free_blocks_end == len(scheduler.free_list()) == logged["free_blocks_end"], where
        assert [ids[r] for r in scheduler.waiting_requests()] == logged["waiting"], where
        assert [ids[r] for r in scheduler.running_requests()] == logged["running"], where
        assert (round.waiting, round.running) == (len(logged["waiting"]), len(logged["running"])), where
        after = {ids[row]: table for row, table in tables.items() if table}
        if nano:
            assert {i: after[i] for i in named} == logged["block_tables_scheduled"], where
            assert {i: scheduler.block_table(row) for row, i in enumerate(ids) if scheduler.block_table(row)} == logged[
                "block_tables"
            ], where
            assert len(scheduler.blocks.hash_to_block) == logged["num_hashed"], where
            assert (logged["phase"] == "decode") == bool(batch.is_decode.all()), where
            if "free_list" in logged:
                assert scheduler.free_list() == logged["free_list"], where
                assert scheduler.hashed_blocks() == logged["hashed_blocks"], where
        else:
            admitted = {
                kind: [ids[row[2]] for row in round.decisions if row[1] == kind] for kind in ("admit", "resume", "skip")
            }
            assert (admitted["admit"], admitted["resume"]) == (logged["new"], logged["resumed"]), where
            assert len(scheduler.blocks.cached) == logged["num_cached_hashes_end"], where
            if "block_tables" in logged:
                assert after == logged["block_tables"], where
            if "new_block_ids" in logged:
                fresh = {i: t[len(tables_before.get(i, [])) if i not in cached else 0 :] for i, t in after.items()}
                assert {i: t for i, t in fresh.items() if t} == {
                    i: t for i, t in logged["new_block_ids"].items() if t
                }, where
            if "free_queue_end" in logged:
                assert scheduler.free_list() == logged["free_queue_end"], where
            if "skipped" in logged:
                assert admitted["skip"] == logged["skipped"], where
                deferred = [ids[r] for r in scheduler.waiting_requests() if r in scheduler.skipped]
                assert deferred == logged["deferred_end"] and round.skipped == len(deferred), where
            preempted_before = {row[2] for row in round.decisions if row[1] == "resume"}
            for i, queried in ((r, scheduler_tokens) for r, scheduler_tokens in admissions(round)):
                prefix = "preempted_" if i in preempted_before else ""
                if config_of(case).enable_prefix_caching:
                    counts[prefix + "queries"] += queried
                    counts[prefix + "hits"] += cached[ids[i]]
                    counts[prefix + "requests"] += 1
        tables_before = after
        counts["rounds"] += 1
        counts["preemptions"] += round.num_preempted
        counts["finished"] += len(round.finished)
        counts["cached"] += sum(cached.values())
        counts["scheduled"] += int(batch.num_tokens.sum())
        counts["queried_by_round"] += round.queried_tokens
    totals = case["totals"]
    if nano:
        assert totals["finished"] == counts["finished"] and totals["preemptions"] == counts["preemptions"]
        assert totals["cached_tokens"] == counts["cached"]
        assert totals["prefill_tokens"] + totals["decode_tokens"] == counts["scheduled"]
        if "hash_table_end" in case:
            assert (
                sorted([f"{key:016x}", block] for key, block in scheduler.blocks.hash_to_block.items())
                == case["hash_table_end"]
            )
    else:
        assert totals["num_finished"] == counts["finished"] and totals["total_preemptions"] == counts["preemptions"]
        assert totals["total_scheduled_tokens"] == counts["scheduled"]
        assert totals["prefix_cache"] == {name: counts[name] for name in totals["prefix_cache"]}
        assert counts["queries"] + counts["preempted_queries"] == counts["queried_by_round"]


def admissions(round: Any) -> list[tuple[int, int]]:
    """(request, known tokens) of each admission of a round: what vLLM counts as queried."""
    batch = round.batch
    wanted = {row[2]: row[6 - 1] for row in round.decisions if row[1] == "chunk"}
    out = []
    for request, start, num, cached in zip(
        batch.request.tolist(),
        batch.start.tolist(),
        batch.num_tokens.tolist(),
        batch.cached_tokens.tolist(),
        strict=True,
    ):
        if cached >= 0:
            out.append((request, start + wanted.get(request, num)))
    return out


@pytest.mark.parametrize("one_by_one", [False, True], ids=["by_columns", "one_by_one"])
@pytest.mark.parametrize(("policy", "name"), CASES)
def test_every_logged_field_is_equal(policy: str, name: str, one_by_one: bool) -> None:
    check_case(load_case(policy, name), one_by_one=one_by_one)


@pytest.mark.parametrize(("policy", "name"), [case for case in CASES if is_refused(load_case(*case))])
def test_what_the_real_one_never_finishes_is_refused_on_arrival(policy: str, name: str) -> None:
    case = load_case(policy, name)
    scheduler = build(case)
    rejections = [scheduler.add(new_request(row, entry)) for row, entry in enumerate(case["requests"])]
    refused = {case["requests"][r.request]["id"]: r for r in rejections if r is not None}
    assert refused and all(r.needed > r.available for r in refused.values())
    error = case.get("error")
    if error:
        assert error["request"] in refused and refused[error["request"]].available == error["num_blocks"]
    else:
        stuck = {entry["id"] for entry in case["requests"]} - set(case["request_summary"]) | {
            i for i, summary in case["request_summary"].items() if "finish_round" not in summary
        }
        assert stuck & set(refused)
    for _ in range(2000):
        if not scheduler.has_unfinished():
            break
        scheduler.update(scheduler.schedule(), None)
    assert not scheduler.has_unfinished(), "what was not refused has to finish"


@pytest.mark.parametrize(("policy", "name"), [case for case in CASES if not is_refused(load_case(*case))])
def test_what_the_real_one_finishes_is_not_refused(policy: str, name: str) -> None:
    case = load_case(policy, name)
    scheduler = build(case)
    assert [scheduler.add(new_request(row, entry)) for row, entry in enumerate(case["requests"])] == [None] * len(
        case["requests"]
    )
