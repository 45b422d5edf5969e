"""The fit finds what made the numbers, whatever disturbed some of them; calibrate and validate at the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from benchctl.calibrate_fit import nonnegative, robust
from benchctl.profiles import load_profile, save_profile
from engines.simulated.profile import Curve, dump_profile, parse_profile
from tests.command_line import call, rows, write_trace
from tests.simulated_profile import make_profile, pass_for_measured
from traces.errors import BenchctlError


def test_least_squares_keeps_coefficients_at_or_above_zero() -> None:
    a = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    assert nonnegative(a, a @ np.array([2.0, 3.0])) == pytest.approx([2.0, 3.0])
    # Falling values: the slope would be -1; without it the mean is best.
    assert nonnegative(a, np.array([3.0, 2.0, 1.0])) == pytest.approx([2.0, 0.0])


def test_a_tenth_of_wild_rounds_moves_nothing() -> None:
    rng = np.random.default_rng(0)
    a = np.stack([np.ones(400), rng.uniform(0, 10, 400)], axis=1)
    clean = a @ np.array([2.0, 0.5])
    wild = clean.copy()
    wild[::10] *= 30
    _, x = robust(a, wild, clean, np.full(400, 1 / 400), huber=0.05)
    assert x == pytest.approx([2.0, 0.5], rel=0.02)


def test_a_profile_survives_its_file() -> None:
    profile = make_profile(16, 256)
    assert parse_profile(dump_profile(profile), "p.json") == profile


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"{", "no profile"),
        (b"[]", "no profile"),
        (b'{"benchctl_profile": 99}', "is 99"),
        (b'{"benchctl_profile": 4}', "missing required field"),
        (dump_profile(make_profile()).replace(b'"bytes_per_s": 1', b'"bytes_per_s": -1'), "bytes_per_s is -1"),
        (
            dump_profile(make_profile()).replace(b'"per_longest_key_s": 5', b'"per_longest_key_s": -5'),
            "per_longest_key_s is -5",
        ),
        (dump_profile(make_profile()).replace(b"      512", b"      2"), "rest is no curve"),
    ],
)
def test_a_broken_profile_is_refused_in_words(raw: bytes, says: str) -> None:
    with pytest.raises(BenchctlError, match=says):
        parse_profile(raw, "p.json")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """trace.jsonl, true.json, and a run `measured` whose times are exactly true.json's, but for one round in 20."""
    from benchctl.cli import app

    place = tmp_path_factory.mktemp("simulated")
    rng = np.random.default_rng(1)
    at = np.cumsum(rng.exponential(0.012, 160))
    sizes = [(float(t), int(rng.integers(8, 900)), int(rng.integers(2, 40))) for t in at]
    trace = write_trace(place / "trace.jsonl", rows(*sizes))
    profile = make_profile(16)
    save_profile(profile, place / "true.json")
    argv = ["replay", trace, "--scheduler", "vllm", "--engine", "simulated", "--profile", place / "true.json", "--no-report",
            "--out", place / "out"]  # fmt: skip
    with pytest.raises(SystemExit) as end:
        app([str(a) for a in argv])
    assert end.value.code == 0
    pass_for_measured(place / "out" / "vllm", profile, hiccups=20)
    return place


def test_calibrate_recovers_what_made_the_run(capfd: pytest.CaptureFixture[str], world: Path) -> None:
    answer = call(capfd, "calibrate", world / "out" / "vllm", "-o", world / "found.json", "--force")
    assert answer.code == 0, answer.err
    assert "decode" in answer.out and "fitted range" in answer.out
    found = load_profile(str(world / "found.json"))
    assert (found.device, found.model.name, found.block_sizes, found.overlapped) == ("Card X", "tiny", (16,), True)
    fit = found.fits[0]
    assert {r.kind for r in fit.residuals} >= {"decode", "mixed"}
    assert all(r.p50 < 0.02 for r in fit.residuals), fit.residuals
    assert fit.host.launch_intercept_s == pytest.approx(1e-4, rel=0.05)
    assert fit.host.launch_per_token_s == pytest.approx(1e-6, rel=0.05)
    assert fit.prefill.per_chunk_key_s == pytest.approx(2e-6, rel=0.1)
    assert fit.prefill.per_longest_key_s == pytest.approx(5e-7, rel=0.3)


