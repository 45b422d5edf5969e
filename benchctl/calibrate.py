"""`benchctl calibrate`: a profile of a device from recorded rounds of one model on one card.

The runs have to agree in everything that a duration depends on; those that do not are refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from benchctl.calibrate_fit import (
    Cells,
    HostTimes,
    Rates,
    cells_of,
    concat,
    fit_decode,
    fit_host,
    fit_prefill,
    joined,
    search,
    take,
)
from benchctl.calibrate_points import MeasuredPoints, Points, graphs_of_points, measured_points
from benchctl.calibrate_rounds import (
    Measured,
    device_of,
    driver_of,
    graphs_of,
    limit,
    measured_rounds,
    model_shape,
    tiles_of,
)
from benchctl.manifest import now
from engines.simulated.cost import bucket_factors, device_time, heat_time, products, work
from engines.simulated.features import Features
from engines.simulated.profile import (
    FAMILIES,
    RANGED,
    Bucket,
    Family,
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
HOST_BOUND = 2.0  # times what its products need at least: a round without a graph that took longer waited for the host
POINT_ROUNDS = 10.0  # a designed round, the median of its repeats, counts like so many
DESIGNED = "designed rounds"
SHRINK_ROUNDS = 10.0  # a bucket with this many rounds goes half the way from 1 to its own factor
FACTOR_LIMITS = (0.5, 2.0)


def calibrate(runs: Sequence[Run], name: str, points: Sequence[tuple[Points, str]] = ()) -> Profile:
    """A fit for each block size among the runs and the points, each of which comes with the path of its file.

    Raises BenchctlError where they differ in device, model, dtype or engine, have too few rounds of a family, or where there
    is no run to tell the host's times.
    """
    if not runs:
        raise BenchctlError(
            "points tell the device's times alone; the host's come from recorded runs, and none is given",
            where=points[0][1] if points else None,
            fix="add a run folder of the same model on the same device",
        )
    measured = [measured_rounds(run) for run in runs]
    check_alike([*(traits_of_run(run) for run in runs), *(traits_of_points(p, path) for p, path in points)])
    first, model, graphs = runs[0], model_shape(runs[0]), graphs_of(runs[0])
    overlapped, roof = bool(first.manifest.get("overlapped")), ceilings_of(first)
    for other in runs[1:]:
        if bool(other.manifest.get("overlapped")) != overlapped:
            raise BenchctlError(
                "the runs differ in whether rounds overlap", where=str(other.path), fix="calibrate from each kind alone"
            )
    run_sizes = {limit(one.run, "block_size") for one in measured}
    sizes = run_sizes | {setup.block_size for p, _ in points for setup in p.setups}
    fits = []
    for size in sorted(sizes):
        of_size = [one for one in measured if limit(one.run, "block_size") == size]
        designed = [measured_points(p, path, size) for p, path in points]
        # Host times depend on the policy and the machine, hardly on the block size: where no run has it, all of them tell.
        fits.append(
            fit_block_size(
                model,
                graphs,
                size,
                of_size,
                of_size or measured,
                measured,
                [d for d in designed if len(d.device_s)],
                roof,
                overlapped,
            )
        )
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
        fits=tuple(fits),
    )


def fit_block_size(
    model: ModelShape,
    graphs: Graphs,
    block_size: int,
    measured: Sequence[Measured],
    host_runs: Sequence[Measured],
    all_runs: Sequence[Measured],
    designed: Sequence[MeasuredPoints],
    roof: Ceilings | None,
    overlapped: bool,
) -> Fit:
    """The fit of all rounds of the runs and points, which share a block size. Raises BenchctlError where a family has too few."""
    parts = [(m.features, m.device_s) for m in measured] + [(d.features, d.device_s) for d in designed]
    f = concat([features for features, _ in parts])
    device_s = np.concatenate([seconds for _, seconds in parts])
    has_prefill = np.asarray(f.has_prefill)
    for family in FAMILIES:
        count = int((has_prefill == (family == "prefill")).sum())
        if count < MIN_ROUNDS:
            what = "decodes alone" if family == "decode" else "prefill"
            raise BenchctlError(
                f"{count} rounds of {what} are known at block size {block_size}; a fit needs {MIN_ROUNDS}",
                where=", ".join([*(str(m.run.path) for m in measured), *(d.path for d in designed)]),
                fix="record a longer trace, or measure designed rounds: benchctl calibrate --measure",
            )
    per_tile = tiles_of(model, block_size)

    def cells(family: Family) -> Cells:
        """Runs together are one source, points another: a long run shall not outvote the design, nor the other way round."""
        sources = []
        for group in (measured, designed):
            if group:
                features, seconds = concat([m.features for m in group]), np.concatenate([m.device_s for m in group])
                rows = np.asarray(features.has_prefill) == (family == "prefill")
                if rows.any():
                    sources.append(cells_of(take(features, rows), seconds[rows], repeated=group is designed))
        return joined(sources)

    decode_cells, prefill_cells = cells("decode"), cells("prefill")
    rates, ceilings = rates_of(model, f, device_s, roof), roof.source if roof else "as far as the rounds tell"
    if roof is None:
        drawn = search(rates.bytes_per_s, lambda b: fit_decode(model, decode_cells, Rates(b, rates.flops_per_s))[1])
        rates = Rates(drawn, rates.flops_per_s)
        done = search(rates.flops_per_s, lambda c: fit_prefill(model, prefill_cells, Rates(drawn, c), per_tile)[1])
        rates = Rates(drawn, done)
    # Launches do not know the block size. Rounds as they came tell; those of designed rounds are warm.
    host = fit_host(host_times(host_runs), overlapped, graphs, issue_of(model, graphs, rates, all_runs))
    plain = Fit(
        block_size=block_size,
        bytes_per_s=rates.bytes_per_s,
        flops_per_s=rates.flops_per_s,
        ceilings=ceilings,
        tile_tokens=per_tile,
        decode=fit_decode(model, decode_cells, rates)[0],
        prefill=fit_prefill(model, prefill_cells, rates, per_tile, host)[0],
        host=host,
        buckets=(),
        ranges=ranges_of(f),
        residuals=(),
        sources=tuple([*(source_of(m) for m in measured), *(source_of_points(d) for d in designed)]),
    )
    weight = np.concatenate(
        [np.ones(len(m.device_s)) for m in measured] + [np.full(len(d.device_s), POINT_ROUNDS) for d in designed]
    )
    # What the repeats of designed rounds cost is not the formula's error.
    hot = np.concatenate(
        [np.zeros(len(m.device_s)) for m in measured] + [heat_of(model, plain, d.features) for d in designed]
    )
    corrected = replace(plain, buckets=buckets_of(model, graphs, plain, f, device_s - hot, weight))
    kind = np.concatenate([m.kind for m in measured] + [d.kind for d in designed])
    return replace(corrected, residuals=residuals_of(predicted_device(model, corrected, f) + hot, device_s, kind))


def host_times(runs: Sequence[Measured]) -> HostTimes:
    names = ("launch_s", "after_s", "device_s", "step_s", "idle_start", "arrive_s")
    return HostTimes(
        concat([m.features for m in runs]), *(np.concatenate([getattr(m, name) for m in runs]) for name in names)
    )


def issue_of(model: ModelShape, graphs: Graphs, rates: Rates, runs: Sequence[Measured]) -> float:
    """Host seconds of launching a round's kernels one by one: the median over rounds that are somewhat too long for a graph.

    The device's time of a round begins before its first kernel is launched, so it is no shorter than the launches; where it is
    far more than the products need, they are what it waited for. 0 without such a round.
    """
    found: list[float] = []
    for run in runs if graphs.prefill else ():
        f, seconds = run.features, run.device_s
        least = products(model, f.padded_tokens, f.padded_seqs, rates.bytes_per_s, rates.flops_per_s)
        limit = graphs.prefill[-1]
        beyond = (f.num_tokens > limit) & (f.num_tokens < 2 * limit) & np.asarray(f.has_prefill)
        here = seconds[beyond & (seconds > HOST_BOUND * least)].tolist()
        found += here[1:] or here  # the first of a run also waits for what it is the first to need
    return float(np.median(found)) if found else 0.0


def heat_of(model: ModelShape, fit: Fit, f: Features) -> npt.NDArray[np.float64]:
    """Seconds by which designed rounds, repeated on end, are slower than in a run."""
    least = products(model, f.padded_tokens, f.padded_seqs, fit.bytes_per_s, fit.flops_per_s)
    hot: npt.NDArray[np.float64] = np.asarray(heat_time(fit.prefill, least, f)) * np.asarray(f.has_prefill)
    return hot


def rates_of(model: ModelShape, f: Features, device_s: npt.NDArray[np.float64], roof: Ceilings | None) -> Rates:
    """The device's ceilings: measured on such a device, and at least the most that any of the rounds reached."""
    has_prefill = np.asarray(f.has_prefill)
    flops, num_bytes = (np.zeros(len(device_s)) for _ in range(2))
    for family in FAMILIES:
        rows = has_prefill == (family == "prefill")
        flops[rows], num_bytes[rows] = work(model, take(f, rows), family)
    reached = Rates(float((num_bytes / device_s).max()), float((flops / device_s).max()))
    if roof is None:
        return reached
    return Rates(max(roof.bytes_per_s, reached.bytes_per_s), max(roof.flops_per_s, reached.flops_per_s))


