"""A large pool in sum: who held its blocks, and for how long they had been held, after every round. From the `blocks` events.

Vectorized: a block's life is cut at its events; what lies between two cuts is one stretch with one state.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from reports.page_pack import Ints
from reports.run import Run

AGES = ((0, "under 10 rounds"), (10, "10–99 rounds"), (100, "100–999 rounds"), (1_000, "1,000 rounds or more"))


def pool_shares(run: Run) -> tuple[pl.DataFrame, pl.DataFrame] | None:
    """After each round, blocks by owner class and by age. None without block events.

    First frame: round, t_end_s, decoding, prefilling, shared, reusable, free. Second: round, t_end_s, a column for each of AGES.
    """
    rounds = run.read("rounds").sort("round")
    if not run.has("blocks") or not rounds.height or not run.usable_blocks:
        return None
    events = (
        run.scan("blocks").filter(pl.col("event").is_in(["allocate", "share", "release", "free"]))
        .select("round", "order", "block", "event", "request").sort("block", "round", "order").collect()
    )  # fmt: skip
    if not events.height:
        return None
    number = rounds["round"].to_numpy()
    at = np.searchsorted(number, events["round"].to_numpy()).astype(np.int64)
    block, request = events["block"].to_numpy(), events["request"].to_numpy()
    gain = np.where(events["event"].is_in(["allocate", "share"]).to_numpy(), 1, -1)
    first = np.concatenate([[True], block[1:] != block[:-1]])
    owners = _running(gain, first)
    # While one request alone holds a block, the sum of the holders' rows is that request.
    holder = _running(gain * request, first)
    until = np.concatenate([np.where(first[1:], rounds.height, at[1:]), [rounds.height]])
    kept = (until > at) & (owners > 0)
    begin, end, owners, holder = at[kept], until[kept], owners[kept], holder[kept]

    shared = _count(begin, end, owners > 1, rounds.height)
    turning = np.where(owners == 1, _prefill_ends(run, number, holder, begin), begin)
    turning = np.clip(turning, begin, end)
    prefilling = _count(begin, turning, owners == 1, rounds.height)
    decoding = _count(turning, end, owners == 1, rounds.height)
    free, reusable = rounds["free_blocks_end"].to_numpy(), rounds["cached_free_blocks"].to_numpy()

    # Age counts from the moment the block left the free list: stretches of one holding are joined first.
    fresh = gain == 1
    fresh &= _running(gain, first) == 1
    taken = np.maximum.accumulate(np.where(fresh, np.arange(len(at)), 0))
    born = at[taken][kept]
    older = []
    for age, _ in AGES:
        older.append(_count(np.clip(born + age, begin, end), end, np.ones(len(begin), dtype=bool), rounds.height))
    base = {"round": number, "t_end_s": rounds["t_end_s"].to_numpy()}
    classes: dict[str, Any] = {"decoding": decoding, "prefilling": prefilling, "shared": shared, "reusable": reusable, "free": free - reusable}  # fmt: skip
    ages = {name: older[k] - (older[k + 1] if k + 1 < len(older) else 0) for k, (_, name) in enumerate(AGES)}
    return (
        pl.DataFrame(base | {name: values for name, values in classes.items()}),
        pl.DataFrame(base | {name: values for name, values in ages.items()}),
    )


def _running(values: Ints, first: np.ndarray[Any, np.dtype[np.bool_]]) -> Ints:
    """Running sums that start anew where `first` is set."""
    total = np.cumsum(values)
    starts = np.flatnonzero(first)
    before = np.concatenate([[0], total[starts[1:] - 1]])
    repeated: Ints = np.repeat(before, np.diff(np.concatenate([starts, [len(values)]])))
    return total - repeated


def _count(begin: Ints, end: Ints, chosen: np.ndarray[Any, np.dtype[np.bool_]], rounds: int) -> Ints:
    """How many of the chosen stretches [begin, end) cover each round."""
    steps = np.zeros(rounds + 1, dtype=np.int64)
    keep = chosen & (end > begin)
    np.add.at(steps, begin[keep], 1)
    np.add.at(steps, end[keep], -1)
    return np.cumsum(steps[:-1])


def _prefill_ends(run: Run, number: Ints, holder: Ints, begin: Ints) -> Ints:
    """For a holder and the round it holds from: the round in which the prefill of that stay gave its token, or `begin` before that."""
    size = len(number) + 1
    stays = run.scan("decisions").filter(pl.col("kind").is_in(["admit", "resume"])).select("request", "round").collect()
    ends = run.scan("batches").filter((pl.col("phase") == "prefill") & pl.col("yields_token")).select("request", "round").collect()  # fmt: skip

    def key(frame: pl.DataFrame) -> Ints:
        places = np.searchsorted(number, frame["round"].to_numpy())
        return np.sort(frame["request"].to_numpy() * size + places)

    stay, done = key(stays), key(ends)
    if not len(stay) or not len(done):
        return begin
    entered = stay[np.maximum(np.searchsorted(stay, holder * size + begin, side="right") - 1, 0)]
    found = np.searchsorted(done, entered, side="left")
    finished = done[np.minimum(found, len(done) - 1)]
    same = (found < len(done)) & (finished // size == holder)
    # Without one the request was still prefilling when the stretch ended.
    return np.where(same, finished % size, np.int64(len(number)))
