"""The language of `--where`: comparisons of a run's figures, joined by and, or, not; `differs(a, b)`, `raises`, `gate(FILE)`.

    preemptions > 5
    ttft_p99 > 200 and rounds_mixed == 0
    vllm.preemptions > nano.preemptions
    differs(nano, vllm)                     some round's batch is not the same
    raises("AssertionError")                the replay breaks so
    gate("baselines/demo.json")             a counter lies above what the baseline allows

Parsed as a Python expression and then walked here: nothing of it is executed. Must not know how figures are made.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchctl.gate_baseline import amount, read_baseline, tolerance_of
from traces.errors import BenchctlError

# Figures that only grow while a run goes on: a comparison with > or >= that is true stays true, so the run can stop there.
GROWING = (
    "requests", "finished", "rejected", "rounds", "rounds_prefill", "rounds_decode", "rounds_mixed", "rounds_empty",
    "scheduled_tokens", "prefill_tokens", "decode_tokens", "cached_tokens", "queried_tokens", "output_tokens", "preemptions",
    "evictions", "peak_blocks", "max_waiting", "max_running", "max_round_s", "recomputed_tokens", "discarded_tokens",
)  # fmt: skip
OF_BATCHES = frozenset((  # what only a batch's columns tell
    "rounds_prefill", "rounds_decode", "rounds_mixed", "rounds_empty", "scheduled_tokens", "prefill_tokens", "decode_tokens",
    "cached_tokens", "output_tokens", "hit_rate",
))  # fmt: skip
STATISTICS = ("mean", "max", "p50", "p90", "p95", "p99")
TIMED = ("ttft", "tpot", "itl", "e2el", "queue", "stalled", "preempted")
LARGEST = tuple(f"{metric}_max" for metric in TIMED)  # these only grow, too
LATENCIES = tuple(f"{metric}_{statistic}" for metric in TIMED for statistic in STATISTICS)
LEDGER = ("recomputed_tokens", "discarded_tokens")  # need what each request went through
OTHER = ("duration_s", "hit_rate")
STOPS = ("stop_waiting", "stop_running")  # stop_waiting("blocks"): rounds in which the loop stopped for it
NAMES = (*GROWING, *LATENCIES, *OTHER)

COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


@dataclass(slots=True)
class Observed:
    """What one replay came to. `batches`: a hash for each round; `error`: (type, message) where it broke."""

    values: dict[str, float] = field(default_factory=dict)
    batches: list[int] = field(default_factory=list)
    error: tuple[str, str] | None = None
    differed: bool = False  # from the run it was held against, found on the way
    cut: bool = False  # stopped before its end without an answer
    latest: int = 0  # row of the latest request handed over
    worst: dict[str, int] = field(default_factory=dict)  # latency -> row of the request with the largest


@dataclass(frozen=True, slots=True)
class Where:
    """A parsed predicate. `schedulers`: those it names, in order of appearance; "" stands for the only one."""

    text: str
    schedulers: tuple[str, ...]
    names: frozenset[str]
    growing: bool  # once true during a run it stays true
    differs: tuple[str, str] | None  # it is nothing but differs(a, b)
    needs_batches: bool
    expects_error: bool
    holds: Callable[[Mapping[str, Observed]], bool]

    @property
    def needs_ledger(self) -> bool:
        return any(name in LATENCIES or name in LEDGER for name in self.names)


def parse_where(text: str, base: Path = Path()) -> Where:
    """Raises BenchctlError that names the part that is not understood. `base`: where gate(FILE) is looked for."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
        at = getattr(error, "offset", None)
        raise BenchctlError(
            f"--where {text!r} is no expression" + (f": it breaks at character {at}" if at else ""),
            fix="such as 'preemptions > 5'",
        ) from None
    parser = _Parser(text, base)
    evaluate = parser.boolean(tree)
    names = frozenset(parser.names)
    return Where(
        text=text.strip(),
        schedulers=tuple(dict.fromkeys(parser.schedulers)),
        names=names,
        growing=parser.growing(tree),
        differs=parser.pairs[0] if isinstance(tree, ast.Call) and parser.pairs else None,
        needs_batches=bool(parser.pairs),
        expects_error=parser.expects_error,
        holds=evaluate,
    )


