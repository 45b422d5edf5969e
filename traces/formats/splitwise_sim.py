"""splitwise-sim traces: one row a request, times in seconds. Source: Mutinifni/splitwise-sim, traces."""

from __future__ import annotations

from collections.abc import Iterable

from traces.formats.base import CsvReader, Draft, Format, whole
from traces.rows import Row

USED = frozenset({"request_id", "application_id", "arrival_timestamp", "prompt_size", "token_size"})


class SplitwiseReader(CsvReader):
    origin = "zero"

    def read(self, record: list[str], number: int) -> Iterable[Draft]:
        def cell(name: str) -> str | None:
            return (record[self.at[name]].strip() or None) if name in self.at else None

        row = Row(
            id=cell("request_id"),
            tenant=cell("application_id"),
            input_length=whole(cell("prompt_size"), "prompt_size", texts=True),
            output_length=whole(cell("token_size"), "token_size", texts=True),
            src={"row": number, **self.extra(record, USED)},
        )
        if cell("batch_size") not in (None, "1"):
            # What a batch of n means is not said: it stays one request, and the number stays in src.
            self.counts["rows with a batch_size other than 1: imported as one request each"] += 1
        return (Draft(row, self.time(record[self.at["arrival_timestamp"]], "s", "arrival_timestamp")),)


FORMAT = Format(
    "splitwise-sim",
    "splitwise-sim traces (CSV)",
    lambda sample: sample.has_columns("arrival_timestamp", "prompt_size", "token_size"),
    SplitwiseReader,
)
