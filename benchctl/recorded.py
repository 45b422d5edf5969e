"""Earlier runs that `--clock recorded` repeats: which one each scheduler takes, and what is taken over from it.

Must not know an engine. A folder of runs gives each scheduler the run of its own name; one run alone is for every scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from benchctl.config import ReplayOptions, chosen_schedulers
from reports.run import Run, find_runs, open_run
from traces.errors import BenchctlError
from traces.load import Trace

TAKEN = ("seed", "over_length")  # from the earlier run, where the command leaves them at the default


def open_earlier(path: str, trace: Trace) -> list[Run]:
    """The runs at `path`: one, or those of a folder. Raises BenchctlError where one was of another trace, or kept no admissions."""
    found = [open_run(each) for each in find_runs(path)] or [open_run(path)]
    if len(found) > 1:
        _one_of_each(path, found)
        _alike(path, found)
    for run in found:
        _check(run, trace)
    return found


def _one_of_each(path: str, runs: Iterable[Run]) -> None:
    by_scheduler: dict[str, list[Run]] = {}
    for run in runs:
        by_scheduler.setdefault(run.scheduler, []).append(run)
    for name, several in by_scheduler.items():
        if len(several) > 1:
            raise BenchctlError(
                f"{path} holds {len(several)} runs of {name}: {', '.join(run.name for run in several[:4])}",
                where="--from",
                fix=f"name one: --from {several[0].shown}",
            )


def _alike(path: str, runs: list[Run]) -> None:
    """What one command has once must be the same in all. Raises BenchctlError."""
    for name in (*TAKEN, "arrivals"):
        values = {run.name: run.setting(name) for run in runs}
        if len(set(values.values())) > 1:
            text = ", ".join(f"{run} {value}" for run, value in values.items())
            raise BenchctlError(
                f"the runs in {path} differ in {name}: {text}", where="--from", fix=f"name one: --from {runs[0].shown}"
            )


def _check(run: Run, trace: Trace) -> None:
    known = (run.manifest.get("trace") or {}).get("sha256")
    if known is None:
        raise BenchctlError(
            "the earlier run ended before its trace was read to the end: which one it was is not known",
            where=run.shown,
            fix="replay it to its end, or with --validate-first",
        )
    if known != trace.sha256:
        raise BenchctlError(
            f"the earlier run replayed another trace: its sha256 begins {str(known)[:12]}, this one's {trace.sha256[:12]}",
            where=run.shown,
            fix=f"replay {(run.manifest.get('trace') or {}).get('path')}",
        )
    if not run.has("decisions"):
        raise BenchctlError(
            f"the earlier run kept --records {run.manifest.get('records')}: its refusals are not known",
            where=run.shown,
            fix="record it with --records compact or full",
        )
    for table in ("admissions", "decisions", "requests", "rounds"):
        run.read(table)  # a damaged one is said here


def schedulers_of(runs: Iterable[Run]) -> tuple[str, ...]:
    """What `--scheduler` would have to say for each run's own policy."""
    return tuple(str(run.manifest.get("place") or run.manifest.get("scheduler")) for run in runs)


def run_for_each(path: str, runs: list[Run], asked: tuple[str, ...]) -> dict[str, Run]:
    """Policy -> the run that it repeats: of several the one of its own name. Raises BenchctlError where there is none.

    `asked`: the command's schedulers; without one those of the runs, so that repeating a run repeats its policy.
    """
    names = chosen_schedulers(asked or schedulers_of(runs))
    if len(runs) == 1:
        return dict.fromkeys(names, runs[0])
    own = {run.scheduler: run for run in runs}
    for name in names:
        if name not in own:
            raise BenchctlError(
                f"{path} holds runs of {' and '.join(own)}, none of {name}",
                where="--from",
                fix=f"name the one whose admissions {name} is to repeat: --from {runs[0].shown}",
            )
    return {name: own[name] for name in names}


def as_recorded(options: ReplayOptions, runs: Mapping[str, Run], notes: list[str]) -> ReplayOptions:
    """The earlier run's seed and over-length rule, where the command leaves theirs at the default."""
    earlier = next(iter(runs.values()))
    if earlier.setting("outputs") == "sampled":
        notes.append(
            "the earlier run appended what its model said: where that ended a request early, this run goes on to the "
            "trace's output length"
        )
    defaults = ReplayOptions(trace="")
    taken = {
        name: earlier.setting(name, getattr(options, name))
        for name in TAKEN
        if getattr(options, name) == getattr(defaults, name)
    }
    return replace(options, **taken)


def num_recorded(run: Run) -> int:
    """Requests that were handed to its scheduler, those that it refused among them."""
    return run.read("admissions").height + int(sum(run.read("decisions")["kind"] == "reject"))
