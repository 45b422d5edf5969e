"""Recorded rounds as the columns that a profile is fitted on and held against: features, times, kinds.

Only runs on a real device are taken: durations of `null` and `simulated` runs are formulas, not measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from engines.model.config import PRESETS, ModelConfig, read_config
from engines.simulated.features import Features, graph_sizes, head_rows, tile_keys, tile_tokens
from engines.simulated.profile import Graphs, ModelShape
from reports.run import Run
from traces.errors import BenchctlError

VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Measured:
    """Rounds that ran on a device, in order. Times in seconds, float64 [num_rounds]."""

    run: Run
    round: npt.NDArray[np.int64]
    kind: npt.NDArray[np.str_]
    features: Features
    device_s: npt.NDArray[np.float64]
    launch_s: npt.NDArray[np.float64]  # host: schedule + prepare
    after_s: npt.NDArray[np.float64]  # host: update + record
    step_s: npt.NDArray[np.float64]  # from the later of its start and the end before it, to its end
    arrive_s: npt.NDArray[np.float64]  # from the first arrival to the start, where the loop slept until then; else nan
    idle_start: npt.NDArray[np.bool_]  # it began when the round before had ended

    @property
    def has_prefill(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self.features.has_prefill)


def measured_rounds(run: Run) -> Measured:
    """Raises BenchctlError where the run has no measured rounds, or kept no batches."""
    where = str(run.path)
    if run.engine in ("null", "simulated"):
        raise BenchctlError(
            f"a run of the {run.engine} engine has no measured times", where=where, fix="give runs of --engine torch"
        )
    if not run.has("batches"):
        raise BenchctlError(
            f"the run kept --records {run.manifest.get('records')}: its batches are not known",
            where=where,
            fix="record it with --records compact or full",
        )
    model, graphs = model_shape(run), graphs_of(run)
    per_tile = tiles_of(model, limit(run, "block_size"))
    end = pl.col("start") + pl.col("num_tokens")
    several, tiles = pl.col("num_tokens") > 1, (pl.col("num_tokens") + per_tile - 1) // per_tile
    own = per_tile * (tiles * (tiles - 1) // 2) + pl.col("num_tokens")
    older_pairs = pl.col("num_tokens") * pl.col("start")
    pairs = older_pairs + pl.col("num_tokens") * (pl.col("num_tokens") + 1) // 2
    prefill = pl.col("phase") != "decode"
    batches = (
        run.scan("batches")
        .group_by("round")
        .agg(
            pl.len().alias("seqs"),
            prefill.any().alias("has_prefill"),
            pl.col("num_tokens").sum().alias("tokens"),
            pl.col("num_tokens").filter(prefill).sum().alias("fed_prefill"),
            pl.col("yields_token").sum().alias("yields"),
            end.sum().alias("context_tokens"),
            pairs.sum().alias("pairs"),
            pairs.filter(several).sum().alias("chunk_pairs"),
            older_pairs.filter(several).sum().alias("older_pairs"),
            tiles.filter(several).sum().alias("tiles"),
            own.filter(several).sum().alias("own"),
            (tiles * pl.col("start")).filter(several).sum().alias("older"),
            end.filter(several).max().fill_null(0).alias("chunk_keys"),
            end.filter(~several).sum().alias("single_context"),
            end.filter(~several).max().fill_null(0).alias("single_keys"),
            end.filter(pl.col("cached_tokens").is_not_null()).sum().alias("known"),
        )
    )
    arrived = run.scan("admissions").group_by("admitted_round").agg(pl.col("arrival_s").min().alias("first_arrival_s"))
    before = pl.col("t_end_s").shift(1).fill_null(0.0)
    slept = pl.col("first_arrival_s") > before
    frame = (
        run.scan("rounds")
        .with_columns(
            step_s=pl.col("t_end_s") - pl.max_horizontal(before, "t_start_s"),
            idle_start=pl.col("t_start_s") > before,
        )
        .join(arrived, left_on="round", right_on="admitted_round", how="left", maintain_order="left")
        .with_columns(arrive_s=pl.when(slept).then(pl.col("t_start_s") - pl.col("first_arrival_s")))
        .filter(pl.col("device_s") > 0)
        .join(batches, on="round", how="inner", maintain_order="left")
        .collect()
    )
    if not frame.height:
        raise BenchctlError("no round of the run has a device time", where=where, fix="replay on --engine torch")

    def column(name: str) -> npt.NDArray[np.float64]:
        return frame[name].cast(pl.Float64).fill_null(0.0).to_numpy()

    has_prefill = frame["has_prefill"].to_numpy()
    padded = column("padded_tokens")
    in_graph, held = frame["mode"].to_numpy() == "graph", head_rows(graphs, column("seqs"), padded)
    own_keys, older_keys, block_keys = tile_keys(
        column("own"), column("older"), column("chunk_pairs"), column("older_pairs"), in_graph
    )
    return Measured(
        run=run,
        round=frame["round"].cast(pl.Int64).to_numpy(),
        kind=frame["kind"].to_numpy().astype(np.str_),
        features=Features(
            has_prefill=has_prefill,
            num_seqs=column("seqs"),
            num_tokens=column("tokens"),
            prefill_tokens=column("fed_prefill"),
            num_yields=column("yields"),
            context_tokens=column("context_tokens"),
            context_pairs=column("pairs"),
            chunk_tiles=column("tiles"),
            own_keys=own_keys,
            older_keys=older_keys,
            block_keys=block_keys,
            chunk_keys=column("chunk_keys"),
            single_context=column("single_context"),
            single_keys=column("single_keys"),
            known_tokens=column("known"),
            padded_tokens=padded,
            padded_seqs=np.where(has_prefill, np.where(in_graph, held, column("seqs")), padded),
        ),
        device_s=column("device_s"),
        launch_s=column("schedule_s") + column("prepare_s"),
        after_s=column("update_s") + column("record_s"),
        step_s=column("step_s"),
        arrive_s=frame["arrive_s"].cast(pl.Float64).fill_null(float("nan")).to_numpy(),
        idle_start=frame["idle_start"].to_numpy(),
    )


def device_of(run: Run) -> str:
    return str(run.manifest.get("device") or "?")


def driver_of(run: Run) -> str | None:
    gpu = (run.manifest.get("hardware") or {}).get("gpu")
    return str(gpu.get("driver")) if isinstance(gpu, dict) and gpu.get("driver") else None


def model_shape(run: Run) -> ModelShape:
    """Of the model that the run's manifest names: a preset, or a folder that is still there. Raises BenchctlError."""
    name, asked = str(run.manifest.get("model")), run.setting("model")
    return shape_of_name(name, str(run.manifest.get("dtype")), str(run.path), str(asked or name))


