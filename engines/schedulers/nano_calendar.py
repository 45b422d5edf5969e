"""nano's decode rounds by their calendar, and many at once.

No second implementation of the policy's rules: what a round takes, frees and says is what nano.py's loops do, told by who has
an edge in it. Part of `NanoScheduler`, which has the loops for every other round.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque

from engines.interface import Int64Array, NewRequest, SchedulerConfig
from engines.schedulers.decisions import RoundLog
from engines.schedulers.nano_blocks import NanoBlockManager
from engines.schedulers.sequence import Columns, Sequence
from engines.schedulers.steady import NOBODY, Steady, StretchLog, in_order
from engines.steady_batch import SteadyBatch, Stretch


class DecodesByCalendar(ABC):
    """What `NanoScheduler` does while `_steady` has members. The attributes and what is abstract are the scheduler's."""

    config: SchedulerConfig
    one_by_one: bool
    columns: Columns
    log: RoundLog
    blocks: NanoBlockManager
    waiting: deque[Sequence | NewRequest]
    running: list[Sequence]
    _steady: Steady | None  # the first `max_num_seqs` of `running`; None: they have to be gone through one by one
    _running_slots: Int64Array | None

    @abstractmethod
    def _head(self) -> Sequence: ...

    @abstractmethod
    def _hold(self, seq: Sequence, needed: int, free: int) -> None: ...

    @abstractmethod
    def _preempt(self, victim: Sequence, wanted_by: Sequence) -> None: ...

    @abstractmethod
    def _finish(self, seq: Sequence, finished: list[tuple[int, str]]) -> None: ...

    def _decode_by_calendar(self) -> str | None:
        """A decode round of the steady members: why it stopped; None where there is no calendar, or nobody in it."""
        steady = self._steady
        if steady is None or not len(steady):
            return None
        if not self._decode_steadily(steady) and not self._open_with_victims(list(steady.opening())):
            return "self_preempted"
        return self._stop_running(steady)

    def _open_with_victims(self, opening: list[Sequence]) -> bool:
        """A block for each, in running order, if need be from the newest of those that run. False: one had to give up itself."""
        pool, at = self.blocks.pool, 0
        while at < len(opening):
            # Victims come from the end of `running`, so one that is met here was taken before its turn.
            fits: list[Sequence] = []
            while at < len(opening) and len(fits) < pool.num_free:
                if opening[at].block_table:
                    fits.append(opening[at])
                at += 1
            if fits:
                self.blocks.open_blocks(fits)
            elif not opening[at].block_table:
                at += 1
            else:
                victim = self.running.pop()
                self._preempt(victim, wanted_by=opening[at])
                if victim is opening[at]:
                    return False
        return True

    def _decode_steadily(self, steady: Steady) -> bool:
        """Blocks for one more token of each member. False: there are not enough, and nothing changed."""
        opening = steady.opening()
        if len(opening) > self.blocks.pool.num_free:
            return False
        if opening:
            self.blocks.open_blocks(opening)
        return True

    def _stop_running(self, steady: Steady) -> str:
        return "running_empty" if len(steady) == len(self.running) else "max_num_seqs"

    def _lacking(self) -> int:
        """Blocks that the head of `waiting` needs, where they are more than are free; else 0."""
        seq = self._head()
        needed = 0 if seq.block_table else self.blocks.can_allocate(seq)[1]
        return needed if needed > self.blocks.pool.num_free else 0

    def upcoming(self) -> tuple[SteadyBatch, int] | None:
        """Where the next rounds are to differ by block edges alone: the next one's batch, and how many until somebody ends."""
        steady = self._steady
        if steady is None or not len(steady) or (self.waiting and not self._lacking()):
            return None
        return steady.batch(self.running), steady.rounds_to_end()

    def advance(self, max_rounds: int) -> Stretch | None:
        """So many rounds, `update` included, or up to the first that ends somebody or wants for a block. None: not one.

        Right after `upcoming` gave a batch.
        """
        steady = self._steady
        assert steady is not None and max_rounds > 0, max_rounds
        budget = self.config.max_num_batched_tokens - len(steady)
        stop_waiting = "blocks" if self.waiting else "waiting_empty"
        out = StretchLog(self.log, steady, self.running, budget, stop_waiting, self._stop_running(steady))
        blocks, pool = self.blocks, self.blocks.pool
        left = min(max_rounds, steady.rounds_to_end())
        while left:
            lacking = self._lacking() if self.waiting else 0
            if self.waiting and not lacking:
                break
            # The last one may end somebody; and each round says whom it holds.
            if not (lacking and self.log.enabled) and (quiet := steady.quiet_rounds(left - 1)):
                out.quiet(quiet, pool.num_free, blocks.cached_free_blocks)
                steady.skip(quiet)
                left -= quiet
            if len(steady.opening()) > pool.num_free:
                break
            started = pool.num_free
            if lacking:
                self._hold(self._head(), lacking, started)
            self._decode_steadily(steady)
            scheduled = pool.num_free
            self._end_members(steady, out.finished)
            out.round(started, scheduled, blocks.cached_free_blocks)
            left -= 1
        if out.finished:
            self._fill_steady()
        return out.stretch(pool.num_free, len(self.waiting), len(self.running), 0)

    def _leave_steady(self) -> None:
        if self._steady is not None:
            self._steady.settle(self.columns, self.running)
            self._steady = self._running_slots = None

    def _fill_steady(self) -> None:
        """The next of `running` become members where a seat is free; all of them where there is no calendar."""
        steady, size = self._steady, min(len(self.running), self.config.max_num_seqs)
        if steady is None:
            if self.one_by_one:
                return
            steady = self._steady = Steady(self.config.block_size, self.log.enabled)
        for seq in self.running[len(steady) : size]:
            if not seq.new.forced:
                self._leave_steady()
                return
            steady.join(seq)

    def _end_members(self, steady: Steady, finished: list[tuple[int, str]]) -> None:
        """The calendar's next round is over: full blocks are hashed, and who has all tokens goes, in running order."""
        age, filling = steady.age, steady.filling() if self.blocks.caching else NOBODY
        size, ending = self.config.block_size, steady.step()
        members = list(in_order(filling, ending)) if ending else [(seq, True, False) for seq in filling]
        for seq, fills, ends in members:
            if fills:
                self.blocks.fill_block(seq, (seq.base + age) // size)
            if ends:
                del self.running[steady.remove(seq)]
                self._finish(seq, finished)
