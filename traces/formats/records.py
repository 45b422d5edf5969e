"""The records of a source file: CSV rows, JSON lines, the elements of a JSON array, or JSON documents, one at a time.

Knows packing, line ends and where a record stands; knows no format. A giant JSON array is streamed by ijson, never held.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from traces.errors import BenchctlError
from traces.files import BOM, open_bytes, read_lines, reading_faults, refuse_foreign_bytes
from traces.formats.base import Sample
from traces.rows import RowFault

HEAD_BYTES = 4 << 20  # of the unpacked file, to find the first record in
CHUNK_BYTES = 1 << 16
MAX_LINE_BYTES = 256 << 20
csv.field_size_limit(1 << 20)  # a prompt may be long; this also bounds how far a quote that is not closed is followed

Place = tuple[str, Any]  # where ("line 5", "entry 3"), and the record or the RowFault in its stead


def take_sample(path: Path) -> Sample:
    """What stands at the head of a file. Raises BenchctlError."""
    source, _ = open_bytes(path)
    with source, reading_faults(path, lambda: "at its start"):
        head = source.read(CHUNK_BYTES)
        refuse_foreign_bytes(head, path)
        text = head.removeprefix(BOM).lstrip()
        if text[:1] in (b"{", b"["):
            head += source.read(HEAD_BYTES - len(head))
            text = head.removeprefix(BOM).lstrip()
    if not text:
        raise BenchctlError("the file is empty", where=str(path), fix="check the download")
    if text.startswith(b"["):
        return Sample(path, "array", first=_first_object(text))
    if text.startswith(b"{"):
        first = _decoded(text.split(b"\n", 1)[0])
        if first is not None:
            return Sample(path, "lines", first=first)
        # One object over many lines, unless what follows tells that the first line is merely damaged.
        later = [_decoded(line) for line in text.split(b"\n")[1:4]]
        if any(later):
            return Sample(path, "lines", first=next(record for record in later if record))
        found = _first_object(text)
        return Sample(path, "documents" if b"\n" in text.strip() else "lines", first=found)
    try:
        row = next(csv.reader([text.split(b"\n", 1)[0].decode("utf-8")]))
    except (UnicodeDecodeError, csv.Error, StopIteration):
        raise BenchctlError("neither CSV nor JSON in UTF-8", where=f"{path}, line 1", fix="check the file") from None
    return Sample(path, "csv", columns=tuple(name.strip() for name in row))


def _decoded(line: bytes) -> dict[str, Any] | None:
    try:
        record = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _first_object(head: bytes) -> dict[str, Any]:
    """The first whole object in the head of an array or document; of one that is longer than the head, its keys so far."""
    import ijson

    found: list[Any] = []
    prefix = "item" if head.startswith(b"[") else ""
    try:
        for record in ijson.items(io.BytesIO(head), prefix, use_float=True, multiple_values=True):
            found.append(record)
            break
    except (ijson.JSONError, ValueError, RecursionError):
        pass
    if found and isinstance(found[0], dict):
        return found[0]
    keys: dict[str, Any] = {}
    try:
        for at, event, value in ijson.parse(io.BytesIO(head), use_float=True, multiple_values=True):
            if event == "map_key" and at == prefix:
                keys[value] = None
    except (ijson.JSONError, ValueError, RecursionError):
        pass
    return keys


def read_records(sample: Sample) -> Iterator[Place]:
    """Every record of the file. A record that cannot be decoded is a RowFault in its place.

    Raises BenchctlError for what is wrong with the file itself.
    """
    if sample.kind == "csv":
        return _csv_rows(sample)
    if sample.kind == "lines":
        return _json_lines(sample.path)
    return _json_values(sample)


def _csv_rows(sample: Sample) -> Iterator[Place]:
    """A field may hold line ends. Where a quote is not closed only its own line is bad: those after it are read anew."""
    source, _ = open_bytes(sample.path)
    width = len(sample.columns)
    headed = not _is_number(sample.columns[0])
    lines = _TextLines(source)
    with source, reading_faults(sample.path, lambda: f"after line {lines.number}"):
        reader = csv.reader(lines)
        while True:
            lines.held.clear()
            try:
                row = next(reader)
                fault = None if len(row) == width else f"{len(row)} columns, the first line has {width}"
            except StopIteration:
                return
            except UnicodeDecodeError:
                row, fault = [""], "not UTF-8"
            except csv.Error as error:
                row, fault = [""], f"not CSV: {error}"
            start = lines.number - len(lines.held) + 1
            if lines.ended or fault is not None and len(lines.held) > 1:
                fault = "a quote is opened and not closed"
                lines.back()
                reader = csv.reader(lines)
            if start == 1 and headed or not row:
                continue
            if fault is not None:
                yield f"line {start}", RowFault(fault, fix="mend the line, or --skip-bad")
                continue
            yield f"line {start}", row


class _TextLines:
    """Lines of a binary file as text, for csv. Unlike a generator it goes on after a line that is no UTF-8. Mutable.

    `held`: the lines given out since the user last emptied it; `ended`: the file's end was met, maybe in the midst of a record.
    """

    def __init__(self, source: IO[bytes]) -> None:
        self._source = source
        self._again: list[bytes] = []  # the next one last
        self.held: list[bytes] = []
        self.number = 0  # of the last line given out, from 1
        self.ended = False

    def __iter__(self) -> _TextLines:
        return self

    def __next__(self) -> str:
        line = self._again.pop() if self._again else self._source.readline(MAX_LINE_BYTES)
        if not line:
            self.ended = bool(self.held)
            raise StopIteration
        self.number += 1
        self.held.append(line)
        if self.number == 1:
            line = line.removeprefix(BOM)
        return line.decode("utf-8")

    def back(self) -> None:
        """Give out all held lines but the first once more."""
        self._again.extend(reversed(self.held[1:]))
        self.number -= len(self.held) - 1
        self.ended = False


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _json_lines(path: Path) -> Iterator[Place]:
    decode = msgspec.json.decode
    for number, _, text, complete in read_lines(path):
        where = f"line {number}"
        try:
            record = decode(text)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            yield where, _line_fault(text, error, complete)
            continue
        if not isinstance(record, dict):
            yield where, RowFault("a line must be one JSON object", fix="mend the line, or --skip-bad")
            continue
        yield where, record


def _line_fault(text: bytes, error: Exception, complete: bool) -> RowFault:
    if not complete and "truncated" in str(error):
        return RowFault("the last line is cut off", fix="fetch the file again, or --skip-bad")
    try:
        json.loads(text)
    except json.JSONDecodeError as fault:
        return RowFault(f"not JSON: {fault.msg} at column {fault.pos + 1}", fix="mend the line, or --skip-bad")
    except (ValueError, RecursionError):
        pass
    return RowFault(f"not JSON: {error}", fix="mend the line, or --skip-bad")


def _json_values(sample: Sample) -> Iterator[Place]:
    """Elements of an array, or documents one after the other, pushed through ijson chunk by chunk.

    A break in the syntax ends the reading: it is a fault at its byte, after all whole entries before it.
    """
    import ijson

    prefix = "item" if sample.kind == "array" else ""
    entries = ijson.sendable_list()
    number = 0
    fed = 0
    fault: str | None = None
    source, _ = open_bytes(sample.path)
    with source, reading_faults(sample.path, lambda: f"after entry {number}"):
        parser = ijson.items_coro(entries, prefix, use_float=True, multiple_values=True)
        ended = False
        while not ended and fault is None:
            chunk = source.read(CHUNK_BYTES)
            if fed == 0:
                chunk = chunk.removeprefix(BOM)
            ended = not chunk
            try:
                if ended:
                    parser.close()
                else:
                    parser.send(chunk)
                    fed += len(chunk)
            except (ijson.JSONError, ValueError, RecursionError, OverflowError) as error:
                fault = _message(error)
            for record in entries:
                number += 1
                if isinstance(record, dict):
                    yield f"entry {number}", record
                else:
                    yield (
                        f"entry {number}",
                        RowFault("an entry must be one JSON object", fix="--skip-bad leaves it out"),
                    )
            del entries[:]
    if fault is None:
        return
    what = "array" if sample.kind == "array" else "document"
    if ended:
        text = f"the JSON {what} is cut off at byte {fed}, after {number} whole entries"
    else:
        text = (
            f"the JSON {what} breaks at byte {_breaking_byte(sample.path, fed)}, after {number} whole entries: {fault}"
        )
    yield f"after entry {number}", RowFault(text, fix="fetch the file again; --skip-bad takes the entries before it")


def _message(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__


def _breaking_byte(path: Path, fed: int) -> int:
    """0-based offset, in the unpacked file, of the byte that the parser refuses; `fed` bytes before it are in whole chunks."""
    import ijson

    source, _ = open_bytes(path)
    events = ijson.sendable_list()
    parser = ijson.basic_parse_coro(events, use_float=True, multiple_values=True)
    at = 0
    with source:
        skipped = len(BOM) if source.read(len(BOM)) == BOM else 0
        source.seek(skipped)
        try:
            while at < fed:
                chunk = source.read(min(CHUNK_BYTES, fed - at))
                parser.send(chunk)
                at += len(chunk)
                del events[:]
            while byte := source.read(1):
                parser.send(byte)
                at += 1
                del events[:]
        except (ijson.JSONError, ValueError, RecursionError, OverflowError):
            pass
    return at + skipped
