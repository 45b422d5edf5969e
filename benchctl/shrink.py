"""Make a trace small while a predicate still holds: fewer requests, shorter ones, simpler arrivals.

Delta debugging (ddmin: Zeller and Hildebrandt, 2002) over requests, groups that belong together first, then searches over lengths
and times. Knows rows of a trace and an oracle that says whether a list of rows still shows the thing; knows no scheduler.
Deterministic: the same rows and the same oracle give the same result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import xxhash

from benchctl.shrink_rows import (
    ARRIVAL_KEYS,
    DROPPABLE,
    Row,
    Rows,
    arrival_of,
    families,
    length_keys,
    length_of,
    repaired,
    sort_key,
    with_length,
)

LINKS = ("session", "turn", "parents", "think_s", "carry", "segments", "hash_ids")

ENOUGH = 3  # requests
FEW, HANDFUL = 4, 10  # requests, up to which lengths are searched to the token, to a sixteenth

Say = Callable[[str], None]


class OutOfTime(Exception):
    """The time for shrinking is up; what was found so far stands."""


@dataclass(slots=True)
class Oracle:
    """Asks whether rows still show the thing, remembers answers, counts. Mutable; owned by one shrink."""

    holds: Callable[[Rows], bool]
    given: Rows
    deadline: float  # of time.monotonic()
    near: int  # place in `given` of the request at which it happens
    fewer_than: int = 0  # requests: so many are known to do already
    asked: int = 0
    best: Rows = field(default_factory=list)  # the smallest rows that held so far
    _known: dict[str, bool] = field(default_factory=dict)

    def know(self, rows: Rows) -> None:
        """These rows are known to hold."""
        self._known[_key(rows)] = True
        self.best = rows

    def __call__(self, rows: Rows) -> bool:
        if not rows:
            return False
        key = _key(rows)
        if key not in self._known:
            if time.monotonic() > self.deadline:
                raise OutOfTime
            self.asked += 1
            self._known[key] = self.holds(rows)
        if self._known[key]:
            self.best = rows
        return self._known[key]


def _key(rows: Rows) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(rows))


@dataclass(frozen=True, slots=True)
class Shrunk:
    """`steps`: (stage, requests, total prompt tokens, total output tokens) after each stage. `complete`: not cut short by time."""

    rows: Rows
    steps: tuple[tuple[str, int, int, int], ...]
    asked: int
    seconds: float
    complete: bool


def shrink(
    rows: Rows,
    holds: Callable[[Rows], bool],
    *,
    limit_s: float = 120.0,
    say: Say = lambda text: None,
    near: int | None = None,
) -> Shrunk:
    """The smallest rows found for which `holds` is true. `rows` are known to hold; each stage keeps what the last one found.

    `near`: the place in `rows` of a request at which it is known to happen; a small part of the trace around it is tried first.
    """
    began = time.monotonic()
    rows = repaired(rows)
    oracle = Oracle(holds, rows, began, len(rows) - 1 if near is None else near, fewer_than=len(rows) + 1)
    steps: list[tuple[str, int, int, int]] = []

    def done(stage: str) -> None:
        spent = f"({oracle.asked:,} replays, {time.monotonic() - began:.1f} s)"
        if len(oracle.best) >= oracle.fewer_than:
            say(f"{stage}: no fewer {spent}")
            return
        prompt, output = (sum(length_of(row, which) for row in oracle.best) for which in ("prompt", "output"))
        steps.append((stage, len(oracle.best), prompt, output))
        say(f"{stage}: {len(oracle.best):,} requests, {prompt:,} + {output:,} tokens {spent}")

    oracle.know(rows)
    done("given")
    complete = True
    found: list[Rows] = []
    for way, share, stages in WAYS:
        # So few leave little to gain from another way.
        if found and len(found[0]) <= ENOUGH:
            break
        oracle.best, oracle.deadline = rows, began + limit_s * share
        oracle.fewer_than = len(found[0]) if found else oracle.fewer_than
        try:
            for stage, apply in stages:
                # A way that leads to no smaller start is not gone further.
                if apply not in STARTS and len(oracle.best) >= oracle.fewer_than:
                    break
                apply(oracle)
                done(f"{way}: {stage}")
        except OutOfTime:
            complete = False
            done(f"{way}: time is up")
        found.append(oracle.best)
    oracle.best, oracle.deadline = min(found, key=lambda each: (len(each), _tokens(each))), began + limit_s
    oracle.fewer_than = len(rows) + 1
    try:
        for stage, apply in POLISH:
            apply(oracle)
            done(stage)
        # Shorter requests may leave others without a part in it, and so on: until nothing gives way any more.
        while True:
            before = len(oracle.best)
            single_requests(oracle)
            if len(oracle.best) == before:
                break
            lengths(oracle)
            arrivals(oracle)
            done("again")
    except OutOfTime:
        complete = False
        done("time is up")
    return Shrunk(oracle.best, tuple(steps), oracle.asked, time.monotonic() - began, complete)


def _tokens(rows: Rows) -> int:
    return sum(length_of(row, "prompt") + length_of(row, "output") for row in rows)


# -- which requests


def window(oracle: Oracle) -> None:
    """The shortest piece of the trace that ends with the request at which it happens, or lies around it: 1, 2, 4, … requests.

    From small to large, so that what is tried costs no more than twice what is found.
    """
    rows, at = oracle.best, oracle.near
    for reach in _doubled(len(rows)):
        # What a request goes through may need those that come after it, too.
        for end in dict.fromkeys((at + 1, min(at + 1 + reach, len(rows)))):
            if oracle(repaired(rows[max(0, at + 1 - reach) : end])):
                cut_ends(oracle)
                return


def _doubled(most: int) -> list[int]:
    """1, 2, 4, … below `most`."""
    return [1 << i for i in range(max(1, most - 1).bit_length()) if 1 << i < most]


def cut_ends(oracle: Oracle) -> None:
    """The shortest beginning of the trace that holds, then the shortest end of that, each by bisection."""
    for beginning in (True, False):
        rows = oracle.best
        low, high = 0, len(rows)  # high holds; the smallest that does lies in (low, high] if holding is monotone
        while high - low > 1:
            middle = (low + high) // 2
            if oracle(repaired(rows[:middle] if beginning else rows[len(rows) - middle :])):
                high = middle
            else:
                low = middle


def together(oracle: Oracle) -> None:
    """All at once: pressure that many requests build up over time, few can build up together."""
    rows, origin = oracle.best, _origin(oracle.best)
    for count in _doubled(oracle.fewer_than):
        begin = max(0, min(oracle.near + 1, len(rows)) - count)
        if oracle(repaired([_moved(row, origin) for row in rows[begin : begin + count]])):
            cut_ends(oracle)
            return


def closer(oracle: Oracle) -> None:
    """Smaller gaps between those that are left: fewer may do."""
    rows = oracle.best
    first, origin = min(arrival_of(row) for row in rows), _origin(rows)
    if all(arrival_of(row) == first for row in rows):
        return
    for scale in (0, 0.01, 0.1, 0.5):
        if oracle([_moved(row, origin + (arrival_of(row) - first) * scale) for row in rows]):
            cut_ends(oracle)
            return


def extremes(oracle: Oracle) -> None:
    """A few requests of one kind from the whole trace, all at once: the longest outputs, or prompts, or the shortest prompts.

    Where pressure is what it is about, a few such do what many did; and fewer of one kind are left than of a mixture.
    """
    rows, origin = oracle.given, _origin(oracle.given)
    orders: tuple[Callable[[Row], int], ...] = (
        lambda row: -length_of(row, "output"),
        lambda row: -length_of(row, "prompt"),
        lambda row: length_of(row, "prompt"),
    )
    for order in orders:
        places = sorted(range(len(rows)), key=lambda i: order(rows[i]))
        for links in ((), LINKS):  # turns of one conversation share blocks; apart they fill as many as strangers
            count = 1
            while count < min(len(oracle.best), oracle.fewer_than):
                chosen = [_moved(rows[i], origin) for i in sorted(places[:count])]
                if oracle(repaired([{k: v for k, v in row.items() if k not in links} for row in chosen])):
                    break
                count += max(1, count // 4)


def whole_groups(oracle: Oracle) -> None:
    """Sessions and requests of one prefix, kept whole."""
    _over(oracle, families(oracle.best, prefixes=True))


def whole_sessions(oracle: Oracle) -> None:
    _over(oracle, families(oracle.best, prefixes=False))


def single_requests(oracle: Oracle) -> None:
    """One by one. Whoever builds on a request that goes keeps its length and loses the link."""
    _over(oracle, [[i] for i in range(len(oracle.best))])


def _over(oracle: Oracle, groups: Sequence[list[int]]) -> None:
    if len(groups) < 2:
        return
    rows = oracle.best

    def kept(chosen: Sequence[list[int]]) -> Rows:
        return repaired([rows[i] for i in sorted(i for group in chosen for i in group)])

    ddmin(list(groups), lambda chosen: oracle(kept(chosen)))


def ddmin(units: list[list[int]], holds: Callable[[list[list[int]]], bool]) -> list[list[int]]:
    """A subset of `units` that holds and of which no single unit can go (1-minimal)."""
    parts = 2
    while len(units) >= 2:
        size = -(-len(units) // parts)
        chunks = [units[i : i + size] for i in range(0, len(units), size)]
        smaller = next((chunk for chunk in chunks if holds(chunk)), None)
        if smaller is not None:
            units, parts = smaller, 2
            continue
        rest = None
        if len(chunks) > 2:
            complements = ([u for c in chunks if c is not chunk for u in c] for chunk in chunks)
            rest = next((complement for complement in complements if holds(complement)), None)
        if rest is not None:
            units, parts = rest, max(parts - 1, 2)
        elif parts >= len(units):
            break
        else:
            parts = min(len(units), parts * 2)
    return units


# -- how long


def all_lengths(oracle: Oracle) -> None:
    """All outputs, then all prompts, divided by the same number."""
    for which in ("output", "prompt"):
        for divisor in (2**20, 64, 8, 2):
            while oracle(shorter := repaired([_divided(row, which, divisor) for row in oracle.best])):
                if shorter == repaired([_divided(row, which, divisor) for row in shorter]):
                    break


def lengths(oracle: Oracle) -> None:
    """Each as short as it may be: many at once that play no part, then one by one."""
    for which in ("output", "prompt"):
        _to_one(oracle, [i for i, row in enumerate(oracle.best) if length_of(row, which) > 1], which)
    for i in range(len(oracle.best)):
        for which in ("output", "prompt"):
            if length_of(oracle.best[i], which) > 1:
                _smallest(oracle, i, which)


def _to_one(oracle: Oracle, places: list[int], which: str) -> None:
    """Lengths of 1, of all the places or else of halves of them."""
    chosen = set(places)
    shorter = [with_length(row, which, 1) if i in chosen else row for i, row in enumerate(oracle.best)]
    if places and not oracle(repaired(shorter)) and len(places) > 1:
        half = len(places) // 2
        _to_one(oracle, places[:half], which)
        _to_one(oracle, places[half:], which)


def _divided(row: Row, which: str, divisor: int) -> Row:
    length = length_of(row, which)
    return with_length(row, which, max(1, length // divisor)) if length_keys(row, which) else row


def _smallest(oracle: Oracle, i: int, which: str) -> None:
    """By steps that halve: the smallest length above 1 that holds, where holding is monotone in it; roughly while there are many."""

    def at(length: int) -> bool:
        rows = list(oracle.best)
        rows[i] = with_length(rows[i], which, length)
        return oracle(repaired(rows))

    length, count = length_of(oracle.best[i], which), len(oracle.best)
    step, finest = length // 2, 1 if count <= FEW else max(1, length // (16 if count <= HANDFUL else 4))
    while step >= finest:
        if length - step >= 1 and at(length - step):
            length -= step
        else:
            step //= 2


# -- when


def arrivals(oracle: Oracle) -> None:
    """All at once if that will do; else each with the one before it, and what is left in round numbers from zero."""
    rows = oracle.best
    first, origin = min(arrival_of(row) for row in rows), _origin(rows)
    if first != origin:
        oracle([_moved(row, arrival_of(row) - first + origin) for row in rows])
    if oracle([_moved(row, origin) for row in oracle.best]):
        return
    for i in range(1, len(oracle.best)):
        rows = oracle.best
        gap = arrival_of(rows[i]) - arrival_of(rows[i - 1])
        if gap > 0:
            oracle([*rows[:i], *(_moved(row, arrival_of(row) - gap) for row in rows[i:])])
    for digits in (0, 1, 2, 3):
        if oracle(sorted((_moved(row, round(arrival_of(row), digits)) for row in oracle.best), key=sort_key)):
            return


def _origin(rows: Rows) -> float:
    return 1.0 if any("arrival_round" in row for row in rows) else 0.0


def _moved(row: Row, at: float) -> Row:
    key = next((key for key in ARRIVAL_KEYS if key in row), None)
    if key is None:
        return row
    if key == "arrival_round":
        return row | {key: max(1, round(at))}
    return row | {key: max(0.0, round(at, 9))}


def simpler(oracle: Oracle) -> None:
    """Keys that play no part go, from all rows at once."""
    for keys in DROPPABLE:
        if any(key in row for row in oracle.best for key in keys):
            oracle(repaired([{k: v for k, v in row.items() if k not in keys} for row in oracle.best]))


Stage = tuple[str, Callable[[Oracle], None]]
FEWER: tuple[Stage, ...] = (
    ("all lengths", all_lengths),
    ("sessions and prefixes", whole_groups),
    ("sessions", whole_sessions),
    ("requests", single_requests),
)
# Two ways that end in different places: the trace's own arrivals, and requests pressed together; with the share of the time
# after which each has to be done.
WAYS: tuple[tuple[str, float, tuple[Stage, ...]], ...] = (
    ("as it came", 0.5, (("window", window), ("ends", cut_ends), ("closer", closer), *FEWER)),
    ("together", 0.75, (("all at once", together), ("extremes", extremes), *FEWER)),
)
STARTS = (window, cut_ends, together, extremes)
# What then happens to the fewest requests found.
POLISH: tuple[Stage, ...] = (("lengths", lengths), ("arrivals", arrivals), ("keys", simpler))
