"""The two answers at the head of a page: what they say against runs small enough to work out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.interface import Round, SchedulerConfig
from reports import metrics
from reports.answers import Answer, answers, gap_causes
from reports.run import Run, open_run
from reports.spikes import slow_starts, spikes
from reports.summary import summarize
from tests.fake_run import record_golden, record_run, request_of


def asked(*runs: Run) -> list[Answer]:
    names = [run.name for run in runs]
    gaps = [metrics.itl(run).collect() for run in runs]
    summaries = [summarize(run) for run in runs]
    return answers(runs, names, summaries, [slow_starts(run) for run in runs], [spikes(run) for run in runs], gaps)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    folder = tmp_path_factory.mktemp("pair")
    cases = (("nano", "article_rounds"), ("vllm", "worked_example"))
    return [open_run(record_golden(folder / policy, policy, case)) for policy, case in cases]


def test_the_worked_example_is_answered(pair: list[Run]) -> None:
    first, gaps = asked(*pair)
    # R5 waits for a seat under vllm, in rounds 5 to 8; R4 alone waits a round under nano.
    assert first.question == "Why did first tokens come later under vllm?"
    assert first.paragraphs[0].startswith("The mean TTFT is 2.20 rounds under vllm and 1.40 rounds under nano.")
    assert "queued for 4 of its 5 rounds: admission stopped for max_num_seqs" in first.paragraphs[1]
    assert first.paragraphs[2].endswith("max_num_seqs in 4 of 28 rounds under vllm and in 0 of 24 rounds under nano.")
    assert gaps.question == "Which rounds made the longest gaps between tokens?"
    assert gaps.paragraphs == (
        "nano: one gap is much longer than the median, 5 rounds: its request lost its blocks to a preemption.",
        "vllm: no gap is much longer than the median; none is a spike.",
    )
    assert [(p.place, p.round) for p in gaps.rounds] == [(0, 6), (0, 2), (0, 5)]
    assert gaps.rounds[0].text == "5 rounds for R5: preempted in round 6 for R3, resumed in round 10"


def test_a_run_alone_is_asked_what_its_slowest_waited_for(pair: list[Run]) -> None:
    first, gaps = asked(pair[0])
    assert first.question == "What did the slowest first tokens wait for?"
    assert first.paragraphs[0].startswith(
        "The slowest first token queued for 1 of its 3 rounds: admission stopped for not_first ("
    )
    assert (first.rounds[0].round, first.rounds[0].text) == (1, "R4, the slowest of all, is held here: needs 1,200 tokens, 69 there")  # fmt: skip
    assert gaps.paragraphs[0].startswith("One gap is much longer than the median")


def test_equal_runs_have_no_later_one(pair: list[Run]) -> None:
    first, _ = asked(pair[0], pair[0])
    assert first.question.endswith("? Neither.") and "1.40 rounds and 1.40 rounds" in first.paragraphs[0]


def lasting(round: Round) -> float:
    """10 ms, and 1 ms more for each token."""
    return 0.010 + 0.001 * sum(round.batch.num_tokens)


def newcomers(path: Path, policy: str) -> Run:
    """Two sequences of 60 tokens; every tenth round a prompt of 40 arrives."""
    config = SchedulerConfig(num_blocks=400, block_size=4, max_num_seqs=16, max_num_batched_tokens=64)
    arrivals = [(1, request_of(0, "a", 4, 60)), (1, request_of(1, "b", 4, 60))]
    arrivals += [(10 * k, request_of(k + 1, f"n{k}", 40, 2)) for k in range(1, 6)]
    return open_run(record_run(path / policy, policy, config, arrivals, duration_of=lasting, manifest={"clock": "virtual"}))  # fmt: skip


def test_the_longest_gaps_are_put_down_to_what_made_them(tmp_path: Path) -> None:
    nano, vllm = newcomers(tmp_path, "nano"), newcomers(tmp_path, "vllm")
    for run, cause in ((nano, "passed_by_prefill"), (vllm, "shared")):
        frame = metrics.itl(run).collect()
        found = gap_causes(run, frame)
        assert found is not None and found.num_gaps == -(-frame.height // 100)
        counts = {
            name: getattr(found, name) for name in ("preempted", "passed_by_prefill", "passed_by", "shared", "own")
        }
        assert counts.pop(cause) == found.num_gaps and not any(counts.values())
    said = asked(nano, vllm)[1].paragraphs
    assert said[0].startswith("nano: of the 2 longest gaps (") and said[0].endswith("all waited through rounds that prefilled others.")  # fmt: skip
    assert said[1].endswith("all shared their round with prefill tokens.")


def test_without_tables_of_tokens_and_decisions_less_is_answered(tmp_path: Path) -> None:
    path = record_golden(tmp_path / "nano", "nano", "article_rounds", manifest={"records": "summary"})
    for table in ("batches", "decisions", "blocks", "tokens"):
        for file in path.glob(f"{table}-*.parquet"):
            file.unlink()
    (first,) = asked(open_run(path))
    assert first.paragraphs[0].startswith("The slowest first token queued for 1 of its 3 rounds") and first.rounds == ()
