"""`benchctl validate`: a profile's predictions against a measured run, per round and end to end.

Per round the device time of each recorded batch is predicted and set against the measured one. End to end the run's own
command is simulated, admissions free, and the percentiles that users see are compared: errors of rounds may cancel or add
up there. A run that the profile was fitted on is named as such: its errors are no hold-out.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchctl.build import build_command, build_run
from benchctl.calibrate import predicted_device
from benchctl.config import KNOB_NAMES, ReplayOptions
from benchctl.held_out import PERCENTILES, Figures, HeldOut, figures_of
from benchctl.manifest import now
from benchctl.runner import run_one, stop_on_interrupt
from engines.simulated.cost import bounds_of, launch_time
from engines.simulated.profile import FAMILIES, Fit, HeldOutError, Profile
from reports.run import open_run
from traces.errors import BenchctlError

FEW = 20  # rounds of a kind in a run that give no median to speak of where other runs have more


@dataclass(frozen=True, slots=True)
class KindError:
    """Rounds of one kind: relative error of device time. `bias`: median of the signed one; above 0 the profile is slow."""

    kind: str
    rounds: int
    p50: float
    p95: float
    bias: float
    outside: int  # rounds beyond what was fitted


@dataclass(frozen=True, slots=True)
class WorstRound:
    """A round of a large error, with what it did. Times in seconds."""

    round: int
    kind: str
    measured_s: float
    predicted_s: float
    num_seqs: int
    num_tokens: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class EndToEnd:
    """One figure of both runs, in its own unit (ms, or tokens a second). `error` is relative, signed."""

    metric: str
    percentile: float | None  # None: a figure of the whole run
    measured: float
    simulated: float
    error: float


@dataclass(frozen=True, slots=True)
class Validation:
    """A profile held against one run. `notes` say what the comparison does not cover."""

    run: str
    model: str
    scheduler: str
    trace: str
    fitted_on: bool
    device_share: float | None  # of the sum of all device times: predicted / measured - 1; None: no round is known
    host_p50: float | None  # median relative error of host time before a launch
    kinds: tuple[KindError, ...]
    worst: tuple[WorstRound, ...]
    end_to_end: tuple[EndToEnd, ...]
    notes: tuple[str, ...]


def validate(profile: Profile, run: HeldOut, trace: str | None, *, end_to_end: bool, worst: int) -> Validation:
    """Raises BenchctlError where the run is of another model or device than the profile."""
    check_same(profile, run)
    notes = list[str]()
    fit = profile.nearest_fit(run.block_size)
    if fit.block_size != run.block_size:
        notes.append(
            f"the run has block size {run.block_size}; the profile's nearest is {fit.block_size}: kernels differ, so this is "
            "no measure of the profile at its own block size"
        )
    fitted_on = any(
        s.digest is not None and (s.digest, s.started) == (run.manifest.get("digest"), run.manifest.get("started"))
        for f in profile.fits
        for s in f.sources
    )
    if fitted_on:
        notes.append("the profile was fitted on this very run: these errors are no hold-out")
    known = len(run.device_s) > 0
    if not known:
        notes.append("the run's batches are not kept: no comparison round by round")
    predicted = predicted_device(profile.model, fit, run.features)
    launch_s = np.asarray(launch_time(fit.host, run.features))
    rows: tuple[EndToEnd, ...] = ()
    if end_to_end:
        path = find_trace(run, trace, notes)
        if path is not None:
            rows = simulate(profile, run, path, notes)
    return Validation(
        run=run.path,
        model=profile.model.name,
        scheduler=run.scheduler,
        trace=str(run.trace.get("name")),
        fitted_on=fitted_on,
        device_share=float(predicted.sum() / run.device_s.sum() - 1) if known else None,
        host_p50=float(np.median(np.abs(launch_s - run.launch_s) / np.maximum(run.launch_s, 1e-9))) if known else None,
        kinds=kind_errors(fit, run, predicted),
        worst=worst_rounds(run, predicted, worst),
        end_to_end=rows,
        notes=tuple(notes),
    )


def check_same(profile: Profile, run: HeldOut) -> None:
    for what, theirs, ours in (
        ("model", run.manifest.get("model"), profile.model.name),
        ("device", run.manifest.get("device"), profile.device),
    ):
        if theirs != ours:
            raise BenchctlError(
                f"the run's {what} is {theirs}, the profile's {ours}",
                where=run.path,
                fix=f"validate on a run of {ours}, or calibrate a profile of {theirs}",
            )


def kind_errors(fit: Fit, measured: HeldOut, predicted: Any) -> tuple[KindError, ...]:
    signed = (predicted - measured.device_s) / measured.device_s
    beyond = np.zeros(len(signed), dtype=np.bool_)
    for family in FAMILIES:
        of_family = measured.features.has_prefill == (family == "prefill")
        for feature, (least, greatest) in bounds_of(fit, family).items():
            values = getattr(measured.features, feature)
            beyond |= of_family & ((values < least) | (values > greatest))
    out = []
    for kind in sorted(set(measured.kind.tolist())):
        rows = measured.kind == kind
        p50, p95 = np.percentile(np.abs(signed[rows]), (50, 95))
        out.append(
            KindError(
                kind, int(rows.sum()), float(p50), float(p95), float(np.median(signed[rows])), int(beyond[rows].sum())
            )
        )
    return tuple(out)


def worst_rounds(measured: HeldOut, predicted: Any, count: int) -> tuple[WorstRound, ...]:
    error, f = np.abs(predicted - measured.device_s) / measured.device_s, measured.features
    return tuple(
        WorstRound(
            round=int(measured.round[i]),
            kind=str(measured.kind[i]),
            measured_s=float(measured.device_s[i]),
            predicted_s=float(predicted[i]),
            num_seqs=int(f.num_seqs[i]),
            num_tokens=int(f.num_tokens[i]),
            context_tokens=int(f.context_tokens[i]),
        )
        for i in np.argsort(-error, kind="stable")[:count].tolist()
    )


# -- end to end


def find_trace(run: HeldOut, given: str | None, notes: list[str]) -> str | None:
    """The file named, or NAME.jsonl of the folder named; else where the run's trace lay, if it still lies there."""
    path = given if given is not None else run.trace.get("path")
    if given is not None and Path(given).is_dir():
        path = str(Path(given) / f"{run.trace.get('name')}.jsonl")
    elif given is not None:
        return given
    if path is not None and Path(str(path)).is_file():
        return str(path)
    notes.append(f"no end-to-end comparison: the trace {path or run.trace.get('name')} is not there; --trace names it")
    return None


