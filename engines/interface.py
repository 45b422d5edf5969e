"""What passes between the replay loop, a scheduler and an engine. No torch, no clock, no files.

The engine is built first and states its `EngineLimits`; the scheduler is built from them. The scheduler never sees the
engine or a tensor, the engine never sees a queue or a policy: a `ScheduledBatch` is data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine can hold. `num_blocks` is the raw count, a policy's null block included."""

    num_blocks: int
    block_size: int
    max_model_len: int | None = None  # None: no limit (the null engine)
    vocab_size: int | None = None  # None: no vocabulary, ids are any signed 64-bit integers


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Knobs of both policies under vLLM's names; a policy ignores those it does not have (`KNOBS` of its module)."""

    num_blocks: int
    block_size: int
    max_num_seqs: int = 512
    max_num_batched_tokens: int = 16384
    max_model_len: int | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0  # 0: off
    scheduling_policy: str = "fcfs"  # or "priority"
    scheduler_reserve_full_isl: bool = False
    watermark: float = 0.0
    max_loras: int | None = None  # None: no limit


class BlockKeys(Protocol):
    """Makes keys that stand for the ids of blocks."""

    shares_nothing: bool  # of no two requests two are equal

    def __call__(self, row: int, num_prompt_tokens: int, num_blocks: int, /) -> tuple[list[Any], int]:
        """(keys, how many of the first ones another request may have too)."""


class NewRequest(msgspec.Struct, frozen=True, gc=False):
    """A request as a scheduler takes it. Sizes are known; ids are made when first looked at.

    A struct outside the garbage collector's care: a million may wait.

    `make_token_ids` returns int64 [num_prompt_tokens + num_output_tokens]: the prompt, then the forced outputs, or
    [num_prompt_tokens] when `forced` is false (then the model's tokens are appended by `update`).
    `num_output_tokens` is the most that will be emitted. `arrival_s` and `id` only break ties of priority.
    """

    request: int
    id: str
    num_prompt_tokens: int
    num_output_tokens: int
    make_token_ids: Callable[[], Int64Array]
    arrival_s: float = 0.0
    priority: int = 0
    adapter: str | None = None
    forced: bool = True
    eos_token_ids: frozenset[int] = frozenset()  # only looked at when not forced
    # Called with (request, num_prompt_tokens, number of leading full blocks): a key a block, equal exactly where all ids up to
    # the block's end are equal, over all requests that have such keys, and unequal to any other's. None: ids are hashed.
    make_block_keys: BlockKeys | None = None


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a request can never run here: refused on arrival. `needed` > `available`, both in `unit`."""

    request: int
    reason: str
    needed: int
    available: int
    unit: str


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One round's work, in batch order, as columns. `[n]` = one entry a sequence.

    The tokens to feed sequence i are `token_ids[i][start[i] : start[i] + num_tokens[i]]`, at those positions; their K and V
    go to block `block_tables[i][p // block_size]`, slot `p % block_size`. A block may be hit by one sequence in the very
    round in which another computes it: write all K and V of a layer before any attention of that layer.
    Lists and arrays are live views of the scheduler's state: valid until its next call.
    """

    request: Int64Array  # [n]
    start: Int64Array  # [n] num_computed_tokens before the round
    num_tokens: Int64Array  # [n]
    is_decode: BoolArray  # [n] was running before the round and feeds exactly its newest, generated token
    yields_token: BoolArray  # [n] this round's logits of its last token give a token
    cached_tokens: Int64Array  # [n] tokens taken from the prefix cache by this round's admission; -1 where none was
    num_blocks: Int64Array  # [n] length of its block table after the round's allocations
    block_tables: Sequence[list[int]]  # n lists, made when read
    token_ids: Sequence[Int64Array]  # n arrays of all known tokens, made when read

    @property
    def num_seqs(self) -> int:
        return len(self.request)

    @property
    def num_yields(self) -> int:
        """Tokens that come out of the round."""
        return int(np.count_nonzero(self.yields_token))


@dataclass(slots=True)
class Round:
    """What one `schedule()` decided; completed by the `update()` that follows. Counts are blocks unless said otherwise.

    `decisions` rows: (order, kind, request, other, reason, needed, available, unit); `blocks` rows: (order, block, event,
    request, index). `order` is one sequence over both lists. The null block is never counted.
    """

    batch: ScheduledBatch
    decisions: Sequence[tuple[int, str, int, int | None, str, int | None, int | None, str | None]]
    blocks: Sequence[tuple[int, int, str, int, int | None]]
    free_blocks_start: int
    free_blocks_scheduled: int
    budget_left: int  # tokens
    queried_tokens: int  # known tokens of the requests admitted in this round: the base of the hit rate
    stop_waiting: str | None  # why the waiting loop ended; None: it did not run
    stop_running: str | None
    num_admitted: int = 0
    num_preempted: int = 0
    num_evicted: int = 0
    # set by update()
    finished: list[tuple[int, str]] = field(default_factory=list)  # (request, reason), in order
    free_blocks_end: int = 0
    cached_free_blocks: int = 0  # free, still holding reusable KV
    waiting: int = 0  # requests, the skipped among them
    running: int = 0
    skipped: int = 0


class Scheduler(Protocol):
    """A policy. Given the same calls it returns the same rounds."""

    name: str

    def add(self, request: NewRequest) -> Rejection | None:
        """Queue a request. Returns a Rejection, and queues nothing, where it could never finish."""

    def has_unfinished(self) -> bool: ...

    def schedule(self) -> Round: ...

    def update(self, round: Round, sampled: Int64Array | None) -> None:
        """Complete `round`: append tokens, finish, free. `sampled`: the model's token of each row that yields one, in
        batch order; needed only for requests that are not forced."""

    def waiting_requests(self) -> list[int]:
        """Requests waiting, in the order in which they would be looked at."""

    def running_requests(self) -> list[int]: ...

    def free_list(self) -> list[int]:
        """Free block ids, next to be taken first."""

    def hashed_blocks(self) -> list[int]:
        """Sorted ids of the blocks that a prefix lookup can find."""

    def block_table(self, request: int) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a forward pass gave back."""

    token_ids: Int64Array | None  # [yields_token.sum()] what the model chose; None: there is no model
    device_s: float | None  # device time where the device can tell
    duration_s: float | None  # what a virtual clock advances by; None: not known, the loop measures it
    mode: str  # eager, graph, simulated, null
    padded_tokens: int  # tokens the device computed, padding included
    prepare_s: float = 0.0  # host time before the launch
    flops: float | None = None
    bytes: float | None = None


class Engine(Protocol):
    """Executes batches. `launch` may return before the device is done; `collect` waits for it.

    An engine may offer `launch` in two steps as well: `prepare(batch)` does the host's part and returns an object whose
    attribute `eager` says that the second, `start(prepared) -> handle`, will keep the host busy.
    """

    name: str
    limits: EngineLimits

    def launch(self, batch: ScheduledBatch) -> Any: ...

    def collect(self, handle: Any) -> StepResult: ...

    def close(self) -> None: ...
