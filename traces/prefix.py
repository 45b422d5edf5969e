"""What a prefix cache could save at best: the trace's own upper bound, to set a run's hit rate against.

Knows token ids only, no policy: the cache is unbounded, nothing is evicted, and every request is done before the next
one looks. Block hashes are of the whole prefix, so an equal block after a different prefix is no hit.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import xxhash


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
