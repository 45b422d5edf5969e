"""The highest request rate that a setting sustains under SLOs: bisection in which a probe is decided by an interval.

A probe replays the trace at one rate with several seeds of Poisson arrivals. It holds where the whole interval of the share
of requests that meet every SLO lies at or above the wanted share, fails where it lies below, or where the queue was still
growing at the end; in between more seeds are drawn. Rates are doubled or halved until one holds and one fails, then bisected.
Only results decide what is probed next, so a search is the same whatever ran beside it. Must not know where cells run.

The interval is the wider of two: Student's t over the seeds' shares (requests of one run wait in one queue and are not
independent) and Wilson's over all requests (seeds that all say 100 % of 30 requests do not prove 99 %).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from benchctl.sweep import Store, as_done
from benchctl.sweep_spec import Cell, make_cell
from benchctl.sweep_workers import DONE, Result, Workers

Verdict = Literal["holds", "fails", "open"]
Z = 1.959964  # 95 %, two-sided
# Student's 97.5 % quantiles by degrees of freedom; beyond the table the normal's is near enough.
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
MAX_DOUBLINGS = 20
MAX_TIGHTENED = 2  # probes to bring a bound nearer, on each side
MAX_OPEN = 3  # probes that cannot be told, after which closer rates cannot either
GROWING = "the queue was still growing when the last request arrived"
SHORT = 10  # arrivals that last less than so many times a request's own time have no steady state


@dataclass(frozen=True, slots=True)
class Aim:
    """What is asked for. `attainment`: wanted share of requests within all SLOs; `precision`: width at which to stop."""

    slo: Mapping[str, float]
    attainment: float = 0.99
    precision: float = 0.02
    seeds: int = 3  # of a probe, at first
    max_seeds: int = 12


@dataclass(slots=True)
class Probe:
    """One rate and what its seeds said. Mutable, owned by its search."""

    rate: float
    results: list[Result] = field(default_factory=list)
    settled: Verdict | None = None

    def shares(self) -> list[float]:
        return [float(r["judged"]["attainment"] or 0.0) for r in self.results]

    def interval(self) -> tuple[float, float, float]:
        """(mean, low, high) of the share of requests within the SLOs, 95 %."""
        shares = self.shares()
        good = sum(r["judged"]["good"] for r in self.results)
        total = sum(r["judged"]["total"] for r in self.results)
        mean = sum(shares) / len(shares)
        low, high = wilson(good, total)
        if len(shares) > 1:
            spread = math.sqrt(sum((share - mean) ** 2 for share in shares) / (len(shares) - 1) / len(shares))
            reach = (T[len(shares) - 2] if len(shares) - 2 < len(T) else Z) * spread
            low, high = min(low, mean - reach), max(high, mean + reach)
        return mean, max(low, 0.0), min(high, 1.0)

    def grows(self) -> bool:
        """Whether the queue was growing to the end in more than half of the seeds."""
        return 2 * sum(GROWING in (r.get("checks") or ()) for r in self.results) > len(self.results)

    def verdict(self, aim: Aim) -> Verdict:
        _, low, high = self.interval()
        if self.grows() or high < aim.attainment:
            return "fails"
        return "holds" if low >= aim.attainment else "open"


def wilson(good: int, total: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    if not total:
        return 0.0, 1.0
    share, z2 = good / total, Z * Z
    centre, scale = share + z2 / (2 * total), 1 + z2 / total
    reach = Z * math.sqrt(share * (1 - share) / total + z2 / (4 * total * total))
    return (centre - reach) / scale, (centre + reach) / scale


class Search:
    """The search of one setting. Mutable; ask `wanted()` for cells, hand their results to `take`, until it wants none."""

    def __init__(self, base: Cell, aim: Aim, start: float) -> None:
        self.base, self.aim = base, aim
        self.probes: list[Probe] = []
        self.error: str | None = None
        self.end: str | None = None  # why there is no rate, or no bound above
        self._rate, self._moves = round_rate(start), 0
        self._ending: str | None = None
        self._tightened = [0, 0]  # probes spent on the bound below, and above
        self._first_seed = int(base.settings.get("seed", 0))

    @property
    def holding(self) -> Probe | None:
        """The highest rate below every rate that fails, of those that hold."""
        top = self.failing.rate if self.failing else math.inf
        found = [p for p in self.probes if p.settled == "holds" and p.rate < top]
        return max(found, key=lambda p: p.rate, default=None)

    @property
    def failing(self) -> Probe | None:
        """The lowest rate that fails."""
        return min((p for p in self.probes if p.settled == "fails"), key=lambda p: p.rate, default=None)

    def wanted(self) -> list[Cell]:
        """Cells to run next; none when the search has ended."""
        if self.error is not None or self.end is not None:
            return []
        if not self.probes or self.probes[-1].settled is not None:
            self.probes.append(Probe(self._rate))
        done = len(self.probes[-1].results)
        number = self.aim.seeds if not done else min(done, self.aim.max_seeds - done)
        settings = dict(self.base.settings) | {"request-rate": self.probes[-1].rate}
        return [make_cell(settings | {"seed": self._first_seed + done + k}) for k in range(number)]

    def take(self, results: Sequence[Result]) -> Verdict | None:
        """Results of the cells wanted, in their order. Returns the verdict once the probe is settled, else None."""
        broken = next((r for r in results if r["status"] not in DONE or not r.get("judged")), None)
        if broken is not None:
            self.error = broken.get("reason") or "the records do not say which requests met the SLOs"
            return None
        probe = self.probes[-1]
        probe.results += results
        verdict = probe.verdict(self.aim)
        if verdict == "open" and len(probe.results) < self.aim.max_seeds:
            return None
        # Still open after all seeds: the mean points the way, and the rate's error bar stays open to both sides.
        mean, _, _ = probe.interval()
        probe.settled = verdict if verdict != "open" else "holds" if mean >= self.aim.attainment else "fails"
        self._move()
        return verdict

    def _move(self) -> None:
        holding, failing = self.holding, self.failing
        if holding is None or failing is None:
            self._moves += 1
            total = self.probes[-1].results[0]["judged"]["total"]
            if failing is None and (self._moves > MAX_DOUBLINGS or self.probes[-1].rate > total * 10):
                self.end = (
                    f"no rate tried fails, up to {self.probes[-1].rate:g}/s: the trace is too short to overload it"
                )
                return
            if holding is None and (why := self._hopeless()) is not None:
                self.end = f"no rate holds, down to {self.probes[-1].rate:g}/s: {why}"
                return
            self._rate = round_rate(self.probes[-1].rate * (2.0 if failing is None else 0.5))
            return
        if self._ending is None:
            middle = round_rate(math.sqrt(holding.rate * failing.rate))
            if failing.rate / holding.rate - 1 <= self.aim.precision or middle in (holding.rate, failing.rate):
                self._ending = "found"
            elif sum(probe.verdict(self.aim) == "open" for probe in self.probes) >= MAX_OPEN:
                self._ending = "seeds differ too much to tell closer"
            else:
                self._rate = middle
                return
        self._tighten()

    def _tighten(self) -> None:
        """The rate is known: a few more probes between it and the nearest clear ones, then the end."""
        bounds = self.bounds()
        assert bounds is not None
        _, low, high = bounds
        rates = sorted(probe.rate for probe in self.probes)
        # Where no rate is clear on a side yet: farther out, so that the error bar ends.
        for side, missing, wanted in ((0, low == 0, rates[0] / 2), (1, math.isinf(high), rates[-1] * 2)):
            if missing and self._tightened[side] < MAX_TIGHTENED:
                self._tightened[side] += 1
                self._rate = round_rate(wanted)
                return
        # Between a clear rate and the next one that was tried towards the middle.
        sides = [
            (low, min((r for r in rates if r > low), default=low)),
            (max((r for r in rates if r < high), default=high), high),
        ]
        for side, (least, most) in enumerate(sides):
            if self._tightened[side] < MAX_TIGHTENED and 0 < least < most < math.inf:
                self._tightened[side] += 1
                wanted = round_rate(math.sqrt(least * most))
                if most / least - 1 > 2 * self.aim.precision and wanted not in rates:
                    self._rate = wanted
                    return
        self.end = self._ending

    def _hopeless(self) -> str | None:
        """Why lower rates would not help, or None."""
        last = self.probes[-1]
        judged = [result["judged"] for result in last.results]
        total = sum(j["total"] for j in judged)
        refused = sum(j["misses"].get("not finished", 0) for j in judged)
        if refused == total - sum(j["good"] for j in judged) and refused > (1 - self.aim.attainment) * total:
            return "too many are refused, whatever the rate (over-length = skip leaves out those that never fit)"
        shares = [probe.interval()[0] for probe in self.probes[-3:]]
        unmoved = len(shares) == 3 and max(shares) - min(shares) < 1e-3
        # Where nobody meets them that may be overload still: then only if nobody waited.
        if (unmoved and (shares[0] > 0 or not waits(last))) or self._moves > MAX_DOUBLINGS // 2:
            return "requests miss the SLOs without waiting for others"
        return None

    # -- what came out

    @property
    def is_open(self) -> bool:
        """Whether no probe could be told from the wanted share: nothing is known of any rate."""
        return all(probe.verdict(self.aim) == "open" for probe in self.probes if probe.results)

    def bounds(self) -> tuple[float, float, float] | None:
        """(rate, low, high): the highest rate that holds; below `low` and above `high` every interval is clear."""
        holding, failing = self.holding, self.failing
        if holding is None:
            return None
        clear = [p for p in self.probes if p.results]
        low = max((p.rate for p in clear if p.rate <= holding.rate and p.verdict(self.aim) == "holds"), default=0.0)
        high = min(
            (p.rate for p in clear if p.rate > holding.rate and p.verdict(self.aim) == "fails"), default=math.inf
        )
        return holding.rate, low, high if failing is not None else math.inf


def round_rate(rate: float) -> float:
    """Four digits: the rate as it is printed is the rate that was replayed."""
    return float(f"{rate:.4g}")


def probe_text(probe: Probe, aim: Aim) -> str:
    """`20.00/s: 99.6 % within the SLOs [99.1, 100.0], 3 seeds: holds`."""
    mean, low, high = probe.interval()
    verdict = probe.verdict(aim)
    if verdict == "open":
        verdict_text = f"cannot be told from {aim.attainment:.4g}; by its mean it {probe.settled}"
    else:
        verdict_text = verdict + (": the queue grows to the end" if probe.grows() else "")
    return (
        f"{probe.rate:g}/s: {mean:.2%} of requests within the SLOs [{low:.2%}, {high:.2%}], "
        f"{len(probe.results)} seeds: {verdict_text}"
    )


def why_text(probe: Probe, aim: Aim) -> str:
    """Why a probe fails: which SLO is missed by how many, where the percentile stands, what the waiting ones waited for."""
    total = sum(r["judged"]["total"] for r in probe.results) or 1
    misses = Counter[str]()
    for result in probe.results:
        misses.update(result["judged"]["misses"])
    texts = []
    for name, count in misses.most_common():
        if not count:
            continue
        limit = aim.slo.get(name)
        values = [r["figures"].get(f"p99_{name}_ms") for r in probe.results]
        known = [value for value in values if value is not None]
        at = f" (p99 up to {max(known):,.4g} ms, SLO {limit:g} ms)" if known and limit and name != "itl" else ""
        texts.append(
            f"{count / total:.2%} "
            + (f"miss {name}{at}" if limit else f"are {name.replace('finished', 'finished: refused')}")
        )
    if probe.grows():
        texts.append("the queue grows to the end")
    if stops := waits(probe):
        reason, number = stops.most_common(1)[0]
        texts.append(f"in {number / stops.total():.0%} of the rounds that left requests waiting it was for {reason}")
    return "; ".join(texts) or "no request missed a SLO"


def waits(probe: Probe) -> Counter[str]:
    """Why the loop over the waiting stopped with some left, in rounds of all seeds; empty: nobody was ever left waiting."""
    stops = Counter[str]()
    for result in probe.results:
        found = (result.get("stops") or {}).get("waiting") or {}
        stops.update({reason: rounds for reason, rounds in found.items() if reason != "waiting_empty"})
    return stops


def needed_requests(attainment: float) -> int | None:
    """Requests of which all within the SLOs prove that share, by Wilson's interval. None: no number does."""
    return None if attainment >= 1 else math.ceil(attainment * Z * Z / (1 - attainment))


