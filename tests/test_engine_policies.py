"""Both policies drive the engine in tight memory, and every sampled position's logits equal transformers'.

A block is NaN from the moment at which its content can no longer be asked for. Which slots hold computed KV is kept beside
the scheduler, by what was fed alone: vLLM's priority policy may hit blocks that never were computed (ghosts, as the real one
does). Requests that did are excluded by name, and under every other policy there may be none.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from engines.interface import Int64Array, NewRequest, Round, SchedulerConfig
from engines.schedulers.registry import SCHEDULERS
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.inputs import build_inputs
from tests.engine_harness import DEVICES, FAMILIES, MAX_LEN, assert_same_logits, make_engine, make_oracle, random_ids

everywhere = pytest.mark.parametrize("device", DEVICES)


@dataclass
class KnownSlots:
    """Which slots hold KV that was computed from computed KV."""

    computed: np.ndarray  # [num_blocks * block_size]
    ghosts: set[int] = field(default_factory=set)  # requests whose context holds a slot that was not

    def feed(self, round: Round, block_size: int, vocab_size: int) -> None:
        for _, block, event, _, _ in round.blocks:
            if event == "allocate":
                self.computed[block * block_size : (block + 1) * block_size] = False
        batch = round.batch
        inputs = build_inputs(batch, block_size, vocab_size)
        # Two passes: a sequence may read what another computes in the same round, and be wrong if that one is.
        self.computed[inputs.slot_mapping] = True
        for _ in range(batch.num_seqs):
            tainted = False
            for i in range(batch.num_seqs):
                fed = inputs.slot_mapping[inputs.cu_seqlens_q[i] : inputs.cu_seqlens_q[i + 1]]
                table = np.array(batch.block_tables[i])
                before = np.arange(int(batch.start[i]))
                read = table[before // block_size] * block_size + before % block_size
                if not self.computed[read].all():
                    self.ghosts.add(int(batch.request[i]))
                    tainted |= bool(self.computed[fed].any())
                    self.computed[fed] = False
            if not tainted:
                break


@dataclass
class Campaign:
    """What happened over the runs of one test, so that it can say that the hard cases came up."""

    counts: Counter[str] = field(default_factory=Counter)
    ghosts: set[tuple[int, int]] = field(default_factory=set)


def run(
    policy: str,
    engine: TorchEngine,
    config: SchedulerConfig,
    arrivals: list[tuple[int, NewRequest]],
    want: dict[int, torch.Tensor] | None,
    campaign: Campaign,
    seed: int = 0,
) -> dict[int, list[int]]:
    """Run to the end; compares logits with `want` (request -> [tokens, vocab]) where given. -> the model's own tokens."""
    scheduler = SCHEDULERS[policy].build(config)
    block_size = config.block_size
    known = KnownSlots(np.zeros(config.num_blocks * block_size, dtype=bool))
    chosen: dict[int, list[int]] = {}
    preempted: set[int] = set()
    for number in range(10_000):
        for due, request in arrivals:
            if due == number:
                assert scheduler.add(request) is None
        if not scheduler.has_unfinished():
            if all(due <= number for due, _ in arrivals):
                break
            continue
        # Free and not to be found by any lookup: nobody can ask for this content again.
        poison(engine, sorted(set(scheduler.free_list()) - set(scheduler.hashed_blocks())))
        round = scheduler.schedule()
        poison(engine, sorted({block for _, block, event, _, _ in round.blocks if event == "allocate"}))
        batch = round.batch
        assert batch.num_seqs, "an empty round with someone waiting"
        known.feed(round, block_size, engine.model.config.vocab_size)
        handle = engine.launch(batch)
        result = engine.collect(handle)
        assert handle.logits is not None and result.token_ids is not None
        yielding = np.flatnonzero(batch.yields_token)
        assert len(yielding) == len(result.token_ids)
        for i, logits, token in zip(yielding.tolist(), handle.logits.cpu(), result.token_ids.tolist(), strict=True):
            request, position = int(batch.request[i]), int(batch.start[i] + batch.num_tokens[i]) - 1
            chosen.setdefault(request, []).append(token)
            if want is not None and request not in known.ghosts:
                assert_same_logits(logits, want[request][position], (policy, number, request, position))
                campaign.counts["compared"] += 1
        resumed = [row[2] for row in round.decisions if row[1] == "resume"]
        preempted |= {row[2] for row in round.decisions if row[1] == "preempt"}
        assert set(resumed) <= preempted
        cached = dict(zip(batch.request.tolist(), batch.cached_tokens.tolist(), strict=True))
        campaign.counts["preempted"] += round.num_preempted
        campaign.counts["hits"] += sum(tokens > 0 for tokens in cached.values())
        campaign.counts["resumed with hits"] += sum(cached[request] > 0 for request in resumed if request in cached)
        campaign.counts["chunks"] += int((~batch.yields_token).sum())
        campaign.counts["mixed"] += bool(batch.is_decode.any() and not batch.is_decode.all())
        scheduler.update(round, result.token_ids)
    assert not scheduler.has_unfinished()
    campaign.ghosts |= {(seed, request) for request in known.ghosts}
    return chosen


def poison(engine: TorchEngine, blocks: list[int]) -> None:
    engine.k_cache[:, blocks] = float("nan")
    engine.v_cache[:, blocks] = float("nan")


