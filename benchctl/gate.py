"""Runs held against a baseline: counters of decisions exactly, or within tolerances written in the file; timings as statistics.

Counters are gated only where the clock does not depend on measured time; timings only against the same machine, over three repeats
or more, where the difference is significant and large enough. Everything else is said and gates nothing. Reads and judges; prints nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchctl.gate_baseline import (
    Baseline,
    Entry,
    Timing,
    amount,
    make_entry,
    read_baseline,
    share_of,
    tolerance_of,
    write_baseline,
)
from benchctl.gate_counters import TIMED, Counter, config_digest, counters, machine, measures_time, settings, timings
from benchctl.gate_log import open_log, write_log
from reports.compare_head import plain
from reports.compare_stats import welch_interval
from reports.decision_diff import DecisionDiff, diff_decisions
from reports.explain import RoundExplanation, explain_round
from reports.run import Run, find_runs, open_run
from traces.errors import BenchctlError

MIN_REPEATS = 3
DIGEST = "decision_digest"


@dataclass(frozen=True, slots=True)
class Finding:
    """One counter or timing. `ok` false and `advisory` false fails the gate. `limit`: what was allowed, in words."""

    name: str
    kind: str  # counter or timing
    baseline: Counter | None
    found: Counter | None
    limit: str
    ok: bool
    advisory: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class FirstChange:
    """The first decision that differs from the baseline's, and the round explained as both had it."""

    diff: DecisionDiff
    round_before: int | None
    round_now: int | None
    before: RoundExplanation | None
    now: RoundExplanation | None


@dataclass(frozen=True, slots=True)
class EntryResult:
    """One entry and the runs that were held against it. `runs` is empty where none was given."""

    entry: Entry
    runs: tuple[Run, ...]
    findings: tuple[Finding, ...]
    first: FirstChange | None = None
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return all(finding.ok or finding.advisory for finding in self.findings)


@dataclass(frozen=True, slots=True)
class GateResult:
    baseline: Path
    entries: tuple[EntryResult, ...]

    @property
    def ok(self) -> bool:
        return all(entry.ok for entry in self.entries)


def open_gated(paths: Sequence[str]) -> list[Run]:
    """Every run at the paths, in order. Raises BenchctlError where one is none, or did not come to its end."""
    runs = [open_run(found) for path in paths for found in (find_runs(path) or [Path(path)])]
    for run in runs:
        if run.status != "complete":
            raise BenchctlError(
                f"the run is {run.status}: its counters are those of a part of the trace",
                where=str(run.path),
                fix=str(run.manifest.get("error") or "replay it to its end"),
                exit_code=1 if run.status == "failed" else 2,
            )
        if not (run.manifest.get("trace") or {}).get("sha256"):
            raise BenchctlError(
                "the run does not say which trace it replayed", where=str(run.path), fix="replay it again"
            )
    return runs


def gate(runs: Sequence[Run], path: Path, *, against: Run | None = None) -> GateResult:
    """Hold every run against its entry. `against`: an earlier run to take decisions from where the baseline keeps no log.

    Raises BenchctlError (exit 2) where a run has no entry, was made with other settings, or its clock measures time.
    """
    baseline = read_baseline(path)
    groups = match(runs, baseline, path)
    results = []
    for entry in baseline.entries:
        mine = groups.get(entry.name, [])
        results.append(_check(entry, mine, path, against) if mine else EntryResult(entry, (), ()))
    return GateResult(path, tuple(results))


