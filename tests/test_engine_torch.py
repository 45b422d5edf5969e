"""The torch engine's edges: what it states and returns, the limits it refuses, and memory that does not suffice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engines.interface import Engine
from engines.model import memory as model_memory
from engines.model.config import PRESETS
from engines.model.load import load_model
from engines.torch_engine import engine as engine_module
from engines.torch_engine import memory
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.inputs import build_inputs
from engines.torch_engine.memory import estimate_forward_bytes, kv_bytes_per_token, max_kv_tokens
from engines.torch_engine.reference_attention import SHORTEST_IN_BUCKET, ReferenceAttention, slots_of_tables
from tests.engine_harness import PLAIN_DEVICES, VOCAB, PoisonedCache, Sequence, load_oracle, make_engine, random_ids
from traces.errors import BenchctlError

everywhere = pytest.mark.parametrize("device", PLAIN_DEVICES)


@everywhere
def test_a_round_returns_tokens_times_and_sizes(device: str) -> None:
    engine: Engine = make_engine("llama", device, block_size=16, max_model_len=128)
    limits = engine.limits
    assert (engine.name, limits.num_blocks, limits.block_size) == ("torch", 96, 16)
    assert (limits.max_model_len, limits.vocab_size) == (128, VOCAB)
    cache = PoisonedCache(engine)  # type: ignore[arg-type]
    result = engine.collect(
        engine.launch(cache.batch([(Sequence(0, random_ids(0, 9)), 9), (Sequence(1, random_ids(1, 5)), 3)]))
    )
    assert result.token_ids is not None and result.token_ids.dtype == np.int64 and result.token_ids.shape == (2,)
    assert result.mode == "eager" and result.padded_tokens == 12
    assert result.device_s is not None and 0 < result.device_s == result.duration_s and 0 < result.prepare_s < 10


@everywhere
def test_the_batch_may_change_once_launched(device: str) -> None:
    """Its arrays are live views of a scheduler's state, and the next round may be scheduled while the device works."""
    engine = make_engine("llama", device, block_size=16)
    cache = PoisonedCache(engine)
    seqs = [Sequence(0, random_ids(0, 40)), Sequence(1, random_ids(1, 20))]
    batch = cache.batch([(seq, 20) for seq in seqs])
    want = engine.collect(engine.launch(batch)).token_ids
    handle = engine.launch(batch)
    for array in (batch.start, batch.num_tokens, batch.num_blocks, *batch.token_ids):
        array[:] = 99
    for table in batch.block_tables:
        table.clear()
    assert np.array_equal(engine.collect(handle).token_ids, want)


@everywhere
def test_two_engines_of_different_block_sizes_share_a_model(device: str) -> None:
    model = load_oracle("qwen3", device)
    got = []
    for block_size in (16, 256):
        engine = TorchEngine(model, num_blocks=4, block_size=block_size)
        assert engine.model is model
        cache = PoisonedCache(engine)
        got.append(engine.collect(engine.launch(cache.batch([(Sequence(0, random_ids(0, 33)), 33)]))).token_ids)
    assert np.array_equal(*got)


def test_a_closed_engine_gives_its_cache_back() -> None:
    engine = make_engine("llama", "cpu", block_size=16)
    assert engine.k_cache.numel() == 2 * 96 * 16 * 2 * 8
    engine.close()
    assert engine.k_cache.numel() == engine.v_cache.numel() == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_blocks": 0}, "a pool of 0 blocks"),
        ({"block_size": 24}, "a block size of 24 is no multiple of 16\n  try: --block-size 16"),
        ({"block_size": 0}, "a block size of 0"),
        ({"max_model_len": 1025}, "max_model_len 1025 is outside 1 to 1024"),
        ({"max_model_len": 0}, "max_model_len 0"),
        ({"attention": "flash"}, "no attention backend is called 'flash'\n  try: use one of reference"),
        ({"temperature": -0.5}, "a temperature of -0.5"),
        ({"temperature": float("nan")}, "a temperature of nan"),
    ],
)
def test_limits_out_of_range_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BenchctlError) as refused:
        TorchEngine(load_oracle("llama", "cpu"), **{"num_blocks": 4, "block_size": 16, **options})
    assert words in str(refused.value)


