"""Speed of the engine on a CUDA device: decode and prefill steps, offline throughput, an arrival-timed trace.

    python benchmarks/engine.py steps --model qwen3-0.6b [--json FILE]     decode and prefill steps (W2, W3)
    python benchmarks/engine.py offline --model qwen3-8b [--json FILE]     256 requests at once (W1)
    python benchmarks/engine.py arrivals --model qwen3-8b --rate 20        400 Poisson arrivals (W4)

Dummy weights, bf16. Every figure is printed beside its floor: the bytes that have to move at the card's measured copy rate, or
the operations at its measured matrix rate, whichever is longer. `ready` is the time from the start of the process to the
first round. `arrivals` is `benchctl replay` with all records; `steps` and `offline` drive schedulers and engine without them
(benchmarks/gpu_measure.sh has the product's whole runs of both).
"""

from __future__ import annotations

import time

PROCESS_BEGAN = time.perf_counter()

import argparse  # noqa: E402
import functools  # noqa: E402
import json  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
import workloads  # noqa: E402

from engines.interface import NewRequest, SchedulerConfig  # noqa: E402
from engines.model.load import load_model  # noqa: E402
from engines.schedulers.registry import SCHEDULERS  # noqa: E402
from engines.torch_engine.triton_engine import TritonEngine  # noqa: E402

COPY_BYTES_PER_S = 4.26e12  # H200, device-to-device copy of 4 GiB, read and written
MATRIX_FLOPS_PER_S = 795e12  # H200, bf16 product n = 8192, random data


# vLLM 0.26.0 at its defaults, FlashAttention 3, one H200, another machine: ms a step, output tokens/s; the lowest of its passes.
ANCHORS: dict[str, dict[str, float]] = {
    "qwen3-0.6b": {
        "decode 1": 1.72, "decode 8": 1.82, "decode 64": 3.71, "decode 256": 10.15, "prefill 1x128": 8.7, "prefill 1x1024": 19.6,
        "prefill 8x1024": 24.5, "prefill 16x1024": 44.7, "prefill 4x4095": 52.3, "offline": 21_400,
    },
    "qwen3-8b": {
        "decode 1": 5.22, "decode 8": 5.71, "decode 64": 7.93, "decode 256": 18.66, "prefill 1x128": 12.0, "prefill 1x1024": 33.2,
        "prefill 8x1024": 187.8, "prefill 16x1024": 371.7, "prefill 4x4095": 390.0, "offline": 9_390,
        "p50_ttft_ms 20": 28.6, "p99_ttft_ms 20": 102.6, "p50_itl_ms 20": 5.83, "p99_itl_ms 20": 44.7,
        "p50_ttft_ms 50": 51.4, "p99_ttft_ms 50": 118.8, "p50_itl_ms 50": 7.18, "p99_itl_ms 50": 46.1,
    },
}  # fmt: skip


def against(bench: Bench, what: str, value: float, floor: float) -> str:
    """measured ÷ floor and ÷ anchor."""
    anchor = ANCHORS.get(bench.model_name, {}).get(what)
    return f"÷ floor {value / floor:.2f}" + (f"  ÷ vLLM {value / anchor:.2f}" if anchor else "")


def floor_ms(flops: float, num_bytes: float) -> float:
    return max(flops / MATRIX_FLOPS_PER_S, num_bytes / COPY_BYTES_PER_S) * 1e3


