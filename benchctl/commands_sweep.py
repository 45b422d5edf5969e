"""`benchctl sweep`, behind its flags. Heavy imports stand inside."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchctl.app import app, exit_with, opt, out_opt
from traces.errors import BenchctlError

if TYPE_CHECKING:
    import polars as pl

    from benchctl.find_rate import Search
    from benchctl.sweep import Store
    from benchctl.sweep_spec import Cell
    from benchctl.sweep_workers import Result, Workers

CELLS, WHERE, JUDGE, OUTPUT = "Cells", "Where they run", "Judging", "Output"
MAX_SEEDS = 12  # of --max-seeds, where it is not given
ARRIVING = ("request-rate", "time-scale", "speedup", "seed")  # set by the search itself


@app.command()
def sweep(
    spec: Annotated[
        str, typer.Argument(metavar="SPEC", help="A TOML file of cells, or a trace with --set.", show_default=False)
    ],
    set: Annotated[
        list[str] | None,
        opt("--set", panel=CELLS, help="A flag of replay and its values: max-num-seqs=64,256. Repeat it for several."),
    ] = None,
    sample: Annotated[
        int | None, opt("--sample", panel=CELLS, help="With --set: N cells of the grid, drawn by --seed.")
    ] = None,
    repeat: Annotated[
        int, opt("--repeat", panel=CELLS, help="With --set: each cell N times, seeds one apart. Default 1.")
    ] = 1,
    seed: Annotated[int, opt("--seed", panel=CELLS, help="With --set: of --sample. Default 0.")] = 0,
    workers: Annotated[
        int | None,
        opt("--workers", panel=WHERE, help="Replays at a time here. Default: the cores; 1 for the torch engine."),
    ] = None,
    ray: Annotated[
        str | None,
        opt(
            "--ray",
            panel=WHERE,
            help="Run on the Ray cluster at this address: auto, HOST:6379, ray://HOST:10001, or local to start one here.",
        ),
    ] = None,
    goodput: Annotated[
        list[str] | None,
        opt(
            "--goodput", panel=JUDGE, help="SLOs such as ttft:200 tpot:50 (ms unless it says s); repeat it for several."
        ),
    ] = None,
    attainment: Annotated[
        float, opt("--attainment", panel=JUDGE, help="Share of requests to be within all SLOs. Default 0.99.")
    ] = 0.99,
    find_rate: Annotated[
        bool,
        opt(
            "--find-rate",
            panel=JUDGE,
            help="Of each cell: the highest --request-rate that keeps the SLOs, by bisection.",
        ),
    ] = False,
    precision: Annotated[
        float, opt("--precision", panel=JUDGE, help="With --find-rate: relative width at which to stop. Default 0.02.")
    ] = 0.02,
    seeds: Annotated[
        int, opt("--seeds", panel=JUDGE, help="With --find-rate: seeds of arrivals of a rate, at first. Default 3.")
    ] = 3,
    max_seeds: Annotated[
        int | None,
        opt("--max-seeds", panel=JUDGE, help="With --find-rate: seeds at most, where fewer do not decide. Default 12."),
    ] = None,
    start_rate: Annotated[
        float | None,
        opt("--start-rate", panel=JUDGE, help="With --find-rate: the first rate tried. Default: the trace's own."),
    ] = None,
    out: Annotated[
        str,
        out_opt("--out", "-o", panel=OUTPUT, folder=True, help="Folder; a sweep begun there goes on. Default sweep/."),
    ] = "sweep",
    report: Annotated[bool, opt("--report/--no-report", panel=OUTPUT, help="Write DIR/sweep.html. Default on.")] = True,
    as_json: Annotated[bool, opt("--json", panel=OUTPUT, help="Print the table as JSON.")] = False,
) -> None:
    """Replay every combination of settings, and say which to use.

    A cell that fails is recorded with its reason, the others go on, and the exit code is 1. A sweep that was stopped goes on
    when the command is given again.

    Example: benchctl sweep traces/burst.jsonl --set scheduler=nano,vllm --set engine=null --set max-num-seqs=64,256
    """
    given = dict(locals())
    exit_with(lambda: run_sweep(given))


def check(given: Mapping[str, Any]) -> None:
    """Values that the command line can be wrong in. Raises BenchctlError."""
    leasts = {"workers": 1, "repeat": 1, "sample": 1, "seed": 0, "seeds": 1, "max_seeds": 1}
    for name, least in leasts.items():
        if given[name] is not None and given[name] < least:
            raise BenchctlError(f"--{name.replace('_', '-')} is {given[name]}", fix=f"give {least} or more")
    if given["max_seeds"] is not None and given["max_seeds"] < given["seeds"]:
        raise BenchctlError(
            f"--seeds {given['seeds']} of a rate at first, and --max-seeds {given['max_seeds']} at most",
            fix=f"--max-seeds {given['seeds']} or more",
        )
    if not 0 < given["attainment"] <= 1:
        raise BenchctlError(f"--attainment is {given['attainment']:g}", fix="a share such as 0.99")
    if not 0 < given["precision"] < 1:
        raise BenchctlError(f"--precision is {given['precision']:g}", fix="a relative width such as 0.02")
    if given["start_rate"] is not None and not 0 < given["start_rate"] < float("inf"):
        raise BenchctlError(f"--start-rate is {given['start_rate']:g}", fix="requests a second, such as 4.5")
    if not given["set"]:
        own: dict[str, int | None] = {"repeat": 1, "sample": None, "seed": 0}
        for name, default in own.items():
            if given[name] != default:
                raise BenchctlError(
                    f"--{name} goes with --set; a spec says it itself",
                    where=given["spec"],
                    fix=f"{name} = {given[name]} in it",
                )
    if given["ray"] is not None and given["workers"] is not None:
        raise BenchctlError("--workers is for this machine, and --ray is another place", fix="give one")
    if not given["find_rate"]:
        searching: dict[str, Any] = {"precision": 0.02, "seeds": 3, "max_seeds": None, "start_rate": None}
        for name, default in searching.items():
            if given[name] != default:
                raise BenchctlError(f"--{name.replace('_', '-')} is a setting of --find-rate", fix="add --find-rate")


def run_sweep(given: dict[str, Any]) -> int:
    check(given)
    from benchctl.sweep import Store, setting_names, table, write_table
    from benchctl.sweep_spec import Place, cells_of, check_traces, from_flags, read_spec, slo_of

    if given["set"]:
        spec = from_flags(given["spec"], given["set"], given["repeat"], given["sample"], given["seed"])
        place = Place("--set")
    else:
        spec, place = read_spec(Path(given["spec"]))
    cells = cells_of(spec, place)
    check_traces(cells, place, given["spec"] if given["set"] else None)
    slo = slo_of(spec, given["goodput"] or [], place)
    wanted = spec.get("attainment", given["attainment"]) if given["attainment"] == 0.99 else given["attainment"]
    if isinstance(wanted, bool) or not isinstance(wanted, int | float) or not 0 < wanted <= 1:
        raise BenchctlError(f"attainment is {wanted!r}", where=place.of("attainment"), fix="a share such as 0.99")
    if given["find_rate"]:
        check_search(cells, slo)
    store = Store(Path(given["out"]), slo)
    store.prepare()
    pool = make_workers(given, cells, store.out)
    now = True
    try:
        if given["find_rate"]:
            cells, results = search_all(given, cells, slo, float(wanted), store, pool)
        else:
            results = sweep_all(cells, store, pool, bool(slo))
        now = False
    finally:
        pool.close(now=now)
    frame = table(cells, results, searched=given["find_rate"])
    path = write_table(frame, store.out)
    page = write_page(given, frame, setting_names(cells), results, store, float(wanted)) if given["report"] else None
    if given["as_json"]:
        print(frame.write_json())
    else:
        show(
            frame, setting_names(cells), [str(entry) for entry in (path, page) if entry is not None], slo, float(wanted)
        )
    return 0 if (frame["status"] == "complete").all() else 1


def make_workers(given: Mapping[str, Any], cells: Sequence[Cell], out: Path) -> Workers:
    """A pool of this machine, or of a cluster."""
    from benchctl.sweep_workers import LocalWorkers, needs_device

    if given["ray"] is not None:
        from benchctl.sweep_ray import RayWorkers

        cluster = RayWorkers(given["ray"], out)
        print(f"ray: {cluster.nodes} nodes, {cluster.cpus} CPUs, {cluster.gpus} GPUs", file=sys.stderr)
        if not cluster.gpus and any(map(needs_device, cells)):
            print("ray: no node has a GPU, so cells of the torch engine run on CPUs", file=sys.stderr)
        return cluster
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Replays on one card would take each other's memory and time.
    return LocalWorkers(given["workers"] or (1 if any(map(needs_device, cells)) else cores), out)


def sweep_all(cells: Sequence[Cell], store: Store, pool: Workers, judged: bool) -> list[Result]:
    from benchctl.sweep import sweep as run_cells
    from benchctl.sweep_live import SweepProgress, varied

    with SweepProgress(len(cells), varied(cells), judged) as progress:
        results = run_cells(cells, store, pool, progress.saw)
    if progress.kept:
        print(f"{progress.kept} of {len(cells)} cells are from an earlier call", file=sys.stderr)
    return results


# -- the highest rate


def check_search(cells: Sequence[Cell], slo: Mapping[str, float]) -> None:
    """Raises BenchctlError where a search has no aim, or does not own the arrivals."""
    if not slo:
        raise BenchctlError("--find-rate needs SLOs to keep", fix='--goodput "ttft:200 tpot:50"')
    for cell in cells:
        for name in ARRIVING:
            if name in cell.settings and not (name == "seed" and cell.settings[name] == cells[0].settings.get("seed")):
                raise BenchctlError(
                    f"{name} is what --find-rate varies",
                    fix="leave it out" + ("; --seeds N gives a rate N seeds" if name == "seed" else ""),
                )


def search_all(
    given: Mapping[str, Any],
    cells: Sequence[Cell],
    slo: Mapping[str, float],
    wanted: float,
    store: Store,
    pool: Workers,
) -> tuple[list[Cell], list[Result]]:
    """Search every cell; a row each, and DIR/probes.parquet with what was tried."""
    from benchctl.find_rate import Aim, find_rates, row_of, short_text, unsure_text
    from benchctl.sweep_live import varied

    names = varied(cells)
    aim = Aim(slo, wanted, given["precision"], given["seeds"], given["max_seeds"] or max(MAX_SEEDS, given["seeds"]))

    def name_of(search: Search) -> str:
        return " ".join(f"{n}={search.base.settings[n]}" for n in names if n in search.base.settings)

    def say(search: Search, text: str) -> None:
        head = name_of(search)
        print(f"{head}: {text}" if head else text, file=sys.stderr, flush=True)

    searches = find_rates(cells, aim, lambda cell: first_rate(cell, given["start_rate"]), store, pool, say)
    for search in searches:
        for warning in (short_text(search), unsure_text(search)):
            if warning is not None:
                say(search, f"note: {warning}")
    write_probes({name_of(search): search for search in searches}, store.out)
    return list(cells), [row_of(search) for search in searches]


def first_rate(cell: Cell, asked: float | None) -> float:
    """Where to begin: as asked, else at the trace's own mean rate, else one a second. Raises BenchctlError for no trace."""
    from traces.load import open_trace

    if asked is not None:
        return asked
    trace = open_trace(str(cell.settings["trace"]), skip_bad=bool(cell.settings.get("skip-bad", False)))
    if not trace.all_have_arrival_s or not trace.span_s:
        return 1.0
    return max(trace.num_requests / trace.span_s, 1e-6)


