"""The simulated engine's formula, checked by hand; its padding against the engine that it stands for; the overlapped clock."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from benchctl.simulated_clock import OverlappedClock
from engines.interface import EngineLimits, ScheduledBatch
from engines.simulated.cost import after_time, device_time, issue_time, on_curve
from engines.simulated.engine import LaunchCost, SimulatedEngine
from engines.simulated.features import Features, features_of, graph_sizes, head_rows, padded, tile_tokens
from engines.simulated.profile import Bucket, Curve, Graphs
from tests.simulated_profile import MODEL, make_fit, make_profile


def batch(*rows: tuple[int, int, bool, int]) -> ScheduledBatch:
    """(start, num_tokens, is_decode, cached tokens or -1) of each sequence; all yield a token."""
    start, num, decode, cached = (np.array(column) for column in zip(*rows, strict=True))
    n = len(rows)
    return ScheduledBatch(
        request=np.arange(n), start=start, num_tokens=num, is_decode=decode, yields_token=np.ones(n, dtype=bool),
        cached_tokens=cached, num_blocks=np.ones(n, dtype=np.int64), block_tables=[[0]] * n, token_ids=[start] * n,
    )  # fmt: skip


DECODES = batch((9, 1, True, -1), (19, 1, True, -1), (29, 1, True, -1))
MIXED = batch((99, 1, True, -1), (16, 4, False, 16))


def test_features_of_decodes() -> None:
    f = features_of(DECODES, graph_sizes(512, 16384))
    assert (f.has_prefill, f.num_seqs, f.num_tokens, f.prefill_tokens) == (False, 3, 3, 0)
    assert f.context_tokens == f.context_pairs == 10 + 20 + 30
    assert (f.padded_tokens, f.padded_seqs) == (4, 4)
    assert (f.chunk_tiles, f.own_keys, f.older_keys, f.block_keys, f.chunk_keys, f.known_tokens) == (0, 0, 0, 0, 0, 0)
    assert (f.single_context, f.single_keys) == (60, 30)


def test_features_of_a_mixed_round() -> None:
    f = features_of(MIXED, graph_sizes(512, 16384))
    assert (f.has_prefill, f.num_seqs, f.num_tokens, f.prefill_tokens, f.num_yields) == (True, 2, 5, 4, 2)
    assert f.context_tokens == 100 + 20
    assert f.context_pairs == 100 + (17 + 18 + 19 + 20)
    assert (f.chunk_tiles, f.own_keys, f.older_keys, f.block_keys, f.chunk_keys) == (1, 4, 16, 0, 20)
    assert (f.single_context, f.single_keys) == (100, 100)
    assert f.known_tokens == 20  # the admitted request's, its 16 cached ones included
    assert (f.padded_tokens, f.padded_seqs) == (64, 64)  # the graph computes the head for all that it has room for


def test_tiles_walk_to_their_own_last_token() -> None:
    f = features_of(batch((100, 40, False, 100), (0, 16, False, 0), (7, 1, True, -1)), Graphs(), 16)
    # Tiles of 16, 16 and 8 tokens behind 100, and one of 16.
    assert f.chunk_tiles == 4
    # 4,000 pairs with older keys, 820 + 136 with own ones, and no graph: all are read through the block tables.
    assert (f.own_keys, f.older_keys, f.block_keys) == (0, 0, (116 + 132 + 140) + 16)
    f = features_of(batch((10, 40, False, 10), (0, 16, False, 0), (7, 1, True, -1)), Graphs(), 16)
    assert (f.own_keys, f.older_keys, f.block_keys) == ((16 + 32 + 40) + 16, 3 * 10, 0)
    f = features_of(batch((100, 40, False, 100), (0, 16, False, 0), (7, 1, True, -1)), graph_sizes(512, 16384), 16)
    assert (f.own_keys, f.older_keys, f.block_keys) == ((16 + 32 + 40) + 16, 3 * 100, 0)
    f = features_of(batch((100, 40, False, 100), (0, 16, False, 0), (7, 1, True, -1)), Graphs(), 16)
    assert (f.chunk_keys, f.single_context, f.single_keys) == (140, 8, 8)
    assert (f.padded_tokens, f.padded_seqs) == (57, 3)


def test_a_round_is_its_roofline_and_the_fitted_rest() -> None:
    engine = SimulatedEngine(EngineLimits(64, 16), make_profile(16))
    layer = 128 * (2 * 128 + 2 * 64) + 3 * 128 * 256  # q, o, k, v and the gated MLP of `tiny`
    matrices = MODEL.matrix_parameters
    assert 2 * layer <= matrices < 2 * layer + 2000  # two layers; norms beside them
    num_bytes = 4 * (matrices + 2048 * 128) + 4 * 128 * 3 + (2 * 2 * 2 * 32 * 4) * (60 + 3)
    result = engine.launch(DECODES)
    assert result.bytes == num_bytes
    assert result.flops == 2 * matrices * 4 + 2 * 2048 * 128 * 4 + 4 * 2 * 4 * 32 * 60
    cost = engine.pop_cost()
    assert cost is not None
    head = 2048 * 128
    products = max(4 * matrices / 1e12, 2 * matrices * 4 / 1e14) + max(4 * head / 1e12, 2 * head * 4 / 1e14)
    # 60 keys of 10 ns hide behind 30 of 100 ns, but for one half.
    assert cost.device_s == pytest.approx(products + 1.3e-3 + 30 * 1e-7 + 60 * 1e-8 / 2)
    assert result.duration_s == pytest.approx(cost.device_s + 1e-4 + 5e-5 + 2e-4)
    assert result.device_s is None and result.mode == "simulated" and result.token_ids is None
    assert engine.pop_cost() is None

    engine.launch(MIXED)
    cost = engine.pop_cost()
    assert cost is not None
    products = max(4 * matrices / 1e12, 2 * matrices * 64 / 1e14) + max(4 * head / 1e12, 2 * head * 64 / 1e14)
    assert cost.device_s == pytest.approx(products + 2e-3 + 64e-6 + 20 * 2e-6 + 100 * 5e-7)
    assert cost.launch_s == pytest.approx(1e-4 + 4 * 1e-6)


def test_a_bucket_that_was_measured_has_a_factor() -> None:
    from msgspec.structs import replace

    profile = make_profile(16)
    bucket = Bucket(family="decode", padded_tokens=4, factor=1.5, rounds=100)
    plain, known = (
        SimulatedEngine(EngineLimits(64, 16), p)
        for p in (profile, replace(profile, fits=(replace(make_fit(), buckets=(bucket,)),)))
    )
    for engine in (plain, known):
        engine.launch(DECODES)
    a, b = plain.pop_cost(), known.pop_cost()
    assert a is not None and b is not None and b.device_s == pytest.approx(1.5 * a.device_s)


def test_rounds_outside_the_fitted_range_are_counted_with_a_margin_of_a_tenth() -> None:
    engine = SimulatedEngine(EngineLimits(64, 16), make_profile(16))
    engine.launch(batch(*[(9, 1, True, -1)] * 4))
    assert engine.account.outside == 0
    engine.launch(batch(*[(9, 1, True, -1)] * 5))
    engine.launch(batch((0, 4300, False, 0)))
    assert (engine.account.rounds, engine.account.outside) == (3, 1)
    assert engine.account.beyond == {("decode", "num_seqs"): [1, 5, 5]}


def test_more_work_never_costs_less() -> None:
    engine = SimulatedEngine(EngineLimits(64, 16), make_profile(16))
    seconds = []
    for n in (1, 2, 3, 5, 17, 129, 512):
        engine.launch(batch(*[(1000, 1, True, -1)] * n))
        cost = engine.pop_cost()
        assert cost is not None
        seconds.append(cost.device_s)
    assert seconds == sorted(seconds)


@pytest.mark.parametrize(("seats", "budget"), [(512, 16384), (256, 2048), (8, 100), (3, 64)])
def test_graph_sizes_are_those_that_the_triton_engine_captures(seats: int, budget: int) -> None:
    triton_engine = pytest.importorskip("engines.torch_engine.triton_engine")
    me = SimpleNamespace(max_seqs=min(seats, budget), max_tokens=budget, _most_tiles=lambda tokens, seqs: 0)
    decode, chunks = triton_engine.TritonEngine._graph_shapes(me)
    found = graph_sizes(seats, budget)
    assert found.decode == tuple(shape.num_tokens for shape in decode)
    assert found.prefill == tuple(sorted({shape.num_tokens for shape in chunks}))
    for num_seqs in (1, seats // 2, seats):
        for size in found.prefill:
            least = min(
                (shape.num_seqs for shape in chunks if shape.num_tokens == size and shape.num_seqs >= num_seqs),
                default=None,
            )
            assert least is None or least == head_rows(found, num_seqs, size)
    assert padded(found, True, min(seats, budget), min(seats, budget)) in found.prefill


@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "size"), [(16, 8, 128, 2), (32, 8, 128, 2), (8, 8, 80, 2), (4, 2, 32, 4)]
)
def test_tiles_are_those_of_the_kernel(heads: int, kv_heads: int, head_dim: int, size: int, block_size: int) -> None:
    tuning = pytest.importorskip("engines.torch_engine.tuning")
    import torch

    dtype = torch.float32 if size == 4 else torch.bfloat16
    config = tuning.own_chunk_attention(heads, kv_heads, head_dim, dtype)
    config = config or tuning.chunk_attention(heads, kv_heads, head_dim, block_size, dtype)
    assert tile_tokens(heads, kv_heads, head_dim, size, block_size) == config.block_m // (heads // kv_heads)


def test_one_formula_for_one_round_and_for_many() -> None:
    profile = make_profile(16)
    rng = np.random.default_rng(0)
    for family in ("decode", "prefill"):
        batches = []
        for _ in range(40):
            n = int(rng.integers(1, 600))
            start = rng.integers(0, 5000, n)
            num = np.ones(n, dtype=np.int64)
            if family == "prefill":
                num[: int(rng.integers(1, 9))] = rng.integers(1, 3000)
            batches.append(batch(*zip(start, num, num == 1, np.full(n, -1), strict=True)))
            if family == "prefill":
                batches[-1].is_decode[0] = False
        single = [features_of(b, profile.graphs, 16) for b in batches]
        many = Features(*(np.array([getattr(f, name) for f in single]) for name in Features.__slots__))
        one_by_one = [device_time(MODEL, profile.fits[0], f, family) for f in single]
        assert device_time(MODEL, profile.fits[0], many, family) == pytest.approx(one_by_one, rel=1e-12)


def test_curves_end_level_or_go_on() -> None:
    curve = Curve(at=(2, 4), value=(10, 30))
    for x, level, on in ((1, 10, 10), (2, 10, 10), (3, 20, 20), (4, 30, 30), (6, 30, 50)):
        assert on_curve(curve, x) == on_curve(curve, np.array([x]))[0] == level
        assert on_curve(curve, x, grows=True) == on_curve(curve, np.array([x]), grows=True)[0] == on
    # Never down below what was measured.
    assert on_curve(Curve(at=(2, 4), value=(30, 10)), 100, grows=True) == 10


def test_padding_goes_to_the_next_size_and_stops_where_there_is_none() -> None:
    graphs = graph_sizes(512, 16384)
    assert [padded(graphs, False, n, n) for n in (1, 3, 9, 128, 129, 512)] == [1, 4, 16, 128, 160, 512]
    assert [padded(graphs, True, n, 1) for n in (5, 65, 2048, 2049, 2561)] == [64, 128, 2048, 2304, 2561]
    assert (
        padded(graphs, True, 500, 100, tiles=100, tokens_per_tile=128) == 500
    )  # 100 short chunks: no graph has room for them
    assert padded(graphs, True, 500, 30, tiles=20, tokens_per_tile=64) == 512
    assert padded(graphs, True, 500, 30, tiles=26, tokens_per_tile=64) == 640
    assert padded(graphs, True, 300, 257) == 384  # the second graph of that size, with room for all seats
    assert padded(graphs, True, 600, 513) == 600  # more sequences than any graph with prefill holds
    assert [head_rows(graphs, n, 384) for n in (256, 257)] == [256, 384]
    assert head_rows(graphs, np.array([256, 257]), np.array([1024, 1024])).tolist() == [256, 512]
    assert padded(Graphs(), False, 3, 3) == 3


# -- the clock


def test_device_and_host_work_side_by_side() -> None:
    costs = [LaunchCost(1.0, 4.0, 0.5, 0.0, 0.0)] * 3
    clock = OverlappedClock(lambda: costs.pop())
    assert clock.start_round() == 0.0
    clock.launched()  # round 1: launched at 1, on the device until 5; host busy until 1.5
    assert clock.start_round() == 1.5
    clock.launched()  # round 2: launched at 2.5, begins at 5, ends at 9
    assert clock.landed(1) == (5.0, 5.0)
    assert clock.start_round() == 5.0
    clock.launched()  # round 3: launched at 6, begins at 9
    assert clock.landed(2) == (9.0, 9.0)
    assert clock.landed(3) == (13.0, 13.0)
    assert clock.round == 4


def test_a_slow_host_leaves_the_device_idle() -> None:
    costs = [LaunchCost(3.0, 1.0, 1.0, 0.0, 0.0)] * 3
    clock = OverlappedClock(lambda: costs.pop())
    clock.launched()  # launched at 3, done at 4; host busy until 4
    clock.launched()  # launched at 7, done at 8; host busy until 8
    assert clock.landed(1) == (8.0, 8.0)  # seen only when the host looks
    clock.launched()  # launched at 11: rounds follow each other at the host's 4 seconds
    assert clock.landed(2) == (12.0, 12.0)


def test_a_sleep_costs_the_way_back_and_gaps_are_added_between_rounds() -> None:
    costs = [LaunchCost(1.0, 4.0, 0.0, 0.25, 2.0)] * 2
    clock = OverlappedClock(lambda: costs.pop(), arrive_s=0.5)
    clock.idle(10.0)
    assert clock.start_round() == 10.5
    clock.launched()  # launched at 11.5, woken at 13.5, done at 17.5
    clock.launched()  # 17.5 + 0.25 + 4
    assert clock.landed(1)[0] == 17.5
    assert clock.landed(2)[0] == 21.75
    clock.idle(3.0)
    assert clock.now() == 21.75


def test_an_empty_round_takes_no_time() -> None:
    clock = OverlappedClock(lambda: None)
    clock.launched()
    assert clock.landed(1) == (0.0, 0.0)


def test_a_round_without_a_graph_takes_at_least_its_launches_and_keeps_the_host_busy() -> None:
    profile = make_profile()
    fit = profile.fits[0]
    host = replace(fit.host, issue_s=0.05, issue_beyond_tokens=2_048, issue_beyond_seqs=256)
    slow = replace(fit, host=host)
    few = features_of(batch((0, 100, False, 0)), profile.graphs)
    many = features_of(batch((0, 2_100, False, 0)), profile.graphs)
    assert issue_time(host, few) == 0 and issue_time(host, many) == 0.05
    assert device_time(MODEL, slow, few, "prefill") == device_time(MODEL, fit, few, "prefill") < 0.05
    assert device_time(MODEL, fit, many, "prefill") < device_time(MODEL, slow, many, "prefill") == 0.05
    assert after_time(host, many) == pytest.approx(after_time(fit.host, many) + 0.05)
    decodes = features_of(batch((2_999, 1, True, -1)), profile.graphs)
    assert issue_time(host, decodes) == 0
