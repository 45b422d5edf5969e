"""Keys of KV blocks that stand for their token ids: equal exactly where the ids up to the block's end would be equal.

A prefix cache needs to know which blocks are equal, not what is in them. Of a request whose ids would be made from lengths
or from `hash_ids` (`traces.tokens`) that follows from its row, without spelling out a token: what only this row has is
told by the row's number, a block of hash ids by the chain of ids up to it. Everything else (ids or text that the trace
gives, segments, `carry`) is spelled out, and so are all rows of a trace in which the two kinds could meet.
Knows no engine and no policy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import xxhash

from traces.errors import BenchctlError
from traces.load import Trace
from traces.request import Request
from traces.tokens import OUTPUT, WIDE_RANGE, UInt64Array

MAX_BLOCKS_OF_ROW = 2**26
MAX_ROWS_LOOKED_AT = 200_000  # whose ids are gathered, to know which of them no other row has
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_KEY_MASK = np.uint64(2**63 - 1)  # keys of shared blocks are >= 0, of private ones < 0


class Keys(Protocol):
    """Makes keys. One object for all requests of a kind, so that a waiting request holds no more than its name."""

    shares_nothing: bool  # no other request has any of them

    def __call__(self, row: int, num_prompt_tokens: int, num_blocks: int) -> tuple[list[int], int]:
        """(a key for each of the leading full blocks of the request of a row of the trace, how many of the first ones another
        request may have too)."""


class PrivateKeys:
    """Of requests that share nothing with any other."""

    shares_nothing = True

    def __call__(self, row: int, num_prompt_tokens: int, num_blocks: int) -> tuple[list[int], int]:
        return private_keys(row, 0, num_blocks), 0


class SharedKeys:
    """Of requests with hash ids, made from the row of the trace."""

    shares_nothing = False

    def __init__(self, make: Callable[[int, int, int], tuple[list[int], int]]) -> None:
        self._make = make

    def __call__(self, row: int, num_prompt_tokens: int, num_blocks: int) -> tuple[list[int], int]:
        return self._make(row, num_prompt_tokens, num_blocks)


class BlockKeys:
    """Makes the keys of one trace's requests for one block size and vocabulary. `by_row` reads a row of the trace."""

    def __init__(
        self, trace: Trace, *, block_size: int, vocab_size: int | None, by_row: Callable[[int], Request]
    ) -> None:
        self._trace, self._block_size, self._by_row = trace, block_size, by_row
        self._vocab_size = vocab_size or WIDE_RANGE
        # A piece begins with its number, spelled in base V; a block has to hold that of two pieces to tell all apart.
        digits, most = 1, self._vocab_size
        while most < 2**63:
            digits, most = digits + 1, most * self._vocab_size
        self._streamed = not trace.complete
        small = block_size < 2 * max(digits, 2)
        # Of a trace that is read on the way the head stands for all of it: who is carried from later is not known.
        self._spelled = trace.gives_ids or small or (trace.any_carry and not trace.complete)
        hash_block = trace.header.block_size
        self._spell_hash_ids = trace.any_carry or hash_block % block_size != 0
        self._by_session = trace.header.hash_scope == "session"
        self._private, self._shared = PrivateKeys(), SharedKeys(self.keys_of_hash_ids)
        self._common_ids: set[Any] | None = None
        self._steps = np.arange(1, max(hash_block // block_size, 1) + 1, dtype=np.uint64) * _GOLDEN

    def of(self, request: Request) -> Keys | None:
        """None: its ids have to be spelled out."""
        if self._spelled or request.segments or request.index >= 2**36:
            return None
        if request.carry is not None:
            if self._streamed:
                raise BenchctlError(
                    f'request "{request.id}" carries tokens, as no row of the trace\'s head does',
                    where=f"{self._trace.path}, line {request.line}",
                    fix="--validate-first, so that all rows are known before any is replayed",
                )
            return None
        if self._trace.is_carry_parent(request.id):
            return None  # its children spell it out
        if request.hash_ids is None:
            return self._private
        return None if self._spell_hash_ids else self._shared

    def _scope(self, request: Request) -> str:
        if not self._by_session:
            return ""
        return f"row {request.index}" if request.session is None else f"session {request.session}"

    def _num_common(self, request: Request) -> int:
        """Leading hash ids that other rows have too, perhaps elsewhere: beyond them nobody else's chain goes on."""
        assert request.hash_ids is not None, request
        trace = self._trace
        if not trace.complete or trace.num_requests > MAX_ROWS_LOOKED_AT:
            return len(request.hash_ids)
        if self._common_ids is None:
            seen: set[Any] = set()
            common: set[Any] = set()
            for other in trace.requests("file"):
                ids = {(self._scope(other), id) for id in other.hash_ids or ()}
                common |= seen & ids
                seen |= ids
            self._common_ids = common
        scope, common = self._scope(request), self._common_ids
        return next((at for at, id in enumerate(request.hash_ids) if (scope, id) not in common), len(request.hash_ids))

    def keys_of_hash_ids(self, row: int, num_prompt_tokens: int, num_blocks: int) -> tuple[list[int], int]:
        """`num_prompt_tokens`: of the prompt's leading part that is used. A chain over the ids, one link a hash block; within one a key for each KV block; then those of the output."""
        request = self._by_row(row)
        assert request.hash_ids is not None, request
        size, per_link = self._block_size, len(self._steps)
        num_shared = min(num_prompt_tokens // size, num_blocks)  # blocks of prompt alone
        scope = self._scope(request)
        rest = num_prompt_tokens % size
        num_links = -(-(num_shared + (rest > 0)) // per_link)
        links, chain = [], xxhash.xxh3_64_intdigest(scope.encode())
        for id in request.hash_ids[:num_links]:
            own = id.to_bytes(9, "little", signed=True) if isinstance(id, int) else b"s" + id.encode()
            chain = xxhash.xxh3_64_intdigest(chain.to_bytes(8, "little") + own)
            links.append(chain)
        keys = _mixed(np.array(links, dtype=np.uint64)[:, None] + self._steps).reshape(-1)
        out: list[int] = (keys[:num_shared] & _KEY_MASK).tolist()
        if num_shared < num_blocks and rest:
            # Prompt and output in one block: as long as the output's number is not spelled out, another row's may be equal.
            told = ((row << 1) << 3 | OUTPUT) % self._vocab_size ** (size - rest)
            before = int(keys[num_shared]).to_bytes(8, "little")
            text = before + rest.to_bytes(4, "little") + told.to_bytes(8, "little")
            out.append(xxhash.xxh3_64_intdigest(text) & (2**63 - 1))
        num_common = self._num_common(request)
        shared = len(out) if num_common >= num_links else min(num_common * per_link, len(out))
        return out + private_keys(row, len(out), num_blocks), shared


def private_keys(row: int, first: int, end: int) -> list[int]:
    """Of the blocks first..end-1 of a row."""
    base = -1 - row * MAX_BLOCKS_OF_ROW
    return list(range(base - first, base - end, -1))


def _mixed(x: UInt64Array) -> UInt64Array:
    """splitmix64's finalizer, a bijection of 64-bit words (as in `traces.tokens`)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return x