def options_of(profile_path: str, run: HeldOut, trace: str) -> ReplayOptions:
    """The run's own command, on the simulated engine."""

    given = run.given
    defaults = ReplayOptions(trace="")
    same = ("max_concurrency", "request_rate", "burstiness", "time_scale", "num_prompts", "seed", "over_length", "skip_bad",
            "num_warmups", "warm_cache")  # fmt: skip
    values = {name: getattr(defaults, name) if given(name) is None else given(name) for name in same}
    # Settings that do not apply to the policy are not in its manifest; the others are given whole.
    knobs = {name: value for name in KNOB_NAMES if (value := given(name)) is not None}
    return ReplayOptions(
        trace=trace,
        schedulers=(scheduler_name(run),),
        engine="simulated",
        profile=profile_path,
        num_blocks=(run.manifest.get("limits") or {}).get("num_blocks"),
        knobs=knobs,
        overlap=bool(run.manifest.get("overlapped")),
        arrivals=str(run.manifest.get("arrivals")),
        records="full",
        report=False,
        command=("benchctl", "validate"),
        **values,
    )


def scheduler_name(run: HeldOut) -> str:
    """What --scheduler said: a policy of the user's own is found by its place."""
    return str(run.manifest.get("place") or run.scheduler)


def simulate(profile: Profile, run: HeldOut, trace: str, notes: list[str]) -> tuple[EndToEnd, ...]:
    """Replay the run's trace on the profile and compare. Admissions are free. Raises BenchctlError."""
    from benchctl.profiles import save_profile

    with tempfile.TemporaryDirectory(prefix="benchctl-validate-") as folder, stop_on_interrupt() as stop:
        file = Path(folder) / "profile.json"
        # A run of a block size that was not fitted is simulated all the same, by the nearest fit: a note says so.
        save_profile(profile if profile.fit_for(run.block_size) else stretched(profile, run), file)
        command = build_command(options_of(str(file), run, trace))
        known = run.trace.get("sha256")
        if command.trace.sha256 != known:
            raise BenchctlError(
                f"the run replayed another trace: its sha256 begins {str(known)[:12]}, this one's {command.trace.sha256[:12]}",
                where=trace,
                fix="--trace FILE names the run's own",
            )
        out = Path(folder) / "run"
        out.mkdir()
        result = run_one(build_run(command, command.policies[0], out), None, stop)
        if stop.is_set():
            raise KeyboardInterrupt
        if result.error is not None:
            raise result.error
        simulated = open_run(out)
        rows = compare_figures(run.figures, figures_of(simulated))
        same = simulated.manifest.get("digest") == run.manifest.get("digest")
    rounds = (run.manifest.get("counts") or {}).get("rounds")
    notes.append(
        "admissions are free: the decision log is "
        + (
            "equal to the measured run's"
            if same
            else f"another one ({result.outcome.rounds:,} rounds, measured {rounds:,})"
        )
    )
    return rows


