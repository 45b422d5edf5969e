"""From logits to tokens in one pass: argmax, of the logits or of logits / temperature + Gumbel noise.

The noise is the hash of (key, token) that engines/torch_engine/sampling.py states, so both draw the same token from the same
logits. A second, small kernel takes the best of each row's blocks; among equals the lowest token wins, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from engines.kernels.launch import launch

BLOCK = 4096


@triton.jit
def _best_of_block_kernel(
    logits_ptr, keys_ptr, best_ptr, token_ptr, num_rows_ptr, inverse_temperature, stride_row, vocab_first, VOCAB: tl.constexpr,
    BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr, NOISE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    if row >= tl.load(num_rows_ptr):
        return
    block = tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row.to(tl.int64) * stride_row + tokens, mask=tokens < VOCAB, other=float("-inf")).to(
        tl.float32
    )
    if NOISE:
        # The finalizer of MurmurHash3 over the token, each half of the key mixed in before one of two rounds of it.
        key = tl.load(keys_ptr + row)
        h = (vocab_first + tokens).to(tl.uint32) * 0x9E3779B1 + key.to(tl.uint32)
        h = (h ^ (h >> 16)) * 0x85EBCA6B
        h = (h ^ (h >> 13)) * 0xC2B2AE35
        h = (h ^ (h >> 16)) + (key >> 32).to(tl.uint32)
        h = (h ^ (h >> 16)) * 0x85EBCA6B
        h = (h ^ (h >> 13)) * 0xC2B2AE35
        h = h ^ (h >> 16)
        # The top 23 bits, centred in their cells: strictly between 0 and 1.
        uniform = ((h >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
        x = x * inverse_temperature - tl.log(-tl.log(uniform))
        x = tl.where(tokens < VOCAB, x, float("-inf"))
    best = tl.max(x, 0)
    at = row * NUM_BLOCKS + block
    tl.store(best_ptr + at, best)
    tl.store(token_ptr + at, vocab_first + tl.min(tl.where(x == best, tokens, VOCAB), 0))


@triton.jit
def _best_of_row_kernel(
    best_ptr,
    token_ptr,
    out_ptr,
    num_rows_ptr,
    NUM_BLOCKS: tl.constexpr,
    PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    if row >= tl.load(num_rows_ptr):
        return
    offs = tl.arange(0, PAD)
    best = tl.load(best_ptr + row * NUM_BLOCKS + offs, mask=offs < NUM_BLOCKS, other=float("-inf"))
    token = tl.load(token_ptr + row * NUM_BLOCKS + offs, mask=offs < NUM_BLOCKS, other=2147483647)
    tl.store(out_ptr + row, tl.min(tl.where(best == tl.max(best, 0), token, 2147483647), 0))


def num_blocks(vocab_size: int) -> int:
    return triton.cdiv(vocab_size, BLOCK)


def sample(
    logits: torch.Tensor,
    keys: torch.Tensor | None,
    best: torch.Tensor,
    token: torch.Tensor,
    out: torch.Tensor,
    num_rows: torch.Tensor,
    temperature: float,
    vocab_first: int = 0,
    gather: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """out int32 [rows] = the token of each row. logits [rows, vocab]; keys int64 [rows] (temperature > 0); best float32 and token
    int32 [rows, num_blocks(vocab)] are scratch; num_rows int32 [1].

    A rank's share of the vocabulary begins at `vocab_first`; `gather` brings the ranks' best together, [ranks, rows, blocks].
    """
    rows, vocab = logits.shape
    blocks = best.shape[1]  # those of the longest share: blocks beyond this one hold -inf
    noise = temperature > 0
    launch(
        _best_of_block_kernel, (rows, blocks),
        logits, keys, best, token, num_rows, 1.0 / temperature if noise else 1.0, logits.stride(0), vocab_first,
        VOCAB=vocab, BLOCK=BLOCK, NUM_BLOCKS=blocks, NOISE=noise, num_warps=8,
    )  # fmt: skip
    if gather is not None:
        best, token = (gather(x).transpose(0, 1).reshape(rows, -1).contiguous() for x in (best, token))
        blocks = best.shape[1]
    launch(
        _best_of_row_kernel,
        (rows,),
        best,
        token,
        out,
        num_rows,
        NUM_BLOCKS=blocks,
        PAD=triton.next_power_of_2(blocks),
        num_warps=1,
    )
