"""What is said of the error of a simulated run's durations, from its manifest: on pages, terminals and in Markdown alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def error_text(error: Mapping[str, Any]) -> str:
    """`±1.2 % at p50 ... on this profile`, of runs that no fit saw; else of the rounds that were fitted, and that it is so."""
    held = error.get("held_out")
    if isinstance(held, Mapping):
        typical = ", ".join(f"±{value:.1%} at p{p}" for p, value in held["end_to_end"].items())
        worst = ", ".join(f"{value:.0%}" for value in held["worst"].values())
        rounds = ", ".join(f"{kind} ±{value:.1%}" for kind, value in held["round_p50"].items())
        return (
            f"{typical} on this profile (median error of TTFT, TPOT, ITL and E2E in {held['runs']} measured runs that it was not "
            f"fitted on; the worst of them {worst}); a round: {rounds}"
        )
    fitted = ", ".join(f"{kind} ±{value:.1%}" for kind, value in (error.get("fitted_p50") or {}).items())
    return f"{fitted or 'no error is known'} on this profile (median error of a round where it was fitted; held against no other run)"
