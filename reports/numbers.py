"""How numbers are printed in pages, terminals and Markdown."""

from __future__ import annotations

NOT_MEASURED = "–"


def number(value: float | int | None, digits: int | None = None) -> str:
    """Three or so significant digits, thousands separated; an en dash for what was not measured."""
    if value is None:
        return NOT_MEASURED
    if isinstance(value, int):
        return f"{value:,}"
    if digits is None:
        size = abs(value)
        digits = 0 if size >= 1000 or value == 0 else 1 if size >= 100 else 2 if size >= 0.1 else 4
    return f"{value:,.{digits}f}"


def share(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.1%}"


def plural(count: int, noun: str) -> str:
    """`1 round`, `2,000 rounds`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
