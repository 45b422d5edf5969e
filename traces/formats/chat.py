"""Chat messages and OpenAI request bodies, which several formats hold in different wrappings.

A text keeps its content, or becomes lengths: then equal messages in equal places stay equal tokens, by segments that are
named after a digest of role and content.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import xxhash

from traces.formats.base import Counts, ImportOptions, list_of, object_of, text_of, whole
from traces.request import Segment
from traces.rows import Row, RowFault

CHARS_PER_TOKEN = 4
SAMPLING_KEYS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "n",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "logprobs",
    "response_format",
)
ESTIMATE = f"estimate: characters / {CHARS_PER_TOKEN}, rounded up"


def estimate_tokens(text: str) -> int:
    """Without a tokenizer: characters / 4, rounded up."""
    return -(-len(text) // CHARS_PER_TOKEN)


def counter(options: ImportOptions) -> tuple[Counts, str]:
    """(how tokens are counted, its name for the header)."""
    if options.count_tokens is None:
        return estimate_tokens, ESTIMATE
    return options.count_tokens, options.tokenizer or "tokenizer"


@dataclass(frozen=True, slots=True)
class Payload:
    """An OpenAI request body as far as it concerns a trace."""

    prompt: str | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    model: str | None = None
    max_tokens: int | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    prompt_token_ids: tuple[int, ...] | None = None


def read_payload(body: dict[str, Any]) -> Payload:
    """Raises RowFault where it has neither messages nor a prompt."""
    max_tokens = whole(body.get("max_completion_tokens"), "max_completion_tokens")
    if max_tokens is None:
        max_tokens = whole(body.get("max_tokens"), "max_tokens")
    common: dict[str, Any] = {
        "model": text_of(body.get("model"), "model"),
        "max_tokens": max_tokens,
        "sampling": {key: body[key] for key in SAMPLING_KEYS if body.get(key) is not None},
    }
    if body.get("messages") is not None:
        tools = None if body.get("tools") is None else list_of(body["tools"], "tools")
        return Payload(messages=list_of(body["messages"], "messages"), tools=tools, **common)
    prompt = body.get("prompt", body.get("input"))
    if isinstance(prompt, str) and prompt:
        return Payload(prompt=prompt, **common)
    if isinstance(prompt, list) and prompt and all(type(id) is int for id in prompt):
        return Payload(prompt_token_ids=tuple(prompt), **common)
    raise RowFault("the request body has neither messages nor a prompt", fix="--skip-bad leaves it out")


def content_text(message: Any) -> str:
    """The words of a message: its content, or the text parts of it; tool calls as their JSON. Raises RowFault."""
    body = object_of(message, "a message")
    content = body.get("content")
    texts: list[str] = []
    if isinstance(content, str):
        texts.append(content)
    elif isinstance(content, list):
        texts += [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if body.get("tool_calls"):
        texts.append(json.dumps(body["tool_calls"], ensure_ascii=False))
    return "".join(texts)


def message_segments(messages: list[Any], count: Counts) -> tuple[Segment, ...]:
    """One segment a message that has words; equal messages have equal ids. Raises RowFault."""
    out = []
    for message in messages:
        text = content_text(message)
        if text:
            name = f"{message.get('role')}\0{text}".encode("utf-8", "replace")
            out.append(Segment(f"m{xxhash.xxh3_64_hexdigest(name)}", max(count(text), 1)))
    return tuple(out)


def without_text(row: Row, count: Counts) -> None:
    """Lengths in the place of a row's text. Raises RowFault."""
    if row.messages is not None:
        row.segments = message_segments(row.messages, count)
        row.input_length = sum(segment.len for segment in row.segments)
        row.messages = row.tools = None
    elif row.prompt is not None:
        row.input_length = max(count(row.prompt), 1)
        row.prompt = None
