"""The trace's own bound on prefix hits, with numbers that can be checked by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traces.prefix import prefix_upper_bound


def bound(block_size: int, *requests: tuple[list[int], list[int]]) -> tuple[int, int]:
    """Each request: prompt ids, output ids."""
    return prefix_upper_bound(((len(p), np.array(p + o, dtype=np.int64)) for p, o in requests), block_size)


def test_an_equal_prompt_hits_all_its_blocks_but_the_one_with_the_last_token() -> None:
    assert bound(4, ([1] * 8, [2]), ([1] * 8, [2])) == (16, 4)
    assert bound(4, ([1] * 9, [2]), ([1] * 9, [2])) == (18, 8)
    assert bound(1, ([1, 2, 3], [4]), ([1, 2, 3], [4])) == (6, 2)


def test_blocks_filled_while_decoding_are_hit_except_by_the_last_token_which_is_never_computed() -> None:
    # 6 + 3 tokens: the second block is whole after two outputs.
    assert bound(4, ([1] * 6, [2, 3, 4]), ([1] * 6 + [2, 3, 4, 5], [6])) == (16, 8)
    # 6 + 2 tokens: the eighth is the last, so no KV of it exists.
    assert bound(4, ([1] * 6, [2, 3]), ([1] * 6 + [2, 3, 4, 5], [6])) == (16, 4)


def test_a_block_after_another_prefix_is_no_hit_and_a_hit_ends_at_the_first_miss() -> None:
    first = [1, 1, 2, 2, 3, 3, 9]
    assert bound(2, (first, [0]), ([5, 5, 2, 2, 3, 3, 9], [0])) == (14, 0)
    assert bound(2, (first, [0]), ([1, 1, 5, 5, 3, 3, 9], [0])) == (14, 2)


def test_a_request_does_not_hit_its_own_blocks_or_later_ones() -> None:
    assert bound(2, ([1, 1, 1, 1, 1, 1], [1]), ([2, 2, 2], [2])) == (9, 0)
    assert prefix_upper_bound([], 16) == (0, 0)
    with pytest.raises(ValueError, match="block_size 0"):
        prefix_upper_bound([], 0)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), min_size=1, max_size=12), st.lists(st.integers(0, 1), min_size=1, max_size=4)
        ),
        max_size=8,
    ),
    st.integers(1, 5),
)
def test_it_equals_a_search_for_the_longest_cached_prefix(
    requests: list[tuple[list[int], list[int]]], size: int
) -> None:
    computed: list[list[int]] = []
    hits = 0
    for prompt, output in requests:
        best = 0
        for known in computed:
            n = 0
            while n < min(len(known), len(prompt)) and known[n] == prompt[n]:
                n += 1
            best = max(best, n // size * size)
        hits += min(best, (len(prompt) - 1) // size * size)
        computed.append((prompt + output)[:-1])
    assert bound(size, *requests) == (sum(len(prompt) for prompt, _ in requests), hits)
