"""Memory over long runs, pools on small cards, and what is said where memory does not suffice."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchctl.build import build_command, build_run
from benchctl.config import ReplayOptions
from benchctl.runner import run_one
from engines.interface import Round
from engines.model import memory as model_memory
from engines.model.config import PRESETS
from engines.model.load import load_model
from engines.model.parallel import SINGLE
from engines.torch_engine import memory, triton_engine
from engines.torch_engine.fused_forward import buffer_bytes
from engines.torch_engine.memory import (
    RESERVED_BYTES,
    _batch_of_zeros,
    cache_out_of_memory,
    kv_bytes_per_token,
    max_kv_tokens,
    measure_engine,
    spare_bytes,
)
from engines.torch_engine.triton_engine import TritonEngine
from engines.torch_engine.verify import reference_logits, widen
from tests.command_line import call, write_trace
from tests.engine_harness import load_oracle
from traces.errors import BenchctlError

MIB, GIB = 1 << 20, 1 << 30
needs_proc = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads its own size in /proc")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Scales:
    """Weighs the process, and the card where there is one, every so many rounds."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.weights: list[tuple[int, int, int]] = []  # resident, allocated on the card, free there

    def saw(self, number: int, now_s: float, round: Round, num_tokens: int) -> None:
        if number % self.every:
            return
        gc.collect()
        on_card = torch.cuda.is_available()
        free = torch.cuda.mem_get_info()[0] if on_card else 0
        self.weights.append((resident_bytes(), torch.cuda.memory_allocated() if on_card else 0, free))