def write_probes(searches: Mapping[str, Search], out: Path) -> None:
    """DIR/probes.parquet: a row a probe, with its interval and verdict. `searches`: by the name of their setting."""
    import polars as pl

    from benchctl.sweep import PROBES

    rows = []
    for name, search in searches.items():
        for probe in search.probes:
            if probe.results:
                mean, low, high = probe.interval()
                rows.append({"cell": search.base.key, "setting": name, "rate": probe.rate, "seeds": len(probe.results),
                             "attainment": mean, "low": low, "high": high, "verdict": probe.verdict(search.aim)})  # fmt: skip
    if rows:
        pl.DataFrame(rows).write_parquet(out / PROBES)


# -- what came out


def write_page(
    given: Mapping[str, Any],
    frame: pl.DataFrame,
    names: Sequence[str],
    results: Sequence[Result],
    store: Store,
    wanted: float,
) -> Path | None:
    """DIR/sweep.html; where a drawing package is missing the table stands without it."""
    try:
        from reports.sweep_page import write_sweep_page
    except ImportError as error:
        print(f"no sweep.html: {error.name or error} is not installed (pip install plotly jinja2)", file=sys.stderr)
        return None
    import polars as pl

    from benchctl.sweep import PROBES

    tried = store.out / PROBES
    probes = pl.read_parquet(tried) if given["find_rate"] and tried.is_file() else None
    simulated = next((result["simulation"] for result in results if result.get("simulation")), None)
    return write_sweep_page(
        frame, names, store.out / "sweep.html", slo=store.slo, attainment=wanted, simulation=simulated, probes=probes,
        command=["benchctl", *sys.argv[1:]], spec=given["spec"],
    )  # fmt: skip


