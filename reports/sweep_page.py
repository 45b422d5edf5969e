"""One offline HTML page about a sweep: which setting to use, how sure that is, and every setting behind it.

Made from the sweep's table. Texts pass through autoescaping, embedded JSON through `script_json`, and reach the script as text
nodes only, so no value of a spec can become markup. Looks and behaves as the report of runs does, and shares its assets.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from reports.figures import plain
from reports.page import _asset, _plotly, script_json
from reports.sweep_view import OBJECTIVES, Setting, SweepView, in_order, make_view
from reports.sweep_words import answer, effects, slo_text
from reports.terminal import METRIC_NAMES, number, share
from traces.errors import BenchctlError

SCRIPTS = ("data", "view", "figures", "sweep")
MAX_SETTINGS = 3_000  # embedded: those on a front and the best
MAX_PROBED = 6  # settings of the picture of probes: as many as there are colours
MAX_ROWS = 400  # of the table without JavaScript
FIGURES: dict[str, tuple[str, str, bool]] = {  # name -> (label, unit, higher is better)
    "rate": ("sustained rate", "requests/s", True),
    "request_goodput": ("goodput", "requests/s", True),
    "attainment": ("within the SLOs", "%", True),
    "output_throughput": ("output throughput", "tokens/s", True),
    "total_token_throughput": ("throughput with prompts", "tokens/s", True),
    "request_throughput": ("request throughput", "requests/s", True),
    **{
        f"p{p}_{metric}_ms": (f"{METRIC_NAMES[metric]} p{p}", "ms", False)
        for metric in ("ttft", "itl", "tpot", "e2el")
        for p in (99, 90, 50)
    },
    **{f"p{p}_max_itl_ms": (f"largest gap p{p}", "ms", False) for p in (99, 90)},
    "duration": ("duration", "s", False),
}
SHOWN = (
    "rate",
    "request_goodput",
    "attainment",
    "output_throughput",
    "p50_ttft_ms",
    "p99_ttft_ms",
    "p99_itl_ms",
    "p99_tpot_ms",
)


def write_sweep_page(
    frame: pl.DataFrame,
    names: Sequence[str],
    out: Path,
    *,
    slo: Mapping[str, float],
    attainment: float,
    simulation: Mapping[str, Any] | None = None,
    probes: pl.DataFrame | None = None,
    command: Sequence[str] = (),
    spec: str = "",
) -> Path:
    """Write the page and return where. `names`: columns of `frame` that are settings. Raises BenchctlError.

    `probes`: what a search for the highest rate tried: setting, rate, attainment, low, high, seeds, verdict.
    """
    view = make_view(frame, names, slo, attainment)
    page = render(view, simulation=simulation, probes=probes, command=command, spec=spec)
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        temporary.write_text(page, encoding="utf-8")
        os.replace(temporary, out)
    except OSError as error:
        raise BenchctlError(
            f"the page cannot be written: {error.strerror}", where=str(out), fix="make room there", exit_code=1
        ) from None
    return out


def render(
    view: SweepView,
    *,
    simulation: Mapping[str, Any] | None = None,
    probes: pl.DataFrame | None = None,
    command: Sequence[str] = (),
    spec: str = "",
) -> str:
    """The page as text."""
    environment = Environment(
        loader=PackageLoader("reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "share": share}
    label, unit = OBJECTIVES[view.mode][1:]
    kept, note = kept_settings(view)
    data = embedded(view, kept)
    tried, probed = probe_figure(probes, view.attainment) if probes is not None else (None, 0)
    title = Path(view.fixed.get("trace") or spec or "a sweep").name
    return environment.get_template("sweep.html").render(
        title=title,
        answer=answer(view),
        facts=facts(view, simulation),
        picks=[pick_row(view, key) for key in view.picks],
        workloads=view.workloads,
        objective={"label": label, "unit": unit},
        effects=effects(view),
        slo=slo_text(view),
        wanted=f"{100 * view.attainment:.4g}%",
        mode=view.mode,
        shown=[(name, *FIGURES[name][:2]) for name in SHOWN if name in view.figures],
        rows=[table_row(view, setting) for setting in kept[:MAX_ROWS]],
        more=max(len(view.settings) - MAX_ROWS, 0),
        columns=[*view.workloads, *view.choices],
        drawn=bool(view.picks),
        note=note,
        failed=view.failed[:200],
        num_failed=len(view.failed),
        num_settings=len(view.settings),
        num_cells=view.cells,
        fixed=view.fixed,
        command=shlex.join(command),
        pareto=[name for name in ("p99_ttft_ms", "p99_itl_ms") if name in view.figures and "output_throughput" in view.figures],
        probed=probed,
        probe_note=tried["note"] if tried else None,
        meta=script_json({"figures": {"probes": tried} if tried else {}, "sweep": data}),
        style=Markup(_asset("style.css") + _asset("sweep.css")),
        script=Markup("\n".join(_asset(f"{name}.js") for name in SCRIPTS)),
        plotly=Markup(_plotly()),
    )  # fmt: skip


def probe_figure(probes: pl.DataFrame, wanted: float) -> tuple[dict[str, Any], int]:
    """Attainment of each rate that was tried, with its interval, a colour a setting; and how many settings are left out."""
    data: list[dict[str, Any]] = []
    groups = probes.sort("rate").partition_by("setting", maintain_order=True)
    groups.sort(key=lambda group: -float(group.filter(pl.col("attainment") >= wanted)["rate"].max() or 0.0))  # type: ignore[arg-type]
    for place, group in enumerate(groups[:MAX_PROBED]):
        x, y = group["rate"].to_list(), [round(value * 100, 4) for value in group["attainment"]]
        role = {"c": f"run{place}"}
        data.append({"type": "scatter", "mode": "lines", "showlegend": False, "hoverinfo": "skip", "name": "", "x": x, "y": y,
                     "line": {"width": 1}, "meta": role})  # fmt: skip
        data.append(
            {
                "type": "scatter", "mode": "markers", "name": plain(str(group["setting"][0]) or "the setting"), "x": x, "y": y,
                "meta": role | {"marks": True}, "text": [f"{verdict}, {seeds} seeds" for verdict, seeds in group.select("verdict", "seeds").iter_rows()],
                "error_y": {
                    "type": "data", "symmetric": False, "thickness": 1.5, "width": 4,
                    "array": [round((high - mean) * 100, 4) for mean, high in group.select("attainment", "high").iter_rows()],
                    "arrayminus": [round((mean - low) * 100, 4) for mean, low in group.select("attainment", "low").iter_rows()],
                },
                "hovertemplate": "%{x:,.4~g} requests/s: %{y:.2f} %, %{text}<extra></extra>",
            }
        )  # fmt: skip
    # Around the wanted share, where it is decided; rates far beyond lie under the picture.
    lowest = float(probes["attainment"].min() or 0.0)  # type: ignore[arg-type]
    floor = max(lowest - 0.01, 1 - 8 * max(1 - wanted, 0.002), 0.0)
    note = None
    if floor > lowest:
        note = f"Rates with less than {floor:.0%} lie under the picture; the table has them"
    rates = probes["rate"]
    wide = float(rates.max() or 1.0) > 8 * float(rates.min() or 1.0)  # type: ignore[arg-type]
    level = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": wanted * 100, "y1": wanted * 100}
    layout = {
        "height": 380,
        "xaxis": {"title": {"text": "request rate, a second"}} | ({"type": "log", "dtick": "D2"} if wide else {}),
        "yaxis": {
            "title": {"text": "requests within the SLOs, %"},
            "range": [floor * 100, 100 + (1 - floor) * 4],
        },
        "shapes": [level | {"line": {"width": 1.5, "dash": "dot"}}],
    }
    return {"data": data, "layout": layout, "note": note}, max(len(groups) - MAX_PROBED, 0)


def kept_settings(view: SweepView) -> tuple[list[Setting], str | None]:
    """Settings by their objective, best first; of very many only the best, and it says so."""
    name = view.objective
    ordered = sorted(
        view.settings,
        key=lambda s: (s.status != "complete", -(s.figures[name][0] if name in s.figures else float("-inf")), s.place),
    )
    if len(ordered) <= MAX_SETTINGS:
        return ordered, None
    picked = {pick.setting.place for pick in view.picks.values()}
    kept = ordered[:MAX_SETTINGS] + [s for s in ordered[MAX_SETTINGS:] if s.place in picked]
    return kept, f"The pictures hold the best {MAX_SETTINGS:,} of {len(ordered):,} settings; sweep.parquet has all."


def embedded(view: SweepView, settings: Sequence[Setting]) -> dict[str, Any]:
    """What the page's script draws from: values of each axis in order, and a row a setting."""
    axes = [*view.workloads, *view.choices]
    values = {name: in_order({setting.values[name] for setting in settings}) for name in axes}
    at = {name: {value: i for i, value in enumerate(values[name])} for name in axes}
    figures = [name for name in FIGURES if name in view.figures]
    return {
        "axes": [{"name": name, "values": [short(value) for value in values[name]]} for name in axes],
        "workloads": list(view.workloads),
        "matters": [axis for axis, *_ in effects(view)],  # most first
        "figures": [
            {"key": name, "label": FIGURES[name][0], "unit": FIGURES[name][1], "higher": FIGURES[name][2]}
            for name in figures
        ],
        "objective": view.objective,
        "mode": view.mode,
        "slo": {f"p99_{metric}_ms": limit for metric, limit in view.slo.items()},
        "attainment": view.attainment,
        "repeats": view.repeats,
        "picks": [pick.setting.place for pick in view.picks.values()],
        "rows": [
            {
                "id": setting.place,
                "v": [at[name][setting.values[name]] for name in axes],
                "f": [trimmed(setting.figures.get(name)) for name in figures],
                "s": setting.status,
                "name": plain(view.name_of(setting)),
            }
            for setting in settings
        ],
    }


