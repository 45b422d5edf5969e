"""A trace in another format: Mooncake JSONL, vLLM bench's custom JSONL, canonical JSONL.

What the format cannot hold is left out, and counted. Prompts made of segments, carried tokens or token ids become Mooncake's hash ids by their tokens:
equal prefixes of whole blocks stay equal, no others are.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from traces.errors import BenchctlError
from traces.load import Trace
from traces.request import Request
from traces.rows import canonical_line, from_request
from traces.tokens import TokenMaker
from traces.transform import header_of
from traces.writing import BodyWriter


@dataclass(slots=True)
class ExportReport:
    out: str
    format: str
    num_requests: int = 0
    left_out: Counter[str] = field(default_factory=Counter)  # keys that the format has no place for, in rows


def export_trace(
    trace: Trace, out: Path, format: str, *, block_size: int | None = None, vocab_size: int | None = None
) -> ExportReport:
    """Rows in order of arrival. `block_size`: of Mooncake's hash ids where they are made. `vocab_size`: to make ids for vLLM.

    Raises BenchctlError.
    """
    report = ExportReport(str(out), format)
    with BodyWriter(out, trace.path) as body:
        for line in EXPORTERS[format](trace, report, block_size, vocab_size):
            body.write(line)
            report.num_requests += 1
        body.finish(header_of(trace) if format == "canonical" else {})
    return report


def _canonical(trace: Trace, report: ExportReport, block_size: int | None, vocab_size: int | None) -> Iterator[bytes]:
    first = 2 if header_of(trace) else 1
    for line, request in enumerate(trace.requests(), first):
        row = from_request(request)
        if row.id == f"r{line}":
            row.id = None  # it is that without being written
        yield canonical_line(row)


def _mooncake(trace: Trace, report: ExportReport, block_size: int | None, vocab_size: int | None) -> Iterator[bytes]:
    if (
        block_size is not None
        and any(r.hash_ids is not None for r in trace.requests())
        and block_size != trace.header.block_size
    ):
        raise BenchctlError(
            f"the trace's own hash ids are of {trace.header.block_size} tokens",
            where="--block-size",
            fix="leave it out",
        )
    hashes = _HashIds(trace, block_size or trace.header.block_size)
    for request in trace.requests():
        row: dict[str, Any] = {}
        if request.arrival_s is not None:
            row["timestamp"] = _number(request.arrival_s * 1000)
        if request.prompt is not None:
            row["text_input"] = request.prompt
        elif request.messages is not None:
            row["messages"] = request.messages
            if request.tools is not None:
                row["tools"] = request.tools
        else:
            row["input_length"] = (
                len(request.prompt_token_ids) if request.prompt_token_ids is not None else request.input_length
            )
        row["output_length"] = request.output_length
        hash_ids = hashes.of(request)
        if hash_ids is not None:
            row["hash_ids"] = hash_ids
        if request.session is not None:
            row["session_id"] = request.session
        if request.think_s is not None:
            row["delay"] = _number(request.think_s * 1000)
        if request.priority:
            row["priority"] = request.priority
        row |= {key: value for key, value in (request.src or {}).items() if key not in (*row, "row")}
        _count(
            report,
            request,
            ("slo", "model", "adapter", "tenant", "media", "sampling", "observed", "stop", "arrival_round"),
        )
        yield json.dumps(row, ensure_ascii=False).encode()


class _HashIds:
    """Hash ids of a row: its own, or made of its tokens, numbered in order of first use."""

    def __init__(self, trace: Trace, block_size: int) -> None:
        self._maker = TokenMaker(trace, vocab_size=None)
        self._block_size = block_size
        self._numbers: dict[tuple[int, bytes], int] = {}  # (the prefix before, the block's tokens) → id

    def of(self, request: Request) -> list[int | str] | None:
        """None where nothing is shared, or the prompt is text."""
        if request.hash_ids is not None:
            return list(request.hash_ids)
        if request.segments is None and request.carry is None and request.prompt_token_ids is None:
            return None
        ids = self._maker.prompt_ids(request)
        out: list[int | str] = []
        before = -1
        for start in range(0, len(ids), self._block_size):
            block = np.ascontiguousarray(ids[start : start + self._block_size]).tobytes()
            before = self._numbers.setdefault((before, block), len(self._numbers))
            out.append(before)
        return out


def _vllm_custom(trace: Trace, report: ExportReport, block_size: int | None, vocab_size: int | None) -> Iterator[bytes]:
    maker = None if vocab_size is None else TokenMaker(trace, vocab_size=vocab_size)
    for request in trace.requests():
        row: dict[str, Any]
        if request.prompt is not None:
            row = {"prompt": request.prompt}
        elif request.messages is not None:
            row = {"messages": request.messages, **({"tools": request.tools} if request.tools is not None else {})}
        elif request.prompt_token_ids is not None:
            row = {"prompt": list(request.prompt_token_ids)}
        elif maker is not None:
            row = {"prompt": maker.prompt_ids(request).tolist()}
        else:
            raise BenchctlError(
                f'"{request.id}" has a length and no text',
                where=f"{trace.path}, line {request.line}",
                fix="--vocab-size N makes token ids for it",
            )
        row["output_tokens"] = request.output_length
        row |= {key: value for key, value in (request.src or {}).items() if key not in (*row, "row")}
        _count(
            report,
            request,
            (
                "arrival_s",
                "session",
                "think_s",
                "priority",
                "slo",
                "model",
                "adapter",
                "tenant",
                "sampling",
                "observed",
            ),
        )
        yield json.dumps(row, ensure_ascii=False).encode()


def _number(milliseconds: float) -> int | float:
    """Whole milliseconds as an integer, as the format writes them; to the nanosecond."""
    value = round(milliseconds, 6)
    return int(value) if value.is_integer() else value


def _count(report: ExportReport, request: Request, keys: tuple[str, ...]) -> None:
    for key in keys:
        if getattr(request, key) not in (None, 0, 0.0):
            report.left_out[key] += 1


Exporter = Callable[[Trace, ExportReport, int | None, int | None], Iterator[bytes]]
EXPORTERS: dict[str, Exporter] = {"mooncake": _mooncake, "vllm-custom": _vllm_custom, "canonical": _canonical}