def show(
    frame: pl.DataFrame, names: Sequence[str], paths: Sequence[str], slo: Mapping[str, float], wanted: float
) -> None:
    """The answer in words, the settings that vary with the main figures, and failures with their reasons."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from reports.sweep_view import make_view
    from reports.sweep_words import answer

    view = make_view(frame, names, slo, wanted)
    searched = "rate" in frame.columns
    varied = [name for name in names if frame[name].n_unique() > 1]
    first = (
        ("rate", "rate_low", "rate_high")
        if searched
        else ("request_goodput", "attainment", "output_throughput")
        if slo
        else ("output_throughput",)
    )
    shown = [
        name
        for name in (*first, "p50_ttft_ms", "p99_ttft_ms", "p99_itl_ms", "p99_e2el_ms")
        if frame[name].null_count() < frame.height
    ]
    title = "sorted by " + {"rate": "sustained requests/s", "request_goodput": "goodput"}.get(
        first[0], "output tokens/s"
    )
    grid = Table(*varied, title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name in shown:
        grid.add_column(name.replace("_", " ").removesuffix(" ms"), justify="right")
    fronts = not searched
    if fronts:
        grid.add_column("best at")
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console = Console(highlight=False, soft_wrap=True, width=200)  # a file has no edge to wrap at
    said = answer(view)
    for sentence in said:
        console.print(Text(sentence))
    console.print()
    rows = frame.filter(frame["status"] != "failed").sort(first[0], descending=True, nulls_last=True)
    for row in rows.head(MAX_ROWS).iter_rows(named=True):
        best = " ".join(word for word, key in (("TTFT", "front_ttft"), ("ITL", "front_itl")) if row[key])
        numbers = [
            "–" if row[name] is None else f"{row[name]:.2%}" if name == "attainment" else f"{row[name]:,.2f}"
            for name in shown
        ]
        grid.add_row(*(Text(row[name] or "–") for name in varied), *numbers, *([best] if fronts else []))
    if rows.height and (varied or shown):
        console.print(grid)
    if rows.height > MAX_ROWS:
        console.print(Text(f"… and {rows.height - MAX_ROWS} more in sweep.parquet"))
    if fronts and rows.height:
        console.print(Text("best at: no cell gives more output tokens/s at a p99 TTFT, or ITL, that is no higher"))
    for text in remarks(frame, varied, searched, said):
        console.print(Text(text))
    for path in paths:
        console.print(Text(path))


def remarks(frame: pl.DataFrame, varied: Sequence[str], searched: bool, said: Sequence[str] = ()) -> list[str]:
    """Why cells failed, and why the rate after a found one does; equal reasons once, those of `said` sentences not again."""
    about: dict[tuple[str, str], list[str]] = {}
    for row in frame.iter_rows(named=True):
        label, reason = row["status"], str(row["reason"])
        if label == "complete" and not searched:
            continue
        if label == "complete":
            sure = row["rate_high"] is not None and row["rate_high"] <= (row["fails_at"] or 0.0)
            label = "the next rate fails" + ("" if sure else " by the mean") if row["fails_at"] else "no bound above"
        if label != "failed" and any(reason in sentence for sentence in said):
            continue
        name = " ".join(f"{n}={row[n]}" for n in varied if row[n] is not None)
        about.setdefault((label, reason), []).append(name)
    out = []
    for (label, reason), cells in about.items():
        more = f" and {len(cells) - 1} more cells" if len(cells) > 1 else ""
        out.append(f"{label}: " + (f"{cells[0]}{more}: " if cells[0] else "") + reason)
    return out


MAX_ROWS = 40  # of the table printed at the end
