"""A sweep's table as an answer: repeats put together, workloads apart from choices, the best setting with its margin.

Reads the table only (`benchctl sweep` writes it). A *setting* is a row for all its repeats (they differ in `seed`); a
*workload* is what one cannot choose (trace, rate …), so each has its own best setting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import polars as pl

WORKLOAD = (
    "trace", "request-rate", "burstiness", "time-scale", "speedup", "num-prompts", "arrivals", "max-concurrency", "from",
    "num-warmups", "warm-cache", "clock", "round-cost", "round-seconds", "profile", "model", "engine",
)  # fmt: skip
REPEATS = "seed"
TIE = 0.01  # objectives closer than this, relatively, are as good as each other
OBJECTIVES = {
    "rate": ("rate", "sustained rate", "requests/s"),
    "slo": ("request_goodput", "goodput", "requests/s"),
    "front": ("output_throughput", "output throughput", "tokens/s"),
}
Span = tuple[float, float, float]  # mean, least, greatest of the repeats


@dataclass(frozen=True, slots=True)
class Setting:
    """Repeats of one cell. `values`: axis -> text, None where not given. `figures`: over complete repeats.

    `by_repeat`: the objectives of each repeat; those of two settings with one seed had the same arrivals.
    """

    place: int
    values: Mapping[str, str | None]
    status: str
    reason: str | None
    repeats: int
    figures: Mapping[str, Span]
    by_repeat: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # figure -> seed -> value

    def mean(self, name: str) -> float | None:
        return self.figures[name][0] if name in self.figures else None

    def spread(self, name: str) -> float:
        """Half the distance between the least and the greatest repeat, as a share of the mean."""
        mean, least, greatest = self.figures[name]
        return (greatest - least) / 2 / mean if mean else 0.0


@dataclass(frozen=True, slots=True)
class Margin:
    """One SLO at the setting: where its percentile stands. `left`: share of the limit to spare, negative beyond it."""

    metric: str
    percentile: str
    value: float
    limit: float
    spread: float

    @property
    def left(self) -> float:
        return 1 - self.value / self.limit


@dataclass(frozen=True, slots=True)
class Pick:
    """The best setting of a workload. `tied`: as good within the error, the best among them; `meets`: the SLOs are met."""

    setting: Setting
    tied: tuple[Setting, ...]
    next: Setting | None
    meets: bool
    margins: tuple[Margin, ...]

    @property
    def tightest(self) -> Margin | None:
        return min(self.margins, key=lambda margin: margin.left, default=None)


@dataclass(frozen=True, slots=True)
class SweepView:
    """A sweep, ready to be told. `choices`, `workloads`: the axes that vary; `fixed`: those that do not."""

    mode: str  # a key of OBJECTIVES
    slo: Mapping[str, float]
    attainment: float
    choices: tuple[str, ...]
    workloads: tuple[str, ...]
    fixed: Mapping[str, str]
    settings: tuple[Setting, ...]
    cells: int
    failed: tuple[Mapping[str, Any], ...]
    error: float | None  # the profile's
    error_worst: float | None  # of p99 in the worst run that it was held against
    outside: float
    figures: tuple[str, ...]
    picks: Mapping[tuple[str | None, ...], Pick] = field(default_factory=dict)

    @property
    def repeats(self) -> int:
        return max((setting.repeats for setting in self.settings), default=1)

    @property
    def objective(self) -> str:
        return OBJECTIVES[self.mode][0]

    def workload_of(self, setting: Setting) -> tuple[str | None, ...]:
        return tuple(setting.values[name] for name in self.workloads)

    def name_of(self, setting: Setting) -> str:
        """`scheduler vllm, max-num-seqs 256`: the choices that vary."""
        named = [f"{name} {setting.values[name]}" for name in self.choices if setting.values[name] is not None]
        return ", ".join(named) or "the setting"

    def workload_name(self, key: Sequence[str | None]) -> str:
        return ", ".join(
            f"{name} {value}" for name, value in zip(self.workloads, key, strict=True) if value is not None
        )


def make_view(frame: pl.DataFrame, names: Sequence[str], slo: Mapping[str, float], attainment: float) -> SweepView:
    """`names`: the columns that are settings. `slo`: metric -> ms."""
    axes = [name for name in names if name != REPEATS]
    varied = [name for name in axes if frame[name].n_unique() > 1]
    figures = [
        name for name, kind in frame.schema.items()
        if kind == pl.Float64 and name not in names and frame[name].null_count() < frame.height
    ]  # fmt: skip
    settings = []
    groups = frame.with_row_index("_at").group_by(axes, maintain_order=True) if axes else [((), frame)]
    for place, (_, rows) in enumerate(groups):
        good = rows.filter(pl.col("status") == "complete")
        bad = rows.filter(pl.col("status") != "complete")
        status = "complete" if not bad.height else "failed" if (bad["status"] == "failed").any() else "incomplete"
        known = good if status == "complete" else rows.filter(pl.col("status") != "failed")
        spans = {}
        for name in figures:
            values = known[name].drop_nulls().to_list()
            if values and len(values) == known.height:
                spans[name] = (sum(values) / len(values), min(values), max(values))
        seeds = known[REPEATS].fill_null("").to_list() if REPEATS in known.columns else [""] * known.height
        by_repeat = {
            name: dict(zip(seeds, known[name].to_list(), strict=True))
            for name, _, _ in OBJECTIVES.values() if name in spans
        }  # fmt: skip
        first = rows.row(0, named=True)
        reason = bad["reason"][0] if bad.height else first["reason"]
        settings.append(
            Setting(place, {name: first[name] for name in axes}, status, reason, rows.height, spans, by_repeat)
        )
    mode = "rate" if "rate" in frame.columns else "slo" if slo and "attainment" in figures else "front"
    view = SweepView(
        mode, dict(slo), attainment,
        tuple(name for name in varied if name not in WORKLOAD),
        tuple(name for name in varied if name in WORKLOAD),
        {name: frame[name][0] for name in axes if name not in varied and frame.height and frame[name][0] is not None},
        tuple(settings),
        frame.height,
        tuple(frame.filter(pl.col("status") != "complete").select(*varied, "status", "reason").to_dicts()),
        max((s.figures["error"][2] for s in settings if "error" in s.figures), default=None),
        max((s.figures["error_worst"][2] for s in settings if "error_worst" in s.figures), default=None),
        max((s.figures["outside_share"][2] for s in settings if "outside_share" in s.figures), default=0.0),
        tuple(name for name in figures if name not in ("error", "error_worst", "outside_share")),
    )  # fmt: skip
    for key in dict.fromkeys(view.workload_of(setting) for setting in settings):
        if (pick := best_of(view, [s for s in settings if view.workload_of(s) == key])) is not None:
            view.picks[key] = pick  # type: ignore[index]
    return view


def best_of(view: SweepView, settings: Sequence[Setting]) -> Pick | None:
    """The setting with the highest objective that meets the SLOs; of those as good within the error, who has most to spare."""
    name = view.objective
    known = [s for s in settings if s.status == "complete" and name in s.figures]
    if not known:
        return None
    meeting = known
    if view.mode == "slo":
        meeting = [s for s in known if (s.mean("attainment") or 0.0) >= view.attainment]
    meets, pool = bool(meeting), meeting or known
    top = max(pool, key=lambda s: s.figures[name][0])
    tied = [s for s in pool if as_good(view, s, top)]
    chosen = top
    if view.mode != "rate" and meets:
        chosen = max(tied, key=lambda s: (room(view, s), s.figures[name][0], -s.place))
    others = [s for s in pool if s not in tied]
    return Pick(
        chosen,
        tuple(s for s in tied if s is not chosen),
        max(others, key=lambda s: s.figures[name][0], default=None),
        meets,
        tuple(margins(view, chosen)),
    )


def as_good(view: SweepView, setting: Setting, top: Setting) -> bool:
    """Whether the two cannot be told apart: error bars of rates that overlap; else within TIE of the top, or ahead of it in
    some repeat. Repeats are held against each other seed by seed."""
    name = view.objective
    if view.mode == "rate":
        floor = top.mean("rate_low")
        high = setting.mean("rate_high")
        return high is None or high > (top.figures[name][0] if floor is None else floor)
    if setting.figures[name][0] >= top.figures[name][0] * (1 - TIE):
        return True
    mine, others = setting.by_repeat[name], top.by_repeat[name]
    return any(mine[seed] >= others[seed] for seed in mine.keys() & others.keys())


def room(view: SweepView, setting: Setting) -> float:
    """The least share of an SLO to spare; without SLOs, less p99 TTFT is more."""
    found = [margin.left for margin in margins(view, setting)]
    if found:
        return min(found)
    latency = setting.mean("p99_ttft_ms") or setting.mean("p50_ttft_ms")
    return -latency if latency is not None else -math.inf


def margins(view: SweepView, setting: Setting) -> list[Margin]:
    """Each SLO against the percentile that the wanted attainment is about (p90 up to 90 %, else p99), where it is known."""
    percentile = "p90" if view.attainment <= 0.9 else "p99"
    out = []
    for metric, limit in view.slo.items():
        # A request meets an SLO of ITL when its largest gap does: the percentile over all gaps would hide most of the misses.
        name = f"{percentile}_{'max_itl' if metric == 'itl' else metric}_ms"
        if name in setting.figures:
            out.append(Margin(metric, percentile, setting.figures[name][0], limit, setting.spread(name)))
    return out


def in_order(values: set[str | None]) -> list[str | None]:
    """Numbers by size, words by the alphabet, "not given" last."""
    known = [value for value in values if value is not None]
    try:
        known.sort(key=float)
    except ValueError:
        known.sort()
    return [*known, *([None] if None in values else [])]
