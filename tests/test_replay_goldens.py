"""Every logged case as a trace through the command line: its rounds are the real scheduler's, and the laws hold on its record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tests.command_line import call, write_trace
from tests.golden_cases import case_names, expand, is_refused, load_case
from tests.laws import assert_laws

CASES = [(policy, name) for policy in ("nano", "vllm") for name in case_names(policy)]
FLAGS = {
    "block_size": "--block-size", "num_blocks": "--num-blocks", "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens", "max_model_len": "--max-model-len", "watermark": "--watermark",
    "long_prefill_token_threshold": "--long-prefill-token-threshold", "policy": "--scheduling-policy", "max_loras": "--max-loras",
}  # fmt: skip
SWITCHES = {
    "enable_chunked_prefill": "enable-chunked-prefill",
    "reserve_full_isl": "scheduler-reserve-full-isl",
    "enable_prefix_caching": "enable-prefix-caching",
}


def flags_of(config: dict[str, Any]) -> list[str]:
    out = [text for key, flag in FLAGS.items() if config.get(key) for text in (flag, str(config[key]))]
    return out + [f"--{'' if config[key] else 'no-'}{name}" for key, name in SWITCHES.items() if key in config]


def trace_of(case: dict[str, Any], path: Path) -> Path:
    rows = []
    for entry in case["requests"]:
        row = {
            "id": entry["id"],
            "arrival_round": entry["arrival_round"],
            "prompt_token_ids": expand(entry["prompt"]).tolist(),
        }
        row |= {"output_token_ids": expand(entry["output"]).tolist(), "arrival_s": entry.get("arrival_time")}
        row |= {"priority": entry.get("priority", 0), "adapter": entry.get("adapter")}
        rows.append({key: value for key, value in row.items() if value is not None})
    return write_trace(path, rows)


@pytest.mark.parametrize(("policy", "name"), CASES)
def test_a_logged_case_through_the_command_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], policy: str, name: str
) -> None:
    case = load_case(policy, name)
    answer = call(
        capfd, "replay", trace_of(case, tmp_path / "t.jsonl"), "--scheduler", policy, "--engine", "null", "--clock", "rounds",
        "--no-report", "--json", "--out", tmp_path / "o", *flags_of(case["config"]),
    )  # fmt: skip
    assert answer.code == (1 if is_refused(case) else 0), answer.err
    run = assert_laws(tmp_path / "o" / policy)
    statuses = set(run.read("requests")["status"])
    if is_refused(case):
        assert statuses <= {"finished", "rejected"} and "rejected" in statuses
        return
    ids = run.ids
    scheduled: dict[int, list[Any]] = {}
    cached: dict[int, dict[str, int]] = {}
    for number, request, start, tokens, hit in (
        run.read("batches").select("round", "request", "start", "num_tokens", "cached_tokens").iter_rows()
    ):
        scheduled.setdefault(number, []).append({"id": ids[request], "start": start, "num_tokens": tokens})
        if hit is not None:
            cached.setdefault(number, {})[ids[request]] = hit
    listed: dict[str, dict[int, list[str]]] = {"preempt": {}, "finish": {}}
    for number, kind, request in (
        run.read("decisions").filter(pl.col("kind").is_in(["preempt", "finish"])).select("round", "kind", "request").iter_rows()
    ):  # fmt: skip
        listed[kind].setdefault(number, []).append(ids[request])
    by_round = {row["round"]: row for row in run.read("rounds").iter_rows(named=True)}
    logged = [r for r in case["rounds"] if r["scheduled"] or r["preempted"]]
    assert sorted(by_round) == [r["round"] for r in case["rounds"] if r.get("phase") != "idle"]
    for want in logged:
        number = want["round"]
        row = by_round[number]
        assert scheduled.get(number, []) == want["scheduled"], number
        assert cached.get(number, {}) == want["cached_tokens"], number
        assert listed["preempt"].get(number, []) == want["preempted"], number
        assert listed["finish"].get(number, []) == want["finished"], number
        assert (row["free_blocks_scheduled"], row["free_blocks_end"]) == (
            want["free_blocks"],
            want["free_blocks_end"],
        ), number
        assert (row["waiting"], row["running"]) == (len(want["waiting"]), len(want["running"])), number
        if "free_list" in want:
            assert (row["free_list"], row["hashed_blocks"]) == (want["free_list"], want["hashed_blocks"]), number
