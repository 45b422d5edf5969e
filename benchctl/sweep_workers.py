"""Replays of a sweep on this machine: worker processes that take one cell after another.

A worker loads its packages once; what it replays runs as `benchctl replay` does. One that dies takes its cell with it, is
named as the reason, and is replaced. Cells of the torch engine get a process each, so that a card's memory is free again.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from benchctl.sweep_spec import Cell
from traces.errors import BenchctlError

Result = dict[str, Any]
FIGURES = (
    "duration", "completed", "failed", "request_throughput", "output_throughput", "total_token_throughput",
    *(f"p{p}_{metric}_ms" for metric in ("ttft", "tpot", "itl", "e2el") for p in (50, 90, 99)),
)  # fmt: skip
DONE = ("complete", "incomplete")  # statuses of a replay that came to its end
MODELLED = ("null", "simulated")  # engines that need no device
MAX_CELLS_A_WORKER = 100  # then a fresh one: what a long-lived process gathers is given back


class Workers(Protocol):
    """Where cells run."""

    def submit(self, cell: Cell) -> Future[Result]:
        """Start the cell when there is room. The future never raises for what a replay does."""

    def close(self, *, now: bool) -> None:
        """Let go of everything; `now`: running cells are ended."""


def needs_device(cell: Cell) -> bool:
    return cell.settings.get("engine", "auto") not in MODELLED


def words_of(cell: Cell, folder: Path) -> list[str]:
    """Arguments of the replay, with where it writes."""
    words = [*cell.argv(), "--json", "--no-report", "--force", "--out", str(folder)]
    return words if "records" in cell.settings else [*words, "--records", "compact"]


def result_of(cell: Cell, code: int, stdout: str, stderr: str, folder: Path) -> Result:
    """What a replay's answer says: status, reason, figures, why its loops stopped, where the run lies."""
    try:
        summary = json.loads(stdout)
    except ValueError:
        summary = None
    if not isinstance(summary, dict):
        lines = stderr.strip().splitlines()
        at = next((i for i, text in enumerate(lines) if text.startswith("Error:")), max(len(lines) - 1, 0))
        reason = " ".join(text.strip() for text in lines[at : at + 3]).removeprefix("Error: ")
        if boxed := [text.strip(" │") for text in lines if text.startswith("│")]:  # a word that its flag does not take
            reason = " ".join(boxed)
        return {"status": "failed", "reason": reason or f"exit code {code}", "figures": {}}
    ours = summary.get("benchctl") or {}
    ended = (ours.get("run") or {}).get("status", "complete")
    status = "complete" if code in (0, 1) and ended == "complete" and not summary.get("failed") else "incomplete"
    why = None
    if status != "complete":
        causes = ", ".join(f"{n} {why}" for why, n in ((ours.get("requests") or {}).get("reasons") or {}).items()
                           if why not in ("max_tokens", "length_capped", "stop"))  # fmt: skip
        why = f"{summary.get('failed')} requests did not finish" + (f" ({causes})" if causes else "")
        why = why if ended == "complete" else f"the run is {ended}; {why}"
    return {
        "status": status,
        "reason": why,
        "figures": {name: summary.get(name) for name in FIGURES},
        "stops": ours.get("stops"),
        "checks": [check.get("what") for check in ours.get("checks") or []],
        "path": str(folder / str(cell.settings["scheduler"])),
    }


def replay_here(words: Sequence[str]) -> tuple[int, str, str]:
    """`benchctl words…` in this process: exit code, stdout, stderr. Never raises for what the command does."""
    import benchctl.cli  # noqa: F401 - registers every command
    from benchctl.app import app

    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            app(list(words))
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BenchctlError as error:
            code = error.exit_code
            err.write(f"Error: {error}\n")
        except Exception as error:
            code = 1
            err.write(traceback.format_exc() + f"Error: the replay broke: {type(error).__name__}: {error}\n")
    return code, out.getvalue(), err.getvalue()


class LocalWorkers:
    """Worker processes of this machine, `number` at a time. Mutable; owned by the sweep that made it."""

    def __init__(self, number: int, out: Path) -> None:
        self._out = out
        self._threads = ThreadPoolExecutor(number)
        self._mine = threading.local()  # a thread's worker process
        self._children: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self._ending = False

    def submit(self, cell: Cell) -> Future[Result]:
        return self._threads.submit(self._run, cell)

    def close(self, *, now: bool) -> None:
        if now:
            self._ending = True
            self._threads.shutdown(wait=False, cancel_futures=True)
            with self._lock:
                for child in self._children:
                    child.kill()
        self._threads.shutdown(wait=True)
        for child in list(self._children):
            if child.stdin is not None and not now:
                child.stdin.close()  # its loop ends there
            child.wait()

    def _run(self, cell: Cell) -> Result:
        folder = self._out / "runs" / cell.key
        child = self._worker()
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(json.dumps(words_of(cell, folder)) + "\n")
            child.stdin.flush()
            answer = child.stdout.readline()
        except OSError:
            answer = ""
        self._mine.cells += 1
        if not answer:
            code = child.wait()
            self._forget(child)
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            return {"status": "failed", "reason": f"its process ended with {how}", "figures": {}}
        if needs_device(cell) or self._mine.cells >= MAX_CELLS_A_WORKER:
            child.stdin.close()
            child.wait()
            self._forget(child)
        code, stdout, stderr = json.loads(answer)
        return result_of(cell, code, stdout, stderr, folder)

    def _worker(self) -> subprocess.Popen[str]:
        child: subprocess.Popen[str] | None = getattr(self._mine, "child", None)
        if child is not None and child.poll() is None:
            return child
        if child is not None:
            self._forget(child)
        child = subprocess.Popen(
            [sys.executable, "-m", "benchctl.sweep_workers", str(os.getpid())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            start_new_session=True,  # Ctrl-C is the sweep's, which ends them
        )  # fmt: skip
        with self._lock:
            self._children.add(child)
            if self._ending:
                child.kill()
        self._mine.child, self._mine.cells = child, 0
        return child

    def _forget(self, child: subprocess.Popen[str]) -> None:
        self._mine.child = None
        with self._lock:
            self._children.discard(child)


def serve(parent: int) -> None:
    """A worker: a JSON list of words a line on stdin, a JSON list (exit code, stdout, stderr) a line on stdout."""

    def watch() -> None:
        # A sweep that was killed must not leave replays behind that write where its successor writes.
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints by itself does not get among the answers
    for line in sys.stdin:
        answers.write(json.dumps(replay_here(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
