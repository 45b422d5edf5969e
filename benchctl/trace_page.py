"""One offline page about a trace: its distributions drawn, with the numbers beside them. Needs plotly; nothing is fetched.

Texts from the trace are escaped, and reach figures as JSON whose `<` is spelled out, so none of them becomes markup.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchctl.trace_print import info_lines
from traces.errors import BenchctlError, printable
from traces.info import Floats, TraceInfo

MAX_POINTS = 2000  # of a curve; more are thinned to their quantiles
BINS = 300  # of the rate over time
BLUE, ORANGE, GREEN = "#4c8bf5", "#e8833a", "#3aa675"

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --paper: #fff; --line: #d7dce3 }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e8ef; --paper: #14181f; --line: #333b47 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
pre { overflow-x: auto; border: 1px solid var(--line); padding: .8rem } h2 { margin-top: 2rem; font-size: 1.1rem }
figure { margin: 1rem 0 } figcaption { font-size: .9rem } .plot { height: 320px }
.warning { border-left: 3px solid #e8833a; padding-left: .8rem; margin: .8rem 0 }
"""
_SCRIPT = """
const ink = () => getComputedStyle(document.documentElement).getPropertyValue('--ink').trim();
const line = () => getComputedStyle(document.documentElement).getPropertyValue('--line').trim();
const figures = JSON.parse(document.getElementById('figures').textContent);
function draw() {
  for (const [id, f] of Object.entries(figures)) {
    const axis = a => Object.assign({gridcolor: line(), zerolinecolor: line(), linecolor: line()}, a);
    Plotly.react(id, f.data, {paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)', font: {color: ink()},
      margin: {l: 60, r: 20, t: 10, b: 45}, xaxis: axis(f.x), yaxis: axis(f.y), legend: {orientation: 'h', y: 1.12}},
      {displayModeBar: false, responsive: true});
  }
}
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', draw);
draw();
"""


