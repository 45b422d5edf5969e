"""What the engine's tests share: random models that transformers can run too, and a cache whose every freed block is NaN."""

from __future__ import annotations

import atexit
import functools
import os
import tempfile
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines.interface import Int64Array, ScheduledBatch
from engines.model.load import load_model
from engines.model.transformer import Model
from engines.torch_engine.engine import PendingStep, TorchEngine
from engines.torch_engine.triton_engine import TritonEngine

os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Where an engine runs, and by which kernels: plain torch, or Triton's with CUDA graphs or without.
DEVICES = ["cpu", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("cuda", "cuda triton", "cuda triton eager"))]
PLAIN_DEVICES = DEVICES[:2]
FAMILIES = ["llama", "qwen2", "qwen3"]
VOCAB = 211
MAX_LEN = 1024
TOLERANCE = 1e-4  # largest difference of a logit from transformers', float32


@dataclass(frozen=True)
class Oracle:
    """A random model as transformers runs it, saved to a folder that we load."""

    family: str
    reference: Any
    folder: Path

    def logits(self, ids: Any) -> torch.Tensor:
        """float32 [len(ids), vocab]: of the whole sequence at once, without any cache."""
        with torch.inference_mode():
            return self.reference(torch.as_tensor(np.asarray(ids))[None], use_cache=False).logits[0]

    def generate(self, prompt: Int64Array, num_tokens: int) -> list[int]:
        """Greedy continuation, as transformers' generate makes it."""
        with torch.inference_mode():
            ids = self.reference.generate(
                torch.as_tensor(prompt)[None], max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False
            )
        return ids[0, len(prompt) :].tolist()


@functools.cache
def make_oracle(family: str) -> Oracle:
    """Two layers, three query heads a KV head, weights and norms and biases all far from what they start as."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_LEN,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    if family == "llama":
        # 64 tokens of original context: tests go far beyond, and the three pairs of wavelengths fall into all three cases.
        scaling = {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
        config = LlamaConfig(**shape, rope_theta=10_000.0, rope_scaling=scaling, tie_word_embeddings=False)
        reference = LlamaForCausalLM(config)
    elif family == "qwen2":
        reference = Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=False))
    else:
        # A head_dim that is not hidden / heads, as in Qwen3's small models.
        reference = Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=16, tie_word_embeddings=True))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
            elif name.endswith("bias"):
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[1] ** 0.5)
    reference.eval()
    folder = tempfile.TemporaryDirectory(prefix=f"benchctl-{family}-")
    atexit.register(folder.cleanup)
    reference.save_pretrained(folder.name)
    return Oracle(family, reference, Path(folder.name))


@functools.cache
def load_oracle(family: str, device: str) -> Model:
    return load_model(str(make_oracle(family).folder), dtype="float32", device=device)


def random_ids(seed: int, length: int) -> Int64Array:
    return np.random.default_rng(seed).integers(0, VOCAB, length)


@dataclass
class Sequence:
    request: int
    ids: Int64Array
    computed: int = 0
    table: list[int] = field(default_factory=list)
    admitted: bool = False


class PoisonedCache:
    """A block allocator over an engine's cache. Every block is NaN until its tokens are computed, and again once freed."""

    def __init__(self, engine: TorchEngine | TritonEngine) -> None:
        self.engine = engine
        self.block_size = engine.limits.block_size
        # The last is taken first, so that a table is not an ascending run.
        self.free = deque(range(engine.limits.num_blocks))
        self.references = [0] * engine.limits.num_blocks
        self.poison(list(self.free))

    def poison(self, blocks: list[int]) -> None:
        self.engine.k_cache[:, blocks] = float("nan")
        self.engine.v_cache[:, blocks] = float("nan")

    def grow(self, seq: Sequence, num_tokens: int) -> None:
        while len(seq.table) * self.block_size < num_tokens:
            block = self.free.pop()
            self.references[block] = 1
            seq.table.append(block)

    def share(self, seq: Sequence, owner: Sequence, num_blocks: int) -> None:
        """A prefix hit: `seq` begins with the first full blocks of `owner`."""
        assert not seq.table and seq.computed == 0
        seq.table = owner.table[:num_blocks]
        seq.computed = num_blocks * self.block_size
        assert np.array_equal(seq.ids[: seq.computed], owner.ids[: seq.computed])
        for block in seq.table:
            self.references[block] += 1

    def release(self, seq: Sequence) -> None:
        """Preempt or finish: what nobody else holds is poisoned."""
        gone = []
        for block in reversed(seq.table):
            self.references[block] -= 1
            if self.references[block] == 0:
                gone.append(block)
                self.free.appendleft(block)
        self.poison(gone)
        seq.table = []
        seq.computed = 0
        seq.admitted = False

    def batch(self, work: list[tuple[Sequence, int]], silent: frozenset[int] = frozenset()) -> ScheduledBatch:
        """One round's work as (sequence, tokens); each yields but the `silent` requests."""
        for seq, count in work:
            self.grow(seq, seq.computed + count)
        seqs = [seq for seq, _ in work]
        start = np.array([seq.computed for seq in seqs], dtype=np.int64)
        cached = [-1 if seq.admitted else seq.computed for seq in seqs]
        for seq in seqs:
            seq.admitted = True
        num_tokens = np.array([count for _, count in work], dtype=np.int64)
        return ScheduledBatch(
            request=np.array([seq.request for seq in seqs], dtype=np.int64),
            start=start,
            num_tokens=num_tokens,
            is_decode=(num_tokens == 1) & (start > 0),
            yields_token=np.array([seq.request not in silent for seq in seqs], dtype=bool),
            cached_tokens=np.array(cached, dtype=np.int64),
            num_blocks=np.array([len(seq.table) for seq in seqs], dtype=np.int64),
            block_tables=[list(seq.table) for seq in seqs],
            token_ids=[seq.ids for seq in seqs],
        )

    def step(self, work: list[tuple[Sequence, int]], silent: frozenset[int] = frozenset()) -> dict[int, torch.Tensor]:
        """Run a round; -> request -> the logits [vocab] after the last token that it fed."""
        batch = self.batch(work, silent)
        handle: PendingStep = self.engine.launch(batch)
        result = self.engine.collect(handle)
        for seq, count in work:
            seq.computed += count
        assert handle.logits is not None and result.token_ids is not None
        yielding = [seq.request for seq, _ in work if seq.request not in silent]
        assert len(yielding) == len(result.token_ids) == len(handle.logits)
        assert result.token_ids.tolist() == handle.logits.argmax(-1).tolist()
        return dict(zip(yielding, handle.logits.cpu(), strict=True))


def make_engine(
    family: str, device: str, *, block_size: int, num_blocks: int = 96, **options: Any
) -> TorchEngine | TritonEngine:
    where, *how = device.split()
    model = load_oracle(family, where)
    options.setdefault("return_logits", True)
    if "triton" in how:
        limits = {"max_num_batched_tokens": 2048, "max_num_seqs": 32, "enforce_eager": "eager" in how}
        return TritonEngine(model, num_blocks=num_blocks, block_size=block_size, **limits, **options)
    return TorchEngine(model, num_blocks=num_blocks, block_size=block_size, **options)


def assert_same_logits(ours: torch.Tensor, theirs: torch.Tensor, what: object = "") -> None:
    difference = (ours - theirs).abs().max().item()
    assert difference <= TOLERANCE, (what, difference)  # false for NaN too
