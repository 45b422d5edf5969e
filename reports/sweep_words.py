"""A sweep's answer in words: which setting, with what margin, what decides, and what the figures are worth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from reports.sweep_view import OBJECTIVES, TIE, Margin, Pick, Setting, SweepView, as_good, in_order
from reports.terminal import METRIC_NAMES, number, share

MATTERS = 0.01  # an axis whose other values cost less than this does not matter


def answer(view: SweepView) -> list[str]:
    """Which setting should I use? A few sentences, the answer first."""
    if not view.picks and view.mode == "rate":
        return no_rate(view)
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
        which = f"{name}, or one that cannot be told from it" if pick.tied else name
        sure = (setting.mean("rate_low") or 0.0) >= setting.figures["rate"][0]
        how = "it sustains" if sure else "by the mean of its seeds it sustains"
        return f"Use {which}: {how} {rate_text(setting)} with {100 * view.attainment:.4g}% of the requests within {slo_text(view)}."
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


def rate_text(setting: Setting) -> str:
    """`4.05 requests/s (+1.68, −0.926)`: up to the nearest rate that surely fails, and down to the nearest that surely holds."""
    rate, low, high = setting.figures["rate"][0], setting.mean("rate_low") or 0.0, setting.mean("rate_high")
    above = f"+{high - rate:.3g}" if high is not None else "none tried surely fails"
    below = f"−{rate - low:.3g}" if low > 0 else "none tried surely holds"
    return f"{number(rate)} requests/s ({above}, {below})"


def next_rate_text(setting: Setting, at: float) -> str:
    """Why the rate after the highest one fails, and whether that is sure."""
    high = setting.mean("rate_high")
    if high is not None and high <= at:
        return f"At {number(at)} requests/s it fails: {setting.reason}."
    surely = "no rate tried surely does" if high is None else f"surely only at {number(high)}"
    return f"At {number(at)} requests/s it fails by the mean, {surely}: {setting.reason}."


def no_rate(view: SweepView) -> list[str]:
    """Where the search found no rate for any setting."""
    reasons = dict.fromkeys(str(row["reason"]) for row in view.failed if row["status"] != "failed")
    if len(reasons) != 1:
        return ["No rate was found for any setting, so none is recommended.", *failures(view)]
    reason = next(iter(reasons))
    return [f"{reason[:1].upper()}{reason[1:]}. So no rate is recommended.", *failures(view)]


def of_one(view: SweepView, pick: Pick) -> list[str]:
    """The pick, its margin, its rivals, what decides."""
    out = [headline(view, pick)]
    if view.mode == "rate" and (at := pick.setting.mean("fails_at")) is not None:
        out.append(next_rate_text(pick.setting, at))
    if view.mode == "slo" and pick.tightest is not None:
        out.append(margin_text(view, pick.tightest))
    if view.mode == "front":
        out += trade(view, [s for s in view.settings if s.status == "complete"], pick.setting)
    label, unit = OBJECTIVES[view.mode][1:]
    if pick.tied and view.mode != "front":
        count = len(pick.tied)
        others = f"{count} other setting{'' if count == 1 else 's'}"
        only = pick.tied[0]
        if view.mode == "rate":
            named = f": {view.name_of(only)}, {rate_text(only)}" if count == 1 else ""
            out.append(f"{others} cannot be told from it in {label} (their error bars overlap){named}.")
            out.append("A longer trace, or more --max-seeds, narrows the bars.")
        else:
            within = f"within {TIE:.0%}" + (", or ahead in a repeat" if view.mode == "slo" and view.repeats > 1 else "")
            named = f": {view.name_of(only)}" if count == 1 else ""
            verb = "is" if count == 1 else "are"
            out.append(f"{others} {verb} as good in {label} ({within}); of them this one has the most to spare{named}.")
        if count > 1 and (common := shared_text(view, (pick.setting, *pick.tied))):
            out.append(f"All of them have {common}{how_many(view, (pick.setting, *pick.tied))}.")
    if pick.next is not None and view.mode != "front":
        value, best = pick.next.figures[view.objective][0], pick.setting.figures[view.objective][0]
        less = f", {1 - value / best:.0%} less" if best > 0 else ""
        out.append(f"The next one, {view.name_of(pick.next)}, has a {label} of {number(value)} {unit}{less}.")
    return out + decides(view)


def how_many(view: SweepView, settings: Sequence[Setting]) -> str:
    """Whether the values that these settings take are all it takes."""
    key, taken = view.workload_of(settings[0]), {axis: {s.values[axis] for s in settings} for axis in view.choices}
    alike = [
        s for s in view.settings
        if view.workload_of(s) == key and all(s.values[axis] in taken[axis] for axis in view.choices)
    ]  # fmt: skip
    if len(alike) == len(settings):
        return ", and every setting that has these is as good"
    return f"; they are {len(settings)} of the {len(alike)} settings that have these"


def shared_text(view: SweepView, settings: Sequence[Setting]) -> str:
    """`max-num-seqs 32, 64 or 128 and kv-cache-tokens 65536`: the axes of which these settings take some values only."""
    texts = []
    for axis in view.choices:
        every = in_order({setting.values[axis] for setting in view.settings})
        taken = [value for value in every if any(setting.values[axis] == value for setting in settings)]
        if len(taken) < len(every):
            words = ["not given" if value is None else value for value in taken]
            texts.append(f"{axis} " + (", ".join(words[:-1]) + " or " if len(words) > 1 else "") + words[-1])
    return ", ".join(texts[:-1]) + " and " + texts[-1] if len(texts) > 1 else "".join(texts)


def margin_text(view: SweepView, margin: Margin) -> str:
    """How far the tightest SLO is, and whether the error leaves it standing."""
    parts = []
    if view.repeats > 1:
        parts.append(f"repeats ±{margin.spread:.1%}")
    if view.error is not None:
        parts.append(f"profile ±{view.error:.1%}")
    total = (margin.spread if view.repeats > 1 else 0.0) + (view.error or 0.0)
    metric = METRIC_NAMES[margin.metric]
    of = " of the requests' largest gaps" if margin.metric == "itl" else ""
    head = f"Its tightest SLO is {metric}: {margin.percentile}{of} {number(margin.value)} ms of {margin.limit:g} ms"
    head += f", {margin.left:.0%} to spare" if margin.left >= 0 else f", {-margin.left:.0%} beyond it"
    if not parts:
        why = unknown_error(view)
        return f"{head}." if why is None else f"{head}; {why}."
    verdict = (
        "the margin is larger than that"
        if margin.value * (1 + total) <= margin.limit
        else "that is more than the margin"
    )
    text = f"{head}, with an error of ±{total:.1%} ({', '.join(parts)}): {verdict}"
    if view.error_worst is not None and margin.value * (1 + total) <= margin.limit < margin.value * (
        1 + view.error_worst
    ):
        text += f", but not than in the profile's worst held-out run, off by {view.error_worst:.0%} at p99"
    return text + "."


def unknown_error(view: SweepView) -> str | None:
    """Why there is no error to state, and what would give one. None of the null engine: `worth` says what its durations are."""
    engine = view.fixed.get("engine")
    if engine == "null":
        return None
    seeded = "request-rate" in view.fixed or "request-rate" in view.workloads
    if engine == "simulated":
        return "the profile states no error" + (", and --repeat 3 shows how much arrivals matter" if seeded else "")
    return "with one replay of each setting its error is not known (--repeat 3 shows the spread)"


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
    by_choice: dict[tuple[str | None, ...], dict[tuple[str | None, ...], tuple[float, Setting]]] = {}
    for setting in view.settings:
        key = view.workload_of(setting)
        if setting.status == "complete" and key in view.picks and name in setting.figures:
            best = view.picks[key].setting.figures[name][0]
            if best > 0:
                choice = tuple(setting.values[axis] for axis in view.choices)
                by_choice.setdefault(choice, {})[key] = setting.figures[name][0] / best, setting
    everywhere = {choice: shares for choice, shares in by_choice.items() if len(shares) == len(view.picks)}
    if not everywhere or not view.choices:
        return []
    choice, shares = max(everywhere.items(), key=lambda item: min(share for share, _ in item[1].values()))
    worst = min(shares, key=lambda key: shares[key][0])
    named = ", ".join(f"{axis} {value}" for axis, value in zip(view.choices, choice, strict=True) if value is not None)
    label = OBJECTIVES[view.mode][1]
    loss, at_worst = max(1 - shares[worst][0], 0.0), shares[worst][1]
    tail = (
        "nowhere worse than the best by more than 1%" if loss < TIE
        else f"at worst {loss:.0%} less {label} than the best, at {view.workload_name(worst)}"
    )  # fmt: skip
    if loss >= TIE and as_good(view, at_worst, view.picks[worst].setting):
        tail += ", which is within the error"
    return [f"One setting for all of them: {named}; {tail}."]


class Effect(NamedTuple):
    """What an axis is worth: the best objective that its worst value still reaches, below that of its best one.

    `sure`: the best settings of the two values can be told apart.
    """

    axis: str
    best: str
    worst: str
    loss: float
    sure: bool


def effects(view: SweepView) -> list[Effect]:
    """Of each axis, over complete settings of a workload; of several workloads the largest loss that is sure. Largest first."""
    name, found = view.objective, []
    for axis in view.choices:
        largest: Effect | None = None
        for key in view.picks:
            best: dict[str, Setting] = {}
            for setting in view.settings:
                if setting.status == "complete" and name in setting.figures and view.workload_of(setting) == key:
                    value = setting.values[axis] or "not given"
                    if value not in best or setting.figures[name][0] > best[value].figures[name][0]:
                        best[value] = setting
            reached = {value: setting.figures[name][0] for value, setting in best.items()}
            if len(reached) > 1 and max(reached.values()) > 0:
                top, low = max(reached, key=reached.__getitem__), min(reached, key=reached.__getitem__)
                loss = 1 - reached[low] / reached[top]
                sure = loss > 0 and not as_good(view, best[low], best[top])
                effect = Effect(axis, *((top, low) if loss > 0 else ("any", "any")), loss, sure)
                if largest is None or (effect.sure, effect.loss) > (largest.sure, largest.loss):
                    largest = effect
        if largest is not None:
            found.append(largest)
    return sorted(found, key=lambda effect: (-effect.sure, -effect.loss))


def decides(view: SweepView) -> list[str]:
    """Which axes the objective depends on, which it does not, and of which it is not known."""
    found = effects(view)
    if not found:
        return []
    label = OBJECTIVES[view.mode][1]
    strong = [f"{e.axis} ({e.worst} reaches {e.loss:.0%} less at best)" for e in found if e.sure and e.loss >= MATTERS]
    unsure = [
        f"{e.axis} ({e.worst} is {e.loss:.0%} below {e.best}, within the error)"
        for e in found
        if not e.sure and e.loss >= MATTERS
    ]
    weak = [e.axis for e in found if e.loss < MATTERS]
    out = []
    if strong:
        out.append(f"What decides {label}: {', '.join(strong[:4])}.")
    if unsure:
        out.append(f"Not decided is whether {label} depends on {', '.join(unsure[:4])}.")
    if weak:
        out.append(f"{', '.join(weak)} {'does' if len(weak) == 1 else 'do'} not move the best {label} by 1%.")
    return out


def worth(view: SweepView) -> list[str]:
    """What durations without a device are worth."""
    out = []
    if view.fixed.get("engine") == "null" or any(setting.values.get("engine") == "null" for setting in view.settings):
        out.append("Durations of the null engine are constants (--round-cost): this is no prediction of a device.")
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
        why = "no rate was found" if view.mode == "rate" else "requests were refused or left over"
        out.append(f"{cut} of {view.cells} cells {'is' if cut == 1 else 'are'} incomplete ({why}) and not recommended.")
    return out