def write_trace_page(info: TraceInfo, out: Path) -> None:
    """Raises BenchctlError where plotly is missing or the page cannot be written."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise BenchctlError(
            f"the page needs {error.name}, which is not installed", fix="pip install plotly", exit_code=1
        ) from None
    figures = list(_figures(info))
    embedded = json.dumps({f"f{i}": figure for i, (_, _, figure) in enumerate(figures)}, allow_nan=False).replace(
        "<", "\\u003c"
    )
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'><title>{_safe(info.name)}</title>",
        f"<style>{_STYLE}</style><h1>{_safe(info.name)}</h1>",
        f"<pre>{html.escape(chr(10).join(info_lines(info)))}</pre>",
        *(
            f"<div class=warning><b>{_safe(w.what)}</b><br>{_safe(w.evidence)}<br>{_safe(w.cure)}</div>"
            for w in info.warnings
        ),
        *(
            f"<h2>{_safe(title)}</h2><figure><div class=plot id=f{i} role=img aria-label='{_safe(caption)}'></div><figcaption>{_safe(caption)}</figcaption></figure>"
            for i, (title, caption, _) in enumerate(figures)
        ),
        f"<h2>Header</h2><pre>{html.escape(json.dumps(info.header, indent=2, ensure_ascii=False, default=str))}</pre>",
        f"<script type=application/json id=figures>{embedded}</script>",
        f"<script>{get_plotlyjs()}</script><script>{_SCRIPT}</script></html>",
    ]
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text("\n".join(parts), encoding="utf-8")
        os.replace(temporary, out)
    except OSError as error:
        raise BenchctlError(
            f"the page cannot be written: {error}", where=str(out), fix="choose another place"
        ) from None


def _safe(text: object) -> str:
    return html.escape(printable(str(text)), quote=True)


Figure = tuple[str, str, dict[str, Any]]  # title, caption that says in words what is drawn, data with axes


def _figures(info: TraceInfo) -> Iterator[Figure]:
    series = info.series
    assert series is not None, info.name
    if info.arrivals.get("rate"):
        yield _rate_figure(series.arrivals, info)
        gaps = np.diff(series.arrivals)
        curve = _ecdf(gaps[gaps > 0], "gaps", BLUE)
        caption = f"Share of the gaps above 0 that are at most so long; {100 * info.arrivals['zero_share']:.1f} % of all are 0. CV {info.arrivals['cv']:.3f}."
        yield "Gaps between arrivals", caption, _plot([curve], "s", "share", log=True)
    known = ~np.isnan(series.inputs)
    curves = [_ecdf(series.outputs, "output", ORANGE)]
    if known.any():
        curves = [
            _ecdf(series.inputs[known], "prompt", BLUE),
            *curves,
            _ecdf((series.inputs + series.outputs)[known], "both", GREEN),
        ]
    words = "; ".join(f"{side} p50 {v['p50']:,.0f}, p99 {v['p99']:,.0f}" for side, v in info.lengths.items())
    yield (
        "Lengths",
        f"Share of the requests with at most so many tokens: {words}.",
        _plot(curves, "tokens", "share", log=True),
    )
    if len(series.turns) and series.turns.max() > 1:
        counts = np.bincount(series.turns.astype(np.int64))[1:]
        bars = {"type": "bar", "x": list(range(1, len(counts) + 1)), "y": counts.tolist(), "marker": {"color": BLUE}}
        yield (
            "Turns",
            f"Sessions by their number of turns; mean {info.sessions['turns_mean']:.2f}.",
            _plot([bars], "turns", "sessions"),
        )
    if len(series.thinks):
        curve = _ecdf(series.thinks[series.thinks > 0], "think time", BLUE)
        yield (
            "Think times",
            f"Share at most so long; median {info.sessions['think_s']['p50']:.3g} s.",
            _plot([curve], "s", "share", log=True),
        )
    prefix = info.prefix
    if prefix is not None and prefix.curve:
        line = {
            "x": [tokens for _, tokens, _ in prefix.curve],
            "y": [rate for _, _, rate in prefix.curve],
            "mode": "lines+markers",
            "name": "LRU",
        }
        line["line"] = {"color": BLUE}
        bound = {
            "x": [prefix.curve[0][1], prefix.curve[-1][1]],
            "y": [prefix.block_rate] * 2,
            "mode": "lines",
            "name": "without bound",
        }
        bound["line"] = {"color": ORANGE, "dash": "dot"}
        caption = f"Share of prompt blocks of {prefix.own_block_size} tokens hit, by what an LRU cache holds; {prefix.block_rate:.4f} without bound."
        yield "Prefix cache", caption, _plot([line, bound], "tokens held", "share hit", log=True)


def _rate_figure(arrivals: Floats, info: TraceInfo) -> Figure:
    span = float(arrivals[-1] - arrivals[0])
    counts, edges = np.histogram(arrivals - arrivals[0], bins=min(BINS, max(len(arrivals) // 4, 1)))
    width = span / len(counts)
    line = {
        "x": edges[:-1].tolist(),
        "y": (counts / width).tolist(),
        "mode": "lines",
        "line": {"shape": "hv", "color": BLUE},
    }
    caption = f"Requests/s in steps of {width:.3g} s; {info.arrivals['rate']:.4g}/s on average, at most {info.arrivals['peak_in_1_s']} within 1 s."
    return "Arrivals", caption, _plot([line], "s", "requests/s")


def _ecdf(values: Floats, name: str, color: str) -> dict[str, Any]:
    ordered = np.sort(values)
    if len(ordered) > MAX_POINTS:
        shares = np.linspace(0, 1, MAX_POINTS)
        ordered = np.quantile(ordered, shares, method="lower")
    else:
        shares = np.arange(1, len(ordered) + 1) / max(len(ordered), 1)
    return {
        "x": ordered.tolist(),
        "y": shares.tolist(),
        "mode": "lines",
        "name": name,
        "line": {"shape": "hv", "color": color},
    }


def _plot(data: list[dict[str, Any]], x: str, y: str, *, log: bool = False) -> dict[str, Any]:
    axis: dict[str, Any] = {"title": {"text": x}}
    if log:
        axis["type"] = "log"
    return {"data": data, "x": axis, "y": {"title": {"text": y}, "rangemode": "tozero"}}
