"""The paged attention kernel against plain torch: on the CPU in Triton's interpreter, or on a CUDA device."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from engines.kernels.attention import Config, paged_attention, reference  # noqa: E402
from engines.kernels.chunk_attention import chunk_attention, own_rows  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def world(spans, *, heads, kv_heads, head_dim, block_size, dtype, seed=0):
    """Random q and cache for spans (position, tokens), one sequence each; unused slots hold NaN."""
    g = torch.Generator().manual_seed(seed)
    blocks_of = [-(-(pos + n) // block_size) for pos, n in spans]
    num_blocks = sum(blocks_of) + 3
    order = torch.randperm(num_blocks, generator=g)
    k = torch.full((num_blocks, block_size, kv_heads, head_dim), float("nan"))
    v = torch.full_like(k, float("nan"))
    tables = torch.full((len(spans), max(blocks_of) + 1), -1, dtype=torch.int32)
    at = 0
    for i, (pos, n) in enumerate(spans):
        mine = order[at : at + blocks_of[i]]
        at += blocks_of[i]
        tables[i, : len(mine)] = mine.int()
        for p in range(pos + n):
            k[mine[p // block_size], p % block_size] = torch.randn(kv_heads, head_dim, generator=g)
            v[mine[p // block_size], p % block_size] = torch.randn(kv_heads, head_dim, generator=g)
    q = torch.randn(sum(n for _, n in spans), heads, head_dim, generator=g)
    return [t.to(DEVICE, dtype) for t in (q, k, v)] + [tables.to(DEVICE)]


def tiles_of(spans, tokens_per_tile):
    rows, tiles, out = 0, [], []
    for seq, (pos, n) in enumerate(spans):
        for first in range(0, n, tokens_per_tile):
            tiles.append((seq, rows + first, pos + first, min(tokens_per_tile, n - first)))
        out.append((seq, rows, pos, n))
        rows += n
    return tiles, out


def run(spans, config, *, heads=4, kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32):
    q, k, v, tables = world(
        spans, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype
    )
    tiles, ref_spans = tiles_of(spans, config.block_m // (heads // kv_heads))
    columns = [torch.tensor(c, dtype=torch.int32, device=DEVICE) for c in zip(*tiles, strict=True)]
    columns = [
        torch.cat([c, torch.full((2,), 10**6, dtype=torch.int32, device=DEVICE)]) for c in columns
    ]  # beyond num_tiles
    out = torch.full_like(q, float("nan"))
    partial = torch.full((len(q), heads, config.num_splits, head_dim), float("nan"), device=DEVICE)
    lse = torch.full((len(q), heads, config.num_splits), float("nan"), device=DEVICE)
    num_tiles = torch.tensor([len(tiles)], dtype=torch.int32, device=DEVICE)
    paged_attention(q, k, v, out, tables, *columns, num_tiles, len(tiles) + 2, head_dim**-0.5, config, partial, lse)
    expected = reference(q, k, v, tables, ref_spans, head_dim**-0.5)
    assert not out.isnan().any()
    error = (out.float() - expected).norm() / expected.norm()
    assert error < TOLERANCE[dtype], float(error)


# Triton's interpreter keeps bfloat16 as 16-bit integers and multiplies those: only a device can test it.
BF16 = pytest.param(
    torch.bfloat16, marks=pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has no bfloat16 dot")
)

MIXED = [(0, 1), (0, 17), (15, 1), (16, 1), (31, 33), (100, 5), (63, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 2, 64), (4, 1, 80), (3, 3, 96), (4, 1, 128), (2, 1, 256)]
)
def test_mixed_chunks_and_decodes(heads, kv_heads, head_dim, dtype):
    run(MIXED, Config(block_m=16, block_n=16), heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)


@pytest.mark.parametrize("block_size", [16, 32, 256])
@pytest.mark.parametrize("block_n", [16, 32, 64])
def test_block_sizes_against_steps(block_size, block_n):
    run(MIXED, Config(block_m=32, block_n=block_n), block_size=block_size)


@pytest.mark.parametrize("num_splits", [2, 3, 8])
@pytest.mark.parametrize("block_size", [16, 256])
def test_split_decodes_are_combined(num_splits, block_size):
    decodes = [(pos, 1) for pos in (0, 1, 15, 16, 17, 63, 200, 255, 256)]
    run(decodes, Config(block_m=16, block_n=32, num_splits=num_splits), heads=8, kv_heads=2, block_size=block_size)


def test_a_group_that_is_no_power_of_two():
    run(MIXED, Config(block_m=16, block_n=16), heads=6, kv_heads=2)
    run([(40, 1), (3, 1)], Config(block_m=16, block_n=16, num_splits=2), heads=7, kv_heads=1)


def run_own(spans, config, *, heads=4, kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32):
    """As `run`, through the rows of the round: blocks hold what is older than the round alone, NaN where it will be written."""
    q, k, v, tables = world(
        spans, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype
    )
    tiles, ref_spans = tiles_of(spans, config.block_m // (heads // kv_heads))
    expected = reference(q, k, v, tables, ref_spans, head_dim**-0.5)
    own = torch.zeros(len(q) + 70, heads + 2 * kv_heads, head_dim, device=DEVICE, dtype=dtype)
    own[len(q) :] = 3.0  # rows of earlier rounds
    bases = []
    for seq, row, pos, n in ref_spans:
        for i in range(n):
            at = int(tables[seq, (pos + i) // block_size]), (pos + i) % block_size
            own[row + i, heads : heads + kv_heads], own[row + i, heads + kv_heads :] = k[at], v[at]
            k[at] = v[at] = float("nan")
        bases += [row] * sum(t[0] == seq for t in tiles)
    columns = [torch.tensor([*c, 10**6, 10**6], dtype=torch.int32, device=DEVICE) for c in zip(*tiles, strict=True)]
    base = torch.tensor([*bases, 0, 0], dtype=torch.int32, device=DEVICE)
    out = torch.full_like(q, float("nan"))
    num_tiles = torch.tensor([len(tiles)], dtype=torch.int32, device=DEVICE)
    described = own_rows(own.flatten(1), head_dim, config)
    chunk_attention(
        q, described, k, v, out, tables, *columns, base, num_tiles, len(tiles) + 2, head_dim**-0.5, config,
        all(pos == 0 for pos, _ in spans),
    )  # fmt: skip
    assert not out.isnan().any()
    error = (out.float() - expected).norm() / expected.norm()
    assert error < TOLERANCE[dtype], float(error)


CHUNKS = [(0, 17), (16, 2), (31, 33), (100, 5), (0, 70), (64, 3), (0, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (4, 1, 128), (6, 2, 16), (2, 1, 256)])
def test_chunks_that_find_their_keys_in_the_round(heads, kv_heads, head_dim, dtype):
    run_own(CHUNKS, Config(block_m=16, block_n=16), heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)


@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize(("block_m", "block_n"), [(64, 64), (32, 16)])
def test_steps_of_chunks_against_block_sizes(block_size, block_m, block_n):
    run_own(CHUNKS, Config(block_m=block_m, block_n=block_n), block_size=block_size)


def test_fresh_prompts_read_no_block():
    run_own([(0, 70), (0, 3), (0, 129)], Config(block_m=32, block_n=32))
