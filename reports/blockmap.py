"""The block map of a short run: who owned which block after each round, a label in every cell (`R4.1`: the second block of R4).

For pools of up to MAX_BLOCKS blocks and runs of up to GRID_ROUNDS rounds; the page draws longer runs itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from reports.blocks import replay
from reports.run import Run

MAX_BLOCKS = 64
GRID_ROUNDS = 60
OWNER_COLOURS = 8


@dataclass(frozen=True, slots=True)
class Cell:
    """One block after one round. `owner`: colour number, or -1 where it is free. `label`: owner and logical index."""

    label: str
    owner: int
    cached: bool
    shared: bool
    title: str


@dataclass(frozen=True, slots=True)
class BlockGrid:
    """`rows`: a row of cells for each block, a cell for each round."""

    rounds: list[int]
    blocks: list[int]
    rows: list[list[Cell]]


def block_grid(run: Run) -> BlockGrid | None:
    """None where the pool or the run is larger than a grid holds, or block events were not recorded."""
    total = run.usable_blocks
    hashed = {row[0]: set(row[1] or ()) for row in run.read("rounds").select("round", "hashed_blocks").iter_rows()}
    if not total or total > MAX_BLOCKS or not run.has("blocks") or not 0 < len(hashed) <= GRID_ROUNDS:
        return None
    first = 0 if run.family == "nano" else 1  # vllm's block 0 is its null block
    blocks = list(range(first, first + total))
    rounds: list[int] = []
    columns: list[list[Cell]] = []
    for round, pool in replay(run):
        rounds.append(round)
        columns.append([_cell(run, round, block, pool.owners.get(block), block in hashed[round]) for block in blocks])
    return BlockGrid(rounds, blocks, [list(row) for row in zip(*columns, strict=True)])


def _cell(run: Run, round: int, block: int, owners: dict[int, int] | None, cached: bool) -> Cell:
    if not owners:
        return Cell(
            "",
            -1,
            cached,
            False,
            f"block {block} after round {round}: free" + (", its content can still be hit" if cached else ""),
        )
    names = [f"{run.labels.get(request, f'#{request}')}.{index}" for request, index in sorted(owners.items())]
    title = f"block {block} after round {round}: {', '.join(names)}" + ("; hashed" if cached else "")
    label = names[0] + (f" +{len(names) - 1}" if len(names) > 1 else "")
    return Cell(label, min(owners) % OWNER_COLOURS, cached, len(names) > 1, title)
