"""The fused kernels against plain torch, on odd shapes: on the CPU in Triton's interpreter, or on a CUDA device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engines.kernels.activation import silu_mul
from engines.kernels.linear import FewRowsConfig, few_rows_linear
from engines.kernels.norms import add_norm, embed_norm
from engines.kernels.rope import rope_and_store
from engines.kernels.rows import take_rows
from engines.kernels.sampling import num_blocks, sample
from engines.kernels.tables import update_tables
from engines.model.transformer import apply_rope, rms_norm
from engines.torch_engine import tuning
from engines.torch_engine.fused_forward import _up_to
from engines.torch_engine.sampling import row_keys
from engines.torch_engine.sampling import sample as sample_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def rand(*shape, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=g).to(DEVICE, dtype)


def i32(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def close(got, expected, dtype):
    assert not got.isnan().any()
    error = (got.float() - expected.float()).norm() / expected.float().norm()
    assert error < TOLERANCE[dtype], float(error)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [96, 128, 1000])
def test_embed_norm(hidden, dtype):
    embedding, weight = rand(50, hidden, dtype=dtype), rand(hidden, dtype=dtype, seed=1)
    ids = i32([3, 49, 0, 7, 7])
    residual, out = (
        torch.full((5, hidden), 9.0, device=DEVICE, dtype=dtype),
        torch.full((5, hidden), 9.0, device=DEVICE, dtype=dtype),
    )
    embed_norm(ids, embedding, weight, residual, out, i32([4]), 1e-6)
    assert torch.equal(residual[:4], embedding[ids[:4].long()])
    close(out[:4], rms_norm(embedding[ids[:4].long()], weight, 1e-6), dtype)
    assert (out[4] == 9).all() and (residual[4] == 9).all(), "a padded row was written"


def test_embed_norm_leaves_other_ranks_ids_zero():
    embedding, weight = rand(10, 96), rand(96, seed=1)
    residual, out = torch.empty(3, 96, device=DEVICE), torch.empty(3, 96, device=DEVICE)
    embed_norm(i32([5, 12, 20]), embedding, weight, residual, out, i32([3]), 1e-6, vocab_first=10)
    assert (residual[0] == 0).all() and torch.equal(residual[1], embedding[2]) and (residual[2] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 3])
def test_add_norm_sums_partial_products(parts, dtype):
    hidden = 200
    added = rand(parts, 6, hidden, dtype=torch.float32 if parts > 1 else dtype)
    residual, weight = rand(6, hidden, dtype=dtype, seed=2), rand(hidden, dtype=dtype, seed=1)
    expected_residual = added.float().sum(0).to(dtype) + residual
    out = torch.full((6, hidden), 9.0, device=DEVICE, dtype=dtype)
    before = residual.clone()
    rows = i32([5, 2, 0])
    gathered = torch.empty(3, hidden, device=DEVICE, dtype=dtype)
    add_norm(added if parts > 1 else added[0], residual, weight, gathered, i32([3]), 1e-5, rows=rows)
    assert torch.equal(residual, before), "with rows the residual stays"
    close(gathered, rms_norm(expected_residual[rows.long()], weight, 1e-5), dtype)
    add_norm(added if parts > 1 else added[0], residual, weight, out, i32([5]), 1e-5)
    close(residual[:5], expected_residual[:5], dtype)
    close(out[:5], rms_norm(expected_residual[:5], weight, 1e-5), dtype)
    assert (out[5] == 9).all() and torch.equal(residual[5], before[5])
    again = torch.empty_like(out)
    add_norm(None, residual, weight, again, i32([5]), 1e-5)
    assert torch.equal(again[:5], out[:5]), "the residual has it already"


@pytest.mark.parametrize(("width_a", "width_b"), [(96, 200), (1500, 64)])
def test_take_rows(width_a, width_b):
    a, b = rand(6, width_a), rand(6, width_b, seed=1)
    out_a, out_b = torch.full((4, width_a), 9.0, device=DEVICE), torch.full((4, width_b), 9.0, device=DEVICE)
    rows = [5, 0, 5, 1 << 30]
    take_rows(a, out_a, b, out_b, i32(rows), i32([3]))
    assert torch.equal(out_a[:3], a[rows[:3]]) and torch.equal(out_b[:3], b[rows[:3]])
    assert (out_a[3] == 9).all() and (out_b[3] == 9).all(), "a row beyond the count was written"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 32), (6, 2, 80), (2, 2, 128), (8, 1, 64)])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("parts", [1, 2])
def test_rope_and_store(heads, kv_heads, head_dim, norm, parts, dtype):
    tokens, block_size = 5, 16
    width = (heads + 2 * kv_heads) * head_dim
    qkv = rand(parts, tokens, width, dtype=torch.float32 if parts > 1 else dtype)
    bias = None if norm else rand(width, dtype=dtype, seed=3)
    q_norm, k_norm = (
        (rand(head_dim, dtype=dtype, seed=4), rand(head_dim, dtype=dtype, seed=5)) if norm else (None, None)
    )
    angles = torch.arange(64, device=DEVICE)[:, None] * (
        1.0 / 100.0 ** (torch.arange(0, head_dim, 2, device=DEVICE) / head_dim)
    )
    cos, sin = angles.cos().float(), angles.sin().float()
    tables = i32([[3, 1, -1, -1], [0, 2, 4, 5]])
    positions, rows = i32([0, 17, 33, 63, 5]), i32([0, 0, 1, 1, 1])
    k_cache = torch.full((6, block_size, kv_heads, head_dim), 7.0, device=DEVICE, dtype=dtype)
    v_cache = torch.full_like(k_cache, 7.0)
    q_out = torch.full((tokens, heads, head_dim), 7.0, device=DEVICE, dtype=dtype)
    rope_and_store(
        qkv if parts > 1 else qkv[0],
        bias,
        q_out,
        k_cache,
        v_cache,
        q_norm,
        k_norm,
        cos,
        sin,
        positions,
        rows,
        tables,
        i32([4]),
        1e-6,
        own := qkv[0].to(dtype).clone(),
    )

    summed = qkv.float().sum(0)
    if bias is not None:
        summed = summed + bias.float()
    x = summed.to(dtype).view(tokens, -1, head_dim)
    q, k, v = x[:, :heads], x[:, heads : heads + kv_heads], x[:, heads + kv_heads :]
    if norm:
        q, k = rms_norm(q, q_norm, 1e-6), rms_norm(k, k_norm, 1e-6)
    c, s = cos[positions.long()][:, None], sin[positions.long()][:, None]
    close(q_out[:4], apply_rope(q, c, s)[:4], dtype)
    k = apply_rope(k, c, s)
    written = 0
    for t in range(4):
        p = int(positions[t])
        block = int(tables[int(rows[t]), p // block_size])
        close(k_cache[block, p % block_size], k[t], dtype)
        close(v_cache[block, p % block_size], v[t], dtype)
        written += kv_heads * head_dim
        mine = own[t].view(-1, head_dim)
        assert torch.equal(mine[heads : heads + kv_heads], k_cache[block, p % block_size])
        assert torch.equal(mine[heads + kv_heads :], v_cache[block, p % block_size])
    assert int((k_cache != 7).sum()) <= written and int((v_cache != 7).sum()) <= written, (
        "a slot that is nobody's was written"
    )
    assert (q_out[4] == 7).all() and torch.equal(own[4], qkv[0, 4].to(dtype))
    assert torch.equal(own[:, : heads * head_dim], qkv[0, :, : heads * head_dim].to(dtype)), "queries are left alone"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 2])
def test_silu_mul(parts, dtype):
    inner = 1100
    gate_up = rand(parts, 3, 2 * inner, dtype=torch.float32 if parts > 1 else dtype)
    out = torch.full((3, inner), 7.0, device=DEVICE, dtype=dtype)
    silu_mul(gate_up if parts > 1 else gate_up[0], out, i32([2]))
    gate, up = gate_up.float().sum(0).to(dtype).chunk(2, -1)
    close(out[:2], (torch.nn.functional.silu(gate) * up)[:2], dtype)
    assert (out[2] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "n", "k", "block_m"),
    [(1, 64, 128, 16), (7, 100, 160, 16), (16, 48, 512, 16), (3, 33, 96, 32), (70, 72, 200, 128)],
)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("beyond", [0, 130])  # rows of the buffer that are not asked for
def test_few_rows_linear(rows, n, k, block_m, splits, beyond, dtype):
    x, weight = rand(rows + beyond, k, dtype=dtype), rand(n, k, dtype=dtype, seed=1)
    out = torch.full((splits + 1, rows, n), float("nan"), device=DEVICE)
    few_rows_linear(x, weight, out[:splits], FewRowsConfig(block_m, 64, 64, splits))
    close(out[:splits].sum(0), x[:rows].float() @ weight.float().T, torch.float32 if dtype == torch.float32 else dtype)
    assert out[splits].isnan().all(), "nothing is written beyond the rows asked for"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_partial_sums_have_room_for_every_split_product(dtype):
    shapes = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (1024, 2048), (1024, 3072), (96, 64)]
    for n, k in shapes:
        for rows in range(1, 200):
            config = tuning.few_rows(rows, n, k, dtype)
            assert config is None or rows <= config.block_m
            if config is not None:
                assert config.splits * rows * n <= tuning.partial_sums([(n, k)], dtype)


def test_more_rows_of_a_buffer_as_far_as_it_goes():
    buffer = torch.arange(20).view(5, 4)
    assert torch.equal(_up_to(4, buffer[:2]), buffer[:4])
    assert torch.equal(_up_to(9, buffer[:2]), buffer) and torch.equal(_up_to(1, buffer[:2]), buffer[:2])


@pytest.mark.parametrize("vocab", [100, 4096, 9001])
def test_sampling_takes_the_largest_and_the_first_of_equals(vocab):
    logits = rand(5, vocab)
    logits[1, :] = 0.5
    logits[2, 10] = logits[2, vocab - 1] = 100.0
    blocks = num_blocks(vocab)
    best, token = torch.empty(5, blocks, device=DEVICE), torch.empty(5, blocks, dtype=torch.int32, device=DEVICE)
    out = torch.full((5,), -7, dtype=torch.int32, device=DEVICE)
    sample(logits, None, best, token, out, i32([4]), 0.0)
    assert out.tolist()[:4] == [int(logits[0].argmax()), 0, 10, int(logits[3].argmax())] and out[4] == -7


@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_sampling_draws_what_the_reference_draws(temperature):
    logits = rand(6, 5000)
    requests, positions = np.arange(6), np.array([0, 5, 5, 1000, 7, 8])
    keys = torch.from_numpy(row_keys(3, requests, positions)).to(DEVICE)
    blocks = num_blocks(5000)
    best, token = torch.empty(6, blocks, device=DEVICE), torch.empty(6, blocks, dtype=torch.int32, device=DEVICE)
    out = torch.empty(6, dtype=torch.int32, device=DEVICE)
    sample(logits, keys, best, token, out, i32([6]), temperature)
    assert out.tolist() == sample_reference(logits, temperature, 3, requests, positions).tolist()


def test_update_tables():
    tables = torch.full((4, 8), -1, dtype=torch.int32, device=DEVICE)
    update_tables(tables, i32([0, 3, 2, 1]), i32([0, 7, 2, 1]), i32([5, 6, 7, 8]), i32([3]))
    expected = torch.full((4, 8), -1, dtype=torch.int32)
    expected[0, 0], expected[3, 7], expected[2, 2] = 5, 6, 7
    assert torch.equal(tables.cpu(), expected)
