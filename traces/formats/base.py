"""What a source format is: how its files are told from others, and how one of its records becomes rows.

A module of this package reads one format: it says what its records look like, and turns one record at a time into
drafts of canonical rows. Opening files, splitting them into records, times that go back, failed requests, checks and
writing are the same for all of them and stand in `traces.importing`. How to add one: docs/formats/adding.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from traces.formats.times import number_ns
from traces.rows import Row, RowFault


class Counts(Protocol):
    """Counts tokens of a text."""

    def __call__(self, text: str) -> int: ...


@dataclass(frozen=True, slots=True)
class Sample:
    """The head of a file: enough to tell what it is.

    `kind`: `csv`, `lines` (a JSON object on each), `array` (one JSON array) or `documents` (JSON objects over many lines).
    `columns`: of a CSV. `first`: its first JSON object, {} where none is whole within the head.
    """

    path: Path
    kind: Literal["csv", "lines", "array", "documents"]
    columns: tuple[str, ...] = ()
    first: dict[str, Any] = field(default_factory=dict)

    def has_columns(self, *names: str) -> bool:
        return self.kind == "csv" and set(names) <= set(self.columns)

    def has_keys(self, *names: str) -> bool:
        return self.kind != "csv" and set(names) <= set(self.first)


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """What the user decided. None: the format's own way.

    `count_tokens`: of a text; None: characters / 4, flagged as an estimate. `text`: keep texts, or lengths only.
    `output_length`: for rows whose source has none. `side_files`: what a format needs beside its main file.
    """

    format: str | None = None
    skip_bad: bool = False
    failed: Literal["skip", "keep-as-1", "error"] = "skip"
    on_descent: str = "error"  # error, sort or fold=SECONDS
    spread: Literal["none", "uniform"] = "none"
    time_unit: str | None = None
    request_rate: float | None = None
    burstiness: float = 1.0
    seed: int = 0
    output_length: int | None = None
    block_size: int | None = None
    text: bool | None = None
    count_tokens: Counts | None = None
    tokenizer: str | None = None
    side_files: tuple[Path, ...] = ()
    columns: dict[str, str] = field(default_factory=dict)  # --map: ours -> the source's
    shared_prefix: int | None = None
    single_turn: bool = False
    limit: int | None = None
    duration_s: float | None = None
    name: str | None = None
    licence: str | None = None


@dataclass(slots=True)
class Draft:
    """A row on its way: `time_ns` on the source's clock, arrival not set yet; `failed` as the source says.

    Lengths may be 0 or negative where the source writes a failure so; a missing output length may be None.
    """

    row: Row
    time_ns: int | None = None
    failed: bool = False


class Reader:
    """Turns records of one file into drafts, in file order. One use; subclasses hold what they need between records.

    `record` is a list of texts for a CSV (columns as in `sample.columns`), else a decoded JSON object.
    """

    origin: Literal["first", "zero"] = "first"  # arrivals count from the first row kept, or are the source's own
    sorts = False  # one record holds rows of many moments: they are sorted by time, and a descent is no fault
    synthesizes_times = False  # the source has none: arrivals are drawn from the options' rate
    default_rate = 1.0  # requests/s where the user gives none; inf: all at 0
    unit: str | None = None  # of the times, once `time` was asked
    clock_has_zone: bool | None = None  # None: the times are no wall clock

    def __init__(self, sample: Sample, options: ImportOptions) -> None:
        self.sample = sample
        self.options = options
        self.header: dict[str, Any] = {}
        self.assumed: list[str] = []  # what is not in the file, for the header
        self.counts: Counter[str] = Counter()  # things met, by name, for the header and the report
        self.warnings: list[str] = []

    def read(self, record: Any, number: int) -> Iterable[Draft | RowFault]:
        """The rows of one record; `number` is its 0-based place among the records.

        Raises RowFault where the record is bad; of one that holds many, a RowFault may also stand in the place of a bad part.
        """
        raise RowFault("a reader without `read`")

    def time(self, value: Any, unit: str, key: str, *, texts: bool = False) -> int:
        """A number of the source as ns; `--time-unit` wins over the format's unit.

        A text is a number only in a CSV, or with `texts` where the format is known to write it so. Raises RowFault.
        """
        if isinstance(value, str) and not texts and self.sample.kind != "csv":
            raise RowFault(f"{key} must be a number, got {_shown(value)}", fix="mend the row, or --skip-bad")
        self.unit = self.options.time_unit or unit
        return number_ns(value, self.unit, key)


@dataclass(frozen=True, slots=True)
class Format:
    """One entry of the registry. `tell` sees only the head of a file; the first format that says yes is taken."""

    name: str
    title: str
    tell: Callable[[Sample], bool]
    reader: Callable[[Sample, ImportOptions], Reader]


def whole(value: Any, key: str, *, texts: bool = False) -> int | None:
    """An integer of a source: 13, 13.0, with `texts` (always in a CSV) "13" too; None where it is null or empty.

    May be negative. Raises RowFault for anything else, NaN among it.
    """
    if texts and isinstance(value, str):
        if value.isdecimal() and len(value) < 40:
            return int(value)
        text = value.strip()
        if text.lower() in ("", "null", "none", "nan"):
            return None
        try:
            return int(text) if len(text) < 40 else _refuse(value, key)
        except ValueError:
            try:
                value = float(text)
            except ValueError:
                return _refuse(value, key)
    if type(value) is int:
        return value
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return _refuse(value, key)


def _refuse(value: Any, key: str) -> int:
    raise RowFault(f"{key} must be an integer, got {_shown(value)}", fix="mend the row, or --skip-bad")


def _shown(value: Any) -> str:
    return f"the text {value[:40]!r}" if isinstance(value, str) else f"{value!r:.40}"


def text_of(value: Any, key: str) -> str | None:
    """A text, or an integer as one; None where it is null or empty. Raises RowFault."""
    if value is None or value == "":
        return None
    if isinstance(value, str):
        return value
    if type(value) is int:
        return str(value)
    raise RowFault(f"{key} must be a text, got {_shown(value)}", fix="mend the row, or --skip-bad")


def object_of(value: Any, key: str) -> dict[str, Any]:
    """Raises RowFault where it is no object."""
    if not isinstance(value, dict):
        raise RowFault(f"{key} must be an object, got {_shown(value)}", fix="mend the row, or --skip-bad")
    return value


def list_of(value: Any, key: str) -> list[Any]:
    """Raises RowFault where it is no list."""
    if not isinstance(value, list):
        raise RowFault(f"{key} must be a list, got {_shown(value)}", fix="mend the row, or --skip-bad")
    return value


def rest(record: dict[str, Any], used: frozenset[str] | set[str]) -> dict[str, Any]:
    """The keys that no rule of the format knows, verbatim, nulls left out: for `src`."""
    return {key: value for key, value in record.items() if key not in used and value is not None}


class CsvReader(Reader):
    """A reader of CSV rows by column name, never by position."""

    def __init__(self, sample: Sample, options: ImportOptions) -> None:
        super().__init__(sample, options)
        self.at = {name: i for i, name in enumerate(sample.columns)}

    def extra(self, record: list[str], used: frozenset[str] | set[str]) -> dict[str, Any]:
        """The other columns, verbatim, the empty ones left out."""
        return {name: record[i] for name, i in self.at.items() if name not in used and record[i] != ""}
