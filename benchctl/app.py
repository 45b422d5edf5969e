"""The command line's root, and what every file of commands needs of it. `cli` gathers the commands; they import this."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import typer

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


def exit_with(run: Callable[[], int]) -> NoReturn:
    """End the command with the exit code of `run`; 130 on Ctrl-C."""
    try:
        code = run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    raise typer.Exit(code)
