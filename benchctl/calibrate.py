"""`benchctl calibrate`: a profile of a device from recorded rounds of one model on one card.

The runs have to agree in everything that a duration depends on; those that do not are refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from benchctl.calibrate_fit import HostTimes, cells_of, concat, fit_device, fit_host, take
from benchctl.calibrate_rounds import Measured, device_of, driver_of, graphs_of, limit, measured_rounds, model_shape
from benchctl.manifest import now
from engines.simulated.cost import bucket_factors, device_time
from engines.simulated.features import Features
from engines.simulated.profile import (
    FAMILIES,
    RANGED,
    Bucket,
    Fit,
    Graphs,
    ModelShape,
    Profile,
    Range,
    Residual,
    Source,
)
from reports.roofline import Ceilings, ceilings_of
from reports.run import Run
from traces.errors import BenchctlError

MIN_ROUNDS = 20  # of each family
SHRINK_ROUNDS = 10.0  # a bucket with this many rounds goes half the way from 1 to its own factor
FACTOR_LIMITS = (0.5, 2.0)


def calibrate(runs: Sequence[Run], name: str) -> Profile:
    """A fit for each block size among the runs.

    Raises BenchctlError where the runs differ in device, model, dtype or engine, or have too few rounds of a family.
    """
    measured = [measured_rounds(run) for run in runs]
    check_alike(runs)
    first, model, graphs = runs[0], model_shape(runs[0]), graphs_of(runs[0])
    overlapped, roof = bool(first.manifest.get("overlapped")), ceilings_of(first)
    by_size: dict[int, list[Measured]] = {}
    for one in measured:
        by_size.setdefault(limit(one.run, "block_size"), []).append(one)
    return Profile(
        name=name,
        created=now(),
        device=device_of(first),
        driver=driver_of(first),
        versions=dict(first.manifest.get("versions") or {}),
        attention_backend=first.manifest.get("attention_backend"),
        overlapped=overlapped,
        kv_cache_tokens=min(limit(run, "usable_tokens") for run in runs),
        max_num_seqs=limit(first, "max_num_seqs"),
        max_num_batched_tokens=limit(first, "max_num_batched_tokens"),
        model=model,
        graphs=graphs,
        fits=tuple(fit_runs(model, graphs, size, by_size[size], roof, overlapped) for size in sorted(by_size)),
    )


def fit_runs(
    model: ModelShape,
    graphs: Graphs,
    block_size: int,
    measured: Sequence[Measured],
    roof: Ceilings | None,
    overlapped: bool,
) -> Fit:
    """The fit of all rounds of the runs, which share a block size. Raises BenchctlError where a family has too few."""
    f = concat([m.features for m in measured])
    device_s = np.concatenate([m.device_s for m in measured])
    has_prefill = np.asarray(f.has_prefill)
    for family in FAMILIES:
        count = int((has_prefill == (family == "prefill")).sum())
        if count < MIN_ROUNDS:
            what = "decodes alone" if family == "decode" else "prefill"
            raise BenchctlError(
                f"{count} rounds of {what} are recorded at block size {block_size}; a fit needs {MIN_ROUNDS}",
                where=", ".join(str(m.run.path) for m in measured),
                fix="record a longer trace",
            )
    found = fit_device(
        model,
        cells_of(take(f, ~has_prefill), device_s[~has_prefill]),
        cells_of(take(f, has_prefill), device_s[has_prefill]),
        (roof.flops_per_s, roof.bytes_per_s) if roof else None,
    )
    times = HostTimes(
        f,
        *(
            np.concatenate([getattr(m, name) for m in measured])
            for name in ("launch_s", "after_s", "device_s", "step_s", "idle_start", "arrive_s")
        ),
    )
    plain = Fit(
        block_size=block_size,
        bytes_per_s=found.bytes_per_s,
        flops_per_s=found.flops_per_s,
        bytes_identified=found.bytes_identified,
        flops_identified=found.flops_identified,
        decode=found.decode,
        prefill=found.prefill,
        host=fit_host(times, overlapped),
        buckets=(),
        ranges=ranges_of(f),
        residuals=(),
        sources=tuple(source_of(m) for m in measured),
    )
    corrected = replace(plain, buckets=buckets_of(model, graphs, plain, f, device_s))
    kind = np.concatenate([m.kind for m in measured])
    return replace(corrected, residuals=residuals_of(predicted_device(model, corrected, f), device_s, kind))


def check_alike(runs: Sequence[Run]) -> None:
    """Raises BenchctlError naming the first thing in which a run differs from the first one."""
    first = runs[0]

    def traits(run: Run) -> dict[str, object]:
        graphs: Graphs = graphs_of(run)
        return {
            "device": device_of(run),
            "model": run.manifest.get("model"),
            "dtype": run.manifest.get("dtype"),
            "attention backend": run.manifest.get("attention_backend"),
            "overlap of rounds": bool(run.manifest.get("overlapped")),
            "set of CUDA graphs": graphs,
        }

    expected = traits(first)
    for run in runs[1:]:
        for name, value in traits(run).items():
            if value != expected[name]:
                shown = "" if name == "set of CUDA graphs" else f": {value} there, {expected[name]} in {first.path}"
                raise BenchctlError(
                    f"the runs differ in {name}{shown}", where=str(run.path), fix="calibrate from each alone"
                )


def ranges_of(f: Features) -> tuple[Range, ...]:
    out = []
    for family in FAMILIES:
        part = take(f, np.asarray(f.has_prefill) == (family == "prefill"))
        for feature in RANGED:
            values = getattr(part, feature)
            out.append(Range(family=family, feature=feature, least=float(values.min()), greatest=float(values.max())))
    return tuple(out)


def buckets_of(
    model: ModelShape, graphs: Graphs, fit: Fit, f: Features, device_s: npt.NDArray[np.float64]
) -> tuple[Bucket, ...]:
    """Factors of the padded sizes that were seen; none where nothing is padded, since each size would be its own."""
    if not graphs.decode:
        return ()
    ratio = device_s / predicted_device(model, fit, f)
    has_prefill, out = np.asarray(f.has_prefill), []
    for family in FAMILIES:
        of_family = has_prefill == (family == "prefill")
        captured = graphs.decode if family == "decode" else graphs.prefill
        for size in captured:
            found = ratio[of_family & (f.padded_tokens == size)]
            if len(found):
                factor = float(np.clip(np.median(found), *FACTOR_LIMITS))
                factor = 1.0 + (factor - 1.0) * len(found) / (len(found) + SHRINK_ROUNDS)
                out.append(Bucket(family=family, padded_tokens=size, factor=factor, rounds=len(found)))
    return tuple(out)


def predicted_device(model: ModelShape, fit: Fit, f: Features) -> npt.NDArray[np.float64]:
    """Device seconds of recorded rounds, as the simulated engine would give them."""
    has_prefill, padded = np.asarray(f.has_prefill), np.asarray(f.padded_tokens)
    out = np.zeros(len(padded))
    for family in FAMILIES:
        rows = has_prefill == (family == "prefill")
        out[rows] = device_time(model, fit, take(f, rows), family)
    for (family, size), factor in bucket_factors(fit).items():
        out[(has_prefill == (family == "prefill")) & (padded == size)] *= factor
    return out


def residuals_of(
    predicted: npt.NDArray[np.float64], device_s: npt.NDArray[np.float64], kind: npt.NDArray[np.str_]
) -> tuple[Residual, ...]:
    error = np.abs(predicted - device_s) / device_s
    out = []
    for name in sorted(set(kind.tolist())):
        p50, p95 = np.percentile(error[kind == name], (50, 95))
        out.append(Residual(kind=name, rounds=int((kind == name).sum()), p50=float(p50), p95=float(p95)))
    return tuple(out)


def source_of(measured: Measured) -> Source:
    manifest = measured.run.manifest
    trace = manifest.get("trace") or {}
    return Source(
        scheduler=measured.run.scheduler,
        trace=str(trace.get("name")),
        trace_sha256=str(trace.get("sha256")),
        digest=manifest.get("digest"),
        started=manifest.get("started"),
        block_size=limit(measured.run, "block_size"),
        rounds=len(measured.device_s),
    )
