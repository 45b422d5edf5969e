"""Cost of the schedulers alone: no engine, no records. Prints µs a round and a sequence, and requests/s.

    python benchmarks/schedulers.py [--json FILE]

1. Steady decodes: 64, 256, 512 running requests, schedule + update, decisions logged; best and median of the rounds.
2. 5,000 requests of 500 prompt and 200 output tokens, all different, kept 256 at a time in a pool that holds them.
3. A head that is refused in every round, with 8 and 32 of its blocks in the cache.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from engines.interface import NewRequest, SchedulerConfig
from engines.schedulers.registry import SCHEDULERS


def request(row: int, prompt: int, output: int, ids: np.ndarray | None = None) -> NewRequest:
    if ids is None:
        ids = np.random.default_rng(row).integers(0, 1 << 30, prompt + output)
    return NewRequest(row, f"r{row}", prompt, output, lambda: ids)


def scheduler(name: str, **config: Any) -> Any:
    return SCHEDULERS[name].build(SchedulerConfig(**config))


def steady(name: str, running: int, block_size: int, rounds: int = 400) -> dict[str, float]:
    """Times of schedule + update while `running` requests decode, µs."""
    s = scheduler(
        name,
        num_blocks=running * (2048 // block_size + 1) + 1,
        block_size=block_size,
        max_num_seqs=running,
        max_num_batched_tokens=1 << 20,
    )
    rng = np.random.default_rng(0)
    for row in range(running):
        # Lengths spread over a block, so that every round has its share of block edges.
        s.add(request(row, int(rng.integers(256, 768)), 1024))
    s.update(s.schedule(), None)
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        s.update(s.schedule(), None)
        times.append((time.perf_counter() - begin) * 1e6)
    return {
        "best": min(times),
        "median": statistics.median(times),
        "per_seq_median": statistics.median(times) / running,
    }


def offline(name: str, block_size: int, num_requests: int = 5000) -> dict[str, float]:
    """Wall time of scheduling everything; making the ids is left out, hashing them is not."""
    s = scheduler(
        name, num_blocks=24_000 * 16 // block_size, block_size=block_size, max_num_seqs=256, max_num_batched_tokens=8192
    )
    ids = np.random.default_rng(0).integers(0, 1 << 30, (num_requests, 700))
    begin, rounds = time.perf_counter(), 0
    for row in range(num_requests):
        s.add(request(row, 500, 200, ids[row]))
    while s.has_unfinished():
        s.update(s.schedule(), None)
        rounds += 1
    wall = time.perf_counter() - begin
    return {"requests_per_s": num_requests / wall, "rounds": rounds, "us_per_request": wall / num_requests * 1e6}


def refused_head(name: str, block_size: int, matched: int) -> dict[str, float]:
    """What a round costs more while the head of the queue, `matched` blocks of which are cached, does not fit."""
    out = {}
    for with_head in (False, True):
        tokens = block_size * matched
        ids = np.random.default_rng(1).integers(0, 1 << 30, tokens * 4)
        s = scheduler(
            name,
            num_blocks=matched + 4,
            block_size=block_size,
            max_num_seqs=8,
            max_num_batched_tokens=1 << 20,
            scheduler_reserve_full_isl=True,
        )
        s.add(request(0, tokens + 1, block_size - 2, ids[: tokens + block_size - 1]))
        s.update(s.schedule(), None)
        if with_head:
            s.add(request(1, tokens + 4 * block_size, 1, ids[: tokens + 4 * block_size + 1])) and s.enqueue(
                request(1, tokens + 4 * block_size, 1, ids[: tokens + 4 * block_size + 1])
            )
        times = []
        for _ in range(block_size - 4):
            begin = time.perf_counter()
            s.update(s.schedule(), None)
            times.append((time.perf_counter() - begin) * 1e6)
        out["with" if with_head else "without"] = statistics.median(times)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": platform.processor() or platform.machine(),
    }
    for name in ("nano", "vllm"):
        block_size = SCHEDULERS[name].default_block_size
        for running in (64, 256, 512):
            r = results[f"{name} steady {running}"] = steady(name, running, block_size)
            print(
                f"{name}  {running:4} decodes  round best {r['best']:7.1f} µs  median {r['median']:7.1f} µs  = {r['per_seq_median']:.3f} µs a sequence"
            )
        r = results[f"{name} offline"] = offline(name, block_size)
        print(
            f"{name}  5,000 x 500/200  {r['requests_per_s']:,.0f} requests/s  {r['rounds']} rounds  {r['us_per_request']:.1f} µs a request"
        )
        for matched in (8, 32):
            r = results[f"{name} refused head {matched}"] = refused_head(name, block_size, matched)
            print(f"{name}  refused head, {matched:2} blocks matched: round {r['without']:.1f} -> {r['with']:.1f} µs")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
