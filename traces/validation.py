"""Every fault of a trace, not the first: what `trace validate` says."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from traces.errors import BenchctlError
from traces.files import resolve
from traces.rows import RowFault
from traces.scan import Scan


@dataclass(frozen=True, slots=True)
class Fault:
    line: int
    what: str
    key: str | None
    fix: str | None


@dataclass(slots=True)
class Validation:
    """`faults` in file order; a row that names a row left out is a fault too, by its own words."""

    path: str
    num_requests: int
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sha256: str | None = None


def validate(path: str | Path, *, strict: bool = False) -> Validation:
    """Read the whole file. Raises BenchctlError where it is no trace at all."""
    file, note = resolve(path)
    faults: list[Fault] = []

    def take(line: int, fault: RowFault) -> None:
        faults.append(Fault(line, fault.what, fault.key, fault.fix))

    scan = Scan(file, skip_bad=True, strict=strict, on_fault=take)
    try:
        scan.read()
    except BenchctlError as error:
        if not faults or scan.num_rows:
            raise
        # Not one row is good: the list says why, and the error whether another block size would fit them all.
        return Validation(str(file), 0, faults, [f"{error.what}: {error.fix}"])
    notes = [text for text in scan.notes if "left out" not in text]
    return Validation(
        str(file), scan.num_rows, faults, [*([note] if note else []), *notes], None if faults else scan.sha256
    )
