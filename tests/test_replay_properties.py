"""Random traces through whole replays: the laws hold, and a recorded clock repeats every decision."""

from __future__ import annotations

import json
import tempfile
import threading
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from benchctl.build import build_command, build_run
from benchctl.config import ReplayOptions
from benchctl.runner import run_one
from reports.run import Run
from tests.laws import assert_laws

requests = st.lists(
    st.fixed_dictionaries(
        {
            "arrival_s": st.integers(0, 40).map(lambda n: n / 4),
            "input_length": st.integers(1, 60),
            "output_length": st.integers(1, 25),
            "priority": st.integers(0, 1),
            "segment": st.integers(0, 2),
            "parent": st.integers(0, 12),
            "think_s": st.sampled_from([0.0, 0.5, 3.0]),
        }
    ),
    min_size=1,
    max_size=14,
)
options = st.fixed_dictionaries(
    {
        "schedulers": st.sampled_from([("nano",), ("vllm",)]),
        "clock": st.sampled_from(["virtual", "rounds"]),
        "arrivals": st.sampled_from(["trace", "session"]),
        "max_concurrency": st.sampled_from([None, 2, 5]),
        "kv_cache_tokens": st.sampled_from([48, 96, 256]),
        "over_length": st.sampled_from(["reject", "skip", "truncate"]),
        "records": st.sampled_from(["full", "compact"]),
        "knobs": st.fixed_dictionaries(
            {
                "block_size": st.sampled_from([4, 8, 16]),
                "max_num_seqs": st.sampled_from([1, 3, 8]),
                "max_num_batched_tokens": st.sampled_from([8, 32, 500]),
                "max_model_len": st.sampled_from([None, 50]),
                "enable_prefix_caching": st.booleans(),
            }
        ),
    }
)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    lines = []
    for i, row in enumerate(sorted(rows, key=lambda row: row["arrival_s"])):
        segment, parent = row["segment"], row["parent"]
        row = {key: value for key, value in row.items() if key not in ("segment", "parent")} | {"id": f"R{i}"}
        row["segments"] = [{"id": segment, "len": min(24, row["input_length"])}]
        if parent < i:
            row["parents"] = [f"R{parent}"]
        else:
            del row["think_s"]
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines) + "\n")


def replay_once(folder: Path, chosen: ReplayOptions) -> Run:
    command = build_command(chosen)
    folder.mkdir()
    result = run_one(build_run(command, command.policies[0], folder), None, threading.Event())
    assert result.status == "complete", result.error
    return assert_laws(folder)


@settings(max_examples=40, deadline=None)
@given(rows=requests, given_options=options)
def test_the_laws_hold_and_decisions_repeat(rows: list[dict[str, Any]], given_options: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as place:
        trace = Path(place) / "t.jsonl"
        write(trace, rows)
        knobs = {key: value for key, value in given_options.pop("knobs").items() if value is not None}
        chosen = ReplayOptions(
            trace=str(trace), engine="null", round_cost=(0.25, 0.0, 0.0), knobs=knobs, **given_options
        )
        first = replay_once(Path(place) / "first", chosen)
        again = ReplayOptions(
            trace=str(trace), engine="null", schedulers=chosen.schedulers, clock="recorded", from_run=str(first.path)
        )
        second = replay_once(Path(place) / "second", again)
        assert second.manifest["digest"] == first.manifest["digest"]
        assert second.read("admissions").equals(first.read("admissions"))
