"""Values of a sweep's spec as words of `benchctl replay`, and those that it would refuse whatever else is given.

Such a value is the spec's fault and is found before the first cell. Values that only together make no replay (a block size that
one of the policies has not) cost the cells that hold them, and the others go on: what a cell is, is `sweep_spec`'s.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import typer

from benchctl.app import app
from benchctl.config import chosen_schedulers
from benchctl.parse import replay_options
from traces.errors import BenchctlError
from traces.load import open_trace

Value = str | int | float | bool
UsageError: Any = typer.BadParameter.__mro__[1]  # of click, or of the copy of click that newer versions of Typer bring
# What a flag needs beside it to mean anything: without these its value could not be looked at alone.
BESIDE: dict[str, dict[str, Value]] = {
    "burstiness": {"request-rate": 1},
    "round-cost": {"engine": "null"},
    "warm-cache": {"num-warmups": 1},
}


@cache
def replay_command() -> Any:
    group: Any = typer.main.get_command(app)
    return group.commands["replay"]


@cache
def flags_of_replay() -> tuple[str, ...]:
    """Long names, without dashes."""
    return tuple(name[2:] for p in replay_command().params for name in p.opts if name.startswith("--"))


@cache
def switches_off() -> frozenset[str]:
    """What turns a switch off, with dashes: not every switch has it."""
    return frozenset(name for p in replay_command().params for name in p.secondary_opts)


def words_of(name: str, value: Value) -> list[str]:
    """A setting as the command line has it; a switch that is off by itself and has no word for it is left out."""
    if value is False:
        return [off] if (off := f"--no-{name}") in switches_off() else []
    return [f"--{name}"] if value is True else [f"--{name}", str(value)]


def check_value(name: str, value: Value, where: str) -> None:
    """Raises BenchctlError, with `where` in the spec, for a value that its flag does not take."""
    words = [word for n, v in ({name: value} | BESIDE.get(name, {})).items() for word in words_of(n, v)]
    try:
        options = replay_options(**replay_command().make_context("replay", ["trace", *words]).params)
        if name == "scheduler":
            chosen_schedulers(options.schedulers)
        if name == "profile" and options.profile is not None:
            from benchctl.profiles import load_profile

            load_profile(options.profile)
    except UsageError as error:
        why = error.format_message().removeprefix(f"Invalid value for '--{name}': ")
        raise BenchctlError(f"{name} is {value!r}: {why}", where=where) from None
    except BenchctlError as error:
        raise placed(error, where) from None


def check_trace(name: str, where: str | None, *, skip_bad: bool) -> None:
    """Raises BenchctlError where the trace is missing or broken. One too large to be read twice is opened alone."""
    try:
        open_trace(name, skip_bad=skip_bad)
    except BenchctlError as error:
        raise (error if where is None else placed(error, where)) from None


def placed(error: BenchctlError, where: str) -> BenchctlError:
    """The error with its place in the spec; of a file that the spec names, with that place too."""
    inside = f" ({error.where})" if error.where and not error.where.startswith("--") else ""
    return BenchctlError(error.what, where=where + inside, fix=error.fix)
