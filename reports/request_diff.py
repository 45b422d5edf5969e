"""Which requests fared most differently under two runs of one trace, and in which phase of their life.

Reads `requests` of both runs; must not know why (that is `decision_work`).
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from reports import metrics
from reports.run import Run

PHASES = ("queue", "prefill", "decode")
COLUMNS = ("ttft", "e2el", *PHASES, "stalled", "preempted")


@dataclass(frozen=True, slots=True)
class RequestDifference:
    """One request in both runs; seconds, B - A in `*_difference`. `phase`: where most of the difference in E2E arose."""

    request: int
    id: str
    prompt_tokens: int
    output_tokens: int
    ttft_a: float
    ttft_b: float
    e2el_a: float
    e2el_b: float
    phase: str
    phase_difference: float
    stalled_difference: float
    preempted_difference: float
    preemptions_a: int
    preemptions_b: int

    @property
    def e2el_difference(self) -> float:
        return self.e2el_b - self.e2el_a

    @property
    def ttft_difference(self) -> float:
        return self.ttft_b - self.ttft_a


def diff_requests(a: Run, b: Run, count: int) -> list[RequestDifference]:
    """The `count` requests that both finished with the largest |E2E difference|, ties by trace row; equal ones are left out."""
    keep = ("request", "id", "prompt_tokens", "emitted_tokens", "preemptions", *COLUMNS)
    first, second = (metrics.per_request(run).select(keep) for run in (a, b))
    both = first.join(second, on="request", suffix="_b").with_columns(
        (pl.col("e2el_b") - pl.col("e2el")).abs().alias("size")
    )
    rows = both.filter(pl.col("size") > 1e-12).sort(["size", "request"], descending=[True, False]).head(count).collect()
    out = []
    for row in rows.iter_rows(named=True):
        changes = {name: row[f"{name}_b"] - row[name] for name in COLUMNS}
        phase = max(PHASES, key=lambda name: abs(changes[name]))
        out.append(
            RequestDifference(
                request=row["request"],
                id=row["id"],
                prompt_tokens=row["prompt_tokens"],
                output_tokens=row["emitted_tokens"],
                ttft_a=row["ttft"],
                ttft_b=row["ttft_b"],
                e2el_a=row["e2el"],
                e2el_b=row["e2el_b"],
                phase=phase,
                phase_difference=changes[phase],
                stalled_difference=changes["stalled"],
                preempted_difference=changes["preempted"],
                preemptions_a=row["preemptions"],
                preemptions_b=row["preemptions_b"],
            )
        )
    return out
