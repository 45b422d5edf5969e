"""Random small worlds: what must hold for any trace, and that the column paths decide what the one-by-one loops decide."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from benchctl.admission import LazyTokens
from engines.interface import NewRequest, Round, SchedulerConfig
from engines.schedulers.block_pool import BLANK, HIDDEN, KEYED, BlockPool
from engines.schedulers.decisions import BLOCK_EVENTS, DECISION_KINDS, REASONS, STOPS, UNITS
from engines.schedulers.registry import SCHEDULERS


class BlockPoolMachine(RuleBasedStateMachine):
    """BlockPool against a plain list and a Counter."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6, first_free=1)
        self.free = [1, 2, 3, 4, 5]
        self.holds = dict.fromkeys(self.free, BLANK)
        self.used: Counter[int] = Counter()

    @precondition(lambda self: self.free)
    @rule()
    def take(self) -> None:
        block = self.free.pop(0)
        held = self.holds.pop(block)
        told: list[int] = []
        taken, still = self.pool.take(1, lambda blocks: told.extend(blocks) or b"\x01")  # type: ignore[func-returns-value]
        assert taken == [block] and still == (None if held == BLANK else b"\x01")
        assert told == ([block] if held == KEYED else [])
        self.pool.hold(taken)
        self.used[block] = 1

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def take_several(self, data: st.DataObject) -> None:
        """Blocks that nobody looks for: they are in one table, and not counted."""
        count = data.draw(st.integers(1, len(self.free)))
        blocks = self.free[:count]
        flags = bytes(self.holds[block] != BLANK for block in blocks)
        taken, still = self.pool.take(count, lambda blocks: b"\x01" * len(blocks))
        assert taken == blocks and (still or bytes(count)) == flags
        del self.free[:count]
        holds = data.draw(st.sampled_from([BLANK, HIDDEN]))
        self.pool.put_back(taken[::-1], holds)
        self.free += blocks[::-1]
        self.holds |= dict.fromkeys(blocks, holds)

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        # A lookup finds what is referenced, or lies in the free list with a key.
        findable = sorted(self.used) + [block for block in self.free if self.holds[block] == KEYED]
        assume(findable)
        block = data.draw(st.sampled_from(findable))
        assert self.pool.touch(block) == (block in self.free)
        if block in self.free:
            self.free.remove(block)
        self.used[block] += 1

    @precondition(lambda self: self.used)
    @rule(data=st.data(), to_front=st.booleans())
    def drop(self, data: st.DataObject, to_front: bool) -> None:
        block = data.draw(st.sampled_from(sorted(self.used)))
        still_held = self.pool.drop_all([block])
        self.used[block] -= 1
        assert still_held == (b"\x01" if self.used[block] else None)
        if not self.used[block]:
            del self.used[block]
            self.holds[block] = BLANK if to_front else KEYED
            if to_front:
                self.pool.put_front([block], BLANK)
                self.free.insert(0, block)
            else:
                self.pool.put_back([block], KEYED)
                self.free.append(block)

    @invariant()
    def equal(self) -> None:
        assert self.pool.free == self.free and self.pool.num_free == len(self.free)
        assert self.pool.hidden() == [block for block in self.free if self.holds[block] == HIDDEN]
        assert [self.pool.ref_count[b] for b in range(1, 6)] == [self.used[b] for b in range(1, 6)]


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[str, SchedulerConfig, list[tuple[int, NewRequest]]]:
    """(policy, config, [(round before which it arrives, request)]): tight memory, few distinct prefixes."""
    policy = draw(st.sampled_from(["nano", "vllm"]))
    block_size = draw(st.sampled_from([2, 4, 8]))
    seats = draw(st.integers(1, 6))
    config = SchedulerConfig(
        num_blocks=draw(st.integers(4, 16)),
        block_size=block_size,
        max_num_seqs=seats,
        max_num_batched_tokens=draw(st.integers(seats, 40)),
        max_model_len=draw(st.sampled_from([None, 30, 64])),
        enable_prefix_caching=draw(st.booleans()),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 3, 7])),
        scheduling_policy=draw(st.sampled_from(["fcfs", "priority"])),
        scheduler_reserve_full_isl=draw(st.booleans()),
        watermark=draw(st.sampled_from([0.0, 0.2])),
        max_loras=draw(st.sampled_from([None, 1, 2])),
    )
    requests = []
    for row in range(draw(st.integers(1, 9))):
        prompt, output = draw(st.integers(1, 24)), draw(st.integers(1, 12))
        shared = min(draw(st.sampled_from([0, 4, 8, 16])), prompt)
        ids = np.arange(prompt + output, dtype=np.int64) + 1000 * (row + 1)
        ids[:shared] = np.arange(shared) + draw(st.sampled_from([0, 100]))
        requests.append(
            (
                draw(st.integers(0, 8)),
                NewRequest(
                    row,
                    f"r{row}",
                    prompt,
                    output,
                    lambda ids=ids: ids,
                    # Times differ: among equals vLLM may take turns preempting for ever, which is the real one's behaviour.
                    arrival_s=float(row),
                    priority=draw(st.integers(0, 2)),
                    adapter=draw(st.sampled_from([None, None, "a", "b"])),
                ),
            )
        )
    return policy, config, requests


