"""The command line's root, and what every file of commands needs of it. `cli` gathers the commands; they import this."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import typer

from traces.errors import BenchctlError

# Other names of a flag -> the one that messages use.
OTHER_NAMES = {"--num-gpu-blocks-override": "--num-blocks"}

app = typer.Typer(
    name="benchctl",
    help="Replay LLM request traces under nano-vLLM's and vLLM V1's schedulers and see every decision, with its reason.",
    epilog="Exit codes: 0 ok; 1 a request was refused or a run broke; 2 usage or bad input; 3 a gate found a change; 130 Ctrl-C.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None if os.environ.get("NO_COLOR") else "rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def opt(*names: str, panel: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, help=help, show_default=False, **more)


def out_opt(
    *names: str,
    help: str,
    panel: str | None = None,
    folder: bool = False,
    kind: Callable[[str], Any] = str,
    **more: Any,
) -> Any:
    """An option that names a file to write, or a `folder`. An empty name (`--out "$DIR"`, unset) would be the current folder."""

    def named(text: str) -> Any:
        if not text:
            what, fix = ("folder", "name a folder, or . for the current one") if folder else ("file", "name a file")
            raise BenchctlError(f"{names[0]} is empty and names no {what}", fix=fix)
        return kind(text)

    metavar = "DIR" if folder else "FILE"
    return typer.Option(
        *names, rich_help_panel=panel, help=help, show_default=False, parser=named, metavar=metavar, **more
    )


def exit_with(run: Callable[[], int]) -> NoReturn:
    """End the command with the exit code of `run`; 130 on Ctrl-C. What it refuses names the flags as they were typed."""
    try:
        code = run()
    except BenchctlError as error:
        raise as_typed(error, sys.argv) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except Exception as error:
        # A lazy table of a damaged run fails where it is collected, far from where its folder is known.
        if not (type(error).__module__.startswith("polars") and str(error).startswith("parquet:")):
            raise
        raise BenchctlError(
            f"records of a run cannot be read: {str(error).splitlines()[0]}",
            where="one of the runs given",
            fix="benchctl report RUN names the damaged file; replay that run again",
        ) from None
    raise typer.Exit(code)


def as_typed(error: BenchctlError, words: list[str]) -> BenchctlError:
    """The error with the names of flags that stand among the words of the command line."""
    typed = {known: other for other, known in OTHER_NAMES.items() if any(w.split("=")[0] == other for w in words)}

    def renamed(text: str | None) -> str | None:
        for known, other in typed.items():
            text = None if text is None else re.sub(rf"{known}(?![\w-])", other, text)
        return text

    return BenchctlError(
        renamed(error.what) or "", where=renamed(error.where), fix=renamed(error.fix), exit_code=error.exit_code
    )
