"""A model split over two processes (gloo): logits, tokens and decisions of one, and clear ends where something fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines.model.config import PRESETS
from engines.model.load import load_model
from engines.model.parallel import Parallel
from engines.model.transformer import Model
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.parallel import Team, load_parallel_model
from engines.torch_engine.triton_engine import TritonEngine
from engines.torch_engine.verify import Watch, verify
from tests.command_line import call
from tests.engine_harness import PoisonedCache, Sequence, assert_same_logits, load_oracle, make_oracle, random_ids
from tests.laws import assert_laws
from traces.errors import BenchctlError

ROOT = Path(__file__).parents[1]
LIMITS = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "max_model_len": 128}


@pytest.fixture(scope="class", params=["qwen2", "qwen3"])
def split(request: pytest.FixtureRequest) -> Iterator[tuple[str, Model]]:
    """(family, rank 0's part of a random model): biases and an untied head, or norms and a tied one; 211 ids do not divide."""
    model = load_parallel_model(str(make_oracle(request.param).folder), 2, dtype="float32", device="cpu")
    yield request.param, model
    model.team.close()


def three_rounds(family: str, engine: TorchEngine | TritonEngine) -> list[int]:
    """A prefill, a chunk with a prefix hit beside a decode, two decodes; each logit against transformers'."""
    oracle = make_oracle(family)
    cache = PoisonedCache(engine)
    first, second = Sequence(0, random_ids(1, 60)), Sequence(1, random_ids(2, 40))
    second.ids[:32] = first.ids[:32]
    want = {0: oracle.logits(first.ids), 1: oracle.logits(second.ids)}
    tokens: list[int] = []
    for work in ([(first, 35)], [(first, 1), (second, 7)], [(second, 1), (first, 1)]):
        if second in [seq for seq, _ in work] and not second.table:
            cache.share(second, first, 2)
        batch = cache.batch(work)
        handle: Any = engine.launch(batch)
        tokens += engine.collect(handle).token_ids.tolist()  # type: ignore[union-attr]
        for (seq, count), logits in zip(work, handle.logits, strict=True):
            seq.computed += count
            assert_same_logits(logits.cpu(), want[seq.request][seq.computed - 1], (seq.request, seq.computed))
    return tokens


class TestTwoRanks:
    @pytest.mark.parametrize(("kind", "temperature"), [("reference", 0.0), ("reference", 1.0), ("triton", 1.0)])
    def test_logits_and_tokens_equal_those_of_one_process(
        self, split: tuple[str, Model], kind: str, temperature: float
    ) -> None:
        family, model = split
        options: dict[str, Any] = {"num_blocks": 16, "block_size": 16, "temperature": temperature, "seed": 5}

        def engine(of: Model) -> TorchEngine | TritonEngine:
            if kind == "triton":
                return TritonEngine(of, return_logits=True, **options, **LIMITS)
            return TorchEngine(of, return_logits=True, **options)

        ours = engine(model)
        assert ours.k_cache.shape[3] == 1, "each rank has one of the two KV heads"
        tokens = three_rounds(family, ours)
        ours.close()
        assert tokens == three_rounds(family, engine(load_oracle(family, "cpu")))

    def test_the_reference_of_verify_is_computed_by_all_ranks(self, split: tuple[str, Model]) -> None:
        family, model = split
        engine = TorchEngine(model, num_blocks=16, block_size=16)
        engine.watch = Watch(2, seed=0, vocab_size=model.config.vocab_size)
        cache = PoisonedCache(engine)
        seq = Sequence(0, random_ids(3, 50))
        for count in (30, 1, 1):
            engine.collect(engine.launch(cache.batch([(seq, count)])))
            seq.computed += count
        engine.close()
        found = verify(model, engine.watch, temperature=0.0, seed=0)
        assert found.passed and found.positions == 3 and found.agreement == 1 and 0 < found.max_error < 1e-5


@pytest.mark.parametrize("preset", ["tiny", "biased"])
def test_two_ranks_draw_the_weights_of_one(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    odd = replace(PRESETS["tiny"], vocab_size=2047, qkv_bias=True, tie_word_embeddings=False)
    monkeypatch.setitem(PRESETS, "biased", odd)
    config = PRESETS[preset]
    whole = load_model(preset, device="cpu", dtype="float32").weights
    parts = [load_model(preset, device="cpu", dtype="float32", parallel=Parallel(r, 2)).weights for r in range(2)]
    for name in ("embedding", "lm_head"):
        assert torch.equal(torch.cat([getattr(p, name) for p in parts])[: config.vocab_size], getattr(whole, name))
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for i, layer in enumerate(whole.layers):
        for name, axis in (("out", 1), ("down", 1)):
            assert torch.equal(torch.cat([getattr(p.layers[i], name) for p in parts], axis), getattr(layer, name))
        split_by = {"qkv": [q, kv, kv], "qkv_bias": [q, kv, kv], "gate_up": [config.intermediate_size] * 2}
        for name, sizes in split_by.items():
            if (matrix := getattr(layer, name)) is None:
                continue
            pieces = [getattr(p.layers[i], name).split([n // 2 for n in sizes]) for p in parts]
            joined = [torch.cat([piece[j] for piece in pieces]) for j in range(len(sizes))]
            assert torch.equal(torch.cat(joined), matrix), name


def replay(capfd: pytest.CaptureFixture[str], out: Path, *flags: object) -> Any:
    return call(
        capfd, "replay", "traces/shared-system-prompt.jsonl", "--engine", "torch", "--model", "tiny", "--num-prompts", 12,
        "--no-report", "--kv-cache-tokens", 2048, "--block-size", 16, "--clock", "rounds", "--round-seconds", 0.05, "--out", out, *flags,
    )  # fmt: skip


def test_decisions_and_tokens_of_a_replay_are_those_of_one_process(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, flags in (("one", ()), ("two", ("--tensor-parallel-size", 2, "--verify", 3))):
        answer = replay(capfd, tmp_path / name, *flags)
        assert answer.code == 0, answer.err
    for policy in ("nano", "vllm"):
        one, two = (assert_laws(tmp_path / name / policy) for name in ("one", "two"))
        assert one.manifest["digest"] == two.manifest["digest"]
        assert two.manifest["config"]["tensor_parallel_size"]["value"] == 2 and two.manifest["verify"]["passed"]
        tokens = [run.read("tokens").select("request", "index", "token_id") for run in (one, two)]
        assert tokens[0].equals(tokens[1]) and tokens[0]["token_id"].null_count() == 0
    assert not torch.distributed.is_initialized()


def test_a_command_refused_after_the_ranks_began_leaves_none(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    answer = replay(capfd, tmp_path, "-tp", 2, "--max-model-len", 4000)
    assert answer.code == 2 and "the pool holds 2048 tokens" in answer.err
    assert Team.current is None and not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("tiny", 3, "tiny cannot be split over 3 ranks: it has 4 query heads, 2 KV heads and 256 inner features"),
        ("tiny", 4, "use one of 1, 2"),
        ("qwen3-8b", 128, "use one of 1, 2, 4, 8"),
    ],
)
def test_a_model_that_does_not_divide_starts_nothing(name: str, size: int, words: str) -> None:
    with pytest.raises(BenchctlError) as refused:
        load_parallel_model(name, size, device="cpu")
    assert words in str(refused.value) and refused.value.exit_code == 2
    assert not torch.distributed.is_initialized()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
@pytest.mark.parametrize("eager", [False, True])
def test_two_cards_give_the_logits_of_one(eager: bool) -> None:
    """Over NCCL, inside CUDA graphs and without them."""
    model = load_parallel_model(str(make_oracle("qwen3").folder), 2, dtype="float32", device="cuda")
    try:
        engine = TritonEngine(model, num_blocks=16, block_size=16, return_logits=True, enforce_eager=eager, **LIMITS)
        three_rounds("qwen3", engine)
        engine.close()
    finally:
        model.team.close()


@pytest.mark.gpu
def test_more_ranks_than_cards_start_nothing() -> None:
    size = 1 << torch.cuda.device_count().bit_length()
    if size > 8:
        pytest.skip("the model has eight KV heads")
    with pytest.raises(BenchctlError, match=f"{size} ranks need {size} cards"):
        load_parallel_model("qwen3-0.6b", size)


def test_what_a_rank_refuses_is_said_by_rank_0() -> None:
    team = Team(2, torch.device("cpu"))
    try:
        team.load("no-such-model", {})
        with pytest.raises(BenchctlError, match="'no-such-model' is neither a preset nor a folder"):
            team.replies()
    finally:
        team.close()
    assert all(process.poll() is not None for process in team.processes)


def start_replay(out: Path) -> tuple[subprocess.Popen[str], int]:
    """A long run over two processes, once it has begun; (it, the other rank's process id)."""
    command = [
        sys.executable, "-m", "benchctl", "replay", "traces/sharegpt.jsonl", "--engine", "torch", "--model", "tiny",
        "-tp", "2", "-s", "vllm", "--no-report", "--out", str(out),
    ]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 120
    while not (out / "vllm" / "manifest.json").exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.1)
    time.sleep(0.5)
    children = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(process.pid)], capture_output=True, text=True)
    ranks = [line.split()[0] for line in children.stdout.splitlines() if "engines.torch_engine.rank" in line]
    assert len(ranks) == 1, children.stdout
    return process, int(ranks[0])


def has_ended(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks processes up in /proc")
@pytest.mark.parametrize("whom", ["a rank is killed", "Ctrl-C", "rank 0 is killed"])
def test_every_end_is_one_clear_line_and_leaves_no_process(tmp_path: Path, whom: str) -> None:
    process, rank = start_replay(tmp_path)
    if whom == "a rank is killed":
        os.kill(rank, signal.SIGKILL)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1 and "Traceback" not in err
        assert "Error: vllm: tensor parallel: rank 1 ended with signal 9" in err
    elif whom == "Ctrl-C":
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130 and "Traceback" not in err and "Error" not in err
        assert_laws(tmp_path / "vllm")
    else:
        process.kill()
        process.wait(timeout=60)
    assert has_ended(rank)


def test_a_share_of_the_vocabulary_may_be_short() -> None:
    assert [Parallel(r, 4).vocab_share(10) for r in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert [Parallel(r, 4).vocab_share(5) for r in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]
    rows = [np.concatenate([np.arange(256)[s] for s in Parallel(r, 2).qkv_rows(PRESETS["tiny"])]) for r in range(2)]
    assert sorted(np.concatenate(rows).tolist()) == list(range(256))
    # Heads 0 and 1 of the queries, head 0 of the keys, head 0 of the values.
    assert rows[0].tolist() == [*range(64), *range(128, 160), *range(192, 224)]
