"""The formula: how long a round takes on the device and on the host.

Physical first. A round cannot be faster than its bytes through memory nor than its operations through the arithmetic units,
and the two overlap, so the larger of them counts:

    device_s = (max(bytes / bytes_per_s, flops / flops_per_s) + rest) * bucket factor
    rest of decodes     = intercept + per_doubling * log2(sequences)
    rest with prefill   = intercept + per_seq * sequences + per_token * tokens + per key of the two longest walks

The intercept is what a stack of kernels costs however small they are. More decodes share its latency until their bytes take
over, so they add by the doubling. With prefill, attention walks along the keys of the longest chunk and of the longest
sequence that feeds one token, and no further processor shortens a walk; rounds of decodes alone split their keys over many
programs. The factor of a bucket (a padded size) is 1 where none was measured.

Every function takes one round or many (`features.Values`), of one family. No torch, no clock, no files.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from engines.simulated.features import Features, Values
from engines.simulated.profile import MARGIN, Family, Fit, HostCost, ModelShape

Bounds = Mapping[str, tuple[float, float]]  # feature -> least, greatest


def work(model: ModelShape, f: Features, family: Family) -> tuple[Values, Values]:
    """(operations, bytes) of a round, padding included in the operations.

    Operations: two a matrix parameter and token, of the head for each yielding row, four a query head, dimension and (query,
    key) pair. Bytes: every weight once, the embedding by row, K and V of each sequence once and what is written of them.
    """
    rows = f.num_yields if family == "prefill" else f.padded_seqs
    flops = 2.0 * model.matrix_parameters * f.padded_tokens + 2.0 * model.head_parameters * rows
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


def roofline(work: tuple[Values, Values], bytes_per_s: float, flops_per_s: float) -> Values:
    """The least time in which (operations, bytes) can be done, in seconds."""
    flops, num_bytes = work
    return larger(num_bytes / bytes_per_s, flops / flops_per_s)


def beyond_roofline(fit: Fit, f: Features, family: Family) -> Values:
    """The fitted rest, in seconds, before the factor of a bucket."""
    if family == "decode":
        return fit.decode.intercept_s + fit.decode.per_doubling_s * np.log2(f.padded_seqs)
    p = fit.prefill
    return (
        p.intercept_s
        + p.per_seq_s * f.num_seqs
        + p.per_token_s * f.padded_tokens
        + p.per_chunk_key_s * f.chunk_keys
        + p.per_single_key_s * f.single_keys
    )


def device_time(model: ModelShape, fit: Fit, f: Features, family: Family) -> Values:
    """Device seconds before the factor of a bucket."""
    floor = roofline(work(model, f, family), fit.bytes_per_s, fit.flops_per_s)
    return floor + beyond_roofline(fit, f, family)


def launch_time(host: HostCost, f: Features) -> Values:
    """Host seconds before the device can start: schedule, prepare."""
    return (
        host.launch_intercept_s
        + host.launch_per_seq_s * f.num_seqs
        + host.launch_per_token_s * f.prefill_tokens
        + host.launch_per_known_token_s * f.known_tokens
    )


def after_time(host: HostCost, f: Features) -> Values:
    """Host seconds after the launch: update, record."""
    return host.after_intercept_s + host.after_per_seq_s * f.num_seqs


def bucket_factors(fit: Fit) -> dict[tuple[Family, int], float]:
    return {(bucket.family, bucket.padded_tokens): bucket.factor for bucket in fit.buckets}


def bounds_of(fit: Fit, family: Family) -> Bounds:
    """The fitted ranges, wider by MARGIN at both ends."""
    return {r.feature: (r.least / MARGIN, r.greatest * MARGIN) for r in fit.ranges if r.family == family}
