"""What of a batch its duration depends on. The same numbers from a batch about to run and from the record of one.

No torch, no clock, no files. A feature is a number a round; of a recorded run they are columns, so that the formula in
`cost` is one for both.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines.interface import ScheduledBatch
from engines.simulated.profile import Graphs
from engines.steady_batch import SteadyBatch

SPARE_TILES = 16  # of a graph with prefill, beyond those that whole tiles of its tokens need
# Of one round: int or float. Of many: float64 [num_rounds] (`has_prefill`: bool). Arithmetic is the same on both.
Values = Any


@dataclass(slots=True)  # not frozen, which would double the time to make one; nobody changes it
class Features:
    """One round, or many as columns."""

    has_prefill: Values  # False: decodes alone
    num_seqs: Values
    num_tokens: Values  # fed
    prefill_tokens: Values  # fed by sequences that are not decodes
    num_yields: Values  # rows of the head
    context_tokens: Values  # sum over sequences of the keys read
    context_pairs: Values  # sum over fed tokens of the keys each attends to, itself included
    chunk_tiles: (
        Values  # tiles of the sequences that feed several tokens: `tile_tokens` query tokens each, the last one fewer
    )
    own_keys: Values  # sum over those tiles of the keys of this round that each walks along
    older_keys: Values  # sum over those tiles of the keys of earlier rounds, found through the block tables
    block_keys: (
        Values  # both instead, where a round without a graph attends to more older keys than own: another kernel
    )
    chunk_keys: Values  # most keys of a sequence that feeds several tokens; 0 where there is none
    single_context: Values  # sum over the sequences that feed one token of their keys
    single_keys: Values  # most keys of a sequence that feeds one token; 0 where there is none
    known_tokens: Values  # of the requests admitted in the round, cached ones included
    padded_tokens: Values  # computed, padding included
    padded_seqs: Values  # rows of the head that are computed


def graph_sizes(max_num_seqs: int, max_num_batched_tokens: int) -> Graphs:
    """The sizes that the Triton engine captures for these limits (`TritonEngine._graph_shapes`; a test holds them equal)."""
    max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
    steps = (1, 2, 4, 8, *range(16, 129, 16), *range(160, 513, 32), *range(576, max_num_seqs + 64, 64))
    chunks = (64, 128, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2304, 2560)
    return Graphs(
        decode=tuple(sorted({min(n, max_num_seqs) for n in steps})),
        prefill=tuple(sorted({min(n, max_num_batched_tokens) for n in chunks})),
        prefill_max_seqs=min(max_num_seqs, 256),
        prefill_most_seqs=max_num_seqs if max_num_seqs > 256 else 0,
    )


def tile_tokens(num_heads: int, num_kv_heads: int, head_dim: int, bytes_per_value: int, block_size: int) -> int:
    """Query tokens in a tile of the Triton kernel for chunks (`FusedForward.tokens_per_tile`; a test holds them equal)."""
    group = num_heads // num_kv_heads
    rows = max(16, 1 << (group - 1).bit_length())
    if head_dim in (16, 32, 64, 128, 256) or head_dim > 128 or bytes_per_value > 2:
        rows = max(rows, 64)
    else:
        rows = max(rows, 128 if block_size % 64 == 0 else 256)
    return rows // group


def padded(
    graphs: Graphs, has_prefill: bool, num_tokens: int, num_seqs: int, tiles: int = 0, tokens_per_tile: int = 1
) -> int:
    """Tokens that the device computes: the next captured size, or those fed where none is large enough.

    A graph with prefill also has room for a number of tiles that grows with its size. Leaves out what else it asks, room for
    the block tables of an admission: a cached prefix of very many blocks sends a small round past the graphs.
    """
    if not has_prefill:
        at = bisect_left(graphs.decode, num_tokens)
        # A graph holds as many sequences as the smaller of its tokens and the most seats: never fewer than fit its tokens.
        return graphs.decode[at] if at < len(graphs.decode) else num_tokens
    sizes = graphs.prefill
    if num_seqs > max(graphs.prefill_max_seqs, graphs.prefill_most_seqs):
        return num_tokens
    for size in sizes[bisect_left(sizes, num_tokens) :]:
        if num_seqs <= size and tiles <= size // tokens_per_tile + SPARE_TILES:
            return size
    return num_tokens


def in_graph(graphs: Graphs, num_seqs: int, num_tokens: int, size: int) -> bool:
    """Whether a round with prefill that is computed as `size` tokens ran as a graph."""
    return size > num_tokens or (
        size in graphs.prefill and num_seqs <= max(graphs.prefill_max_seqs, graphs.prefill_most_seqs)
    )


def head_rows(graphs: Graphs, num_seqs: Values, size: Values) -> Values:
    """Rows of the head that a graph with prefill of `size` tokens computes for so many sequences: all that it has room for."""
    if isinstance(num_seqs, np.ndarray):
        seats = np.where(num_seqs > graphs.prefill_max_seqs, graphs.prefill_most_seqs, graphs.prefill_max_seqs)
        return np.minimum(size, seats)
    return min(size, graphs.prefill_max_seqs if num_seqs <= graphs.prefill_max_seqs else graphs.prefill_most_seqs)


def tile_keys(
    own: Values, older: Values, pairs: Values, older_pairs: Values, graph: Values
) -> tuple[Values, Values, Values]:
    """(own, older, block keys) of tiles, as `HostInputs.chunk_keys` chooses between the kernels. `pairs` are those of chunks."""
    blocks = (
        (older_pairs > pairs - older_pairs) & ~graph
        if isinstance(graph, np.ndarray)
        else (older_pairs > pairs - older_pairs and not graph)
    )
    return own * (1 - blocks), older * (1 - blocks), (own + older) * blocks


def features_of(batch: ScheduledBatch, graphs: Graphs, tokens_per_tile: int = 64) -> Features:
    """Features of one batch, as numbers."""
    if isinstance(batch, SteadyBatch):
        return _features_of_steady(batch, graphs, tokens_per_tile)
    num, start = batch.num_tokens, batch.start
    n, total = batch.num_seqs, int(num.sum())
    decodes = int(batch.is_decode.sum())
    context = int(start.sum()) + total
    if decodes == n:
        return features_of_decodes(n, context, int(start.max(initial=-1)) + 1, graphs)
    ends = start + num
    several = num > 1
    chunk, behind, singles = num[several], start[several], ends[~several]
    tiles = -(-chunk // tokens_per_tile)
    num_tiles = int(tiles.sum())
    size = padded(graphs, True, total, n, num_tiles, tokens_per_tile)
    graph = in_graph(graphs, n, total, size)
    # Tile j of a chunk walks to its own last token.
    own = tokens_per_tile * int(tiles @ (tiles - 1)) // 2 + int(chunk.sum())
    older_pairs = int(chunk @ behind)
    own, older, blocks = tile_keys(
        own, int(tiles @ behind), older_pairs + (int(chunk @ chunk) + int(chunk.sum())) // 2, older_pairs, graph
    )
    return Features(
        has_prefill=True,
        num_seqs=n,
        num_tokens=total,
        prefill_tokens=total - decodes,
        num_yields=int(batch.yields_token.sum()),
        context_tokens=context,
        context_pairs=int(num @ start) + (int(num @ num) + total) // 2,
        chunk_tiles=num_tiles,
        own_keys=own,
        older_keys=older,
        block_keys=blocks,
        chunk_keys=int(ends[several].max(initial=0)),
        single_context=int(singles.sum()),
        single_keys=int(singles.max(initial=0)),
        known_tokens=int(ends[batch.cached_tokens >= 0].sum()),
        padded_tokens=size,
        padded_seqs=head_rows(graphs, n, size) if graph else n,
    )


def features_of_decodes(num_seqs: int, context: Values, longest: Values, graphs: Graphs) -> Features:
    """Of rounds of `num_seqs` decodes: `context` keys in all, `longest` of the longest sequence; of one round or many."""
    size = padded(graphs, False, num_seqs, num_seqs)
    return Features(
        has_prefill=False,
        num_seqs=num_seqs,
        num_tokens=num_seqs,
        prefill_tokens=0,
        num_yields=num_seqs,
        context_tokens=context,
        context_pairs=context,
        chunk_tiles=0,
        own_keys=0,
        older_keys=0,
        block_keys=0,
        chunk_keys=0,
        single_context=context,
        single_keys=longest,
        known_tokens=0,
        padded_tokens=size,
        padded_seqs=size,
    )


def _features_of_steady(batch: SteadyBatch, graphs: Graphs, tokens_per_tile: int) -> Features:
    """The same without a look at each decode: their sums are known, and admissions are few."""
    decodes, extra = batch.num_decodes, batch.extra
    context, longest = batch.decode_context + decodes, batch.longest_start + 1 if decodes else 0
    if extra is None:
        return features_of_decodes(decodes, context, longest, graphs)
    total, n = decodes, batch.num_seqs
    tiles = own = older = pairs = older_pairs = chunk_keys = known = 0
    context_pairs = single_context = context
    for start, num, cached in zip(extra.start, extra.num_tokens, extra.cached_tokens, strict=True):
        end = start + num
        total += num
        context += end
        mine = num * start + (num * num + num) // 2
        context_pairs += mine
        known += end if cached >= 0 else 0
        if num == 1:
            single_context += end
            longest = max(longest, end)
            continue
        own_tiles = -(-num // tokens_per_tile)
        tiles += own_tiles
        own += tokens_per_tile * (own_tiles * (own_tiles - 1)) // 2 + num
        older += own_tiles * start
        pairs += mine
        older_pairs += num * start
        chunk_keys = max(chunk_keys, end)
    size = padded(graphs, True, total, n, tiles, tokens_per_tile)
    graph = in_graph(graphs, n, total, size)
    own, older, blocks = tile_keys(own, older, pairs, older_pairs, graph)
    return Features(
        has_prefill=True,
        num_seqs=n,
        num_tokens=total,
        prefill_tokens=total - decodes,
        num_yields=batch.num_yields,
        context_tokens=context,
        context_pairs=context_pairs,
        chunk_tiles=tiles,
        own_keys=own,
        older_keys=older,
        block_keys=blocks,
        chunk_keys=chunk_keys,
        single_context=single_context,
        single_keys=longest,
        known_tokens=known,
        padded_tokens=size,
        padded_seqs=head_rows(graphs, n, size) if graph else n,
    )
