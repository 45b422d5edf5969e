"""Every `benchctl` command line in the README and the docs is one that the program takes; every linked file exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
import typer.main

from benchctl.cli import app
from tests.command_line import call

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# What a page writes for something of the reader's.
PLACEHOLDERS = {"N": "1", "RATE": "2", "…": "x"}


def command_lines(text: str) -> list[str]:
    """Lines of fenced blocks and inline code that begin with `benchctl`, continuation lines joined."""
    found = []
    for block in re.findall(r"```(?:bash|console|sh|text)?\n(.*?)```", text, re.S):
        for line in block.replace("\\\n", " ").splitlines():
            line = line.strip().removeprefix("$ ")
            if line.startswith("benchctl "):
                found.append(line)
    outside = re.sub(r"```.*?```", "", text, flags=re.S)
    found += [code for code in re.findall(r"`([^`\n]+)`", outside) if re.match(r"benchctl [a-z-]+ \S", code)]
    return found


def arguments(line: str) -> list[str]:
    words = shlex.split(line, comments=True)[1:]
    end = next((i for i, word in enumerate(words) if re.fullmatch(r"\||\|\||&&|;|\d?>.*", word)), len(words))
    return [PLACEHOLDERS.get(word, word.replace("…", "")) for word in words[:end]]


LINES = [(path.relative_to(ROOT).as_posix(), line) for path in PAGES for line in command_lines(path.read_text())]


def test_there_are_command_lines_to_look_at() -> None:
    assert len(LINES) > 20 and {"README.md"} <= {page for page, _ in LINES}


@pytest.mark.parametrize(("page", "line"), LINES, ids=[f"{page}: {line}"[:90] for page, line in LINES])
def test_a_documented_command_line_is_taken(page: str, line: str) -> None:
    command: click.Command = typer.main.get_command(app)
    context = click.Context(command, info_name="benchctl")
    args = arguments(line)
    while isinstance(command, click.Group) and args:
        name, command, args = command.resolve_command(context, args)
        assert command is not None, line
        context = click.Context(command, info_name=name, parent=context)
    try:
        command.make_context("benchctl", list(args), parent=context.parent)
    except click.exceptions.Exit:
        pass  # --help, --version
    except click.UsageError as error:
        raise AssertionError(f"{page}: {line}\n{error.format_message()}") from None


@pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(ROOT).as_posix() for page in PAGES])
def test_a_linked_file_exists(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), f"{page.name} links {target}"


def test_the_readme_s_sweep_prints_what_the_readme_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "README.md").read_text()
    found = re.search(r"```bash\n(benchctl sweep [^\n]+)\n```\n\n```text\n(.*?)```", page, re.S)
    assert found is not None
    monkeypatch.chdir(tmp_path)
    answer = call(capfd, *arguments(found[1]), "--workers", "1")
    assert answer.code == 0, answer.err
    assert [line.rstrip() for line in answer.out.splitlines()] == found[2].splitlines()
