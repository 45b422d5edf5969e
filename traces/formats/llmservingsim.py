"""LLMServingSim JSONL: nanoseconds, token ids where their number agrees, agentic lines with sub_requests.

The first call of a session arrives at the line's time; each later one `tool_duration_ns` of the call before it after that call's end, so it has
a think time and no arrival. Source: casys-kaist/LLMServingSim, workloads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from traces.formats.base import Draft, Format, Reader, Sample, list_of, object_of, rest, text_of, whole
from traces.rows import Row

CALL = frozenset({"input_toks", "output_toks", "input_tok_ids", "output_tok_ids", "tool_duration_ns"})
USED = CALL | {"arrival_time_ns", "sub_requests", "session_id"}


class LlmServingSimReader(Reader):
    origin = "zero"

    def read(self, record: dict[str, Any], number: int) -> Iterable[Draft]:
        time = self.time(record.get("arrival_time_ns"), "ns", "arrival_time_ns")
        if record.get("sub_requests") is None:
            row = self._call(record)
            row.src = {"row": number, **rest(record, USED)}
            return (Draft(row, time),)
        session = text_of(record.get("session_id"), "session_id") or f"session-{number}"
        drafts: list[Draft] = []
        wait = 0.0
        for turn, call in enumerate(list_of(record["sub_requests"], "sub_requests"), 1):
            row = self._call(object_of(call, "a sub_request"))
            row.id, row.session, row.turn = f"{session}-t{turn}", session, turn
            row.src = {"row": number, **rest(call, CALL)}
            if drafts:
                row.parents, row.think_s = (f"{session}-t{turn - 1}",), wait
            drafts.append(Draft(row, None if drafts else time))
            wait = self.time(call.get("tool_duration_ns") or 0, "ns", "tool_duration_ns") / 1e9
        return drafts

    def _call(self, call: dict[str, Any]) -> Row:
        row = Row(
            input_length=whole(call.get("input_toks"), "input_toks"),
            output_length=whole(call.get("output_toks"), "output_toks"),
        )
        if self.options.text is False:
            return row
        prompt, output = call.get("input_tok_ids"), call.get("output_tok_ids")
        if prompt:
            if len(list_of(prompt, "input_tok_ids")) == row.input_length:
                row.prompt_token_ids, row.input_length = tuple(prompt), None
            else:
                self.counts["input_tok_ids whose number is not input_toks: the length is kept, the ids are not"] += 1
        if output:
            if len(list_of(output, "output_tok_ids")) == row.output_length:
                row.output_token_ids, row.output_length = tuple(output), None
            else:
                self.counts["output_tok_ids whose number is not output_toks: the length is kept, the ids are not"] += 1
        return row


def tell(sample: Sample) -> bool:
    return sample.has_keys("arrival_time_ns") and bool({"input_toks", "sub_requests"} & set(sample.first))


FORMAT = Format("llmservingsim", "LLMServingSim JSONL, flat and agentic", tell, LlmServingSimReader)
