"""The metrics: what each is, as Polars expressions and small functions over a run. Seconds and tokens everywhere.

Symbols, of one request: a = intended arrival, d = handed to the scheduler, f = first scheduled (end of that round's
schedule()), t_1 … t_n = times of its n output tokens. Of a run: T = end of its last round, counted from its beginning.
`formulas.py` and docs/metrics.md give the same formulas. Distributions are over finished requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from reports.blocks import free_counts
from reports.run import Run

STEADY_SHARE = 0.8  # of the peak concurrency: where the steady window begins and ends


# -- latency of one request, columns of `requests`


def ttft() -> pl.Expr:
    """Time to first token: t_1 - a."""
    return pl.col("first_token_s") - pl.col("arrival_s")


def e2el() -> pl.Expr:
    """End-to-end latency: t_n - a."""
    return pl.col("finished_s") - pl.col("arrival_s")


def tpot() -> pl.Expr:
    """Time per output token: (t_n - t_1) / (n - 1); null where n = 1. One value a request; not ITL, which is one a gap."""
    gaps = pl.col("emitted_tokens") - 1
    return pl.when(gaps > 0).then((pl.col("finished_s") - pl.col("first_token_s")) / gaps)


def queue() -> pl.Expr:
    """f - a. queue + prefill + decode = e2el."""
    return pl.col("first_scheduled_s") - pl.col("arrival_s")


def prefill() -> pl.Expr:
    """t_1 - f. Where rounds overlap f lies before the end of the round before, so that end is part of it, as in vLLM's metrics."""
    return pl.col("first_token_s") - pl.col("first_scheduled_s")


def decode() -> pl.Expr:
    """t_n - t_1."""
    return pl.col("finished_s") - pl.col("first_token_s")


def preempted() -> pl.Expr:
    """Time without blocks after preemptions; lies inside prefill and decode."""
    return pl.col("preempted_s")


def stalled() -> pl.Expr:
    """Own time (`own_time`) of the rounds in which it was running and was not computed; lies inside decode (and a chunked prefill)."""
    return pl.col("stalled_s")


def ttft_admitted() -> pl.Expr:
    """t_1 - d: what a client that starts its clock when it sends would see."""
    return pl.col("first_token_s") - pl.col("admitted_s")


def e2el_admitted() -> pl.Expr:
    """t_n - d."""
    return pl.col("finished_s") - pl.col("admitted_s")


def queue_admitted() -> pl.Expr:
    """f - d: the scheduler's own queueing."""
    return pl.col("first_scheduled_s") - pl.col("admitted_s")


def dispatch() -> pl.Expr:
    """d - a: how late the loop handed it over; large values mean rounds longer than the gaps between arrivals."""
    return pl.col("admitted_s") - pl.col("arrival_s")


PER_REQUEST = {
    expression.__name__: expression
    for expression in (
        ttft, tpot, e2el, queue, prefill, decode, preempted, stalled, ttft_admitted, e2el_admitted, queue_admitted, dispatch,
    )
}  # fmt: skip


def per_request(run: Run) -> pl.LazyFrame:
    """`requests` of the finished, with a column in seconds for each entry of PER_REQUEST."""
    frame = run.scan("requests").filter(pl.col("status") == "finished")
    return frame.with_columns(expression().alias(name) for name, expression in PER_REQUEST.items())


def itl(run: Run) -> pl.LazyFrame:
    """Inter-token latency: t_{i+1} - t_i, every gap of every finished request, pooled.

    Columns request, index (of the later token), round, t_s, itl.
    """
    finished = run.scan("requests").filter(pl.col("status") == "finished").select("request")
    gap = (pl.col("t_s") - pl.col("t_s").shift(1)).over("request", order_by="index")
    tokens = run.scan("tokens").select("request", "index", "round", "t_s").join(finished, on="request", how="semi")
    return tokens.with_columns(gap.alias("itl")).filter(pl.col("itl").is_not_null())


# -- distributions


def carries(n: int, percent: float) -> bool:
    """Whether n samples carry the percentile: at least one sample has to lie beyond it, n · (1 - percent / 100) >= 1.

    So p50 needs 2 samples, p90 10, p95 20, p99 100, p99.9 1,000.
    """
    return n * (100 - percent) >= 100 - 1e-9


@dataclass(frozen=True, slots=True)
class Distribution:
    """n samples in one unit. `percentiles`: percent -> value, None where n does not carry it."""

    n: int
    mean: float | None
    median: float | None
    std: float | None  # of the samples as a population, as in vLLM's benchmark
    least: float | None
    most: float | None
    percentiles: dict[float, float | None]


