"""vLLM's rounds in which nearly all who run decode one token each: by their calendar, and many at once.

No second implementation of the policy's rules: what a round takes, frees and says is what vllm.py's loops do, told by who has
an edge in it. Part of `VllmScheduler`, which has the loops for every other round.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from engines.interface import Int64Array, Round, SchedulerConfig
from engines.schedulers.decisions import RoundLog
from engines.schedulers.sequence import Columns, Sequence
from engines.schedulers.steady import NOBODY, ROUNDS_OF_EDGES, Steady, StretchLog, extra_rows, in_order
from engines.schedulers.vllm_batch import RoundBatch, cut_by_budget
from engines.schedulers.vllm_blocks import VllmBlockManager
from engines.schedulers.vllm_queue import FcfsQueue, PriorityQueue
from engines.steady_batch import SteadyBatch, Stretch

MOST_IN_PROMPTS = 4  # requests behind the calendar's; with more, all are handled by columns


class CalendarRounds(ABC):
    """What `VllmScheduler` does while `_steady` is set. The attributes and what is abstract are the scheduler's."""

    config: SchedulerConfig
    one_by_one: bool
    columns: Columns
    log: RoundLog
    blocks: VllmBlockManager
    waiting: FcfsQueue | PriorityQueue
    skipped: set[int]
    running: list[Sequence]
    _steady: (
        Steady | None
    )  # all of `running`, but for a few behind them in their prompts; None: somebody else is among them
    _running_slots: Int64Array | None
    _scheduled: list[Sequence]

    @abstractmethod
    def _wanted(self, seq: Sequence, num_computed: int, threshold: int, budget: int) -> int: ...

    @abstractmethod
    def _log_chunk(self, seq: Sequence, wanted: int, given: int, threshold: int) -> None: ...

    @abstractmethod
    def _preempt(self, victim: Sequence, wanted_by: Sequence, needed: int) -> None: ...

    @abstractmethod
    def _closed(self, budget: int) -> str | None: ...

    @abstractmethod
    def _finish(self, seq: Sequence, finished: list[tuple[int, str]]) -> None: ...

    def _schedule_steady(self, threshold: int) -> RoundBatch | None:
        """All running requests by the calendar, those in their prompts behind it; None where somebody else is among them, or
        tokens or blocks don't suffice."""
        steady = self._steady
        if steady is None:
            return None
        batch = RoundBatch(self.config.max_num_batched_tokens - len(steady))
        batch.steady = True
        if len(steady) < len(self.running):
            if batch.budget <= 0 or not self._prompts_fit(steady, threshold, batch.budget):
                self._leave_steady()
                return None
            self._decode_steadily(steady)
            self._feed_prompts(self.running[len(steady) :], threshold, batch)
        elif batch.budget < 0 or not self._decode_steadily(steady):
            if batch.budget < 0 or self.config.scheduling_policy == "priority":
                self._leave_steady()
                return None
            batch.stop_running = self._decode_with_victims(steady)
            batch.budget = self.config.max_num_batched_tokens - len(steady)
        return batch

    def _prompts_fit(self, steady: Steady, threshold: int, budget: int) -> bool:
        """Whether there are blocks for one more token of each member, and for what those behind them can feed."""
        limit, needed = self.config.max_model_len, len(steady.opening())
        for seq in self.running[len(steady) :]:
            num_new = self._wanted(seq, seq.num_computed_tokens, threshold, budget)
            target = seq.num_computed_tokens + num_new
            if limit is not None and target >= limit:
                return False
            needed += self.blocks.blocks_needed(seq, target)
            budget -= num_new
        return needed <= self.blocks.pool.num_free

    def _feed_prompts(self, seqs: list[Sequence], threshold: int, batch: RoundBatch) -> None:
        """A chunk of each, in order, until the budget is used up."""
        for seq in seqs:
            if batch.budget == 0:
                batch.stop_running = "token_budget"
                break
            computed = seq.num_computed_tokens
            wanted = seq.num_tokens - computed
            num_new = self._wanted(seq, computed, threshold, batch.budget)
            self.blocks.allocate_slots(seq, computed + num_new)
            self._log_chunk(seq, wanted, num_new, threshold)
            batch.admit(seq, num_new, -1, 0)
            if batch.budget == 0 and cut_by_budget(wanted, num_new, threshold):
                batch.stop_running = "token_budget"

    def _decode_steadily(self, steady: Steady) -> bool:
        """Blocks for one more token of each member. False: there are not enough, and nothing changed."""
        opening = steady.opening()
        if len(opening) > self.blocks.pool.num_free:
            return False
        filling = steady.filling() if self.blocks.caching else NOBODY
        if opening or filling:
            self.blocks.decode_edges(opening, filling, steady.age)
        steady.filled = steady.age + 1
        return True

    def _decode_with_victims(self, steady: Steady) -> str:
        """Members in running order, each with a block if need be from the newest. Says why it stopped."""
        pool, steady.filled = self.blocks.pool, steady.age + 1
        filling = list(steady.filling()) if self.blocks.caching else NOBODY
        edges, at = list(in_order(list(steady.opening()), filling)), 0
        while at < len(edges):
            # Who holds no block any more is a victim: taken before its turn.
            opening: list[Sequence] = []
            filling = []
            while at < len(edges) and len(opening) + edges[at][1] <= pool.num_free:
                seq, opens, fills = edges[at]
                if seq.block_table:
                    opening += [seq] * opens
                    filling += [seq] * fills
                at += 1
            if opening or filling:
                self.blocks.decode_edges(opening, filling, steady.age)
            elif at < len(edges) and not edges[at][0].block_table:
                at += 1
            elif at < len(edges):
                victim = self.running.pop()
                self._preempt(victim, edges[at][0], 1)
                if victim is edges[at][0]:
                    return "self_preempted"
        return "running_empty"

    def upcoming(self) -> tuple[SteadyBatch, int] | None:
        """Where the next rounds are to differ by block edges alone: the next one's batch, and how many until somebody ends."""
        steady = self._steady
        if steady is None or not len(steady) or len(steady) < len(self.running):
            return None
        budget = self.config.max_num_batched_tokens - len(steady)
        if budget < 0 or self._closed(budget) is None:
            return None
        return steady.batch(self.running), steady.rounds_to_end()

    def advance(self, max_rounds: int) -> Stretch | None:
        """So many rounds, `update` included, or up to the first that ends somebody or wants for a block. None: not one.

        Right after `upcoming` gave a batch.
        """
        steady = self._steady
        assert steady is not None and max_rounds > 0, max_rounds
        budget = self.config.max_num_batched_tokens - len(steady)
        out = StretchLog(self.log, steady, self.running, budget, self._closed(budget), "running_empty")
        blocks, pool = self.blocks, self.blocks.pool
        left = min(max_rounds, steady.rounds_to_end())
        while left:
            if quiet := steady.quiet_rounds(left - 1):  # the last one may end somebody
                out.quiet(quiet, pool.num_free, blocks.cached_free_blocks)
                steady.skip(quiet)
                left -= quiet
            if len(steady.opening()) > pool.num_free:
                break
            started = pool.num_free
            self._decode_steadily(steady)
            scheduled = pool.num_free
            self._end_members(steady, out.finished)
            out.round(started, scheduled, blocks.cached_free_blocks)
            left -= 1
        return out.stretch(pool.num_free, len(self.waiting), len(self.running), len(self.skipped))

    def _steady_batch(self, batch: RoundBatch) -> SteadyBatch:
        assert self._steady is not None
        extra = None
        self._scheduled = batch.seqs
        if batch.seqs:
            start = [seq.num_computed_tokens for seq in batch.seqs]
            extra = extra_rows(batch.seqs, batch.num_new, batch.cached, start)
            for seq, num_new in zip(batch.seqs, batch.num_new, strict=True):
                seq.num_computed_tokens += num_new
        return self._steady.batch(self.running, extra)

    def _update_steady(self, round: Round, sampled: Int64Array | None) -> None:
        """The members by the calendar, then the round's admissions, who may become members."""
        steady = self._steady
        assert steady is not None
        place = len(steady)  # among the sampled tokens: members all yield one
        self._end_members(steady, round.finished)
        for seq in self._scheduled:
            if seq.num_computed_tokens == seq.num_tokens:
                if sampled is not None:
                    seq.take_sampled(int(sampled[place]))
                    place += 1
                seq.num_tokens += 1
                if seq.num_tokens >= seq.num_final_tokens:
                    self.running.remove(seq)
                    self._finish(seq, round.finished)
        while len(steady) < len(self.running) and self._is_steady(self.running[len(steady)]):
            steady.join(self.running[len(steady)])
        behind = self.running[len(steady) :]
        if len(behind) > MOST_IN_PROMPTS or not all(self._in_prompt(seq) for seq in behind):
            self._leave_steady()

    def _end_members(self, steady: Steady, finished: list[tuple[int, str]]) -> None:
        """The calendar's next round is over."""
        for seq in steady.step():
            del self.running[steady.remove(seq)]
            seq.num_tokens = seq.num_final_tokens
            self._finish(seq, finished)

    def _enter_steady(self) -> None:
        """Where all that run have one token to compute, know their outputs and stay within max_model_len, but for a few behind
        them that are in their prompts.

        And where the free blocks last for a while: who preempts in every round has to go one by one anyway.
        """
        running = self.running
        scarce = self.blocks.pool.num_free * self.config.block_size < ROUNDS_OF_EDGES * len(running)
        if self.one_by_one or scarce:
            return
        in_prompts = 0
        while in_prompts < min(MOST_IN_PROMPTS, len(running)) and self._in_prompt(running[-1 - in_prompts]):
            in_prompts += 1
        members = running[: len(running) - in_prompts]
        if not all(self._is_steady(seq) for seq in reversed(members)):
            return
        steady = Steady(self.config.block_size, self.log.enabled)
        for seq in members:
            steady.join(seq)
        self._steady = steady

    def _is_steady(self, seq: Sequence) -> bool:
        known, limit, new = seq.num_tokens, self.config.max_model_len, seq.new
        decodes = known - seq.num_computed_tokens == 1 and known > new.num_prompt_tokens
        return decodes and new.forced and (limit is None or known < limit)

    def _in_prompt(self, seq: Sequence) -> bool:
        """Whether it has known tokens to compute before it decodes (after a preemption generated ones too)."""
        missing = seq.num_tokens - seq.num_computed_tokens
        return seq.new.forced and (missing > 1 or (missing == 1 and seq.num_tokens <= seq.new.num_prompt_tokens))

    def _leave_steady(self) -> None:
        if self._steady is not None:
            self._steady.settle(self.columns, self.running)
            self._steady = self._running_slots = None
