"""The closed vocabulary of what a scheduler says it did, and the log that collects it within a round.

Every word is a plain string, so that a row costs nothing to store; the dicts are the closed sets, with the meaning that
reports print. `reports/records.py` repeats the meanings for readers that have no schedulers; a test holds them equal.
"""

from __future__ import annotations

DECISION_KINDS: dict[str, str] = {
    "admit": "a waiting request was scheduled for the first time; needed = blocks taken from the free list, available = free before",
    "resume": "a preempted request was scheduled again; numbers as for admit",
    "chunk": "fewer tokens than wanted were given; needed = wanted, available = given",
    "hold": "a loop examined the request and could not schedule it",
    "skip": "the waiting loop passed over the request and went on with the next",
    "preempt": "a running request lost its blocks; other = the request that wanted them, needed / available blocks then",
    "evict": "a free block that still held reusable KV was taken by the request, and its content is lost",
    "finish": "the request ended and its blocks were released",
    "reject": "the request could never run here and was refused on arrival",
}

REASONS: dict[str, str] = {
    # admit, resume
    "fits": "tokens, seats and blocks were there",
    # chunk, hold
    "token_budget": "max_num_batched_tokens leaves fewer tokens than it wants",
    "not_first": "nano: more tokens than the budget has left, and only a round's first request may be chunked",
    "blocks": "more blocks needed than are free",
    "long_prefill_token_threshold": "one request may get no more than the threshold in a round",
    "chunking_disabled": "chunked prefill is off and the budget left does not cover the whole",
    "reserve_full_isl": "the whole known sequence has to fit the free blocks at admission",
    "watermark": "the blocks would be there, but the watermark keeps them for the running",
    "max_model_len": "the next token would lie beyond max_model_len",
    # skip
    "max_loras": "every adapter place is taken by another adapter",
    # preempt
    "newest": "the last of the running list is the victim",
    "lowest_priority": "the largest (priority, arrival) among the running is the victim",
    "self": "nobody else was left to preempt, or the request itself was the victim",
    # evict
    "reused": "the block was next in the free list",
    # finish
    "max_tokens": "all output tokens asked for were emitted",
    "length_capped": "max_model_len was reached before the output asked for",
    "eos": "the model chose an end-of-sequence token",
    # reject
    "exceeds_pool": "prompt and output need more blocks than the engine has",
    "prompt_too_long": "the prompt is not shorter than max_model_len",
    "exceeds_budget": "chunked prefill is off and the sequence can grow beyond max_num_batched_tokens",
    "parent_rejected": "a request it depends on was refused",
}

STOPS: dict[str, str] = {
    "waiting_empty": "nobody is left waiting",
    "running_empty": "every running request was served",
    "token_budget": "max_num_batched_tokens is used up",
    "max_num_seqs": "no seat is left: max_num_seqs",
    "blocks": "the head of the queue needs more blocks than are free",
    "not_first": "the head wants more tokens than the budget has left, and only a round's first may be chunked",
    "chunking_disabled": "the head wants more tokens than the budget has left, and chunked prefill is off",
    "reserve_full_isl": "the head's whole sequence does not fit the free blocks",
    "watermark": "the head would fit but for the watermark",
    "preemption": "a request was preempted in this round, so nobody is admitted",
    "self_preempted": "the request that needed a block had to preempt itself",
}

UNITS: tuple[str, ...] = ("tokens", "blocks", "seats", "adapters")

BLOCK_EVENTS: dict[str, str] = {
    "allocate": "taken from the free list; its old content is lost",
    "share": "a prefix hit: the block stands in one more table",
    "cache": "full, and findable by its hash from now on",
    "release": "left a table, still held by others",
    "free": "left its last table; its content stays until it is taken again",
    "evict": "its hash was forgotten because it was taken again",
}

DecisionRow = tuple[int, str, int, int | None, str, int | None, int | None, str | None]
BlockRow = tuple[int, int, str, int, int | None]


class RoundLog:
    """Decisions and block events of one round, in the order in which they happened.

    Owned by one scheduler, cleared at each `schedule()`. `enabled=False` keeps the counts alone (for measuring its cost).
    """

    __slots__ = ("blocks", "decisions", "enabled", "num_evicted", "num_preempted", "order")

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.clear()

    def clear(self) -> None:
        """Begin a round. The lists are new: those of the last round belong to whoever took them."""
        self.order = 0
        self.num_preempted = 0
        self.num_evicted = 0
        self.decisions: list[DecisionRow] = []
        self.blocks: list[BlockRow] = []

    def decide(
        self,
        kind: str,
        request: int,
        reason: str,
        *,
        other: int | None = None,
        needed: int | None = None,
        available: int | None = None,
        unit: str | None = None,
    ) -> None:
        if kind == "preempt":
            self.num_preempted += 1
        if self.enabled:
            self.decisions.append((self.order, kind, request, other, reason, needed, available, unit))
            self.order += 1

    def block(self, event: str, block: int, request: int, index: int | None) -> None:
        if self.enabled:
            self.blocks.append((self.order, block, event, request, index))
            self.order += 1

    def evict(self, block: int, request: int) -> None:
        """A cached block is taken by `request`: as an event of the block and as a decision."""
        self.num_evicted += 1
        if self.enabled:
            order = self.order
            self.blocks.append((order, block, "evict", request, None))
            self.decisions.append((order + 1, "evict", request, None, "reused", None, None, None))
            self.order = order + 2

    def blocks_in_table(self, event: str, table: list[int], request: int, first: int, end: int) -> None:
        """The same event for the logical blocks first..end-1 of one table."""
        if self.enabled:
            order = self.order - first
            self.blocks += [(order + index, table[index], event, request, index) for index in range(first, end)]
            self.order += end - first
