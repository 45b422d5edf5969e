"""Programmatic dependent launch: on Hopper and later a kernel may start while the one before it still runs.

Each kernel here first loads what no kernel of the round writes (weights, the round's inputs), then waits until its predecessor
is done, and only then lets its successor start: so two kernels share the device, never a queue of waiting ones. Every program
of a kernel has to wait, those without work too: the next kernel relies on it. Block tables are written by a round's first
kernel, which is done before the third one starts.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch


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
