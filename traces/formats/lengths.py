"""Lengths without times: etalon's and Vidur's statistics files. Arrivals are drawn by rate.

Rows of one conversation follow each other in some of these files, but nothing says where it begins, so every row is a request by itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from traces.formats.base import CsvReader, Draft, Format, Sample, whole
from traces.formats.vidur import DERIVED
from traces.rows import Row

USED = DERIVED | {"num_prefill_tokens", "num_decode_tokens"}


class LengthsReader(CsvReader):
    synthesizes_times = True

    def read(self, record: list[str], number: int) -> Iterable[Draft]:
        row = Row(
            input_length=whole(record[self.at["num_prefill_tokens"]], "num_prefill_tokens", texts=True),
            output_length=whole(record[self.at["num_decode_tokens"]], "num_decode_tokens", texts=True),
            src={"row": number, **self.extra(record, USED)},
        )
        return (Draft(row),)


def tell(sample: Sample) -> bool:
    return sample.has_columns("num_prefill_tokens", "num_decode_tokens") and "arrived_at" not in sample.columns


FORMAT = Format("lengths", "etalon and Vidur length files without times (CSV)", tell, LengthsReader)
