"""How much memory a device has left, and the one error for asking more of it."""

from __future__ import annotations

from pathlib import Path

import torch

from traces.errors import BenchctlError

GIB = 1 << 30


def available_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated: free memory of a card, or what the machine and its container leave a process."""
    if device.type == "cuda":
        free, _ = card_memory(device)
        # What torch holds in its cache without using it can be allocated too.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    available = _meminfo_available()
    container = _container_available()
    return min(x for x in (available, container, 1 << 62) if x is not None)


def card_memory(device: torch.device) -> tuple[int, int]:
    """(free, in all) bytes of a card, of what this process may have of it (torch.cuda.set_per_process_memory_fraction)."""
    free, total = torch.cuda.mem_get_info(device)
    share = torch.cuda.get_per_process_memory_fraction(device)
    if share < 1:
        total = int(total * share)
        free = min(free, total - torch.cuda.memory_reserved(device))
    return max(free, 0), total


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


def require_bytes(num_bytes: int, device: torch.device, *, what: str, fix: str) -> None:
    """Raises BenchctlError, naming both sizes, where `num_bytes` more do not fit the device."""
    available = available_bytes(device)
    if num_bytes > available:
        raise BenchctlError(f"{what} needs {gib(num_bytes)}; {device} has {gib(available)} free", fix=fix)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch failed to allocate: its own error type on a card, a plain RuntimeError on the CPU and of other libraries."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    words = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return any(word in str(error) for word in words)


def _meminfo_available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None  # not Linux: nothing to ask without another dependency


def _container_available() -> int | None:
    """What cgroup v2 leaves; page cache counts as used there but is given up when asked for."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        return int(limit) - used + int(stat.get("file", 0))
    except (OSError, ValueError):
        return None