def distribution(values: pl.Series, percents: tuple[float, ...] = (50, 90, 95, 99)) -> Distribution:
    """Percentiles interpolate linearly between the two nearest samples. Nulls are no samples."""
    samples = values.drop_nulls().to_numpy()
    n = len(samples)
    if not n:
        return Distribution(0, None, None, None, None, None, dict.fromkeys(percents))
    at = np.percentile(samples, percents)
    return Distribution(
        n=n,
        mean=float(samples.mean()),
        median=float(np.median(samples)),
        std=float(samples.std()),
        least=float(samples.min()),
        most=float(samples.max()),
        percentiles={p: float(v) if carries(n, p) else None for p, v in zip(percents, at, strict=True)},
    )


# -- concurrency and throughput


def concurrency(run: Run) -> pl.DataFrame:
    """t_s, concurrency: requests in the system from each moment on, exactly.

    A request is in the system from its arrival a to t_n (or to the end of the run); refused ones never are. Who leaves at
    the moment at which another arrives does not overlap it.
    """
    ended = run.scan("requests").select("request", "status", "finished_s")
    seen = (
        run.scan("admissions").select("request", "arrival_s")
        .join(ended, on="request", how="left")
        .filter(pl.col("status").ne_missing("rejected"))
        .with_columns(pl.col("finished_s").fill_null(run.duration_s))
        .with_columns(pl.max_horizontal("arrival_s", "finished_s").alias("finished_s"))
    )  # fmt: skip
    changes = pl.concat(
        [
            seen.select(pl.col("arrival_s").alias("t_s"), pl.lit(1).alias("change")),
            seen.select(pl.col("finished_s").alias("t_s"), pl.lit(-1).alias("change")),
        ]
    )
    return (
        changes.group_by("t_s")
        .agg(pl.col("change").sum())
        .sort("t_s")
        .select("t_s", pl.col("change").cum_sum().alias("concurrency"))
        .collect()
    )


def peak_concurrency(run: Run) -> int:
    """max over time of the requests in the system."""
    return int(concurrency(run)["concurrency"].max() or 0)  # type: ignore[arg-type]


def steady_window(run: Run) -> tuple[float, float] | None:
    """From the first moment with concurrency >= 0.8 of its peak to the last; None where nothing ran."""
    steps = concurrency(run)
    high = steps.with_columns(pl.col("t_s").shift(-1).fill_null(run.duration_s).alias("until_s")).filter(
        (pl.col("concurrency") >= STEADY_SHARE * pl.col("concurrency").max()) & (pl.col("concurrency") > 0)
    )
    if not high.height:
        return None
    begin, end = high["t_s"][0], high["until_s"][-1]
    return (begin, end) if end > begin else None


@dataclass(frozen=True, slots=True)
class Throughput:
    """Rates in a window of time. Tokens of input count when their request finishes; None: not recorded, or no time passed."""

    begin_s: float
    end_s: float
    requests_per_s: float | None
    output_tokens_per_s: float | None
    total_tokens_per_s: float | None


def throughput(run: Run) -> Throughput:
    """Whole run, as in vLLM's benchmark: finished requests and their tokens / T."""
    end = run.duration_s
    done = run.scan("requests").filter(pl.col("status") == "finished")
    count, given, out = (
        done.select(pl.len(), pl.col("prompt_tokens").sum(), pl.col("emitted_tokens").sum()).collect().row(0)
    )
    if not end:
        return Throughput(0.0, end, None, None, None)
    return Throughput(0.0, end, count / end, out / end, (given + out) / end)


def steady_throughput(run: Run) -> Throughput | None:
    """In the steady window [b, e]: requests finished in (b, e], tokens emitted in (b, e], over e - b."""
    window = steady_window(run)
    if window is None:
        return None
    begin, end = window
    inside = pl.col("finished_s").is_between(begin, end, closed="right")
    count, given = (
        run.scan("requests")
        .filter((pl.col("status") == "finished") & inside)
        .select(pl.len(), pl.col("prompt_tokens").sum())
        .collect()
        .row(0)
    )
    out = None
    if run.has("tokens"):
        out = (
            run.scan("tokens")
            .filter(pl.col("t_s").is_between(begin, end, closed="right"))
            .select(pl.len())
            .collect()
            .item()
        )
    span = end - begin
    return Throughput(
        begin, end, count / span, None if out is None else out / span, None if out is None else (given + out) / span
    )


# -- SLOs