def run(
    policy: str, config: SchedulerConfig, requests: list[tuple[int, NewRequest]], **options: Any
) -> tuple[Any, list[Round], list[Any]]:
    scheduler = SCHEDULERS[policy].build(config, **options)
    rounds: list[Round] = []
    refused = []
    last = max(arrival for arrival, _ in requests)
    for number in range(3000):
        refused += [scheduler.add(request) for arrival, request in requests if arrival == number]
        if not scheduler.has_unfinished():
            if number >= last:
                break
            continue
        round = scheduler.schedule()
        check_round(scheduler, config, round)
        scheduler.update(round, None)
        check_pool(scheduler, config, round)
        rounds.append(round)
    assert not scheduler.has_unfinished(), "did not come to an end"
    return scheduler, rounds, refused


def check_round(scheduler: Any, config: SchedulerConfig, round: Round) -> None:
    batch = round.batch
    assert batch.num_seqs <= config.max_num_seqs
    if scheduler.name == "vllm" or not batch.is_decode.any():
        assert (
            int(batch.num_tokens.sum()) + round.budget_left == config.max_num_batched_tokens and round.budget_left >= 0
        )
    assert (batch.num_tokens > 0).all() and len(set(batch.request.tolist())) == batch.num_seqs
    for start, num, table, blocks in zip(
        batch.start.tolist(), batch.num_tokens.tolist(), batch.block_tables, batch.num_blocks.tolist(), strict=True
    ):
        assert len(table) == blocks and len(set(table)) == blocks
        assert blocks * config.block_size >= start + num
    orders = sorted([row[0] for row in round.decisions] + [row[0] for row in round.blocks])
    assert orders == list(range(len(orders)))
    for _, kind, _, _, reason, needed, available, unit in round.decisions:
        assert kind in DECISION_KINDS and reason in REASONS and (unit is None or unit in UNITS)
        if kind in ("hold", "skip", "preempt", "chunk"):
            assert needed > available
        if kind in ("admit", "resume"):
            assert needed <= available
    assert round.stop_waiting is None or round.stop_waiting in STOPS
    assert round.stop_running is None or round.stop_running in STOPS
    examined = {row[2] for row in round.decisions if row[1] in ("hold", "skip")}
    if scheduler.waiting_requests() and not examined:
        assert round.stop_waiting in ("token_budget", "max_num_seqs", "preemption") or round.num_preempted, (
            round.stop_waiting
        )


def check_pool(scheduler: Any, config: SchedulerConfig, round: Round) -> None:
    pool = scheduler.blocks.pool
    live = [scheduler.block_table(r) for r in (*scheduler.running_requests(), *scheduler.waiting_requests())]
    held = Counter(b for table in live for b in table)
    usable = config.num_blocks - SCHEDULERS[scheduler.name].null_blocks
    assert pool.num_free + len(held) == usable == len({*pool.free, *held})
    # References are counted of blocks that a lookup may find; the others are in one table.
    counted = Counter({b: n for b, n in enumerate(pool.ref_count) if n})
    assert counted.items() <= held.items() and all(held[b] == 1 for b in held.keys() - counted.keys())
    assert round.cached_free_blocks == len(set(scheduler.hashed_blocks()) & set(pool.free))
    assert all(event in BLOCK_EVENTS for _, _, event, _, _ in round.blocks)


def comparable(rounds: list[Round]) -> list[Any]:
    out = []
    for r in rounds:
        b = r.batch
        columns = [
            c.tolist()
            for c in (b.request, b.start, b.num_tokens, b.is_decode, b.yields_token, b.cached_tokens, b.num_blocks)
        ]
        rest = [getattr(r, name) for name in Round.__dataclass_fields__ if name != "batch"]
        out.append((columns, rest))
    return out


