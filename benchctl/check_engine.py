"""A random campaign against the engine: random models under both policies in tight memory, each logit held against plain torch.

A case is replayed twice: as it would be (rounds overlapped, CUDA graphs where there are any) and plainly (one round after the
other, no graphs). Both have to run the same batches over the same blocks, and both have to compute what the reference does.
Seeded: a number of a campaign is the same case on every machine, but for what the device takes.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from benchctl.build import build_command, build_run
from benchctl.config import ReplayOptions
from benchctl.runner import run_one
from benchctl.shrink_rows import Rows, write_rows
from engines.interface import Engine, ScheduledBatch, StepResult
from engines.model.config import PRESETS, Llama3RopeScaling, ModelConfig
from traces.errors import BenchctlError
from traces.header import Header

MAX_LEN = 4096


@dataclass(frozen=True, slots=True)
class EngineCase:
    """A random model, a random trace, and how it is run."""

    number: int
    config: ModelConfig
    rows: Rows
    options: ReplayOptions
    attention: str

    @property
    def text(self) -> str:
        c, o = self.config, self.options
        return (
            f"{self.attention}, {o.schedulers[0]}, {o.dtype}, {c.num_heads}/{c.num_kv_heads} heads of {c.head_dim}, hidden {c.hidden_size}, "
            f"{c.num_layers} layers, block {o.knobs['block_size']}, {o.num_blocks} blocks, {len(self.rows)} requests"
        )


@dataclass(slots=True)
class EngineCampaign:
    """What a campaign came to. `broken`: [{case, text, what}]."""

    seed: int
    seconds: float = 0.0
    cases: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    max_error: dict[str, float] = field(default_factory=dict)  # by dtype
    broken: list[dict[str, Any]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "seconds": round(self.seconds, 3),
            "cases": self.cases,
            "counts": dict(self.counts),
            "max_error": self.max_error,
            "broken": self.broken,
        }


class Spy:
    """An engine whose batches are hashed and whose rounds are counted on the way."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.name, self.limits = engine.name, engine.limits
        self.digest = xxhash.xxh3_128()
        self.counts: Counter[str] = Counter()
        self.seen: set[int] = set()

    def launch(self, batch: ScheduledBatch) -> Any:
        return self.engine.start(self.prepare(batch))

    def prepare(self, batch: ScheduledBatch) -> Any:
        columns = (
            batch.request,
            batch.start,
            batch.num_tokens,
            batch.yields_token,
            batch.cached_tokens,
            batch.num_blocks,
        )
        for column in columns:
            self.digest.update(np.ascontiguousarray(column, dtype=np.int64).tobytes())
        for table in batch.block_tables:
            self.digest.update(np.asarray(table, dtype=np.int64).tobytes())
        admitted = batch.request[batch.cached_tokens >= 0].tolist()
        self.counts["resumed"] += sum(request in self.seen for request in admitted)
        self.seen.update(admitted)
        self.counts["rounds"] += 1
        self.counts["prefix hits"] += int((batch.cached_tokens > 0).sum())
        self.counts["chunks"] += int((~batch.yields_token).sum())
        self.counts["mixed rounds"] += bool(batch.is_decode.any() and not batch.is_decode.all())
        return self.engine.prepare(batch)

    def start(self, prepared: Any) -> Any:
        return self.engine.start(prepared)

    def collect(self, handle: Any) -> StepResult:
        result: StepResult = self.engine.collect(handle)
        self.counts[f"{result.mode} rounds"] += 1
        return result

    def close(self) -> None:
        self.engine.close()


