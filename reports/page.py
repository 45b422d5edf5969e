"""One offline HTML page about one or more runs: figures, tables, round table with reasons, formulas, manifest.

Reads run folders only. Texts from a trace pass through autoescaping, embedded JSON through `script_json`, and reach the
page's script as text nodes only, so none of them can become markup. plotly.js is inlined once; nothing is fetched.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import polars as pl
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from reports import figures, glossary, metrics
from reports.blockmap import BlockMap, block_map
from reports.checks import Check, checks, checks_across
from reports.formulas import FORMULAS, PERCENTILE_RULE, SYMBOLS
from reports.rounds import RoundText, round_texts
from reports.run import Run, open_runs
from reports.summary import DEFAULT_METRICS, Summary, summarize
from reports.terminal import MARKS, column_names, number
from reports.verdict import cards, lines, sentences
from traces.errors import BenchctlError

MAX_BYTES = 10_000_000
MAX_ROWS = 2_000  # of a round table, all runs together
MAX_REQUEST_ROWS = 300
LONGEST_TEXT = 120  # of an id or a cell
LONGEST_MANIFEST = 100_000


@dataclass(frozen=True, slots=True)
class RunView:
    """One run as the template draws it."""

    name: str
    index: int  # among the runs of the page
    place: int  # of its colour
    facts: list[tuple[str, str]]
    rounds: list[RoundText]
    rounds_note: str | None
    requests: list[tuple[str, ...]]
    requests_note: str | None
    blocks: BlockMap | None
    stops: list[tuple[str, str, str, int, float]]  # loop, reason, meaning, rounds, share of the largest
    differs: list[tuple[str, str]]  # setting, how it differs from the real system's default
    command: str
    manifest: str


def write_report(run_paths: Sequence[str | Path], out_path: str | Path) -> Path:
    """Write the page about all runs found at `run_paths` to `out_path`, and return it.

    Raises BenchctlError where a path holds no run, or the page cannot be written.
    """
    out = Path(out_path)
    page = render(open_runs(run_paths))
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


def render(runs: Sequence[Run], lead: str = "") -> str:
    """The page as text, at most MAX_BYTES: tables and timelines are cut shorter where several large runs share it.

    `lead`: HTML, escaped already, of a section that stands before the summary (a comparison).
    """
    if not runs:
        raise BenchctlError("there is no run to report on", fix="give one or more run folders")
    names = column_names([{"name": run.name, "path": str(run.path)} for run in runs])
    rows = MAX_ROWS
    while True:
        page = _render(runs, names, rows, lead)
        if len(page.encode()) <= MAX_BYTES or rows < 50:
            return page
        rows //= 3


def _render(runs: Sequence[Run], names: Sequence[str], rows: int, lead: str) -> str:
    summaries = [summarize(run) for run in runs]
    per_run = max(rows // len(runs), 20)
    views = [
        _view(run, name, place, summary, per_run)
        for place, (run, name, summary) in enumerate(zip(runs, names, summaries, strict=True))
    ]
    drawn = _figures(runs, names, views, rows)
    found = [_finding(check, "") for check in checks_across(list(runs))] + _run_checks(runs, names)
    environment = Environment(
        loader=PackageLoader("reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        title=f"{_trace_name(runs[0])}: {' and '.join(names)}",
        trace=_trace_name(runs[0]),
        lead=Markup(lead),
        names=names,
        views=views,
        verdict=sentences(summaries, names),
        cards=cards(summaries),
        lines=lines(summaries),
        checks=found,
        figures={name: {"note": figure["note"]} for name, figure in drawn.items()},
        figure_json=script_json(drawn),
        metrics=[metric for metric in DEFAULT_METRICS if f"ecdf-{metric}" in drawn],
        formulas=[(name, *entry) for name, entry in FORMULAS.items()],
        symbols=SYMBOLS,
        percentile_rule=PERCENTILE_RULE,
        glossary={
            "decisions": glossary.DECISION_KINDS,
            "reasons": glossary.REASONS,
            "stops": glossary.STOPS,
            "block events": glossary.BLOCK_EVENTS,
        },
        columns=glossary.columns(),
        style=Markup(_asset("style.css")),
        script=Markup(_asset("page.js")),
        plotly=Markup(get_plotlyjs().replace("</script", "<\\/script")),
    )


def script_json(value: Any) -> Markup:
    """JSON that is safe inside a script element: no `<`, `>` or `&`, so neither `</script>` nor `<!--` can be in it."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _asset(name: str) -> str:
    return (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")


def _trace_name(run: Run) -> str:
    trace = run.manifest.get("trace")
    name = trace.get("name") or trace.get("path") if isinstance(trace, dict) else trace
    return shortened(str(name or run.path.parent.name))


def shortened(text: str, longest: int = LONGEST_TEXT) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _run_checks(runs: Sequence[Run], names: Sequence[str]) -> list[dict[str, str]]:
    """The findings of every run; equal ones are said once, for all they are true of."""
    about: dict[Any, list[str]] = {}
    for run, name in zip(runs, names, strict=True):
        for check in checks(run):
            about.setdefault(check, []).append(name)
    order = list(MARKS)
    ranked = sorted(about.items(), key=lambda item: order.index(item[0].level))
    return [_finding(check, ", ".join(where) if len(runs) > 1 else "") for check, where in ranked]


def _finding(check: Check, about: str) -> dict[str, str]:
    """A check as sentences: `what` and `cure` begin with a capital; `evidence` may begin with a run's name."""
    text = check.as_dict()
    return text | {
        "run": about,
        "what": text["what"][:1].upper() + text["what"][1:],
        "cure": text["cure"][:1].upper() + text["cure"][1:] + ".",
    }


def _view(run: Run, name: str, place: int, summary: Summary, rows: int) -> RunView:
    total = run.read("rounds").height
    numbers = run.read("rounds")["round"].to_list()[:rows]
    texts = list(islice(round_texts(run, numbers[-1]), rows)) if numbers else []
    requests, requests_note = _requests(run)
    manifest = json.dumps(run.manifest, indent=2, ensure_ascii=False, default=str)
    command, differs = run.manifest.get("command"), run.manifest.get("policy_differs")
    return RunView(
        name=name,
        index=place,
        place=place % 6,
        facts=_facts(run, summary),
        rounds=texts,
        rounds_note=None
        if total <= rows
        else f"The first {len(texts):,} of {total:,} rounds are listed; all of them are in the run folder's tables.",
        requests=requests,
        requests_note=requests_note,
        blocks=block_map(run),
        stops=_stops(summary),
        differs=[(str(key), str(value)) for key, value in differs.items()] if isinstance(differs, dict) else [],
        command=" ".join(map(str, command)) if isinstance(command, list) else str(command or ""),
        manifest=manifest
        if len(manifest) <= LONGEST_MANIFEST
        else manifest[:LONGEST_MANIFEST] + "\n… cut here; the whole stands in manifest.json",
    )


def _facts(run: Run, summary: Summary) -> list[tuple[str, str]]:
    identity = summary["benchctl"]["run"]
    model = run.manifest.get("model")
    model = model.get("name") if isinstance(model, dict) else model
    facts = [
        ("policy", identity["policy"] or run.scheduler),
        ("engine", " · ".join(str(part) for part in (run.engine, model) if part)),
        ("device", _device(run)),
        ("clock", run.clock),
        ("KV pool", f"{number(run.usable_blocks)} blocks of {number(run.block_size)} tokens"),
        ("budget", f"{number(run.token_budget)} tokens, {number(run.max_num_seqs)} sequences"),
        ("status", run.status),
    ]
    return [(label, shortened(str(value))) for label, value in facts if value not in (None, "")]


def _device(run: Run) -> str | None:
    hardware = run.manifest.get("hardware")
    if not isinstance(hardware, dict) or run.engine in ("null", "simulated"):
        return None
    gpu = hardware.get("gpu")
    on_gpu = str(run.manifest.get("device") or run.setting("device") or "cuda").startswith("cuda")
    if isinstance(gpu, dict) and on_gpu:
        return str(gpu.get("name"))
    return (
        " · ".join(
            str(part)
            for part in (hardware.get("cpu"), f"{hardware['cores']} cores" if hardware.get("cores") else None)
            if part
        )
        or None
    )


def _stops(summary: Summary) -> list[tuple[str, str, str, int, float]]:
    stops = summary["benchctl"]["stops"]
    most = max((count for counts in stops.values() for count in counts.values()), default=1)
    return [
        (loop, reason, glossary.STOPS.get(reason, ""), count, count / most)
        for loop, counts in stops.items()
        for reason, count in counts.items()
    ]


def _requests(run: Run) -> tuple[list[tuple[str, ...]], str | None]:
    """Rows of the table behind the timeline: the requests in order of arrival, the first MAX_REQUEST_ROWS of them."""
    frame = (
        run.scan("requests")
        .with_columns(expression().alias(name) for name, expression in metrics.PER_REQUEST.items())
        .sort("arrival_s", "request")
    )
    total = frame.select(pl.len()).collect().item()
    out = []
    for row in frame.head(MAX_REQUEST_ROWS).collect().iter_rows(named=True):
        times = tuple(
            number(None if row[key] is None else row[key] * 1000)
            for key in ("ttft", "e2el", "queue", "prefill", "decode", "stalled", "preempted")
        )
        status = row["status"] if row["reason"] in (None, "max_tokens") else f"{row['status']}: {row['reason']}"
        counts = tuple(
            number(row[key])
            for key in ("prompt_tokens", "emitted_tokens", "cached_tokens", "recomputed_tokens", "preemptions")
        )
        out.append(
            (str(row["request"]), shortened(row["id"] or "", 60), status, number(row["arrival_s"], 3), *counts, *times)
        )
    note = None if total <= MAX_REQUEST_ROWS else f"The first {MAX_REQUEST_ROWS} of {total:,} requests by arrival."
    return out, note


def _figures(
    runs: Sequence[Run], names: Sequence[str], views: Sequence[RunView], rows: int
) -> dict[str, dict[str, Any]]:
    """Every figure of the page by the id of its place. `rows` shrinks where the page would grow too large."""
    share = min(1.0, 2 / len(runs)) * min(1.0, rows / MAX_ROWS)
    drawn: dict[str, Any] = {}
    for place, run in enumerate(runs):
        drawn[f"rounds-{place}"] = figures.rounds_figure(run, max(int(figures.MAX_POINTS * share), 200))
        drawn[f"timeline-{place}"] = figures.timeline_figure(run, max(int(figures.MAX_GANTT * share), 20))
        blocks = views[place].blocks
        drawn[f"blocks-{place}"] = blocks.heatmap if blocks else None
    drawn["cache"] = figures.cache_figure(runs, names)
    for metric in DEFAULT_METRICS:
        drawn[f"ecdf-{metric}"] = figures.ecdf_figure(runs, names, metric)
    return {name: figure for name, figure in drawn.items() if figure is not None}
