"""Runs of the command line inside the test process, and small traces for them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchctl.cli import app
from traces.errors import BenchctlError


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str


def write_trace(path: Path, rows: Iterable[dict[str, Any]], **header: Any) -> Path:
    """A canonical trace; `header` keys make a header line."""
    lines = [json.dumps({"benchctl_trace": 1, **header})] if header else []
    path.write_text("\n".join([*lines, *(json.dumps(row) for row in rows)]) + "\n")
    return path


def rows(*sizes: tuple[float, int, int]) -> list[dict[str, Any]]:
    """(arrival_s, prompt, output) of requests R1, R2, …"""
    return [
        {"id": f"R{i}", "arrival_s": at, "input_length": prompt, "output_length": output}
        for i, (at, prompt, output) in enumerate(sizes, 1)
    ]


def call(capfd: pytest.CaptureFixture[str], *argv: object) -> Answer:
    """`benchctl argv…` as the console script answers it."""
    capfd.readouterr()
    note, code = "", 0
    try:
        app([str(a) for a in argv])
    except BenchctlError as error:
        code, note = error.exit_code, f"Error: {error}"
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    out, err = capfd.readouterr()
    return Answer(code, out, err + note)
