"""Each source format from a few rows of its shape: told from its content, read by its own rules. Numbers can be checked by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from traces.errors import BenchctlError
from traces.formats import FORMATS, find_format
from traces.formats.base import ImportOptions
from traces.formats.records import take_sample
from traces.importing import ImportReport, import_trace
from traces.load import Trace, open_trace
from traces.request import Carry, Request, Segment
from traces.rows import RULES


def imported(tmp_path: Path, content: str | bytes, **options: Any) -> tuple[ImportReport, Trace, list[Request]]:
    """Import `content` and open what came of it, strictly: whatever an import writes is a valid trace."""
    source = tmp_path / "source"
    source.write_bytes(content if isinstance(content, bytes) else content.encode())
    report = import_trace(source, tmp_path / "out.jsonl", ImportOptions(**options))
    trace = open_trace(tmp_path / "out.jsonl", strict=True)
    return report, trace, list(trace.requests())


def lines(*records: dict[str, Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def lengths(requests: list[Request]) -> list[tuple[float | None, int | None, int | None]]:
    return [(r.arrival_s, r.input_length, r.output_length) for r in requests]


RAGPULSE = {
    "timestamp": "82",
    "input_length": 100,
    "output_length": 7,
    "hash_ids": {"sys_prompt": [1, 2], "passages_ids": [9], "history": [], "web_search": [], "user_input": [5]},
    "session_id": "s",
}
SPAN = {"trace_id": "t", "span_id": "a", "start_time": "2026-02-25T10:00:00Z", "end_time": "2026-02-25T10:00:02Z"}
CHAT = {"gen_ai.operation.name": "chat", "gen_ai.usage.input_tokens": 10, "gen_ai.usage.output_tokens": 3}
SAMPLES: dict[str, str] = {
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44",
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n",
    "vidur": "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374,44\n",
    "lengths": "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n74,918,992,0.08\n",
    "splitwise-sim": "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n0,2,0,1,1,4096,32\n",
    "mooncake": lines({"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}),
    "bailian": lines({"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 17, "output_length": 2, "type": "text", "turn": 1, "hash_ids": [4, 5]}),
    "ragpulse": lines(RAGPULSE),
    "servegen-offline": lines({"request_id": "a", "type": "x", "input_length": 17, "output_length": 2, "hash_ids": [1, 2]}),
    "sharegpt": json.dumps([{"id": "a_0", "conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]}]),
    "vllm-custom": lines({"prompt": "hello there", "output_tokens": 9}),
    "aiperf": lines({"text": "hello", "output_length": 4, "timestamp": 100}),
    "openai": lines({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}}),
    "llmservingsim": lines({"input_toks": 3, "output_toks": 2, "arrival_time_ns": 5, "input_tok_ids": [1, 2, 3]}),
    "aibrix": lines({"timestamp": 1000, "requests": [{"prompt": "x", "prompt_length": 4, "output_length": 3}]}),
    "otel": json.dumps({"trace_id": "t", "spans": [{**SPAN, "attributes": CHAT}]}, indent=1),
    "copilot": lines({"session_id": "s", "turns": [{"turn_id": 1, "llm_calls": [{"message_id": "m", "timestamp": "2026-01-01T00:00:00Z", "tokens": {"prompt": 9, "completion": 2}}]}]}),
    "weka": json.dumps({"id": "t1", "block_size": 64, "hash_id_scope": "local", "requests": [{"t": 0.0, "type": "n", "in": 70, "out": 3, "hash_ids": [1, 2]}]}),
    "chats": lines({"conversation_id": "c", "model": "m", "conversation": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}),
    "canonical": lines({"benchctl_trace": 1, "name": "n"}, {"arrival_s": 0.5, "input_length": 4, "output_length": 2}),
    "sglang-agentic": json.dumps({"metadata": {}, "conversations": [[{"messages": [{"role": "user", "content": "go on"}], "prompt_tokens": 50}]]}),
    "payloads": json.dumps({"data": [{"session_id": "s", "payloads": [{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}]}]}),
    "servegen-clients": "0,1.5,1.1,Gamma,0.75,0.015\n",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_a_format_is_told_from_its_content(tmp_path: Path, name: str) -> None:
    (tmp_path / "x").write_text(SAMPLES[name])
    assert find_format(take_sample(tmp_path / "x"), None).name == name


def test_every_format_has_a_sample_here_but_the_one_that_only_a_flag_chooses() -> None:
    assert set(FORMATS) - {"mapped"} == set(SAMPLES)


@pytest.mark.parametrize("name", sorted(set(SAMPLES) - {"servegen-clients"}))
def test_every_format_imports_its_sample_packed_or_not(tmp_path: Path, name: str) -> None:
    plain = imported(tmp_path, SAMPLES[name])
    packed = imported(tmp_path, gzip.compress(SAMPLES[name].encode()))
    assert plain[0].num_requests == len(plain[2]) == 1
    assert [r.output_length for r in plain[2]] == [r.output_length for r in packed[2]]


def test_an_unknown_header_is_refused_with_what_was_seen(tmp_path: Path) -> None:
    with pytest.raises(BenchctlError, match="no known format has these columns: when, size"):
        imported(tmp_path, "when,size\n1,2\n")
    with pytest.raises(BenchctlError, match="no known format has these keys: a, b"):
        imported(tmp_path, lines({"a": 1, "b": 2}))


def test_burstgpt_turns_follow_each_other_and_carry_only_what_fits(tmp_path: Path) -> None:
    head = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    rows = "100.0,s,10,GPT-4,50,20,70,Conversation log\n130.0,s,5,GPT-4,90,9,99,Conversation log\n140.0,,3,ChatGPT,8,2,10,API log\n150.0,s,1,GPT-4,60,3,63,Conversation log\n"
    report, trace, (one, two, api, three) = imported(tmp_path, head + rows)
    assert lengths([one, two, api, three]) == [(0.0, 50, 20), (30.0, 90, 9), (40.0, 8, 2), (50.0, 60, 3)]
    assert (two.parents, two.think_s, two.carry) == ((one.id,), 20.0, Carry(one.id, 70))
    assert (api.session, api.parents) == (None, ())
    assert (three.parents, three.think_s, three.carry) == ((two.id,), 15.0, None)  # 60 < 90 + 9
    assert one.observed == {"e2e_s": 10.0} and one.model == "GPT-4"
    assert trace.header.on_import["time_offset_s"] == 100.0


def test_bailian_children_belong_to_their_root_and_a_missing_parent_makes_one(tmp_path: Path) -> None:
    def row(chat: int, parent: int, **more: Any) -> dict[str, Any]:
        return {"chat_id": chat, "parent_chat_id": parent, "timestamp": chat / 4, "input_length": 16, "output_length": 2, "type": "image", "turn": 1, "hash_ids": [chat], **more}  # fmt: skip

    report, trace, (a, b, c) = imported(tmp_path, lines(row(1, -1), row(2, 1), row(3, 77)))
    assert (a.session, b.session, c.session) == ("1", "1", "3")
    assert (b.parents, c.parents) == (("1",), ())
    assert (trace.header.block_size, trace.header.hash_kind) == (16, "content")
    assert a.src is not None and a.src["type"] == "image" and a.media
    assert report.counts["parents that are not in the file: the row is a root"] == 1


def test_ragpulse_prompts_are_their_components_in_order_with_a_unique_rest(tmp_path: Path) -> None:
    side = tmp_path / "lengths.csv"
    side.write_text("component,id,token_length\nsys_prompt,1,30\nsys_prompt,2,20\npassages_ids,9,40\nuser_input,5,4\n")
    _, _, (one,) = imported(tmp_path, lines(RAGPULSE), side_files=(side,))
    assert one.arrival_s == 0.0 and one.input_length == 100
    assert one.segments == (
        Segment("sys_prompt 1", 30), Segment("sys_prompt 2", 20), Segment("passages_ids 9", 40), Segment("user_input 5", 4),
    )  # fmt: skip
    with pytest.raises(BenchctlError, match="no length of passages_ids 8"):
        imported(tmp_path, lines({**RAGPULSE, "hash_ids": {"passages_ids": [8]}}), side_files=(side,))
    report, _, (plain,) = imported(tmp_path, lines(RAGPULSE))
    assert plain.segments is None and "--with" in report.warnings[0]


def test_sharegpt_answers_are_requests_that_carry_what_was_said(tmp_path: Path) -> None:
    chats = [
        {"id": "a_0", "conversations": [{"from": "human", "value": "x" * 40}, {"from": "gpt", "value": "y" * 80}, {"from": "human", "value": "z" * 20}, {"from": "gpt", "value": "w" * 12}]},
        {"id": "a_0", "conversations": [{"from": "gpt", "value": "a" * 8}, {"from": "human", "value": "b" * 8}, {"from": "chatgpt", "value": "c" * 4}]},
        {"id": "c", "conversations": [{"from": "human", "value": "alone"}]},
        {"id": "d", "conversations": []},
        {"id": "e", "conversations": [{"from": "human", "value": "q" * 4}, {"from": "gpt", "value": ""}]},
        {"id": "f", "items": [{"from": "human", "value": "q" * 4}, {"from": "gpt", "value": "r" * 4}]},
    ]  # fmt: skip
    report, trace, requests = imported(tmp_path, json.dumps(chats), request_rate=100.0)
    by_id = {request.id: request for request in requests}
    # A token is four characters without a tokenizer: 10 + 20 + 5 + 3.
    assert (by_id["a_0-t1"].input_length, by_id["a_0-t1"].output_length) == (10, 20)
    assert (by_id["a_0-t2"].input_length, by_id["a_0-t2"].carry) == (35, Carry("a_0-t1", 30))
    assert by_id["a_0-2-t1"].input_length == 4  # the answer before the question is part of the prompt
    assert by_id["f-t1"].input_length == 1
    assert len(requests) == 4
    assert report.counts["conversations without a question and its answer"] == 3
    assert "estimate" in str(trace.header.length_tokenizer)
    assert any("Poisson, 100/s" in text for text in report.assumed)
    kept = imported(tmp_path, json.dumps(chats), text=True)[2]
    second = next(request for request in kept if request.id == "a_0-t2")
    assert [m["role"] for m in second.messages or []] == ["user", "assistant", "user"]


def test_sharegpt_single_turns_pass_vllms_filter(tmp_path: Path) -> None:
    def chat(id: str, prompt: int, answer: int) -> dict[str, Any]:
        return {
            "id": id,
            "conversations": [{"from": "human", "value": "x" * 4 * prompt}, {"from": "gpt", "value": "y" * 4 * answer}],
        }

    chats = [
        chat("ok", 1024, 1024),
        chat("short", 3, 10),
        chat("mute", 10, 3),
        chat("long", 1025, 10),
        chat("both", 1024, 1025),
    ]
    report, _, requests = imported(tmp_path, json.dumps(chats), single_turn=True)
    assert [request.id for request in requests] == ["ok-t1"]
    assert report.counts["conversations that vLLM's length filter leaves out"] == 4


def test_llmservingsim_waits_after_the_call_before_and_drops_ids_of_another_number(tmp_path: Path) -> None:
    session = {"session_id": "s", "arrival_time_ns": 2_000_000_000, "sub_requests": [
        {"input_toks": 5, "output_toks": 2, "tool_duration_ns": 250_000_000},
        {"input_toks": 9, "output_toks": 1, "tool_duration_ns": 0},
    ]}  # fmt: skip
    flat = {
        "input_toks": 4,
        "output_toks": 2,
        "arrival_time_ns": 1,
        "input_tok_ids": [1, 2, 3],
        "output_tok_ids": [7, 8],
    }
    report, _, (one, two, three) = imported(tmp_path, lines(flat, session))
    assert (one.arrival_s, one.input_length, one.output_token_ids) == (1e-9, 4, (7, 8))
    assert (two.arrival_s, three.arrival_s) == (2.0, None)
    assert (three.parents, three.think_s) == ((two.id,), 0.25)
    assert report.counts["input_tok_ids whose number is not input_toks: the length is kept, the ids are not"] == 1


def test_an_aibrix_line_holds_several_requests_and_old_spellings(tmp_path: Path) -> None:
    text = lines({"timestamp": 0, "requests": [{"Prompt Length": 4, "Output Length": 3}, {"prompt_length": 6, "output_length": 1, "session_id": 7}]})  # fmt: skip
    _, _, requests = imported(tmp_path, text)
    assert [(r.id, r.input_length, r.output_length, r.session) for r in requests] == [
        ("0.0", 4, 3, None),
        ("0.1", 6, 1, "7"),
    ]


def test_otel_parents_are_the_calls_that_had_ended_and_failures_without_usage_are_left_out(tmp_path: Path) -> None:
    def span(id: str, start: float, end: float, **more: Any) -> dict[str, Any]:
        base = 1_772_013_600
        return {"traceId": "t", "spanId": id, "startTimeUnixNano": str(int((base + start) * 1e9)), "endTimeUnixNano": str(int((base + end) * 1e9)), "attributes": [{"key": k, "value": {"intValue": str(v)} if isinstance(v, int) else {"stringValue": v}} for k, v in CHAT.items()], **more}  # fmt: skip

    failed = {
        **span("e", 9, 10),
        "status": {"code": 2},
        "attributes": [{"key": "gen_ai.operation.name", "value": {"stringValue": "chat"}}],
    }
    tool = {
        **span("x", 1, 2),
        "attributes": [{"key": "gen_ai.operation.name", "value": {"stringValue": "execute_tool"}}],
    }
    spans = [span("a", 0, 2), span("b", 2.5, 5), span("c", 3, 5.5), span("d", 6, 8), failed, tool]
    otlp = {"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}
    report, trace, (a, b, c, d) = imported(tmp_path, json.dumps(otlp))
    assert [r.arrival_s for r in (a, b, c, d)] == [0.0, 2.5, 3.0, 6.0]
    assert (b.parents, c.parents, d.parents) == (("a",), ("a",), ("b", "c"))
    assert (b.think_s, d.think_s) == (0.5, 0.5)
    assert (a.input_length, a.output_length, a.observed) == (10, 3, {"e2e_s": 2.0})
    assert report.dropped["failed"] == 1 and report.counts["spans that are no call of a model"] == 1


def test_copilot_calls_wait_for_tools_and_share_by_sequence(tmp_path: Path) -> None:
    def call(id: str, second: int, prompt: int, *sizes: int) -> dict[str, Any]:
        metadata = [{"type": "text", "sequenceId": i, "token_len": size} for i, size in enumerate(sizes)]
        return {"message_id": id, "timestamp": f"2026-01-01T00:00:{second:02d}Z", "duration_ms": 2000, "model": "m", "tokens": {"prompt": prompt, "completion": 4, "cached": 1}, "message_metadata": metadata}  # fmt: skip

    turn = {
        "llm_calls": [call("a", 0, 30, 10, 20), call("b", 9, 50, 10, 20, 15)],
        "tool_batches": [{"timestamp": "2026-01-01T00:00:03Z", "duration_ms": 1500}],
    }
    report, _, (a, b) = imported(tmp_path, lines({"session_id": "s", "turns": [turn]}))
    assert (b.arrival_s, b.parents, b.think_s) == (9.0, ("a",), 1.5)
    assert a.segments is not None and b.segments is not None and b.segments[:2] == a.segments
    assert a.observed == {"cached_tokens": 1, "e2e_s": 2.0}
    assert any("assumption" in text or "taken for equal" in text for text in report.assumed)


def test_weka_calls_wait_for_sub_agents_and_ids_are_the_sessions_own(tmp_path: Path) -> None:
    def call(t: float, ids: list[int], size: int, **more: Any) -> dict[str, Any]:
        return {"t": t, "type": "n", "model": "m", "in": size, "out": 3, "hash_ids": ids, **more}

    agent = {"t": 5.0, "type": "subagent", "requests": [call(0.0, [9], 64), call(1.0, [9, 10], 128)]}
    session = {
        "id": "w",
        "block_size": 64,
        "hash_id_scope": "local",
        "requests": [call(0.0, [1], 64), agent, call(9.0, [1], 100, think_time=0.5)],
    }
    report, trace, rows = imported(tmp_path, lines(session), request_rate=1.0)
    assert [(r.id, r.arrival_s) for r in rows] == [("w/1", 0.0), ("w/1.1", 5.0), ("w/1.2", 6.0), ("w/2", 9.0)]
    assert rows[1].parents == ("w/1",) and rows[3].parents == ("w/1", "w/1.2") and rows[3].think_s == 0.5
    assert (trace.header.block_size, trace.header.hash_scope) == (64, "session")
    # 100 tokens with one id: the partly filled last block has none in this format and gets one of its own.
    assert rows[3].hash_ids == (1, "rest of w/2")


def test_openai_logs_take_usage_and_time_and_skip_what_failed(tmp_path: Path) -> None:
    def log(at: str, status: int, prompt: int, output: int) -> dict[str, Any]:
        return {"timestamp": at, "request": {"model": "m", "messages": [{"role": "user", "content": "hi"}]}, "response": {"status_code": status, "usage": {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": {"cached_tokens": 2}}}}  # fmt: skip

    text = lines(
        log("2026-01-01T00:00:02Z", 200, 9, 3),
        log("2026-01-01T00:00:01Z", 200, 7, 1),
        log("2026-01-01T00:00:03Z", 500, 5, 0),
    )
    report, trace, (one, two) = imported(tmp_path, text)
    assert lengths([one, two]) == [(0.0, 7, 1), (1.0, 9, 3)]  # written when a request ended: sorted, no fault
    assert one.observed == {"status": 200, "cached_tokens": 2}
    assert report.dropped["failed"] == 1
    assert trace.header.time_origin == "2026-01-01T00:00:01+00:00"


def test_wildchat_times_are_the_questions_and_columns_about_the_user_are_dropped(tmp_path: Path) -> None:
    def message(role: str, text: str, at: str | None) -> dict[str, Any]:
        return {"role": role, "content": text, "timestamp": at, "hashed_ip": "ff", "header": {"x": 1}}

    chat = {"conversation_hash": "h", "model": "m", "hashed_ip": "ff", "country": "X", "conversation": [
        message("user", "q" * 40, "2024-01-01T00:00:00Z"), message("assistant", "a" * 20, "2024-01-01T00:00:09Z"),
        message("user", "q" * 4, None), message("assistant", "a" * 4, "2024-01-01T00:01:00Z"),
    ]}  # fmt: skip
    _, trace, (one, two) = imported(tmp_path, lines(chat))
    assert (one.arrival_s, two.arrival_s, two.think_s) == (0.0, 60.0, 60.0)
    assert b"ff" not in trace.path.read_bytes() and b"country" not in trace.path.read_bytes()


def test_aiperf_conversations_keep_their_turns_delays_and_media(tmp_path: Path) -> None:
    talk = {
        "session_id": "s",
        "turns": [
            {"text": "one", "timestamp": 1000, "output_length": 3},
            {"text": "two", "delay": 500, "output_length": 2, "image": "x.png"},
        ],
    }
    _, _, (one, two) = imported(tmp_path, lines(talk))
    assert (one.arrival_s, two.arrival_s, two.think_s, two.parents) == (1.0, None, 0.5, (one.id,))
    assert two.media == [{"type": "image", "id": "0.2.image"}] and two.prompt == "two"


def test_servegen_clients_are_drawn_by_seed_from_their_windows(tmp_path: Path) -> None:
    (tmp_path / "chunk-1-trace.csv").write_text("0,5,1.1,Gamma,0.8,0.25\n600,0,0,,0,0\n1200,5,1,,0,0\n")
    sides = {
        "0": {"input_tokens": "{10: 0.5, 20: 0.5}", "output_tokens": "{3: 1.0}"},
        "21600": {"input_tokens": "{}", "output_tokens": "{}"},
    }
    (tmp_path / "chunk-1-dataset.json").write_text(json.dumps(sides))

    def run(seed: int) -> list[Request]:
        import_trace(tmp_path / "chunk-1-trace.csv", tmp_path / "out.jsonl", ImportOptions(seed=seed))
        return list(open_trace(tmp_path / "out.jsonl").requests())

    one = run(1)
    assert 5500 < len(one) < 6500  # two windows of 600 s at 5/s
    assert {r.input_length for r in one} == {10, 20} and {r.output_length for r in one} == {3}
    assert not [r for r in one if 600 <= (r.arrival_s or 0) < 1200] and one[0].tenant == "chunk-1"
    assert lengths(run(1)) == lengths(one) != lengths(run(2))


def test_a_map_of_columns_reads_any_csv_and_any_json(tmp_path: Path) -> None:
    csv = "when,n_in,n_out,who,status\n1700000002.5,20,5,a,200\n1700000001,10,2,b,200\n1700000003,0,0,b,503\n"
    columns = {"arrival": "when", "input": "n_in", "output": "n_out", "tenant": "who", "status": "status"}
    report, _, (one, two) = imported(tmp_path, csv, columns=columns)
    assert lengths([one, two]) == [(0.0, 10, 2), (1.5, 20, 5)] and one.tenant == "b"
    assert report.dropped["failed"] == 1
    nested = lines({"ts": "2026-01-01T00:00:00Z", "usage": {"prompt_tokens": 3, "completion_tokens": 1}})
    paths = {"arrival": "ts", "input": "usage.prompt_tokens", "output": "usage.completion_tokens"}
    assert lengths(imported(tmp_path, nested, columns=paths)[2]) == [(0.0, 3, 1)]
    with pytest.raises(BenchctlError, match="no column 'nope'"):
        imported(tmp_path, csv, columns={"input": "nope"})


def test_an_entry_point_adds_a_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint, EntryPoints

    point = EntryPoint("twice", "tests.format_example:FORMAT", "benchctl.trace_formats")
    monkeypatch.setattr("traces.formats.entry_points", lambda group: EntryPoints([point]))
    report, _, requests = imported(tmp_path, "at;tokens\n1;7\n4;8\n")
    assert report.format == "semicolons" and lengths(requests) == [(0.0, 7, 1), (3.0, 8, 1)]


DOCS = Path(__file__).parent.parent / "docs"


def test_the_example_of_adding_a_format_is_the_one_that_is_tested() -> None:
    page = (DOCS / "formats" / "adding.md").read_text()
    shown = page.split("```python\n")[1].split("```")[0]
    given = (Path(__file__).parent / "format_example.py").read_text()
    assert shown.strip() == given.split("from __future__ import annotations\n\n")[1].strip()


def test_the_examples_of_the_keys_are_a_valid_trace(tmp_path: Path) -> None:
    page = (DOCS / "traces.md").read_text()
    (tmp_path / "t.jsonl").write_text(page.split("### An example a key\n\n```json\n")[1].split("```")[0])
    assert open_trace(tmp_path / "t.jsonl", strict=True).num_requests == 8
    shown = {key for line in (tmp_path / "t.jsonl").read_text().splitlines() for key in json.loads(line)}
    assert set(RULES) - shown == {"session_id", "delay", "text_input"}  # the other aliases


def test_every_format_stands_in_the_matrix() -> None:
    page = (DOCS / "formats" / "import.md").read_text()
    assert [name for name in FORMATS if f"| `{name}`" not in page] == ["canonical"]


def test_sglangs_agentic_turns_carry_the_turn_before_with_its_answer(tmp_path: Path) -> None:
    user = {"role": "user", "content": "x" * 40}
    turns = [
        {"messages": [user], "prompt_tokens": 50},
        {"messages": [user], "prompt_tokens": 300},
        {"messages": [user]},
    ]
    document = json.dumps(
        {"metadata": {"seed": 1}, "conversations": [turns, [{"messages": [user], "prompt_tokens": 9}]]}
    )
    report, trace, requests = imported(tmp_path, document, output_length=200)
    assert report.format == "sglang-agentic" and trace.num_sessions == 2
    # The second prompt holds the first one and its answer of 200; the third is counted: 300 + 200, and 40 characters / 4.
    assert [(r.input_length, r.output_length) for r in requests if r.session == "conversation-0"] == [
        (50, 200),
        (300, 200),
        (510, 200),
    ]
    by_id = {r.id: r for r in requests}
    assert by_id["conversation-0-t2"].carry == Carry("conversation-0-t1", 250)
    assert by_id["conversation-0-t3"].carry == Carry("conversation-0-t2", 500)
    assert by_id["conversation-0-t2"].parents == ("conversation-0-t1",) and by_id["conversation-0-t2"].think_s
    report, _, requests = imported(tmp_path, document)
    assert requests[0].output_length == 220 and any("220" in text for text in report.assumed)
    broken = json.dumps({"conversations": [[turns[0], {"messages": [], "prompt_tokens": "x"}, turns[1]], [turns[0]]]})
    report, _, requests = imported(tmp_path, broken, skip_bad=True)
    assert [r.id for r in requests] == ["conversation-0-t1", "conversation-1-t1"] and report.dropped["bad"] == 1
    assert "conversation-0: prompt_tokens must be an integer, got the text 'x'" in report.examples[0]
    # An answer shorter than was assumed leaves a shorter prompt: all of it is what went before.
    short = json.dumps(
        {"conversations": [[{"messages": [user], "prompt_tokens": 50}, {"messages": [user], "prompt_tokens": 90}]]}
    )
    _, _, requests = imported(tmp_path, short)
    assert requests[1].carry == Carry("conversation-0-t1", 90)


def test_payloads_that_are_ready_to_be_sent_are_requests(tmp_path: Path) -> None:
    hi, more = {"role": "user", "content": "hi"}, {"role": "user", "content": "more"}
    bodies = [
        {"model": "m", "messages": [hi], "max_tokens": 5, "temperature": 0.5, "stream": True},
        {"model": "m", "messages": [hi, {"role": "assistant", "content": "ho"}, more], "max_completion_tokens": 7},
    ]
    _, trace, requests = imported(
        tmp_path, json.dumps({"data": [{"session_id": "s", "payloads": bodies}, {"payload": bodies[:1]}]}, indent=1)
    )
    assert [(r.session, r.turn, r.parents, r.output_length) for r in requests if r.session] == [
        ("s", 1, (), 5),
        ("s", 2, ("s-t1",), 7),
    ]
    assert requests[0].messages == [hi] and requests[0].sampling == {"temperature": 0.5}
    assert requests[0].src == {"row": 0, "entry": 0, "stream": True} and trace.num_requests == 3
    report, _, requests = imported(
        tmp_path,
        lines({"payload": {"prompt": [5, 6, 7], "max_tokens": 2}}, {"payload": {"prompt": "x", "max_tokens": 3}}),
    )
    assert report.format == "payloads" and requests[0].prompt_token_ids == (5, 6, 7) and requests[1].prompt == "x"
    with pytest.raises(BenchctlError, match="no payload"):
        imported(tmp_path, lines({"payload": {"prompt": "x", "max_tokens": 3}}, {"text": 1}), format="payloads")


def test_nobody_follows_a_failed_turn_of_burstgpt(tmp_path: Path) -> None:
    head = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    turns = "5,s,2,GPT-4,9,0,9,Conversation log\n8,s,2,GPT-4,10,4,14,Conversation log\n20,s,3,GPT-4,30,6,36,Conversation log\n"
    _, _, requests = imported(tmp_path, head + turns, failed="keep-as-1")
    assert [(r.id, r.turn, r.parents) for r in requests] == [
        ("s-t1-failed-0", None, ()),
        ("s-t1", 1, ()),
        ("s-t2", 2, ("s-t1",)),
    ]
    assert requests[2].carry == Carry("s-t1", 14)


def test_what_is_carried_is_never_more_than_there_is(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "arrival_s": 0, "input_length": 9, "output_length": 2},
        {"id": "b", "arrival_s": 1, "input_length": 50, "output_length": 2, "carry": {"from": "a", "tokens": 40}},
    ]
    text = lines({"benchctl_trace": 1}, *rows)
    with pytest.raises(BenchctlError, match='carry of 40 tokens from "a", whose prompt and output have 11'):
        imported(tmp_path, text)
    report, _, requests = imported(tmp_path, text, skip_bad=True)
    assert [r.id for r in requests] == ["a"] and report.dropped["bad"] == 1
