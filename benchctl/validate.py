"""`benchctl validate`: a profile's predictions against a measured run, per round and end to end.

Per round the device time of each recorded batch is predicted and set against the measured one. End to end the run's own
command is simulated, admissions free, and the percentiles that users see are compared: errors of rounds may cancel or add
up there. A run that the profile was fitted on is named as such: its errors are no hold-out.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchctl.build import build_command, build_run
from benchctl.calibrate import predicted_device
from benchctl.calibrate_rounds import Measured, device_of, measured_rounds
from benchctl.config import KNOB_NAMES, ReplayOptions
from benchctl.runner import run_one, stop_on_interrupt
from engines.simulated.cost import bounds_of, launch_time
from engines.simulated.profile import FAMILIES, Fit, Profile
from reports.run import Run, open_run
from reports.summary import summarize
from traces.errors import BenchctlError

METRICS, PERCENTILES = ("ttft", "tpot", "itl", "e2el"), (50.0, 90.0, 99.0)


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
    scheduler: str
    trace: str
    fitted_on: bool
    device_share: float  # of the sum of all device times: predicted / measured - 1
    host_p50: float  # median relative error of host time before a launch
    kinds: tuple[KindError, ...]
    worst: tuple[WorstRound, ...]
    end_to_end: tuple[EndToEnd, ...]
    notes: tuple[str, ...]


def validate(profile: Profile, run: Run, trace: str | None, *, end_to_end: bool, worst: int) -> Validation:
    """Raises BenchctlError where the run is of another model or device than the profile, or holds no measured rounds."""
    check_same(profile, run)
    measured, notes = measured_rounds(run), list[str]()
    fit = profile.nearest_fit(run.block_size or 1)
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
    predicted = predicted_device(profile.model, fit, measured.features)
    launch_s = np.asarray(launch_time(fit.host, measured.features))
    rows: tuple[EndToEnd, ...] = ()
    if end_to_end:
        path = trace or find_trace(run, notes)
        if path is not None:
            rows = simulate(profile, run, path, notes)
    return Validation(
        run=str(run.path),
        scheduler=run.scheduler,
        trace=str((run.manifest.get("trace") or {}).get("name")),
        fitted_on=fitted_on,
        device_share=float(predicted.sum() / measured.device_s.sum() - 1),
        host_p50=float(np.median(np.abs(launch_s - measured.launch_s) / np.maximum(measured.launch_s, 1e-9))),
        kinds=kind_errors(fit, measured, predicted),
        worst=worst_rounds(measured, predicted, worst),
        end_to_end=rows,
        notes=tuple(notes),
    )


def check_same(profile: Profile, run: Run) -> None:
    if run.engine in ("null", "simulated"):
        raise BenchctlError(
            f"a run of the {run.engine} engine has no measured times",
            where=str(run.path),
            fix="give runs of --engine torch",
        )
    for what, theirs, ours in (
        ("model", run.manifest.get("model"), profile.model.name),
        ("device", device_of(run), profile.device),
    ):
        if theirs != ours:
            raise BenchctlError(
                f"the run's {what} is {theirs}, the profile's {ours}",
                where=str(run.path),
                fix=f"validate on a run of {ours}, or calibrate a profile of {theirs}",
            )


def kind_errors(fit: Fit, measured: Measured, predicted: Any) -> tuple[KindError, ...]:
    signed = (predicted - measured.device_s) / measured.device_s
    beyond = np.zeros(len(signed), dtype=np.bool_)
    for family in FAMILIES:
        of_family = measured.has_prefill == (family == "prefill")
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


def worst_rounds(measured: Measured, predicted: Any, count: int) -> tuple[WorstRound, ...]:
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


def find_trace(run: Run, notes: list[str]) -> str | None:
    """Where the run's trace lay, if it still lies there."""
    path = (run.manifest.get("trace") or {}).get("path")
    if path is not None and Path(str(path)).is_file():
        return str(path)
    notes.append(f"no end-to-end comparison: the trace {path} is not there; --trace FILE names it")
    return None


def options_of(profile_path: str, run: Run, trace: str) -> ReplayOptions:
    """The run's own command, on the simulated engine."""

    def given(name: str) -> Any:
        entry = (run.manifest.get("config") or {}).get(name)
        return entry.get("value") if isinstance(entry, dict) else None

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


def scheduler_name(run: Run) -> str:
    """What --scheduler said: a policy of the user's own is found by its place."""
    return str(run.manifest.get("place") or run.scheduler)


def simulate(profile: Profile, run: Run, trace: str, notes: list[str]) -> tuple[EndToEnd, ...]:
    """Replay the run's trace on the profile and compare. Admissions are free. Raises BenchctlError."""
    from benchctl.profiles import save_profile

    with tempfile.TemporaryDirectory(prefix="benchctl-validate-") as folder, stop_on_interrupt() as stop:
        file = Path(folder) / "profile.json"
        # A run of a block size that was not fitted is simulated all the same, by the nearest fit: a note says so.
        save_profile(profile if profile.fit_for(run.block_size or 1) else stretched(profile, run), file)
        command = build_command(options_of(str(file), run, trace))
        known = (run.manifest.get("trace") or {}).get("sha256")
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
        rows = compare_figures(figures(run), figures(simulated))
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


def stretched(profile: Profile, run: Run) -> Profile:
    """The profile with its nearest fit standing in for the run's block size."""
    from msgspec.structs import replace

    size = run.block_size or 1
    return replace(profile, fits=(replace(profile.nearest_fit(size), block_size=size),))


def figures(run: Run) -> dict[tuple[str, float | None], float]:
    """(metric, percentile) -> ms; (throughput, None) -> a second."""
    summary: Mapping[str, Any] = summarize(run, percentile_metrics=METRICS, percentiles=PERCENTILES)
    out: dict[tuple[str, float | None], float] = {}
    for metric in METRICS:
        for p in PERCENTILES:
            value = summary.get(f"p{p:g}_{metric}_ms")
            if value is not None:
                out[metric, p] = float(value)
    for name in ("output_throughput", "duration"):
        if summary.get(name) is not None:
            out[name, None] = float(summary[name])
    return out


def compare_figures(
    measured: Mapping[tuple[str, float | None], float], simulated: Mapping[tuple[str, float | None], float]
) -> tuple[EndToEnd, ...]:
    return tuple(
        EndToEnd(metric, p, value, simulated[metric, p], simulated[metric, p] / value - 1)
        for (metric, p), value in measured.items()
        if (metric, p) in simulated and value > 0
    )
