"""What a reader of a run's figures has to know first: each a finding with its evidence and what to do about it.

Looks only at recorded files, of one run; what differs between runs shown together is checks_across's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
import polars as pl

from reports import metrics
from reports.blocks import ghost_hits
from reports.load import early_turns, retimed
from reports.numbers import plural
from reports.own_time import own_scheduled
from reports.run import Run
from reports.simulated_error import error_text

Level = Literal["error", "warn", "info"]
RECORD_SHARE_LIMIT = 0.03
SATURATED_SHARE = 0.9  # of the rounds that end between the first and the last arrival
COLD_FACTOR = 4  # times the median of the rounds of the same shape


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `evidence` holds the numbers, `cure` what to do."""

    level: Level
    what: str
    evidence: str
    cure: str

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def checks(run: Run) -> list[Check]:
    """Every finding about one run, the gravest first."""
    found = [check for look in LOOKS for check in look(run)]
    return sorted(found, key=lambda check: ("error", "warn", "info").index(check.level))


def _status(run: Run) -> list[Check]:
    rounds = run.scan("rounds").select(pl.len()).collect().item()
    until = f"tick {run.duration_s:,.0f}" if run.clock == "rounds" else f"{run.duration_s:.3f} s"
    where = f"{plural(rounds, 'round')} up to {until}"
    if run.status == "running":
        return [
            Check(
                "warn",
                "the run is still going on, or was killed",
                f"status running; recorded: {where}",
                "figures cover the finished parts only",
            )
        ]
    if run.status == "interrupted":
        return [
            Check(
                "warn",
                "the run was interrupted",
                where,
                "figures cover what ran; who was still there counts as unfinished",
            )
        ]
    if run.status == "failed":
        why = str(run.manifest.get("error") or "the manifest does not say why")
        return [Check("error", "the run failed", f"{why}; {where}", "do not compare its figures")]
    return []


def _damage(run: Run) -> list[Check]:
    """What `salvage` found wrong with the folder."""
    damage = run.manifest.get("damage")
    return [
        Check("error", "the run folder is damaged or not understood whole", str(text), "figures cover what could be read; replay again for the whole")
        for text in (damage if isinstance(damage, list) else [])
    ]  # fmt: skip


def _rejected(run: Run) -> list[Check]:
    rows = (
        run.scan("requests")
        .filter(pl.col("status") == "rejected")
        .group_by("reason")
        .len("n")
        .sort("n", descending=True)
        .collect()
    )
    if not rows.height:
        return []
    first = run.scan("decisions").filter(pl.col("kind") == "reject").head(1).collect()
    example = ""
    if first.height and first["needed"][0] is not None:
        row = first.row(0, named=True)
        example = f"; first: {run.labels.get(row['request'], row['request'])} needs {row['needed']:,} {row['unit']}, {row['available']:,} at most"
    reasons = ", ".join(f"{n:,} × {reason}" for reason, n in rows.iter_rows())
    return [
        Check(
            "warn",
            "requests were refused",
            f"{reasons} of {metrics.num_requests(run):,} requests{example}",
            "raise the limit named, or pass --over-length skip; latency is that of the others, attainment counts them as missed",
        )
    ]


def _length_capped(run: Run) -> list[Check]:
    count = run.scan("requests").filter(pl.col("reason") == "length_capped").select(pl.len()).collect().item()
    if not count:
        return []
    return [
        Check(
            "info",
            "outputs were cut at max_model_len",
            f"{count:,} requests finished as length_capped",
            "raise --max-model-len to replay them whole",
        )
    ]


def _ghosts(run: Run) -> list[Check]:
    hits = ghost_hits(run)
    if not hits.height:
        return []
    first = hits.row(0, named=True)
    label = run.labels
    return [
        Check(
            "warn",
            "KV that was never computed was hit",
            f"{hits.height:,} prefix hit{'' if hits.height == 1 else 's'} on ghost blocks, first in round {first['round']}: {label.get(first['request'])} hits block {first['block']}, "
            f"cached for {label.get(first['cached_by'])} in round {first['cached_round']}, which was preempted before computing it",
            "vLLM 0.33.0 decides the same with priorities; the tokens after such a hit are wrong, so compare decisions and times only",
        )
    ]


def _growing(run: Run) -> list[Check]:
    arrivals = (
        run.scan("admissions")
        .select(pl.col("arrival_s").min(), pl.col("arrival_s").max().alias("last"), pl.len())
        .collect()
        .row(0)
    )
    first, last, count = arrivals
    if count < 20 or last is None or last <= first:
        return []
    begin = last - (last - first) / 3
    waiting = (
        run.scan("rounds").filter(pl.col("t_end_s").is_between(begin, last)).select("t_end_s", "waiting").collect()
    )
    if waiting.height < 9:
        return []
    thirds = np.array_split(waiting["waiting"].to_numpy(), 3)
    means = [float(third.mean()) for third in thirds]
    if not (means[0] < means[1] < means[2] and means[2] >= 1.5 * means[0] + 2):
        return []
    return [
        Check(
            "warn",
            "the queue was still growing when the last request arrived",
            f"waiting {means[0]:.0f} → {means[1]:.0f} → {means[2]:.0f} (means over the last third of the arrivals)",
            "percentiles depend on the length of the run here: lower the rate, or report throughput at saturation only",
        )
    ]


