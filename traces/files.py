"""The bytes of a trace file as numbered lines, and where the bundled traces are.

Knows gzip (by content), BOM, CRLF, blank lines and a missing final line end; knows nothing of rows. Every fault of the
file itself (missing, unreadable, a Git LFS pointer, another format) is a BenchctlError here.
"""

from __future__ import annotations

import difflib
import gzip
import io
import os
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import resources
from pathlib import Path
from typing import IO, cast

from traces.errors import BenchctlError

GZIP_MAGIC = b"\x1f\x8b"
BOM = b"\xef\xbb\xbf"
LESSONS = "lessons"  # folder of the package, and how a bundled lesson's name begins
SUFFIX = ".jsonl"
LFS_POINTER = b"version https://git-lfs"
OTHER_FORMATS: dict[bytes, str] = {
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"PK\x03\x04": "zip",
    b"PAR1": "Parquet",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}


def bundled_traces() -> list[str]:
    """Names of the traces that are part of the package, such as `sharegpt.jsonl`, sorted."""
    return sorted(entry.name for entry in resources.files("traces").iterdir() if entry.name.endswith(SUFFIX))


def bundled_lessons() -> list[str]:
    """Names of the bundled lessons (docs/lessons.md), such as `lessons/05-chunking.jsonl`, sorted."""
    folder = resources.files("traces").joinpath(LESSONS)
    return sorted(f"{LESSONS}/{entry.name}" for entry in folder.iterdir() if entry.name.endswith(SUFFIX))


def resolve(path: str | Path) -> tuple[Path, str | None]:
    """The file meant by `path`, and a note where that is the bundled trace although a file of one's own seems to be meant.

    A bundled trace goes by its name, `walkthrough` or `lessons/05-chunking`, with or without `traces/` before it and `.jsonl`
    behind; a file of that name in the current folder is meant first, a folder is not. Another folder's missing file is
    never replaced. Raises BenchctlError.
    """
    given = Path(path)
    bundled = _bundled(given)
    if bundled is None:
        if os.path.lexists(given):
            return given, None
        raise _no_such_trace(given)
    full = given if given.name.endswith(SUFFIX) else given.with_name(given.name + SUFFIX)
    for own in (given, full):
        if os.path.lexists(own) and not own.is_dir():
            return own, None
    # A package on disk, which pip always makes, gives real paths.
    packaged = Path(str(resources.files("traces").joinpath(bundled)))
    return packaged, f"{given} does not exist here: the bundled trace of this name is used" if given == full else None


def _bundled(given: Path) -> str | None:
    """The bundled trace of this name, as `bundled_traces` and `bundled_lessons` have it."""
    name = given.as_posix().removeprefix("traces/").removesuffix(SUFFIX) + SUFFIX
    return name if name in _bundled_names() else None


@cache
def _bundled_names() -> frozenset[str]:
    return frozenset([*bundled_traces(), *bundled_lessons()])


def _no_such_trace(given: Path) -> BenchctlError:
    """Says which traces are near, of the bundled ones and of the folder that was looked in."""
    traces, lessons = ([name.removesuffix(SUFFIX) for name in names] for names in (bundled_traces(), bundled_lessons()))
    known = {name: name for name in traces} | {name.removeprefix(f"{LESSONS}/"): name for name in lessons}
    try:
        beside = sorted(entry.name for entry in given.parent.iterdir() if entry.name.endswith((SUFFIX, f"{SUFFIX}.gz")))
    except (OSError, ValueError):
        beside = []
    known |= {_stem(name): str(given.with_name(name)) for name in beside}
    stem = _stem(given.name)
    near = [name for name in known if len(stem) > 2 and stem in name]
    near += [name for name in difflib.get_close_matches(stem, known, 3) if name not in near]
    meant = f"did you mean {' or '.join(known[name] for name in near[:3])}? " if near else "check the path; "
    if given.parts[:1] == (LESSONS,):
        return BenchctlError(f"no such trace: {given}", fix=f"{meant}bundled lessons: {', '.join(lessons)}")
    more = f"; and {len(lessons)} lessons, {lessons[0]} the first" if lessons else ""
    return BenchctlError(f"no such trace: {given}", fix=f"{meant}bundled traces: {', '.join(traces) or 'none'}{more}")


def _stem(name: str) -> str:
    return name.removesuffix(".gz").removesuffix(SUFFIX)


