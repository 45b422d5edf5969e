"""An engine without a model: a round costs what a formula says, and no token is chosen.

It makes schedules and nothing else, so it has no vocabulary, and takes any block size and any model length. Must not know
torch, a clock, a policy. The coefficients are constants of the formula, not measurements of any device.
"""

from __future__ import annotations

from dataclasses import dataclass

from engines.interface import EngineLimits, ScheduledBatch, StepResult
from engines.steady_batch import Costs, SteadyBatch
from traces.errors import BenchctlError


@dataclass(frozen=True, slots=True)
class RoundCost:
    """A round of T fed tokens takes `per_round_s + per_token_s * T + per_context_s * context`, in seconds.

    context = the sum over every fed token of the tokens it attends to, itself included: position + 1. So a decode at
    position p counts p + 1, and a chunk of n tokens from position s counts n * s + n * (n + 1) / 2. A round that feeds
    nothing costs `per_round_s`.
    """

    per_round_s: float = 5e-3
    per_token_s: float = 20e-6
    per_context_s: float = 2e-9

    def of(self, batch: ScheduledBatch) -> float:
        if isinstance(batch, SteadyBatch) and batch.extra is None:
            return self.of_decodes(batch.num_decodes, batch.decode_context + batch.num_decodes)
        num_tokens = batch.num_tokens
        total = int(num_tokens.sum())
        # n * s + n * (n + 1) / 2, summed: dot products stay in C, and integers stay exact up to 2^63.
        context = int(num_tokens @ batch.start) + (int(num_tokens @ num_tokens) + total) // 2
        return self.per_round_s + self.per_token_s * total + self.per_context_s * context

    def of_decodes(self, num_seqs: int, context: int) -> float:
        return self.per_round_s + self.per_token_s * num_seqs + self.per_context_s * context


class NullEngine:
    """An `Engine` whose rounds take `round_cost` = (A, B, C) of `RoundCost` on a virtual clock, and no real time.

    Raises BenchctlError where a limit or a coefficient is out of range.
    """

    name = "null"

    def __init__(self, limits: EngineLimits, round_cost: tuple[float, float, float] = (5e-3, 20e-6, 2e-9)) -> None:
        for what, value, flag in (
            ("a pool", limits.num_blocks, "--num-blocks"),
            ("a block size", limits.block_size, "--block-size"),
            ("a model length", limits.max_model_len, "--max-model-len"),
        ):
            if value is not None and value < 1:
                raise BenchctlError(f"{what} of {value} cannot hold a token", fix=f"give {flag} 1 or more")
        if len(round_cost) != 3 or not all(0 <= cost < float("inf") for cost in round_cost):
            raise BenchctlError(
                f"a round cost is three finite numbers of seconds >= 0, not {','.join(map(str, round_cost))}",
                where="--round-cost",
                fix="--round-cost 5e-3,20e-6,2e-9",
            )
        self.limits = limits
        self.round_cost = RoundCost(*round_cost)

    def launch(self, batch: ScheduledBatch) -> StepResult:
        """The result itself is the handle: there is nothing to wait for."""
        return StepResult(
            token_ids=None,
            device_s=None,
            duration_s=self.round_cost.of(batch),
            mode="null",
            padded_tokens=batch.num_decodes
            if isinstance(batch, SteadyBatch) and batch.extra is None
            else int(batch.num_tokens.sum()),
        )

    def costs(self, batch: SteadyBatch, num_rounds: int) -> Costs:
        """What `launch` would say of the batch and of the rounds that follow it, each one token longer."""
        n, context = batch.num_decodes, batch.decode_context + batch.num_decodes
        duration_s = [self.round_cost.of_decodes(n, context + n * age) for age in range(num_rounds)]
        return Costs(duration_s, "null", n)

    def took(self, batch: SteadyBatch, num_rounds: int) -> None:
        """Nothing is counted."""

    def collect(self, handle: StepResult) -> StepResult:
        return handle

    def close(self) -> None:
        """Nothing is held."""
