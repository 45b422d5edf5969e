"""How requests came: what the head says of arrivals, when throughput is theirs, and turns that came before their time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl

from engines.interface import SchedulerConfig
from reports.checks import checks
from reports.load import arrivals_text, early_turns, load_facts
from reports.page_pair import deltas, differing_settings
from reports.run import Run, open_run
from reports.summary import summarize
from reports.verdict import lines, sentences
from tests.fake_run import record_run, request_of

CONFIG = SchedulerConfig(num_blocks=40, block_size=4, max_num_seqs=4, max_num_batched_tokens=32)


def run_of(path: Path, rounds: list[int], policy: str = "nano", pool: SchedulerConfig = CONFIG, **manifest: Any) -> Run:
    """A request of 8 + 3 tokens at each of `rounds`; a round lasts 1 s, and a request alone three of them."""
    arrivals = [(number, request_of(i, f"r{i}", 8, 3)) for i, number in enumerate(rounds)]
    return open_run(record_run(path, policy, pool, arrivals, manifest={"clock": "virtual"} | manifest))


def in_session(run: Run, turns: list[tuple[str | None, int | None]]) -> Run:
    """The same run, its requests turns of sessions, in their order."""
    (file,) = run.path.glob("admissions-*.parquet")
    frame = pl.read_parquet(file).sort("request")
    sessions, numbers = zip(*turns, strict=True)
    frame.with_columns(pl.Series("session", sessions, pl.String), pl.Series("turn", numbers, pl.Int64)).write_parquet(
        file
    )
    return open_run(run.path)


def test_the_head_says_how_arrivals_were_made(tmp_path: Path) -> None:
    trace = {"name": "t", "span_s": 600.0}
    drawn = run_of(tmp_path / "a", [1, 31, 61], arrivals="trace", load="open", trace=trace)
    assert arrivals_text(drawn) == "at the trace's own times · open loop"
    drawn.manifest["config"] = {"request_rate": {"value": 0.05, "source": "flag"}, "burstiness": {"value": 1.0}}
    assert (
        arrivals_text(drawn) == "drawn anew by --request-rate 0.05 (Poisson): 600.0 s of trace in 60.00 s · open loop"
    )
    drawn.manifest["config"] = {"time_scale": {"value": 0.1}, "max_concurrency": {"value": 4}}
    drawn.manifest["load"] = "closed"
    assert (
        arrivals_text(drawn) == "the trace's, gaps × 0.1: 600.0 s of trace in 60.00 s · closed loop, at most 4 at once"
    )
    drawn.manifest["config"] = {"request_rate": {"value": float("inf")}}
    assert arrivals_text(drawn) == "all at once (--request-rate inf) · closed loop"
    drawn.manifest.update({"arrivals": "session", "load": "open", "config": {}})
    assert arrivals_text(drawn) == (
        "of conversations at the trace's own times; a later turn after the turn before it has ended (--arrivals session) · open loop"
    )


def test_a_load_that_was_finished_as_it_came_sets_the_throughput(tmp_path: Path) -> None:
    run = run_of(tmp_path / "calm", list(range(1, 301, 5)), load="open")  # 60 requests, 295 s, done 3 s after the last
    facts = load_facts(run)
    assert facts["kept_up"] and (facts["arrivals_s"], facts["after_last_arrival_s"]) == (295.0, 3.0)
    assert facts["offered_request_rate"] == 59 / 295
    said = sentences([summarize(run)], ["nano"])[0]
    assert said == (
        "Arrivals set the throughput: nano finished all 60 requests as fast as they came, 0.20 a second for 295.0 s, and ended 3.00 s "
        "after the last; 0.60 output tokens a second are no limit of the policy."
    )
    burst = run_of(tmp_path / "burst", [1] * 60, load="open")
    assert not load_facts(burst)["kept_up"]
    assert sentences([summarize(burst)], ["nano"])[0].startswith("nano finished 60 of 60 requests in ")
    assert not load_facts(run_of(tmp_path / "closed", list(range(1, 301, 5)), load="closed"))["kept_up"]
    # One that did not keep up: both are told as before.
    assert sentences([summarize(run), summarize(burst)], ["a", "b"])[0].startswith("a finished 60 of 60 requests in ")


def test_turns_that_ran_beside_their_parents_are_told_with_numbers(tmp_path: Path) -> None:
    # Turns 1 to 3 of `s` a round apart, each of three rounds: both later ones came too early. `t` waits; one has no session.
    run = in_session(
        run_of(tmp_path / "run", [1, 2, 3, 20, 30, 40]),
        [("s", 1), ("s", 2), ("s", 3), ("t", 1), ("t", 2), (None, None)],
    )
    early = early_turns(run)
    assert early is not None and (early.num_early, early.later_turns, early.first) == (2, 3, 1)
    (found,) = (check for check in checks(run) if "turn" in check.what)
    assert found.level == "info" and found.what == "turns arrived before the turn before them had ended"
    run.manifest["config"] = {"request_rate": {"value": 1.0}}
    (found,) = (check for check in checks(run) if "turn" in check.what)
    assert found.level == "warn" and "re-timed" in found.what and "--arrivals session" in found.cure
    ended = run.read("requests").filter(pl.col("request") == 0)["finished_s"].item()
    assert found.evidence == (
        f"2 of 3 later turns (66.7%), first r1 at 1.000 s, where the turn before it ended at {ended:.3f} s"
    )
    run.manifest["arrivals"] = "session"
    assert not [check for check in checks(run) if "turn" in check.what]
    assert early_turns(run_of(tmp_path / "plain", [1, 2])) is None


def test_a_peak_is_no_steady_window(tmp_path: Path) -> None:
    short = summarize(run_of(tmp_path / "peak", [1, 100, 100, 100, 100, 200]))  # four at once for three of 202 s
    assert short["benchctl"]["steady"] is None
    (line,) = (line for line in lines([short]) if line.label.startswith("steady window"))
    assert line.values == ("under 10% of the run",)
    assert summarize(run_of(tmp_path / "even", [1, 4, 7]))["benchctl"]["steady"] is not None


def test_blocks_of_unequal_size_are_compared_in_tokens(tmp_path: Path) -> None:
    rounds = [1 + 4 * i for i in range(30)]
    small = SchedulerConfig(num_blocks=11, block_size=4, max_num_seqs=4, max_num_batched_tokens=32)
    large = SchedulerConfig(num_blocks=5, block_size=8, max_num_seqs=4, max_num_batched_tokens=32)
    runs = [
        run_of(tmp_path / name, rounds, "vllm", config, config={"num_blocks": {"value": config.num_blocks}})
        for name, config in (("small", small), ("large", large))
    ]
    summaries = [summarize(run) for run in runs]
    evicted = [s["benchctl"]["counters"]["evictions"] for s in summaries]
    assert all(evicted)
    (delta,) = (delta for delta in deltas(summaries, None) if delta.label == "evictions")
    assert delta.unit == "tokens" and delta.values == (f"{evicted[0] * 4:,}", f"{evicted[1] * 8:,}")
    (line,) = (line for line in lines(summaries) if line.label.startswith("evictions"))
    assert line.label == "evictions, in tokens" and line.values == delta.values and line.change == delta.change
    named = {setting.name: setting.values for setting in differing_settings(runs)}
    assert named["num_blocks"] == ("11, one of them the null block", "5, one of them the null block")
