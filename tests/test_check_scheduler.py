"""Policies of one's own: found, refused by name, replayed and reported; and a campaign that finds planted faults and makes them small."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from benchctl import policies
from engines.schedulers.registry import SCHEDULERS
from reports.explain import document, explain_round
from reports.run import open_run
from tests.command_line import call, rows, write_trace
from tests.laws import assert_laws

SPF = "examples.shortest_prompt_first:ShortestPromptFirst"
ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test loads is gone after it."""
    monkeypatch.setattr(policies, "_loaded", {})
    for name in [name for name in SCHEDULERS if name not in policies.BUILTIN]:
        monkeypatch.delitem(SCHEDULERS, name)
    before = dict(SCHEDULERS)
    monkeypatch.syspath_prepend(str(ROOT))
    yield
    for name in [name for name in SCHEDULERS if name not in before]:
        del SCHEDULERS[name]


def module(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, name, raising=False)


def test_the_shortest_prompt_is_served_first(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """R1 takes the one seat; of R2 (30 tokens) and R3 (10), that came later, R3 is next."""
    trace = write_trace(tmp_path / "t.jsonl", rows((0, 20, 4), (0, 30, 2), (1, 10, 2)))
    argv = ["replay", trace, "--scheduler", SPF, "--scheduler", "vllm", "--engine", "null", "--clock", "rounds"]
    answer = call(capfd, *argv, "--max-num-seqs", 1, "--kv-cache-tokens", 160, "--no-report", "--out", tmp_path / "o")
    assert answer.code == 0, answer.err
    order = {}
    for name in ("shortest-prompt-first", "vllm"):
        run = assert_laws(tmp_path / "o" / name)
        order[name] = run.read("requests").sort("first_scheduled_s")["id"].to_list()
    assert order == {"shortest-prompt-first": ["R1", "R3", "R2"], "vllm": ["R1", "R2", "R3"]}
    run = open_run(tmp_path / "o/shortest-prompt-first")
    assert run.manifest["place"] == SPF and run.family == "vllm"
    assert "the policy may have another" in str(document(explain_round(run, 2)))


def test_the_example_is_sixty_lines_of_code() -> None:
    text = (ROOT / "examples/shortest_prompt_first.py").read_text().partition("from __future__")[2]
    assert sum(bool(line.strip()) for line in text.splitlines()) <= 60


def test_an_entry_point_gives_a_short_name(monkeypatch: pytest.MonkeyPatch) -> None:
    point = metadata.EntryPoint("spf", SPF, policies.GROUP)
    monkeypatch.setattr(policies.metadata, "entry_points", lambda group: [point] if group == policies.GROUP else [])
    assert policies.find_policy("spf") == "shortest-prompt-first"
    assert SCHEDULERS["shortest-prompt-first"].place == SPF


BASE = "from engines.schedulers.vllm import VllmScheduler\n"


@pytest.mark.parametrize(
    ("text", "asked", "what"),
    [
        ("", "nobody_has_this:Class", "there is no module nobody_has_this"),
        (
            BASE + "class Mine(VllmScheduler):\n    name = 'mine'\n",
            "mine_mod:Other",
            "module mine_mod has no class Other",
        ),
        ("1 / 0\n", "mine_mod:Mine", "cannot be imported: ZeroDivisionError"),
        ("def broken(:\n", "mine_mod:Mine", "cannot be imported: SyntaxError"),
        ("import nothing_like_it\n", "mine_mod:Mine", "cannot be imported: ModuleNotFoundError"),
        (
            "class Mine:\n    name = 'mine'\n    def add(self, request): ...\n",
            "mine_mod:Mine",
            "Mine is no scheduler: it has no has_unfinished, schedule",
        ),
        (BASE + "class Mine(VllmScheduler): ...\n", "mine_mod:Mine", "Mine calls itself 'vllm', which is taken"),
        (BASE + "class Mine(VllmScheduler):\n    name = 'a/b'\n", "mine_mod:Mine", "Mine.name is 'a/b'"),
        (
            BASE + "class Mine(VllmScheduler):\n    name = 'm'\n    KNOBS = ('seats',)\n",
            "mine_mod:Mine",
            "Mine.KNOBS names seats",
        ),
        (
            BASE + "class Mine(VllmScheduler):\n    name = 'm'\n    NULL_BLOCKS = -1\n",
            "mine_mod:Mine",
            "Mine.NULL_BLOCKS is -1",
        ),
        ("", "what is this", "no scheduler named 'what is this'"),
        (
            "",
            "examples/shortest_prompt_first.py",
            "try: examples.shortest_prompt_first:CLASS, with the name of its class",
        ),
        ("", "pkg.mod:1x", "--scheduler is 'pkg.mod:1x'"),
    ],
)
def test_what_is_no_policy_is_said_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], text: str, asked: str, what: str
) -> None:
    module(monkeypatch, tmp_path, "mine_mod", text)
    answer = call(capfd, "replay", "traces/walkthrough.jsonl", "--engine", "null", "--scheduler", asked)
    assert answer.code == 2 and what in answer.err and "try: " in answer.err


