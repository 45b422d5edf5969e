"""Random traces: good ones come back as they were, damaged ones give a clear error and never a traceback."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from traces import rows
from traces.errors import BenchctlError
from traces.load import open_trace
from traces.tokens import TokenMaker

INT64 = st.integers(-(2**63), 2**63 - 1)
LENGTH = st.integers(1, 40)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
ID = st.one_of(INT64, TEXT)
JSON = st.recursive(st.none() | st.booleans() | INT64 | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=6)  # fmt: skip
OBJECT = st.dictionaries(TEXT, JSON, max_size=3)
BLOCK_SIZE = 8


@st.composite
def valid_rows(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Rows in canonical keys that keep every rule; later ones may carry from earlier ones."""
    made: list[dict[str, Any]] = []
    lengths: dict[str, int | None] = {}
    for number in range(draw(st.integers(1, 6))):
        row: dict[str, Any] = {"id": f"{draw(TEXT)}-{number}"}
        optional = {
            "arrival_s": st.floats(0, 1e6),
            "arrival_round": st.integers(1, 50),
            "session": TEXT,
            "turn": st.integers(1, 9),
            "think_s": st.floats(0, 100),
            "max_tokens": LENGTH,
            "stop": st.just("eos"),
            "priority": INT64,
            "slo": st.fixed_dictionaries({}, optional={"ttft_ms": st.floats(1, 9), "class": TEXT}),
            "tenant": TEXT,
            "adapter": TEXT,
            "media": st.lists(JSON, max_size=2),
            "observed": OBJECT,
            "src": OBJECT,
        }
        row |= draw(st.fixed_dictionaries({}, optional=optional))
        if lengths and draw(st.booleans()):
            row["parents"] = draw(st.lists(st.sampled_from(sorted(lengths)), min_size=1, max_size=2))
        kind = draw(st.sampled_from(["ids", "text", "chat", "alone", "hash", "segments", "carry"]))
        length: int | None = draw(LENGTH)
        assert length is not None
        if kind == "ids":
            row["prompt_token_ids"] = draw(st.lists(INT64, min_size=1, max_size=5))
            length = len(row["prompt_token_ids"])
        elif kind == "text":
            row["prompt"] = draw(TEXT)
            length = None
        elif kind == "chat":
            row["messages"] = draw(st.lists(OBJECT, min_size=1, max_size=2))
            length = None
        elif kind == "hash":
            num = -(-length // BLOCK_SIZE)
            row |= {"input_length": length, "hash_ids": draw(st.lists(ID, min_size=num, max_size=num))}
        elif kind == "segments":
            first = draw(st.integers(1, length))
            row |= {"input_length": length, "segments": [{"id": draw(ID), "len": first}]}
        elif kind == "carry" and (parents := sorted(id for id, n in lengths.items() if n)):
            parent = draw(st.sampled_from(parents))
            tokens = draw(st.integers(1, lengths[parent] or 1))
            length += tokens
            row |= {"input_length": length, "carry": {"from": parent, "tokens": tokens}}
        else:
            row["input_length"] = length
        output = draw(LENGTH)
        if draw(st.booleans()):
            row["output_token_ids"] = draw(st.lists(INT64, min_size=1, max_size=5))
            output = len(row["output_token_ids"])
        else:
            row["output_length"] = output
        lengths[row["id"]] = None if length is None else length + min(output, row.get("max_tokens", output))
        made.append(row)
    return made


def encode(made: list[dict[str, Any]]) -> bytes:
    head = {"benchctl_trace": 1, "block_size": BLOCK_SIZE}
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in [head, *made]).encode()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(valid_rows())
def test_valid_rows_come_back_as_they_were(made: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.jsonl"
        path.write_bytes(encode(made))
        trace = open_trace(path, strict=True)
        requests = sorted(trace.requests(), key=lambda request: request.index)
        assert [request.id for request in requests] == [row["id"] for row in made]
        assert [trace.by_row(request.index) for request in requests] == requests
        for row, request in zip(made, requests, strict=True):
            outputs = row.get("output_length") or len(row["output_token_ids"])
            assert request.output_length == min(outputs, row.get("max_tokens", outputs))
            for key in (
                "arrival_s",
                "arrival_round",
                "session",
                "turn",
                "think_s",
                "prompt",
                "messages",
                "input_length",
            ):
                assert getattr(request, key) == row.get(key)
            for key in ("stop", "tenant", "adapter", "media", "observed", "src", "max_tokens"):
                assert getattr(request, key) == row.get(key)
            for key in ("prompt_token_ids", "hash_ids", "output_token_ids"):
                assert list(getattr(request, key) or ()) == row.get(key, [])
            assert request.priority == row.get("priority", 0)

        # Written in canonical form and read again: the same requests.
        again = Path(folder) / "again.jsonl"
        lines = [rows.canonical_line(rows.from_request(request)) for request in requests]
        again.write_bytes(b"".join(line + b"\n" for line in [trace.header.canonical_line(), *lines]))
        assert sorted(open_trace(again, strict=True).requests(), key=lambda request: request.index) == requests


def read_everything(path: Path) -> None:
    """What a replay would do with the file: its faults must come as BenchctlError."""
    for skip_bad in (False, True):
        try:
            trace = open_trace(path, skip_bad=skip_bad)
            assert all(note.isprintable() for note in trace.notes)
            maker = TokenMaker(trace, vocab_size=None)
            assert len(list(trace.requests(order="round"))) == trace.num_requests
            for request in trace.requests():
                if (request.input_length or 0) + (request.output_length or 0) < 100_000:
                    maker.token_ids(request)
        except BenchctlError as error:
            assert error.what and error.fix and error.what.isprintable()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    valid_rows(),
    st.lists(st.tuples(st.floats(0, 1), st.sampled_from(["cut", "insert", "flip", "end", "line"]), st.binary(max_size=4)), min_size=1, max_size=3),
    st.booleans(),
)  # fmt: skip
def test_damaged_bytes_never_give_a_traceback(
    made: list[dict[str, Any]], damages: list[tuple[float, str, bytes]], packed: bool
) -> None:
    content = encode(made)
    if packed:
        content = gzip.compress(content)
    for place, damage, noise in damages:
        at = int(place * len(content))
        if damage == "cut":
            content = content[:at] + content[at + 1 + len(noise) :]
        elif damage == "insert":
            content = content[:at] + noise + content[at:]
        elif damage == "flip":
            content = content[:at] + noise + content[at + len(noise) :]
        elif damage == "end":
            content = content[:at]
        else:
            content = content[:at] + b"\n" + content[at:]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.jsonl"
        path.write_bytes(content)
        read_everything(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(valid_rows(), st.data())
def test_wrong_values_never_give_a_traceback(made: list[dict[str, Any]], data: st.DataObject) -> None:
    keys = st.sampled_from([*rows.RULES, "benchctl_trace", "block_size", "hash_kind", "limits", "salt"])
    values = st.one_of(JSON, st.lists(JSON, max_size=3), st.integers(-(2**70), 2**70), OBJECT)
    lines = [{"benchctl_trace": 1, "block_size": BLOCK_SIZE}, *made]
    for _ in range(data.draw(st.integers(1, 3))):
        row = data.draw(st.sampled_from(lines))
        key = data.draw(keys)
        if data.draw(st.booleans()):
            row[key] = data.draw(values)
        else:
            row.pop(key, None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in lines))
        read_everything(path)


@pytest.mark.parametrize("line", [b"{" * 100_000, b'{"src": ' + b'{"a":' * 100_000, b'{"arrival_s": ' + b"9" * 100_000])
def test_hostile_lines_are_refused(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(BenchctlError):
        open_trace(path)
