"""`benchctl compare` and `benchctl explain`, behind their flags. Heavy imports stand inside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from benchctl.app import app, exit_with, opt, out_opt
from benchctl.places import check_file
from traces.errors import BenchctlError

SIDES, OUTPUT, WHAT = "Sides", "Output", "What to explain"


def share(text: str, flag: str) -> float:
    """`1%` or `0.01` as a number. Raises BenchctlError."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise BenchctlError(f"{flag} is {text!r}", fix="a share such as 1% or 0.01")
    return value


def write_text(path: str, text: str, flag: str) -> None:
    """Write a result file, or say which flag named a place that can't be written."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise BenchctlError(
            f"{path} cannot be written: {error.strerror}", where=flag, fix="name another file"
        ) from None


@app.command()
def compare(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            help="A and B: run folders or folders of repeats. One folder with runs of two schedulers: those are the sides.",
            show_default=False,
        ),
    ] = None,
    a: Annotated[list[str] | None, opt("--a", panel=SIDES, help="A run of side A; repeat it for repeats.")] = None,
    b: Annotated[list[str] | None, opt("--b", panel=SIDES, help="A run of side B; repeat it for repeats.")] = None,
    min_effect: Annotated[
        str, opt("--min-effect", panel=SIDES, help="A smaller relative difference is called the same. Default 1%.")
    ] = "1%",
    requests: Annotated[
        int, opt("--requests", panel=OUTPUT, help="Requests that differ most, to list. Default 10.")
    ] = 10,
    as_json: Annotated[bool, opt("--json", panel=OUTPUT, help="Print the comparison as JSON.")] = False,
    md: Annotated[bool, opt("--md", panel=OUTPUT, help="Print it as Markdown.")] = False,
    html: Annotated[
        str | None, out_opt("--html", panel=OUTPUT, help="Write the page of both sides, comparison first.")
    ] = None,
) -> None:
    """Compare two runs of one trace: settings, metrics, the first decision that differs, and what every divergence cost.

    Differences are B - A. Several runs on a side are repeats of it.

    Example: benchctl compare runs/demo/nano runs/demo/vllm
    """
    exit_with(lambda: run_compare(runs or [], a or [], b or [], min_effect, requests, as_json, md, html))


def run_compare(
    runs: list[str],
    a: list[str],
    b: list[str],
    min_effect: str,
    requests: int,
    as_json: bool,
    md: bool,
    html: str | None,
) -> int:
    effect = share(min_effect, "--min-effect")
    if requests < 0:
        raise BenchctlError(f"--requests is {requests}", fix="give 0 or more")
    if as_json and md:
        raise BenchctlError("--json and --md are two outputs", fix="give one of the two")
    if runs and (a or b):
        raise BenchctlError("sides are given both by place and by --a or --b", fix="give them one way")
    if len(runs) > 2:
        raise BenchctlError(
            f"{len(runs)} runs are given by place; two are compared",
            fix="repeats go by --a A1 --a A2 --b B1 --b B2",
        )
    if bool(a) != bool(b):
        raise BenchctlError("one side has no run", fix="give both --a and --b")
    if not runs and not a:
        raise BenchctlError("no runs are given", fix="benchctl compare A B, each a run folder")
    if html is not None:
        check_file(Path(html), "--html", in_place=True)
    from reports.compare import compare as compare_sides
    from reports.compare_head import make_sides
    from reports.compare_text import as_json as comparison_json
    from reports.compare_text import document

    side_a, side_b = make_sides(a or runs[:1], b or runs[1:])
    comparison = compare_sides(side_a, side_b, min_effect=effect, num_requests=requests)
    if html is not None:
        from reports.compare_page import comparison_page

        write_text(html, comparison_page(comparison), "--html")
    emit(document(comparison), comparison_json(comparison), as_json, md)
    return 0


def emit(elements: list[Any], data: dict[str, Any], as_json: bool, md: bool) -> None:
    """A document to stdout: JSON, Markdown, or for people."""
    from reports.document import to_markdown, to_rich

    if as_json:
        print(json.dumps(data, indent=1, ensure_ascii=False))
    elif md:
        print(to_markdown(elements), end="")
    else:
        from rich.console import Console

        Console(highlight=False).print(to_rich(elements), crop=False)


class SpikeMayStandAlone(TyperCommand):
    """`--spike` without a word is `--spike itl`: an option's value cannot be left out otherwise."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words: list[str] = []
        for word, following in zip(args, [*args[1:], "-"], strict=True):
            words.append(word)
            if word == "--spike" and (following.startswith("-") or Path(following).exists()):
                words.append("itl")
        return super().parse_args(ctx, words)


@app.command(cls=SpikeMayStandAlone)
def explain(
    run: Annotated[str, typer.Argument(help="A run folder.", show_default=False)],
    round: Annotated[int | None, opt("--round", panel=WHAT, help="A round by its number.")] = None,
    request: Annotated[
        str | None,
        opt(
            "--request",
            panel=WHAT,
            help="A request by its id, or its trace row: '#12' (quoted: a shell takes # for a comment).",
        ),
    ] = None,
    spike: Annotated[
        str | None,
        opt(
            "--spike",
            panel=WHAT,
            help="itl or ttft: the worst inter-token gap (without a word) or time to first token.",
        ),
    ] = None,
    as_json: Annotated[bool, opt("--json", panel=OUTPUT, help="Print it as JSON.")] = False,
    md: Annotated[bool, opt("--md", panel=OUTPUT, help="Print it as Markdown.")] = False,
) -> None:
    """Explain a round, a request's life, or the worst spike of a run: who was looked at, and the arithmetic that decided it.

    Example: benchctl explain runs/demo/nano --round 6
    """
    exit_with(lambda: run_explain(run, round, request, spike, as_json, md))


def run_explain(run: str, round: int | None, request: str | None, spike: str | None, as_json: bool, md: bool) -> int:
    given = [
        flag for flag, value in (("--round", round), ("--request", request), ("--spike", spike)) if value is not None
    ]
    if len(given) != 1:
        raise BenchctlError(
            f"{' and '.join(given)} ask for different things" if given else "nothing to explain is named",
            fix="give one of --round N, --request ID, --spike itl, --spike ttft",
        )
    if as_json and md:
        raise BenchctlError("--json and --md are two outputs", fix="give one of the two")
    from reports import explain as explain_round
    from reports import explain_life as life
    from reports.run import open_run

    opened = open_run(run)
    if round is not None:
        explanation = explain_round.explain_round(opened, round)
        emit(explain_round.document(explanation), explain_round.as_json(explanation), as_json, md)
    elif request is not None:
        story = life.explain_request(opened, life.find_request(opened, request))
        emit(life.document(story), life.as_json(story), as_json, md)
    else:
        assert spike is not None
        if spike not in ("itl", "ttft"):
            raise BenchctlError(f"--spike is {spike!r}", fix="itl or ttft")
        found = life.explain_spike(opened, spike)
        emit(life.spike_document(found), life.spike_json(found), as_json, md)
    return 0
