"""Makes the bundled traces, byte for byte the same anywhere: `python -m traces.synthetic [--out DIR] [--full]`.

Everything is drawn by seed from stated distributions or written out by hand; no row comes from anybody's traffic.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from traces.conversations import ConversationRecipe, make_conversations
from traces.draws import draw_exponential, draw_lognormal, draw_uniform_int

Rows = list[dict[str, Any]]

SHAREGPT = ConversationRecipe(
    seed=20260801,
    num_requests=256,
    max_context=2048,
    output_scale=0.25,
    think_scale=0.02,
    conversations_per_s=2.0,
    nominal_s_per_output_token=0.01,
    end_s=45.0,
)
SHAREGPT_FULL = ConversationRecipe(
    seed=20260802,
    num_requests=2000,
    max_context=8192,
    output_scale=1.0,
    think_scale=1.0,
    conversations_per_s=2.0,
    nominal_s_per_output_token=0.02,
    end_s=900.0,
)

# The limits of the article's worked example. vLLM's pool has one block more, its null block.
WALKTHROUGH_LIMITS: dict[str, Any] = {
    "common": {"max_num_batched_tokens": 1024, "max_num_seqs": 4},
    "nano": {"block_size": 256, "num_blocks": 11},
    "vllm": {"block_size": 256, "num_blocks": 12},
}


def make_sharegpt() -> tuple[dict[str, Any], Rows]:
    """Conversations small and quick enough for two CPU cores."""
    return _sharegpt("sharegpt", SHAREGPT)


def make_sharegpt_full() -> tuple[dict[str, Any], Rows]:
    """The same shape unscaled, for a GPU."""
    return _sharegpt("sharegpt-full", SHAREGPT_FULL)


def _sharegpt(name: str, recipe: ConversationRecipe) -> tuple[dict[str, Any], Rows]:
    source = "synthetic: multi-turn conversations with the length statistics of ShareGPT; lengths are drawn, there is no text"
    return _header(name, source, on_import=recipe.statement()), make_conversations(recipe)


def make_walkthrough() -> tuple[dict[str, Any], Rows]:
    """The worked example: R4 is chunked, R5 stops the decodes, R3 crosses a block edge and R5 is preempted for it."""
    source = "synthetic: the worked example of an article on vLLM's scheduler by way of nano-vLLM"
    return _header("walkthrough", source, limits=WALKTHROUGH_LIMITS), [
        _numbered(1, 1, 0.0, 300, 12),
        _numbered(2, 1, 0.0, 400, 10),
        _numbered(3, 1, 0.0, 255, 20),
        _numbered(4, 1, 0.0, 1200, 6),
        # Under nano and the null engine's default costs 0.062 s is in round 4, so every clock admits R5 before round 5.
        _numbered(5, 5, 0.062, 200, 9),
    ]


def make_prefix_hit() -> tuple[dict[str, Any], Rows]:
    """R7's first 256 tokens are R1's: one block shared, two new, 344 tokens to prefill."""
    source = "synthetic: the article's prefix example without R4, so that R7 is admitted when it arrives"
    return _header("prefix-hit", source, limits=WALKTHROUGH_LIMITS), [
        _numbered(1, 1, 0.0, 300, 12, shared=256),
        _numbered(2, 1, 0.0, 400, 10),
        _numbered(3, 1, 0.0, 255, 20),
        _numbered(7, 2, 0.01, 600, 8, shared=256),
    ]


def make_prefix_hit_literal() -> tuple[dict[str, Any], Rows]:
    """The article's own run with R7 in it: R4 is ahead, so R7 has to wait for blocks, and R5 behind it."""
    source = "synthetic: the article's prefix example taken literally, R7 after round 1 while R4 waits"
    return _header("prefix-hit-literal", source, limits=WALKTHROUGH_LIMITS), [
        _numbered(1, 1, 0.0, 300, 12, shared=256),
        _numbered(2, 1, 0.0, 400, 10),
        _numbered(3, 1, 0.0, 255, 20),
        _numbered(4, 1, 0.0, 1200, 6),
        _numbered(7, 2, 0.01, 600, 8, shared=256),
        _numbered(5, 5, 0.062, 200, 9),
    ]


def _numbered(
    number: int, arrival_round: int, arrival_s: float, input_length: int, output_length: int, *, shared: int = 0
) -> dict[str, Any]:
    row: dict[str, Any] = {"id": f"R{number}", "arrival_s": arrival_s, "arrival_round": arrival_round}
    row["input_length"] = input_length
    if shared:
        row["segments"] = [{"id": "R1 and R7", "len": shared}]
    row["output_length"] = output_length
    return row


