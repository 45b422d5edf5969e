"""Products on a CUDA device, our own against the library's: those with few rows, and those with many.

    python benchmarks/linear.py few|many [--json FILE]

few: the split kernel, weights rotated beyond the L2 cache. many: products that go on with their result (SiLU, residual) against the
library's and a kernel after it; all candidates in turn, a quarter of a second each, five times, as the card is at its power limit.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attention import median_ms
from torch import Tensor

from engines.kernels.activation import silu_mul
from engines.kernels.linear import FewRowsConfig, few_rows_linear
from engines.kernels.many_rows import ManyRows, ManyRowsConfig

SHAPES = {
    "0.6B qkv": (4096, 1024),
    "0.6B o": (1024, 2048),
    "0.6B gate_up": (6144, 1024),
    "0.6B down": (1024, 3072),
    "8B qkv": (6144, 4096),
    "8B o": (4096, 4096),
    "8B gate_up": (24576, 4096),
    "8B down": (4096, 12288),
}
CONFIGS = [
    FewRowsConfig(16, 256, 1),
    FewRowsConfig(16, 256, 2),
    FewRowsConfig(16, 256, 4),
    FewRowsConfig(32, 256, 1),
    FewRowsConfig(32, 256, 2),
    FewRowsConfig(32, 256, 4),
    FewRowsConfig(16, 512, 1),
    FewRowsConfig(16, 512, 2),
    FewRowsConfig(32, 128, 2, 4, 4),
    FewRowsConfig(16, 512, 4),
]


def few() -> list[dict[str, Any]]:
    rows_out = []
    for name, (n, k) in SHAPES.items():
        copies = max(2, min(60, -(-250_000_000 // (n * k * 2))))
        weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
        for rows in (1, 8, 16):
            x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
            out = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)
            parts = torch.empty(8, rows, n, device="cuda")

            def graph_of(launch, weights=weights):
                launch(weights[0])
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for w in weights:
                        launch(w)
                return graph

            results = [("library", median_ms(graph_of(lambda w: torch.mm(x, w.t(), out=out))) / copies)]  # noqa: B023
            for config in CONFIGS:
                ms = median_ms(graph_of(lambda w: few_rows_linear(x, w, parts[: config.splits], config))) / copies  # noqa: B023
                results.append((f"n{config.block_n} k{config.block_k} s{config.splits} st{config.num_stages}", ms))
            best = sorted(results[1:], key=lambda r: r[1])[:3]
            bytes_ms = n * k * 2 / 4.26e12 * 1e3
            print(
                f"{name:12} rows {rows:2}: floor {bytes_ms * 1e3:5.1f} µs  library {results[0][1] * 1e3:5.1f}  own "
                + "  ".join(f"{c} {ms * 1e3:5.1f}" for c, ms in best),
                flush=True,
            )
            rows_out.append({"shape": name, "rows": rows, "us": {c: ms * 1e3 for c, ms in results}})
    return rows_out


MANY = [
    ManyRowsConfig(),
    ManyRowsConfig(band=16),
    ManyRowsConfig(num_stages=3),
    ManyRowsConfig(block_n=128, num_stages=4),
    ManyRowsConfig(block_n=128, num_warps=4, num_stages=4),
]


def sustained_us(launch: Callable[[], object], seconds: float) -> float:
    """Mean time of launches on end: long kernels, whose launching hides behind them."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    launch()
    end.record()
    end.synchronize()
    repeats = max(3, int(seconds * 1e3 / start.elapsed_time(end)))
    start.record()
    for _ in range(repeats):
        launch()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / repeats


def library(epilogue: str, x: Tensor, weight: Tensor, wide: Tensor, out: Tensor, count: Tensor) -> None:
    if epilogue == "add":
        wide.addmm_(x, weight.t())
        return
    torch.mm(x, weight.t(), out=wide)
    if epilogue == "silu":
        silu_mul(wide, out, count)


def many(rows_of: list[int], seconds: float) -> list[dict[str, Any]]:
    found = []
    for name, (n, k) in SHAPES.items():
        kind = name.split()[1]
        if kind == "qkv":
            continue  # nothing goes on with it
        epilogue: Any = "silu" if kind == "gate_up" else "add"
        most = max(rows_of)
        x = torch.randn(most, k, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / k**0.5
        wide = torch.zeros(most, n, device="cuda", dtype=torch.bfloat16)
        out = torch.zeros(most, n // 2, device="cuda", dtype=torch.bfloat16) if kind == "gate_up" else wide
        for rows in rows_of:
            count = torch.tensor([rows], device="cuda", dtype=torch.int32)

            launches: dict[str, Callable[[], object]] = {
                "library": functools.partial(library, epilogue, x[:rows], weight, wide[:rows], out[:rows], count)
            }
            for c in MANY:
                product = ManyRows(x, out, n, epilogue, c)
                described = product.weight(weight)
                launches[f"m{c.block_m} n{c.block_n} b{c.band} w{c.num_warps} s{c.num_stages}"] = functools.partial(
                    product, described, rows
                )
            times: dict[str, list[float]] = {label: [] for label in launches}
            for launch in launches.values():
                launch()
            for _ in range(5):
                for label, launch in launches.items():
                    times[label].append(sustained_us(launch, seconds))
            us = {label: statistics.median(values) for label, values in times.items()}
            print(
                f"{name:12} rows {rows:5}: floor {2e6 * rows * n * k / 795e12:6.0f} µs  "
                + "  ".join(f"{label} {value:6.0f}" for label, value in us.items()),
                flush=True,
            )
            found.append({"shape": name, "rows": rows, "epilogue": epilogue, "us": us})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["few", "many"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 2304, 4096, 16384])
    parser.add_argument("--seconds", type=float, default=0.1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows_out = few() if args.what == "few" else many(args.rows, args.seconds)
    if args.json:
        args.json.write_text(json.dumps(rows_out, indent=1) + "\n")


if __name__ == "__main__":
    main()
