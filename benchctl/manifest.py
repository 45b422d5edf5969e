"""manifest.json of a run folder: what was run, on what, with which settings and whose word they are.

Written whole, under a temporary name and renamed, at the start of a run (`status: running`) and at its end; a run that was
killed still says running. Keys that reports read are listed in `reports.records.MANIFEST`.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import sys
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from benchctl import __version__
from reports import records
from traces.errors import BenchctlError

FILE = "manifest.json"
TEMPORARY = f".{FILE}.tmp"
PACKAGES = ("numpy", "polars", "msgspec", "xxhash", "torch", "triton", "transformers", "safetensors")


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Replace the folder's manifest at once: a reader sees the old one or the new one, never half of one.

    Raises BenchctlError where the disk does not take it; the old one then stands.
    """
    temporary = folder / TEMPORARY
    text = json.dumps(manifest, indent=1, ensure_ascii=False, default=str) + "\n"
    try:
        # A path whose bytes are no UTF-8 has halves of surrogate pairs: they are written as JSON's own escapes.
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(temporary, folder / FILE)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise unwritable(folder, error) from None


def unwritable(folder: Path, error: OSError) -> BenchctlError:
    """The disk is full, the folder is gone: no fault of the run's."""
    return BenchctlError(
        f"the record cannot be written: {error.strerror or error}",
        where=str(folder),
        fix="make room there, or name another --out",
        exit_code=1,
    )


def now() -> str:
    """The time of day, ISO 8601 with its offset."""
    return datetime.datetime.now().astimezone().isoformat(timespec="milliseconds")


def base() -> dict[str, Any]:
    """What every manifest of this process has in common."""
    return {
        "schema_version": records.SCHEMA_VERSION,
        "benchctl": __version__,
        "versions": versions(),
        "hardware": hardware(),
    }


@cache
def versions() -> dict[str, str | None]:
    """Python and the packages that a result depends on, without importing them; null where one is not installed."""
    out: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            out[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            out[name] = None
    return out


def hardware() -> dict[str, Any]:
    """CPU, cores that this process may use, memory; the card, where torch is loaded already and sees one."""
    found: dict[str, Any] = {
        "host": platform.node(),
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": memory_bytes(),
        "gpu": None,
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "count": torch.cuda.device_count(),
            "cuda": torch.version.cuda,
            "driver": driver_version(),
        }
    return found


def cpu_name() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or None


def memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def driver_version() -> str | None:
    """Of the NVIDIA kernel module, where there is one."""
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return None
