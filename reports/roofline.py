"""How near rounds came to what their device can do: FLOPs and bytes of each round against its device time.

Ceilings are figures measured on such a device, not those of a data sheet; a device without them has no roof.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from reports.run import Run


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What was measured on a device, and how. `own`: on the device of the run, else on another of its kind."""

    flops_per_s: float
    bytes_per_s: float
    source: str
    own: bool = False


# Name of the device, as its driver gives it -> its ceilings.
CEILINGS: dict[str, Ceilings] = {
    "NVIDIA H200": Ceilings(
        795e12, 4.26e12, "bf16 matrix product of 8192 × 8192 random values; device-to-device copy of 4 GiB, read and written"
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Use:
    """Rounds of one kind. Shares are of the ceilings and weighted by device time; None where the device has none.

    `bound`: share of the device time in rounds whose FLOPs per byte lie below the ridge, where memory limits them.
    """

    kind: str
    rounds: int
    device_s: float
    tflops: float
    terabytes_per_s: float
    flops_share: float | None
    bytes_share: float | None
    bound: float | None


def ceilings_of(run: Run) -> Ceilings | None:
    """What was measured on the run's own device, if it was; else what is known of such a device."""
    return measured(run.manifest) or known(run)


def measured(manifest: Mapping[str, Any]) -> Ceilings | None:
    """From `benchctl doctor --measure`: the copy, and the fastest product in the run's dtype."""
    found, dtype = manifest.get("ceilings"), manifest.get("dtype")
    if not isinstance(found, dict):
        return None
    try:
        products = {
            int(name.rpartition("_")[2]): float(entry["value"])
            for name, entry in found.items()
            if name.startswith(f"gemm_{dtype}_")
        }
        best = max(products, key=lambda n: products[n])
        copy = float(found["copy"]["value"])
        source = (
            f"{dtype} matrix product of {best} × {best} random values and a copy of {found['copy']['size_bytes'] / 2**30:.3g} GiB, read "
            f"and written, on this device ({found.get('device')}, {found.get('measured')})"
        )
    except (ValueError, KeyError, TypeError):  # no product in this dtype, or a file of someone else's
        return None
    return Ceilings(products[best], copy, source, own=True) if products[best] > 0 and copy > 0 else None


def known(run: Run) -> Ceilings | None:
    hardware = run.manifest.get("hardware")
    gpu = hardware.get("gpu") if isinstance(hardware, dict) else None
    return CEILINGS.get(str(gpu.get("name"))) if isinstance(gpu, dict) else None


def device_use(run: Run) -> list[Use]:
    """By kind of round, over the rounds that have device time, FLOPs and bytes; empty where none has."""
    roof = ceilings_of(run)
    ridge = roof.flops_per_s / roof.bytes_per_s if roof else 0.0
    frame = (
        run.scan("rounds")
        .filter((pl.col("device_s") > 0) & (pl.col("flops") > 0) & (pl.col("bytes") > 0))
        .group_by("kind")
        .agg(
            pl.len().alias("rounds"), pl.col("device_s", "flops", "bytes").sum(),
            pl.col("device_s").filter(pl.col("flops") < ridge * pl.col("bytes")).sum().alias("below"),
        )
        .sort("device_s", descending=True).collect()
    )  # fmt: skip
    return [
        Use(
            kind=row["kind"],
            rounds=row["rounds"],
            device_s=row["device_s"],
            tflops=row["flops"] / row["device_s"] / 1e12,
            terabytes_per_s=row["bytes"] / row["device_s"] / 1e12,
            flops_share=row["flops"] / row["device_s"] / roof.flops_per_s if roof else None,
            bytes_share=row["bytes"] / row["device_s"] / roof.bytes_per_s if roof else None,
            bound=row["below"] / row["device_s"] if roof else None,
        )
        for row in frame.iter_rows(named=True)
    ]
