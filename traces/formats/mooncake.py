"""Mooncake JSONL, and the dialects of AIPerf, Dynamo and AISBench that use its keys.

`timestamp` in milliseconds from the trace's start, `hash_ids` of blocks of 512 tokens that name a block after its prefix; AIPerf
adds `delay` (ms), `session_id`, `text_input`, `messages`, `tools`, `payload`, `extra`; AISBench calls the text `input_text`.
Source: kvcache-ai/Mooncake, README; AIPerf's loader of mooncake traces.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from traces.formats.base import Draft, Format, ImportOptions, Reader, Sample, list_of, object_of, rest, text_of, whole
from traces.formats.chat import Payload, read_payload
from traces.rows import Row, RowFault

TEXT_KEYS = ("text_input", "input_text")
USED = frozenset(
    {"timestamp", "delay", "input_length", "output_length", "hash_ids", "session_id", "messages", "tools", "payload", "priority", *TEXT_KEYS}
)  # fmt: skip


class MooncakeReader(Reader):
    origin = "zero"

    def __init__(self, sample: Sample, options: ImportOptions) -> None:
        super().__init__(sample, options)
        self.block_size = options.block_size or 512
        self.header["block_size"] = self.block_size
        self._turns: dict[str, tuple[str, int]] = {}  # session -> id and turn of its last row

    def read(self, record: dict[str, Any], number: int) -> Iterable[Draft]:
        row = Row(output_length=whole(record.get("output_length"), "output_length"))
        row.src = {"row": number, **rest(record, USED)}
        time = None if record.get("timestamp") is None else self.time(record["timestamp"], "ms", "timestamp")
        if record.get("delay") is not None:
            row.think_s = self.time(record["delay"], "ms", "delay") / 1e9
        row.priority = whole(record.get("priority"), "priority")
        self._prompt(row, record)
        session = text_of(record.get("session_id"), "session_id")
        if session is not None:
            before, turn = self._turns.get(session, (None, 0))
            row.session, row.turn, row.id = session, turn + 1, f"{session}-t{turn + 1}"
            if before is not None:
                row.parents = (before,)
            self._turns[session] = (row.id, turn + 1)
        elif time is None and row.think_s is None:
            self.counts["rows without timestamp: they arrive with the row above"] += 1
        return (Draft(row, time),)

    def _prompt(self, row: Row, record: dict[str, Any]) -> None:
        row.input_length = whole(record.get("input_length"), "input_length")
        texts = [text for key in TEXT_KEYS if (text := record.get(key)) is not None]
        if record.get("payload") is not None:
            payload = read_payload(object_of(record["payload"], "payload"))
            fill(row, payload)
        elif record.get("messages") is not None:
            row.messages = list_of(record["messages"], "messages")
            row.tools = record.get("tools")
        elif texts:
            row.prompt = text_of(texts[0], "text_input")
        hash_ids = record.get("hash_ids")
        if row.input_length is not None:
            # The text, where there is one too, is not needed to know the prompt's length.
            if row.prompt is not None or row.messages is not None:
                raise RowFault("both input_length and a text", fix="keep one of the two")
            if hash_ids:
                row.hash_ids = tuple(list_of(hash_ids, "hash_ids"))
            elif "hash_ids" in record:
                self.counts["rows with empty hash_ids: their tokens are unique"] += 1
        elif hash_ids:
            raise RowFault("hash_ids without input_length", fix="give input_length")


def fill(row: Row, payload: Payload) -> None:
    """What a request body says, where the row does not say it yet."""
    row.prompt, row.messages, row.tools = payload.prompt, payload.messages, payload.tools
    row.model = row.model or payload.model
    row.max_tokens = row.max_tokens or payload.max_tokens
    row.sampling = row.sampling or payload.sampling or None


def tell(sample: Sample) -> bool:
    if sample.kind == "csv" or isinstance(sample.first.get("hash_ids"), dict) or "chat_id" in sample.first:
        return False
    prompt = any(key in sample.first for key in ("input_length", "payload", "hash_ids", *TEXT_KEYS))
    timed = "timestamp" in sample.first or "delay" in sample.first or "session_id" in sample.first
    return prompt and timed or "hash_ids" in sample.first and "request_id" not in sample.first


FORMAT = Format("mooncake", "Mooncake JSONL and the dialects of AIPerf, Dynamo and AISBench", tell, MooncakeReader)
