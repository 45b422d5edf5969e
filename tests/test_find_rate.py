"""The search for the highest rate: on a made-up system whose capacity is known, decided by intervals, the same every time."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from benchctl.find_rate import (
    GROWING,
    Aim,
    Probe,
    Search,
    find_rates,
    needed_requests,
    row_of,
    short_text,
    unsure_text,
    why_text,
    wilson,
)
from benchctl.sweep import Store
from benchctl.sweep_spec import Cell, make_cell
from benchctl.sweep_workers import Result
from tests.command_line import call, rows, write_trace

BASE = make_cell({"trace": "none.jsonl", "scheduler": "vllm", "engine": "null"})
AIM = Aim({"ttft": 200.0}, attainment=0.99, precision=0.02)


def result(good: int, total: int = 1000, *, grows: bool = False, p50_e2el: float = 100.0) -> Result:
    return {
        "status": "complete",
        "reason": None,
        "figures": {"p50_e2el_ms": p50_e2el, "p99_ttft_ms": 100.0 if good == total else 300.0},
        "judged": {
            "slo": {"ttft": 200.0}, "good": good, "total": total, "attainment": good / total, "request_goodput": 1.0,
            "misses": {"ttft": total - good, "not finished": 0},
        },
        "stops": {"waiting": {"max_num_seqs": 30, "token_budget": 10, "waiting_empty": 500}},
        "checks": [GROWING] if grows else [],
    }  # fmt: skip


class Made:
    """Workers whose system holds every SLO up to `capacity`, and fewer beyond. Remembers what it was asked."""

    def __init__(self, capacity: float, noise: int = 0) -> None:
        self.capacity, self.noise, self.asked = capacity, noise, list[tuple[float, int]]()

    def submit(self, cell: Cell) -> Future[Result]:
        rate, seed = float(cell.settings["request-rate"]), int(cell.settings["seed"])
        self.asked.append((rate, seed))
        future: Future[Result] = Future()
        # Seeds see the capacity a little higher and lower.
        seen = self.capacity * (1 + self.noise / 1000 * ((seed * 7) % 5 - 2))
        future.set_result(result(1000 if rate <= seen else max(0, int(1000 * (1 - 3 * (rate / seen - 1))))))
        return future

    def close(self, *, now: bool) -> None: ...


class Keeping(Store):
    """A store that keeps nothing and does not read run folders."""

    def load(self, cell: Cell) -> Result | None:
        return None

    def finished(self, cell: Cell, result: Result) -> Result:
        return result


def search(made: Made, start: float = 5.0, aim: Aim = AIM) -> Search:
    said: list[str] = []
    (found,) = find_rates(
        [BASE], aim, lambda cell: start, Keeping(Path("."), {}), made, lambda s, text: said.append(text)
    )
    assert len(said) == sum(probe.settled is not None for probe in found.probes)
    return found


@pytest.mark.parametrize("start", [0.3, 5.0, 900.0])
def test_the_capacity_is_found_from_below_and_from_above(start: float) -> None:
    found = search(Made(37.0), start)
    bounds = found.bounds()
    assert bounds is not None
    rate, low, high = bounds
    assert rate <= 37.0 * 1.0034 and rate / 37.0 > 0.97  # 1 % of misses come 0.33 % beyond the capacity
    assert low == rate and rate < high <= rate * 1.03
    assert found.failing is not None and found.failing.rate == high


def test_the_same_search_asks_the_same() -> None:
    first, again = Made(12.3, noise=5), Made(12.3, noise=5)
    search(first), search(again)
    assert first.asked == again.asked and len(first.asked) == len(set(first.asked))


def test_more_seeds_are_drawn_where_three_do_not_decide() -> None:
    probe = Probe(10.0, [result(1000), result(985), result(1000)])
    assert probe.verdict(AIM) == "open"
    made = Made(37.0, noise=30)
    found = search(made)
    assert {len(p.results) for p in found.probes} > {3}
    rate, low, high = found.bounds() or (0, 0, 0)
    assert low <= rate < high and low < 37.0 < high
    assert sum(p.verdict(AIM) == "open" for p in found.probes) <= 3 + 4


def test_one_hundred_percent_of_few_requests_proves_nothing() -> None:
    low, high = wilson(30, 30)
    assert low == pytest.approx(30 / (30 + 1.959964**2)) and high == pytest.approx(1.0)
    assert Probe(1.0, [result(10, 10)] * 3).verdict(AIM) == "open"
    assert Probe(1.0, [result(1000)] * 3).verdict(AIM) == "holds"


def test_a_queue_that_grows_to_the_end_fails_whatever_the_slos_say() -> None:
    assert Probe(1.0, [result(1000, grows=True)] * 3).verdict(AIM) == "fails"
    assert Probe(1.0, [result(1000, grows=True), result(1000), result(1000)]).verdict(AIM) == "holds"


def test_misses_that_no_rate_mends_end_the_search_soon() -> None:
    made = Made(1e-9)
    made.submit = lambda cell: done(result(900))  # type: ignore[method-assign]
    found = search(made)
    assert found.bounds() is None and len(found.probes) <= 4
    row = row_of(found)
    assert row["status"] == "incomplete" and "without waiting for others" in row["reason"]


def test_a_trace_too_short_to_overload_says_so() -> None:
    made = Made(1e9)
    found = search(made)
    assert found.bounds() is not None and (found.bounds() or (0, 0, 0))[2] == float("inf")
    assert row_of(found)["rate"]["rate_high"] is None and "too short" in row_of(found)["reason"]
    assert "longer trace" in (short_text(found) or "")


def test_a_trace_of_three_requests_decides_nothing_and_is_told_how_many_would() -> None:
    made = Made(1e9)
    made.submit = lambda cell: done(result(3, 3))  # type: ignore[method-assign]
    found = search(made)
    row = row_of(found)
    assert found.is_open and row["status"] == "incomplete" and "rate" not in row
    # 3 requests with 12 seeds: Wilson's least is 36 / (36 + 1.96²) = 90.4 %; 99 % takes 0.99 · 1.96² / 0.01 = 380.3.
    assert "nothing could be decided: at no rate tried, 5 to 40/s, can" in row["reason"]
    assert "36 requests (3 with 12 seeds), all of them within the SLOs, prove 90.4%; 99% takes 381" in row["reason"]
    assert "a trace of 32 or more, or --max-seeds 127" in row["reason"]
    assert short_text(found) is None and unsure_text(found) is None


def test_a_rate_that_few_requests_hold_by_the_mean_is_noted_as_unsure() -> None:
    made = Made(1e9)
    made.submit = lambda cell: done(result(3 if float(cell.settings["request-rate"]) <= 10 else 0, 3))  # type: ignore[method-assign]
    found = search(made)
    assert not found.is_open and found.bounds() is not None and (found.bounds() or (0, 1, 0))[1] == 0
    assert (unsure_text(found) or "").startswith("no rate tried is sure to hold; 36 requests (3 with 12 seeds)")


def test_as_many_requests_as_are_named_do_decide() -> None:
    assert needed_requests(0.99) == 381 and needed_requests(1.0) is None
    assert wilson(380, 380)[0] < 0.99 <= wilson(381, 381)[0]
    made = Made(1e9)
    made.submit = lambda cell: done(result(32, 32))  # type: ignore[method-assign]
    found = search(made)
    assert not found.is_open and row_of(found)["status"] == "complete"


def test_enough_requests_that_still_decide_nothing_ask_for_a_narrower_interval() -> None:
    made = Made(1e9)
    # Seeds of 100 % and of 98 %: their mean is the wanted share, whatever the rate.
    made.submit = lambda cell: done(result(1000 - 20 * (int(cell.settings["seed"]) % 2)))  # type: ignore[method-assign]
    row = row_of(search(made))
    assert row["status"] == "incomplete" and "a longer trace or more --max-seeds narrow the interval" in row["reason"]


def test_all_of_the_requests_is_a_share_that_nothing_proves() -> None:
    made = Made(1e9)
    made.submit = lambda cell: done(result(1000))  # type: ignore[method-assign]
    row = row_of(search(made, aim=Aim({"ttft": 200.0}, attainment=1.0)))
    assert row["status"] == "incomplete" and "ask for less, --attainment 0.99" in row["reason"]


def test_where_the_next_rate_fails_by_its_mean_alone_farther_ones_end_the_error_bar() -> None:
    def answer(cell: Cell) -> Future[Result]:
        rate, odd = float(cell.settings["request-rate"]), int(cell.settings["seed"]) % 2
        return done(result(1000 if rate <= 10 else 500 if rate > 25 else 975 if odd else 1000))

    made = Made(1e9)
    made.submit = answer  # type: ignore[method-assign]
    found = search(made)  # 5 and 10 hold, 20 fails by its mean; then between, and at last 40 and between
    rate, low, high = found.bounds() or (0, 0, 0)
    assert rate == low <= 10 and 25 < high <= 40
    assert found.failing is not None and found.failing.verdict(AIM) == "open" and found.failing.rate < 20


def test_a_probe_that_breaks_ends_its_search_with_the_reason() -> None:
    made = Made(10.0)
    made.submit = lambda cell: done({"status": "failed", "reason": "no such trace: x", "figures": {}})  # type: ignore[method-assign]
    found = search(made)
    assert row_of(found) == {"status": "failed", "reason": "no such trace: x", "figures": {}}


def test_why_the_next_rate_fails_names_slo_and_stop() -> None:
    text = why_text(Probe(9.0, [result(900), result(950), result(850)]), AIM)
    assert "10.00% miss ttft (p99 up to 300 ms, SLO 200 ms)" in text
    assert "in 75% of the rounds that left requests waiting it was for max_num_seqs" in text


def done(value: Result) -> Future[Result]:
    future: Future[Result] = Future()
    future.set_result(value)
    return future


# -- at the command line


def trace_of(tmp_path: Path, number: int = 200) -> Path:
    return write_trace(tmp_path / "t.jsonl", rows(*((i * 0.2, 64, 8) for i in range(number))))


def flags(trace: Path, out: Path) -> list[Any]:
    """The null engine: a round takes 20 ms and nothing for tokens, and 4 seats are full at 4 / (8 × 20 ms) = 25 requests/s."""
    return [
        "sweep", trace, "--set", "scheduler=vllm", "--set", "engine=null", "--set", "round-cost=20e-3,0,0", "--set", "max-num-seqs=4",
        "--find-rate", "--goodput", "ttft:200", "--workers", "1", "--out", out, "--precision", "0.1", "--max-seeds", "6", "--no-report",
    ]  # fmt: skip


def test_the_rate_of_a_real_replay_is_near_what_its_seats_allow(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import json

    answer = call(capfd, *flags(trace_of(tmp_path, 100), tmp_path / "o"), "--json")
    assert answer.code == 0, answer.err
    (row,) = json.loads(answer.out)
    assert 10 < row["rate"] < 25 and row["rate_low"] <= row["rate"] < row["fails_at"]
    assert "holds" in answer.err and "fails" in answer.err
    again = call(capfd, *flags(trace_of(tmp_path, 100), tmp_path / "o"), "--json")
    assert json.loads(again.out) == json.loads(answer.out)


def test_a_search_that_decides_nothing_claims_no_rate(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    answer = call(capfd, *flags(trace_of(tmp_path, 3), tmp_path / "o"))
    assert answer.code == 1 and "sustains" not in answer.out
    # 3 requests with 6 seeds: 18 / (18 + 1.96²).
    assert answer.out.startswith("Nothing could be decided: at no rate tried") and "prove 82.4%" in answer.out
    assert "a trace of 64 or more, or --max-seeds 127. So no rate is recommended." in answer.out
    assert pl.read_parquet(tmp_path / "o" / "sweep.parquet")["rate"].to_list() == [None]
    page = [*flags(trace_of(tmp_path, 3), tmp_path / "o")[:-1]]
    call(capfd, *page)
    assert "Nothing could be decided" in (tmp_path / "o" / "sweep.html").read_text()


def test_more_seeds_at_first_than_the_default_at_most_raise_it(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = flags(trace_of(tmp_path, 3), tmp_path / "o")
    at = words.index("--max-seeds")
    answer = call(capfd, *words[:at], *words[at + 2 :], "--seeds", "13")
    assert "13 seeds" in answer.err and "26 seeds" not in answer.err


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--find-rate"], "needs SLOs"),
        (["--find-rate", "--goodput", "ttft:9", "--set", "request-rate=3"], "request-rate is what --find-rate varies"),
        (["--precision", "0.1"], "--precision is a setting of --find-rate"),
        (["--find-rate", "--goodput", "ttft:9", "--seeds", "0"], "--seeds is 0"),
        (
            ["--find-rate", "--goodput", "ttft:9", "--seeds", "8", "--max-seeds", "2"],
            "--seeds 8 of a rate at first, and --max-seeds 2 at most",
        ),
        (["--find-rate", "--goodput", "ttft:9", "--max-seeds", "2"], "--seeds 3 of a rate at first, and --max-seeds 2"),
        (["--max-seeds", "12"], "--max-seeds is a setting of --find-rate"),
        (["--attainment", "1.5"], "--attainment is 1.5"),
    ],
)
def test_a_search_asked_for_wrongly_is_refused(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, more: list[str], says: str
) -> None:
    answer = call(capfd, "sweep", trace_of(tmp_path, 3), "--set", "scheduler=vllm", "--out", tmp_path / "o", *more)
    assert answer.code == 2 and says in answer.err