def test_a_token_outside_the_vocabulary_is_refused_with_its_place() -> None:
    cache = PoisonedCache(make_engine("llama", "cpu", block_size=16))
    for bad in (VOCAB, -1):
        seq = Sequence(7, np.array([1, 2, 3, bad, 5]))
        with pytest.raises(BenchctlError, match=f"token id {bad} at position 3 of request 7: .* has {VOCAB}"):
            cache.step([(Sequence(6, random_ids(0, 3)), 3), (seq, 5)])


def test_inputs_of_a_mixed_batch() -> None:
    cache = PoisonedCache(make_engine("llama", "cpu", block_size=16))
    decode = Sequence(4, np.arange(100, 140), computed=16, table=[9, 3])
    chunk = Sequence(5, np.arange(50), computed=15, table=[7, 8])
    inputs = build_inputs(cache.batch([(decode, 1), (chunk, 3)], silent=frozenset({4})), 16, VOCAB)
    assert inputs.token_ids.tolist() == [116, 15, 16, 17]
    assert inputs.positions.tolist() == [16, 15, 16, 17]
    assert inputs.slot_mapping.tolist() == [3 * 16, 7 * 16 + 15, 8 * 16, 8 * 16 + 1]
    assert inputs.cu_seqlens_q.tolist() == [0, 1, 4] and inputs.context_lens.tolist() == [17, 18]
    assert inputs.block_tables.tolist() == [[9, 3], [7, 8]]
    assert (inputs.yield_rows.tolist(), inputs.yield_requests.tolist(), inputs.yield_positions.tolist()) == (
        [3],
        [5],
        [18],
    )


def test_slots_follow_the_block_table() -> None:
    tables = np.array([[2, 5, -1], [0, 1, 4]])
    assert slots_of_tables(tables, 4, 6).tolist() == [[8, 9, 10, 11, 20, 21], [0, 1, 2, 3, 4, 5]]


def test_decodes_of_similar_context_share_a_bucket() -> None:
    cache = PoisonedCache(make_engine("llama", "cpu", block_size=16))
    seqs = [Sequence(i, np.zeros(600, dtype=np.int64), computed=c) for i, c in enumerate((399, 99, 299, 9, 98, 380))]
    inputs = build_inputs(cache.batch([(seq, 1) for seq in seqs]), 16, VOCAB)
    attention = ReferenceAttention(cache.engine.k_cache, cache.engine.v_cache).prepare(inputs)
    assert attention.decode_rows is not None and attention.decode_rows.tolist() == [0, 5, 2, 1, 4, 3]
    buckets = [(bucket.begin, bucket.end, len(bucket.slots)) for bucket in attention.buckets]
    assert buckets == [(0, 3, 3 * 400), (3, 5, 2 * 100), (5, 6, 10)] and 300 >= SHORTEST_IN_BUCKET * 400


# -- memory


def test_kv_bytes_of_a_token_are_those_of_the_models_cards() -> None:
    assert kv_bytes_per_token(PRESETS["qwen3-0.6b"], torch.bfloat16) == 114_688
    assert kv_bytes_per_token(PRESETS["qwen3-8b"], torch.bfloat16) == 147_456
    engine = make_engine("qwen3", "cpu", block_size=16)
    stored = engine.k_cache.nbytes + engine.v_cache.nbytes
    assert stored == 96 * 16 * kv_bytes_per_token(engine.model.config, torch.float32)


def test_a_cache_too_large_names_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model("tiny", dtype="float32", device="cpu")
    assert kv_bytes_per_token(model.config, model.dtype) == 1024
    for module in (memory, engine_module):
        monkeypatch.setattr(module, "available_bytes", lambda device: 10 << 20)
    with pytest.raises(BenchctlError) as refused:
        TorchEngine(model, num_blocks=1 << 16, block_size=16)
    # 90 % of 10 MiB = 9216 tokens of 1 KiB, a multiple of 256.
    assert "65536 blocks of 16 tokens needs 1.00 GiB; cpu has 0.01 GiB free" in refused.value.what
    assert refused.value.fix == "--kv-cache-tokens 9216 (576 blocks) or less"
    assert TorchEngine(model, num_blocks=576, block_size=16).limits.num_blocks == 576