def _saturated(run: Run) -> list[Check]:
    """Somebody waited in nearly every round between the first and the last arrival: latency is that of the queue."""
    first, last = (
        run.scan("admissions")
        .select(pl.col("arrival_s").min(), pl.col("arrival_s").max().alias("last"))
        .collect()
        .row(0)
    )
    if first is None or last <= first:
        return []
    rounds = run.scan("rounds").filter(pl.col("t_end_s").is_between(first, last))
    total, crowded = rounds.select(pl.len(), (pl.col("waiting") > 0).sum().alias("crowded")).collect().row(0)
    if total < 50 or crowded < SATURATED_SHARE * total:
        return []
    stops = rounds.filter((pl.col("waiting") > 0) & pl.col("stop_waiting").is_not_null()).group_by("stop_waiting").len("n").sort("n", "stop_waiting", descending=[True, False]).collect()  # fmt: skip
    why = (
        f"; admission stopped most often for {stops['stop_waiting'][0]} ({stops['n'][0]:,} rounds)"
        if stops.height
        else ""
    )
    return [
        Check(
            "warn",
            "the system was saturated",
            f"somebody waited after {crowded / total:.0%} of the {total:,} rounds between the first and the last arrival{why}",
            "throughput is the system's, latency the queue's: lower the rate to compare latency, or read throughput only",
        )
    ]


def _cold(run: Run) -> list[Check]:
    """Rounds that were the first of their shape and took far longer than the others of it."""
    if run.engine != "torch":
        return []
    spent = pl.col("t_executed_s") - own_scheduled()
    shapes = (
        run.scan("rounds").sort("round").with_columns(spent.alias("spent")).filter(pl.col("kind") != "empty")
        .group_by("kind", "mode", "padded_tokens")
        .agg(pl.len().alias("n"), pl.col("spent").sort_by("round").first().alias("first"), pl.col("spent").median().alias("usual"))
        .filter((pl.col("n") >= 5) & (pl.col("first") >= COLD_FACTOR * pl.col("usual")) & (pl.col("first") - pl.col("usual") > 0.001))
        .with_columns((pl.col("first") - pl.col("usual")).alias("lost")).sort("lost", descending=True).collect()
    )  # fmt: skip
    if not shapes.height:
        return []
    worst = shapes.row(0, named=True)
    return [
        Check(
            "warn",
            "rounds ran cold",
            f"{shapes.height:,} shape{'' if shapes.height == 1 else 's'} took {COLD_FACTOR} times their median or more at their first use, {shapes['lost'].sum() * 1000:,.1f} ms lost in all; "
            f"worst: {worst['kind']} of {worst['padded_tokens']:,} tokens, {worst['first'] * 1000:,.1f} ms against {worst['usual'] * 1000:,.1f}",
            "pass --num-warmups, so that kernels, graphs and clocks are warm before the first arrival",
        )
    ]


def _ticks(run: Run) -> list[Check]:
    if run.clock == "rounds":
        return []  # there, ticks are the clock
    times = run.scan("admissions").select("arrival_s").drop_nulls().collect()["arrival_s"]
    distinct = times.unique().sort()
    if times.len() < 20 or distinct.len() < 3 or times.len() < 2 * distinct.len():
        return []
    gaps = np.rint(np.diff(distinct.to_numpy()) * 1000).astype(np.int64)
    tick = math.gcd(*gaps.tolist()) / 1000
    if tick < 0.5:
        return []
    return [
        Check(
            "warn",
            "arrivals lie on a coarse grid",
            f"{times.len():,} requests arrive at {distinct.len():,} moments, all multiples of {tick:g} s",
            "the trace's clock ticks; each tick replays as a burst: use `benchctl trace shuffle-arrivals` or --request-rate",
        )
    ]


def _early_turns(run: Run) -> list[Check]:
    """Turns that began before the turn before them had ended: no user or agent can have written them."""
    if run.clock == "rounds" or run.manifest.get("arrivals") == "session":
        return []
    early = early_turns(run)
    if early is None or not early.num_early:
        return []
    label = run.labels.get(early.first, f"#{early.first}")
    ended = "never ended" if early.parent_ended_s is None else f"ended at {early.parent_ended_s:,.3f} s"
    evidence = (
        f"{early.num_early:,} of {early.later_turns:,} later turns ({early.num_early / early.later_turns:.1%}), "
        f"first {label} at {early.admitted_s:,.3f} s, where the turn before it {ended}"
    )
    again = "replay with --arrivals session, which sends a turn only after the one before it"
    if retimed(run):
        return [
            Check(
                "warn",
                "turns of one conversation ran at once, since arrivals were re-timed",
                evidence,
                f"prefix hits and queues are not those of users who wait for an answer: {again}",
            )
        ]
    return [
        Check(
            "info",
            "turns arrived before the turn before them had ended",
            evidence,
            f"the trace overlaps them, or this run is slower than the system that was traced; to keep their order, {again}",
        )
    ]


