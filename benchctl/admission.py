"""What becomes of a request when its turn comes: handed to the scheduler, cut to the limits, refused or left out.

The over-length rules live here and nothing is clipped silently: everything is counted. A waiting request costs a
`NewRequest`; its tokens are made from the trace's row when the scheduler first looks at them. Must not know a clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from engines.interface import Int64Array, NewRequest, Rejection
from traces.errors import BenchctlError
from traces.keys import Keys
from traces.request import Request

NO_EOS: frozenset[int] = frozenset()  # one for all: an empty set takes 216 bytes


@dataclass(slots=True)
class AdmissionCounts:
    """What was done to requests of the trace before a scheduler saw them. Mutable; owned by one `Admission`."""

    skipped: int = 0  # left out by --over-length skip
    truncated: int = 0  # prompts cut by --over-length truncate
    truncated_tokens: int = 0  # prompt tokens cut
    outputs_cut: int = 0  # outputs that end at max_model_len (nano: cut here; vllm: by the scheduler)
    output_tokens_cut: int = 0
    first_skipped: str | None = None
    rejected_reasons: dict[str, int] = field(default_factory=dict)


class LazyTokens(msgspec.Struct, frozen=True, gc=False):
    """Makes a request's ids when called, from its row of the trace. Holds the row's number alone."""

    maker: Callable[[int], Int64Array]
    row: int

    def __call__(self) -> Int64Array:
        return self.maker(self.row)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What bounds a request. None: no bound."""

    usable_blocks: int
    block_size: int
    max_model_len: int | None
    cut_outputs: bool  # the policy itself knows no max_model_len: outputs are cut where vLLM would stop


class Admission:
    """Turns due requests into `NewRequest`s. Mutable; owned by one replay.

    `prompt_length` and `token_ids` are those of a `traces.tokens.TokenMaker`, `block_keys` is of `traces.keys`, `by_row` reads a row of the trace again; `forced` is false
    under `--outputs sampled`; `eos_token_ids` then end rows whose `stop` is "eos".
    """

    def __init__(
        self,
        *,
        prompt_length: Callable[[Request], int],
        token_ids: Callable[[Request], Int64Array],
        by_row: Callable[[int], Request],
        sizes: Sizes,
        over_length: str = "reject",
        forced: bool = True,
        eos_token_ids: frozenset[int] = frozenset(),
        trace: str = "the trace",
        block_keys: Callable[[Request], Keys | None] | None = None,
    ) -> None:
        self._prompt_length, self._token_ids, self._by_row = prompt_length, token_ids, by_row
        self._maker = self._make_ids  # one bound method for all requests
        self._sizes, self._over_length = sizes, over_length
        self._forced, self._eos = forced, eos_token_ids
        self._trace = trace
        self._block_keys = block_keys if forced else None
        self.rejected_ids: set[str] = set()
        self.counts = AdmissionCounts()

    def prepare(self, request: Request, tie_s: float) -> tuple[NewRequest, Rejection | None]:
        """The request as a scheduler takes it, and why it must not be handed over at all (else None).

        `tie_s`: the arrival time that breaks ties of priority.
        """
        prompt, output = self._fitted(self._prompt_length(request), request.output_length or 1)
        limit = self._sizes.max_model_len
        new = NewRequest(
            request=request.index,
            id=request.id,
            num_prompt_tokens=prompt,
            num_output_tokens=output,
            make_token_ids=LazyTokens(self._maker, request.index),
            arrival_s=tie_s,
            priority=request.priority,
            adapter=request.adapter,
            forced=self._forced,
            eos_token_ids=self._eos if not self._forced and request.stop == "eos" else NO_EOS,
            make_block_keys=None if self._block_keys is None else self._block_keys(request),
        )
        if self.rejected_ids and (parent := self._rejected_parent(request)) is not None:
            return new, Rejection(request.index, "parent_rejected", 0, 0, parent)
        if limit is not None and prompt >= limit:
            return new, Rejection(request.index, "prompt_too_long", prompt, limit - 1, "tokens")
        return new, None

    def accept(self, request: Request, new: NewRequest) -> None:
        """The scheduler took it: count what was cut to make it fit."""
        counts, limit = self.counts, self._sizes.max_model_len
        prompt, asked = new.num_prompt_tokens, request.output_length or 1
        if self._over_length == "truncate" and (whole := self._prompt_length(request)) > prompt:
            counts.truncated += 1
            counts.truncated_tokens += whole - prompt
        if limit is not None and prompt + asked > limit:
            counts.outputs_cut += 1
            counts.output_tokens_cut += prompt + asked - limit

    def refuse(self, request: Request, rejection: Rejection) -> bool:
        """Decide about a request that cannot run. True: it is recorded as rejected; False: it is left out.

        Raises BenchctlError under `--over-length error`.
        """
        if rejection.reason != "parent_rejected":
            if self._over_length == "error":
                raise BenchctlError(
                    explain(request, rejection),
                    where=f"{self._trace}, line {request.line}",
                    fix="raise the limit, or pass --over-length reject, skip or truncate",
                )
            if self._over_length == "skip":
                self.counts.skipped += 1
                self.counts.first_skipped = self.counts.first_skipped or explain(request, rejection)
                return False
        self.rejected_ids.add(request.id)
        reasons = self.counts.rejected_reasons
        reasons[rejection.reason] = reasons.get(rejection.reason, 0) + 1
        return True

    def _room(self, output: int) -> int:
        """The longest prompt that, with an output of `output`, fits pool and model; < 1: none does."""
        # The last token is never computed, so it needs no slot.
        room = self._sizes.usable_blocks * self._sizes.block_size + 1 - output
        limit = self._sizes.max_model_len
        return room if limit is None else min(room, limit - 1)

    def _fitted(self, prompt: int, output: int) -> tuple[int, int]:
        """(prompt, output) as handed over. The prompt's leading part is kept; what fits nowhere is left as it is."""
        if self._over_length == "truncate" and 0 < (room := self._room(output)) < prompt:
            prompt = room
        limit = self._sizes.max_model_len
        if self._sizes.cut_outputs and limit is not None and prompt < limit:
            output = min(output, limit - prompt)
        return prompt, output

    def _make_ids(self, row: int) -> Int64Array:
        """int64 [prompt + output] (forced) or [prompt]: the leading part of both, as handed over."""
        request = self._by_row(row)
        whole, asked = self._prompt_length(request), request.output_length or 1
        prompt, output = self._fitted(whole, asked)
        ids = self._token_ids(request)
        if not self._forced:
            return ids[:prompt]
        if prompt < whole:
            return np.concatenate([ids[:prompt], ids[whole : whole + output]])
        return ids[: prompt + output]

    def _rejected_parent(self, request: Request) -> str | None:
        for parent in request.parents:
            if parent in self.rejected_ids:
                return parent
        if request.carry is not None and request.carry.from_id in self.rejected_ids:
            return request.carry.from_id
        return None


def explain(request: Request, rejection: Rejection) -> str:
    """One line with the numbers that decided it."""
    if rejection.reason == "prompt_too_long":
        return (
            f"request {request.id} has a prompt of {rejection.needed} tokens; "
            f"max_model_len allows {rejection.available}"
        )
    if rejection.reason == "exceeds_budget":
        return (
            f"request {request.id} can grow to {rejection.needed} computed tokens; without chunked prefill "
            f"max_num_batched_tokens ({rejection.available}) must hold them"
        )
    return f"request {request.id} needs {rejection.needed} KV blocks; the engine has {rejection.available}"
