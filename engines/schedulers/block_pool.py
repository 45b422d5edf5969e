"""Storage of KV blocks shared by both policies: reference counts and the ordered free list. The rules are theirs."""

from __future__ import annotations

from collections import OrderedDict


class BlockPool:
    """Blocks 0..num_blocks-1, each either in the free list or referenced. Mutable; owned by one policy's block rules.

    The free list is an ordered set: taken at the head, a hit removed from anywhere in O(1), the rest keeping its order.
    """

    __slots__ = ("free", "num_blocks", "ref_count")

    def __init__(self, num_blocks: int, first_free: int = 0) -> None:
        self.num_blocks = num_blocks
        self.ref_count = [0] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(first_free, num_blocks))

    @property
    def num_free(self) -> int:
        return len(self.free)

    def take(self, count: int) -> list[int]:
        """`count` blocks from the head of the free list, in its order, each now referenced once."""
        popitem, ref_count = self.free.popitem, self.ref_count
        taken = [popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            assert ref_count[block] == 0, (block, ref_count[block])
            ref_count[block] = 1
        return taken

    def touch(self, block: int) -> bool:
        """One more reference to a block that a lookup found. True if it lay in the free list, and so was taken out of it."""
        was_free = self.ref_count[block] == 0
        if was_free:
            del self.free[block]
        self.ref_count[block] += 1
        return was_free

    def drop(self, block: int) -> bool:
        """One reference less. True if it was the last: the caller decides where in the free list the block goes."""
        count = self.ref_count[block] - 1
        assert count >= 0, block
        self.ref_count[block] = count
        return count == 0

    def put_back(self, block: int) -> None:
        self.free[block] = None

    def put_front(self, blocks: list[int]) -> None:
        """`blocks` become the head of the free list, in their order."""
        for block in reversed(blocks):
            self.free[block] = None
            self.free.move_to_end(block, last=False)
