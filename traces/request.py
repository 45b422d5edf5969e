"""One row of a trace, before any system has touched it, and the header that stands above the rows."""

from __future__ import annotations

from typing import Any

import msgspec


class Segment(msgspec.Struct, frozen=True, gc=False):
    """A shared piece of a prompt: equal ids are equal tokens. `len` in tokens."""

    id: str | int
    len: int


class Carry(msgspec.Struct, frozen=True, gc=False, rename={"from_id": "from"}):
    """The first `tokens` tokens of a prompt are the parent's prompt + output, from its start."""

    from_id: str
    tokens: int


class Slo(msgspec.Struct, frozen=True, gc=False, rename={"slo_class": "class"}):
    """Targets of one request, in milliseconds; absent = none."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    slo_class: str | None = None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the trace states it, normalized: seconds, names of the canonical format, defaults filled in.

    Exactly one of `prompt_token_ids`, `prompt`, `messages`, `input_length` is set.
    """

    index: int  # 0-based data row of the trace: the join key `request` of every table
    line: int  # 1-based line in the file, for messages
    id: str
    arrival_s: float | None = None  # seconds from trace start
    arrival_round: int | None = None  # from 1; only for --clock rounds
    session: str | None = None
    turn: int | None = None
    parents: tuple[str, ...] = ()
    think_s: float | None = None  # wait after the last parent finished
    prompt_token_ids: tuple[int, ...] | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    input_length: int | None = None
    hash_ids: tuple[int | str, ...] | None = None
    segments: tuple[Segment, ...] | None = None
    carry: Carry | None = None
    output_length: int | None = None  # forced unless stop == "eos"; always set once loaded (min with max_tokens)
    output_token_ids: tuple[int, ...] | None = None
    max_tokens: int | None = None
    stop: str | None = None
    priority: int = 0  # lower is more urgent
    slo: Slo | None = None
    model: str | None = None
    adapter: str | None = None
    tenant: str | None = None
    media: list[Any] | None = None
    sampling: dict[str, Any] | None = None
    observed: dict[str, Any] | None = None
    src: dict[str, Any] | None = None
