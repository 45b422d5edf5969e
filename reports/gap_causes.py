"""The longest gaps between tokens, counted by what made them, and that in words."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from reports.round_causes import HALF, round_causes
from reports.run import Run
from reports.units import Unit

LONGEST = 0.01  # share of the gaps whose causes are counted
MUCH_LONGER = 1.5  # times the median: what is less is no spike


@dataclass(frozen=True, slots=True)
class GapCauses:
    """The longest gaps of a run by what made them; each gap is counted once, for the first that is true of it.

    `eager`, `decodes`, `usual_decodes` are beside the count: gaps that lay mostly in rounds without a CUDA graph, in a run that
    has graphs; mean decodes of the rounds that made the gaps of `own`, and of all rounds that decoded.
    """

    num_gaps: int
    least_s: float
    preempted: int  # its request lost its blocks
    hiccup: int  # neither the device nor recorded host work took half of it, nor a launch
    launch: int  # the device took less than half; the next round's kernels were launched one by one meanwhile
    host: int  # the host took half of it, the device did not
    passed_by_prefill: int  # most of it in rounds that did not compute it and prefilled others
    passed_by: int  # most of it in rounds that did not compute it, without prefill
    shared: int  # its own round fed prefill tokens too
    own: int  # its own round only decoded
    eager: int = 0
    decodes: float | None = None
    usual_decodes: float | None = None


def gap_causes(run: Run, gaps: pl.DataFrame) -> GapCauses | None:
    """Of the longest LONGEST of the gaps, those much longer than the median. None where there are none."""
    rounds = round_causes(run)
    if not gaps.height or not rounds.height:
        return None
    usual = float(gaps["itl"].median() or 0.0)  # type: ignore[arg-type]
    top = gaps.sort("itl", descending=True, maintain_order=True).head(max(math.ceil(gaps.height * LONGEST), 1))
    top = top.filter(pl.col("itl") > MUCH_LONGER * usual)
    if not top.height:
        return None
    numbers, ends = rounds["round"].to_numpy(), rounds["t_end_s"].to_numpy()
    last = np.searchsorted(numbers, top["round"].to_numpy())
    begin = (top["t_s"] - top["itl"]).to_numpy()
    first = np.minimum(np.searchsorted(ends, begin + 1e-9, side="right"), last)

    def within(values: pl.Expr, until: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Σ over the rounds first .. until - 1 of each gap."""
        total = np.concatenate([[0.0], np.cumsum(rounds.select(values.cast(pl.Float64)).to_series().to_numpy())])
        out: npt.NDArray[np.float64] = total[until] - total[first]
        return out

    own_s = pl.col("own_s")
    all_of_it, before = within(own_s, last + 1), within(own_s, last)
    # Device time of a round without a graph can begin in the round before, so no more than the round's own time counts.
    device = within(pl.min_horizontal(pl.col("device_s").fill_null(0.0), own_s), last + 1)
    host = within(pl.min_horizontal("host_s", own_s), last + 1)
    known = within((pl.col("cause") == "unknown").cast(pl.Float64), last + 1) == 0
    idle_device = known & (device < HALF * all_of_it)
    preempted = _preempted(run, rounds, top, first, last)
    neither = ~preempted & idle_device & (host < HALF * all_of_it)
    of_launch, of_hiccup = (within(own_s * (pl.col("cause") == cause), last + 1) for cause in ("launch", "hiccup"))
    launch = neither & (of_launch > of_hiccup)
    hiccup = neither & ~launch
    by_host = ~preempted & idle_device & ~neither
    rest = ~preempted & ~idle_device
    passed = rest & (last > first) & (before >= HALF * all_of_it - 1e-9)
    fed = within(pl.col("prefill_tokens"), last) > 0
    alone = rest & ~passed
    shared = alone & (rounds["prefill_tokens"].to_numpy()[last] > 0)
    decoding = rounds.filter(pl.col("decode_tokens") > 0)["decode_tokens"]
    only = alone & ~shared
    graphs = bool((rounds["mode"] == "graph").any())
    eager = within(pl.when(pl.col("mode").eq_missing("eager")).then(own_s).otherwise(0.0), last + 1) > HALF * all_of_it
    return GapCauses(
        num_gaps=top.height,
        least_s=float(top["itl"][-1]),
        preempted=int(preempted.sum()),
        hiccup=int(hiccup.sum()),
        launch=int(launch.sum()),
        host=int(by_host.sum()),
        passed_by_prefill=int((passed & fed).sum()),
        passed_by=int((passed & ~fed).sum()),
        shared=int(shared.sum()),
        own=int(only.sum()),
        eager=int(eager.sum()) if graphs else 0,
        decodes=float(rounds["decode_tokens"].to_numpy()[last[only]].mean()) if only.any() else None,
        usual_decodes=float(decoding.to_numpy().mean()) if decoding.len() else None,
    )


