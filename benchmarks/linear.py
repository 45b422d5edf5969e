"""Products with few rows on a CUDA device: the split kernel against the library's, weights rotated beyond the L2 cache.

python benchmarks/linear.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from attention import median_ms

from engines.kernels.linear import FewRowsConfig, few_rows_linear

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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
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
    if args.json:
        args.json.write_text(json.dumps(rows_out, indent=1) + "\n")


if __name__ == "__main__":
    main()
