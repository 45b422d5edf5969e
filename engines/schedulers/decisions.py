"""The closed vocabulary of what a scheduler says it did, and the log that collects it within a round.

Every word is a plain string, so that a row costs nothing to store; the dicts are the closed sets, with the meaning that
reports print. `reports/records.py` repeats the meanings for readers that have no schedulers; a test holds them equal.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableSequence
from collections.abc import Sequence as Seq
from typing import Any

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

# What a run of block events is. Within a run the flag of a block says: ALLOCATE, its content was forgotten just before (an
# `evict` event, and the decision beside it, come in front); FREE, it is still held by others (`release`).
ALLOCATE, CACHE, SHARE, FREE, EVICT_EVENT, EVICT = range(6)  # EVICT: the event and its decision
RUN_EVENTS: tuple[tuple[str, str], ...] = (
    ("allocate", "allocate"),
    ("cache", "cache"),
    ("share", "share"),
    ("free", "release"),
    ("evict", "evict"),
    ("evict", "evict"),
)
_RUN_OF = {"allocate": (ALLOCATE, 0), "cache": (CACHE, 0), "share": (SHARE, 0), "free": (FREE, 0), "release": (FREE, 1), "evict": (EVICT_EVENT, 0)}  # fmt: skip
RUN_WIDTH = 6
NO_INDEX = -(2**63)


class BlockEvents(Seq[BlockRow]):
    """Block events of a round by runs: blocks of one table, one after the other. Rows are made when they are read.

    `runs` holds RUN_WIDTH integers a run: what, order, request, logical index of its first block, step of the index,
    number of blocks. `blocks` and `flags` hold the blocks of all runs.
    """

    __slots__ = ("blocks", "flags", "runs")

    def __init__(self) -> None:
        self.runs: list[int] = []
        self.blocks: list[int] = []
        self.flags = bytearray()

    def rows(self) -> list[BlockRow]:
        out: list[BlockRow] = []
        at = 0
        for i in range(0, len(self.runs), RUN_WIDTH):
            what, order, request, index, step, count = self.runs[i : i + RUN_WIDTH]
            plain, flagged = RUN_EVENTS[what]
            for place in range(at, at + count):
                block, flag = self.blocks[place], self.flags[place]
                if flag and what == ALLOCATE:
                    out.append((order, block, "evict", request, None))
                    order += 2  # the decision stands between
                out.append((order, block, flagged if flag else plain, request, None if index == NO_INDEX else index))
                order += 1
                index += step
            at += count
        return out

    def evictions(self) -> list[DecisionRow]:
        """The decisions that stand beside `evict` events."""
        return [(at + 1, "evict", request, None, "reused", None, None, None) for at, request in self._evicted()]

    def _evicted(self) -> Iterator[tuple[int, int]]:
        """(order, request) of each event that has such a decision."""
        at = 0
        for i in range(0, len(self.runs), RUN_WIDTH):
            what, order, request, _, _, count = self.runs[i : i + RUN_WIDTH]
            if what == EVICT:
                yield order, request
            elif what == ALLOCATE:
                for flag in self.flags[at : at + count]:
                    if flag:
                        yield order, request
                    order += 1 + 2 * flag
            at += count

    def __len__(self) -> int:
        return len(self.rows())

    def __getitem__(self, index: int) -> BlockRow:  # type: ignore[override]
        return self.rows()[index]

    def __iter__(self) -> Iterator[BlockRow]:
        return iter(self.rows())

    def __eq__(self, other: object) -> bool:
        return self.rows() == other.rows() if isinstance(other, type(self)) else self.rows() == other

    __hash__ = None  # type: ignore[assignment]


class Decisions(MutableSequence[DecisionRow]):
    """Decisions of a round. Evictions are kept beside their block events, and come in where they belong when read.

    `whole`: somebody changed the rows, and all of them stand in `plain`.
    """

    __slots__ = ("events", "plain", "whole")

    def __init__(self, events: BlockEvents) -> None:
        self.plain: list[DecisionRow] = []  # all but evictions
        self.events = events
        self.whole = False

    def rows(self) -> list[DecisionRow]:
        return self.plain if self.whole else sorted(self.plain + self.events.evictions(), key=lambda row: row[0])

    def _own(self) -> list[DecisionRow]:
        self.plain, self.whole = self.rows(), True
        return self.plain

    def __len__(self) -> int:
        return len(self.rows())

    def __getitem__(self, index: Any) -> Any:
        return self.rows()[index]

    def __iter__(self) -> Iterator[DecisionRow]:
        return iter(self.rows())

    def __setitem__(self, index: Any, value: Any) -> None:
        self._own()[index] = value

    def __delitem__(self, index: Any) -> None:
        del self._own()[index]

    def insert(self, index: int, value: DecisionRow) -> None:
        self._own().insert(index, value)

    def __eq__(self, other: object) -> bool:
        return self.rows() == other.rows() if isinstance(other, type(self)) else self.rows() == other

    __hash__ = None  # type: ignore[assignment]


class RoundLog:
    """Decisions and block events of one round, in the order in which they happened.

    Owned by one scheduler, cleared at each `schedule()`. `keep`: True for everything, "preemptions" for those decisions and the
    counts, False for the counts alone.
    """

    __slots__ = ("_keeps_preemptions", "blocks", "decisions", "enabled", "num_evicted", "num_preempted", "order")

    def __init__(self, keep: bool | str = True) -> None:
        self.enabled = keep is True
        self._keeps_preemptions = bool(keep)
        self.clear()

    def clear(self) -> None:
        """Begin a round. The lists are new: those of the last round belong to whoever took them."""
        self.order = 0
        self.num_preempted = 0
        self.num_evicted = 0
        self.blocks = BlockEvents()
        self.decisions = Decisions(self.blocks)

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
        if self.enabled or (kind == "preempt" and self._keeps_preemptions):
            self.decisions.plain.append((self.order, kind, request, other, reason, needed, available, unit))
            self.order += 1

    def take(self, taken: list[int], request: int, first: int, evicted: bytes | None) -> None:
        """`request` got blocks from the free list, from logical index `first` on. `evicted`: a 1 for each whose content
        could still be found until then; None: of none."""
        num_evicted = 0
        if evicted is not None:
            num_evicted = sum(evicted)
            self.num_evicted += num_evicted
        if self.enabled:
            events, count = self.blocks, len(taken)
            events.runs += (ALLOCATE, self.order, request, first, 1, count)
            events.blocks += taken
            events.flags += bytes(count) if evicted is None else evicted
            self.order += count + 2 * num_evicted

    def edges(
        self, opening: list[Any], taken: list[int], evicted: bytes | None, filling: list[Any], age: int, block_size: int
    ) -> None:
        """In running order: `take` of one block of `taken` each, and the block that is full now findable.

        Members of a `steady.Steady`; their tables hold the blocks already.
        """
        if evicted is not None:
            self.num_evicted += sum(evicted)
        if not self.enabled:
            return
        events, order = self.blocks, self.order
        runs, blocks, flags = events.runs, events.blocks, events.flags
        at, end = 0, len(filling)
        for place, seq in enumerate(opening):
            while at < end and filling[at].serial < seq.serial:
                full = filling[at]
                index = (full.base + age) // block_size
                runs += (CACHE, order, full.new.request, index, 1, 1)
                blocks.append(full.block_table[index])
                flags.append(0)
                order += 1
                at += 1
            flag = 0 if evicted is None else evicted[place]
            runs += (ALLOCATE, order, seq.new.request, len(seq.block_table) - 1, 1, 1)
            blocks.append(taken[place])
            flags.append(flag)
            order += 1 + 2 * flag
        for full in filling[at:]:
            index = (full.base + age) // block_size
            runs += (CACHE, order, full.new.request, index, 1, 1)
            blocks.append(full.block_table[index])
            flags.append(0)
            order += 1
        self.order = order

    def fill_block(self, block: int, request: int, index: int) -> None:
        """`blocks_in_table` of a single block that is full."""
        if self.enabled:
            events = self.blocks
            events.runs += (CACHE, self.order, request, index, 1, 1)
            events.blocks.append(block)
            events.flags.append(0)
            self.order += 1

    def blocks_in_table(self, event: str, table: list[int], request: int, first: int, end: int) -> None:
        """The same event for the logical blocks first..end-1 of one table."""
        if self.enabled:
            events, count = self.blocks, end - first
            events.runs += (_RUN_OF[event][0], self.order, request, first, 1, count)
            events.blocks += table[first:end]
            events.flags += bytes(count)
            self.order += count

    def block(self, event: str, block: int, request: int, index: int | None) -> None:
        """One event, where nothing else can be said about it."""
        if self.enabled:
            events, (what, flag) = self.blocks, _RUN_OF[event]
            events.runs += (what, self.order, request, NO_INDEX if index is None else index, 0, 1)
            events.blocks.append(block)
            events.flags.append(flag)
            self.order += 1

    def evict(self, block: int, request: int) -> None:
        """A cached block is taken by `request`: as an event of the block and as a decision."""
        self.num_evicted += 1
        if self.enabled:
            self.blocks.runs += (EVICT, self.order, request, NO_INDEX, 0, 1)
            self.blocks.blocks.append(block)
            self.blocks.flags.append(0)
            self.order += 2

    def leave(self, blocks: list[int], request: int, still_held: bytes | None) -> None:
        """All blocks of a table, last one first, left it. `still_held`: a 1 for each that others hold; None: none."""
        if self.enabled:
            events, count = self.blocks, len(blocks)
            events.runs += (FREE, self.order, request, count - 1, -1, count)
            events.blocks += blocks
            events.flags += bytes(count) if still_held is None else still_held
            self.order += count