def _preempted(
    run: Run, rounds: pl.DataFrame, top: pl.DataFrame, first: npt.NDArray[np.int64], last: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Whether the request of each gap lost its blocks inside it."""
    if not run.has("decisions"):
        return np.zeros(top.height, dtype=np.bool_)
    lost = run.scan("decisions").filter(pl.col("kind") == "preempt").select("request", "round").collect()
    size = rounds.height + 1
    keys = np.sort(lost["request"].to_numpy() * size + np.searchsorted(rounds["round"].to_numpy(), lost["round"].to_numpy()))  # fmt: skip
    mine = top["request"].to_numpy() * size
    out: npt.NDArray[np.bool_] = np.searchsorted(keys, mine + last, side="right") > np.searchsorted(
        keys, mine + first, side="left"
    )
    return out


def causes_text(found: GapCauses, under: str, unit: Unit) -> str:
    """In the order of their number; of one gap without a number. `under`: the run's name and a colon, where there are several."""
    many = found.num_gaps != 1
    large = found.decodes is not None and found.usual_decodes is not None and found.decodes > 1.1 * found.usual_decodes
    size = (
        f" ({found.decodes:,.0f} a round on average, against {found.usual_decodes:,.0f} in all that decode)"
        if large
        else ""
    )
    words = (
        (found.passed_by_prefill, "waited through rounds that prefilled others", "waited through rounds that prefilled others"),
        (found.passed_by, "waited through other rounds that did not compute them", "waited through other rounds that did not compute it"),
        (found.shared, "shared their round with prefill tokens", "shared its round with prefill tokens"),
        (found.preempted, "lost their blocks to a preemption", "lost its blocks to a preemption"),
        (found.host, "waited for the host, the device idle for more than half of them", "waited for the host, the device idle for more than half of it"),
        (found.launch, "waited for the launch of the next round, which has no CUDA graph", "waited for the launch of the next round, which has no CUDA graph"),
        (found.hiccup, "are hiccups of the machine: neither the device nor recorded host work took half of them", "met a hiccup of the machine: neither the device nor recorded host work took half of it"),
        (found.own, f"are rounds of decodes alone{size}", f"was in a round of decodes alone{size}"),
    )  # fmt: skip
    told = sorted((entry for entry in words if entry[0]), key=lambda entry: -entry[0])
    graph = "" if not found.eager else "all" if found.eager == found.num_gaps else f"{found.eager:,}"
    if not many:
        eager = ", without a CUDA graph (eager)" if graph else ""
        return f"{under}{'one' if under else 'One'} gap is much longer than the median, {unit.said(found.least_s * 1000)}: its request {told[0][2]}{eager}."
    parts = [f"{'all' if count == found.num_gaps else f'{count:,}'} {text}" for count, text, _ in told]
    eager = f"; {graph} of them lay mostly in rounds without a CUDA graph (eager)" if graph else ""
    return f"{under}{'of' if under else 'Of'} the {found.num_gaps:,} longest gaps (within the longest {LONGEST:.0%}, {unit.said(found.least_s * 1000)} and more) {', '.join(parts)}{eager}."
