"""docs/validation/simulator.md comes out of the committed runs; the bundled profiles state what it says, and work by name."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import make_validation  # noqa: E402

from benchctl.calibrate import heat_of, predicted_device  # noqa: E402
from benchctl.calibrate_points import load_points, measured_points  # noqa: E402
from benchctl.held_out import copy_names, open_held_out, write_copy  # noqa: E402
from benchctl.profiles import BUNDLED, load_profile, save_profile  # noqa: E402
from benchctl.validate import held_out_error, validate  # noqa: E402
from tests.command_line import call, rows, write_trace  # noqa: E402
from traces.errors import BenchctlError  # noqa: E402

BUNDLED_NAMES = sorted(path.stem for path in BUNDLED.glob("*.json"))
HELD_OUT = make_validation.FOLDER / "held-out"


def test_the_page_says_of_every_round_what_the_committed_runs_give() -> None:
    text = make_validation.PAGE.read_text()
    found = make_validation.validations(end_to_end=False)
    assert len(found) == len(list(HELD_OUT.iterdir())) >= 15 and sum(len(run.device_s) for _, run, _ in found) > 60_000
    for _, run, v in found:
        assert make_validation.title(v) in text
        if not v.kinds:
            continue
        assert make_validation.round_row(v) in text
        for w in v.worst:
            assert f"| {w.round} | {w.kind} | {w.measured_s * 1e3:.3f} ms | {w.predicted_s * 1e3:.3f} ms |" in text
        assert (
            not v.fitted_on and run.manifest["started"][:16] > "2026-12-01T02:10"
        )  # another start than the profiles' runs


@pytest.mark.parametrize("name", ["qwen3-8b-offline-nano", "qwen3-0.6b-offline-vllm"])
def test_the_page_says_end_to_end_what_a_simulation_gives_now(name: str) -> None:
    text = make_validation.PAGE.read_text()
    ((_, run, v),) = make_validation.validations(only=[name])
    assert make_validation.end_to_end_row(v) in text
    assert "\n".join(make_validation.detail(run, v)).strip() in text


def test_profiles_state_the_errors_of_the_page() -> None:
    text = make_validation.PAGE.read_text()
    for name in BUNDLED_NAMES:
        held = load_profile(name).held_out
        assert held is not None
        assert f"{held.worst['99']:.1%}" in text and len(held.runs) == text.count(f"### {name.removeprefix('h200-')},")


def test_the_table_of_the_docs_is_that_of_the_page() -> None:
    page, docs = make_validation.PAGE.read_text(), (ROOT / "docs" / "simulator.md").read_text()
    lines = [
        line.strip("| ").split(" | ")
        for line in page.splitlines()
        if line.startswith(("| p50 |", "| p90 |", "| p99 |"))
    ]
    assert len(lines) == 3, lines
    for percentile, figures, median, within, largest in lines:
        said = f"| {percentile} | {figures} | {median} | {within.split()[0]} | {largest.split(':')[0]} |"
        assert said in docs, said


@pytest.mark.parametrize("name", BUNDLED_NAMES)
def test_a_bundled_profile_fits_the_designed_rounds_it_was_made_from(name: str, tmp_path: Path) -> None:
    profile = load_profile(name)
    file = tmp_path / "points.json"
    file.write_bytes(gzip.decompress((make_validation.FOLDER / f"points-{profile.model.name}.json.gz").read_bytes()))
    points = load_points(file)
    assert (points.device, points.model) == (profile.device, profile.model.name)
    for fit in profile.fits:
        m = measured_points(points, str(file), fit.block_size)
        predicted = predicted_device(profile.model, fit, m.features) + heat_of(profile.model, fit, m.features)
        error = np.abs(predicted / m.device_s - 1)
        for kind in ("decode", "mixed", "prefill"):
            assert np.median(error[m.kind == kind]) < 0.02, (fit.block_size, kind)
        assert np.percentile(error, 95) < 0.09


@pytest.mark.parametrize("name", BUNDLED_NAMES)
def test_a_bundled_profile_grows_with_what_a_round_holds(name: str) -> None:
    """Beyond what was measured, too: more sequences, more keys or more tokens never take less, but for the steps of padding."""
    from benchctl.calibrate_grid import Case, chunks, decodes
    from benchctl.calibrate_points import bare_batch
    from engines.simulated.cost import device_time
    from engines.simulated.features import features_of

    profile = load_profile(name)
    for fit in profile.fits:

        def seconds(case: Case, fit=fit) -> float:  # type: ignore[no-untyped-def]
            f = features_of(bare_batch(case), profile.graphs, fit.tile_tokens)
            return float(device_time(profile.model, fit, f, "prefill" if f.has_prefill else "decode"))

        for n in (1, 8, 64, 200, 512):
            grown = [seconds((decodes(n, context),)) for context in (16, 128, 1_024, 8_192, 65_536, 200_000)]
            assert grown == sorted(grown)
        by_size = [seconds((chunks(1, length),)) for length in (8, 128, 512, 1_024, 2_048, 8_192, 32_768, 65_536)]
        assert all(after > 0.98 * before for before, after in zip(by_size, by_size[1:], strict=False)), by_size
        assert by_size[-1] <= 4.05 * by_size[-2]  # twice the tokens: quadratic at most
        behind = [seconds((chunks(1, 512, context),)) for context in (0, 512, 4_096, 32_768, 131_072)]
        assert behind == sorted(behind)


def test_bundled_profiles_are_found_by_name_and_state_their_error(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = call(capfd, "profiles")
    assert answer.code == 0 and all(name in answer.out for name in BUNDLED_NAMES) and "on this profile" in answer.out
    trace = write_trace(tmp_path / "t.jsonl", rows((0.0, 100, 5), (0.01, 300, 20)))
    answer = call(
        capfd, "replay", trace, "--engine", "simulated", "--profile", "h200-qwen3-8b", "--out", tmp_path / "out"
    )
    assert answer.code == 0, answer.err
    for said in (answer.err, " ".join(answer.out.split()), (tmp_path / "out" / "report.html").read_text()):
        assert "at p99 on this profile" in said
    markdown = call(capfd, "report", tmp_path / "out" / "nano", "--format", "md")
    assert "at p99 on this profile" in markdown.out
    about = json.loads((tmp_path / "out" / "nano" / "manifest.json").read_text())["simulation"]
    assert about["error"]["held_out"]["runs"] == len(list(HELD_OUT.glob("qwen3-8b-*"))) and about["outside"] == 0
    answer = call(capfd, "replay", trace, "--engine", "simulated", "--profile", "h200-nobody")
    assert answer.code == 2 and "h200-qwen3-8b" in answer.err


def test_a_copy_gives_the_errors_that_the_run_gives(tmp_path: Path) -> None:
    source = HELD_OUT / "qwen3-8b-arrivals-20-nano"
    (held,) = open_held_out([str(source)])
    assert copy_names([held, held]) == ["qwen3-8b-arrivals-20-nano", "qwen3-8b-arrivals-20-nano-2"]
    write_copy(held, tmp_path / "again")
    (again,) = open_held_out([str(tmp_path)])
    profile = load_profile("h200-qwen3-8b")
    first, second = (validate(profile, h, None, end_to_end=False, worst=2) for h in (held, again))
    assert first.kinds == second.kinds and first.worst == second.worst and again.figures == held.figures
    (tmp_path / "again" / "rounds.parquet").write_bytes(b"no")
    with pytest.raises(BenchctlError, match="damaged"):
        open_held_out([str(tmp_path)])


def test_save_keeps_errors_of_hold_outs_only(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    save_profile(load_profile("h200-llama-3.1-8b"), file)
    answer = call(capfd, "validate", file, HELD_OUT / "qwen3-8b-offline-nano", "--save")
    assert answer.code == 2 and "the run's model is qwen3-8b" in answer.err
    answer = call(capfd, "validate", "h200-qwen3-8b", HELD_OUT / "qwen3-8b-offline-nano", "--save", "--no-end-to-end")
    assert answer.code == 2 and "--save" in answer.err
    profile = load_profile("h200-qwen3-8b")
    (held,) = open_held_out([str(HELD_OUT / "qwen3-8b-offline-nano")])
    with pytest.raises(BenchctlError, match="not simulated end to end"):
        held_out_error([validate(profile, held, None, end_to_end=False, worst=0)])
