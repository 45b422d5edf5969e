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

from reports.terminal import METRIC_NAMES, number, share

WORKLOAD = (
    "trace", "request-rate", "burstiness", "time-scale", "speedup", "num-prompts", "arrivals", "max-concurrency", "from",
    "num-warmups", "warm-cache", "clock", "round-cost", "round-seconds", "profile", "model", "engine",
)  # fmt: skip
REPEATS = "seed"
TIE = 0.01  # objectives closer than this, relatively, are as good as each other
MATTERS = 0.01  # an axis whose other values cost less than this does not matter
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
    mode = "rate" if "rate" in figures else "slo" if slo and "attainment" in figures else "front"
    view = SweepView(
        mode, dict(slo), attainment,
        tuple(name for name in varied if name not in WORKLOAD),
        tuple(name for name in varied if name in WORKLOAD),
        {name: frame[name][0] for name in axes if name not in varied and frame.height and frame[name][0] is not None},
        tuple(settings),
        frame.height,
        tuple(frame.filter(pl.col("status") != "complete").select(*varied, "status", "reason").to_dicts()),
        max((s.figures["error"][2] for s in settings if "error" in s.figures), default=None),
        max((s.figures["outside_share"][2] for s in settings if "outside_share" in s.figures), default=0.0),
        tuple(name for name in figures if name not in ("error", "outside_share")),
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
    if view.mode == "rate":
        floor = (top.figures["rate_low"] if "rate_low" in top.figures else top.figures[name])[0]
        tied = [s for s in pool if s.figures.get("rate_high", (math.inf,))[0] > floor and s.figures[name][0] >= 0]
        chosen = top
    else:
        tied = [s for s in pool if as_good(s, top, name)]
        chosen = max(tied, key=lambda s: (room(view, s), s.figures[name][0], -s.place)) if meets else top
    others = [s for s in pool if s not in tied]
    return Pick(
        chosen,
        tuple(s for s in tied if s is not chosen),
        max(others, key=lambda s: s.figures[name][0], default=None),
        meets,
        tuple(margins(view, chosen)),
    )


def as_good(setting: Setting, top: Setting, name: str) -> bool:
    """Within TIE of the top, or ahead of it in some repeat. Repeats are held against each other seed by seed."""
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
        name = f"{percentile}_{metric}_ms"
        if name in setting.figures:
            out.append(Margin(metric, percentile, setting.figures[name][0], limit, setting.spread(name)))
    return out


# -- in words


def answer(view: SweepView) -> list[str]:
    """Which setting should I use? A few sentences, the answer first."""
    if not view.picks:
        return ["No cell came to its end, so there is nothing to recommend.", *failures(view)]
    sentences: list[str] = []
    if len(view.picks) == 1:
        pick = next(iter(view.picks.values()))
        sentences += of_one(view, pick)
    else:
        for key, pick in list(view.picks.items())[:4]:
            sentences.append(f"At {view.workload_name(key)}: {lower(headline(view, pick))}")
        if len(view.picks) > 4:
            sentences.append(f"{len(view.picks) - 4} more workloads stand in the table below.")
        sentences += for_all(view)
    return [*sentences, *worth(view), *failures(view)]


def lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def slo_text(view: SweepView) -> str:
    return " and ".join(f"{METRIC_NAMES[name]} ≤ {limit:g} ms" for name, limit in view.slo.items())


def headline(view: SweepView, pick: Pick) -> str:
    """The pick of a workload in one sentence."""
    setting, name = pick.setting, view.name_of(pick.setting)
    if view.mode == "rate":
        high = setting.mean("rate_high")
        rate, low = setting.figures["rate"][0], setting.mean("rate_low") or 0.0
        bar = f"+{high - rate:.3g}" if high is not None else "no bound above"
        return (
            f"Use {name}: it sustains {number(rate)} requests/s ({bar}, −{rate - low:.3g}) with {100 * view.attainment:.4g}% of the "
            f"requests within {slo_text(view)}."
        )
    if view.mode == "slo":
        attained, goodput = setting.mean("attainment"), setting.mean("request_goodput")
        head = f"Use {name}: {share(attained)} of the requests meet {slo_text(view)}, a goodput of {number(goodput)} requests/s."
        if pick.meets:
            return head
        return (
            f"No setting keeps {slo_text(view)} for {100 * view.attainment:.4g}% of the requests; nearest by goodput is {name}, "
            f"with {share(attained)} and {number(goodput)} requests/s."
        )
    return (
        f"Highest throughput: {name}, {number(setting.mean('output_throughput'))} output tokens/s at a p99 TTFT of "
        f"{number(setting.mean('p99_ttft_ms'))} ms."
    )


def of_one(view: SweepView, pick: Pick) -> list[str]:
    """The pick, its margin, its rivals, what decides."""
    out = [headline(view, pick)]
    if view.mode == "rate" and pick.setting.mean("fails_at") is not None:
        out.append(f"At {number(pick.setting.mean('fails_at'))} requests/s it fails: {pick.setting.reason}.")
    if view.mode == "slo" and pick.tightest is not None:
        out.append(margin_text(view, pick.tightest))
    if view.mode == "front":
        out += trade(view, [s for s in view.settings if s.status == "complete"], pick.setting)
    label, unit = OBJECTIVES[view.mode][1:]
    if pick.tied and view.mode != "front":
        within = "their error bars overlap" if view.mode == "rate" else f"within {TIE:.0%}"
        if view.mode == "slo" and view.repeats > 1:
            within += ", or ahead in a repeat"
        chosen = "" if view.mode == "rate" else "; of them this one has the most to spare"
        count = len(pick.tied)
        out.append(
            f"{count} other setting{' is' if count == 1 else 's are'} as good in {label} ({within}){chosen}"
            + (f": {view.name_of(pick.tied[0])}." if count == 1 else ".")
        )
    if pick.next is not None and view.mode != "front":
        value, best = pick.next.figures[view.objective][0], pick.setting.figures[view.objective][0]
        less = f", {1 - value / best:.0%} less" if best > 0 else ""
        out.append(f"The next one, {view.name_of(pick.next)}, has a {label} of {number(value)} {unit}{less}.")
    return out + decides(view)


def margin_text(view: SweepView, margin: Margin) -> str:
    """How far the tightest SLO is, and whether the error leaves it standing."""
    parts = []
    if view.repeats > 1:
        parts.append(f"repeats ±{margin.spread:.1%}")
    if view.error is not None:
        parts.append(f"profile ±{view.error:.1%}")
    total = (margin.spread if view.repeats > 1 else 0.0) + (view.error or 0.0)
    metric = METRIC_NAMES[margin.metric]
    head = f"Its tightest SLO is {metric}: {margin.percentile} {number(margin.value)} ms of {margin.limit:g} ms"
    head += f", {margin.left:.0%} to spare" if margin.left >= 0 else f", {-margin.left:.0%} beyond it"
    if not parts:
        return f"{head}; with one replay of each setting its error is not known (--repeat 3 shows the spread)."
    verdict = (
        "the margin is larger than that"
        if margin.value * (1 + total) <= margin.limit
        else "that is more than the margin"
    )
    return f"{head}, with an error of ±{total:.1%} ({', '.join(parts)}): {verdict}."


def trade(view: SweepView, settings: Sequence[Setting], fastest: Setting) -> list[str]:
    """Without SLOs there is a front and no single answer: its ends, and the point between."""
    known = [s for s in settings if s.mean("p99_ttft_ms") and s.mean("output_throughput")]
    if not known:
        return ["Without --goodput there is no single answer, and too few samples for p99."]
    quick = min(known, key=lambda s: (s.figures["p99_ttft_ms"][0], -s.figures["output_throughput"][0]))
    out = []
    if quick is not fastest:
        out.append(
            f"Shortest p99 TTFT: {view.name_of(quick)}, {number(quick.mean('p99_ttft_ms'))} ms at "
            f"{number(quick.mean('output_throughput'))} tokens/s."
        )
        between = balanced(known)
        if between not in (quick, fastest):
            out.append(
                f"Between them: {view.name_of(between)}, {number(between.mean('p99_ttft_ms'))} ms at "
                f"{number(between.mean('output_throughput'))} tokens/s."
            )
        out.append('Which of them to use depends on what is promised: --goodput "ttft:200 tpot:50" gives one answer.')
    else:
        out.append("It has the shortest p99 TTFT as well, so on this workload nothing is traded.")
    return out


def balanced(settings: Sequence[Setting]) -> Setting:
    """Nearest to the best of both, each axis scaled to its range, TTFT by its logarithm."""
    speeds = [s.figures["output_throughput"][0] for s in settings]
    waits = [math.log(s.figures["p99_ttft_ms"][0]) for s in settings]

    def scaled(value: float, values: Sequence[float]) -> float:
        width = max(values) - min(values)
        return (value - min(values)) / width if width else 0.0

    distances = [
        math.hypot(1 - scaled(speed, speeds), scaled(wait, waits)) for speed, wait in zip(speeds, waits, strict=True)
    ]
    return settings[min(range(len(settings)), key=distances.__getitem__)]


def for_all(view: SweepView) -> list[str]:
    """The one setting that loses least over all workloads."""
    name = view.objective
    by_choice: dict[tuple[str | None, ...], dict[tuple[str | None, ...], float]] = {}
    for setting in view.settings:
        key = view.workload_of(setting)
        if setting.status == "complete" and key in view.picks and name in setting.figures:
            best = view.picks[key].setting.figures[name][0]
            if best > 0:
                choice = tuple(setting.values[axis] for axis in view.choices)
                by_choice.setdefault(choice, {})[key] = setting.figures[name][0] / best
    everywhere = {choice: shares for choice, shares in by_choice.items() if len(shares) == len(view.picks)}
    if not everywhere or not view.choices:
        return []
    choice, shares = max(everywhere.items(), key=lambda item: min(item[1].values()))
    worst = min(shares, key=shares.__getitem__)
    named = ", ".join(f"{axis} {value}" for axis, value in zip(view.choices, choice, strict=True) if value is not None)
    label = OBJECTIVES[view.mode][1]
    loss = max(1 - shares[worst], 0.0)
    tail = (
        "nowhere worse than the best by more than 1 %" if loss < TIE
        else f"at worst {loss:.0%} less {label} than the best, at {view.workload_name(worst)}"
    )  # fmt: skip
    return [f"One setting for all of them: {named}; {tail}."]


def effects(view: SweepView) -> list[tuple[str, str, str, float]]:
    """(axis, best value, worst value, loss): the best objective that the worst value of an axis still reaches, below the best.

    Over complete settings of a workload; of several workloads the largest loss. Largest first.
    """
    name, found = view.objective, []
    for axis in view.choices:
        largest: tuple[str, str, float] | None = None
        for key in view.picks:
            best: dict[str, float] = {}
            for setting in view.settings:
                if setting.status == "complete" and name in setting.figures and view.workload_of(setting) == key:
                    value = setting.values[axis] or "not given"
                    best[value] = max(best.get(value, -math.inf), setting.figures[name][0])
            if len(best) > 1 and max(best.values()) > 0:
                top, low = max(best, key=best.__getitem__), min(best, key=best.__getitem__)
                loss = 1 - best[low] / best[top]
                if largest is None or loss > largest[2]:
                    largest = top, low, loss
        if largest is not None:
            found.append((axis, *largest))
    return sorted(found, key=lambda effect: -effect[3])


def decides(view: SweepView) -> list[str]:
    """Which axes the objective depends on, and which it does not."""
    found = effects(view)
    if not found:
        return []
    label = OBJECTIVES[view.mode][1]
    strong = [f"{axis} ({low} reaches {loss:.0%} less at best)" for axis, _, low, loss in found if loss >= MATTERS]
    weak = [axis for axis, _, _, loss in found if loss < MATTERS]
    out = []
    if strong:
        out.append(f"What decides {label}: {', '.join(strong[:4])}.")
    if weak:
        out.append(f"{', '.join(weak)} {'does' if len(weak) == 1 else 'do'} not move the best {label} by 1 %.")
    return out


def worth(view: SweepView) -> list[str]:
    """What simulated durations are worth, and how wide repeats are."""
    out = []
    if view.mode == "rate" and view.error is not None:
        out.append(
            f"The bounds are those of the seeds; the profile's error of ±{view.error:.1%} of a duration comes on top."
        )
    if view.outside > 0.01:
        out.append(
            f"Up to {view.outside:.0%} of a setting's rounds lie beyond what the profile was fitted on: their durations are "
            "extrapolated, without a known error."
        )
    return out


def failures(view: SweepView) -> list[str]:
    failed = sum(row["status"] == "failed" for row in view.failed)
    cut = len(view.failed) - failed
    out = []
    if failed:
        out.append(
            f"{failed} of {view.cells} cells failed and {'is' if failed == 1 else 'are'} left out; the reasons stand at the end."
        )
    if cut:
        why = "no rate was found for them" if view.mode == "rate" else "requests were refused or left over"
        out.append(f"{cut} of {view.cells} cells are incomplete ({why}) and not recommended.")
    return out
