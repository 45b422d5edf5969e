"""BurstGPT, both layouts, by column name: with and without `Session ID` and `Elapsed time`.

Times are whole seconds since midnight of the collection's first day, of which many are equal. A failed request has 0 response tokens.
Inside a session a turn follows the one before it; it carries that one's tokens only where its prompt is long enough to hold
them. Source: HPMLL/BurstGPT, README and release notes.
"""

from __future__ import annotations

from collections.abc import Iterable

from traces.formats.base import CsvReader, Draft, Format, ImportOptions, Sample, whole
from traces.request import Carry
from traces.rows import Row

MAPPED = frozenset({"Timestamp", "Session ID", "Request tokens", "Response tokens", "Model", "Total tokens"})


class BurstGptReader(CsvReader):
    def __init__(self, sample: Sample, options: ImportOptions) -> None:
        super().__init__(sample, options)
        # Last turn of a session that did not fail: (id, turn, time, elapsed, tokens).
        self._last: dict[str, tuple[str, int, int, int | None, int]] = {}

    def _text(self, record: list[str], name: str) -> str | None:
        at = self.at.get(name)
        return (record[at].strip() or None) if at is not None else None

    def read(self, record: list[str], number: int) -> Iterable[Draft]:
        time = self.time(record[self.at["Timestamp"]], "s", "Timestamp")
        row = Row(
            input_length=whole(record[self.at["Request tokens"]], "Request tokens", texts=True),
            output_length=whole(record[self.at["Response tokens"]], "Response tokens", texts=True),
            model=self._text(record, "Model"),
            src={"row": number, **self.extra(record, MAPPED)},
        )
        elapsed = self._text(record, "Elapsed time")
        elapsed_ns = None if elapsed is None else self.time(elapsed, "s", "Elapsed time")
        if elapsed_ns is not None and elapsed_ns >= 0:
            row.observed = {"e2e_s": elapsed_ns / 1e9}
        draft = Draft(row, time)
        session = self._text(record, "Session ID")
        if session is not None:
            self._follow(row, session, time, elapsed_ns, number)
        return (draft,)

    def _follow(self, row: Row, session: str, time: int, elapsed: int | None, number: int) -> None:
        before = self._last.get(session)
        turn = 1 if before is None else before[1] + 1
        row.session, row.turn, row.id = session, turn, f"{session}-t{turn}"
        if before is not None:
            row.parents = (before[0],)
            gap = time - before[2]
            if before[3] is None:
                self.counts[
                    "think times without an elapsed time: the gap between arrivals, too long by the answer"
                ] += 1
            row.think_s = max(gap - (before[3] or 0), 0) / 1e9
            if row.input_length is not None and row.input_length >= before[4]:
                row.carry = Carry(before[0], before[4])
                self.counts["turns that carry the tokens of the one before"] += 1
        if not (row.input_length and row.output_length and row.input_length > 0 and row.output_length > 0):
            # Nobody follows a failed request, and the next one takes its turn.
            row.id, row.turn = f"{row.id}-failed-{number}", None
        else:
            self._last[session] = (row.id, turn, time, elapsed, row.input_length + row.output_length)


FORMAT = Format(
    "burstgpt",
    "BurstGPT, layouts of 6 and 8 columns (CSV)",
    lambda sample: sample.has_columns("Timestamp", "Request tokens", "Response tokens"),
    BurstGptReader,
)
