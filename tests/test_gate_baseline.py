"""The gate's judgement on small runs: what is exact, what a tolerance allows, what is not comparable, and what a timing may say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from benchctl.gate_baseline import Entry, Tolerance, TraceOf, make_entry, read_baseline
from benchctl.gate_counters import counters, mean_blocks, settings
from benchctl.gate_log import open_log, write_log
from engines.schedulers import nano_blocks
from engines.schedulers.nano import NanoScheduler
from reports.run import Run, open_run
from tests.command_line import Answer, call, rows, write_trace
from tests.laws import assert_laws

ROWS = rows(*((0.4 * i, 60 + 37 * (i % 7), 5 + 3 * (i % 4)) for i in range(30)))
POOL = ("--kv-cache-tokens", 512, "--block-size", 16, "--max-num-seqs", 8, "--max-num-batched-tokens", 256)


def replay(capfd: pytest.CaptureFixture[str], trace: Path, out: Path, *more: object) -> Path:
    argv = [
        "replay",
        trace,
        "--engine",
        "null",
        "--round-cost",
        "0.05,1e-3,0",
        "--no-report",
        "--out",
        out,
        *POOL,
        *more,
    ]
    answer = call(capfd, *argv)
    assert answer.code == 0, answer.err
    return out


@pytest.fixture
def made(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capfd: pytest.CaptureFixture[str]) -> Path:
    """t.jsonl, out/{nano,vllm} and their baseline b.json: made once, a copy for each test."""
    once = tmp_path_factory.getbasetemp() / "gate-once"
    if not (once / "b.json").exists():
        once.mkdir()
        replay(capfd, write_trace(once / "t.jsonl", ROWS), once / "out")
        assert gate(capfd, once, once / "out", "--update").code == 0
    return shutil.copytree(once, tmp_path, dirs_exist_ok=True)


def gate(capfd: pytest.CaptureFixture[str], folder: Path, *argv: object) -> Answer:
    return call(capfd, "gate", *argv, "--baseline", folder / "b.json")


def edit(folder: Path, **changes: Any) -> None:
    """Change keys of the nano entry."""
    data = json.loads((folder / "b.json").read_text())
    data["entries"][0] |= changes
    (folder / "b.json").write_text(json.dumps(data))


def test_the_same_run_passes_and_a_second_update_changes_nothing(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    answer = gate(capfd, made, made / "out")
    assert answer.code == 0 and "2 entries as in the baseline" in " ".join(answer.out.split())
    before = (made / "b.json").read_bytes()
    logs = {path.name: path.read_bytes() for path in made.glob("*.zip")}
    again = gate(capfd, made, made / "out", "--update")
    assert "t/nano: as before" in again.out and (made / "b.json").read_bytes() == before
    assert {path.name: path.read_bytes() for path in made.glob("*.zip")} == logs and len(logs) == 2


def test_every_counter_is_the_tables_own(made: Path) -> None:
    run = open_run(made / "out/nano")
    found = counters(run)
    batches, decisions = run.read("batches"), run.read("decisions")
    assert found["scheduled_tokens"] == batches["num_tokens"].sum()
    assert found["preemptions"] == (decisions["kind"] == "preempt").sum() > 0
    assert found["evictions"] == (decisions["kind"] == "evict").sum()
    assert found["cached_tokens"] == batches["cached_tokens"].sum()
    assert found["rounds.decode"] == (run.read("rounds")["kind"] == "decode").sum()
    assert found["stop_waiting.blocks"] == (run.read("rounds")["stop_waiting"] == "blocks").sum() > 0
    used = 32 - run.read("rounds")["free_blocks_scheduled"]
    assert found["mean_blocks"] == mean_blocks(run) == pytest.approx(used.mean(), abs=1e-4)  # type: ignore[arg-type]
    assert found["decision_digest"] == run.manifest["digest"]


def test_a_log_holds_every_decision_of_its_run(made: Path, tmp_path: Path) -> None:
    run = open_run(made / "out/vllm")
    write_log(run, tmp_path / "log.zip")
    with open_log(tmp_path / "log.zip") as log:
        for table in ("batches", "decisions", "blocks"):
            assert log.read(table).equals(run.read(table)), table
        assert log.labels == run.labels


def test_a_skipped_hash_is_found_with_its_round_and_its_consequence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1's blocks are hashed no more: nothing else changes until R3, which begins like R1, finds nothing."""
    shared = {"segments": [{"id": "system", "len": 48}]}
    trace = write_trace(
        tmp_path / "t.jsonl",
        [
            {"id": "R1", "arrival_s": 0.0, "input_length": 60, "output_length": 3} | shared,
            {"id": "R2", "arrival_s": 5.0, "input_length": 30, "output_length": 3},
            {"id": "R3", "arrival_s": 9.0, "input_length": 70, "output_length": 3} | shared,
        ],
    )
    gate(capfd, tmp_path, replay(capfd, trace, tmp_path / "old", "--scheduler", "nano"), "--update")
    hash_blocks = nano_blocks.NanoBlockManager.hash_blocks
    monkeypatch.setattr(
        nano_blocks.NanoBlockManager, "hash_blocks", lambda self, seq, end: seq.request and hash_blocks(self, seq, end)
    )
    new = replay(capfd, trace, tmp_path / "new", "--scheduler", "nano")
    answer = gate(capfd, tmp_path, new, "--json")
    found = json.loads(answer.out)["entries"][0]
    assert answer.code == 3 and found["ok"] is False
    moved = {f["name"]: (f["baseline"], f["found"]) for f in found["findings"] if not f["ok"]}
    assert moved["cached_tokens"] == (48, 0) and moved["prefill_tokens"] == (112, 160)
    first = found["first"]
    assert first["differences"][0].startswith("round 1: baseline: block 0 cache, R1 as its block 0; now: nothing more")
    assert first["differences"][1].startswith(
        "round 7: baseline admitted R3 whole, 22 tokens after a prefix hit of 48 tokens; now admitted R3 whole, 70 tokens"
    )
    assert (first["round_baseline"], first["round_now"]) == (7, 7)
    assert first["explain_now"]["candidates"][0]["label"] == "R3"
    text = gate(capfd, tmp_path, new).out
    assert f"benchctl explain {new}/nano --round 7" in " ".join(text.split())


