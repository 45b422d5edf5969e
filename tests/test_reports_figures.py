"""Figures as data: axes that can be read, bars that begin where they should, and points that say what they are."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from reports import figures
from reports.page import render
from reports.page_view import make_view
from reports.roofline import ceilings_of
from reports.run import Run, open_run
from reports.summary import summarize
from reports.units import MEASURED
from tests.fake_run import record_golden


def gaps_of(*gaps_s: float) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "request": [0] * len(gaps_s),
            "round": range(1, len(gaps_s) + 1),
            "t_s": [float(i + 1) for i in range(len(gaps_s))],
            "itl": gaps_s,
        }
    )


def test_the_gaps_axis_is_labelled_in_its_own_unit_through_its_whole_range() -> None:
    drawn = figures.itl_figure([gaps_of(0.0012, 0.005, 0.104)], ["nano"])
    assert drawn is not None
    axis = drawn["layout"]["yaxis"]
    low, high = (10**end for end in axis["range"])
    assert low < 1.2 and high > 104  # milliseconds
    inside = [text for value, text in zip(axis["tickvals"], axis["ticktext"], strict=True) if low <= value <= high]
    assert inside == ["2", "5", "10", "20", "50", "100"]
    # Over many decades only they are labelled; small ones are not written as powers.
    assert figures.log_axis(0.004, 900.0, 3.5)["ticktext"] == ["0.001", "0.01", "0.1", "1", "10", "100", "1,000"]


def test_points_of_two_runs_differ_in_shape_and_filling() -> None:
    drawn = figures.itl_figure([gaps_of(0.01, 0.02)] * 6, list("abcdef"))
    assert drawn is not None
    marks = [trace["marker"] for trace in drawn["data"] if trace["mode"] == "markers"]
    assert len({mark["symbol"] for mark in marks}) == 6 and marks[1]["symbol"].endswith("-open")


def test_stalled_time_lies_under_the_decode_part_and_a_run_without_any_has_no_row(tmp_path: Path) -> None:
    nano = summarize(
        open_run(record_golden(tmp_path / "nano", "nano", "article_rounds", manifest={"clock": "virtual"}))
    )
    calm = summarize(
        open_run(record_golden(tmp_path / "calm", "nano", "article_rounds", manifest={"clock": "virtual"}))
    )
    for phase in ("stalled", "preempted"):
        calm["benchctl"]["latency"][phase]["mean_ms"] = 0.0
    drawn = figures.split_figure([nano, calm], ["nano", "calm"], MEASURED)
    assert drawn is not None
    assert drawn["layout"]["yaxis"]["categoryarray"] == ["calm", "nano, of which", "nano"]
    bars = {trace["name"]: trace for trace in drawn["data"]}
    mean = {phase: nano["benchctl"]["latency"][phase]["mean_ms"] for phase in ("queue", "prefill", "decode", "stalled")}
    assert bars["stalled"]["y"] == bars["preempted"]["y"] == ["nano, of which"]
    assert bars["stalled"]["base"] == [pytest.approx(mean["queue"] + mean["prefill"])]
    assert bars["preempted"]["base"] == [pytest.approx(mean["queue"] + mean["prefill"] + mean["stalled"])]
    assert drawn["layout"]["xaxis"]["range"][0] == 0
    none = figures.split_figure([calm], ["calm"], MEASURED)
    assert none is not None and [trace["name"] for trace in none["data"]] == ["queue", "prefill", "decode"]


def on_device(path: Path, **manifest: object) -> Run:
    """A run of an H200 whose rounds all do 8.52 TFLOP and move 42.6 GB in 0.2 s."""
    gpu = {"gpu": {"name": "NVIDIA H200"}}
    folder = record_golden(
        path, "nano", "article_rounds", manifest={"engine": "torch", "dtype": "bfloat16", "hardware": gpu} | manifest
    )
    file = folder / "rounds-00000.parquet"
    pl.read_parquet(file).with_columns(
        pl.lit(8.52e12).alias("flops"), pl.lit(42.6e9).alias("bytes"), pl.lit(0.2).alias("device_s")
    ).write_parquet(file)
    return open_run(folder)


def test_a_point_of_the_roofline_names_its_run_its_kind_and_its_traffic(tmp_path: Path) -> None:
    drawn = figures.roofline_figure([on_device(tmp_path / "nano")], ["<nano>"], (795e12, 4.26e12))
    assert drawn is not None
    points = next(trace for trace in drawn["data"] if trace["name"].endswith("prefill"))
    assert points["hovertemplate"].startswith("&lt;nano&gt;, round %{customdata[2]:,}, prefill<br>")
    assert points["customdata"][0][3] == 0.213  # 42.6 GB in 0.2 s, TB/s
    assert (points["x"][0], points["y"][0]) == (200.0, 42.6)


def test_the_page_says_once_where_the_ceilings_were_measured(tmp_path: Path) -> None:
    runs = [on_device(tmp_path / name) for name in ("a", "b")]
    assert all(not ceilings.own for run in runs if (ceilings := ceilings_of(run)))
    page = render(runs)
    assert page.count("The ceilings were not measured on this machine") == 1 and "benchctl doctor --measure" in page
    found = {
        "device": "NVIDIA H200", "measured": "2026-11-30",
        "copy": {"value": 4e12, "size_bytes": 2**32}, "gemm_bfloat16_8192": {"value": 7e14},
    }  # fmt: skip
    own = on_device(tmp_path / "own", ceilings=found)
    view = make_view(own, "own", 0, summarize(own), gaps_of(1.0))
    assert view.ceilings is not None and view.ceilings.own
    assert "Ceilings: bfloat16 matrix product of 8192 × 8192 random values" in render([own])


def test_facts_say_weights_outputs_and_the_null_block(tmp_path: Path) -> None:
    config = {name: {"value": value} for name, value in (("load_format", "dummy"), ("outputs", "forced"))}
    run = on_device(tmp_path / "nano", config=config)
    facts = dict(make_view(run, "nano", 0, summarize(run), gaps_of(1.0)).facts)
    assert facts["weights"].startswith("random (--load-format dummy)") and "--outputs forced" in facts["outputs"]
    assert facts["KV pool"] == "11 blocks of 256 tokens"
    vllm = open_run(record_golden(tmp_path / "vllm", "vllm", "worked_example"))
    vllm.manifest["limits"]["num_blocks"] = (vllm.usable_blocks or 0) + 1
    shown = dict(make_view(vllm, "vllm", 0, summarize(vllm), gaps_of(1.0)).facts)
    assert shown["KV pool"] == f"{vllm.usable_blocks} blocks of {vllm.block_size} tokens, and the null block"
    assert "weights" not in shown
