"""Figures as data: from a run's frames to Plotly traces and layouts. No colours and no HTML: the page gives both.

A trace names its colour by role (`meta.c`), so that the same thing has the same colour everywhere, in light and in dark.
Traces without `x` share the figure's axes `by_round` and `by_time`. What is thinned says so in `note`.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from reports import metrics
from reports.run import Run
from reports.summary import DEFAULT_METRICS

Figure = dict[str, Any]

MAX_POINTS = 2_000  # drawn rounds of one figure
BARS = 400  # more bars than that are outlined, so that each stays visible
MAX_GANTT = 250  # requests in the timeline
MAX_SPANS = 10_000  # stretches in the timeline; fewer requests are drawn where they have more
ECDF_POINTS = 400


def plain(text: str) -> str:
    """A text that Plotly shows as it is: Plotly reads tags and entities in labels, so both are escaped."""
    return html.escape(text, quote=False)


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


def rounds_figure(run: Run, limit: int = MAX_POINTS) -> Figure | None:
    """Three rows over one axis: tokens of each batch, blocks after each round, queues after each round."""
    columns = [
        "round",
        "t_start_s",
        "t_end_s",
        "kind",
        "prefill_tokens",
        "decode_tokens",
        "cached_tokens",
        "waiting",
        "running",
        "skipped",
    ]
    frame = run.scan("rounds").select(*columns, "free_blocks_end", "cached_free_blocks").collect()
    if not frame.height:
        return None
    total = run.usable_blocks or 0
    frame = frame.with_columns(
        (total - pl.col("free_blocks_end")).alias("used"),
        (pl.col("free_blocks_end") - pl.col("cached_free_blocks")).alias("empty"),
    )
    frame, note = thin(frame, ("prefill_tokens", "decode_tokens", "cached_tokens", "used", "waiting", "running"), limit)
    thin_bars = frame.height > BARS

    def trace(column: str, name: str, role: str, axis: str, legend: str, stack: str | None, bar: bool) -> Figure:
        out: Figure = {"name": name, "y": frame[column].to_list(), "yaxis": axis, "legend": legend, "meta": {"c": role}}
        if bar:
            return out | {"type": "bar", "meta": {"c": role, "outlined": thin_bars}}
        out |= {"type": "scatter", "mode": "lines", "line": {"width": 1.5, "shape": "hv"}}
        return out | ({"stackgroup": stack, "line": {"width": 0, "shape": "hv"}} if stack else {})

    data = [
        trace("decode_tokens", "decode", "decode", "y", "legend", None, True),
        trace("prefill_tokens", "prefill", "prefill", "y", "legend", None, True),
        trace("cached_tokens", "cached", "cached", "y", "legend", None, True),
        trace("used", "used", "used", "y2", "legend2", "blocks", False),
        trace("cached_free_blocks", "free, cached", "cached", "y2", "legend2", "blocks", False),
        trace("empty", "free", "free", "y2", "legend2", "blocks", False),
        trace("running", "running", "decode", "y3", "legend3", None, False),
        trace("waiting", "waiting", "queued", "y3", "legend3", None, False),
    ]
    if (frame["skipped"] > 0).any():
        data.append(trace("skipped", "skipped", "stalled", "y3", "legend3", None, False))
    return {
        "by_round": frame["round"].to_list(),
        "by_time": rounded(frame["t_end_s"]),
        "durations": rounded(frame["t_end_s"] - frame["t_start_s"]),
        "data": data,
        "layout": {
            "height": 560,
            "barmode": "stack",
            "bargap": 0,
            "yaxis": {"title": {"text": "tokens in the batch"}, "domain": [0.70, 0.97], "rangemode": "tozero"},
            "yaxis2": {"title": {"text": "blocks"}, "domain": [0.36, 0.61], "range": [0, total * 1.02]},
            "yaxis3": {"title": {"text": "requests"}, "domain": [0.0, 0.27], "rangemode": "tozero"},
            "xaxis": {"anchor": "y3"},
            "legend": {"y": 1.0, "yanchor": "bottom"},
            "legend2": {"y": 0.62, "yanchor": "bottom"},
            "legend3": {"y": 0.28, "yanchor": "bottom"},
        },
        "note": note,
    }


def cache_figure(runs: Sequence[Run], names: Sequence[str]) -> Figure | None:
    """Cumulated tokens looked up and found, over time, a pair of lines a run; the trace's upper bound as a level."""
    data: list[Figure] = []
    notes: list[str] = []
    bound = None
    for place, (run, name) in enumerate(zip(runs, names, strict=True)):
        frame = (
            run.scan("rounds")
            .filter(pl.col("queried_tokens") > 0)
            .select("round", "t_end_s", pl.col("queried_tokens").cum_sum(), pl.col("cached_tokens").cum_sum())
            .collect()
        )
        if not frame.height:
            continue
        frame, note = thin(frame, ("queried_tokens", "cached_tokens"), MAX_POINTS // 3)
        notes += [f"{name}: {note}"] if note else []
        for column, what, width in (("queried_tokens", "looked up", 1), ("cached_tokens", "hit", 2.5)):
            data.append(
                {
                    "type": "scatter", "mode": "lines", "name": f"{plain(name)}: {what}", "x": rounded(frame["t_end_s"]), "y": frame[column].to_list(),
                    "line": {"shape": "hv", "width": width}, "meta": {"c": f"run{place % 6}"},
                }
            )  # fmt: skip
        upper = run.manifest.get("prefix_upper_bound")
        bound = upper.get("hit_tokens") if isinstance(upper, dict) else bound
    if not data:
        return None
    layout: Figure = {
        "height": 300,
        "xaxis": {"title": {"text": "time, s"}},
        "yaxis": {"title": {"text": "tokens"}, "rangemode": "tozero"},
    }
    if bound:
        layout["shapes"] = [
            {
                "type": "line",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "y0": bound,
                "y1": bound,
                "line": {"dash": "dot", "width": 1.5},
            }
        ]
        layout["annotations"] = [
            {
                "xref": "paper",
                "x": 1,
                "y": bound,
                "xanchor": "right",
                "yanchor": "bottom",
                "showarrow": False,
                "text": "hits of an unbounded cache",
            }
        ]
    return {"data": data, "layout": layout, "note": "; ".join(notes) or None}


def ecdf_points(
    values: np.ndarray[Any, np.dtype[np.float64]], points: int = ECDF_POINTS
) -> tuple[list[float], list[float]]:
    """x, share of samples <= x. The smallest and the largest sample are always there."""
    ordered = np.sort(values)
    at = np.unique(np.linspace(0, len(ordered) - 1, min(points, len(ordered))).round().astype(np.int64))
    return [round(float(x), 4) for x in ordered[at]], [round(float(x), 5) for x in (at + 1) / len(ordered)]


def ecdf_figure(runs: Sequence[Run], names: Sequence[str], metric: str) -> Figure | None:
    """One metric's samples of each run as an empirical distribution, in ms, with its percentiles as marks."""
    data: list[Figure] = []
    widest, least = 0.0, np.inf
    thinned: list[str] = []
    for place, (run, name) in enumerate(zip(runs, names, strict=True)):
        values = samples_ms(run, metric)
        if not len(values):
            continue
        x, y = ecdf_points(values)
        if len(x) < len(values):
            thinned.append(f"{name}: drawn at {len(x):,} of {len(values):,} samples, evenly over the ranks")
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
                "text": [f"p{p}" for p in marks], "hovertemplate": "%{text}: %{x:,.4~g} ms<extra></extra>",
            }
        )  # fmt: skip
        widest = max(widest, float(values.max()))
        positive = values[values > 0]
        least = min(least, float(positive.min()) if len(positive) and len(positive) == len(values) else 0.0)
    if not data:
        return None
    axis: Figure = {"title": {"text": f"{metric.upper() if metric != 'e2el' else 'E2E latency'}, ms"}}
    if least > 0 and widest / least > 20:
        axis |= {"type": "log", "dtick": 1}
    else:
        axis |= {"rangemode": "tozero"}
    return {
        "data": data,
        "layout": {
            "height": 300,
            "xaxis": axis,
            "yaxis": {"title": {"text": "share of samples"}, "range": [0, 1.02], "tickformat": ".0%"},
        },
        "note": "; ".join(thinned) or None,
    }


