"""Every fault of a trace: what is said, and where, before anything runs."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from traces.errors import BenchctlError
from traces.load import open_trace

OK = {"id": "a", "input_length": 5, "output_length": 2}


def without(row: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in keys}


TEXT = {"id": "t", "prompt": "hello", "output_length": 2}

# (the last line of a file whose first is OK, what is said, the key that is named)
ROW_FAULTS: list[tuple[dict[str, Any] | str, str, str | None]] = [
    ("{'id': 1}", "not JSON: Expecting property name enclosed in double quotes at column 2", None),
    ('{"input_length": 5 "output_length": 2}', "not JSON: Expecting ',' delimiter at column 20", None),
    ("hello there", "not JSON: hello there", None),
    ("null", "a row must be one JSON object, not null", None),
    ("[1, 2]", "a row must be one JSON object, not a list", None),
    ("3", "a row must be one JSON object, not 3", None),
    ('{"arrival_s": NaN, "input_length": 5}', "NaN is no number in JSON", None),
    ('{"arrival_s": -Infinity}', "-Infinity is no number in JSON", None),
    ('{"arrival_s": 1e999, "input_length": 5}', "`arrival_s` number out of range", "arrival_s"),
    ('{"prompt": "\\ud800", "output_length": 1}', "text with half a surrogate pair, which is no Unicode", None),
    ('{"a": ' + "[" * 5000, "nested too deeply", None),
    ({**OK, "benchctl_trace": 1}, "a header below the first line", None),
    ({**OK, "id": "b", "arrival_s": -1}, "`arrival_s` must be a number >= 0.0, got -1", "arrival_s"),
    ({**OK, "id": "b", "timestamp": -5}, "`timestamp` must be a number >= 0.0, got -5", "timestamp"),
    ({**OK, "id": "b", "arrival_s": "1"}, '`arrival_s` must be a number, got the text "1"', "arrival_s"),
    ({**OK, "id": "b", "arrival_s": 1, "timestamp": 1000}, "both arrival_s and timestamp", "timestamp"),
    ({**OK, "id": "b", "think_s": 1, "delay": 1000}, "both think_s and delay", "delay"),
    ({**OK, "id": "b", "session": "s", "session_id": "s"}, "both session and session_id", "session_id"),
    ({**OK, "id": "b", "arrival_round": 0}, "`arrival_round` must be an integer >= 1, got 0", "arrival_round"),
    ({**OK, "id": "b", "turn": 1.5}, "`turn` must be an integer, got 1.5", "turn"),
    ({**OK, "id": "b", "input_length": "13"}, '`input_length` must be an integer, got the text "13"', "input_length"),
    ({**OK, "id": "b", "input_length": True}, "`input_length` must be an integer, got true", "input_length"),
    ({**OK, "id": "b", "input_length": 0}, "`input_length` must be an integer >= 1, got 0", "input_length"),
    ({**OK, "id": "b", "output_length": 0}, "`output_length` must be an integer >= 1, got 0", "output_length"),
    ({**OK, "id": "b", "output_length": -1}, "`output_length` must be an integer >= 1, got -1", "output_length"),
    ({**OK, "id": "b", "max_tokens": 0}, "`max_tokens` must be an integer >= 1, got 0", "max_tokens"),
    ({**OK, "id": "b", "output_length": None}, "no output length", None),
    (without({**OK, "id": "b"}, "output_length"), "no output length", None),
    (without({**OK, "id": "b"}, "input_length"), "no prompt", None),
    ({**OK, "id": "b", "input_length": None}, "no prompt", None),
    ({"input_toks": 5, "output_toks": 2}, "no prompt (unknown keys: input_toks, output_toks)", None),
    ({**OK, **TEXT}, "2 prompts: prompt, input_length", None),
    ({**TEXT, "text_input": "x"}, "two prompts: prompt and text_input", "text_input"),
    ({**TEXT, "prompt": ""}, "an empty prompt", "prompt"),
    ({**TEXT, "prompt": 7}, "`prompt` must be a text, got 7", "prompt"),
    ({"messages": [], "output_length": 1}, "an empty messages", "messages"),
    ({"prompt_token_ids": [], "output_length": 1}, "an empty prompt_token_ids", "prompt_token_ids"),
    (
        {"prompt_token_ids": [1, 2**63], "output_length": 1},
        "`prompt_token_ids[1]` must be an integer <= 9223372036854775807, got a list",
        "prompt_token_ids",
    ),
    (
        {"prompt_token_ids": [1, None], "output_length": 1},
        "`prompt_token_ids[1]` must be an integer, got a list",
        "prompt_token_ids",
    ),
    ({**TEXT, "tools": []}, "tools beside prompt", "tools"),
    ({**TEXT, "carry": {"from": "a", "tokens": 1}}, "carry beside prompt", "carry"),
    ({**OK, "id": "b", "output_token_ids": []}, "no output_token_ids in the list", "output_token_ids"),
    ({**OK, "id": "b", "output_token_ids": [1]}, "output_length 2, but 1 output_token_ids", "output_length"),
    ({**OK, "id": "b", "hash_ids": [1, 2]}, "2 hash_ids for 5 tokens; blocks of 512 need 1", "hash_ids"),
    ({**OK, "id": "b", "hash_ids": [1.5]}, "`hash_ids[0]` must be an integer or a text, got a list", "hash_ids"),
    ({**OK, "id": "b", "hash_ids": [-(2**63) - 1]}, "`hash_ids[0]` must be an integer >= -92", "hash_ids"),
    ({**OK, "id": "b", "segments": [{"id": 1, "len": 3}] * 2}, "segments of 6 tokens in a prompt of 5", "segments"),
    ({**OK, "id": "b", "segments": [{"id": 1, "len": 0}]}, "a segment of 0 tokens", "segments"),
    ({**OK, "id": "b", "segments": [{"id": 2**63, "len": 1}]}, f"segment id {2**63} is outside 64 bits", "segments"),
    ({**OK, "id": "b", "segments": [{"id": 1}]}, "`segments[0]` object missing required field `len`", "segments"),
    (
        {**OK, "id": "b", "segments": [{"id": 1, "len": 1}], "hash_ids": [1]},
        "hash_ids and segments in one row",
        "segments",
    ),
    ({**OK, "id": "b", "carry": {"from": "x", "tokens": 1}}, '`carry` names "x", which is no row above', "carry"),
    ({**OK, "id": "b", "carry": {"from": "b", "tokens": 1}}, '`carry` names "b", which is no row above', "carry"),
    ({**OK, "id": "b", "carry": {"from": "a", "tokens": 0}}, "carry of 0 tokens", "carry"),
    ({**OK, "id": "b", "carry": {"from": "a", "tokens": 6}}, "carry of 6 tokens in a prompt of 5", "carry"),
    (
        {**OK, "id": "b", "input_length": 9, "carry": {"from": "a", "tokens": 8}},
        'carry of 8 tokens from "a", whose prompt and output have 7',
        "carry",
    ),
    ({**OK, "id": "b", "parents": ["a", "x"]}, '`parents` names "x", which is no row above this one', "parents"),
    (OK, 'id "a" is taken by line 1', "id"),
    ({**OK, "id": ""}, '`id` must be a text of length >= 1, got the text ""', "id"),
    ({**OK, "id": 5}, "`id` must be a text, got 5", "id"),
    ({**OK, "id": "b", "stop": "length"}, "`stop` invalid enum value 'length'", "stop"),
    ({**OK, "id": "b", "slo": {"ttft_ms": 0}}, "slo.ttft_ms is 0.0", "slo"),
    ({**OK, "id": "b", "slo": {"ttft_ms": "1"}}, "`slo.ttft_ms` must be a number", "slo"),
    ({**OK, "id": "b", "priority": 2**63}, "`priority` must be an integer <= 9223372036854775807", "priority"),
    ({**OK, "id": "b", "src": 3}, "`src` must be an object, got 3", "src"),
]


@pytest.mark.parametrize(("row", "what", "key"), ROW_FAULTS, ids=[what for _, what, _ in ROW_FAULTS])
def test_a_bad_row_is_named_with_its_line_its_key_and_a_cure(
    tmp_path: Path, row: dict[str, Any] | str, what: str, key: str | None
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(OK) + "\n" + (row if isinstance(row, str) else json.dumps(row)) + "\n")
    with pytest.raises(BenchctlError) as refused:
        open_trace(path)
    error = refused.value
    assert error.what.startswith(what)
    assert error.where == f"{path}, line 2" + (f", key `{key}`" if key else "")
    assert error.fix
    assert (error.exit_code, "\n" in error.what) == (2, False)
    # The same row is left out on demand, and the good one stays.
    trace = open_trace(path, skip_bad=True)
    assert ([r.id for r in trace.requests()], trace.num_bad) == (["a"], 1)


FILE_FAULTS: list[tuple[bytes, str]] = [
    (b"", "no requests in the trace"),
    (b"\n\n  \n", "no requests in the trace"),
    (b'{"benchctl_trace": 1}\n', "no requests in the trace"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 5\n", "this is a Git LFS pointer"),
    (b"\x28\xb5\x2f\xfdabc", "this is a zstd file"),
    (b"PAR1\x15\x04", "this is a Parquet file"),
    ("﻿{}".encode("utf-16"), "this is a UTF-16 file"),
    (b"\x7fELF\x00\x00\x01", "this is a binary file"),
    (b'[\n{"input_length": 1}]', "this is a JSON array"),
    (b'{"input_length": 5, "output_le', "the last line is cut off"),
    (b'{"input_length": 5, "output_length": 2}\n{"id": "b", "input_length": 5', "the last line is cut off"),
    (b'{"prompt": "\xff", "output_length": 2}\n', "not UTF-8: byte 0xff at byte 12"),
    (gzip.compress(json.dumps(OK).encode() * 1)[:-9], "the gzip file is cut off"),
    (gzip.compress(b"x" * 100)[:-8] + b"12345678", "damaged gzip"),
    (b'{"benchctl_trace": 2}\n', "trace version 2; this program reads 1"),
    (b'{"benchctl_trace": 1, "block_size": 0}\n', "header key `block_size`: Expected int >= 1"),
    (b'{"benchctl_trace": 1, "hash_kind": "x"}\n', "header key `hash_kind`: Invalid enum value 'x'"),
    (b'{"benchctl_trace": 1, "limits": {"nano": 3}}\n', "header key `limits`: Expected object, got int"),
]


@pytest.mark.parametrize(("content", "what"), FILE_FAULTS, ids=[what for _, what in FILE_FAULTS])
@pytest.mark.parametrize("skip_bad", [False, True])
def test_a_bad_file_is_named(tmp_path: Path, content: bytes, what: str, skip_bad: bool) -> None:
    if skip_bad and b"cut off" in what.encode() and content.startswith(b'{"input_length": 5, "output_length"'):
        pytest.skip("one good row is left")
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(BenchctlError) as refused:
        open_trace(path, skip_bad=skip_bad)
    assert what in refused.value.what and refused.value.fix
    assert str(path) in str(refused.value.where)


def test_a_path_that_is_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchctlError, match="is a folder"):
        open_trace(tmp_path)
    with pytest.raises(BenchctlError, match="no such trace"):
        open_trace(tmp_path / "none.jsonl")
    (tmp_path / "dangling").symlink_to(tmp_path / "none.jsonl")
    with pytest.raises(BenchctlError, match="no such trace"):
        open_trace(tmp_path / "dangling")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BenchctlError, match="is no regular file"):
        open_trace(tmp_path / "pipe")


@pytest.mark.parametrize("size", [16, 64, 24])
def test_hash_ids_that_all_fit_another_block_size_name_it(tmp_path: Path, size: int) -> None:
    path = tmp_path / "t.jsonl"
    lengths = [size * 3, size * 3 + 1, 1000]
    rows = [{"input_length": n, "output_length": 1, "hash_ids": list(range(-(-n // size)))} for n in lengths]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for skip_bad in (False, True):
        with pytest.raises(BenchctlError) as refused:
            open_trace(path, skip_bad=skip_bad)
        assert refused.value.what == f"no row's hash_ids fit blocks of 512 tokens; blocks of {size} fit all 3"
        assert f'"block_size": {size}' in str(refused.value.fix)
    path.write_text(json.dumps({"benchctl_trace": 1, "block_size": size}) + "\n" + path.read_text())
    assert open_trace(path).num_requests == 3


def test_hash_ids_that_fail_in_some_rows_list_the_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = [(600, [1]), (1100, [1, 2, 3]), (700, [1])]
    path.write_text(
        "".join(json.dumps({"input_length": n, "output_length": 1, "hash_ids": ids}) + "\n" for n, ids in rows)
    )
    with pytest.raises(BenchctlError) as refused:
        open_trace(path)
    assert refused.value.what == (
        "1 hash_ids for 600 tokens; blocks of 512 need 2 (2 rows with such a fault: line 1, 3)"
    )
    assert refused.value.fix == "give 2 hash_ids, or mend input_length"
    trace = open_trace(path, skip_bad=True)
    assert (trace.num_requests, trace.num_bad) == (1, 2)


def test_a_short_prompt_that_fits_any_block_size_does_not_hide_the_right_one(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = [(9, [1]), (100, list(range(7))), (1000, list(range(63)))]
    path.write_text(
        "".join(json.dumps({"input_length": n, "output_length": 1, "hash_ids": ids}) + "\n" for n, ids in rows)
    )
    with pytest.raises(BenchctlError) as refused:
        open_trace(path)
    assert refused.value.what.endswith("(2 rows with such a fault: line 2, 3)")
    assert "blocks of 16 would fit every row" in str(refused.value.fix)


def test_an_id_cannot_steer_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    row = {**OK, "id": "a\n\x1b[2J\u202e", "k\ney": 1}
    path.write_text((json.dumps(row) + "\n") * 2)
    with pytest.raises(BenchctlError) as refused:
        open_trace(path)
    assert refused.value.what == 'id "a\\n\\x1b[2J\\u202e" is taken by line 1'
    assert all(note.isprintable() for note in open_trace(path, skip_bad=True).notes)


def test_an_impossible_length_is_refused_or_kept_as_a_number(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({**OK, "input_length": 2**60}) + "\n")
    assert next(open_trace(path).requests()).input_length == 2**60  # nothing of that size was allocated
    path.write_text(json.dumps({**OK, "input_length": 2**60 + 1}) + "\n")
    with pytest.raises(BenchctlError, match="`input_length` must be an integer <= "):
        open_trace(path)
