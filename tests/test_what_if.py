"""What-if from a recorded run: everything but the question is the run's, the question is checked, and the page says both."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchctl.profiles import save_profile
from reports.run import Run, open_run
from tests.command_line import Answer, call, rows, write_trace
from tests.simulated_profile import make_profile, pass_for_measured

TRACE = rows(*((i * 0.01, 48, 6) for i in range(30)))


@pytest.fixture
def recorded(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Path:
    """vllm on the null engine, by rate and seed, with a small pool."""
    trace = write_trace(tmp_path / "t.jsonl", TRACE)
    answer = call(
        capfd, "replay", trace, "-s", "vllm", "--engine", "null", "--request-rate", "50", "--seed", "3", "--num-prompts", "25",
        "--num-blocks", "65", "--max-num-seqs", "8", "--goodput", "ttft:200", "--out", tmp_path / "o", "--no-report",
    )  # fmt: skip
    assert answer.code == 0, answer.err
    return tmp_path / "o" / "vllm"


def ask(capfd: pytest.CaptureFixture[str], run: Path, *words: object) -> tuple[Answer, Run]:
    out = run.parent.parent / f"w{len(list(run.parent.parent.iterdir()))}"
    answer = call(capfd, "replay", "--from", run, "--out", out, *words)
    assert answer.code == 0, answer.err
    (folder,) = [path.parent for path in out.glob("*/manifest.json")]
    return answer, open_run(folder)


def test_nothing_else_is_different(capfd: pytest.CaptureFixture[str], recorded: Path) -> None:
    answer, run = ask(capfd, recorded, "--set", "max_num_seqs=2", "--no-report")
    before = open_run(recorded)
    for name in (
        "seed",
        "request_rate",
        "num_prompts",
        "max_num_batched_tokens",
        "block_size",
        "goodput",
        "num_blocks",
    ):
        assert run.setting(name) == before.setting(name), name
    assert (run.max_num_seqs, before.max_num_seqs) == (2, 8)
    entry = run.manifest["config"]
    assert entry["max_num_seqs"]["source"] == "flag" and entry["num_blocks"]["source"] == "recorded run"
    assert entry["request_rate"]["source"] == "recorded run"
    assert run.manifest["what_if"] == {"of": str(recorded), "changes": {"max_num_seqs": {"was": 8, "is": 2}}}
    assert "max_num_seqs: 8 → 2" in answer.err
    assert run.read("admissions")["arrival_s"].to_list() == before.read("admissions")["arrival_s"].to_list()


def test_asking_for_nothing_repeats_every_decision(capfd: pytest.CaptureFixture[str], recorded: Path) -> None:
    answer, run = ask(capfd, recorded, "--no-report")
    assert run.manifest["digest"] == open_run(recorded).manifest["digest"]
    assert "nothing is asked to be different" in answer.err


def test_another_policy_gets_the_same_tokens_of_pool(capfd: pytest.CaptureFixture[str], recorded: Path) -> None:
    _, run = ask(capfd, recorded, "--set", "scheduler=nano", "--set", "block-size=64", "--no-report")
    assert run.scheduler == "nano" and run.block_size == 64
    assert run.setting("usable_tokens") == 1024 == open_run(recorded).setting("usable_tokens")
    answer, run = ask(capfd, recorded, "--set", "block_size=48", "--no-report")
    assert run.setting("usable_tokens") == 1008 and "1,008 tokens, not 1,024" in answer.err


def test_flags_ask_as_set_does_and_none_takes_a_setting_back(capfd: pytest.CaptureFixture[str], recorded: Path) -> None:
    _, run = ask(capfd, recorded, "--max-num-seqs", "2", "--set", "num_prompts=none", "--no-report")
    assert run.max_num_seqs == 2 and run.setting("num_prompts") is None
    assert run.read("requests").height == 30
    _, run = ask(capfd, recorded, "--set", "enable_prefix_caching=off", "--set", "num_blocks=33", "--no-report")
    assert run.setting("enable_prefix_caching") is False and run.usable_blocks == 32


def test_recorded_admissions_are_kept_on_request(capfd: pytest.CaptureFixture[str], recorded: Path) -> None:
    _, run = ask(capfd, recorded, "--clock", "recorded", "--set", "max_num_seqs=2", "--no-report")
    assert run.clock == "recorded" and run.max_num_seqs == 2
    rounds = [r.read("admissions").select("request", "admitted_round").rows() for r in (run, open_run(recorded))]
    assert rounds[0] == rounds[1]


def test_the_trace_of_the_run_is_found_or_asked_for(capfd: pytest.CaptureFixture[str], recorded: Path) -> None:
    trace = recorded.parent.parent / "t.jsonl"
    moved = trace.rename(trace.with_name("moved.jsonl"))
    answer = call(capfd, "replay", "--from", recorded, "--set", "max_num_seqs=2")
    assert answer.code == 2 and "t.jsonl (sha256" in answer.err and "is not there any more" in answer.err
    assert "benchctl replay TRACE --from RUN" in answer.err
    out = recorded.parent.parent / "named"
    assert (
        call(capfd, "replay", moved, "--from", recorded, "--set", "max_num_seqs=2", "--out", out, "--no-report").code
        == 0
    )
    write_trace(trace, rows((0.0, 9, 1)))
    answer = call(capfd, "replay", "--from", recorded, "--set", "max_num_seqs=2")
    assert answer.code == 2 and "is another one by now" in answer.err
    # Beside the run's folder it is found by its sha256.
    trace.unlink()
    shutil.copy(moved, recorded.parent / "t.jsonl")
    assert (
        call(
            capfd, "replay", "--from", recorded, "--set", "max_num_seqs=2", "--out", out, "--force", "--no-report"
        ).code
        == 0
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--set", "max_num_seq=4"], "did you mean max_num_seqs?"),
        (["--set", "num_blokcs=4"], "did you mean num_blocks?"),
        (["--set", "max_num_seqs=four"], "give a whole number"),
        (["--set", "enable_prefix_caching=maybe"], "give on or off"),
        (["--set", "max_num_seqs"], "--set is 'max_num_seqs'"),
        (["--set", "seed=1", "--set", "seed=2"], "seed is set twice"),
        (["--set", "seed=1", "--seed", "2"], "seed is given twice"),
        (["--set", "scheduler=sjf"], "no scheduler named 'sjf'"),
        (["--set", "engine=simulated"], "which device is to be simulated?"),
    ],
)
def test_a_question_that_cannot_be_asked(
    capfd: pytest.CaptureFixture[str], recorded: Path, words: list[str], says: str
) -> None:
    answer = call(capfd, "replay", "--from", recorded, "--out", recorded.parent.parent / "w", *words)
    assert answer.code == 2 and says in answer.err and "Traceback" not in answer.err


def test_a_policy_taken_back_asks_every_policy(capfd: pytest.CaptureFixture[str], recorded: Path) -> None:
    out = recorded.parent.parent / "w"
    answer = call(capfd, "replay", "--from", recorded, "--set", "scheduler=none", "--out", out, "--no-report")
    assert answer.code == 0, answer.err
    assert sorted(path.parent.name for path in out.glob("*/manifest.json")) == ["nano", "vllm"]


def test_set_without_a_run_and_a_folder_of_several(capfd: pytest.CaptureFixture[str], recorded: Path) -> None:
    answer = call(capfd, "replay", "t.jsonl", "--set", "seed=1")
    assert answer.code == 2 and "--set changes a recorded run" in answer.err
    shutil.copytree(recorded, recorded.parent / "again")
    answer = call(capfd, "replay", "--from", recorded.parent, "--set", "seed=1")
    assert answer.code == 2 and "holds 2 runs" in answer.err


def test_the_page_compares_and_draws_both(capfd: pytest.CaptureFixture[str], recorded: Path) -> None:
    answer, _ = ask(capfd, recorded, "--set", "max_num_seqs=2", "--json")
    found: dict[str, Any] = json.loads(answer.out)
    assert set(found) == {"original", "what_if", "page"}
    assert found["what_if"]["p50_ttft_ms"] > found["original"]["p50_ttft_ms"]
    page = Path(found["page"]).read_text()
    assert "max_num_seqs" in page and 'id="comparison"' in page and page.count('class="run-data"') == 2


def test_a_measured_run_is_simulated_as_it_was_too(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What the engine changes stands apart from what the question changes."""
    profile = make_profile(16)
    save_profile(profile, tmp_path / "p.json")
    trace = write_trace(tmp_path / "t.jsonl", TRACE)
    flags = ["--engine", "simulated", "--profile", tmp_path / "p.json"]
    call(capfd, "replay", trace, "-s", "vllm", *flags, "--out", tmp_path / "o", "--no-report")
    run = tmp_path / "o" / "vllm"
    pass_for_measured(run, profile)
    config = json.loads((run / "manifest.json").read_text())
    config["config"]["profile"]["value"] = None
    (run / "manifest.json").write_text(json.dumps(config))
    answer = call(capfd, "replay", "--from", run, "--set", "max_num_seqs=2")
    assert answer.code == 2 and "recorded on Card X, and there is no card here" in answer.err
    answer = call(
        capfd, "replay", "--from", run, *flags, "--set", "max_num_seqs=2", "--out", tmp_path / "w", "--no-report"
    )
    assert answer.code == 0, answer.err
    assert "the engine itself, on the run as it was" in answer.out
    assert open_run(tmp_path / "w" / "as-recorded" / "vllm").max_num_seqs == 512
    assert open_run(tmp_path / "w" / "vllm").max_num_seqs == 2
    other = make_profile(16)
    import msgspec

    save_profile(msgspec.structs.replace(other, device="Card Y", name="y"), tmp_path / "y.json")
    words = ["replay", "--from", run, "--engine", "simulated", "--out", tmp_path / "y", "--no-report"]
    answer = call(capfd, *words, "--profile", tmp_path / "y.json")
    assert answer.code == 2 and "measured on Card Y, the run on Card X" in answer.err
    assert call(capfd, *words, "--set", f"profile={tmp_path / 'y.json'}").code == 0


def test_the_bundled_profile_of_the_runs_card_is_found(tmp_path: Path) -> None:
    from benchctl.what_if import profile_for

    run = open_run(Path(__file__).parent / "data" / "h200-sharegpt" / "vllm")
    assert profile_for(run) == "h200-qwen3-0.6b"
