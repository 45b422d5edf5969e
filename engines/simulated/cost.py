"""The formula: how long a round takes on the device and on the host.

Physical first. A kernel cannot be faster than its bytes through memory, nor than its operations through the arithmetic units:
within a kernel the two overlap, so the larger counts; kernels follow each other, so they add.

    decodes      products(padded sequences) + rest(padded sequences) + attention over single tokens
    with prefill products(padded tokens) + rest(padded tokens) + per_seq * sequences
                 + attention over single tokens + attention over chunks
    products     = max(bytes of the layers / B, operations / F) + max(bytes of the head / B, operations / F), where what follows the
                   last layer's attention is computed for the head's rows alone
    single tokens = overlap(per_key * all their keys, per_longest_key * keys of the longest)
    chunks        = overlap(per_tile * tiles + per_key * keys of all tiles, per_chunk_key * keys of the longest)
    overlap(a, b) = max(a, b) + unhidden * min(a, b)
    without a graph: at least issue, the host's time to launch the kernels

all times the factor of the bucket (a padded size; 1 where none was measured). B and F are the device's ceilings. Attention is
shared out over many programs, and ends with the last one: either all together have to draw the memory's bandwidth, or one
walks along its keys while the others are done. The coefficients of decodes are curves over their number, since a kernel with
few sequences splits their keys and with many does not.

Every function takes one round or many (`features.Values`), of one family. No torch, no clock, no files.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

import numpy as np

from engines.simulated.features import Features, Values
from engines.simulated.profile import MARGIN, Curve, DecodeCost, Family, Fit, HostCost, ModelShape, PrefillCost

NEXT_TO_NONE = 64  # so few tokens or keys cost what one costs
Bounds = Mapping[str, tuple[float, float]]  # feature -> least, greatest


def work(model: ModelShape, f: Features, family: Family) -> tuple[Values, Values]:
    """(operations, bytes) of a round, padding included in the operations.

    Operations: two a matrix parameter and token, of the head and what follows the last attention for each row of it, four a query head, dimension and (query,
    key) pair. Bytes: every weight once, the embedding by row, K and V of each sequence once and what is written of them.
    """
    flops = 2.0 * (model.matrix_parameters - model.last_parameters) * f.padded_tokens
    flops = flops + 2.0 * (model.last_parameters + model.head_parameters) * f.padded_seqs
    flops = flops + 4.0 * model.num_layers * model.num_heads * model.head_dim * f.context_pairs
    num_bytes = (
        float(model.weight_bytes)
        + model.bytes_per_value * model.hidden_size * f.num_tokens
        + model.kv_bytes_per_token * (f.context_tokens + f.num_tokens)
    )
    return flops, num_bytes


def larger(a: Values, b: Values) -> Values:
    """The maximum, of numbers or column by column."""
    return b + (a - b) * (a > b)


def overlap(a: Values, b: Values, unhidden: float) -> Values:
    """The larger, and a share of the smaller."""
    return larger(a, b) + unhidden * (a + b - larger(a, b))


def products(model: ModelShape, rows: Values, head_rows: Values, bytes_per_s: float, flops_per_s: float) -> Values:
    """The least time of the matrix products: `rows` through the layers, `head_rows` through the last one's end and the head."""
    size, layers, head = model.bytes_per_value, float(model.matrix_parameters), float(model.head_parameters)
    last = float(model.last_parameters)
    operations = 2.0 * (layers - last) * rows + 2.0 * last * head_rows
    return larger(size * layers / bytes_per_s + 0.0 * rows, operations / flops_per_s) + larger(
        size * head / bytes_per_s + 0.0 * rows, 2.0 * head / flops_per_s * head_rows
    )


