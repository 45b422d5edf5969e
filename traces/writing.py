"""Writes a trace whose header is known only at the end: rows to a file beside the target, then header and rows into place.

Knows canonical lines and how to sort them by arrival without holding them; knows no format.
"""

from __future__ import annotations

import gzip
import heapq
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

import msgspec

from traces.errors import BenchctlError
from traces.header import VERSION

SORT_ROWS = 200_000  # of one run of the external sort
SORT_BYTES = 64 << 20
COPY_BYTES = 1 << 20
# A canonical line begins with its id, where it has one, and its arrival.
_ARRIVAL = re.compile(rb'(\{(?:"id":"(?:[^"\\]|\\.)*",)?)"arrival_s":([-+0-9.e]+)')

Line = tuple[int, bytes]  # arrival in ns, the line without its end


def split_arrival(line: bytes) -> tuple[bytes, int, bytes] | None:
    """(what stands before, arrival in ns, what stands after) of a canonical line; None where it has none."""
    match = _ARRIVAL.match(line)
    if match is None:
        return None
    return match[1], round(float(match[2]) * 1e9), line[match.end() :]


def with_arrival(line: bytes, ns: int) -> bytes:
    """The same line at another time; as it was where it has none."""
    parts = split_arrival(line)
    if parts is None:
        return line
    return parts[0] + b'"arrival_s":' + msgspec.json.encode(ns / 1e9) + parts[2]


class BodyWriter:
    """The target appears, whole, when `finish` is called; without it nothing is left behind. Mutable, one use."""

    def __init__(self, target: Path, *sources: Path) -> None:
        self.target = target
        if target.is_dir():
            raise BenchctlError(f"{target} is a folder", where="--out", fix="name the file to write")
        if target.exists() and any(source.exists() and os.path.samefile(target, source) for source in sources):
            raise BenchctlError(
                "the file to write is the file to read", where=str(target), fix="give --out another name"
            )
        self._folder: str | None = None
        self._parts = 0

    def __enter__(self) -> BodyWriter:
        # Made here, so that whatever comes next, Ctrl-C too, leaves nothing behind.
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self._folder = tempfile.mkdtemp(prefix=f".{self.target.name[:60]}.", dir=self.target.parent)
            self._path, self._file = self._new_part()
        except OSError as error:
            self._clear()
            raise BenchctlError(
                f"cannot write {self.target}: {error.strerror}", fix="give --out another place"
            ) from None
        except BaseException:
            self._clear()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._clear()

    def _clear(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def folder(self) -> Path:
        """For parts; gone in the end."""
        assert self._folder is not None, "BodyWriter outside its with"
        return Path(self._folder)

    def _new_part(self) -> tuple[Path, IO[bytes]]:
        self._parts += 1
        path = self.folder / f"part-{self._parts}"
        return path, open(path, "wb", buffering=COPY_BYTES)

    def write(self, line: bytes) -> None:
        """One canonical line, without its end."""
        self._file.write(line + b"\n")

    def lines(self) -> Iterator[Line]:
        """Every line so far in order, with its arrival; a line without one has that of the line above."""
        self._file.flush()
        last = 0
        with open(self._path, "rb", buffering=COPY_BYTES) as source:
            for line in source:
                parts = split_arrival(line)
                last = last if parts is None else parts[1]
                yield last, line.rstrip(b"\n")

    def replace(self, lines: Iterable[bytes]) -> None:
        """Other lines in the place of those so far, which `lines` may be made from while it is read."""
        path, file = self._new_part()
        for line in lines:
            file.write(line)
            file.write(b"\n")
        self._file.close()
        self._path.unlink()
        self._path, self._file = path, file

    def sort(self) -> None:
        """Stably by arrival, in runs of 200,000 rows, or 64 MB, that are merged from disk."""
        self.replace(line for _, line in sorted_lines(self.lines(), self.folder))

    def finish(self, header: dict[str, Any]) -> None:
        """Put the header before the lines, and both into place. A target named `.gz` is packed."""
        self._file.close()
        head = msgspec.json.encode({"benchctl_trace": VERSION, **header}) + b"\n" if header else b""
        whole = self.folder / "whole"
        with open(whole, "wb") as raw, open(self._path, "rb") as rows:
            if self.target.name.endswith(".gz"):
                # mtime 0 and no name: the same rows give the same bytes.
                with gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=6, mtime=0) as packed:
                    packed.write(head)
                    shutil.copyfileobj(rows, cast(IO[bytes], packed), COPY_BYTES)
            else:
                raw.write(head)
                raw.flush()
                shutil.copyfileobj(rows, raw, COPY_BYTES)
        os.replace(whole, self.target)


def sorted_lines(lines: Iterable[Line], folder: Path) -> Iterator[Line]:
    """Stable external sort by time: memory for one run, the others on disk in `folder`."""
    runs: list[Path] = []
    held: list[Line] = []
    size = 0
    for entry in lines:
        held.append(entry)
        size += len(entry[1])
        if len(held) >= SORT_ROWS or size >= SORT_BYTES:
            runs.append(_spill(held, folder / f"run-{len(runs)}"))
            held, size = [], 0
    held.sort(key=lambda entry: entry[0])
    if not runs:
        yield from held
        return
    # merge is stable: of equal keys the earlier run's comes first.
    yield from heapq.merge(*(_read_run(path) for path in runs), held, key=lambda entry: entry[0])
    for path in runs:
        path.unlink()


def _spill(held: list[Line], path: Path) -> Path:
    held.sort(key=lambda entry: entry[0])
    with open(path, "wb", buffering=COPY_BYTES) as out:
        for ns, line in held:
            out.write(b"%d %b\n" % (ns, line))
    return path


def _read_run(path: Path) -> Iterator[Line]:
    with open(path, "rb", buffering=1 << 16) as source:
        for entry in source:
            ns, _, line = entry.partition(b" ")
            yield int(ns), line.rstrip(b"\n")
