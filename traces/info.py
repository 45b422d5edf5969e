"""What a trace is like: arrivals, lengths, sessions, and what a prefix cache could save, from one reading of its rows.

Knows rows, no engine. Memory: 32 bytes a request for the statistics, about 100 bytes a distinct block for the cache's bound.
Definitions: docs/traces.md, "What `trace info` says".
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from traces.load import Trace
from traces.prefix_curve import PrefixUse, measure_prefix_use
from traces.request import Request
from traces.scan import TICKS

QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
CONTEXT_QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999, 1.0)
MANY = 100  # rows, below which a share is no evidence

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Warning:
    """Something the user should know of: what, the numbers that show it, and what changes it."""

    what: str
    evidence: str
    cure: str


@dataclass(slots=True)
class TraceInfo:
    """The whole of `trace info`; lengths in tokens, times in seconds, None: not in the trace."""

    name: str
    path: str
    sha256: str
    num_requests: int
    num_text: int  # rows whose prompt only a tokenizer can count
    num_sessions: int
    span_s: float
    arrivals: dict[str, Any]
    lengths: dict[str, dict[str, float]]
    spikes: list[dict[str, Any]]
    context: dict[str, int]  # quantile → input + output
    sessions: dict[str, Any]
    prefix: PrefixUse | None
    shapes: dict[str, int]
    header: dict[str, Any]
    warnings: list[Warning] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    series: Series | None = None


@dataclass(slots=True)
class Series:
    """The values themselves, for drawing. Not part of the JSON."""

    arrivals: Floats  # sorted
    inputs: Floats
    outputs: Floats
    thinks: Floats
    turns: Floats  # of each session


def describe(trace: Trace, *, block_size: int = 16, max_model_len: int | None = None) -> TraceInfo:
    """Read the rows once for the statistics, once more for the cache. Raises BenchctlError."""
    times, inputs, outputs, thinks = array("d"), array("d"), array("d"), array("d")
    turns: Counter[str] = Counter()
    shapes: Counter[str] = Counter()
    num_text = num_followed = 0
    for request in trace.requests():
        if request.arrival_s is not None:
            times.append(request.arrival_s)
        length = prompt_length(request)
        num_text += length is None
        inputs.append(math.nan if length is None else length)
        outputs.append(request.output_length or 0)
        if request.think_s is not None:
            thinks.append(request.think_s)
        if request.session is not None:
            turns[request.session] += 1
        num_followed += bool(request.parents)
        shapes[shape_of(request)] += 1
    series = Series(_array(times), _array(inputs), _array(outputs), _array(thinks), _array(turns.values()))
    known = series.inputs[~np.isnan(series.inputs)]
    context = (series.inputs + series.outputs)[~np.isnan(series.inputs)]
    lengths = {"output": quantiles(series.outputs)}
    if len(known):
        lengths = {"input": quantiles(known), **lengths}
    spikes = [] if not len(known) else find_spikes("input", known)
    spikes += find_spikes("output", series.outputs)
    info = TraceInfo(
        name=trace.name,
        path=str(trace.path),
        sha256=trace.sha256,
        num_requests=trace.num_requests,
        num_text=num_text,
        num_sessions=trace.num_sessions,
        span_s=trace.span_s,
        arrivals=arrival_statistics(series.arrivals),
        lengths=lengths,
        spikes=spikes,
        context={f"{q:g}": int(np.quantile(context, q, method="higher")) for q in CONTEXT_QUANTILES}
        if len(context)
        else {},
        sessions=_sessions(series, num_followed),
        prefix=measure_prefix_use(trace, block_size, shapes),
        shapes=dict(shapes),
        header={key: value for key, value in _header(trace).items() if value},
        notes=[note for note in trace.notes if not note.endswith(TICKS)],  # a warning here, with its cure
        series=series,
    )
    info.warnings = _warnings(info, context, max_model_len)
    return info


def prompt_length(request: Request) -> int | None:
    """Tokens of the prompt; None for text."""
    return len(request.prompt_token_ids) if request.prompt_token_ids is not None else request.input_length


def shape_of(request: Request) -> str:
    """How the row gives its prompt."""
    for key in ("prompt_token_ids", "prompt", "messages", "hash_ids", "segments", "carry"):
        if getattr(request, key) is not None:
            return key
    return "unique"


def quantiles(values: Floats) -> dict[str, float]:
    """Mean, quantiles (an observed value each, the next higher one) and the moments of log length."""
    logs = np.log(np.maximum(values, 1))
    out = {"sum": float(values.sum()), "mean": float(values.mean())}
    out |= {f"p{100 * q:g}": float(np.quantile(values, q, method="higher")) for q in QUANTILES}
    return {**out, "ln_mu": float(logs.mean()), "ln_sigma": float(logs.std())}


def arrival_statistics(times: Floats) -> dict[str, Any]:
    """Of sorted arrivals: rate, variation of the gaps, ties, peaks; {} without times.

    `rate` = gaps / span. `cv` = standard deviation / mean of the gaps (population). `idc60` = variance / mean of counts in whole minutes.
    """
    if not len(times):
        return {}
    gaps = np.diff(times)
    span = float(times[-1] - times[0])
    out: dict[str, Any] = {"first_s": float(times[0]), "timed": len(times)}
    if not len(gaps) or span <= 0:
        return {**out, "zero_gaps": int((gaps == 0).sum()), "zero_share": 1.0 if len(gaps) else None}
    since = times - times[0]
    # A window's end takes no part; float noise must not put a whole second into the one before.
    ends = np.searchsorted(since, since + 1.0 - 1e-9, side="left")
    minutes = np.bincount((since // 60).astype(np.int64)) if span < 1e8 else np.zeros(0)
    whole = minutes[: int(span // 60)]
    positive = gaps[gaps > 0]
    return {
        **out,
        "rate": len(gaps) / span,
        "cv": float(gaps.std() / gaps.mean()),
        "zero_gaps": int((gaps == 0).sum()),
        "zero_share": float((gaps == 0).mean()),
        "smallest_gap_s": float(positive.min()) if len(positive) else None,
        "longest_gap_s": float(gaps.max()),
        "gap_p50_s": float(np.median(gaps)),
        "peak_in_1_s": int((ends - np.arange(len(times))).max()),
        "peak_minute": int(minutes.max()) if len(minutes) else None,
        "idc60": float(whole.var() / whole.mean()) if len(whole) > 1 and whole.mean() > 0 else None,
    }


def find_spikes(side: str, values: Floats) -> list[dict[str, Any]]:
    """Single lengths that more than 2 % of the rows have and no neighbour comes near: caps, and answers of one word."""
    if len(values) < MANY:
        return []
    lengths, counts = np.unique(values, return_counts=True)
    typical = float(np.median(counts))
    order = np.argsort(-counts)[:3]
    return [
        {"side": side, "length": int(lengths[i]), "count": int(counts[i]), "share": float(counts[i] / len(values)), "largest": bool(i == len(lengths) - 1)}
        for i in order
        if counts[i] > 0.02 * len(values) and counts[i] > 10 * typical
    ]  # fmt: skip


def _sessions(series: Series, num_followed: int) -> dict[str, Any]:
    if not len(series.turns):
        return {}
    out: dict[str, Any] = {
        "turns_mean": float(series.turns.mean()),
        **{f"turns_p{q}": int(np.quantile(series.turns, q / 100, method="higher")) for q in (50, 90, 99, 100)},
        "single_turn_share": float((series.turns == 1).mean()),
        "rows_with_parents": num_followed,
    }
    if len(series.thinks):
        positive = np.log(series.thinks[series.thinks > 0])
        out["think_s"] = {f"p{q}": float(np.quantile(series.thinks, q / 100)) for q in (10, 50, 90, 99)}
        out["think_s"]["mean"] = float(series.thinks.mean())
        if len(positive):
            out["think_s"] |= {"ln_mu": float(positive.mean()), "ln_sigma": float(positive.std())}
    return out


def _header(trace: Trace) -> dict[str, Any]:
    head = trace.header
    keys = (
        "licence",
        "source",
        "limits",
        "block_size",
        "hash_kind",
        "hash_scope",
        "time_origin",
        "length_tokenizer",
        "on_import",
    )
    return {key: getattr(head, key) for key in keys}


def _warnings(info: TraceInfo, context: Floats, max_model_len: int | None) -> list[Warning]:
    out: list[Warning] = []
    arrivals = info.arrivals
    if not arrivals:
        out.append(
            Warning("no arrival times", "no row has arrival_s", "replay with --request-rate R, or --arrivals session")
        )
    elif arrivals["timed"] < info.num_requests:
        late = info.num_requests - arrivals["timed"]
        out.append(
            Warning(
                "rows without a time",
                f"{late} of {info.num_requests}",
                "replay with --arrivals session, or --request-rate R",
            )
        )
    share = arrivals.get("zero_share")
    if share == 1.0 and info.num_requests > 1:
        out.append(Warning("a batch", "all arrivals are equal", "replay with --request-rate R to spread it out"))
    elif share is not None and share > 0.5 and info.num_requests > MANY:
        tick = f", the smallest other gap is {arrivals['smallest_gap_s']:g} s"
        out.append(
            Warning(
                "the clock ticks: its batches read as bursts, and the CV is not the service's",
                f"{arrivals['zero_gaps']} of {arrivals['timed'] - 1} gaps are zero{tick}",
                "import again with --spread uniform, or replay with --request-rate",
            )
        )
    rate = arrivals.get("rate")
    if rate is not None and arrivals["timed"] >= 10 and not 1 / 3600 <= rate <= 1000:
        out.append(
            Warning("an unlikely rate", f"{rate:.3g} requests/s", "import again with --time-unit if the unit is wrong")
        )
    if info.num_text:
        out.append(
            Warning(
                "prompts as text",
                f"{info.num_text} of {info.num_requests} rows",
                "replay with a model folder that has a tokenizer",
            )
        )
    for spike in info.spikes:
        if spike["largest"] or spike["share"] > 0.2:
            what = f"{spike['side']} of {spike['length']} tokens: a cap of the source, or a fixed length"
            evidence = (
                f"{spike['count']} rows, {100 * spike['share']:.1f} %, and none longer"
                if spike["largest"]
                else f"{spike['count']} rows"
            )
            out.append(Warning(what, evidence, "longer requests may be missing or cut: say so beside results"))
    if max_model_len is not None and len(context):
        prompts = info.series.inputs[~np.isnan(info.series.inputs)] if info.series is not None else context
        over = int((prompts >= max_model_len).sum())
        cut = int((context > max_model_len).sum()) - over
        if over or cut:
            out.append(
                Warning(
                    f"longer than --max-model-len {max_model_len}",
                    f"{over} prompts, the largest of {int(prompts.max())} tokens; {cut} more outputs would end early",
                    "replay with --over-length skip or truncate, or trace slice --max-model-len",
                )
            )
    return out


def _array(values: Any) -> Floats:
    return np.array(list(values) if not isinstance(values, array) else values, dtype=np.float64)
