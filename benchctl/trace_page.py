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
h1 { margin: 0 0 .3rem; font-size: 1.6rem; overflow-wrap: anywhere } h2 { margin: 2rem 0 .5rem; font-size: 1.1rem }
.soft { color: color-mix(in srgb, var(--ink) 65%, var(--paper)); font-size: .85rem; overflow-wrap: anywhere }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(8rem, 1fr)); gap: .6rem; margin: 1.2rem 0 }
dl div { border: 1px solid var(--line); border-radius: 6px; padding: .5rem .7rem } dt { font-size: .85rem }
dd { margin: 0; font-size: 1.25rem; font-variant-numeric: tabular-nums } dd small { display: block; font-size: .8rem }
.wide { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap }
th:first-child { text-align: left; padding-left: 0 } thead th { font-weight: normal; font-size: .85rem }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85rem } summary { cursor: pointer; margin-top: 1rem }
figure { margin: .5rem 0 0 } figcaption { font-size: .9rem } .plot { height: 300px }
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
        f"<style>{_STYLE}</style><h1>{_safe(info.name)}</h1><div class=soft>{_safe(_origin(info))}</div>",
        "<dl>",
        *(
            f"<div><dt>{_safe(name)}</dt><dd>{_safe(value)}<small class=soft>{_safe(more)}</small></dd></div>"
            for name, value, more in _tiles(info)
        ),
        "</dl>",
        *(
            f"<div class=warning><b>{_safe(w.what)}</b><br>{_safe(w.evidence)}<br>{_safe(w.cure)}</div>"
            for w in info.warnings
        ),
        _length_table(info),
        *(
            f"<h2>{_safe(title)}</h2><figure><div class=plot id=f{i} role=img aria-label='{_safe(caption)}'></div><figcaption>{_safe(caption)}</figcaption></figure>"
            for i, (title, caption, _) in enumerate(figures)
        ),
        f"<h2>In full</h2><details><summary>Everything that trace info says</summary><pre>{html.escape(chr(10).join(info_lines(info)))}</pre></details>",
        f"<details><summary>The trace's header</summary><pre>{html.escape(json.dumps(info.header, ensure_ascii=False, indent=1, default=str))}</pre></details>",
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


def _origin(info: TraceInfo) -> str:
    licence = info.header.get("licence")
    return f"{f'{licence} · ' if licence else ''}sha256 {info.sha256}"


def _tiles(info: TraceInfo) -> Iterator[tuple[str, str, str]]:
    """(name, value, what stands below it) of the figures that are looked at first."""
    arrivals, prefix = info.arrivals, info.prefix
    yield "requests", f"{info.num_requests:,}", f"{info.num_sessions:,} sessions" if info.num_sessions else ""
    if "rate" in arrivals:
        yield "span", _duration(info.span_s), f"{info.span_s:,.3f} s"
        yield "rate", f"{arrivals['rate']:.4g}/s", f"at most {arrivals['peak_in_1_s']} within 1 s"
        zeros = f"{100 * arrivals['zero_share']:.1f} % of the gaps are 0" if arrivals["zero_gaps"] else "no two at once"
        yield "CV of the gaps", f"{arrivals['cv']:.2f}", zeros
    for side, name in (("input", "prompt, median"), ("output", "output, median")):
        if side in info.lengths:
            found = info.lengths[side]
            yield name, f"{found['p50']:,.0f}", f"tokens; p99 {found['p99']:,.0f}"
    if info.context:
        yield "context needed", f"{info.context['1']:,}", f"tokens for all; {info.context['0.99']:,} for 99 %"
    if info.sessions:
        yield "turns, median", f"{info.sessions['turns_p50']}", f"mean {info.sessions['turns_mean']:.2f}"
    if prefix is not None:
        yield "shared prefix", f"{100 * prefix.token_rate:.1f} %", f"of prompt tokens, blocks of {prefix.block_size}"


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def _length_table(info: TraceInfo) -> str:
    columns = ("mean", "p10", "p50", "p90", "p95", "p99", "p100")
    head = "".join(f"<th scope=col>{'max' if name == 'p100' else name}</th>" for name in columns)
    rows = "".join(
        f"<tr><th scope=row>{side}</th>{''.join(f'<td>{found[name]:,.0f}</td>' for name in columns)}</tr>"
        for side, found in info.lengths.items()
    )
    return f"<h2>Tokens</h2><div class=wide tabindex=0><table><thead><tr><th scope=col>tokens</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>"


Figure = tuple[str, str, dict[str, Any]]  # title, caption that says in words what is drawn, data with axes


def _figures(info: TraceInfo) -> Iterator[Figure]:
    series = info.series
    assert series is not None, info.name
    if info.arrivals.get("rate"):
        yield _rate_figure(series.arrivals, info)
        gaps = np.diff(series.arrivals)
        curve = _ecdf(gaps[gaps > 0], "gaps", BLUE)
        caption = f"Share of the gaps above 0 that are at most so long; {100 * info.arrivals['zero_share']:.1f} % of all are 0. CV {info.arrivals['cv']:.3f}."
        yield "Gaps between arrivals", caption, _plot([curve], "gap, s", "share of the gaps", log=True)
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
        _plot(curves, "tokens", "share of the requests", log=True),
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
            _plot([curve], "think time, s", "share of the turns", log=True),
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
    width = span / min(BINS, max(len(arrivals) // 4, 1))
    tick = info.arrivals["smallest_gap_s"]
    if info.arrivals["zero_share"] > 0.5 and tick:
        width = tick * max(np.ceil(width / tick), 2)  # whole ticks, else the steps beat against the clock
    edges = np.arange(int(span / width) + 2) * width
    counts, _ = np.histogram(arrivals - arrivals[0], bins=edges)
    line = {
        "x": edges[:-1].tolist(),
        "y": (counts / width).tolist(),
        "mode": "lines",
        "line": {"shape": "hv", "color": BLUE},
    }
    caption = f"Requests/s in steps of {width:.3g} s; {info.arrivals['rate']:.4g}/s on average, at most {info.arrivals['peak_in_1_s']} within 1 s."
    return "Arrivals", caption, _plot([line], "time, s", "requests/s")


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
        values = [x for curve in data for x in curve["x"] if x > 0]
        low, high = np.log10(min(values, default=1)), np.log10(max(values, default=1))
        axis["dtick"] = 1  # decades: more of them do not fit on a narrow page
        if high - low < 1:
            # Less than a decade: its surroundings, so that nearly equal values look so.
            middle = (low + high) / 2
            axis |= {"range": [float(middle - 0.6), float(middle + 0.6)], "dtick": "D2"}
    return {"data": data, "x": axis, "y": {"title": {"text": y}, "rangemode": "tozero"}}
