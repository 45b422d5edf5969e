"""The waiting and running queues before each round, rebuilt from admissions, decisions and batches.

Knows the two policies' rules of order, since the tables hold the changes of the queues and not the queues.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import polars as pl

from reports.run import Run

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RoundView:
    """One round with all its rows. `waiting` and `running`: requests before schedule(), in the scheduler's order.

    `waiting` holds the arrivals of this round too, and is in the order in which it would be looked at.
    """

    row: Row  # of `rounds`
    waiting: list[int]
    running: list[int]
    batch: list[Row]  # of `batches`, in batch order
    decisions: list[Row]  # of `decisions`, in order

    @property
    def round(self) -> int:
        return int(self.row["round"])


class Queues:
    """Both queues of one scheduler while its records are replayed. Mutable, owned by `walk`."""

    def __init__(self, run: Run) -> None:
        self.nano = run.family == "nano"
        self.by_priority = run.setting("scheduling_policy") == "priority" and not self.nano
        self.waiting: list[int] = []
        self.running: list[int] = []
        self._key: dict[int, tuple[int, float, str]] = {}

    def arrive(self, admission: Row) -> None:
        request = admission["request"]
        self._key[request] = (admission["priority"] or 0, admission["arrival_s"] or 0.0, admission["id"])
        self._enqueue(request, at_head=False)

    def _enqueue(self, request: int, at_head: bool) -> None:
        if self.by_priority:
            insort(self.waiting, request, key=self._key.__getitem__)
        elif at_head:
            self.waiting.insert(0, request)
        else:
            self.waiting.append(request)

    def advance(self, batch: list[Row], decisions: list[Row]) -> None:
        """Go from before schedule() to after update()."""
        for decision in decisions:
            request = decision["request"]
            if decision["kind"] == "preempt":
                self.running.remove(request)
                self._enqueue(request, at_head=True)
            elif decision["kind"] in ("admit", "resume") and not self.nano:
                self._start(request)
        if self.nano:
            # nano-vLLM keeps a partly prefilled request at the head of waiting until its last chunk is scheduled.
            for row in batch:
                if row["phase"] == "prefill" and row["yields_token"]:
                    self._start(row["request"])
        gone = {decision["request"] for decision in decisions if decision["kind"] == "finish"}
        if gone:
            self.running = [request for request in self.running if request not in gone]

    def _start(self, request: int) -> None:
        self.waiting.remove(request)
        self.running.append(request)


def walk(run: Run, last_round: int | None = None) -> Iterator[RoundView]:
    """Every recorded round up to `last_round`, in order, with the queues before it."""

    def rows(table: str, *sort: str) -> Iterator[tuple[int, list[Row]]]:
        frame = run.scan(table)
        if last_round is not None:
            frame = frame.filter(pl.col("round") <= last_round)
        for number, group in groupby(
            frame.sort(*sort, maintain_order=True).collect().iter_rows(named=True), key=lambda row: row["round"]
        ):
            yield number, list(group)

    decisions, batches = dict(rows("decisions", "round", "order")), dict(rows("batches", "round", "order"))
    refused = {row["request"] for group in decisions.values() for row in group if row["kind"] == "reject"}
    arrivals = [row for row in run.read("admissions").iter_rows(named=True) if row["request"] not in refused]
    queues, due = Queues(run), 0
    for number, (row,) in rows("rounds", "round"):
        while due < len(arrivals) and arrivals[due]["admitted_round"] <= number:
            queues.arrive(arrivals[due])
            due += 1
        mine, batch = decisions.get(number, []), batches.get(number, [])
        yield RoundView(row, list(queues.waiting), list(queues.running), batch, mine)
        queues.advance(batch, [decision for decision in mine if decision["kind"] != "reject"])
