"""How much memory a device has left, and the one error for asking more of it."""

from __future__ import annotations

from pathlib import Path

import torch

from engines.model.config import PRESETS, ModelConfig
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


def require_model_fits(
    local: ModelConfig, dtype: torch.dtype, device: torch.device, *, what: str, num_ranks: int
) -> None:
    """Raises BenchctlError, naming both sizes and what would fit, where the weights of `local` do not fit the device."""
    available, needed = available_bytes(device), local.num_parameters * dtype.itemsize
    if needed > available:
        fix = ways_to_fit(local, dtype, device, num_ranks=num_ranks)
        raise BenchctlError(f"{what} needs {gib(needed)}; {device} has {gib(available)} free", fix=fix)


def ways_to_fit(local: ModelConfig, dtype: torch.dtype, device: torch.device, *, num_ranks: int) -> str:
    """Flags and values with which weights fit the device and leave a tenth of its free memory. `local`: of one of `num_ranks`."""
    room = 0.9 * available_bytes(device)
    needed = local.num_parameters * dtype.itemsize
    ways = []
    if dtype.itemsize == 4 and needed / 2 <= room:
        ways.append("--dtype bfloat16")
    cards = torch.cuda.device_count() if device.type == "cuda" else 1
    lengths = (local.num_heads, local.num_kv_heads, local.intermediate_size)
    for parts in range(2, cards // num_ranks + 1):
        if needed / parts <= room and not any(length % parts for length in lengths):
            ways.append(f"--tensor-parallel-size {parts * num_ranks}")
            break
    presets = [(c.num_parameters, name) for name, c in PRESETS.items() if c.num_parameters * dtype.itemsize <= room]
    smaller = [entry for entry in presets if entry[0] < local.num_parameters]
    if smaller:
        ways.append(f"--model {max(smaller)[1]}")
    return ", or ".join(ways) or "end what else takes its memory"


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
