"""What of a batch its duration depends on. The same numbers from a batch about to run and from the record of one.

No torch, no clock, no files. A feature is a number a round; of a recorded run they are columns, so that the formula in
`cost` is one for both.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engines.interface import ScheduledBatch
from engines.simulated.profile import Graphs

# Of one round: int or float. Of many: float64 [num_rounds] (`has_prefill`: bool). Arithmetic is the same on both.
Values = Any


@dataclass(frozen=True, slots=True)
class Features:
    """One round, or many as columns."""

    has_prefill: Values  # False: decodes alone
    num_seqs: Values
    num_tokens: Values  # fed
    prefill_tokens: Values  # fed by sequences that are not decodes
    num_yields: Values  # rows of the head
    context_tokens: Values  # sum over sequences of the keys read
    context_pairs: Values  # sum over fed tokens of the keys each attends to, itself included
    chunk_keys: Values  # most keys of a sequence that feeds several tokens; 0 where there is none
    single_keys: Values  # in a round with prefill: most keys of a sequence that feeds one token; else 0
    known_tokens: Values  # of the requests admitted in the round, cached ones included
    padded_tokens: Values  # computed, padding included
    padded_seqs: Values


def graph_sizes(max_num_seqs: int, max_num_batched_tokens: int) -> Graphs:
    """The sizes that the Triton engine captures for these limits (`TritonEngine._graph_shapes`; a test holds them equal)."""
    max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
    steps = (1, 2, 4, 8, *range(16, 129, 16), *range(160, 513, 32), *range(576, max_num_seqs + 64, 64))
    chunks = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
    return Graphs(
        decode=tuple(sorted({min(n, max_num_seqs) for n in steps})),
        prefill=tuple(sorted({min(n, max_num_batched_tokens) for n in chunks})),
        prefill_max_seqs=min(max_num_seqs, 256),
    )


def padded(graphs: Graphs, has_prefill: bool, num_tokens: int, num_seqs: int) -> int:
    """Tokens that the device computes: the next captured size, or those fed where none is large enough.

    Leaves out what the engine also asks of a graph with prefill, room for its chunk tiles and block-table updates: a round of
    very many short chunks is padded further there.
    """
    sizes: Sequence[int] = graphs.prefill if has_prefill else graphs.decode
    if has_prefill and num_seqs > graphs.prefill_max_seqs:
        return num_tokens
    at = bisect_left(sizes, num_tokens)
    # A graph holds as many sequences as the smaller of its tokens and the most seats: never fewer than fit its tokens.
    return sizes[at] if at < len(sizes) else num_tokens


def features_of(batch: ScheduledBatch, graphs: Graphs) -> Features:
    """Features of one batch, as numbers."""
    num, start = batch.num_tokens, batch.start
    n, total = batch.num_seqs, int(num.sum())
    decodes = int(batch.is_decode.sum())
    has_prefill = decodes < n
    chunk_keys = single_keys = known = 0
    if has_prefill:
        ends = start + num
        several = num > 1
        chunk_keys = int(ends[several].max(initial=0))
        single_keys = int(ends[~several].max(initial=0))
        known = int(ends[batch.cached_tokens >= 0].sum())
    size = padded(graphs, has_prefill, total, n)
    return Features(
        has_prefill=has_prefill,
        num_seqs=n,
        num_tokens=total,
        prefill_tokens=total - decodes,
        num_yields=int(batch.yields_token.sum()),
        context_tokens=int(start.sum()) + total,
        context_pairs=int(num @ start) + (int(num @ num) + total) // 2,
        chunk_keys=chunk_keys,
        single_keys=single_keys,
        known_tokens=known,
        padded_tokens=size,
        padded_seqs=n if has_prefill else size,
    )
