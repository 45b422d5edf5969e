"""Programmatic dependent launch: on Hopper and later a kernel may start while the one before it still runs.

Each kernel here first loads what no kernel of the round writes (weights, the round's inputs), then waits until its predecessor
is done, and only then lets its successor start: so two kernels share the device, never a queue of waiting ones. Every program
of a kernel has to wait, those without work too: the next kernel relies on it. Block tables are written by a round's first
kernel, which is done before the third one starts.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

_compile_only = False


@functools.cache
def _overlaps() -> bool:
    if (
        os.environ.get("TRITON_INTERPRET") == "1"
        or os.environ.get("BENCHCTL_PDL") == "0"
        or not torch.cuda.is_available()
    ):
        return False
    return torch.cuda.get_device_capability()[0] >= 9


def dependent_launch() -> dict[str, Any]:
    """Keyword arguments of every launch: the kernel's PDL constant and, where it is on, the launch attribute."""
    return {"PDL": True, "launch_pdl": True} if _overlaps() else {"PDL": False}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Launch a kernel of this package; within `compiling`, only have it compiled."""
    if _compile_only:
        kernel.warmup(*args, grid=grid, **meta, **dependent_launch())
    else:
        kernel[grid](*args, **meta, **dependent_launch())


@contextmanager
def compiling(num_threads: int = 16) -> Iterator[None]:
    """Kernels that are launched within are compiled side by side and not run; all are ready on the way out."""
    from triton.runtime._async_compile import AsyncCompileMode

    global _compile_only
    _compile_only = True
    try:
        with ThreadPoolExecutor(num_threads) as executor, AsyncCompileMode(executor):
            yield
    finally:
        _compile_only = False
