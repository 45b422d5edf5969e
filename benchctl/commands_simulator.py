"""`benchctl calibrate` and `benchctl validate`, behind their flags. Heavy imports stand inside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import replace

from benchctl.app import app, exit_with, opt, out_opt
from benchctl.places import check_file, check_folder
from traces.errors import BenchctlError

if TYPE_CHECKING:
    from benchctl.calibrate_measure import MeasureOptions

PROFILE, OUTPUT, MEASURE = "Profile", "Output", "Measure"


@app.command()
def calibrate(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN|POINTS]...",
            help="Run folders of --engine torch, folders of runs, files of --measure: one device, one model.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        str, opt("--output", "-o", panel=OUTPUT, help="The profile to write, JSON; with --measure the points.")
    ] = "",
    name: Annotated[
        str | None, opt("--name", panel=PROFILE, help="What reports call it. Default: the file's name.")
    ] = None,
    force: Annotated[bool, opt("--force", panel=OUTPUT, help="Replace an earlier file.")] = False,
    as_json: Annotated[bool, opt("--json", panel=OUTPUT, help="Print the profile.")] = False,
    measuring: Annotated[
        bool,
        opt("--measure", panel=MEASURE, help="Run designed rounds on this machine's device and write their times."),
    ] = False,
    model: Annotated[
        str | None, opt("--model", panel=MEASURE, help="A preset or a local folder, as for replay.")
    ] = None,
    dtype: Annotated[str | None, opt("--dtype", panel=MEASURE, help="As for replay.")] = None,
    load_format: Annotated[str, opt("--load-format", panel=MEASURE, help="auto or dummy.")] = "auto",
    attention_backend: Annotated[
        str, opt("--attention-backend", panel=MEASURE, help="auto, triton or reference.")
    ] = "auto",
    enforce_eager: Annotated[bool, opt("--enforce-eager", panel=MEASURE, help="No CUDA graphs.")] = False,
    block_size: Annotated[
        list[int] | None,
        opt(
            "--block-size",
            panel=MEASURE,
            help="Tokens a block; repeatable. Default: 16 and 256, those of the policies.",
        ),
    ] = None,
    max_num_seqs: Annotated[int, opt("--max-num-seqs", panel=MEASURE, help="As for replay. Default 512.")] = 512,
    max_num_batched_tokens: Annotated[
        int, opt("--max-num-batched-tokens", panel=MEASURE, help="As for replay. Default 16384.")
    ] = 16_384,
    max_model_len: Annotated[
        int | None, opt("--max-model-len", panel=MEASURE, help="As for replay. Default: the model's.")
    ] = None,
    gpu_memory_utilization: Annotated[
        float, opt("--gpu-memory-utilization", panel=MEASURE, help="As for replay. Default 0.9.")
    ] = 0.9,
    kv_cache_tokens: Annotated[
        int | None, opt("--kv-cache-tokens", panel=MEASURE, help="Tokens of KV cache. Default: what the memory holds.")
    ] = None,
    max_seconds: Annotated[
        float, opt("--max-seconds", panel=MEASURE, help="Time for the rounds of one block size. Default 60.")
    ] = 60.0,
    seed: Annotated[int, opt("--seed", panel=MEASURE, help="Of weights, keys, values and ids. Default 0.")] = 0,
) -> None:
    """Fit a profile of a device, for --engine simulated, from recorded rounds; or measure designed ones for such a fit.

    Runs and points are of one device, model and engine; each block size among them gets a fit of its own. Points tell device
    times over the whole range; host times come from runs, of which there has to be one.

    Example: benchctl calibrate runs/demo/nano runs/demo/vllm -o profiles/demo.json

    Example: benchctl calibrate --measure --model qwen3-8b -o points.json
    """
    given = {
        "--model": model, "--dtype": dtype, "--enforce-eager": enforce_eager or None, "--block-size": block_size or None,
        "--max-model-len": max_model_len, "--kv-cache-tokens": kv_cache_tokens,
    }  # fmt: skip

    def run() -> int:
        if not measuring:
            stray = [flag for flag, value in given.items() if value is not None]
            if stray:
                raise BenchctlError(f"{stray[0]} is for --measure", fix="add --measure, or leave it out")
            return run_calibrate(sources or [], output, name, force, as_json)
        if sources:
            raise BenchctlError(
                f"--measure measures on this machine and reads nothing: {sources[0]}",
                fix="measure first, then benchctl calibrate RUN... POINTS... -o FILE",
            )
        from benchctl.calibrate_measure import MeasureOptions

        options = MeasureOptions(
            model=model,
            dtype=dtype,
            load_format=load_format,
            attention_backend=attention_backend,
            enforce_eager=enforce_eager,
            block_sizes=tuple(block_size or (16, 256)),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_tokens=kv_cache_tokens,
            max_seconds=max_seconds,
            seed=seed,
        )
        return run_measure(options, output, force)

    exit_with(run)


def new_file(output: str, force: bool, example: str) -> Path:
    """Raises BenchctlError where no file is named, or where it exists."""
    if not output:
        raise BenchctlError("no file is named for the result", where="--output", fix=f"-o {example}")
    path = Path(output)
    if path.is_dir():
        raise BenchctlError(f"{path} is a folder", where="--output", fix=f"name a file: -o {path / Path(example).name}")
    if path.exists() and not force:
        raise BenchctlError(f"{path} exists", where="--output", fix="name another file, or pass --force")
    check_file(path, "--output")
    return path


def run_measure(options: MeasureOptions, output: str, force: bool) -> int:
    path = new_file(output, force, "points.json")
    from benchctl.calibrate_measure import measure, to_stderr

    points = measure(options, path, to_stderr)
    print(f"{path}: {len(points.points)} rounds of {points.model} on {points.device}")
    return 0


def run_calibrate(paths: list[str], output: str, name: str | None, force: bool, as_json: bool) -> int:
    path = new_file(output, force, "profiles/NAME.json")
    if not paths:
        raise BenchctlError(
            "nothing is given to fit",
            fix="give run folders of --engine torch, and files of benchctl calibrate --measure",
        )
    from benchctl.calibrate import calibrate as fit
    from benchctl.calibrate_points import is_points, load_points
    from benchctl.profiles import save_profile
    from engines.simulated.profile import dump_profile
    from reports.run import open_runs

    points = [(load_points(Path(p)), p) for p in paths if is_points(p)]
    runs = [p for p in paths if not is_points(p)]
    profile = fit(open_runs(runs) if runs else [], name or path.stem, points)
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
            help="Run folders of --engine torch on the profile's device, best ones that it was not fitted on; or copies.",
            show_default=False,
        ),
    ],
    trace: Annotated[
        str | None,
        opt(
            "--trace",
            panel=PROFILE,
            help="The runs' trace, or a folder of their traces, where they do not lie where they did.",
        ),
    ] = None,
    end_to_end: Annotated[
        bool,
        opt("--end-to-end/--no-end-to-end", panel=PROFILE, help="Simulate each run's command and compare. Default on."),
    ] = True,
    save: Annotated[
        bool,
        opt(
            "--save",
            panel=OUTPUT,
            help="Keep the errors in the profile's file: reports of simulated runs then show them.",
        ),
    ] = False,
    copy: Annotated[
        str | None,
        out_opt(
            "--copy",
            folder=True,
            panel=OUTPUT,
            help="Write what of the runs is needed here to DIR, small, for another day.",
        ),
    ] = None,
    worst: Annotated[int, opt("--worst", panel=OUTPUT, help="Rounds of the largest error to list. Default 5.")] = 5,
    as_json: Annotated[bool, opt("--json", panel=OUTPUT, help="Print the result as JSON.")] = False,
) -> None:
    """Hold a profile's predictions against measured runs: round by round and by kind, then end to end.

    End to end the same command is simulated with admissions free, and its percentiles stand beside the measured ones.

    Example: benchctl validate profiles/demo.json runs/other/nano

    Example: benchctl validate profiles/demo.json runs/other --save
    """
    exit_with(lambda: run_validate(profile, runs, trace, end_to_end, worst, as_json, save, copy))


def run_validate(
    profile: str,
    paths: list[str],
    trace: str | None,
    end_to_end: bool,
    worst: int,
    as_json: bool,
    save: bool,
    copy: str | None,
) -> int:
    if worst < 0:
        raise BenchctlError(f"--worst is {worst}", fix="give 0 or more")
    if save and not end_to_end:
        raise BenchctlError("--save keeps errors end to end too", fix="leave --no-end-to-end out")
    from benchctl.held_out import copy_names, open_held_out, write_copy
    from benchctl.profiles import find_profile, load_profile, save_profile
    from benchctl.validate import held_out_error, worst_first
    from benchctl.validate import validate as hold

    loaded = load_profile(profile)
    if copy is not None:
        check_folder(Path(copy), "--copy")
    if save:
        check_file(find_profile(profile), "--save")
    held = open_held_out(paths)
    results = [hold(loaded, run, trace, end_to_end=end_to_end, worst=worst) for run in held]
    if copy is not None:
        for run, name in zip(held, copy_names(held), strict=True):
            write_copy(run, Path(copy) / name)
    if save:
        save_profile(replace(loaded, held_out=held_out_error(results)), find_profile(profile))
    results = worst_first(results)
    if as_json:
        from dataclasses import asdict

        print(json.dumps([asdict(r) for r in results], indent=1))
    else:
        from benchctl.validate_print import validation_tables

        for result in results:
            validation_tables(loaded, result)
    return 0


@app.command()
def profiles(
    as_json: Annotated[bool, opt("--json", panel=OUTPUT, help="Print them as JSON.")] = False,
) -> None:
    """List the profiles that --engine simulated knows by name: the bundled ones, and those in ./profiles.

    Example: benchctl profiles
    """

    def run() -> int:
        from benchctl.profiles import listed

        rows = listed()
        if as_json:
            print(json.dumps(rows, indent=1))
            return 0
        from benchctl.validate_print import profile_list

        profile_list(rows)
        return 0

    exit_with(run)
