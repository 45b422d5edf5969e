"""The bundled traces: made anew byte for byte, of the stated shape, and the three of the article equal to the real log."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import traces
from engines.interface import NewRequest, SchedulerConfig
from engines.schedulers.registry import SCHEDULERS
from tests.golden_cases import load_case
from traces import synthetic
from traces.conversations import make_conversations
from traces.files import bundled_traces
from traces.load import Trace, open_trace
from traces.prefix import prefix_upper_bound
from traces.tokens import TokenMaker

FOLDER = Path(traces.__file__).parent
DOCUMENT = FOLDER.parent / "docs" / "traces.md"


def test_the_generators_write_the_bundled_files_byte_for_byte(tmp_path: Path) -> None:
    synthetic.main(["--out", str(tmp_path)])
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(made) == sorted(synthetic.BUNDLED)
    for name, content in made.items():
        assert content == (FOLDER / name).read_bytes(), name
        assert len(content) < 200_000


def test_the_full_trace_is_valid_and_unscaled(tmp_path: Path) -> None:
    header, rows = synthetic.make_sharegpt_full()
    synthetic.write_trace(tmp_path / "full.jsonl", header, rows)
    trace = open_trace(tmp_path / "full.jsonl", strict=True)
    requests = list(trace.requests())
    assert trace.num_requests == 2000 and trace.notes == []
    assert 7000 < max(r.input_length + r.output_length for r in requests) <= 8192
    first = [r.input_length for r in requests if r.turn == 1]
    # The medians of the recipe: exp(4.364) = 79 tokens for a first prompt, 1,024 x 0.42 = 429 for an output, both a little
    # less since what passes the longest context is cut off.
    assert 65 <= statistics.median(first) <= 95
    assert 380 <= statistics.median(r.output_length for r in requests) <= 450
    assert 780 <= sorted(r.output_length for r in requests)[1800] <= 880


@pytest.mark.parametrize("name", sorted(synthetic.BUNDLED))
def test_a_bundled_trace_is_valid_and_has_times(name: str) -> None:
    trace = open_trace(FOLDER / name, strict=True)
    assert trace.notes == [] and trace.all_have_arrival_s and not trace.has_text
    assert trace.header.licence == "Apache-2.0" and trace.header.source and trace.header.salt == trace.name
    assert trace.name == name.removesuffix(".jsonl")
    assert trace.num_requests == len({request.id for request in trace.requests()})
    # Small enough for the CPU engine's model.
    assert max((r.input_length or 0) + (r.output_length or 0) for r in trace.requests()) <= 2048
    assert name in bundled_traces()


def test_sharegpt_is_made_of_conversations_that_either_way_of_arriving_can_replay() -> None:
    trace = open_trace(FOLDER / "sharegpt.jsonl")
    requests = {request.id: request for request in trace.requests()}
    assert len(requests) == 256 and trace.span_s <= 45
    followed = [request for request in requests.values() if request.parents]
    assert len(followed) == 256 - trace.num_sessions
    for request in followed:
        assert request.carry is not None and request.parents == (request.carry.from_id,)
        parent = requests[request.carry.from_id]
        assert (request.session, request.turn) == (parent.session, (parent.turn or 0) + 1)
        assert (
            request.carry.tokens
            == (parent.input_length or 0) + (parent.output_length or 0)
            < (request.input_length or 0)
        )
        assert request.think_s is not None and request.think_s > 0
        assert parent.arrival_s is not None and request.arrival_s is not None
        answer_s = 0.01 * (parent.output_length or 0)
        assert request.arrival_s == pytest.approx(parent.arrival_s + answer_s + request.think_s, abs=1e-6)


def test_a_recipe_that_does_not_fit_its_time_says_so() -> None:
    import dataclasses

    with pytest.raises(ValueError, match="of 256 requests fit into 5"):
        make_conversations(dataclasses.replace(synthetic.SHAREGPT, end_s=5.0))


@pytest.mark.parametrize(
    ("name", "case_name"),
    [
        ("walkthrough.jsonl", "article_rounds"),
        ("prefix-hit.jsonl", "article_r7_hit"),
        ("prefix-hit-literal.jsonl", "article_r7_literal"),
    ],
)
@pytest.mark.parametrize("vocab_size", [None, 1000])
def test_the_articles_traces_give_the_decisions_of_the_real_scheduler(
    name: str, case_name: str, vocab_size: int | None
) -> None:
    trace, case = open_trace(FOLDER / name), load_case("nano", case_name)
    limits = {**trace.header.limits["common"], **trace.header.limits["nano"]}
    assert limits == case["config"]
    assert [r.id for r in trace.requests(order="round")] == [entry["id"] for entry in case["requests"]]
    maker = TokenMaker(trace, vocab_size=vocab_size)
    scheduler = SCHEDULERS["nano"].build(SchedulerConfig(**limits))
    waiting = list(trace.requests(order="round"))
    ids = [request.id for request in waiting]
    for logged in case["rounds"]:
        while waiting and (waiting[0].arrival_round or 0) <= logged["round"]:
            request = waiting.pop(0)
            made = maker.token_ids(request)
            new = NewRequest(
                request=request.index,
                id=request.id,
                num_prompt_tokens=maker.prompt_length(request),
                num_output_tokens=len(made) - maker.prompt_length(request),
                make_token_ids=lambda made=made: made,
            )
            assert scheduler.add(new) is None
        round = scheduler.schedule()
        batch = round.batch
        rows = zip(batch.request.tolist(), batch.start.tolist(), batch.num_tokens.tolist(), strict=True)
        assert [(ids[r], s, n) for r, s, n in rows] == [
            (entry["id"], entry["start"], entry["num_tokens"]) for entry in logged["scheduled"]
        ]
        cached = zip(batch.request.tolist(), batch.cached_tokens.tolist(), strict=True)
        assert {ids[r]: n for r, n in cached if n >= 0} == logged["cached_tokens"]
        assert [ids[d[2]] for d in round.decisions if d[1] == "preempt"] == logged["preempted"]
        scheduler.update(round, None)
        assert scheduler.free_list() == logged["free_list"]
        assert scheduler.hashed_blocks() == logged["hashed_blocks"]
        assert [ids[r] for r in scheduler.waiting_requests()] == logged["waiting"]
        assert [ids[r] for r in scheduler.running_requests()] == logged["running"]
    assert not waiting and not scheduler.has_unfinished()


def table_row(trace: Trace) -> str:
    """The row of this trace in the documentation's table of bundled traces."""
    requests = list(trace.requests())
    prompts = np.array([request.input_length for request in requests])
    outputs = np.array([request.output_length for request in requests])
    maker = TokenMaker(trace, vocab_size=None)

    def hit(block_size: int) -> str:
        pairs = ((maker.prompt_length(request), maker.token_ids(request)) for request in requests)
        queried, hit = prefix_upper_bound(pairs, block_size)
        return f"{hit / queried:.3f}"

    def percentile(values: Any, p: int) -> int:
        return int(np.percentile(values, p, method="higher"))

    cells = [
        f"`{trace.path.name}`",
        f"{trace.num_requests:,}",
        f"{trace.num_sessions:,}" if trace.num_sessions else "–",
        f"{trace.span_s:,.3f}",
        *(f"{percentile(prompts, p):,}" for p in (50, 90, 100)),
        *(f"{percentile(outputs, p):,}" for p in (50, 90, 100)),
        f"{prompts.sum():,} / {outputs.sum():,}",
        hit(16),
        hit(256),
    ]
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize("name", [*sorted(synthetic.BUNDLED), *synthetic.FULL])
def test_the_documented_statistics_are_those_of_the_files(tmp_path: Path, name: str) -> None:
    path = FOLDER / name
    if name in synthetic.FULL:
        path = tmp_path / name
        synthetic.write_trace(path, *synthetic.FULL[name]())
    row = table_row(open_trace(path))
    assert row in DOCUMENT.read_text(encoding="utf-8").splitlines(), row
