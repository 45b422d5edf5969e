"""OpenAI batch inputs, batch outputs, and request logs of OpenAI-compatible services or proxies.

A batch has no times: all its requests arrive at 0. A log line has a request (or its keys at the top) and a response with `usage`; its
time is `created` (Unix s) or an ISO `timestamp`, `time` or `start_time`. Lengths come from `usage`, else from the text. Source: OpenAI batch API reference.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from traces.formats.base import Draft, Format, ImportOptions, Reader, Sample, object_of, rest, text_of, whole
from traces.formats.chat import read_payload
from traces.formats.mooncake import fill
from traces.formats.times import moment_ns
from traces.rows import Row, RowFault

TIME_KEYS = ("timestamp", "start_time", "startTime", "time", "created_at", "created")
BODY_KEYS = ("body", "request", "request_body")
USED = frozenset(
    {
        "custom_id",
        "id",
        "method",
        "url",
        "usage",
        "response",
        "error",
        "messages",
        "prompt",
        "tools",
        *TIME_KEYS,
        *BODY_KEYS,
    }
)


class OpenAiReader(Reader):
    default_rate = math.inf

    def __init__(self, sample: Sample, options: ImportOptions) -> None:
        super().__init__(sample, options)
        self._time_key = next((key for key in TIME_KEYS if time_of(sample.first, key) is not None), None)
        self.synthesizes_times = self._time_key is None
        self.clock_has_zone = None if self._time_key is None else True
        self.sorts = self._time_key is not None  # a log is written when a request ends

    def read(self, record: dict[str, Any], number: int) -> Iterable[Draft]:
        body = next((object_of(record[key], key) for key in BODY_KEYS if record.get(key) is not None), None)
        response = None if record.get("response") is None else object_of(record["response"], "response")
        answer = (response.get("body") or response) if response is not None else record
        usage = object_of(answer.get("usage") or record.get("usage") or {}, "usage")
        row = Row(
            id=text_of(record.get("custom_id"), "custom_id") or text_of(record.get("id"), "id"),
            input_length=whole(usage.get("prompt_tokens", usage.get("input_tokens")), "usage.prompt_tokens"),
            output_length=whole(usage.get("completion_tokens", usage.get("output_tokens")), "usage.completion_tokens"),
        )
        row.model = text_of(answer.get("model") or record.get("model"), "model")
        self._observe(row, record, response, usage)
        source = body if body is not None else record
        if row.input_length is None or self.options.text:
            payload = read_payload(source)
            fill(row, payload)
            row.prompt_token_ids = payload.prompt_token_ids
            row.input_length = None
        elif body is not None and row.output_length is None:
            row.max_tokens = read_payload(body).max_tokens
        row.src = {
            "row": number,
            **rest(record, USED | set(row.sampling or ()) | {"model", "max_tokens", "max_completion_tokens"}),
        }
        failed = bool(record.get("error")) or (row.observed or {}).get("status", 200) not in (200, "ok", "success")
        if failed and row.output_length is None and row.max_tokens is None:
            row.output_length = 0
        return (Draft(row, self._time(record), failed),)

    def _observe(
        self, row: Row, record: dict[str, Any], response: dict[str, Any] | None, usage: dict[str, Any]
    ) -> None:
        observed: dict[str, Any] = {}
        status = (response or record).get("status_code")
        if status is not None:
            observed["status"] = status
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and details.get("cached_tokens") is not None:
            observed["cached_tokens"] = details["cached_tokens"]
        row.observed = observed or None

    def _time(self, record: dict[str, Any]) -> int | None:
        if self._time_key is None:
            return None
        value = time_of(record, self._time_key)
        if value is None:
            raise RowFault(f"no {self._time_key}, which the first row has", fix="mend the row, or --skip-bad")
        self.unit = self.options.time_unit or "s"
        return moment_ns(value, self.unit, self._time_key)


def time_of(record: dict[str, Any], key: str) -> Any:
    """The moment of a log line: its own, or that of its response."""
    if record.get(key) is not None:
        return record[key]
    response = record.get("response")
    body = response.get("body") if isinstance(response, dict) else None
    for part in (response, body):
        if isinstance(part, dict) and key == "created" and part.get(key) is not None:
            return part[key]
    return None


def tell(sample: Sample) -> bool:
    keys = set(sample.first)
    if sample.kind == "csv" or keys & {"input_length", "hash_ids", "conversations", "turns"}:
        return False
    return "custom_id" in keys or bool(
        keys & {"body", "request", "request_body", "response", "usage"}
        and keys & {*TIME_KEYS, "messages", "prompt", "usage", "body"}
    )


FORMAT = Format("openai", "OpenAI batch inputs and outputs, OpenAI-compatible request logs (JSONL)", tell, OpenAiReader)
