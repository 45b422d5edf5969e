"""One offline HTML page about one or more runs of a trace: what the scheduler did, why, and what it cost.

Reads run folders only. Texts from a trace pass through autoescaping, embedded JSON through `script_json`, and reach the
page's script as text nodes only, so none of them can become markup. plotly.js is inlined once, deflated; nothing is fetched.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import polars as pl
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from reports import figures as draw
from reports import glossary, metrics
from reports.answers import answers
from reports.checks import checks
from reports.checks_across import checks_across
from reports.findings import merge
from reports.formulas import FORMULAS, PERCENTILE_RULE, SYMBOLS
from reports.numbers import number, share, unequal
from reports.page_data import DETAILS, embed
from reports.page_pair import deltas, differing_settings, judge, refuse_other_traces, single_measured
from reports.page_view import RunView, make_view, trace_name
from reports.roofline import ceilings_of
from reports.run import Run, open_runs
from reports.summary import DEFAULT_METRICS, Summary, summarize
from reports.terminal import METRIC_NAMES, column_names
from reports.units import Unit
from reports.verdict import cards, lines, sentences, unit_for
from reports.verified import verified
from traces.errors import BenchctlError

MAX_BYTES = 10_000_000
SCRIPTS = ("data", "words", "view", "canvas", "rounds", "why", "blocks", "requests", "figures", "main")


def write_report(run_paths: Sequence[str | Path], out_path: str | Path) -> Path:
    """Write the page about all runs found at `run_paths` to `out_path`, and return it.

    Raises BenchctlError where a path holds no run, runs replayed different traces, or the page cannot be written.
    """
    return write_runs(open_runs(run_paths), Path(out_path))


def write_runs(runs: Sequence[Run], out: Path) -> Path:
    """The same of runs that are open already."""
    page = render(runs)
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(page, encoding="utf-8")
        os.replace(temporary, out)
    except OSError as error:
        raise BenchctlError(
            f"the report cannot be written: {error}", where=str(out), fix="choose another place with -o"
        ) from None
    return out


def render(runs: Sequence[Run], first_section: str = "") -> str:
    """The page as text, at most MAX_BYTES: where several large runs share it, less of each is embedded, and it says so.

    `first_section`: the inside of a section to stand before the others, as HTML that its maker has escaped.
    """
    if not runs:
        raise BenchctlError("there is no run to report on", fix="give one or more run folders")
    names = column_names([{"name": run.name, "path": run.shown} for run in runs])
    refuse_other_traces(runs, names)
    context = _context(runs, names) | {"first_section": Markup(first_section)}
    for detail in DETAILS:
        packed = [Markup(embed(run, detail)) for run in runs]
        page = _template(context["unit"]).render(context, packed=packed, detail_notes=detail.notes)
        if len(page.encode()) <= MAX_BYTES:
            return page
    raise BenchctlError(
        f"{len(runs)} runs of {sum(run.read('rounds').height for run in runs):,} rounds do not fit one page of {MAX_BYTES / 1e6:.0f} MB",
        fix="report on fewer runs at a time",
    )


def _template(unit: Unit) -> Template:
    environment = Environment(
        loader=PackageLoader("reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number,
        "share": share,
        "latency": lambda seconds: unit.figure(seconds * 1000),
        "said": lambda seconds: unit.said(seconds * 1000),
    }
    return environment.get_template("page.html")


def _context(runs: Sequence[Run], names: Sequence[str]) -> dict[str, Any]:
    """Everything that the template shows, but for the embedded runs."""
    summaries = [summarize(run) for run in runs]
    gaps = [metrics.itl(run).collect() for run in runs]
    views = [make_view(run, names[k], k, summaries[k], gaps[k]) for k, run in enumerate(runs)]
    figures = _figures(runs, names, summaries, views, gaps)
    several = len(runs) > 1
    meta = {"figures": figures, "stops": glossary.STOPS, "reasons": glossary.REASONS}
    return {
        "title": f"{trace_name(runs[0])}: {' and '.join(names)}",
        "trace": trace_name(runs[0]),
        "names": names,
        "views": views,
        "verdict": sentences(summaries, names, single_measured(runs)),
        "answers": answers(runs, names, summaries, [v.slow for v in views], [v.spikes for v in views], gaps),
        "cards": cards(summaries),
        "lines": lines(summaries),
        "ceiling_notes": _ceiling_notes(views) if "roofline" in figures else [],
        "unequal_blocks": " and ".join(f"{run.block_size:,}" for run in runs)
        if unequal([run.block_size for run in runs])
        else "",
        "unit": unit_for(summaries),
        "deltas": deltas(summaries, judge(runs, summaries)) if several else [],
        "settings": differing_settings(runs),
        "verified": verified(runs),
        "checks": [_finding(check.as_dict(), "") for check in checks_across(list(runs))] + _run_checks(runs, names),
        "axis": "time" if several and runs[0].clock != "rounds" else "round",
        "figures": {name: {"note": figure["note"]} for name, figure in figures.items()},
        "meta": script_json(meta),
        "metrics": [metric for metric in DEFAULT_METRICS if f"ecdf-{metric}" in figures],
        "metric_names": METRIC_NAMES,
        "formulas": [(name, *entry) for name, entry in FORMULAS.items()],
        "symbols": SYMBOLS,
        "percentile_rule": PERCENTILE_RULE,
        "overlapped": [name for run, name in zip(runs, names, strict=True) if run.manifest.get("overlapped")],
        "glossary": {
            "decisions": glossary.DECISION_KINDS,
            "reasons": glossary.REASONS,
            "stops": glossary.STOPS,
            "block events": glossary.BLOCK_EVENTS,
            "times": glossary.TIMES,
        },
        "columns": glossary.columns(),
        "style": Markup(_asset("style.css")),
        "script": Markup("\n".join(_asset(f"{name}.js") for name in SCRIPTS)),
        "plotly": Markup(_plotly()),
    }


def script_json(value: Any) -> Markup:
    """JSON that is safe inside a script element: no `<`, `>` or `&`, so neither `</script>` nor `<!--` can be in it."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


