"""Before any test module is imported: Triton's interpreter where there is no card, and never the network."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from types import SimpleNamespace

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_finish() -> None:
    """Freeze what every test module has imported, once.

    Each run looks through all objects there are before its clock starts, and thaws them when it ends. With the modules of
    all tests that is a third of a second a run, and there are thousands.
    """
    import benchctl.runner

    gc.collect()
    gc.freeze()
    benchctl.runner.gc = SimpleNamespace(collect=gc.collect, freeze=lambda: None, unfreeze=lambda: None)