def check_engine(
    *,
    seed: int,
    seconds: float | None = None,
    cases: int | None = None,
    only: int | None = None,
    backend: str = "auto",
    most: int = 3,
    say: Callable[[str], None] = lambda text: None,
) -> EngineCampaign:
    """Run cases until `seconds` are over or `cases` are done (at least one), or case `only` alone; stops at `most` faults."""
    campaign = EngineCampaign(seed)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="benchctl-check-") as folder:
        number = 0 if only is None else only
        while True:
            case = make_case(seed, number, backend)
            try:
                fault = run_case(case, Path(folder), campaign)
            except BenchctlError as error:
                fault = str(error)
            except Exception as error:  # an engine may break in any way: the case is what is wanted
                fault = f"{type(error).__name__}: {error}"
            campaign.cases += 1
            if fault is not None:
                say(f"case {number} broke: {fault.splitlines()[0]}")
                campaign.broken.append({"case": number, "text": case.text, "what": fault})
            number += 1
            campaign.seconds = time.monotonic() - began
            over = seconds is not None and campaign.seconds >= seconds
            if only is not None or over or campaign.cases == cases or len(campaign.broken) >= most:
                return campaign
            if campaign.cases % 10 == 0:
                say(f"{campaign.cases} cases, {campaign.counts['positions']:,} positions, {campaign.seconds:.0f} s")


def run_case(case: EngineCase, folder: Path, campaign: EngineCampaign) -> str | None:
    """What is wrong with the case, in words; None: nothing."""
    from engines.torch_engine.verify import Watch, verify

    trace = folder / "case.jsonl"
    write_rows(trace, Header(salt="check"), case.rows)
    found: list[tuple[str, Any]] = []
    with preset(case):
        for plain in (False, True):
            how = "plainly" if plain else "overlapped"
            options = replace(case.options, trace=str(trace), overlap=not plain, enforce_eager=plain)
            command = build_command(options)
            command.engine.attention = case.attention
            (policy,) = command.policies
            parts = build_run(command, policy, None)
            watch = Watch(0, seed=0, vocab_size=case.config.vocab_size, everything=True)
            parts.engine.watch = watch  # type: ignore[attr-defined]
            spy = Spy(parts.engine)
            engine: Engine = spy
            try:
                result = run_one(replace(parts, engine=engine), None, threading.Event())
            finally:
                spy.close()
            if result.error is not None:
                raise result.error
            assert result.outcome.finished == result.outcome.admitted, result.outcome
            check = verify(command.engine.model, watch, temperature=options.temperature, seed=options.seed)
            dtype = check.dtype
            campaign.max_error[dtype] = max(campaign.max_error.get(dtype, 0.0), check.max_error)
            campaign.counts["positions"] += check.positions
            campaign.counts["requests"] += len(check.requests)
            campaign.counts["preemptions"] += result.outcome.preemptions
            campaign.counts += spy.counts
            if not check.passed:
                worst = max(check.requests, key=lambda r: (r.max_error != r.max_error, r.max_error))
                return (
                    f"{how}: relative error of logits up to {check.max_error:.3g} (tolerance {check.tolerance:g}), same token at "
                    f"{check.agreement_beyond_rounding:.1%} but for rounding; worst: request {worst.request} ({worst.kind})"
                )
            found.append((spy.digest.hexdigest(), watch))
    if found[0][0] != found[1][0]:
        return "batches or block tables differ between overlapped and plain rounds"
    return differ(found[0][1], found[1][1])


def differ(one: Any, other: Any) -> str | None:
    """Where two watches of the same run kept different positions; None: they kept the same ones."""
    for request in sorted(set(one.ids) | set(other.ids)):
        if request not in one.ids or request not in other.ids:
            return f"request {request} yielded tokens in one of two equal runs only"
        positions, again = one.of_request(request)[0], other.of_request(request)[0]
        if not np.array_equal(positions, again):
            return f"request {request} yielded tokens at other positions the second time"
    return None


@contextmanager
def preset(case: EngineCase) -> Iterator[None]:
    """The case's model under its name."""
    name = str(case.options.model)
    PRESETS[name] = case.config
    try:
        yield
    finally:
        del PRESETS[name]


