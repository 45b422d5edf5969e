"""Kernels for cards that are not here: they compile, and take no more shared memory than such a card has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("capability", [86, 120])
def test_kernels_fit_the_card(capability: int) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tests" / "compile_for_cards.py"), str(capability)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert len(lines) >= 4 and {line[0].split()[0] for line in lines} >= {"chunks", "decodes"}
    assert ("product" in {line[0].split()[0] for line in lines}) == (capability >= 90)
    for what, used, there in lines:
        assert 0 < int(used) <= int(there), what
