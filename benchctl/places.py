"""Whether results can be written where they are wanted: asked before the work, not found out after it.

Asked by writing a file without a name there, since permissions alone tell nothing of a file system that is read-only or full.
Nothing is made and nothing is left behind.
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from traces.errors import BenchctlError


def check_folder(folder: Path, flag: str = "--out") -> None:
    """Raises BenchctlError where `folder` cannot be written, or cannot be made."""
    try:
        with tempfile.TemporaryFile(dir=nearest(folder)):
            pass
    except OSError as error:
        raise unusable(folder, error, flag) from None


def check_file(path: Path, flag: str, *, in_place: bool = False) -> None:
    """Raises BenchctlError where no file `path` can be written. `in_place`: one that is there (/dev/stdout, too) is written to
    as it is; else another takes its place."""
    if path.is_dir():
        raise BenchctlError(f"{path} is a folder", where=flag, fix="name a file")
    try:
        if in_place and path.exists():
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        with tempfile.TemporaryFile(dir=nearest(path.parent)):
            pass
    except OSError as error:
        raise BenchctlError(
            f"{short(path)} cannot be written: {error.strerror}", where=flag, fix="name another file"
        ) from None


def nearest(folder: Path) -> Path:
    """The folder itself, or the first above it that is there. Raises OSError where there cannot be one."""
    while True:
        try:
            folder.stat()
            return folder
        except FileNotFoundError:
            if folder == folder.parent:
                raise
            folder = folder.parent


def unusable(folder: Path, error: OSError, flag: str = "--out") -> BenchctlError:
    return BenchctlError(f"{short(folder)} cannot be written: {error.strerror}", where=flag, fix=f"name another {flag}")


def short(path: Path) -> str:
    return str(path) if len(str(path)) < 200 else f"{str(path)[:60]}…"