def _cap(run: Run) -> list[Check]:
    cap = run.setting("max_concurrency")
    if not cap:
        return []
    peak = _peak_admitted(run)
    if peak < cap:
        return [
            Check(
                "info",
                "the load loop is closed",
                f"--max-concurrency {cap}, peak {peak}",
                "the cap was never reached: the load was open in effect",
            )
        ]
    return [
        Check(
            "warn",
            "the concurrency cap was reached",
            f"--max-concurrency {cap}, peak {peak}",
            "the load followed the system: compare throughput, not latency, or leave the cap out",
        )
    ]


def _peak_admitted(run: Run) -> int:
    ended = run.scan("requests").select("request", "finished_s")
    seen = (
        run.scan("admissions")
        .select("request", "admitted_s")
        .join(ended, on="request", how="left")
        .with_columns(pl.col("finished_s").fill_null(math.inf))
    )
    changes = pl.concat(
        [
            seen.select(pl.col("admitted_s").alias("t"), pl.lit(1).alias("c")),
            seen.select(pl.col("finished_s").alias("t"), pl.lit(-1).alias("c")),
        ]
    )
    return int(
        changes.group_by("t").agg(pl.col("c").sum()).sort("t").select(pl.col("c").cum_sum().max()).collect().item() or 0
    )


def _few_samples(run: Run) -> list[Check]:
    finished = run.scan("requests").filter(pl.col("status") == "finished").select(pl.len()).collect().item()
    missing = [percent for percent in (50, 90, 95, 99) if not metrics.carries(finished, percent)]
    if not missing or not run.has("requests"):
        return []
    needed = math.ceil(100 / (100 - missing[0]))
    names = ", ".join(f"p{percent}" for percent in missing)
    return [
        Check(
            "info",
            f"too few samples for {names} of request metrics",
            f"{finished:,} finished requests; p{missing[0]} needs {needed:,}",
            "replay more requests; those percentiles are left empty",
        )
    ]


def _recorder(run: Run) -> list[Check]:
    share = metrics.record_share(run)
    if share is None or share <= RECORD_SHARE_LIMIT:
        return []
    return [
        Check(
            "warn",
            "recording took a noticeable share of the run",
            f"{share:.1%} of the wall time, limit {RECORD_SHARE_LIMIT:.0%}",
            "pass --records compact or summary, or put the run folder on a faster disk",
        )
    ]


def _constants(run: Run) -> list[Check]:
    if run.engine == "simulated":
        return _simulated(run)
    if run.engine != "null":
        return []
    if run.clock == "rounds":
        return [
            Check(
                "info",
                "times are ticks, not measurements",
                "clock rounds: one tick a round, counted as one second",
                "decisions and counts are exact; read latencies as numbers of rounds",
            )
        ]
    cost = run.setting("round_cost")
    if isinstance(cost, list):
        cost = ",".join(f"{part:g}" for part in cost)
    how = f"--round-cost {cost}: A + B · tokens + C · Σ context" if cost is not None else "durations from --round-cost"
    return [
        Check(
            "info",
            "durations are constants, not measured",
            f"engine null, {how}",
            "decisions are exact; use --engine torch for times of a device",
        )
    ]


def _simulated(run: Run) -> list[Check]:
    """How far the durations of a simulated run may be trusted: the profile's error, and what was extrapolated."""
    about = run.manifest.get("simulation")
    if not isinstance(about, dict) or run.clock == "rounds":
        return []
    error = about.get("error") or {
        "fitted_p50": {entry["kind"]: entry["p50"] for entry in about.get("residuals") or []}
    }
    found = [
        Check(
            "info",
            "durations are modelled, not measured",
            f"profile {about.get('profile')} of {about.get('device')}: {error_text(error)}",
            "decisions are exact; benchctl validate PROFILE RUN gives the error on a run of your own",
        )
    ]
    rounds, outside = about.get("rounds") or 0, about.get("outside") or 0
    if rounds and outside:
        found.append(
            Check(
                "warn",
                "rounds lie outside what the profile was fitted on",
                f"{outside:,} of {rounds:,} rounds ({outside / rounds:.1%}): {'; '.join(about.get('beyond') or [])}",
                "their durations are extrapolated, without a known error; calibrate from a run that has such rounds",
            )
        )
    return found


LOOKS: tuple[Callable[[Run], list[Check]], ...] = (
    _damage, _status, _rejected, _ghosts, _growing, _saturated, _cold, _ticks, _early_turns, _cap, _recorder, _length_capped, _constants, _few_samples,
)  # fmt: skip
