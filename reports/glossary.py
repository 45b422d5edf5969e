"""What the closed words of the records mean: decisions, reasons, stops, block events; and every column of the tables.

Repeats engines/schedulers/decisions.py for readers that have no schedulers; a test holds the two equal.
"""

from __future__ import annotations

from reports.records import TABLES

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
    "fits": "tokens, seats and blocks were there",
    "token_budget": "max_num_batched_tokens leaves fewer tokens than it wants",
    "not_first": "nano: more tokens than the budget has left, and only a round's first request may be chunked",
    "blocks": "more blocks needed than are free",
    "long_prefill_token_threshold": "one request may get no more than the threshold in a round",
    "chunking_disabled": "chunked prefill is off and the budget left does not cover the whole",
    "reserve_full_isl": "the whole known sequence has to fit the free blocks at admission",
    "watermark": "the blocks would be there, but the watermark keeps them for the running",
    "max_model_len": "the next token would lie beyond max_model_len",
    "max_loras": "every adapter place is taken by another adapter",
    "newest": "the last of the running list is the victim",
    "lowest_priority": "the largest (priority, arrival) among the running is the victim",
    "self": "nobody else was left to preempt, or the request itself was the victim",
    "reused": "the block was next in the free list",
    "max_tokens": "all output tokens asked for were emitted",
    "length_capped": "max_model_len was reached before the output asked for",
    "eos": "the model chose an end-of-sequence token",
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

BLOCK_EVENTS: dict[str, str] = {
    "allocate": "taken from the free list; its old content is lost",
    "share": "a prefix hit: the block stands in one more table",
    "cache": "full, and findable by its hash from now on",
    "release": "left a table, still held by others",
    "free": "left its last table; its content stays until it is taken again",
    "evict": "its hash was forgotten because it was taken again",
}

TIMES: dict[str, str] = {
    "overlap": "the next round is scheduled and launched while the device works on this one, so a round starts before the one before it ends; decisions are still those of a synchronous scheduler, since the tokens to come are known beforehand",
    "own time": "a round's t_end_s less the later of its t_start_s and the end of the round before: what it added to the run. Every sum over rounds, stalled time among them, is one of own times, so that no moment counts twice",
    "host and device time": "one after the other without overlap; side by side with it, and then never added up",
}


def columns() -> list[tuple[str, str, str]]:
    """(table, column, meaning) of every column of the schema, for the report's glossary."""
    return [(table, column, meaning) for table, entries in TABLES.items() for column, (_, meaning) in entries.items()]
