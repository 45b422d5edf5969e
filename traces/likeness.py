"""The shape of a trace of the user's own: its quantiles as tables, so that a made trace can stand in for one that may not be given away.

Takes lengths, gaps, turns and think times; no ids, no texts, no order of events. What later turns carry is taken for the whole conversation.
"""

from __future__ import annotations

import numpy as np

from traces.arrival_process import ArrivalProcess
from traces.errors import BenchctlError
from traces.load import Trace
from traces.quantiles import Table, fit, table
from traces.shapes import Shape


def shape_like(trace: Trace) -> Shape:
    """Raises BenchctlError where lengths or times are missing."""
    firsts: list[float] = []
    more: list[float] = []
    outputs: list[float] = []
    pairs: list[tuple[float, float]] = []
    starts: list[float] = []
    thinks: list[float] = []
    said: dict[str, tuple[int, int]] = {}  # session → its turns so far, prompt + output of the last
    for request in trace.requests():
        length = len(request.prompt_token_ids) if request.prompt_token_ids is not None else request.input_length
        if length is None or request.output_length is None:
            raise BenchctlError(
                f'"{request.id}" is text, whose length is not known',
                where=f"{trace.path}, line {request.line}",
                fix="import it with --no-text",
            )
        turns, before = said.get(request.session, (0, 0)) if request.session is not None else (0, 0)
        outputs.append(request.output_length)
        if turns:
            more.append(max(length - before, 1))
            if request.think_s is not None:
                thinks.append(request.think_s)
        else:
            firsts.append(length)
            pairs.append((length, request.output_length))
            if request.arrival_s is not None:
                starts.append(request.arrival_s)
        if request.session is not None:
            said[request.session] = (turns + 1, length + request.output_length)
    gaps = np.diff(np.array(starts))
    if len(gaps) < 1 or gaps.sum() <= 0:
        raise BenchctlError(
            "the trace has no arrivals to learn from", where=str(trace.path), fix="give its rows arrival_s"
        )
    counts = [turns for turns, _ in said.values()]
    many = max(counts, default=1) > 1
    return Shape(
        name=f"{trace.name}-like",
        about=f"the lengths, gaps and turns of {trace.name}",
        source=f"{trace.name}, sha256 {trace.sha256[:16]}",
        first=fit(firsts),
        output=fit(outputs),
        more=fit(more) if many and more else None,
        turns=fit([count + 0.5 for count in counts]) if many and more else None,
        think=(fit(thinks) if thinks else table((0, 0.001), (100, 0.001))) if many and more else None,
        correlation=_spearman(pairs),
        arrivals=ArrivalProcess(len(gaps) / float(gaps.sum()), gap="empirical", gaps=_gap_table(gaps)),
    )


def _gap_table(gaps: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Table:
    return fit(gaps.tolist())


def _spearman(pairs: list[tuple[float, float]]) -> float:
    """Rank correlation, ties at their mean rank; 0 where it cannot be told."""
    if len(pairs) < 10:
        return 0.0
    x, y = (_ranks(np.array(side)) for side in zip(*pairs, strict=True))
    if x.std() == 0 or y.std() == 0:
        return 0.0
    return round(float(np.clip(np.corrcoef(x, y)[0, 1], -0.99, 0.99)), 3)


def _ranks(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means: np.ndarray[tuple[int], np.dtype[np.float64]] = (ends - (counts - 1) / 2)[inverse]
    return means
