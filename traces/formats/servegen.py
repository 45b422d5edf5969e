"""ServeGen's offline traces: batch jobs without arrivals, with prefix hash ids of 16 tokens in a to c, outputs in d to f.

Source: alibaba/ServeGen, data/offline.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from traces.formats.base import Draft, Format, ImportOptions, Reader, Sample, list_of, rest, text_of, whole
from traces.rows import Row

USED = frozenset({"request_id", "input_length", "output_length", "hash_ids", "img_ids", "duration"})


class ServeGenReader(Reader):
    synthesizes_times = True
    default_rate = math.inf

    def __init__(self, sample: Sample, options: ImportOptions) -> None:
        super().__init__(sample, options)
        self.header["block_size"] = options.block_size or 16

    def read(self, record: dict[str, Any], number: int) -> Iterable[Draft]:
        row = Row(
            id=text_of(record.get("request_id"), "request_id"),
            input_length=whole(record.get("input_length"), "input_length"),
            output_length=whole(record.get("output_length"), "output_length"),
            src={"row": number, **rest(record, USED)},
        )
        if record.get("hash_ids"):
            row.hash_ids = tuple(list_of(record["hash_ids"], "hash_ids"))
        if record.get("img_ids"):
            row.media = [{"type": "image", "id": str(id)} for id in list_of(record["img_ids"], "img_ids")]
        if record.get("duration") is not None:
            row.observed = {"e2e_s": self.time(record["duration"], "ms", "duration") / 1e9}
        return (Draft(row),)


def tell(sample: Sample) -> bool:
    return sample.has_keys("request_id", "input_length") and "timestamp" not in sample.first


FORMAT = Format("servegen-offline", "ServeGen offline traces (JSONL, no arrivals)", tell, ServeGenReader)