def more_text(search: Search) -> str:
    """What would let a probe be told: more requests, where all of them within the SLOs prove too little, else a narrower interval."""
    aim, most = search.aim, max(search.probes, key=lambda probe: len(probe.results))
    needed, seeds = needed_requests(aim.attainment), len(most.results)
    total = sum(result["judged"]["total"] for result in most.results)
    if needed is None:
        return "no number of requests proves all of them; ask for less, --attainment 0.99"
    if total >= needed:
        return "a longer trace or more --max-seeds narrow the interval"
    each = math.ceil(total / seeds)
    return (
        f"{total} requests ({each} with {seeds} seeds), all of them within the SLOs, prove {wilson(total, total)[0]:.1%}; "
        f"{100 * aim.attainment:.4g}% takes {needed}: a trace of {math.ceil(needed / aim.max_seeds)} or more, or --max-seeds {math.ceil(needed / each)}"
    )


def open_text(search: Search) -> str:
    """Why nothing could be decided, and what would help."""
    rates = [probe.rate for probe in search.probes if probe.results]
    tried = f"{min(rates):g}/s" if min(rates) == max(rates) else f"{min(rates):g} to {max(rates):g}/s"
    return (
        f"nothing could be decided: at no rate tried, {tried}, can the share of requests within the SLOs be told from "
        f"{100 * search.aim.attainment:.4g}%; {more_text(search)}"
    )


