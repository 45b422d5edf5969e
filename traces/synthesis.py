"""Makes traces by seed: a shape of lengths and sharing, a process of arrivals, priorities. A request at a time, any number of them.

Each purpose has a generator of its own, so that more requests, another rate or priorities leave the other draws as they were.
"""

from __future__ import annotations

import bisect
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from traces.arrival_process import ArrivalProcess
from traces.errors import BenchctlError
from traces.quantiles import Table, draw_pair
from traces.request import Carry, Segment
from traces.rows import Row, canonical_line
from traces.shapes import Shape
from traces.writing import BodyWriter

ANSWER_S_PER_TOKEN = 0.02  # stands in for the answer's time in the arrival of a later turn


@dataclass(frozen=True, slots=True)
class SynthOptions:
    """`num_requests` and `duration_s`: whichever is reached first. `priorities`: (priority, weight). Scales multiply tokens."""

    num_requests: int = 1000
    duration_s: float | None = None
    seed: int = 0
    input_scale: float = 1.0
    output_scale: float = 1.0
    think_scale: float = 1.0
    max_context: int | None = None
    priorities: tuple[tuple[int, float], ...] = ()
    name: str | None = None


@dataclass(frozen=True, slots=True)
class PrefixGroups:
    """Groups of prompts behind one prefix each: vLLM's prefix_repetition and SGLang's generated-shared-prefix.

    `zipf`: the group of each prompt is drawn, with this exponent; None: every group has `per_group` prompts, shuffled.
    """

    num_groups: int = 10
    per_group: int = 10
    prefix_len: int = 256
    suffix_len: int = 256
    output_len: int = 128
    range_ratio: float = 0.0  # lengths of suffix and output uniform in [(1 - ratio) x, (1 + ratio) x]
    zipf: float | None = None

    def check(self) -> None:
        """Raises BenchctlError."""
        counts = {
            "--num-groups": self.num_groups,
            "--per-group": self.per_group,
            "--suffix-len": self.suffix_len,
            "--output-len": self.output_len,
        }
        for flag, value in counts.items():
            if value < 1:
                raise BenchctlError(f"{flag} is {value}", fix="give 1 or more")
        if self.prefix_len < 0 or not 0 <= self.range_ratio < 1:
            raise BenchctlError(
                "--prefix-len must not be negative, --range-ratio lies from 0 up to 1", fix="mend the flag"
            )


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Prompts as paths from a tree's root to a leaf: every node is a shared piece, the question at the end is unique."""

    depth: int = 3
    branches: int = 4
    node_len: int = 256
    suffix_len: int = 128
    output_len: int = 128
    zipf: float = 1.0  # how unequal the branches of a node are; 0: equal

    def check(self) -> None:
        """Raises BenchctlError."""
        for flag in ("depth", "branches", "node_len", "suffix_len", "output_len"):
            if getattr(self, flag) < 1:
                raise BenchctlError(f"--{flag.replace('_', '-')} is {getattr(self, flag)}", fix="give 1 or more")


@dataclass(slots=True)
class SynthReport:
    out: str
    num_requests: int = 0
    num_sessions: int = 0
    span_s: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    header: dict[str, Any] = field(default_factory=dict)


Group = list[tuple[float, Row]]  # the requests of one start: (arrival, row), first to last


def synthesize(
    kind: Shape | PrefixGroups | PrefixTree, process: ArrivalProcess, options: SynthOptions, out: Path
) -> SynthReport:
    """Write the trace. Raises BenchctlError."""
    process.check()
    if options.num_requests < 1:
        raise BenchctlError(f"--num-requests is {options.num_requests}", fix="give 1 or more")
    streams = Streams(options.seed)
    if isinstance(kind, Shape):
        groups = _shape_groups(kind, options, streams)
    else:
        kind.check()
        groups = (
            _prefix_groups(kind, options, streams)
            if isinstance(kind, PrefixGroups)
            else _tree_groups(kind, options, streams)
        )
    report = SynthReport(str(out))
    priority = _Priorities(options.priorities, streams.priorities)
    with BodyWriter(out) as body:
        last = 0.0
        ordered = True
        for start, group in zip(process.times(streams.arrivals), groups, strict=False):
            if options.duration_s is not None and start >= options.duration_s:
                break
            report.num_sessions += group[0][1].session is not None
            for offset, row in group[: options.num_requests - report.num_requests]:
                arrival = round(start + offset, 6)
                if options.duration_s is not None and arrival >= options.duration_s:
                    break
                row.arrival_s = arrival
                row.priority = priority.draw()
                body.write(canonical_line(row))
                ordered = ordered and arrival >= last
                last = arrival
                _sum(report, row)
            if report.num_requests >= options.num_requests:
                break
        if not report.num_requests:
            raise BenchctlError(
                "no request fits into the duration", where="--duration", fix="a longer one, or a higher --rate"
            )
        if not ordered:
            body.sort()
        report.header = _header(kind, process, options)
        body.finish(report.header)
    return report


