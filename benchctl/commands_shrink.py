"""`benchctl shrink`, behind its flags. Heavy imports stand inside."""

from __future__ import annotations

import json
import math
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from benchctl.app import app, exit_with, opt, out_opt
from benchctl.places import check_file
from traces.errors import BenchctlError

REPLAYED = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(context_settings=REPLAYED)
def shrink(
    context: typer.Context,
    trace: Annotated[str, typer.Argument(help="A trace that shows it, or a bundled one by name.", show_default=False)],
    where: Annotated[
        str,
        opt(
            "--where",
            "-w",
            panel="Options",
            help="What to keep: 'preemptions > 5', 'differs(nano, vllm)', 'ttft_p99 > 200', 'raises', 'gate(\"FILE\")', joined by and, or, not.",
        ),
    ] = "",
    out: Annotated[
        str | None,
        out_opt("--out", "-o", panel="Options", help="The trace to write. Default: <trace>-shrunk.jsonl here."),
    ] = None,
    force: Annotated[bool, opt("--force", panel="Options", help="Replace a file at --out.")] = False,
    limit_s: Annotated[
        float,
        opt(
            "--limit-s", panel="Options", help="Seconds after which the smallest trace so far is written. Default 120."
        ),
    ] = 120.0,
    as_json: Annotated[bool, opt("--json", panel="Options", help="Print what came out as JSON.")] = False,
) -> None:
    """Make a trace small while something still happens in its replay: a failure to attach, of a handful of requests.

    Every other option is one of `benchctl replay` (scheduler, limits, clock, round cost); the engine is null.

    Example: benchctl shrink traces/sharegpt.jsonl --where 'preemptions > 2' --scheduler nano -o small.jsonl
    """  # fmt: skip
    exit_with(lambda: run_shrink(trace, list(context.args), where, out, force, limit_s, as_json))


def replay_options_of(trace: str, extra: list[str]) -> Any:
    """The options of a replay from the words that `shrink` does not know itself. Raises BenchctlError, or a usage error."""
    from typer.main import get_command

    from benchctl.parse import replay_options

    group: Any = get_command(app)
    command = group.commands["replay"]
    words = extra if "--engine" in extra else [*extra, "--engine", "null"]
    given = dict(command.make_context("replay", [trace, *words]).params)
    for name in ("map", "format"):
        if given.pop(name, None):
            raise BenchctlError(
                f"--{name} imports a trace; shrink takes a canonical one", fix="benchctl trace import first"
            )
    for name in ("out", "num_repeats", "from_run"):
        given[name] = {"num_repeats": 1}.get(name)
    options = replay_options(**given)
    if options.engine not in ("null", "simulated"):
        raise BenchctlError(
            f"shrink replays hundreds of times, which --engine {options.engine} is not for",
            fix="leave --engine out: null",
        )
    return options


