"""One run in numbers, ready for JSON: vLLM bench's keys at the top, ours under `benchctl`.

The only place where seconds become milliseconds. Every key has its formula in `formulas.py` and docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl

from reports import metrics
from reports.checks import checks
from reports.formulas import FORMULAS
from reports.load import load_facts
from reports.metrics import Distribution
from reports.run import Run

DEFAULT_METRICS = ("ttft", "tpot", "itl", "e2el")
DEFAULT_PERCENTILES = (50.0, 90.0, 95.0, 99.0)

STEADY_LEAST = 0.1  # of the run: a window shorter than that is a peak, not a steady state

Summary = dict[str, Any]


def summarize(
    run: Run, *, percentile_metrics: Sequence[str] = DEFAULT_METRICS, percentiles: Sequence[float] = DEFAULT_PERCENTILES
) -> Summary:
    """Every figure of the run, JSON-able; null where it was not measured, not recorded or n does not carry it.

    `percentile_metrics` are those that appear at the top under vLLM's names (`p99_ttft_ms`); all stand under `benchctl`.
    """
    percents = tuple(sorted({float(p) for p in percentiles}))
    samples = _samples(run)
    spread = {name: metrics.distribution(values, percents) for name, values in samples.items()}
    statuses = _statuses(run)
    whole = metrics.throughput(run)
    slo = slo_ms(run)
    attained = metrics.attainment(run, slo)
    finished = run.scan("requests").filter(pl.col("status") == "finished")
    given, out = finished.select(pl.col("prompt_tokens").sum(), pl.col("emitted_tokens").sum()).collect().row(0)
    summary: Summary = {
        "duration": run.duration_s,
        "completed": statuses["finished"],
        "failed": statuses["rejected"] + statuses["unfinished"],
        "total_input_tokens": given,
        "total_output_tokens": out,
        "request_throughput": whole.requests_per_s,
        "request_goodput": attained[0] / run.duration_s if attained and run.duration_s else None,
        "output_throughput": whole.output_tokens_per_s,
        "total_token_throughput": whole.total_tokens_per_s,
        "max_concurrent_requests": metrics.peak_concurrency(run),
    }
    for name in percentile_metrics:
        summary |= _vllm_keys(name, spread[name])
    summary["benchctl"] = {
        "run": _identity(run),
        "requests": statuses | {"total": metrics.num_requests(run), "reasons": _reasons(run)},
        "latency": {name: _distribution_ms(values) for name, values in spread.items()},
        "load": load_facts(run),
        "steady": _steady(run),
        "slo": {"limits_ms": slo, "good": attained[0], "attainment": attained[0] / attained[1] if attained[1] else None}
        if attained
        else None,
        **_scheduler(run),
        "checks": [check.as_dict() for check in checks(run)],
    }
    return summary


def slo_ms(run: Run) -> dict[str, float]:
    """The SLOs the run was given, metric -> milliseconds, under the names of the metrics."""
    given = run.setting("goodput") or {}
    if not isinstance(given, dict):
        return {}
    short = {name.removesuffix("_ms"): float(value) for name, value in given.items()}
    known = {"e2e": "e2el"}
    return {known.get(name, name): value for name, value in short.items() if known.get(name, name) in DEFAULT_METRICS}


def metric_names(summary: Summary) -> set[str]:
    """The metrics that stand in a summary, under the names of `formulas.FORMULAS`."""
    ours = summary["benchctl"]
    top = {key for key in summary if key != "benchctl" and not key.endswith("_ms")}
    nested = {
        *ours["latency"],
        *ours["prefix_cache"],
        *ours["rounds"],
        *ours["counters"],
        "steady",
        "stop_waiting",
        "stop_running",
        "host",
    }
    return top | nested | ({"attainment"} if ours["slo"] else set())


def _samples(run: Run) -> dict[str, pl.Series]:
    """Metric -> seconds of every sample; empty where the run did not record what it takes."""
    frame = metrics.per_request(run).select(*metrics.PER_REQUEST).collect()
    samples = {name: frame[name] for name in metrics.PER_REQUEST}
    samples["itl"] = metrics.itl(run).select("itl").collect()["itl"]
    return {name: samples[name] for name in FORMULAS if name in samples}


def _ms(value: float | None) -> float | None:
    return None if value is None else value * 1000


def percent_name(percent: float) -> str:
    """50.0 -> p50, 99.9 -> p99.9."""
    return f"p{percent:g}"


def _vllm_keys(name: str, spread: Distribution) -> dict[str, float | None]:
    keys = {
        f"mean_{name}_ms": _ms(spread.mean),
        f"median_{name}_ms": _ms(spread.median),
        f"std_{name}_ms": _ms(spread.std),
    }
    return keys | {f"{percent_name(p)}_{name}_ms": _ms(value) for p, value in spread.percentiles.items()}


def _distribution_ms(spread: Distribution) -> dict[str, float | int | None]:
    out: dict[str, float | int | None] = {
        "n": spread.n,
        "mean_ms": _ms(spread.mean),
        "median_ms": _ms(spread.median),
        "std_ms": _ms(spread.std),
    }
    out |= {"min_ms": _ms(spread.least), "max_ms": _ms(spread.most)}
    return out | {f"{percent_name(p)}_ms": _ms(value) for p, value in spread.percentiles.items()}


def _statuses(run: Run) -> dict[str, int]:
    """Requests by status. Those that a running or killed run never wrote an end for are unfinished."""
    counts = dict(run.scan("requests").group_by("status").len("n").collect().iter_rows())
    out = {status: int(counts.get(status, 0)) for status in ("finished", "rejected", "unfinished")}
    out["unfinished"] += metrics.num_requests(run) - sum(out.values())
    return out


def _reasons(run: Run) -> dict[str, int]:
    frame = (
        run.scan("requests")
        .filter(pl.col("reason").is_not_null())
        .group_by("reason")
        .len("n")
        .sort("n", "reason", descending=[True, False])
    )
    return dict(frame.collect().iter_rows())


def _identity(run: Run) -> dict[str, Any]:
    trace = run.manifest.get("trace")
    keys = ("scheduler", "policy", "engine", "model", "clock", "arrivals", "records", "digest")
    name = trace.get("name") or trace.get("path") if isinstance(trace, dict) else trace
    out: dict[str, Any] = {"name": run.name, "path": run.shown, "status": run.status, "trace": name}
    out |= {key: run.manifest.get(key) for key in keys}
    return out | {
        "block_size": run.block_size,
        "usable_blocks": run.usable_blocks,
        "max_num_seqs": run.max_num_seqs,
        "max_num_batched_tokens": run.token_budget,
    }


def _steady(run: Run) -> dict[str, float | None] | None:
    """Rates of the steady window; None where there is none, or where it is a peak of less than STEADY_LEAST of the run."""
    span = metrics.steady_window(run)
    if span is None or span[1] - span[0] < STEADY_LEAST * run.duration_s:
        return None
    window = metrics.steady_throughput(run)
    assert window is not None, span
    return {
        "begin_s": window.begin_s,
        "end_s": window.end_s,
        "request_throughput": window.requests_per_s,
        "output_throughput": window.output_tokens_per_s,
        "total_token_throughput": window.total_tokens_per_s,
    }


def _scheduler(run: Run) -> dict[str, Any]:
    totals = metrics.round_totals(run)
    busy = int(totals["rounds"] or 0) - int(totals["empty"] or 0)
    sizes = metrics.distribution(metrics.tokens_per_round(run))
    discarded, recomputed = (
        run.scan("requests")
        .select(pl.col("discarded_tokens").sum(), pl.col("recomputed_tokens").sum())
        .collect()
        .row(0)
    )
    bound = run.manifest.get("prefix_upper_bound")
    peak = metrics.peak_used_blocks(run)
    return {
        "rounds": {
            "rounds": {"total": totals["rounds"]}
            | {kind: totals[kind] for kind in ("prefill", "decode", "mixed", "empty")},
            "mixed_share": (totals["mixed"] or 0) / busy if busy else None,
            "tokens_per_round": {
                "mean": sizes.mean,
                "max": sizes.most,
                **{percent_name(p): value for p, value in sizes.percentiles.items()},
            },
            "budget_use": metrics.budget_use(run),
            "max_num_seqs": totals["max_num_seqs"],
        },
        "prefix_cache": _prefix_cache(run, int(totals["queried_tokens"] or 0), int(totals["cached_tokens"] or 0))
        | {"upper_bound": _upper_bound(bound)},
        "counters": {
            "preemptions": int(totals["preempted"] or 0),
            "discarded_tokens": int(discarded or 0),
            "recomputed_tokens": int(recomputed or 0),
            "evictions": int(totals["evicted"] or 0),
            "peak_blocks": peak,
            "record_share": metrics.record_share(run),
        },
        "stops": {loop: metrics.stop_histogram(run, loop) for loop in ("waiting", "running")},
        "host": {name: totals[name] for name in ("schedule_s", "prepare_s", "device_s", "update_s", "record_s")},
    }


def _prefix_cache(run: Run, queried: int, hit: int) -> dict[str, int | float | None]:
    """Look-ups of first admissions, which the upper bound is about, apart from those of preempted requests coming back.

    `queried`, `hit`: tokens of all of them, 0 where prefix caching is off.
    """
    admitted = run.scan("requests").filter(pl.col("cached_tokens").is_not_null())
    first = admitted.select(pl.col("prompt_tokens").sum(), pl.col("cached_tokens").sum()).collect().row(0)
    first_queried, first_hit = (int(value or 0) for value in first) if queried else (0, 0)
    # Before a run has ended, requests under way are in the rounds and not yet among the requests.
    ended = run.status != "running"
    return {
        "queried_tokens": first_queried,
        "hit_tokens": first_hit,
        "hit_rate": first_hit / first_queried if first_queried else None,
        "resumed_queried_tokens": queried - first_queried if ended else None,
        "resumed_hit_tokens": hit - first_hit if ended else None,
    }


def _upper_bound(bound: Any) -> dict[str, float | int | None] | None:
    if not isinstance(bound, dict) or "queried_tokens" not in bound:
        return None
    queried, hit = int(bound["queried_tokens"]), int(bound["hit_tokens"])
    return {"queried_tokens": queried, "hit_tokens": hit, "hit_rate": hit / queried if queried else None}