def make_case(seed: int, number: int, backend: str = "auto") -> EngineCase:
    """Case `number` of a campaign: a model of up to three layers, memory for a few of its requests."""
    import torch

    draw = np.random.default_rng([seed, number, 0x656E67])
    on_card = torch.cuda.is_available()
    interpreted = not on_card and os.environ.get("TRITON_INTERPRET") == "1"

    def chance(share: float) -> bool:
        return bool(draw.random() < share)

    def between(low: int, high: int) -> int:
        return int(draw.integers(low, high + 1))

    def one_of(*values: Any) -> Any:
        return values[int(draw.integers(len(values)))]

    # Drawn in the same order everywhere, whatever the device makes of it.
    use_triton, dtype, scheduler = (
        chance(0.85),
        one_of("bfloat16", "bfloat16", "float16", "float32"),
        one_of("nano", "vllm"),
    )
    head_dim, kv_heads, group = one_of(64, 80, 96, 128, 256), one_of(1, 2, 3, 4, 8), one_of(1, 2, 3, 4, 5, 7, 8)
    family, tied = one_of("llama", "qwen2", "qwen3"), chance(0.5)
    config = ModelConfig(
        model_type=family,
        vocab_size=one_of(211, 1000, 4099, 32_000),
        hidden_size=16 * between(4, 64),
        intermediate_size=16 * between(4, 96),
        num_layers=between(1, 3),
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=MAX_LEN,
        rope_theta=one_of(10_000.0, 1_000_000.0),
        rope_scaling=Llama3RopeScaling(8.0, 1.0, 4.0, 64) if family == "llama" and chance(0.5) else None,
        tie_word_embeddings=tied,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )
    attention = {"auto": "triton" if use_triton and on_card else "reference"}.get(backend, backend)
    if attention == "triton" and not (on_card or interpreted):
        raise BenchctlError(
            "Triton's kernels need a card, or the interpreter",
            fix="TRITON_INTERPRET=1, or --attention-backend reference",
        )
    if not on_card:
        small = {"num_heads": min(kv_heads, 2) * min(group, 3), "num_kv_heads": min(kv_heads, 2), "num_layers": 1}
        config = replace(
            config, hidden_size=16 * (config.hidden_size % 64 // 16 + 3), intermediate_size=96, vocab_size=211, **small
        )
        if attention == "triton":
            dtype = "float32"

    block_size = one_of(16, 16, 32, 48, 64, 128, 256)
    slow = attention == "triton" and not on_card  # the interpreter: seconds a round
    longest = between(2, 6) * max(block_size, 32) if on_card else between(2, 4) * (16 if slow else max(block_size, 24))
    usable = -(-int(longest * (1.05 + 1.2 * draw.random())) // block_size)
    seats = between(2, 12)
    knobs: dict[str, Any] = {
        "block_size": block_size,
        "max_num_seqs": seats,
        "max_num_batched_tokens": max(seats, between(1, 2) * longest // one_of(1, 2, 4, 8)),
        "enable_prefix_caching": chance(0.85),
    }
    if scheduler == "vllm":
        if chance(0.3):
            knobs["long_prefill_token_threshold"] = between(8, 64)
        if chance(0.2):
            knobs["scheduler_reserve_full_isl"] = True
    else:
        knobs["max_num_batched_tokens"] = max(
            knobs["max_num_batched_tokens"], longest
        )  # nano computes a prompt at once
    rows: Rows = []
    for i in range(between(2, 16 if on_card else 2 if slow else 10)):
        output = between(1, min(60 if on_card else 3 if slow else 40, longest * 2 // 3))
        prompt = between(1, longest - output)
        row: dict[str, Any] = {
            "id": f"R{i + 1}",
            "arrival_s": float(between(0, 12)) if chance(0.7) else 0.0,
            "input_length": prompt,
            "output_length": output,
        }
        if chance(0.6):
            row["segments"] = [{"id": between(0, 1), "len": between(1, prompt) if chance(0.5) else prompt}]
        rows.append(row)
    rows.sort(key=lambda row: row["arrival_s"])
    options = ReplayOptions(
        trace="", schedulers=(scheduler,), engine="torch", model=f"random-{seed}-{number}", dtype=dtype, seed=number, clock="rounds",
        knobs=knobs, num_blocks=usable + (scheduler == "vllm"), temperature=one_of(0.0, 0.0, 0.8), records="none", report=False,
    )  # fmt: skip
    return EngineCase(number, config, rows, options, attention)