def test_validate_by_the_true_profile_finds_no_error(capfd: pytest.CaptureFixture[str], world: Path) -> None:
    answer = call(capfd, "validate", world / "true.json", world / "out" / "vllm", "--json")
    assert answer.code == 0, answer.err
    (result,) = json.loads(answer.out)
    assert not result["fitted_on"]
    assert all(kind["p50"] < 1e-9 for kind in result["kinds"])
    assert result["worst"][0]["measured_s"] == pytest.approx(10 * result["worst"][0]["predicted_s"])
    assert len(result["end_to_end"]) == 14
    assert all(abs(entry["error"]) < 1e-9 for entry in result["end_to_end"]), result["end_to_end"]
    assert any("equal to the measured run's" in note for note in result["notes"])


def test_validate_sees_a_profile_that_is_wrong(capfd: pytest.CaptureFixture[str], world: Path) -> None:
    from msgspec.structs import replace

    profile = make_profile(16)
    fit = profile.fits[0]
    slow = replace(fit, decode=replace(fit.decode, rest=Curve(at=(1,), value=(3e-3,))))
    save_profile(replace(profile, fits=(slow,)), world / "slow.json")
    answer = call(capfd, "validate", world / "slow.json", world / "out" / "vllm", "--json", "--no-end-to-end")
    (result,) = json.loads(answer.out)
    decode = next(kind for kind in result["kinds"] if kind["kind"] == "decode")
    assert decode["bias"] > 0.5 and decode["p50"] > 0.5
    assert result["end_to_end"] == []


def test_a_fitted_run_is_no_hold_out_and_is_named(capfd: pytest.CaptureFixture[str], world: Path) -> None:
    call(capfd, "calibrate", world / "out" / "vllm", "-o", world / "own.json", "--force")
    answer = call(capfd, "validate", world / "own.json", world / "out" / "vllm", "--no-end-to-end")
    assert answer.code == 0 and "no hold-out" in answer.out


def test_a_simulated_run_says_how_far_to_trust_it(capfd: pytest.CaptureFixture[str], world: Path) -> None:
    trace = write_trace(world / "many.jsonl", rows(*[(0.0, 20, 5)] * 12))
    argv = ["replay", trace, "--scheduler", "vllm", "--engine", "simulated", "--profile", world / "true.json", "--no-report",
            "--out", world / "many", "--force"]  # fmt: skip
    answer = call(capfd, *argv)
    assert answer.code == 0, answer.err
    assert "4 of 5 rounds (80.0%) lie outside" in answer.err
    assert "durations are modelled, not measured" in " ".join(answer.out.split())
    manifest = json.loads((world / "many" / "vllm" / "manifest.json").read_text())
    assert manifest["simulation"]["outside"] == 4 and manifest["model"] == "tiny" and manifest["engine"] == "simulated"
    assert manifest["overlapped"] is True


