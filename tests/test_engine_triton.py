"""The Triton engine in the interpreter, on the CPU: small, since that is slow. On a card it runs the tests of the other engine."""

from __future__ import annotations

import pytest

from engines.interface import NewRequest, SchedulerConfig
from engines.schedulers.registry import SCHEDULERS
from engines.torch_engine import fused_forward, tuning
from engines.torch_engine.round_inputs import DeviceInputs, TableRows
from engines.torch_engine.triton_engine import TritonEngine
from tests.engine_harness import PoisonedCache, Sequence, assert_same_logits, load_oracle, make_oracle, random_ids

LIMITS = {"max_num_batched_tokens": 128, "max_num_seqs": 4, "max_model_len": 128, "return_logits": True}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_chunks_hits_and_decodes_equal_transformers(family: str) -> None:
    oracle = make_oracle(family)
    engine = TritonEngine(load_oracle(family, "cpu"), num_blocks=16, block_size=16, **LIMITS)
    engine._load_kernels(16)  # as on a card: it leaves nothing behind
    cache = PoisonedCache(engine)
    first, second = Sequence(0, random_ids(1, 60)), Sequence(1, random_ids(2, 40))
    second.ids[:32] = first.ids[:32]
    want = {0: oracle.logits(first.ids), 1: oracle.logits(second.ids)}
    got = cache.step([(first, 35)])
    assert_same_logits(got[0], want[0][34])
    cache.share(second, first, 2)
    # A chunk beside a decode: both kinds of tiles in one round.
    got = cache.step([(first, 1), (second, 7)])
    assert_same_logits(got[0], want[0][35])
    assert_same_logits(got[1], want[1][38])
    got = cache.step([(second, 1), (first, 1)])
    assert_same_logits(got[0], want[0][36])
    assert_same_logits(got[1], want[1][39])


def test_a_policy_drives_it_to_the_end_with_few_table_rows() -> None:
    engine = TritonEngine(load_oracle("qwen3", "cpu"), num_blocks=12, block_size=16, **LIMITS)
    engine.rows = TableRows(4, 12)  # fewer rows than requests: they are given up and sent anew
    scheduler = SCHEDULERS["vllm"].build(
        SchedulerConfig(num_blocks=12, block_size=16, max_num_seqs=3, max_num_batched_tokens=40)
    )
    oracle = make_oracle("qwen3")
    ids = [random_ids(10 + row, 24) for row in range(6)]
    for row in range(6):
        scheduler.add(NewRequest(row, f"r{row}", 21, 3, lambda row=row: ids[row]))
    seen = 0
    while scheduler.has_unfinished():
        round = scheduler.schedule()
        batch = round.batch
        handle = engine.launch(batch)
        for i, row in enumerate(batch.request[batch.yields_token].tolist()):
            at = int((batch.start + batch.num_tokens)[batch.yields_token][i]) - 1
            assert_same_logits(handle.logits[i], oracle.logits(ids[row][: at + 1])[at], (row, at))
            seen += 1
        result = engine.collect(handle)
        assert result.mode == "eager" and result.flops > 0 and result.bytes > 0
        scheduler.update(round, result.token_ids)
    assert seen == 18


def test_products_that_add_and_products_with_more_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rounds of thousands of tokens do, with few: products add to the residual stream, others run with rows to spare."""
    monkeypatch.setattr(fused_forward, "MANY_ROWS", 17)
    monkeypatch.setattr(tuning, "product_rows", lambda rows, n, k: rows + 5)
    oracle = make_oracle("qwen3")
    cache = PoisonedCache(TritonEngine(load_oracle("qwen3", "cpu"), num_blocks=16, block_size=16, **LIMITS))
    first, second = Sequence(0, random_ids(1, 60)), Sequence(1, random_ids(2, 40))
    want = {0: oracle.logits(first.ids), 1: oracle.logits(second.ids)}
    got = cache.step([(first, 35), (second, 20)])
    assert_same_logits(got[0], want[0][34])
    assert_same_logits(got[1], want[1][19])
    got = cache.step([(first, 1), (second, 18)])
    assert_same_logits(got[0], want[0][35])
    assert_same_logits(got[1], want[1][37])


@pytest.mark.parametrize("max_seqs", [1, 3, 40])
def test_every_captured_shape_fits_the_inputs_of_a_small_engine(max_seqs: int) -> None:
    engine = TritonEngine(
        load_oracle("qwen3", "cpu"), num_blocks=5, block_size=16, max_num_batched_tokens=3000, max_num_seqs=max_seqs
    )
    for shape in (shape for shapes in engine._graph_shapes() for shape in shapes):
        columns = DeviceInputs.of(shape, engine.inputs).columns
        assert shape.size <= len(engine.flights[0].inputs)
        assert all(len(columns[name]) == length for name, length in shape.columns().items() if name != "keys"), shape
