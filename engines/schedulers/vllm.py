"""vLLM V1's scheduling policy: one token budget, the running first, then the waiting; computed tokens chase known tokens.

Pure decisions: no torch, no clock, no I/O. Given the same calls it returns the same rounds.
Source: vllm 0.33.0, vllm/v1/core/sched/scheduler.py, synchronous scheduling, a text-only decoder with one full-attention
group. Without: speculative decoding, encoder budgets, KV connectors, structured output, data-parallel throttling.
Differs from the source: a request that can never fit is refused on arrival (there the front end refuses some, and the rest
block the queue for ever); and while nobody has to be preempted, the running loop handles all running requests at once (the
one-by-one loop stands below it and decides the same).
"""

from __future__ import annotations

import numpy as np

from engines.interface import Int64Array, NewRequest, Rejection, Round, ScheduledBatch, SchedulerConfig
from engines.schedulers.decisions import RoundLog
from engines.schedulers.sequence import Columns, Sequence, append_tokens, build_batch, slots_of
from engines.schedulers.steady import Steady
from engines.schedulers.vllm_batch import RoundBatch, cut_by_budget
from engines.schedulers.vllm_blocks import VllmBlockManager
from engines.schedulers.vllm_calendar import CalendarRounds
from engines.schedulers.vllm_config import NULL_BLOCKS as NULL_BLOCKS
from engines.schedulers.vllm_config import check_config
from engines.schedulers.vllm_queue import FcfsQueue, PriorityQueue
from engines.steady_batch import SteadyBatch

POLICY = "vllm 0.33.0, synchronous"
DEFAULT_BLOCK_SIZE = 16
KNOBS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "enable_prefix_caching",
    "max_model_len",
    "enable_chunked_prefill",
    "long_prefill_token_threshold",
    "scheduling_policy",
    "scheduler_reserve_full_isl",
    "watermark",
    "max_loras",
)


