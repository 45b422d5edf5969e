"""A random campaign against one policy: small traces in tight memory, each replayed twice and held against the laws.

What breaks is made small (`shrink`) and kept as a trace with the command that shows it. Seeded: the same seed makes the
same cases. Knows policies through the registry alone.
"""

from __future__ import annotations

import re
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchctl.build import build_command, build_run
from benchctl.config import ReplayOptions
from benchctl.policies import BUILTIN
from benchctl.runner import run_one
from benchctl.shrink import shrink
from benchctl.shrink_rows import Rows, write_rows
from engines.schedulers.registry import SCHEDULERS
from reports.laws import assert_laws
from traces.errors import BenchctlError
from traces.header import Header

SHRINK_S = 20.0
MEASURED = re.compile(r"'(schedule|prepare|device|update|record)_s': [^,}]*, ")  # host times in a row that breaks a law


@dataclass(frozen=True, slots=True)
class Case:
    """A random trace and the limits that it is replayed under. `flags`: those of `benchctl replay`."""

    number: int
    rows: Rows
    options: ReplayOptions
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Broken:
    """`what`: raised, stuck, law or nondeterministic. `evidence`: the message, numbers and all. `rows`: shrunk."""

    case: Case
    what: str
    evidence: str
    rows: Rows


@dataclass(frozen=True, slots=True)
class Campaign:
    """`refused`: cases whose limits the policy did not accept."""

    scheduler: str
    cases: int
    refused: int
    requests: int
    rounds: int
    preemptions: int
    broken: tuple[Broken, ...]


def check_scheduler(
    scheduler: str, *, cases: int, seed: int, most: int = 3, say: Callable[[str], None] = lambda text: None
) -> Campaign:
    """Run the campaign; stops after `most` faults of different kinds. Raises BenchctlError where laws can't be checked."""
    if not __debug__:
        raise BenchctlError("python -O leaves out the checks that this command is made of", fix="run it without -O")
    broken: dict[str, Broken] = {}
    totals = {"refused": 0, "requests": 0, "rounds": 0, "preemptions": 0}
    with tempfile.TemporaryDirectory(prefix="benchctl-check-") as folder:
        done = 0
        for number in range(cases):
            case = make_case(scheduler, seed, number)
            done += 1
            try:
                fault, counts = run_case(case, Path(folder))
            except BenchctlError as error:
                if error.exit_code != 2:
                    raise
                totals["refused"] += 1
                continue
            for name in ("requests", "rounds", "preemptions"):
                totals[name] += counts[name]
            if fault is None:
                continue
            kind = signature(*fault)
            if kind in broken:
                continue
            say(f"case {number}: {fault[0]}: {fault[1].splitlines()[0]}")
            rows = smallest(case, kind, Path(folder), say)
            again, _ = run_case(replace_rows(case, rows), Path(folder))  # the words are those of the trace that is kept
            evidence = again[1] if again is not None and signature(*again) == kind else fault[1]
            broken[kind] = Broken(case, fault[0], evidence, rows)
            if len(broken) >= most:
                break
    return Campaign(scheduler, done, broken=tuple(broken.values()), **totals)


def smallest(case: Case, kind: str, folder: Path, say: Callable[[str], None]) -> Rows:
    """The fewest and shortest requests that break in the same way."""

    def holds(rows: Rows) -> bool:
        try:
            fault, _ = run_case(replace_rows(case, rows), folder)
        except BenchctlError:
            return False
        return fault is not None and signature(*fault) == kind

    if not holds(case.rows):
        return case.rows  # it does not break every time, so there is nothing to go by
    return shrink(case.rows, holds, limit_s=SHRINK_S, say=lambda text: say(f"  {text}")).rows


def replace_rows(case: Case, rows: Rows) -> Case:
    return Case(case.number, rows, case.options, case.flags)


def signature(what: str, evidence: str) -> str:
    """What makes two faults the same: their kind and their words, without numbers and what follows a colon."""
    return f"{what}: {re.sub(r'[0-9]+', '#', evidence.splitlines()[0].split(':')[0] if evidence else '')}"


