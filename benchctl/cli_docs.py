"""docs/cli.md, made from the commands themselves: `python -m benchctl.cli_docs > docs/cli.md`, or `make docs`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from benchctl import cli as _cli  # noqa: F401 - registers the commands
from benchctl.app import app

EXIT_CODES = (
    ("0", "ok"),
    ("1", "a request was refused, or a run broke; what ran is recorded"),
    ("2", "usage or bad input: nothing ran, or `--over-length error` stopped at a row"),
    ("3", "`gate` found a change"),
    ("130", "Ctrl-C: the run ended as `interrupted`, its rounds are kept"),
)


def markdown() -> str:
    """The whole page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    group: Any = typer.main.get_command(app)
    yield "# The command line"
    yield ""
    yield "Made from `benchctl --help` by `make docs`; a test keeps it equal."
    yield ""
    yield str(group.help)
    yield ""
    yield "Results go to stdout or files, progress and warnings to stderr. `NO_COLOR` is honoured."
    yield ""
    yield "| exit code | meaning |"
    yield "| --- | --- |"
    for code, meaning in EXIT_CODES:
        yield f"| {code} | {meaning} |"
    for name, command in _commands(group):
        yield ""
        yield f"## benchctl {name}"
        yield ""
        text, _, example = (command.help or "").partition("Example:")
        yield text.strip()
        yield ""
        yield "```sh"
        yield example.strip()
        yield "```"
        yield from _parameters(command)


def _commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each command with its name, those of a group of commands after the group's name."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def _parameters(command: Any) -> Iterator[str]:
    panels: dict[str, list[Any]] = {}
    for parameter in command.params:
        if not getattr(parameter, "hidden", False):
            default = "Arguments" if parameter.param_type_name == "argument" else "Options"
            panels.setdefault(getattr(parameter, "rich_help_panel", None) or default, []).append(parameter)
    for panel, parameters in panels.items():
        yield ""
        yield f"**{panel}**"
        yield ""
        yield "| | |"
        yield "| --- | --- |"
        for parameter in parameters:
            yield f"| {_names(parameter)} | {getattr(parameter, 'help', None) or ''} |"


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{(parameter.name or '').upper()}`"
    names = [*parameter.opts, *parameter.secondary_opts]
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    print(markdown(), end="")
