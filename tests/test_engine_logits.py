"""The engine's logits equal transformers' on the whole sequence, however a scheduler cuts, shares and repeats the work.

Blocks are NaN until computed and again when freed, so nothing stale can pass. Float32; every position that yields a token
is compared.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.engine_harness import (
    DEVICES,
    FAMILIES,
    PoisonedCache,
    Sequence,
    assert_same_logits,
    make_engine,
    make_oracle,
    random_ids,
)

everywhere = pytest.mark.parametrize("device", DEVICES)
every_family = pytest.mark.parametrize("family", FAMILIES)
both_block_sizes = pytest.mark.parametrize("block_size", [16, 256])


def test_the_random_models_are_far_from_each_familys_simplest_case() -> None:
    """Else a missing bias, norm or scaling would pass below."""
    qwen2 = make_oracle("qwen2").reference.model.layers[0].self_attn
    assert qwen2.q_proj.bias.abs().max() > 0.3
    qwen3 = make_oracle("qwen3").reference.model.layers[0].self_attn
    assert (qwen3.q_norm.weight - qwen3.k_norm.weight).abs().max() > 0.3
    inv_freq = make_oracle("llama").reference.model.rotary_emb.inv_freq
    plain = 10_000.0 ** -(torch.arange(0, 8, 2) / 8)
    ratio = (plain / inv_freq).tolist()
    assert min(ratio) == pytest.approx(1) and max(ratio) == pytest.approx(8) and any(1.01 < r < 7.9 for r in ratio), (
        ratio
    )


@everywhere
@every_family
@both_block_sizes
def test_chunks_that_begin_and_end_anywhere(family: str, device: str, block_size: int) -> None:
    oracle = make_oracle(family)
    cache = PoisonedCache(make_engine(family, device, block_size=block_size))
    seq = Sequence(0, random_ids(1, 300))
    want = oracle.logits(seq.ids)
    for count in (1, 2, 13, 16, 17, 1, 1, 31, 100, 74, 1, 43):
        got = cache.step([(seq, count)])
        assert_same_logits(got[0], want[seq.computed - 1], seq.computed)
    assert seq.computed == 300


@everywhere
@every_family
@both_block_sizes
def test_prefills_chunks_and_decodes_in_one_batch(family: str, device: str, block_size: int) -> None:
    oracle = make_oracle(family)
    cache = PoisonedCache(make_engine(family, device, block_size=block_size))
    seqs = [Sequence(i, random_ids(10 + i, length)) for i, length in enumerate((40, 270, 100, 3, 64, 255, 258))]
    want = [oracle.logits(seq.ids) for seq in seqs]
    rng = np.random.default_rng(0)
    rounds = 0
    while any(seq.computed < len(seq.ids) for seq in seqs):
        work = []
        for i in rng.permutation(len(seqs)).tolist():
            left = len(seqs[i].ids) - seqs[i].computed
            if left and rng.random() < 0.7:
                work.append((seqs[i], min(left, 1 if rng.random() < 0.5 else int(rng.integers(1, 90)))))
        if not work:
            continue
        for request, logits in cache.step(work).items():
            assert_same_logits(logits, want[request][seqs[request].computed - 1], (request, seqs[request].computed))
        rounds += 1
    assert rounds > 8


@everywhere
@every_family
@both_block_sizes
def test_prefix_hits_read_the_blocks_of_another(family: str, device: str, block_size: int) -> None:
    oracle = make_oracle(family)
    cache = PoisonedCache(make_engine(family, device, block_size=block_size))
    prefix = random_ids(2, 256)
    owner = Sequence(0, np.concatenate([prefix, random_ids(3, 30)]))
    cache.step([(owner, len(owner.ids))])
    for request, hit in ((1, 256 // block_size), (2, 1)):
        guest = Sequence(request, np.concatenate([prefix, random_ids(3 + request, 50)]))
        cache.share(guest, owner, hit)
        got = cache.step([(guest, len(guest.ids) - guest.computed - 1)])
        want = oracle.logits(guest.ids)
        assert_same_logits(got[request], want[-2])
        assert_same_logits(cache.step([(guest, 1)])[request], want[-1])
        cache.release(owner) if request == 2 else None
    # The owner is gone; its shared blocks stay valid for the last guest.
    again = Sequence(3, guest.ids.copy())
    cache.share(again, guest, 1)
    assert_same_logits(cache.step([(again, len(again.ids) - again.computed)])[3], want[-1])


@everywhere
@every_family
@both_block_sizes
@pytest.mark.parametrize("guest_first", [False, True])
def test_a_hit_on_blocks_that_the_same_pass_computes(
    family: str, device: str, block_size: int, guest_first: bool
) -> None:
    """Also with the reader in front of the writer: K and V of a layer are all stored before any is read."""
    oracle = make_oracle(family)
    cache = PoisonedCache(make_engine(family, device, block_size=block_size))
    prefix = random_ids(4, 256)
    owner = Sequence(0, np.concatenate([prefix, random_ids(5, 20)]))
    guest = Sequence(1, np.concatenate([prefix, random_ids(6, 33)]))
    single = Sequence(
        2, np.concatenate([prefix, random_ids(7, 1)])
    )  # a hit that leaves one token: attended as a decode
    cache.grow(owner, len(owner.ids))
    cache.share(guest, owner, 256 // block_size)
    cache.share(single, owner, 256 // block_size)
    work = [(owner, len(owner.ids)), (guest, 33), (single, 1)]
    got = cache.step(work[::-1] if guest_first else work)
    for seq in (owner, guest, single):
        assert_same_logits(got[seq.request], oracle.logits(seq.ids)[-1], seq.request)


@everywhere
@every_family
@both_block_sizes
def test_a_preempted_request_recomputes_and_goes_on(family: str, device: str, block_size: int) -> None:
    oracle = make_oracle(family)
    cache = PoisonedCache(make_engine(family, device, block_size=block_size, num_blocks=1024 // block_size))
    victim = Sequence(0, random_ids(8, 290))
    other = Sequence(1, random_ids(9, 200))
    want = [oracle.logits(victim.ids), oracle.logits(other.ids)]

    def step(*work: tuple[Sequence, int]) -> None:
        for request, logits in cache.step(list(work)).items():
            seq = (victim, other)[request]
            assert_same_logits(logits, want[request][seq.computed - 1], (request, seq.computed))

    step((victim, 270), (other, 100))
    step((victim, 1), (other, 1))
    cache.release(victim)
    step((other, 1))
    step((victim, 150), (other, 1))  # resumed in chunks, in blocks that others have held
    step((victim, 125), (other, 1))
    step((victim, 1), (other, 1))
    assert victim.computed == 276


@everywhere
@every_family
def test_a_resumed_request_hits_a_part_of_what_it_had(family: str, device: str) -> None:
    oracle = make_oracle(family)
    cache = PoisonedCache(make_engine(family, device, block_size=16))
    victim = Sequence(0, random_ids(11, 150))
    cache.step([(victim, 120)])
    keeper = Sequence(1, victim.ids[:100].copy())  # holds the first five blocks on while the victim is away
    cache.share(keeper, victim, 5)
    cache.release(victim)
    cache.share(victim, keeper, 5)
    got = cache.step([(victim, 41), (keeper, 20)])
    want = oracle.logits(victim.ids)
    assert_same_logits(got[0], want[120])
    assert_same_logits(got[1], want[99])
    assert_same_logits(cache.step([(victim, 29)])[0], want[149])


@everywhere
def test_the_order_of_a_batch_changes_no_logit(device: str) -> None:
    want: dict[int, torch.Tensor] = {}
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1], [3, 4, 1, 0, 2]):
        cache = PoisonedCache(make_engine("qwen3", device, block_size=16))
        seqs = [Sequence(i, random_ids(20 + i, 60 + 9 * i)) for i in range(5)]
        cache.step([(seq, 40) for seq in seqs[:3]])
        counts = {0: 1, 1: 1, 2: 7, 3: 30, 4: 1}
        got = cache.step([(seqs[i], counts[i]) for i in order])
        for request, logits in got.items():
            want.setdefault(request, logits)
            assert_same_logits(logits, want[request], (order, request))
    oracle = make_oracle("qwen3")
    for request, logits in want.items():
        seq = Sequence(request, random_ids(20 + request, 60 + 9 * request))
        position = {0: 40, 1: 40, 2: 46, 3: 29, 4: 0}[request]
        assert_same_logits(logits, oracle.logits(seq.ids)[position], request)


@everywhere
def test_only_sequences_that_yield_have_logits(device: str) -> None:
    oracle = make_oracle("llama")
    cache = PoisonedCache(make_engine("llama", device, block_size=16))
    seqs = [Sequence(i, random_ids(30 + i, 50)) for i in range(4)]
    got = cache.step([(seq, 20 + seq.request) for seq in seqs], silent=frozenset({0, 2}))
    assert list(got) == [1, 3]
    for request in got:
        assert_same_logits(got[request], oracle.logits(seqs[request].ids)[19 + request])
    assert cache.step([(seq, 1) for seq in seqs], silent=frozenset(range(4))) == {}


@everywhere
@every_family
@both_block_sizes
def test_greedy_generation_equals_transformers_generate(family: str, device: str, block_size: int) -> None:
    oracle = make_oracle(family)
    engine = make_engine(family, device, block_size=block_size)
    cache = PoisonedCache(engine)
    prompts = [random_ids(40 + i, length) for i, length in enumerate((5, 47, 130))]
    num_tokens = 40
    seqs = [Sequence(i, np.concatenate([prompt, np.full(num_tokens, -1)])) for i, prompt in enumerate(prompts)]
    work = [(seq, len(prompt)) for seq, prompt in zip(seqs, prompts, strict=True)]
    for _ in range(num_tokens):
        for request, logits in cache.step(work).items():
            seq = seqs[request]
            seq.ids[seq.computed] = int(logits.argmax())
        work = [(seq, 1) for seq in seqs]
    for seq, prompt in zip(seqs, prompts, strict=True):
        assert seq.ids[len(prompt) :].tolist() == oracle.generate(prompt, num_tokens), seq.request


@everywhere
def test_tiles_and_buckets_that_memory_forces_change_no_logit(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits so small that every chunk goes in tiles of 16 queries and every decode alone."""
    from engines.torch_engine import reference_attention

    monkeypatch.setattr(reference_attention, "MAX_SCORES", {"cpu": 1, "cuda": 1})
    monkeypatch.setattr(reference_attention, "MAX_GATHERED_VALUES", {"cpu": 1, "cuda": 1})
    oracle = make_oracle("qwen2")
    cache = PoisonedCache(make_engine("qwen2", device, block_size=16))
    seqs = [Sequence(i, random_ids(50 + i, 120)) for i in range(3)]
    want = [oracle.logits(seq.ids) for seq in seqs]
    for counts in ((30, 50, 70), (1, 1, 45), (51, 1, 1)):
        for request, logits in cache.step(list(zip(seqs, counts, strict=True))).items():
            assert_same_logits(logits, want[request][seqs[request].computed - 1], (request, counts))
