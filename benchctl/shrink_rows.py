"""Rows of a trace as plain dicts in canonical keys, and the changes that leave them a valid trace.

Knows which keys hang together (a session, a parent, a shared prefix; a length and what is listed for it); knows no scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from traces.header import Header
from traces.load import Trace
from traces.rows import canonical_line, from_request

Row = dict[str, Any]
Rows = list[Row]

HASH_BLOCK = "\0block"  # beside hash_ids while rows are in hand: tokens of one; never written
ARRIVAL_KEYS = ("arrival_round", "arrival_s")
# Tried together, in this order: what stands first matters least.
DROPPABLE = (
    ("src",), ("observed",), ("sampling",), ("tenant",), ("model",), ("slo",), ("stop",), ("max_tokens",),
    ("session", "turn", "parents", "think_s"), ("carry",), ("segments",), ("hash_ids",), ("adapter",), ("priority",),
)  # fmt: skip


def rows_of(trace: Trace, num_prompts: int | None = None) -> Rows:
    """The rows in order of arrival, canonical."""
    out: Rows = []
    by_round = trace.any_arrival_round
    for request in trace.requests(order="round" if by_round else "time"):
        row = msgspec.json.decode(canonical_line(from_request(request)))
        out.append(row | {HASH_BLOCK: trace.header.block_size} if "hash_ids" in row else row)
        if num_prompts is not None and len(out) == num_prompts:
            break
    return out


def write_rows(path: Path, header: Header, rows: Sequence[Row], **changes: Any) -> None:
    """A canonical trace; `changes` are of the header."""
    head = msgspec.json.decode(header.canonical_line() or b"{}") | changes
    lines = [msgspec.json.encode({"benchctl_trace": 1} | head)] if head else []
    path.write_bytes(
        b"\n".join([*lines, *(msgspec.json.encode({k: v for k, v in row.items() if k != HASH_BLOCK}) for row in rows)])
        + b"\n"
    )


def arrival_of(row: Row) -> float:
    for key in ARRIVAL_KEYS:
        if key in row:
            return float(row[key])
    return 0.0


def sort_key(row: Row) -> float:
    return arrival_of(row)


def length_keys(row: Row, which: str) -> tuple[str, ...]:
    """The keys that state the length of a prompt or output; none for text, whose tokens only a tokenizer knows."""
    keys = ("input_length", "prompt_token_ids") if which == "prompt" else ("output_length", "output_token_ids")
    return tuple(key for key in keys if key in row)


def length_of(row: Row, which: str) -> int:
    for key in length_keys(row, which):
        return len(row[key]) if isinstance(row[key], list) else int(row[key])
    return 0


def with_length(row: Row, which: str, length: int) -> Row:
    """The row with a shorter prompt or output, its leading part kept."""
    out = dict(row)
    for key in length_keys(row, which):
        out[key] = row[key][:length] if isinstance(row[key], list) else length
    return out


def repaired(rows: Rows) -> Rows:
    """The rows with links only to rows that are there and above, and with no more shared tokens than lengths allow."""
    out: Rows = []
    totals: dict[str, int] = {}
    for row in rows:
        row = dict(row)
        parents = [parent for parent in row.get("parents", ()) if parent in totals]
        if "parents" in row and not parents:
            del row["parents"]
        elif parents:
            row["parents"] = parents
        prompt = length_of(row, "prompt")
        carry = row.get("carry")
        if carry is not None:
            available = min(totals.get(carry["from"], 0), prompt)
            if available < 1:
                del row["carry"]
            else:
                row["carry"] = {"from": carry["from"], "tokens": min(carry["tokens"], available)}
        if "segments" in row:
            row["segments"] = _fitting(row["segments"], prompt)
            if not row["segments"]:
                del row["segments"]
        if "hash_ids" in row:
            row["hash_ids"] = row["hash_ids"][: -(-prompt // row[HASH_BLOCK])]
        totals[row["id"]] = prompt + length_of(row, "output")
        out.append(row)
    return out


def _fitting(segments: list[dict[str, Any]], prompt: int) -> list[dict[str, Any]]:
    out, left = [], prompt
    for segment in segments:
        if left < 1:
            break
        taken = min(int(segment["len"]), left)
        out.append(segment | {"len": taken})
        left -= taken
    return out


def families(rows: Rows, *, prefixes: bool) -> list[list[int]]:
    """Rows that belong together, as lists of places: by session, parent and carry; with `prefixes` by the prompt's first shared piece too."""
    root = list(range(len(rows)))

    def find(i: int) -> int:
        while root[i] != i:
            root[i] = root[root[i]]
            i = root[i]
        return i

    seen: dict[tuple[str, Any], int] = {}
    places = {row["id"]: i for i, row in enumerate(rows)}
    for i, row in enumerate(rows):
        keys: list[tuple[str, Any]] = []
        if "session" in row:
            keys.append(("session", row["session"]))
        if prefixes and row.get("segments"):
            keys.append(("segment", row["segments"][0]["id"]))
        if prefixes and row.get("hash_ids"):
            keys.append(("hash", row["hash_ids"][0]))
        for key in keys:
            root[find(i)] = find(seen.setdefault(key, i))
        links = [*row.get("parents", ()), *([row["carry"]["from"]] if "carry" in row else [])]
        for link in links:
            if link in places:
                root[find(i)] = find(places[link])
    groups: dict[int, list[int]] = {}
    for i in range(len(rows)):
        groups.setdefault(find(i), []).append(i)
    return sorted(groups.values())
