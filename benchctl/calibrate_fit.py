"""The fit: coefficients of `engines.simulated.cost` from measured rounds, robust to rounds that something disturbed.

Rounds alike in every feature are one cell, and a cell counts by its median: a hiccup moves nothing, and ten thousand like
decodes weigh no more than their kind. The relative error is minimised under a loss that grows linearly for outliers, all
coefficients at or above what the device's ceilings allow. Where rounds are few, weak terms hold the curves: towards a
straight line, and attention towards the memory's ceiling. The solver is scipy's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from engines.simulated.cost import decode_rest, heat_time, issue_time, launch_time, prefill_rest, products
from engines.simulated.features import Features
from engines.simulated.profile import Curve, DecodeCost, Graphs, HostCost, ModelShape, PrefillCost

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

HUBER = 0.03  # relative residuals beyond this count linearly, not squared
HOST_HUBER = 0.5
HOLD = 0.01  # weight of a term that holds a curve, against a cell's own
DECODE_AT = (1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256, 384, 512)  # sequences
WALK_AT = (1, 2, 4, 8, 16, 32, 64, 112, 128, 512)
PREFILL_AT = (16, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384)  # tokens
HEAT_AT = (
    128,
    256,
    512,
    1024,
    2048,
    4096,
)  # tokens; none at the ends: memory limits few, and many are hot in a run too
SOUGHT = 1024
NO_GRAPHS = Graphs()
WALK_KEYS = 30.0  # one walk along keys takes about so much longer than its share of all keys together
FASTER = 0.8  # a kernel may be this much of the time its ceiling gives: what lies in a cache is no memory's


@dataclass(frozen=True, slots=True)
class Cells:
    """Groups of like rounds of one family: features and the median device time, [num_cells]."""

    features: Features
    seconds: Floats
    weight: Floats  # sums to 1
    repeated: Bools  # designed rounds, each several times on end: the device is hotter than in a run


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


def take(f: Features, rows: npt.NDArray[np.bool_] | npt.NDArray[np.int64]) -> Features:
    return Features(*(np.asarray(getattr(f, name))[rows] for name in Features.__slots__))


def concat(parts: list[Features]) -> Features:
    return Features(*(np.concatenate([getattr(p, name) for p in parts]) for name in Features.__slots__))


def cells_of(f: Features, seconds: Floats, repeated: bool = False) -> Cells:
    """Rounds of one family; sizes that grow are grouped in steps of a few percent."""
    steps = [np.round(np.log1p(np.asarray(getattr(f, name), dtype=np.float64)) / 0.03)
             for name in ("context_tokens", "context_pairs", "older_keys", "block_keys", "chunk_keys", "single_context", "single_keys")]  # fmt: skip
    keys = np.stack([f.padded_tokens, f.num_seqs, f.num_tokens, *steps], axis=1)
    _, cell, counts = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
    cell = cell.reshape(-1)
    order = np.lexsort((seconds, cell))
    first = np.concatenate([[0], np.cumsum(counts)[:-1]])
    middle = order[first + (counts - 1) // 2]  # the round of median time stands for its cell, with its own features
    # Root of the count: a cell of many rounds is better known, but shall not hide the others.
    weight = np.sqrt(counts.astype(np.float64))
    return Cells(take(f, middle), seconds[middle], weight / weight.sum(), np.full(len(middle), repeated))


def joined(parts: list[Cells]) -> Cells:
    """Cells of several sources, each source of equal weight."""
    weight = np.concatenate([part.weight for part in parts]) / len(parts)
    return Cells(
        concat([part.features for part in parts]),
        np.concatenate([part.seconds for part in parts]),
        weight,
        np.concatenate([part.repeated for part in parts]),
    )


@dataclass(frozen=True, slots=True)
class Rates:
    """Ceilings, bytes and FLOP a second."""

    bytes_per_s: float
    flops_per_s: float


def fit_decode(model: ModelShape, cells: Cells, rates: Rates) -> tuple[DecodeCost, float]:
    """The coefficients of rounds of decodes alone, and their loss."""
    f, key = cells.features, model.kv_bytes_per_token / rates.bytes_per_s
    n, w = len(DECODE_AT), len(WALK_AT)
    least = products(model, f.padded_tokens, f.padded_seqs, rates.bytes_per_s, rates.flops_per_s)
    at = np.array(DECODE_AT, dtype=np.float64)
    scale = typical(model, at, rates, cells.seconds)
    step = np.log2(at)
    # As in the engine's kernel: the keys of few sequences are shared out over up to 16 programs, those of 64 are not.
    walks = np.clip(WALK_AT, 4, 64) / 64 * WALK_KEYS

    def unpack(x: Floats) -> DecodeCost:
        return DecodeCost(
            rest=curve(DECODE_AT, x[:n] * scale),
            per_key=curve(DECODE_AT, x[n : 2 * n] * key),
            per_longest_key=curve(WALK_AT, x[2 * n : 2 * n + w] * walks * key),
            unhidden=float(x[-1]),
        )

    def hold(x: Floats) -> Floats:
        rest, drawn, walk = x[:n] * scale, x[n : 2 * n], x[2 * n : 2 * n + w]
        # Straight over doublings: what a stack of kernels costs grows slowly until its bytes take over.
        bends = np.diff(np.diff(rest) / np.diff(step)) / scale[2:]
        return np.concatenate(
            [3 * bends, np.diff(np.log(drawn)), 0.3 * np.log(drawn), np.diff(np.log1p(walk)), 0.1 * np.log1p(walk)]
        )

    x0 = np.concatenate([np.full(n, 0.3), np.full(n, 1.2), np.full(w, 0.5), [0.3]])
    low = np.concatenate([np.zeros(n), np.full(n, FASTER), np.zeros(w), [0.0]])
    high = np.concatenate([np.full(n + n + w, np.inf), [1.0]])
    x, loss = solve(lambda x: least + decode_rest(unpack(x), f), hold, cells, x0, low, high)
    return unpack(x), loss


def fit_prefill(
    model: ModelShape, cells: Cells, rates: Rates, tokens_per_tile: int, host: HostCost | None = None
) -> tuple[PrefillCost, float]:
    """The coefficients of rounds that feed a prompt, and their loss. `host` tells how long launching without a graph takes."""
    f, n = cells.features, len(PREFILL_AT)
    heats = len(HEAT_AT) - 2
    # Only where the same sizes ran in a run can the two be told apart.
    both = bool(cells.repeated.any() and not cells.repeated.all())
    issue: Floats = issue_time(host, f) if host else np.zeros(len(cells.seconds))
    least = products(model, f.padded_tokens, f.padded_seqs, rates.bytes_per_s, rates.flops_per_s)
    at = np.array(PREFILL_AT, dtype=np.float64)
    scale = typical(model, at, rates, cells.seconds)
    key = model.kv_bytes_per_token / rates.bytes_per_s
    tile_key = 4.0 * model.num_layers * model.num_heads * model.head_dim * tokens_per_tile / rates.flops_per_s
    units = np.array([1e-5, 64 * tile_key, tile_key, tile_key, tile_key, key, key, key])

    def unpack(x: Floats) -> PrefillCost:
        seq, tile, own, older, block, chunk_key, single, longest = (x[n : n + 8] * units).tolist()
        return PrefillCost(
            rest=curve(PREFILL_AT, x[:n] * scale),
            per_seq_s=seq,
            per_tile_s=tile,
            per_own_key_s=own,
            per_older_key_s=older,
            per_block_key_s=block,
            per_chunk_key_s=chunk_key,
            per_key_s=single,
            per_longest_key_s=longest,
            unhidden_chunk=float(x[n + 8]),
            unhidden_single=float(x[n + 9]),
            heat=curve(HEAT_AT, both * np.concatenate([[0.0], x[n + 10 :], [0.0]])),
        )

    def predict(x: Floats) -> Floats:
        cost = unpack(x)
        seconds: Floats = np.maximum(least + prefill_rest(cost, f) + cells.repeated * heat_time(cost, least, f), issue)
        return seconds

    def hold(x: Floats) -> Floats:
        slope = np.diff(x[:n] * scale) / np.diff(at)
        # Straight over tokens: products of many rows miss their ceiling by a constant share.
        bends = np.diff(slope) * at[2:] / scale[2:]
        seq, tile, own, older, block, chunk_key, single, longest = x[n : n + 8]
        alike = np.log([own, older / own, block / own, single])
        return np.concatenate([bends, 0.3 * alike, 0.1 * np.log1p([seq, tile, chunk_key, longest]), x[n + 10 :]])

    x0 = np.concatenate([np.full(n, 0.3), [0.1, 0.1, 2.0, 2.0, 2.0, 0.5, 1.2, 0.5, 0.3, 0.3], np.full(heats, 0.01)])
    low = np.concatenate([np.zeros(n), [0.0, 0.0, FASTER, FASTER, FASTER, 0.0, FASTER, 0.0, 0.0, 0.0], np.zeros(heats)])
    high = np.concatenate([np.full(n + 8, np.inf), [1.0, 1.0], np.full(heats, 0.5)])
    x, loss = solve(predict, hold, cells, x0, low, high)
    return unpack(x), loss


def typical(model: ModelShape, rows: Floats, rates: Rates, seconds: Floats) -> Floats:
    """Seconds of a round of so many rows, roughly: units in which coefficients are of one size."""
    least: Floats = products(model, rows, np.minimum(rows, 256.0), rates.bytes_per_s, rates.flops_per_s)
    return np.maximum(least, float(np.min(seconds)) / 2)


def solve(
    predict: Callable[[Floats], Floats],
    hold: Callable[[Floats], Floats],
    cells: Cells,
    x0: Floats,
    low: Floats,
    high: Floats,
) -> tuple[Floats, float]:
    """argmin of the loss of relative residuals, weighted by cell, plus the weak terms that hold the curves; and that loss."""
    from scipy.optimize import least_squares

    root = np.sqrt(cells.weight * len(cells.weight))

    def residuals(x: Floats) -> Floats:
        relative = root * (predict(x) / cells.seconds - 1.0)
        return np.concatenate([relative, HOLD * hold(x)])

    found = least_squares(
        residuals, np.clip(x0, low, high), bounds=(low, high), loss="soft_l1", f_scale=HUBER, x_scale=1.0, max_nfev=300
    )
    x: Floats = found.x
    return x, float(found.cost)


def search(reached: float, loss_at: Callable[[float], float]) -> float:
    """The ceiling of a device that nobody measured: at least what a round reached, at most SOUGHT times that.

    The lowest whose loss is as good as the best one's, nearly: where rounds do not tell, what was seen is the better guess.
    """
    grid = [reached * 2.0**k for k in range(SOUGHT.bit_length())]
    losses = [loss_at(value) for value in grid]
    return next(value for value, loss in zip(grid, losses, strict=True) if loss <= min(losses) * 1.02)


def curve(at: tuple[int, ...], value: Floats) -> Curve:
    return Curve(at=tuple(float(a) for a in at), value=tuple(float(v) for v in value))


def robust(
    columns: Floats, target: Floats, scale: Floats, weight: Floats, huber: float = HOST_HUBER
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
    """argmin |a x - b| with x >= 0; columns may differ in size by many powers of ten."""
    from scipy.optimize import nnls

    size = np.linalg.norm(a, axis=0)
    size[size == 0] = 1.0
    found: Floats = nnls(a / size, b)[0] / size
    return found


def fit_host(times: HostTimes, overlapped: bool, graphs: Graphs = NO_GRAPHS, issue_s: float = 0.0) -> HostCost:
    """Host time by sequences and prompt tokens, and the gaps of the device.

    `issue_s`: of launching the kernels of a round without a graph.

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

    launch = fit([one, f.num_seqs, f.prefill_tokens, f.known_tokens, has_prefill.astype(np.float64)], times.launch_s)
    after = fit([one, f.num_seqs], times.after_s)
    base = HostCost(
        launch_intercept_s=float(launch[0]),
        launch_per_seq_s=float(launch[1]),
        launch_per_token_s=float(launch[2]),
        launch_per_known_token_s=float(launch[3]),
        launch_prefill_s=float(launch[4]),
        after_intercept_s=float(after[0]),
        after_per_seq_s=float(after[1]),
    )

    def middle(values: Floats) -> float:
        return max(float(np.median(values)), 0.0) if len(values) else 0.0

    if graphs.prefill:
        base = replace(
            base,
            issue_s=issue_s,
            issue_beyond_tokens=float(graphs.prefill[-1]),
            issue_beyond_seqs=float(max(graphs.prefill_max_seqs, graphs.prefill_most_seqs)),
        )
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