def attainment(run: Run, slo_ms: dict[str, float]) -> tuple[int, int] | None:
    """(good, all): requests that meet every SLO, of all requests, the refused and unfinished among them.

    `slo_ms`: ttft, tpot, e2el against each request; itl against the request's largest gap. A value that does not exist
    (tpot of one token) cannot be missed. None without SLOs.
    """
    if not slo_ms:
        return None
    frame = per_request(run)
    if "itl" in slo_ms:
        frame = frame.join(itl(run).group_by("request").agg(pl.col("itl").max()), on="request", how="left")
    names = {"e2e": "e2el"}
    meets = [(pl.col(names.get(name, name)) * 1000 <= limit).fill_null(True) for name, limit in slo_ms.items()]
    good = frame.filter(pl.all_horizontal(meets)).select(pl.len()).collect().item()
    return int(good), num_requests(run)


def num_requests(run: Run) -> int:
    """Every request that was seen: handed to the scheduler, refused, or left over."""
    seen = pl.concat([run.scan(table).select("request") for table in ("admissions", "requests")])
    return int(seen.select(pl.col("request").n_unique()).collect().item())


# -- scheduler


def round_totals(run: Run) -> dict[str, int | float | None]:
    """Sums over `rounds`: rounds by kind, tokens, preemptions, evictions, cache, host seconds (None where never measured)."""
    kinds = {kind: (pl.col("kind") == kind).sum().cast(pl.Int64) for kind in ("prefill", "decode", "mixed", "empty")}
    sums = (
        "prefill_tokens",
        "decode_tokens",
        "cached_tokens",
        "queried_tokens",
        "preempted",
        "evicted",
        "admitted",
        "padded_tokens",
    )
    host = ("schedule_s", "prepare_s", "device_s", "update_s", "record_s")
    frame = run.scan("rounds").select(
        pl.len().alias("rounds"),
        *(expression.alias(kind) for kind, expression in kinds.items()),
        *(pl.col(name).sum() for name in sums),
        *(pl.when(pl.col(name).is_not_null().any()).then(pl.col(name).sum()).alias(name) for name in host),
        pl.col("num_seqs").max().alias("max_num_seqs"),
    )
    return frame.collect().row(0, named=True)


def budget_use(run: Run) -> float | None:
    """Σ scheduled tokens / Σ budget, over the rounds that the budget governs: all that scheduled something, for nano its prefill rounds."""
    governed = pl.col("kind") == "prefill" if run.family == "nano" else pl.col("kind") != "empty"
    tokens = pl.col("prefill_tokens") + pl.col("decode_tokens")
    used, offered = (
        run.scan("rounds")
        .filter(governed)
        .select(tokens.sum(), (tokens + pl.col("budget_left")).sum().alias("offered"))
        .collect()
        .row(0)
    )
    return used / offered if offered else None


def tokens_per_round(run: Run) -> pl.Series:
    """Tokens fed by each round that scheduled something."""
    frame = (
        run.scan("rounds")
        .filter(pl.col("kind") != "empty")
        .select((pl.col("prefill_tokens") + pl.col("decode_tokens")).alias("tokens"))
    )
    return frame.collect()["tokens"]


def peak_used_blocks(run: Run) -> int | None:
    """max over all moments of usable - free blocks; where block events are recorded, moments inside a schedule() too."""
    if run.usable_blocks is None:
        return None
    columns = ("free_blocks_start", "free_blocks_scheduled", "free_blocks_end")
    least = run.scan("rounds").select(pl.min_horizontal(*(pl.col(column).min() for column in columns))).collect().item()
    if least is None:
        return None
    if run.has("blocks"):
        inside = free_counts(run).select(pl.col("least_free").min()).collect().item()
        least = min(least, inside) if inside is not None else least
    return int(run.usable_blocks - least)


def stop_histogram(run: Run, loop: str) -> dict[str, int]:
    """Reason -> rounds in which the loop ("waiting" or "running") stopped for it, most frequent first; loops that did not run are left out."""
    column = f"stop_{loop}"
    counts = (
        run.scan("rounds")
        .filter(pl.col(column).is_not_null())
        .group_by(column)
        .len("n")
        .sort(["n", column], descending=[True, False])
        .collect()
    )
    return dict(counts.iter_rows())


def record_share(run: Run) -> float | None:
    """Σ record_s / (last t_end_s - first t_start_s); None except on the wall clock, the only one that recording moves."""
    if run.clock != "wall":
        return None
    spent, begin, end = (
        run.scan("rounds")
        .select(pl.col("record_s").sum(), pl.col("t_start_s").min(), pl.col("t_end_s").max().alias("end"))
        .collect()
        .row(0)
    )
    return spent / (end - begin) if end is not None and end > begin else None
