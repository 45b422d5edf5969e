"""A large trace is replayed while it is read: the first rounds are over before its last rows were looked at."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import benchctl.progress
import traces.scan
import traces.streamed
from benchctl.command import run_replay
from benchctl.config import ReplayOptions
from reports.run import open_run
from tests.laws import assert_laws
from traces.errors import BenchctlError
from traces.files import read_lines
from traces.load import open_trace
from traces.streamed import is_large, open_stream

Row = dict[str, Any]


@pytest.fixture(autouse=True)
def small_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces.streamed, "HEAD_ROWS", 4)


def write(path: Path, *rows: Row) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.name.endswith(".gz") else text)
    return path


def rows(num: int, **more: Any) -> list[Row]:
    return [{"arrival_s": i / 4, "input_length": 20 + i % 9, "output_length": 2 + i % 3, **more} for i in range(num)]


def conversations() -> list[Row]:
    """Turns that carry the turn before, and think; far behind the head."""
    out: list[Row] = []
    for i in range(12):
        row: Row = {"id": f"c{i}", "arrival_s": float(i), "session": f"s{i % 2}", "input_length": 40 + 10 * i}
        if i >= 2:
            row |= {"carry": {"from": f"c{i - 2}", "tokens": 40}, "think_s": 0.5}
        out.append(row | {"output_length": 5, "made_up": i})
    return out


def options(trace: Path, out: Path, **more: Any) -> ReplayOptions:
    given: dict[str, Any] = {"engine": "null", "schedulers": ("nano", "vllm"), "validate_first": False} | more
    return ReplayOptions(trace=str(trace), out=str(out), report=False, **given)


def manifest(out: Path) -> dict[str, Any]:
    return json.loads((out / "manifest.json").read_text())


def test_rounds_are_over_before_the_last_row_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def slowly(path: Path, **more: Any) -> Iterator[tuple[int, int, bytes, bool]]:
        for entry in read_lines(path, **more):
            events.append(f"line {entry[0]}")
            yield entry

    monkeypatch.setattr(traces.scan, "read_lines", slowly)
    monkeypatch.setattr(benchctl.progress.Progress, "saw", lambda self, number, *rest: events.append(f"round {number}"))
    trace = write(tmp_path / "t.jsonl", *rows(200))
    assert run_replay(options(trace, tmp_path / "out", schedulers=("vllm",))) == 0
    first_round, last_line = events.index("round 1"), events.index("line 200")
    # The head of four; then one row ahead of the one that is due.
    assert [event for event in events[:first_round] if event[:4] == "line"][-1] == "line 4"
    assert events[events.index("line 6") - 1][:5] == "round"
    assert sum(event[:5] == "round" for event in events[:last_line]) > 300
    assert events.count("line 200") == 1


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
@pytest.mark.parametrize("made", ["plain", "conversations", "hashes", "text ids"])
def test_a_streamed_run_is_the_run_of_the_checked_trace(tmp_path: Path, name: str, made: str) -> None:
    lines = {
        "plain": rows(40),
        "conversations": conversations(),
        "hashes": [{"benchctl_trace": 1, "name": "h", "block_size": 16}]
        + [row | {"hash_ids": [i % 3, 10 + i]} for i, row in enumerate(rows(30))],
        "text ids": [
            {"arrival_s": i / 9, "prompt_token_ids": [1, 2, 3] * (1 + i % 7), "output_token_ids": [i, 5]}
            for i in range(30)
        ],
    }[made]
    trace = write(tmp_path / name, *lines)
    for kind, first in (("streamed", False), ("checked", True)):
        assert run_replay(options(trace, tmp_path / kind, validate_first=first, kv_cache_tokens=4096)) == 0
    for policy in ("nano", "vllm"):
        one, two = manifest(tmp_path / "streamed" / policy), manifest(tmp_path / "checked" / policy)
        for key in ("trace", "num_requests", "digest", "prefix_upper_bound", "counts"):
            assert one[key] == two[key], (policy, key)
        assert one["trace"]["sha256"] == open_trace(trace).sha256
        assert set(one["notes"]) == set(two["notes"])
        assert_laws(tmp_path / "streamed" / policy)


def test_by_round_and_by_rate_it_is_the_same(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", *({**row, "arrival_round": 1 + i // 3} for i, row in enumerate(rows(40))))
    cases: list[dict[str, Any]] = [{"clock": "rounds"}, {"request_rate": 9.0}, {"num_prompts": 17, "num_warmups": 6}]
    for case in cases:
        digests = set()
        for first in (True, False):
            assert run_replay(options(trace, tmp_path / "out", validate_first=first, force=True, **case)) == 0
            found = manifest(tmp_path / "out" / "nano")
            digests.add((found["digest"], found["num_requests"], found["trace"]["sha256"]))
        assert len(digests) == 1, case


def test_a_row_out_of_order_ends_the_run_and_what_ran_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = rows(40)
    lines[30]["arrival_s"] = 1.0
    trace = write(tmp_path / "t.jsonl", *lines)
    assert run_replay(options(trace, tmp_path / "out")) == 2
    said = capsys.readouterr().err
    assert "arrival_s goes back from 7.25 to 1: not in order" in said and "line 31" in said
    assert "benchctl trace sort" in said and "--validate-first" in said
    run = open_run(tmp_path / "out" / "nano")
    assert run.status == "failed" and run.read("requests").height == 30
    assert manifest(run.path)["trace"]["sha256"] is None and manifest(run.path)["num_requests"] is None
    assert not (tmp_path / "out" / "vllm").exists()
    # Checked first it is sorted, and runs.
    assert run_replay(options(trace, tmp_path / "sorted", validate_first=True)) == 0


def test_order_is_that_of_the_rounds_under_a_clock_of_rounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[Row] = [{"arrival_round": 1 + i // 2, "input_length": 4, "output_length": 1} for i in range(20)]
    lines[12]["arrival_round"] = 2
    assert run_replay(options(write(tmp_path / "t.jsonl", *lines), tmp_path / "out", clock="rounds")) == 2
    assert "due in round 2, a row above it in 6" in capsys.readouterr().err


def test_a_head_out_of_order_or_without_times_is_read_whole_as_ever(tmp_path: Path) -> None:
    lines = rows(20)
    lines[1]["arrival_s"] = 3.0
    trace = write(tmp_path / "t.jsonl", *lines)
    assert run_replay(options(trace, tmp_path / "a")) == 0
    assert any("sorted on load" in note for note in manifest(tmp_path / "a" / "nano")["notes"])
    untimed = write(tmp_path / "u.jsonl", *({"input_length": 4, "output_length": 1} for _ in range(9)))
    assert run_replay(options(untimed, tmp_path / "b", request_rate=5.0)) == 0


def test_a_bad_row_in_the_head_stops_before_anything_runs_a_later_one_at_its_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for at in (2, 25):
        lines = rows(40)
        lines[at]["input_length"] = "20"
        trace = write(tmp_path / "t.jsonl", *lines)
        out = tmp_path / f"out{at}"
        if at == 2:
            with pytest.raises(BenchctlError, match="must be an integer"):
                run_replay(options(trace, out))
            assert not out.exists()
            continue
        assert run_replay(options(trace, out)) == 2
        assert "line 26, key `input_length`" in capsys.readouterr().err
        assert open_run(out / "nano").read("requests").height == at
        assert run_replay(options(trace, tmp_path / "skipped", skip_bad=True)) == 0
        found = manifest(tmp_path / "skipped" / "vllm")
        assert found["num_requests"] == 39 and found["trace"]["num_bad"] == 1
        assert any("1 row left out: line 26" in note for note in found["notes"])


def test_after_num_prompts_the_rest_is_read_for_the_hash_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = rows(40)
    trace = write(tmp_path / "t.jsonl", *lines)
    assert run_replay(options(trace, tmp_path / "a", num_prompts=10)) == 0
    found = manifest(tmp_path / "a" / "vllm")
    assert found["num_requests"] == 10 and found["trace"]["num_requests"] == 40
    lines[30]["output_length"] = -1
    assert run_replay(options(write(trace, *lines), tmp_path / "b", num_prompts=10)) == 0
    assert "its sha256 is not known" in capsys.readouterr().err
    found = manifest(tmp_path / "b" / "vllm")
    assert found["num_requests"] == 10 and found["trace"]["sha256"] is None
    with pytest.raises(BenchctlError, match="ended before its trace was read to the end"):
        run_replay(ReplayOptions(trace=str(trace), clock="recorded", from_run=str(tmp_path / "b" / "vllm"), skip_bad=True))  # fmt: skip


def test_hash_ids_of_another_block_size_are_told_from_the_head(tmp_path: Path) -> None:
    lines = [row | {"hash_ids": [1, 2]} for row in rows(20)]
    trace = write(tmp_path / "t.jsonl", *lines)
    with pytest.raises(BenchctlError, match="no row's hash_ids fit blocks of 512 tokens; blocks of 16 fit all"):
        open_stream(trace)
    mixed = [row | {"hash_ids": [1]} for row in rows(10)] + lines[:1]
    stream = open_stream(write(trace, *mixed))
    with pytest.raises(BenchctlError, match="2 hash_ids for 20 tokens"):
        list(stream.requests("file"))


def test_readers_share_what_was_read_and_a_fault_stays(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl.gz", *conversations())
    whole = list(open_trace(trace).requests())
    stream = open_stream(trace)
    one, two = stream.requests(), stream.requests()
    found = [next(one) for _ in range(6)]
    assert [next(two) for _ in range(8)] == whole[:8] and not stream.complete
    assert found + list(one) == whole and stream.complete and list(two) == whole[8:]
    assert stream.by_id("c9") == whole[9] == stream.by_row(9) and stream.notes == open_trace(trace).notes
    assert list(stream.requests()) == whole

    broken = write(tmp_path / "b.jsonl", *rows(9), {"arrival_s": 99})
    stream = open_stream(broken)
    for _ in range(2):
        with pytest.raises(BenchctlError, match="no prompt"):
            list(stream.requests())
    assert not stream.complete


def test_a_file_that_changes_while_it_is_read_is_said(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", *rows(9))
    stream = open_stream(trace)
    write(trace, *rows(10))
    with pytest.raises(BenchctlError, match="changed"):
        list(stream.requests())


def test_large_files_are_streamed_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, packed = write(tmp_path / "t.jsonl", *rows(99)), write(tmp_path / "t.jsonl.gz", *rows(900))
    assert not is_large(trace) and not is_large("traces/sharegpt.jsonl")
    monkeypatch.setattr(traces.streamed, "STREAM_BYTES", 3000)
    assert is_large(trace) and is_large(packed)
    base = options(trace, tmp_path / "out", schedulers=("nano",), validate_first=None)
    assert run_replay(base) == 0
    for more in ({"arrivals": "session"}, {"outputs": "sampled", "engine": "torch", "model": "tiny"}):
        from benchctl.sources import open_for

        assert open_for(replace(base, **more)).complete  # type: ignore[arg-type]
    assert not open_for(base).complete
    assert open_for(replace(base, validate_first=True)).complete


def test_a_full_disk_under_the_unpacked_copy_is_one_line(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    trace = write(tmp_path / "t.jsonl.gz", *rows(2000))
    with (
        open("/dev/full", "wb", buffering=1000) as full,
        pytest.raises(BenchctlError, match="unpacked copy cannot be written") as caught,
    ):  # noqa: PT012
        try:
            list(traces.scan.Scan(trace, skip_bad=False, strict=False, copy=full).rows())
        finally:
            full.raw.close()
    assert "No space left" in caught.value.what and caught.value.exit_code == 1
