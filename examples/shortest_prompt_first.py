"""Shortest prompt first: vLLM's policy with another waiting queue. A policy of one's own in sixty lines.

    benchctl replay traces/sharegpt.jsonl --engine null --scheduler vllm --scheduler examples.shortest_prompt_first:ShortestPromptFirst
    benchctl check-scheduler examples.shortest_prompt_first:ShortestPromptFirst

Mean TTFT falls, and long prompts pay for it: while shorter ones keep coming, a long one waits.
"""

from __future__ import annotations

import heapq

from engines.interface import NewRequest, SchedulerConfig
from engines.schedulers.sequence import Sequence
from engines.schedulers.vllm import VllmScheduler
from engines.schedulers.vllm_queue import MakeSequence, Waiting

Key = tuple[bool, int, int]


class ShortestPromptQueue:
    """Who was preempted first, then the shortest prompt; equals in order of arrival."""

    def __init__(self, make: MakeSequence) -> None:
        self._heap: list[tuple[Key, Waiting]] = []
        self._make = make
        self._arrivals: dict[int, int] = {}  # request -> its place among all that ever came

    def __len__(self) -> int:
        return len(self._heap)

    def _push(self, waiting: Waiting, fresh: bool, prompt: int) -> None:
        place = self._arrivals.setdefault(waiting.request, len(self._arrivals))
        heapq.heappush(self._heap, ((fresh, prompt, place), waiting))

    def add(self, request: NewRequest) -> None:
        self._push(request, True, request.num_prompt_tokens)

    def peek(self) -> Sequence:
        key, head = self._heap[0]
        if isinstance(head, NewRequest):
            head = self._make(head)  # the same key: the heap stays as it is
            self._heap[0] = key, head
        return head

    def pop(self) -> Sequence:
        head = self.peek()
        heapq.heappop(self._heap)
        return head

    def put_back(self, seqs: list[Sequence]) -> None:
        """Preempted requests, and those that were passed over."""
        for seq in seqs:
            self._push(seq, seq.num_preemptions == 0, seq.new.num_prompt_tokens)

    def in_order(self) -> list[int]:
        return [waiting.request for _, waiting in sorted(self._heap, key=lambda entry: entry[0])]


class ShortestPromptFirst(VllmScheduler):
    """Everything but the order of waiting is vLLM's: budget, chunks, blocks, victims."""

    name = "shortest-prompt-first"
    POLICY = "vllm 0.33.0, waiting ordered by prompt length"

    def __init__(self, config: SchedulerConfig, *, log_decisions: bool = True) -> None:
        super().__init__(config, log_decisions=log_decisions)
        self.waiting = ShortestPromptQueue(self._make_sequence)  # type: ignore[assignment]