def random_trace(seed: int, block_size: int, *, forced: bool = True) -> list[tuple[int, NewRequest]]:
    """Ten requests that arrive over 12 rounds and share prefixes from a few families; each fits the pool alone."""
    rng = np.random.default_rng(seed)
    longest = 5 * block_size if block_size == 16 else 3 * block_size
    prefixes = [random_ids(1000 + seed * 3 + k, longest) for k in range(3)]
    arrivals = []
    for row in range(10):
        prompt, output = int(rng.integers(1, longest)), int(rng.integers(1, 25))
        if block_size == 256 and row % 2:  # so long that the output needs a block more
            prompt = int(rng.integers(1, 3)) * block_size - int(rng.integers(0, output))
        shared = min(prompt, int(rng.integers(0, longest)))
        ids = random_ids(5000 + seed * 100 + row, prompt + output)
        ids[:shared] = prefixes[int(rng.integers(3))][:shared]
        request = NewRequest(
            row,
            f"r{row}",
            prompt,
            output,
            lambda ids=ids, n=prompt + output if forced else prompt: ids[:n].copy(),
            arrival_s=float(row),
            priority=int(rng.integers(0, 3)),
            forced=forced,
        )
        arrivals.append((int(rng.integers(0, 12)), request))
    return sorted(arrivals, key=lambda arrival: arrival[0])


def tight_config(policy: str, block_size: int, **knobs: object) -> SchedulerConfig:
    usable = 13 if block_size == 16 else 5
    return SchedulerConfig(
        num_blocks=usable + SCHEDULERS[policy].null_blocks,
        block_size=block_size,
        max_num_seqs=6,
        max_num_batched_tokens=48 if block_size == 16 else 300,
        max_model_len=MAX_LEN,
        **knobs,  # type: ignore[arg-type]
    )


def ids_of(request: NewRequest) -> Int64Array:
    return request.make_token_ids()


@everywhere
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("policy", ["nano", "vllm"])
def test_logits_equal_transformers_in_tight_memory(policy: str, block_size: int, family: str, device: str) -> None:
    oracle, campaign = make_oracle(family), Campaign()
    config = tight_config(policy, block_size)
    for seed in range(3):
        arrivals = random_trace(seed, block_size)
        engine = make_engine(family, device, block_size=block_size, num_blocks=config.num_blocks)
        want = {request.request: oracle.logits(ids_of(request)) for _, request in arrivals}
        run(policy, engine, config, arrivals, want, campaign, seed)
    assert not campaign.ghosts
    wanted = ["preempted", "hits", "resumed with hits", "chunks"] + (["mixed"] if policy == "vllm" else [])
    assert all(campaign.counts[what] for what in wanted), campaign.counts
    outputs = sum(request.num_output_tokens for seed in range(3) for _, request in random_trace(seed, block_size))
    assert campaign.counts["compared"] == outputs


@everywhere
def test_logits_equal_transformers_under_the_priority_policy(device: str) -> None:
    oracle, campaign = make_oracle("qwen3"), Campaign()
    config = tight_config("vllm", 16, scheduling_policy="priority")
    for seed in range(4):
        arrivals = random_trace(seed, 16)
        engine = make_engine("qwen3", device, block_size=16, num_blocks=config.num_blocks)
        want = {request.request: oracle.logits(ids_of(request)) for _, request in arrivals}
        run("vllm", engine, config, arrivals, want, campaign, seed)
    assert not campaign.ghosts
    assert campaign.counts["preempted"] and campaign.counts["compared"] > 300, campaign.counts


@everywhere
def test_a_request_that_hit_a_ghost_is_left_out_by_name(device: str) -> None:
    """Request 0 is scheduled over [160, 192) and loses its blocks in that same round; block 10 stays findable, uncomputed."""
    oracle, campaign = make_oracle("qwen3"), Campaign()
    config = SchedulerConfig(
        num_blocks=15,
        block_size=16,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=MAX_LEN,
        long_prefill_token_threshold=32,
        scheduling_policy="priority",
    )
    arrivals, want = [], {}
    for row, (due, prompt, output, priority) in enumerate([(0, 200, 4, 9), (1, 30, 6, 1)]):
        ids = random_ids(90 + row, prompt + output)
        new = NewRequest(row, f"r{row}", prompt, output, lambda ids=ids: ids, arrival_s=row / 10, priority=priority)
        arrivals.append((due, new))
        want[row] = oracle.logits(ids)
    engine = make_engine("qwen3", device, block_size=16, num_blocks=15)
    run("vllm", engine, config, arrivals, want, campaign)
    assert campaign.ghosts == {(0, 0)}
    assert campaign.counts["compared"] == 6  # every output of request 1


@everywhere
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", ["nano", "vllm"])
def test_sampled_outputs_equal_transformers_generate(policy: str, family: str, device: str) -> None:
    """Outputs are the model's own, so what a preempted request recomputes is what the model said."""
    oracle, campaign = make_oracle(family), Campaign()
    config = tight_config(policy, 16)
    arrivals = random_trace(3, 16, forced=False)
    engine = make_engine(family, device, block_size=16, num_blocks=config.num_blocks)
    chosen = run(policy, engine, config, arrivals, None, campaign)
    for _, request in arrivals:
        assert chosen[request.request] == oracle.generate(ids_of(request), request.num_output_tokens), request.id
    assert campaign.counts["preempted"] and campaign.counts["hits"], campaign.counts