def _sum(report: SynthReport, row: Row) -> None:
    report.num_requests += 1
    report.span_s = max(report.span_s, row.arrival_s or 0.0)
    report.input_tokens += row.input_length or 0
    report.output_tokens += row.output_length or 0


class Streams:
    """One generator for each purpose, from one seed. Mutable; one trace."""

    def __init__(self, seed: int) -> None:
        def stream(purpose: str) -> random.Random:
            return random.Random(f"{seed} {purpose}")

        self.arrivals, self.lengths, self.turns = stream("arrivals"), stream("lengths"), stream("turns")
        self.think, self.sharing, self.priorities = stream("think"), stream("sharing"), stream("priorities")


class _Priorities:
    def __init__(self, weighted: tuple[tuple[int, float], ...], rng: random.Random) -> None:
        self._values = [value for value, _ in weighted]
        self._upto = list(accumulate(weight for _, weight in weighted))
        self._rng = rng

    def draw(self) -> int | None:
        if not self._values:
            return None
        place = bisect.bisect_right(self._upto, self._rng.random() * self._upto[-1])
        return self._values[min(place, len(self._values) - 1)] or None


class Zipf:
    """Ranks from 0 with weight 1 / (rank + 1) ** exponent."""

    def __init__(self, count: int, exponent: float) -> None:
        self._upto = list(accumulate((rank + 1) ** -exponent for rank in range(count)))

    def draw(self, rng: random.Random) -> int:
        return min(bisect.bisect_right(self._upto, rng.random() * self._upto[-1]), len(self._upto) - 1)


def _shape_groups(shape: Shape, options: SynthOptions, streams: Streams) -> Iterator[Group]:
    longest = options.max_context or shape.max_context
    prompts = _Prompts(shape, streams)
    number = 0
    refused = 0
    while True:
        turns = 1 if shape.turns is None else max(int(shape.turns.draw(streams.turns)), 1)
        group = _conversation(shape, options, streams, prompts, number, turns, longest)
        if not group:
            refused += 1
            if refused > 10_000:
                raise BenchctlError(
                    f"10,000 draws in a row did not fit into {longest} tokens",
                    where="--max-context",
                    fix="a longer context",
                )
            continue
        refused = 0
        number += 1
        yield group


def _conversation(
    shape: Shape,
    options: SynthOptions,
    streams: Streams,
    prompts: _Prompts,
    number: int,
    turns: int,
    longest: int | None,
) -> Group:
    group: Group = []
    context = 0
    at = 0.0
    for turn in range(1, turns + 1):
        table = shape.first if turn == 1 else shape.more
        assert table is not None, shape
        drawn = draw_pair(streams.lengths, table, shape.output, shape.correlation)
        new = max(round(int(drawn[0]) * options.input_scale), 1)
        output = max(round(int(drawn[1]) * options.output_scale), 1)
        pieces = prompts.draw() if turn == 1 else ()
        length = context + sum(piece.len for piece in pieces) + new
        if longest is not None and length + output > longest:
            break
        if shape.keep is not None and not _kept(shape.keep, length, output):
            break
        row = Row(input_length=length, output_length=output, segments=pieces or None)
        if shape.turns is not None:
            row.id, row.session, row.turn = f"c{number}-t{turn}", f"c{number}", turn
        if turn > 1:
            before = group[-1][1]
            assert shape.think is not None and before.id is not None and before.output_length is not None, shape
            row.think_s = max(round(shape.think.draw(streams.think) * options.think_scale, 3), 0.001)
            row.parents = (before.id,)
            row.carry = Carry(before.id, context)
            at += before.output_length * ANSWER_S_PER_TOKEN + row.think_s
        group.append((at, row))
        context = length + output
    return group


def _kept(keep: tuple[int, int, int, int], prompt: int, output: int) -> bool:
    least_prompt, least_output, longest_prompt, longest = keep
    return prompt >= least_prompt and output >= least_output and prompt <= longest_prompt and prompt + output <= longest


class _Prompts:
    """The shared pieces of a first prompt: a system prompt, then passages by popularity."""

    def __init__(self, shape: Shape, streams: Streams) -> None:
        self._shape = shape
        self._rng = streams.sharing
        self._upto = list(accumulate(weight for _, weight in shape.shared))
        self._zipf = Zipf(shape.pool[0], shape.pool[1]) if shape.pool else None

    def draw(self) -> tuple[Segment, ...]:
        shape, pieces = self._shape, []
        if shape.shared:
            place = min(bisect.bisect_right(self._upto, self._rng.random() * self._upto[-1]), len(shape.shared) - 1)
            pieces.append(Segment(f"system-{place}", shape.shared[place][0]))
        if shape.pool and shape.num_passages and self._zipf:
            for _ in range(int(shape.num_passages.draw(self._rng))):
                passage = self._zipf.draw(self._rng)
                # A passage has one length wherever it stands: its own generator draws it.
                length = int(shape.pool[2].draw(random.Random(f"passage {passage}")))
                pieces.append(Segment(f"passage-{passage}", max(length, 1)))
        return tuple(pieces)


