"""One run, from its folder to its last word: opens the record, replays, closes it whatever happened, and says how it ended.

Gets everything built. A run that breaks keeps its rounds and says `failed`; Ctrl-C ends it as `interrupted`, and a second
one at once.
"""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from benchctl.admission import Admission
from benchctl.arrivals import Arrivals, CappedArrivals
from benchctl.clock import Clock
from benchctl.manifest import now, write_manifest
from benchctl.recorder import FileRecorder, NoRecorder
from benchctl.replay import Observer, Outcome, replay
from engines.interface import Engine, Scheduler
from traces.errors import BenchctlError


@dataclass(frozen=True, slots=True)
class RunParts:
    """What one run is made of. `start_clock` is called when the run begins: a wall clock starts there."""

    folder: Path | None  # None: --records none
    name: str
    scheduler: Scheduler
    engine: Engine
    arrivals: Arrivals
    admission: Admission
    start_clock: Callable[[threading.Event], Clock]
    usable_blocks: int
    records: str
    overlap: bool  # schedule a round while the one before it runs, where the clock allows it
    manifest: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended. `error` is set when it failed."""

    name: str
    folder: Path | None
    status: str
    outcome: Outcome
    manifest: Mapping[str, Any]
    error: BaseException | None


def run_one(parts: RunParts, observer: Observer | None, stop: threading.Event) -> RunResult:
    """Replay and record. Every exception of the run ends up in the result, so that the record is always closed."""
    manifest = parts.manifest | {"status": "running", "started": now()}
    if parts.folder is not None:
        write_manifest(parts.folder, manifest)
    recorder = (
        NoRecorder()
        if parts.folder is None
        else FileRecorder(parts.folder, parts.scheduler, parts.usable_blocks, parts.records)
    )
    outcome, error = Outcome(), None
    # What is built lives as long as the run: the collector need not look through it again and again. Where a host's time counts,
    # what is dead goes first: a quarter of a second with torch loaded, so the clock starts after it.
    if manifest["clock"] in ("wall", "recorded"):
        gc.collect()
    gc.freeze()
    clock = parts.start_clock(stop)
    began = time.perf_counter()
    try:
        replay(
            parts.arrivals, parts.admission, parts.scheduler, parts.engine, clock, recorder,
            overlap=parts.overlap and clock.overlaps, observer=observer, stop=stop, outcome=outcome,
        )  # fmt: skip
    except KeyboardInterrupt:
        outcome.interrupted = True
    except Exception as fault:
        error = fault
    wall_s, in_loop_s = time.perf_counter() - began, recorder.record_s
    gc.unfreeze()
    status = "failed" if error else "interrupted" if outcome.interrupted else "complete"
    try:
        recorder.close(max(outcome.end_s, clock.now() if status == "complete" else outcome.end_s))
    except Exception as fault:
        if not outcome.interrupted:  # a second Ctrl-C may have cut a record short: what was written stands
            error, status = error or fault, "failed"
    manifest |= {
        "overlapped": parts.overlap and clock.overlaps,
        "status": status,
        "ended": now(),
        "counts": counts(parts, outcome),
        "wall_s": wall_s,
    }
    if error is not None:
        manifest["error"] = str(error) if isinstance(error, BenchctlError) else f"{type(error).__name__}: {error}"
    # Those left out by --over-length skip were not replayed.
    if manifest["num_requests"] is not None:
        manifest["num_requests"] -= parts.admission.counts.skipped
    if isinstance(recorder, FileRecorder):
        manifest["digest"] = f"xxh3:{recorder.digest.hexdigest()}" if recorder.keeps_log else None
        manifest["record"] = {
            "seconds": recorder.record_s,
            "write_seconds": recorder.write_s,
            "share_of_wall": in_loop_s / wall_s if wall_s else None,
            "parts": recorder.num_parts,
            "bytes": recorder.num_bytes,
            "rows": recorder.counts,
        }
    if parts.folder is not None:
        try:
            write_manifest(parts.folder, manifest)
        except BenchctlError as fault:  # the disk is full: the folder goes on saying that it runs
            error, status = error or fault, "failed"
    return RunResult(parts.name, parts.folder, status, outcome, manifest, error)


def counts(parts: RunParts, outcome: Outcome) -> dict[str, Any]:
    """What was done with the trace's requests, by number."""
    cut = parts.admission.counts
    found: dict[str, Any] = {
        "admitted": outcome.admitted,
        "finished": outcome.finished,
        "unfinished": outcome.admitted - outcome.finished,
        "rejected": outcome.rejected,
        "rejected_reasons": cut.rejected_reasons,
        "skipped_over_length": cut.skipped,
        "first_skipped": cut.first_skipped,
        "prompts_truncated": cut.truncated,
        "prompt_tokens_truncated": cut.truncated_tokens,
        "outputs_length_capped": cut.outputs_cut,
        "output_tokens_length_capped": cut.output_tokens_cut,
        "rounds": outcome.rounds,
        "emitted_tokens": outcome.emitted_tokens,
        "preemptions": outcome.preemptions,
        "last_arrival_s": outcome.last_arrival_s,
    }
    if isinstance(parts.arrivals, CappedArrivals):
        found["rounds_capped"] = parts.arrivals.rounds_capped
        found["first_capped_round"] = parts.arrivals.first_capped_round
    return found


@contextmanager
def stop_on_interrupt() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets; the second one raises KeyboardInterrupt."""
    stop = threading.Event()
    before = signal.getsignal(signal.SIGINT)

    def interrupted(number: int, frame: FrameType | None) -> None:
        stop.set()
        signal.signal(signal.SIGINT, before)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, interrupted)
    try:
        yield stop
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)
