"""The blocks at one moment, drawn for small pools and summed for large ones.

A cell is the owner and the logical index in its table (`R4.1`), `*` marks content that a lookup can find, `+` a shared block.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from reports.explain_state import owners_after
from reports.run import Run
from reports.treatment import label

MAX_DRAWN = 64
WIDTH = 76


@dataclass(frozen=True, slots=True)
class BlockPicture:
    """`lines`: a drawing of each block, or a sum for each owner. `note`: how to read it."""

    drawn: bool
    lines: tuple[str, ...]
    note: str | None


def block_picture(run: Run, number: int, *, after: bool) -> BlockPicture:
    """The pool before `schedule()` or after `update()` of a round."""
    moment = number if after else number - 1
    owners = owners_after(run, moment).owners
    usable = run.usable_blocks or 0
    if usable > MAX_DRAWN:
        return _summed(run, owners, usable)
    found = run.scan("rounds").filter(pl.col("round") <= moment).sort("round").select("hashed_blocks").tail(1).collect()
    hashed = set(found.item()) if found.height and found.item() is not None else set()
    first = 0 if run.family == "nano" else 1  # vllm's block 0 is its null block
    cells = []
    for block in range(first, first + usable):
        held = owners.get(block)
        text = "·"
        if held:
            request = min(held)
            text = f"{label(run, request)}.{held[request]}" + ("+" if len(held) > 1 else "")
        cells.append(f"{block:>2} {text}{'*' if block in hashed else ''}")
    width = max(map(len, cells), default=1) + 2
    across = max(1, WIDTH // width)
    lines = tuple(
        "".join(cell.ljust(width) for cell in cells[i : i + across]).rstrip() for i in range(0, len(cells), across)
    )
    note = "R4.1: the second block of R4's table; · free; * a lookup can find it; + shared by several"
    return BlockPicture(True, lines, note)


def _summed(run: Run, owners: dict[int, dict[int, int]], usable: int, most: int = 12) -> BlockPicture:
    counts: dict[int, int] = {}
    for held in owners.values():
        for request in held:
            counts[request] = counts.get(request, 0) + 1
    shared = sum(len(held) > 1 for held in owners.values())
    largest = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    shown = "  ".join(f"{label(run, request)} {count}" for request, count in largest[:most])
    more = f"  and {len(largest) - most} more" if len(largest) > most else ""
    lines = (
        f"{len(owners):,} of {usable:,} used by {len(counts):,} requests, {shared:,} shared, {usable - len(owners):,} free",
        *([shown + more] if counts else []),
    )
    return BlockPicture(False, lines, "blocks a request holds; pools up to 64 blocks are drawn")
