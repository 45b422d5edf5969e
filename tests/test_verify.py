"""`replay --verify` and `check-engine`: what is right passes, what is wrong is found, and the choice is repeatable."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchctl.check_engine import make_case
from engines.torch_engine import reference_attention
from engines.torch_engine.verify import KINDS, RequestCheck, Verification, Watch
from reports.run import open_run
from reports.verified import KINDS as KIND_LABELS
from reports.verified import verified
from tests.command_line import Answer, call
from tests.engine_harness import PoisonedCache, Sequence, make_engine, random_ids
from tests.laws import assert_laws

Capture = pytest.CaptureFixture[str]


def replay(capfd: Capture, out: Path, *flags: object) -> Answer:
    """Tight memory: requests are preempted, hit prefixes and are cut in chunks."""
    return call(
        capfd, "replay", "traces/shared-system-prompt.jsonl", "--engine", "torch", "--model", "tiny", "--num-prompts", 24,
        "--no-report", "--kv-cache-tokens", 2048, "--block-size", 16, "--max-num-seqs", 16, "--max-num-batched-tokens", 1024,
        "--clock", "rounds", "--round-seconds", 0.05, "--out", out, *flags,
    )  # fmt: skip


@pytest.mark.parametrize(("dtype", "temperature"), [("float32", 0.0), ("float32", 0.7), ("bfloat16", 0.0)])
def test_a_right_run_passes_and_says_how_far_off_it_was(
    capfd: Capture, tmp_path: Path, dtype: str, temperature: float
) -> None:
    answer = replay(capfd, tmp_path, "--verify", 6, "--dtype", dtype, "--temperature", temperature, "--json")
    assert answer.code == 0, answer.err
    assert answer.err.count("verify  ") == 2 and "positions against float32: relative error of logits max" in answer.err
    summaries = json.loads(answer.out)["runs"]
    from reports.page import render  # not where rounds run on a device: it needs plotly

    page = render([open_run(tmp_path / "nano"), open_run(tmp_path / "vllm")])
    assert "<summary>Verified against float32</summary>" in page and "‖l − r‖ / ‖r‖" in page
    kinds = set()
    for summary in summaries:
        found = summary["benchctl"]["verify"]
        run = assert_laws(Path(summary["benchctl"]["path"]))
        assert run.manifest["verify"] == found
        told = {label: values[0] for label, values in verified([run]).rows}  # type: ignore[union-attr]
        assert told["within tolerance"] == "yes" and told["n, positions"] == f"{found['positions']:,}"
        assert told["requests"] == "6" and sum(int(told[label]) for label in KIND_LABELS.values()) == 6
        assert set(KIND_LABELS) == set(KINDS) and told["relative error, largest"] == f"{found['max_error']:.2g}"
        assert all(f">{text}<" in page for text in told.values())
        assert found["passed"] and len(found["requests"]) == 6 and found["dtype"] == dtype
        assert 0 < found["mean_error"] <= found["max_error"] <= 2 * found["tolerance"]
        assert found["positions"] == sum(r["positions"] for r in found["requests"]) > 50
        assert found["agreement_beyond_rounding"] == 1
        if dtype == "float32":
            assert found["agreement"] == 1 and found["max_error"] < 1e-5
        kinds |= {r["kind"] for r in found["requests"]}
    assert {"resumed", "cached"} <= kinds <= set(KINDS)


def test_verifying_changes_no_decision_and_chooses_the_same_requests_again(capfd: Capture, tmp_path: Path) -> None:
    manifests = []
    for name, flags in (
        ("a", ("--verify", 4)),
        ("b", ("--verify", 4)),
        ("none", ()),
        ("seed", ("--verify", 4, "--seed", 9)),
    ):
        assert replay(capfd, tmp_path / name, "-s", "vllm", *flags).code == 0
        manifests.append(json.loads((tmp_path / name / "vllm" / "manifest.json").read_text()))
    a, b, none, seed = manifests
    assert a["digest"] == b["digest"] == none["digest"] == seed["digest"]
    assert a["verify"] == b["verify"] and "verify" not in none
    chosen = [[r["request"] for r in m["verify"]["requests"]] for m in (a, seed)]
    assert chosen[0] != chosen[1]


@pytest.mark.parametrize("what", ["decodes", "chunks"])
def test_a_wrong_engine_fails_with_the_request_and_the_figures(
    capfd: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Scores one per cent too large, in decodes or in chunks that have tokens before them."""
    if what == "decodes":
        plain = reference_attention.BatchAttention._decode

        def decode(self: Any, layer: int, q: Any) -> Any:
            return plain(self, layer, q * 1.01)

        monkeypatch.setattr(reference_attention.BatchAttention, "_decode", decode)
    else:
        scaled = reference_attention.BatchAttention._prefill

        def prefill(self: Any, layer: int, chunk: Any, q: Any, out: Any) -> None:
            scaled(self, layer, chunk, q * (1.01 if chunk.start else 1.0), out)

        monkeypatch.setattr(reference_attention.BatchAttention, "_prefill", prefill)
    answer = replay(capfd, tmp_path, "-s", "vllm", "--verify", 6)
    assert answer.code == 1
    assert "Error: vllm: the engine's logits are not the reference's: relative error up to" in answer.err
    assert "of the trace (" in answer.err and "(tolerance 0.0001, twice that at one position)" in answer.err
    manifest = json.loads((tmp_path / "vllm" / "manifest.json").read_text())
    assert manifest["status"] == "failed" and not manifest["verify"]["passed"]
    assert manifest["verify"]["max_error"] > 1e-4


