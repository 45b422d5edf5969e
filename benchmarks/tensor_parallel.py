"""A model split over N processes against the model in one: logits, tokens, and the time of a decode step.

    python benchmarks/tensor_parallel.py logits --model qwen3-0.6b --dtype bfloat16 --ranks 2 [--json FILE]
    python benchmarks/tensor_parallel.py steps --model qwen3-8b --ranks 2 [--batches 1,64,256] [--json FILE]

Dummy weights. On CUDA by the Triton engine and NCCL, elsewhere by the plain engine and gloo (which is only for trying it out).
Errors are relative, of the logits of a position (L2 norm of the difference over that of N = 1); steps are wall times between
collected rounds, the next one launched meanwhile, medians after a warm-up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engines.interface import NewRequest, SchedulerConfig
from engines.schedulers.registry import SCHEDULERS
from engines.torch_engine.parallel import load_parallel_model

BLOCK_SIZE = 16


def build(
    args: argparse.Namespace, ranks: int, tokens: int, seqs: int, budget: int, **options: Any
) -> tuple[Any, Any, float]:
    """(model, engine, seconds until both stood)."""
    began = time.perf_counter()
    model = load_parallel_model(args.model, ranks, dtype=args.dtype)
    limits: dict[str, Any] = {"num_blocks": tokens // BLOCK_SIZE + 1, "block_size": BLOCK_SIZE, **options}
    if model.device.type == "cuda":
        from engines.torch_engine.triton_engine import TritonEngine

        engine: Any = TritonEngine(
            model,
            max_num_batched_tokens=budget,
            max_num_seqs=seqs,
            max_model_len=2048,
            enforce_eager=args.enforce_eager,
            **limits,
        )
    else:
        from engines.torch_engine.engine import TorchEngine

        engine = TorchEngine(model, max_model_len=2048, **limits)
    return model, engine, time.perf_counter() - began


def close(model: Any, engine: Any) -> None:
    engine.close()
    if model.team is not None:
        model.team.close()


def scheduler_for(tokens: int, seqs: int, budget: int) -> Any:
    config = SchedulerConfig(
        num_blocks=tokens // BLOCK_SIZE + 1,
        block_size=BLOCK_SIZE,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_model_len=2048,
    )
    return SCHEDULERS["vllm"].build(config)


def add(scheduler: Any, row: int, prompt: int, output: int, vocab: int) -> None:
    ids = np.random.default_rng(row).integers(0, vocab, prompt + output)
    assert scheduler.add(NewRequest(row, f"r{row}", prompt, output, lambda: ids)) is None


def logits(args: argparse.Namespace) -> dict[str, Any]:
    """Chunks, decodes and mixed rounds of 12 requests: the logits of every yielding position, N against 1."""
    kept: list[tuple[list[tuple[int, int]], torch.Tensor, np.ndarray]] = []
    ready = []
    for ranks in (1, args.ranks):
        model, engine, seconds = build(args, ranks, 8192, 16, 512, return_logits=True)
        ready.append(seconds)
        scheduler = scheduler_for(8192, 16, 512)
        for row in range(12):
            add(scheduler, row, 20 + 53 * row, 12, model.config.vocab_size)
        places: list[tuple[int, int]] = []
        rows, tokens = [], []
        while scheduler.has_unfinished():
            round = scheduler.schedule()
            batch, handle = round.batch, engine.launch(round.batch)
            ends = (batch.start + batch.num_tokens)[batch.yields_token]
            places += list(zip(batch.request[batch.yields_token].tolist(), ends.tolist(), strict=True))
            result = engine.collect(handle)
            rows.append(handle.logits.float().cpu())
            tokens.append(result.token_ids)
            scheduler.update(round, result.token_ids)
        kept.append((places, torch.cat(rows), np.concatenate(tokens)))
        close(model, engine)
    (places, one, chosen), (again, many, chosen_too) = kept
    assert places == again, "the rounds differ"
    error = (many - one).norm(dim=1) / one.norm(dim=1)
    return {
        "positions": len(places), "max_error": float(error.max()), "mean_error": float(error.mean()),
        "same_token": float((chosen == chosen_too).mean()), "ready_s": ready,
    }  # fmt: skip


def steps(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds a decode step at ~1k context, for 1 and N ranks."""
    out: dict[str, Any] = {}
    batches = [int(n) for n in args.batches.split(",")]
    most = max(batches)
    tokens = most * (args.context + args.steps + 64) // BLOCK_SIZE * BLOCK_SIZE + 64 * BLOCK_SIZE
    budget = 8192
    for ranks in (1, args.ranks):
        model, engine, seconds = build(args, ranks, tokens, max(most, 16), budget)
        out[f"{ranks} ready_s"] = seconds
        row = 0
        for batch in batches:
            scheduler = scheduler_for(tokens, max(most, 16), budget)
            for _ in range(batch):
                row += 1
                add(scheduler, row, args.context, args.steps + 40, model.config.vocab_size)
            while True:
                round = scheduler.schedule()
                result = engine.collect(engine.launch(round.batch))
                scheduler.update(round, result.token_ids)
                if bool(round.batch.is_decode.all()):
                    break
            walls, devices, pending, last = [], [], None, None
            for step in range(args.steps + 5):
                round = scheduler.schedule()
                handle = engine.launch(round.batch)
                scheduler.update(round, None)
                if pending is not None:
                    result = engine.collect(pending)
                    now = time.perf_counter()
                    if last is not None and step > 5:
                        walls.append((now - last) * 1e3)
                        devices.append(result.device_s * 1e3)
                    last = now
                pending = handle
            result = engine.collect(pending)
            out[f"{ranks} batch {batch}"] = {
                "wall_ms": statistics.median(walls), "device_ms": statistics.median(devices), "mode": result.mode, "raw_ms": [round_(w) for w in walls],
            }  # fmt: skip
            print(
                f"N={ranks} batch {batch}: wall {statistics.median(walls):.2f} ms, device {statistics.median(devices):.2f} ms, {result.mode}",
                flush=True,
            )
        close(model, engine)
    return out


def round_(value: float) -> float:
    return float(f"{value:.4g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("logits", "steps"))
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batches", default="1,64,256")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = logits(args) if args.what == "logits" else steps(args)
    about = {key: str(value) for key, value in vars(args).items() if key != "json"}
    where = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"
    found = {"about": about, "device": where, "torch": torch.__version__, **found}
    print(json.dumps({key: value for key, value in found.items() if not isinstance(value, dict) or key == "about"}))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