def match(runs: Sequence[Run], baseline: Baseline, path: Path) -> dict[str, list[Run]]:
    """Entry name -> its runs."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        sha256 = run.manifest["trace"]["sha256"]
        same_trace = [entry for entry in baseline.entries if entry.trace.sha256 == sha256]
        candidates = [entry for entry in same_trace if entry.scheduler == run.scheduler]
        if not candidates:
            raise BenchctlError(_no_entry(run, baseline, same_trace), where=f"{run.path}, {path}", fix=_add_fix(path))
        values = settings(run)
        digest = config_digest(values)
        entry = next((each for each in candidates if each.config_digest == digest), None)
        if entry is None:
            differ = _differing(candidates[0].settings, values)
            raise BenchctlError(
                f"the run was made with other settings than entry {candidates[0].name}: {differ}",
                where=str(run.path),
                fix=f"make it as the baseline was: {candidates[0].command}; or --update",
            )
        if entry.counters is not None and measures_time(run):
            raise clock_fault(run)
        groups.setdefault(entry.name, []).append(run)
    return groups


def clock_fault(run: Run) -> BenchctlError:
    return BenchctlError(
        f"--clock {run.clock} with the {run.engine} engine depends on measured time, so its counters differ from run to run",
        where=str(run.path),
        fix="replay with --clock rounds, --clock recorded --from RUN, or --engine null; or gate timings: --update --timing",
    )


def _no_entry(run: Run, baseline: Baseline, same_trace: list[Entry]) -> str:
    name = (run.manifest.get("trace") or {}).get("name")
    if same_trace:
        return f"the baseline has no entry of scheduler {run.scheduler} for trace {name}"
    alike = [entry for entry in baseline.entries if entry.trace.name == name]
    if alike:
        return f"trace {name} is not the baseline's: its sha256 begins {run.manifest['trace']['sha256'][:12]}, there {alike[0].trace.sha256[:12]}"
    return f"the baseline has no entry for trace {name}"


def _add_fix(path: Path) -> str:
    return f"add it with --update, or name another --baseline than {path}"


def _differing(old: dict[str, Any], new: dict[str, Any]) -> str:
    names = [name for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]
    return ", ".join(f"{name} {plain(new.get(name))}, there {plain(old.get(name))}" for name in names)


def _check(entry: Entry, runs: list[Run], path: Path, against: Run | None) -> EntryResult:
    findings: list[Finding] = []
    first = None
    notes: list[str] = []
    if entry.counters is not None:
        for run in runs:
            mine = check_counters(entry, counters(run), str(path))
            findings += mine if len(runs) == 1 else [finding for finding in mine if not finding.ok]
            if any(not finding.ok for finding in mine) and first is None:
                first, note = first_change(entry, run, path, against)
                notes += [note] if note else []
        if len(runs) > 1 and not findings:
            findings = check_counters(entry, counters(runs[0]), str(path))
    if entry.timing is not None:
        findings += check_timing(entry.timing, runs, f"{path}, entry {entry.name}")
    return EntryResult(entry, tuple(runs), tuple(findings), first, tuple(notes))


def check_counters(entry: Entry, found: dict[str, Counter], where: str) -> list[Finding]:
    """Every counter of the baseline and of the run, in the baseline's order, then the new ones. What is absent is 0."""
    old = entry.counters or {}
    out = []
    for name in dict.fromkeys([*old, *found]):
        base, now = old.get(name, 0), found.get(name, 0)
        tolerance = tolerance_of(entry, name)
        if tolerance is not None and tolerance.ignore:
            out.append(Finding(name, "counter", base, now, "ignored", True, advisory=True))
        elif isinstance(base, str) or isinstance(now, str):
            out.append(Finding(name, "counter", base, now, "equal", base == now))
        elif tolerance is None:
            out.append(Finding(name, "counter", base, now, "equal", base == now))
        else:
            up = None if tolerance.max_increase is None else amount(tolerance.max_increase, base, where)
            down = None if tolerance.max_decrease is None else amount(tolerance.max_decrease, base, where)
            ok = (up is None or now <= base + up) and (down is None or now >= base - down)
            limits = [f"+{tolerance.max_increase}"] if up is not None else []
            limits += [f"−{tolerance.max_decrease}"] if down is not None else []
            out.append(Finding(name, "counter", base, now, " ".join(limits) or "any", ok))
    digest = next((finding for finding in out if finding.name == DIGEST and not finding.ok), None)
    if digest is not None and entry.tolerances and all(f.ok for f in out if f is not digest):
        note = 'all counters are within their tolerances; to gate those alone: "decision_digest": {"ignore": true}'
        out[out.index(digest)] = Finding(DIGEST, "counter", digest.baseline, digest.found, "equal", False, note=note)
    return out


def check_timing(timing: Timing, runs: Sequence[Run], where: str) -> list[Finding]:
    """Welch's interval of new against old repeats. Advisory on another machine, or with fewer than three repeats on a side."""
    here = machine(runs[0])
    other = [
        f"{key} {plain(here.get(key))}, there {plain(value)}"
        for key, value in timing.machine.items()
        if here.get(key) != value
    ]
    effect = share_of(timing.min_effect, where)
    values = [timings(run) for run in runs]
    out = []
    for name, old in timing.metrics.items():
        unit, better = TIMED[name]
        new = [each[name] for each in values if name in each]
        base, now = _mean(old), _mean(new)
        reasons = []
        if other:
            reasons.append(f"another machine ({'; '.join(other)})")
        if min(len(old), len(new)) < MIN_REPEATS:
            reasons.append(f"{len(new)} repeats against {len(old)}: {MIN_REPEATS} of each are needed")
        worse = False
        note = ""
        if base and now is not None and min(len(old), len(new)) >= 2:
            interval = welch_interval(old, new)
            bad = interval.low > 0 if better == "lower" else interval.high < 0
            worse = bad and abs(now - base) >= effect * abs(base)
            note = f"{(now - base) / base:+.1%}, 95 % interval {interval.low:+.4g} … {interval.high:+.4g} {unit}"
        elif now is None:
            reasons.append("not measured")
        advisory = bool(reasons)
        text = f"not worse by {timing.min_effect} and significantly"
        note = "; ".join([*([note] if note else []), *reasons])
        out.append(Finding(name, "timing", base, now, text, not worse, advisory, note))
    return out


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def first_change(entry: Entry, run: Run, path: Path, against: Run | None) -> tuple[FirstChange | None, str]:
    """Where the run's decisions leave the baseline's, and why; or what is missing to say so."""
    with ExitStack() as stack:
        before = against
        if before is None and entry.log is not None and (path.parent / entry.log).is_file():
            before = stack.enter_context(open_log(path.parent / entry.log))
        if before is None:
            return (
                None,
                "the baseline keeps no decision log, so the first decision that differs is not known; --against RUN gives one",
            )
        if not run.has("batches"):
            return (
                None,
                f"the run kept no decisions (--records {run.manifest.get('records')}), so the first that differs is not known",
            )
        diff = diff_decisions(before, run, ("baseline", "now"))
        if diff.first is None:
            return (
                None,
                "every decision is equal to those of the log: the log and the baseline's counters are not of one run",
            )
        # The round explained is the first in which something else was done, where there is one.
        told = next((d for d in diff.chain if d.level == "batch" and d.differences), diff.first)
        explained = [
            None if number is None else replace(explain_round(each, number), run=name)
            for each, number, name in ((before, told.round_a, "the baseline"), (run, told.round_b, str(run.path)))
        ]
        return FirstChange(diff, told.round_a, told.round_b, explained[0], explained[1]), ""


