"""What a prefix cache could save at best: the trace's own upper bound, to set a run's hit rate against.

Knows token ids only, no policy: the cache is unbounded, nothing is evicted, and every request is done before the next
one looks. Block hashes are of the whole prefix, so an equal block after a different prefix is no hit.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import xxhash

from traces.request import Request

MAX_NODES = 3_000_000  # different blocks that are held at once: half a gigabyte


def prefix_upper_bound(arrays_iter: Iterable[tuple[int, npt.NDArray[np.int64]]], block_size: int) -> tuple[int, int]:
    """(prompt tokens queried, prompt tokens hit) over requests in the given order.

    Each item is (num_prompt_tokens, int64 ids of prompt + output). A lookup takes full blocks from the start up to the
    first that is not cached, and never the one with the last prompt token, whose logits are needed. Then the request's
    own full blocks are cached, those filled while decoding too; its last output token is never computed, so a block
    that only it would complete is not cached. Memory: about 100 bytes for each distinct block.
    """
    if block_size < 1:
        raise ValueError(f"block_size {block_size}")
    cached: set[int] = set()
    queried = hit = 0
    for num_prompt_tokens, ids in arrays_iter:
        queried += num_prompt_tokens
        num_computed = max(num_prompt_tokens, len(ids) - 1)
        may_hit = (num_prompt_tokens - 1) // block_size
        data = memoryview(np.asarray(ids, dtype="<i8").tobytes())
        prefix = xxhash.xxh3_64()
        looking = True
        for block in range(num_computed // block_size):
            prefix.update(data[8 * block * block_size : 8 * (block + 1) * block_size])
            key = prefix.intdigest()
            looking = looking and block < may_hit and key in cached
            hit += block_size * looking
            cached.add(key)
    return queried, hit


def bound_by_hash_ids(
    requests: Iterable[Request], own_size: int, by_session: bool, block_size: int
) -> tuple[int, int] | None:
    """The same of requests whose prompts share nothing but hash ids of `own_size` tokens, without making a token.

    `by_session`: an id means something in its session only. `own_size` must be a multiple of `block_size`, and pieces must
    differ within a block (`TokenMaker.digits`). None where the trace has more than MAX_NODES different blocks.
    """
    assert own_size % block_size == 0, (own_size, block_size)
    nodes: dict[tuple[int, int | str], int] = {}  # (number of the prefix, id) -> number of this prefix
    filled: list[int] = [0]  # most tokens of this block that a prompt had, by number of its prefix
    roots: dict[str, int] = {}
    queried = hit = 0
    for request in requests:
        length = request.input_length
        assert length is not None, request
        queried += length
        if request.hash_ids is None:
            continue
        at = 0
        if by_session:
            name = f"s{request.session}" if request.session is not None else f"r{request.index}"
            at = roots.setdefault(name, len(filled))
            if at == len(filled):
                filled.append(0)
        shared, looking, left = 0, True, length
        for id in request.hash_ids:
            mine = own_size if left >= own_size else left
            left -= mine
            at = nodes.setdefault((at, id), len(filled))
            if at == len(filled):
                filled.append(mine)
                looking = False
                continue
            if looking:
                # Behind a block that was shorter there, an output or nothing follows: no more is shared.
                shared += min(mine, filled[at])
                looking = mine <= filled[at]
            if filled[at] < mine:
                filled[at] = mine
        if len(filled) > MAX_NODES:
            return None
        hit += min(shared, length - 1) // block_size * block_size
    return queried, hit
