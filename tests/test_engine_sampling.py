"""Drawn tokens: reproducible by (seed, request, position) alone, and distributed as the softmax says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engines.torch_engine import sampling
from engines.torch_engine.sampling import gumbel_noise, row_keys, sample
from tests.engine_harness import PLAIN_DEVICES, PoisonedCache, Sequence, make_engine, random_ids

everywhere = pytest.mark.parametrize("device", PLAIN_DEVICES)


def draw(logits: torch.Tensor, seed: int = 0, requests: list[int] | None = None, position: int = 10) -> list[int]:
    n = len(logits)
    ids = np.arange(n) if requests is None else np.array(requests)
    return sample(logits, 1.0, seed, ids, np.full(n, position)).tolist()


def test_keys_part_whatever_differs() -> None:
    grid = [(seed, r, p) for seed in (0, 1, -1) for r in range(40) for p in range(40)]
    keys = {int(row_keys(seed, np.array([r]), np.array([p]))[0]) for seed, r, p in grid}
    assert len(keys) == len(grid)


@everywhere
def test_noise_is_standard_gumbel_and_uncorrelated(device: str) -> None:
    keys = torch.from_numpy(row_keys(3, np.arange(200), np.arange(200))).to(device)
    noise = gumbel_noise(keys, 2048).double().cpu()
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)  # Euler's constant
    assert noise.var().item() == pytest.approx(np.pi**2 / 6, abs=0.02)
    flat = noise - noise.mean()
    for shifted in (flat.roll(1, 0), flat.roll(1, 1)):  # the next request, the next token
        assert abs((flat * shifted).mean() / flat.var()).item() < 0.01


@everywhere
def test_draws_follow_the_softmax(device: str) -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.2, 0.05])
    n = 20_000
    drawn = draw(probabilities.log().expand(n, 4).to(device))
    shares = np.bincount(drawn, minlength=4) / n
    # Four standard deviations of a share of one half: 4 * sqrt(0.25 / 20000) = 0.014.
    assert np.abs(shares - probabilities.numpy()).max() < 0.015, shares


@everywhere
def test_a_draw_is_the_same_in_any_company_and_in_parts(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(8, 500, generator=torch.Generator().manual_seed(0)).to(device)
    want = draw(logits)
    order = [5, 2, 7, 0]
    assert draw(logits[order], requests=order) == [want[i] for i in order]
    monkeypatch.setattr(sampling, "MAX_NOISE_VALUES", {"cpu": 1200, "cuda": 1200})  # two rows at a time
    assert draw(logits) == want
    assert draw(logits, seed=1) != want and draw(logits, position=11) != want


def test_temperature_flattens_and_zero_takes_the_largest() -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0]]).expand(4000, 3)
    requests, positions = np.arange(4000), np.zeros(4000, dtype=np.int64)
    shares = [
        (sample(logits, temperature, 0, requests, positions) == 2).float().mean().item()
        for temperature in (0.0, 0.5, 1.0, 4.0)
    ]
    want = [1.0, *(torch.softmax(logits[0] / t, 0)[2].item() for t in (0.5, 1.0, 4.0))]
    assert shares == pytest.approx(want, abs=0.03)


@everywhere
def test_the_engine_draws_by_request_and_position(device: str) -> None:
    """The same request yields the same tokens alone, in chunks, and in company."""

    def tokens(chunks: list[int], company: int, seed: int = 5) -> list[int]:
        engine = make_engine("qwen3", device, block_size=16, temperature=1.0, seed=seed)
        cache = PoisonedCache(engine)
        seq = Sequence(3, random_ids(0, 60))
        others = [Sequence(10 + i, random_ids(i, 60)) for i in range(company)]
        out = []
        for count in chunks:
            work = [(other, count) for other in others] + [(seq, count)]
            result = engine.collect(engine.launch(cache.batch(work)))
            for each, _ in work:
                each.computed += count
            assert result.token_ids is not None
            out.append(int(result.token_ids[-1]))
        return out

    alone = tokens([30] + [1] * 10, company=0)
    assert tokens([30] + [1] * 10, company=4) == alone
    assert tokens([13, 17] + [1] * 10, company=2)[1:] == alone
    assert tokens([30] + [1] * 10, company=0, seed=6) != alone