def test_another_victim_is_found(
    made: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    preempt = NanoScheduler._preempt

    def oldest(self: NanoScheduler, victim: Any, wanted_by: Any) -> None:
        """The second of the running instead of the last."""
        self.running.append(victim)
        preempt(self, self.running.pop(1), wanted_by)

    monkeypatch.setattr(NanoScheduler, "_preempt", oldest)
    changed = replay(capfd, made / "t.jsonl", made / "changed", "--scheduler", "nano")
    answer = gate(capfd, made, changed, "--json")
    first = json.loads(answer.out)["entries"][0]["first"]
    assert answer.code == 3 and "preempted" in first["differences"][0]


def test_tolerances_are_of_the_file(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The run has 8 % more preemptions than a baseline that is changed by hand."""
    base = json.loads((made / "b.json").read_text())["entries"][0]["counters"]
    base["preemptions"] = now = base["preemptions"] * 100
    run = open_run(made / "out/nano")
    for tolerances, name, value, ok in (
        ({}, "preemptions", now + 1, False),
        ({}, "preemptions", now - 1, False),
        ({"preemptions": Tolerance(max_increase="5%")}, "preemptions", now * 105 // 100, True),
        ({"preemptions": Tolerance(max_increase="5%")}, "preemptions", now * 105 // 100 + 1, False),
        ({"preemptions": Tolerance(max_increase="5%")}, "preemptions", 0, True),
        ({"preemptions": Tolerance(max_increase=3, max_decrease=2)}, "preemptions", now - 2, True),
        ({"preemptions": Tolerance(max_increase=3, max_decrease=2)}, "preemptions", now - 3, False),
        ({"pre*": Tolerance(ignore=True)}, "preemptions", 0, True),
        ({"pre*": Tolerance(ignore=True), "preemptions": Tolerance(max_increase=1)}, "preemptions", now + 2, False),
        ({"pre*": Tolerance(ignore=True)}, "evictions", base["evictions"] + 1, False),
    ):
        from benchctl.gate import check_counters

        entry = Entry("t/nano", "nano", TraceOf("t", "x"), "x", settings(run), base, tolerances)
        findings = {f.name: f for f in check_counters(entry, base | {name: value}, "b.json")}
        assert (findings[name].ok or findings[name].advisory) == ok, (tolerances, value)


def test_a_new_stop_reason_is_a_change(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = json.loads((made / "b.json").read_text())
    gone = data["entries"][0]["counters"].pop("stop_waiting.blocks")
    (made / "b.json").write_text(json.dumps(data))
    answer = gate(capfd, made, made / "out/nano", "--json")
    bad = [f for f in json.loads(answer.out)["entries"][0]["findings"] if not f["ok"]]
    assert answer.code == 3 and [(f["name"], f["baseline"], f["found"]) for f in bad] == [
        ("stop_waiting.blocks", 0, gone)
    ]


def test_a_digest_alone_says_how_to_gate_counters_only(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = json.loads((made / "b.json").read_text())
    data["entries"][0]["counters"]["decision_digest"] = "xxh3:0"
    data["entries"][0]["tolerances"] = {"preemptions": {"max_increase": "5%"}}
    (made / "b.json").write_text(json.dumps(data))
    answer = gate(capfd, made, made / "out/nano")
    assert answer.code == 3 and '"decision_digest": {"ignore": true}' in " ".join(answer.out.split())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"tolerances": {"preemption": {"max_increase": 1}}},
            "tolerances name 'preemption', and no counter is called so",
        ),
        ({"tolerances": {"preemptions": {"max_increse": 1}}}, "unknown field `max_increse`"),
        ({"tolerances": {"preemptions": {"max_increase": "lots"}}}, "the tolerance 'lots' is no amount"),
        ({"tolerances": {"preemptions": {"max_increase": -1}}}, "the tolerance -1 is no amount"),
        ({"counters": 7}, "this is no baseline"),
        ({"name": "t/vllm"}, "two entries are named 't/vllm'"),
        ({"timing": {"machine": {}, "metrics": {"speed": [1.0]}}}, "no timing is called 'speed'"),
        ({"timing": {"machine": {}, "metrics": {}, "min_effect": "3"}}, "'3' is no share"),
    ],
)
def test_faults_of_the_file_are_named(
    made: Path, capfd: pytest.CaptureFixture[str], changes: dict[str, Any], text: str
) -> None:
    edit(made, **changes)
    answer = gate(capfd, made, made / "out/nano")
    assert answer.code == 2 and text in answer.err and "b.json" in answer.err and "try: " in answer.err


def test_what_is_not_comparable_is_exit_2_and_says_why(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    other = replay(capfd, made / "t.jsonl", made / "seats", "--scheduler", "nano", "--max-num-seqs", 4)
    answer = gate(capfd, made, other)
    assert answer.code == 2 and "other settings than entry t/nano: max_num_seqs 4, there 8" in answer.err
    short = replay(
        capfd,
        write_trace(made / "s/t.jsonl", ROWS[:9]) if (made / "s").mkdir() is None else made,
        made / "o2",
        "--scheduler",
        "nano",
    )
    assert "trace t is not the baseline's: its sha256 begins" in gate(capfd, made, short).err
    answer = call(capfd, "gate", made / "out", "--baseline", made / "none.json")
    assert answer.code == 2 and "there is no baseline yet" in answer.err
    assert call(capfd, "gate", made / "out").code == 2


def relabel(run: Path, folder: Path, factor: float = 1.0, **manifest: Any) -> Path:
    """A copy of a run with other words in its manifest and all its times `factor` longer."""
    shutil.copytree(run, folder)
    for part in folder.glob("*.parquet"):
        frame = pl.read_parquet(part)
        times = [name for name in frame.columns if name.endswith("_s") and name != "arrival_s"]
        frame.with_columns(pl.col(times) * factor).write_parquet(part)
    text = json.loads((folder / "manifest.json").read_text()) | manifest
    (folder / "manifest.json").write_text(json.dumps(text))
    return folder


def test_a_clock_that_measures_is_refused_by_name(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wall = relabel(made / "out/nano", made / "wall", clock="wall", engine="torch")
    answer = gate(capfd, made, wall, "--update")
    assert answer.code == 2 and "--clock wall with the torch engine depends on measured time" in answer.err
    virtual = relabel(made / "out/nano", made / "virtual", engine="torch")
    assert "--clock virtual with the torch engine" in gate(capfd, made, virtual, "--update").err


@pytest.mark.parametrize(
    ("factors", "code"),
    [((1.2, 1.21, 1.19), 3), ((1.01, 1.02, 1.0), 0), ((0.8, 0.81, 0.79), 0), ((1.0, 1.9, 1.0), 0), ((1.2, 1.2), 0)],
)
def test_timings_need_significance_and_size_and_three_repeats(
    made: Path, capfd: pytest.CaptureFixture[str], factors: tuple[float, ...], code: int
) -> None:
    """20 % slower fails; 1 % is too little, 20 % faster is fine, one slow repeat of three is chance, two are too few."""
    old = [relabel(made / "out/nano", made / f"old{i}", f, clock="wall") for i, f in enumerate((0.99, 1.0, 1.01))]
    assert call(capfd, "gate", *old, "--baseline", made / "w.json", "--update", "--timing").code == 0
    new = [relabel(made / "out/nano", made / f"new{i}", f, clock="wall") for i, f in enumerate(factors)]
    answer = call(capfd, "gate", *new, "--baseline", made / "w.json", "--json")
    assert answer.code == code, answer.out
    entry = json.loads((made / "w.json").read_text())["entries"][0]
    assert "counters" not in entry and len(entry["timing"]["metrics"]["itl_mean"]) == 3


def test_timings_of_another_machine_are_advisory(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    old = [relabel(made / "out/nano", made / f"old{i}", f, clock="wall") for i, f in enumerate((0.99, 1.0, 1.01))]
    call(capfd, "gate", *old, "--baseline", made / "w.json", "--update", "--timing")
    new = [
        relabel(made / "out/nano", made / f"new{i}", 2 * f, clock="wall", hardware={"cpu": "another", "cores": 2})
        for i, f in enumerate((0.99, 1.0, 1.01))
    ]
    answer = call(capfd, "gate", *new, "--baseline", made / "w.json")
    assert answer.code == 0 and "another machine (cpu another" in " ".join(answer.out.split())


def test_repeats_that_decide_differently_are_no_baseline(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    twin = relabel(made / "out/nano", made / "twin", digest="xxh3:other")
    answer = gate(capfd, made, made / "out/nano", twin, "--update")
    assert answer.code == 2 and "repeats under --clock virtual took different decisions" in answer.err
    assert gate(capfd, made, made / "out/nano", twin).code == 3


def test_a_broken_or_killed_run_is_no_result(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    failed = relabel(made / "out/nano", made / "failed", status="failed", error="the device fell off")
    assert gate(capfd, made, failed).code == 1
    assert gate(capfd, made, relabel(made / "out/nano", made / "cut", status="running")).code == 2


def test_a_run_without_a_digest_of_its_decisions_is_refused(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    short = replay(capfd, made / "t.jsonl", made / "short", "--scheduler", "nano", "--records", "summary")
    for more in ([], ["--update"]):
        answer = gate(capfd, made, short, *more)
        assert answer.code == 2 and "no digest to hold against the baseline" in answer.err, answer.err


def test_update_keeps_tolerances_and_prints_the_change(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    edit(made, tolerances={"preemptions": {"max_increase": "5%"}, "decision_digest": {"ignore": True}})
    other = replay(capfd, made / "t.jsonl", made / "seats", "--scheduler", "nano", "--max-num-seqs", 4)
    answer = gate(capfd, made, other, "--update")
    assert answer.code == 0 and "max_num_seqs" in answer.out
    entries = read_baseline(made / "b.json").entries
    assert [e.name for e in entries] == ["t/nano", "t/vllm"]
    assert entries[0].settings["max_num_seqs"] == 4 and entries[0].tolerances["preemptions"].max_increase == "5%"
    assert gate(capfd, made, other).code == 0


def test_a_recorded_clock_is_gated_with_its_admissions(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    again = replay_recorded(capfd, made, made / "out/nano", "again")
    run: Run = assert_laws(again / "nano")
    assert settings(run)["admissions"].startswith("xxh3:")
    assert run.manifest["digest"] == open_run(made / "out/nano").manifest["digest"]
    assert make_entry(run, "x", None).counters is not None


def replay_recorded(capfd: pytest.CaptureFixture[str], folder: Path, source: Path, name: str) -> Path:
    argv = [
        "replay",
        folder / "t.jsonl",
        "--scheduler",
        "nano",
        "--engine",
        "null",
        "--clock",
        "recorded",
        "--from",
        source,
    ]
    answer = call(capfd, *argv, "--no-report", "--out", folder / name)
    assert answer.code == 0, answer.err
    return folder / name
