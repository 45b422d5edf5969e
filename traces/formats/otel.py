"""OpenTelemetry GenAI spans: a session a line, a span a line, one document of spans, or OTLP JSON.

Only calls of a model become requests: operations chat, text_completion, generate_content. A request arrives when its span starts; the calls of its
trace that had ended by then, and that no other of them waited for, are its parents. Names of usage attributes: the present ones, then the
old. Source: OpenTelemetry semantic conventions for generative AI; OTLP/JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from traces.formats.base import Draft, Format, ImportOptions, Reader, Sample, list_of, object_of, text_of, whole
from traces.formats.chat import SAMPLING_KEYS, counter
from traces.formats.times import moment_ns
from traces.rows import Row, RowFault

CALLS = ("chat", "text_completion", "generate", "generate_content")
REMEMBERED = 512  # calls of a session, to find parents among


@dataclass(frozen=True, slots=True)
class _Call:
    id: str
    end_ns: int
    parents: tuple[str, ...]


class OtelReader(Reader):
    sorts = True
    clock_has_zone = True

    def __init__(self, sample: Sample, options: ImportOptions) -> None:
        super().__init__(sample, options)
        self._sessions: dict[str, list[_Call]] = {}
        self._count, self._count_name = counter(options)

    def read(self, record: dict[str, Any], number: int) -> Iterable[Draft]:
        calls = []
        for span in spans_of(record):
            attributes = attributes_of(span)
            operation = attributes.get("gen_ai.operation.name")
            if operation not in CALLS and not (operation is None and usage(attributes, "input") is not None):
                self.counts["spans that are no call of a model"] += 1
                continue
            start = moment_ns(_first(span, "start_time", "startTimeUnixNano", "startTime"), "ns", "start_time")
            calls.append((start, span, attributes))
        calls.sort(key=lambda call: call[0])  # within one record; spans are exported when they end
        return [draft for start, span, attributes in calls if (draft := self._request(span, attributes, start, number))]

    def _request(self, span: dict[str, Any], attributes: dict[str, Any], start: int, number: int) -> Draft | None:
        end = _first(span, "end_time", "endTimeUnixNano", "endTime")
        end_ns = start if end is None else moment_ns(end, "ns", "end_time")
        status = span.get("status")
        code = status.get("code") if isinstance(status, dict) else None
        failed = code in (2, "2", "ERROR", "STATUS_CODE_ERROR")
        row = Row(
            id=text_of(_first(span, "span_id", "spanId"), "span_id"),
            output_length=usage(attributes, "output"),
            max_tokens=whole(attributes.get("gen_ai.request.max_tokens"), "gen_ai.request.max_tokens", texts=True),
            model=text_of(attributes.get("gen_ai.request.model"), "gen_ai.request.model"),
            observed={"e2e_s": max(end_ns - start, 0) / 1e9, **({"status": "failed"} if failed else {})},
            src={"row": number, "name": span.get("name")},
        )
        self._prompt(row, attributes, failed)
        sampling = {
            key: attributes[f"gen_ai.request.{key}"] for key in SAMPLING_KEYS if f"gen_ai.request.{key}" in attributes
        }
        row.sampling = sampling or None
        cached = attributes.get("gen_ai.usage.cache_read.input_tokens")
        if cached is not None and row.observed is not None:
            row.observed["cached_tokens"] = cached
        row.session = text_of(
            attributes.get("gen_ai.conversation.id") or _first(span, "trace_id", "traceId"), "trace_id"
        )
        if row.session is not None and not failed:
            self._follow(row, row.session, start, end_ns)
        return Draft(row, start, failed)

    def _prompt(self, row: Row, attributes: dict[str, Any], failed: bool) -> None:
        messages = _messages(attributes.get("gen_ai.input.messages", attributes.get("gen_ai.prompt")))
        system = _messages(attributes.get("gen_ai.system_instructions"), "system")
        if messages and self.options.text is not False or messages and usage(attributes, "input") is None:
            row.messages = [*system, *messages]
        else:
            row.input_length = usage(attributes, "input")
            if row.input_length is None and failed:
                row.input_length = 0
        if row.output_length is None and not failed:
            text = attributes.get("gen_ai.output.text")
            answer = (
                text
                if isinstance(text, str)
                else "".join(m["content"] for m in _messages(attributes.get("gen_ai.output.messages"), "assistant"))
            )
            if answer:
                row.output_length = max(self._count(answer), 1)
                self.header["length_tokenizer"] = self._count_name
                self.counts["outputs without usage: counted from the text"] += 1
            elif row.max_tokens is not None:
                self.counts["outputs without usage and text: max_tokens is taken"] += 1
        if row.messages is None and row.input_length is None:
            raise RowFault("a span with neither usage nor messages", fix="--skip-bad leaves it out")

    def _follow(self, row: Row, session: str, start: int, end: int) -> None:
        calls = self._sessions.setdefault(session, [])
        row.id = row.id or f"{session}-{len(calls)}"
        ended = [call for call in calls if call.end_ns <= start]
        waited_for = {parent for call in ended for parent in call.parents}
        parents = [call for call in ended if call.id not in waited_for]
        if parents:
            row.parents = tuple(call.id for call in parents)
            row.think_s = (start - max(call.end_ns for call in parents)) / 1e9
        row.turn = len(calls) + 1 if len(calls) < REMEMBERED else None
        calls.append(_Call(row.id, end, row.parents or ()))
        if len(calls) > REMEMBERED:
            del calls[0]


def spans_of(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The spans of a record, whatever it is wrapped in. Raises RowFault."""
    if "resourceSpans" in record or "resource_spans" in record:
        for resource in list_of(_first(record, "resourceSpans", "resource_spans"), "resourceSpans"):
            scopes = _first(
                object_of(resource, "resourceSpans"), "scopeSpans", "scope_spans", "instrumentationLibrarySpans"
            )
            for scope in list_of(scopes or [], "scopeSpans"):
                yield from (
                    object_of(span, "a span")
                    for span in list_of(object_of(scope, "scopeSpans").get("spans") or [], "spans")
                )
    elif "spans" in record:
        yield from (object_of(span, "a span") for span in list_of(record["spans"], "spans"))
    else:
        yield record


