"""The block map: who owned which block after each round, for pools small enough to show every block.

Up to GRID_ROUNDS rounds it is a grid with a label in every cell (`R4.1`: the second block of R4); beyond that a heat map.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from reports.blocks import replay
from reports.run import Run

MAX_BLOCKS = 64
GRID_ROUNDS = 60
HEATMAP_ROUNDS = 1_500
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
class BlockMap:
    """Either `grid` (a row of cells a block) or `heatmap` (a Plotly figure); `rounds` are the columns."""

    rounds: list[int]
    blocks: list[int]
    grid: list[list[Cell]] | None
    heatmap: dict[str, Any] | None
    note: str | None


def block_map(run: Run) -> BlockMap | None:
    """None where the pool has more than MAX_BLOCKS blocks or block events were not recorded."""
    total = run.usable_blocks
    if not total or total > MAX_BLOCKS or not run.has("blocks"):
        return None
    first = 0 if run.scheduler == "nano" else 1  # vllm's block 0 is its null block
    blocks = list(range(first, first + total))
    num_rounds = run.read("rounds").height
    small = num_rounds <= GRID_ROUNDS
    hashed = {row[0]: set(row[1] or ()) for row in run.read("rounds").select("round", "hashed_blocks").iter_rows()}
    rounds: list[int] = []
    columns: list[list[Any]] = []
    drawn = sorted(hashed)[:HEATMAP_ROUNDS]
    for round, pool in replay(run, drawn[-1] if drawn else 0):
        rounds.append(round)
        found = hashed[round]
        if small:
            columns.append([_cell(run, round, block, pool.owners.get(block), block in found) for block in blocks])
        else:
            columns.append(
                [
                    (_owner(owners), min(owners))
                    if (owners := pool.owners.get(block))
                    else (-1 if block in found else -2, None)
                    for block in blocks
                ]
            )
    if small:
        return BlockMap(rounds, blocks, [list(row) for row in zip(*columns, strict=True)], None, None)
    note = None if len(rounds) == num_rounds else f"the first {len(rounds):,} of {num_rounds:,} rounds are drawn"
    heatmap = {
        "data": [
            {
                "type": "heatmap", "x": rounds, "y": blocks, "z": [[column[i][0] for column in columns] for i in range(total)],
                "customdata": [[column[i][1] for column in columns] for i in range(total)], "zmin": -2.5, "zmax": OWNER_COLOURS - 0.5,
                "hovertemplate": "round %{x}, block %{y}: request #%{customdata}<extra></extra>", "showscale": False, "xgap": 0, "ygap": 1,
                "meta": {"c": "owners"},
            }
        ],
        "layout": {
            "height": min(max(200, 90 + 12 * total), 620), "xaxis": {"title": {"text": "round"}, "showgrid": False},
            "yaxis": {"title": {"text": "block"}, "autorange": "reversed", "showgrid": False, "zeroline": False},
        },
        "note": note,
    }  # fmt: skip
    return BlockMap(rounds, blocks, None, heatmap, note)


def _owner(owners: dict[int, int]) -> int:
    return min(owners) % OWNER_COLOURS


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
    return Cell(
        names[0] + (f" +{len(names) - 1}" if len(names) > 1 else ""), _owner(owners), cached, len(names) > 1, title
    )
