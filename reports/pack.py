"""Run folders as one compressed file, to be carried elsewhere: packed, split, checked, unpacked. Standard library only.

A tar archive that any tar opens (parts are joined by `cat`): a folder for each run, and last INDEX, which names every file
with its size and sha256. Equal runs give equal bytes. What is read is checked against INDEX; parts also against the
NAME.sha256 beside them, so that the damaged one can be named.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any

from reports import records
from reports.segments import SEGMENTS
from traces.errors import BenchctlError

INDEX = "benchctl-pack.json"
FORMAT = 1
SUFFIXES = (".tar.gz", ".tgz", ".tar.xz", ".tar.zst", ".tar")
GZIP_LEVEL, XZ_PRESET = 6, 0
CHUNK = 1 << 20
_PART = re.compile(r"^(?P<base>.+)\.part(?P<number>\d+)of(?P<count>\d+)$")
_BROKEN = (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError, ValueError)


def is_pack(path: Path) -> bool:
    """Whether the name is that of a pack or of one of its parts, and such a file is there."""
    base = base_of(path)
    return base.name.endswith(SUFFIXES) and (path.is_file() or bool(_parts_beside(base)))


def run_names(runs: Sequence[Path]) -> list[str]:
    """The folder of each run in the archive: its own name, with its parent's before it where two are called the same."""
    names = [run.resolve().name for run in runs]
    if len(set(names)) < len(names):
        names = [f"{run.resolve().parent.name}-{run.resolve().name}" for run in runs]
    if len(set(names)) < len(names):
        raise BenchctlError("two of the runs have the same name and the same parent's name", fix="pack them apart")
    return names


def run_files(run: Path) -> list[Path]:
    """What belongs to a run: its finished parts and every other plain file of its folder; nothing half-written, no packs."""
    finished = set(records.parts(run))
    out = []
    for file in sorted(run.iterdir()):
        table = re.match(r"^([a-z]+)-(\d{5,})\.parquet$", file.name)
        unfinished = table is not None and table[1] in (*records.TABLES, SEGMENTS) and table[2] not in finished
        passing = (
            file.name.startswith(".") or file.name.endswith(".tmp") or is_pack(file) or is_pack(file.with_suffix(""))
        )
        if file.is_file() and not unfinished and not passing:
            out.append(file)
    return out


def pack(runs: Sequence[Path], out: Path, split: int | None = None) -> list[Path]:
    """Write the runs to `out`; where that has more than `split` bytes, to parts of it and a NAME.sha256. Returns the files.

    Raises BenchctlError where the suffix is not known, the parts would be too many, or a place is no good.
    """
    _check_suffix(out)
    names = run_names(runs)
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as raw, _compressor(out, raw) as stream:
            _write_tar(stream, runs, names)
        for old in [out, *_parts_beside(out).values(), _sums_of(out)]:
            old.unlink(missing_ok=True)
        size = temporary.stat().st_size
        if split is not None and size > split:
            return _split(temporary, out, split, -(-size // split))
        temporary.replace(out)
        return [out]
    except OSError as error:
        raise BenchctlError(
            f"{out} cannot be written: {error.strerror or error}", where="--out", fix="name another file with -o"
        ) from None
    finally:
        temporary.unlink(missing_ok=True)


def _write_tar(stream: IO[bytes], runs: Sequence[Path], names: Sequence[str]) -> None:
    index: dict[str, dict[str, list[Any]]] = {}
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as tar:

        def add(name: str, data: bytes) -> None:
            member = tarfile.TarInfo(name)  # owner, mode and time are those of no machine
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))

        for run, name in zip(runs, names, strict=True):
            index[name] = {}
            for file in run_files(run):
                data = file.read_bytes()
                add(f"{name}/{file.name}", data)
                index[name][file.name] = [len(data), hashlib.sha256(data).hexdigest()]
        add(INDEX, (json.dumps({"format": FORMAT, "runs": index}, indent=1) + "\n").encode())


def _split(whole: Path, out: Path, size: int, count: int) -> list[Path]:
    digits = len(str(count))
    parts, sums = [], []
    with whole.open("rb") as file:
        for number in range(1, count + 1):
            part = out.with_name(f"{out.name}.part{number:0{digits}}of{count}")
            digest, left = hashlib.sha256(), size
            with part.open("wb") as to:
                while left and (data := file.read(min(CHUNK, left))):
                    digest.update(data)
                    to.write(data)
                    left -= len(data)
            parts.append(part)
            sums.append(f"{digest.hexdigest()}  {part.name}\n")
    _sums_of(out).write_text("".join(sums), encoding="utf-8")  # as sha256sum writes and checks it
    return [*parts, _sums_of(out)]


def _sums_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.sha256")