def weigh(tmp_path: Path, rounds: int, **options: Any) -> Scales:
    """One request after the other, 500 tokens each, until so many rounds are over; weighed ten times."""
    num = rounds // 500
    trace = write_trace(
        tmp_path / "long.jsonl",
        [{"id": f"R{i}", "arrival_s": 0.0, "input_length": 8, "output_length": 500} for i in range(num)],
    )
    asked = ReplayOptions(
        trace=str(trace), schedulers=("vllm",), clock="rounds", records="none", report=False, kv_cache_tokens=2048,
        knobs={"max_num_seqs": 1, "block_size": 16, "max_num_batched_tokens": 64, "max_model_len": 1024}, **options,
    )  # fmt: skip
    command = build_command(asked)
    scales = Scales(rounds // 10)
    parts = build_run(command, command.policies[0], None)
    try:
        result = run_one(parts, scales, threading.Event())
    finally:
        parts.engine.close()
    assert result.error is None and result.outcome.finished == num and result.outcome.rounds >= rounds
    return scales


def growth(scales: Scales, what: int) -> int:
    """From a third of the run, when everything has been met once, to its end."""
    values = [weights[what] for weights in scales.weights]
    return values[-1] - values[len(values) // 3]


@needs_proc
def test_fifty_thousand_rounds_of_the_scheduler_keep_the_process_as_large_as_it_was(tmp_path: Path) -> None:
    assert growth(weigh(tmp_path, 50_000, engine="null"), 0) < 3 * MIB


@needs_proc
def test_rounds_of_the_plain_engine_keep_the_process_as_large_as_it_was(tmp_path: Path) -> None:
    assert growth(weigh(tmp_path, 4000, engine="torch", model="tiny", attention_backend="reference"), 0) < 3 * MIB


@needs_proc
@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [True, False])
def test_fifty_thousand_rounds_on_a_card_take_no_more_memory_there_or_here(tmp_path: Path, overlap: bool) -> None:
    scales = weigh(tmp_path, 50_000, engine="torch", model="tiny", overlap=overlap)
    assert growth(scales, 0) < 8 * MIB, [w[0] // MIB for w in scales.weights]
    assert growth(scales, 1) == 0, [w[1] for w in scales.weights]
    assert growth(scales, 2) > -2 * MIB, [w[2] // MIB for w in scales.weights]


# -- small cards


@pytest.fixture
def eight_gigabytes() -> Iterator[int]:
    """This process may have 8 GB of the card, and finds the card to be that large."""
    total = torch.cuda.get_device_properties(0).total_memory
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, 8e9 / total))
    torch.cuda.reset_peak_memory_stats()
    yield 8_000_000_000
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_run_fits_eight_gigabytes_by_itself(
    eight_gigabytes: int, capfd: pytest.CaptureFixture[str], tmp_path: Path, backend: str
) -> None:
    answer = call(
        capfd, "replay", "traces/sharegpt.jsonl", "--model", "qwen3-0.6b", "--num-prompts", 40, "--request-rate", "inf", "-s", "vllm",
        "--max-model-len", 4096, "--attention-backend", backend, "--no-report", "--out", tmp_path,
    )  # fmt: skip
    assert answer.code == 0, answer.err
    manifest = json.loads((tmp_path / "vllm" / "manifest.json").read_text())
    tokens = manifest["limits"]["usable_tokens"]
    assert 4096 <= tokens < eight_gigabytes / kv_bytes_per_token(PRESETS["qwen3-0.6b"], torch.bfloat16)
    assert torch.cuda.max_memory_reserved() <= eight_gigabytes


@pytest.mark.gpu
def test_too_large_a_model_and_too_large_a_pool_name_what_fits(eight_gigabytes: int) -> None:
    with pytest.raises(BenchctlError, match="qwen3-8b with 8.19 B parameters in bfloat16 needs 15.26 GiB"):
        load_model("qwen3-8b")
    model = load_model("qwen3-0.6b")
    limits = {"max_num_batched_tokens": 2048, "max_num_seqs": 64, "max_model_len": 4096}
    with pytest.raises(BenchctlError) as refused:
        TritonEngine(model, num_blocks=8192, block_size=16, **limits)
    assert refused.value.fix is not None and refused.value.fix.startswith("--kv-cache-tokens ")
    fits = int(refused.value.fix.split()[1])
    assert 0 < fits < 8192 * 16
    TritonEngine(model, num_blocks=fits // 16, block_size=16, **limits).close()  # and it does


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_pool_takes_what_was_asked_for_and_leaves_room_for_the_largest_round(
    enforce_eager: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """The pool beside all that an engine takes is within the share asked for, and not far below it; the two worst rounds run."""
    gc.collect()
    model = load_model("qwen3-0.6b")
    limits = {"max_num_batched_tokens": 16384, "max_num_seqs": 512, "max_model_len": 4096}
    began = time.perf_counter()
    tokens = max_kv_tokens(
        model, gpu_memory_utilization=0.9, attention="triton", enforce_eager=enforce_eager, temperature=1.0, **limits
    )
    measured = time.perf_counter()
    engine = TritonEngine(
        model, num_blocks=tokens // 16, block_size=16, temperature=1.0, enforce_eager=enforce_eager, **limits
    )
    built = time.perf_counter()
    tables = [list(range(i * 256, (i + 1) * 256)) for i in range(4)]
    engine.collect(engine.launch(_batch_of_zeros([0] * 4, [4096] * 4, tables)))
    engine.collect(engine.launch(_batch_of_zeros([4095] * 512, [1] * 512, [tables[0]] * 512)))
    engine.inputs.zero_()  # counts of 0: a graph of another shape would take the last round's inputs for its own, which are elsewhere
    for graph in engine.graphs.values():
        graph.replay()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    engine.close()
    with capfd.disabled():
        print(
            f"\n{tokens:,} tokens: measured in {measured - began:.2f} s (kernels compiled and loaded in that), built in "
            f"{built - measured:.2f} s; in use {(total - free) / total:.2%} of the card, {total * 0.9 / GIB - (total - free) / GIB:.2f} GiB "
            "below the share"
        )
    assert total * 0.9 - 2 * RESERVED_BYTES <= total - free <= total * 0.9


# -- sizes without a card


def test_what_is_spare_is_what_the_fullest_card_leaves_of_its_share() -> None:
    cards = [(100 * GIB, 140 * GIB), (90 * GIB, 140 * GIB)]
    # 0.9 of 140 less 50 in use, less 2 that are still to come, less what is reserved.
    assert spare_bytes(cards, 0.9, 2 * GIB) == 74 * GIB - RESERVED_BYTES
    assert spare_bytes([(1 * GIB, 8 * GIB)], 0.5, -GIB) == -2 * GIB - RESERVED_BYTES


def fake_card(name: str) -> Any:
    config = PRESETS[name]
    return SimpleNamespace(
        name=name, config=config, local=config, dtype=torch.bfloat16, device=torch.device("cuda", 0), team=None,
        parallel=SINGLE,
    )  # fmt: skip


def test_a_pool_is_what_a_measurement_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """112 KiB a token: of 8 GiB 7.2 may be used, 3.2 are, 0.5 come, 0.25 are reserved."""
    asked: list[tuple[Any, ...]] = []

    def measured(*args: Any) -> tuple[list[tuple[int, int]], int]:
        asked.append(args[1:])
        return [(int(4.8 * GIB), 8 * GIB)], GIB // 2

    monkeypatch.setattr(memory, "measure_engine", measured)
    model = fake_card("qwen3-0.6b")
    tokens = max_kv_tokens(
        model, max_num_batched_tokens=2048, max_num_seqs=64, max_model_len=4096, attention="triton", block_size=32,
        enforce_eager=True,
    )  # fmt: skip
    assert tokens == int(3.25 * GIB) // (112 * 1024) // 256 * 256 == 30208
    assert asked == [(2048, 64, 4096, 32, 0.0, True)]


def test_no_room_for_a_pool_names_values_that_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fake_card("qwen3-0.6b")
    found = {"card": (int(0.5 * GIB), 8 * GIB)}
    monkeypatch.setattr(memory, "measure_engine", lambda *_: ([found["card"]], 0))
    limits = {"max_num_batched_tokens": 16384, "max_num_seqs": 512, "max_model_len": 4096, "attention": "triton"}
    with pytest.raises(
        BenchctlError, match="no room for 256 tokens of KV cache \\(0.03 GiB\\) beside qwen3-0.6b"
    ) as refused:
        max_kv_tokens(model, **limits)
    # 7.2 GiB less 7.5 in use less 0.25: 0.578 GiB are missing with 0.027 for the pool; 0.9 + 0.0723 is 0.98 of the card.
    assert refused.value.fix is not None
    assert refused.value.fix.startswith("--gpu-memory-utilization 0.98, or --max-num-batched-tokens ")
    assert max_kv_tokens(model, gpu_memory_utilization=0.98, **limits) >= 256
    with pytest.raises(BenchctlError):
        max_kv_tokens(model, gpu_memory_utilization=0.97, **limits)
    budget = int(refused.value.fix.split("--max-num-batched-tokens ")[1].split(",")[0])
    c, most = model.config, limits["max_num_batched_tokens"]
    saved = [
        buffer_bytes(c, torch.bfloat16, most, 512, 4096) - buffer_bytes(c, torch.bfloat16, n, 512, 4096)
        for n in (budget, 2 * budget)
    ]
    assert saved[0] >= 0.578 * GIB > saved[1]
    monkeypatch.setattr(model_memory, "available_bytes", lambda device: 100 * MIB)
    found["card"] = (0, 8 * GIB)  # 1.08 GiB are missing, more than the card and any budget have
    with pytest.raises(BenchctlError) as refused:
        max_kv_tokens(model, **limits | {"max_num_batched_tokens": 512})
    assert refused.value.fix == "--model tiny"


def test_measuring_runs_the_largest_rounds_over_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[tuple[list[int], int, int]] = []
    engines: list[TritonEngine] = []
    launch = TritonEngine.launch

    def watched(self: TritonEngine, batch: Any) -> Any:
        engines.append(self)
        held = self.k_cache.shape[1]
        rounds.append((batch.num_tokens.tolist(), held, batch.num_yields))
        return launch(self, batch)

    def card(device: torch.device) -> tuple[int, int]:
        assert engines and engines[0].forward is not None, "read while the engine holds what it takes"
        return 5 * GIB, 8 * GIB

    monkeypatch.setattr(TritonEngine, "launch", watched)
    monkeypatch.setattr(memory, "card_memory", card)
    model = load_oracle("qwen3", "cpu")
    cards, beside = measure_engine(model, 72, 4, 32, 16, 0.0, True)
    assert rounds == [([32, 32, 8], 1, 3), ([1] * 4, 1, 4)]
    assert cards == [(5 * GIB, 8 * GIB)]
    assert beside == -16 * kv_bytes_per_token(model.config, model.dtype)
    assert engines[0].forward is None and engines[0].k_cache.numel() == 0  # given back


@pytest.mark.parametrize(("tokens", "seqs", "captured"), [(16384, 512, 7), (64, 2, 3)])
def test_graphs_that_are_not_captured_are_counted_by_those_that_are(
    tokens: int, seqs: int, captured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph takes 20 MiB, half of it when it first runs; the first takes a pool besides."""
    used = 0

    class Graph:
        def replay(self) -> None:
            nonlocal used
            used += 10 * MIB

    def capture(shapes: Any) -> None:
        nonlocal used
        for shape in shapes:
            used += 10 * MIB + (0 if me.graphs else 300 * MIB)
            me.graphs[shape] = Graph()

    me = TritonEngine.__new__(TritonEngine)
    me.model, me.graphs = SimpleNamespace(device=torch.device("cpu")), {}  # type: ignore[assignment]
    me.max_tokens, me.max_seqs, me.forward = tokens, seqs, SimpleNamespace(tokens_per_tile=32)  # type: ignore[assignment]
    monkeypatch.setattr(me, "_capture", capture)
    monkeypatch.setattr(triton_engine, "card_memory", lambda device: (8 * GIB - used, 8 * GIB))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    decodes, mixed = me._graph_shapes()
    assert me._sample_graphs() == (len(decodes) + len(mixed) - captured) * 20 * MIB
    assert {mixed[-1], decodes[-1]} <= set(me.graphs) and len(me.graphs) == captured


def test_buffers_that_do_not_fit_name_a_budget_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    model = load_model("tiny", dtype="float32", device="cpu")
    monkeypatch.setattr(triton_engine, "FusedForward", fail)
    limits = [buffer_bytes(model.local, model.dtype, n, 64, 512) for n in (1024, 2048)]
    available = sum(limits) // 2 + RESERVED_BYTES + 256 * 1024
    monkeypatch.setattr(memory, "available_bytes", lambda device: available)
    with pytest.raises(
        BenchctlError, match="rounds of 8192 tokens and 64 sequences need 0... GiB of buffers"
    ) as refused:
        measure_engine(model, 8192, 64, 512, 16, 0.0, False)
    assert refused.value.fix == "--max-num-batched-tokens 1024"


@pytest.mark.parametrize(
    ("name", "tokens", "seqs", "length"),
    [("tiny", 256, 16, 1024), ("qwen3-0.6b", 512, 64, 2048), ("qwen3-0.6b", 2048, 512, 4096)],
)
def test_the_sum_of_an_engines_buffers_bounds_what_it_holds(
    name: str, tokens: int, seqs: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a pool is planned beside: every tensor of the engine but the cache, one layer's worth of weights."""
    monkeypatch.setitem(PRESETS, "cut", replace(PRESETS[name], num_layers=1))
    model = load_model("cut", dtype="bfloat16", device="cpu")
    limits = {"max_num_batched_tokens": tokens, "max_num_seqs": seqs, "max_model_len": length}
    engine = TritonEngine(model, num_blocks=length // 16, block_size=16, **limits)
    held = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for owner in (engine, engine.forward)
        for tensor in vars(owner).values()
        if isinstance(tensor, torch.Tensor)
    }
    for cache in (engine.k_cache, engine.v_cache):
        del held[cache.untyped_storage().data_ptr()]
    planned = buffer_bytes(model.local, model.dtype, tokens, seqs, length)
    assert planned - 128 * MIB < sum(held.values()) <= planned


def test_what_fits_leaves_room_for_buffers_and_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model("tiny", dtype="float32", device="cpu")
    held = {"bytes": 10 * MIB}
    for module in (memory, model_memory):
        monkeypatch.setattr(module, "available_bytes", lambda device: held["bytes"])
    plain = cache_out_of_memory(model, 1 << 16, 16)
    assert plain.fix == "--kv-cache-tokens 9216 (576 blocks) or less"
    full, small = (buffer_bytes(model.local, model.dtype, n, 64, 512) for n in (8192, 1024))
    held["bytes"] = -(-(full + 12 * MIB + 5 * MIB) * 10 // 9)
    beside = cache_out_of_memory(model, 1 << 16, 16, (8192, 64, 512, 12 * MIB))
    # Nine tenths less the buffers, less 12 MiB of graphs: 5 MiB of 1 KiB a token, a multiple of 256.
    assert beside.fix == "--kv-cache-tokens 5120 (320 blocks) or less"
    assert f"needs 1.00 GiB beside {(full + 12 * MIB) / GIB:.2f} GiB of buffers" in beside.what
    held["bytes"] = -(-(small + 5 * MIB) * 10 // 9)
    less = cache_out_of_memory(model, 1 << 16, 16, (8192, 64, 512, 0))
    assert less.fix == "--max-num-batched-tokens 1024 --kv-cache-tokens 5120"
    held["bytes"] = 1 * MIB
    assert cache_out_of_memory(model, 1 << 16, 16, (8192, 64, 512, 0)).fix == "end what else takes its memory"


@pytest.mark.parametrize("place", ["FusedForward", "_prepare"])
def test_memory_that_ends_while_an_engine_is_built_is_one_clear_line(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    model = load_model("tiny", dtype="float32", device="cpu")
    owner: Any = triton_engine if place == "FusedForward" else TritonEngine
    monkeypatch.setattr(owner, place, fail)
    with pytest.raises(BenchctlError, match="a KV cache of 64 blocks of 16 tokens needs") as refused:
        TritonEngine(model, num_blocks=64, block_size=16, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=128)
    assert refused.value.fix is not None and "--kv-cache-tokens" in refused.value.fix


def test_memory_that_ends_in_a_round_of_the_kernels_names_a_smaller_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers are there before: a smaller budget would not help, and what is missing is little. 1 GiB is 1,048,576 tokens here."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    model = load_model("tiny", dtype="float32", device="cpu")
    limits = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "max_model_len": 128}
    engine = TritonEngine(model, num_blocks=16, block_size=16, **limits)
    engine.limits = replace(engine.limits, num_blocks=1 << 17)
    monkeypatch.setattr(engine.forward, "run", fail)
    with pytest.raises(BenchctlError, match="out of memory in a round of 9 tokens and 1 sequences") as refused:
        engine.launch(_batch_of_zeros([0], [9], [[0]]))
    assert refused.value.fix == f"--kv-cache-tokens {(1 << 21) - (1 << 20)}" and refused.value.exit_code == 1


def test_other_libraries_words_for_no_memory_are_known() -> None:
    for text in (
        "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes",
    ):  # fmt: skip
        assert model_memory.is_out_of_memory(RuntimeError(text))
    assert not model_memory.is_out_of_memory(RuntimeError("shape mismatch"))


# -- 16-bit against 32


def report_of_bfloat16(model: Any, num_tokens: int) -> dict[str, float]:
    """Plain torch in the model's dtype against float32: errors, and greedy tokens by how clearly the reference chose."""
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, num_tokens)
    positions = np.arange(1, num_tokens + 1)
    want, got = (torch.cat(list(reference_logits(m, ids, positions))) for m in (widen(model), model))
    error = (got - want).norm(dim=1) / want.norm(dim=1)
    same = (got.argmax(1) == want.argmax(1)).float()
    top = want.topk(2, dim=1).values
    clear = (top[:, 0] - top[:, 1]) > 0.04 * want.square().mean(1).sqrt()
    return {
        "max error": float(error.max()), "mean error": float(error.mean()), "same token": float(same.mean()),
        "clear": float(clear.float().mean()), "same where clear": float(same[clear].mean()),
    }  # fmt: skip


def test_bfloat16_is_near_float32_and_chooses_as_it_does_where_the_choice_is_clear() -> None:
    found = report_of_bfloat16(load_model("tiny", dtype="bfloat16", device="cpu"), 400)
    assert 1e-3 < found["mean error"] <= found["max error"] <= 2e-2, found
    assert found["clear"] > 0.5 and found["same where clear"] >= 0.99, found


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama-3.1-8b", "qwen3-8b"])
def test_bfloat16_of_the_kernels_at_real_sizes(name: str, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A table of what rounding does, printed; random weights, so that logits are flat and many choices are close ones."""
    answer = call(
        capfd, "replay", "traces/sharegpt.jsonl", "--model", name, "--num-prompts", 24, "-s", "vllm", "--request-rate", "inf",
        "--max-model-len", 4096, "--kv-cache-tokens", 16384, "--verify", 8, "--no-report", "--out", tmp_path,
    )  # fmt: skip
    found = json.loads((tmp_path / "vllm" / "manifest.json").read_text())["verify"]
    with capfd.disabled():
        print(
            f"\n{name}: kernels in bfloat16 against float32 over {found['positions']} positions: mean {found['mean_error']:.2e}, max "
            f"{found['max_error']:.2e}; same token {found['agreement']:.2%}, but for rounding {found['agreement_beyond_rounding']:.2%}"
        )
        plain = report_of_bfloat16(load_model(name), 512)
        print("  plain torch in bfloat16: " + ", ".join(f"{what} {value:.4g}" for what, value in plain.items()))
    assert answer.code == 0, answer.err
    assert found["mean_error"] <= 2e-2 and found["agreement_beyond_rounding"] >= 0.99
    # No worse than rounding has to be: the kernels against plain torch, both in bfloat16.
    assert found["mean_error"] <= 1.25 * plain["mean error"]
    assert plain["same where clear"] >= 0.99