def unsure_text(search: Search) -> str | None:
    """A note where a rate was found, and none is sure to hold."""
    bounds = search.bounds()
    if bounds is None or search.is_open or bounds[1] > 0:
        return None
    return f"no rate tried is sure to hold; {more_text(search)}"


def short_text(search: Search) -> str | None:
    """A warning where all arrivals are over before a steady state could be."""
    probe = search.holding
    if probe is None or not probe.results or search.is_open:
        return None
    first = probe.results[0]
    spent, total = first["figures"].get("p50_e2el_ms"), first["judged"]["total"]
    if spent is None or total / probe.rate >= SHORT * spent / 1000:
        return None
    return (
        f"at {probe.rate:g}/s all {total} requests arrive within {total / probe.rate:.3g} s, less than {SHORT} times what one "
        f"takes ({spent / 1000:.3g} s): a longer trace would sustain less"
    )


def find_rates(
    bases: Sequence[Cell],
    aim: Aim,
    start: Callable[[Cell], float],
    store: Store,
    workers: Workers,
    say: Callable[[Search, str], None],
) -> list[Search]:
    """Search every setting, side by side. `say` (search, line) follows each probe. Raises what `store` raises."""
    searches = [Search(base, aim, start(base)) for base in bases]
    open_cells: dict[int, tuple[list[Cell], dict[str, Result]]] = {}
    running: dict[Future[Result], tuple[int, Cell]] = {}

    def advance(i: int) -> None:
        """Hand out the next cells of search i; results of earlier calls are taken at once."""
        while cells := searches[i].wanted():
            known = {cell.key: found for cell in cells if (found := store.load(cell)) is not None}
            open_cells[i] = cells, known
            missing = [cell for cell in cells if cell.key not in known]
            if missing:
                running.update({workers.submit(cell): (i, cell) for cell in missing})
                return
            take(i)

    def take(i: int) -> None:
        cells, found = open_cells.pop(i)
        search = searches[i]
        verdict = search.take([found[cell.key] for cell in cells])
        if verdict is not None:
            say(search, probe_text(search.probes[-1], aim))

    for i in range(len(searches)):
        advance(i)
    while running:
        for future in first_done(running):
            i, cell = running.pop(future)
            open_cells[i][1][cell.key] = store.finished(cell, future.result())
            if len(open_cells[i][1]) == len(open_cells[i][0]):
                take(i)
                advance(i)
    return searches


