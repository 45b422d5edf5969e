"""Packs opened like folders: unpacked once a process into a temporary folder, which goes away when the process ends."""

from __future__ import annotations

import tempfile
from pathlib import Path

from reports import pack

_opened: dict[tuple[Path, ...], tuple[tempfile.TemporaryDirectory[str], Path]] = {}


def folder_of(path: Path) -> Path | None:
    """The temporary folder that holds the runs of a pack, or of PACK/run that run's; None where `path` is neither.

    Raises BenchctlError where the pack is broken.
    """
    if not pack.is_pack(path):
        whole = folder_of(path.parent) if pack.is_pack(path.parent) else None
        return None if whole is None else whole / path.name
    key = tuple(piece.resolve() for piece in pack.pieces(path))
    if key not in _opened:
        scratch = tempfile.TemporaryDirectory(prefix="benchctl-pack-")
        pack.unpack(path, Path(scratch.name))
        _opened[key] = (scratch, pack.base_of(path))
    return Path(_opened[key][0].name)


def origin_of(folder: Path) -> Path:
    """Where a run folder came from, as the user named it: PACK/run for one of a pack, else the folder itself."""
    for scratch, base in _opened.values():
        if folder.parent == Path(scratch.name):
            return base / folder.name
    return folder
