"""Products with few rows on a CUDA device: split kernels of several shapes against what the engine ran before, the library's for
more than 16 rows; each with the kernel that reads its result, weights rotated beyond the L2 cache.

python benchmarks/linear.py [--rows 1 8 16 32 64 128] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import triton
from attention import median_ms

from engines.kernels.activation import silu_mul
from engines.kernels.launch import compiling
from engines.kernels.linear import FewRowsConfig, few_rows_linear
from engines.kernels.norms import add_norm

COPY_BYTES_PER_S = 4.26e12
SHARED_BYTES = 227 << 10  # of an H200's program
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


def configs(rows: int, n: int, k: int) -> Iterator[FewRowsConfig]:
    """Those whose programs fill the card and whose stages fit a processor."""
    block_m = max(16, triton.next_power_of_2(rows))
    for block_n in (64, 128, 256):
        for block_k in (64, 128):
            for splits in (1, 2, 3, 4, 6, 8):
                programs = -(-n // block_n) * splits
                if not 60 <= programs <= 420 or k % (splits * block_k) or (splits > 4 and n > 1024):
                    continue
                for stages in (3, 4, 6, 8):
                    used = (stages + 1) * (block_n + block_m) * block_k * 2
                    if used + 1024 <= SHARED_BYTES and stages * block_k <= k // splits:
                        warps = 8 if block_n * block_m > 128 * 128 else 4
                        yield FewRowsConfig(block_m, block_n, block_k, splits, warps, stages)


def with_reader(rows: int, n: int, gate_up: bool) -> Callable[[torch.Tensor], None]:
    """What adds the partial sums up: SiLU for the merged product of gate and up, the residual's norm for the others."""
    count = torch.full((1,), rows, dtype=torch.int32, device="cuda")
    if gate_up:
        activated = torch.empty(rows, n // 2, device="cuda", dtype=torch.bfloat16)
        return lambda out: silu_mul(out, activated, count)
    residual, x = (torch.zeros(rows, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.ones(n, device="cuda", dtype=torch.bfloat16)
    return lambda out: add_norm(out, residual, weight, x, count, 1e-6)


def microseconds(launch: Callable[[torch.Tensor], None], weights: list[torch.Tensor]) -> float:
    launch(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for w in weights:
            launch(w)
    return median_ms(graph) / len(weights) * 1e3


def measure(name: str, rows: int) -> dict[str, object]:
    n, k = SHAPES[name]
    weights = [
        torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        for _ in range(max(2, min(60, 250_000_000 // (n * k * 2))))
    ]
    x = torch.randn(128, k, device="cuda", dtype=torch.bfloat16)
    read, plain = with_reader(rows, n, "gate" in name), torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)

    def library(w: torch.Tensor) -> None:
        torch.mm(x[:rows], w.t(), out=plain)
        read(plain)

    us = {"library": microseconds(library, weights)}
    for config in configs(rows, n, k):
        dtype = torch.float32 if config.splits > 1 else torch.bfloat16
        parts = torch.empty(config.splits, rows, n, device="cuda", dtype=dtype)

        def own(w: torch.Tensor, parts: torch.Tensor = parts, config: FewRowsConfig = config) -> None:
            few_rows_linear(x, w, parts, config)
            read(parts if config.splits > 1 else parts[0])

        us[f"n{config.block_n} k{config.block_k} s{config.splits} st{config.num_stages}"] = microseconds(own, weights)
    best = sorted(us.items(), key=lambda item: item[1])[:3]
    print(
        f"{name:12} rows {rows:3}: floor of the product {n * k * 2 / COPY_BYTES_PER_S * 1e6:5.1f} µs  library {us['library']:5.1f}  "
        + "  ".join(f"{c} {value:5.1f}" for c, value in best),
        flush=True,
    )
    return {"shape": name, "rows": rows, "us": us}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with compiling():
        for n, k in SHAPES.values():
            x, w = (torch.empty(size, k, device="cuda", dtype=torch.bfloat16) for size in (128, n))
            for config in {c for rows in args.rows for c in configs(rows, n, k)}:
                dtype = torch.float32 if config.splits > 1 else torch.bfloat16
                few_rows_linear(x, w, torch.empty(config.splits, 1, n, device="cuda", dtype=dtype), config)
    out = [measure(name, rows) for rows in args.rows for name in SHAPES]
    if args.json:
        args.json.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