def test_a_watch_keeps_a_bounded_number_and_what_the_engine_gave() -> None:
    engine = make_engine("qwen3", "cpu", block_size=16)
    watch = Watch(2, seed=3, vocab_size=211)
    engine.watch = watch
    cache = PoisonedCache(engine)
    seqs = [Sequence(i, random_ids(i, 40)) for i in range(12)]
    seen: dict[tuple[int, int], torch.Tensor] = {}
    for seq in seqs:
        for count in (20, 1, 1) if seq.request % 2 else (17, 5, 1):
            batch = cache.batch([(seq, count)], frozenset({seq.request}) if count == 17 else frozenset())
            handle: Any = engine.launch(batch)
            engine.collect(handle)
            seq.computed += count
            if count != 17:
                seen[seq.request, seq.computed] = handle.logits[0]
        cache.release(seq)
    chosen = watch.choose()
    assert len(chosen) == 2 and {kind for _, kind in chosen} == {"chunked", "plain"}
    assert all(len(members) <= 2 for members in watch.chosen.values())
    assert watch.offered["chunked"] == watch.offered["plain"] == 6
    for request, kind in chosen:
        positions, tokens, logits = watch.of_request(request)
        assert positions.tolist() == ([22, 23] if kind == "chunked" else [20, 21, 22])
        for position, token, row in zip(positions.tolist(), tokens.tolist(), logits, strict=True):
            assert torch.equal(row, seen[request, position]) and token == int(row.argmax())
        assert np.array_equal(watch.ids[request], seqs[request].ids[: positions[-1]])


def test_no_number_is_no_agreement() -> None:
    def of(error: float, same: int, near: int) -> Verification:
        checks = [
            RequestCheck(0, "plain", 100, 1e-6, 1e-6, 100, 0),
            RequestCheck(1, "plain", 100, error, error, same, near),
        ]
        return Verification(checks, "float32", 1e-4, 0.99, 211, 211)

    assert of(1e-5, 98, 0).passed and of(1e-5, 90, 8).passed
    assert not of(1e-5, 97, 0).passed and not of(1.1e-4, 100, 0).passed
    assert not of(float("nan"), 100, 0).passed


# -- check-engine


def test_a_campaign_holds_and_is_repeatable(capfd: Capture) -> None:
    answers = [call(capfd, "check-engine", "--cases", 4, "--seed", 7, "--json") for _ in range(2)]
    first, again = (json.loads(answer.out) for answer in answers)
    assert answers[0].code == 0 and first["broken"] == [] and first["cases"] == 4
    counts = first["counts"]
    assert counts["positions"] > 500 and counts["resumed"] and counts["prefix hits"] and counts["chunks"], counts
    assert counts == again["counts"]
    assert first["max_error"] == again["max_error"]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="on a card the campaign runs the kernels anyway")
def test_the_kernels_are_held_against_plain_torch_in_the_interpreter(capfd: Capture) -> None:
    answer = call(capfd, "check-engine", "--case", 1, "--seed", 1, "--attention-backend", "triton", "--json")
    found = json.loads(answer.out)
    assert answer.code == 0 and found["counts"]["positions"] >= 4 and found["max_error"]["float32"] < 1e-5


def test_cases_differ_in_what_they_are_to_differ_in() -> None:
    cases = [make_case(1, number) for number in range(60)]
    assert {case.options.dtype for case in cases} == {"float32", "bfloat16", "float16"}
    assert {case.config.head_dim for case in cases} == {64, 80, 96, 128, 256}
    assert {case.options.schedulers for case in cases} == {("nano",), ("vllm",)}
    assert {case.options.knobs["block_size"] for case in cases} == {16, 32, 48, 64, 128, 256}
    assert {case.config.model_type for case in cases} == {"llama", "qwen2", "qwen3"}
    assert len({case.config.num_heads // case.config.num_kv_heads for case in cases}) >= 3
    assert make_case(1, 5) == cases[5] != make_case(2, 5)


def test_a_fault_is_found_and_the_command_repeats_it(capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = reference_attention.BatchAttention._decode

    def decode(self: Any, layer: int, q: torch.Tensor) -> torch.Tensor:
        return scaled(self, layer, q * 1.3)

    with monkeypatch.context() as patch:
        patch.setattr(reference_attention.BatchAttention, "_decode", decode)
        answer = call(capfd, "check-engine", "--cases", 8, "--seed", 3)
        assert answer.code == 1 and "relative error of logits up to" in answer.out
        command = answer.out.strip().splitlines()[-1]
        assert command.startswith("benchctl check-engine --seed 3 --case ")
        assert call(capfd, *command.split()[1:]).code == 1
    assert call(capfd, *command.split()[1:]).code == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--cases", 0), "--cases is 0"),
        (("--seconds", -1), "--seconds is -1"),
        (("--attention-backend", "flash"), "no attention backend is called 'flash'"),
    ],
)
def test_check_engine_refuses(capfd: Capture, flags: tuple[object, ...], words: str) -> None:
    answer = call(capfd, "check-engine", *flags)
    assert answer.code == 2 and words in answer.err


@pytest.mark.gpu
def test_a_campaign_on_a_card_holds_for_half_a_minute(capfd: Capture) -> None:
    answer = call(capfd, "check-engine", "--seconds", 30, "--seed", 1)
    assert answer.code == 0, answer.out
