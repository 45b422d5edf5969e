"""The prefix cache of a run in numbers: what was looked up, hit, lost, and what it gave back after preemptions."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from reports.run import Run
from reports.summary import Summary


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Tokens and blocks; None where block events or batches were not recorded.

    `hits_on_used`: hit blocks that stood in another table then; `hits_on_freed`: those that had left their last one.
    `recovered_tokens`: hits of resumed requests, so computed tokens that a preemption threw away and the cache gave back.
    """

    queried_tokens: int
    hit_tokens: int
    hit_rate: float | None
    bound_rate: float | None
    hits_on_used: int | None
    hits_on_freed: int | None
    evictions: int
    discarded_tokens: int
    recomputed_tokens: int
    recovered_tokens: int | None


def cache_use(run: Run, summary: Summary) -> CacheUse:
    ours = summary["benchctl"]
    cache, counters = ours["prefix_cache"], ours["counters"]
    used = freed = recovered = None
    if run.has("blocks"):
        # A hit block's last change before was its `free`, or else somebody still holds it.
        last = pl.col("event").shift(1).over("block", order_by=["round", "order"])
        hits = (
            run.scan("blocks").filter(pl.col("event").is_in(["allocate", "share", "release", "free"]))
            .with_columns((last == "free").alias("freed")).filter(pl.col("event") == "share")
            .select(pl.len(), pl.col("freed").sum()).collect().row(0)
        )  # fmt: skip
        used, freed = int(hits[0] - (hits[1] or 0)), int(hits[1] or 0)
    if run.has("batches"):
        resumed = run.scan("decisions").filter(pl.col("kind") == "resume").select("round", "request")
        recovered = int(
            run.scan("batches").filter(pl.col("cached_tokens") > 0).join(resumed, on=["round", "request"], how="semi")
            .select(pl.col("cached_tokens").sum()).collect().item() or 0
        )  # fmt: skip
    bound = cache["upper_bound"]
    return CacheUse(
        queried_tokens=cache["queried_tokens"],
        hit_tokens=cache["hit_tokens"],
        hit_rate=cache["hit_rate"],
        bound_rate=bound["hit_rate"] if bound else None,
        hits_on_used=used,
        hits_on_freed=freed,
        evictions=counters["evictions"],
        discarded_tokens=counters["discarded_tokens"],
        recomputed_tokens=counters["recomputed_tokens"],
        recovered_tokens=recovered,
    )