def test_the_shipped_policies_pass(capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("nano", "vllm", SPF):
        answer = call(capfd, "check-scheduler", name, "--cases", 4, "--json")
        found: dict[str, Any] = json.loads(answer.out)
        assert answer.code == 0 and found["broken"] == [], found
        assert found["cases"] == 4 and found["rounds"] > 50
    assert call(capfd, "check-scheduler", "nano", "--cases", 2).out.endswith("every law held\n")


FAULTS = {
    "leaks": (
        "law",
        "    def update(self, round, sampled):\n"
        "        free, self.blocks.free = self.blocks.free, lambda seq: None if seq.finish_reason and seq.request == 3 else free(seq)\n"
        "        super().update(round, sampled)\n        self.blocks.free = free\n",
    ),
    "forgets": ("stuck", "    def _schedule_waiting(self, batch, threshold):\n        return 'waiting_empty'\n"),
    "raises": (
        "raised",
        "    def schedule(self):\n        if len(self.running) > 2:\n            raise KeyError('three is a crowd')\n        return super().schedule()\n",
    ),
    "drifts": (
        "nondeterministic",
        "    seen = 0\n    def schedule(self):\n        type(self).seen += 1\n        round = super().schedule()\n"
        "        if type(self).seen % 7 == 0 and round.decisions:\n"
        "            order, kind, request, other, reason, *rest = round.decisions[0]\n"
        "            round.decisions[0] = (order, kind, request, other, 'not_first' if kind == 'admit' else reason, *rest)\n        return round\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_made_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], fault: str
) -> None:
    what, body = FAULTS[fault]
    module(
        monkeypatch,
        tmp_path,
        f"planted_{fault}",
        BASE + f"class Planted(VllmScheduler):\n    name = 'planted-{fault}'\n{body}",
    )
    monkeypatch.setattr("benchctl.check_scheduler.SHRINK_S", 20.0)
    answer = call(capfd, "check-scheduler", f"planted_{fault}:Planted", "--cases", 12, "--out", tmp_path, "--json")
    assert answer.code == 1, answer.out
    broken = json.loads(answer.out)["broken"]
    assert what in {entry["what"] for entry in broken}, broken
    entry = next(entry for entry in broken if entry["what"] == what)
    # What comes and goes from run to run cannot be made small.
    assert (entry["requests"] <= 5 or what == "nondeterministic") and Path(entry["trace"]).exists()
    assert entry["command"].startswith(f"benchctl replay {entry['trace']} --scheduler planted_{fault}:Planted")
    if what in ("raised", "stuck"):
        shown = call(capfd, *entry["command"].split()[1:], "--no-report", "--out", tmp_path / "shown")
        assert shown.code == 1


def test_a_copy_of_nano_has_its_block_size_and_decides_as_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "engines/schedulers/nano.py").read_text()
    assert text.count('    name = "nano"\n') == 1
    module(monkeypatch, tmp_path, "copied_nano", text.replace('    name = "nano"\n', '    name = "copied"\n'))
    trace = write_trace(tmp_path / "t.jsonl", rows((0, 600, 30), (0, 700, 20), (0.01, 300, 300)))
    argv = ["replay", trace, "--scheduler", "nano", "--scheduler", "copied_nano:NanoScheduler", "--engine", "null"]
    answer = call(capfd, *argv, "--kv-cache-tokens", 2048, "--no-report", "--out", tmp_path / "o")
    assert answer.code == 0, answer.err
    nano, copied = (open_run(tmp_path / "o" / name) for name in ("nano", "copied"))
    assert copied.block_size == nano.block_size == 256
    assert copied.manifest["digest"] == nano.manifest["digest"]