@settings(max_examples=250, deadline=None)
@given(worlds())
def test_any_trace_ends_and_both_paths_decide_the_same(
    world: tuple[str, SchedulerConfig, list[tuple[int, NewRequest]]],
) -> None:
    policy, config, requests = world
    scheduler, rounds, refused = run(policy, config, requests)
    _, one_by_one, _ = run(policy, config, requests, one_by_one=True)
    assert comparable(rounds) == comparable(one_by_one)
    finished = [request for r in rounds for request, _ in r.finished]
    assert len(finished) == len(set(finished)) == refused.count(None)
    assert all(count == 0 for count in scheduler.blocks.pool.ref_count)
    # Work: what was scheduled is what had to be computed, plus what preemption lost, less what the cache gave.
    for _, request in requests:
        if request.request not in finished:
            continue
        scheduled = yielded = cached = discarded = computed = 0
        for r in rounds:
            # A victim's tokens of this round were never in the batch: what it loses was computed before.
            if any(row[1] == "preempt" and row[2] == request.request for row in r.decisions):
                discarded, computed = discarded + computed, 0
            for i in np.flatnonzero(r.batch.request == request.request).tolist():
                if r.batch.cached_tokens[i] >= 0:
                    cached += int(r.batch.cached_tokens[i])
                scheduled += int(r.batch.num_tokens[i])
                yielded += bool(r.batch.yields_token[i])
                computed = int(r.batch.start[i] + r.batch.num_tokens[i])
        assert scheduled == request.num_prompt_tokens + yielded - 1 - cached + discarded
        capped = config.max_model_len is not None and policy == "vllm"
        assert yielded == min(
            request.num_output_tokens,
            config.max_model_len - request.num_prompt_tokens if capped else request.num_output_tokens,
        )


@pytest.mark.parametrize(
    ("policy", "method"),
    [("nano", "_schedule_decode_one_by_one"), ("vllm", "_schedule_running_one_by_one"), ("vllm", "_wanted")],
)
def test_a_changed_loop_over_the_running_is_what_runs(policy: str, method: str) -> None:
    base = type(SCHEDULERS[policy].build(SchedulerConfig(num_blocks=64, block_size=4)))
    calls = []

    def counted(self: Any, *args: Any) -> Any:
        calls.append(method)
        return getattr(super(changed, self), method)(*args)

    changed: Any = type("Changed", (base,), {method: counted})
    decided = []
    for kind in (base, changed):
        scheduler = kind(SchedulerConfig(num_blocks=64, block_size=4))
        for i in range(3):
            ids = np.arange(30)
            assert scheduler.add(NewRequest(i, f"r{i}", 6, 24, lambda ids=ids: ids, forced=True)) is None
        rounds = []
        while scheduler.has_unfinished():
            rounds.append(scheduler.schedule())
            scheduler.update(rounds[-1], None)
        decided.append(comparable(rounds))
    assert decided[0] == decided[1]
    decodes = sum(bool(row[0][3] and row[0][3][0]) for row in decided[0])
    assert decodes >= 20 and len(calls) >= decodes


@settings(max_examples=100, deadline=None)
@given(worlds())
def test_the_log_can_be_left_out_without_changing_a_decision(
    world: tuple[str, SchedulerConfig, list[tuple[int, NewRequest]]],
) -> None:
    policy, config, requests = world
    scheduler = SCHEDULERS[policy].build(config, log_decisions=False)
    _, logged, _ = run(policy, config, requests)
    silent = []
    last = max(arrival for arrival, _ in requests)
    for number in range(3000):
        for arrival, request in requests:
            if arrival == number:
                scheduler.add(request)
        if not scheduler.has_unfinished():
            if number >= last:
                break
            continue
        round = scheduler.schedule()
        scheduler.update(round, None)
        silent.append(round)
    assert [r.batch.request.tolist() for r in silent] == [r.batch.request.tolist() for r in logged]
    assert [(r.num_preempted, r.num_evicted, r.free_blocks_end) for r in silent] == [
        (r.num_preempted, r.num_evicted, r.free_blocks_end) for r in logged
    ]
    assert not any(r.decisions or r.blocks for r in silent)


@pytest.mark.parametrize("policy", sorted(SCHEDULERS))
def test_a_waiting_request_that_was_not_looked_at_costs_at_most_300_bytes(policy: str) -> None:
    scheduler = SCHEDULERS[policy].build(SchedulerConfig(num_blocks=4096, block_size=16))
    make = partial(np.empty, dtype=np.int64)
    tracemalloc.start()
    for row in range(20_000):
        new = NewRequest(row, f"request-{row}", 1000 + row % 64, 500, LazyTokens(make, row), arrival_s=row / 7)
        assert scheduler.add(new) is None
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used / 20_000 < 300, used / 20_000
