"""Sort, slice, scale, merge, shuffle, validate, export: what stays, what is said, and that what is written is a valid trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import write_trace
from traces.errors import BenchctlError
from traces.exporting import export_trace
from traces.formats.base import ImportOptions
from traces.importing import import_trace
from traces.info import describe
from traces.load import Trace, open_trace
from traces.merging import merge_traces
from traces.request import Carry, Request, Segment
from traces.rows import from_request
from traces.transform import SliceOptions, factor_for_rate, scale_trace, shuffle_arrivals, slice_trace, sort_trace
from traces.validation import validate


def plain(id: str, at: float, size: int = 10, output: int = 2, **more: Any) -> dict[str, Any]:
    return {"id": id, "arrival_s": at, "input_length": size, "output_length": output, **more}


CHAT = [
    plain("a1", 0.0, 10, 5, session="a", turn=1),
    plain("b1", 1.0, 20, 5, session="b", turn=1),
    plain("x", 2.0, 600, 1),
    plain("a2", 4.0, 25, 5, session="a", turn=2, parents=["a1"], think_s=1.5, carry={"from": "a1", "tokens": 15}),
    plain("a3", 9.0, 40, 5, session="a", turn=3, parents=["a2"], think_s=2.0, carry={"from": "a2", "tokens": 30}),
]


@pytest.fixture
def chat(tmp_path: Path) -> Trace:
    return open_trace(write_trace(tmp_path / "chat.jsonl", CHAT, name="chat", time_origin="2026-01-01T00:00:00+00:00"))


def reread(path: Path) -> list[Request]:
    return list(open_trace(path, strict=True).requests())


def changes(path: Path) -> list[dict[str, Any]]:
    on_import = open_trace(path).header.on_import
    return list(on_import["changes"])


def test_a_window_begins_anew_where_parents_are_left_out(tmp_path: Path, chat: Trace) -> None:
    change = slice_trace(chat, tmp_path / "s.jsonl", SliceOptions(start_s=1.0, end_s=9.0))
    rows = reread(tmp_path / "s.jsonl")
    assert [(r.id, r.arrival_s) for r in rows] == [("b1", 0.0), ("x", 1.0), ("a2", 3.0)]
    assert (rows[2].parents, rows[2].carry, rows[2].input_length) == ((), None, 25)
    assert change.counts["left out, before the window"] == 1 and change.counts["left out, after the window"] == 1
    assert change.counts["rows that begin anew: a parent was left out"] == 1
    assert open_trace(tmp_path / "s.jsonl").header.time_origin == "2026-01-01T00:00:01+00:00"
    assert changes(tmp_path / "s.jsonl")[0]["slice"] == {"start_s": 1.0, "end_s": 9.0, "rebase": True}


def test_a_session_is_thinned_whole_or_not_at_all(tmp_path: Path) -> None:
    rows = [plain(f"s{s}-{t}", t + s / 100, session=f"s{s}", turn=t + 1) for t in range(3) for s in range(300)]
    trace = open_trace(write_trace(tmp_path / "many.jsonl", rows))
    slice_trace(trace, tmp_path / "out.jsonl", SliceOptions(keep_share=0.25, seed=5))
    kept = [r.session for r in reread(tmp_path / "out.jsonl")]
    assert all(kept.count(session) == 3 for session in set(kept)) and 50 <= len(set(kept)) <= 100
    again = slice_trace(trace, tmp_path / "again.jsonl", SliceOptions(keep_share=0.25, seed=5))
    assert again.num_requests == len(kept)


def test_lengths_sessions_and_first_n_select(tmp_path: Path, chat: Trace) -> None:
    def ids(**options: Any) -> list[str]:
        slice_trace(chat, tmp_path / "s.jsonl", SliceOptions(rebase=False, **options))
        return [r.id for r in reread(tmp_path / "s.jsonl")]

    assert ids(first=2) == ["a1", "b1"]
    assert ids(sessions=("a",)) == ["a1", "a2", "a3"]
    assert ids(input_range=(20, 40)) == ["b1", "a2", "a3"]
    assert ids(output_range=(None, 1)) == ["x"]
    assert ids(max_model_len=41) == ["a1", "b1", "a2", "a3"]
    with pytest.raises(BenchctlError, match="no request is left"):
        ids(input_range=(10_000, None))


def test_truncation_keeps_leading_tokens_and_what_they_share(tmp_path: Path) -> None:
    rows = [
        plain("h", 0.0, 1100, hash_ids=[1, 2, 3]),
        plain("h2", 1.0, 1200, hash_ids=[1, 2, 4]),
        plain("g", 2.0, 900, segments=[{"id": "s", "len": 500}, {"id": "t", "len": 300}]),
        plain("c", 3.0, 1000, 10),
        plain("c2", 4.0, 1500, 10, carry={"from": "c", "tokens": 1010}),
    ]
    trace = open_trace(write_trace(tmp_path / "t.jsonl", rows))
    change = slice_trace(trace, tmp_path / "s.jsonl", SliceOptions(max_model_len=601, over_length="truncate"))
    h, h2, g, c, c2 = reread(tmp_path / "s.jsonl")
    assert [r.input_length for r in (h, h2, g, c, c2)] == [600] * 5
    assert h.hash_ids == h2.hash_ids == (1, 2)
    assert g.segments == (Segment("s", 500), Segment("t", 100))
    assert c2.carry == Carry("c", 600)
    assert change.counts["prompts cut to max_model_len - 1"] == 5


def test_scaling_is_one_factor_on_gaps_and_think_times(tmp_path: Path, chat: Trace) -> None:
    change = scale_trace(chat, tmp_path / "s.jsonl", 0.5)
    rows = reread(tmp_path / "s.jsonl")
    assert [r.arrival_s for r in rows] == [0.0, 0.5, 1.0, 2.0, 4.5] and rows[3].think_s == 0.75
    assert change.span_s == 4.5
    assert factor_for_rate(chat, 2.0) == pytest.approx(4 / 9 / 2)
    assert changes(tmp_path / "s.jsonl")[0]["scale"] == {"gaps_times": 0.5, "span_before_s": 9.0}


def test_merging_sets_traces_to_their_origins_and_keeps_their_ids_apart(tmp_path: Path, chat: Trace) -> None:
    other = open_trace(
        write_trace(
            tmp_path / "o.jsonl",
            [plain("a1", 0.0, 600, hash_ids=[7, 8]), plain("q", 5.0, session="a", segments=[{"id": 1, "len": 4}])],
            name="other", time_origin="2026-01-01T00:00:03+00:00",
        )
    )  # fmt: skip
    merge_traces([chat, other], tmp_path / "m.jsonl", None)
    rows = reread(tmp_path / "m.jsonl")
    assert [(r.id, r.arrival_s) for r in rows] == [
        ("chat/a1", 0.0), ("chat/b1", 1.0), ("chat/x", 2.0), ("other/a1", 3.0), ("chat/a2", 4.0), ("other/q", 8.0), ("chat/a3", 9.0),
    ]  # fmt: skip
    assert rows[4].parents == ("chat/a1",) and rows[4].carry == Carry("chat/a1", 15)
    assert rows[3].hash_ids == ("other/7", "other/8") and rows[5].session == "other/a"
    merge_traces([chat, other], tmp_path / "m.jsonl", "start")
    assert [r.arrival_s for r in reread(tmp_path / "m.jsonl")] == [0.0, 0.0, 1.0, 2.0, 4.0, 5.0, 9.0]
    unset = open_trace(write_trace(tmp_path / "u.jsonl", [plain("z", 0.0)]))
    with pytest.raises(BenchctlError, match="some of the traces have a time_origin"):
        merge_traces([chat, unset], tmp_path / "m.jsonl", None)


def test_merged_traces_share_nothing_and_lose_nothing(tmp_path: Path) -> None:
    rows = [plain(f"r{i}", float(i), 1024, hash_ids=[1, 2]) for i in range(2)]
    one = open_trace(write_trace(tmp_path / "a.jsonl", rows, name="a"))
    two = open_trace(write_trace(tmp_path / "b.jsonl", rows, name="a"))
    merge_traces([one, two], tmp_path / "m.jsonl", "start")
    use = describe(open_trace(tmp_path / "m.jsonl")).prefix
    assert use is not None and (use.blocks_hit, use.blocks) == (4, 8)


def test_shuffling_keeps_the_process_and_a_sessions_own_gaps(tmp_path: Path, chat: Trace) -> None:
    shuffle_arrivals(chat, tmp_path / "s.jsonl", 3)
    rows = reread(tmp_path / "s.jsonl")
    starts = sorted(r.arrival_s or 0 for r in rows if r.id in ("a1", "b1", "x"))
    assert starts == [0.0, 1.0, 2.0]
    at = {r.id: r.arrival_s or 0 for r in rows}
    assert (at["a2"] - at["a1"], at["a3"] - at["a1"]) == (4.0, 9.0)
    seen = {tuple(r.id for r in _shuffled(chat, tmp_path, seed)) for seed in range(8)}
    assert len(seen) > 1


def _shuffled(trace: Trace, tmp_path: Path, seed: int) -> list[Request]:
    shuffle_arrivals(trace, tmp_path / "x.jsonl", seed)
    return reread(tmp_path / "x.jsonl")


def test_sorting_streams_in_runs_and_is_stable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traces.writing.SORT_ROWS", 7)
    rows = [plain(f"r{i}", float((i * 37) % 50 // 2)) for i in range(200)]
    path = write_trace(tmp_path / "u.jsonl", rows)
    change = sort_trace(open_trace(path, any_order=True), tmp_path / "s.jsonl")
    assert [r.id for r in reread(tmp_path / "s.jsonl")] == [
        row["id"] for row in sorted(rows, key=lambda row: row["arrival_s"])
    ]
    assert change.num_requests == 200 and open_trace(tmp_path / "s.jsonl").in_time_order


def test_a_file_too_large_to_sort_on_load_is_sorted_by_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traces.load.MAX_SORT_BYTES", 10)
    path = write_trace(tmp_path / "u.jsonl", [plain("b", 1.0), plain("a", 0.0)])
    with pytest.raises(BenchctlError, match="trace sort"):
        open_trace(path)
    sort_trace(open_trace(path, any_order=True), tmp_path / "s.jsonl")
    assert [r.id for r in reread(tmp_path / "s.jsonl")] == ["a", "b"]


def test_sorting_refuses_to_put_a_row_before_its_parent(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "u.jsonl", [plain("p", 5.0), plain("c", 1.0, parents=["p"], think_s=0.1)])
    with pytest.raises(BenchctlError, match='"c" arrives at 1 s, before its parent "p" at 5 s'):
        sort_trace(open_trace(path, any_order=True), tmp_path / "s.jsonl")


def test_validate_lists_every_fault(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(
        '{"input_length": 5, "output_length": 1}\n{"input_length": 0, "output_length": 1}\nnope\n{"id": "a", "input_length": 5}\n'
    )
    found = validate(path)
    assert [(fault.line, fault.key) for fault in found.faults] == [(2, "input_length"), (3, None), (4, None)]
    assert found.num_requests == 1 and found.sha256 is None
    path.write_text("{}\n[]\n")
    assert [fault.line for fault in validate(path).faults] == [1, 2]
    with pytest.raises(BenchctlError, match="no such trace"):
        validate(tmp_path / "none")


MOONCAKE = "".join(
    json.dumps(row) + "\n"
    for row in (
        {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]},
        {"timestamp": 27, "input_length": 512, "output_length": 5, "hash_ids": [0]},
        {"timestamp": 2999, "input_length": 1030, "output_length": 1, "hash_ids": [0, 2, 3]},
    )
)


def test_mooncake_round_trips_value_for_value(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text(MOONCAKE)
    import_trace(tmp_path / "m.jsonl", tmp_path / "c.jsonl", ImportOptions())
    export_trace(open_trace(tmp_path / "c.jsonl"), tmp_path / "back.jsonl", "mooncake")
    assert (tmp_path / "back.jsonl").read_text() == MOONCAKE
    export_trace(open_trace(tmp_path / "m.jsonl"), tmp_path / "raw.jsonl", "mooncake")
    assert (tmp_path / "raw.jsonl").read_text() == MOONCAKE


def test_vllm_custom_round_trips(tmp_path: Path) -> None:
    text = "".join(
        json.dumps(row) + "\n"
        for row in ({"prompt": "hello", "output_tokens": 3}, {"prompt": [5, 6, 7], "output_tokens": 1, "tag": "x"})
    )
    (tmp_path / "v.jsonl").write_text(text)
    import_trace(tmp_path / "v.jsonl", tmp_path / "c.jsonl", ImportOptions())
    report = export_trace(open_trace(tmp_path / "c.jsonl"), tmp_path / "back.jsonl", "vllm-custom")
    assert (tmp_path / "back.jsonl").read_text() == text
    assert (
        report.left_out["arrival_s"] == 1
    )  # the first arrives at 0, the second has a time that the format cannot hold


def test_canonical_round_trips_to_the_same_requests_and_hash(tmp_path: Path, chat: Trace) -> None:
    export_trace(chat, tmp_path / "e.jsonl.gz", "canonical")
    import_trace(tmp_path / "e.jsonl.gz", tmp_path / "i.jsonl", ImportOptions())
    assert open_trace(tmp_path / "e.jsonl.gz").sha256 == open_trace(tmp_path / "i.jsonl").sha256 == chat.sha256
    assert [from_request(r) for r in reread(tmp_path / "i.jsonl")] == [from_request(r) for r in chat.requests()]


def test_made_hash_ids_share_what_tokens_share(tmp_path: Path, chat: Trace) -> None:
    export_trace(chat, tmp_path / "m.jsonl", "mooncake", block_size=5)
    rows = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    a2, a3 = rows[3], rows[4]
    assert len(a2["hash_ids"]) == 5 and len(a3["hash_ids"]) == 8
    assert a3["hash_ids"][:5] == a2["hash_ids"] and a3["hash_ids"][5] != a2["hash_ids"][4]
    assert (a2["delay"], a2["session_id"], a2["timestamp"]) == (1500, "a", 4000)
    with pytest.raises(BenchctlError, match="has a length and no text"):
        export_trace(chat, tmp_path / "v.jsonl", "vllm-custom")
    export_trace(chat, tmp_path / "v.jsonl", "vllm-custom", vocab_size=1000)
    assert len(json.loads((tmp_path / "v.jsonl").read_text().splitlines()[0])["prompt"]) == 10


def test_origins_without_a_zone_merge_among_themselves_only(tmp_path: Path) -> None:
    row = {"arrival_s": 0.0, "input_length": 4, "output_length": 1}
    origins = {"a": "2023-11-16T18:15:46.68059", "b": "2023-11-16T18:15:48", "c": "2023-11-16T18:15:47+00:00"}
    found = {
        name: open_trace(write_trace(tmp_path / f"{name}.jsonl", [row], name=name, time_origin=origin))
        for name, origin in origins.items()
    }
    merge_traces([found["b"], found["a"]], tmp_path / "m.jsonl", None)
    merged = open_trace(tmp_path / "m.jsonl")
    assert merged.header.time_origin == origins["a"] and merged.span_s == pytest.approx(1.31941)
    with pytest.raises(BenchctlError, match="says no time zone, another one does"):
        merge_traces([found["c"], found["a"]], tmp_path / "n.jsonl", None)
    merge_traces([found["c"], found["a"]], tmp_path / "n.jsonl", "start")
