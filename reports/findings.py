"""What the checks of several runs found, as one list: what is found of several runs is said once, with the evidence of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

LEVELS = ("error", "warn", "info")  # the gravest first


class Finding(NamedTuple):
    """A check, and the runs it is about."""

    level: str
    runs: tuple[str, ...]
    what: str
    evidence: str
    cure: str


def merge(found: Sequence[Sequence[Mapping[str, str]]], names: Sequence[str]) -> list[Finding]:
    """The checks of each run (`Check.as_dict`), the gravest first. Evidence that is not the same for all is given run by run."""
    about: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for checks, name in zip(found, names, strict=True):
        for check in checks:
            alike = about.setdefault((check["level"], check["what"], check["cure"]), {})
            alike.setdefault(check["evidence"], []).append(name)
    out = []
    for (level, what, cure), evidence in about.items():
        each = [f"{', '.join(runs)}: {text}" for text, runs in evidence.items()]
        runs = tuple(name for name in names if any(name in of for of in evidence.values()))
        out.append(Finding(level, runs, what, ". ".join(each) if len(each) > 1 else next(iter(evidence)), cure))
    return sorted(out, key=lambda finding: LEVELS.index(finding.level))
