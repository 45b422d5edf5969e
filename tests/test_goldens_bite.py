"""The logged cases bite: break one rule of a policy in its source, and some case must differ.

Each entry names a rule, the file that holds it, the text and what it is broken into. The text has to occur exactly once, so
a change of the source that loses a rule is noticed here.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import engines.schedulers
from engines.schedulers.registry import SCHEDULERS
from tests import test_goldens
from tests.golden_cases import FOLDER, case_names, load_case

SOURCE = Path(engines.schedulers.__file__).parent
MODULES = (
    "decisions", "sequence", "block_pool", "steady", "nano_blocks", "vllm_queue", "vllm_batch", "vllm_blocks", "vllm_calendar",
    "nano_calendar", "{policy}",
)  # fmt: skip

BROKEN = [
    # rule, policy, file, text, broken into
    (
        "blocks that are freed are taken last",
        "nano",
        "block_pool",
        "self._runs.append(FreeRun(blocks, holds))",
        "self._runs.appendleft(FreeRun(blocks, holds))",
    ),
    (
        "the last block is never matched, even when full",
        "nano",
        "nano_blocks",
        "keys = seq.hashes_xxh64(num_blocks - 1, self.block_size)\n            for index, key in enumerate(keys[: min(num_blocks - 1,",
        "full = seq.num_tokens // self.block_size\n            keys = seq.hashes_xxh64(full, self.block_size)\n"
        "            for index, key in enumerate(keys[: min(full,",
    ),
    (
        "blocks are released last first",
        "nano",
        "nano_blocks",
        "self._deallocate_keyed(table[:first][::-1])",
        "self._deallocate_keyed(table[:first])",
    ),
    (
        "a later twin takes over the entry",
        "nano",
        "nano_blocks",
        "self.hash_to_block[key] = block",
        "self.hash_to_block.setdefault(key, block)",
    ),
    (
        "an entry owned by a twin stays",
        "nano",
        "nano_blocks",
        "if entries.get(key) != block:",
        "if not entries.get(key):",
    ),
    (
        "a block's own ids are compared",
        "nano",
        "nano_blocks",
        "block is None or content[block] != (None if keyed else seq.block_content(index, self.block_size))",
        "block is None",
    ),
    (
        "a hit in the free list still needs a free block",
        "nano",
        "nano_blocks",
        "if ref_count[block] > 0:",
        "if True:",
    ),
    (
        "the hash is chained over the whole prefix",
        "nano",
        "sequence",
        'previous = key.to_bytes(8, "little")',
        'previous = b""',
    ),
    (
        "block 0 is hashed without a prefix",
        "nano",
        "sequence",
        'hashes[-1].to_bytes(8, "little") if hashes else b""',
        'b"" if hashes else bytes(8)',
    ),
    ("only a round's first may be chunked", "nano", "nano", "if wanted > budget and out.seqs:", "if False:"),
    (
        "the newest running is the victim",
        "nano",
        "nano_calendar",
        "victim = self.running.pop()",
        "victim = self.running.pop(min(1, len(self.running) - 1))",
    ),
    (
        "a preempted sequence waits ahead of all others",
        "nano",
        "nano",
        "self.waiting.appendleft(victim)",
        "self.waiting.append(victim)",
    ),
    (
        "max_num_seqs caps a round and not the running",
        "nano",
        "nano",
        "if len(out.seqs) >= config.max_num_seqs:",
        "if len(self.running) >= config.max_num_seqs:",
    ),
    (
        "blocks filled by decode are hashed",
        "nano",
        "nano_calendar",
        "self.blocks.fill_block(seq, (seq.base + age) // size)",
        "pass",
    ),
    (
        "the whole prompt is reserved at the first chunk",
        "nano",
        "nano_blocks",
        "self._allocate_blocks(seq, -(-seq.num_tokens // self.block_size) - num_cached)",
        "self._allocate_blocks(seq, 1)",
    ),
    (
        "prefill stops every decode",
        "nano",
        "nano",
        "while self.waiting:\n",
        "while self.waiting and not self.running:\n",
    ),
    ("the threshold is off when alone", "vllm", "vllm", "if len(self.running) + len(self.waiting) > 1 else 0", ""),
    (
        "who only waits turns the threshold on",
        "vllm",
        "vllm",
        "len(self.running) + len(self.waiting) > 1",
        "len(self.running) > 1",
    ),
    (
        "the last token is always computed",
        "vllm",
        "vllm_blocks",
        "num_blocks, find = (seq.num_tokens - 1) // self",
        "num_blocks, find = seq.num_tokens // self",
    ),
    (
        "released blocks without a hash go to the front",
        "vllm",
        "vllm_blocks",
        "pool.put_front(unhashed, BLANK)",
        "pool.put_back(unhashed, BLANK)",
    ),
    (
        "blocks are released last first",
        "vllm",
        "vllm_blocks",
        "keyed, hashes = table[:first][::-1], self.hash",
        "keyed, hashes = table[:first], self.hash",
    ),
    (
        "of equal blocks the one cached first is found",
        "vllm",
        "vllm_blocks",
        "hits.append(block)",
        "hits.append(self.twins.get(key, [block])[-1])",
    ),
    (
        "blocks can be hit in the round that computes them",
        "vllm",
        "vllm_blocks",
        "min(num_tokens, seq.num_tokens) // self.block_size",
        "seq.num_computed_tokens // self.block_size",
    ),
    (
        "hits in the free queue count as needed",
        "vllm",
        "vllm_blocks",
        " + list(map(self.pool.ref_count.__getitem__, hits)).count(0)",
        "",
    ),
    (
        "among equal victims the first running is taken",
        "vllm",
        "vllm",
        "victim = max(running, key",
        "victim = max(reversed(running), key",
    ),
    (
        "the victim is the largest priority, then the latest",
        "vllm",
        "vllm",
        "(other.new.priority, other.new.arrival_s)",
        "(other.new.arrival_s, other.new.priority)",
    ),
    (
        "a scheduled victim gives its tokens back",
        "vllm",
        "vllm",
        "budget += scheduled.pop(victim, 0)",
        "scheduled.pop(victim, 0)",
    ),
    ("a victim in front shifts the place in the list", "vllm", "vllm", "i -= place < i", "i -= 0"),
    ("a round that preempts admits nobody", "vllm", "vllm", "if self.log.num_preempted:", "if False:"),
    (
        "the running list never exceeds max_num_seqs",
        "vllm",
        "vllm",
        "if len(self.running) >= self.config.max_num_seqs:",
        "if len(self.running) > self.config.max_num_seqs:",
    ),
    (
        "ids break ties as text",
        "vllm",
        "vllm_queue",
        "new.arrival_s, new.id",
        "new.arrival_s, new.id.rjust(9)",
    ),
    (
        "without chunking the capped size is compared",
        "vllm",
        "vllm",
        "if num_new > batch.budget and not config",
        "if wanted > batch.budget and not config",
    ),
    ("the watermark spares the first to run", "vllm", "vllm", "if self.running else 0", ""),
    (
        "the reservation check counts outputs",
        "vllm",
        "vllm",
        '("reserve_full_isl", seq.num_tokens)',
        '("reserve_full_isl", seq.new.num_prompt_tokens)',
    ),
    ("by priority the loop goes on after a self-preemption", "vllm", "vllm", "if not by_priority:", "if True:"),
    ("the skipped keep their order", "vllm", "vllm_queue", "extendleft(reversed(seqs))", "extendleft(seqs)"),
    ("the adapter is part of the hash", "vllm", "sequence", '(self.new.adapter or "").encode()', 'b""'),
    ("an admission takes its adapter place at once", "vllm", "vllm", "adapters.add(adapter)", "pass"),
    (
        "FCFS victims go to the front of the queue",
        "vllm",
        "vllm",
        "self.waiting.put_back([victim])",
        "self.waiting.add(victim)",
    ),
    (
        "max_model_len ends a request",
        "vllm",
        "vllm",
        "return self.blocks.clip(request.num_prompt_tokens + request.num_output_tokens)",
        "return request.num_prompt_tokens + request.num_output_tokens",
    ),
    (
        "a prefix hit advances computed tokens",
        "vllm",
        "vllm",
        "seq.num_computed_tokens = num_cached",
        "seq.num_computed_tokens = 0",
    ),
]


@contextmanager
def scheduler_built_from(policy: str, file: str, old: str, new: str) -> Iterator[type]:
    """The policy's class, all its modules executed afresh with `old` replaced in one of them."""
    names = [name.format(policy=policy) for name in MODULES]
    saved = {name: sys.modules.get(f"engines.schedulers.{name}") for name in names}
    try:
        for name in names:
            path = SOURCE / f"{name}.py"
            text = path.read_text()
            if name == file:
                assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {name}.py"
                text = text.replace(old, new)
            module = types.ModuleType(f"engines.schedulers.{name}")
            sys.modules[module.__name__] = module
            exec(compile(text, str(path), "exec"), module.__dict__)
        yield sys.modules[f"engines.schedulers.{policy}"].__dict__[f"{policy.capitalize()}Scheduler"]
    finally:
        for name, module in saved.items():
            key = f"engines.schedulers.{name}"
            if module is None:
                sys.modules.pop(key, None)
            else:
                sys.modules[key] = module


