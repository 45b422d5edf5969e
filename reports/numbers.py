"""How numbers are printed in pages, terminals and Markdown."""

from __future__ import annotations

from collections.abc import Sequence

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


def signed(text: str) -> str:
    """With a minus sign in place of a hyphen; nothing has no sign."""
    return text[1:] if text[1:] == "0.0%" else text.replace("-", "\N{MINUS SIGN}")


def change(values: Sequence[float | int | None], as_share: bool = False) -> str:
    """The second of two values against the first: a share of it, `+53.7%`, or points where both are shares. Else nothing."""
    if len(values) != 2:
        return ""
    first, second = values
    if first is None or second is None:
        return ""
    if first == second:
        return "same"
    if as_share:
        return signed(f"{(second - first) * 100:+.1f} points")
    return signed(f"{(second - first) / first:+,.1%}") if first else "from 0"


def unequal(sizes: Sequence[int | None]) -> bool:
    """Whether blocks of these sizes are no common measure."""
    return None not in sizes and len(set(sizes)) > 1
