"""A trace that is checked while it is read: the first rows are there before the last ones were looked at.

For large files, sorted by time. Its head is checked when it is opened; every later row when somebody asks for it, by the same
rules, once. When the end was reached it is a Trace like any other. Knows no engine and no clock.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Literal, cast

from traces.errors import BenchctlError
from traces.files import GZIP_MAGIC, copying_faults, file_stamp, resolve
from traces.load import Trace, due_round
from traces.request import Request
from traces.rows import Row, to_request
from traces.scan import Scan

STREAM_BYTES = 32 << 20  # files from this size on are worth it: below, checking all of them takes seconds at most
GZIP_RATIO = 6  # how many bytes of rows a byte of gzip stands for, about
HEAD_ROWS = 2000
HEAD_BYTES = 1 << 20


def is_large(path: str | Path) -> bool:
    """Whether a trace is read on the way by default: its file has some 32 MB of rows or more. Raises BenchctlError."""
    file, _ = resolve(path)
    size = file_stamp(file)[0]
    if size * GZIP_RATIO < STREAM_BYTES:
        return False
    return size >= STREAM_BYTES or _is_gzip(file)


def open_stream(path: str | Path, *, skip_bad: bool = False) -> StreamedTrace:
    """Check the head of the file and return it. Raises BenchctlError for a fault in the head."""
    file, note = resolve(path)
    stamp = file_stamp(file)
    copy = reader = None
    if _is_gzip(file):
        # gzip cannot be entered in the middle: what was unpacked is kept without a name, gone with the process.
        named = tempfile.NamedTemporaryFile(prefix="benchctl-")  # noqa: SIM115 - open as long as the trace
        copy, reader = cast(IO[bytes], named), open(named.name, "rb")  # noqa: SIM115
    scan = Scan(file, skip_bad=skip_bad, strict=False, copy=copy)
    return StreamedTrace(file, scan, stamp, [note] if note else [], copy, reader)


class StreamedTrace(Trace):
    """`complete` turns true when the end was read; before, numbers are those of the rows so far.

    Several readers may be under way: the one that is farthest checks new rows for all. Memory: 41 bytes a row, and the
    head's requests. Mutable.
    """

    def __init__(
        self,
        path: Path,
        scan: Scan,
        stamp: tuple[int, int],
        notes: list[str],
        copy: IO[bytes] | None,
        reader: IO[bytes] | None,
    ) -> None:
        self._rows = scan.rows()
        self._copy, self._handle_of_copy = copy, reader
        self._failed: BenchctlError | None = None
        self.head: list[Request] = []
        super().__init__(path, scan, stamp, notes)
        while len(self.head) < HEAD_ROWS and scan.num_bytes < HEAD_BYTES:
            row = self._advance()
            if row is None:
                break
            self.head.append(self._made(row, scan.num_rows - 1))
        scan.raise_block_faults()
        scan.patient = False
        # The header is the first line, so it is known only now.
        self.header = scan.header
        self.name = scan.header.name or self.name

    def head_in_order(self, order: Literal["time", "round"], round_seconds: float) -> bool:
        """Whether the head's own order is the one asked for."""
        if order == "time":
            return self._scan.descent is None
        rounds = [due_round(request, round_seconds) for request in self.head]
        return rounds == sorted(rounds)

    def read_to_end(self, go_on: Callable[[], bool] = lambda: True) -> None:
        """Check what is left, and know all of the file. Stops where `go_on` says no. Raises BenchctlError."""
        at = 0
        while not self.complete and self._advance() is not None:
            at += 1
            if at % 4096 == 0 and not go_on():
                return

    def requests(
        self, order: Literal["time", "round", "file"] = "time", round_seconds: float = 1.0
    ) -> Iterator[Request]:
        """As of any trace, once it is complete. Before, each row is checked when it is asked for, its order too.

        Raises BenchctlError at a faulty row, or at the first that is out of order: those above it were given out.
        """
        if self.complete:
            return super().requests(order, round_seconds)
        return self._as_read(order, round_seconds)

    def by_row(self, index: int) -> Request:
        if index < len(self.head):
            return self.head[index]
        if self._handle_of_copy is not None:
            assert self._copy is not None
            with copying_faults(self.path):
                self._copy.flush()
            self._handle = self._handle_of_copy
        return super().by_row(index)

    def by_id(self, id: str) -> Request:
        row = self._scan.row_of(id)
        if row is None:
            raise KeyError(id)
        return self.by_row(row)

    def _advance(self) -> Row | None:
        """The next row that nobody has seen; None at the end."""
        if self._failed is not None:
            raise self._failed
        try:
            row = next(self._rows, None)
            if row is None:
                self._check_unchanged()
        except BenchctlError as error:
            self._failed = error
            raise
        return row

    def _made(self, row: Row, index: int) -> Request:
        implied = self._scan.implied_parents.get(index)
        parents = row.parents or (() if implied is None else (implied,))
        return to_request(row, index=index, line=self._scan.lines[index], parents=parents)

    def _as_read(self, order: Literal["time", "round", "file"], round_seconds: float) -> Iterator[Request]:
        scan = self._scan
        index = 0
        last = 0
        while True:
            if index < scan.num_rows:
                request = self.by_row(index)
            else:
                row = self._advance()
                if row is None:
                    return
                request = self._made(row, index)
            if order == "time":
                if scan.descent is not None and request.line >= scan.descent[0]:
                    line, before, after = scan.descent
                    raise self._unordered(f"arrival_s goes back from {before:g} to {after:g}", line)
            elif order == "round":
                due = due_round(request, round_seconds)
                if due < last:
                    raise self._unordered(f"due in round {due}, a row above it in {last}", request.line)
                last = due
            yield request
            index += 1

    def _unordered(self, what: str, line: int) -> BenchctlError:
        return BenchctlError(
            f"{what}: not in order, and the trace is read while it is replayed",
            where=f"{self.path}, line {line}",
            fix=f"benchctl trace sort {self.path} -o sorted.jsonl, or --validate-first, which sorts up to 256 MB",
        )


def _is_gzip(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(2) == GZIP_MAGIC
    except OSError:
        return False  # opening it properly says what is wrong
