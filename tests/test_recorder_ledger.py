"""What one request is charged with, on rounds small enough to count by hand."""

from __future__ import annotations

import numpy as np

from benchctl.buffers import RowBuffer, decision_buffer
from benchctl.digest import NULL, DecisionDigest, word
from benchctl.ledger import Ledger, RoundSpan
from benchctl.round_buffers import fold
from engines.interface import ScheduledBatch


def batch(*rows: tuple[int, int, int, bool, bool]) -> ScheduledBatch:
    """Rows (request, start, num_tokens, is_decode, yields_token)."""
    request, start, num, decode, yields = (np.array(c) for c in zip(*rows, strict=True))
    none = np.full(len(rows), -1, dtype=np.int64)
    return ScheduledBatch(request, start, num, decode, yields, none, none, [[]] * len(rows), [none] * len(rows))


def span(start: float, end: float) -> RoundSpan:
    return RoundSpan(start, start, end)


COLUMNS = (
    "request id status reason arrival_s admitted_s first_scheduled_s first_token_s finished_s prompt_tokens emitted_tokens "
    "cached_tokens discarded_tokens recomputed_tokens preemptions stalled_s preempted_s"
).split()


def as_dict(row: tuple[object, ...]) -> dict[str, object]:
    return dict(zip(COLUMNS, row, strict=True))


def test_a_preempted_request_is_charged_for_what_it_lost_waited_and_computed_again() -> None:
    ledger = Ledger(capacity=1)
    ledger.admit(7, "R7", arrival_s=0.5, admitted_s=1.0, prompt_tokens=4, asked_tokens=0)
    ledger.admit(2, "R2", arrival_s=0.6, admitted_s=1.0, prompt_tokens=3, asked_tokens=0)
    ledger.schedule_first(7, cached=0, t_scheduled_s=1.0)
    ledger.count(batch((7, 0, 4, False, True)), False, span(1.0, 2.0))  # prefill of 4, gives token 0
    ledger.schedule_first(2, cached=0, t_scheduled_s=2.0)
    ledger.count(batch((2, 0, 3, False, True)), False, span(2.0, 4.0))  # R7 stalls for 2 s
    ledger.count(batch((7, 4, 1, True, True), (2, 3, 1, True, True)), True, span(4.0, 5.0))
    ledger.preempt(7, t_scheduled_s=5.0)  # 5 computed tokens are lost
    ledger.count(batch((2, 4, 1, True, True)), True, span(5.0, 6.0))
    ledger.schedule_first(7, cached=2, t_scheduled_s=8.5)  # 2 of them come back from the cache
    ledger.count(batch((7, 2, 4, False, True)), False, span(8.0, 9.0))  # positions 2..5: 2, 3, 4 again
    row = as_dict(ledger.finish(7, "max_tokens", 9.0))
    assert row == {
        "request": 7, "id": "R7", "status": "finished", "reason": "max_tokens", "arrival_s": 0.5, "admitted_s": 1.0,
        "first_scheduled_s": 1.0, "first_token_s": 2.0, "finished_s": 9.0, "prompt_tokens": 4, "emitted_tokens": 3,
        "cached_tokens": 0, "discarded_tokens": 5, "recomputed_tokens": 3, "preemptions": 1, "stalled_s": 2.0,
        "preempted_s": 3.5,
    }  # fmt: skip
    other = as_dict(ledger.unfinished(2, 9.0))
    assert (other["status"], other["emitted_tokens"], other["finished_s"], other["stalled_s"]) == (
        "unfinished",
        3,
        None,
        1.0,
    )


def test_a_request_preempted_at_the_end_of_the_run_waited_until_then() -> None:
    ledger = Ledger()
    ledger.admit(0, "R1", 0.0, 0.0, prompt_tokens=4, asked_tokens=0)
    ledger.schedule_first(0, 0, 0.0)
    ledger.count(batch((0, 0, 4, False, True)), False, span(0.0, 1.0))
    ledger.preempt(0, 1.5)
    row = as_dict(ledger.unfinished(0, 4.0))
    assert (row["preempted_s"], row["discarded_tokens"], row["emitted_tokens"]) == (2.5, 4, 1)


def test_a_chunk_that_ends_inside_the_prompt_emits_nothing() -> None:
    ledger = Ledger()
    ledger.admit(0, "R1", 0.0, 0.0, prompt_tokens=10, asked_tokens=0)
    ledger.schedule_first(0, 0, 0.0)
    ledger.count(batch((0, 0, 9, False, False)), False, span(0.0, 1.0))
    row = as_dict(ledger.unfinished(0, 1.0))
    assert (row["emitted_tokens"], row["first_token_s"], row["first_scheduled_s"]) == (0, None, 0.0)


