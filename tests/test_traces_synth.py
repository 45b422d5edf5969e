"""Made traces: their statistics lie within the bounds that each shape states, and the same seed gives the same bytes."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from traces.arrival_process import ArrivalProcess
from traces.errors import BenchctlError
from traces.info import TraceInfo, describe
from traces.likeness import shape_like
from traces.load import open_trace
from traces.quantiles import draw_pair, fit, table
from traces.request import Request
from traces.shapes import SHAPES
from traces.synthesis import PrefixGroups, PrefixTree, SynthOptions, synthesize, with_arrivals

# Requests enough for the stated bounds; fewer where tokens have to be made for the cache.
NUM = {"sharegpt": 2500, "mooncake-agents": 2000, "long-context": 2000, "rag": 1500}


def figure(info: TraceInfo, name: str) -> float:
    side, _, which = name.partition(" ")
    if name in ("rate", "cv"):
        return float(info.arrivals[name])
    if name == "token hit":
        assert info.prefix is not None
        return info.prefix.token_rate
    if name == "turns mean":
        return float(info.sessions["turns_mean"])
    if name == "single turn":
        return float(info.sessions["single_turn_share"])
    return info.lengths[side][which]


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_a_made_trace_is_like_its_target(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traces.prefix_curve.MAX_CURVE_BLOCKS", 1)  # the curve has its own tests
    shape = SHAPES[name]
    synthesize(shape, shape.arrivals, SynthOptions(num_requests=NUM.get(name, 12_000), seed=7), tmp_path / "t.jsonl")
    info = describe(open_trace(tmp_path / "t.jsonl", strict=True))
    for what, (target, bound) in shape.target.items():
        assert figure(info, what) == pytest.approx(target, rel=bound), what


def test_the_same_seed_gives_the_same_bytes_and_seeds_are_split_by_purpose(tmp_path: Path) -> None:
    shape = SHAPES["azure-conv"]

    def made(name: str, process: ArrivalProcess = shape.arrivals, **options: object) -> list[Request]:
        synthesize(shape, process, SynthOptions(num_requests=50, **options), tmp_path / name)  # type: ignore[arg-type]
        return list(open_trace(tmp_path / name).requests())

    one = made("a.jsonl", seed=4)
    made("b.jsonl", seed=4)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    faster = made("c.jsonl", with_arrivals(shape.arrivals, rate=50.0), seed=4, priorities=((0, 0.5), (9, 0.5)))
    assert [(r.input_length, r.output_length) for r in faster] == [(r.input_length, r.output_length) for r in one]
    assert {r.priority for r in faster} == {0, 9} and faster[-1].arrival_s != one[-1].arrival_s
    assert [r.input_length for r in made("d.jsonl", seed=5)] != [r.input_length for r in one]


@pytest.mark.parametrize(
    ("gap", "shape", "cv"),
    [("poisson", 1.0, 1.0), ("gamma", 0.25, 2.0), ("weibull", 0.5, 5**0.5), ("constant", 1.0, 0.0)],
)
def test_gaps_have_the_rate_and_variation_of_their_process(gap: str, shape: float, cv: float) -> None:
    times = ArrivalProcess(4.0, gap=gap, shape=shape).times(random.Random(1))
    gaps = np.diff([next(times) for _ in range(60_000)])
    assert gaps.mean() == pytest.approx(0.25, rel=0.04) and gaps.std() / gaps.mean() == pytest.approx(
        cv, rel=0.08, abs=1e-6
    )


def counts(process: ArrivalProcess, until: float, width: float) -> list[int]:
    out = [0] * round(until / width)
    for time in process.times(random.Random(2)):
        if time >= until:
            return out
        out[int(time // width)] += 1
    return out


def test_the_course_of_the_rate_is_followed() -> None:
    ramp = counts(ArrivalProcess(20.0, course="ramp", rate_from=0.0, period_s=1000), 1500, 250)
    assert ramp == pytest.approx([625, 1875, 3125, 4375, 5000, 5000], rel=0.1)
    day = counts(ArrivalProcess(10.0, course="diurnal", amplitude=0.5, period_s=1000), 1000, 500)
    # Over half a day the sine adds amplitude x 2 / pi of the mean.
    assert day == pytest.approx([5000 * (1 + 1 / np.pi), 5000 * (1 - 1 / np.pi)], rel=0.06)
    pulse = counts(ArrivalProcess(5.0, course="onoff", on_s=100, off_s=300), 800, 100)
    assert pulse == pytest.approx([500, 0, 0, 0, 500, 0, 0, 0], rel=0.15)


def test_prefix_groups_are_vllms_and_sglangs(tmp_path: Path) -> None:
    kind = PrefixGroups(num_groups=5, per_group=4, prefix_len=64, suffix_len=16, output_len=8)
    synthesize(kind, ArrivalProcess(1.0), SynthOptions(num_requests=20), tmp_path / "t.jsonl")
    requests = list(open_trace(tmp_path / "t.jsonl").requests())
    groups = Counter(r.segments[0].id for r in requests if r.segments)
    assert set(groups.values()) == {4} and len(groups) == 5
    assert {(r.input_length, r.output_length) for r in requests} == {(80, 8)}
    assert [r.segments for r in requests] != sorted((r.segments for r in requests), key=str)  # shuffled
    use = describe(open_trace(tmp_path / "t.jsonl")).prefix
    assert use is not None and use.tokens_hit == 15 * 64


def test_a_tree_of_prefixes_shares_by_depth(tmp_path: Path) -> None:
    synthesize(
        PrefixTree(depth=2, branches=2, node_len=16, suffix_len=16),
        ArrivalProcess(1.0),
        SynthOptions(num_requests=100),
        tmp_path / "t.jsonl",
    )
    requests = list(open_trace(tmp_path / "t.jsonl").requests())
    assert {r.segments[1].id for r in requests if r.segments} == {"root.0", "root.1"}
    use = describe(open_trace(tmp_path / "t.jsonl")).prefix
    assert use is not None and use.tokens_hit == 98 * 32 + 16  # each leaf's first request hits the root at most


def test_a_likeness_has_the_statistics_of_its_model(tmp_path: Path) -> None:
    shape = SHAPES["azure-code"]
    synthesize(shape, shape.arrivals, SynthOptions(num_requests=3000, seed=1), tmp_path / "a.jsonl")
    like = shape_like(open_trace(tmp_path / "a.jsonl"))
    synthesize(like, like.arrivals, SynthOptions(num_requests=3000, seed=2), tmp_path / "b.jsonl")
    one, two = (describe(open_trace(tmp_path / name)) for name in ("a.jsonl", "b.jsonl"))
    for side in ("input", "output"):
        assert two.lengths[side]["p50"] == pytest.approx(one.lengths[side]["p50"], rel=0.1)
        assert two.lengths[side]["mean"] == pytest.approx(one.lengths[side]["mean"], rel=0.12)
    assert two.arrivals["rate"] == pytest.approx(one.arrivals["rate"], rel=0.4)
    conversations = shape_like(open_trace("traces/sharegpt.jsonl"))
    synthesize(conversations, conversations.arrivals, SynthOptions(num_requests=600), tmp_path / "c.jsonl")
    assert describe(open_trace(tmp_path / "c.jsonl")).sessions["turns_mean"] == pytest.approx(4.9, rel=0.25)


def test_tables_draw_what_they_say_and_keep_spikes() -> None:
    spiked = table((0, 1), (50, 10), (90, 10), (100, 20))
    rng = random.Random(3)
    values = [spiked.draw(rng) for _ in range(20_000)]
    assert sum(value == 10 for value in values) / 20_000 == pytest.approx(0.4, abs=0.02)
    assert np.mean(values) == pytest.approx(spiked.mean(), rel=0.02) and spiked.mean() == pytest.approx(
        0.5 * 5.5 + 0.4 * 10 + 0.1 * 15
    )
    observed = fit([1] * 30 + [5] * 70)
    assert (observed.at(0.1), observed.at(0.9)) == (1, 5)
    pairs = [draw_pair(rng, table((0, 0), (100, 1)), table((0, 0), (100, 1)), 0.6) for _ in range(5000)]
    assert np.corrcoef(*zip(*pairs, strict=True))[0, 1] == pytest.approx(0.6, abs=0.04)


def test_what_cannot_be_made_is_refused_with_its_flag(tmp_path: Path) -> None:
    shape = SHAPES["azure-conv"]
    with pytest.raises(BenchctlError, match="--max-context|fit into 1 tokens"):
        synthesize(shape, shape.arrivals, SynthOptions(max_context=1), tmp_path / "t.jsonl")
    with pytest.raises(BenchctlError, match="no gaps of its own"):
        synthesize(shape, with_arrivals(shape.arrivals, gap="empirical"), SynthOptions(), tmp_path / "t.jsonl")
    with pytest.raises(BenchctlError, match="--amplitude is 1"):
        synthesize(
            shape, with_arrivals(shape.arrivals, course="diurnal", amplitude=1.0), SynthOptions(), tmp_path / "t.jsonl"
        )
    assert not (tmp_path / "t.jsonl").exists()
