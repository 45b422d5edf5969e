"""nano-vLLM's scheduling policy: all prefill first, then all decode, never both in a round.

Pure decisions: no torch, no clock, no I/O. Given the same calls it returns the same rounds.
Source: nano-vllm bb823b3, nanovllm/engine/{scheduler,block_manager}.py.
Differs from the source: a request that can never fit is refused on arrival instead of failing an assertion later; prefix
caching can be turned off; and while no decode wants for a block, all decodes of a round are counted at once (the one-by-one
loop stands below it and decides the same).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from engines.interface import Int64Array, NewRequest, Rejection, Round, ScheduledBatch, SchedulerConfig
from engines.schedulers.decisions import RoundLog
from engines.schedulers.nano_blocks import NanoBlockManager
from engines.schedulers.nano_calendar import DecodesByCalendar
from engines.schedulers.sequence import Columns, Sequence, append_tokens, build_batch, slots_of
from engines.schedulers.steady import Steady, admissions_alone
from engines.steady_batch import ExtraRows, SteadyBatch
from traces.errors import BenchctlError

POLICY = "nano-vllm bb823b3"
DEFAULT_BLOCK_SIZE = 256
NULL_BLOCKS = 0
KNOBS = ("max_num_seqs", "max_num_batched_tokens", "block_size", "enable_prefix_caching")


class NanoScheduler(DecodesByCalendar):
    """Two queues and a block manager. `log_decisions=False` and `one_by_one=True` are for measuring and for tests."""

    name = "nano"
    # Named here too: what runs many rounds at once asks which class says what a round is.
    upcoming, advance = DecodesByCalendar.upcoming, DecodesByCalendar.advance

    def __init__(self, config: SchedulerConfig, *, log_decisions: bool | str = True, one_by_one: bool = False) -> None:
        check_config(config)
        self.config = config
        # A subclass that changes the loop over the running has it run.
        changed = type(self)._schedule_decode_one_by_one is not NanoScheduler._schedule_decode_one_by_one
        self.one_by_one = one_by_one = one_by_one or changed
        self.columns = Columns()
        self.log = RoundLog(log_decisions)
        self.blocks = NanoBlockManager(config.num_blocks, config.block_size, config.enable_prefix_caching, self.log)
        self.waiting: deque[Sequence | NewRequest] = deque()  # a request becomes a sequence when it is first looked at
        self.running: list[Sequence] = []
        self._steady = None if one_by_one else Steady(config.block_size, self.log.enabled)
        self._running_slots: Int64Array | None = None  # of `running`; None: it changed
        self._scheduled: list[Sequence] = []
        self._slots = slots_of([])

    # -- arrivals

    def add(self, request: NewRequest) -> Rejection | None:
        """Queue at the end, unless the whole of it, its last token left out (never computed), exceeds the pool."""
        needed = -(-(request.num_prompt_tokens + request.num_output_tokens - 1) // self.config.block_size)
        if needed > self.config.num_blocks:
            return Rejection(request.request, "exceeds_pool", needed, self.config.num_blocks, "blocks")
        self.enqueue(request)
        return None

    def enqueue(self, request: NewRequest) -> None:
        """As the source does it: without a look at what can ever fit."""
        self.waiting.append(request)

    def _head(self) -> Sequence:
        """The first of `waiting`, which holds at least one."""
        head = self.waiting[0]
        if isinstance(head, NewRequest):
            head = Sequence(head, self.columns, head.num_prompt_tokens + head.num_output_tokens)
            self.waiting[0] = head
        return head

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    # -- a round

    def schedule(self) -> Round:
        self.log.clear()
        free_start = self.blocks.pool.num_free
        prefill = self._schedule_prefill()
        stop_running = None if prefill.seqs else self._decode_by_calendar()
        batch: ScheduledBatch
        if stop_running is not None:
            assert self._steady is not None
            batch = self._steady.batch(self.running)
            num_new_sum = batch.num_decodes
        else:
            num_new_sum = sum(prefill.num_new)
            if prefill.seqs and not self.one_by_one:
                self._scheduled = prefill.seqs
                batch = admissions_alone(prefill.seqs, prefill.num_new, prefill.cached, self.config.block_size)
            else:
                batch, stop_running = self._batch_of_columns(prefill)
                num_new_sum = num_new_sum or len(self._scheduled)
        return Round(
            batch=batch,
            decisions=self.log.decisions,
            blocks=self.log.blocks,
            free_blocks_start=free_start,
            free_blocks_scheduled=self.blocks.pool.num_free,
            budget_left=self.config.max_num_batched_tokens - num_new_sum,
            queried_tokens=prefill.queried_tokens,
            stop_waiting=prefill.stop,
            stop_running=stop_running,
            num_admitted=prefill.num_admitted,
            num_preempted=self.log.num_preempted,
            num_evicted=self.log.num_evicted,
        )

    def _batch_of_columns(self, prefill: _Prefill) -> tuple[ScheduledBatch, str | None]:
        """The round's columns, of prefills or of decodes; and why these stopped."""
        stop = None
        if prefill.seqs:
            scheduled, cached = prefill.seqs, np.array(prefill.cached, dtype=np.int64)
            num_new = np.array(prefill.num_new, dtype=np.int64)
            slots = slots_of(scheduled)
        else:
            self._leave_steady()
            scheduled, slots, stop = self._schedule_decode()
            num_new = np.ones(len(scheduled), dtype=np.int64)
            cached = np.full(len(scheduled), -1, dtype=np.int64)
        self._scheduled, self._slots = scheduled, slots
        start = self.columns.num_computed_tokens[slots]
        return build_batch(self.columns, scheduled, slots, start, num_new, not prefill.seqs, cached), stop

    def _schedule_prefill(self) -> _Prefill:
        """From the head of `waiting`, strictly in order. Only the round's first may be given less than it wants."""
        config, log, out = self.config, self.log, _Prefill()
        budget = config.max_num_batched_tokens
        while self.waiting:
            if len(out.seqs) >= config.max_num_seqs:
                out.stop = "max_num_seqs"
                break
            if budget == 0:
                out.stop = "token_budget"
                break
            seq = self._head()
            admit, num_cached, needed, free = not seq.block_table, 0, 0, self.blocks.pool.num_free
            if admit:
                num_cached, needed = self.blocks.can_allocate(seq)
                if needed > free:
                    self._hold(seq, needed, free)
                    out.stop = "blocks"
                    break
                wanted = seq.num_tokens - num_cached * config.block_size
            else:
                wanted = seq.num_tokens - seq.num_computed_tokens  # a further chunk; its blocks are reserved already
            if wanted > budget and out.seqs:
                log.decide("hold", seq.request, "not_first", needed=wanted, available=budget, unit="tokens")
                out.stop = "not_first"
                break
            if admit:
                kind = "resume" if seq.num_preemptions else "admit"
                log.decide(kind, seq.request, "fits", needed=needed, available=free, unit="blocks")
                self.blocks.allocate(seq, num_cached)
                out.num_admitted += 1
                out.queried_tokens += seq.num_tokens if config.enable_prefix_caching else 0
            num_new = min(wanted, budget)
            budget -= num_new
            if num_new < wanted:
                log.decide("chunk", seq.request, "token_budget", needed=wanted, available=num_new, unit="tokens")
            else:
                # It counts as running from here, before anything is computed.
                self.waiting.popleft()
                self.running.append(seq)
                self._running_slots = None
            out.seqs.append(seq)
            out.num_new.append(num_new)
            out.cached.append(num_cached * config.block_size if admit else -1)
        return out

    def _hold(self, seq: Sequence, needed: int, free: int) -> None:
        self.log.decide("hold", seq.request, "blocks", needed=needed, available=free, unit="blocks")

    def _schedule_decode(self) -> tuple[list[Sequence], Int64Array, str]:
        """One token each for the first `max_num_seqs` of `running`; the token budget plays no part."""
        if self._running_slots is None:
            self._running_slots = slots_of(self.running)
        slots = self._running_slots[: self.config.max_num_seqs]
        opens_block = np.flatnonzero(self.columns.num_tokens[slots] % self.config.block_size == 1)
        if self.one_by_one or len(opens_block) > self.blocks.pool.num_free:
            return self._schedule_decode_one_by_one()
        for i in opens_block.tolist():
            self.blocks.may_append(self.running[i])
        stop = "running_empty" if len(slots) == len(self.running) else "max_num_seqs"
        return self.running[: len(slots)], slots, stop

    def _schedule_decode_one_by_one(self) -> tuple[list[Sequence], Int64Array, str]:
        """The source's loop. `running[:i]` is scheduled; victims come from the other end, so never from there."""
        running, i, stop = self.running, 0, "running_empty"
        while i < len(running):
            if i >= self.config.max_num_seqs:
                stop = "max_num_seqs"
                break
            seq = running[i]
            while not self.blocks.can_append(seq):
                victim = running.pop()
                self._preempt(victim, wanted_by=seq)
                if victim is seq:
                    stop = "self_preempted"
                    break
            else:
                self.blocks.may_append(seq)
                i += 1
        return running[:i], slots_of(running[:i]), stop

    def _preempt(self, victim: Sequence, wanted_by: Sequence) -> None:
        """Everything computed is given up; generated tokens are kept, and it waits ahead of all others."""
        itself = victim is wanted_by
        self.log.decide(
            "preempt",
            victim.request,
            "self" if itself else "newest",
            other=None if itself else wanted_by.request,
            needed=1,
            available=self.blocks.pool.num_free,
            unit="blocks",
        )
        victim.num_preemptions += 1
        if self._steady is not None and self._steady.holds(victim):
            self._steady.drop(victim)
        if victim.hidden_from < len(victim.block_table):
            self.blocks.reveal(victim)
        self.blocks.deallocate(victim)
        self.waiting.appendleft(victim)
        self._running_slots = None

    # -- after the forward pass

    def update(self, round: Round, sampled: Int64Array | None) -> None:
        """Hash what is full, append, finish: in schedule order, all steps of a sequence before the next one's."""
        if isinstance(round.batch, SteadyBatch) and round.batch.extra is not None:
            self._update_prefill(round, round.batch.extra, sampled)
        elif isinstance(round.batch, SteadyBatch):
            assert self._steady is not None
            self._end_members(self._steady, round.finished)
        else:
            self._update_columns(round, sampled)
        self._fill_steady()
        round.num_evicted = self.log.num_evicted
        round.free_blocks_end = self.blocks.pool.num_free
        round.cached_free_blocks = self.blocks.cached_free_blocks
        round.waiting, round.running = len(self.waiting), len(self.running)

    def _update_prefill(self, round: Round, rows: ExtraRows, sampled: Int64Array | None) -> None:
        size, yielded = self.config.block_size, 0
        for seq, start, num_new, yields in zip(
            self._scheduled, rows.start, rows.num_tokens, rows.yields_token, strict=True
        ):
            computed = seq.num_computed_tokens = start + num_new
            if yields:
                if sampled is not None:
                    seq.take_sampled(int(sampled[yielded]))
                    yielded += 1
                seq.num_tokens += 1
            if seq.num_hashed_blocks < computed // size:
                self.blocks.hash_blocks(seq, computed)
            if yields and seq.num_tokens >= seq.num_final_tokens:
                self.running.remove(seq)
                self._running_slots = None
                self._finish(seq, round.finished)

    def _update_columns(self, round: Round, sampled: Int64Array | None) -> None:
        columns, batch = self.columns, round.batch
        computed = batch.start + batch.num_tokens
        touched = columns.num_hashed_blocks[self._slots] < computed // self.config.block_size
        columns.num_computed_tokens[self._slots] = computed
        finished = append_tokens(columns, self._scheduled, self._slots, batch, sampled)
        if finished or self.blocks.caching:
            done = set(finished)
            for i in sorted({*np.flatnonzero(touched).tolist(), *finished}):
                seq = self._scheduled[i]
                self.blocks.hash_blocks(seq, int(computed[i]))
                if i in done:
                    self._finish(seq, round.finished)
        if finished:
            self.running = [seq for seq in self.running if seq.finish_reason is None]
            self._running_slots = None

    def _finish(self, seq: Sequence, finished: list[tuple[int, str]]) -> None:
        seq.finish_reason = seq.finish_reason or "max_tokens"
        self.log.decide("finish", seq.request, seq.finish_reason)
        finished.append((seq.request, seq.finish_reason))
        self.blocks.deallocate(seq)
        self.columns.give_back(seq.slot)

    # -- looking in

    def waiting_requests(self) -> list[int]:
        return [seq.request for seq in self.waiting]

    def running_requests(self) -> list[int]:
        return [seq.request for seq in self.running]

    def free_list(self) -> list[int]:
        return self.blocks.pool.free

    def hashed_blocks(self) -> list[int]:
        if self._steady is not None:
            self._steady.count_hashed(self.running)
        return sorted([*self.blocks.hash_to_block.values(), *self.blocks.hidden(self._admitted())])

    def block_table(self, request: int) -> list[int]:
        return next((list(seq.block_table) for seq in self._admitted() if seq.request == request), [])

    def _admitted(self) -> Iterator[Sequence]:
        """Those that may hold blocks: the head of the queue too, between two chunks."""
        return (seq for seq in (*self.running, *self.waiting) if isinstance(seq, Sequence))


class _Prefill:
    """What the waiting loop gathered."""

    __slots__ = ("cached", "num_admitted", "num_new", "queried_tokens", "seqs", "stop")

    def __init__(self) -> None:
        self.seqs: list[Sequence] = []
        self.num_new: list[int] = []
        self.cached: list[int] = []
        self.num_admitted = 0
        self.queried_tokens = 0
        self.stop = "waiting_empty"


def check_config(config: SchedulerConfig) -> None:
    """The settings that the source would fail on later, or never notice."""
    if config.block_size < 2:
        raise BenchctlError(
            f"nano needs --block-size 2 or more, got {config.block_size}",
            fix="with 1 the real nano-vLLM fails in its first decode",
        )
    for flag, value in (
        ("--num-blocks", config.num_blocks),
        ("--max-num-seqs", config.max_num_seqs),
        ("--max-num-batched-tokens", config.max_num_batched_tokens),
    ):
        if value < 1:
            raise BenchctlError(f"{flag} is {value}", fix=f"give {flag} 1 or more")
