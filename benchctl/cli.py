"""The command line: its start, its streams, and every command by the file that has it."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Annotated

import typer

from benchctl import __version__
from benchctl import commands_replay as _replay  # noqa: F401 - registers replay, the first command of the help
from benchctl.app import app, exit_with
from traces.errors import BenchctlError


def main() -> None:
    """The console script. A user's mistake is a few lines on stderr and an exit code, never a traceback."""
    open_streams()
    try:
        app()
    except BenchctlError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader of stdout went away (`| head`): keep the interpreter from failing once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"Error: {error.strerror}: {error.filename or 'standard output'}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def open_streams() -> None:
    """Make stdin, stdout and stderr usable, whoever started this.

    A closed one (`2>&-`) leads nowhere from here on, else the next file opened would take its place, and what is meant for
    stderr would be printed on stdout. Characters that the locale cannot write become question marks.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - open to the end
        elif mode == "w" and isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"benchctl {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None: ...


@app.command()
def doctor(
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure what the device can do at most (copies, products, launches; under a minute) and keep it: later runs and their reports state it.",
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Say what is installed, which device there is, what is missing and how to get it.

    Example: benchctl doctor --json
    """

    def run() -> int:
        from benchctl.doctor import diagnose, print_diagnosis

        return print_diagnosis(diagnose(measure), as_json=json)

    exit_with(run)


from benchctl import commands_check as _check  # noqa: E402, F401 - registers check-scheduler
from benchctl import commands_compare as _compare  # noqa: E402, F401 - registers compare and explain
from benchctl import commands_engine as _engine  # noqa: E402, F401 - registers check-engine
from benchctl import commands_gate as _gate  # noqa: E402, F401 - registers gate
from benchctl import commands_pack as _pack  # noqa: E402, F401 - registers pack and unpack
from benchctl import commands_report as _report  # noqa: E402, F401 - registers report
from benchctl import commands_shrink as _shrink  # noqa: E402, F401 - registers shrink
from benchctl import commands_simulator as _simulator  # noqa: E402, F401 - registers calibrate and validate
from benchctl import commands_sweep as _sweep  # noqa: E402, F401 - registers sweep
from benchctl import commands_trace as _trace  # noqa: E402, F401 - registers the group trace
from benchctl import commands_trace_make as _trace_make  # noqa: E402, F401 - and its commands that make and change traces