def samples_ms(run: Run, metric: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Every sample of one of the four metrics, milliseconds."""
    assert metric in DEFAULT_METRICS, metric
    frame = metrics.itl(run).select("itl") if metric == "itl" else metrics.per_request(run).select(metric)
    return frame.collect()[metric].drop_nulls().to_numpy() * 1000


PHASES = ("queued", "prefill", "decode", "stalled", "preempted")


def timeline_figure(run: Run, limit: int = MAX_GANTT) -> Figure | None:
    """A Gantt of requests in order of arrival: queued, prefill, decode, and over them the stalled and preempted stretches."""
    spans, shown, total = timeline(run, limit)
    while spans.height > MAX_SPANS and len(shown) > 10:
        spans, shown, total = timeline(run, len(shown) // 2)
    if not spans.height:
        return None
    order = {request: place for place, request in enumerate(shown)}
    data = []
    for phase in PHASES:
        rows = spans.filter(pl.col("phase") == phase)
        data.append(
            {
                "type": "bar", "orientation": "h", "name": phase, "meta": {"c": phase}, "base": rounded(rows["begin_s"]),
                "x": rounded(rows["end_s"] - rows["begin_s"]), "y": [order[request] for request in rows["request"]],
                "text": [plain(run.labels.get(request, f"#{request}")) for request in rows["request"]], "textposition": "none",
                "hovertemplate": "%{text}: " + phase + " %{x:.4~g} s from %{base:.4~g} s<extra></extra>",
            }
        )  # fmt: skip
    axis: Figure = {
        "autorange": "reversed",
        "title": {"text": "requests by arrival"},
        "showgrid": False,
        "zeroline": False,
    }
    if len(shown) <= 40:
        axis |= {
            "tickvals": list(range(len(shown))),
            "ticktext": [plain(run.labels.get(request, f"#{request}")) for request in shown],
            "title": None,
        }
    note = (
        None
        if len(shown) == total
        else f"{len(shown):,} of {total:,} requests are drawn, evenly spread over the arrivals"
    )
    height = min(max(160 + 16 * len(shown), 240), 620)
    return {
        "data": data,
        "layout": {
            "height": height,
            "barmode": "overlay",
            "bargap": 0.15,
            "xaxis": {"title": {"text": "time, s"}},
            "yaxis": axis,
        },
        "note": note,
    }


def timeline(run: Run, limit: int = MAX_GANTT) -> tuple[pl.DataFrame, list[int], int]:
    """(request, phase, begin_s, end_s), the requests in order of arrival, and how many there are in all.

    Stalled: between two of its rows without a preemption, where rounds passed it by. Preempted: from the round that took
    its blocks to the round that gave it new ones.
    """
    end = run.duration_s
    ended = run.scan("requests").select("request", "status", "first_scheduled_s", "first_token_s", "finished_s")
    seen = (
        run.scan("admissions")
        .select("request", "arrival_s")
        .join(ended, on="request", how="left")
        .sort("arrival_s", "request")
        .collect()
    )
    total = seen.height
    if total > limit:
        seen = seen[np.unique(np.linspace(0, total - 1, limit).round().astype(np.int64)).tolist()]
    shown = seen["request"].to_list()
    phases = []
    for phase, begin, stop in (
        ("queued", "arrival_s", "first_scheduled_s"),
        ("prefill", "first_scheduled_s", "first_token_s"),
        ("decode", "first_token_s", "finished_s"),
    ):
        phases.append(
            seen.filter(pl.col(begin).is_not_null()).select(
                "request",
                pl.lit(phase).alias("phase"),
                pl.col(begin).alias("begin_s"),
                pl.col(stop).fill_null(end).alias("end_s"),
            )
        )
    rounds = run.scan("rounds").select(
        "round", "t_start_s", "t_scheduled_s", "t_end_s", pl.int_range(pl.len()).alias("place")
    )
    mine = pl.col("request").is_in(shown)
    rows = (
        run.scan("batches")
        .filter(mine)
        .select("request", "round", "cached_tokens")
        .join(rounds, on="round")
        .sort("request", "round")
    )
    gap = rows.with_columns(
        pl.col("place").shift(1).over("request").alias("before"),
        pl.col("t_end_s").shift(1).over("request").alias("begin_s"),
    ).filter((pl.col("place") - pl.col("before") > 1) & pl.col("cached_tokens").is_null())
    phases.append(
        gap.select("request", pl.lit("stalled").alias("phase"), "begin_s", pl.col("t_start_s").alias("end_s")).collect()
    )
    changes = (
        run.scan("decisions").filter(mine & pl.col("kind").is_in(["preempt", "resume"])).select("request", "round", "kind", "order")
        .join(rounds, on="round").sort("request", "round", "order")
        .with_columns(pl.col("t_scheduled_s").shift(-1).over("request").fill_null(end).alias("until_s"))
    )  # fmt: skip
    phases.append(
        changes.filter(pl.col("kind") == "preempt")
        .select(
            "request",
            pl.lit("preempted").alias("phase"),
            pl.col("t_scheduled_s").alias("begin_s"),
            pl.col("until_s").alias("end_s"),
        )
        .collect()
    )
    return pl.concat(phases).filter(pl.col("end_s") > pl.col("begin_s")), shown, total