def timed(parts: dict[str, float], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function; how long its calls take goes to parts[name], seconds."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            parts[name] = parts.get(name, 0.0) + time.perf_counter() - began

    return call


class Bench:
    """A model and an engine for one policy."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.name, self.model_name = args.scheduler, args.model
        info = SCHEDULERS[self.name]
        self.parts = {"imports": time.perf_counter() - PROCESS_BEGAN}
        self.model = timed(self.parts, "model", load_model)(args.model)
        for name, part in (("_compile_kernels", "compile"), ("_load_kernels", "load"), ("_capture_graphs", "graphs")):
            setattr(TritonEngine, name, timed(self.parts, part, getattr(TritonEngine, name)))
        block_size = info.default_block_size
        tokens = args.kv_tokens // 256 * 256
        num_blocks = tokens // block_size + info.null_blocks
        self.config = SchedulerConfig(
            num_blocks=num_blocks, block_size=block_size, max_num_seqs=512, max_model_len=4096
        )
        self.engine = TritonEngine(
            self.model,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_num_seqs=512,
            max_model_len=4096,
            temperature=0.6,
            enforce_eager=args.enforce_eager,
        )
        self.rows = 0

    def scheduler(self) -> Any:
        return SCHEDULERS[self.name].build(self.config)

    def request(self, prompt: int, output: int) -> NewRequest:
        self.rows += 1
        ids = np.random.default_rng(self.rows).integers(0, 10_000, prompt + output)
        return NewRequest(self.rows, f"r{self.rows}", prompt, output, lambda: ids)


def decode(bench: Bench, batch: int, steps: int = 100) -> dict[str, float]:
    """`batch` sequences of 1,024 prompt tokens, then `steps` steps, the next one prepared while the device works."""
    scheduler, engine = bench.scheduler(), bench.engine
    for _ in range(batch):
        scheduler.add(bench.request(1024, steps + 40))
    while True:
        round = scheduler.schedule()
        scheduler.update(round, engine.collect(engine.launch(round.batch)).token_ids)
        if bool(round.batch.is_decode.all()):
            break
    walls, devices, prepares, floors, pending = [], [], [], [], None
    last = None
    for step in range(steps + 10):
        round = scheduler.schedule()
        handle = engine.launch(round.batch)
        scheduler.update(round, None)
        if pending is not None:
            result = engine.collect(pending)
            now = time.perf_counter()
            if step > 10 and last is not None:
                walls.append((now - last) * 1e3)
                devices.append((result.device_s or 0) * 1e3)
                prepares.append(result.prepare_s * 1e3)
                floors.append(floor_ms(result.flops or 0, result.bytes or 0))
            last = now
        pending = handle
    engine.collect(pending)
    return {
        "wall_ms": statistics.fmean(walls),
        "wall_ms_median": statistics.median(walls),
        "device_ms": statistics.median(devices),
        "prepare_ms": statistics.median(prepares),
        "floor_ms": statistics.fmean(floors),  # of the same steps: contexts grow
    }


def prefill(bench: Bench, count: int, length: int, repeats: int = 5) -> dict[str, float]:
    """One round that computes `count` fresh prompts of `length` tokens and gives a token each; median of `repeats`."""
    walls, devices, hosts, floor = [], [], [], 0.0
    for _ in range(repeats + 1):
        scheduler = bench.scheduler()
        for _ in range(count):
            scheduler.add(bench.request(length, 1))
        torch.cuda.synchronize()
        began = time.perf_counter()
        device, host, floor = 0.0, 0.0, 0.0
        while scheduler.has_unfinished():
            started = time.perf_counter()
            round = scheduler.schedule()
            host += (time.perf_counter() - started) * 1e3
            result = bench.engine.collect(bench.engine.launch(round.batch))
            host += result.prepare_s * 1e3
            scheduler.update(round, result.token_ids)
            device += (result.device_s or 0) * 1e3
            floor += floor_ms(result.flops or 0, result.bytes or 0)
        walls.append((time.perf_counter() - began) * 1e3)
        devices.append(device)
        hosts.append(host)
    return {
        "wall_ms": statistics.median(walls[1:]),
        "device_ms": statistics.median(devices[1:]),
        "schedule_and_prepare_ms": statistics.median(hosts[1:]),
        "floor_ms": floor,
    }


def steps(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for batch in (1, 8, 64, 256) if "decode" in args.only else ():
        r = min((decode(bench, batch) for _ in range(args.repeats)), key=lambda r: r["wall_ms"])
        out[f"decode {batch}"] = r
        print(
            f"decode {batch:4}: wall {r['wall_ms']:7.3f} ms  device {r['device_ms']:7.3f}  prepare {r['prepare_ms']:.3f}  floor {r['floor_ms']:6.3f}  "
            f"{against(bench, f'decode {batch}', r['wall_ms'], r['floor_ms'])}",
            flush=True,
        )
    for count, length in () if "prefill" not in args.only else ((1, 128), (1, 1024), (8, 1024), (16, 1024), (4, 4095)):
        r = prefill(bench, count, length)
        out[f"prefill {count}x{length}"] = r
        print(
            f"prefill {count:2} x {length}: wall {r['wall_ms']:7.2f} ms  device {r['device_ms']:7.2f}  host before {r['schedule_and_prepare_ms']:.2f}  floor {r['floor_ms']:6.2f}  {against(bench, f'prefill {count}x{length}', r['wall_ms'], r['floor_ms'])}",
            flush=True,
        )
    return out


def offline_requests(bench: Bench) -> list[NewRequest]:
    """The lengths of nano-vLLM's bench; ids from a generator of their own."""
    rows = workloads.offline()
    return [bench.request(int(row["input_length"]), int(row["output_length"])) for row in rows]


def offline(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    runs = []
    for _ in range(args.repeats):
        scheduler, engine = bench.scheduler(), bench.engine
        requests = offline_requests(bench)
        output = sum(r.num_output_tokens for r in requests)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for request in requests:
            scheduler.add(request)
        pending, device, rounds, floor = None, 0.0, 0, 0.0
        while scheduler.has_unfinished() or pending is not None:
            handle = None
            if scheduler.has_unfinished():
                round = scheduler.schedule()
                handle = engine.launch(round.batch)
                scheduler.update(round, None)
                rounds += 1
            if pending is not None:
                result = engine.collect(pending)
                device += result.device_s or 0
                floor += floor_ms(result.flops or 0, result.bytes or 0) * 1e-3
            pending = handle
        wall = time.perf_counter() - began
        runs.append(
            {
                "tok_s": output / wall,
                "wall_s": wall,
                "device_s": device,
                "rounds": rounds,
                "floor_s": floor,
                "output_tokens": output,
            }
        )
        print(
            f"offline {bench.name}: {output / wall:8.0f} tok/s  wall {wall:.3f} s  device {device:.3f}  floor {floor:.3f}  rounds {rounds}  {against(bench, 'offline', output / wall, output / floor)}",
            flush=True,
        )
    return {"runs": runs, "median_tok_s": statistics.median(r["tok_s"] for r in runs)}


def arrivals(args: argparse.Namespace) -> None:
    """400 Poisson arrivals through the product, latencies beside vLLM's."""
    with tempfile.TemporaryDirectory() as folder:
        workloads.write(Path(folder))
        command = [
            sys.executable,
            "-m",
            "benchctl",
            "replay",
            f"{folder}/arrivals-{args.rate}.jsonl",
            "--model",
            args.model,
        ]
        command += [
            "--scheduler",
            args.scheduler,
            "--temperature",
            "0.6",
            "--max-model-len",
            "4096",
            "--no-report",
            "--json",
        ]
        done = subprocess.run([*command, "--out", f"{folder}/runs"], check=True, stdout=subprocess.PIPE, text=True)
    metrics = json.loads(done.stdout)
    for key in ("p50_ttft_ms", "p90_ttft_ms", "p99_ttft_ms", "p50_itl_ms", "p90_itl_ms", "p99_itl_ms"):
        anchor = ANCHORS.get(args.model, {}).get(f"{key} {args.rate}")
        beside = f"   vLLM {anchor:8.2f}   ÷ vLLM {metrics[key] / anchor:.2f}" if anchor else ""
        print(f"arrivals {args.rate}/s {args.scheduler}: {key:12} {metrics[key]:8.2f}{beside}", flush=True)
    if args.json:
        args.json.write_text(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["steps", "offline", "arrivals"])
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--scheduler", default="vllm", choices=sorted(SCHEDULERS))
    parser.add_argument("--kv-tokens", type=int, default=400_000)
    parser.add_argument("--only", nargs="+", default=["decode", "prefill"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rate", type=int, default=20, choices=[10, 20, 50])
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.what == "arrivals":
        return arrivals(args)
    bench = Bench(args)
    scheduler = bench.scheduler()
    scheduler.add(bench.request(20, 3))
    while scheduler.has_unfinished():
        round = scheduler.schedule()
        scheduler.update(round, bench.engine.collect(bench.engine.launch(round.batch)).token_ids)
    ready = time.perf_counter() - PROCESS_BEGAN
    parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in bench.parts.items())
    print(f"{args.model} {args.scheduler}: ready after {ready:.1f} s ({parts})", flush=True)
    out = {"steps": steps, "offline": offline}[args.what](bench, args)
    if args.json:
        meta = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "model": args.model,
            "scheduler": args.scheduler,
            "ready_s": ready,
            "ready_parts_s": bench.parts,
        }
        args.json.write_text(json.dumps(meta | {"results": out}, indent=1) + "\n")


if __name__ == "__main__":
    main()
