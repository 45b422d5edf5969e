"""Open a trace: one pass that checks everything, then as many lazy readings as are wanted.

`open_trace` raises a BenchctlError that names file, line, key and cure before anything runs. After it a Trace holds a
few numbers for each row (its time and its place, 41 bytes), never the rows. A large file may be checked while it is replayed
instead: traces/streamed.py. Knows no engine and no clock. The format: docs/traces.md.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Literal, cast

import numpy as np
import numpy.typing as npt

from traces import rows
from traces.errors import BenchctlError
from traces.files import copying_faults, file_stamp, open_bytes, read_lines, resolve
from traces.header import Header, is_header
from traces.request import Request
from traces.scan import Scan

__all__ = ["Header", "Trace", "due_round", "open_trace"]

MAX_SORT_BYTES = 256 << 20  # an unsorted file up to this size is sorted in memory


def open_trace(path: str | Path, *, skip_bad: bool = False, strict: bool = False, any_order: bool = False) -> Trace:
    """Check the whole file and return it, ready to be read.

    `skip_bad`: rows with a fault are left out and counted instead of stopping at the first one. `strict`: unknown keys
    are a fault. `any_order`: the rows will be read in file order, so one too large to be sorted is no fault. A bundled
    trace is found by its name from anywhere. Raises BenchctlError.
    """
    file, note = resolve(path)
    stamp = file_stamp(file)
    scan = Scan(file, skip_bad=skip_bad, strict=strict)
    scan.read()
    return Trace(file, scan, stamp, [note] if note else [], any_order)


def due_round(request: Request, round_seconds: float = 1.0) -> int:
    """The round, from 1, that a request is due before under `--clock rounds`.

    Its `arrival_round`, else 1 + floor(arrival_s / round_seconds), else 1.
    """
    if request.arrival_round is not None:
        return request.arrival_round
    return 1 + _whole_rounds(request.arrival_s or 0.0, round_seconds)


class Trace:
    """An opened trace. `requests` may be called any number of times; the file must not change in between.

    `sha256` is that of the canonical form: the header (where it is not all defaults) and every good row in file order,
    each as one compact JSON line with canonical keys and units, no nulls and no defaults. So gzip, line ends, key order
    and aliases do not change it.
    `num_sessions` counts distinct `session` values; `span_s` is the last arrival minus the first, 0 without arrivals.
    """

    def __init__(
        self, path: Path, scan: Scan, stamp: tuple[int, int], notes: list[str], any_order: bool = False
    ) -> None:
        self.path = path
        self.header = scan.header
        self.name = scan.header.name or path.name.removesuffix(".gz").removesuffix(".jsonl")
        self._scan = scan
        self._notes = notes
        self._stamp = stamp
        self._bad_lines: frozenset[int] | None = None
        self._carry_parents: dict[str, int] | None = None
        self._handle: IO[bytes] | None = None
        if scan.done and scan.descent and not self.any_arrival_round and not any_order:
            self._time_order()  # refuse or say so now, before anything runs

    @property
    def complete(self) -> bool:
        """Whether the whole file was read. Before, numbers are those of the rows so far, and there is no `sha256`."""
        return self._scan.done

    @property
    def sha256(self) -> str:
        return self._scan.sha256

    @property
    def notes(self) -> list[str]:
        """What the user should know of; complete only when the trace is."""
        return self._notes + self._scan.notes

    @property
    def num_requests(self) -> int:
        return self._scan.num_rows

    @property
    def num_bad(self) -> int:
        return len(self._scan.bad_lines)

    @property
    def num_sessions(self) -> int:
        return self._scan.num_sessions

    @property
    def span_s(self) -> float:
        return self._scan.span_s

    @property
    def all_have_arrival_s(self) -> bool:
        return self._scan.num_timed == self._scan.num_rows

    @property
    def any_arrival_round(self) -> bool:
        return self._scan.any_arrival_round

    @property
    def has_text(self) -> bool:
        return self._scan.has_text

    @property
    def sharing(self) -> Literal["none", "hash_ids", "other"]:
        """What prompts may share tokens by: nothing (each is unique), hash ids alone, or other means too."""
        return "other" if self._scan.any_other_shared else "hash_ids" if self._scan.any_hash_ids else "none"

    @property
    def gives_ids(self) -> bool:
        """Whether some row states token ids or text."""
        return self._scan.gives_ids

    @property
    def any_carry(self) -> bool:
        return self._scan.any_carry

    def is_carry_parent(self, id: str) -> bool:
        """Whether another row (so far) carries from this one."""
        return self._scan.is_carry_parent(id)

    @property
    def sum_prompts(self) -> int:
        """Prompt tokens of all rows whose prompts are no text."""
        return self._scan.sum_prompts

    @property
    def in_time_order(self) -> bool:
        """Whether the file's own order is that of `arrival_s`."""
        return self._scan.descent is None

    def requests(
        self, order: Literal["time", "round", "file"] = "time", round_seconds: float = 1.0
    ) -> Iterator[Request]:
        """The requests, read anew from the file.

        `order="time"`: by `arrival_s`, ties in file order; a row without one follows the row above it.
        `order="round"`: by (`due_round`, file order), for `--clock rounds`, where a descent of times is no fault.
        `order="file"`: as they stand.
        Raises BenchctlError where an unsorted file is too large to sort, or the file has changed since it was opened.
        """
        if order == "file":
            positions = None
        elif order == "time":
            positions = self._time_order()
        else:
            positions = self._round_order(round_seconds)
        return self._file_order() if positions is None else self._in_order(positions)

    def by_row(self, index: int) -> Request:
        """The request of this data row, read again from its place in the file. Raises BenchctlError."""
        if self._handle is None:
            self._handle = self._open_for_seeking()
        self._handle.seek(self._scan.offsets[index])
        text = self._handle.readline().strip()
        return self._request(self._decoder().decode(text), index, self._scan.lines[index])

    def by_id(self, id: str) -> Request:
        """The request of this id, read again. Only the ids that a `carry` names are held; KeyError for others."""
        if self._carry_parents is None:
            self._carry_parents = self._scan.carry_parents()
        return self.by_row(self._carry_parents[id])

    def _decoder(self) -> rows.RowDecoder:
        return rows.RowDecoder(lenient=bool(self._scan.decoder.unknown))

    def _request(self, row: rows.Row, index: int, line: int) -> Request:
        rows.normalize(row)
        parents = row.parents or ()
        if not parents and index in self._scan.implied_parents:
            parents = (self._scan.implied_parents[index],)
        return rows.to_request(row, index=index, line=line, parents=parents)

    def _lines(self) -> Iterator[tuple[int, int, bytes]]:
        """(index, line, bytes) of the good rows, in file order."""
        self._check_unchanged()
        if self._bad_lines is None:
            self._bad_lines = frozenset(self._scan.bad_lines)
        index = 0
        first = True
        for line, _, text, _ in read_lines(self.path):
            if first:
                first = False
                if is_header(text):
                    continue
            if line not in self._bad_lines:
                yield index, line, text
                index += 1

    def _file_order(self) -> Iterator[Request]:
        decoder = self._decoder()
        for index, line, text in self._lines():
            yield self._request(decoder.decode(text), index, line)

    def _in_order(self, positions: npt.NDArray[np.int64]) -> Iterator[Request]:
        decoder = self._decoder()
        held = [(line, text) for _, line, text in self._lines()]
        for index in positions.tolist():
            line, text = held[index]
            yield self._request(decoder.decode(text), index, line)

    def _time_order(self) -> npt.NDArray[np.int64] | None:
        if self._scan.descent is None:
            return None
        line, before, after = self._scan.descent
        self._refuse_large_sort(f"line {line}: arrival_s goes back from {before:g} to {after:g}", line)
        note = f"not in time order (line {line}: arrival_s goes back from {before:g} to {after:g}): sorted on load"
        if note not in self._notes:
            self._notes.append(note)
        return np.argsort(np.frombuffer(self._scan.times, dtype=np.float64), kind="stable")

    def _round_order(self, round_seconds: float) -> npt.NDArray[np.int64] | None:
        if not round_seconds >= 1e-9:
            raise BenchctlError(f"a round of {round_seconds} s", fix="--round-seconds must be at least 1e-9")
        by_time = [1 + _whole_rounds(t, round_seconds) for t in self._scan.times]
        rounds = np.array([min(r, 2**62) for r in by_time], dtype=np.int64)
        if self.any_arrival_round:
            given = np.frombuffer(self._scan.rounds, dtype=np.int64)  # 0: none
            rounds = np.where(given > 0, given, rounds)
        falls = np.flatnonzero(np.diff(rounds) < 0)
        if not len(falls):
            return None
        row = int(falls[0]) + 1
        self._refuse_large_sort(
            f"data row {row} is due in round {rounds[row]}, the one above it in {rounds[row - 1]}", 0
        )
        return np.argsort(rounds, kind="stable")

    def _refuse_large_sort(self, what: str, line: int) -> None:
        num_bytes = self._scan.num_bytes
        if num_bytes > MAX_SORT_BYTES:
            raise BenchctlError(
                f"{what}: not in order, and too large to sort in memory "
                f"({num_bytes / 2**20:.0f} MB, limit {MAX_SORT_BYTES >> 20} MB)",
                where=f"{self.path}, line {line}" if line else str(self.path),
                fix=f"benchctl trace sort {self.path}",
            )

    def _open_for_seeking(self) -> IO[bytes]:
        self._check_unchanged()
        source, is_gzip = open_bytes(self.path)
        if not is_gzip:
            return source
        # gzip cannot be entered in the middle: an unpacked copy without a name, gone with the process.
        copy = cast(IO[bytes], tempfile.TemporaryFile())
        with source, copying_faults(self.path):
            shutil.copyfileobj(source, copy, 1 << 20)
        return copy

    def _check_unchanged(self) -> None:
        if file_stamp(self.path) != self._stamp:
            raise BenchctlError("the trace changed after it was checked", where=str(self.path), fix="start again")


def _whole_rounds(seconds: float, round_seconds: float) -> int:
    quotient = seconds / round_seconds
    nearest = round(quotient)
    # 0.3 s are three rounds of 0.1 s, though 0.3 / 0.1 is 2.9999999999999996 in binary.
    return nearest if abs(nearest - quotient) <= 1e-12 * max(1.0, quotient) else int(quotient)