def first_done(running: Mapping[Future[Result], Any]) -> Iterator[Future[Result]]:
    """Those that have ended by now; waits for the first."""
    ended = next(iter(as_done(running)))
    yield ended
    yield from [future for future in list(running) if future.done() and future is not ended]


def row_of(search: Search) -> Result:
    """The outcome as a cell's result: `figures` are means over the seeds of the highest rate that holds."""
    bounds, holding, failing = search.bounds(), search.holding, search.failing
    if search.error is not None:
        return {"status": "failed", "reason": search.error, "figures": {}}
    if search.is_open:
        return {"status": "incomplete", "reason": open_text(search), "figures": {}}
    if bounds is None or holding is None:
        why = why_text(failing, search.aim) if failing else ""
        return {"status": "incomplete", "reason": f"{search.end}; {why}", "figures": {}}
    names = holding.results[0]["figures"]
    figures = {name: mean_of([r["figures"].get(name) for r in holding.results]) for name in names}
    mean, low, high = holding.interval()
    rate, rate_low, rate_high = bounds
    return {
        "status": "complete",
        "reason": search.end if failing is None else why_text(failing, search.aim),
        "figures": figures,
        "judged": {
            "attainment": mean,
            "request_goodput": mean_of([r["judged"]["request_goodput"] for r in holding.results]),
        },
        "simulation": holding.results[0].get("simulation"),
        "path": holding.results[0].get("path"),
        "rate": {
            "rate": rate,
            "rate_low": rate_low,
            "rate_high": None if math.isinf(rate_high) else rate_high,
            "fails_at": failing.rate if failing else None,
            "attainment_low": low,
            "attainment_high": high,
            "probes": float(len(search.probes)),
        },
    }


def mean_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None