def run_shrink(
    trace: str, extra: list[str], text: str, out: str | None, force: bool, limit_s: float, as_json: bool
) -> int:
    if not text:
        raise BenchctlError("nothing to look for is given", fix="--where 'preemptions > 5'")
    if not 0 < limit_s < 1e9:
        raise BenchctlError(f"--limit-s is {limit_s}", fix="seconds above 0")
    from dataclasses import replace

    from benchctl.policies import find_policy
    from benchctl.shrink import shrink as shrink_rows
    from benchctl.shrink_rows import rows_of, write_rows
    from benchctl.shrink_run import Candidates
    from benchctl.shrink_where import parse_where
    from traces.load import open_trace

    options = replay_options_of(trace, extra)
    where = parse_where(text)
    names = scheduler_names(where.schedulers, options.schedulers, where.expects_error, find_policy)
    options = replace(options, schedulers=tuple(dict.fromkeys(names.values())))
    opened = open_trace(trace, skip_bad=options.skip_bad)
    target = Path(out or f"{opened.name}-shrunk.jsonl")
    if target.exists() and not force:
        raise BenchctlError(f"{target} exists", where="--out", fix="name another file, or pass --force")
    check_file(target, "--out", in_place=True)
    rows = rows_of(opened, options.num_prompts)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="benchctl-shrink-") as folder:
        candidates = Candidates(options, opened.header, where, names, Path(folder))
        seen = candidates.observe(rows)
        if seen is None or not where.holds(seen):
            raise BenchctlError(
                f"it does not happen in the whole trace: {where.text}",
                where=trace,
                fix=_found(seen, where.names) or "check the options",
            )
        candidates.deadline = time.monotonic() + limit_s
        candidates.expect(seen)
        found = shrink_rows(rows, candidates.holds, limit_s=limit_s, say=say, near=candidates.near(seen))
        candidates.deadline = math.inf
        last = candidates.observe(found.rows)
        rounds = candidates.rounds
        assert last is not None and where.holds(last), "what was kept does not hold"
    header = {
        "name": f"{opened.name}-shrunk",
        "source": f"benchctl shrink {opened.name} ({opened.sha256[:12]}) --where {where.text}",
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    write_rows(target, opened.header, found.rows, **header)
    words = ["benchctl", "replay", str(target), *_without(extra, "--num-prompts")]
    if not any(word in ("--scheduler", "-s") for word in extra):
        words += [word for name in options.schedulers for word in ("--scheduler", _asked(name))]
    command = shlex.join(words if "--engine" in extra else [*words, "--engine", "null"])
    figures = {
        name or options.schedulers[0]: {k: v for k, v in each.values.items() if k in where.names}
        for name, each in last.items()
    }
    if as_json:
        print(json.dumps(_json(target, where.text, rows, found, rounds, command, figures), indent=1))
        return 0
    state = "" if found.complete else "; time was up, so it may get smaller (--limit-s)"
    print(f"{target}: {len(found.rows)} of {len(rows):,} requests still show {where.text}{state}")
    for name, values in figures.items():
        for key, value in values.items():
            print(f"  {name}: {key} {value:,.6g}")
    for name, each in last.items():
        if each.error is not None:
            print(
                f"  {name or options.schedulers[0]}: {each.error[0]}: {each.error[1].splitlines()[0] if each.error[1] else ''}"
            )
    print(command)
    return 0


def scheduler_names(named: tuple[str, ...], asked: tuple[str, ...], any_number: bool, find: Any) -> dict[str, str]:
    """What the predicate calls a scheduler ("" where it names none) -> the scheduler. Raises BenchctlError where that is not clear."""
    names = {name: find(name) for name in (*named, *asked) if name}
    chosen = list(dict.fromkeys(names.values()))
    if "" in named:
        if len(chosen) != 1:
            fix = "--scheduler nano, or nano.preemptions" if not chosen else f"such as {next(iter(names))}.preemptions"
            raise BenchctlError("it is not clear of which scheduler --where speaks", where="--where", fix=fix)
        return {"": chosen[0], **{name: real for name, real in names.items() if name in named}}
    if not chosen:
        if any_number:
            return {"nano": "nano", "vllm": "vllm"}
        raise BenchctlError("no scheduler is named", where="--where", fix="--scheduler nano")
    return names


def _asked(name: str) -> str:
    """A scheduler as `--scheduler` takes it."""
    from engines.schedulers.registry import SCHEDULERS

    return SCHEDULERS[name].place or name


def _without(words: list[str], flag: str) -> list[str]:
    out = list(words)
    while flag in out:
        at = out.index(flag)
        del out[at : at + 2]
    return out


def _found(seen: Any, names: Any) -> str | None:
    if not seen:
        return None
    texts = [
        f"{name + '.' if name else ''}{key} is {each.values.get(key, 0):g}"
        for name, each in seen.items()
        for key in sorted(names)
    ]
    return "another --where or other limits; there " + ", ".join(texts[:6]) if texts else None


def _json(target: Path, where: str, rows: Any, found: Any, rounds: int, command: str, figures: Any) -> dict[str, Any]:
    return {
        "benchctl_shrink": 1,
        "trace": str(target),
        "where": where,
        "requests_before": len(rows),
        "requests": len(found.rows),
        "complete": found.complete,
        "replays": found.asked,
        "rounds": rounds,
        "steps": [
            dict(zip(("stage", "requests", "prompt_tokens", "output_tokens"), step, strict=True))
            for step in found.steps
        ],
        "figures": figures,
        "command": command,
    }
