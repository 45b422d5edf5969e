"""Keys of blocks against the ids that they stand for: equal exactly where the ids up to the block's end are equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.command_line import write_trace
from traces.errors import BenchctlError
from traces.keys import BlockKeys
from traces.load import open_trace
from traces.streamed import open_stream
from traces.tokens import TokenMaker

VOCABULARIES = (None, 151_936, 2_048)


def agree(path: Path, block_size: int, vocab_size: int | None) -> int:
    """Blocks of all requests, grouped by key and by ids. Returns how many groups have several."""
    trace = open_trace(path)
    maker = TokenMaker(trace, vocab_size=vocab_size)
    keys = BlockKeys(trace, block_size=block_size, vocab_size=vocab_size, by_row=trace.by_row)
    by_key: dict[Any, set[bytes]] = {}
    by_ids: dict[bytes, set[Any]] = {}
    shared: dict[bytes, set[int]] = {}
    private: list[tuple[bytes, int]] = []
    for request in trace.requests():
        make = keys.of(request)
        ids = maker.token_ids(request)
        num_blocks = len(ids) // block_size
        assert make is not None, request
        found, num_shared = make(request.index, maker.prompt_length(request), num_blocks)
        assert len(found) == num_blocks and 0 <= num_shared <= num_blocks
        private += [
            (ids[: (block + 1) * block_size].tobytes(), request.index) for block in range(num_shared, num_blocks)
        ]
        for block, key in enumerate(found):
            prefix = ids[: (block + 1) * block_size].tobytes()
            by_key.setdefault(key, set()).add(prefix)
            by_ids.setdefault(prefix, set()).add(key)
            shared.setdefault(prefix, set()).add(request.index)
        assert num_shared == 0 or not make.shares_nothing
    assert all(len(prefixes) == 1 for prefixes in by_key.values())
    assert all(len(found) == 1 for found in by_ids.values())
    for prefix, row in private:
        assert shared[prefix] == {row}, "said to be nobody else's"
    return sum(len(rows) > 1 for rows in shared.values())


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("scope", ["file", "session"])
def test_keys_are_equal_exactly_where_ids_are(tmp_path: Path, vocab_size: int | None, scope: str) -> None:
    draw = np.random.default_rng(3)
    rows: list[dict[str, Any]] = []
    for i in range(120):
        prompt = int(draw.integers(1, 200))
        row: dict[str, Any] = {"id": f"R{i}", "arrival_s": float(i), "input_length": prompt, "output_length": int(draw.integers(1, 60))}  # fmt: skip
        if draw.random() < 0.7:
            ids = [int(draw.integers(0, 2)) for _ in range(-(-prompt // 64))]
            row["hash_ids"] = [f"t{each}" if draw.random() < 0.1 else each for each in ids]
        if draw.random() < 0.5:
            row["session"] = f"s{int(draw.integers(0, 2))}"
        rows.append(row)
    path = write_trace(tmp_path / "t.jsonl", rows, block_size=64, hash_scope=scope)
    for block_size in (16, 32, 64):
        assert agree(path, block_size, vocab_size) > 0


def test_prompts_that_are_equal_but_for_the_first_token_of_their_outputs(tmp_path: Path) -> None:
    """Rows 128 apart begin their outputs with the same id here: the block with 15 prompt tokens and that one is the same."""
    rows = [
        {"id": f"R{i}", "arrival_s": float(i), "input_length": 15, "output_length": 40, "hash_ids": [7]}
        for i in range(260)
    ]
    path = write_trace(tmp_path / "t.jsonl", rows, block_size=16)
    assert agree(path, 16, 2_048) > 100


def test_what_could_meet_spelled_out_ids_is_spelled_out(tmp_path: Path) -> None:
    plain = {"id": "A", "arrival_s": 0.0, "input_length": 64, "output_length": 8}

    def keys_of(*others: dict[str, Any], block_size: int = 16, vocab_size: int | None = None) -> list[bool]:
        path = write_trace(tmp_path / "t.jsonl", [plain, *others], block_size=16)
        trace = open_trace(path)
        keys = BlockKeys(trace, block_size=block_size, vocab_size=vocab_size, by_row=trace.by_row)
        return [keys.of(request) is not None for request in trace.requests()]

    base = {"arrival_s": 1.0, "output_length": 8}
    assert keys_of({**base, "id": "B", "input_length": 9}) == [True, True]
    assert keys_of({**base, "id": "B", "prompt_token_ids": [1, 2, 3]}) == [False, False]
    assert keys_of({**base, "id": "B", "input_length": 9, "segments": [{"id": 1, "len": 9}]}) == [True, False]
    carry = {**base, "id": "B", "input_length": 70, "carry": {"from": "A", "tokens": 60}}
    assert keys_of(carry) == [False, False]
    hashed = {**base, "id": "C", "input_length": 16, "hash_ids": [4]}
    assert keys_of(hashed) == [True, True] and keys_of(carry, hashed) == [False, False, False]
    assert keys_of(hashed, block_size=32, vocab_size=2**40) == [True, False]
    assert keys_of(block_size=2) == [False]


def test_a_carry_beyond_the_head_of_a_stream_is_refused(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": f"R{i}", "arrival_s": float(i), "input_length": 64, "output_length": 8} for i in range(2100)
    ]
    rows.append({"id": "late", "arrival_s": 3000.0, "input_length": 70, "output_length": 8, "carry": {"from": "R5", "tokens": 60}})  # fmt: skip
    trace = open_stream(write_trace(tmp_path / "t.jsonl", rows))
    keys = BlockKeys(trace, block_size=16, vocab_size=None, by_row=trace.by_row)
    with pytest.raises(BenchctlError, match="validate-first"):
        for request in trace.requests():
            keys.of(request)
