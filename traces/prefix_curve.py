"""What a prefix cache of a given size could save: the unbounded bound, and LRU caches of several sizes.

Knows rows and blocks, no policy. Requests come in order of arrival, each is done before the next looks; a lookup takes the leading run of
blocks that are cached, by the whole prefix. Where all shapes are hash ids, their own blocks are counted, without making a token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import xxhash

from traces.load import Trace
from traces.tokens import MAX_TOKENS, TokenMaker

CAPACITIES = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
MAX_MADE_TOKENS = 300_000_000  # of a trace whose tokens have to be made; above it only the first requests are measured
UNSHARED = {"unique", "prompt", "messages"}
MAX_CURVE_BLOCKS = 1_000_000  # lookups of the LRU curve


@dataclass(slots=True)
class PrefixUse:
    """`block_size` is that of the engine for the token figures, `own_block_size` that of the blocks counted.

    `curve`: (capacity in own blocks, tokens it holds, share of prompt blocks hit) for LRU. `measured`: requests that took part.
    """

    block_size: int
    own_block_size: int
    measured: int = 0
    left_out: int = 0  # text, or beyond the limit
    blocks: int = 0
    blocks_hit: int = 0
    unique_blocks: int = 0
    prompt_tokens: int = 0
    tokens_hit: int = 0
    repeated_prompts: int = 0  # every block hit
    hit_beyond_first: int = 0  # requests that hit more than their first block
    curve: list[tuple[int, int, float]] = field(default_factory=list)
    curve_requests: int = 0

    @property
    def block_rate(self) -> float:
        return self.blocks_hit / self.blocks if self.blocks else 0.0

    @property
    def token_rate(self) -> float:
        return self.tokens_hit / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True, slots=True)
class _Access:
    """Blocks of one request: `keys` name a block after its whole prefix; the first `num_prompt` are looked up, all are cached."""

    keys: list[int]
    num_prompt: int
    length: int  # prompt tokens


def measure_prefix_use(trace: Trace, block_size: int, shapes: Iterable[str]) -> PrefixUse | None:
    """`shapes`: the ways in which rows give their prompts. None where every row is unique, or text. Raises BenchctlError."""
    shared = set(shapes) - UNSHARED
    if not shared:
        return None
    by_hash = shared == {"hash_ids"} and trace.header.block_size % block_size == 0
    own = trace.header.block_size if by_hash else block_size
    use = PrefixUse(block_size, own)
    caches = [_Lru(size) for size in CAPACITIES]
    seen: set[int] = set()
    curve_hits = [0] * len(caches)
    curve_blocks = 0
    for access in _hash_accesses(trace, use) if by_hash else _token_accesses(trace, use):
        use.measured += 1
        use.prompt_tokens += access.length
        use.blocks += access.num_prompt
        hit = _run(seen, access)
        use.blocks_hit += hit
        use.repeated_prompts += hit == access.num_prompt and hit > 0
        use.hit_beyond_first += hit > 1
        # Never the last prompt token: its logits are needed. A tail's whole engine blocks count, its rest does not.
        tokens = min(hit * own, access.length - 1) // block_size * block_size
        use.tokens_hit += tokens
        seen.update(access.keys)
        if curve_blocks < MAX_CURVE_BLOCKS:
            curve_blocks += access.num_prompt
            use.curve_requests += 1
            for place, cache in enumerate(caches):
                curve_hits[place] += cache.use(access)
    use.unique_blocks = len(seen)
    for cache, hits in zip(caches, curve_hits, strict=True):
        use.curve.append((cache.capacity, cache.capacity * own, hits / curve_blocks if curve_blocks else 0.0))
        if cache.capacity >= use.unique_blocks:
            break  # larger ones hold everything
    return use


def _run(cached: set[int], access: _Access) -> int:
    run = 0
    for key in access.keys[: access.num_prompt]:
        if key not in cached:
            break
        run += 1
    return run


class _Lru:
    """Blocks by last use. A request's first blocks count as used last, as in an engine that frees from the end."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def use(self, access: _Access) -> int:
        blocks = self._blocks
        run = 0
        for key in access.keys[: access.num_prompt]:
            if key not in blocks:
                break
            run += 1
        for key in reversed(access.keys):
            if key in blocks:
                blocks.move_to_end(key)
            else:
                blocks[key] = None
        while len(blocks) > self.capacity:
            blocks.popitem(last=False)
        return run


def _hash_accesses(trace: Trace, use: PrefixUse) -> Iterator[_Access]:
    """By hash ids alone; the tail is a block like the others. A unique row has blocks of its own."""
    size = trace.header.block_size
    by_session = trace.header.hash_scope == "session"
    numbers: dict[tuple[int, int | str], int] = {}  # (number of the prefix, id) → number of this prefix
    roots: dict[str, int] = {}  # a session's empty prefix
    next_root = -1
    fresh = -(2**62)
    for request in trace.requests():
        length = request.input_length
        if length is None:
            use.left_out += 1
            continue
        if request.hash_ids is None:
            num = -(-length // size)
            keys = list(range(fresh, fresh + num))
            fresh += num
            yield _Access(keys, num, length)
            continue
        at = 0
        if by_session:
            name = f"s{request.session}" if request.session is not None else f"r{request.index}"
            if name not in roots:
                roots[name] = next_root
                next_root -= 1
            at = roots[name]
        keys = []
        for id in request.hash_ids:
            at = numbers.setdefault((at, id), len(numbers) + 1)
            keys.append(at)
        yield _Access(keys, len(keys), length)


def _token_accesses(trace: Trace, use: PrefixUse) -> Iterator[_Access]:
    """By made tokens; the blocks that outputs fill are cached too, but for the one that the last token would fill."""
    maker = TokenMaker(trace, vocab_size=None)
    size = use.own_block_size
    made = 0
    for request in trace.requests():
        if request.prompt is not None or request.messages is not None:
            use.left_out += 1
            continue
        length = maker.prompt_length(request)
        total = length + (request.output_length or 0)
        if made + total > MAX_MADE_TOKENS or total > MAX_TOKENS:
            use.left_out += 1
            continue
        made += total
        ids = maker.token_ids(request)
        data = memoryview(np.asarray(ids, dtype="<i8").tobytes())
        prefix = xxhash.xxh3_64()
        keys = []
        for block in range(max(length, len(ids) - 1) // size):
            prefix.update(data[8 * block * size : 8 * (block + 1) * size])
            keys.append(prefix.intdigest())
        yield _Access(keys, length // size, length)