def first_case_that_differs(policy: str, scheduler_class: type, monkeypatch: pytest.MonkeyPatch) -> str | None:
    def build(case: dict, **options: object) -> object:
        return scheduler_class(test_goldens.config_of(case), **options)

    monkeypatch.setattr(test_goldens, "build", build)
    by_size = sorted(case_names(policy), key=lambda name: (FOLDER / policy / f"{name}.json.gz").stat().st_size)
    for name in by_size:
        try:
            test_goldens.check_case(load_case(policy, name))
        except Exception:  # a broken rule may fail anywhere
            return name
    return None


@pytest.mark.parametrize(
    ("rule", "policy", "file", "old", "new"), BROKEN, ids=[f"{entry[1]}: {entry[0]}" for entry in BROKEN]
)
def test_a_broken_rule_is_noticed(
    rule: str, policy: str, file: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scheduler_built_from(policy, file, old, new) as broken:
        assert first_case_that_differs(policy, broken, monkeypatch) is not None, rule


@pytest.mark.parametrize("policy", sorted(SCHEDULERS))
def test_nothing_differs_when_nothing_is_broken(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with scheduler_built_from(
        policy, policy, "from __future__ import annotations", "from __future__ import annotations"
    ) as same:
        assert first_case_that_differs(policy, same, monkeypatch) is None