def shape_of_name(name: str, dtype: str, where: str, folder: str | None = None) -> ModelShape:
    """Raises BenchctlError where the name is no preset and there is no such folder."""
    config = PRESETS.get(name)
    if config is None:
        path = Path(folder or name).expanduser()
        if not path.is_dir():
            raise BenchctlError(
                f"the sizes of model {name} are not known: it is no preset, and {path} is no folder",
                where=where,
                fix="run this where the model folder lies, or record a run of " + ", ".join(PRESETS),
            )
        config = read_config(path)
    if dtype not in VALUE_BYTES:
        raise BenchctlError(f"the dtype is {dtype!r}", where=where, fix="one of " + ", ".join(VALUE_BYTES))
    return shape_of(name, config, VALUE_BYTES[dtype])


def shape_of(name: str, c: ModelConfig, bytes_per_value: int) -> ModelShape:
    head = c.vocab_size * c.hidden_size
    return ModelShape(
        name=name,
        vocab_size=c.vocab_size,
        max_position_embeddings=c.max_position_embeddings,
        hidden_size=c.hidden_size,
        num_layers=c.num_layers,
        num_heads=c.num_heads,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        matrix_parameters=c.num_parameters - head * (1 if c.tie_word_embeddings else 2),
        last_parameters=c.hidden_size * (c.num_heads * c.head_dim + 3 * c.intermediate_size),
        bytes_per_value=bytes_per_value,
    )


def tiles_of(model: ModelShape, block_size: int) -> int:
    """Query tokens in a tile of a chunk's attention."""
    return tile_tokens(model.num_heads, model.num_kv_heads, model.head_dim, model.bytes_per_value, block_size)


def graphs_of(run: Run) -> Graphs:
    """Of the Triton engine with graphs on; none otherwise."""
    if run.manifest.get("attention_backend") != "triton" or run.setting("enforce_eager"):
        return Graphs()
    return graph_sizes(limit(run, "max_num_seqs"), limit(run, "max_num_batched_tokens"))


def limit(run: Run, name: str) -> int:
    value: Any = run.setting(name)
    if not isinstance(value, int) or value < 1:
        raise BenchctlError(f"the manifest gives no {name}", where=str(run.path), fix="replay again")
    return value
