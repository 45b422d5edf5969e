"""`benchctl pack` and `benchctl unpack`, behind their flags. Heavy imports stand inside."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from benchctl.app import app, exit_with, out_opt
from traces.errors import BenchctlError

UNITS = {"": 1, "b": 1, "k": 2**10, "kib": 2**10, "kb": 10**3, "m": 2**20, "mib": 2**20, "mb": 10**6, "g": 2**30, "gib": 2**30, "gb": 10**9}  # fmt: skip
LEAST_PART = 2**10
MOST_PARTS = 999


def size(text: str, flag: str) -> int:
    """`15MiB`, `15M`, `15MB` or plain bytes as a number of bytes. Raises BenchctlError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in UNITS:
        raise BenchctlError(f"{flag} is {text!r}", fix="a size such as 15MiB, 15MB (10**6) or 15728640")
    value = int(float(match[1]) * UNITS[match[2].lower()])
    if value < LEAST_PART:
        raise BenchctlError(f"{flag} is {value:,} bytes", fix="1KiB or more")
    return value


@app.command()
def pack(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Run folders, or folders of runs.", show_default=False)
    ],
    out: Annotated[
        str | None,
        out_opt(
            "--out",
            "-o",
            help="The file: .tar.gz; .tar.xz is smaller and slower; .tar.zst needs Python 3.14. Default: RUN.tar.gz beside the first.",
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option("--split", help="Parts of at most so many bytes: 15MiB, 15MB, 15728640.", show_default=False),
    ] = None,
) -> None:
    """Pack run folders into one file, to carry them elsewhere; report, compare and explain read it as it is.

    Parts are called FILE.part1of3 and so on, with their checksums in FILE.sha256; `cat` joins them. The paths are printed.

    Example: benchctl pack runs/sharegpt-20261130-101500 -o sharegpt.tar.gz --split 15MiB
    """

    def run() -> int:
        limit = None if split is None else size(split, "--split")
        from reports import pack as packs
        from reports.run import find_runs, open_run

        folders = []
        for path in runs:
            if packs.is_pack(Path(path)):
                raise BenchctlError(f"{path} is packed already", fix="give run folders")
            found = find_runs(path)
            if not found:
                open_run(path)  # says what is wrong with it
            folders += [folder for folder in found if folder not in folders]
        first = Path(runs[0]).resolve()
        target = Path(out) if out is not None else Path(runs[0]).parent / f"{first.name}.tar.gz"
        if target.is_dir():
            raise BenchctlError(f"{target} is a folder", where="--out", fix="name a file, e.g. runs.tar.gz")
        for folder in folders:
            if open_run(folder).status == "running":
                print(
                    f"Warning: {folder} is still running, or was killed: its finished parts are packed", file=sys.stderr
                )
        before = sum(file.stat().st_size for folder in folders for file in packs.run_files(folder))
        if limit is not None and before > limit * MOST_PARTS:
            raise BenchctlError(f"--split {split} makes more than {MOST_PARTS} parts", fix="give larger parts")
        written = packs.pack(folders, target, limit)
        after = sum(file.stat().st_size for file in written)
        parts = sum(".part" in file.name for file in written)
        what = "1 run" if len(folders) == 1 else f"{len(folders)} runs"
        into = f" in {parts} parts" if parts else ""
        print(f"{what}, {before / 1e6:,.1f} MB → {after / 1e6:,.1f} MB{into}", file=sys.stderr)
        for file in written:
            print(file)
        return 0

    exit_with(run)


@app.command()
def unpack(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="Packs; of a split one any part.", show_default=False)
    ],
    out: Annotated[
        str | None,
        out_opt("--out", "-o", folder=True, help="The folder for the runs. Default: named like the file, beside it."),
    ] = None,
) -> None:
    """Unpack what `benchctl pack` made. Every file is checked; of a damaged pack nothing is left behind.

    Example: benchctl unpack sharegpt.tar.gz -o runs/sharegpt
    """

    def run() -> int:
        from reports import pack as packs

        for base in dict.fromkeys(packs.base_of(Path(file)) for file in files):
            given = next(Path(file) for file in files if packs.base_of(Path(file)) == base)
            suffix = next((suffix for suffix in packs.SUFFIXES if base.name.endswith(suffix)), "")
            if out is None and not suffix:
                raise BenchctlError(
                    f"{base.name} is not called like a pack", fix="name the folder for its runs with -o"
                )
            folder = Path(out) if out is not None else base.with_name(base.name.removesuffix(suffix))
            for placed in place(given, folder):
                print(placed)
        return 0

    exit_with(run)


def place(file: Path, folder: Path) -> list[Path]:
    """Unpack into `folder`, whole or not at all. Raises BenchctlError where a run of that name is there already."""
    from reports import pack as packs

    packs.pieces(file)  # a missing part is said before anything is made
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unpack-", dir=folder) as scratch:
            found = packs.unpack(file, Path(scratch))
            taken = [run.name for run in found if (folder / run.name).exists()]
            if taken:
                raise BenchctlError(
                    f"{folder / taken[0]} is there already", fix="name another folder with -o, or remove it"
                )
            return [Path(shutil.move(run, folder / run.name)) for run in found]
    except OSError as error:
        raise BenchctlError(
            f"{folder} cannot be written: {error.strerror or error}", where="--out", fix="name another folder"
        ) from None
    finally:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
