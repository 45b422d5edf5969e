"""Changes of a trace: sort, slice, scale, shuffle. Each returns what it wrote, with a note in the header of what it changed.

Knows canonical rows only. Streams; what is held is a number a request where that is needed (shuffle), never rows. A row whose parent is left
out begins anew: it keeps its lengths, and the tokens it carried become unique; all such rows are counted.
"""

from __future__ import annotations

import math
import random
from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import xxhash

from traces.errors import BenchctlError
from traces.formats.times import iso_ns, iso_text
from traces.load import Trace
from traces.request import Carry, Request, Segment
from traces.rows import Row, RowFault, canonical_line, from_request
from traces.writing import BodyWriter


@dataclass(slots=True)
class Change:
    """What was written. `counts`: what happened to rows, by name."""

    out: str
    num_requests: int = 0
    first_s: float | None = None
    last_s: float | None = None
    counts: Counter[str] = field(default_factory=Counter)
    note: dict[str, Any] = field(default_factory=dict)

    @property
    def span_s(self) -> float | None:
        return None if self.first_s is None or self.last_s is None else self.last_s - self.first_s


class TraceWriter:
    """Rows into a new trace. Knows which ids were written, so that nothing names a row that was not. Mutable, one change."""

    def __init__(self, out: Path, *sources: Path) -> None:
        self.change = Change(str(out))
        self.body = BodyWriter(out, *sources)
        self._ids: set[str] = set()
        self._last = -math.inf
        self._ordered = True

    def __enter__(self) -> TraceWriter:
        self.body.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.body.__exit__(*error)

    def write(self, row: Row) -> None:
        change = self.change
        if row.parents:
            kept = tuple(parent for parent in row.parents if parent in self._ids)
            if len(kept) < len(row.parents):
                change.counts["rows that begin anew: a parent was left out"] += 1
                row.parents = kept or None
                row.think_s = row.think_s if kept else None
        if row.carry is not None and row.carry.from_id not in self._ids:
            change.counts["rows whose carried tokens became unique: the parent was left out"] += 1
            row.carry = None
        if row.id is not None:
            self._ids.add(row.id)
        if row.arrival_s is not None:
            self._ordered = self._ordered and row.arrival_s >= self._last
            self._last = row.arrival_s
            change.first_s = row.arrival_s if change.first_s is None else min(change.first_s, row.arrival_s)
            change.last_s = row.arrival_s if change.last_s is None else max(change.last_s, row.arrival_s)
        change.num_requests += 1
        self.body.write(canonical_line(row))

    def finish(self, header: dict[str, Any], note: dict[str, Any]) -> Change:
        change = self.change
        if not change.num_requests:
            raise BenchctlError("no request is left", where=change.out, fix="loosen what was asked for")
        if not self._ordered:
            self.body.sort()
        change.note = {**note, **({"counts": dict(change.counts)} if change.counts else {})}
        self.body.finish(with_note(header, change.note))
        return change


def header_of(trace: Trace) -> dict[str, Any]:
    """The header's keys that are not at their default."""
    line = trace.header.canonical_line()
    keys: dict[str, Any] = msgspec.json.decode(line) if line else {}
    keys.pop("benchctl_trace", None)
    return keys


def with_note(header: dict[str, Any], note: dict[str, Any]) -> dict[str, Any]:
    """The header with one more entry in the list of changes under `on_import`."""
    before = header.get("on_import")
    notes = dict(before) if isinstance(before, dict) else {} if before is None else {"before": before}
    notes["changes"] = [*notes.get("changes", []), note]
    return {**header, "on_import": notes}


def sort_trace(trace: Trace, out: Path) -> Change:
    """By arrival, ties in file order; a file of any size. Raises BenchctlError where a row would come before its parent."""
    times: dict[str, float] = {}
    moved = 0
    last = -math.inf
    with TraceWriter(out, trace.path) as writer:
        for request in trace.requests(order="file"):
            at = request.arrival_s if request.arrival_s is not None else max(last, 0.0)
            for parent in (*request.parents, *([request.carry.from_id] if request.carry else ())):
                if times[parent] > at:
                    raise BenchctlError(
                        f'"{request.id}" arrives at {at:g} s, before its parent "{parent}" at {times[parent]:g} s',
                        where=f"{trace.path}, line {request.line}",
                        fix="mend the times: a parent stands above its children",
                    )
            times[request.id] = at
            moved += at < last
            last = max(last, at)
            writer.write(from_request(request))
        return writer.finish(header_of(trace), {"sort": "by arrival_s, stable", "rows_behind_a_later_one": moved})


