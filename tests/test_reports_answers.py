"""The two answers at the head of a page: what they say against runs small enough to work out by hand."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from engines.interface import Round, SchedulerConfig
from reports import metrics
from reports.answers import Answer, answers
from reports.first_tokens import first_tokens
from reports.gap_causes import gap_causes
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


@pytest.mark.parametrize(("decode_ms", "cause"), [(25, "passed"), (80, "own")])
def test_a_gap_is_put_down_to_what_took_most_of_it(tmp_path: Path, decode_ms: int, cause: str) -> None:
    """Two long answers decode; prompts of 100, 120 and 110 tokens pass them by in three rounds of 10, 12 and 11 ms."""

    def duration(round: Round) -> float:
        tokens = round.batch.num_tokens
        if max(tokens) > 1:
            return 0.0001 * float(sum(tokens))
        return decode_ms / 1000 if len(tokens) == 5 else 0.004

    config = SchedulerConfig(num_blocks=400, block_size=4, max_num_seqs=16, max_num_batched_tokens=128)
    arrivals = [(1, request_of(0, "a", 4, 30)), (1, request_of(1, "b", 4, 30))]
    arrivals += [(10, request_of(2 + k, f"n{k}", size, 2)) for k, size in enumerate((100, 120, 110))]
    run = open_run(record_run(tmp_path / "nano", "nano", config, arrivals, duration_of=duration, manifest={"clock": "virtual"}))  # fmt: skip
    worst = spikes(run)[0]
    assert worst.cause == cause and worst.gap_s == pytest.approx(0.033 + decode_ms / 1000)
    if cause == "passed":
        assert worst.round == 11
        assert worst.why == (
            "3 rounds prefilled others for 33.00 ms; the longest, 11 with 120 prefill tokens, 12.00 ms; its own round of 5 decodes took 25.00 ms"
        )
    else:
        assert worst.round == 13
        assert worst.why == "its own round of 5 decodes took 80.00 ms; 3 rounds prefilled others for 33.00 ms"
    causes = gap_causes(run, metrics.itl(run).collect())
    assert causes is not None and (causes.passed_by_prefill, causes.own) == ((1, 0) if cause == "passed" else (0, 1))


@pytest.mark.parametrize(
    ("measured", "field", "words"),
    [
        ({"device_s": 0.2, "schedule_s": 0.1, "after": "eager"}, "launch", "all waited for the launch of the next round, which has no CUDA graph."),
        ({"device_s": 0.7, "mode": "graph"}, "shared", "all shared their round with prefill tokens."),
        ({"device_s": 0.7, "mode": "eager"}, "shared", "tokens; all of them lay mostly in rounds without a CUDA graph (eager)."),
        ({"device_s": 0.2, "schedule_s": 0.6}, "host", "all waited for the host, the device idle for more than half of them."),
        ({"device_s": 0.2, "schedule_s": 0.1}, "hiccup", "all are hiccups of the machine: neither the device nor recorded host work took half of them."),
    ],
)  # fmt: skip
def test_what_made_a_round_long_is_read_from_its_device_and_host_times(
    tmp_path: Path, measured: dict[str, float | str], field: str, words: str
) -> None:
    """As the longest gaps are those of mixed rounds, every mixed round is given the times; shares of its own time."""
    run = newcomers(tmp_path, "vllm")
    long = pl.col("kind") == "mixed"
    span = pl.col("t_end_s") - pl.col("t_start_s")
    for part in run.path.glob("rounds-*.parquet"):
        frame = pl.read_parquet(part).with_columns(
            device_s=pl.when(long).then(span * float(measured["device_s"])).otherwise(span),
            schedule_s=pl.when(long).then(span * float(measured.get("schedule_s", 0.0))).otherwise(0.0),
            prepare_s=pl.lit(0.0), update_s=pl.lit(0.0), record_s=pl.lit(0.0),
            mode=pl.when(long).then(pl.lit(measured.get("mode", "graph"))).when(long.shift(1).fill_null(False)).then(pl.lit(measured.get("after", "graph"))).otherwise(pl.lit("graph")),
        )  # fmt: skip
        frame.write_parquet(part)
    again = open_run(run.path)
    again.manifest.update(clock="wall", overlapped="after" in measured)
    found = gap_causes(again, metrics.itl(again).collect())
    assert found is not None and getattr(found, field) == found.num_gaps
    assert asked(again)[1].paragraphs[0].endswith(words)


def test_the_mechanism_of_later_first_tokens_is_named(tmp_path: Path) -> None:
    """10 ms and 1 ms a token: a prompt of 40 alone takes 50 ms, with the two that decode 52."""
    nano, vllm = newcomers(tmp_path, "nano"), newcomers(tmp_path, "vllm")
    alone, shared = first_tokens(nano), first_tokens(vllm)
    assert alone is not None and shared is not None
    # Two of seven come from round 1, which prefills 8 tokens in 18 ms.
    assert alone.own_s == pytest.approx((2 * 0.018 + 5 * 0.050) / 7) and alone.decodes == 0 and alone.mixed == 0
    assert shared.own_s == pytest.approx((2 * 0.018 + 5 * 0.052) / 7) and shared.decodes == pytest.approx(10 / 7)
    assert shared.mixed == pytest.approx(5 / 7) and shared.tail_s == alone.tail_s == 0
    said = " ".join(asked(nano, vllm)[0].paragraphs)
    assert "42.29 ms under vllm, where 71.4% decode others too (31 prefill tokens and 1.43 decodes in the mean)" in said
    assert "where they prefill alone (31 prefill tokens in the mean)" in said and "dispatch" in said


def test_without_tables_of_tokens_and_decisions_less_is_answered(tmp_path: Path) -> None:
    path = record_golden(tmp_path / "nano", "nano", "article_rounds", manifest={"records": "summary"})
    for table in ("batches", "decisions", "blocks", "tokens"):
        for file in path.glob(f"{table}-*.parquet"):
            file.unlink()
    (first,) = asked(open_run(path))
    assert first.paragraphs[0].startswith("The slowest first token queued for 1 of its 3 rounds") and first.rounds == ()
