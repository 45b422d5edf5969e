"""Time of the paged attention kernel on a CUDA device, against the bytes or operations it cannot do without.

    python benchmarks/attention.py [decode|prefill] [--json FILE] [--workers N]

Each figure is the median of graph replays, one launch a layer over KV copies that together exceed the L2 cache, random
data, bf16. decode: every sequence has 1,085 tokens; bytes = K and V read once. prefill: causal operations counted.
Configurations are compiled by worker processes first, so that the timed process finds them in Triton's cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path

import torch

from engines.kernels.attention import Config, paged_attention

CONTEXT = 1085
DECODE_CONFIGS = [
    (n, splits, warps, stages)
    for n, splits, warps, stages in itertools.product((64, 128), (1, 2, 4, 8, 16), (2, 4), (3, 4))
    if n == 64 or warps == 4
]
PREFILL_CONFIGS = [
    (128, 64, 4, 3),
    (128, 64, 8, 3),
    (128, 128, 8, 2),
    (128, 128, 8, 3),
    (64, 64, 4, 3),
    (128, 64, 8, 4),
    (256, 64, 8, 3),
]


def median_ms(graph: torch.cuda.CUDAGraph, repeats: int = 12) -> float:
    for _ in range(2):
        graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def setting(heads: int, kv_heads: int, spans: list[tuple[int, int]], block_size: int, copies: int, block_m: int):
    """Tensors for spans (position, tokens): q, out, list of (k, v), tables, tiles."""
    blocks = [-(-(pos + n) // block_size) for pos, n in spans]
    total = sum(blocks)
    tables = torch.zeros(len(spans), max(blocks), dtype=torch.int32)
    order, at = torch.randperm(total), 0
    for i, b in enumerate(blocks):
        tables[i, :b] = order[at : at + b]
        at += b
    tokens = sum(n for _, n in spans)
    q = torch.randn(tokens, heads, 128, device="cuda", dtype=torch.bfloat16)
    caches = [
        torch.randn(2, total, block_size, kv_heads, 128, device="cuda", dtype=torch.bfloat16) for _ in range(copies)
    ]
    step = block_m // (heads // kv_heads)
    tiles, row = [], 0
    for seq, (pos, n) in enumerate(spans):
        for first in reversed(range(0, n, step)):  # the longest first
            tiles.append((seq, row + first, pos + first, min(step, n - first)))
        row += n
    columns = [torch.tensor(c, dtype=torch.int32, device="cuda") for c in zip(*tiles, strict=True)]
    return (
        q,
        torch.empty_like(q),
        caches,
        tables.cuda(),
        columns,
        torch.tensor([len(tiles)], dtype=torch.int32, device="cuda"),
    )


def capture(heads, kv_heads, spans, block_size, copies, config):
    q, out, caches, tables, columns, num_tiles = setting(heads, kv_heads, spans, block_size, copies, config.block_m)
    partial = torch.empty(len(q), heads, config.num_splits, 128, device="cuda") if config.num_splits > 1 else None
    lse = torch.empty(len(q), heads, config.num_splits, device="cuda") if config.num_splits > 1 else None

    def launch() -> None:
        for kv in caches:
            paged_attention(
                q, kv[0], kv[1], out, tables, *columns, num_tiles, len(columns[0]), 128**-0.5, config, partial, lse
            )

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph


def cases(what: str):
    for heads, kv_heads in ((32, 8), (16, 8)):
        for block_size in (16, 256):
            if what == "decode":
                for batch in (1, 8, 64, 256):
                    spans = [(CONTEXT - 1, 1)] * batch
                    size = batch * CONTEXT * kv_heads * 128 * 2 * 2
                    copies = max(1, min(40, -(-300_000_000 // size)))
                    for n, splits, warps, stages in DECODE_CONFIGS:
                        if (
                            (batch >= 64 and splits > 2)
                            or (batch == 8 and splits not in (2, 4, 8))
                            or (batch == 1 and splits < 8)
                        ):
                            continue
                        yield (
                            heads,
                            kv_heads,
                            block_size,
                            f"{batch}",
                            spans,
                            copies,
                            Config(16, n, splits, warps, stages),
                            size,
                            "TB/s",
                            1e-12,
                        )
            else:
                for count, length in ((16, 1024), (4, 4096)):
                    flops = count * 4 * heads * 128 * length * (length + 1) / 2
                    for m, n, warps, stages in PREFILL_CONFIGS:
                        yield (
                            heads, kv_heads, block_size, f"{count}x{length}", [(0, length)] * count, 2, Config(m, n, 1, warps, stages), flops, "TFLOP/s", 1e-12,
                        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["decode", "prefill"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--compile", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    everything = list(cases(args.what))
    if args.compile:
        share, shares = args.compile
        seen = {}
        for case in everything:
            seen.setdefault((case[0], case[2], case[6]), case)
        for case in list(seen.values())[share::shares]:
            heads, kv_heads, block_size, _, _, _, config, *_ = case
            try:
                capture(heads, kv_heads, [(100, 1)], block_size, 1, config)
            except Exception as error:  # a configuration that does not fit the card is left out of the table
                print(case[6], type(error).__name__, file=sys.stderr)
        return
    if args.workers:
        workers = [
            subprocess.Popen([sys.executable, __file__, args.what, "--compile", str(i), str(args.workers)])
            for i in range(args.workers)
        ]
        for worker in workers:
            worker.wait()
    results = []
    for (heads, kv_heads, block_size, name), group in itertools.groupby(everything, key=lambda c: c[:4]):
        rows = []
        for *_, spans, copies, config, work, _unit, scale in group:
            try:
                ms = median_ms(capture(heads, kv_heads, spans, block_size, copies, config)) / copies
            except Exception as error:
                print(name, config, type(error).__name__, str(error)[:80])
                continue
            rows.append((ms, work / ms * 1e3 * scale, config))
        rows.sort(key=lambda r: r[0])
        for ms, rate, config in rows[:3]:
            print(
                f"{args.what} {heads}/{kv_heads} block {block_size:3} {name:>7}: {ms * 1e3:8.1f} µs {rate:7.2f} {'TB/s' if args.what == 'decode' else 'TFLOP/s'}  "
                f"m{config.block_m} n{config.block_n} splits {config.num_splits} warps {config.num_warps} stages {config.num_stages}",
                flush=True,
            )
        results += [
            {
                "heads": heads,
                "block_size": block_size,
                "case": name,
                "us": ms * 1e3,
                "rate": rate,
                "config": repr(config),
            }
            for ms, rate, config in rows
        ]
    if args.json:
        args.json.write_text(
            json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": results}, indent=1)
        )


if __name__ == "__main__":
    main()