@lru_cache(1)
def _plotly() -> str:
    """plotly.js, deflated and as base64: 1.9 MB in place of 4.8, and no text in it can end a script element."""
    return base64.b64encode(zlib.compress(get_plotlyjs().encode(), 9)).decode("ascii")


@lru_cache
def _asset(name: str) -> str:
    return (Path(__file__).parent / "assets" / name).read_text(encoding="utf-8")


def _run_checks(runs: Sequence[Run], names: Sequence[str]) -> list[dict[str, str]]:
    """The findings of every run, each once, for all it is true of."""
    found = [[check.as_dict() for check in checks(run)] for run in runs]
    return [
        _finding(finding._asdict(), ", ".join(finding.runs) if len(runs) > 1 else "") for finding in merge(found, names)
    ]


def _ceiling_notes(views: Sequence[RunView]) -> list[str]:
    """Where the roof comes from: once for all runs it is true of."""
    about: dict[str, list[str]] = {}
    for view in views:
        if view.ceilings is None:
            text = "No ceilings have been measured for this device, so there is no roof to hold the rounds against: benchctl doctor --measure measures them for the runs that follow."
        elif view.ceilings.own:
            text = f"Ceilings: {view.ceilings.source}."
        else:
            text = (
                f"The ceilings were not measured on this machine but on another of the same device: {view.ceilings.source}. "
                "benchctl doctor --measure measures this one's for the runs that follow."
            )
        about.setdefault(text, []).append(view.name)
    return [text if len(about) == 1 else f"{', '.join(names)}: {text}" for text, names in about.items()]


def _finding(text: Mapping[str, Any], about: str) -> dict[str, str]:
    """A check as sentences: `what` and `cure` begin with a capital; `evidence` may begin with a run's name."""
    return {
        "level": text["level"],
        "evidence": text["evidence"],
        "run": about,
        "what": text["what"][:1].upper() + text["what"][1:],
        "cure": text["cure"][:1].upper() + text["cure"][1:] + ".",
    }


def _figures(
    runs: Sequence[Run],
    names: Sequence[str],
    summaries: Sequence[Summary],
    views: Sequence[RunView],
    gaps: Sequence[pl.DataFrame],
) -> dict[str, dict[str, Any]]:
    """Every Plotly figure of the page by the id of its place."""
    unit = unit_for(summaries)
    drawn: dict[str, Any] = {
        "cache": draw.cache_figure(runs, names, unit),
        "split": draw.split_figure(summaries, names, unit),
    }
    for metric in DEFAULT_METRICS:
        drawn[f"ecdf-{metric}"] = draw.ecdf_figure(runs, names, metric, unit)
    drawn["itl-time"] = draw.itl_figure(gaps, names, unit)
    roof = ceilings_of(runs[0])
    drawn["roofline"] = draw.roofline_figure(runs, names, (roof.flops_per_s, roof.bytes_per_s) if roof else None)
    for view in views:
        if view.pool is not None:
            owners, ages = view.pool
            usable = runs[view.index].usable_blocks or 0
            drawn[f"pool-owners-{view.index}"] = draw.pool_figure(
                owners, {"decoding": "decode", "prefilling": "prefill", "shared": "shared", "reusable": "cached-free", "free": "free"}, usable, unit
            )  # fmt: skip
            drawn[f"pool-ages-{view.index}"] = draw.pool_figure(
                ages, dict(zip(ages.columns[2:], ("age0", "age1", "age2", "age3"), strict=True)), usable, unit
            )
    return {name: figure for name, figure in drawn.items() if figure is not None}
