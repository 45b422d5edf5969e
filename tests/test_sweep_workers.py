"""Worker processes of a sweep: one that dies costs its cell, a sweep that is killed leaves nothing running and goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest

from benchctl.sweep import Store, sweep
from benchctl.sweep_slo import judge, per_request
from benchctl.sweep_spec import Cell, make_cell
from benchctl.sweep_workers import LocalWorkers, Result, replay_here, result_of, words_of
from reports.run import open_run
from tests.command_line import rows, write_trace


def cells(trace: Path, number: int) -> list[Cell]:
    base = {"trace": str(trace), "scheduler": "vllm", "engine": "null"}
    return [make_cell(base | {"max-num-seqs": seats}) for seats in range(1, number + 1)]


def descendants(ancestor: int) -> list[int]:
    """Processes that are working for a sweep."""
    found = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    table = [line.split(None, 2) for line in found.splitlines()[1:]]
    return [int(pid) for pid, parent, args in table if int(parent) == ancestor and "benchctl.sweep_workers" in args]


def test_a_worker_that_dies_costs_its_cell_and_is_replaced(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", rows(*((i * 0.01, 64, 50) for i in range(300))))
    store, workers = Store(tmp_path / "o"), LocalWorkers(1, tmp_path / "o")
    store.prepare()
    killed: list[int] = []

    def saw(cell: Cell, result: Result, earlier: bool) -> None:
        if not killed:
            killed.extend(descendants(os.getpid()))
            os.kill(killed[0], signal.SIGKILL)  # while it is at the second cell, or before it takes it

    results = sweep(cells(trace, 3), store, workers, saw)
    workers.close(now=False)
    assert [result["status"] for result in results].count("complete") >= 2
    lost = [result for result in results if result["status"] == "failed"]
    assert all(result["reason"] == "its process ended with signal 9" for result in lost)
    # The next call runs only what failed.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "o" / "runs").glob("*/*/manifest.json")}
    workers = LocalWorkers(1, tmp_path / "o")
    again = sweep(cells(trace, 3), store, workers, lambda cell, result, earlier: None)
    workers.close(now=False)
    assert [result["status"] for result in again] == ["complete"] * 3
    kept = [r["path"] for r in results if r["status"] == "complete"]
    assert all(
        (Path(path) / "manifest.json").stat().st_mtime_ns == before[Path(path) / "manifest.json"] for path in kept
    )


def test_a_sweep_that_is_killed_leaves_no_worker_and_goes_on(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", rows(*((i * 0.01, 64, 50) for i in range(300))))
    words = [sys.executable, "-m", "benchctl", "sweep", str(trace), "--set", "scheduler=vllm", "--set", "engine=null",
             "--set", "max-num-seqs=1,2,3,4,5,6", "--workers", "1", "--out", str(tmp_path / "o"), "--no-report"]  # fmt: skip
    first = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while len(list((tmp_path / "o" / "cells").glob("*.json"))) < 2:
        assert time.monotonic() < until and first.poll() is None
        time.sleep(0.02)
    working = descendants(first.pid)
    first.kill()
    first.wait()
    done = {path.stem for path in (tmp_path / "o" / "cells").glob("*.json")}
    while any(Path(f"/proc/{pid}").exists() for pid in working):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert working and len(done) < 6
    second = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert second.returncode == 0 and f"{len(done)} of 6 cells are from an earlier call" in second.stderr
    assert (pl.read_parquet(tmp_path / "o" / "sweep.parquet")["status"] == "complete").all()


def test_ctrl_c_ends_the_workers_and_says_130(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", rows(*((i * 0.01, 64, 400) for i in range(2000))))
    words = [sys.executable, "-m", "benchctl", "sweep", str(trace), "--set", "scheduler=vllm", "--set", "engine=null",
             "--workers", "1", "--out", str(tmp_path / "o")]  # fmt: skip
    child = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 120
    while not (working := descendants(child.pid)):
        assert time.monotonic() < until and child.poll() is None
        time.sleep(0.05)
    time.sleep(0.5)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130 and "Traceback" not in err
    while any(Path(f"/proc/{pid}").exists() for pid in working):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_other_slos_are_held_against_the_records_without_a_new_replay(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", rows(*((i * 0.001, 64, 8) for i in range(40))))
    (cell,) = cells(trace, 1)
    workers = LocalWorkers(1, tmp_path / "o")
    store = Store(tmp_path / "o", {"ttft": 1e6})
    store.prepare()
    (first,) = sweep([cell], store, workers, lambda cell, result, earlier: None)
    workers.close(now=False)
    assert first["judged"]["attainment"] == 1.0
    strict = Store(tmp_path / "o", {"ttft": 100.0, "tpot": 50.0}).load(cell)
    assert strict is not None and 0 < strict["judged"]["attainment"] < 0.2
    assert strict["judged"]["misses"]["tpot"] == 0 and strict["judged"]["misses"]["ttft"] >= 32
    assert strict["judged"] == judge(str(strict["path"]), {"ttft": 100.0, "tpot": 50.0})


def test_an_slo_of_itl_gives_the_percentiles_of_the_largest_gaps(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", rows(*((i * 0.001, 64, 8) for i in range(40))))
    (cell,) = cells(trace, 1)
    slo = {"itl": 20.0}
    workers, store = LocalWorkers(1, tmp_path / "o"), Store(tmp_path / "o", slo)
    store.prepare()
    (first,) = sweep([cell], store, workers, lambda cell, result, earlier: None)
    workers.close(now=False)
    gaps = per_request(open_run(first["path"]), slo)["itl"] * 1000
    assert first["judged"]["p90_max_itl_ms"] == pytest.approx(gaps.quantile(0.9, "linear"))
    assert first["judged"]["p99_max_itl_ms"] is None  # needs 100 requests
    older = first | {"judged": {"slo": slo, "attainment": 1.0}}
    store.save(cell, older)
    again = store.load(cell)
    assert again is not None and again["judged"] == first["judged"]


def test_a_file_that_changed_makes_another_cell(tmp_path: Path) -> None:
    from benchctl import sweep_spec

    trace = write_trace(tmp_path / "t.jsonl", rows((0.0, 20, 5)))
    (before,) = cells(trace, 1)
    write_trace(trace, rows((0.0, 21, 5)))
    sweep_spec.digest_of.cache_clear()
    (after,) = cells(trace, 1)
    assert before.settings == after.settings and before.key != after.key


def test_a_bug_in_a_replay_is_a_reason_not_the_end() -> None:
    code, out, err = replay_here(["replay", "traces/walkthrough.jsonl", "--scheduler", "sjf"])
    assert code == 2 and out == "" and "no scheduler named 'sjf'" in err
    code, out, _ = replay_here(
        ["replay", "traces/walkthrough.jsonl", "-s", "nano", "--engine", "null", "--json", "--records", "none"]
    )
    assert code == 0 and json.loads(out)["completed"] == 5


def test_the_error_of_a_profile_is_that_of_runs_held_out_where_there_are_any() -> None:
    from benchctl.sweep_slo import stated_error

    residuals = [{"kind": "decode", "p50": 0.01, "p95": 0.02}, {"kind": "mixed", "p50": 0.02, "p95": 0.06}]
    error, what = stated_error({"residuals": residuals})
    assert error == 0.06 and "95% of mixed rounds" in what and "no run was held out" in what
    held = {"runs": 6, "end_to_end": {"50": 0.01, "99": 0.05}, "worst": {"99": 0.11}}
    error, what = stated_error({"residuals": residuals, "error": {"held_out": held}})
    assert error == 0.05 and "on 6 runs that were not fitted; the worst ±11.0%" in what
    assert stated_error({})[0] is None


def test_a_value_that_its_flag_does_not_take_is_the_reason(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", rows((0.0, 20, 5)))
    cell = make_cell({"trace": str(trace), "scheduler": "vllm", "engine": "null", "max-num-seqs": "many"})
    code, out, err = replay_here(words_of(cell, tmp_path / "o"))
    reason = result_of(cell, code, out, err, tmp_path / "o")["reason"]
    assert code == 2 and "--max-num-seqs" in reason and "integer" in reason and "─" not in reason, reason
