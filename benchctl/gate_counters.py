"""What a baseline holds of a run: counters of its decisions, the settings that decide them, its machine, and its timings.

Reads run folders through `reports`; must not know a baseline.
"""

from __future__ import annotations

import json
from typing import Any

import polars as pl
import xxhash

from reports import metrics
from reports.run import Run
from reports.summary import summarize
from traces.errors import BenchctlError

Counter = int | float | str

# Settings that decide which decisions are taken, beyond those of the policy. The engine decides where it gives durations.
WORKLOAD = (
    "arrivals", "max_concurrency", "request_rate", "burstiness", "time_scale", "num_prompts", "num_warmups", "warm_cache",
    "over_length", "skip_bad", "outputs",
)  # fmt: skip
NEUTRAL: dict[str, Any] = {
    "max_concurrency": None, "request_rate": None, "burstiness": 1.0, "time_scale": None, "num_prompts": None, "num_warmups": 0,
    "warm_cache": False, "over_length": "reject", "skip_bad": False, "outputs": "forced", "arrivals": "trace",
}  # fmt: skip
POLICY = (
    "max_num_seqs", "max_num_batched_tokens", "max_model_len", "enable_prefix_caching", "enable_chunked_prefill",
    "long_prefill_token_threshold", "scheduling_policy", "scheduler_reserve_full_isl", "watermark", "max_loras",
)  # fmt: skip

TIMED: dict[str, tuple[str, str]] = {
    # metric -> (unit, better)
    "ttft_mean": ("ms", "lower"), "ttft_p99": ("ms", "lower"), "itl_mean": ("ms", "lower"), "itl_p99": ("ms", "lower"),
    "e2el_mean": ("ms", "lower"), "output_throughput": ("tokens/s", "higher"), "schedule_us_per_round": ("µs", "lower"),
}  # fmt: skip


def measures_time(run: Run) -> bool:
    """Whether decisions depend on measured time, so that counters differ from run to run."""
    return not (run.clock in ("rounds", "recorded") or (run.clock == "virtual" and run.engine in ("null", "simulated")))


def counters(run: Run) -> dict[str, Counter]:
    """Name -> value, in the order in which a baseline lists them. Every value is a sum or extreme over the run's tables."""
    totals = metrics.round_totals(run)
    statuses = dict(run.scan("requests").group_by("status").len("n").collect().iter_rows())
    lost, again = (
        run.scan("requests")
        .select(pl.col("discarded_tokens").sum(), pl.col("recomputed_tokens").sum())
        .collect()
        .row(0)
    )
    out: dict[str, Counter] = {
        "finished": int(statuses.get("finished", 0)),
        "rejected": int(statuses.get("rejected", 0)),
    }
    out["rounds"] = int(totals["rounds"] or 0)
    for kind in ("prefill", "decode", "mixed", "empty"):
        out[f"rounds.{kind}"] = int(totals[kind] or 0)
    prefill, decode = int(totals["prefill_tokens"] or 0), int(totals["decode_tokens"] or 0)
    out |= {"scheduled_tokens": prefill + decode, "prefill_tokens": prefill, "decode_tokens": decode}
    out |= {"cached_tokens": int(totals["cached_tokens"] or 0), "queried_tokens": int(totals["queried_tokens"] or 0)}
    out |= {"recomputed_tokens": int(again or 0), "discarded_tokens": int(lost or 0)}
    out |= {"preemptions": int(totals["preempted"] or 0), "evictions": int(totals["evicted"] or 0)}
    peak = metrics.peak_used_blocks(run)
    if peak is not None:
        out |= {"peak_blocks": peak, "mean_blocks": mean_blocks(run)}
    for loop in ("waiting", "running"):
        out |= {f"stop_{loop}.{reason}": count for reason, count in sorted(metrics.stop_histogram(run, loop).items())}
    digest = run.manifest.get("digest")
    if digest is None and not measures_time(run):
        raise BenchctlError(
            f"the run kept --records {run.manifest.get('records')}: its decisions have no digest to hold against the baseline",
            where=str(run.path),
            fix="record it with --records compact or full",
        )
    out["decision_digest"] = str(digest)
    return out


def mean_blocks(run: Run) -> float:
    """Used blocks after `schedule()`, mean over the rounds, to four decimals."""
    total, count = run.scan("rounds").select(pl.col("free_blocks_scheduled").sum(), pl.len()).collect().row(0)
    return round((run.usable_blocks or 0) - total / count, 4) if count else 0.0


def settings(run: Run) -> dict[str, Any]:
    """The settings on which the decisions depend, as the manifest has them; those of the workload only where they were used."""
    config = {
        name: entry["value"] if isinstance(entry, dict) and "value" in entry else entry
        for name, entry in (run.manifest.get("config") or {}).items()
    }
    limits = run.manifest.get("limits") or {}
    out: dict[str, Any] = {"clock": run.clock, "block_size": run.block_size, "num_blocks": limits.get("num_blocks")}
    out |= {name: config[name] for name in POLICY if config.get(name) is not None}
    out |= {name: config[name] for name in WORKLOAD if name in config and config[name] != NEUTRAL[name]}
    if run.clock == "rounds":
        out["round_seconds"] = config.get("round_seconds")
    if run.clock == "virtual":
        out |= {"engine": run.engine} | {
            name: config[name] for name in ("round_cost", "profile") if config.get(name) is not None
        }
    if config.get("request_rate") is not None or config.get("num_warmups"):
        out["seed"] = config.get("seed")
    if run.clock == "recorded":
        out["admissions"] = admissions_digest(run)
    return out


def admissions_digest(run: Run) -> str:
    """Which request was admitted before which round: what a `recorded` clock repeats."""
    rows = run.scan("admissions").select("request", "admitted_round").collect().to_numpy()
    return f"xxh3:{xxhash.xxh3_128_hexdigest(rows.astype('<i8').tobytes())}"


def config_digest(values: dict[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return f"xxh3:{xxhash.xxh3_128_hexdigest(text.encode())}"


def machine(run: Run) -> dict[str, Any]:
    """What timings depend on and that one can name: processor, cores, card. Not the host's name: images come and go."""
    hardware = run.manifest.get("hardware") or {}
    gpu = hardware.get("gpu") or {}
    return {
        "cpu": hardware.get("cpu"),
        "cores": hardware.get("cores"),
        "gpu": gpu.get("name"),
        "gpus": gpu.get("count"),
        "engine": run.engine,
        "model": run.manifest.get("model"),
        "dtype": run.manifest.get("dtype"),
    }


def timings(run: Run) -> dict[str, float]:
    """Metric of TIMED -> value of this run; those that it cannot give are absent."""
    summary = summarize(run, percentiles=(50, 99))
    ours = summary["benchctl"]
    rounds, seconds = ours["rounds"]["rounds"]["total"], ours["host"]["schedule_s"]
    found = {f"{name}_mean": ours["latency"][name]["mean_ms"] for name in ("ttft", "itl", "e2el")}
    found |= {f"{name}_p99": ours["latency"][name]["p99_ms"] for name in ("ttft", "itl")}
    found["output_throughput"] = summary["output_throughput"]
    found["schedule_us_per_round"] = None if seconds is None or not rounds else seconds / rounds * 1e6
    return {name: float(found[name]) for name in TIMED if found[name] is not None}
