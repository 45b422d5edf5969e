"""vLLM's waiting queues: first come first served, or by (priority, arrival, id).

Source: vllm 0.33.0, vllm/v1/core/sched/request_queue.py. Requests passed over (max_loras) stay in the queue, marked.
"""

from __future__ import annotations

import heapq
from collections import deque

from engines.schedulers.sequence import Sequence


def priority_key(seq: Sequence) -> tuple[int, float, str]:
    """Smaller is served first; the id is compared as text, so that the order is total."""
    return seq.new.priority, seq.new.arrival_s, seq.new.id


class FcfsQueue:
    """Arrivals at the end, preempted requests at the front."""

    def __init__(self) -> None:
        self._queue: deque[Sequence] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, seq: Sequence) -> None:
        self._queue.append(seq)

    def peek(self) -> Sequence:
        return self._queue[0]

    def pop(self) -> Sequence:
        return self._queue.popleft()

    def put_back(self, seqs: list[Sequence]) -> None:
        """In front of all others, keeping their order."""
        self._queue.extendleft(reversed(seqs))

    def in_order(self) -> list[Sequence]:
        return list(self._queue)


class PriorityQueue:
    """A heap; there is no front to go back to, so whoever returns takes his place by key."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, str], int, Sequence]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, seq: Sequence) -> None:
        # The request's row never decides: ids are distinct. It keeps the heap from comparing Sequences.
        heapq.heappush(self._heap, (priority_key(seq), seq.request, seq))

    def peek(self) -> Sequence:
        return self._heap[0][2]

    def pop(self) -> Sequence:
        return heapq.heappop(self._heap)[2]

    def put_back(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            self.add(seq)

    def in_order(self) -> list[Sequence]:
        return [seq for _, _, seq in sorted(self._heap, key=lambda entry: entry[:2])]
