"""The laws of a recorded run, for tests: every test that makes a run calls `assert_laws(path)`."""

from __future__ import annotations

from reports.laws import assert_laws

__all__ = ["assert_laws"]