class VllmScheduler(CalendarRounds):
    """A running list, a waiting queue and a block manager. `log_decisions`, `one_by_one`: for measuring and for tests."""

    name = "vllm"
    # Named here too: what runs many rounds at once asks which class says what a round is.
    upcoming, advance = CalendarRounds.upcoming, CalendarRounds.advance

    def __init__(self, config: SchedulerConfig, *, log_decisions: bool | str = True, one_by_one: bool = False) -> None:
        check_config(config)
        self.config = config
        # A subclass that changes the loop over the running has it run.
        self.one_by_one = one_by_one = one_by_one or any(
            getattr(type(self), name) is not getattr(VllmScheduler, name)
            for name in ("_wanted", "_schedule_running_one_by_one")
        )
        self.columns = Columns()
        self.log = RoundLog(log_decisions)
        self.blocks = VllmBlockManager(
            config.num_blocks, config.block_size, config.max_model_len, config.enable_prefix_caching, self.log
        )
        self.waiting: FcfsQueue | PriorityQueue = (
            PriorityQueue if config.scheduling_policy == "priority" else FcfsQueue
        )(self._make_sequence)
        self.skipped: set[int] = set()  # requests passed over and not admitted since
        self.running: list[Sequence] = []
        self._steady = None if one_by_one else Steady(config.block_size, self.log.enabled)
        self._running_slots: Int64Array | None = None  # of `running`; None: it changed
        self._scheduled: list[Sequence] = []
        self._slots = slots_of([])

    # -- arrivals

    def add(self, request: NewRequest) -> Rejection | None:
        """Queue, unless it could never finish here.

        A prompt has to be shorter than max_model_len. Every token but the last is computed, and alone in the pool a request
        may use all usable blocks. With chunked prefill off it may have to be admitted again, after a preemption, with all
        tokens but its last, within one budget.
        """
        config = self.config
        if config.max_model_len is not None and request.num_prompt_tokens >= config.max_model_len:
            return Rejection(
                request.request, "prompt_too_long", request.num_prompt_tokens, config.max_model_len - 1, "tokens"
            )
        computed = self._final_tokens(request) - 1
        needed, usable = -(-computed // config.block_size), config.num_blocks - NULL_BLOCKS
        if needed > usable:
            return Rejection(request.request, "exceeds_pool", needed, usable, "blocks")
        if not config.enable_chunked_prefill and computed > config.max_num_batched_tokens:
            return Rejection(request.request, "exceeds_budget", computed, config.max_num_batched_tokens, "tokens")
        self.enqueue(request)
        return None

    def enqueue(self, request: NewRequest) -> None:
        """As the source's scheduler does it: without a look at what can ever fit."""
        self.waiting.add(request)

    def _make_sequence(self, request: NewRequest) -> Sequence:
        return Sequence(request, self.columns, self._final_tokens(request))

    def _final_tokens(self, request: NewRequest) -> int:
        return self.blocks.clip(request.num_prompt_tokens + request.num_output_tokens)

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    # -- a round

    def schedule(self) -> Round:
        self.log.clear()
        free_start = self.blocks.pool.num_free
        # One request alone is never held back for the sake of others; who only waits counts too.
        threshold = self.config.long_prefill_token_threshold if len(self.running) + len(self.waiting) > 1 else 0
        batch = (
            self._schedule_steady(threshold)
            or self._schedule_running_at_once(threshold)
            or self._schedule_running_one_by_one(threshold)
        )
        num_running = len(batch.seqs)
        if self.log.num_preempted:
            stop_waiting = "preemption"  # blocks just given up are not for newcomers
        else:
            stop_waiting = self._schedule_waiting(batch, threshold)
        out = self._steady_batch(batch) if batch.steady else self._columns_of(batch, num_running)
        return Round(
            batch=out,
            decisions=self.log.decisions,
            blocks=self.log.blocks,
            free_blocks_start=free_start,
            free_blocks_scheduled=self.blocks.pool.num_free,
            budget_left=batch.budget,
            queried_tokens=batch.queried_tokens,
            stop_waiting=stop_waiting,
            stop_running=batch.stop_running,
            num_admitted=len(batch.seqs) - num_running,
            num_preempted=self.log.num_preempted,
            num_evicted=self.log.num_evicted,
        )

    def _columns_of(self, batch: RoundBatch, num_running: int) -> ScheduledBatch:
        columns, scheduled = self.columns, batch.seqs
        if len(scheduled) == num_running and batch.slots is not None:
            slots, num_new = batch.slots, batch.running_num_new
        else:
            slots = (
                slots_of(scheduled)
                if batch.slots is None
                else np.concatenate([batch.slots, slots_of(scheduled[num_running:])])
            )
            num_new = np.concatenate([batch.running_num_new, np.array(batch.num_new, dtype=np.int64)])
        cached = np.full(len(scheduled), -1, dtype=np.int64)
        cached[num_running:] = batch.cached
        was_running = np.zeros(len(scheduled), dtype=np.bool_)
        was_running[:num_running] = True
        self._scheduled, self._slots = scheduled, slots
        start = columns.num_computed_tokens[slots]
        out = build_batch(columns, scheduled, slots, start, num_new, was_running, cached)
        columns.num_computed_tokens[slots] = start + num_new  # ahead of the model; nothing is rolled back later
        return out

    def _wanted(self, seq: Sequence, num_computed: int, threshold: int, budget: int) -> int:
        """Tokens for `seq`: what it lacks, at most the threshold, at most the budget."""
        num_new = seq.num_tokens - num_computed
        if 0 < threshold < num_new:
            num_new = threshold
        return min(num_new, budget)

    def _schedule_running_at_once(self, threshold: int) -> RoundBatch | None:
        """All running requests by columns; None where blocks don't suffice for all of them, tokens for all but the last, or one
        wants nothing."""
        if self.one_by_one:
            return None
        if self._running_slots is None:
            self._running_slots = slots_of(self.running)
        slots, columns, block_size = self._running_slots, self.columns, self.config.block_size
        computed, known = columns.num_computed_tokens[slots], columns.num_tokens[slots]
        num_new = known - computed
        if threshold > 0:
            num_new = np.minimum(num_new, threshold)
        budget, stop = self.config.max_num_batched_tokens - int(num_new.sum()), "running_empty"
        if budget < 0 and -budget < num_new[-1]:
            # Enough for all but the last, who gets what is left.
            num_new[-1] += budget
            budget = 0
            if cut_by_budget(int(known[-1] - computed[-1]), int(num_new[-1]), threshold):
                stop = "token_budget"
        if budget < 0 or (
            self.config.max_model_len is not None and (computed + num_new >= self.config.max_model_len).any()
        ):
            return None
        target = computed + num_new
        new_blocks = (target + (block_size - 1)) // block_size - columns.num_blocks[slots]
        if int(new_blocks.sum()) > self.blocks.pool.num_free:
            return None
        touched = (new_blocks > 0) | (target < known)  # takes a block, or is a chunk
        if self.blocks.caching:
            touched |= target // block_size > columns.num_hashed_blocks[slots]
        for i in np.flatnonzero(touched).tolist():
            seq = self.running[i]
            self.blocks.allocate_slots(seq, int(target[i]))
            self._log_chunk(seq, int(known[i] - computed[i]), int(num_new[i]), threshold)
        batch = RoundBatch(budget)
        batch.seqs, batch.slots, batch.running_num_new, batch.stop_running = list(self.running), slots, num_new, stop
        return batch

    def _schedule_running_one_by_one(self, threshold: int) -> RoundBatch:
        """The source's loop. A request that gets no blocks preempts others, and itself if nobody else is left."""
        config, running, log = self.config, self.running, self.log
        by_priority = config.scheduling_policy == "priority"
        budget, stop, i = config.max_num_batched_tokens, "running_empty", 0
        scheduled: dict[Sequence, int] = {}
        while i < len(running):
            if budget == 0:
                stop = "token_budget"
                break
            seq = running[i]
            num_new = self._wanted(seq, seq.num_computed_tokens, threshold, budget)
            if config.max_model_len is not None:
                num_new = min(num_new, config.max_model_len - seq.num_computed_tokens - 1)
            if num_new == 0:
                # Not a stop: those behind it are served, against strict first come first served.
                log.decide("hold", seq.request, "max_model_len", needed=1, available=0, unit="tokens")
                i += 1
                continue
            target = seq.num_computed_tokens + num_new
            while (needed := self.blocks.blocks_needed(seq, target)) > self.blocks.pool.num_free:
                if by_priority:
                    # max() keeps the first of equals in running order; the id breaks no tie here.
                    victim = max(running, key=lambda other: (other.new.priority, other.new.arrival_s))
                    place = running.index(victim)
                    del running[place]
                    i -= place < i
                    # Its tokens return to the budget, for those behind: this request's share is settled.
                    budget += scheduled.pop(victim, 0)
                else:
                    victim = running.pop()
                self._preempt(victim, seq, needed)
                if victim is seq:
                    break
            else:
                wanted = seq.num_tokens - seq.num_computed_tokens
                self.blocks.allocate_slots(seq, target)
                self._log_chunk(seq, wanted, num_new, threshold)
                scheduled[seq] = num_new
                budget -= num_new
                i += 1
                if budget == 0 and cut_by_budget(wanted, num_new, threshold):
                    stop = "token_budget"
                continue
            if not by_priority:
                stop = "self_preempted"
                break
            # By priority the next one now stands where this one stood, and is served.
        batch = RoundBatch(budget)
        batch.seqs, batch.stop_running = list(scheduled), stop
        batch.running_num_new = np.fromiter(scheduled.values(), dtype=np.int64, count=len(scheduled))
        return batch

    def _log_chunk(self, seq: Sequence, wanted: int, given: int, threshold: int) -> None:
        if given < wanted:
            by_budget = cut_by_budget(wanted, given, threshold)
            reason = "token_budget" if by_budget else "long_prefill_token_threshold"
            self.log.decide("chunk", seq.request, reason, needed=wanted, available=given, unit="tokens")

    def _preempt(self, victim: Sequence, wanted_by: Sequence, needed: int) -> None:
        """Everything computed is given up; generated tokens are kept; what its blocks still hold can be hit on return."""
        itself = victim is wanted_by
        reason = "lowest_priority" if self.config.scheduling_policy == "priority" else "newest"
        self.log.decide(
            "preempt",
            victim.request,
            "self" if itself else reason,
            other=None if itself else wanted_by.request,
            needed=needed,
            available=self.blocks.pool.num_free,
            unit="blocks",
        )
        if self._steady is not None and self._steady.holds(victim):
            self._steady.drop(victim)
        if victim.hidden_from < len(victim.block_table):
            self.blocks.reveal(victim)
        self.blocks.free(victim)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self.waiting.put_back([victim])
        self._running_slots = None

    def _schedule_waiting(self, batch: RoundBatch, threshold: int) -> str:
        """Admit from the head until tokens, seats or blocks run out; pass over only those whose adapter has no place."""
        config, log, running = self.config, self.log, self.running
        adapters = {seq.new.adapter for seq in running if seq.new.adapter} if config.max_loras is not None else set()
        passed: list[Sequence] = []
        cut = False  # the last one admitted used the budget up, and wanted more
        while (stop := self._closed(batch.budget)) is None:
            seq = self.waiting.peek()
            adapter = seq.new.adapter
            if (
                config.max_loras is not None
                and adapter
                and adapter not in adapters
                and len(adapters) >= config.max_loras
            ):
                log.decide(
                    "skip",
                    seq.request,
                    "max_loras",
                    needed=len(adapters) + 1,
                    available=config.max_loras,
                    unit="adapters",
                )
                passed.append(self.waiting.pop())
                self.skipped.add(seq.request)
                continue
            hits = self.blocks.get_computed_blocks(seq)
            num_cached = len(hits) * config.block_size
            wanted = seq.num_tokens - num_cached
            num_new = self._wanted(seq, num_cached, threshold, wanted)
            if num_new > batch.budget and not config.enable_chunked_prefill:
                log.decide(
                    "hold", seq.request, "chunking_disabled", needed=num_new, available=batch.budget, unit="tokens"
                )
                stop = "chunking_disabled"
                break
            num_new = min(num_new, batch.budget)
            lacking = self._lacking(seq, num_cached + num_new, hits)
            if lacking is not None:
                stop = lacking
                break
            kind = "resume" if seq.num_preemptions else "admit"
            needed, free = self.blocks.blocks_needed(seq, num_cached + num_new, hits), self.blocks.pool.num_free
            log.decide(kind, seq.request, "fits", needed=needed, available=free, unit="blocks")
            self._log_chunk(seq, wanted, num_new, threshold)
            self.waiting.pop()
            self.skipped.discard(seq.request)
            self.blocks.allocate_slots(seq, num_cached + num_new, hits)
            seq.num_computed_tokens = num_cached
            running.append(seq)
            self._running_slots = None
            if adapter:
                adapters.add(adapter)
            batch.admit(seq, num_new, num_cached, seq.num_tokens if config.enable_prefix_caching else 0)
            cut = batch.budget == 0 and cut_by_budget(wanted, num_new, threshold)
        self.waiting.put_back(passed)
        return "token_budget" if cut else stop  # though nobody may be left behind it

    def _closed(self, budget: int) -> str | None:
        """Why nobody who waits is looked at; None: the head is."""
        if not self.waiting:
            return "waiting_empty"
        if budget == 0:
            return "token_budget"
        if len(self.running) >= self.config.max_num_seqs:
            return "max_num_seqs"
        return None

    def _lacking(self, seq: Sequence, num_tokens: int, hits: list[int]) -> str | None:
        """Why the head gets no blocks, or None where it does. The watermark spares the first to run."""
        config, blocks = self.config, self.blocks
        free = blocks.pool.num_free
        watermark = int(config.watermark * config.num_blocks) if self.running else 0
        checks = [("blocks", num_tokens)]
        if config.scheduler_reserve_full_isl:
            checks.insert(0, ("reserve_full_isl", seq.num_tokens))  # a check, not a reservation
        for reason, tokens in checks:
            needed = blocks.blocks_needed(seq, tokens, hits)
            if needed + watermark > free:
                reason = reason if needed > free else "watermark"
                self.log.decide("hold", seq.request, reason, needed=needed + watermark, available=free, unit="blocks")
                return reason
        return None

    # -- after the forward pass

    def update(self, round: Round, sampled: Int64Array | None) -> None:
        """Append, and free at once what is finished, in batch order; seats and blocks are usable in the next round."""
        if isinstance(round.batch, SteadyBatch):
            self._update_steady(round, sampled)
        else:
            finished = append_tokens(self.columns, self._scheduled, self._slots, round.batch, sampled)
            for i in finished:
                self._finish(self._scheduled[i], round.finished)
            if finished:
                self.running = [seq for seq in self.running if seq.finish_reason is None]
            self._running_slots = None
            self._enter_steady()
        round.free_blocks_end = self.blocks.pool.num_free
        round.cached_free_blocks = self.blocks.cached_free_blocks
        round.waiting, round.running, round.skipped = len(self.waiting), len(self.running), len(self.skipped)

    def _finish(self, seq: Sequence, finished: list[tuple[int, str]]) -> None:
        if seq.finish_reason is None:
            asked = seq.new.num_prompt_tokens + seq.new.num_output_tokens
            seq.finish_reason = "max_tokens" if seq.num_tokens >= asked else "length_capped"
        self.log.decide("finish", seq.request, seq.finish_reason)
        finished.append((seq.request, seq.finish_reason))
        self.blocks.free(seq)
        self.columns.give_back(seq.slot)

    # -- looking in

    def waiting_requests(self) -> list[int]:
        return self.waiting.in_order()

    def running_requests(self) -> list[int]:
        return [seq.request for seq in self.running]

    def free_list(self) -> list[int]:
        return self.blocks.pool.free

    def hashed_blocks(self) -> list[int]:
        if self._steady is not None:
            self._steady.count_hashed(self.running)
        return self.blocks.hashed(self.running)

    def block_table(self, request: int) -> list[int]:
        return next((list(s.block_table) for s in self.running if s.request == request), [])