def stretched(profile: Profile, run: HeldOut) -> Profile:
    """The profile with its nearest fit standing in for the run's block size."""
    from msgspec.structs import replace

    size = run.block_size
    return replace(profile, fits=(replace(profile.nearest_fit(size), block_size=size),))


def compare_figures(measured: Figures, simulated: Figures) -> tuple[EndToEnd, ...]:
    return tuple(
        EndToEnd(metric, p, value, simulated[metric, p], simulated[metric, p] / value - 1)
        for (metric, p), value in measured.items()
        if (metric, p) in simulated and value > 0
    )


# -- all runs together


def worst_first(results: Sequence[Validation]) -> list[Validation]:
    """By the largest error end to end at p50 and p90; without one, by the largest median error of a kind."""
    return sorted(results, key=lambda r: (-largest(r, (50.0, 90.0)), -max((k.p50 for k in r.kinds), default=0.0)))


def largest(result: Validation, percentiles: Sequence[float]) -> float:
    return max((abs(e.error) for e in result.end_to_end if e.percentile in percentiles), default=0.0)


def held_out_error(results: Sequence[Validation]) -> HeldOutError:
    """Raises BenchctlError where a run was fitted, or was not simulated end to end."""
    for result in results:
        if result.fitted_on:
            raise BenchctlError(
                "the profile was fitted on this run: its errors are no hold-out",
                where=result.run,
                fix="leave it out of --save",
            )
        if not result.end_to_end:
            raise BenchctlError(
                "this run was not simulated end to end", where=result.run, fix="--trace names its trace"
            )
    rounds: dict[str, float] = {}
    kinds = [kind for result in results for kind in result.kinds]
    for kind in kinds:
        if kind.rounds >= FEW or not any(k.kind == kind.kind and k.rounds >= FEW for k in kinds):
            rounds[kind.kind] = max(rounds.get(kind.kind, 0.0), kind.p50)
    errors = {
        f"{p:g}": [abs(e.error) for result in results for e in result.end_to_end if e.percentile == p]
        for p in PERCENTILES
    }
    return HeldOutError(
        validated=now(),
        runs=tuple(f"{result.scheduler}, {result.trace}" for result in results),
        round_p50=rounds,
        end_to_end={p: float(np.median(values)) for p, values in errors.items()},
        worst={p: max(values) for p, values in errors.items()},
    )
