"""The fit: coefficients of `engines.simulated.cost` from measured rounds, robust to rounds that something disturbed.

Rounds alike in every feature are one cell, and a cell counts by its median: a hiccup moves nothing, and ten thousand like
decodes weigh no more than their kind. Within a family the relative error is minimised with Huber's weights under
coefficients >= 0 (a negative cost would turn absurd when extrapolated); the two ceilings are searched on a grid around
it. Needs numpy only: a non-negative least squares of five columns is a page, and no reason for scipy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from engines.simulated.cost import launch_time, roofline, work
from engines.simulated.features import Features
from engines.simulated.profile import Family, FamilyCost, HostCost, ModelShape

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

HUBER = 0.05  # relative residuals beyond this count linearly, not squared
HOST_HUBER = 0.5
GRID = 24  # steps of a ceiling
GAIN = 0.002  # a ceiling further from the device's own has to lower the loss by this share
NEAR = 0.6  # a round tells a ceiling where this share of its time is the roofline's


@dataclass(frozen=True, slots=True)
class Cells:
    """Groups of like rounds of one family: features and the median device time, [num_cells]."""

    features: Features
    seconds: Floats
    weight: Floats  # sums to 1


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Rounds in order, columns as in `calibrate_rounds.Measured`."""

    features: Features
    launch_s: Floats
    after_s: Floats
    device_s: Floats
    step_s: Floats
    idle_start: Bools
    arrive_s: Floats


@dataclass(frozen=True, slots=True)
class DeviceFit:
    bytes_per_s: float
    flops_per_s: float
    bytes_identified: bool
    flops_identified: bool
    decode: FamilyCost
    prefill: FamilyCost


def take(f: Features, rows: npt.NDArray[np.bool_] | npt.NDArray[np.int64]) -> Features:
    return Features(*(np.asarray(getattr(f, name))[rows] for name in Features.__slots__))


def concat(parts: list[Features]) -> Features:
    return Features(*(np.concatenate([getattr(p, name) for p in parts]) for name in Features.__slots__))


