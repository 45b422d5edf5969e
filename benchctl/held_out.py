"""What a profile is held against: a measured run's rounds, and its figures end to end, from its records or a small copy of them.

A copy keeps what `validate` needs and no more: the manifest, a column for each feature and time of a round, and the figures.
It is a folder of its own kind (`held-out.json`), some hundred kilobytes where the records are megabytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from benchctl.calibrate_rounds import measured_rounds
from engines.simulated.features import Features
from reports.run import Run, open_runs
from reports.summary import summarize
from traces.errors import BenchctlError

FORMAT = 1
ABOUT, ROUNDS = "held-out.json", "rounds.parquet"
METRICS, PERCENTILES = ("ttft", "tpot", "itl", "e2el"), (50.0, 90.0, 99.0)
WHOLE = ("output_throughput", "duration")  # figures of the whole run
TICK_S = 1e-7  # times of a copy are whole multiples of it: finer than the device's own clock
# Of a manifest, what a comparison reads or a reader wants to know; the paths of the machine it ran on are neither.
KEPT = ("benchctl", "versions", "started", "status", "engine", "model", "dtype", "device", "attention_backend", "hardware", "scheduler",
        "place", "policy", "clock", "arrivals", "overlapped", "records", "config", "limits", "counts", "digest", "trace")  # fmt: skip

Figures = dict[
    tuple[str, float | None], float
]  # (metric, percentile) -> ms; (figure of the whole run, None) -> its own unit


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A measured run as `validate` reads it. Columns are [num_rounds], times in seconds."""

    path: str
    manifest: Mapping[str, Any]
    round: npt.NDArray[np.int64]
    kind: npt.NDArray[np.str_]
    features: Features
    device_s: npt.NDArray[np.float64]
    launch_s: npt.NDArray[np.float64]
    figures: Figures

    @property
    def scheduler(self) -> str:
        return str(self.manifest.get("scheduler") or self.manifest.get("policy") or "?")

    @property
    def trace(self) -> Mapping[str, Any]:
        return self.manifest.get("trace") or {}

    def given(self, name: str) -> Any:
        """The value of a setting; None where it was not given or does not apply."""
        entry = (self.manifest.get("config") or {}).get(name)
        return entry.get("value") if isinstance(entry, dict) else None

    @property
    def block_size(self) -> int:
        value = (self.manifest.get("limits") or {}).get("block_size") or self.given("block_size")
        return int(value["value"] if isinstance(value, dict) else value or 1)


def held_out(run: Run) -> HeldOut:
    """Raises BenchctlError where the run has no measured rounds. Of one whose batches were taken away, only the figures are known."""
    if run.engine == "torch" and run.has("batches") and not run.read("batches").height and run.read("rounds").height:
        none = np.zeros(0)
        bare = Features(
            *(np.zeros(0, dtype=np.bool_ if name == "has_prefill" else np.float64) for name in Features.__slots__)
        )
        return HeldOut(
            run.shown, run.manifest, none.astype(np.int64), none.astype(np.str_), bare, none, none, figures_of(run)
        )
    m = measured_rounds(run)
    return HeldOut(run.shown, run.manifest, m.round, m.kind, m.features, m.device_s, m.launch_s, figures_of(run))


def figures_of(run: Run) -> Figures:
    summary: Mapping[str, Any] = summarize(run, percentile_metrics=METRICS, percentiles=PERCENTILES)
    out: Figures = {}
    for metric in METRICS:
        for p in PERCENTILES:
            value = summary.get(f"p{p:g}_{metric}_ms")
            if value is not None:
                out[metric, p] = float(value)
    for name in WHOLE:
        if summary.get(name) is not None:
            out[name, None] = float(summary[name])
    return out


def open_held_out(paths: list[str]) -> list[HeldOut]:
    """Runs, folders of runs, and copies or folders of copies. Raises BenchctlError."""
    out: list[HeldOut] = []
    for path in paths:
        inner = sorted(entry.parent for entry in Path(path).rglob(ABOUT)) if Path(path).is_dir() else []
        out += [read_copy(folder) for folder in inner] if inner else [held_out(run) for run in open_runs([path])]
    return out


def copy_names(held: Sequence[HeldOut]) -> list[str]:
    """MODEL-TRACE-SCHEDULER; -2, -3 ... behind it for further runs of the same."""
    seen: dict[str, int] = {}
    out = []
    for one in held:
        name = f"{Path(str(one.manifest.get('model'))).name}-{one.trace.get('name')}-{one.scheduler}"
        seen[name] = seen.get(name, 0) + 1
        out.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return out


def write_copy(held: HeldOut, folder: Path) -> None:
    """Raises BenchctlError where it cannot be written."""
    manifest = {key: held.manifest[key] for key in KEPT if key in held.manifest}
    manifest["trace"] = {key: value for key, value in held.trace.items() if key != "path"}
    config = {k: v for k, v in (manifest.get("config") or {}).items() if k != "trace" and k != "out"}
    about = {
        "benchctl_held_out": FORMAT,
        "manifest": manifest | {"config": config},
        "figures": [[metric, p, round(value, 4)] for (metric, p), value in held.figures.items()],
    }
    columns: dict[str, Any] = {
        "round": held.round,
        "kind": held.kind,
        "device": np.round(held.device_s / TICK_S).astype(np.int32),
        "launch": np.round(held.launch_s / TICK_S / 10).astype(np.int32),  # the host's clock scatters by far more
    }
    for name in Features.__slots__:
        values = np.asarray(getattr(held.features, name))
        columns[name] = values if values.dtype == np.bool_ else values.astype(np.int64)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ABOUT).write_text(json.dumps(about, indent=None, separators=(",", ":")) + "\n")
        pl.DataFrame(columns).with_columns(pl.col("kind").cast(pl.Categorical)).write_parquet(
            folder / ROUNDS, compression="zstd", compression_level=19, statistics=False
        )
    except OSError as error:
        raise BenchctlError(f"{folder} cannot be written: {error.strerror}", fix="name another folder") from None


def read_copy(folder: Path) -> HeldOut:
    """Raises BenchctlError where the folder holds no such copy, or a damaged one."""
    try:
        about = json.loads((folder / ABOUT).read_bytes())
        if about.get("benchctl_held_out") != FORMAT:
            raise BenchctlError(
                f"a copy of format {about.get('benchctl_held_out')!r}; this reads {FORMAT}", where=str(folder)
            )
        frame = pl.read_parquet(folder / ROUNDS)
        features = Features(
            *(
                frame[name].to_numpy() if name == "has_prefill" else frame[name].cast(pl.Float64).to_numpy()
                for name in Features.__slots__
            )
        )
        return HeldOut(
            path=str(folder),
            manifest=about["manifest"],
            round=frame["round"].cast(pl.Int64).to_numpy(),
            kind=frame["kind"].cast(pl.String).to_numpy().astype(np.str_),
            features=features,
            device_s=frame["device"].cast(pl.Float64).to_numpy() * TICK_S,
            launch_s=frame["launch"].cast(pl.Float64).to_numpy() * TICK_S * 10,
            figures={(metric, p): float(value) for metric, p, value in about["figures"]},
        )
    except (OSError, ValueError, KeyError, TypeError, pl.exceptions.PolarsError) as error:
        raise BenchctlError(
            f"the copy is damaged: {str(error).splitlines()[0]}",
            where=str(folder),
            fix="make it anew: benchctl validate --copy",
        ) from None
