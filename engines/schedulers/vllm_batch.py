"""A round of vLLM's policy while it is gathered."""

from __future__ import annotations

import numpy as np

from engines.interface import Int64Array
from engines.schedulers.sequence import Sequence


class RoundBatch:
    """A round's work while it is gathered: the running requests by column, then the admissions one by one."""

    __slots__ = (
        "budget",
        "cached",
        "num_new",
        "queried_tokens",
        "running_num_new",
        "seqs",
        "slots",
        "steady",
        "stop_running",
    )

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.seqs: list[Sequence] = []
        self.slots: Int64Array | None = None
        self.steady = False  # the running are not among `seqs`: the calendar has them
        self.running_num_new = np.empty(0, dtype=np.int64)
        self.num_new: list[int] = []
        self.cached: list[int] = []
        self.queried_tokens = 0
        self.stop_running = "running_empty"

    def admit(self, seq: Sequence, num_new: int, num_cached: int, queried: int) -> None:
        self.seqs.append(seq)
        self.num_new.append(num_new)
        self.cached.append(num_cached)
        self.budget -= num_new
        self.queried_tokens += queried


def cut_by_budget(wanted: int, given: int, threshold: int) -> bool:
    """Whether the token budget, and not the long-prefill threshold, left a request with fewer tokens than it wants."""
    return given < wanted and given != threshold
