"""What the page embeds: the format there and back, the rules of stretches, spikes, slow starts, pools, differences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from engines.interface import SchedulerConfig
from reports.blocks import replay
from reports.cache import cache_use
from reports.compare import compare
from reports.compare_head import Side
from reports.page_data import DETAILS, embed
from reports.page_pack import DELTA, FLOAT, NULLABLE, Pack, unpack
from reports.page_pair import deltas, differing_settings, judge, single_measured
from reports.page_pool import AGES, pool_shares
from reports.roofline import device_use
from reports.run import Run, open_run
from reports.spikes import slow_starts, spikes
from reports.summary import summarize
from reports.verdict import sentences
from tests.fake_run import record_golden, record_run, request_of


def test_a_pack_comes_back_as_it_went_in() -> None:
    rng = np.random.default_rng(1)
    wide = rng.integers(-(2**45), 2**45, 300)
    columns = {
        "plain": wide,
        "delta": np.cumsum(rng.integers(0, 5, 300)) + 10**9,
        "nullable": pl.Series([None if i % 3 else int(v) for i, v in enumerate(wide)]),
        "float": pl.Series([None if i % 5 == 0 else i / 8 for i in range(300)]),
        "flag": pl.Series([i % 2 == 0 for i in range(300)]),
    }
    pack = Pack({"words": ["a", "</script>"]})
    pack.add("table", columns, {"delta": DELTA, "nullable": NULLABLE, "float": FLOAT})
    pack.add("empty", {"a": np.zeros(0, dtype=np.int64)})
    header, tables = unpack(pack.text())
    assert header["words"] == ["a", "</script>"] and "<" not in pack.text()
    assert tables["empty"] == {"a": []}
    for name, values in columns.items():
        assert tables["table"][name] == [int(v) if isinstance(v, bool | np.integer) else v for v in values], name


def test_a_decoding_request_is_one_row_however_long_it_decodes(tmp_path: Path) -> None:
    config = SchedulerConfig(num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=64)
    run = open_run(
        record_run(tmp_path / "nano", "nano", config, [(1, request_of(0, "a", 8, 30)), (5, request_of(1, "b", 8, 30))])
    )
    _, tables = unpack(embed(run))
    # a: prefill in round 1, decodes 29 tokens; round 5 prefills b and decodes nobody, which does not end the stretch.
    assert list(zip(*(tables["stretches"][name] for name in ("request", "at", "count", "start")), strict=True)) == [
        (0, 1, 29, 8),
        (1, 5, 29, 8),
    ]
    assert tables["singles"]["at"] == [0, 4] and tables["orders"]["at"] == []


def test_a_request_that_is_left_out_of_a_decode_begins_a_new_stretch(tmp_path: Path) -> None:
    config = SchedulerConfig(num_blocks=64, block_size=4, max_num_seqs=1, max_num_batched_tokens=64)
    run = open_run(
        record_run(tmp_path / "nano", "nano", config, [(1, request_of(0, "a", 8, 4)), (2, request_of(1, "b", 8, 4))])
    )
    batches = run.read("batches").filter(pl.col("phase") == "decode")
    _, tables = unpack(embed(run))
    assert sum(tables["stretches"]["count"]) == batches.height


def test_less_detail_is_smaller_and_says_what_is_missing(tmp_path: Path) -> None:
    run = open_run(record_golden(tmp_path / "vllm", "vllm", "stress_fcfs_a"))
    sizes = [len(embed(run, detail)) for detail in DETAILS]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(DETAILS)
    assert [len(detail.notes) for detail in DETAILS] == [0, 1, 1, 1]
    header, tables = unpack(embed(run, DETAILS[-1]))
    assert set(tables) == {"rounds", "requests"} and not header["facts"]["batches"]


# -- spikes and slow starts


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return open_run(record_golden(tmp_path_factory.mktemp("n") / "nano", "nano", "article_rounds"))


def test_the_article_s_longest_gaps_name_their_rounds(nano: Run) -> None:
    found = spikes(nano)
    # R5 emits in round 5, loses its block in round 6 and gets its second token in round 10: 5 s.
    first = found[0]
    assert (nano.labels[first.request], first.gap_s, first.round) == ("R5", 5.0, 6)
    assert first.why == "preempted in round 6 for R3, resumed in round 10"
    # R1 to R3 emit in round 1 and next in round 4: rounds 2 and 3 prefill R4.
    second = found[1]
    assert (second.gap_s, second.round) == (3.0, 2)
    assert second.why == "2 rounds prefilled others; the first, 2 with 1,024 prefill tokens"  # ticks last alike


def test_even_gaps_are_no_spikes(tmp_path: Path) -> None:
    config = SchedulerConfig(num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=64)
    run = open_run(record_run(tmp_path / "vllm", "vllm", config, [(1, request_of(0, "a", 8, 20))]))
    assert spikes(run) == []


def test_what_the_slowest_first_tokens_waited_for(tmp_path: Path) -> None:
    # One seat: the last of ten waits while each of the others prefills and decodes twice.
    config = SchedulerConfig(num_blocks=64, block_size=4, max_num_seqs=1, max_num_batched_tokens=64)
    run = open_run(
        record_run(tmp_path / "vllm", "vllm", config, [(1, request_of(i, f"r{i}", 8, 3)) for i in range(10)])
    )
    slow = slow_starts(run)
    assert slow is not None and slow.num_requests == 1 and slow.worst == (9,)
    assert slow.stops == (("max_num_seqs", 27),) and slow.num_rounds == 27  # rounds 1 to 27; round 28 schedules it
    assert (slow.queue_s, slow.prefill_s, slow.ttft_s) == (27.0, 1.0, 28.0)


# -- pools, cache, device


@pytest.mark.parametrize(
    "policy, case", [("vllm", "stress_fcfs_a"), ("nano", "stress_b16_tight"), ("vllm", "multi_turn_16")]
)
def test_shares_of_a_pool_are_those_of_a_replay(tmp_path: Path, policy: str, case: str) -> None:
    run = open_run(record_golden(tmp_path / policy, policy, case))
    found = pool_shares(run)
    assert found is not None
    owners, ages = found
    rounds = run.read("rounds")
    at = {number: i for i, number in enumerate(rounds["round"])}
    born: dict[int, int] = {}
    prefilling: dict[int, bool] = {}
    batches = run.read("batches").partition_by("round", as_dict=True)
    decisions = run.read("decisions").partition_by("round", as_dict=True)
    by_owner = {row["round"]: row for row in owners.iter_rows(named=True)}
    by_age = {row["round"]: row for row in ages.iter_rows(named=True)}
    held: dict[int, dict[int, int]] = {}
    events = run.read("blocks").sort("round", "order").partition_by("round", as_dict=True)
    for number, pool in replay(run):
        for row in events.get((number,), pl.DataFrame()).iter_rows(named=True):
            if row["event"] == "allocate" or (row["event"] == "share" and not held.get(row["block"])):
                born[row["block"]] = at[number]
            if row["event"] in ("allocate", "share"):
                held.setdefault(row["block"], {})[row["request"]] = 1
            elif row["event"] in ("free", "release"):
                held[row["block"]].pop(row["request"])
        for row in decisions.get((number,), pl.DataFrame()).iter_rows(named=True):
            if row["kind"] in ("admit", "resume"):
                prefilling[row["request"]] = True
        for row in batches.get((number,), pl.DataFrame()).iter_rows(named=True):
            if row["phase"] == "prefill" and row["yields_token"]:
                prefilling[row["request"]] = False
        if number not in by_owner:
            continue
        mine = by_owner[number]
        single = [next(iter(who)) for who in pool.owners.values() if len(who) == 1]
        assert mine["shared"] == sum(len(who) > 1 for who in pool.owners.values()), number
        assert mine["prefilling"] == sum(prefilling[request] for request in single), number
        assert mine["decoding"] == sum(not prefilling[request] for request in single), number
        row = rounds.row(at[number], named=True)
        assert (mine["reusable"], mine["reusable"] + mine["free"]) == (
            row["cached_free_blocks"],
            row["free_blocks_end"],
        )
        edges = [age for age, _ in AGES] + [10**9]
        old = [at[number] - born[block] for block in pool.owners]
        for (low, name), high in zip(AGES, edges[1:], strict=True):
            assert by_age[number][name] == sum(low <= age < high for age in old), (number, name)


def test_cache_use_counts_hits_on_used_and_on_freed_blocks(tmp_path: Path) -> None:
    run = open_run(record_golden(tmp_path / "nano", "nano", "article_r7_hit"))
    use = cache_use(run, summarize(run))
    blocks = run.read("blocks").sort("round", "order")
    used = freed = 0
    last: dict[int, str] = {}
    for row in blocks.iter_rows(named=True):
        if row["event"] == "share":
            freed += last[row["block"]] == "free"
            used += last[row["block"]] != "free"
        if row["event"] in ("allocate", "share", "release", "free"):
            last[row["block"]] = row["event"]
    assert (use.hits_on_used, use.hits_on_freed) == (used, freed) and used + freed == 1
    assert use.recovered_tokens == 0


def test_tokens_given_back_to_resumed_requests(tmp_path: Path) -> None:
    run = open_run(record_golden(tmp_path / "vllm", "vllm", "preempt_recover"))
    resumed = run.read("decisions").filter(pl.col("kind") == "resume").select("round", "request")
    given = run.read("batches").join(resumed, on=["round", "request"], how="semi")["cached_tokens"].sum()
    assert cache_use(run, summarize(run)).recovered_tokens == given > 0


def test_device_use_against_measured_ceilings(tmp_path: Path) -> None:
    path = record_golden(
        tmp_path / "nano",
        "nano",
        "article_rounds",
        manifest={"engine": "torch", "hardware": {"gpu": {"name": "NVIDIA H200"}}},
    )
    file = path / "rounds-00000.parquet"
    rounds = pl.read_parquet(file).with_columns(
        pl.when(pl.col("kind") == "prefill").then(79.5e12).otherwise(1e9).alias("flops"),
        pl.lit(4.26e9).alias("bytes"),
        pl.lit(0.2).alias("device_s"),
    )
    rounds.write_parquet(file)
    use = {entry.kind: entry for entry in device_use(open_run(path))}
    # 79.5 TFLOP in 0.2 s are half of the measured 795 TFLOP/s; 4.26 GB in 0.2 s are 0.5 % of 4.26 TB/s.
    assert use["prefill"].flops_share == pytest.approx(0.5) and use["prefill"].bound == 0
    assert use["decode"].bytes_share == pytest.approx(0.005) and use["decode"].bound == pytest.approx(1)


# -- several runs


def test_differing_settings_leave_out_what_one_policy_alone_has_at_its_default(tmp_path: Path) -> None:
    runs = [
        open_run(record_golden(tmp_path / policy, policy, case))
        for policy, case in (("nano", "article_rounds"), ("vllm", "worked_example"))
    ]
    found = {setting.name: setting.values for setting in differing_settings(runs)}
    assert found["scheduler"] == ("nano", "vllm")
    assert differing_settings(runs[:1]) == [] and differing_settings([runs[0], runs[0]]) == []


def test_deltas_call_better_what_compare_calls_better(nano: Run) -> None:
    summary = summarize(nano)
    same = judge([nano, nano], [summary, summary])
    assert same is not None and all(delta.best is None and delta.change == "same" for delta in deltas([summary, summary], same))  # fmt: skip
    slower = summarize(nano)
    slower["benchctl"]["latency"]["itl"] = {
        key: None if v is None else v * 2 for key, v in summary["benchctl"]["latency"]["itl"].items()
    }
    slower["output_throughput"] = summary["output_throughput"] * 1.2
    found = {delta.label: delta for delta in deltas([summary, slower], judge([nano, nano], [summary, slower]))}
    # Five requests carry no interval, so a latency is not called better; what the run did as a whole is exact.
    assert (found["ITL p50"].best, found["ITL p50"].change) == (None, "+100.0%")
    assert found["ITL p50"].verdict == "can't tell beyond these few requests"
    assert (found["output throughput"].best, found["output throughput"].change) == (1, "+20.0%")
    assert all(delta.best is None for delta in deltas([summary, slower, slower], None))


def test_single_runs_on_a_measuring_clock_are_not_called_better(tmp_path: Path) -> None:
    runs = []
    for policy, case in (("nano", "article_rounds"), ("vllm", "worked_example")):
        runs.append(open_run(record_golden(tmp_path / policy, policy, case, manifest={"clock": "wall", "engine": "torch"})))  # fmt: skip
    summaries = [summarize(run) for run in runs]
    judged = judge(runs, summaries)
    assert judged is not None and single_measured(runs)
    rows = compare(Side("A", (runs[0],)), Side("B", (runs[1],))).metrics
    assert judged == {row.key: row for row in rows}  # one rule
    for delta in deltas(summaries, judged):
        assert delta.best is None, delta
        assert delta.verdict.startswith("can't tell: one measured run of each") or delta.verdict == "no difference", (
            delta
        )
    assert "a repeat may turn differences round" in sentences(summaries, ["nano", "vllm"], True)[-1]


# -- the verdict


def test_the_verdict_counts_rounds_where_the_clock_does(nano: Run) -> None:
    said = sentences([summarize(nano)], ["nano"])
    assert said == [
        "nano finished 5 of 5 requests in 24 rounds, 2.38 output tokens a round.",
        "TTFT p50 is 1 round; requests queued for 0.20 rounds on average.",  # R4 alone waits, for one
        "ITL p95 is 3 rounds; running requests stood still for 13 rounds in all (17.1% of all latency) and one preemption made 200 tokens be computed again.",
    ]


def test_the_verdict_of_a_clock_that_measures_is_in_seconds(tmp_path: Path) -> None:
    run = open_run(record_golden(tmp_path / "nano", "nano", "article_rounds", manifest={"clock": "virtual"}))
    said = sentences([summarize(run)], ["nano"])
    assert said[0] == "nano finished 5 of 5 requests in 24.00 s, 2.38 output tokens a second."
    assert said[1] == "TTFT p50 is 1,000 ms; requests queued for 200.0 ms on average."


def test_the_verdict_of_two_equal_runs_says_so(nano: Run) -> None:
    summary = summarize(nano)
    said = sentences([summary, summary], ["a", "b"])
    assert said[1].startswith("TTFT p50 is the same, 1 round;") and "ITL p95 is the same, 3 rounds" in said[2]


def test_the_verdict_of_three_runs_puts_them_in_order(nano: Run) -> None:
    said = sentences([summarize(nano)] * 3, ["a", "b", "c"])
    assert said[1].startswith("TTFT p50, lowest first: a 1 round, b 1 round, c 1 round;")
