"""Token ids: equal prefixes have equal ids, others have not, in any order, process and on any machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import traces.tokens
from traces.errors import BenchctlError
from traces.load import Trace, open_trace
from traces.request import Request
from traces.tokens import TokenMaker, TokenRange

VOCABULARIES = [None, 512, 151643]


def trace_of(tmp_path: Path, *rows: dict[str, Any], name: str = "t.jsonl", **header: Any) -> Trace:
    path = tmp_path / name
    lines = [{"benchctl_trace": 1, **header}, *({"output_length": 4, **row} for row in rows)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return open_trace(path)


def all_ids(trace: Trace, vocab_size: int | None = 1000, **options: Any) -> dict[str, np.ndarray]:
    maker = TokenMaker(trace, vocab_size=vocab_size, **options)
    return {request.id: maker.token_ids(request) for request in trace.requests()}


def common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_prefixes_are_shared_exactly_as_the_trace_says(tmp_path: Path, vocab_size: int | None) -> None:
    trace = trace_of(
        tmp_path,
        {"id": "alone", "input_length": 40},
        {"id": "alone2", "input_length": 40},
        {"id": "h12", "input_length": 40, "hash_ids": [1, 2, 3]},
        {"id": "h12b", "input_length": 35, "hash_ids": [1, 2, 4]},
        {"id": "h2", "input_length": 16, "hash_ids": [2]},
        {"id": "text", "input_length": 16, "hash_ids": ["1"]},
        {"id": "seg", "input_length": 40, "segments": [{"id": "sys", "len": 20}]},
        {"id": "seg2", "input_length": 50, "segments": [{"id": "sys", "len": 20}, {"id": "t", "len": 10}]},
        {"id": "seg3", "input_length": 50, "segments": [{"id": "sys", "len": 20}, {"id": "t", "len": 10}]},
        {"id": "short", "input_length": 8, "segments": [{"id": "sys", "len": 8}]},
        {"id": "seg1", "input_length": 40, "segments": [{"id": 1, "len": 20}]},
        {"id": "child", "input_length": 60, "carry": {"from": "seg", "tokens": 44}},
        {"id": "part", "input_length": 60, "carry": {"from": "seg", "tokens": 42}},
        {"id": "grand", "input_length": 90, "carry": {"from": "child", "tokens": 64}},
        {"id": "whole", "input_length": 44, "carry": {"from": "alone", "tokens": 44}},
        block_size=16,
    )
    ids = all_ids(trace, vocab_size)
    shared = {
        ("h12", "h12b"): 32,
        ("seg", "seg2"): 20,
        ("seg", "seg3"): 20,
        ("seg2", "seg3"): 30,
        ("seg", "short"): 8,
        ("seg2", "short"): 8,
        ("seg3", "short"): 8,
        ("seg", "child"): 44,
        ("seg", "part"): 42,
        ("seg", "grand"): 44,
        ("child", "part"): 42,
        ("child", "grand"): 64,
        ("part", "grand"): 42,
        ("alone", "whole"): 44,
    }
    shared |= {(a, b): 20 for a in ("seg2", "seg3") for b in ("child", "part", "grand")}
    shared |= {("short", b): 8 for b in ("child", "part", "grand")}
    for a, b in combinations(ids, 2):
        # A token more may agree by chance: of 512 ids every 512th pair. Drawn by seed, so always the same pairs.
        expected = shared.get((a, b), 0)
        assert expected <= common(ids[a], ids[b]) <= expected + 1, (a, b, common(ids[a], ids[b]))
    assert {id: len(made) for id, made in ids.items()} == {r.id: (r.input_length or 0) + 4 for r in trace.requests()}


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("reserved", [0, 100])
def test_ids_lie_in_the_vocabulary_behind_the_reserved_ones(
    tmp_path: Path, vocab_size: int | None, reserved: int
) -> None:
    trace = trace_of(tmp_path, {"input_length": 20000}, {"input_length": 1024, "hash_ids": [-5, 2**63 - 1]})
    for ids in all_ids(trace, vocab_size, reserved=reserved).values():
        assert ids.dtype == np.int64
        assert ids.min() >= reserved and ids.max() < (vocab_size or 2**63)


def test_ids_are_spread_evenly_over_the_vocabulary(tmp_path: Path) -> None:
    ids = next(iter(all_ids(trace_of(tmp_path, {"input_length": 200_000}), 100).values()))
    counts = np.bincount(ids, minlength=100)
    # 2,000 expected of each; a standard deviation is 44.
    assert counts.min() > 1780 and counts.max() < 2220


@pytest.mark.parametrize("size", [3 * 2**61, 2**63 - 1, 2**63, 5])
def test_no_word_is_favoured(size: int) -> None:
    # Most of the top words are refused for these sizes. A plain remainder would give the lower third 3/2 of its share.
    ids = TokenRange(0, size)
    keys = traces.tokens._keys(1, np.arange(4000, dtype=np.int64))
    words = ids.draw(keys, np.zeros(4000, dtype=np.uint64), 8)[:, 2:].astype(np.uint64)
    low = float((words < np.uint64(max(1, size // 5))).mean())
    assert abs(low - max(1, size // 5) / size) < 0.015


def test_different_ids_differ_in_their_first_two_tokens() -> None:
    rng = np.random.default_rng(7)
    values = np.unique(np.concatenate([np.arange(-50_000, 50_000), rng.integers(-(2**31), 2**31, 100_000)]))
    keys = traces.tokens._keys(3, values)
    for kind in range(4):
        made = TokenRange(0, 151643).draw(keys, traces.tokens._numbers(kind, values), 2)
        assert len(np.unique(made, axis=0)) == len(values)
    # With a vocabulary too small for two tokens the number goes on into the next ones.
    made = TokenRange(0, 256).draw(keys, traces.tokens._numbers(0, values), 6)
    assert len(np.unique(made, axis=0)) == len(values)


def test_a_unique_prompt_never_begins_like_a_hash_block_or_a_segment(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"input_length": 4} for _ in range(200)]
    rows += [{"input_length": 4, "hash_ids": [i]} for i in range(200)]
    rows += [{"input_length": 4, "segments": [{"id": i, "len": 4}]} for i in range(200)]
    heads = {tuple(ids[:2]) for ids in all_ids(trace_of(tmp_path, *rows), 32000).values()}
    assert len(heads) == 600


def test_content_ids_at_another_place_are_the_same_tokens(tmp_path: Path) -> None:
    trace = trace_of(
        tmp_path,
        {"id": "a", "input_length": 32, "hash_ids": [6, 7]},
        {"id": "b", "input_length": 32, "hash_ids": [5, 6]},
        {"id": "c", "input_length": 10, "hash_ids": [6]},
        block_size=16,
        hash_kind="content",
    )
    ids = all_ids(trace)
    assert (ids["a"][:16] == ids["b"][16:32]).all()
    assert (ids["c"][:10] == ids["a"][:10]).all()


def test_session_scope_keeps_the_ids_of_sessions_apart(tmp_path: Path) -> None:
    rows = [
        {"id": "a1", "session": "a", "input_length": 32, "hash_ids": [1, 2]},
        {"id": "b1", "session": "b", "input_length": 32, "hash_ids": [1, 2]},
        {"id": "a2", "session": "a", "input_length": 32, "hash_ids": [1, 3]},
        {"id": "n1", "input_length": 32, "hash_ids": [1, 2]},
        {"id": "n2", "input_length": 32, "hash_ids": [1, 2]},
    ]
    ids = all_ids(trace_of(tmp_path, *rows, block_size=16, hash_scope="session"), 151643)
    assert common(ids["a1"], ids["a2"]) == 16
    assert {common(ids[a], ids[b]) for a, b in combinations(ids, 2)} == {0, 16}
    ids = all_ids(trace_of(tmp_path, *rows, block_size=16), 151643)
    assert common(ids["a1"], ids["b1"]) == 32


def test_the_salt_changes_what_follows_the_number(tmp_path: Path) -> None:
    made = [
        all_ids(trace_of(tmp_path, {"id": "a", "input_length": 20}, salt=salt), None)["a"] for salt in ("", "x", 1, "1")
    ]
    assert {common(a, b) for a, b in combinations(made, 2)} == {2}


def test_given_ids_pass_through_and_must_be_in_the_vocabulary(tmp_path: Path) -> None:
    row = {
        "id": "a",
        "prompt_token_ids": [5, 6, 2**62],
        "output_token_ids": [7, -8, 9],
        "max_tokens": 2,
        "output_length": 3,
    }
    trace = trace_of(tmp_path, row)
    request = next(trace.requests())
    maker = TokenMaker(trace, vocab_size=None)
    assert maker.token_ids(request).tolist() == [5, 6, 2**62, 7, -8]
    assert maker.prompt_ids(request).tolist() == [5, 6, 2**62]
    assert maker.prompt_length(request) == 3
    with pytest.raises(BenchctlError) as refused:
        TokenMaker(trace, vocab_size=100).token_ids(request)
    assert refused.value.what == (
        f'request "a": token id {2**62} at prompt_token_ids[2] is outside the vocabulary of 100'
    )
    assert refused.value.where == f"{trace.path}, line 2, key `prompt_token_ids`"
    trace = trace_of(tmp_path, {**row, "prompt_token_ids": [5]})
    with pytest.raises(BenchctlError, match=r"token id -8 at output_token_ids\[1\]"):
        TokenMaker(trace, vocab_size=100).token_ids(next(trace.requests()))


def test_a_child_carries_given_ids_and_outputs_as_they_were_capped(tmp_path: Path) -> None:
    trace = trace_of(
        tmp_path,
        {"id": "a", "prompt_token_ids": [1, 2], "output_token_ids": [3, 4, 5], "output_length": 3, "max_tokens": 2},
        {"id": "b", "input_length": 6, "carry": {"from": "a", "tokens": 4}},
    )
    assert all_ids(trace)["b"][:4].tolist() == [1, 2, 3, 4]


def test_a_request_whose_output_was_cut_does_not_change_its_children(tmp_path: Path) -> None:
    trace = trace_of(
        tmp_path,
        {"id": "a", "input_length": 10, "output_length": 8},
        {"id": "b", "input_length": 30, "carry": {"from": "a", "tokens": 18}},
    )
    a, b = trace.requests()
    maker = TokenMaker(trace, vocab_size=None)
    cut = Request(index=a.index, line=a.line, id=a.id, input_length=10, output_length=3)
    assert (maker.token_ids(cut) == maker.token_ids(a)[:13]).all()
    assert (maker.token_ids(b)[:18] == maker.token_ids(a)).all()


def test_what_the_caller_writes_into_an_array_stays_there(tmp_path: Path) -> None:
    trace = trace_of(
        tmp_path,
        {"id": "a", "input_length": 10},
        {"id": "b", "input_length": 20, "carry": {"from": "a", "tokens": 14}},
        {"id": "c", "input_length": 30, "carry": {"from": "b", "tokens": 24}},
    )
    clean = all_ids(trace)
    maker = TokenMaker(trace, vocab_size=1000)
    for _ in range(2):
        for request in trace.requests():
            ids = maker.token_ids(request)
            assert (ids == clean[request.id]).all()
            ids[:] = -1


def chain(length: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"id": "t0", "input_length": 10}]
    for i in range(1, length):
        rows.append({"id": f"t{i}", "input_length": 10 + 14 * i, "carry": {"from": f"t{i - 1}", "tokens": 14 * i}})
    return rows


def test_a_long_chain_of_carries_needs_no_recursion_and_is_not_made_over_and_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = trace_of(tmp_path, *chain(3000))
    maker = TokenMaker(trace, vocab_size=None)
    last = trace.by_row(2999)
    ids = maker.token_ids(last)  # first of all: its ancestors are made from the top down
    assert (ids[:14] == maker.token_ids(trace.by_row(0))).all()

    made = []
    make = TokenMaker._make
    monkeypatch.setattr(TokenMaker, "_make", lambda self, *a: made.append(1) or make(self, *a))
    fresh = TokenMaker(trace, vocab_size=None)
    for request in trace.requests():
        fresh.token_ids(request)
    assert len(made) <= 2 * 3000
    assert fresh._memo_bytes <= traces.tokens.MEMO_BYTES
    assert fresh._memo_bytes == sum(ids.nbytes for ids in fresh._memo.values())


def test_a_small_memo_gives_the_same_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = trace_of(tmp_path, *chain(30))
    expected = all_ids(trace)
    monkeypatch.setattr(traces.tokens, "MEMO_BYTES", 1)
    maker = TokenMaker(trace, vocab_size=1000)
    for row in (29, 3, 17, 28, 0):
        request = trace.by_row(row)
        assert (maker.token_ids(request) == expected[request.id]).all()


DIGEST = """
import sys, xxhash
from traces.load import open_trace
from traces.tokens import TokenMaker
trace = open_trace(sys.argv[1])
maker = TokenMaker(trace, vocab_size=None if sys.argv[2] == "None" else int(sys.argv[2]))
rows = range(trace.num_requests)
order = reversed(rows) if sys.argv[3] == "back" else rows
made = {row: maker.token_ids(trace.by_row(row)).tobytes() for row in order}
print(xxhash.xxh3_64_hexdigest(b"".join(made[row] for row in rows)))
"""


@pytest.mark.parametrize("vocab_size", [None, 32000])
def test_ids_are_the_same_in_any_order_and_any_process(vocab_size: int | None) -> None:
    path = Path(traces.tokens.__file__).parent / "sharegpt.jsonl"
    digests = set()
    for seed, order in (("1", "forth"), ("2", "back")):
        done = subprocess.run(
            [sys.executable, "-c", DIGEST, str(path), str(vocab_size), order],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        digests.add(done.stdout.strip())
    assert len(digests) == 1


def test_ids_stay_what_they_were() -> None:
    """Recorded once: a run and its repeat years later must see the same ids."""
    digests = []
    for vocab_size in (None, 32000):
        trace = open_trace(Path(traces.tokens.__file__).parent / "shared-system-prompt.jsonl")
        maker = TokenMaker(trace, vocab_size=vocab_size)
        whole = b"".join(maker.token_ids(request).astype("<i8").tobytes() for request in trace.requests())
        digests.append(xxhash.xxh3_64_hexdigest(whole))
    assert digests == ["49cff59022129a9c", "60750b2b4caccd6d"]


class Words:
    """A tokenizer that gives each character its code."""

    def __init__(self) -> None:
        self.calls = 0

    def encode(self, text: str) -> list[int]:
        self.calls += 1
        return [ord(c) for c in text]

    def apply_chat_template(self, conversation: list[Any], **options: Any) -> list[int]:
        assert options["tokenize"] and options["add_generation_prompt"] and not options["return_dict"]
        if any("role" not in message for message in conversation):
            raise ValueError("a message without a role\nmore")
        return self.encode("".join(message["content"] for message in conversation) + str(options["tools"] or ""))


def test_text_goes_through_the_tokenizer_once(tmp_path: Path) -> None:
    trace = trace_of(
        tmp_path,
        {"id": "a", "prompt": "abc"},
        {"id": "b", "messages": [{"role": "user", "content": "hi"}], "tools": [1]},
        {"id": "c", "input_length": 9, "carry": {"from": "a", "tokens": 7}},
    )
    words = Words()
    maker = TokenMaker(trace, vocab_size=200, tokenizer=words)
    a, b, c = trace.requests()
    assert (maker.prompt_length(a), maker.prompt_length(b)) == (3, 5)
    assert maker.prompt_ids(a).tolist() == [97, 98, 99]
    assert maker.prompt_ids(b).tolist() == [ord(x) for x in "hi[1]"]
    assert (maker.token_ids(c)[:7] == maker.token_ids(a)).all()
    assert words.calls == 2


def faulty() -> Iterator[tuple[dict[str, Any], Any, str]]:
    yield {"prompt": "abc"}, None, 'request "a" is text, and there is no tokenizer'
    yield {"messages": [{"content": "x"}]}, Words(), 'the tokenizer refuses request "a": a message without a role'
    yield {"messages": [{"role": "u", "content": ""}]}, Words(), 'the messages of request "a" has no tokens'
    yield {"prompt": "aé"}, Words(), 'request "a": token id 233 at prompt[1] is outside the vocabulary of 200'
    yield {"input_length": 2**40}, None, f'request "a" has {2**40 + 4} tokens; ids are made for up to {2**26}'


@pytest.mark.parametrize(("row", "tokenizer", "what"), list(faulty()))
def test_what_has_no_ids_is_a_clear_error(tmp_path: Path, row: dict[str, Any], tokenizer: Any, what: str) -> None:
    trace = trace_of(tmp_path, {"id": "a", **row})
    with pytest.raises(BenchctlError) as refused:
        TokenMaker(trace, vocab_size=200, tokenizer=tokenizer).token_ids(next(trace.requests()))
    assert refused.value.what == what
    assert refused.value.fix and "line 2" in str(refused.value.where)


def test_a_carry_longer_than_a_text_parent_is_found_when_its_length_is_known(tmp_path: Path) -> None:
    rows = [{"id": "a", "prompt": "abc"}, {"id": "b", "input_length": 20, "carry": {"from": "a", "tokens": 8}}]
    trace = trace_of(tmp_path, *rows)
    maker = TokenMaker(trace, vocab_size=200, tokenizer=Words())
    with pytest.raises(BenchctlError, match='carry of 8 tokens from "a", whose prompt and output have 7'):
        maker.token_ids(trace.by_row(1))


@pytest.mark.parametrize(("vocab_size", "reserved"), [(1, 0), (10, 9), (10, -1)])
def test_a_vocabulary_without_room_is_refused(tmp_path: Path, vocab_size: int, reserved: int) -> None:
    with pytest.raises(BenchctlError, match="reserved"):
        TokenMaker(trace_of(tmp_path, {"input_length": 1}), vocab_size=vocab_size, reserved=reserved)


SAMPLES = os.environ.get("BENCHCTL_TRACE_SAMPLES")


@pytest.mark.skipif(not SAMPLES, reason="BENCHCTL_TRACE_SAMPLES names no folder of real traces")
@pytest.mark.parametrize(
    ("name", "sums", "hit", "blocks"),
    [
        ("mooncake_conversation_rows_0-1200.jsonl", (1200, 16848754, 413423, 410.999), 7632, 33490),
        ("mooncake_synthetic_rows_0-1000.jsonl", (1000, 11851558, 196039, 272.653), 4007, 23787),
    ],
)
def test_real_mooncake_rows_give_the_block_hits_that_were_counted_from_their_ids(
    name: str, sums: tuple[int, int, int, float], hit: int, blocks: int
) -> None:
    """Input blocks of 512, the partial last one counted as a block; unbounded cache, file order."""
    trace = open_trace(Path(str(SAMPLES)) / name)
    maker = TokenMaker(trace, vocab_size=151643)
    seen: set[bytes] = set()
    num_hit = num_blocks = num_input = num_output = 0
    for request in trace.requests():
        ids = maker.prompt_ids(request)
        num_input += len(ids)
        num_output += request.output_length or 0
        prefix = xxhash.xxh3_128()
        leading = True
        for start in range(0, len(ids), 512):
            prefix.update(ids[start : start + 512].tobytes())
            key = prefix.digest()
            leading = leading and key in seen
            num_hit += leading
            num_blocks += 1
            seen.add(key)
    assert (trace.num_requests, num_input, num_output, trace.span_s) == sums
    assert (num_hit, num_blocks) == (hit, blocks)