def make_burst() -> tuple[dict[str, Any], Rows]:
    """Three bursts, everything at one moment, with quiet between them but for a trickle."""
    rng = random.Random(20260803)
    rows: Rows = []
    for burst, (start, size) in enumerate([(0.0, 40), (8.0, 40), (16.0, 24)], 1):
        for i in range(1, size + 1):
            rows.append(_plain(rng, f"b{burst}-{i:02d}", start, prompt=(4.6, 0.8, 512), output=(3.2, 0.6, 96)))
    time = 0.0
    for i in range(1, 17):
        time += 0.5 + draw_exponential(rng, 1.0)
        rows.append(_plain(rng, f"trickle-{i:02d}", round(time, 3), prompt=(4.6, 0.8, 512), output=(3.2, 0.6, 96)))
    source = "synthetic: bursts of 40, 40 and 24 requests at 0, 8 and 16 s over a trickle; lognormal lengths"
    return _header("burst", source), sorted(rows, key=lambda row: float(row["arrival_s"]))


def make_long_prompts() -> tuple[dict[str, Any], Rows]:
    """A steady stream of short prompts with a long one after every seventh; contexts up to 2,048 tokens."""
    rng = random.Random(20260804)
    rows: Rows = []
    time = 0.0
    for i in range(1, 97):
        if i % 8 == 0:
            row = {"id": f"long-{i // 8:02d}", "arrival_s": round(time, 3)}
            row |= {"input_length": draw_uniform_int(rng, 1500, 1980), "output_length": draw_uniform_int(rng, 16, 64)}
            rows.append(row)
        else:
            rows.append(_plain(rng, f"short-{i:02d}", round(time, 3), prompt=(3.9, 0.6, 192), output=(3.9, 0.5, 128)))
        time += draw_exponential(rng, 0.2)
    source = "synthetic: Poisson, 5 requests/s; every eighth has a prompt of 1,500 to 1,980 tokens, the others of 192 at most"
    return _header("long-prompts", source), rows


def make_shared_system_prompt() -> tuple[dict[str, Any], Rows]:
    """Four tenants of unequal weight: one system prompt for all, one part for each tenant, a question of its own."""
    rng = random.Random(20260805)
    # Share of the requests up to and with this tenant, tokens of its own part of the prompt.
    tenants = {"a": (0.55, 256), "b": (0.8, 320), "c": (0.95, 192), "d": (1.0, 448)}
    rows: Rows = []
    time = 0.0
    for i in range(1, 129):
        share = rng.random()
        tenant = next((name for name, (up_to, _) in tenants.items() if share < up_to), "d")
        part = tenants[tenant][1]
        question = min(max(int(draw_lognormal(rng, 4.0, 0.9)), 4), 400)
        output = min(max(int(draw_lognormal(rng, 3.6, 0.6)), 1), 128)
        rows.append(
            {
                "id": f"{tenant}-{i:03d}",
                "arrival_s": round(time, 3),
                "input_length": 512 + part + question,
                "segments": [{"id": "system", "len": 512}, {"id": f"tenant-{tenant}", "len": part}],
                "output_length": output,
                "tenant": tenant,
            }
        )
        time += draw_exponential(rng, 0.15)
    source = (
        "synthetic: Poisson, 6.7 requests/s of four tenants (55, 25, 15, 5 %) behind one system prompt of 512 tokens"
    )
    return _header("shared-system-prompt", source), rows


def _plain(
    rng: random.Random, id: str, arrival_s: float, *, prompt: tuple[float, float, int], output: tuple[float, float, int]
) -> dict[str, Any]:
    """A row with unique tokens; lengths are (mu, sigma, largest) of a lognormal, from 1."""
    lengths = [min(max(int(draw_lognormal(rng, mu, sigma)), 1), most) for mu, sigma, most in (prompt, output)]
    return {"id": id, "arrival_s": arrival_s, "input_length": lengths[0], "output_length": lengths[1]}


def _header(name: str, source: str, **more: Any) -> dict[str, Any]:
    return {"benchctl_trace": 1, "name": name, "licence": "Apache-2.0", "source": source, "salt": name, **more}


BUNDLED: dict[str, Callable[[], tuple[dict[str, Any], Rows]]] = {
    "burst.jsonl": make_burst,
    "long-prompts.jsonl": make_long_prompts,
    "prefix-hit-literal.jsonl": make_prefix_hit_literal,
    "prefix-hit.jsonl": make_prefix_hit,
    "sharegpt.jsonl": make_sharegpt,
    "shared-system-prompt.jsonl": make_shared_system_prompt,
    "walkthrough.jsonl": make_walkthrough,
}
FULL = {"sharegpt-full.jsonl": make_sharegpt_full}


def write_trace(path: Path, header: dict[str, Any], rows: Rows) -> None:
    """One object on each line, UTF-8, LF."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in [header, *rows])
    path.write_bytes(text.encode("utf-8"))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m traces.synthetic", description="Write the bundled traces anew.")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent, help="folder to write to (default: %(default)s)"
    )
    parser.add_argument("--full", action="store_true", help="also sharegpt-full.jsonl, for a GPU")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, make in {**BUNDLED, **(FULL if options.full else {})}.items():
        header, rows = make()
        write_trace(options.out / name, header, rows)
        print(f"{options.out / name}: {len(rows)} requests")


if __name__ == "__main__":
    main()
