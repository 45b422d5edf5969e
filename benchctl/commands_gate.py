"""`benchctl gate`, behind its flags. Heavy imports stand inside."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchctl.app import app, exit_with, opt, out_opt
from benchctl.commands_compare import write_text
from benchctl.places import check_file
from traces.errors import BenchctlError

BASELINE, OUTPUT = "Baseline", "Output"
CHANGED = 3


@app.command()
def gate(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Run folders, or folders of runs.", show_default=False)
    ],
    baseline: Annotated[
        str, opt("--baseline", "-b", panel=BASELINE, help="The baseline file, JSON, kept in git.")
    ] = "",
    update: Annotated[
        bool,
        opt(
            "--update",
            panel=BASELINE,
            help="Write the entries of these runs anew, keep all tolerances, and print the change.",
        ),
    ] = False,
    timing: Annotated[
        bool, opt("--timing", panel=BASELINE, help="With --update: keep timings of these runs too, with their machine.")
    ] = False,
    log: Annotated[
        bool,
        opt(
            "--log/--no-log",
            panel=BASELINE,
            help="With --update: keep the decisions in a zip beside the baseline. Default on.",
        ),
    ] = True,
    against: Annotated[
        str | None,
        opt(
            "--against",
            panel=BASELINE,
            help="An earlier run, to find the first decision that differs where no log is kept.",
        ),
    ] = None,
    as_json: Annotated[bool, opt("--json", panel=OUTPUT, help="Print the result as JSON.")] = False,
    junit: Annotated[str | None, out_opt("--junit", panel=OUTPUT, help="Write JUnit XML.")] = None,
    github: Annotated[
        bool,
        opt(
            "--github", panel=OUTPUT, help="Add to GitHub's step summary ($GITHUB_STEP_SUMMARY) and print annotations."
        ),
    ] = False,
    benchmark: Annotated[
        str | None,
        out_opt("--benchmark", panel=OUTPUT, help="Write customSmallerIsBetter JSON, for github-action-benchmark."),
    ] = None,
) -> None:
    """Hold runs against a baseline of decision counters: exit 0 as before, 3 changed, 2 not comparable.

    On a change it names the first decision that differs and explains its round.

    Example: benchctl gate runs/demo --baseline baselines/demo.json
    """
    exit_with(lambda: run_gate(runs, baseline, update, timing, log, against, as_json, junit, github, benchmark))


def run_gate(
    paths: list[str],
    baseline: str,
    update: bool,
    timing: bool,
    log: bool,
    against: str | None,
    as_json: bool,
    junit: str | None,
    github: bool,
    benchmark: str | None,
) -> int:
    if not baseline:
        raise BenchctlError("no baseline is named", fix="--baseline FILE; add --update to make it")
    if timing and not update:
        raise BenchctlError("--timing says what --update keeps", fix="add --update, or leave --timing out")
    if update and (as_json or junit or github or benchmark):
        raise BenchctlError("--update writes the baseline and gates nothing", fix="leave the outputs of the gate out")
    if github and as_json:
        raise BenchctlError("--github prints annotations among which JSON is lost", fix="give one of the two")
    for flag, file in (("--baseline", baseline if update else None), ("--junit", junit), ("--benchmark", benchmark)):
        if file is not None:
            check_file(Path(file), flag, in_place=True)
    from benchctl import gate as gates
    from benchctl import gate_output as output

    path, opened = Path(baseline), gates.open_gated(paths)
    if update:
        changes = gates.update(opened, path, timing=timing, log=log)
        show(output.update_document(changes, baseline))
        return 0
    from reports.run import open_run

    result = gates.gate(opened, path, against=None if against is None else open_run(against))
    if junit is not None:
        write_text(junit, output.junit(result), "--junit")
    if benchmark is not None:
        write_text(benchmark, json.dumps(output.smaller_is_better(result), indent=1) + "\n", "--benchmark")
    if as_json:
        print(json.dumps(output.as_json(result), indent=1, ensure_ascii=False))
    else:
        show(output.document(result))
    if github:
        step_summary(output.document(result))
        for line in output.annotation_lines(result):
            print(line)
    return 0 if result.ok else CHANGED


def show(elements: Sequence[Any]) -> None:
    from rich.console import Console

    from reports.document import to_rich

    Console(highlight=False).print(to_rich(elements), crop=False)


def step_summary(elements: Sequence[Any]) -> None:
    """Append to the file that GitHub names, where it names one."""
    from reports.document import to_markdown

    place = os.environ.get("GITHUB_STEP_SUMMARY")
    if not place:
        print("note: GITHUB_STEP_SUMMARY is not set, so no step summary is written", file=sys.stderr)
        return
    try:
        with open(place, "a", encoding="utf-8") as file:
            file.write(to_markdown(elements))
    except OSError as error:
        raise BenchctlError(
            f"the step summary cannot be written: {error.strerror}", where=place, fix="check GITHUB_STEP_SUMMARY"
        ) from None
