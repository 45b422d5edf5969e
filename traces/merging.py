"""Several traces as one: times by their origins or from a common start, ids kept apart, streamed side by side.

Equal ids of two traces are different things: rows, sessions, hash ids and segments get their trace's name in front.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from traces.errors import BenchctlError
from traces.formats.times import iso_ns, iso_text
from traces.load import Trace
from traces.request import Carry, Request, Segment
from traces.rows import Row, RowFault, from_request
from traces.transform import Change, TraceWriter, header_of

Align = Literal["origin", "start"]


def merge_traces(traces: list[Trace], out: Path, align: Align | None) -> Change:
    """`align`: `origin` sets each trace to its time_origin, `start` all to 0; None: origin where every trace has one.

    Raises BenchctlError: unequal block sizes, origins that only some have, rows without a time.
    """
    names = _names(traces)
    origins = [_origin(trace) for trace in traces]
    if align is None:
        align = "origin" if all(origin is not None for origin in origins) else "start"
        if align == "start" and any(origin is not None for origin in origins):
            raise BenchctlError(
                "some of the traces have a time_origin and some do not", where="trace merge", fix="--align start"
            )
    if align == "origin" and None in origins:
        raise BenchctlError("not every trace has a time_origin", where="--align origin", fix="--align start")
    if align == "origin" and len({_has_zone(trace) for trace in traces}) > 1:
        naive = next(trace for trace in traces if not _has_zone(trace))
        raise BenchctlError(
            f"the time_origin {naive.header.time_origin} says no time zone, another one does",
            where=f"{naive.path}, line 1",
            fix="write its offset into the header, or --align start",
        )
    base = min((origin for origin in origins if origin is not None), default=0)
    shifts = [(origin or 0) - base if align == "origin" else 0 for origin in origins]
    header, by_session = _header(traces, names, base if align == "origin" else None)
    with TraceWriter(out, *(trace.path for trace in traces)) as writer:
        streams = [_rows(*args) for args in zip(traces, names, shifts, by_session, strict=True)]
        for _, _, row in heapq.merge(*streams, key=lambda entry: entry[:2]):
            writer.write(row)
        note = {
            "merge": [
                {"trace": name, "sha256": trace.sha256, "shift_s": shift / 1e9}
                for trace, name, shift in zip(traces, names, shifts, strict=True)
            ]
        }
        return writer.finish(header, {**note, "align": align})


def _names(traces: list[Trace]) -> list[str]:
    """A name for each, no two alike."""
    seen: dict[str, int] = {}
    out = []
    for trace in traces:
        times = seen[trace.name] = seen.get(trace.name, 0) + 1
        out.append(trace.name if times == 1 else f"{trace.name}-{times}")
    return out


def _origin(trace: Trace) -> int | None:
    if trace.header.time_origin is None:
        return None
    try:
        return iso_ns(trace.header.time_origin, "time_origin")
    except RowFault as fault:
        raise BenchctlError(
            fault.what, where=f"{trace.path}, line 1", fix="mend the header, or --align start"
        ) from None


def _has_zone(trace: Trace) -> bool:
    """Whether its origin states an offset; files with naive times give an origin without."""
    after_seconds = (trace.header.time_origin or "")[len("2026-01-01T00:00:00") :]
    return any(sign in after_seconds for sign in "+-Zz")


def _header(traces: list[Trace], names: list[str], base: int | None) -> tuple[dict[str, Any], list[bool]]:
    """(the merged header, for each trace whether its hash ids are those of a session)."""
    sizes = {trace.header.block_size for trace in traces if _has_hash_ids(trace)}
    if len(sizes) > 1:
        raise BenchctlError(
            f"hash ids of blocks of {' and '.join(map(str, sorted(sizes)))} tokens",
            where="trace merge",
            fix="merge traces of one block size",
        )
    scopes = [trace.header.hash_scope == "session" for trace in traces]
    kinds = {trace.header.hash_kind for trace in traces}
    licences = {str(trace.header.licence) for trace in traces if trace.header.licence}
    header: dict[str, Any] = {
        "name": "+".join(names),
        "salt": "+".join(names),
        "source": [trace.header.source or trace.name for trace in traces],
    }
    if sizes:
        header["block_size"] = sizes.pop()
    if "content" in kinds:
        header["hash_kind"] = "content"
    if licences:
        header["licence"] = " and ".join(sorted(licences))
    if base is not None:
        header["time_origin"] = iso_text(base, zone=all(map(_has_zone, traces)))
    header["on_import"] = {
        "merged": {name: header_of(trace).get("on_import") for trace, name in zip(traces, names, strict=True)}
    }
    return header, scopes


def _has_hash_ids(trace: Trace) -> bool:
    return any(request.hash_ids is not None for request in trace.requests())


def _rows(trace: Trace, name: str, shift: int, by_session: bool) -> Iterator[tuple[int, int, Row]]:
    """(arrival in ns, row of the trace, the row with its trace's name on every id)."""
    for request in trace.requests():
        if request.arrival_s is None:
            raise BenchctlError(
                f'"{request.id}" has no arrival_s',
                where=f"{trace.path}, line {request.line}",
                fix="give every row a time",
            )
        at = round(request.arrival_s * 1e9) + shift
        row = _renamed(request, name, by_session)
        row.arrival_s = at / 1e9
        yield at, request.index, row


def _renamed(request: Request, name: str, by_session: bool) -> Row:
    row = from_request(request)
    row.id = f"{name}/{request.id}"
    row.parents = tuple(f"{name}/{parent}" for parent in request.parents) or None
    if request.session is not None:
        row.session = f"{name}/{request.session}"
    if request.carry is not None:
        row.carry = Carry(f"{name}/{request.carry.from_id}", request.carry.tokens)
    if request.segments is not None:
        row.segments = tuple(Segment(f"{name}/{_typed(piece.id)}", piece.len) for piece in request.segments)
    if request.hash_ids is not None:
        # Ids of a session alone get its name too: the merged trace's ids are the file's.
        scope = (
            f"{name}/"
            if not by_session
            else f"{name}/{request.session if request.session is not None else f'row {request.index}'}/"
        )
        row.hash_ids = tuple(f"{scope}{_typed(id)}" for id in request.hash_ids)
    row.src = {**(request.src or {}), "trace": name}
    return row


def _typed(id: int | str) -> str:
    """5 and "5" are two ids."""
    return str(id) if isinstance(id, int) else f"'{id}"
