"""The metrics against figures worked out by hand, and the summary's contract: its keys, its JSON, its formulas."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from engines.interface import SchedulerConfig
from reports import metrics
from reports.formulas import FORMULAS, PERCENTILE_RULE, SYMBOLS
from reports.run import Run, open_run
from reports.summary import metric_names, summarize
from tests.fake_run import record_golden, record_run, request_of
from tests.golden_cases import load_case
from tests.laws import assert_laws

DOCS = Path(__file__).parent.parent / "docs" / "metrics.md"


def two_requests(path: Path) -> Run:
    """nano, blocks of 4, budget 8, rounds of 1 s: A 6 + 3 tokens at round 1, B 5 + 2 at round 3.

    round 1 prefill A; 2 decode A; 3 prefill B, A stalls; 4 decode A B, both finish.
    """
    config = SchedulerConfig(num_blocks=8, block_size=4, max_num_seqs=4, max_num_batched_tokens=8)
    arrivals = [(1, request_of(0, "A", 6, 3)), (3, request_of(1, "B", 5, 2))]
    return assert_laws(record_run(path, "nano", config, arrivals, manifest={"goodput": {"ttft": 1000, "tpot": 1000}}))


def test_latencies_of_two_requests_by_hand(tmp_path: Path) -> None:
    run = two_requests(tmp_path / "nano")
    rows = metrics.per_request(run).sort("request").collect()
    columns = {name: rows[name].to_list() for name in metrics.PER_REQUEST}
    assert columns["ttft"] == [1.0, 1.0]  # A: round 1 ends at 1 s; B: arrives at 2 s, first token at 3 s
    assert columns["e2el"] == [4.0, 2.0]
    assert columns["tpot"] == [1.5, 1.0]  # A: 3 s over 2 gaps
    assert columns["queue"] == [0.0, 0.0]
    assert columns["prefill"] == [1.0, 1.0]
    assert columns["decode"] == [3.0, 1.0]
    assert columns["stalled"] == [1.0, 0.0]
    assert columns["preempted"] == [0.0, 0.0]
    assert sorted(metrics.itl(run).collect()["itl"].to_list()) == [1.0, 1.0, 2.0]


def test_queue_prefill_and_decode_sum_to_e2e_latency(tmp_path: Path) -> None:
    run = assert_laws(record_golden(tmp_path / "nano", "nano", "stress_b16_tight"))
    rows = metrics.per_request(run).collect()
    assert rows.height == 120
    assert (rows["queue"] + rows["prefill"] + rows["decode"] - rows["e2el"]).abs().max() < 1e-9
    assert ((rows["preempted"] + rows["stalled"]) <= rows["e2el"] + 1e-9).all()


def test_one_token_outputs_have_no_tpot_and_no_gaps(tmp_path: Path) -> None:
    config = SchedulerConfig(num_blocks=8, block_size=4, max_num_seqs=4, max_num_batched_tokens=8)
    run = assert_laws(record_run(tmp_path / "run", "vllm", config, [(1, request_of(0, "A", 3, 1))]))
    summary = summarize(run)
    assert summary["mean_ttft_ms"] == 1000
    assert summary["mean_tpot_ms"] is None and summary["benchctl"]["latency"]["tpot"]["n"] == 0
    assert summary["benchctl"]["latency"]["itl"]["n"] == 0


def test_throughput_over_the_whole_run_and_the_steady_window(tmp_path: Path) -> None:
    run = two_requests(tmp_path / "nano")
    whole = metrics.throughput(run)
    assert (whole.requests_per_s, whole.output_tokens_per_s, whole.total_tokens_per_s) == (2 / 4, 5 / 4, 16 / 4)
    # Both are there from 2 s to 4 s: 3 of the 5 tokens come in that window, B's first at 3 s and one each at 4 s.
    assert metrics.peak_concurrency(run) == 2
    assert metrics.steady_window(run) == (2.0, 4.0)
    steady = metrics.steady_throughput(run)
    assert steady is not None
    assert (steady.requests_per_s, steady.output_tokens_per_s, steady.total_tokens_per_s) == (
        2 / 2,
        3 / 2,
        (11 + 3) / 2,
    )


def test_who_leaves_when_another_arrives_does_not_overlap_it(tmp_path: Path) -> None:
    config = SchedulerConfig(num_blocks=8, block_size=4, max_num_seqs=4, max_num_batched_tokens=8)
    arrivals = [(1, request_of(0, "A", 3, 1)), (2, request_of(1, "B", 3, 1))]
    run = assert_laws(record_run(tmp_path / "run", "vllm", config, arrivals))
    assert metrics.peak_concurrency(run) == 1


def test_slo_attainment_counts_the_refused(tmp_path: Path) -> None:
    config = SchedulerConfig(num_blocks=8, block_size=4, max_num_seqs=4, max_num_batched_tokens=8)
    arrivals = [(1, request_of(0, "A", 6, 3)), (1, request_of(1, "too-long", 60, 2)), (3, request_of(2, "B", 5, 2))]
    run = assert_laws(
        record_run(tmp_path / "run", "nano", config, arrivals, manifest={"goodput": {"ttft": 1000, "tpot": 1000}})
    )
    summary = summarize(run)
    assert (summary["completed"], summary["failed"]) == (2, 1)
    assert summary["benchctl"]["requests"]["reasons"] == {"max_tokens": 2, "exceeds_pool": 1}
    assert summary["benchctl"]["slo"] == {"limits_ms": {"ttft": 1000.0, "tpot": 1000.0}, "good": 1, "attainment": 1 / 3}
    assert summary["request_goodput"] == 1 / 4  # B alone meets both; A's TPOT is 1.5 s


@pytest.mark.parametrize(("percent", "least"), [(50, 2), (90, 10), (95, 20), (99, 100), (99.9, 1000)])
def test_a_percentile_needs_a_sample_beyond_it(percent: float, least: int) -> None:
    assert metrics.carries(least, percent) and not metrics.carries(least - 1, percent)
    spread = metrics.distribution(pl.Series(range(least - 1)), (percent,))
    assert spread.percentiles[percent] is None
    assert metrics.distribution(pl.Series(range(least)), (percent,)).percentiles[percent] is not None


def test_a_distribution_is_numpy_s() -> None:
    values = np.random.default_rng(1).gamma(2.0, size=500)
    spread = metrics.distribution(pl.Series(values.tolist() + [None]), (50, 99))
    assert spread.n == 500
    assert spread.mean == pytest.approx(values.mean()) and spread.std == pytest.approx(np.std(values))
    assert spread.percentiles[99] == pytest.approx(np.percentile(values, 99))


def test_scheduler_counters_equal_the_log_s_totals(tmp_path: Path) -> None:
    run = assert_laws(record_golden(tmp_path / "nano", "nano", "stress_b16_tight"))
    ours, logged = summarize(run)["benchctl"], load_case("nano", "stress_b16_tight")["totals"]
    rounds = {
        "total": logged["rounds"],
        "prefill": logged["prefill_rounds"],
        "decode": logged["decode_rounds"],
        "mixed": 0,
        "empty": 0,
    }
    assert ours["rounds"]["rounds"] == rounds
    assert ours["counters"]["preemptions"] == logged["preemptions"] == 52
    cache = ours["prefix_cache"]
    assert cache["hit_tokens"] + cache["resumed_hit_tokens"] == logged["cached_tokens"]
    assert cache["queried_tokens"] == ours_prompt_tokens(run) and cache["resumed_hit_tokens"] > 0
    assert ours["counters"]["peak_blocks"] == 30 - logged["min_free_blocks"]
    assert sum(ours["stops"]["waiting"].values()) == logged["rounds"]
    assert sum(ours["stops"]["running"].values()) == logged["decode_rounds"]


def test_peak_blocks_sees_moments_inside_a_round(tmp_path: Path) -> None:
    run = open_run(record_golden(tmp_path / "vllm", "vllm", "priority_ghost_hit"))
    # Round 5 goes 2 → 0 → 12 → 11 free of 14: neither end shows the moment without a free block.
    at_ends = (
        run.read("rounds")
        .filter(pl.col("round") == 5)
        .select("free_blocks_start", "free_blocks_scheduled", "free_blocks_end")
        .row(0)
    )
    assert at_ends == (2, 11, 11)
    assert metrics.free_counts(run).filter(pl.col("round") == 5).collect()["least_free"][0] == 0
    assert metrics.peak_used_blocks(run) == 14


def test_the_summary_has_vllm_bench_s_keys_and_is_json(tmp_path: Path) -> None:
    summary = summarize(two_requests(tmp_path / "nano"))
    expected = {
        "duration",
        "completed",
        "failed",
        "total_input_tokens",
        "total_output_tokens",
        "request_throughput",
        "request_goodput",
    }
    expected |= {"output_throughput", "total_token_throughput", "max_concurrent_requests", "benchctl"}
    for metric in ("ttft", "tpot", "itl", "e2el"):
        expected |= {f"{stat}_{metric}_ms" for stat in ("mean", "median", "std", "p50", "p90", "p95", "p99")}
    assert set(summary) == expected
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert summary["median_ttft_ms"] == 1000 and summary["p99_ttft_ms"] is None


def test_chosen_metrics_and_percentiles_stand_at_the_top(tmp_path: Path) -> None:
    summary = summarize(two_requests(tmp_path / "nano"), percentile_metrics=("ttft",), percentiles=(25, 99.9))
    assert {key for key in summary if key.endswith("_ms")} == {
        "mean_ttft_ms",
        "median_ttft_ms",
        "std_ttft_ms",
        "p25_ttft_ms",
        "p99.9_ttft_ms",
    }


def test_a_run_without_rounds_summarizes_to_nothing_measured(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(
        json.dumps({"schema_version": 1, "status": "running", "scheduler": "nano", "records": "none"})
    )
    summary = summarize(open_run(tmp_path))
    assert (summary["duration"], summary["completed"], summary["request_throughput"]) == (0.0, 0, None)
    assert summary["benchctl"]["counters"]["peak_blocks"] is None


def test_without_token_records_itl_is_empty_and_the_rest_stands(tmp_path: Path) -> None:
    path = record_golden(tmp_path / "nano", "nano", "article_rounds", manifest={"records": "summary"})
    whole = summarize(open_run(record_golden(tmp_path / "full", "nano", "article_rounds")))
    for table in ("batches", "decisions", "blocks", "tokens"):
        (path / f"{table}-00000.parquet").unlink()
    summary = summarize(open_run(path))
    assert summary["mean_itl_ms"] is None and summary["benchctl"]["latency"]["itl"]["n"] == 0
    assert (
        summary["mean_ttft_ms"] == whole["mean_ttft_ms"] and summary["output_throughput"] == whole["output_throughput"]
    )


def ours_prompt_tokens(run: Run) -> int:
    return int(run.read("requests")["prompt_tokens"].sum())


def test_every_metric_of_the_summary_has_its_formula_in_the_documentation(tmp_path: Path) -> None:
    named = metric_names(summarize(two_requests(tmp_path / "nano")))
    assert named == set(FORMULAS), named ^ set(FORMULAS)
    text = DOCS.read_text()
    for name, (formula, _) in FORMULAS.items():
        assert f"| `{name}` | {formula.replace('|', chr(92) + '|')} |" in text, (
            f"docs/metrics.md lacks {name} = {formula}"
        )
    for symbol, meaning in SYMBOLS.items():
        assert f"| `{symbol}` | {meaning} |" in text, symbol
    assert PERCENTILE_RULE in text
