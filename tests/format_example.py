"""A source format as another package would add it: the example of docs/formats/adding.md."""

from __future__ import annotations

from collections.abc import Iterable

from traces.formats.base import Draft, Format, Reader, Sample, whole
from traces.rows import Row


class SemicolonReader(Reader):
    """`at;tokens` with times in seconds."""

    def read(self, record: list[str], number: int) -> Iterable[Draft]:
        at, tokens = record[0].split(";")
        row = Row(input_length=whole(tokens, "tokens", texts=True), output_length=1, src={"row": number})
        return (Draft(row, self.time(at, "s", "at")),)


def looks_so(sample: Sample) -> bool:
    return sample.columns == ("at;tokens",)


FORMAT = Format("semicolons", "at;tokens, one line a request", looks_so, SemicolonReader)
