"""Slices of public traces, where BENCHCTL_TRACE_SAMPLES names their folder: the sums that a correct importer reports. None is committed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from traces.errors import BenchctlError
from traces.exporting import export_trace
from traces.formats.base import ImportOptions
from traces.importing import import_trace
from traces.info import describe
from traces.load import Trace, open_trace
from traces.prefix import prefix_upper_bound
from traces.tokens import TokenMaker

FOLDER = os.environ.get("BENCHCTL_TRACE_SAMPLES")
pytestmark = pytest.mark.skipif(not FOLDER, reason="BENCHCTL_TRACE_SAMPLES names no folder of samples")

# file → requests, input tokens, output tokens, span in s (None: it has no times)
SUMS: dict[str, tuple[int, int, int, float | None]] = {
    "azure_2023_code_rows_0-2000.csv": (2000, 3973157, 59024, 853.079),
    "azure_2023_conv_rows_0-2000.csv": (2000, 2209565, 529807, 424.259),
    "azure_2024_code_head_tail.csv": (10, 24016, 180, 604799.920),
    "burstgpt_3_conversation_rows_0-105_reduced.csv": (105, 123925, 21098, 32700.0),
    "burstgpt_v1_head.csv": (5, 3521, 1386, 209.0),
    "burstgpt_v2_head.csv": (4, 3656, 776, 144.0),
    "etalon_sharegpt4_lengths_rows_0-6000.csv": (6000, 14049464, 2690181, None),
    "mooncake_conversation_rows_0-1200.jsonl": (1200, 16848754, 413423, 410.999),
    "mooncake_synthetic_rows_0-1000.jsonl": (1000, 11851558, 196039, 272.653),
    "ragpulse_rows_0-900.jsonl": (900, 2729142, 233526, 48673.0),
    "vidur_arxiv_lengths_rows_0-2000.csv": (2000, 5079765, 625186, None),
    "vidur_splitwise_conv_rows_0-2000.csv": (2000, 2209565, 529807, 424.259),
}
OTHERS = {
    "frontier_prefix_cache_shared_session_trace.csv": 2, "llmservingsim_example_trace.jsonl": 10, "openai_batch_sample_job_input.jsonl": 10,
    "otel_genai_parallel_requests.json": 5, "otel_genai_simple_chain.json": 3, "sharegpt_shape_neutral.json": 9, "splitwise-sim_test_trace.csv": 3,
}  # fmt: skip


def sample(name: str) -> Path:
    assert FOLDER is not None
    return Path(FOLDER) / name


def imported(tmp_path: Path, name: str, **options: Any) -> Trace:
    if name.startswith("ragpulse"):
        options["side_files"] = (sample("ragpulse_rows_0-900_component_lengths.csv"),)
    import_trace(sample(name), tmp_path / "out.jsonl", ImportOptions(**options))
    return open_trace(tmp_path / "out.jsonl", strict=True)


@pytest.mark.parametrize("name", sorted(SUMS))
def test_a_slice_imports_with_its_sums(tmp_path: Path, name: str) -> None:
    trace = imported(tmp_path, name)
    requests = list(trace.requests())
    num, inputs, outputs, span = SUMS[name]
    assert len(requests) == num
    assert sum(r.input_length or 0 for r in requests) == inputs
    assert sum(r.output_length or 0 for r in requests) == outputs
    if span is not None:
        assert round(trace.span_s, 3) == span
        assert trace.in_time_order
        assert not (trace.header.on_import or {}).get("descents")


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_the_other_samples_import_whole(tmp_path: Path, name: str) -> None:
    assert imported(tmp_path, name).num_requests == OTHERS[name]


def test_the_dialect_example_has_one_row_with_a_wrong_block_count(tmp_path: Path) -> None:
    with pytest.raises(BenchctlError, match="3 hash_ids for 1024 tokens"):
        imported(tmp_path, "aiperf_production_trace.jsonl")
    assert imported(tmp_path, "aiperf_production_trace.jsonl", skip_bad=True).num_requests == 9


def test_a_client_of_servegen_gives_requests_at_its_rate(tmp_path: Path) -> None:
    trace = imported(tmp_path, "servegen_m-small_chunk-27-trace.csv", duration_s=100.0)
    assert trace.num_requests == pytest.approx(8806, rel=0.05)  # 88.06/s


@pytest.mark.parametrize(
    ("name", "hit", "blocks"), [("conversation_rows_0-1200", 7632, 33490), ("synthetic_rows_0-1000", 4007, 23787)]
)
def test_mooncake_slices_hit_as_many_blocks_as_published(tmp_path: Path, name: str, hit: int, blocks: int) -> None:
    trace = imported(tmp_path, f"mooncake_{name}.jsonl")
    use = describe(trace).prefix
    assert use is not None and (use.blocks_hit, use.blocks) == (hit, blocks)


def test_the_token_bound_by_hash_ids_is_that_of_the_made_tokens(tmp_path: Path) -> None:
    trace = imported(tmp_path, "mooncake_synthetic_rows_0-1000.jsonl", limit=200)
    use = describe(trace).prefix
    maker = TokenMaker(trace, vocab_size=None)
    made = prefix_upper_bound(((maker.prompt_length(r), maker.token_ids(r)) for r in trace.requests()), 16)
    assert use is not None and (use.prompt_tokens, use.tokens_hit) == made


@pytest.mark.parametrize("name", ["mooncake_conversation_rows_0-1200.jsonl", "mooncake_synthetic_rows_0-1000.jsonl"])
def test_mooncake_files_come_back_byte_for_byte(tmp_path: Path, name: str) -> None:
    export_trace(imported(tmp_path, name), tmp_path / "back.jsonl", "mooncake")
    assert (tmp_path / "back.jsonl").read_bytes() == sample(name).read_bytes()


def test_azure_statistics_are_those_of_the_rows_read_another_way(tmp_path: Path) -> None:
    rows = [line.split(",") for line in sample("azure_2023_code_rows_0-2000.csv").read_text().splitlines()[1:]]
    stamps = np.array([row[0].replace(" ", "T") for row in rows], dtype="datetime64[ns]").astype(np.int64)
    gaps = np.diff(stamps) / 1e9
    info = describe(imported(tmp_path, "azure_2023_code_rows_0-2000.csv"))
    assert info.arrivals["cv"] == pytest.approx(gaps.std() / gaps.mean(), rel=1e-9)
    assert info.arrivals["longest_gap_s"] == pytest.approx(gaps.max(), rel=1e-9)
    assert info.arrivals["zero_gaps"] == 0
    inputs = sorted(int(row[1]) for row in rows)
    assert info.lengths["input"]["p50"] in inputs[998:1002] and info.lengths["input"]["p100"] == inputs[-1]


FULL = {"conversation_trace.jsonl": (12031, 0.3736, 118, 0.3664), "synthetic_trace.jsonl": (3993, 0.6512, 213, 0.6396)}


@pytest.mark.parametrize("name", sorted(FULL))
def test_full_mooncake_files_give_the_published_figures(name: str) -> None:
    if not sample(name).exists():
        pytest.skip(f"{name} is not in the folder of samples")
    info = describe(open_trace(sample(name)))
    num, tokens, repeats, blocks = FULL[name]
    assert info.num_requests == num and info.prefix is not None
    assert round(info.prefix.token_rate, 4) == tokens and round(info.prefix.block_rate, 4) == blocks
    assert info.prefix.repeated_prompts == repeats


def test_a_truncated_sharegpt_file_from_a_package(tmp_path: Path) -> None:
    path = os.environ.get("BENCHCTL_TRUNCATED_SHAREGPT")
    if not path:
        pytest.skip("BENCHCTL_TRUNCATED_SHAREGPT names no file")
    with pytest.raises(BenchctlError, match=f"cut off at byte {Path(path).stat().st_size}"):
        import_trace(path, tmp_path / "out.jsonl", ImportOptions())
    report = import_trace(path, tmp_path / "out.jsonl", ImportOptions(skip_bad=True))
    assert report.num_requests > 10_000 and report.dropped["bad"] == 1
    assert open_trace(tmp_path / "out.jsonl").num_requests == report.num_requests
    json.dumps(report.header)