# -- updating


@dataclass(frozen=True, slots=True)
class Update:
    """What `--update` changed in one entry: name -> (before, now); empty where nothing did."""

    name: str
    new: bool
    changes: dict[str, tuple[Any, Any]] = field(default_factory=dict)


def update(runs: Sequence[Run], path: Path, *, timing: bool, log: bool) -> list[Update]:
    """Rewrite the entries of these runs, keeping the others and all tolerances. Returns what changed.

    Raises BenchctlError where the clock measures time and no timing is asked for, or repeats of a deterministic clock differ.
    """
    old = read_baseline(path).entries if path.exists() else []
    entries = {entry.name: entry for entry in old}
    out = []
    for group in _groups(runs).values():
        run = group[0]
        if measures_time(run) and not timing:
            raise clock_fault(run)
        digests = {each.manifest.get("digest") for each in group}
        if len(digests) > 1 and not measures_time(run):
            raise BenchctlError(
                f"repeats under --clock {run.clock} took different decisions: {', '.join(sorted(map(str, digests)))}",
                where=", ".join(str(each.path) for each in group),
                fix="a policy must decide the same from the same calls: benchctl check-scheduler",
            )
        before = _same_entry(old, run)
        name = before.name if before else _new_name(entries, run)
        file = f"{path.stem}.{name.replace('/', '.')}.zip"
        keeps = log and not measures_time(run) and run.has("blocks")
        entry = make_entry(run, name, before, repeats=group if timing else None, log=file if keeps else None)
        if keeps:
            write_log(run, path.parent / file)
        out.append(Update(name, before is None, _changes(before, entry)))
        entries[name] = entry
    write_baseline(path, list(entries.values()))
    read_baseline(path)  # what was written must read back: a tolerance may have lost its counter
    return out


def _groups(runs: Sequence[Run]) -> dict[tuple[str, str, str], list[Run]]:
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        key = (run.manifest["trace"]["sha256"], run.scheduler, config_digest(settings(run)))
        groups.setdefault(key, []).append(run)
    return groups


def _same_entry(old: Sequence[Entry], run: Run) -> Entry | None:
    """The entry that the run replaces: of its trace (by content, else by name), scheduler and settings; else of trace and scheduler alone."""
    trace = run.manifest["trace"]
    mine = [e for e in old if e.scheduler == run.scheduler]
    digest = config_digest(settings(run))
    exact = [e for e in mine if e.trace.sha256 == trace["sha256"]]
    for group in (
        [e for e in exact if e.config_digest == digest],
        exact,
        [e for e in mine if e.trace.name == trace.get("name")],
    ):
        if len(group) == 1:
            return group[0]
    return None


def _new_name(entries: dict[str, Entry], run: Run) -> str:
    stem = f"{run.manifest['trace'].get('name') or 'trace'}/{run.scheduler}"
    name, number = stem, 1
    while name in entries:
        number += 1
        name = f"{stem}-{number}"
    return name


def _changes(before: Entry | None, now: Entry) -> dict[str, tuple[Any, Any]]:
    if before is None:
        return {}
    out: dict[str, tuple[Any, Any]] = {}
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"trace sha256": before.trace.sha256}, {"trace sha256": now.trace.sha256}),
        (before.settings, now.settings),
        (before.counters or {}, now.counters or {}),
        (before.timing.metrics if before.timing else {}, now.timing.metrics if now.timing else {}),
    ]
    for old, new in pairs:
        out |= {
            name: (old.get(name), new.get(name))
            for name in dict.fromkeys([*old, *new])
            if old.get(name) != new.get(name)
        }
    return out
