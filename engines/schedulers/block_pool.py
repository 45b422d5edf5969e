"""Storage of KV blocks shared by both policies: reference counts and the ordered free list. The rules are theirs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

# What the blocks of a run of the free list still hold.
BLANK = 0  # nothing that can be used again
HIDDEN = 1  # KV that no lookup looks for: nobody else may have it, and its owner is gone
KEYED = 2  # KV that a lookup may find, or nothing: each block is looked at

Forget = Callable[[list[int]], bytes | None]


class FreeRun:
    """Neighbours in the free list; those before `at` have been taken."""

    __slots__ = ("at", "blocks", "holds")

    def __init__(self, blocks: list[int], holds: int) -> None:
        self.blocks, self.holds, self.at = blocks, holds, 0


class BlockPool:
    """Blocks 0..num_blocks-1, each either in the free list or held. Mutable; owned by one policy's block rules.

    The free list is kept by runs, as blocks come and go in: what a run holds is one thing for all of it, so that blocks
    which nobody looks for are never touched one by one. `ref_count` counts the tables that hold a block, of blocks that a lookup may
    find; any other belongs to the one table that it is in.

    Taken at the head. A hit removes a block from anywhere without a search: its old place stays in its run as a gap, and is
    passed over when it comes to the head.
    """

    __slots__ = ("_gaps", "_num_gaps", "_runs", "num_blocks", "num_free", "ref_count")

    def __init__(self, num_blocks: int, first_free: int = 0) -> None:
        self.num_blocks = num_blocks
        self.ref_count = [0] * num_blocks
        self._runs: deque[FreeRun] = deque()
        self.num_free = 0
        self._gaps: dict[int, int] = {}  # block -> how many of its leading entries in keyed runs are gaps
        self._num_gaps = 0
        self.put_back(list(range(first_free, num_blocks)), BLANK)

    @property
    def free(self) -> list[int]:
        """The free list, next to be taken first."""
        return [block for blocks, _ in self._whole_runs() for block in blocks]

    def hidden(self) -> list[int]:
        """Free blocks that hold KV which no lookup looks for."""
        return [block for run in self._runs if run.holds == HIDDEN for block in run.blocks[run.at :]]

    def _whole_runs(self) -> Iterator[tuple[list[int], int]]:
        """(blocks, what they hold) of each run, gaps left out."""
        left = dict(self._gaps)
        for run in self._runs:
            blocks = run.blocks[run.at :]
            if left and run.holds == KEYED:
                kept = []
                for block in blocks:
                    if left.get(block):
                        left[block] -= 1
                    else:
                        kept.append(block)
                blocks = kept
            yield blocks, run.holds

    def take(self, count: int, forget: Forget) -> tuple[list[int], bytes | None]:
        """-> (`count` blocks from the head of the free list, in its order; a 1 for each that still held KV, None: no one did).

        `forget` is told of the keyed ones, and answers which of them a lookup could still find.
        """
        assert count <= self.num_free, (count, self.num_free)
        if not count:
            return [], None
        self.num_free -= count
        run = self._runs[0]
        at, end = run.at, run.at + count
        if end < len(run.blocks) and run.holds != KEYED:  # as nearly always
            run.at = end
            return run.blocks[at:end], (b"\x01" * count if run.holds == HIDDEN else None)
        taken, flags, any_held = list[int](), bytearray(), False
        while len(taken) < count:
            run = self._runs[0]
            blocks = run.blocks[run.at : run.at + count - len(taken)]
            run.at += len(blocks)
            if run.at == len(run.blocks):
                self._runs.popleft()
            held = None
            if run.holds == HIDDEN:
                held = b"\x01" * len(blocks)
            elif run.holds == KEYED:
                if self._num_gaps and not self._gaps.keys().isdisjoint(blocks):
                    blocks = self._without_gaps(blocks)
                held = forget(blocks) if blocks else None
            taken += blocks
            flags += bytes(len(blocks)) if held is None else held
            any_held = any_held or held is not None
        return taken, bytes(flags) if any_held else None

    def _without_gaps(self, popped: list[int]) -> list[int]:
        gaps, taken = self._gaps, list[int]()
        for block in popped:
            if block not in gaps:
                taken.append(block)
                continue
            self._num_gaps -= 1
            gaps[block] -= 1
            if not gaps[block]:
                del gaps[block]
        return taken

    def hold(self, blocks: Sequence[int]) -> None:
        """Blocks just taken, of which a lookup may find what they will hold: each is referenced once."""
        ref_count = self.ref_count
        for block in blocks:
            assert not ref_count[block], block
            ref_count[block] = 1

    def touch(self, block: int) -> bool:
        """One more reference to a block that a lookup found. True if it lay in the free list, and so was taken out of it."""
        was_free = self.ref_count[block] == 0
        if was_free:
            # A block's gaps come before its entry: it returns at the back, or, where it has none, at the front.
            self._gaps[block] = self._gaps.get(block, 0) + 1
            self._num_gaps += 1
            self.num_free -= 1
            if self._num_gaps > self.num_blocks:
                self._close_gaps()
        self.ref_count[block] += 1
        return was_free

    def drop_all(self, blocks: list[int]) -> bytes | None:
        """One reference less to each, in order. A 1 for each that is still held; None: all were dropped for good."""
        ref_count = self.ref_count
        counts = [ref_count[block] for block in blocks]
        if counts.count(1) == len(counts):
            for block in blocks:
                ref_count[block] = 0
            return None
        assert min(counts) > 0, blocks
        for block, count in zip(blocks, counts, strict=True):
            ref_count[block] = count - 1
        return bytes([count > 1 for count in counts])

    def put_back(self, blocks: list[int], holds: int) -> None:
        """`blocks` become the tail of the free list, in their order. The list is the pool's from now on."""
        if blocks:
            self._runs.append(FreeRun(blocks, holds))
            self.num_free += len(blocks)

    def put_front(self, blocks: list[int], holds: int) -> None:
        """`blocks` become the head of the free list, in their order. The list is the pool's from now on."""
        if blocks:
            if self._num_gaps and not self._gaps.keys().isdisjoint(blocks):
                self._close_gaps()
            self._runs.appendleft(FreeRun(blocks, holds))
            self.num_free += len(blocks)

    def _close_gaps(self) -> None:
        self._runs = deque(FreeRun(blocks, holds) for blocks, holds in self._whole_runs() if blocks)
        self._gaps.clear()
        self._num_gaps = 0
