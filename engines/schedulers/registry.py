"""The policies by name. A policy is a module with POLICY, DEFAULT_BLOCK_SIZE, NULL_BLOCKS, KNOBS and a Scheduler class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engines.interface import Scheduler
from engines.schedulers import nano, vllm


@dataclass(frozen=True, slots=True)
class PolicyInfo:
    """What is known of a policy before one is built. `null_blocks` are counted in num_blocks and never usable.

    `family`: nano or vllm where its records follow that policy's rules of order, None where they follow its own. `place`:
    package.module:Class of a policy that is not of this package.
    """

    policy: str
    build: Callable[..., Scheduler]
    default_block_size: int
    null_blocks: int
    knobs: tuple[str, ...]
    family: str | None = None
    place: str | None = None


SCHEDULERS: dict[str, PolicyInfo] = {
    "nano": PolicyInfo(nano.POLICY, nano.NanoScheduler, nano.DEFAULT_BLOCK_SIZE, nano.NULL_BLOCKS, nano.KNOBS, "nano"),
    "vllm": PolicyInfo(vllm.POLICY, vllm.VllmScheduler, vllm.DEFAULT_BLOCK_SIZE, vllm.NULL_BLOCKS, vllm.KNOBS, "vllm"),
}
