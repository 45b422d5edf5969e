"""Vidur and etalon traces with times, and Frontier's, which adds sessions and block hashes joined by `|`.

Times are seconds from 0. The derived columns num_total_tokens and pd_ratio are dropped. Frontier's blocks have 16 tokens. Source: microsoft/vidur,
data/processed_traces; NetX-lab/Frontier, examples.
"""

from __future__ import annotations

from collections.abc import Iterable

from traces.formats.base import CsvReader, Draft, Format, ImportOptions, Sample, whole
from traces.rows import Row

DERIVED = frozenset({"num_total_tokens", "pd_ratio"})
USED = DERIVED | {"arrived_at", "num_prefill_tokens", "num_decode_tokens", "session_id", "block_hash_ids"}


class VidurReader(CsvReader):
    origin = "zero"

    def __init__(self, sample: Sample, options: ImportOptions) -> None:
        super().__init__(sample, options)
        self._turns: dict[str, int] = {}
        if "block_hash_ids" in self.at:
            self.header["block_size"] = options.block_size or 16
            self.assumed.append(f"block_hash_ids name blocks of {self.header['block_size']} tokens after their prefix")

    def read(self, record: list[str], number: int) -> Iterable[Draft]:
        at = self.at
        row = Row(
            input_length=whole(record[at["num_prefill_tokens"]], "num_prefill_tokens", texts=True),
            output_length=whole(record[at["num_decode_tokens"]], "num_decode_tokens", texts=True),
            src={"row": number, **self.extra(record, USED)},
        )
        if "session_id" in at and record[at["session_id"]]:
            row.session = record[at["session_id"]]
            row.turn = self._turns[row.session] = self._turns.get(row.session, 0) + 1
        if "block_hash_ids" in at and record[at["block_hash_ids"]]:
            ids = record[at["block_hash_ids"]].split("|")
            row.hash_ids = tuple(int(id) if id.isdecimal() and len(id) < 19 else id for id in ids)
        return (Draft(row, self.time(record[at["arrived_at"]], "s", "arrived_at")),)


FORMAT = Format(
    "vidur",
    "Vidur, etalon and Frontier traces (CSV)",
    lambda sample: sample.has_columns("arrived_at", "num_prefill_tokens", "num_decode_tokens"),
    VidurReader,
)
