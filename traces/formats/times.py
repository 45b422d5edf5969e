"""Moments and durations of source files as integer nanoseconds, so that differences are exact.

Knows texts and numbers, no format. Digits beyond the ninth of a second are cut from texts and rounded from numbers.
"""

from __future__ import annotations

import re
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Any, Literal

from traces.rows import RowFault

Unit = Literal["s", "ms", "us", "ns"]
NS_PER_UNIT: dict[str, int] = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
MAX_NS = 2**80  # far beyond any calendar; keeps arithmetic on damaged numbers small

_ISO = re.compile(
    r"\s*(\d{4}-\d\d-\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d+))?\s*(Z|z|UTC|[+-]\d\d(?::?\d\d)?)?\s*$", re.ASCII
)
_EPOCH = date(1970, 1, 1).toordinal()


@lru_cache(maxsize=4096)
def _day_ns(text: str) -> int:
    return (date.fromisoformat(text).toordinal() - _EPOCH) * 86_400 * 10**9


@lru_cache(maxsize=256)
def _offset_ns(zone: str | None) -> int:
    if zone is None or zone in ("Z", "z", "UTC"):
        return 0
    hours, minutes = int(zone[1:3]), int(zone[-2:]) if len(zone) > 3 else 0
    return (-1 if zone[0] == "-" else 1) * (hours * 60 + minutes) * 60 * 10**9


def iso_ns(text: Any, key: str) -> int:
    """Nanoseconds since 1970 of `2024-05-10 00:00:00[.fraction][offset]`; without an offset as if it were UTC.

    Raises RowFault.
    """
    match = _ISO.match(text) if isinstance(text, str) else None
    if match is None:
        raise RowFault(f"{key} is {text!r:.60}, which is no time", fix="such as 2024-05-10 00:00:00.009930+00:00")
    day, hours, minutes, seconds, fraction, zone = match.groups()
    if int(hours) > 23 or int(minutes) > 59 or int(seconds) > 60:
        raise RowFault(f"{key} is {text!r}, which is no time of day", fix="mend the row")
    try:
        at = _day_ns(day)
    except ValueError:
        raise RowFault(f"{key} is {text!r}, which is no day of the calendar", fix="mend the row") from None
    at += (int(hours) * 3600 + int(minutes) * 60 + int(seconds)) * 10**9
    if fraction is not None:
        at += int(fraction[:9].ljust(9, "0"))
    return at - _offset_ns(zone)


def number_ns(value: Any, unit: str, key: str) -> int:
    """Nanoseconds of a number, or of its text, in `unit`. Raises RowFault."""
    scale = NS_PER_UNIT[unit]
    if type(value) is int:
        at = value * scale
    else:
        try:
            if isinstance(value, bool) or not isinstance(value, (str, float)):
                raise ValueError
            text = value.strip() if isinstance(value, str) else repr(value)
            if text.isdecimal() and len(text) <= 30:
                at = int(text) * scale
            else:
                exact = Decimal(text) * scale
                # Checked before it is made an int: 1e999999 would be a number of a million digits.
                if not exact.is_finite() or exact.adjusted() > 30:
                    raise ValueError
                at = int(exact.to_integral_value())
        except (ValueError, InvalidOperation, OverflowError):
            raise RowFault(f"{key} is {value!r:.60}, which is no time in {unit}", fix="mend the row") from None
    if not -MAX_NS < at < MAX_NS:
        raise RowFault(f"{key} is {value!r:.60}, which is no time in {unit}", fix="mend the row")
    return at


def moment_ns(value: Any, unit: str, key: str) -> int:
    """ISO text, or a number in `unit`, or its text. Raises RowFault."""
    if isinstance(value, str) and len(value) >= 19 and value.strip()[4:5] == "-":
        return iso_ns(value, key)
    return number_ns(value, unit, key)


def iso_text(ns: int, *, zone: bool) -> str:
    """ISO 8601 of a moment, with as many digits as it has; `zone`: whether the source said that it is UTC."""
    seconds, rest = divmod(ns, 10**9)
    text = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    if rest:
        text += f".{rest:09d}".rstrip("0")
    return text + ("+00:00" if zone else "")
