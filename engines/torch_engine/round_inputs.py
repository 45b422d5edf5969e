"""One round's inputs as a single int32 buffer: written on the host, copied to the device once, read there through views.

Where each column lies depends on a round's shape alone, so a CUDA graph captured for a shape finds its inputs again. Block
tables stay on the device; a round carries what is new in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from engines.interface import Int64Array, ScheduledBatch
from engines.torch_engine.sampling import row_keys
from traces.errors import BenchctlError

WARM_UP_REQUESTS = 1 << 16  # requests may be negative down to here: warm-ups are no rows of a trace
HEADER = 20
# Where the counts lie: each at a multiple of 16 bytes, as a kernel is compiled anew for another alignment.
TOKENS, SINGLES, CHUNKS, YIELDS, UPDATES = range(0, HEADER, 4)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a round may hold: a CUDA graph is captured for one. `chunk_tiles` 0: decodes alone, one token a sequence.

    `chunk_keys`: chunks find their keys of this round in its rows ("own"), and there are no others ("fresh"), or all are read
    through the block tables ("blocks").
    `singles`: sequences that feed one token may be among them.
    """

    num_tokens: int
    num_seqs: int
    chunk_tiles: int
    num_updates: int
    chunk_keys: Literal["own", "fresh", "blocks"] = "own"
    singles: bool = True

    @property
    def decodes_only(self) -> bool:
        return self.chunk_tiles == 0

    def columns(self) -> dict[str, int]:
        """Name -> length in int32, in the order in which they lie.

        Each begins at a multiple of 16 bytes, whatever the shape: a kernel is compiled anew for another alignment.
        """
        columns = {
            "header": HEADER,
            "keys": 2 * self.num_seqs,
            "yield_rows": self.num_seqs,
            "token_ids": self.num_tokens,
            "positions": self.num_tokens,
            "table_rows": self.num_tokens,
        }
        columns |= dict.fromkeys(("single_row", "single_query", "single_pos"), self.num_seqs)
        if not self.decodes_only:
            names = ("chunk_row", "chunk_query", "chunk_pos", "chunk_len", "chunk_base")
            columns |= dict.fromkeys(names, self.chunk_tiles)
        columns |= dict.fromkeys(("update_row", "update_column", "update_block"), self.num_updates)
        return {name: -(-length // 4) * 4 for name, length in columns.items()}

    @property
    def size(self) -> int:
        return sum(self.columns().values())


@dataclass(frozen=True, slots=True)
class DeviceInputs:
    """Views of the device's buffer for one shape; int32 but `keys`, int64."""

    shape: Shape
    columns: dict[str, Tensor]

    @classmethod
    def of(cls, shape: Shape, buffer: Tensor) -> DeviceInputs:
        views, at = {}, 0
        for name, length in shape.columns().items():
            views[name] = buffer[at : at + length]
            at += length
        views["keys"] = views["keys"].view(torch.int64)
        return cls(shape, views)

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    def count(self, which: int) -> Tensor:
        return self.columns["header"][which : which + 1]


class TableRows:
    """Which row of the device's block tables belongs to which request, and how much of its table is there.

    Nobody tells an engine that a request has ended: when no row is left, those of requests outside the batch are given up,
    and whoever comes back is sent anew.
    """

    def __init__(self, num_rows: int, max_blocks: int) -> None:
        self.num_rows = num_rows
        self.max_blocks = max_blocks
        self.row_of = np.full(WARM_UP_REQUESTS + 1024, -1, dtype=np.int64)  # by request + WARM_UP_REQUESTS
        self.owner = np.full(num_rows, -1, dtype=np.int64)
        self.sent = np.zeros(num_rows, dtype=np.int64)  # blocks of the row that are on the device
        self.free = list(range(num_rows - 1, -1, -1))

    def rows_and_updates(self, batch: ScheduledBatch) -> tuple[Int64Array, list[tuple[int, int, list[int]]]]:
        """-> (row of each sequence, new pieces of tables: (row, first column, blocks))."""
        request = batch.request + WARM_UP_REQUESTS
        highest = int(request.max(initial=0))
        if highest >= len(self.row_of):
            self.row_of = np.concatenate([self.row_of, np.full(highest + 1, -1, dtype=np.int64)])
        rows = self.row_of[request]
        for i in np.flatnonzero(rows < 0).tolist():
            rows[i] = self._take_row(int(request[i]), request)
        # An admission brings a table of its own: what an earlier stay left on the device is void.
        self.sent[rows[batch.cached_tokens >= 0]] = 0
        updates = []
        for i in np.flatnonzero(batch.num_blocks > self.sent[rows]).tolist():
            row, first = int(rows[i]), int(self.sent[rows[i]])
            updates.append((row, first, batch.block_tables[i][first:]))
        self.sent[rows] = batch.num_blocks
        return rows, updates

    def _take_row(self, request: int, batch_requests: Int64Array) -> int:
        if not self.free:
            gone = np.flatnonzero(~np.isin(self.owner, batch_requests))
            self.row_of[self.owner[gone]] = -1
            self.owner[gone] = -1
            self.sent[gone] = 0
            self.free = gone.tolist()
        row = self.free.pop()
        self.row_of[request] = row
        self.owner[row] = request
        self.sent[row] = 0
        return row


@dataclass(slots=True)
class HostInputs:
    """What a round needs, before it is laid out: numpy, in batch order."""

    token_ids: Int64Array  # [T]
    positions: Int64Array  # [T]
    token_seq: Int64Array  # [T] sequence of each token
    first_row: Int64Array  # [n + 1] first token of each sequence
    start: Int64Array
    num_tokens: Int64Array
    yielding: Int64Array  # sequences that yield a token
    context_pairs: int  # sum over fed tokens of the keys each attends to
    context_tokens: int  # sum over sequences of the keys read

    @property
    def chunk_keys(self) -> Literal["own", "fresh", "blocks"]:
        """Where chunks had best read their keys: from blocks where most are of earlier rounds."""
        several = self.num_tokens > 1
        n, start = self.num_tokens[several], self.start[several]
        older = int((n * start).sum())
        return "fresh" if older == 0 else "own" if older <= int((n * (n + 1) // 2).sum()) else "blocks"


def gather(batch: ScheduledBatch, vocab_size: int) -> HostInputs:
    """Raises BenchctlError where a token id is outside the vocabulary."""
    start, num_tokens, n = batch.start, batch.num_tokens, batch.num_seqs
    first_row = np.zeros(n + 1, dtype=np.int64)
    np.cumsum(num_tokens, out=first_row[1:])
    total = int(first_row[-1])
    if total == n:
        token_ids = np.fromiter(
            (ids[s] for ids, s in zip(batch.token_ids, start.tolist(), strict=True)), dtype=np.int64, count=n
        )
        positions, token_seq = start, np.arange(n)
    else:
        ends = (start + num_tokens).tolist()
        token_ids = np.concatenate([ids[s:e] for ids, s, e in zip(batch.token_ids, start.tolist(), ends, strict=True)])
        token_seq = np.repeat(np.arange(n), num_tokens)
        positions = np.arange(total) - (first_row[:-1] - start)[token_seq]
    if total and (token_ids.min() < 0 or token_ids.max() >= vocab_size):
        at = int(np.flatnonzero((token_ids < 0) | (token_ids >= vocab_size))[0])
        raise BenchctlError(
            f"token id {token_ids[at]} at position {positions[at]} of request {batch.request[token_seq[at]]}: the model's vocabulary has {vocab_size}",
            fix="use a model with a larger vocabulary, --engine null, or a trace with ids below it",
        )
    return HostInputs(
        token_ids=token_ids,
        positions=positions,
        token_seq=token_seq,
        first_row=first_row,
        start=start,
        num_tokens=num_tokens,
        yielding=np.flatnonzero(batch.yields_token),
        context_pairs=int((positions + 1).sum()),
        context_tokens=int((start + num_tokens).sum()),
    )


def chunk_tiles(inputs: HostInputs, tokens_per_tile: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Tiles of the sequences that feed several tokens: (sequence, first token within it, tokens), most keys first."""
    several = np.flatnonzero(inputs.num_tokens > 1)
    per_seq = -(-inputs.num_tokens[several] // tokens_per_tile)
    seq = np.repeat(several, per_seq)
    ahead = np.concatenate([[0], np.cumsum(per_seq)[:-1]]) if len(per_seq) else np.zeros(0, dtype=np.int64)
    first = (np.arange(len(seq)) - np.repeat(ahead, per_seq)) * tokens_per_tile
    length = np.minimum(inputs.num_tokens[seq] - first, tokens_per_tile)
    # The longest work starts first, so that no program is left alone at the end.
    order = np.argsort(-(inputs.start[seq] + first), kind="stable")
    return seq[order], first[order], length[order]


def write(
    out: np.ndarray,
    shape: Shape,
    inputs: HostInputs,
    rows: Int64Array,
    tiles: tuple[Int64Array, Int64Array, Int64Array],
    updates: list[tuple[int, int, list[int]]],
    batch: ScheduledBatch,
    seed: int | None,
) -> None:
    """Lay a round out in `out` (int32 [shape.size], host). `seed`: of the keys for sampling; None: tokens are not drawn."""
    at = 0
    views = {}
    for name, length in shape.columns().items():
        views[name] = out[at : at + length]
        at += length
    num_tokens, yielding = len(inputs.token_ids), inputs.yielding
    views["token_ids"][:num_tokens] = inputs.token_ids
    views["positions"][:num_tokens] = inputs.positions
    views["table_rows"][:num_tokens] = rows[inputs.token_seq]
    num_updates = 0
    for row, column, blocks in updates:
        end = num_updates + len(blocks)
        views["update_row"][num_updates:end] = row
        views["update_column"][num_updates:end] = range(column, column + len(blocks))
        views["update_block"][num_updates:end] = blocks
        num_updates = end
    views["yield_rows"][: len(yielding)] = inputs.first_row[yielding + 1] - 1
    header = views["header"]
    header[TOKENS], header[YIELDS], header[UPDATES] = num_tokens, len(yielding), num_updates
    # The longest first, so that none is left alone at the end.
    order = np.argsort(-inputs.start, kind="stable")
    singles = order if shape.decodes_only else order[inputs.num_tokens[order] == 1]
    header[SINGLES], header[CHUNKS] = len(singles), 0
    views["single_row"][: len(singles)] = rows[singles]
    views["single_query"][: len(singles)] = inputs.first_row[singles]
    views["single_pos"][: len(singles)] = inputs.start[singles]
    if not shape.decodes_only:
        seq, first, length = tiles
        header[CHUNKS] = len(seq)
        views["chunk_base"][: len(seq)] = inputs.first_row[seq]
        views["chunk_row"][: len(seq)] = rows[seq]
        views["chunk_query"][: len(seq)] = inputs.first_row[seq] + first
        views["chunk_pos"][: len(seq)] = inputs.start[seq] + first
        views["chunk_len"][: len(seq)] = length
    if seed is not None:
        positions = inputs.start[yielding] + inputs.num_tokens[yielding]
        views["keys"].view(np.int64)[: len(yielding)] = row_keys(seed, batch.request[yielding], positions)
