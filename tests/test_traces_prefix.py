"""The trace's own bound on prefix hits, with numbers that can be checked by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traces.load import open_trace
from traces.prefix import bound_by_hash_ids, prefix_upper_bound
from traces.tokens import TokenMaker


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


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(1, 16), st.integers(1, 9), st.sampled_from("ab")),
        min_size=1,
        max_size=10,
    ),
    st.sampled_from([4, 8, 16]),
    st.booleans(),
    st.sampled_from([None, 3000]),
)  # fmt: skip
def test_by_hash_ids_the_bound_is_that_of_the_tokens(
    tmp_path_factory: pytest.TempPathFactory,
    requests: list[tuple[list[int], int, int, str]],
    size: int,
    by_session: bool,
    vocab_size: int | None,
) -> None:
    path = tmp_path_factory.mktemp("t") / "t.jsonl"
    header = {"benchctl_trace": 1, "block_size": 16, "hash_scope": "session" if by_session else "file"}
    rows = [
        {"session": session, "input_length": 16 * (len(ids) - 1) + tail, "hash_ids": ids, "output_length": output}
        for ids, tail, output, session in requests
    ]
    rows.append({"input_length": 40, "output_length": 3})  # of its own
    path.write_text("".join(json.dumps(row) + "\n" for row in [header, *rows]))
    trace = open_trace(path)
    maker = TokenMaker(trace, vocab_size=vocab_size)
    made = prefix_upper_bound(((r.input_length or 0, maker.token_ids(r)) for r in trace.requests()), size)
    assert maker.digits <= 6
    if maker.digits <= size:
        assert bound_by_hash_ids(trace.requests(), 16, by_session, size) == made
    assert trace.sharing == "hash_ids" and trace.sum_prompts == made[0]


def test_a_block_that_was_shorter_before_is_hit_so_far_and_no_further(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(
        '{"benchctl_trace": 1, "block_size": 8}\n'
        '{"input_length": 13, "hash_ids": [1, 2], "output_length": 1}\n'  # five tokens of block 2
        '{"input_length": 20, "hash_ids": [1, 2, 3], "output_length": 1}\n'  # hits 8 + 4 of these five
        '{"input_length": 20, "hash_ids": [1, 2, 3], "output_length": 1}\n'  # hits 8 + 8, and 3 of 4: the last is never hit
    )
    trace = open_trace(tmp_path / "t.jsonl")
    assert bound_by_hash_ids(trace.requests(), 8, False, 4) == (53, 12 + 16)
    maker = TokenMaker(trace, vocab_size=None)
    made = prefix_upper_bound(((r.input_length or 0, maker.token_ids(r)) for r in trace.requests()), 4)
    assert made == (53, 28) and maker.digits == 1
