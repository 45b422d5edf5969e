"""The baseline: a small JSON file, kept in git and read by people, of what runs of a trace are to come to.

    {"benchctl_baseline": 1,
     "entries": [{"name": "sharegpt/nano", "scheduler": "nano", "trace": {"name", "sha256", "num_requests"},
                  "config_digest": "xxh3:…", "settings": {…}, "command": "benchctl replay …", "log": "sharegpt.nano.zip",
                  "counters": {"preemptions": 11, …}, "tolerances": {"preemptions": {"max_increase": "5%"}},
                  "timing": {"machine": {…}, "min_effect": "3%", "metrics": {"itl_mean": [5.7, 5.8, 5.7]}}}]}

Every fault of the file is a BenchctlError that names the entry and the key.
"""

from __future__ import annotations

import json
import os
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec

from benchctl.gate_counters import (
    TIMED,
    Counter,
    config_digest,
    counters,
    machine,
    measures_time,
    settings,
    timings,
)
from reports.run import Run
from traces.errors import BenchctlError

VERSION = 1
MIN_EFFECT = "3%"  # of a timing, where the file does not say
Amount = int | float | str


class Tolerance(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How far a counter may move: numbers in its own unit, or a percentage of the baseline. `ignore`: it is not gated."""

    max_increase: Amount | None = None
    max_decrease: Amount | None = None
    ignore: bool = False


class TraceOf(msgspec.Struct, frozen=True):
    name: str | None
    sha256: str
    num_requests: int | None = None


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Timings of the repeats that made the baseline. `metrics`: name of TIMED -> a value a repeat."""

    machine: dict[str, Any]
    metrics: dict[str, list[float]]
    min_effect: str = MIN_EFFECT


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What runs of one trace, scheduler and configuration are to come to. `counters` is null where the clock measures time."""

    name: str
    scheduler: str
    trace: TraceOf
    config_digest: str
    settings: dict[str, Any]
    counters: dict[str, Counter] | None = None
    tolerances: dict[str, Tolerance] = {}
    timing: Timing | None = None
    command: str | None = None
    log: str | None = None  # beside the baseline; null: none is kept


class Baseline(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"version": "benchctl_baseline"}):
    version: int
    entries: list[Entry]


def read_baseline(path: Path) -> Baseline:
    """Raises BenchctlError where the file is missing, no baseline, or says something that no gate can check."""
    try:
        data = path.read_bytes()
    except OSError as error:
        what = "there is no baseline yet" if not path.exists() else f"the baseline cannot be read: {error.strerror}"
        raise BenchctlError(what, where=str(path), fix="make it: benchctl gate RUN --baseline FILE --update") from None
    try:
        baseline = msgspec.json.decode(data, type=Baseline)
    except msgspec.DecodeError as error:
        raise BenchctlError(
            f"this is no baseline: {error}", where=str(path), fix="mend the key, or make it anew with --update"
        ) from None
    if baseline.version != VERSION:
        raise BenchctlError(
            f"the baseline has version {baseline.version}; this benchctl reads {VERSION}",
            where=str(path),
            fix="make it anew with --update",
        )
    names = [entry.name for entry in baseline.entries]
    for name in names:
        if names.count(name) > 1:
            raise BenchctlError(f"two entries are named {name!r}", where=str(path), fix="rename one")
    for entry in baseline.entries:
        check_entry(entry, path)
    return baseline


def check_entry(entry: Entry, path: Path) -> None:
    """Tolerances must be of counters and of amounts; a misspelt one would gate nothing."""
    where = f"{path}, entry {entry.name}"
    known = entry.counters or {}
    for key, tolerance in entry.tolerances.items():
        if not any(fnmatchcase(name, key) for name in known):
            raise BenchctlError(
                f"tolerances name {key!r}, and no counter is called so",
                where=where,
                fix=f"one of {', '.join(known)}, or a pattern such as stop_*",
            )
        for limit in (tolerance.max_increase, tolerance.max_decrease):
            if limit is not None:
                amount(limit, 1.0, f"{where}, tolerances.{key}")
    if entry.timing is not None:
        share_of(entry.timing.min_effect, f"{where}, timing.min_effect")
        for name in entry.timing.metrics:
            if name not in TIMED:
                raise BenchctlError(f"no timing is called {name!r}", where=where, fix=f"one of {', '.join(TIMED)}")


def amount(limit: Amount, base: float, where: str) -> float:
    """A tolerance in the counter's unit: `5` is 5, `"5%"` is a twentieth of the baseline. Raises BenchctlError."""
    try:
        value = abs(base) * float(limit[:-1]) / 100 if isinstance(limit, str) and limit.endswith("%") else float(limit)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise BenchctlError(
            f"the tolerance {limit!r} is no amount", where=where, fix='a number, or a share such as "5%"'
        )
    return value


def share_of(text: str, where: str) -> float:
    if not text.endswith("%"):
        raise BenchctlError(f"{text!r} is no share", where=where, fix='such as "3%"')
    return amount(text, 1.0, where)


def tolerance_of(entry: Entry, name: str) -> Tolerance | None:
    """The tolerance of a counter: by its own name, else by the first pattern of the file that fits; None: it must be equal."""
    if name in entry.tolerances:
        return entry.tolerances[name]
    return next((each for key, each in entry.tolerances.items() if fnmatchcase(name, key)), None)


def make_entry(
    run: Run, name: str, old: Entry | None, *, repeats: list[Run] | None = None, log: str | None = None
) -> Entry:
    """A new entry from a run; tolerances and the limits of the old one stay. `repeats`: take timings of these runs too."""
    values = settings(run)
    timing = None if repeats is None else make_timing(repeats, old)
    tolerances = dict(old.tolerances) if old else {}
    trace = run.manifest.get("trace") or {}
    command = run.manifest.get("command") or []
    return Entry(
        name=name,
        scheduler=run.scheduler,
        trace=TraceOf(trace.get("name"), str(trace.get("sha256")), trace.get("num_requests")),
        config_digest=config_digest(values),
        settings=values,
        counters=None if measures_time(run) else counters(run),
        tolerances=tolerances,
        timing=timing if timing is not None else (old.timing if old and repeats is None else None),
        command=command if isinstance(command, str) else _shell(command),
        log=log,
    )


def make_timing(runs: list[Run], old: Entry | None) -> Timing:
    found = [timings(run) for run in runs]
    names = [name for name in TIMED if all(name in each for each in found)]
    effect = old.timing.min_effect if old and old.timing else MIN_EFFECT
    return Timing(machine(runs[0]), {name: [round(each[name], 6) for each in found] for name in names}, effect)


def _shell(words: list[str]) -> str:
    """A command as one types it, without what only says where the run went."""
    import shlex

    out: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word in ("--out", "-o"):
            skip = True
        elif word not in ("--force", "--json", "--no-report") and not word.startswith("--out="):
            out.append(word)
    return shlex.join(out)


def write_baseline(path: Path, entries: list[Entry]) -> None:
    """Write the file whole, entries by name, one key a line. Raises BenchctlError."""
    data = {"benchctl_baseline": VERSION, "entries": [_plain(entry) for entry in sorted(entries, key=lambda e: e.name)]}
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise BenchctlError(
            f"the baseline cannot be written: {error.strerror}", where=str(path), fix="name another file"
        ) from None


def _plain(entry: Entry) -> dict[str, Any]:
    """JSON-able, without what is not set."""
    found: dict[str, Any] = msgspec.to_builtins(entry)
    return {key: value for key, value in found.items() if value is not None}
