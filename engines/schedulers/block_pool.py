"""Storage of KV blocks shared by both policies: reference counts and the ordered free list. The rules are theirs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class BlockPool:
    """Blocks 0..num_blocks-1, each either in the free list or referenced. Mutable; owned by one policy's block rules.

    Taken at the head. A hit removes a block from anywhere without a search: its old place stays in the queue as a gap, and
    is passed over when it comes to the head.
    """

    __slots__ = ("_gaps", "_num_gaps", "_queue", "num_blocks", "num_free", "ref_count")

    def __init__(self, num_blocks: int, first_free: int = 0) -> None:
        self.num_blocks = num_blocks
        self.ref_count = [0] * num_blocks
        self._queue: deque[int] = deque(range(first_free, num_blocks))
        self.num_free = len(self._queue)
        self._gaps: dict[int, int] = {}  # block -> how many of its leading entries in the queue are gaps
        self._num_gaps = 0

    @property
    def free(self) -> list[int]:
        """The free list, next to be taken first."""
        if not self._gaps:
            return list(self._queue)
        left, out = dict(self._gaps), []
        for block in self._queue:
            if left.get(block):
                left[block] -= 1
            else:
                out.append(block)
        return out

    def take(self, count: int) -> list[int]:
        """`count` blocks from the head of the free list, in its order, each now referenced once."""
        assert count <= self.num_free, (count, self.num_free)
        pop, ref_count = self._queue.popleft, self.ref_count
        if count == 1 and not self._num_gaps:
            block = pop()
            assert not ref_count[block], block
            ref_count[block] = 1
            self.num_free -= 1
            return [block]
        taken = [pop() for _ in range(count)]
        if self._num_gaps and not self._gaps.keys().isdisjoint(taken):
            taken = self._without_gaps(taken)
        for block in taken:
            assert not ref_count[block], block
            ref_count[block] = 1
        self.num_free -= count
        return taken

    def _without_gaps(self, popped: list[int]) -> list[int]:
        """As many blocks from the head, gaps passed over; `popped` are the first entries."""
        gaps, pop, taken = self._gaps, self._queue.popleft, list[int]()
        count = len(popped)
        while True:
            for block in popped:
                if block not in gaps:
                    taken.append(block)
                    continue
                self._num_gaps -= 1
                gaps[block] -= 1
                if not gaps[block]:
                    del gaps[block]
            if len(taken) == count:
                return taken
            popped = [pop() for _ in range(count - len(taken))]

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

    def drop(self, block: int) -> bool:
        """One reference less. True if it was the last: the caller decides where in the free list the block goes."""
        count = self.ref_count[block] - 1
        assert count >= 0, block
        self.ref_count[block] = count
        return count == 0

    def drop_all(self, blocks: list[int]) -> bytes | None:
        """`drop` of each, in order. A 1 for each that is still held; None: all were dropped for good."""
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

    def put_back(self, blocks: Iterable[int]) -> None:
        """`blocks` become the tail of the free list, in their order."""
        before = len(self._queue)
        self._queue.extend(blocks)
        self.num_free += len(self._queue) - before

    def put_front(self, blocks: list[int]) -> None:
        """`blocks` become the head of the free list, in their order."""
        if self._num_gaps and not self._gaps.keys().isdisjoint(blocks):
            self._close_gaps()
        self._queue.extendleft(reversed(blocks))
        self.num_free += len(blocks)

    def _close_gaps(self) -> None:
        self._queue = deque(self.free)
        self._gaps.clear()
        self._num_gaps = 0
