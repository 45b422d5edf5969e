"""Points: rounds of a designed calibration with what they took, as one JSON file. A profile can be fitted from it anywhere.

The file holds every repeat of every round, so that a later formula can be fitted to it without a card. No torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from benchctl.calibrate_grid import Case, Group
from benchctl.calibrate_rounds import shape_of_name, tiles_of
from engines.interface import ScheduledBatch
from engines.simulated.features import Features, features_of, graph_sizes
from engines.simulated.profile import Graphs
from traces.errors import BenchctlError

FORMAT = 1
MADE_BY = "benchctl calibrate --measure --model MODEL -o FILE"


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A round and its repeats. `seqs`: (start, tokens fed, is a decode, how many alike), in batch order. Times in seconds."""

    block_size: int
    seqs: tuple[tuple[int, int, bool, int], ...]
    mode: str  # graph, eager
    padded_tokens: int
    device_s: tuple[float, ...]  # of each repeat
    step_s: tuple[float, ...]  # from one collected round to the next, while the next is prepared
    prepare_s: tuple[float, ...]  # host, of the engine


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """An engine of the measurement, and how far it came."""

    block_size: int
    kv_cache_tokens: int  # usable
    ready_s: float  # building it, graphs included
    measured_s: float
    planned: int  # rounds of the design that fit
    measured: int


class Points(msgspec.Struct, frozen=True, kw_only=True):
    """One model on one device. Keys as in a run's manifest where it has them."""

    benchctl_points: int = FORMAT
    created: str  # ISO 8601
    benchctl: str
    versions: dict[str, str | None]
    hardware: dict[str, Any]
    device: str
    model: str
    dtype: str
    attention_backend: str
    enforce_eager: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    seed: int
    complete: bool  # False: stopped by its time limit, or still running when this was written
    setups: tuple[Setup, ...]
    points: tuple[Point, ...]
    readings: tuple[str, ...] = ()  # of the card's clocks, power and temperature, where nvidia-smi gave them


def is_points(path: str | Path) -> bool:
    """A file, where a run would be a folder."""
    return Path(path).is_file()


def load_points(path: Path) -> Points:
    """Raises BenchctlError where the file is no such thing."""
    try:
        raw = path.read_bytes()
        version = msgspec.json.decode(raw, type=dict[str, Any]).get("benchctl_points")
        if version != FORMAT:
            raise BenchctlError(
                f"no points of format {FORMAT}: the key benchctl_points is {version!r}", where=str(path), fix=MADE_BY
            )
        points = msgspec.json.decode(raw, type=Points)
    except OSError as error:
        raise BenchctlError(f"the points cannot be read: {error.strerror}", where=str(path)) from None
    except msgspec.DecodeError as error:
        raise BenchctlError(f"no points: {error}", where=str(path), fix=MADE_BY) from None
    for number, point in enumerate(points.points, 1):
        if not point.device_s or not all(0 < s < float("inf") for s in point.device_s):
            raise BenchctlError(f"point {number} has times {point.device_s}", where=str(path), fix=MADE_BY)
        if not point.seqs or any(start < 0 or num < 1 or count < 1 for start, num, _, count in point.seqs):
            raise BenchctlError(f"point {number} has sequences {point.seqs}", where=str(path), fix=MADE_BY)
    return points


def save_points(points: Points, path: Path) -> None:
    """Written under a temporary name and renamed: a killed measurement leaves the last whole file. Raises BenchctlError."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(msgspec.json.encode(points) + b"\n")
        os.replace(temporary, path)
    except OSError as error:
        raise BenchctlError(
            f"{path} cannot be written: {error.strerror}", where="--output", fix="name another file"
        ) from None


@dataclass(frozen=True, slots=True)
class MeasuredPoints:
    """Points of one block size as columns, [num_points]; device seconds are the median of the repeats."""

    points: Points
    path: str
    block_size: int
    features: Features
    kind: npt.NDArray[np.str_]  # decode, prefill, mixed
    device_s: npt.NDArray[np.float64]


def measured_points(points: Points, path: str, block_size: int) -> MeasuredPoints:
    """Raises BenchctlError where the model's sizes are not known."""
    model, graphs = shape_of_name(points.model, points.dtype, path), graphs_of_points(points)
    per_tile = tiles_of(model, block_size)
    rows, kinds, seconds = [], [], []
    for point in points.points:
        if point.block_size != block_size:
            continue
        batch = bare_batch(case_of(point))
        f = features_of(batch, graphs, per_tile)
        if f.padded_tokens != point.padded_tokens:  # the engine knows better: that size alone is captured
            only = replace(graphs, decode=(point.padded_tokens,), prefill=(point.padded_tokens,))
            f = features_of(batch, only if point.mode == "graph" else Graphs(), per_tile)
        rows.append(f)
        kinds.append("decode" if not f.has_prefill else "mixed" if batch.is_decode.any() else "prefill")
        seconds.append(float(np.median(point.device_s)))
    columns = (
        np.array([getattr(f, name) for f in rows], dtype=np.bool_ if name == "has_prefill" else np.float64)
        for name in Features.__slots__
    )
    return MeasuredPoints(
        points, path, block_size, Features(*columns), np.array(kinds, dtype=np.str_), np.array(seconds)
    )


def graphs_of_points(points: Points) -> Graphs:
    if points.attention_backend != "triton" or points.enforce_eager:
        return Graphs()
    return graph_sizes(points.max_num_seqs, points.max_num_batched_tokens)


def case_of(point: Point) -> Case:
    return tuple(Group(start, num, decode, count) for start, num, decode, count in point.seqs)


def seqs_of(case: Case) -> tuple[tuple[int, int, bool, int], ...]:
    return tuple((group.start, group.num_tokens, group.decode, group.count) for group in case)


def columns(case: Case) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """(start, num_tokens, is_decode) of each sequence, [n]."""
    count = [group.count for group in case]
    return (
        np.repeat(np.array([group.start for group in case], dtype=np.int64), count),
        np.repeat(np.array([group.num_tokens for group in case], dtype=np.int64), count),
        np.repeat(np.array([group.decode for group in case], dtype=np.bool_), count),
    )


def bare_batch(case: Case) -> ScheduledBatch:
    """The round as a batch without tables and tokens: enough for its features."""
    start, num_tokens, is_decode = columns(case)
    n = len(start)
    return ScheduledBatch(
        request=np.arange(n),
        start=start,
        num_tokens=num_tokens,
        is_decode=is_decode,
        yields_token=np.ones(n, dtype=np.bool_),
        cached_tokens=np.full(n, -1),
        num_blocks=np.zeros(n, dtype=np.int64),
        block_tables=(),
        token_ids=(),
    )