Traits = tuple[str, dict[str, object]]  # where, and what has to be alike


def traits_of_run(run: Run) -> Traits:
    return str(run.path), {
        "device": device_of(run),
        "model": run.manifest.get("model"),
        "dtype": run.manifest.get("dtype"),
        "attention backend": run.manifest.get("attention_backend"),
        "tensor parallel size": run.setting("tensor_parallel_size") or 1,
        "sampling": "drawn" if (run.setting("temperature") or 0) > 0 else "likeliest",
        "set of CUDA graphs": graphs_of(run),
    }


def traits_of_points(points: Points, path: str) -> Traits:
    return path, {
        "device": points.device,
        "model": points.model,
        "dtype": points.dtype,
        "attention backend": points.attention_backend,
        "tensor parallel size": 1,
        "sampling": "likeliest",
        "set of CUDA graphs": graphs_of_points(points),
    }


def check_alike(all_traits: Sequence[Traits]) -> None:
    """Raises BenchctlError naming the first thing in which a source differs from the first one."""
    first_where, expected = all_traits[0]
    for where, traits in all_traits[1:]:
        for name, value in traits.items():
            if value != expected[name]:
                shown = "" if name == "set of CUDA graphs" else f": {value} there, {expected[name]} in {first_where}"
                raise BenchctlError(f"they differ in {name}{shown}", where=where, fix="calibrate from each alone")


