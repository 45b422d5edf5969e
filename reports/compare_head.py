"""What is compared with what: the two sides, every setting in which they differ, and what a reader has to know beforehand.

Refuses sides that replayed different traces. Reads manifests and admissions; must not know metrics or decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from reports.run import Run, find_runs, open_run
from traces.errors import BenchctlError

# Settings that change which requests come when: with one of them different the runs did not get the same work.
WORKLOAD = (
    "num_prompts", "request_rate", "burstiness", "time_scale", "arrivals", "max_concurrency", "over_length", "skip_bad",
    "round_seconds", "outputs", "warm_cache", "num_warmups", "max_model_len",
)  # fmt: skip
# Facts of the manifest that are no settings, but that figures depend on.
FACTS = ("policy", "engine", "model", "dtype", "device", "clock", "records", "cache", "load", "benchctl")
HIDDEN = ("from_run", "num_repeats", "records", "seed")  # of `config`: they change no figure, or stand elsewhere
DETERMINISTIC_CLOCKS = ("rounds", "recorded")
DETERMINISTIC_ENGINES = ("null", "simulated")


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison: a run, or repeats of it. `name` tells it from the other side."""

    name: str
    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        return self.runs[0]


@dataclass(frozen=True, slots=True)
class SettingDifference:
    """A setting with its value on each side, as text. `workload`: with it the two sides did not get the same work."""

    name: str
    a: str
    b: str
    workload: bool


def is_deterministic(run: Run) -> bool:
    """Whether decisions and times follow from trace and settings alone, so that a repeat would be the same."""
    if run.clock in DETERMINISTIC_CLOCKS:
        return True
    return run.clock == "virtual" and run.engine in DETERMINISTIC_ENGINES


def make_sides(a: Sequence[str | Path], b: Sequence[str | Path]) -> tuple[Side, Side]:
    """Open both sides. With `a` one folder that holds runs of two schedulers, and `b` empty, the schedulers are the sides.

    Raises BenchctlError where a path holds no run, a side mixes settings, or the sides replayed different traces.
    """
    if not b:
        first, second = _split(a)
    else:
        first, second = _open(a, "A"), _open(b, "B")
    for runs, label in ((first, "A"), (second, "B")):
        _check_alike(runs, label)
    _check_traces(first, second)
    names = _side_names(first, second)
    return Side(names[0], tuple(first)), Side(names[1], tuple(second))


def _open(paths: Sequence[str | Path], label: str) -> list[Run]:
    runs: list[Run] = []
    for path in paths:
        found = find_runs(path)
        runs += [open_run(each) for each in found or [Path(path)]]
    if not runs:
        raise BenchctlError(f"side {label} names no run", fix="benchctl compare A B, each a run folder")
    return sorted(runs, key=lambda run: str(run.manifest.get("started") or "")) if len(runs) > 1 else runs


def _split(paths: Sequence[str | Path]) -> tuple[list[Run], list[Run]]:
    runs = _open(paths, "A")
    schedulers = sorted({run.scheduler for run in runs})
    if len(schedulers) != 2:
        found = f"runs of {' and '.join(schedulers)}" if len(schedulers) > 1 else f"runs of {schedulers[0]} only"
        raise BenchctlError(
            f"{paths[0]} holds {found}: two sides are needed",
            fix="benchctl compare A B, or one folder with runs of two schedulers",
        )
    first, second = ([run for run in runs if run.scheduler == name] for name in schedulers)
    return first, second


def _check_alike(runs: Sequence[Run], label: str) -> None:
    """Repeats must be repeats of one thing."""
    for run in runs[1:]:
        differ = [d.name for d in setting_differences(runs[0], run)]
        if run.scheduler != runs[0].scheduler or differ:
            raise BenchctlError(
                f"side {label} is no set of repeats: {runs[0].shown} and {run.shown} differ in "
                + (", ".join(differ) or "scheduler"),
                fix="name runs of one policy and equal settings on each side: --a A1 --a A2 --b B1 --b B2",
            )


def _trace(run: Run) -> dict[str, Any]:
    trace = run.manifest.get("trace")
    return trace if isinstance(trace, dict) else {"name": trace}


def _check_traces(a: Sequence[Run], b: Sequence[Run]) -> None:
    """All runs have to be of one trace: by its sha256, or by name where a manifest has none on either side."""
    known = {run.path: _trace(run) for run in (*a, *b)}
    keys = {path: trace.get("sha256") or f"{trace.get('name')} (no sha256)" for path, trace in known.items()}
    if len(set(keys.values())) > 1:
        one = a[0].path
        other = next(path for path, key in keys.items() if key != keys[one])
        texts = [
            f"{known[path].get('name')} ({keys[path][:12] if known[path].get('sha256') else 'sha256 unknown'})"
            for path in (one, other)
        ]
        raise BenchctlError(
            f"the runs replayed different traces: {texts[0]} and {texts[1]}",
            where=f"{one} and {other}",
            fix="replay the same trace under both, e.g. benchctl replay TRACE --scheduler nano --scheduler vllm",
        )


