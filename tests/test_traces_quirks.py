"""The quirks of real trace files, each with its stated behaviour and message. Rows have the shape of the public files; none is from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.test_traces_formats import imported, lengths, lines
from traces.errors import BenchctlError
from traces.formats.base import ImportOptions
from traces.importing import import_trace
from traces.info import describe
from traces.load import open_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"


def mooncake(*stamps: float, **more: Any) -> str:
    return lines(*({"timestamp": t, "input_length": 5, "output_length": 2, **more} for t in stamps))


# 1: CRLF, seven digits, no final line end
def test_azure_2023_loses_no_row_and_no_microsecond(tmp_path: Path) -> None:
    text = f"{AZURE}\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,109\r\n2023-11-16 19:14:08.4025270,879,55"
    _, trace, requests = imported(tmp_path, text)
    assert lengths(requests) == [(0.0, 374, 44), (4.314579, 396, 109), (3501.721937, 879, 55)]
    assert trace.header.time_origin == "2023-11-16T18:15:46.68059"  # naive, as in the file


# 2: mixed fractions, offsets, BOM
def test_azure_2024_reads_stamps_with_and_without_fraction_and_honours_offsets(tmp_path: Path) -> None:
    rows = [
        "2024-05-10 00:00:00+00:00,1,1",
        "2024-05-10 00:00:00.009930+00:00,2,2",
        "2024-05-09 20:00:01-04:00,3,3",
        "2024-05-10T00:00:02.5Z,4,4",
    ]
    _, trace, requests = imported(tmp_path, b"\xef\xbb\xbf" + "\n".join([AZURE, *rows]).encode())
    assert [r.arrival_s for r in requests] == [0.0, 0.00993, 1.0, 2.5]
    assert trace.header.time_origin == "2024-05-10T00:00:00+00:00"


@pytest.mark.parametrize(
    "stamp", ["", "2024-05-10", "2024-13-10 00:00:00", "2024-02-30 00:00:00", "2024-05-10 25:00:00", "yesterday"]
)
def test_a_time_that_is_none_is_named_with_its_line(tmp_path: Path, stamp: str) -> None:
    with pytest.raises(BenchctlError, match="TIMESTAMP is") as error:
        imported(tmp_path, f"{AZURE}\n2024-05-10 00:00:00,1,1\n{stamp},1,1\n")
    assert "line 3" in str(error.value)


# 3: two layouts, by name
def test_burstgpt_columns_are_found_by_name_in_any_order(tmp_path: Path) -> None:
    _, _, (one, two) = imported(
        tmp_path,
        "Response tokens,Log Type,Timestamp,Model,Request tokens\n18,API log,5,ChatGPT,472\n7,API log,45.0,GPT-4,9\n",
    )
    assert lengths([one, two]) == [(0.0, 472, 18), (40.0, 9, 7)]
    assert one.src == {"row": 0, "Log Type": "API log"}


# 4: failed requests
FAILURES = f"{BURST}\n0,GPT-4,10,5,15,API log\n10,GPT-4,10,0,10,API log\n20,GPT-4,0,5,5,API log\n30,GPT-4,-1,-1,-2,API log\n100,GPT-4,20,6,26,API log\n"


def test_failed_requests_are_left_out_counted_and_the_rates_told_apart(tmp_path: Path) -> None:
    report, trace, requests = imported(tmp_path, FAILURES)
    assert lengths(requests) == [(0.0, 10, 5), (100.0, 20, 6)]
    assert report.dropped == {"failed": 3}
    failed = trace.header.on_import["failed"]
    assert failed["arrivals_before"]["rate"] == 0.04 and failed["arrivals_after"]["rate"] == 0.01
    assert failed["arrivals_before"]["cv"] == pytest.approx(3**0.5 * 15 / 25, rel=1e-4)  # gaps 10, 10, 10, 70


def test_failed_requests_can_be_kept_as_one_or_be_an_error(tmp_path: Path) -> None:
    _, _, requests = imported(tmp_path, FAILURES, failed="keep-as-1")
    assert lengths(requests)[1:4] == [(10.0, 10, 1), (20.0, 1, 5), (30.0, 1, 1)]
    assert requests[3].observed == {"status": "failed", "input_length": -1, "output_length": -1}
    with pytest.raises(BenchctlError, match="a failed request: input 10, output 0") as error:
        imported(tmp_path, FAILURES, failed="error")
    assert "line 3" in str(error.value) and "--failed" in str(error.value)


# 5: ticking clocks
def test_ticks_are_warned_of_and_spread_inside_their_tick_only_on_request(tmp_path: Path) -> None:
    stamps = [t for tick in range(40) for t in [3000 * tick + tick % 3] * 10]
    report, _, plain = imported(tmp_path, mooncake(*stamps))
    assert any("--spread uniform" in text and "360 of 399 gaps" in text for text in report.warnings)
    _, trace, spread = imported(tmp_path, mooncake(*stamps), spread="uniform", seed=3)
    note = trace.header.on_import["spread"]
    assert note["kind"] == "uniform" and note["seed"] == 3 and note["zero_gaps_before"] == 360
    ticks = sorted(set(stamps))
    counts = [sum(t <= (r.arrival_s or 0) * 1000 < t + note["tick_s"] * 1000 for r in spread) for t in ticks]
    assert counts == [10] * 40 and len({r.arrival_s for r in spread}) == 400
    assert [r.src for r in spread] == [r.src for r in plain]  # file order stays
    assert [r.arrival_s for r in imported(tmp_path, mooncake(*stamps), spread="uniform", seed=3)[2]] == [
        r.arrival_s for r in spread
    ]


def test_equal_times_keep_file_order(tmp_path: Path) -> None:
    _, _, requests = imported(tmp_path, mooncake(5, 5, 5, 9))
    assert [(r.src or {})["row"] for r in requests] == [0, 1, 2, 3]


# 6: units
def test_an_unlikely_rate_is_warned_of_and_nothing_is_rescaled_silently(tmp_path: Path) -> None:
    report, _, requests = imported(tmp_path, mooncake(*(i / 10 for i in range(20))))
    assert requests[-1].arrival_s == pytest.approx(0.0019)
    assert any("--time-unit" in text for text in report.warnings)
    report, _, requests = imported(tmp_path, mooncake(*(i / 10 for i in range(20))), time_unit="s")
    assert requests[-1].arrival_s == 1.9 and report.warnings == []
    report, _, _ = imported(tmp_path, mooncake(*(7_200_000 * i for i in range(20))))
    assert any("0.000139 requests/s" in text for text in report.warnings)


def test_fractional_milliseconds_below_ten_look_like_seconds(tmp_path: Path) -> None:
    report, _, _ = imported(tmp_path, mooncake(*(i / 1.3 for i in range(13))))
    assert any("--time-unit s" in text for text in report.warnings)


# 7: descents
WEEK = [0, 100, 604_000, 5, 50]


def ragpulse(*stamps: int) -> str:
    row = {"input_length": 9, "output_length": 2, "hash_ids": {"sys_prompt": []}}
    return lines(*({"timestamp": str(t), "session_id": f"s{i}", **row} for i, t in enumerate(stamps))) + "\n"


def test_time_that_goes_back_stops_with_the_row_and_both_times(tmp_path: Path) -> None:
    with pytest.raises(BenchctlError, match="time goes back from 604000.000000 to 5.000000 s") as error:
        imported(tmp_path, ragpulse(*WEEK))
    assert "data row 3" in str(error.value) and "fold=SECONDS" in str(error.value)


def test_a_fold_adds_the_week_and_leaves_no_descent(tmp_path: Path) -> None:
    _, trace, requests = imported(tmp_path, ragpulse(*WEEK), on_descent="fold=604800")
    assert [r.arrival_s for r in requests] == [0, 100, 604_000, 604_805, 604_850]
    assert trace.header.on_import["descents"] == {"policy": "fold=604800", "count": 1}
    assert trace.in_time_order
    with pytest.raises(BenchctlError, match="after a fold of 10 s still"):
        imported(tmp_path, ragpulse(*WEEK), on_descent="fold=10")
    with pytest.raises(BenchctlError, match="--on-descent is 'wrap'"):
        imported(tmp_path, ragpulse(*WEEK), on_descent="wrap")


def test_sorting_is_allowed_and_stated(tmp_path: Path) -> None:
    _, trace, requests = imported(tmp_path, ragpulse(*WEEK), on_descent="sort")
    assert [r.arrival_s for r in requests] == [0, 5, 50, 100, 604_000]
    assert trace.header.on_import["sorted"] is True and trace.header.on_import["descents"]["count"] == 1


def test_small_descents_are_sorted_with_a_count_even_before_the_first_row(tmp_path: Path) -> None:
    _, trace, requests = imported(
        tmp_path, f"{AZURE}\n2024-05-10 00:00:00.5,1,1\n2024-05-10 00:00:00.2,2,2\n2024-05-10 00:00:01,3,3\n"
    )
    assert lengths(requests) == [(0.0, 2, 2), (0.3, 1, 1), (0.8, 3, 3)]
    assert trace.header.on_import["descents_below_1_s_sorted"] == 1
    assert trace.header.time_origin == "2024-05-10T00:00:00.2"


# 8: hash ids that do not mean the same thing
def bailian(chat: int, *ids: int) -> dict[str, Any]:
    return {"chat_id": chat, "parent_chat_id": -1, "timestamp": chat, "input_length": 16 * len(ids), "output_length": 1, "type": "text", "turn": 1, "hash_ids": list(ids)}  # fmt: skip


def test_content_ids_hit_only_as_a_leading_run_of_the_same_prefix(tmp_path: Path) -> None:
    rows = [bailian(1, 5, 6, 7), bailian(2, 9, 6, 7), bailian(3, 5, 6, 8), bailian(4, 6)]
    _, trace, _ = imported(tmp_path, lines(*rows))
    use = describe(trace).prefix
    assert use is not None and (use.blocks_hit, use.blocks) == (2, 10)  # row 3's first two, and no others


def test_ids_of_another_session_are_other_text(tmp_path: Path) -> None:
    call = {"t": 0.0, "type": "n", "in": 64, "out": 1, "hash_ids": [1]}
    sessions = [
        {"id": name, "block_size": 64, "hash_id_scope": "local", "requests": [call, {**call, "t": 1.0}]}
        for name in "ab"
    ]
    _, trace, _ = imported(tmp_path, lines(*sessions), request_rate=10.0)
    use = describe(trace).prefix
    assert use is not None and (use.blocks_hit, use.blocks) == (2, 4)


def test_if_all_rows_fail_the_block_size_that_fits_is_named(tmp_path: Path) -> None:
    rows = [{"timestamp": i, "input_length": 100 + i, "output_length": 1, "hash_ids": list(range(7))} for i in range(3)]
    with pytest.raises(BenchctlError, match="blocks of 16 fit all 3") as error:
        imported(tmp_path, lines(*rows))
    assert "--block-size 16" in str(error.value)
    _, trace, _ = imported(tmp_path, lines(*rows), block_size=16)
    assert trace.header.block_size == 16


def test_if_some_rows_fail_their_lines_are_listed(tmp_path: Path) -> None:
    rows = [
        {"timestamp": i, "input_length": 512, "output_length": 1, "hash_ids": [1] if i % 2 else [1, 2]}
        for i in range(4)
    ]
    with pytest.raises(BenchctlError, match=r"line 1, 3\)"):
        imported(tmp_path, lines(*rows))
    report, _, requests = imported(tmp_path, lines(*rows), skip_bad=True)
    assert report.dropped["bad"] == 2 and len(requests) == 2


def test_empty_hash_ids_are_unique_and_counted(tmp_path: Path) -> None:
    report, _, requests = imported(tmp_path, mooncake(0, 1, hash_ids=[]))
    assert requests[0].hash_ids is None
    assert report.counts["rows with empty hash_ids: their tokens are unique"] == 2


# 9: lengths beyond the model, or nonsense
def test_lengths_beyond_the_model_are_told_before_anything_runs(tmp_path: Path) -> None:
    _, trace, _ = imported(
        tmp_path,
        lines(
            {"timestamp": 0, "input_length": 5000, "output_length": 32768},
            {"timestamp": 1, "input_length": 10, "output_length": 9},
        ),
    )
    (warning,) = [w for w in describe(trace, max_model_len=4096).warnings if "4096" in w.what]
    assert "1 prompts, the largest of 5000 tokens" in warning.evidence


@pytest.mark.parametrize("length", [2**61, 10**40, 1e300, "13", True, [], 1.5])
def test_a_nonsense_length_is_a_fault_with_its_line(tmp_path: Path, length: Any) -> None:
    with pytest.raises(BenchctlError) as error:
        imported(tmp_path, lines({"timestamp": 0, "input_length": length, "output_length": 1}))
    assert "line 1" in str(error.value)


def test_a_huge_claim_allocates_nothing(tmp_path: Path) -> None:
    _, trace, (one,) = imported(tmp_path, lines({"timestamp": 0, "input_length": 10**9, "output_length": 10**9}))
    assert one.input_length == 10**9
    assert describe(trace).lengths["input"]["mean"] == 1e9


# 10: damaged or fake files
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
        (b"", "the file is empty"),
        (b"PAR1\x00\x00", "Parquet"),
        (b"\xff\xfea\x00", "UTF-16"),
        (b"\x00\x01\x02", "binary"),
        (b"\x1f\x8b\x08\x00cut", "gzip"),
        (f"{AZURE}\n2024-05-10 00:00:00,1\n".encode(), "2 columns, the first line has 3"),
        (f"{AZURE}\n2024-05-10 00:00:00,NaN,3\n2024-05-10 00:00:00,x,3\n".encode(), "no length of the prompt"),
        (f"{AZURE}\n2024-05-10 00:00:00,\xff,3\n".encode("latin-1"), "not UTF-8"),
        (b'{"timestamp": 0, "input_length": 5, "output_length": 1}\n{"timestamp": 1, "inp', "the last line is cut off"),
        (b'{"timestamp": NaN, "input_length": 5, "output_length": 1}\n{"timestamp": 1, "input_length": 5, "output_length": 1}\n', "not JSON"),
        (b'{"timestamp": 0, "input_length": 5, "output_length": null}\n', "no output length"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_said_to_be_one(tmp_path: Path, content: bytes, said: str) -> None:
    with pytest.raises(BenchctlError, match=said):
        imported(tmp_path, content)
    assert not (tmp_path / "out.jsonl").exists()


def test_skip_bad_counts_and_shows_the_lines(tmp_path: Path) -> None:
    text = f"{AZURE}\n2024-05-10 00:00:00,5.0,3\n\nbroken,1,1\n2024-05-10 00:00:01,7,2\n2024-05-10 00:0"
    report, trace, requests = imported(tmp_path, text, skip_bad=True)
    assert lengths(requests) == [(0.0, 5, 3), (1.0, 7, 2)]
    assert report.dropped["bad"] == 2 and report.examples[0].startswith("line 4:")
    assert trace.header.on_import["dropped"] == {"bad": 2}


def test_ids_used_twice_are_renamed_and_counted(tmp_path: Path) -> None:
    row = "0,2,0,{},1,40,3\n"
    report, _, requests = imported(
        tmp_path,
        "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n"
        + row.format(1)
        + row.format(2),
    )
    assert [r.id for r in requests] == ["0", "0-2"] and report.counts["ids used twice, renamed"] == 1


def test_a_time_in_a_text_is_taken_only_where_the_format_writes_it_so(tmp_path: Path) -> None:
    with pytest.raises(BenchctlError, match="timestamp must be a number, got the text '82'"):
        imported(tmp_path, lines({"timestamp": "82", "input_length": 5, "output_length": 1}))


def test_a_limit_is_kept_inside_a_conversation_too(tmp_path: Path) -> None:
    chat = {"id": "a", "conversations": [{"from": who, "value": "x" * 8} for who in ("human", "gpt") * 5]}
    assert len(imported(tmp_path, json.dumps([chat]), limit=3)[2]) == 3


def test_another_format_is_pointed_to_the_import(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"{AZURE}\n2024-05-10 00:00:00,1,1\n")
    with pytest.raises(BenchctlError, match="not JSON") as error:
        open_trace(tmp_path / "a.csv")
    assert "benchctl trace import" in str(error.value)


def test_a_missing_output_is_the_users_to_give(tmp_path: Path) -> None:
    text = lines({"request_id": "a", "type": "x", "input_length": 17, "hash_ids": [1, 2]})
    with pytest.raises(BenchctlError, match="no output length") as error:
        imported(tmp_path, text)
    assert "--output-length" in str(error.value)
    assert imported(tmp_path, text, output_length=64)[2][0].output_length == 64


def chats(count: int) -> list[dict[str, Any]]:
    return [
        {"id": f"c{i}", "conversations": [{"from": "human", "value": "q" * 40}, {"from": "gpt", "value": "a" * 400}]}
        for i in range(count)
    ]


def test_a_truncated_array_gives_its_whole_entries_or_the_byte_where_it_breaks(tmp_path: Path) -> None:
    whole = json.dumps(chats(300)).encode()
    cut = whole[: len(whole) * 2 // 3]
    with pytest.raises(BenchctlError, match=rf"cut off at byte {len(cut)}, after \d+ whole entries"):
        imported(tmp_path, cut)
    report, _, requests = imported(tmp_path, cut, skip_bad=True)
    assert len(requests) == cut.count(b'"id"') - 1 and report.dropped["bad"] == 1


def test_an_array_broken_in_the_middle_names_the_byte(tmp_path: Path) -> None:
    whole = json.dumps(chats(1000)).encode()
    at = whole.index(b'"id": "c700"')
    broken = whole[:at] + b"\x01" + whole[at:]
    with pytest.raises(BenchctlError, match=f"breaks at byte {at}, after 700 whole entries"):
        imported(tmp_path, broken)


def test_an_array_is_streamed_not_held(tmp_path: Path) -> None:
    import resource

    source = tmp_path / "big.json"
    with open(source, "w") as out:
        out.write("[")
        for i in range(40):
            out.write(("," if i else "") + json.dumps({"id": f"c{i}", "conversations": [{"from": "human", "value": "q" * 1_000_000}, {"from": "gpt", "value": "a" * 1_000_000}]}))  # fmt: skip
        out.write("]")
    from traces.formats.base import ImportOptions
    from traces.importing import import_trace

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = import_trace(source, tmp_path / "out.jsonl", ImportOptions())
    assert report.num_requests == 40
    # 80 MB of text; what is held is one entry and a chunk.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40_000


def test_the_target_is_never_the_source(tmp_path: Path) -> None:
    from traces.formats.base import ImportOptions
    from traces.importing import import_trace

    (tmp_path / "a.jsonl").write_text(mooncake(1))
    with pytest.raises(BenchctlError, match="the file to write is the file to read"):
        import_trace(tmp_path / "a.jsonl", tmp_path / "a.jsonl", ImportOptions())
    assert open_trace(tmp_path / "a.jsonl").num_requests == 1


def test_a_quote_that_is_not_closed_costs_its_own_line_only(tmp_path: Path) -> None:
    rows = [f"2024-05-10 00:00:{i:02d}+00:00,{10 + i},5" for i in range(30)]
    rows[7] = '2024-05-10 00:00:07+00:00,"17,5'
    rows[29] = '2024-05-10 00:00:29+00:00,39,"5'  # as many columns as it should have
    source = tmp_path / "t.csv"
    source.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows))
    with pytest.raises(BenchctlError, match="a quote is opened and not closed") as caught:
        import_trace(source, tmp_path / "out.jsonl", ImportOptions())
    assert caught.value.where is not None and caught.value.where.endswith("line 9")
    report = import_trace(source, tmp_path / "out.jsonl", ImportOptions(skip_bad=True))
    assert report.num_requests == 28 and report.dropped["bad"] == 2
    assert report.examples == [f"line {line}: a quote is opened and not closed" for line in (9, 31)]


def test_a_field_of_a_log_may_hold_line_ends(tmp_path: Path) -> None:
    source = tmp_path / "log.csv"
    source.write_bytes(b'ts,prompt,n\r\n1,"two\nlines, ""quoted""",5\r\n2,one,6\r\n3,x,"7\n8,y,9\n')
    columns = {"arrival": "ts", "prompt": "prompt", "output": "n"}
    report = import_trace(source, tmp_path / "out.jsonl", ImportOptions(columns=columns, skip_bad=True))
    rows = list(open_trace(tmp_path / "out.jsonl").requests())
    assert [r.prompt for r in rows] == ['two\nlines, "quoted"', "one", "y"]
    assert report.examples == ["line 5: a quote is opened and not closed"]


@pytest.mark.parametrize("size", ["{}", "-5", "1e30", "[64]"])
def test_a_head_that_a_format_cannot_use_is_said(tmp_path: Path, size: str) -> None:
    source = tmp_path / "w.jsonl"
    source.write_text(lines({"id": "t", "hash_id_scope": "local", "requests": [], "block_size": json.loads(size)}))
    with pytest.raises(BenchctlError) as caught:
        import_trace(source, tmp_path / "out.jsonl", ImportOptions())
    assert caught.value.where == f"{source}, at its start" and "\n" not in caught.value.what


def test_times_far_apart_are_shifted_to_zero_whatever_floats_round(tmp_path: Path) -> None:
    stamps = ("99999999999.123456789", "3.000000001", "5")
    text = f"{BURST}\n" + "".join(f"{at},GPT-4,10,5,15,API log\n" for at in stamps)
    _, _, requests = imported(tmp_path, text, on_descent="sort")
    assert requests[0].arrival_s == 0 and requests[1].arrival_s == pytest.approx(2, abs=1e-4)
