"""The engine without a model: what a round costs, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest

from engines.interface import EngineLimits, ScheduledBatch
from engines.null_engine import NullEngine
from traces.errors import BenchctlError


def make_batch(*chunks: tuple[int, int]) -> ScheduledBatch:
    """A batch of (start, num_tokens) chunks; tables and ids are never looked at by this engine."""
    n = len(chunks)
    start, num_tokens = np.array(chunks, dtype=np.int64).reshape(n, 2).T
    return ScheduledBatch(
        request=np.arange(n),
        start=start.copy(),
        num_tokens=num_tokens.copy(),
        is_decode=num_tokens == 1,
        yields_token=np.ones(n, dtype=bool),
        cached_tokens=np.full(n, -1),
        num_blocks=np.ones(n, dtype=np.int64),
        block_tables=[],
        token_ids=[],
    )


def duration_of(engine: NullEngine, *chunks: tuple[int, int]) -> float:
    duration = engine.collect(engine.launch(make_batch(*chunks))).duration_s
    assert duration is not None
    return duration


def test_a_round_costs_its_intercept_its_tokens_and_its_context() -> None:
    # 1000 a round, 10 a token, 1 an attended token. A chunk of 3 from position 4 attends to 5 + 6 + 7 = 18 tokens; a decode
    # at position 9 to 10.
    engine = NullEngine(EngineLimits(num_blocks=8, block_size=1), (1000.0, 10.0, 1.0))
    assert duration_of(engine, (4, 3), (9, 1)) == 1000 + 40 + 28
    assert duration_of(engine) == 1000


def test_a_prompt_in_chunks_has_the_context_of_the_whole() -> None:
    engine = NullEngine(EngineLimits(num_blocks=8, block_size=16), (0.0, 0.0, 1.0))
    whole = duration_of(engine, (0, 1000))
    assert whole == sum(range(1, 1001))
    assert duration_of(engine, (0, 333)) + duration_of(engine, (333, 1)) + duration_of(engine, (334, 666)) == whole


def test_default_cost_of_one_decode() -> None:
    engine = NullEngine(EngineLimits(num_blocks=8, block_size=16))
    assert duration_of(engine, (999, 1)) == pytest.approx(5e-3 + 20e-6 + 1000 * 2e-9, rel=1e-12)


def test_it_chooses_no_token_and_says_its_mode() -> None:
    engine = NullEngine(EngineLimits(num_blocks=1, block_size=1))
    result = engine.collect(engine.launch(make_batch((0, 7), (3, 1))))
    assert (result.token_ids, result.device_s, result.mode, result.padded_tokens) == (None, None, "null", 8)
    assert (engine.limits.vocab_size, engine.limits.max_model_len) == (None, None)


@pytest.mark.parametrize(
    ("limits", "cost", "words"),
    [
        (EngineLimits(0, 16), (0.0, 0.0, 0.0), "--num-blocks"),
        (EngineLimits(8, 0), (0.0, 0.0, 0.0), "--block-size"),
        (EngineLimits(8, 16, max_model_len=0), (0.0, 0.0, 0.0), "--max-model-len"),
        (EngineLimits(8, 16), (0.0, -1e-6, 0.0), "--round-cost"),
        (EngineLimits(8, 16), (0.0, float("nan"), 0.0), "--round-cost"),
    ],
)
def test_limits_and_costs_out_of_range_are_refused(
    limits: EngineLimits, cost: tuple[float, float, float], words: str
) -> None:
    with pytest.raises(BenchctlError) as refused:
        NullEngine(limits, cost)
    assert words in str(refused.value)


def test_a_round_of_512_decodes_takes_microseconds() -> None:
    engine = NullEngine(EngineLimits(num_blocks=8, block_size=16))
    batch = make_batch(*[(1000 + i, 1) for i in range(512)])
    best = float("inf")
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(20):
            engine.collect(engine.launch(batch))
        best = min(best, (time.perf_counter() - began) / 20)
    # Measured 7 us on a 2-core machine; the bound only catches a per-sequence loop (hundreds of microseconds).
    assert best < 100e-6, best


def test_it_loads_no_torch() -> None:
    code = "import sys, engines.null_engine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
