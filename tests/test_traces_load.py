"""Opening good traces: what is read, in what order, and what is said about it."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from traces.errors import BenchctlError
from traces.files import bundled_traces
from traces.load import Trace, due_round, open_trace
from traces.request import Carry, Request, Segment, Slo


def write(path: Path, *rows: dict[str, Any] | str, end: str = "\n") -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_bytes("".join(line + end for line in lines).encode())
    return path


def plain(id: str, **keys: Any) -> dict[str, Any]:
    return {"id": id, "input_length": 5, "output_length": 2, **keys}


def ids(trace: Trace, **options: Any) -> list[str]:
    return [request.id for request in trace.requests(**options)]


def test_every_key_reaches_the_request(tmp_path: Path) -> None:
    full = {
        "id": "b",
        "arrival_s": 2,
        "arrival_round": 3.0,
        "session": "s",
        "turn": 2,
        "parents": ["a"],
        "think_s": 0.5,
        "input_length": 9,
        "carry": {"from": "a", "tokens": 7},
        "output_length": 4,
        "output_token_ids": [1, 2, 3, 4],
        "max_tokens": 3,
        "stop": "eos",
        "priority": -1,
        "slo": {"ttft_ms": 200, "class": "chat"},
        "model": "m",
        "adapter": "l",
        "tenant": "t",
        "media": [{"type": "image", "id": "i", "tokens": 2}],
        "sampling": {"temperature": 0.5},
        "observed": {"ttft_s": 0.1},
        "src": {"row": 7},
        "colour": "red",
    }
    trace = open_trace(write(tmp_path / "t.jsonl", plain("a", arrival_s=1), full))
    assert list(trace.requests())[1] == Request(
        index=1,
        line=2,
        id="b",
        arrival_s=2.0,
        arrival_round=3,
        session="s",
        turn=2,
        parents=("a",),
        think_s=0.5,
        input_length=9,
        carry=Carry(from_id="a", tokens=7),
        output_length=3,
        output_token_ids=(1, 2, 3, 4),
        max_tokens=3,
        stop="eos",
        priority=-1,
        slo=Slo(ttft_ms=200, slo_class="chat"),
        model="m",
        adapter="l",
        tenant="t",
        media=[{"type": "image", "id": "i", "tokens": 2}],
        sampling={"temperature": 0.5},
        observed={"ttft_s": 0.1},
        src={"row": 7, "colour": "red"},
    )
    assert (trace.num_requests, trace.num_sessions, trace.span_s) == (2, 1, 1.0)
    assert (trace.all_have_arrival_s, trace.any_arrival_round, trace.has_text) == (True, True, False)
    assert trace.notes == ["unknown keys are kept in src (rows): colour (1)"]


def test_a_mooncake_file_is_read_as_it_is(tmp_path: Path) -> None:
    trace = open_trace(
        write(
            tmp_path / "m.jsonl",
            {"timestamp": 0, "input_length": 1025, "output_length": 3, "hash_ids": [0, 1, 2]},
            {"timestamp": 3001, "input_length": 512, "output_length": 1, "hash_ids": [0]},
        )
    )
    requests = list(trace.requests())
    assert [(r.id, r.index, r.line, r.arrival_s, r.hash_ids) for r in requests] == [
        ("r1", 0, 1, 0.0, (0, 1, 2)),
        ("r2", 1, 2, 3.001, (0,)),
    ]
    assert (trace.header.block_size, trace.header.hash_kind, trace.header.hash_scope) == (512, "chained", "file")
    assert trace.notes == []


def test_aliases_give_the_same_trace_as_the_canonical_keys(tmp_path: Path) -> None:
    dialect = [
        {"timestamp": 1500, "session_id": "s", "text_input": "hello", "output_length": 2},
        {"delay": 250, "session_id": "s", "text_input": "more", "output_length": 2},
    ]
    canonical = [
        {"output_length": 2.0, "prompt": "hello", "session": "s", "arrival_s": 1.5, "priority": 0, "tenant": None},
        {"output_length": 2, "prompt": "more", "session": "s", "think_s": 0.25},
    ]
    one, two = open_trace(write(tmp_path / "d.jsonl", *dialect)), open_trace(write(tmp_path / "c.jsonl", *canonical))
    assert list(one.requests()) == list(two.requests())
    assert one.sha256 == two.sha256
    assert one.has_text and not one.all_have_arrival_s
    # A think time needs somebody to wait for: the turn before it in the session.
    assert [r.parents for r in one.requests()] == [(), ("r1",)]
    assert one.by_row(1).parents == ("r1",)
    assert one.notes == ["1 row with a think time and no parents: each follows the row before in its session"]


def test_bom_crlf_blank_lines_gzip_and_a_missing_line_end_change_nothing(tmp_path: Path) -> None:
    rows = [plain("a", arrival_s=0), plain("b", arrival_s=1)]
    clean = open_trace(write(tmp_path / "clean.jsonl", *rows))
    text = "\r\n \r\n".join(json.dumps(row) for row in rows)
    (tmp_path / "odd.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode())
    odd = open_trace(tmp_path / "odd.jsonl")
    (tmp_path / "packed.jsonl").write_bytes(gzip.compress((tmp_path / "odd.jsonl").read_bytes()))
    packed = open_trace(tmp_path / "packed.jsonl")  # known by its content: the name does not say gz
    assert clean.sha256 == odd.sha256 == packed.sha256
    assert [r.line for r in odd.requests()] == [1, 3]
    assert list(odd.requests()) == list(packed.requests())
    assert [packed.by_row(1), packed.by_row(0)] == [odd.by_row(1), odd.by_row(0)] == list(odd.requests())[::-1]


def test_the_hash_sees_what_a_replay_sees(tmp_path: Path) -> None:
    def digest(*rows: dict[str, Any]) -> str:
        return open_trace(write(tmp_path / "t.jsonl", *rows)).sha256

    base = digest(plain("a"))
    assert base == digest({"benchctl_trace": 1}, plain("a"))
    assert base == digest({"benchctl_trace": 1, "block_size": 512, "hash_scope": "file"}, plain("a"))
    others = [
        digest(plain("b")),
        digest(plain("a", arrival_s=0)),
        digest(plain("a", x=1)),
        digest({"benchctl_trace": 1, "salt": "s"}, plain("a")),
        digest({"benchctl_trace": 1, "block_size": 16}, plain("a")),
        digest(plain("a"), plain("b")),
        digest(plain("b"), plain("a")),
    ]
    assert len({base, *others}) == 8


def test_the_canonical_form_is_what_the_documentation_says(tmp_path: Path) -> None:
    import hashlib

    rows = [
        {"timestamp": 250, "output_length": 2, "input_length": 5, "b": 1, "a": {"d": 1, "c": 2}},
        plain("x", turn=None),
    ]
    trace = open_trace(write(tmp_path / "t.jsonl", {"salt": "s", "benchctl_trace": 1, "name": "n"}, *rows))
    canonical = (
        b'{"benchctl_trace":1,"name":"n","salt":"s"}\n'
        b'{"arrival_s":0.25,"input_length":5,"output_length":2,"src":{"a":{"c":2,"d":1},"b":1}}\n'
        b'{"id":"x","input_length":5,"output_length":2}\n'
    )
    assert trace.sha256 == hashlib.sha256(canonical).hexdigest()
    assert trace.name == "n"


def test_the_header_is_read_and_its_unknown_keys_kept(tmp_path: Path) -> None:
    head = {"benchctl_trace": 1, "name": "mine", "limits": {"common": {"max_num_seqs": 4}}, "colour": "red", "salt": 7}
    trace = open_trace(write(tmp_path / "t.jsonl", head, plain("a")))
    assert (trace.header.name, trace.header.limits, trace.header.salt) == ("mine", {"common": {"max_num_seqs": 4}}, 7)
    assert trace.header.extra == {"colour": "red"}
    assert trace.notes == ["unknown header keys are kept: colour"]
    assert [(r.index, r.line) for r in trace.requests()] == [(0, 2)]
    with pytest.raises(BenchctlError, match="unknown header key: colour"):
        open_trace(trace.path, strict=True)


@pytest.mark.parametrize(
    ("keys", "length"),
    [
        ({"output_length": 5}, 5),
        ({"output_length": 5, "max_tokens": 3}, 3),
        ({"output_length": 5, "max_tokens": 9}, 5),
        ({"output_token_ids": [7, 8, 9]}, 3),
        ({"output_token_ids": [7, 8, 9], "max_tokens": 2}, 2),
        ({"max_tokens": 4}, 4),
        ({"max_tokens": 4, "output_length": None}, 4),
    ],
)
def test_requests_come_with_the_output_length_resolved(tmp_path: Path, keys: dict[str, Any], length: int) -> None:
    trace = open_trace(write(tmp_path / "t.jsonl", {"input_length": 1, **keys}))
    assert [r.output_length for r in trace.requests()] == [length]


def test_rows_are_sorted_by_time_with_ties_in_file_order(tmp_path: Path) -> None:
    times = {"a": 2, "b": 0, "c": 2, "d": 1, "e": 0}
    trace = open_trace(write(tmp_path / "t.jsonl", *(plain(id, arrival_s=t) for id, t in times.items())))
    assert ids(trace) == ["b", "e", "d", "a", "c"]
    assert [r.index for r in trace.requests()] == [1, 4, 3, 0, 2]
    assert trace.notes == ["not in time order (line 2: arrival_s goes back from 2 to 0): sorted on load"]
    assert trace.span_s == 2.0


def test_a_row_without_a_time_stays_behind_the_row_above_it(tmp_path: Path) -> None:
    rows = [plain("a", arrival_s=5), plain("a2"), plain("b", arrival_s=1), plain("b2")]
    assert ids(open_trace(write(tmp_path / "t.jsonl", *rows))) == ["b", "b2", "a", "a2"]


def test_rounds_order_rows_by_round_and_take_a_descent_of_times_for_no_fault(tmp_path: Path) -> None:
    rows = [
        plain("a", arrival_round=2, arrival_s=9),
        plain("b", arrival_round=1, arrival_s=8),
        plain("c", arrival_round=2, arrival_s=7),
        plain("d", arrival_s=0.3),  # round 4 in rounds of 0.1 s, round 1 in rounds of 1 s
    ]
    trace = open_trace(write(tmp_path / "t.jsonl", *rows))
    assert ids(trace, order="round") == ["b", "d", "a", "c"]
    assert ids(trace, order="round", round_seconds=0.1) == ["b", "a", "c", "d"]
    assert trace.notes == []
    assert ids(trace, order="time") == ["d", "c", "b", "a"]
    assert trace.notes == ["not in time order (line 2: arrival_s goes back from 9 to 8): sorted on load"]


@pytest.mark.parametrize(
    ("arrival_s", "round_seconds", "expected"),
    [(0.0, 1.0, 1), (0.999, 1.0, 1), (1.0, 1.0, 2), (0.3, 0.1, 4), (0.299, 0.1, 3), (1e9, 1e-3, 10**12 + 1)],
)
def test_due_round(arrival_s: float, round_seconds: float, expected: int) -> None:
    assert due_round(Request(index=0, line=1, id="a", arrival_s=arrival_s), round_seconds) == expected


def test_a_file_too_large_to_sort_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traces.load.MAX_SORT_BYTES", 50)
    path = write(tmp_path / "t.jsonl", plain("a", arrival_s=1), plain("b", arrival_s=0.5))
    with pytest.raises(BenchctlError) as refused:
        open_trace(path)
    assert str(refused.value).splitlines() == [
        "line 2: arrival_s goes back from 1 to 0.5: not in order, and too large to sort in memory (0 MB, limit 0 MB)",
        f"  in {path}, line 2",
        f"  try: benchctl trace sort {path}",
    ]
    # By rounds it is in order, and is read.
    path = write(
        tmp_path / "r.jsonl", plain("a", arrival_s=1, arrival_round=1), plain("b", arrival_s=0, arrival_round=1)
    )
    trace = open_trace(path)
    assert ids(trace, order="round") == ["a", "b"]
    with pytest.raises(BenchctlError, match="too large to sort"):
        trace.requests()


def test_skipped_rows_are_counted_and_leave_no_gap(tmp_path: Path) -> None:
    rows = [plain("a"), plain("b", input_length=0), "{", plain("c"), plain("a"), plain("d", parents=["b"])]
    trace = open_trace(write(tmp_path / "t.jsonl", *rows), skip_bad=True)
    assert (trace.num_requests, trace.num_bad) == (2, 4)
    assert [(r.id, r.index, r.line) for r in trace.requests()] == [("a", 0, 1), ("c", 1, 4)]
    (note,) = trace.notes
    assert note.startswith("4 rows left out: line 2: `input_length` must be an integer >= 1, got 0; line 3: not JSON")


def test_strict_makes_an_unknown_key_a_fault(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", plain("a", colour=1), plain("b"))
    with pytest.raises(BenchctlError, match="unknown key `colour`") as refused:
        open_trace(path, strict=True)
    assert refused.value.where == f"{path}, line 1"
    trace = open_trace(path, strict=True, skip_bad=True)
    assert ids(trace) == ["b"]


def test_the_source_of_a_key_named_like_ours_in_src_is_not_overwritten(tmp_path: Path) -> None:
    trace = open_trace(write(tmp_path / "t.jsonl", plain("a", colour="new", src={"colour": "old", "row": 1})))
    assert next(trace.requests()).src == {"colour": "old", "row": 1}


def test_rows_are_found_again_by_row_and_by_id(tmp_path: Path) -> None:
    rows = [
        plain("a", colour=1),
        plain("b", carry={"from": "a", "tokens": 5}),
        plain("c", segments=[{"id": 1, "len": 2}]),
    ]
    path = write(tmp_path / "t.jsonl", {"benchctl_trace": 1}, *rows)
    for name, content in (("t.jsonl", path.read_bytes()), ("t.jsonl.gz", gzip.compress(path.read_bytes()))):
        (tmp_path / name).write_bytes(content)
        trace = open_trace(tmp_path / name)
        requests = list(trace.requests())
        assert [trace.by_row(i) for i in (2, 0, 1)] == [requests[i] for i in (2, 0, 1)]
        assert trace.by_id("a") == requests[0]
        assert requests[2].segments == (Segment(id=1, len=2),)
        with pytest.raises(KeyError):
            trace.by_id("b")  # nobody carries from it


def test_a_file_that_changes_after_it_was_checked_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", plain("a"))
    trace = open_trace(path)
    write(path, plain("a"), plain("b", input_length=0))
    with pytest.raises(BenchctlError, match="changed after it was checked"):
        list(trace.requests())


def test_times_in_ticks_and_times_from_an_epoch_are_noted(tmp_path: Path) -> None:
    rows = [plain(f"a{i}", timestamp=1.7e12 + 3000 * (i // 10)) for i in range(1100)]
    notes = open_trace(write(tmp_path / "t.jsonl", *rows)).notes
    assert notes[0] == "990 of 1099 gaps between arrivals are zero: the times come in ticks, and read as bursts"
    assert notes[1].startswith("the first arrival is at 1700000000 s")


def test_a_bundled_trace_is_found_by_its_name_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("walkthrough", "traces/walkthrough", "traces/walkthrough.jsonl", "walkthrough.jsonl"):
        trace = open_trace(name)
        assert trace.name == "walkthrough" and trace.num_requests == 5
        note = f"{name} does not exist here: the bundled trace of this name is used"
        assert trace.notes == ([note] if name.endswith(".jsonl") else [])
    for name in (
        "elsewhere/walkthrough.jsonl",
        "elsewhere/walkthrough",
        str(tmp_path / "walkthrough.jsonl"),
        "traces/none.jsonl",
        "traces/../walkthrough",
        "w" * 300,
    ):
        with pytest.raises(BenchctlError, match="no such trace") as refused:
            open_trace(name)
        assert all(bundled.removesuffix(".jsonl") in str(refused.value.fix) for bundled in bundled_traces())


def test_a_file_of_a_bundled_traces_name_is_meant_before_it_and_a_folder_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "walkthrough").mkdir()  # of its runs, say
    assert open_trace("walkthrough").num_requests == 5
    write(tmp_path / "walkthrough.jsonl", plain("own"))
    assert ids(open_trace("walkthrough.jsonl")) == ids(open_trace("walkthrough")) == ["own"]
    write(tmp_path / "burst", plain("bare"))
    assert ids(open_trace("burst")) == ["bare"]
    (tmp_path / "mine").mkdir()
    with pytest.raises(BenchctlError, match="mine is a folder"):
        open_trace("mine")


def test_an_unknown_trace_names_near_ones_of_the_package_and_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "tuesday.jsonl.gz", plain("a"))
    for name, near in (
        ("walktrough", "did you mean walkthrough? "),
        ("sharegtp.jsonl", "did you mean sharegpt? "),
        ("long", "did you mean long-prompts or lessons/06-long-prefill-cap? "),
        ("chunking", "did you mean lessons/05-chunking? "),
        ("05-chunking.jsonl", "did you mean lessons/05-chunking? "),
        ("tuesday.jsonl", "did you mean tuesday.jsonl.gz? "),
        ("azure", "check the path; "),
    ):
        with pytest.raises(BenchctlError, match=f"no such trace: {name}") as refused:
            open_trace(name)
        assert str(refused.value.fix).startswith(f"{near}bundled traces: burst, "), refused.value.fix


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_a_clear_error(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", plain("a"))
    path.chmod(0)
    with pytest.raises(BenchctlError, match="no permission"):
        open_trace(path)