def run_case(case: Case, folder: Path) -> tuple[tuple[str, str] | None, dict[str, int]]:
    """(what broke and its evidence, or None; counts). Raises BenchctlError where the limits are refused."""
    trace = folder / "case.jsonl"
    write_rows(trace, Header(salt="check"), case.rows)
    command = build_command(replace(case.options, trace=str(trace)))
    (policy,) = command.policies
    digests = []
    counts = {"requests": len(case.rows), "rounds": 0, "preemptions": 0}
    for repeat in range(2):
        with tempfile.TemporaryDirectory(dir=folder) as place:
            run = Path(place) / "run"
            run.mkdir()
            parts = build_run(command, policy, run)
            result = run_one(parts, None, threading.Event())
            counts |= {"rounds": result.outcome.rounds, "preemptions": result.outcome.preemptions}
            if result.error is not None:
                stuck = isinstance(result.error, BenchctlError)
                name = "" if stuck else f"{type(result.error).__name__}: "
                return ("stuck" if stuck else "raised", f"{name}{result.error}"), counts
            digests.append(result.manifest.get("digest"))
            if repeat == 0:
                try:
                    assert_laws(run)
                except AssertionError as error:
                    return ("law", MEASURED.sub("", str(error)) or "an assertion without words"), counts
    if digests[0] != digests[1]:
        return ("nondeterministic", "the same calls gave other decisions the second time"), counts
    return None, counts


def make_case(scheduler: str, seed: int, number: int) -> Case:
    """Case `number` of a campaign: 1 to 16 requests, memory for two or three of them, every knob that the policy has."""
    draw = np.random.default_rng([seed, number])
    info = SCHEDULERS[scheduler]

    def chance(share: float) -> bool:
        return bool(draw.random() < share)

    def between(low: int, high: int) -> int:
        return int(draw.integers(low, high + 1))

    block_size = int(draw.choice([4, 4, 16]))
    blocks = between(5, 24)
    seats = between(1, 8)
    knobs: dict[str, Any] = {
        "block_size": block_size,
        "max_num_seqs": seats,
        "max_num_batched_tokens": max(seats, between(2, 12) * block_size),
        "enable_prefix_caching": chance(0.8),
    }
    if chance(0.2):
        knobs["enable_chunked_prefill"] = False
        knobs["max_num_batched_tokens"] = blocks * block_size + 8
    if chance(0.3):
        knobs["long_prefill_token_threshold"] = between(1, 3) * block_size
    if chance(0.3):
        knobs["scheduling_policy"] = "priority"
    if chance(0.2):
        knobs["scheduler_reserve_full_isl"] = True
    if chance(0.2):
        knobs["watermark"] = 0.1
    if chance(0.2):
        knobs["max_loras"] = 1
    knobs = {name: value for name, value in knobs.items() if name in info.knobs}
    pool = blocks * block_size
    rows: Rows = []
    for i in range(between(1, 16)):
        prompt = between(1, max(2, (pool if chance(0.1) else pool // 2)))
        row: dict[str, Any] = {
            "id": f"R{i + 1}",
            "arrival_s": float(between(0, 12)) if chance(0.7) else 0.0,
            "input_length": prompt,
            "output_length": between(1, max(1, pool // 4)),
        }
        if chance(0.5):
            row["segments"] = [{"id": between(0, 1), "len": between(1, prompt)}]
        if "scheduling_policy" in knobs:
            row["priority"] = between(0, 2)
        if "max_loras" in knobs and chance(0.6):
            row["adapter"] = f"a{between(1, 2)}"
        rows.append(row)
    rows.sort(key=lambda row: row["arrival_s"])
    options = ReplayOptions(
        trace="", schedulers=(info.place or scheduler,), engine="null", clock="rounds", knobs=knobs,
        num_blocks=blocks + info.null_blocks, records="full", report=False,
    )  # fmt: skip
    return Case(number, rows, options, tuple(flags_of(knobs, blocks + info.null_blocks)))


def flags_of(knobs: dict[str, Any], num_blocks: int) -> list[str]:
    out = ["--clock", "rounds", "--num-blocks", str(num_blocks)]
    for name, value in knobs.items():
        flag = name.replace("_", "-")
        out += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return out


def check_name(asked: str, find: Callable[[str], str]) -> str:
    """The registry's name of the policy to check."""
    name = find(asked)
    assert name in SCHEDULERS and (name in BUILTIN or SCHEDULERS[name].place), (asked, name)
    return name