def _side_names(a: Sequence[Run], b: Sequence[Run]) -> tuple[str, str]:
    """The schedulers where they differ, else the folders, else A and B."""

    def unlike(first: str, second: str) -> bool:
        return first != second and bool(first) and bool(second)

    if unlike(a[0].scheduler, b[0].scheduler):
        return a[0].scheduler, b[0].scheduler
    parents = Path(a[0].shown).resolve().parent.name, Path(b[0].shown).resolve().parent.name
    if unlike(*parents) and a[0].name == b[0].name:
        return f"{parents[0]}/{a[0].name}", f"{parents[1]}/{b[0].name}"
    if len(a) == len(b) == 1 and unlike(a[0].name, b[0].name):
        return a[0].name, b[0].name
    return "A", "B"


def plain(value: Any) -> str:
    """A setting as a reader writes it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return ",".join(plain(each) for each in value)
    return str(value)


def setting_differences(a: Run, b: Run) -> list[SettingDifference]:
    """Every setting, limit and fact in which two runs differ: what changes the work first, then in the manifest's order."""
    out: list[SettingDifference] = []

    def add(name: str, first: Any, second: Any) -> None:
        if first != second:
            out.append(SettingDifference(name, plain(first), plain(second), name in WORKLOAD))

    for name in FACTS:
        add(name, a.manifest.get(name), b.manifest.get(name))
    limits = [run.manifest.get("limits") or {} for run in (a, b)]
    for name in ("block_size", "usable_blocks", "usable_tokens", "max_model_len"):
        add(name, limits[0].get(name), limits[1].get(name))
    configs = [run.manifest.get("config") or {} for run in (a, b)]
    said = {difference.name for difference in out} | set(HIDDEN) | {"num_blocks"}
    for name in dict.fromkeys([*configs[0], *configs[1]]):
        if name in said:
            continue
        values = [
            entry.get("value") if isinstance(entry, dict) else entry
            for entry in (config.get(name, "not a setting of it") for config in configs)
        ]
        add(name, *values)
    hardware = [run.manifest.get("hardware") or {} for run in (a, b)]
    if not (is_deterministic(a) and is_deterministic(b)):
        for name in ("host", "cpu", "cores"):
            add(name, hardware[0].get(name), hardware[1].get(name))
        gpus = [(entry.get("gpu") or {}).get("name") for entry in hardware]
        add("gpu", *gpus)
    add("seed", *(run.setting("seed") for run in (a, b)))
    return sorted(out, key=lambda difference: not difference.workload)


def warnings(a: Side, b: Side, differences: Sequence[SettingDifference]) -> list[str]:
    """What makes the figures below less than they seem; each with its evidence."""
    out: list[str] = []
    for side in (a, b):
        for run in side.runs:
            if run.status != "complete":
                out.append(f"{side.name}: {run.shown} is {run.status}, so its figures are those of a part of the trace")
    work = [d for d in differences if d.workload]
    if work:
        texts = ", ".join(f"{d.name} {d.a} / {d.b}" for d in work)
        out.append(f"the sides did not get the same work: {texts}")
    moved = _moved_arrivals(a.first, b.first)
    if moved:
        count, total, largest = moved
        why = (
            " (--arrivals session: a turn comes after its parent finished)"
            if a.first.setting("arrivals") == "session"
            else ""
        )
        out.append(
            f"the policies saw different arrivals: {count} of {total} requests arrived at other times, by up to {largest:.3f} s{why}"
        )
    if len(a.runs) > 1 and len(b.runs) > 1 and not _interleaved(a, b):
        out.append(
            "the repeats were not interleaved (all of one side ran before the other): drift of the machine looks like a difference"
        )
    if a.first.setting("usable_tokens") != b.first.setting("usable_tokens"):
        out.append(
            f"the pools hold different numbers of tokens: {plain(a.first.setting('usable_tokens'))} / {plain(b.first.setting('usable_tokens'))}"
        )
    return out


def _moved_arrivals(a: Run, b: Run) -> tuple[int, int, float] | None:
    both = (
        a.scan("admissions").select("request", "arrival_s")
        .join(b.scan("admissions").select("request", "arrival_s"), on="request", suffix="_b")
        .select((pl.col("arrival_s_b") - pl.col("arrival_s")).abs().alias("moved"))
        .collect()["moved"]
    )  # fmt: skip
    moved = both.filter(both > 1e-9)
    return (len(moved), len(both), float(moved.max())) if len(moved) else None  # type: ignore[arg-type]


def _interleaved(a: Side, b: Side) -> bool:
    started = [[str(run.manifest.get("started") or "") for run in side.runs] for side in (a, b)]
    if not all(all(times) for times in started):
        return True  # not known; nothing to warn of
    return max(started[0]) > min(started[1]) and max(started[1]) > min(started[0])
