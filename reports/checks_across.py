"""What makes runs shown side by side not directly comparable: findings as in checks. Looks only at recorded files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import polars as pl

from reports.checks import Check
from reports.numbers import plural
from reports.run import Run
from reports.terminal import column_names


def checks_across(runs: list[Run]) -> list[Check]:
    """What makes runs shown side by side not directly comparable; nothing for fewer than two."""
    found: list[Check] = []
    if len(runs) < 2:
        return found
    names = column_names([{"name": run.name, "path": run.shown} for run in runs])

    def each(value: Callable[[Run], Any]) -> str:
        return ", ".join(f"{name}: {value(run)}" for name, run in zip(names, runs, strict=True))

    traces = {_trace_key(run) for run in runs}
    if len(traces) > 1:
        found.append(
            Check("error", "the runs replayed different traces", each(_trace_key), "compare runs of one trace only")
        )
    tokens = [(run.usable_blocks or 0) * (run.block_size or 0) for run in runs]
    if len(set(tokens)) > 1:
        evidence = ", ".join(
            f"{name} {held:,} ({run.usable_blocks} blocks of {run.block_size})"
            for name, held, run in zip(names, tokens, runs, strict=True)
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
                f"tokens of a block: {each(lambda run: run.block_size)}; larger blocks waste more of the pool and match "
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
                Check("warn", f"the runs differ in {name}", each(value), f"repeat one with the other's {name}")
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
    done = [_work(run) for run in runs]
    if len(set(done)) > 1:
        evidence = ", ".join(
            f"{name} {plural(requests, 'request')}, {plural(emitted, 'output token')}"
            for name, (requests, emitted) in zip(names, done, strict=True)
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