@dataclass(frozen=True, slots=True)
class SliceOptions:
    """What stays. None: no bound. Times in seconds of the trace, both ends of a length range included, `end_s` not.

    `keep_share`: of the sessions, whole ones; a row without a session is one by itself. `max_model_len`: prompts of this many tokens or
    more are left out (`skip`) or cut to one less (`truncate`). `rebase`: the first row kept arrives at 0.
    """

    start_s: float | None = None
    end_s: float | None = None
    first: int | None = None
    sessions: tuple[str, ...] = ()
    keep_share: float | None = None
    input_range: tuple[int | None, int | None] = (None, None)
    output_range: tuple[int | None, int | None] = (None, None)
    max_model_len: int | None = None
    over_length: Literal["skip", "truncate"] = "skip"
    rebase: bool = True
    seed: int = 0

    def statement(self) -> dict[str, Any]:
        """For the header: what was asked for."""
        given = {key: getattr(self, key) for key in self.__dataclass_fields__}
        plain = {key: value for key, value in given.items() if value not in (None, (), (None, None)) and key != "seed"}
        if self.keep_share is not None:
            plain["seed"] = self.seed
        if self.max_model_len is None:
            plain.pop("over_length")
        return plain


def slice_trace(trace: Trace, out: Path, options: SliceOptions) -> Change:
    """The rows that `options` keep, in order of arrival. Raises BenchctlError."""
    cut = _Cutter(options.max_model_len, trace.header.block_size)
    origin: float | None = None
    with TraceWriter(out, trace.path) as writer:
        counts = writer.change.counts
        for request in trace.requests():
            reason = _left_out(request, options)
            if reason is None and options.max_model_len is not None and options.over_length == "skip":
                length = _prompt_tokens(request)
                counts["text whose length is not known: kept"] += length is None
                reason = "over max_model_len" if length is not None and length >= options.max_model_len else None
            if reason is not None:
                counts[f"left out, {reason}"] += 1
                continue
            row = from_request(request)
            if options.over_length == "truncate":
                counts["prompts cut to max_model_len - 1"] += cut.cut(row)
            if options.rebase and row.arrival_s is not None:
                origin = row.arrival_s if origin is None else origin
                row.arrival_s = _minus(row.arrival_s, origin)
            writer.write(row)
            if options.first is not None and writer.change.num_requests >= options.first:
                break
        for name in [name for name, count in counts.items() if not count]:
            del counts[name]
        header = header_of(trace)
        if origin and trace.header.time_origin:
            header["time_origin"] = _later(trace.header.time_origin, origin)
        return writer.finish(header, {"slice": options.statement(), **({"origin_s": origin} if origin else {})})


def _left_out(request: Request, options: SliceOptions) -> str | None:
    """Why the row does not stay; None: it does."""
    at = request.arrival_s
    if options.start_s is not None and (at is None or at < options.start_s):
        return "before the window"
    if options.end_s is not None and (at is None or at >= options.end_s):
        return "after the window"
    if options.sessions and request.session not in options.sessions:
        return "another session"
    if options.keep_share is not None:
        name = f"s{request.session}" if request.session is not None else f"r{request.id}"
        if xxhash.xxh3_64_intdigest(f"{options.seed} {name}".encode()) >= options.keep_share * 2**64:
            return "thinned by session"
    for what, value, (low, high) in (
        ("prompt", _prompt_tokens(request), options.input_range),
        ("output", request.output_length, options.output_range),
    ):
        if (low is not None or high is not None) and value is None:
            return f"{what} is text, of unknown length"
        if value is not None and (low is not None and value < low or high is not None and value > high):
            return f"{what} length"
    return None


def _prompt_tokens(request: Request) -> int | None:
    return len(request.prompt_token_ids) if request.prompt_token_ids is not None else request.input_length


