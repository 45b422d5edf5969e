"""Figures as data: from a run's frames to Plotly traces and layouts. No colours and no HTML: the page gives both.

A trace names its colour by role (`meta.c`), so that the same thing has the same colour everywhere, in light and in dark.
A point with `customdata` ["round", place of the run, round] leads to that round. What is thinned says so in `note`.
The pictures of every round are not made here: the page draws them from the embedded run (`page_data`).
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from reports import metrics
from reports.run import Run
from reports.summary import DEFAULT_METRICS, Summary, slo_ms
from reports.units import MEASURED, Unit

Figure = dict[str, Any]

MAX_POINTS = 2_000  # drawn rounds of one figure
MAX_GAPS = 700  # drawn stretches of time of the ITL figure, all runs together
MAX_ROOFLINE = 1_500
# Small points of two runs lie among each other: shape, filling and size tell them apart where colours are near.
GAP_MARKS = (
    {"symbol": "circle", "size": 5},
    {"symbol": "diamond-open", "size": 7, "line": {"width": 1.5}},
    {"symbol": "x-thin-open", "size": 7, "line": {"width": 1.5}},
    {"symbol": "triangle-up", "size": 7},
    {"symbol": "square-open", "size": 7, "line": {"width": 1.5}},
    {"symbol": "cross-thin-open", "size": 8, "line": {"width": 1.5}},
)
ECDF_POINTS = 400


def plain(text: str) -> str:
    """A text that Plotly shows as it is: Plotly reads tags and entities in labels, so both are escaped."""
    return html.escape(text, quote=False)


def time_title(unit: Unit) -> str:
    return "ticks of the clock" if unit.ticks else "time, s"


def log_axis(least: float, most: float, decades: float = 2.2) -> Figure:
    """A logarithmic axis from `least` to `most` with labels at 1, 2 and 5 of each decade, or at decades where there are many."""
    low, high = math.floor(math.log10(least)), math.ceil(math.log10(most))
    steps = (1, 2, 5) if math.log10(most / least) < decades else (1,)
    values = [digit * 10.0**power for power in range(low, high + 1) for digit in steps]
    text = [f"{value:,.{max(-math.floor(math.log10(value)), 0)}f}" for value in values]
    return {"type": "log", "tickvals": values, "ticktext": text}


def rounded(values: pl.Series, digits: int = 6) -> list[float | None]:
    return [None if value is None else round(value, digits) for value in values.to_list()]


def thin(frame: pl.DataFrame, series: Sequence[str], limit: int = MAX_POINTS) -> tuple[pl.DataFrame, str | None]:
    """At most about `limit` rows: of every stretch those with the least and the most of each series. Rows are kept, not averaged.

    Returns the rows in their order, and a sentence that says what was done, or None where nothing was.
    """
    if frame.height <= limit:
        return frame, None
    place = pl.int_range(pl.len())
    extremes = [
        pl.col("_row").get(expression(pl.col(name))).alias(f"{name}{i}")
        for name in series
        for i, expression in enumerate((pl.Expr.arg_min, pl.Expr.arg_max))
    ]
    buckets = max(limit // len(extremes), 1)
    while True:
        size = -(-frame.height // buckets)
        numbered = frame.with_columns(place.alias("_row"), (place // size).alias("_bucket"))
        rows = np.unique(numbered.group_by("_bucket").agg(extremes).drop("_bucket").to_numpy())
        rows = np.union1d(rows, [0, frame.height - 1])
        # Where one row is the extreme of several series there is room for shorter stretches.
        if len(rows) > limit // 2 or size <= 2:
            break
        buckets *= 2
    note = f"{len(rows):,} of {frame.height:,} rounds are drawn: of every {size:,} those with the least and the most of each series, exactly as recorded"
    return frame[rows.tolist()], note


def cache_figure(runs: Sequence[Run], names: Sequence[str], unit: Unit = MEASURED) -> Figure | None:
    """Cumulated tokens looked up and found, over time, a pair of lines a run; what the trace offers each as a level."""
    data: list[Figure] = []
    notes: list[str] = []
    for place, (run, name) in enumerate(zip(runs, names, strict=True)):
        frame = (
            run.scan("rounds")
            .filter(pl.col("queried_tokens") > 0)
            .select("round", "t_end_s", pl.col("queried_tokens").cum_sum(), pl.col("cached_tokens").cum_sum())
            .collect()
        )
        if not frame.height:
            continue
        end = run.duration_s
        frame, note = thin(frame, ("queried_tokens", "cached_tokens"), MAX_POINTS // 3)
        notes += [f"{name}: {note}"] if note else []
        role = {"c": f"run{place % 6}"}
        for column, what, width in (("queried_tokens", "looked up", 1), ("cached_tokens", "hit", 2.5)):
            data.append(
                {
                    "type": "scatter", "mode": "lines", "name": f"{plain(name)}: {what}", "x": [*rounded(frame["t_end_s"]), end],
                    "y": [*frame[column].to_list(), frame[column][-1]], "line": {"shape": "hv", "width": width}, "meta": role,
                }
            )  # fmt: skip
        upper = run.manifest.get("prefix_upper_bound")
        if isinstance(upper, dict) and upper.get("hit_tokens"):
            data.append(
                {
                    "type": "scatter", "mode": "lines", "name": f"{plain(name)}: hits of an unbounded cache", "x": [0, end],
                    "y": [upper["hit_tokens"]] * 2, "line": {"width": 1.5}, "meta": role | {"dash": 2},
                }
            )  # fmt: skip
    if not data:
        return None
    layout: Figure = {
        "height": 320,
        "xaxis": {"title": {"text": time_title(unit)}},
        "yaxis": {"title": {"text": "tokens"}, "rangemode": "tozero"},
    }
    return {"data": data, "layout": layout, "note": "; ".join(notes) or None}


def ecdf_points(
    values: np.ndarray[Any, np.dtype[np.float64]], points: int = ECDF_POINTS
) -> tuple[list[float], list[float]]:
    """x, share of samples <= x. The smallest and the largest sample are always there."""
    ordered = np.sort(values)
    at = np.unique(np.linspace(0, len(ordered) - 1, min(points, len(ordered))).round().astype(np.int64))
    return [round(float(x), 4) for x in ordered[at]], [round(float(x), 5) for x in (at + 1) / len(ordered)]


def ecdf_figure(runs: Sequence[Run], names: Sequence[str], metric: str, unit: Unit = MEASURED) -> Figure | None:
    """One metric's samples of each run as an empirical distribution, in ms, with its percentiles as marks."""
    data: list[Figure] = []
    widest, least = 0.0, np.inf
    thinned: list[str] = []
    for place, (run, name) in enumerate(zip(runs, names, strict=True)):
        values = samples_ms(run, metric) * unit.per_ms
        if not len(values):
            continue
        x, y = ecdf_points(values)
        if len(x) < len(values):
            thinned.append(f"{name}: drawn at {len(x):,} of {len(values):,} samples, evenly over the ranks")
        x, y = [x[0], *x], [0.0, *y]  # it rises from nothing
        role = {"c": f"run{place % 6}"}
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": f"{plain(name)}, n {len(values):,}",
                "x": x,
                "y": y,
                "line": {"shape": "hv"},
                "meta": role | {"dash": place},
            }
        )
        marks = [p for p in (50, 90, 95, 99) if metrics.carries(len(values), p)]
        data.append(
            {
                "type": "scatter", "mode": "markers", "name": f"{plain(name)} percentiles", "showlegend": False, "meta": role | {"marks": True},
                "x": [round(float(v), 4) for v in np.percentile(values, marks)] if marks else [], "y": [p / 100 for p in marks],
                "text": [f"p{p}" for p in marks], "hovertemplate": f"%{{text}}: %{{x:,.4~g}} {unit.latency}<extra></extra>",
            }
        )  # fmt: skip
        widest = max(widest, float(values.max()))
        positive = values[values > 0]
        least = min(least, float(positive.min()) if len(positive) and len(positive) == len(values) else 0.0)
    if not data:
        return None
    axis: Figure = {"title": {"text": f"{metric.upper() if metric != 'e2el' else 'E2E latency'}, {unit.latency}"}}
    if least > 0 and widest / least > 20:
        axis |= log_axis(least, widest)
    else:
        axis |= {"rangemode": "tozero"}
    layout: Figure = {
        "height": 300,
        "xaxis": axis,
        "yaxis": {"title": {"text": "share of samples"}, "range": [0, 1.02], "tickformat": ".0%"},
    }
    limits = sorted({limits[metric] * unit.per_ms for run in runs if metric in (limits := slo_ms(run))})
    if limits:
        line = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": {"dash": "dot", "width": 1.5}}
        layout["shapes"] = [line | {"x0": limit, "x1": limit, "line": dict(line["line"])} for limit in limits]  # type: ignore[call-overload]
        at = np.log10(limits) if axis.get("type") == "log" else limits
        layout["annotations"] = [
            {"x": float(x), "yref": "paper", "y": 0, "yanchor": "bottom", "xanchor": "left", "showarrow": False, "text": f"SLO {limit:g} {unit.latency}"}
            for x, limit in zip(at, limits, strict=True)
        ]  # fmt: skip
    return {"data": data, "layout": layout, "note": "; ".join(thinned) or None}


