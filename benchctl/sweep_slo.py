"""What a finished cell's records say: whether SLOs were met, by how many, and what a simulation's durations are worth.

Reads the run folder only, so other SLOs need no new replay.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from reports import metrics
from reports.run import Run, open_run
from traces.errors import BenchctlError

LARGEST_GAPS = ("p90_max_itl_ms", "p99_max_itl_ms")  # percentiles over requests of what an SLO of ITL is held against


def judge(path: str | Path, slo: Mapping[str, float]) -> dict[str, Any] | None:
    """`attainment`, `good`, `total`, `request_goodput` and `misses` (metric -> requests beyond its SLO) of a run.

    With an SLO of ITL also LARGEST_GAPS: percentiles of the requests' largest gaps, None where too few finished.
    `slo`: metric -> ms. Refused and unfinished requests count in the total. None without SLOs, or where the run is gone.
    """
    if not slo:
        return None
    try:
        run = open_run(path)
        found = metrics.attainment(run, dict(slo))
        frame = per_request(run, slo)
    except (BenchctlError, OSError, pl.exceptions.PolarsError):
        return None
    assert found is not None
    good, total = found
    misses = {name: int((frame[name] * 1000 > limit).sum()) for name, limit in slo.items()}
    return {
        "slo": dict(slo),
        "good": good,
        "total": total,
        "attainment": good / total if total else None,
        "request_goodput": good / run.duration_s if run.duration_s else None,
        "misses": misses | {"not finished": total - frame.height},
    } | (largest_gaps(frame["itl"]) if "itl" in slo else {})


def judged_by(found: Mapping[str, Any] | None, slo: Mapping[str, float]) -> bool:
    """Whether an earlier `judge` was by these SLOs and says all that it does now."""
    wanted = LARGEST_GAPS if "itl" in slo else ()
    return found is not None and found.get("slo") == dict(slo) and all(name in found for name in wanted)


def largest_gaps(seconds: pl.Series) -> dict[str, float | None]:
    found = metrics.distribution(seconds, (90, 99)).percentiles
    return {name: None if at is None else at * 1000 for name, at in zip(LARGEST_GAPS, found.values(), strict=True)}


def per_request(run: Run, slo: Mapping[str, float]) -> pl.DataFrame:
    """The metrics of the SLOs of each finished request, seconds; of `itl` a request's largest gap."""
    frame = metrics.per_request(run)
    if "itl" in slo:
        frame = frame.join(metrics.itl(run).group_by("request").agg(pl.col("itl").max()), on="request", how="left")
    return frame.select(list(slo)).collect()


def simulation_of(path: str | Path) -> dict[str, Any] | None:
    """Of a simulated run: profile, the error stated for it (a share of a time), what that error is, share of rounds outside."""
    try:
        about = open_run(path).manifest.get("simulation")
    except (BenchctlError, OSError):
        return None
    if not isinstance(about, dict):
        return None
    error, what = stated_error(about)
    worst = (((about.get("error") or {}).get("held_out") or {}).get("worst") or {}).get("99")
    rounds, outside = int(about.get("rounds") or 0), int(about.get("outside") or 0)
    return {
        "profile": about.get("profile"),
        "device": about.get("device"),
        "error": error,
        "error_worst": worst,
        "error_is": what,
        "outside_share": outside / rounds if rounds else 0.0,
    }


def stated_error(about: Mapping[str, Any]) -> tuple[float | None, str]:
    """The ±x of a profile, and what it is: its error at p99 on runs that no fit saw, else its p95 residual of a round.

    None where the profile states neither.
    """
    held = (about.get("error") or {}).get("held_out") or {}
    if (at_99 := (held.get("end_to_end") or {}).get("99")) is not None:
        worst = (held.get("worst") or {}).get("99")
        text = f"median error of p99 of TTFT, TPOT, ITL and E2E on {held.get('runs')} runs that were not fitted"
        return float(at_99), text + (f"; the worst ±{worst:.1%}" if worst is not None else "")
    residuals = [r for r in about.get("residuals") or [] if isinstance(r, dict) and r.get("p95") is not None]
    if not residuals:
        return None, "the profile states no error"
    worst_kind = max(residuals, key=lambda r: float(r["p95"]))
    return float(worst_kind["p95"]), (
        f"95% of {worst_kind['kind']} rounds were predicted better where the profile was fitted; no run was held out"
    )
