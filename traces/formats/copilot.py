"""GitHub Copilot coding agent traces, 2026: one line a session, its turns and their calls of a model and of tools.

A call follows the one before it in its session; between them lie the tools' time, where tools ran, or the user's. Prompts are segments from
message_metadata, named after session, type and sequenceId: an assumption, since the trace does not say that equal ids are equal text.
Source: Azure/AzurePublicDataset, its Copilot trace's README.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from traces.formats.base import Draft, Format, ImportOptions, Reader, Sample, list_of, object_of, rest, text_of, whole
from traces.formats.times import moment_ns
from traces.request import Segment
from traces.rows import Row

USED = frozenset({"message_id", "timestamp", "duration_ms", "model", "tokens", "message_metadata", "status_code"})
ASSUMED = (
    "segments are named after session, type and sequenceId of message_metadata: equal names are taken for equal tokens"
)


class CopilotReader(Reader):
    sorts = True
    clock_has_zone = True

    def __init__(self, sample: Sample, options: ImportOptions) -> None:
        super().__init__(sample, options)
        self.assumed.append(ASSUMED)

    def read(self, record: dict[str, Any], number: int) -> Iterable[Draft]:
        session = text_of(record.get("session_id"), "session_id") or f"session-{number}"
        calls: list[tuple[int, dict[str, Any]]] = []
        tools: list[tuple[int, int]] = []  # start, ns
        for entry in list_of(record.get("turns"), "turns"):
            turn = object_of(entry, "a turn")
            for call in list_of(turn.get("llm_calls") or [], "llm_calls"):
                calls.append((moment_ns(object_of(call, "a call").get("timestamp"), "ms", "timestamp"), call))
            for batch in list_of(turn.get("tool_batches") or [], "tool_batches"):
                start = moment_ns(object_of(batch, "a tool batch").get("timestamp"), "ms", "timestamp")
                tools.append((start, self.time(batch.get("duration_ms") or 0, "ms", "duration_ms")))
        calls.sort(key=lambda call: call[0])
        drafts: list[Draft] = []
        end, last = 0, None
        for place, (start, call) in enumerate(calls, 1):
            row, failed = self._call(call, session, place, number)
            if last is not None:
                gap = max(start - end, 0)
                ran = sum(ns for at, ns in tools if end <= at <= start)
                row.parents, row.think_s = (last,), (min(ran, gap) if ran else gap) / 1e9
            drafts.append(Draft(row, start, failed))
            if not failed:
                end = start + self.time(call.get("duration_ms") or 0, "ms", "duration_ms")
                last = row.id
        return drafts

    def _call(self, call: dict[str, Any], session: str, place: int, number: int) -> tuple[Row, bool]:
        tokens = object_of(call.get("tokens") or {}, "tokens")
        length = whole(tokens.get("prompt"), "tokens.prompt")
        output = whole(tokens.get("completion"), "tokens.completion")
        row = Row(
            id=text_of(call.get("message_id"), "message_id") or f"{session}-{place}",
            session=session,
            turn=place,
            input_length=length,
            output_length=output,
            model=text_of(call.get("model"), "model"),
            src={"row": number, **rest(call, USED)},
        )
        observed: dict[str, Any] = {}
        if call.get("duration_ms") is not None:
            observed["e2e_s"] = self.time(call["duration_ms"], "ms", "duration_ms") / 1e9
        if tokens.get("cached") is not None:
            observed["cached_tokens"] = tokens["cached"]
        if call.get("status_code") is not None:
            observed["status"] = call["status_code"]
        row.observed = observed or None
        if length is not None and length > 0:
            row.segments = self._segments(call.get("message_metadata"), session, length)
        failed = not output or not length
        if failed:
            row.input_length, row.output_length = length or 0, output or 0
        return row, failed

    def _segments(self, metadata: Any, session: str, length: int) -> tuple[Segment, ...] | None:
        out: list[Segment] = []
        left = length
        for entry in list_of(metadata or [], "message_metadata"):
            message = object_of(entry, "message_metadata")
            size = whole(message.get("token_len"), "token_len") or 0
            if size > left:
                self.counts["prompts shorter than their messages: cut there"] += 1
                size = left
            if size > 0:
                out.append(Segment(f"{session} {message.get('type')} {message.get('sequenceId')}", size))
                left -= size
        return tuple(out) or None


def tell(sample: Sample) -> bool:
    turns = sample.first.get("turns")
    if not sample.has_keys("session_id", "turns") or not isinstance(turns, list):
        return False
    return any(isinstance(turn, dict) and ("llm_calls" in turn or "tool_batches" in turn) for turn in turns)


FORMAT = Format("copilot", "GitHub Copilot coding agent traces 2026 (JSONL, a session a line)", tell, CopilotReader)