def file_stamp(path: Path) -> tuple[int, int]:
    """(size in bytes, mtime in ns) of a regular, readable file. Raises BenchctlError."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise _os_fault(error, path) from None
    if stat.S_ISDIR(status.st_mode):
        raise BenchctlError(f"{path} is a folder", fix="name one trace file in it")
    if not stat.S_ISREG(status.st_mode):
        raise BenchctlError(f"{path} is no regular file", fix="save it to a file first: a trace is read more than once")
    return status.st_size, status.st_mtime_ns


def open_bytes(path: Path) -> tuple[IO[bytes], bool]:
    """(the file, unpacked where its content is gzip; whether it is). Raises BenchctlError."""
    file_stamp(path)
    try:
        raw = io.BufferedReader(io.FileIO(path), buffer_size=1 << 18)
    except OSError as error:
        raise _os_fault(error, path) from None
    if raw.peek(2)[:2] == GZIP_MAGIC:
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw)), True
    return raw, False


def read_lines(path: Path, *, copy: IO[bytes] | None = None) -> Iterator[tuple[int, int, bytes, bool]]:
    """(line from 1, its byte offset in the unpacked file, its bytes without blanks around, whether a line end followed).

    Blank lines are numbered and left out. `copy` gets every byte, unpacked. Holds one line at a time. Raises BenchctlError.
    """
    source, _ = open_bytes(path)
    number = offset = 0
    with source, reading_faults(path, lambda: f"after line {number}"):
        while True:
            line = source.readline()
            if not line:
                return
            if copy is not None:
                with copying_faults(path):
                    copy.write(line)
            number += 1
            start, offset = offset, offset + len(line)
            if number == 1:
                if line.startswith(BOM):
                    line = line[len(BOM) :]
                    start += len(BOM)
                _refuse_other_formats(line, path)
            text = line.strip()
            if text:
                yield number, start, text, line.endswith(b"\n")


@contextmanager
def reading_faults(path: Path, where: Callable[[], str]) -> Iterator[None]:
    """What goes wrong while a file is read as a BenchctlError; `where` says how far the reading came."""
    try:
        yield
    except EOFError:
        raise BenchctlError("the gzip file is cut off", where=f"{path}, {where()}", fix=_AGAIN) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise BenchctlError(f"damaged gzip: {error}", where=f"{path}, {where()}", fix=_AGAIN) from None
    except OSError as error:
        raise _os_fault(error, path) from None


@contextmanager
def copying_faults(path: Path) -> Iterator[None]:
    """What goes wrong while an unpacked copy is written as a BenchctlError."""
    try:
        yield
    except OSError as error:
        raise BenchctlError(
            f"the unpacked copy cannot be written to {tempfile.gettempdir()}: {error.strerror or error}",
            where=str(path),
            fix="make room there, or set TMPDIR to another folder, or unpack the file (gunzip)",
            exit_code=1,
        ) from None


_AGAIN = "fetch the file again: it is not whole"


def refuse_foreign_bytes(head: bytes, path: Path) -> None:
    """Raises BenchctlError where a file's head is a Git LFS pointer, another packing or no text at all."""
    if head.startswith(LFS_POINTER):
        raise BenchctlError(
            "this is a Git LFS pointer, not the trace", where=str(path), fix="git lfs pull, or download the file itself"
        )
    for magic, name in OTHER_FORMATS.items():
        if head.startswith(magic):
            raise BenchctlError(
                f"this is a {name} file, not JSON lines",
                where=str(path),
                fix="convert it to JSON lines (gzip may stay)",
            )
    if b"\x00" in head[:4096]:
        raise BenchctlError("this is a binary file", where=str(path), fix="a trace has one JSON object on each line")


def _refuse_other_formats(line: bytes, path: Path) -> None:
    refuse_foreign_bytes(line, path)
    if line.lstrip().startswith(b"["):
        raise BenchctlError(
            "this is a JSON array",
            where=f"{path}, line 1",
            fix="write one object on each line, without brackets, or benchctl trace import",
        )


def _os_fault(error: OSError, path: Path) -> BenchctlError:
    if isinstance(error, FileNotFoundError):
        return BenchctlError(f"no such trace: {path}", fix="check the path")
    if isinstance(error, PermissionError):
        return BenchctlError(f"no permission to read {path}", fix=f"chmod +r {path}, or run as its owner")
    return BenchctlError(f"cannot read {path}: {error.strerror or error}", fix="check the file and its disk")
