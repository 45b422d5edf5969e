"""vLLM's waiting queues: first come first served, or by (priority, arrival, id).

Source: vllm 0.33.0, vllm/v1/core/sched/request_queue.py. Requests passed over (max_loras) stay in the queue, marked.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

from engines.interface import NewRequest
from engines.schedulers.sequence import Sequence

Waiting = Sequence | NewRequest  # a request becomes a sequence when it is first looked at
MakeSequence = Callable[[NewRequest], Sequence]
Key = tuple[int, float, str]


def priority_key(new: NewRequest) -> Key:
    """Smaller is served first; the id is compared as text, so that the order is total."""
    return new.priority, new.arrival_s, new.id


class FcfsQueue:
    """Arrivals at the end, preempted requests at the front."""

    def __init__(self, make: MakeSequence) -> None:
        self._queue: deque[Waiting] = deque()
        self._make = make

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, request: NewRequest) -> None:
        self._queue.append(request)

    def peek(self) -> Sequence:
        head = self._queue[0]
        if isinstance(head, NewRequest):
            self._queue[0] = head = self._make(head)
        return head

    def pop(self) -> Sequence:
        head = self.peek()
        self._queue.popleft()
        return head

    def put_back(self, seqs: list[Sequence]) -> None:
        """In front of all others, keeping their order."""
        self._queue.extendleft(reversed(seqs))

    def in_order(self) -> list[int]:
        """Requests, the next to be looked at first."""
        return [waiting.request for waiting in self._queue]


class PriorityQueue:
    """A heap; there is no front to go back to, so whoever returns takes his place by key."""

    def __init__(self, make: MakeSequence) -> None:
        self._heap: list[tuple[Key, int, Waiting]] = []
        self._make = make

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: NewRequest) -> None:
        # The request's row never decides: ids are distinct. It keeps the heap from comparing what stands behind it.
        heapq.heappush(self._heap, (priority_key(request), request.request, request))

    def peek(self) -> Sequence:
        key, row, head = self._heap[0]
        if isinstance(head, NewRequest):
            head = self._make(head)
            self._heap[0] = (key, row, head)
        return head

    def pop(self) -> Sequence:
        head = self.peek()
        heapq.heappop(self._heap)
        return head

    def put_back(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            heapq.heappush(self._heap, (priority_key(seq.new), seq.request, seq))

    def in_order(self) -> list[int]:
        """Requests, the next to be looked at first."""
        return [row for _, row, _ in sorted(self._heap, key=lambda entry: entry[:2])]