def attributes_of(span: dict[str, Any]) -> dict[str, Any]:
    """Attributes as one flat object; OTLP's list of key and typed value too. Raises RowFault."""
    attributes = span.get("attributes") or {}
    if isinstance(attributes, dict):
        return attributes
    out: dict[str, Any] = {}
    for entry in list_of(attributes, "attributes"):
        pair = object_of(entry, "an attribute")
        value = pair.get("value")
        if isinstance(value, dict):
            kind, value = next(iter(value.items()), ("", None))
            if kind == "intValue" and str(value).lstrip("-").isdecimal():
                value = int(str(value))  # OTLP writes 64-bit integers as texts
        out[str(pair.get("key"))] = value
    return out


def usage(attributes: dict[str, Any], side: str) -> int | None:
    """Tokens of `input` or `output`. Raises RowFault."""
    old = {"input": "prompt", "output": "completion"}[side]
    key = f"gen_ai.usage.{side}_tokens"
    return whole(attributes.get(key, attributes.get(f"gen_ai.usage.{old}_tokens")), key, texts=True)


def _messages(value: Any, role: str | None = None) -> list[dict[str, Any]]:
    """Messages as they are, or as JSON inside a text; `parts` become their text. [] where there is none."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            return [{"role": role or "user", "content": value}]
    out = []
    for message in value if isinstance(value, list) else []:
        if not isinstance(message, dict):
            continue
        content = message.get("content")
        parts = message.get("parts")
        if content is None and isinstance(parts, list):
            words = [part.get("content", part.get("text")) for part in parts if isinstance(part, dict)]
            content = "".join(word for word in words if isinstance(word, str))
        if isinstance(content, str):
            out.append({"role": str(message.get("role") or role or "user"), "content": content})
    return out


def _first(record: dict[str, Any], *keys: str) -> Any:
    return next((record[key] for key in keys if record.get(key) is not None), None)


def tell(sample: Sample) -> bool:
    keys = set(sample.first)
    return sample.kind != "csv" and bool(keys & {"spans", "resourceSpans", "resource_spans", "span_id", "spanId"})


FORMAT = Format("otel", "OpenTelemetry GenAI spans (JSON, JSON lines, OTLP JSON)", tell, OtelReader)
