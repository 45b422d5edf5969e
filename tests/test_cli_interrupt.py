"""Ctrl-C is one line and exit code 130, whenever it comes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.test_traces_scale import write_azure

DURING_IMPORTS = """
import os, signal, sys

class Finder:
    def find_spec(self, name, *rest):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
sys.argv = ["benchctl", "trace", "info", "traces/burst.jsonl"]
from benchctl.__main__ import main
main()
"""


@pytest.mark.parametrize("module", ["benchctl.cli", "typer", "benchctl.app", "polars", "traces.info", "msgspec"])
def test_during_imports(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DURING_IMPORTS.format(module=module)], capture_output=True, text=True, timeout=60
    )
    if module == "polars" and done.returncode == 0:
        pytest.skip("trace info does without polars")
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_during_an_import_of_a_file_which_leaves_nothing_behind(tmp_path: Path) -> None:
    write_azure(tmp_path / "week.csv", 400_000)
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-m", "benchctl", "trace", "import", str(tmp_path / "week.csv"), "-o", str(tmp_path / "out" / "t.jsonl")]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not list((tmp_path / "out").glob(".*/part-1")) and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")
    assert not list((tmp_path / "out").iterdir())
