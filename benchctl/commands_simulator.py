"""`benchctl calibrate` and `benchctl validate`, behind their flags. Heavy imports stand inside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from benchctl.app import app, exit_with, opt
from traces.errors import BenchctlError

PROFILE, OUTPUT = "Profile", "Output"


@app.command()
def calibrate(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...", help="Run folders of --engine torch, or folders of runs: one device.", show_default=False
        ),
    ],
    output: Annotated[str, opt("--output", "-o", panel=OUTPUT, help="The profile to write, JSON.")] = "",
    name: Annotated[
        str | None, opt("--name", panel=PROFILE, help="What reports call it. Default: the file's name.")
    ] = None,
    force: Annotated[bool, opt("--force", panel=OUTPUT, help="Replace an earlier profile.")] = False,
    as_json: Annotated[bool, opt("--json", panel=OUTPUT, help="Print the profile.")] = False,
) -> None:
    """Fit a profile of a device from recorded rounds, for --engine simulated.

    Runs of one device, model and engine; each block size among them gets a fit of its own.

    Example: benchctl calibrate runs/demo/nano runs/demo/vllm -o profiles/demo.json
    """
    exit_with(lambda: run_calibrate(runs, output, name, force, as_json))


def run_calibrate(paths: list[str], output: str, name: str | None, force: bool, as_json: bool) -> int:
    if not output:
        raise BenchctlError("no file is named for the profile", fix="-o profiles/NAME.json")
    path = Path(output)
    if path.exists() and not force:
        raise BenchctlError(f"{path} exists", where="--output", fix="name another file, or pass --force")
    from benchctl.calibrate import calibrate as fit
    from benchctl.profiles import save_profile
    from engines.simulated.profile import dump_profile
    from reports.run import open_runs

    profile = fit(open_runs(paths), name or path.stem)
    save_profile(profile, path)
    if as_json:
        print(dump_profile(profile).decode(), end="")
        return 0
    from benchctl.validate_print import profile_tables

    profile_tables(profile, path)
    return 0


@app.command()
def validate(
    profile: Annotated[str, typer.Argument(help="A profile: a file, or its name.", show_default=False)],
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Run folders of --engine torch on the profile's device, best ones that it was not fitted on.",
            show_default=False,
        ),
    ],
    trace: Annotated[
        str | None, opt("--trace", panel=PROFILE, help="The runs' trace, where it does not lie where it did.")
    ] = None,
    end_to_end: Annotated[
        bool,
        opt("--end-to-end/--no-end-to-end", panel=PROFILE, help="Simulate each run's command and compare. Default on."),
    ] = True,
    worst: Annotated[int, opt("--worst", panel=OUTPUT, help="Rounds of the largest error to list. Default 5.")] = 5,
    as_json: Annotated[bool, opt("--json", panel=OUTPUT, help="Print the result as JSON.")] = False,
) -> None:
    """Hold a profile's predictions against measured runs: round by round and by kind, then end to end.

    End to end the same command is simulated with admissions free, and its percentiles stand beside the measured ones.

    Example: benchctl validate profiles/demo.json runs/other/nano
    """
    exit_with(lambda: run_validate(profile, runs, trace, end_to_end, worst, as_json))


def run_validate(profile: str, paths: list[str], trace: str | None, end_to_end: bool, worst: int, as_json: bool) -> int:
    if worst < 0:
        raise BenchctlError(f"--worst is {worst}", fix="give 0 or more")
    from benchctl.profiles import load_profile
    from benchctl.validate import validate as hold
    from reports.run import open_runs

    loaded = load_profile(profile)
    results = [hold(loaded, run, trace, end_to_end=end_to_end, worst=worst) for run in open_runs(paths)]
    # The worst first: by the largest median error of a kind.
    results.sort(key=lambda r: -max((k.p50 for k in r.kinds), default=0.0))
    if as_json:
        from dataclasses import asdict

        print(json.dumps([asdict(r) for r in results], indent=1))
    else:
        from benchctl.validate_print import validation_tables

        for result in results:
            validation_tables(loaded, result)
    return 0
