"""Shortest prompt first: vLLM's policy with another waiting queue. A policy of one's own in sixty lines.

    benchctl replay traces/sharegpt.jsonl --engine null --scheduler vllm --scheduler examples.shortest_prompt_first:ShortestPromptFirst
    benchctl check-scheduler examples.shortest_prompt_first:ShortestPromptFirst

Mean TTFT falls, and long prompts pay for it: while shorter ones keep coming, a long one waits.
"""

from __future__ import annotations

import heapq

from engines.interface import SchedulerConfig
from engines.schedulers.sequence import Sequence
from engines.schedulers.vllm import VllmScheduler

Key = tuple[bool, int, int]


class ShortestPromptQueue:
    """Who was preempted first, then the shortest prompt; equals in order of arrival."""

    def __init__(self) -> None:
        self._heap: list[tuple[Key, Sequence]] = []
        self._arrivals: dict[int, int] = {}  # request -> its place among all that ever came

    def _key(self, seq: Sequence) -> Key:
        place = self._arrivals.setdefault(seq.request, len(self._arrivals))
        return (seq.num_preemptions == 0, seq.new.num_prompt_tokens, place)

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, seq: Sequence) -> None:
        heapq.heappush(self._heap, (self._key(seq), seq))

    def peek(self) -> Sequence:
        return self._heap[0][1]

    def pop(self) -> Sequence:
        return heapq.heappop(self._heap)[1]

    def put_back(self, seqs: list[Sequence]) -> None:
        """Preempted requests, and those that were passed over."""
        for seq in seqs:
            self.add(seq)

    def in_order(self) -> list[Sequence]:
        return [seq for _, seq in sorted(self._heap, key=lambda entry: entry[0])]


class ShortestPromptFirst(VllmScheduler):
    """Everything but the order of waiting is vLLM's: budget, chunks, blocks, victims."""

    name = "shortest-prompt-first"
    POLICY = "vllm 0.33.0, waiting ordered by prompt length"

    def __init__(self, config: SchedulerConfig, *, log_decisions: bool = True) -> None:
        super().__init__(config, log_decisions=log_decisions)
        self.waiting = ShortestPromptQueue()  # type: ignore[assignment]