def ranges_of(f: Features) -> tuple[Range, ...]:
    out = []
    for family in FAMILIES:
        part = take(f, np.asarray(f.has_prefill) == (family == "prefill"))
        for feature in RANGED:
            values = getattr(part, feature)
            out.append(Range(family=family, feature=feature, least=float(values.min()), greatest=float(values.max())))
    return tuple(out)


def buckets_of(
    model: ModelShape,
    graphs: Graphs,
    fit: Fit,
    f: Features,
    device_s: npt.NDArray[np.float64],
    weight: npt.NDArray[np.float64],
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
            rows = of_family & (f.padded_tokens == size)
            if rows.any():
                factor, rounds = (
                    float(np.clip(weighted_median(ratio[rows], weight[rows]), *FACTOR_LIMITS)),
                    float(weight[rows].sum()),
                )
                factor = 1.0 + (factor - 1.0) * rounds / (rounds + SHRINK_ROUNDS)
                out.append(Bucket(family=family, padded_tokens=size, factor=factor, rounds=int(rows.sum())))
    return tuple(out)


def weighted_median(values: npt.NDArray[np.float64], weight: npt.NDArray[np.float64]) -> float:
    order = np.argsort(values)
    total = np.cumsum(weight[order])
    return float(values[order][np.searchsorted(total, total[-1] / 2)])


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


def source_of_points(designed: MeasuredPoints) -> Source:
    return Source(
        scheduler="none",
        trace=DESIGNED,
        trace_sha256="",
        digest=None,
        started=designed.points.created,
        block_size=designed.block_size,
        rounds=len(designed.device_s),
    )
