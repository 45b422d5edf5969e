"""What `replay --verify N` found of each run: a few requests computed anew in plain torch, as rows of a table with their formula."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from reports.numbers import NOT_MEASURED, number
from reports.run import Run

TOLD = {
    "requests", "dtype", "tolerance", "least_agreement", "columns", "vocab_size", "positions", "passed",
    "mean_error", "max_error", "agreement", "agreement_beyond_rounding",
}  # fmt: skip
KINDS = {
    "resumed": "preempted and resumed",
    "cached": "with cached tokens",
    "chunked": "in chunks",
    "plain": "plain",
}


class Verified(NamedTuple):
    """`rows`: what is told, then a text for each run; a dash for a run that was not verified."""

    rows: list[tuple[str, list[str]]]
    formula: str


def verified(runs: Sequence[Run]) -> Verified | None:
    """None where no run was verified."""
    found = [_of(run) for run in runs]
    first = next((one for one in found if one is not None), None)
    if first is None:
        return None

    def row(label: str, text: Callable[[Mapping[str, Any]], str]) -> tuple[str, list[str]]:
        return label, [NOT_MEASURED if one is None else text(one) for one in found]

    rows = [
        row("within tolerance", lambda v: "yes" if v["passed"] else "no"),
        row("requests", lambda v: number(len(v["requests"]))),
        *(row(label, lambda v, k=kind: number(_of_kind(v, k))) for kind, label in KINDS.items()),  # type: ignore[misc]
        row("n, positions", lambda v: number(v["positions"])),
        row("relative error, mean", lambda v: _error(v, "mean_error")),
        row("relative error, largest", lambda v: _error(v, "max_error")),
        row("tolerance", lambda v: f"{v['tolerance']:g}"),
        row("engine's dtype", lambda v: str(v["dtype"])),
        row("same token", lambda v: _part(v, "agreement")),
        row("same token but for rounding", lambda v: _part(v, "agreement_beyond_rounding")),
    ]
    formula = (
        "Relative error of a position: ‖l − r‖ / ‖r‖, where l are the engine's logits and r those of the same tokens computed at once in float32, "
        f"plain torch, over {number(first['columns'])} of {number(first['vocab_size'])} columns of the vocabulary. Within tolerance: each request's mean is at most the tolerance, "
        f"its largest at most twice that, and {first['least_agreement']:.0%} of positions have the same likeliest token, or another whose logit lies within rounding of it"
    )
    return Verified(rows, formula)


def _of(run: Run) -> Mapping[str, Any] | None:
    verify = run.manifest.get("verify")
    return verify if isinstance(verify, dict) and verify.keys() >= TOLD else None


def _of_kind(verify: Mapping[str, Any], kind: str) -> int:
    return sum(request["kind"] == kind for request in verify["requests"])


def _error(verify: Mapping[str, Any], name: str) -> str:
    return f"{verify[name]:.2g}" if verify["positions"] else NOT_MEASURED


def _part(verify: Mapping[str, Any], name: str) -> str:
    return f"{verify[name]:.2%}" if verify["positions"] else NOT_MEASURED
