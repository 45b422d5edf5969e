"""An engine without a model: a round takes what a profile of a real device says it would take there.

No token is chosen. Must not know torch, a clock, a file or a policy; the profile is handed in. The formula is the one that
was fitted (`cost`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from engines.interface import EngineLimits, ScheduledBatch, StepResult
from engines.simulated.cost import (
    after_time,
    bounds_of,
    bucket_factors,
    device_time,
    launch_time,
    on_curve,
    overlap,
    products,
    work,
)
from engines.simulated.features import Features, Values, features_of, features_of_decodes
from engines.simulated.profile import FAMILIES, Family, Profile
from engines.steady_batch import Costs, SteadyBatch

FEW_ROUNDS = 4  # up to here numbers are faster than columns


@dataclass(frozen=True, slots=True)
class LaunchCost:
    """Seconds of the round last launched, for a clock on which rounds overlap."""

    launch_s: float  # host: schedule, prepare
    device_s: float
    after_s: float  # host: update, record
    gap_s: float  # device: after a round that directly preceded
    wake_s: float  # device: after the loop slept


@dataclass(frozen=True, slots=True)
class _Decodes:
    """The formula for so many decodes alone: what is left are the keys of all contexts, and of the longest."""

    padded: int
    products_s: float
    rest_s: float
    per_key_s: float
    per_longest_key_s: float
    unhidden: float
    factor: float
    flops: float  # of a round without keys
    pair_flops: float  # a key
    bytes: float
    kv_bytes: float
    launch_s: float
    after_s: float


@dataclass(slots=True)
class Account:
    """Rounds simulated, and how many lay outside what was fitted. Mutable; owned by the engine.

    `beyond`: (family, feature) -> [rounds, least value, greatest value] of the rounds outside.
    """

    rounds: int = 0
    outside: int = 0
    beyond: dict[tuple[Family, str], list[float]] = field(default_factory=dict)


class SimulatedEngine:
    """An `Engine` whose rounds take `profile`'s time.

    Its coefficients are those of the limits' block size, or of the nearest one where that was not fitted.
    `duration_s` is a whole round's, host included, as if nothing overlapped; where rounds overlap the clock asks `pop_cost`.
    """

    name = "simulated"

    def __init__(self, limits: EngineLimits, profile: Profile) -> None:
        self.limits = limits
        self.profile = profile
        self.fit = profile.nearest_fit(limits.block_size)
        self.account = Account()
        self._factors = bucket_factors(self.fit)
        self._bounds = {family: bounds_of(self.fit, family) for family in FAMILIES}
        self._cost: LaunchCost | None = None
        self._of_decodes: dict[int, _Decodes] = {}

    def launch(self, batch: ScheduledBatch) -> StepResult:
        """The result itself is the handle: there is nothing to wait for."""
        profile, fit = self.profile, self.fit
        f = features_of(batch, profile.graphs, fit.tile_tokens)
        family: Family = "prefill" if f.has_prefill else "decode"
        flops, num_bytes = work(profile.model, f, family)
        device_s = device_time(profile.model, fit, f, family) * self._factors.get((family, f.padded_tokens), 1.0)
        host = fit.host
        cost = LaunchCost(launch_time(host, f), float(device_s), after_time(host, f), host.gap_s, host.wake_s)
        self._cost = cost
        self._count(family, f)
        return StepResult(
            token_ids=None,
            device_s=None,  # nothing was measured
            duration_s=cost.launch_s + cost.wake_s + cost.device_s + cost.after_s,
            mode="simulated",
            padded_tokens=f.padded_tokens,
            flops=flops,
            bytes=num_bytes,
        )

    def costs(self, batch: SteadyBatch, num_rounds: int) -> Costs:
        """What `launch` would say of the batch and of the rounds that follow it, each one token longer. Counts nothing."""
        n, host = batch.num_decodes, self.fit.host
        of = self._of_decodes.get(n)
        if of is None:
            of = self._of_decodes[n] = self._decodes(n)
        ages: Values = np.arange(num_rounds) if num_rounds > FEW_ROUNDS else range(num_rounds)
        device_s: list[float] = []
        flops: list[float] = []
        num_bytes: list[float] = []
        # Columns, or numbers round by round: the same operations in the same order as `device_time` and `work`.
        for age in [ages] if num_rounds > FEW_ROUNDS else ages:
            context, longest = batch.decode_context + n + n * age, batch.longest_start + 1 + age
            rest = of.rest_s + overlap(of.per_key_s * context, of.per_longest_key_s * longest, of.unhidden)
            device: Values = (of.products_s + rest) * of.factor
            done = of.flops + of.pair_flops * context
            moved = of.bytes + of.kv_bytes * (context + n)
            if num_rounds > FEW_ROUNDS:
                device_s, flops, num_bytes = device.tolist(), done.tolist(), moved.tolist()
            else:
                device_s.append(device)
                flops.append(done)
                num_bytes.append(moved)
        launch_s, after_s = of.launch_s, of.after_s
        return Costs(
            duration_s=[launch_s + host.wake_s + device + after_s for device in device_s],
            mode="simulated",
            padded_tokens=of.padded,
            flops=flops,
            bytes=num_bytes,
            device_s=device_s,
            launch_s=launch_s,
            after_s=after_s,
            gap_s=host.gap_s,
            wake_s=host.wake_s,
        )

    def _decodes(self, num_seqs: int) -> _Decodes:
        """What of the formula depends on the number of decodes alone."""
        model, fit, n = self.profile.model, self.fit, num_seqs
        f, cost = features_of_decodes(n, 0, 0, self.profile.graphs), fit.decode
        flops, num_bytes = work(model, replace(f, num_tokens=0), "decode")
        return _Decodes(
            padded=f.padded_tokens,
            products_s=products(model, f.padded_tokens, f.padded_seqs, fit.bytes_per_s, fit.flops_per_s),
            rest_s=on_curve(cost.rest, f.padded_seqs, grows=True),
            per_key_s=on_curve(cost.per_key, f.padded_seqs),
            per_longest_key_s=on_curve(cost.per_longest_key, f.padded_seqs),
            unhidden=cost.unhidden,
            factor=self._factors.get(("decode", f.padded_tokens), 1.0),
            flops=flops,
            pair_flops=4.0 * model.num_layers * model.num_heads * model.head_dim,
            bytes=num_bytes + model.bytes_per_value * model.hidden_size * n,
            kv_bytes=model.kv_bytes_per_token,
            launch_s=launch_time(fit.host, f),
            after_s=after_time(fit.host, f),
        )

    def took(self, batch: SteadyBatch, num_rounds: int) -> None:
        """So many rounds from `batch` on were run: counts them, as `launch` does."""
        account, bounds = self.account, self._bounds["decode"]
        n, context, longest = batch.num_decodes, batch.decode_context + batch.num_decodes, batch.longest_start + 1
        last = num_rounds - 1
        # Features grow from round to round: where the first and the last are inside, all are.
        ends = {
            "num_seqs": (n, n),
            "num_tokens": (n, n),
            "context_tokens": (context, context + n * last),
            "chunk_keys": (0, 0),
            "single_keys": (longest, longest + last),
        }
        if all(least <= ends[name][0] and ends[name][1] <= most for name, (least, most) in bounds.items()):
            account.rounds += num_rounds
            return
        ages = np.arange(num_rounds)
        self._count(
            "decode", features_of_decodes(n, context + n * ages, longest + ages, self.profile.graphs), num_rounds
        )

    def collect(self, handle: StepResult) -> StepResult:
        return handle

    def close(self) -> None:
        """Nothing is held."""

    def pop_cost(self) -> LaunchCost | None:
        """Of the launch since the last call; None where nothing was launched."""
        cost, self._cost = self._cost, None
        return cost

    def _count(self, family: Family, f: Features, num_rounds: int = 1) -> None:
        """`f`: of one round, or of `num_rounds`, where what differs is a column."""
        account, hit = self.account, np.zeros(num_rounds, dtype=np.bool_) if num_rounds > 1 else False
        account.rounds += num_rounds
        for feature, (least, greatest) in self._bounds[family].items():
            value = getattr(f, feature)
            if isinstance(value, np.ndarray):
                low, high = int(value.min()), int(value.max())
                if least <= low and high <= greatest:
                    continue
                outside = (value < least) | (value > greatest)
                hit = hit | outside
                times, low, high = int(outside.sum()), int(value[outside].min()), int(value[outside].max())
            else:
                if least <= value <= greatest:
                    continue
                hit, times, low, high = hit | True, num_rounds, value, value
            seen = account.beyond.setdefault((family, feature), [0, low, high])
            seen[0] += times
            seen[1], seen[2] = min(seen[1], low), max(seen[2], high)
        account.outside += int(np.count_nonzero(hit))