def test_an_output_cut_beforehand_ends_as_length_capped() -> None:
    ledger = Ledger()
    ledger.admit(0, "R1", 0.0, 0.0, prompt_tokens=2, asked_tokens=50)
    ledger.schedule_first(0, 0, 0.0)
    ledger.count(batch((0, 0, 2, False, True)), False, span(0.0, 1.0))
    assert as_dict(ledger.finish(0, "max_tokens", 1.0))["reason"] == "length_capped"


def test_slots_are_reused_clean() -> None:
    ledger = Ledger(capacity=1)
    for row in range(3):
        ledger.admit(row, f"R{row}", 0.0, 0.0, prompt_tokens=1, asked_tokens=0)
        ledger.schedule_first(row, cached=row, t_scheduled_s=float(row))
        ledger.count(batch((row, 0, 1, False, True)), False, span(row, row + 1.0))
        out = as_dict(ledger.finish(row, "max_tokens", row + 1.0))
        assert (out["cached_tokens"], out["stalled_s"], out["preemptions"]) == (row, 0.0, 0)


def test_the_digest_does_not_depend_on_the_pieces_it_is_fed_in() -> None:
    columns = [np.arange(i, i + 10, dtype=np.int64) for i in range(6)]
    whole, pieces = DecisionDigest(), DecisionDigest()
    whole.update("blocks", columns)
    for at in (slice(0, 3), slice(3, 3), slice(3, 10)):
        pieces.update("blocks", [c[at] for c in columns])
    assert whole.hexdigest() == pieces.hexdigest()
    columns[5][9] += 1
    other = DecisionDigest()
    other.update("blocks", columns)
    assert other.hexdigest() != whole.hexdigest()


def test_the_digest_tells_tables_apart() -> None:
    columns = [np.zeros(1, dtype=np.int64)] * 9
    first, second = DecisionDigest(), DecisionDigest()
    first.update("batches", columns)
    second.update("decisions", columns)
    assert first.hexdigest() != second.hexdigest()


def test_rows_become_columns_with_codes_nulls_and_shifted_order() -> None:
    buffer: RowBuffer = decision_buffer()
    buffer.extend(
        3, 2, [(0, "admit", 5, None, "fits", 1, 4, "blocks"), (1, "finish", 5, None, "max_tokens", None, None, None)]
    )
    number, order, kind, request, other, reason, needed, available, unit = (c.tolist() for c in buffer.columns())
    assert (number, order, request) == ([3, 3], [2, 3], [5, 5])
    assert kind == [word("admit"), word("finish")] and reason == [word("fits"), word("max_tokens")]
    assert (other, needed, available, unit) == ([NULL, NULL], [1, NULL], [4, NULL], [word("blocks"), NULL])


def decodes(*rows: tuple[int, int, int]) -> list[np.ndarray]:
    """Columns of `batches` of plain decodes (round, request, start), blocks of 4, in order."""
    number, request, start = (np.array(column) for column in zip(*rows, strict=True))
    one, null = np.ones(len(rows), dtype=np.int64), np.full(len(rows), NULL)
    return [number, one, request, start, one, one, null, one, start // 4 + 1]


def folded(columns: list[np.ndarray]) -> tuple[list[int], list[int]]:
    rows, counts = fold(columns, 4)
    return rows.tolist(), counts.tolist()


def test_fold_joins_the_decodes_of_a_request_in_successive_rounds_with_decodes() -> None:
    # Nobody decodes in round 4; request 2 misses round 5 and comes back as somebody new; blocks open at 12.
    rows = decodes(
        (1, 1, 10), (1, 2, 20), (2, 1, 11), (2, 2, 21), (3, 1, 12), (3, 2, 22), (5, 1, 13), (6, 1, 14), (6, 2, 23)
    )
    assert folded(rows) == ([0, 1, 8], [5, 3, 1])
    rows[3][7] = 15  # a token skipped: not one after the other
    assert folded(rows) == ([0, 1, 7, 8], [4, 3, 1, 1])
    rows[8][6] += 1  # a block more than the tokens need
    assert folded(rows) == ([0, 1, 6, 7, 8], [3, 3, 1, 1, 1])


def test_fold_begins_anew_where_the_order_of_a_round_changes() -> None:
    rows = decodes((1, 1, 10), (1, 2, 20), (2, 1, 11), (2, 2, 21), (3, 2, 22), (3, 1, 12), (4, 2, 23), (4, 1, 13))
    assert folded(rows) == ([0, 1, 4, 5], [2, 2, 2, 2])
