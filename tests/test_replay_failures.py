"""Runs that break: what is kept, what is said, and that a loop which cannot go on ends."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchctl.arrivals import OpenArrivals
from benchctl.clock import RoundClock
from benchctl.command import write_outputs
from benchctl.recorder import NoRecorder
from benchctl.replay import Outcome, replay
from engines.interface import EngineLimits, Round, ScheduledBatch
from engines.null_engine import NullEngine
from reports.run import open_run
from tests.command_line import call, rows, write_trace
from tests.laws import assert_laws
from traces.errors import BenchctlError


def empty_round(**more: Any) -> Round:
    none = np.empty(0, dtype=np.int64)
    batch = ScheduledBatch(none, none, none, none.astype(bool), none.astype(bool), none, none, [], [])
    return Round(batch, [], [], 4, 4, 10, 0, "blocks", None, **more)


class StuckScheduler:
    """Somebody waits for ever; `preempting` makes it preempt in every round."""

    name = "stuck"

    def __init__(self, preempting: int = 0) -> None:
        self.rounds, self.preempting = 0, preempting

    def has_unfinished(self) -> bool:
        return True

    def schedule(self) -> Round:
        self.rounds += 1
        return empty_round(num_preempted=self.preempting)

    def update(self, round: Round, sampled: object) -> None:
        round.waiting = 1

    def waiting_requests(self) -> list[int]:
        return [41]

    def running_requests(self) -> list[int]:
        return []

    def free_list(self) -> list[int]:
        return [0, 1, 2, 3]


def run_stuck(scheduler: StuckScheduler) -> BenchctlError:
    with pytest.raises(BenchctlError) as caught:
        replay(
            OpenArrivals([]),
            None,
            scheduler,
            NullEngine(EngineLimits(4, 4)),
            RoundClock(),
            NoRecorder(),
            outcome=Outcome(),
        )  # type: ignore[arg-type]
    return caught.value


def test_an_empty_round_with_somebody_waiting_and_nothing_left_to_arrive_ends_the_run() -> None:
    scheduler = StuckScheduler()
    error = run_stuck(scheduler)
    assert scheduler.rounds == 1 and error.exit_code == 1
    assert "a round scheduled nothing, and nothing is left to arrive" in error.what
    assert error.where is not None and "waiting (trace rows): 41; running: nobody; free blocks: 4" in error.where


def test_preemption_without_end_and_without_a_token_ends_the_run() -> None:
    scheduler = StuckScheduler(preempting=2)
    error = run_stuck(scheduler)
    assert 400 < scheduler.rounds < 600 and "preemptions without one token in between" in error.what


def test_a_stop_before_the_first_round_ends_at_once() -> None:
    stop = threading.Event()
    stop.set()
    outcome = replay(
        OpenArrivals([]), None, StuckScheduler(), NullEngine(EngineLimits(4, 4)), RoundClock(), NoRecorder(), stop=stop
    )  # type: ignore[arg-type]
    assert outcome.interrupted and outcome.rounds == 0


@pytest.mark.parametrize("fault", [RuntimeError("the card fell off"), BenchctlError("no memory is left", exit_code=1)])
def test_an_engine_that_breaks_leaves_its_rounds_and_exits_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str], fault: Exception
) -> None:
    honest = NullEngine.launch

    def launch(self: NullEngine, batch: ScheduledBatch) -> Any:
        if int(batch.start[0]) >= 12:
            raise fault
        return honest(self, batch)

    monkeypatch.setattr(NullEngine, "launch", launch)
    monkeypatch.delattr(NullEngine, "costs")  # so that every round is launched
    trace = write_trace(tmp_path / "t.jsonl", rows((0, 8, 20), (0, 8, 2), (900, 8, 2)))
    answer = call(
        capfd,
        "replay",
        trace,
        "--engine",
        "null",
        "--no-report",
        "-s",
        "vllm",
        "--block-size",
        4,
        "--out",
        tmp_path / "o",
    )
    assert answer.code == 1
    assert (
        f"Error: vllm: {'' if isinstance(fault, BenchctlError) else 'the run broke: RuntimeError: '}{fault}"
        in answer.err
    )
    assert ("Traceback" in answer.err) == isinstance(fault, RuntimeError)  # only a bug of ours shows one
    run = assert_laws(tmp_path / "o" / "vllm")
    assert run.status == "failed" and str(fault) in run.manifest["error"]
    statuses = dict(run.read("requests").select("id", "status").iter_rows())
    assert statuses == {"R1": "unfinished", "R2": "finished"}
    assert run.read("rounds").height == 5


def test_a_failed_policy_does_not_keep_the_other_from_running(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made: list[int] = []
    honest = NullEngine.launch

    def launch(self: NullEngine, batch: ScheduledBatch) -> Any:
        made.append(1)
        if len(made) == 1:
            raise BenchctlError("no memory is left", exit_code=1)
        return honest(self, batch)

    monkeypatch.setattr(NullEngine, "launch", launch)
    trace = write_trace(tmp_path / "t.jsonl", rows((0, 8, 3)))
    assert call(capfd, "replay", trace, "--engine", "null", "--no-report", "--out", tmp_path / "o").code == 1
    assert open_run(tmp_path / "o" / "nano").status == "failed"
    assert assert_laws(tmp_path / "o" / "vllm").status == "complete"


def test_what_the_model_said_is_written_as_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import polars as pl

    trace = write_trace(tmp_path / "t.jsonl", rows((0, 8, 2), (0, 8, 1)))
    call(capfd, "replay", trace, "--engine", "null", "--no-report", "-s", "nano", "--out", tmp_path / "o")
    run = open_run(tmp_path / "o" / "nano")
    said = {(0, 0): 72, (0, 1): 105, (1, 0): 33}
    part = run.path / "tokens-00000.parquet"
    pl.read_parquet(part).with_columns(
        pl.struct("request", "index")
        .map_elements(lambda at: said[at["request"], at["index"]], pl.Int64)
        .alias("token_id")
    ).write_parquet(part)

    class Tokenizer:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return "".join(map(chr, ids))

    write_outputs(open_run(run.path), Tokenizer())
    lines = [json.loads(line) for line in (run.path / "outputs.jsonl").read_text().splitlines()]
    assert lines == [{"id": "R1", "text": "Hi", "token_ids": [72, 105]}, {"id": "R2", "text": "!", "token_ids": [33]}]