def _zstd() -> Any:
    """The module, or None: this Python has none."""
    try:
        from compression import zstd  # type: ignore[import-not-found, unused-ignore]  # Python 3.14
    except ImportError:
        try:
            from backports import zstd  # type: ignore[import-not-found, no-redef, unused-ignore]
        except ImportError:
            return None
    return zstd


ZSTD_NEEDS = "Python 3.14, or pip install backports.zstd"


def _zstd_reader(raw: Any) -> Any:
    if (zstd := _zstd()) is None:
        raise BenchctlError("the pack is compressed with Zstandard, which this Python has not", fix=ZSTD_NEEDS)
    return zstd.ZstdFile(raw)


def writable() -> list[str]:
    """Suffixes of packs that this Python can write."""
    return [suffix for suffix in SUFFIXES if suffix != ".tar.zst" or _zstd() is not None]


def _check_suffix(out: Path) -> None:
    """Raises BenchctlError where the name does not say how to compress, or says what this Python cannot."""
    others = ", ".join(suffix for suffix in writable() if suffix != ".tar.gz")
    if not out.name.endswith(SUFFIXES):
        raise BenchctlError(
            f"{out.name} does not say how to compress", where="--out", fix=f"let it end in .tar.gz, or {others}"
        )
    if not out.name.endswith(tuple(writable())):
        instead = out.with_name(out.name.removesuffix(".tar.zst"))
        raise BenchctlError(
            f"{out.name}: this Python has no Zstandard",
            where="--out",
            fix=f"-o {instead}.tar.gz, or {others}; .tar.zst needs {ZSTD_NEEDS}",
        )


@contextmanager
def _compressor(out: Path, raw: IO[bytes]) -> Iterator[IO[bytes]]:
    if out.name.endswith((".tar.gz", ".tgz")):
        with gzip.GzipFile("", "wb", compresslevel=GZIP_LEVEL, fileobj=raw, mtime=0) as stream:
            yield stream  # type: ignore[misc]
    elif out.name.endswith(".tar.xz"):
        with lzma.LZMAFile(raw, "wb", preset=XZ_PRESET) as stream:
            yield stream
    elif out.name.endswith(".tar.zst"):
        with _zstd().ZstdFile(raw, "wb") as stream:
            yield stream
    else:
        yield raw


# -- reading


def _parts_beside(base: Path) -> dict[tuple[int, int], Path]:
    """(number, count) -> every part of `base` in its folder."""
    if not base.parent.is_dir():
        return {}
    found = ((_PART.match(entry.name), entry) for entry in base.parent.iterdir() if entry.name.startswith(base.name))
    return {(int(m["number"]), int(m["count"])): entry for m, entry in found if m and m["base"] == base.name}


def base_of(path: Path) -> Path:
    """The pack that a file is, is a part of, or has the checksums of: `NAME.tar.gz*` of a shell names them all."""
    part = _PART.match(path.name)
    if part is None and path.name.endswith(tuple(f"{suffix}.sha256" for suffix in SUFFIXES)):
        return path.with_name(path.name.removesuffix(".sha256"))
    return path.with_name(part["base"]) if part else path


def pieces(path: Path) -> list[Path]:
    """The file itself, or every part of the pack that `path` names or is a part of, in order.

    Raises BenchctlError where there is no such file, or a part is missing or not the one that NAME.sha256 tells of.
    """
    given = _PART.match(path.name)
    base = base_of(path)
    if given is None and base.is_file():
        return [base]
    found = _parts_beside(base)
    counts = {int(given["count"])} if given else {count for _, count in found}
    if not found:
        raise BenchctlError(f"no file {path}", fix="give the file that `benchctl pack` wrote, or one of its parts")
    if len(counts) > 1:
        raise BenchctlError(
            f"there are parts of {len(counts)} packs called {base.name}: of {' and of '.join(map(str, sorted(counts)))}",
            fix="name a part of the one that is meant",
        )
    (count,) = counts
    missing = [number for number in range(1, count + 1) if (number, count) not in found]
    if missing:
        which = ", ".join(map(str, missing))
        raise BenchctlError(
            f"part{'s' if len(missing) > 1 else ''} {which} of {count} of {base.name} {'are' if len(missing) > 1 else 'is'} missing",
            fix=f"put every {base.name}.part…of{count} into {base.parent}",
        )
    parts = [found[number, count] for number in range(1, count + 1)]
    _check_sums(base, parts)
    return parts


def _check_sums(base: Path, parts: Sequence[Path]) -> None:
    sums = _sums_of(base)
    if not sums.is_file():
        return
    lines = (line.split(maxsplit=1) for line in sums.read_text(encoding="utf-8", errors="replace").splitlines())
    told = {fields[1].strip().lstrip("*"): fields[0] for fields in lines if len(fields) == 2}
    for part in parts:
        with part.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if told.get(part.name, digest) != digest:
            raise BenchctlError(
                f"{part.name} is damaged: its sha256 is not that of {sums.name} ({part.stat().st_size:,} bytes)",
                fix="copy that part again",
            )


