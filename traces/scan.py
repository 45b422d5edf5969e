"""The checking pass over a trace file: every fault, the sums of the whole, and the few numbers kept for each row.

Streams: holds one line, and of each row its place, its time and its length (41 bytes), and its id where it has one of its own.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from traces.errors import BenchctlError, printable
from traces.files import read_lines
from traces.header import Header, decode_header, is_header
from traces.rows import (
    BlockCountFault,
    Row,
    RowDecoder,
    RowFault,
    canonical_line,
    check,
    normalize,
    prompt_tokens,
    resolved_output_length,
)

MAX_EXAMPLES = 5
USUAL_BLOCK_SIZES = (16, 64, 512, 32, 128, 256, 1024)  # those of published traces first
TICK_NOTE_ROWS = 1000  # below this many rows equal times are a scenario, not a coarse clock
TICKS = ": the times come in ticks, and read as bursts"  # how the note of it ends
DAY_S = 86400.0


class Scan:
    """One pass, once: `read`, then look; or `rows`, and look on the way. Mutable, owned by one Trace."""

    def __init__(
        self,
        path: Path,
        *,
        skip_bad: bool,
        strict: bool,
        on_fault: Callable[[int, RowFault], None] | None = None,
        copy: IO[bytes] | None = None,
    ) -> None:
        """`on_fault`: told of every row that is left out, with its line. `copy`: gets the bytes of the file, unpacked."""
        self.path = path
        self.skip_bad = skip_bad
        self.strict = strict
        self.header = Header()
        self.decoder = RowDecoder(strict=strict)
        self.done = False  # the whole file was read: what concerns all of it is known
        self.patient = True  # rows whose hash_ids do not fit are a fault of the whole file, said at its end
        self.sha256 = ""
        self.num_rows = 0
        self.num_bytes = 0  # unpacked, of the rows
        self.num_timed = 0
        self.num_sessions = 0
        self.span_s = 0.0
        self.any_arrival_round = False
        self.has_text = False
        self.any_hash_ids = False
        self.gives_ids = False  # token ids, or text, of a prompt or an output
        self.any_other_shared = False  # prompts that may share tokens by other means than hash ids
        self.sum_prompts = 0  # tokens, of the prompts whose length is known
        self.notes: list[str] = []
        self.times = array("d")  # arrival_s, or the one above it
        self.rounds = array("q")  # arrival_round, 0 where there is none
        self.descent: tuple[int, float, float] | None = None  # first (line, time before, time)
        self.bad_lines: list[int] = []
        self.implied_parents: dict[int, str] = {}  # row -> id of the turn before it
        self.lines = array("q")  # from 1, in the file
        self.offsets = array("q")  # in bytes, of the unpacked file
        self._on_fault = on_fault
        self._copy = copy
        self._bad_examples: list[str] = []
        self._ids: dict[str, int] = {}  # id -> row, of those that give one
        self._unnamed = bytearray()  # 1: the row gives no id, so it is "r" and its line
        self._lengths = array("q")  # prompt + output tokens, -1 where only a tokenizer knows
        self._last_of_session: dict[str, str] = {}
        self._carry_parents: set[str] = set()
        self._block_faults = BlockFaults()
        self._min_time = float("inf")
        self._max_time = float("-inf")
        self._zero_gaps = 0
        self._num_max_tokens_only = 0

    def read(self) -> None:
        """Raises BenchctlError at the first fault, or with `skip_bad` when nothing good is left."""
        for _ in self.rows():
            pass

    def rows(self) -> Iterator[Row]:
        """The good rows in file order, each when all that stands above it was checked. Raises as `read` does."""
        digest = hashlib.sha256()
        first = True
        for line, offset, text, complete in read_lines(self.path, copy=self._copy):
            if first:
                first = False
                if is_header(text):
                    self._read_header(text, line)
                    head = self.header.canonical_line()
                    if head:
                        digest.update(head + b"\n")
                    continue
            try:
                row = self.decoder.decode(text, complete=complete)
                normalize(row)
                check(row, self.header.block_size)
                self._check_against_others(row, line)
            except RowFault as fault:
                self._take_fault(fault, line)
                continue
            digest.update(canonical_line(row))
            digest.update(b"\n")
            self._keep(row, line, offset, len(text))
            yield row
        self._finish()
        self.sha256 = digest.hexdigest()
        self.done = True

    def row_of(self, id: str) -> int | None:
        """The row of this id, of those read so far."""
        row = self._ids.get(id)
        if row is None and id[:1] == "r" and id[1:].isascii() and id[1:].isdigit() and id[1] != "0" and len(id) < 20:
            line = int(id[1:])
            at = bisect_left(self.lines, line)
            if at < self.num_rows and self.lines[at] == line and self._unnamed[at]:
                return at
        return row

    def is_carry_parent(self, id: str) -> bool:
        """Whether a row so far carries from this one."""
        return id in self._carry_parents

    @property
    def any_carry(self) -> bool:
        return bool(self._carry_parents)

    def carry_parents(self) -> dict[str, int]:
        """id -> row of every row that a carry names."""
        found = ((id, self.row_of(id)) for id in self._carry_parents)
        return {id: row for id, row in found if row is not None}

    def raise_block_faults(self) -> None:
        """Raises BenchctlError where hash_ids of rows so far do not fit the block size."""
        faults = self._block_faults
        if faults.lines and (not self.skip_bad or faults.another_size_fits()):
            raise faults.error(self.path, self.header.block_size)

    def _read_header(self, text: bytes, line: int) -> None:
        try:
            self.header = decode_header(text)
        except RowFault as fault:
            raise self._error(fault, line) from None
        if self.header.extra:
            keys = ", ".join(self.header.extra)
            if self.strict:
                raise BenchctlError(
                    f"unknown header key: {keys}",
                    where=f"{self.path}, line {line}",
                    fix="remove it, or leave out --strict",
                )
            self.notes.append(f"unknown header keys are kept: {keys}")

    def _check_against_others(self, row: Row, line: int) -> None:
        if row.id is not None or self._ids:
            id = row.id or f"r{line}"
            taken = self.row_of(id)
            if taken is not None:
                at = self.lines[taken]
                raise RowFault(f'id "{id}" is taken by line {at}', key="id", fix="give each row an id of its own")
        for parent in row.parents or ():
            if self.row_of(parent) is None:
                raise _not_above("parents", parent)
        if row.carry is not None:
            parent = row.carry.from_id
            parent_row = self.row_of(parent)
            if parent_row is None:
                raise _not_above("carry", parent)
            available = self._lengths[parent_row]
            if 0 <= available < row.carry.tokens:
                raise RowFault(
                    f'carry of {row.carry.tokens} tokens from "{parent}", whose prompt and output have {available}',
                    key="carry",
                    fix=f"carry at most {available} tokens",
                )

    def _keep(self, row: Row, line: int, offset: int, num_bytes: int) -> None:
        index = self.num_rows
        self.num_rows += 1
        self.num_bytes += num_bytes + 1
        if row.id is not None:
            self._ids[row.id] = index
        self._unnamed.append(row.id is None)
        self.lines.append(line)
        self.offsets.append(offset)
        prompt = prompt_tokens(row)
        self._lengths.append(-1 if prompt is None else prompt + resolved_output_length(row))
        self.has_text |= prompt is None
        self.sum_prompts += prompt or 0
        self.gives_ids |= row.input_length is None or row.output_token_ids is not None
        self.any_other_shared |= row.input_length is None or row.segments is not None or row.carry is not None
        self._num_max_tokens_only += row.output_length is None and row.output_token_ids is None
        if row.hash_ids is not None:
            assert row.input_length is not None, row
            self._block_faults.add_right(len(row.hash_ids), row.input_length)
            self.any_hash_ids = True
        if row.carry is not None:
            self._carry_parents.add(row.carry.from_id)
        if row.session is not None:
            before = self._last_of_session.get(row.session)
            if before is not None and row.think_s is not None and row.parents is None:
                self.implied_parents[index] = before
            self._last_of_session[row.session] = row.id or f"r{line}"
        self.rounds.append(row.arrival_round or 0)
        self.any_arrival_round |= row.arrival_round is not None
        last = self.times[-1] if self.times else 0.0
        time = row.arrival_s
        if time is None:
            self.times.append(last)
            return
        if time < last and self.num_timed and self.descent is None:
            self.descent = (line, last, time)
        self._zero_gaps += self.num_timed > 0 and time == last
        self.num_timed += 1
        self._min_time = min(self._min_time, time)
        self._max_time = max(self._max_time, time)
        self.times.append(time)

    def _take_fault(self, fault: RowFault, line: int) -> None:
        if isinstance(fault, BlockCountFault):
            # Not raised yet: if no row fits, the header's block size is wrong, and the rows say which one is right.
            self._block_faults.add(fault, line)
            if self.skip_bad:
                self._leave_out(fault, line)
            elif not self.patient:
                raise self._error(fault, line) from None
            return
        if self.skip_bad:
            self._leave_out(fault, line)
            return
        if self._block_faults.lines:
            raise self._block_faults.error(self.path, self.header.block_size)
        raise self._error(fault, line) from None

    def _leave_out(self, fault: RowFault, line: int) -> None:
        self.bad_lines.append(line)
        if self._on_fault is not None:
            self._on_fault(line, fault)
        if len(self._bad_examples) < MAX_EXAMPLES:
            self._bad_examples.append(f"line {line}: {fault.what}")

    def _finish(self) -> None:
        self.raise_block_faults()
        if not self.num_rows:
            if self.bad_lines:
                raise BenchctlError(
                    f"none of the {len(self.bad_lines)} rows is good; {self._bad_examples[0]}",
                    where=str(self.path),
                    fix="mend the rows; --skip-bad leaves out single ones",
                )
            raise BenchctlError("no requests in the trace", where=str(self.path), fix="write one JSON object on a line")
        self.num_sessions = len(self._last_of_session)
        self._last_of_session.clear()
        if self.num_timed:
            self.span_s = self._max_time - self._min_time
        self._write_notes()
        self.notes = [printable(note) for note in self.notes]

    def _write_notes(self) -> None:
        if self.bad_lines:
            more = "" if len(self.bad_lines) <= MAX_EXAMPLES else f"; and {len(self.bad_lines) - MAX_EXAMPLES} more"
            self.notes.append(f"{_rows(len(self.bad_lines))} left out: {'; '.join(self._bad_examples)}{more}")
        if self.decoder.unknown:
            keys = ", ".join(f"{key} ({count})" for key, count in sorted(self.decoder.unknown.items()))
            self.notes.append(f"unknown keys are kept in src (rows): {keys}")
        if self._num_max_tokens_only:
            self.notes.append(f"{_rows(self._num_max_tokens_only)} with max_tokens alone: taken as the output length")
        if self.implied_parents:
            n = len(self.implied_parents)
            self.notes.append(
                f"{_rows(n)} with a think time and no parents: each follows the row before in its session"
            )
        gaps = self.num_timed - 1
        if gaps >= TICK_NOTE_ROWS and 2 * self._zero_gaps > gaps:
            self.notes.append(f"{self._zero_gaps} of {gaps} gaps between arrivals are zero{TICKS}")
        if self._min_time > DAY_S and self.num_timed:
            self.notes.append(
                f"the first arrival is at {self._min_time:.0f} s: times should count from the trace's start, not from an epoch"
            )

    def _error(self, fault: RowFault, line: int) -> BenchctlError:
        where = f"{self.path}, line {line}" + (f", key `{fault.key}`" if fault.key else "")
        return BenchctlError(fault.what, where=where, fix=fault.fix)


class BlockFaults:
    """The rows whose `hash_ids` do not fit the block size, and the block sizes that would fit every row so far."""

    def __init__(self) -> None:
        self.lines: list[int] = []
        self._first: BlockCountFault | None = None
        self._num_right = 0
        self._smallest = 1
        self._largest: float = float("inf")

    def add_right(self, num_ids: int, input_length: int) -> None:
        self._num_right += 1
        self._narrow(num_ids, input_length)

    def add(self, fault: BlockCountFault, line: int) -> None:
        self._first = self._first or fault
        self.lines.append(line)
        self._narrow(fault.num_ids, fault.input_length)

    def _narrow(self, n: int, length: int) -> None:
        # ceil(length / b) == n  <=>  length / n <= b < length / (n - 1)
        self._smallest = max(self._smallest, -(-length // n))
        if n > 1:
            self._largest = min(self._largest, -(-length // (n - 1)) - 1)

    def another_size_fits(self) -> bool:
        """Whether the block size is wrong rather than the rows."""
        return not self._num_right and self._fitting_size() is not None

    def _fitting_size(self) -> int | None:
        """A block size for which no row would have failed. One row alone is believed only for a usual size."""
        usual = next((size for size in USUAL_BLOCK_SIZES if self._smallest <= size <= self._largest), None)
        if usual is not None or len(self.lines) + self._num_right < 2:
            return usual
        return self._smallest if self._smallest <= self._largest else None

    def error(self, path: Path, block_size: int, option: str | None = None) -> BenchctlError:
        """`option`: the flag that sets the block size where no header does."""
        assert self._first is not None
        where = f"{path}, line {self.lines[0]}, key `hash_ids`"
        size = self._fitting_size()
        if option is None:
            header = f'make the first line {{"benchctl_trace": 1, "block_size": {size}}}, or set it in the header'
        else:
            header = f"{option} {size}"
        if not self._num_right and size is not None:
            what = f"no row's hash_ids fit blocks of {block_size} tokens; blocks of {size} fit all {len(self.lines)}"
            return BenchctlError(what, where=where, fix=header)
        shown = ", ".join(map(str, self.lines[:MAX_EXAMPLES])) + (", ..." if len(self.lines) > MAX_EXAMPLES else "")
        what = f"{self._first.what} ({_rows(len(self.lines))} with such a fault: line {shown})"
        other = "" if size is None else f"; blocks of {size} would fit every row: {header}"
        return BenchctlError(what, where=where, fix=f"{self._first.fix}{other}")


def _not_above(key: str, parent: str) -> RowFault:
    return RowFault(
        f'`{key}` names "{parent}", which is no row above this one',
        key=key,
        fix="name the id of an earlier row, or move that row up",
    )


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"
