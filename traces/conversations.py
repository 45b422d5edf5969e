"""Multi-turn conversations with the shape of ShareGPT and no text of it.

The distributions were fitted to the lengths of a published ShareGPT (GPT-4) set of 5,678 conversations, Llama-2 tokens,
contexts up to 8,192: turns, first prompts, later prompts and answers. ShareGPT has no times: think times follow the
gaps of a published trace of a retrieval service (RAGPulse), arrivals of conversations are Poisson.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from traces.draws import draw_beta, draw_exponential, draw_geometric, draw_lognormal

MAX_TURNS = 56


@dataclass(frozen=True, slots=True)
class ConversationRecipe:
    """What is asked for. Lengths in tokens, times in seconds; the scales multiply what is drawn."""

    seed: int
    num_requests: int
    max_context: int  # input + output; a conversation ends where its next turn would pass it
    output_scale: float
    think_scale: float
    conversations_per_s: float
    nominal_s_per_output_token: float  # stands in for the answer's time in arrival_s
    end_s: float  # no turn arrives later

    def statement(self) -> dict[str, Any]:
        """For the header: what was drawn from what, and scaled by how much."""
        return {
            "seed": self.seed,
            "turns": f"geometric(0.185), at most {MAX_TURNS}",
            "first_prompt": "floor(lognormal(4.364, 1.389)), 1 to 7400 tokens",
            "later_prompts": "floor(lognormal(3.455, 1.482)), 1 to 7000 tokens, after the whole conversation so far (carry)",
            "outputs": f"(1 + floor(1024 x beta(1.07, 1.42))) x {self.output_scale:g}",
            "think_s": f"lognormal(3.8, 1.1) x {self.think_scale:g}",
            "contexts": f"at most {self.max_context} tokens: the conversation ends before, or is drawn again if no turn fits",
            "arrivals": f"conversations Poisson, {self.conversations_per_s:g}/s; a later turn comes think_s after its "
            f"parent, which is given {self.nominal_s_per_output_token:g} s for each output token; none after {self.end_s:g} s",
        }


def make_conversations(recipe: ConversationRecipe) -> list[dict[str, Any]]:
    """Rows of the canonical format, sorted by arrival; exactly `num_requests`, the last conversation cut short for it."""
    rng = random.Random(recipe.seed)
    rows: list[dict[str, Any]] = []
    start = 0.0
    number = 0
    while len(rows) < recipe.num_requests:
        if start > recipe.end_s:
            raise ValueError(f"{len(rows)} of {recipe.num_requests} requests fit into {recipe.end_s} s: {recipe}")
        turns = _one_conversation(rng, recipe, f"c{number + 1:03d}", round(start, 3))
        if not turns:
            continue
        rows += turns[: recipe.num_requests - len(rows)]
        number += 1
        start += draw_exponential(rng, 1 / recipe.conversations_per_s)
    return sorted(rows, key=lambda row: float(row["arrival_s"]))


def _one_conversation(
    rng: random.Random, recipe: ConversationRecipe, session: str, start: float
) -> list[dict[str, Any]]:
    num_turns = min(draw_geometric(rng, 0.185), MAX_TURNS)
    rows: list[dict[str, Any]] = []
    context = 0
    arrival = start
    for turn in range(1, num_turns + 1):
        if turn == 1:
            new = min(max(int(draw_lognormal(rng, 4.364, 1.389)), 1), 7400)
        else:
            new = min(max(int(draw_lognormal(rng, 3.455, 1.482)), 1), 7000)
        drawn = 1 + int(1024 * draw_beta(rng, 1.07, 1.42))
        output = max(round(drawn * recipe.output_scale), 1)
        if context + new + output > recipe.max_context:
            break
        row: dict[str, Any] = {"id": f"{session}-t{turn}"}
        if turn > 1:
            think = max(round(draw_lognormal(rng, 3.8, 1.1) * recipe.think_scale, 3), 0.001)
            before = rows[-1]
            arrival = round(arrival + recipe.nominal_s_per_output_token * before["output_length"] + think, 3)
            if arrival > recipe.end_s:
                break
        row |= {"arrival_s": arrival, "session": session, "turn": turn}
        if turn > 1:
            row |= {"parents": [before["id"]], "think_s": think}
        row["input_length"] = context + new
        if turn > 1:
            row["carry"] = {"from": before["id"], "tokens": context}
        row["output_length"] = output
        rows.append(row)
        context += new + output
    return rows
