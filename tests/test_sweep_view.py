"""Which setting a sweep recommends, and with what words: on tables small enough to answer by eye."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from benchctl.sweep import JUDGED, RATE, WORTH
from benchctl.sweep_workers import FIGURES
from reports.sweep_view import make_view
from reports.sweep_words import answer, effects

SLO = {"ttft": 200.0, "tpot": 50.0}


def frame(
    *cells: dict[str, Any], names: tuple[str, ...] = ("scheduler", "max-num-seqs"), rate: bool = False
) -> pl.DataFrame:
    numbers = (*FIGURES, *JUDGED, *WORTH, *(RATE if rate else ()))
    schema = {"cell": pl.String} | dict.fromkeys(names, pl.String) | {"status": pl.String, "reason": pl.String}
    schema |= dict.fromkeys(numbers, pl.Float64) | {"path": pl.String}
    rows = [{"cell": str(i), "status": "complete"} | cell for i, cell in enumerate(cells)]
    return pl.DataFrame([{name: row.get(name) for name in schema} for row in rows], schema=schema)


def cell(
    scheduler: str, seats: str, goodput: float, attainment: float = 1.0, ttft: float = 100.0, **more: Any
) -> dict[str, Any]:
    return {
        "scheduler": scheduler, "max-num-seqs": seats, "request_goodput": goodput, "attainment": attainment,
        "output_throughput": goodput * 100, "p99_ttft_ms": ttft, "p99_tpot_ms": 20.0,
    } | more  # fmt: skip


def view(*cells: dict[str, Any], slo: dict[str, float] = SLO, **more: Any) -> Any:
    names = more.pop("names", ("scheduler", "max-num-seqs"))
    return make_view(frame(*cells, names=names, **more), names, slo, 0.99)


def test_the_highest_goodput_that_keeps_the_slos_wins_and_names_its_margin() -> None:
    found = view(
        cell("nano", "64", 9.0, ttft=150.0),
        cell("vllm", "64", 10.0, ttft=150.0),
        cell("vllm", "256", 11.0, 0.95, ttft=250.0),
    )
    (pick,) = found.picks.values()
    assert (pick.setting.values["scheduler"], pick.setting.values["max-num-seqs"]) == ("vllm", "64")
    assert pick.meets and pick.tightest.metric == "ttft" and pick.tightest.left == pytest.approx(0.25)
    text = answer(found)
    assert text[0].startswith(
        "Use scheduler vllm, max-num-seqs 64: 100.0% of the requests meet TTFT ≤ 200 ms and TPOT ≤ 50 ms"
    )
    assert "150.0 ms of 200 ms, 25% to spare" in text[1] and "its error is not known" in text[1]
    assert any("nano" in sentence and "10% less" in sentence for sentence in text)


def test_of_those_as_good_the_one_with_the_most_to_spare_is_taken() -> None:
    found = view(
        cell("vllm", "64", 10.0, ttft=190.0), cell("vllm", "128", 9.95, ttft=60.0), cell("vllm", "256", 8.0, ttft=10.0)
    )
    (pick,) = found.picks.values()
    assert pick.setting.values["max-num-seqs"] == "128" and len(pick.tied) == 1
    assert pick.next is not None and pick.next.values["max-num-seqs"] == "256"


def test_the_margin_of_itl_is_that_of_the_largest_gaps() -> None:
    """A request has many gaps and meets the SLO when its largest does: p99 over all gaps may be short where many miss."""
    found = view(
        cell("vllm", "64", 10.0, p99_itl_ms=10.0, p99_max_itl_ms=19.0),
        cell("vllm", "128", 9.95, p99_itl_ms=12.0, p99_max_itl_ms=15.0),
        slo={"ttft": 200.0, "itl": 20.0},
    )
    (pick,) = found.picks.values()
    assert pick.setting.values["max-num-seqs"] == "128"
    assert (
        "Its tightest SLO is ITL: p99 of the requests' largest gaps 15.00 ms of 20 ms, 25% to spare" in answer(found)[1]
    )


def test_a_margin_smaller_than_the_error_is_said() -> None:
    cells = [cell("vllm", "64", 10.0, ttft=ttft, seed=seed, error=0.05) for seed, ttft in (("0", 185.0), ("1", 195.0))]
    cells += [cell("nano", "64", 5.0, seed=seed, error=0.05) for seed in ("0", "1")]
    found = view(*cells, names=("scheduler", "max-num-seqs", "seed"))
    assert found.repeats == 2 and len(found.settings) == 2
    # Repeats: (195 - 185) / 2 / 190 = 2.6 %, profile 5 %: 190 ms + 7.6 % is beyond 200.
    assert "±7.6% (repeats ±2.6%, profile ±5.0%): that is more than the margin" in answer(found)[1]


def test_a_margin_that_the_worst_held_out_run_would_take_is_said() -> None:
    good = {"error": 0.01, "error_worst": 0.7}
    text = answer(view(cell("vllm", "64", 10.0, ttft=150.0, **good), cell("nano", "64", 5.0, ttft=10.0, **good)))[1]
    assert "the margin is larger than that, but not than in the profile's worst held-out run, off by 70% at p99" in text
    text = answer(view(cell("vllm", "64", 10.0, ttft=60.0, **good), cell("nano", "64", 5.0, ttft=10.0, **good)))[1]
    assert text.endswith("the margin is larger than that.")


def test_seeds_are_held_against_each_other_one_by_one() -> None:
    """All seeds of one setting are 3 % behind: the spread between seeds, ten times that, does not hide it."""
    cells = [cell(who, "64", goodput, seed=str(seed)) for who, less in (("vllm", 1.0), ("nano", 0.97))
             for seed, goodput in enumerate((8.0 * less, 10.0 * less, 12.0 * less))]  # fmt: skip
    (pick,) = view(*cells, names=("scheduler", "max-num-seqs", "seed")).picks.values()
    assert pick.setting.values["scheduler"] == "vllm" and not pick.tied


def test_no_setting_that_keeps_the_slos_is_said_first() -> None:
    found = view(cell("nano", "64", 3.0, 0.4, ttft=900.0), cell("vllm", "64", 4.0, 0.5, ttft=800.0))
    assert answer(found)[0].startswith(
        "No setting keeps TTFT ≤ 200 ms and TPOT ≤ 50 ms for 99% of the requests; nearest by goodput is"
    )
    assert "beyond it" in answer(found)[1]


def test_without_slos_the_ends_of_the_front_are_told() -> None:
    found = view(
        cell("vllm", "8", 5.0, ttft=10.0),
        cell("vllm", "64", 9.0, ttft=30.0),
        cell("vllm", "256", 10.0, ttft=500.0),
        slo={},
    )
    text = " ".join(answer(found))
    assert "Highest throughput: max-num-seqs 256" in text and "Shortest p99 TTFT: max-num-seqs 8" in text
    assert "Between them: max-num-seqs 64" in text and "--goodput" in text


def test_workloads_have_a_best_each_and_one_setting_for_all() -> None:
    names = ("scheduler", "max-num-seqs", "request-rate")
    cells = [cell(who, "64", goodput, **{"request-rate": rate}) for who, rate, goodput in
             (("nano", "10", 10.0), ("vllm", "10", 9.5), ("nano", "20", 12.0), ("vllm", "20", 19.0))]  # fmt: skip
    found = view(*cells, names=names)
    assert found.workloads == ("request-rate",) and found.choices == ("scheduler",)
    text = answer(found)
    assert text[0].startswith("At request-rate 10: use scheduler nano") and text[1].startswith(
        "At request-rate 20: use scheduler vllm"
    )
    assert (
        text[2]
        == "One setting for all of them: scheduler vllm; at worst 5% less goodput than the best, at request-rate 10."
    )


def test_what_decides_is_the_axis_whose_worst_value_costs_most() -> None:
    found = view(cell("nano", "64", 5.0), cell("nano", "256", 5.0), cell("vllm", "64", 10.0), cell("vllm", "256", 9.99))
    assert [(effect.axis, effect.worst, round(effect.loss, 3), effect.sure) for effect in effects(found)] == [
        ("scheduler", "nano", 0.5, True), ("max-num-seqs", "256", 0.001, False),
    ]  # fmt: skip
    text = " ".join(answer(found))
    assert "What decides goodput: scheduler (nano reaches 50% less at best)" in text
    assert "max-num-seqs does not move the best goodput by 1%" in text


def test_failed_cells_are_counted_and_never_recommended() -> None:
    found = view(cell("nano", "64", 99.0, status="failed", reason="x"), cell("vllm", "64", 10.0))
    (pick,) = found.picks.values()
    assert pick.setting.values["scheduler"] == "vllm"
    assert answer(found)[-1] == "1 of 2 cells failed and is left out; the reasons stand at the end."
    nothing = view(cell("nano", "64", 99.0, status="failed", reason="x"))
    assert answer(nothing)[0] == "No cell came to its end, so there is nothing to recommend."


def test_a_found_rate_is_told_with_its_bounds_and_why_the_next_fails() -> None:
    cells = [
        cell("vllm", "64", 10.0, rate=20.0, rate_low=19.0, rate_high=20.5, fails_at=20.4, reason="2 % miss ttft"),
        cell("nano", "64", 9.0, rate=15.0, rate_low=15.0, rate_high=15.3, fails_at=15.3, reason="y"),
    ]
    text = answer(view(*cells, rate=True))
    assert text[0].startswith(
        "Use scheduler vllm: by the mean of its seeds it sustains 20.00 requests/s (+0.5, −1) with 99% of the requests within"
    )
    assert text[1] == "At 20.40 requests/s it fails by the mean, surely only at 20.50: 2 % miss ttft."
    assert any("scheduler nano" in sentence and "25% less" in sentence for sentence in text)


def test_a_rate_whose_bounds_are_clear_is_told_without_a_doubt() -> None:
    one = cell("vllm", "64", 10.0, rate=20.0, rate_low=20.0, rate_high=20.4, fails_at=20.4, reason="2 % miss ttft")
    text = answer(view(one, rate=True))
    assert text[0].startswith("Use the setting: it sustains 20.00 requests/s (+0.4, −0) with")
    assert text[1] == "At 20.40 requests/s it fails: 2 % miss ttft."
    beside = cell("nano", "64", 9.0, rate=15.0, rate_low=15.0, rate_high=15.3, fails_at=15.3, reason="y")
    text = answer(view(one, beside, rate=True))
    assert text[-1] == "What decides sustained rate: scheduler (nano reaches 25% less at best)."


def test_rates_whose_error_bars_overlap_are_nowhere_told_apart() -> None:
    """8 % apart by the mean, and each within the other's bar: no sentence may call one better, or say what decides."""
    cells = [
        cell("vllm", "64", 10.0, rate=4.05, rate_low=3.12, rate_high=5.72, fails_at=4.41, reason="1 % miss ttft"),
        cell("nano", "64", 9.0, rate=3.71, rate_low=2.99, rate_high=5.25, fails_at=4.05, reason="y"),
    ]
    text = answer(view(*cells, rate=True))
    assert text[0].startswith(
        "Use scheduler vllm, or one that cannot be told from it: by the mean of its seeds it sustains 4.05"
    )
    assert (
        "1 other setting cannot be told from it in sustained rate (their error bars overlap): scheduler nano, 3.71 requests/s (+1.54, −0.72)."
        in text
    )
    assert "A longer trace, or more --max-seeds, narrows the bars." in text
    assert (
        "Not decided is whether sustained rate depends on scheduler (nano is 8% below vllm, within the error)." in text
    )
    assert not any("as good" in sentence or "What decides" in sentence or "less" in sentence for sentence in text)


