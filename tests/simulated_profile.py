"""A small profile whose every number is round, and runs recorded by it that pass for measured ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl

from benchctl.calibrate import predicted_device
from benchctl.calibrate_rounds import measured_rounds, shape_of
from engines.model.config import PRESETS
from engines.simulated.cost import launch_time
from engines.simulated.features import graph_sizes
from engines.simulated.profile import (
    Curve,
    DecodeCost,
    Fit,
    HostCost,
    ModelShape,
    PrefillCost,
    Profile,
    Range,
    Source,
)
from reports.run import open_run

MODEL: ModelShape = shape_of("tiny", PRESETS["tiny"], 4)
HOST = HostCost(launch_intercept_s=1e-4, launch_per_token_s=1e-6, after_intercept_s=5e-5, gap_s=1e-5, wake_s=2e-4)


def make_fit(block_size: int = 16) -> Fit:
    return Fit(
        block_size=block_size,
        bytes_per_s=1e12,
        flops_per_s=1e14,
        ceilings="round numbers",
        tile_tokens=16,
        decode=DecodeCost(
            rest=Curve(at=(1, 4, 512), value=(1e-3, 1.3e-3, 11.46e-3)),
            per_key=Curve(at=(1,), value=(1e-8,)),
            per_longest_key=Curve(at=(1,), value=(1e-7,)),
            unhidden=0.5,
        ),
        prefill=PrefillCost(
            rest=Curve(at=(0, 1000), value=(2e-3, 3e-3)),
            per_seq_s=0.0,
            per_tile_s=1e-6,
            per_own_key_s=1e-8,
            per_older_key_s=2e-8,
            per_block_key_s=3e-8,
            per_chunk_key_s=2e-6,
            per_key_s=1e-8,
            per_longest_key_s=5e-7,
            unhidden_chunk=0.0,
            unhidden_single=0.0,
        ),
        host=HOST,
        buckets=(),
        ranges=(
            Range(family="decode", feature="num_seqs", least=1, greatest=4),
            Range(family="prefill", feature="num_tokens", least=1, greatest=4000),
        ),
        residuals=(),
        sources=(
            Source(
                scheduler="vllm",
                trace="t",
                trace_sha256="0",
                digest=None,
                started=None,
                block_size=block_size,
                rounds=1,
            ),
        ),
    )


def make_profile(*block_sizes: int, overlapped: bool = True) -> Profile:
    return Profile(
        name="round-numbers",
        created="2026-01-01T00:00:00+00:00",
        device="Card X",
        driver="1.0",
        versions={},
        attention_backend="triton",
        overlapped=overlapped,
        kv_cache_tokens=65_536,
        max_num_seqs=512,
        max_num_batched_tokens=16_384,
        model=MODEL,
        graphs=graph_sizes(512, 16_384),
        fits=tuple(make_fit(size) for size in block_sizes or (16,)),
    )


def pass_for_measured(run: Path, profile: Profile, *, hiccups: int = 0) -> None:
    """Turn a simulated run's folder into what a card with exactly these times would have recorded.

    Every `hiccups`-th round took ten times as long, to be shrugged off by the fit.
    """
    manifest = json.loads((run / "manifest.json").read_text())
    manifest |= {"engine": "torch", "device": profile.device, "dtype": "float32", "attention_backend": "triton"}
    manifest["simulation"] = None
    (run / "manifest.json").write_text(json.dumps(manifest))
    for part in run.glob("rounds-*.parquet"):
        pl.read_parquet(part).with_columns(device_s=pl.lit(1.0)).write_parquet(part)
    measured = measured_rounds(open_run(run))
    device_s = predicted_device(profile.model, profile.nearest_fit(16), measured.features)
    launch_s = np.asarray(launch_time(profile.fits[0].host, measured.features))
    if hiccups:
        device_s[::hiccups] *= 10
    times = pl.DataFrame(
        {"round": measured.round, "device_s": device_s, "schedule_s": launch_s, "prepare_s": 0 * launch_s}
    )
    for part in run.glob("rounds-*.parquet"):
        frame = pl.read_parquet(part)
        changed = times.with_columns(
            pl.col("round").cast(frame.schema["round"]),
            update_s=pl.lit(profile.fits[0].host.after_intercept_s),
            record_s=pl.lit(0.0),
        )
        frame.update(changed, on="round").write_parquet(part)
