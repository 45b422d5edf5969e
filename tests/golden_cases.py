"""Reads the logged cases and drives a scheduler through one, round by round."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from engines.interface import NewRequest, Round, SchedulerConfig
from engines.schedulers.registry import SCHEDULERS

FOLDER = Path(__file__).parent / "goldens"


def case_names(policy: str) -> list[str]:
    return sorted(path.name.removesuffix(".json.gz") for path in (FOLDER / policy).glob("*.json.gz"))


def load_case(policy: str, name: str) -> dict[str, Any]:
    return json.loads(gzip.decompress((FOLDER / policy / f"{name}.json.gz").read_bytes()))


def expand(ranges: list[list[int]]) -> np.ndarray:
    """int64 ids of the ranges [start, length], one after the other."""
    return np.concatenate([np.arange(start, start + length, dtype=np.int64) for start, length in ranges])


def config_of(case: dict[str, Any]) -> SchedulerConfig:
    config = dict(case["config"])
    for theirs, ours in (("policy", "scheduling_policy"), ("reserve_full_isl", "scheduler_reserve_full_isl")):
        if theirs in config:
            config[ours] = config.pop(theirs)
    return SchedulerConfig(**config)


def new_request(row: int, entry: dict[str, Any]) -> NewRequest:
    ids = expand(entry["prompt"] + entry["output"])
    num_outputs = sum(length for _, length in entry["output"])
    return NewRequest(
        request=row,
        id=entry["id"],
        num_prompt_tokens=len(ids) - num_outputs,
        num_output_tokens=num_outputs,
        make_token_ids=lambda: ids,
        arrival_s=entry.get("arrival_time", 0.0),
        priority=entry.get("priority", 0),
        adapter=entry.get("adapter"),
    )


def is_refused(case: dict[str, Any]) -> bool:
    """The real scheduler fails or stalls on it, so ours refuses a request of it on arrival."""
    return bool(case.get("error") or case["totals"].get("stall"))


def build(case: dict[str, Any], **options: Any) -> Any:
    return SCHEDULERS[case["scheduler"]].build(config_of(case), **options)


def rounds_of(case: dict[str, Any], scheduler: Any) -> Iterator[tuple[dict[str, Any], Round, dict[int, list[int]]]]:
    """(logged round, our round, block tables after schedule()) until the log ends. Nothing is refused: as the real one."""
    arrivals: dict[int, list[NewRequest]] = {}
    for row, entry in enumerate(case["requests"]):
        arrivals.setdefault(entry["arrival_round"], []).append(new_request(row, entry))
    number = 0
    for logged in case["rounds"]:
        while number < logged["round"]:
            number += 1
            for request in arrivals.get(number, []):
                scheduler.enqueue(request)
        if logged.get("phase") == "idle":
            assert not scheduler.has_unfinished(), logged["round"]
            continue
        round = scheduler.schedule()
        tables = {row: scheduler.block_table(row) for row in range(len(case["requests"]))}
        scheduler.update(round, None)
        yield logged, round, tables