def cells_of(f: Features, seconds: Floats) -> Cells:
    """Rounds of one family; sizes that grow are grouped in steps of a few percent."""
    steps = [np.round(np.log1p(np.asarray(getattr(f, name), dtype=np.float64)) / 0.03)
             for name in ("context_tokens", "context_pairs", "chunk_keys", "single_keys")]  # fmt: skip
    keys = np.stack([f.padded_tokens, f.num_seqs, f.num_tokens, f.num_yields, *steps], axis=1)
    _, cell, counts = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
    cell = cell.reshape(-1)
    order = np.lexsort((seconds, cell))
    first = np.concatenate([[0], np.cumsum(counts)[:-1]])
    middle = order[first + (counts - 1) // 2]  # the round of median time stands for its cell, with its own features
    # Root of the count: a cell of many rounds is better known, but shall not hide the others.
    weight = np.sqrt(counts.astype(np.float64))
    return Cells(take(f, middle), seconds[middle], weight / weight.sum())


def columns_of(f: Features, family: Family) -> Floats:
    """[num_rounds, k]: what the coefficients of `FamilyCost` multiply, in the order of `family_cost`."""
    one = np.ones_like(f.num_seqs)
    if family == "decode":
        return np.stack([one, np.log2(f.padded_seqs)], axis=1)
    return np.stack([one, f.num_seqs, f.padded_tokens, f.chunk_keys, f.single_keys], axis=1)


def family_cost(x: Floats, family: Family) -> FamilyCost:
    if family == "decode":
        return FamilyCost(intercept_s=float(x[0]), per_doubling_s=float(x[1]))
    return FamilyCost(
        intercept_s=float(x[0]),
        per_seq_s=float(x[1]),
        per_token_s=float(x[2]),
        per_chunk_key_s=float(x[3]),
        per_single_key_s=float(x[4]),
    )


def fit_device(model: ModelShape, decode: Cells, prefill: Cells, ceilings: tuple[float, float] | None) -> DeviceFit:
    """`ceilings`: (FLOP/s, bytes/s) that the device was measured to reach elsewhere, where that is known."""
    works = {"decode": work(model, decode.features, "decode"), "prefill": work(model, prefill.features, "prefill")}
    rates = [(float(np.max(w[0] / c.seconds)), float(np.max(w[1] / c.seconds)))
             for w, c in ((works["decode"], decode), (works["prefill"], prefill))]  # fmt: skip
    # A ceiling is at least what some round reached, and at most the device's own; unknown ones are sought within 30 times.
    flops_grid = _grid(max(r[0] for r in rates), ceilings[0] if ceilings else None)
    bytes_grid = _grid(max(r[1] for r in rates), ceilings[1] if ceilings else None)

    def best(family: Family, cells: Cells, bytes_per_s: float, flops_per_s: float) -> tuple[float, Floats]:
        floor = np.asarray(roofline(works[family], bytes_per_s, flops_per_s))
        return robust(columns_of(cells.features, family), cells.seconds - floor, cells.seconds, cells.weight)

    def seek(
        family: Family, cells: Cells, which: int, grid: list[float], loss_at: Callable[[float], float]
    ) -> tuple[float, bool]:
        """(ceiling, whether the rounds tell it). Where they do not, the fit inside their range is no guide beyond it."""
        told = bool((works[family][which] / grid[0] / cells.seconds).max() >= NEAR)
        if ceilings is not None and not told:
            return grid[0], False
        return _first_good([(loss_at(value), value) for value in grid]), told

    # Decodes tell the memory's ceiling: their operations hardly count. Rounds with prefill tell the other.
    bytes_per_s, bytes_told = seek(
        "decode", decode, 1, bytes_grid, lambda value: best("decode", decode, value, flops_grid[0])[0]
    )
    flops_per_s, flops_told = seek(
        "prefill", prefill, 0, flops_grid, lambda value: best("prefill", prefill, bytes_per_s, value)[0]
    )
    return DeviceFit(
        bytes_per_s=bytes_per_s,
        flops_per_s=flops_per_s,
        bytes_identified=bytes_told,
        flops_identified=flops_told,
        decode=family_cost(best("decode", decode, bytes_per_s, flops_per_s)[1], "decode"),
        prefill=family_cost(best("prefill", prefill, bytes_per_s, flops_per_s)[1], "prefill"),
    )


def _grid(reached: float, ceiling: float | None) -> list[float]:
    """From the ceiling down to what was reached."""
    top = reached * 30 if ceiling is None else max(ceiling, reached)
    return [float(v) for v in np.geomspace(top, reached, GRID)]


def _first_good(found: list[tuple[float, float]]) -> float:
    """The value nearest the device's ceiling whose loss is as good as the best one's, within GAIN."""
    least = min(loss for loss, _ in found)
    return next(value for loss, value in found if loss <= least * (1 + GAIN) + 1e-12)


def robust(
    columns: Floats, target: Floats, scale: Floats, weight: Floats, huber: float = HUBER
) -> tuple[float, Floats]:
    """-> (Huber loss of the residuals relative to `scale`, coefficients >= 0 [k]), by reweighted least squares."""
    a, b = columns / scale[:, None], target / scale
    w, x = weight.copy(), np.zeros(columns.shape[1])
    for _ in range(30):
        root = np.sqrt(w)
        new = nonnegative(a * root[:, None], b * root)
        residual = np.abs(a @ new - b)
        w = weight * np.minimum(1.0, huber / np.maximum(residual, 1e-12))
        if np.allclose(new, x, rtol=1e-5, atol=0):
            break
        x = new
    residual = np.abs(a @ new - b)
    loss = np.where(residual <= huber, residual**2 / 2, huber * (residual - huber / 2))
    return float(weight @ loss), new


def nonnegative(a: Floats, b: Floats) -> Floats:
    """argmin |a x - b| with x >= 0: the best of all subsets of columns, of which there are few."""
    k, best, best_loss = a.shape[1], np.zeros(a.shape[1]), float(b @ b)
    size = np.linalg.norm(a, axis=0)
    size[size == 0] = 1.0
    scaled = a / size
    gram, right = scaled.T @ scaled, scaled.T @ b
    for subset in range(1, 1 << k):
        chosen = [i for i in range(k) if subset >> i & 1]
        part, *_ = np.linalg.lstsq(gram[np.ix_(chosen, chosen)], right[chosen], rcond=1e-10)
        if (part < 0).any():
            continue
        loss = float(b @ b - 2 * part @ right[chosen] + part @ gram[np.ix_(chosen, chosen)] @ part)
        if loss < best_loss - 1e-15:
            best, best_loss = np.zeros(k), loss
            best[chosen] = part
    out: Floats = best / size
    return out


def fit_host(times: HostTimes, overlapped: bool) -> HostCost:
    """Host time by sequences and prompt tokens, and the gaps of the device.

    Not overlapped: a step holds host and device time one after the other, and what is left over is `wake_s`.
    """
    f = times.features
    one, has_prefill = np.ones_like(f.num_seqs), np.asarray(f.has_prefill)
    weight = np.ones_like(f.num_seqs)
    if 0 < (share := has_prefill.mean()) < 1:  # both families count alike, however many rounds they have
        weight = np.where(has_prefill, 0.5 / share, 0.5 / (1 - share))
    weight /= weight.sum()

    def fit(columns: list[Floats], seconds: Floats) -> Floats:
        # Relative to the family, not to the round: host times have a long tail upwards, and errors relative to each would
        # favour its low side.
        scale = np.ones_like(seconds)
        for rows in (has_prefill, ~has_prefill):
            if rows.any():
                scale[rows] = max(float(np.median(seconds[rows])), 1e-6)
        return robust(np.stack(columns, axis=1), seconds, scale, weight, HOST_HUBER)[1]

    launch = fit([one, f.num_seqs, f.prefill_tokens, f.known_tokens], times.launch_s)
    after = fit([one, f.num_seqs], times.after_s)
    base = HostCost(
        launch_intercept_s=float(launch[0]),
        launch_per_seq_s=float(launch[1]),
        launch_per_token_s=float(launch[2]),
        launch_per_known_token_s=float(launch[3]),
        after_intercept_s=float(after[0]),
        after_per_seq_s=float(after[1]),
    )

    def middle(values: Floats) -> float:
        return max(float(np.median(values)), 0.0) if len(values) else 0.0

    if not overlapped:
        return replace(base, wake_s=middle(times.step_s - times.device_s - times.launch_s - times.after_s))
    follows, beyond = ~times.idle_start & ~has_prefill, times.step_s - times.device_s
    return replace(
        base,
        gap_s=middle(beyond[follows]),
        # Against the formula: what it misses of the host's time after idling belongs here.
        wake_s=middle((beyond - np.asarray(launch_time(base, f)))[times.idle_start]),
        arrive_s=middle(times.arrive_s[~np.isnan(times.arrive_s)]),
    )