def trimmed(span: tuple[float, float, float] | None) -> list[float] | None:
    """[mean] where repeats do not differ, else [mean, least, greatest]; six digits."""
    if span is None:
        return None
    digits = [float(f"{value:.6g}") for value in span]
    return digits[:1] if digits[1] == digits[2] else digits


def short(value: str | None) -> str:
    """As it is read on an axis: of a path its name."""
    return "not given" if value is None else Path(value).name if "/" in value else value


def figure_text(name: str, span: tuple[float, float, float] | None) -> str:
    """Mean, and ± half the spread of the repeats where they differ."""
    if span is None:
        return number(None)
    mean, least, greatest = span
    if name == "attainment":
        return f"{mean:.2%}"
    spread = f" ±{number((greatest - least) / 2)}" if greatest > least else ""
    return number(mean) + spread


def table_row(view: SweepView, setting: Setting) -> dict[str, Any]:
    best = any(pick.setting is setting for pick in view.picks.values())
    return {
        "id": setting.place,
        "best": best,
        "cells": [short(setting.values[name]) for name in (*view.workloads, *view.choices)],
        "figures": [figure_text(name, setting.figures.get(name)) for name in SHOWN if name in view.figures],
        "status": setting.status,
    }


def pick_row(view: SweepView, key: tuple[str | None, ...]) -> dict[str, Any]:
    """The best setting of a workload as a card."""
    pick = view.picks[key]
    label, unit = OBJECTIVES[view.mode][1:]
    setting = pick.setting
    bar = None
    if view.mode == "rate":
        low, high = setting.mean("rate_low"), setting.mean("rate_high")
        bar = f"{number(low) if low else 'no bound'} to {number(high) if high is not None else 'no bound'}"
    elif setting.figures[view.objective][1] < setting.figures[view.objective][2]:
        bar = f"{number(setting.figures[view.objective][1])} to {number(setting.figures[view.objective][2])} over {setting.repeats} repeats"
    return {
        "workload": view.workload_name(key),
        "choices": [(name, short(setting.values[name])) for name in view.choices],
        "value": number(setting.figures[view.objective][0]),
        "label": label,
        "unit": unit,
        "bar": bar,
        "meets": pick.meets,
        "attainment": share(setting.mean("attainment")) if view.slo else None,
        "margins": [
            {
                "metric": METRIC_NAMES[m.metric],
                "percentile": m.percentile,
                "value": number(m.value),
                "limit": f"{m.limit:g}",
                "left": f"{abs(m.left):.0%} {'to spare' if m.left >= 0 else 'beyond'}",
                "fill": max(0.0, min(m.value / m.limit, 1.0)),
                "over": m.left < 0,
                "error": error_text(view, m.spread),
            }
            for m in pick.margins
        ],
        "tied": len(pick.tied),
    }


def error_text(view: SweepView, spread: float) -> str:
    parts = [f"repeats ±{spread:.1%}"] if view.repeats > 1 else []
    parts += [f"profile ±{view.error:.1%}"] if view.error is not None else []
    return ", ".join(parts) or "error not known"


def facts(view: SweepView, simulation: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """What was swept, beside the answer."""
    same = view.cells == len(view.settings)
    out = [("settings", f"{len(view.settings):,}" + ("" if same else f", {view.cells:,} cells"))]
    if view.repeats > 1:
        out.append(("repeats", f"{view.repeats} of each, seeds one apart; figures are means"))
    for name in ("trace", "engine", "request-rate", "num-prompts"):
        if name in view.fixed:
            out.append((name, short(view.fixed[name])))
    if view.slo:
        out.append(("SLOs", f"{slo_text(view)}, for {100 * view.attainment:.4g}% of the requests"))
    if simulation is not None:
        out.append(("profile", f"{simulation.get('profile')}, {simulation.get('device')}"))
        error = simulation.get("error")
        text = str(simulation.get("error_is"))
        out.append(("its error", text if error is None else f"±{error:.1%}: {text}"))
    return out
