"""A scheduled batch as arrays: what is fed, where it is written, and which blocks each sequence reads.

Host side only: numpy, no torch. The batch is a live view of a scheduler's state, so everything is copied here.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np

from engines.interface import Int64Array, ScheduledBatch
from traces.errors import BenchctlError


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """T tokens of n sequences, in batch order; all int64."""

    block_size: int
    token_ids: Int64Array  # [T]
    positions: Int64Array  # [T]
    slot_mapping: Int64Array  # [T] where K and V go: block * block_size + offset
    cu_seqlens_q: Int64Array  # [n + 1] sequence i's tokens are [cu_seqlens_q[i], cu_seqlens_q[i + 1])
    context_lens: Int64Array  # [n] tokens that its last token attends to, itself included
    block_tables: Int64Array  # [n, most blocks], rows padded with -1
    yield_rows: Int64Array  # [m] rows of the m sequences that yield a token
    yield_requests: Int64Array  # [m]
    yield_positions: Int64Array  # [m] position of the token that will be chosen

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_seqs(self) -> int:
        return len(self.context_lens)


def build_inputs(batch: ScheduledBatch, block_size: int, vocab_size: int) -> BatchInputs:
    """Raises BenchctlError where a token id is outside the vocabulary. Does not modify the batch."""
    start, num_tokens = batch.start, batch.num_tokens
    n = batch.num_seqs
    context_lens = start + num_tokens
    cu_seqlens_q = np.zeros(n + 1, dtype=np.int64)
    np.cumsum(num_tokens, out=cu_seqlens_q[1:])
    total = int(cu_seqlens_q[-1])

    if total == n:  # one token each: no array a sequence
        token_ids = np.fromiter(
            (ids[s] for ids, s in zip(batch.token_ids, start.tolist(), strict=True)), dtype=np.int64, count=n
        )
        positions = start.copy()
        rows = np.arange(n)
    else:
        token_ids = np.concatenate(
            [ids[s:e] for ids, s, e in zip(batch.token_ids, start.tolist(), context_lens.tolist(), strict=True)]
        )
        assert len(token_ids) == total, (len(token_ids), total)
        rows = np.repeat(np.arange(n), num_tokens)
        positions = np.arange(total) - (cu_seqlens_q[:-1] - start)[rows]
    if total and (token_ids.min() < 0 or token_ids.max() >= vocab_size):
        raise _outside_vocabulary(batch, token_ids, rows, positions, vocab_size)

    block_tables = _pad_block_tables(batch)
    blocks = block_tables[rows, positions // block_size]
    assert total == 0 or blocks.min() >= 0, "a token is fed beyond its sequence's block table"
    yielding = np.flatnonzero(batch.yields_token)
    return BatchInputs(
        block_size=block_size,
        token_ids=token_ids,
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        cu_seqlens_q=cu_seqlens_q,
        context_lens=context_lens,
        block_tables=block_tables,
        yield_rows=cu_seqlens_q[1:][yielding] - 1,
        yield_requests=batch.request[yielding],
        yield_positions=context_lens[yielding],
    )


def _pad_block_tables(batch: ScheduledBatch) -> Int64Array:
    num_blocks = batch.num_blocks
    widest = int(num_blocks.max()) if len(num_blocks) else 0
    flat = np.fromiter(chain.from_iterable(batch.block_tables), dtype=np.int64)
    assert len(flat) == int(num_blocks.sum()), (len(flat), num_blocks)
    block_tables = np.full((len(num_blocks), widest), -1, dtype=np.int64)
    # A boolean index fills row by row, left to right: the order in which the tables were chained.
    block_tables[np.arange(widest) < num_blocks[:, None]] = flat
    return block_tables


def _outside_vocabulary(
    batch: ScheduledBatch, token_ids: Int64Array, rows: Int64Array, positions: Int64Array, vocab_size: int
) -> BenchctlError:
    at = int(np.flatnonzero((token_ids < 0) | (token_ids >= vocab_size))[0])
    return BenchctlError(
        f"token id {token_ids[at]} at position {positions[at]} of request {batch.request[rows[at]]}: "
        f"the model's vocabulary has {vocab_size}",
        fix="use a model with a larger vocabulary, --engine null, or a trace with ids below it",
    )