def test_the_same_simulation_twice_is_the_same(capfd: pytest.CaptureFixture[str], world: Path) -> None:
    digests = []
    for name in ("a", "b"):
        call(capfd, "replay", world / "trace.jsonl", "-s", "vllm", "--engine", "simulated", "--profile", world / "true.json",
             "--no-report", "--out", world / name, "--force")  # fmt: skip
        digests.append(json.loads((world / name / "vllm" / "manifest.json").read_text())["digest"])
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("replay {t} --engine simulated", "--profile FILE, made by benchctl calibrate"),
        ("replay {t} --engine null --profile {p}", "--profile is for --engine simulated, not null"),
        ("replay {t} --engine simulated --profile nobody", "no profile 'nobody'"),
        ("replay {t} --engine simulated --profile {t}", "no profile"),
        ("replay {t} -s nano --engine simulated --profile {p}", "was measured at block size 16; nano has 256"),
        ("replay {t} -s vllm --engine simulated --profile {p} --model qwen3-8b", "measured with tiny, not qwen3-8b"),
        ("replay {t} -s vllm --engine simulated --profile {p} --clock wall", "simulated rounds take no real time"),
        ("replay {t} -s vllm --engine simulated --profile {p} --outputs sampled", "chooses no tokens"),
        ("calibrate {r}", "no file is named"),
        ("calibrate {r} -o {p}", "exists"),
        ("calibrate {s} -o {w}/n.json", "has no measured times"),
        ("validate {p} {s}", "has no measured times"),
        ("validate {p} {r} --trace {w}/many.jsonl", "replayed another trace"),
    ],
)
def test_mistakes_are_one_clear_line(capfd: pytest.CaptureFixture[str], world: Path, argv: str, says: str) -> None:
    write_trace(world / "many.jsonl", rows((0.0, 20, 5)))
    if not (world / "sim").exists():
        call(capfd, "replay", world / "many.jsonl", "-s", "vllm", "--engine", "simulated", "--profile", world / "true.json",
             "--no-report", "--out", world / "sim")  # fmt: skip
    places = {"t": world / "trace.jsonl", "p": world / "true.json", "r": world / "out" / "vllm", "w": world,
              "s": world / "sim" / "vllm"}  # fmt: skip
    answer = call(capfd, *[word.format(**places) for word in argv.split()])
    assert answer.code == 2, (answer.out, answer.err)
    assert says in answer.err and "Traceback" not in answer.err


def test_designed_rounds_that_ran_hot_do_not_slow_the_simulation() -> None:
    """The same rounds, in a run and repeated on end: their products are a tenth slower so between 512 and 2,048 tokens."""
    from dataclasses import fields, is_dataclass

    from benchctl.calibrate import heat_of
    from benchctl.calibrate_fit import Rates, cells_of, concat, fit_prefill, joined
    from benchctl.calibrate_grid import chunks, decodes
    from benchctl.calibrate_points import bare_batch
    from engines.simulated.cost import device_time, on_curve
    from engines.simulated.features import Features, features_of
    from tests.simulated_profile import MODEL

    profile = make_profile()
    fit = profile.fits[0]
    names = [f.name for f in fields(Features)] if is_dataclass(Features) else list(Features.__struct_fields__)
    cases = [
        (chunks(1, n, c),) for n in (16, 100, 200, 384, 512, 768, 1_024, 1_536, 2_048, 4_096, 8_192) for c in (0, 700)
    ]
    cases += [(decodes(n, 300), chunks(1, 600)) for n in (1, 8, 40, 200)]
    rounds = [features_of(bare_batch(case), profile.graphs, fit.tile_tokens) for case in cases]
    f = Features(*(np.array([getattr(r, name) for r in rounds]) for name in names))
    cool = np.asarray(device_time(MODEL, fit, f, "prefill"))
    heat = Curve(at=(256.0, 512.0, 2_048.0, 4_096.0), value=(0.0, 0.1, 0.1, 0.0))
    hot = cool + heat_of(MODEL, replace(fit, prefill=replace(fit.prefill, heat=heat)), f)
    cells = joined([cells_of(concat([f] * 3), np.tile(cool, 3)), cells_of(f, hot, repeated=True)])
    found, _ = fit_prefill(MODEL, cells, Rates(fit.bytes_per_s, fit.flops_per_s), fit.tile_tokens)
    assert on_curve(found.heat, 1_024.0) == pytest.approx(0.1, abs=0.06) and on_curve(found.heat, 64.0) == 0
    predicted = np.asarray(device_time(MODEL, replace(fit, prefill=found), f, "prefill"))
    assert np.median(np.abs(predicted / cool - 1)) < 0.01 and np.abs(predicted / cool - 1).max() < 0.06
