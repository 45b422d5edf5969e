"""Which rounds a designed calibration runs: decodes by number and context, chunks by length and context, and both together.

Only sizes: no engine, no tokens, no clock. The same limits give the same rounds in the same order. They come in passes: a
measurement that runs out of time after one of them still covers the whole range, more coarsely.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

SEED = 7
CONTEXTS = (128, 512, 2_048, 8_192, 32_768)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CHUNKS = (16, 64, 128, 256, 512, 1_024, 2_048, 4_096, 8_192, 16_384)
BETWEEN = (32, 96, 192, 384, 768, 1_536, 3_072, 6_144)  # further lengths of a chunk


@dataclass(frozen=True, slots=True)
class Group:
    """`count` sequences alike: each feeds `num_tokens` tokens from position `start`. `decode`: one that was running."""

    start: int
    num_tokens: int
    decode: bool
    count: int = 1


Case = tuple[Group, ...]  # a round; decodes first, as a policy that runs the running first would have them


@dataclass(frozen=True, slots=True)
class GridLimits:
    """What a round may hold. `kv_cache_tokens`: the pool, in whole blocks of `block_size`."""

    kv_cache_tokens: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int

    def admit(self, case: Case) -> bool:
        blocks = sum(group.count * -(-(group.start + group.num_tokens) // self.block_size) for group in case)
        return (
            bool(case)
            and blocks * self.block_size <= self.kv_cache_tokens
            and sum(group.count for group in case) <= self.max_num_seqs
            and sum(group.count * group.num_tokens for group in case) <= self.max_num_batched_tokens
            and max(group.start + group.num_tokens for group in case) <= self.max_model_len
        )


def design(limits: GridLimits, decode_sizes: Sequence[int]) -> list[list[Case]]:
    """Passes of rounds that fit the limits, each shuffled by a fixed seed, so that a card's warming up favours none.

    `decode_sizes`: the sizes to which rounds of decodes alone are padded, if any.
    """
    rng = np.random.default_rng(SEED)
    passes = [list(_first()), list(_second(rng)), list(_third(decode_sizes))]
    seen: set[Case] = set()
    out = []
    for cases in passes:
        # What does not fit is left out; the same round twice, where limits make two alike, is run once.
        fitting = [case for case in cases if limits.admit(case) and not (case in seen or seen.add(case))]  # type: ignore[func-returns-value]
        out.append([fitting[i] for i in rng.permutation(len(fitting)).tolist()])
    return out


def decodes(count: int, context: int) -> Group:
    """`count` decodes that each read `context` keys, their newest token's own included."""
    return Group(context - 1, 1, True, count)


def chunks(count: int, num_tokens: int, context: int = 0) -> Group:
    """`count` sequences that each feed `num_tokens` tokens of a prompt behind `context` tokens."""
    return Group(context, num_tokens, False, count)


def _first() -> Iterator[Case]:
    for batch in BATCHES:
        for context in CONTEXTS:
            yield (decodes(batch, context),)
    for length in CHUNKS:
        for context in (0, 2_048, 8_192) if length <= 2_048 else (0, 8_192):
            yield (chunks(1, length, context),)
    for batch, context in ((1, 512), (8, 2_048), (32, 512), (32, 2_048), (128, 512), (256, 512)):
        for length in (64, 512, 1_500):
            yield (decodes(batch, context), chunks(1, length))
    yield (decodes(32, 1_024), chunks(1, 4_096))
    # More sequences than most graphs with prefill have room for.
    for length in (64, 512, 1_500):
        yield (decodes(448, 512), chunks(1, length))
    for count, length in ((4, 64), (4, 256), (16, 64), (8, 1_024), (64, 128)):
        yield (chunks(count, length),)


def _second(rng: np.random.Generator) -> Iterator[Case]:
    # One long sequence among short ones: its keys are walked by few programs while the others are done.
    for batch in (4, 16, 64, 128):
        for longest in (4_096, 16_384, 32_768):
            yield (decodes(batch - 1, 256), decodes(1, longest))
    # Rounds as they come in a run: contexts and prompts of many lengths.
    for _ in range(24):
        seqs = _varied_decodes(rng, int(2 ** rng.uniform(0, 7.5)))
        for _ in range(int(rng.integers(1, 4))):
            length = int(np.clip(rng.lognormal(5.0, 1.1), 2, 2_048))
            behind = int(rng.choice((0, 0, int(rng.lognormal(6.5, 1.0)))))
            seqs.append(chunks(1, length, behind))
        yield tuple(seqs)
    for _ in range(16):
        yield tuple(_varied_decodes(rng, int(2 ** rng.uniform(0, 8.5))))
    for _ in range(8):
        count = int(rng.integers(1, 12))
        yield tuple(chunks(1, int(np.clip(rng.lognormal(5.3, 1.1), 2, 2_048))) for _ in range(count))


def _third(decode_sizes: Sequence[int]) -> Iterator[Case]:
    for size in decode_sizes:
        yield (decodes(size, 1_024),)
        # A padded row costs something, a real one more: rounds a little below a captured size.
        if size > 8:
            yield (decodes(size - max(size // 16, 1), 700),)
    for length in BETWEEN:
        yield (chunks(1, length),)
    for length in (16, 64, 256, 1_024, 4_096):
        yield (chunks(1, length, 32_000),)
    # Short rests of prompts behind long cached prefixes.
    for count, length, context in ((8, 32, 1_024), (16, 32, 2_048), (32, 16, 1_024), (4, 64, 8_192), (16, 128, 4_096),
                                   (8, 256, 8_192)):  # fmt: skip
        yield (chunks(count, length, context),)
    for batch in (8, 64):
        for length in (64, 512):
            yield (decodes(batch, 1_024), chunks(1, length, 8_192))
            yield (decodes(batch - 1, 256), decodes(1, 16_384), chunks(1, length))
    for count, length in ((4, 4_095), (16, 1_024), (128, 32)):
        yield (chunks(count, length),)


def _varied_decodes(rng: np.random.Generator, count: int) -> list[Group]:
    contexts = np.clip(rng.lognormal(6.3, 1.0, count), 16, 16_000).astype(int)
    return [decodes(1, context) for context in contexts.tolist()]
