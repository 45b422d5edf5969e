"""Canonical traces: read row by row with the loader's own rules, so that an import of one is the identity.

The header passes through; unknown keys go to `src`, as on loading.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from traces.formats.base import Draft, Format, ImportOptions, Reader, Sample
from traces.header import decode_header
from traces.rows import Row, RowDecoder, normalize

ROW_KEYS = frozenset(Row.__struct_fields__)
OWN_KEYS = frozenset({"arrival_s", "arrival_round", "think_s", "prompt_token_ids", "segments", "carry"})


class CanonicalReader(Reader):
    origin = "zero"

    def __init__(self, sample: Sample, options: ImportOptions) -> None:
        super().__init__(sample, options)
        self._decoder = RowDecoder()

    def read(self, record: dict[str, Any], number: int) -> Iterable[Draft]:
        if number == 0 and "benchctl_trace" in record:
            decode_header(msgspec.json.encode(record))  # the loader's own rules
            self.header |= {key: value for key, value in record.items() if key != "benchctl_trace"}
            return ()
        row = self._decoder.decode(msgspec.json.encode(record))
        normalize(row)
        time = None if row.arrival_s is None else round(row.arrival_s * 1e9)
        return (Draft(row, time),)


def tell(sample: Sample) -> bool:
    if sample.kind != "lines":
        return False
    keys = set(sample.first)
    return "benchctl_trace" in keys or bool(keys & OWN_KEYS) and keys <= ROW_KEYS


FORMAT = Format("canonical", "benchctl's own JSONL", tell, CanonicalReader)
