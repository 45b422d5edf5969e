"""What makes runs shown side by side not directly comparable: findings as in checks. Looks only at recorded files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import polars as pl

from reports.checks import Check
from reports.run import Run


def checks_across(runs: list[Run]) -> list[Check]:
    """What makes runs shown side by side not directly comparable; nothing for fewer than two."""
    found: list[Check] = []
    if len(runs) < 2:
        return found
    traces = {_trace_key(run) for run in runs}
    if len(traces) > 1:
        found.append(
            Check(
                "error", "the runs replayed different traces", _each(runs, _trace_key), "compare runs of one trace only"
            )
        )
    tokens = {run.name: (run.usable_blocks or 0) * (run.block_size or 0) for run in runs}
    if len(set(tokens.values())) > 1:
        evidence = ", ".join(
            f"{run.name} {tokens[run.name]:,} ({run.usable_blocks} blocks of {run.block_size})" for run in runs
        )
        found.append(
            Check(
                "warn",
                "the KV pools are unequal",
                f"usable tokens: {evidence}",
                "pass --kv-cache-tokens, which gives every policy the same",
            )
        )
    if len({run.block_size for run in runs}) > 1:
        found.append(
            Check(
                "warn",
                "the block sizes are unequal",
                f"tokens of a block: {_each(runs, lambda run: run.block_size)}; larger blocks waste more of the pool and match "
                "prefixes more coarsely, whatever the policy",
                "pass --block-size, which gives every policy the same, to see the policies alone",
            )
        )
    looks: dict[str, Callable[[Run], Any]] = {
        "engine": lambda run: run.engine,
        "clock": lambda run: run.clock,
        "arrivals": lambda run: run.manifest.get("arrivals"),
    }
    for name, value in looks.items():
        if len({str(value(run)) for run in runs}) > 1:
            found.append(
                Check("warn", f"the runs differ in {name}", _each(runs, value), f"repeat one with the other's {name}")
            )
    if any(run.manifest.get("arrivals") == "session" for run in runs):
        found.append(
            Check(
                "info",
                "arrivals depend on the policy",
                "--arrivals session: a turn is due after its parent finished",
                "the runs saw different arrivals",
            )
        )
    asked = {run.name: _work(run) for run in runs}
    if len(set(asked.values())) > 1:
        evidence = ", ".join(
            f"{name} {requests:,} requests, {tokens:,} output tokens" for name, (requests, tokens) in asked.items()
        )
        found.append(
            Check(
                "warn",
                "the runs finished different work",
                evidence,
                "compare per request, or make both finish the same requests",
            )
        )
    return found


def _each(runs: list[Run], value: Callable[[Run], Any]) -> str:
    return ", ".join(f"{run.name}: {value(run)}" for run in runs)


def _trace_key(run: Run) -> str:
    trace = run.manifest.get("trace")
    if isinstance(trace, dict):
        digest = str(trace.get("sha256") or "")[:12]
        return " ".join(part for part in (str(trace.get("name") or trace.get("path") or "?"), digest) if part)
    return str(trace)


def _work(run: Run) -> tuple[int, int]:
    """(finished requests, their output tokens)."""
    requests, tokens = (
        run.scan("requests")
        .filter(pl.col("status") == "finished")
        .select(pl.len(), pl.col("emitted_tokens").sum())
        .collect()
        .row(0)
    )
    return int(requests), int(tokens)