def test_a_round_too_large_for_memory_names_a_budget_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine("llama", "cpu", block_size=16)
    cache = PoisonedCache(engine)

    def estimate(num_tokens: int) -> int:
        return estimate_forward_bytes(
            engine.model.config,
            torch.float32,
            torch.device("cpu"),
            num_tokens=num_tokens,
            num_seqs=1,
            max_context=900,
        )

    for module in (memory, engine_module):
        monkeypatch.setattr(module, "available_bytes", lambda device: (estimate(512) + estimate(900)) // 2)
    with pytest.raises(BenchctlError) as refused:
        cache.step([(Sequence(0, random_ids(0, 900)), 900)])
    assert refused.value.exit_code == 1
    assert "out of memory in a round of 900 tokens and 1 sequences" in refused.value.what
    # Of a cache of 96 blocks of 16 too little is to be had: at least 256 MiB are asked of one.
    assert refused.value.fix == "--max-num-batched-tokens 512"


def test_torch_failing_to_allocate_in_a_round_is_the_same_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine("llama", "cpu", block_size=16)
    cache = PoisonedCache(engine)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(engine.model.__class__, "logits", fail)
    with pytest.raises(BenchctlError, match="out of memory in a round of 5 tokens"):
        cache.step([(Sequence(0, random_ids(0, 5)), 5)])


def test_the_estimate_of_a_pass_bounds_what_a_pass_allocates() -> None:
    """Largest sum of live allocations, by torch's profiler, for a prefill and for decodes."""
    model = load_model("tiny", dtype="float32", device="cpu")
    engine = TorchEngine(model, num_blocks=256, block_size=16, temperature=1.0)
    for start, count, n in ((0, 2000, 1), (1999, 1, 64), (1000, 500, 2)):
        ids, table = np.zeros(2000, dtype=np.int64), list(range(125))
        cache = PoisonedCache(engine)
        batch = cache.batch([(Sequence(i, ids, computed=start, table=table), count) for i in range(n)])
        with torch.profiler.profile(profile_memory=True) as profile:
            engine.collect(engine.launch(batch))
        live = peak = 0
        for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
            if event.name() == "[memory]":
                live += event.nbytes()
                peak = max(peak, live)
        estimate = estimate_forward_bytes(
            model.config, model.dtype, model.device, num_tokens=n * count, num_seqs=n, max_context=2000
        )
        assert 1 << 20 < peak <= estimate, (start, count, n, peak, estimate)


def test_kv_tokens_on_a_cpu_are_modest_and_bounded_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model("tiny", dtype="float32", device="cpu")
    assert max_kv_tokens(model) == memory.DEFAULT_CPU_KV_TOKENS
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2 * 1024 * 1000)
    assert max_kv_tokens(model) == 768  # half of it holds 1000 tokens of 1 KiB
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1000)
    with pytest.raises(BenchctlError, match="no room for 256 tokens"):
        max_kv_tokens(model)


@pytest.mark.gpu
def test_kv_tokens_on_a_card_fit_beside_the_worst_rounds() -> None:
    model = load_model("qwen3-0.6b", device="cuda")
    tokens = max_kv_tokens(model, gpu_memory_utilization=0.5, max_num_batched_tokens=8192, max_num_seqs=64)
    free, total = torch.cuda.mem_get_info()
    assert 0 < tokens * kv_bytes_per_token(model.config, model.dtype) < total * 0.5
    assert max_kv_tokens(model, gpu_memory_utilization=0.6, max_num_batched_tokens=8192, max_num_seqs=64) > tokens
    with pytest.raises(BenchctlError, match="no room"):
        max_kv_tokens(model, gpu_memory_utilization=0.01, max_num_batched_tokens=1024, max_num_seqs=8)


def test_available_memory_is_read_without_other_packages() -> None:
    available = model_memory.available_bytes(torch.device("cpu"))
    assert 1 << 20 < available < 1 << 50