Value = Callable[[Mapping[str, Observed]], Any]


class _Parser:
    """Turns a tree into closures, and gathers what they need. One for each predicate."""

    def __init__(self, text: str, base: Path) -> None:
        self.text, self.base = text, base
        self.schedulers: list[str] = []
        self.names: list[str] = []
        self.pairs: list[tuple[str, str]] = []
        self.expects_error = False

    def fault(self, node: ast.AST, what: str, fix: str) -> BenchctlError:
        part = ast.get_source_segment(self.text.strip(), node) or self.text
        return BenchctlError(f"{part!r} {what}", where=f"--where {self.text!r}", fix=fix)

    def boolean(self, node: ast.expr) -> Callable[[Mapping[str, Observed]], bool]:
        match node:
            case ast.BoolOp(op, values):
                parts = [self.boolean(value) for value in values]
                join = all if isinstance(op, ast.And) else any
                return lambda seen: join(part(seen) for part in parts)
            case ast.UnaryOp(ast.Not(), operand):
                inner = self.boolean(operand)
                return lambda seen: not inner(seen)
            case ast.Compare(left, ops, comparators):
                return self._compare(left, ops, comparators)
            case ast.Call(ast.Name("differs"), [first, second], []):
                a, b = self._scheduler(first), self._scheduler(second)
                self.pairs.append((a, b))
                return lambda seen: _differ(seen[a], seen[b])
            case ast.Call(ast.Name("raises"), arguments, []):
                words = [self._text(argument) for argument in arguments]
                return self._raises(words)
            case ast.Name("raises"):
                return self._raises([])
            case ast.Call(ast.Name("gate"), [argument], []):
                return self._gate(node, self._text(argument))
        raise self.fault(
            node, "says nothing that is true or false", "a comparison, differs(a, b), raises, or gate('FILE')"
        )

    def _raises(self, words: list[str]) -> Callable[[Mapping[str, Observed]], bool]:
        self.expects_error = True

        def raised(seen: Mapping[str, Observed]) -> bool:
            errors = [each.error for each in seen.values() if each.error is not None]
            return any(all(word in kind or word in message for word in words) for kind, message in errors)

        return raised

    def _compare(
        self, left: ast.expr, ops: Sequence[ast.cmpop], rest: Sequence[ast.expr]
    ) -> Callable[[Mapping[str, Observed]], bool]:
        values = [self.number(left), *(self.number(each) for each in rest)]
        checks = []
        for op in ops:
            if type(op) not in COMPARISONS:
                raise self.fault(left, "is compared in a way that is not known", "one of > >= < <= == !=")
            checks.append(COMPARISONS[type(op)])

        def holds(seen: Mapping[str, Observed]) -> bool:
            found = [value(seen) for value in values]
            if any(each is None for each in found):
                return False  # not measured: no request finished, say
            return all(check(found[i], found[i + 1]) for i, check in enumerate(checks))

        return holds

    def number(self, node: ast.expr) -> Value:
        match node:
            case ast.Constant(value) if isinstance(value, (int, float)) and not isinstance(value, bool):
                return lambda seen: value
            case ast.UnaryOp(ast.USub(), operand):
                inner = self.number(operand)
                return lambda seen: _minus(inner(seen))
            case ast.BinOp(left, op, right) if type(op) in ARITHMETIC:
                first, second, apply = self.number(left), self.number(right), ARITHMETIC[type(op)]
                return lambda seen: _apply(apply, first(seen), second(seen))
            case ast.Name(name):
                return self._figure(node, name, "")
            case ast.Attribute(ast.Name(scheduler), name):
                return self._figure(node, name, self._named(scheduler))
            case ast.Subscript(ast.Name(name), ast.Constant(str(scheduler))):
                return self._figure(node, name, self._named(scheduler))
            case ast.Call(ast.Name(stop), [argument], []) if stop in STOPS:
                return self._figure(node, f"{stop}.{self._text(argument)}", "")
            case ast.Call(ast.Attribute(ast.Name(scheduler), stop), [argument], []) if stop in STOPS:
                return self._figure(node, f"{stop}.{self._text(argument)}", self._named(scheduler))
        raise self.fault(node, "is no figure", f"a number, or one of {', '.join(NAMES[:8])}, ttft_p99, …")

    def _figure(self, node: ast.expr, name: str, scheduler: str) -> Value:
        if name not in NAMES and not name.startswith(tuple(f"{stop}." for stop in STOPS)):
            close = [known for known in NAMES if known.startswith(name[:4])][:6] or list(NAMES[:8])
            raise self.fault(node, "is no figure of a run", f"one of {', '.join(close)}; docs/shrink.md lists them all")
        self.names.append(name)
        if not scheduler:
            self.schedulers.append("")
        default = 0 if name in GROWING or "." in name else None
        return lambda seen: seen[scheduler].values.get(name, default)

    def _named(self, scheduler: str) -> str:
        self.schedulers.append(scheduler)
        return scheduler

    def _scheduler(self, node: ast.expr) -> str:
        match node:
            case ast.Name(name):
                return self._named(name)
            case ast.Constant(str(name)):
                return self._named(name)
        raise self.fault(node, "is no scheduler", "nano, vllm, or 'package.module:Class' in quotes")

    def _text(self, node: ast.expr) -> str:
        match node:
            case ast.Constant(str(text)) | ast.Name(text):
                return text
        raise self.fault(node, "is no text", "put it in quotes")

    def _gate(self, node: ast.expr, file: str) -> Callable[[Mapping[str, Observed]], bool]:
        """A counter of the baseline lies above its limit. Counters that must be equal differ in any shorter trace, so they are left out."""
        path = self.base / file
        limits: list[tuple[str, str, float]] = []
        for entry in read_baseline(path).entries:
            for name, value in (entry.counters or {}).items():
                tolerance = tolerance_of(entry, name)
                figure = name if "stop_" in name else name.replace(".", "_")
                if isinstance(value, str) or tolerance is None or tolerance.ignore or tolerance.max_increase is None:
                    continue
                if figure not in GROWING and not figure.startswith(tuple(f"{stop}." for stop in STOPS)):
                    continue
                limits.append(
                    (self._named(entry.scheduler), figure, value + amount(tolerance.max_increase, value, str(path)))
                )
                self.names.append(figure)
        if not limits:
            raise self.fault(
                node,
                "has no counter with max_increase: a shorter trace differs in every counter that must be equal",
                "differs(OLD, NEW) with both policies, or a comparison such as 'preemptions > 11'",
            )
        return lambda seen: any(
            scheduler in seen and seen[scheduler].values.get(name, 0) > limit for scheduler, name, limit in limits
        )

    def growing(self, node: ast.expr) -> bool:
        """Whether it can only turn from false to true while a run goes on."""
        match node:
            case ast.BoolOp(_, values):
                return all(self.growing(value) for value in values)
            case ast.Compare(left, [ast.Gt() | ast.GtE()], [ast.Constant()]):
                return self._grows(left)
            case ast.Compare(ast.Constant(), [ast.Lt() | ast.LtE()], [right]):
                return self._grows(right)
            case ast.Call(ast.Name("gate"), _, _):
                return True
        return False

    def _grows(self, node: ast.expr) -> bool:
        match node:
            case ast.Name(name) | ast.Attribute(_, name) | ast.Subscript(ast.Name(name), _):
                return name in GROWING or name in LARGEST
            case ast.Call(_, _, _):
                return True  # stop_waiting("…")
        return False


def _differ(a: Observed, b: Observed) -> bool:
    if a.cut or b.cut:
        return a.differed or b.differed
    return a.differed or b.differed or a.batches != b.batches


def _minus(value: Any) -> Any:
    return None if value is None else -value


def _apply(apply: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    if a is None or b is None or (apply is operator.truediv and b == 0):
        return None
    return apply(a, b)
