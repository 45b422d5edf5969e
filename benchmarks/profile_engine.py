"""Where a step's device time goes, kernel by kernel: torch's profiler over a few steps of the engine.

python benchmarks/profile_engine.py --model qwen3-8b decode:1 decode:64 prefill:16x1024
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from typing import Any

import torch
from engine import Bench


def steps_of(bench: Bench, what: str) -> Any:
    """A function that runs one step of the kind, on sequences that are there."""
    kind, size = what.split(":")
    engine = bench.engine
    scheduler = bench.scheduler()

    def step() -> None:
        round = scheduler.schedule()
        scheduler.update(round, engine.collect(engine.launch(round.batch)).token_ids)

    if kind == "decode":
        for _ in range(int(size)):
            scheduler.add(bench.request(1024, 100))
        while (
            not scheduler.running
            or any(s.num_tokens <= s.new.num_prompt_tokens for s in scheduler.running)
            or scheduler.waiting
        ):
            step()
        return step, 10
    count, length = map(int, size.split("x"))

    def prefill() -> None:
        for _ in range(count):
            scheduler.add(bench.request(length, 1))
        while scheduler.has_unfinished():
            step()

    prefill()
    return prefill, 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", nargs="+")
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--scheduler", default="vllm")
    parser.add_argument("--kv-tokens", type=int, default=400_000)
    parser.add_argument("--enforce-eager", action="store_true")
    args = parser.parse_args()
    bench = Bench(args)
    for what in args.steps:
        step, repeats = steps_of(bench, what)
        step()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(repeats):
                step()
            torch.cuda.synchronize()
        totals: dict[str, list[float]] = defaultdict(list)
        spans = []
        for event in profile.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                totals[re.sub(r"<.*|\(.*", "", event.name)[:60]].append(event.device_time_total)
                spans.append((event.time_range.start, event.time_range.end))
        busy = sum(map(sum, totals.values())) / repeats
        spans.sort()
        covered, end = 0.0, 0.0
        for s, e in spans:
            covered += max(0.0, e - max(s, end))
            end = max(end, e)
        print(f"\n{args.model} {what}: kernels {busy / 1e3:.3f} ms a step, covered {covered / repeats / 1e3:.3f} ms")
        for name, times in sorted(totals.items(), key=lambda kv: -sum(kv[1]))[:14]:
            print(
                f"  {sum(times) / repeats / 1e3:8.3f} ms  {len(times) / repeats:6.1f} x {sum(times) / len(times):8.2f} µs  {name}",
                flush=True,
            )


if __name__ == "__main__":
    main()