def _prefix_groups(kind: PrefixGroups, options: SynthOptions, streams: Streams) -> Iterator[Group]:
    def length(whole: int) -> int:
        low, high = round(whole * (1 - kind.range_ratio)), round(whole * (1 + kind.range_ratio))
        return max(low + int(streams.lengths.random() * (high - low + 1)), 1)

    if kind.zipf is None:
        order = [group for group in range(kind.num_groups) for _ in range(kind.per_group)]
        _shuffle(order, streams.sharing)
    else:
        zipf = Zipf(kind.num_groups, kind.zipf)
        order = [zipf.draw(streams.sharing) for _ in range(kind.num_groups * kind.per_group)]
    for group in order:
        suffix, output = length(kind.suffix_len), length(kind.output_len)
        row = Row(input_length=kind.prefix_len + suffix, output_length=output)
        if kind.prefix_len:
            row.segments = (Segment(f"group-{group}", kind.prefix_len),)
        yield [(0.0, row)]


def _shuffle(items: list[int], rng: random.Random) -> None:
    """Fisher and Yates by rng.random() alone, whose sequence Python guarantees."""
    for i in range(len(items) - 1, 0, -1):
        j = int(rng.random() * (i + 1))
        items[i], items[j] = items[j], items[i]


def _tree_groups(kind: PrefixTree, options: SynthOptions, streams: Streams) -> Iterator[Group]:
    zipf = Zipf(kind.branches, kind.zipf)
    while True:
        path = "root"
        pieces = [Segment(path, kind.node_len)]
        for _ in range(kind.depth - 1):
            path = f"{path}.{zipf.draw(streams.sharing)}"
            pieces.append(Segment(path, kind.node_len))
        length = kind.depth * kind.node_len + kind.suffix_len
        yield [(0.0, Row(input_length=length, output_length=kind.output_len, segments=tuple(pieces)))]


def _header(kind: Shape | PrefixGroups | PrefixTree, process: ArrivalProcess, options: SynthOptions) -> dict[str, Any]:
    name = options.name or (
        kind.name if isinstance(kind, Shape) else "prefix-tree" if isinstance(kind, PrefixTree) else "prefix-groups"
    )
    notes: dict[str, Any] = {"synthesized": "every row", "seed": options.seed, "arrivals": process.statement()}
    if isinstance(kind, Shape):
        source = f"synthetic: {kind.about}; after the statistics of {kind.source}"
        notes["lengths"] = {"first_prompt": _points(kind.first), "output": _points(kind.output)}
        if kind.more is not None and kind.turns is not None and kind.think is not None:
            notes["lengths"] |= {
                "later_prompts": _points(kind.more),
                "turns": _points(kind.turns),
                "think_s": _points(kind.think),
            }
            notes["later_turns"] = (
                f"think_s after the parent, whose answer takes {ANSWER_S_PER_TOKEN:g} s a token in arrival_s"
            )
        if kind.correlation:
            notes["rank_correlation"] = kind.correlation
        if kind.keep:
            notes["kept"] = "prompt >= {}, output >= {}, prompt <= {}, both <= {} tokens".format(*kind.keep)
        if kind.shared:
            notes["system_prompts"] = [{"tokens": tokens, "weight": weight} for tokens, weight in kind.shared]
        if kind.pool:
            notes["passages"] = {"pool": kind.pool[0], "zipf": kind.pool[1], "tokens": _points(kind.pool[2])}
        for scale in ("input_scale", "output_scale", "think_scale"):
            if getattr(options, scale) != 1:
                notes[scale] = getattr(options, scale)
        if options.max_context or kind.max_context:
            notes["max_context"] = options.max_context or kind.max_context
    else:
        source = (
            "synthetic: paths of a tree of shared prefixes"
            if isinstance(kind, PrefixTree)
            else "synthetic: groups of prompts behind one prefix each"
        )
        notes["parameters"] = {key: getattr(kind, key) for key in kind.__dataclass_fields__}
    if options.priorities:
        notes["priorities"] = {str(value): weight for value, weight in options.priorities}
    return {"name": name, "source": source, "salt": f"{name} {options.seed}", "on_import": notes}


def _points(table: Table) -> list[list[float]]:
    return [[percent, round(value, 6)] for percent, value in table.points]


def with_arrivals(process: ArrivalProcess, **changes: Any) -> ArrivalProcess:
    """The process with the given fields in place of its own; None: as it was."""
    return replace(process, **{key: value for key, value in changes.items() if value is not None})