class _Joined(io.RawIOBase):
    """Parts read one after the other. `number`: of the part being read."""

    def __init__(self, parts: Sequence[Path]) -> None:
        self._parts = list(parts)
        self.number = 0
        self._file: IO[bytes] | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self._file is None:
                if self.number == len(self._parts):
                    return 0
                self._file = self._parts[self.number].open("rb")
                self.number += 1
            if count := self._file.readinto(buffer):  # type: ignore[attr-defined]
                return int(count)
            self._file.close()
            self._file = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()


MAGIC: tuple[tuple[bytes, Callable[[Any], Any]], ...] = (
    (b"\x1f\x8b", lambda raw: gzip.GzipFile(fileobj=raw)),
    (b"\xfd7zXZ\x00", lzma.LZMAFile),
    (b"\x28\xb5\x2f\xfd", _zstd_reader),
)


def unpack(path: Path, into: Path) -> list[Path]:
    """Write the runs of a pack as folders into `into`, every file checked. Returns the folders.

    Raises BenchctlError, one line, where a part is missing, a file is damaged or the archive is none of benchctl's; what was
    written by then is left to the caller to remove.
    """
    parts = pieces(path)
    joined = _Joined(parts)
    name = base_of(path).name
    written: dict[str, dict[str, list[Any]]] = {}
    index: Any = None
    try:
        with io.BufferedReader(joined, CHUNK) as raw:
            start = raw.peek(8)
            stream = next((make(raw) for magic, make in MAGIC if start.startswith(magic)), raw)
            with tarfile.open(fileobj=stream, mode="r|") as tar:
                for member in tar:
                    file = tar.extractfile(member) if member.isfile() else None
                    if file is None:
                        continue
                    if member.name == INDEX:
                        index = json.loads(file.read())
                        continue
                    run, leaf = _place(member.name, name)
                    (into / run).mkdir(parents=True, exist_ok=True)
                    written.setdefault(run, {})[leaf] = _copy(file, into / run / leaf)
            while stream.read(CHUNK):  # to the end, where the checksum of the compressed stream stands
                pass
    except _BROKEN as error:
        where = f" in or before part {joined.number} of {len(parts)}" if len(parts) > 1 else ""
        raise BenchctlError(
            f"{name} cannot be read{where}: {str(error).splitlines()[0] or type(error).__name__}",
            fix="it is damaged, cut short, or no pack of benchctl: copy or pack it again",
        ) from None
    _check_index(index, written, name)
    return [into / run for run in sorted(written)]


def _place(member: str, pack: str) -> tuple[str, str]:
    """The run's folder and the file's name; nothing else may be named by an archive."""
    path = PurePosixPath(member)
    if len(path.parts) != 2 or ".." in path.parts or path.is_absolute() or "\\" in member or "\0" in member:
        raise BenchctlError(f"{pack} is no pack of benchctl: it holds {member}", fix="open it with tar")
    return path.parts[0], path.parts[1]


def _copy(file: IO[bytes], to: Path) -> list[Any]:
    digest, size = hashlib.sha256(), 0
    with to.open("wb") as out:
        while data := file.read(CHUNK):
            digest.update(data)
            size += out.write(data)
    return [size, digest.hexdigest()]


def _check_index(index: Any, written: dict[str, dict[str, list[Any]]], name: str) -> None:
    if index is None and any(leaf == "manifest.json" for leaves in written.values() for leaf in leaves):
        raise BenchctlError(f"{name} is damaged or cut short: it ends before {INDEX}", fix="copy or pack it again")
    if not isinstance(index, dict) or not isinstance(index.get("runs"), dict):
        raise BenchctlError(f"{name} is no pack of benchctl: it holds no {INDEX}", fix="open it with tar")
    if index.get("format") != FORMAT:
        raise BenchctlError(
            f"{name} has pack format {index.get('format')}; this benchctl knows {FORMAT}", fix="use a newer benchctl"
        )
    if index["runs"] != written:
        files = {
            f"{run}/{leaf}" for runs in (index["runs"], written) for run, leaves in runs.items() for leaf in leaves
        }
        wrong = sorted(
            file
            for file in files
            if index["runs"].get(file.split("/")[0], {}).get(file.split("/")[1])
            != written.get(file.split("/")[0], {}).get(file.split("/")[1])
        )
        raise BenchctlError(
            f"{name} is damaged: {wrong[0]} is not the file that was packed"
            + (f", nor are {len(wrong) - 1:,} others" if len(wrong) > 1 else ""),
            fix="copy or pack it again",
        )
