"""Import of a source file: what all formats share between a reader's drafts and a canonical file.

Failed requests, missing outputs, times that go back, ticks, double ids, checks, counts, and the header that states all of it.
Streams: rows go to a file beside the target as they come; the header, which holds the counts, is put before them at the end.
Must not know a format. Times stay integers until a row is written.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from traces.errors import BenchctlError
from traces.formats import find_format
from traces.formats.base import Draft, Format, ImportOptions, Reader, Sample
from traces.formats.chat import counter, without_text
from traces.formats.records import read_records, take_sample
from traces.formats.times import iso_text
from traces.header import Header
from traces.rows import (
    MAX_LENGTH,
    BlockCountFault,
    Row,
    RowDecoder,
    RowFault,
    canonical_line,
    check,
    normalize,
    prompt_tokens,
    resolved_output_length,
)
from traces.scan import BlockFaults
from traces.timeline import GapStats, Timeline
from traces.transform import with_note
from traces.writing import BodyWriter

MAX_EXAMPLES = 5


@dataclass(slots=True)
class ImportReport:
    """What an import did. `dropped`: reason → rows; `examples`: the first faults with their places."""

    format: str
    title: str
    source: str
    out: str
    num_records: int = 0
    num_requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    span_s: float | None = None
    num_text: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    header: dict[str, Any] = field(default_factory=dict)


def import_trace(path: str | Path, out: str | Path, options: ImportOptions) -> ImportReport:
    """Write `path` as a canonical trace to `out` (`.gz`: packed). `out` is replaced only at the end, when all went well.

    Raises BenchctlError.
    """
    source = Path(path)
    sample = take_sample(source)
    format = find_format(sample, "mapped" if options.columns and options.format is None else options.format)
    reader = _reader(format, sample, options)
    with BodyWriter(Path(out), source) as body:
        run = _Import(source, format, reader, options, body)
        for where, record in read_records(sample):
            run.take(where, record)
            if run.is_full:
                break
        return run.finish()


# What a reader trips over, which may be another package's, with a record that may hold anything.
_TRIPS = (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError)


def _reader(format: Format, sample: Sample, options: ImportOptions) -> Reader:
    """The format's reader. What it refuses, it read in the head of the file. Raises BenchctlError."""
    fix = "mend the head of the file, or --format NAME"
    try:
        reader = format.reader(sample, options)
        # The loader's own rules: a format may take a header key from the file.
        msgspec.convert({k: v for k, v in reader.header.items() if k in Header.__struct_fields__}, Header)
    except RowFault as fault:
        raise BenchctlError(fault.what, where=f"{sample.path}, at its start", fix=fault.fix or fix) from None
    except _TRIPS as error:
        what = f"cannot be read as {format.name}: {type(error).__name__}: {error}"
        raise BenchctlError(f"{what:.160}", where=f"{sample.path}, at its start", fix=fix) from None
    return reader