def on_curve(curve: Curve, x: Values, *, grows: bool = False) -> Values:
    """Between points along a straight line; beyond the ends level, but with `grows` on along the last line."""
    at, value = curve.at, curve.value
    if len(at) == 1:
        return value[0] + 0.0 * x
    slope = max((value[-1] - value[-2]) / (at[-1] - at[-2]), 0.0) if grows else 0.0
    if isinstance(x, np.ndarray):
        return np.interp(x, at, value) + slope * np.maximum(x - at[-1], 0.0)
    if x <= at[0]:
        return value[0]
    if x >= at[-1]:
        return value[-1] + slope * (x - at[-1])
    i = bisect_right(at, x)
    return value[i - 1] + (value[i] - value[i - 1]) * (x - at[i - 1]) / (at[i] - at[i - 1])


def decode_rest(cost: DecodeCost, f: Features) -> Values:
    """Seconds beyond the products, of a round of decodes alone."""
    n = f.padded_seqs
    drawn = on_curve(cost.per_key, n) * f.single_context
    walked = on_curve(cost.per_longest_key, n) * f.single_keys
    return on_curve(cost.rest, n, grows=True) + overlap(drawn, walked, cost.unhidden)


def prefill_rest(cost: PrefillCost, f: Features) -> Values:
    """Seconds beyond the products, of a round that feeds a prompt."""
    chunks = overlap(
        cost.per_tile_s * f.chunk_tiles
        + cost.per_own_key_s * f.own_keys
        + cost.per_older_key_s * f.older_keys
        + cost.per_block_key_s * f.block_keys,
        cost.per_chunk_key_s * f.chunk_keys,
        cost.unhidden_chunk,
    )
    singles = overlap(cost.per_key_s * f.single_context, cost.per_longest_key_s * f.single_keys, cost.unhidden_single)
    return on_curve(cost.rest, f.padded_tokens, grows=True) + cost.per_seq_s * f.num_seqs + chunks + singles


def heat_time(cost: PrefillCost, least: Values, f: Features) -> Values:
    """Seconds that a designed round, one of several alike on end, takes longer than in a run. `least`: its products."""
    return on_curve(cost.heat, f.padded_tokens) * (least + on_curve(cost.rest, f.padded_tokens, grows=True))


def device_time(model: ModelShape, fit: Fit, f: Features, family: Family) -> Values:
    """Device seconds before the factor of a bucket."""
    least = products(model, f.padded_tokens, f.padded_seqs, fit.bytes_per_s, fit.flops_per_s)
    if family == "decode":
        return least + decode_rest(fit.decode, f)
    return larger(least + prefill_rest(fit.prefill, f), issue_time(fit.host, f))


def issue_time(host: HostCost, f: Features) -> Values:
    """Host seconds of launching a round's kernels one by one; 0 where a graph is launched, or nobody could tell the two apart."""
    beyond = (f.padded_tokens > host.issue_beyond_tokens) | (f.num_seqs > host.issue_beyond_seqs)
    return host.issue_s * (beyond & f.has_prefill)


def launch_time(host: HostCost, f: Features) -> Values:
    """Host seconds before the device can start: schedule, prepare."""
    return (
        host.launch_intercept_s
        + host.launch_per_seq_s * f.num_seqs
        + host.launch_per_token_s * f.prefill_tokens
        + host.launch_per_known_token_s * f.known_tokens
        + host.launch_prefill_s * f.has_prefill
    )


def after_time(host: HostCost, f: Features) -> Values:
    """Host seconds after the device could start: launching the kernels that have no graph, update, record."""
    return host.after_intercept_s + host.after_per_seq_s * f.num_seqs + issue_time(host, f)


def bucket_factors(fit: Fit) -> dict[tuple[Family, int], float]:
    return {(bucket.family, bucket.padded_tokens): bucket.factor for bucket in fit.buckets}


def bounds_of(fit: Fit, family: Family) -> Bounds:
    """The fitted ranges, wider by MARGIN at both ends; tokens and keys down to none where as few as NEXT_TO_NONE were fitted."""
    return {
        r.feature: (
            0.0 if r.feature != "num_seqs" and r.least <= NEXT_TO_NONE else r.least / MARGIN,
            r.greatest * MARGIN,
        )
        for r in fit.ranges
        if r.family == family
    }