def samples_ms(run: Run, metric: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Every sample of one of the four metrics, milliseconds."""
    assert metric in DEFAULT_METRICS, metric
    frame = metrics.itl(run).select("itl") if metric == "itl" else metrics.per_request(run).select(metric)
    return frame.collect()[metric].drop_nulls().to_numpy() * 1000


def split_figure(summaries: Sequence[Summary], names: Sequence[str], unit: Unit = MEASURED) -> Figure | None:
    """Where a request's time went, mean ms: queue + prefill + decode = E2E, and below the decode what of it was stalled or preempted.

    A run of which nothing was stalled or preempted has no such row.
    """
    if not any(summary["benchctl"]["latency"]["e2el"]["n"] for summary in summaries):
        return None
    inside = [f"{plain(name)}, of which" for name in names]

    def mean(summary: Summary, phase: str) -> float:
        return float(summary["benchctl"]["latency"][phase]["mean_ms"] or 0.0)

    lost = [mean(summary, "stalled") + mean(summary, "preempted") for summary in summaries]
    longest = (
        1.03
        * unit.per_ms
        * max(sum(mean(summary, phase) for phase in ("queue", "prefill", "decode")) for summary in summaries)
    )
    begin = [(mean(summary, "queue") + mean(summary, "prefill")) * unit.per_ms for summary in summaries]
    data: list[Figure] = []
    for phase, role, lower in (
        ("queue", "queued", False), ("prefill", "prefill", False), ("decode", "decode", False), ("stalled", "stalled", True), ("preempted", "preempted", True),
    ):  # fmt: skip
        means = [mean(summary, phase) * unit.per_ms for summary in summaries]
        kept = [place for place in range(len(names)) if lost[place] or not lower]
        if lower:
            bars = {"y": [inside[place] for place in kept], "base": [round(begin[place], 4) for place in kept]}
            begin = [value + more for value, more in zip(begin, means, strict=True)]
            if not any(means):
                continue
        else:
            bars = {"y": [plain(name) for name in names]}
        data.append(
            {
                "type": "bar", "orientation": "h", "name": phase, "meta": {"c": role}, "x": [round(means[place], 4) for place in kept],
                **bars, "hovertemplate": phase + f" %{{x:,.4~g}} {unit.latency}<extra></extra>",
            }
        )  # fmt: skip
    order = [
        label for place, name in enumerate(names) for label in (plain(name), *inside[place : place + bool(lost[place])])
    ]
    return {
        "data": data,
        "layout": {
            "height": 110 + 28 * len(order),
            "barmode": "stack",
            "bargap": 0.25,
            "xaxis": {"title": {"text": f"mean of the finished requests, {unit.latency}"}, "range": [0, longest]},
            "yaxis": {"categoryorder": "array", "categoryarray": order[::-1], "showgrid": False},
        },
        "note": None,
    }


def itl_figure(gaps: Sequence[pl.DataFrame], names: Sequence[str], unit: Unit = MEASURED) -> Figure | None:
    """The longest and the median gap between tokens over time. `gaps`: `metrics.itl` of each run, collected."""
    data: list[Figure] = []
    notes = []
    points = max(MAX_GAPS // max(len(gaps), 1), 50)
    least, most = np.inf, 0.0
    for place, (frame, name) in enumerate(zip(gaps, names, strict=True)):
        if not frame.height:
            continue
        end = float(frame["t_s"].max() or 0.0) or 1.0  # type: ignore[arg-type]
        bucket = (pl.col("t_s") / end * points).cast(pl.Int64).clip(0, points - 1).alias("bucket")
        at = pl.col("itl").arg_max()
        drawn = (
            frame.lazy().group_by(bucket)
            .agg(pl.col("itl").median().alias("median"), *(pl.col(column).get(at).alias(column) for column in ("request", "round", "t_s", "itl")))
            .sort("t_s").collect()
        )  # fmt: skip
        if drawn.height < frame.height:
            notes.append(
                f"{name}: of {frame.height:,} gaps the longest of each {end / points:.3g} {unit.span}, and the median beside it"
            )
        least = min(least, float(drawn["median"].min() or 0.0) * 1000 * unit.per_ms)  # type: ignore[arg-type]
        most = max(most, float(drawn["itl"].max() or 0.0) * 1000 * unit.per_ms)  # type: ignore[arg-type]
        role = f"run{place % 6}"
        data.append(
            {
                "type": "scatter", "mode": "markers", "name": f"{plain(name)}: longest gap", "meta": {"c": role}, "marker": GAP_MARKS[place % len(GAP_MARKS)],
                "x": rounded(drawn["t_s"]), "y": rounded(drawn["itl"] * 1000 * unit.per_ms, 4), "customdata": [["round", place, number] for number in drawn["round"]],
                "hovertemplate": "%{y:,.4~g} rounds, given in round %{customdata[2]}<extra></extra>" if unit.ticks else "%{y:,.4~g} ms at %{x:.4~g} s, round %{customdata[2]}<extra></extra>",
            }
        )  # fmt: skip
        data.append(
            {
                "type": "scatter", "mode": "lines", "name": f"{plain(name)}: median gap", "meta": {"c": role, "dash": place},
                "x": rounded(drawn["t_s"]), "y": rounded(drawn["median"] * 1000 * unit.per_ms, 4), "line": {"width": 1.2, "shape": "hv"}, "hoverinfo": "skip",
            }
        )  # fmt: skip
    if not data:
        return None
    axis: Figure = {"title": {"text": f"gap between two tokens, {unit.latency}"}, "rangemode": "tozero"}
    if least > 0 and most / least > 20:
        axis = {"title": axis["title"]} | log_axis(least, most, 3.5)
        axis["range"] = [math.log10(least / 1.15), math.log10(most * 1.25)]
    layout: Figure = {
        "height": 360,
        "xaxis": {"title": {"text": time_title(unit)}, "rangemode": "tozero"},
        "yaxis": axis,
    }
    return {"data": data, "layout": layout, "note": "; ".join(notes) or None}


def pool_figure(frame: pl.DataFrame, roles: dict[str, str], usable: int, unit: Unit = MEASURED) -> Figure:
    """Blocks of a large pool, stacked over time. `frame`: t_end_s and a column for each of `roles` (column -> colour).

    Of a pool that is never half full the lower part is drawn; of many rounds those with extremes. The note says so.
    """
    held = int(frame.select(pl.sum_horizontal(*(name for name in roles if name != "free"))).to_series().max() or 0)  # type: ignore[arg-type]
    part = held < usable / 2
    frame, thinned = thin(frame, [name for name in roles if name != "free"], MAX_POINTS // 2)
    cut = (
        f"of {usable:,} blocks at most {held:,} are shown in colour, so only the lower part is drawn" if part else None
    )
    note = "; ".join(text for text in (thinned, cut) if text)
    return {
        "data": [
            {
                "type": "scatter", "mode": "lines", "name": name, "x": rounded(frame["t_end_s"]), "y": frame[name].to_list(), "stackgroup": "pool",
                "line": {"width": 0, "shape": "hv"}, "meta": {"c": role}, "hovertemplate": name + (": %{y:,} at tick %{x:,}<extra></extra>" if unit.ticks else ": %{y:,} at %{x:.4~g} s<extra></extra>"),
            }
            for name, role in roles.items()
        ],
        "layout": {
            "height": 280,
            "xaxis": {"title": {"text": time_title(unit)}},
            "yaxis": {"title": {"text": "blocks"}, "range": [0, max(held * 1.1, 1) if part else usable]},
        },
        "note": note or None,
    }  # fmt: skip


def roofline_figure(runs: Sequence[Run], names: Sequence[str], ceilings: tuple[float, float] | None) -> Figure | None:
    """FLOP/s of each round's forward pass against its FLOPs per byte, both axes logarithmic.

    `ceilings`: (FLOP/s, bytes/s) measured on that device, drawn as the roof; how rounds come to lie above it is said. Rounds without device time, FLOPs or bytes
    are left out; of many, an even choice over the rounds is drawn.
    """
    data: list[Figure] = []
    notes = []
    left, right, above = np.inf, 0.0, 0
    for place, (run, name) in enumerate(zip(runs, names, strict=True)):
        counted = (
            pl.col("flops").is_not_null() & (pl.col("flops") > 0) & (pl.col("bytes") > 0) & (pl.col("device_s") > 0)
        )
        frame = (
            run.scan("rounds").filter(counted)
            .select("round", "kind", (pl.col("flops") / pl.col("bytes")).alias("intensity"), (pl.col("flops") / pl.col("device_s") / 1e12).alias("tflops"),
                    (pl.col("bytes") / pl.col("device_s") / 1e12).alias("terabytes"))
            .collect()
        )  # fmt: skip
        if not frame.height:
            continue
        if ceilings is not None:
            roof = pl.min_horizontal(pl.lit(ceilings[0]), pl.col("intensity") * ceilings[1]) / 1e12
            above += frame.select((pl.col("tflops") > 1.05 * roof).sum()).item()
        if frame.height > MAX_ROOFLINE:
            kept = np.linspace(0, frame.height - 1, MAX_ROOFLINE).round().astype(np.int64)
            notes.append(f"{name}: {MAX_ROOFLINE:,} of {frame.height:,} rounds, evenly over the run")
            frame = frame[kept.tolist()]
        left, right = min(left, float(frame["intensity"].min())), max(right, float(frame["intensity"].max()))  # type: ignore[arg-type]
        for kind, symbol in (("decode", "circle"), ("prefill", "square"), ("mixed", "diamond")):
            of = frame.filter(pl.col("kind") == kind)
            if of.height:
                data.append(
                    {
                        "type": "scatter", "mode": "markers", "name": f"{plain(name)}: {kind}", "meta": {"c": f"run{place % 6}" if len(runs) > 1 else kind},
                        "marker": {"symbol": symbol}, "x": [float(f"{v:.5g}") for v in of["intensity"]], "y": [float(f"{v:.5g}") for v in of["tflops"]],
                        "customdata": [["round", place, number, float(f"{v:.4g}")] for number, v in of.select("round", "terabytes").iter_rows()],
                        "hovertemplate": f"{plain(name)}, round %{{customdata[2]:,}}, {kind}<br>%{{x:.4~g}} FLOP/byte, %{{y:.4~g}} TFLOP/s, %{{customdata[3]:.3~g}} TB/s<extra></extra>",
                    }
                )  # fmt: skip
    if not data:
        return None
    if ceilings is not None:
        flops, bandwidth = ceilings
        ridge = flops / bandwidth
        xs = [left / 1.5, *([ridge] if left / 1.5 < ridge < right * 1.5 else []), right * 1.5]
        if above:
            notes.append(
                f"{above:,} rounds lie more than 5% above the roof: blocks that several sequences share count for each of them, and the "
                "device's cache reads them from memory once"
            )
        data.append(
            {
                "type": "scatter", "mode": "lines", "name": f"measured ceilings: {flops / 1e12:,.0f} TFLOP/s, {bandwidth / 1e12:.2f} TB/s",
                "x": xs, "y": [min(flops, x * bandwidth) / 1e12 for x in xs], "line": {"width": 1.5}, "meta": {"c": "used"}, "hoverinfo": "skip",
            }
        )  # fmt: skip
    return {
        "data": data,
        "layout": {
            "height": 380,
            "xaxis": {"title": {"text": "FLOP per byte"}, "type": "log", "dtick": 1},
            "yaxis": {"title": {"text": "TFLOP/s"}, "type": "log", "dtick": 1},
        },
        "note": "; ".join(notes) or None,
    }
