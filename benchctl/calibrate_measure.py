"""`benchctl calibrate --measure`: the rounds of `calibrate_grid` on a device, through the engine that a replay would use.

No prefill builds the contexts: block tables point at distinct blocks of a pool filled with seeded random keys and values. As
in a run, a round is launched while the one before it works, so that device times hold no wait for the host. Needs torch,
numpy and msgspec; what is measured goes to a file that `benchctl calibrate` fits elsewhere.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchctl import __version__
from benchctl.calibrate_grid import Case, GridLimits, design
from benchctl.calibrate_points import Point, Points, Setup, columns, save_points, seqs_of
from benchctl.config import ReplayOptions
from benchctl.engine_choice import choose_attention
from benchctl.manifest import base, now
from engines.interface import Engine, ScheduledBatch, StepResult
from engines.simulated.features import graph_sizes
from traces.errors import BenchctlError

SAVE_EVERY_S = 5.0
LONG_S = 0.1  # a round from here on is repeated once
FLOOR_TOKENS = 256  # a pool smaller than this measures nothing
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOptions:
    """`benchctl calibrate --measure` as given. None: as a replay would choose."""

    model: str | None = None
    dtype: str | None = None
    load_format: str = "auto"
    attention_backend: str = "auto"
    enforce_eager: bool = False
    block_sizes: tuple[int, ...] = (16, 256)
    max_num_seqs: int = 512
    max_num_batched_tokens: int = 16_384
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_tokens: int | None = None
    max_seconds: float = 60.0  # for the rounds of one block size
    seed: int = 0


def measure(options: MeasureOptions, path: Path, say: Say) -> Points:
    """Measure and write `path`, a few seconds apart and at the end. Raises BenchctlError."""
    check(options)
    try:
        import torch
    except ImportError:
        raise BenchctlError("measuring needs torch, which is not installed", fix="pip install torch") from None
    from engines.torch_engine.memory import max_kv_tokens
    from engines.torch_engine.parallel import load_parallel_model

    on_card = torch.cuda.is_available()
    name = options.model or ("qwen3-0.6b" if on_card else "tiny")
    began = time.perf_counter()
    model = load_parallel_model(
        name, 1, dtype=options.dtype or "auto", load_format=options.load_format, seed=options.seed
    )
    attention = choose_attention(
        ReplayOptions(trace="", attention_backend=options.attention_backend, enforce_eager=options.enforce_eager),
        on_card,
    )
    longest = model.config.max_position_embeddings
    max_model_len = min(options.max_model_len or longest, longest)
    tokens = options.kv_cache_tokens or max_kv_tokens(
        model,
        gpu_memory_utilization=options.gpu_memory_utilization,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs,
        max_model_len=max_model_len,
        attention=attention,
        block_size=min(options.block_sizes),
        enforce_eager=options.enforce_eager,
    )
    say(f"{model.name} loaded after {time.perf_counter() - began:.1f} s; {tokens:,} tokens of KV cache")
    facts = base()
    points = Points(
        created=now(),
        benchctl=__version__,
        versions=facts["versions"],
        hardware=facts["hardware"],
        device=torch.cuda.get_device_name(0) if on_card else "CPU",
        model=model.name,
        dtype=str(model.dtype).removeprefix("torch."),
        attention_backend=attention,
        enforce_eager=options.enforce_eager,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=max_model_len,
        seed=options.seed,
        complete=False,
        setups=(),
        points=(),
        readings=readings("start"),
    )
    for block_size in options.block_sizes:
        began = time.perf_counter()
        engine = build(model, attention, options, block_size, tokens, max_model_len)
        fill(engine, options.seed)
        ready_s = time.perf_counter() - began
        limits = GridLimits(
            tokens // block_size * block_size,
            block_size,
            options.max_num_seqs,
            options.max_num_batched_tokens,
            max_model_len,
        )
        graphs = graph_sizes(options.max_num_seqs, options.max_num_batched_tokens).decode
        cases = [case for part in design(limits, graphs) for case in part]
        say(
            f"block size {block_size}: ready after {ready_s:.1f} s; {len(cases)} rounds, {options.max_seconds:g} s at most"
        )
        before = points

        def keep(
            found: list[Point], seconds: float, before: Points = before, block_size: int = block_size,
            ready_s: float = ready_s, planned: int = len(cases),
        ) -> Points:  # fmt: skip
            setup = Setup(
                block_size=block_size, kv_cache_tokens=tokens // block_size * block_size, ready_s=ready_s, measured_s=seconds,
                planned=planned, measured=len(found),
            )  # fmt: skip
            kept = msgspec.structs.replace(before, setups=(*before.setups, setup), points=(*before.points, *found))
            save_points(kept, path)
            return kept

        try:
            points = run_cases(engine, cases, block_size, options, keep)
        finally:
            engine.close()
            del engine
            gc.collect()
            if on_card:
                torch.cuda.empty_cache()
        last = points.setups[-1]
        left = f", {last.planned - last.measured} left out for want of time" if last.measured < last.planned else ""
        say(f"block size {block_size}: {last.measured} rounds in {last.measured_s:.1f} s{left}")
    points = msgspec.structs.replace(
        points,
        complete=all(setup.measured == setup.planned for setup in points.setups),
        readings=(*points.readings, *readings("end")),
    )
    save_points(points, path)
    return points


def check(options: MeasureOptions) -> None:
    """Raises BenchctlError for what no engine could be built with."""
    for flag, value in (
        ("--max-num-seqs", options.max_num_seqs),
        ("--max-num-batched-tokens", options.max_num_batched_tokens),
        ("--max-model-len", options.max_model_len),
        ("--kv-cache-tokens", options.kv_cache_tokens),
        *(("--block-size", size) for size in options.block_sizes),
    ):
        if value is not None and value < 1:
            raise BenchctlError(f"{flag} is {value}", fix="give 1 or more")
    if not options.max_seconds > 0:
        raise BenchctlError(f"--max-seconds is {options.max_seconds:g}", fix="give a number above 0")
    if len(set(options.block_sizes)) < len(options.block_sizes):
        raise BenchctlError("a block size is given twice", where="--block-size", fix="give each once")
    if options.kv_cache_tokens is not None and options.kv_cache_tokens < max(FLOOR_TOKENS, *options.block_sizes):
        raise BenchctlError(
            f"a pool of {options.kv_cache_tokens} tokens holds no round worth measuring",
            where="--kv-cache-tokens",
            fix=f"give {max(FLOOR_TOKENS, *options.block_sizes)} or more",
        )


def build(
    model: Any, attention: str, options: MeasureOptions, block_size: int, tokens: int, max_model_len: int
) -> Engine:
    """The engine of a replay with these limits. Raises BenchctlError."""
    num_blocks = tokens // block_size
    if attention == "triton":
        from engines.torch_engine.triton_engine import TritonEngine

        return TritonEngine(
            model,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_num_seqs=options.max_num_seqs,
            max_model_len=max_model_len,
            seed=options.seed,
            enforce_eager=options.enforce_eager,
        )
    from engines.torch_engine.engine import TorchEngine

    return TorchEngine(
        model, num_blocks=num_blocks, block_size=block_size, max_model_len=max_model_len, seed=options.seed
    )


def fill(engine: Any, seed: int) -> None:
    """Seeded normal keys and values in the whole pool, layer by layer."""
    import torch

    generator = torch.Generator(device=engine.k_cache.device).manual_seed(seed)
    with torch.inference_mode():
        for cache in (engine.k_cache, engine.v_cache):
            for layer in cache:
                layer.normal_(generator=generator)


def run_cases(
    engine: Engine,
    cases: Sequence[Case],
    block_size: int,
    options: MeasureOptions,
    keep: Callable[[list[Point], float], Points],
) -> Points:
    """Measure each round until the time is up. `keep` is told now and then, and last."""
    rng = np.random.default_rng(options.seed)
    blocks = rng.permutation(engine.limits.num_blocks)
    longest = max(group.start + group.num_tokens for case in cases for group in case) if cases else 0
    # Sequences read one array of ids from places of their own: rows alike would draw less power than real ones.
    ids = rng.integers(0, engine.limits.vocab_size or 1, longest + 4096)
    began = saved = time.perf_counter()
    found: list[Point] = []
    next_request = 0
    for case in cases:
        if time.perf_counter() - began > options.max_seconds:
            break
        batch = batch_of(case, block_size, blocks, ids, next_request)
        next_request += batch.num_seqs
        found.append(run_case(engine, case, batch, block_size))
        if time.perf_counter() - saved > SAVE_EVERY_S:
            keep(found, time.perf_counter() - began)
            saved = time.perf_counter()
    return keep(found, time.perf_counter() - began)


def batch_of(case: Case, block_size: int, blocks: Any, ids: Any, first_request: int) -> ScheduledBatch:
    """The round on distinct blocks of the pool, each sequence a request of its own."""
    start, num_tokens, is_decode = columns(case)
    n, ends = len(start), start + num_tokens
    num_blocks = -(-ends // block_size)
    edges = np.concatenate([[0], np.cumsum(num_blocks)]).tolist()
    offsets = np.random.default_rng(first_request).integers(0, 4096, n).tolist()
    return ScheduledBatch(
        request=np.arange(first_request, first_request + n),
        start=start,
        num_tokens=num_tokens,
        is_decode=is_decode,
        yields_token=np.ones(n, dtype=np.bool_),
        cached_tokens=start.copy(),  # of an admission: its block table is sent whole
        num_blocks=num_blocks,
        block_tables=[blocks[a:b].tolist() for a, b in zip(edges, edges[1:], strict=False)],
        token_ids=[ids[at : at + end] for at, end in zip(offsets, ends.tolist(), strict=True)],
    )


def run_case(engine: Engine, case: Case, batch: ScheduledBatch, block_size: int) -> Point:
    """Its block tables are sent in a first round; then the round is repeated, each launched while the one before it works."""
    first_s = engine.collect(engine.launch(batch)).device_s or 0.0
    steady = replace(batch, cached_tokens=np.full(batch.num_seqs, -1))
    results: list[StepResult] = []
    ended: list[float] = []
    handle = engine.launch(steady)
    for _ in range(repeats_for(first_s)):
        following = engine.launch(steady)
        results.append(engine.collect(handle))
        ended.append(time.perf_counter())
        handle = following
    results.append(engine.collect(handle))
    # The first of them began on an idle device, waiting for its own launch: that is nothing in a long round only.
    timed = results if first_s > LONG_S else results[1:]
    return Point(
        block_size=block_size,
        seqs=seqs_of(case),
        mode=timed[0].mode,
        padded_tokens=timed[0].padded_tokens,
        device_s=tuple(round(r.device_s or 0.0, 9) for r in timed),
        # Not of the last: nothing was launched after it, and on the CPU it had ended long before it was collected.
        step_s=tuple(round(b - a, 9) for a, b in zip(ended, ended[1:], strict=False)),
        prepare_s=tuple(round(r.prepare_s, 9) for r in timed),
    )


def repeats_for(seconds: float) -> int:
    """Short rounds scatter more and cost less."""
    return 9 if seconds < 0.01 else 5 if seconds < 0.04 else 3 if seconds < LONG_S else 1


def readings(when: str) -> tuple[str, ...]:
    """One line of the card's clocks, power and temperature; none without nvidia-smi."""
    fields = "clocks.sm,clocks.mem,power.draw,temperature.gpu"
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    line = answer.stdout.strip().splitlines()
    return (f"{when}: {fields} = {line[0]}",) if answer.returncode == 0 and line else ()


def to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