def test_a_rate_that_nothing_bounds_surely_says_so() -> None:
    one = cell("vllm", "64", 10.0, rate=20.0, rate_low=0.0, fails_at=20.4, reason="x")
    text = answer(view(one, rate=True))
    assert "20.00 requests/s (none tried surely fails, none tried surely holds)" in text[0]
    assert text[1] == "At 20.40 requests/s it fails by the mean, no rate tried surely does: x."


def test_a_search_that_found_nothing_says_why_first_and_recommends_nothing() -> None:
    lost = {"status": "incomplete", "reason": "nothing could be decided: too few"}
    text = answer(view(cell("vllm", "64", 1.0, **lost), cell("nano", "64", 1.0, **lost), rate=True))
    assert text == [
        "Nothing could be decided: too few. So no rate is recommended.",
        "2 of 2 cells are incomplete (no rate was found) and not recommended.",
    ]


def test_settings_ahead_in_one_repeat_are_as_good_and_so_nothing_is_said_to_decide() -> None:
    names = ("scheduler", "max-num-seqs", "seed")
    cells = [cell(who, "64", goodput, seed=seed) for who, seed, goodput in
             (("vllm", "0", 10.0), ("vllm", "1", 10.0), ("nano", "0", 10.1), ("nano", "1", 8.0))]  # fmt: skip
    text = " ".join(answer(view(*cells, names=names)))
    assert "1 other setting is as good in goodput (within 1%, or ahead in a repeat)" in text
    assert "Not decided is whether goodput depends on scheduler" in text and "What decides" not in text


def test_what_the_tied_settings_have_in_common_is_told() -> None:
    cells = [
        cell(who, seats, 10.0 if seats != "8" else 3.0) for who in ("nano", "vllm") for seats in ("8", "64", "256")
    ]
    text = " ".join(answer(view(*cells)))
    assert "3 other settings are as good in goodput (within 1%)" in text
    assert "All of them have max-num-seqs 64 or 256, and every setting that has these is as good." in text
    cells[-1]["request_goodput"] = 4.0
    text = " ".join(answer(view(*cells)))
    assert "All of them have max-num-seqs 64 or 256; they are 3 of the 4 settings that have these." in text
