"""RAGPulse: times as texts of whole seconds, and hash ids as five lists of components whose lengths stand in side files.

With the lengths (`--with FILE`, the five `{"id", "token_length"}` files or one CSV of component, id, token_length) a prompt is segments in the
order in which the lists are named, and a unique rest; without them prompts are unique. The order is an assumption. Source:
flashserve/RAGPulse, README and data.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from traces.errors import BenchctlError
from traces.formats.base import Draft, Format, ImportOptions, Reader, Sample, list_of, object_of, rest, text_of, whole
from traces.request import Segment
from traces.rows import Row, RowFault

COMPONENTS = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")
USED = frozenset({"timestamp", "input_length", "output_length", "session_id"})


class RagPulseReader(Reader):
    def __init__(self, sample: Sample, options: ImportOptions) -> None:
        super().__init__(sample, options)
        self._lengths: dict[tuple[str, int], int] = {}
        for path in options.side_files:
            read_lengths(path, self._lengths)
        self._turns: dict[str, tuple[str, int, int]] = {}  # session → id, turn, time of its last row
        if self._lengths:
            self.assumed.append(
                f"prompts are their components in the order {', '.join(COMPONENTS)}, then a unique rest"
            )
        else:
            self.warnings.append(
                "components have no lengths, so no tokens are shared: give the component files with --with"
            )

    def read(self, record: dict[str, Any], number: int) -> Iterable[Draft]:
        time = self.time(record.get("timestamp"), "s", "timestamp", texts=True)
        length = whole(record.get("input_length"), "input_length")
        row = Row(input_length=length, output_length=whole(record.get("output_length"), "output_length"))
        row.src = {"row": number, **rest(record, USED)}
        if self._lengths and length is not None:
            row.segments = self._segments(object_of(record.get("hash_ids"), "hash_ids"), length)
        session = text_of(record.get("session_id"), "session_id")
        if session is not None:
            before, turn, at = self._turns.get(session, (None, 0, 0))
            row.session, row.turn, row.id = session, turn + 1, f"{session}-t{turn + 1}"
            if before is not None and time >= at:
                row.parents, row.think_s = (before,), (time - at) / 1e9
                self.counts["think times are gaps between arrivals, too long by the answer"] += 1
            self._turns[session] = (row.id, turn + 1, time)
        return (Draft(row, time),)

    def _segments(self, components: dict[str, Any], length: int) -> tuple[Segment, ...]:
        out: list[Segment] = []
        left = length
        for name in COMPONENTS:
            for id in list_of(components.get(name) or [], f"hash_ids.{name}"):
                size = self._lengths.get((name, id)) if type(id) is int else None
                if size is None:
                    raise RowFault(f"no length of {name} {id!r:.40}", fix="give all five component files with --with")
                if size > left:
                    self.counts["prompts shorter than their components: cut there"] += 1
                    size = left
                if size > 0:
                    out.append(Segment(f"{name} {id}", size))
                    left -= size
        return tuple(out)


def read_lengths(path: Path, into: dict[tuple[str, int], int]) -> None:
    """A CSV of component, id, token_length; or JSON lines of {id, token_length}, the component in the file's name."""
    number = 0
    try:
        with open(path, encoding="utf-8-sig", newline="") as source:
            if source.readline().lstrip().startswith("{"):
                source.seek(0)
                component = next((name for name in COMPONENTS if name.removesuffix("_ids") in path.name), None)
                if component is None:
                    raise BenchctlError(f"{path.name} names no component", where="--with", fix=", ".join(COMPONENTS))
                for line in source:
                    number += 1
                    if line.strip():
                        _keep(into, component, msgspec.json.decode(line))
            else:
                source.seek(0)
                for entry in csv.DictReader(source):
                    number += 1
                    _keep(into, str(entry["component"]), entry)
    except OSError as error:
        raise BenchctlError(f"cannot read {path}: {error.strerror}", where="--with", fix="check the path") from None
    except (KeyError, TypeError, ValueError, msgspec.DecodeError, csv.Error) as error:
        raise BenchctlError(
            f"no component lengths: {error!r:.80}",
            where=f"{path}, row {number}",
            fix="a file with id and token_length",
        ) from None


def _keep(into: dict[tuple[str, int], int], component: str, entry: dict[str, Any]) -> None:
    id = entry.get("id", entry.get("hash_id"))
    into[component, int(id)] = int(entry["token_length"])  # type: ignore[arg-type]


FORMAT = Format(
    "ragpulse",
    "RAGPulse (JSONL with components under hash_ids)",
    lambda sample: sample.kind != "csv" and isinstance(sample.first.get("hash_ids"), dict),
    RagPulseReader,
)
