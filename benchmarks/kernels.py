"""Every kernel of a layer on a CUDA device, its time beside the bytes and operations it cannot do without.

    python benchmarks/kernels.py [--model qwen3-8b] [--rows 1 8 64 256 16384] [--prompts 1024 4096] [--json FILE]

Each figure is the median of graph replays, buffers rotated so that together they exceed the L2 cache, random data, bf16. Rows are
the tokens of a round: up to 512 a decode each, at a context of 1,085; above, prompts of each length of --prompts. Floors: bytes at 4.26 TB/s (copy of
4 GiB on an H200, read and written) or operations at 795 TFLOP/s (product of n = 8192), whichever is longer. A launch in a graph
takes about 1 µs whatever it does, so the floors of the smallest are out of reach.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from attention import median_ms, setting
from engine import COPY_BYTES_PER_S, MATRIX_FLOPS_PER_S

from engines.kernels.activation import silu_mul
from engines.kernels.attention import paged_attention
from engines.kernels.chunk_attention import chunk_attention, own_rows
from engines.kernels.linear import few_rows_linear
from engines.kernels.norms import add_norm, embed_norm
from engines.kernels.rope import rope_and_store
from engines.kernels.sampling import num_blocks, sample
from engines.model.config import PRESETS, ModelConfig
from engines.torch_engine import tuning

CONTEXT, BLOCK_SIZE = 1085, 16
L2_BYTES = 120_000_000
Case = tuple[str, float, float, list[Callable[[], None]]]  # name, bytes, operations, launches on different buffers


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def i32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, device="cuda", dtype=torch.int32)


def copies(num_bytes: float) -> range:
    return range(max(1, min(40, int(L2_BYTES // num_bytes) + 1)))


def small_kernels(c: ModelConfig, rows: int) -> Iterator[Case]:
    h, inner, count = c.hidden_size, c.intermediate_size, i32([rows])
    weight = rand(h)

    size = 8.0 * rows * h
    buffers = [(rand(rows, h), rand(rows, h), rand(rows, h)) for _ in copies(size)]
    yield "add, norm", size, 0, [lambda b=b: add_norm(b[0], b[1], weight, b[2], count, 1e-6) for b in buffers]
    yield "norm", size / 2, 0, [lambda b=b: add_norm(None, b[1], weight, b[2], count, 1e-6) for b in buffers]
    ids, embedding = torch.randint(0, c.vocab_size, (rows,), device="cuda", dtype=torch.int32), rand(c.vocab_size, h)
    yield (
        "embed, norm", 6.0 * rows * h, 0,
        [lambda b=b: embed_norm(ids, embedding, weight, b[1], b[2], count, 1e-6) for b in buffers],
    )  # fmt: skip

    width, q_width = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim, c.num_heads * c.head_dim
    kv = width - q_width
    chunks = rows > 512
    size = 2.0 * rows * (2 * width + (kv // 2 if chunks else 0))
    blocks = -(-rows // BLOCK_SIZE)
    tables = torch.arange(blocks, device="cuda", dtype=torch.int32)[None]
    norm = rand(c.head_dim) if c.qk_norm else None
    angles = rand(blocks * BLOCK_SIZE, c.head_dim // 2).float()
    positions, zeros = torch.arange(rows, device="cuda", dtype=torch.int32), i32([0] * rows)
    sets = [
        (
            rand(rows, width),
            rand(rows, c.num_heads, c.head_dim),
            rand(2, blocks, BLOCK_SIZE, c.num_kv_heads, c.head_dim),
        )
        for _ in copies(size)
    ]
    yield (
        "norm, RoPE, KV write", size, 0,
        [
            lambda s=s: rope_and_store(
                s[0], None, s[1], s[2][0], s[2][1], norm, norm, angles, angles, positions, zeros, tables, count, 1e-6,
                s[0] if chunks else None,
            )
            for s in sets
        ],
    )  # fmt: skip

    size = 6.0 * rows * inner
    pairs = [(rand(rows, 2 * inner), rand(rows, inner)) for _ in copies(size)]
    yield "SiLU, product", size, 0, [lambda p=p: silu_mul(p[0], p[1], count) for p in pairs]

    if not chunks:
        size = 2.0 * rows * c.vocab_size
        logits = [rand(rows, c.vocab_size) for _ in copies(size)]
        best = torch.zeros(rows, num_blocks(c.vocab_size), device="cuda")
        token, out = best.int(), i32([0] * rows)
        keys = torch.arange(rows, device="cuda")
        yield "sample", size, 0, [lambda x=x: sample(x, keys, best, token, out, count, 0.6) for x in logits]


def decode_attention(c: ModelConfig, rows: int) -> Case:
    heads, kv_heads, scale = c.num_heads, c.num_kv_heads, c.head_dim**-0.5
    size = rows * CONTEXT * kv_heads * c.head_dim * 4.0
    config = tuning.decode_attention(rows, heads, kv_heads, c.head_dim, torch.bfloat16)
    q, out, caches, tables, columns, num_tiles = setting(
        heads, kv_heads, [(CONTEXT - 1, 1)] * rows, BLOCK_SIZE, len(copies(size)), config.block_m
    )
    splits = config.num_splits
    partial = torch.empty(rows * heads * splits * c.head_dim, device="cuda") if splits > 1 else None
    lse = torch.empty(rows * heads * splits, device="cuda") if splits > 1 else None
    return (
        "attention", size, 0,
        [
            lambda kv=kv: paged_attention(
                q, kv[0], kv[1], out, tables, *columns, num_tiles, rows, scale, config, partial, lse
            )
            for kv in caches
        ],
    )  # fmt: skip


def prompt_attention(c: ModelConfig, rows: int, prompt: int) -> Case:
    """Fresh prompts of so many tokens, `rows` together."""
    heads, kv_heads, scale = c.num_heads, c.num_kv_heads, c.head_dim**-0.5
    prompts = rows // prompt
    config = tuning.own_chunk_attention(heads, kv_heads, c.head_dim, torch.bfloat16)
    assert config is not None, "this card has no copy engine"
    q, out, caches, tables, columns, num_tiles = setting(
        heads, kv_heads, [(0, prompt)] * prompts, BLOCK_SIZE, 1, config.block_m
    )
    order = torch.argsort(columns[2], descending=True, stable=True)
    columns = [column[order].contiguous() for column in columns]
    base = (columns[1] // prompt * prompt).int()
    qkvs = [rand(rows, (heads + 2 * kv_heads) * c.head_dim) for _ in range(2)]
    launches = [
        lambda own=own_rows(qkv, c.head_dim, config): chunk_attention(
            q, own, caches[0][0], caches[0][1], out, tables, *columns, base, num_tiles, len(base), scale, config, True
        )
        for qkv in qkvs
    ]
    name = f"attention, {prompts} x {prompt:,}"
    return name, 0, prompts * 4.0 * heads * c.head_dim * prompt * (prompt + 1) / 2, launches


def products(c: ModelConfig, rows: int) -> Iterator[Case]:
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes = {"qkv": (q + 2 * kv, c.hidden_size), "output": (c.hidden_size, q)}
    shapes |= {"gate, up": (2 * c.intermediate_size, c.hidden_size), "down": (c.hidden_size, c.intermediate_size)}
    if rows <= 512:
        shapes["head"] = (c.vocab_size, c.hidden_size)
    for name, (n, k) in shapes.items():
        size = 2.0 * n * k
        weights = [rand(n, k) for _ in copies(size)]
        x, out = rand(max(rows, 512), k), rand(max(rows, 512), n)
        config = tuning.few_rows(rows, n, k, x.dtype)
        if config is None:
            padded = tuning.product_rows(rows, n, k)
            launches = [lambda w=w, a=x[:padded], o=out[:padded]: torch.mm(a, w.t(), out=o) for w in weights]
        else:
            parts = torch.empty(config.splits, rows, n, device="cuda")
            target = parts if config.splits > 1 else out[None, :rows]
            launches = [lambda w=w, a=x, o=target, f=config: few_rows_linear(a, w, o, f) for w in weights]
        yield f"{name} {k}→{n}", size, 2.0 * rows * n * k, launches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b", choices=sorted(PRESETS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256, 16384])
    parser.add_argument("--prompts", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    c, out = PRESETS[args.model], []
    for rows in args.rows:
        print(f"{args.model}, {rows} rows", flush=True)
        for name, num_bytes, flops, launches in [
            *small_kernels(c, rows),
            *([decode_attention(c, rows)] if rows <= 512 else [prompt_attention(c, rows, n) for n in args.prompts]),
            *products(c, rows),
        ]:
            for launch in launches:
                launch()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for launch in launches:
                    launch()
            us = median_ms(graph) / len(launches) * 1e3
            floor = max(num_bytes / COPY_BYTES_PER_S, flops / MATRIX_FLOPS_PER_S) * 1e6
            rate = (
                f"{flops / us * 1e-6:6.0f} TFLOP/s"
                if flops / MATRIX_FLOPS_PER_S > num_bytes / COPY_BYTES_PER_S
                else f"{num_bytes / us * 1e-6:6.2f} TB/s"
            )
            print(f"  {name:24} {us:9.1f} µs   floor {floor:8.1f}   {us / floor:6.2f} x   {rate}", flush=True)
            out.append({"rows": rows, "kernel": name, "us": us, "floor_us": floor, "bytes": num_bytes, "flops": flops})
            graph.reset()
        torch.cuda.empty_cache()
    if args.json:
        head = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "model": args.model}
        args.json.write_text(json.dumps(head | {"kernels": out}, indent=1) + "\n")


if __name__ == "__main__":
    main()
