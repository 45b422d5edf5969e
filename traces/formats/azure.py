"""Azure LLM inference traces: 2023 (naive times), 2024 (offsets, some stamps without a fraction), 2025 multimodal.

Columns TIMESTAMP, ContextTokens, GeneratedTokens, and NumImages in the multimodal one. A prompt's tokens are unique; no
sessions. Source: Azure/AzurePublicDataset, README and notebooks.
"""

from __future__ import annotations

from collections.abc import Iterable

from traces.formats.base import CsvReader, Draft, Format, ImportOptions, Sample, whole
from traces.formats.times import iso_ns
from traces.request import Segment
from traces.rows import Row

USED = frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"})


class AzureReader(CsvReader):
    clock_has_zone = False

    def __init__(self, sample: Sample, options: ImportOptions) -> None:
        super().__init__(sample, options)
        self._time, self._in, self._out = self.at["TIMESTAMP"], self.at["ContextTokens"], self.at["GeneratedTokens"]
        self._images = self.at.get("NumImages")
        self._plain = len(self.at) == 3
        if options.shared_prefix:
            self.assumed.append(
                f"the first {options.shared_prefix} tokens of every prompt are the same: --shared-prefix"
            )

    def read(self, record: list[str], number: int) -> Iterable[Draft]:
        stamp = record[self._time]
        if not self.clock_has_zone:
            self.clock_has_zone = any(sign in stamp[19:] for sign in "+-Z")
        row = Row(
            input_length=whole(record[self._in], "ContextTokens", texts=True),
            output_length=whole(record[self._out], "GeneratedTokens", texts=True),
            src={"row": number},
        )
        if self.options.shared_prefix and row.input_length:
            length = min(self.options.shared_prefix, row.input_length)
            if length > 0:
                row.segments = (Segment("shared prefix", length),)
        if not self._plain:
            assert row.src is not None
            row.src |= self.extra(record, USED)
            images = 0 if self._images is None else whole(record[self._images], "NumImages", texts=True) or 0
            if 0 < images <= 4096:
                # How many of the prompt's tokens an image took is not in the file.
                row.media = [{"type": "image", "id": f"{number}.{i}"} for i in range(images)]
        return (Draft(row, iso_ns(stamp, "TIMESTAMP")),)


FORMAT = Format(
    "azure",
    "Azure LLM inference traces, 2023 to 2025 (CSV)",
    lambda sample: sample.has_columns(*USED),
    AzureReader,
)
