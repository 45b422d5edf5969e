"""`benchctl replay`, behind its flags: build, run every policy, print, write the report. Returns the exit code.

Results go to stdout and files, everything else to stderr.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
from rich.console import Console
from rich.text import Text

from benchctl.build import Command, build_command, build_run, prefix_bound
from benchctl.config import PolicySettings, ReplayOptions
from benchctl.describe import about_trace
from benchctl.engine_choice import close_team
from benchctl.manifest import FILE, TEMPORARY, write_manifest
from benchctl.places import check_folder, unusable
from benchctl.profiles import account_of, outside_text
from benchctl.progress import Progress
from benchctl.runner import RunResult, run_one, stop_on_interrupt
from benchctl.sources import num_to_replay, requests_of
from benchctl.verify_run import verify_run, watch_engine
from engines.interface import Engine
from engines.simulated.engine import SimulatedEngine
from reports.checks_across import checks_across
from reports.run import Run, open_run
from reports.summary import summarize
from reports.terminal import MAX_ROUNDS, advice, column_names, round_table, sparklines, summary_table
from traces.errors import BenchctlError
from traces.streamed import StreamedTrace

OK, FAILED, INTERRUPTED = 0, 1, 130


def run_replay(options: ReplayOptions) -> int:
    """Everything a replay command does. Raises BenchctlError for what is wrong before the first run."""
    err = Console(stderr=True, highlight=False, soft_wrap=True)
    if options.records != "none":
        check_folder(Path(options.out or "runs"))
    try:
        return run_command(build_command(options), err)
    finally:
        close_team()


def run_command(command: Command, err: Console) -> int:
    """Every run of a command that is built; -> the exit code."""
    options = command.options
    out = None if options.records == "none" else out_folder(command)
    announce(command, err)
    results: list[RunResult] = []
    with stop_on_interrupt() as stop:
        for name, policy in run_order(command):
            folder = None if out is None else out / name
            parts = build_run(command, policy, folder, stop)
            try:
                if folder is not None:
                    make_run_folder(folder, options.force)
                watch = watch_engine(parts.engine, command.engine, options)
                with Progress(err, name, policy.usable_blocks) as progress:
                    result = run_one(parts, progress, stop)
            finally:
                parts.engine.close()
            result = finish(command, policy, result, stop, err)
            result = account_for(parts.engine, result, err)
            result = verify_run(watch, command.engine, options, result, err)
            results.append(result)
            if result.error is not None:
                say_error(result, err)
                if isinstance(result.error, BenchctlError) and result.error.exit_code != FAILED:
                    return result.error.exit_code
            if stop.is_set() or result.outcome.interrupted:
                break
    page_written = show(command, results, out, err)
    if any(result.status == "interrupted" for result in results):
        return INTERRUPTED
    broken = any(result.status != "complete" or result.outcome.rejected for result in results)
    return FAILED if broken or not page_written else OK


def run_order(command: Command) -> Iterator[tuple[str, PolicySettings]]:
    """(folder name, policy) of each run. Repeats of several policies are interleaved A B B A, so that drift hits both."""
    repeats = command.options.num_repeats
    for k in range(1, repeats + 1):
        for policy in command.policies if k % 2 else command.policies[::-1]:
            yield (policy.name if repeats == 1 else f"{policy.name}-{k}"), policy


def out_folder(command: Command) -> Path:
    """`--out`, or runs/<trace>-<time>. Checks all run folders before anything runs. Raises BenchctlError."""
    options = command.options
    out = new_folder(command.trace.name) if options.out is None else Path(options.out)
    for name, _ in run_order(command):
        check_free(out / name, options.force)
    return out


def new_folder(name: str) -> Path:
    """runs/<name>-<time>, one that is not there yet."""
    stem = "".join(c if c.isalnum() or c in "-_." else "-" for c in name)[:64] or "trace"
    out = Path("runs") / f"{stem}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    number = 1
    while out.exists():
        number += 1
        out = out.with_name(f"{out.name.split('~')[0]}~{number}")
    return out


def check_free(folder: Path, force: bool) -> None:
    """Refuse to write over anything but, with `force`, an earlier run."""
    try:
        if not os.path.lexists(folder):
            folder.stat()  # says why, where there cannot be one
        if not folder.is_dir():
            raise BenchctlError(f"{folder} exists and is no folder", where="--out", fix="name another --out")
        # A manifest under its temporary name is what is left where the first one could not be written, or was cut short.
        if not any(path.name != TEMPORARY for path in folder.iterdir()):
            return
    except FileNotFoundError:
        return
    except OSError as error:
        raise unusable(folder, error) from None
    is_run = (folder / FILE).is_file()
    if not force or not is_run:
        what = "holds an earlier run" if is_run else "is not empty, and holds no run"
        fix = "name another --out" + (", or pass --force to replace that run" if is_run else "")
        raise BenchctlError(f"{folder} {what}", where="--out", fix=fix)


def make_run_folder(folder: Path, force: bool) -> None:
    check_free(folder, force)
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    except OSError as error:
        raise unusable(folder, error) from None


def account_for(engine: Engine, result: RunResult, err: Console) -> RunResult:
    """What a simulated run extrapolated: into its manifest, and said once."""
    if not isinstance(engine, SimulatedEngine):
        return result
    manifest = dict(result.manifest)
    manifest["simulation"] = (manifest.get("simulation") or {}) | account_of(engine)
    if (text := outside_text(engine)) is not None:
        line(err, "note", f"{result.name}: {text}")
    if result.folder is not None:
        write_manifest(result.folder, manifest)
    return RunResult(result.name, result.folder, result.status, result.outcome, manifest, result.error)


# -- what is said before and after


def announce(command: Command, err: Console) -> None:
    """What is about to run, with the source of each setting."""
    trace, engine, options = command.trace, command.engine, command.options
    if trace.complete:
        line(err, "trace", whole_trace_text(command))
    else:
        line(
            err,
            "trace",
            f"{trace.name}: {'' if command.num_requests is None else f'{command.num_requests} requests, '}large, so its rows are "
            "checked while it is replayed (--validate-first: all of them before)",
        )
    model = "" if engine.model_name is None else f" {engine.model_name} on {engine.device},"
    line(err, "engine", f"{engine.kind},{model} clock {command.clock}, arrivals {command.arrivals}")
    for policy in command.policies:
        pool = policy.settings["num_blocks"]
        texts = [
            f"{policy.usable_tokens} tokens of KV ({pool.source}) in {policy.usable_blocks} blocks of {policy.config.block_size} "
            f"({policy.settings['block_size'].source})"
        ]
        for name, setting in policy.settings.items():
            if name not in ("num_blocks", "block_size"):
                texts.append(f"{name} {plain(setting.value)} ({setting.source})")
        line(err, policy.name, f"{policy.info.policy}: " + ", ".join(texts))
    if options.max_concurrency is not None:
        line(err, "load", f"closed loop: at most {options.max_concurrency} requests at a time (--max-concurrency)")
    for note in [*command.notes, *(f"{p.name}: {n}" for p in command.policies for n in p.notes)]:
        line(err, "note", note)


def whole_trace_text(command: Command) -> str:
    trace, num = command.trace, num_to_replay(command.options, command.trace)
    num = num if command.num_requests is None else command.num_requests
    cut = f" of {trace.num_requests}" if num != trace.num_requests else ""
    return f"{trace.name}: {num}{cut} requests, sha256 {trace.sha256[:12]}{span_text(command)}"


def span_text(command: Command) -> str:
    """How long arrivals take, after scaling; by rate they are only known as they come."""
    options = command.options
    if options.request_rate is not None:
        return f", arrivals by rate {plain(options.request_rate)}/s (gamma, shape {plain(options.burstiness)}; not renormalised)"
    if not command.trace.all_have_arrival_s:
        return ""
    span_s = command.trace.span_s
    if command.num_requests is not None and command.num_requests < command.trace.num_requests:
        times = [r.arrival_s or 0.0 for r in requests_of(command.trace, options, command.clock)]
        span_s = max(times) - min(times)
    scale = 1.0 if options.time_scale is None else options.time_scale
    changed = "" if options.time_scale is None else f" (gaps × {scale:g})"
    return f", arrivals over {span_s * scale:.3f} s{changed}"


def plain(value: Any) -> str:
    return (
        f"{value:g}" if isinstance(value, float) else "on" if value is True else "off" if value is False else str(value)
    )


def line(console: Console, head: str, text: str) -> None:
    console.print(Text(f"{head:<7} ", style="bold") + Text(text))


def say_error(result: RunResult, err: Console) -> None:
    error = result.error
    if isinstance(error, BenchctlError):
        err.print(Text(f"Error: {result.name}: {error}"))
    else:
        assert error is not None
        err.print(Text("".join(traceback.format_exception(error))))
        err.print(Text(f"Error: {result.name}: the run broke: {type(error).__name__}: {error}"))
    if result.folder is not None:
        err.print(Text(f"  the rounds up to here are kept in {result.folder}"))


def finish(
    command: Command, policy: PolicySettings, result: RunResult, stop: threading.Event, err: Console
) -> RunResult:
    """Add to a run what needs its records or the whole trace."""
    if result.folder is None or result.error is not None:
        return result
    manifest = dict(result.manifest)
    if result.status == "complete" and manifest["trace"]["sha256"] is None:
        read_the_rest(command, manifest, stop, err)
    if result.status == "complete" and policy.config.enable_prefix_caching:
        manifest["prefix_upper_bound"] = prefix_bound(command, policy.config.block_size)
    if command.options.outputs == "sampled" and command.engine.tokenizer is not None:
        write_outputs(open_run(result.folder), command.engine.tokenizer)
    try:
        write_manifest(result.folder, manifest)
    except BenchctlError as fault:
        return RunResult(result.name, result.folder, "failed", result.outcome, result.manifest, fault)
    return RunResult(result.name, result.folder, result.status, result.outcome, manifest, result.error)


def read_the_rest(command: Command, manifest: dict[str, Any], stop: threading.Event, err: Console) -> None:
    """Of a trace that was checked while it was replayed: what only its end tells. Changes `manifest`; says it."""
    trace, known = command.trace, list(command.notes)
    if not trace.complete and isinstance(trace, StreamedTrace):
        line(err, "trace", f"the rows after request {trace.num_requests} are checked for the trace's sha256")
    unknown = "the trace was not read to its end, so its sha256 is not known"
    try:
        if isinstance(trace, StreamedTrace):
            trace.read_to_end(lambda: not stop.is_set())
    except BenchctlError as error:
        unknown = f"{unknown}: {error.what}, in {error.where}"
    if trace.complete:
        manifest["trace"] = about_trace(trace)
        num = num_to_replay(command.options, trace)
        skipped = manifest["counts"]["skipped_over_length"]
        manifest["num_requests"] = None if num is None else num - skipped
        line(err, "trace", whole_trace_text(command))
    notes = [note for note in trace.notes if note not in known] if trace.complete else [unknown]
    for note in notes:
        line(err, "note", note)
    manifest["notes"] = [*manifest["notes"], *notes]


def write_outputs(run: Run, tokenizer: Any) -> None:
    """outputs.jsonl: what the model said, a line for each request that emitted a token, in trace order."""
    tokens = (
        run.scan("tokens").sort("request", "index").group_by("request", maintain_order=True).agg("token_id").collect()
    )
    with (run.path / "outputs.jsonl").open("w", encoding="utf-8") as file:
        for row, ids in tokens.sort("request").iter_rows():
            text = tokenizer.decode(ids, skip_special_tokens=True)
            file.write(json.dumps({"id": run.ids[row], "text": text, "token_ids": ids}, ensure_ascii=False) + "\n")


def show(command: Command, results: list[RunResult], out: Path | None, err: Console) -> bool:
    """Summary to stdout (or JSON), then the paths. False: the page could not be written, as was said; all else stands."""
    options = command.options
    runs = [open_run(result.folder) for result in results if result.folder is not None]
    page, page_written = None, True
    if out is not None and options.report and runs:
        try:
            page = write_page(runs, out, options, err)
        except BenchctlError as error:
            page_written = False
            err.print(Text(f"Error: {error}"))
    summaries = [
        summarize(run, percentile_metrics=options.percentile_metrics, percentiles=options.metric_percentiles)
        for run in runs
    ] or [counts_only(result) for result in results]
    if options.json:
        for summary, result in zip(summaries, results, strict=True):
            if options.verify:
                summary["benchctl"]["verify"] = result.manifest.get("verify")
            summary["benchctl"]["path"] = None if result.folder is None else str(result.folder)
            summary["benchctl"]["report"] = None if page is None else str(page)
        print(json.dumps(summaries[0] if len(summaries) == 1 else {"runs": summaries}, indent=1, default=str))
        return page_written
    stdout = Console(highlight=False)
    wide = Console(highlight=False, soft_wrap=True)  # paths stay on one line, to be copied
    if not runs:
        for result, summary in zip(results, summaries, strict=True):
            stdout.print(
                Text(f"{result.name}: " + ", ".join(f"{k} {v}" for k, v in summary["benchctl"]["counts"].items()))
            )
        return page_written
    if command.clock == "rounds":
        for run in runs:
            if 0 < run.scan("rounds").select(pl.len()).collect().item() <= MAX_ROUNDS:
                stdout.print(round_table(run))
                stdout.print()
    stdout.print(summary_table(summaries, percentile_metrics=options.percentile_metrics))
    stdout.print()
    stdout.print(sparklines(runs))
    stdout.print()
    ours = [summary["benchctl"] for summary in summaries]
    hint = advice([entry["checks"] for entry in ours], column_names([entry["run"] for entry in ours]))
    for check in checks_across(runs):
        stdout.print(Text(f"· {check.what}: {check.evidence}. To mend: {check.cure}"))
    if hint is not None:
        stdout.print(hint)
    for result in results:
        line(
            wide,
            result.name,
            f"{result.folder}  {result.status}, digest {result.manifest.get('digest') or 'none (--records summary)'}",
        )
    if page is not None:
        line(wide, "report", str(page))
    return page_written


def counts_only(result: RunResult) -> dict[str, Any]:
    """What is known of a run with --records none, under vLLM bench's names."""
    out = result.outcome
    return {
        "duration": out.end_s,
        "completed": out.finished,
        "failed": out.rejected + out.admitted - out.finished,
        "total_output_tokens": out.emitted_tokens,
        "request_throughput": out.finished / out.end_s if out.end_s else None,
        "output_throughput": out.emitted_tokens / out.end_s if out.end_s else None,
        "benchctl": {
            "status": result.status,
            "scheduler": result.manifest["scheduler"],
            "counts": {
                "status": result.status,
                "duration_s": round(out.end_s, 6),
                "wall_s": round(result.manifest["wall_s"], 6),
                "finished": out.finished,
                "rejected": out.rejected,
                "rounds": out.rounds,
                "output_tokens": out.emitted_tokens,
                "preemptions": out.preemptions,
            },
        },
    }


def write_page(runs: list[Run], out: Path, options: ReplayOptions, err: Console) -> Path | None:
    """DIR/report.html; where a drawing package is missing the replay stands without it."""
    try:
        from reports.page import write_report
    except ImportError as error:
        line(err, "note", f"no report.html: {error.name or error} is not installed (pip install plotly jinja2)")
        return None
    page = out / "report.html"
    write_report([run.path for run in runs], page)
    return page
