"""What the first part of a run would be the first to load is loaded before the run begins."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from benchctl.cli import app
from benchctl.parts import PartWriter
write, calls = PartWriter.write, []
def watched(self, part):
    before = set(sys.modules)
    write(self, part)
    calls.append((str(self.folder), part.num_rows, sorted(set(sys.modules) - before)))
PartWriter.write = watched
try:
    app(["replay", "traces/walkthrough.jsonl", "--engine", "null", "--records", sys.argv[1], "--no-report", "--out", sys.argv[2]])
except SystemExit:
    pass
for folder, rows, loaded in calls:
    print(folder.startswith(sys.argv[2]), rows > 0, *loaded)
"""


@pytest.mark.parametrize("mode", ["full", "compact", "summary"])
def test_the_first_part_of_a_run_loads_nothing(mode: str, tmp_path: object) -> None:
    out = subprocess.run(
        [sys.executable, "-c", SCRIPT, mode, str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout
    rehearsed, first, *_ = [line.split() for line in out.splitlines() if line.startswith(("True", "False"))]
    assert rehearsed[:2] == ["False", "True"] and len(rehearsed) > 2, "the rehearsal is what loads"
    assert first == ["True", "True"], first[2:]
