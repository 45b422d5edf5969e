"""Any CSV or JSON lines whose columns the user names: `--map arrival=ts,input=prompt_tokens,output=completion_tokens`.

Times may be ISO, or numbers in --time-unit (seconds without it); JSON keys may be paths, `usage.prompt_tokens`. Every other column goes to src.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from traces.errors import BenchctlError
from traces.formats.base import CsvReader, Draft, Format, ImportOptions, Sample, rest, text_of, whole
from traces.formats.times import moment_ns
from traces.rows import Row

OURS = (
    "arrival",
    "input",
    "output",
    "prompt",
    "id",
    "session",
    "turn",
    "priority",
    "model",
    "tenant",
    "adapter",
    "think",
    "e2e",
    "ttft",
    "status",
)
GOOD = frozenset({"200", "200.0", "ok", "success", "succeeded", "completed", "stop", "true", ""})


class MappedReader(CsvReader):
    sorts = True  # an access log is written when a request ends

    def __init__(self, sample: Sample, options: ImportOptions) -> None:
        super().__init__(sample, options)
        columns = options.columns
        for ours in columns:
            if ours not in OURS:
                raise BenchctlError(f"--map names {ours!r}", where="--map", fix=f"one of {', '.join(OURS)}")
        if not {"input", "prompt"} & set(columns):
            raise BenchctlError(
                "--map says nothing of the prompt",
                where="--map",
                fix="add input=COLUMN (tokens) or prompt=COLUMN (text)",
            )
        self._get: dict[str, Callable[[Any], Any]] = {ours: self._getter(column) for ours, column in columns.items()}
        self._used = frozenset(columns.values())
        self.synthesizes_times = "arrival" not in columns
        self._turns: dict[str, int] = {}
        if not self.synthesizes_times:
            self.clock_has_zone = None

    def _getter(self, column: str) -> Callable[[Any], Any]:
        if self.sample.kind == "csv":
            if column not in self.at:
                raise BenchctlError(
                    f"no column {column!r}", where="--map", fix=f"one of {', '.join(self.sample.columns[:20])}"
                )
            place = self.at[column]
            return lambda record: record[place].strip() or None
        path = column.split(".")

        def get(record: Any) -> Any:
            if column in record:
                return record[column]
            for key in path:
                record = record.get(key) if isinstance(record, dict) else None
            return record

        return get

    def _value(self, ours: str, record: Any) -> Any:
        get = self._get.get(ours)
        return None if get is None else get(record)

    def read(self, record: Any, number: int) -> Iterable[Draft]:
        def count(ours: str) -> int | None:
            return whole(self._value(ours, record), self.options.columns.get(ours, ours), texts=True)

        def text(ours: str) -> str | None:
            return text_of(self._value(ours, record), self.options.columns.get(ours, ours))

        row = Row(
            id=text("id"), session=text("session"), model=text("model"), tenant=text("tenant"), adapter=text("adapter")
        )
        row.input_length, row.output_length, row.turn, row.priority = (
            count("input"),
            count("output"),
            count("turn"),
            count("priority"),
        )
        if row.input_length is None:
            row.prompt = text("prompt")
            if row.prompt is None:
                row.input_length = 0  # as services write a request that failed
        extra = self.extra(record, self._used) if self.sample.kind == "csv" else rest(record, self._used)
        row.src = {"row": number, **extra}
        observed = {}
        for ours in ("ttft", "e2e"):
            value = self._value(ours, record)
            if value is not None:
                observed[f"{ours}_s"] = self.time(value, "s", ours) / 1e9
        status = self._value("status", record)
        if status is not None:
            observed["status"] = status
        row.observed = observed or None
        think = self._value("think", record)
        if think is not None:
            row.think_s = self.time(think, "s", "think") / 1e9
        time = None
        if not self.synthesizes_times:
            value = self._value("arrival", record)
            self.unit = self.options.time_unit or "s"
            time = moment_ns(value, self.unit, self.options.columns["arrival"])
            if isinstance(value, str) and len(value) >= 19 and value[4:5] == "-":
                self.clock_has_zone = any(sign in value[19:] for sign in "+-Zz")
                self.unit = None
        failed = status is not None and str(status).lower() not in GOOD
        if failed and row.output_length is None:
            row.output_length = 0
        return (Draft(row, time, failed),)


FORMAT = Format("mapped", "any CSV or JSON lines, its columns named by --map", lambda sample: False, MappedReader)
