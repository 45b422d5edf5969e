"""The engine that runs a model: a scheduled batch to tensors, one forward pass, tokens back.

Must not know a policy, a queue or a clock: a batch is data, and so is the result. Every batch runs: prefills, decodes,
both, chunks from any position. The KV cache belongs to the engine, the model may be shared.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engines.interface import EngineLimits, ScheduledBatch, StepResult
from engines.model.memory import available_bytes, is_out_of_memory
from engines.model.transformer import Attention, Model
from engines.torch_engine.inputs import BatchInputs, build_inputs
from engines.torch_engine.memory import (
    cache_out_of_memory,
    estimate_forward_bytes,
    forward_out_of_memory,
    kv_bytes_per_token,
)
from engines.torch_engine.reference_attention import ReferenceAttention, to_device
from engines.torch_engine.sampling import sample
from engines.torch_engine.verify import Watch, WatchedRows
from engines.torch_engine.work import Work
from traces.errors import BenchctlError


class AttentionBackend(Protocol):
    """Paged attention over the KV cache of one engine; it may keep buffers of its own between rounds."""

    def prepare(self, inputs: BatchInputs) -> Attention:
        """The attention of one batch over all layers, its metadata on the device."""


# Made from (K cache, V cache), each [layers, num_blocks, block_size, num_kv_heads, head_dim].
ATTENTION_BACKENDS: dict[str, Callable[[Tensor, Tensor], AttentionBackend]] = {"reference": ReferenceAttention}
BLOCK_SIZE_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A round whose inputs are laid out on the host."""

    inputs: BatchInputs
    longest: int  # context, in tokens
    watched: WatchedRows | None
    prepare_s: float
    eager: bool = True  # there are no graphs: starting it takes the host as long as launching each operation does


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A round that was launched. `token_ids` and `logits` may still be being computed until it is collected."""

    token_ids: Tensor  # int64 [yields], host memory
    logits: Tensor | None  # float32 [yields, vocab] where the engine was asked for them
    num_tokens: int
    prepare_s: float  # host time of building the inputs
    forward_s: float | None  # CPU: measured
    events: (
        tuple[torch.cuda.Event, torch.cuda.Event, torch.cuda.Event] | None
    )  # CUDA: before and after it, tokens copied
    work: tuple[float, float]  # operations, bytes

    def wait(self) -> float:
        """Until the tokens are in host memory; -> seconds the device worked."""
        if self.events is None:
            assert self.forward_s is not None
            return self.forward_s
        start, end, copied = self.events
        copied.synchronize()
        return start.elapsed_time(end) * 1e-3


class TorchEngine:
    """An `Engine` on the model's device.

    `block_size` is a multiple of 16; `max_model_len` at most the model's. `temperature` 0 takes the likeliest token, above
    it tokens are drawn, each by `seed`, request and position alone. `return_logits` keeps each step's logits on its handle.
    Raises BenchctlError for limits out of range, and where memory does not suffice, here or in a round.
    """

    name = "torch"

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int | None = None,
        attention: str = "reference",
        temperature: float = 0.0,
        seed: int = 0,
        return_logits: bool = False,
    ) -> None:
        config = model.config
        if max_model_len is None:
            max_model_len = config.max_position_embeddings
        self._check(model, num_blocks, block_size, max_model_len, attention, temperature)
        if model.team is not None:  # the other ranks build theirs
            model.team.build(
                "TorchEngine",
                num_blocks=num_blocks,
                block_size=block_size,
                max_model_len=max_model_len,
                attention=attention,
            )
        self.model = model
        self.limits = EngineLimits(num_blocks, block_size, max_model_len, config.vocab_size)
        self.temperature = temperature
        self.seed = seed
        self.return_logits = return_logits
        shape = (config.num_layers, num_blocks, block_size, model.local.num_kv_heads, config.head_dim)
        # Asked beforehand, since a CPU gives out memory that it does not have and ends the process later.
        if num_blocks * block_size * kv_bytes_per_token(model.local, model.dtype) > available_bytes(model.device):
            raise cache_out_of_memory(model, num_blocks, block_size)
        try:
            self.k_cache = torch.zeros(shape, dtype=model.dtype, device=model.device)
            self.v_cache = torch.zeros(shape, dtype=model.dtype, device=model.device)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self.close()
            raise cache_out_of_memory(model, num_blocks, block_size) from None
        self._attention: AttentionBackend | None = ATTENTION_BACKENDS[attention](self.k_cache, self.v_cache)
        self._fitting_bytes = 0  # CPU: the largest estimate of a pass that was found to fit
        self.watch: Watch | None = None
        self.work = Work(model)

    @staticmethod
    def _check(
        model: Model, num_blocks: int, block_size: int, max_model_len: int, attention: str, temperature: float
    ) -> None:
        if num_blocks < 1:
            raise BenchctlError(f"a pool of {num_blocks} blocks cannot hold a token", fix="give --num-blocks 1 or more")
        if block_size < 1 or block_size % BLOCK_SIZE_MULTIPLE:
            near = max(BLOCK_SIZE_MULTIPLE, block_size // BLOCK_SIZE_MULTIPLE * BLOCK_SIZE_MULTIPLE)
            raise BenchctlError(
                f"a block size of {block_size} is no multiple of {BLOCK_SIZE_MULTIPLE}",
                fix=f"--block-size {near}, or --engine null, which takes any",
            )
        longest = model.config.max_position_embeddings
        if not 1 <= max_model_len <= longest:
            raise BenchctlError(
                f"max_model_len {max_model_len} is outside 1 to {longest}, the positions of {model.name}",
                fix=f"--max-model-len {longest} or less",
            )
        if attention not in ATTENTION_BACKENDS:
            raise BenchctlError(
                f"no attention backend is called {attention!r}", fix=f"use one of {', '.join(ATTENTION_BACKENDS)}"
            )
        if not 0 <= temperature < float("inf"):
            raise BenchctlError(
                f"a temperature of {temperature} is not a number >= 0", fix="--temperature 0 takes the likeliest"
            )

    def launch(self, batch: ScheduledBatch) -> PendingStep:
        """Start a round. On a card it returns while the device works; the batch is not looked at afterwards."""
        return self.start(self.prepare(batch))

    def prepare(self, batch: ScheduledBatch) -> PreparedStep:
        """Lay out a round's inputs on the host; the device learns nothing yet."""
        began = time.perf_counter()
        model = self.model
        assert batch.num_seqs, "a round that schedules nothing is not launched"
        inputs = build_inputs(batch, self.limits.block_size, model.config.vocab_size)
        longest = int(inputs.context_lens.max(initial=0))
        assert longest <= (self.limits.max_model_len or 0), (longest, self.limits)
        if model.device.type == "cpu":
            self._require_forward_fits(inputs, longest)
        watched = None if self.watch is None else self.watch.rows(batch)
        return PreparedStep(inputs, longest, watched, time.perf_counter() - began)

    @torch.inference_mode()
    def start(self, step: PreparedStep) -> PendingStep:
        """Run a prepared round; on a card, have it run."""
        began = time.perf_counter() - step.prepare_s
        model, inputs, watched = self.model, step.inputs, step.watched
        assert self._attention is not None, "the engine was closed"
        try:
            if model.team is not None:
                model.team.round(inputs)
            attention = self._attention.prepare(inputs)
            if model.device.type == "cuda":
                return self._launch_on_card(inputs, attention, began, watched)
            prepared = time.perf_counter()
            token_ids, logits = self._forward(inputs, attention)
            ended = time.perf_counter()
            if watched is not None:
                assert self.watch is not None
                self.watch.keep(watched, logits, token_ids)
            kept = logits if self.return_logits else None
            work = self._work_of(inputs)
            return PendingStep(token_ids, kept, inputs.num_tokens, prepared - began, ended - prepared, None, work)
        except (RuntimeError, MemoryError) as error:
            if model.team is not None:
                model.team.explain(error)
            if not is_out_of_memory(error):
                raise
            raise self._out_of_memory(inputs, step.longest) from None

    @torch.inference_mode()
    def follow(self, inputs: BatchInputs) -> None:
        """This rank's part of a round that rank 0 announced."""
        assert self._attention is not None, "the engine was closed"
        device = self.model.device
        attention = self._attention.prepare(inputs)
        hidden = self.model.forward(to_device(inputs.token_ids, device), to_device(inputs.positions, device), attention)
        self.model.logits(hidden.index_select(0, to_device(inputs.yield_rows, device)))

    def _require_forward_fits(self, inputs: BatchInputs, longest: int) -> None:
        """The CPU gives out memory that it does not have: refuse a pass too large instead of being killed in it."""
        model = self.model
        needed = estimate_forward_bytes(
            model.local,
            model.dtype,
            model.device,
            num_tokens=inputs.num_tokens,
            num_seqs=len(inputs.yield_rows),
            max_context=longest,
        )
        if needed > self._fitting_bytes:
            if needed > available_bytes(model.device):
                raise self._out_of_memory(inputs, longest)
            self._fitting_bytes = needed

    def _out_of_memory(self, inputs: BatchInputs, longest: int) -> BenchctlError:
        tokens = self.limits.num_blocks * self.limits.block_size
        return forward_out_of_memory(self.model, inputs.num_tokens, inputs.num_seqs, longest, cache_tokens=tokens)

    def _launch_on_card(
        self, inputs: BatchInputs, attention: Attention, began: float, watched: WatchedRows | None
    ) -> PendingStep:
        stream = torch.cuda.current_stream(self.model.device)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        prepared = time.perf_counter()
        start.record(stream)
        on_device, logits = self._forward(inputs, attention)
        end.record(stream)
        token_ids = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=True)
        token_ids.copy_(on_device, non_blocking=True)
        if watched is not None:
            assert self.watch is not None
            self.watch.keep(watched, logits, on_device)
        copied = torch.cuda.Event()
        copied.record(stream)
        kept = logits if self.return_logits else None
        work = self._work_of(inputs)
        return PendingStep(token_ids, kept, inputs.num_tokens, prepared - began, None, (start, end, copied), work)

    def _work_of(self, inputs: BatchInputs) -> tuple[float, float]:
        pairs, read = int((inputs.positions + 1).sum()), int(inputs.context_lens.sum())
        return self.work.of_round(inputs.num_tokens, len(inputs.yield_rows), pairs, read)

    def _forward(self, inputs: BatchInputs, attention: Attention) -> tuple[Tensor, Tensor]:
        """-> (token ids [yields], their logits), on the device."""
        model, device = self.model, self.model.device
        hidden = model.forward(to_device(inputs.token_ids, device), to_device(inputs.positions, device), attention)
        # Only positions that yield a token are worth a row of the vocabulary's width.
        logits = model.logits(hidden.index_select(0, to_device(inputs.yield_rows, device)))
        token_ids = sample(logits, self.temperature, self.seed, inputs.yield_requests, inputs.yield_positions)
        return token_ids, logits

    def collect(self, handle: PendingStep) -> StepResult:
        """Wait for a round. `duration_s` is the device's time: the host's is measured by whoever calls."""
        if self.model.team is not None and handle.events is not None:
            self.model.team.wait(handle.events[2])
        device_s = handle.wait()
        return StepResult(
            token_ids=handle.token_ids.numpy().astype(np.int64, copy=False),
            device_s=device_s,
            duration_s=device_s,
            mode="eager",
            padded_tokens=handle.num_tokens,
            prepare_s=handle.prepare_s,
            flops=handle.work[0],
            bytes=handle.work[1],
        )

    def close(self) -> None:
        """Give the KV cache back. Rounds that were launched have to be collected before."""
        if self.model.team is not None:
            self.model.team.release()
        self._attention = None
        self.k_cache = self.v_cache = torch.empty(0)