class _Cutter:
    """Cuts prompts to their leading part, so that what they share with others stays shared. Mutable: remembers who was cut."""

    def __init__(self, max_model_len: int | None, block_size: int) -> None:
        self._room = None if max_model_len is None else max_model_len - 1
        self._block_size = block_size
        self._totals: dict[str, int] = {}  # of rows that were cut: prompt + output

    def cut(self, row: Row) -> bool:
        """Whether `row` was changed; its own prompt, or what it carries from a row that was."""
        if self._room is None:
            return False
        if row.carry is not None and row.carry.from_id in self._totals:
            row.carry = Carry(row.carry.from_id, min(row.carry.tokens, self._totals[row.carry.from_id]))
        if row.prompt_token_ids is not None and len(row.prompt_token_ids) > self._room:
            row.prompt_token_ids = row.prompt_token_ids[: self._room]
        elif row.input_length is not None and row.input_length > self._room:
            row.input_length = self._room
            if row.hash_ids is not None:
                row.hash_ids = row.hash_ids[: -(-self._room // self._block_size)]
            row.segments = self._cut_segments(row.segments)
            if row.carry is not None:
                row.carry = Carry(row.carry.from_id, min(row.carry.tokens, self._room))
        else:
            return False
        if row.id is not None:
            self._totals[row.id] = self._room + (row.output_length or len(row.output_token_ids or ()))
        return True

    def _cut_segments(self, segments: tuple[Segment, ...] | None) -> tuple[Segment, ...] | None:
        out: list[Segment] = []
        left = self._room or 0
        for segment in segments or ():
            if left <= 0:
                break
            out.append(Segment(segment.id, min(segment.len, left)))
            left -= segment.len
        return tuple(out) or None


def scale_trace(trace: Trace, out: Path, factor: float) -> Change:
    """Every gap and think time times `factor`; the first arrival stays where it is. Raises BenchctlError."""
    first: float | None = None
    with TraceWriter(out, trace.path) as writer:
        for request in trace.requests():
            row = from_request(request)
            if row.arrival_s is not None:
                first = row.arrival_s if first is None else first
                row.arrival_s = round(first + (row.arrival_s - first) * factor, 9)
            if row.think_s is not None:
                row.think_s = round(row.think_s * factor, 9)
            writer.write(row)
        return writer.finish(header_of(trace), {"scale": {"gaps_times": factor, "span_before_s": trace.span_s}})


def factor_for_rate(trace: Trace, rate: float) -> float:
    """The factor after which the trace has `rate` requests/s over its span. Raises BenchctlError."""
    if trace.span_s <= 0:
        raise BenchctlError(
            "the trace has no span to scale", where=str(trace.path), fix="benchctl replay --request-rate"
        )
    return (trace.num_requests - 1) / trace.span_s / rate


def shuffle_arrivals(trace: Trace, out: Path, seed: int) -> Change:
    """Give the starts to other sessions: the process of arrivals stays, what arrives when is drawn anew.

    A session's later rows keep their distance to its first; a row without a session is one by itself. Raises BenchctlError.
    """
    starts = array("d")
    places: dict[str, int] = {}  # session → place of its start
    for request in trace.requests():
        if request.arrival_s is None:
            raise BenchctlError(
                f'"{request.id}" has no arrival_s',
                where=f"{trace.path}, line {request.line}",
                fix="give every row a time",
            )
        if request.session is None or request.session not in places:
            if request.session is not None:
                places[request.session] = len(starts)
            starts.append(request.arrival_s)
    drawn = list(range(len(starts)))
    rng = random.Random(f"{seed} shuffle")
    for i in range(len(drawn) - 1, 0, -1):
        j = int(rng.random() * (i + 1))
        drawn[i], drawn[j] = drawn[j], drawn[i]
    seen: set[str] = set()
    place = 0
    with TraceWriter(out, trace.path) as writer:
        for request in trace.requests():
            row = from_request(request)
            own = places[request.session] if request.session is not None else place
            if request.session is None or request.session not in seen:
                place += 1
                if request.session is not None:
                    seen.add(request.session)
            assert row.arrival_s is not None, row
            row.arrival_s = round(starts[drawn[own]] + (row.arrival_s - starts[own]), 9)
            writer.write(row)
        return writer.finish(header_of(trace), {"shuffle_arrivals": {"seed": seed, "starts": len(starts)}})


def _minus(a: float, b: float) -> float:
    """Exact to the nanosecond."""
    return (round(a * 1e9) - round(b * 1e9)) / 1e9


def _later(origin: str, seconds: float) -> str:
    """The moment `seconds` after an ISO time; the text as it was where it is none."""
    try:
        ns = iso_ns(origin, "time_origin")
    except RowFault:
        return origin
    return iso_text(ns + round(seconds * 1e9), zone=any(sign in origin[19:] for sign in "+-Zz"))
