"""Before any test module is imported: Triton's interpreter where there is no card, and never the network."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.browser import Browser

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True, scope="module")
def freeze_what_is_imported() -> None:
    """Freeze, once a file, all objects there are: every module that any test has imported by then.

    Each run looks through all objects before its clock starts, and thaws them when it ends. Beside the modules of all tests
    that takes most of a second, and there are thousands of runs. What a test makes is collected as ever.
    """
    import benchctl.runner

    gc.collect()
    gc.freeze()
    benchctl.runner.gc = SimpleNamespace(collect=gc.collect, freeze=lambda: None, unfreeze=lambda: None)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One Chromium for every test of a page; each opens a tab of its own."""
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()