class _Import:
    """One import. Mutable, one use."""

    def __init__(self, source: Path, format: Format, reader: Reader, options: ImportOptions, body: BodyWriter) -> None:
        self.report = ImportReport(format.name, format.title, str(source), str(body.target))
        self._path = source
        self._reader = reader
        self._options = options
        self._body = body
        self._decode = RowDecoder()
        self._block_faults = BlockFaults()
        self._ids: dict[str, int] = {}  # every id that a source gave → its arrival in ns
        self._totals: dict[str, int] = {}  # id → prompt and output tokens, of rows that others may carry from
        self._timeline = Timeline(options, reader)
        self._before_policy = GapStats()
        self._number = 0
        self._keep_text = options.text
        self._count, self._count_name = counter(options)
        self._estimated = False

    @property
    def _block_size(self) -> int:
        # Asked anew: a canonical file's header is its first record.
        return int(self._reader.header.get("block_size") or self._options.block_size or 512)

    @property
    def is_full(self) -> bool:
        """Whether --limit is reached."""
        return self._options.limit is not None and self.report.num_requests >= self._options.limit

    def take(self, where: str, record: Any) -> None:
        if isinstance(record, RowFault):
            self.report.num_records += where[:5] != "after"
            self._fault(record, where)
            return
        number = self._number
        self._number += 1
        self.report.num_records += 1
        try:
            for draft in self._reader.read(record, number):
                if self.is_full:
                    break
                if isinstance(draft, RowFault):
                    self._fault(draft, where)
                    continue
                try:
                    self._keep(draft, where)
                except RowFault as fault:
                    self._fault(fault, where)
        except RowFault as fault:
            self._fault(fault, where)
        except _TRIPS as error:
            reason = f"{type(error).__name__}: {error}"
            self._fault(
                RowFault(f"cannot be read as {self.report.format}: {reason:.100}", fix="mend it, or --skip-bad"), where
            )

    def _keep(self, draft: Draft, where: str) -> None:
        row = draft.row
        if draft.time_ns is not None:
            self._before_policy.add(draft.time_ns)
        if self._keep_text is False and (row.prompt is not None or row.messages is not None):
            without_text(row, self._count)
            self.report.header["length_tokenizer"] = self._count_name
        if (
            row.output_length is None
            and row.output_token_ids is None
            and row.max_tokens is None
            and not self._fill_output(draft)
        ):
            raise RowFault("no output length", fix="--output-length N gives every such row one")
        if row.input_length is None and row.prompt_token_ids is None and row.prompt is None and row.messages is None:
            raise RowFault("no length of the prompt, and no text", fix="mend the row, or --skip-bad")
        if self._has_failed(draft) and not self._apply_failed(draft, where):
            return
        self._check_lengths(row)
        self._settle_ids(row)
        normalize(row)
        check(row, self._block_size)
        if row.hash_ids is not None:
            assert row.input_length is not None, row
            self._block_faults.add_right(len(row.hash_ids), row.input_length)
        arrival = self._timeline.arrival(draft, self._path, where)
        if arrival is not None:
            if row.parents and any(self._ids[parent] > arrival for parent in row.parents):
                self._reader.counts["parents that arrive after the row: no longer its parents"] += 1
                row.parents = tuple(parent for parent in row.parents if self._ids[parent] <= arrival) or None
                if row.parents is None:
                    row.think_s = None
                if row.carry is not None and self._ids[row.carry.from_id] > arrival:
                    row.carry = None
            if arrival >= 0:
                row.arrival_s = arrival / 1e9
        try:
            line = canonical_line(row)
            # Written and read once: whatever a source held, the file written is valid.
            self._decode.decode(line)
        except (UnicodeEncodeError, OverflowError, ValueError, TypeError, RecursionError) as error:
            raise RowFault(f"cannot be written: {error}", fix="mend the row, or --skip-bad") from None
        if arrival is not None:
            if arrival < 0:
                # Before the first row, until the lines are sorted and shifted: the loader's rules know no such time.
                row.arrival_s = arrival / 1e9
                line = canonical_line(row)
            self._timeline.keep(arrival)
        if row.id is not None:
            self._ids[row.id] = arrival or 0
            length = prompt_tokens(row)
            if length is not None and (row.session is not None or self.report.format == "canonical"):
                self._totals[row.id] = length + resolved_output_length(row)
        self._body.write(line)
        self._sum(row)

    def _fill_output(self, draft: Draft) -> bool:
        if draft.failed:
            draft.row.output_length = 0
            return True
        if self._options.output_length is not None:
            draft.row.output_length = self._options.output_length
            self._reader.counts["outputs that the source has not: --output-length"] += 1
            return True
        return False

    def _has_failed(self, draft: Draft) -> bool:
        row = draft.row
        return (
            draft.failed
            or (row.input_length is not None and row.input_length < 1)
            or (row.output_length is not None and row.output_length < 1)
        )

    def _apply_failed(self, draft: Draft, where: str) -> bool:
        """Whether the row stays."""
        row = draft.row
        what = f"a failed request: input {row.input_length}, output {row.output_length}"
        if self._options.failed == "error":
            raise BenchctlError(
                what,
                where=f"{self._path}, {where}",
                fix="--failed skip leaves such rows out, --failed keep-as-1 keeps them",
            )
        if self._options.failed == "skip":
            self.report.dropped["failed"] += 1
            return False
        row.observed = {**(row.observed or {}), "status": "failed"}
        for key in ("input_length", "output_length"):
            if getattr(row, key) is not None and getattr(row, key) < 1:
                row.observed[key] = getattr(row, key)
                setattr(row, key, 1)
                if key == "input_length":
                    row.hash_ids = row.segments = row.carry = None
        self._reader.counts["failed requests kept, lengths of 0 as 1"] += 1
        return True

    def _check_lengths(self, row: Row) -> None:
        if (row.input_length or 0) <= MAX_LENGTH and (row.output_length or 0) <= MAX_LENGTH:
            return
        key = "input_length" if (row.input_length or 0) > MAX_LENGTH else "output_length"
        raise RowFault(f"{key} {getattr(row, key):.3g} is above {MAX_LENGTH}", fix="mend the row, or --skip-bad")

    def _settle_ids(self, row: Row) -> None:
        """Ids get unique; what names a row that was left out no longer does."""
        if row.id is not None and row.id in self._ids:
            base, n = row.id, 2
            while f"{base}-{n}" in self._ids:
                n += 1
            row.id = f"{base}-{n}"
            self._reader.counts["ids used twice, renamed"] += 1
        if row.parents:
            kept = tuple(parent for parent in row.parents if parent in self._ids)
            if len(kept) < len(row.parents):
                self._reader.counts["parents that are not in the file, or were left out: the row begins anew"] += 1
            row.parents = kept or None
            if not kept:
                row.think_s = None
        if row.carry is not None and row.carry.from_id not in self._ids:
            row.carry = None
        if row.carry is not None and row.carry.tokens > (
            available := self._totals.get(row.carry.from_id, row.carry.tokens)
        ):
            if self.report.format == "canonical":  # the row says so itself: as on loading
                what = f'carry of {row.carry.tokens} tokens from "{row.carry.from_id}", whose prompt and output have {available}'
                raise RowFault(what, key="carry", fix=f"carry at most {available} tokens")
            self._reader.counts["carried tokens that the row named has not: they are unique"] += 1
            row.carry = None

    def _sum(self, row: Row) -> None:
        report = self.report
        report.num_requests += 1
        if row.prompt is not None or row.messages is not None:
            report.num_text += 1
        else:
            report.input_tokens += row.input_length or len(row.prompt_token_ids or ())
        report.output_tokens += row.output_length or len(row.output_token_ids or ()) or row.max_tokens or 0

    def _fault(self, fault: RowFault, where: str) -> None:
        if isinstance(fault, BlockCountFault):
            # As on loading: if no row fits, the block size is wrong, not the rows; so all are read before it is said.
            self._block_faults.add(fault, int(where.rpartition(" ")[2]))
            if not self._options.skip_bad:
                return
        elif not self._options.skip_bad:
            if self._block_faults.lines:
                raise self._block_faults.error(self._path, self._block_size)
            key = f", key `{fault.key}`" if fault.key else ""
            raise BenchctlError(
                fault.what, where=f"{self._path}, {where}{key}", fix=fault.fix or "--skip-bad leaves it out"
            )
        self.report.dropped["bad"] += 1
        if len(self.report.examples) < MAX_EXAMPLES:
            self.report.examples.append(f"{where}: {fault.what}")

    def finish(self) -> ImportReport:
        report, reader = self.report, self._reader
        faults = self._block_faults
        if faults.lines and (not self._options.skip_bad or faults.another_size_fits()):
            raise faults.error(self._path, self._block_size, option="--block-size")
        if not report.num_requests:
            first = f"; {report.examples[0]}" if report.examples else ""
            raise BenchctlError(
                f"no request to import: {report.num_records} records, {_list(report.dropped) or 'none left out'}{first}",
                where=str(self._path),
                fix="check the file and --format",
            )
        timeline = self._timeline
        times = timeline.settle(self._body)
        report.span_s = times.pop("span_s", None)
        report.counts = dict(reader.counts)
        report.assumed = [*reader.assumed, *timeline.assumed]
        report.warnings = [*reader.warnings, *timeline.warnings(self._path.name)]
        header = self._header(times)
        report.header = header
        self._body.finish(header)
        return report

    def _header(self, times: dict[str, Any]) -> dict[str, Any]:
        report, options, reader = self.report, self._options, self._reader
        notes: dict[str, Any] = {
            "format": report.format,
            "file": self._path.name,
            "records": report.num_records,
            "requests": report.num_requests,
        }
        if report.dropped:
            notes["dropped"] = dict(report.dropped)
        if "failed" in report.dropped or options.failed != "skip":
            notes["failed"] = {"policy": options.failed, "arrivals_before": self._before_policy.summary()}
            notes["failed"]["arrivals_after"] = self._timeline.stats.summary()
        notes |= times
        if report.assumed:
            notes["assumed"] = report.assumed
        if report.counts:
            notes["counts"] = report.counts
        if options.seed and (reader.synthesizes_times or options.spread != "none"):
            notes["seed"] = options.seed
        if report.format == "canonical":
            return self._own_header(notes, times)
        name = options.name or self._path.name.removesuffix(".gz").rsplit(".", 1)[0]
        header: dict[str, Any] = {"name": name, "source": self._path.name, "salt": name, **reader.header}
        header |= {key: value for key, value in report.header.items() if key not in header}
        if options.licence:
            header["licence"] = options.licence
        origin = self._timeline.origin_ns
        if reader.clock_has_zone is not None and origin is not None:
            header.setdefault("time_origin", iso_text(origin, zone=reader.clock_has_zone))
        header["on_import"] = notes
        header = {key: value for key, value in header.items() if value is not None}
        # The loader's own rules, once: a format may set any header key.
        msgspec.convert({k: v for k, v in header.items() if k in Header.__struct_fields__}, Header)
        return header

    def _own_header(self, notes: dict[str, Any], times: dict[str, Any]) -> dict[str, Any]:
        """A canonical file's header as it is; what was changed is one more entry in its list of changes."""
        given = {"name": self._options.name, "licence": self._options.licence}
        header = {**self._reader.header, **{key: value for key, value in given.items() if value}}
        changed = bool(times or self.report.dropped or self.report.counts)
        return with_note(header, {"import": notes}) if changed else header


def _list(counts: Counter[str]) -> str:
    return ", ".join(f"{n} {reason}" for reason, n in counts.items())
