"""What an engine computed, held against plain torch: whole sequences at once, dense attention, float32.

`Watch` sits in an engine during a run and keeps logits of a few requests, preferring those whose KV took a detour (resumed
after a preemption, cached, chunked); `verify` computes the same positions anew afterwards, without a cache, a kernel of ours
or a batch. Outputs that were forced are fed as they were (teacher forcing). Must not know a policy or a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engines.interface import Int64Array, ScheduledBatch
from engines.model.transformer import Attention, LayerWeights, Model, Weights
from engines.torch_engine.sampling import gumbel_noise, row_keys

# How a request came to its KV, the most telling first.
KINDS = ("resumed", "cached", "chunked", "plain")
MAX_COLUMNS = 4096  # of the vocabulary, drawn by seed: what is kept of a position's logits
MAX_POSITIONS = 256  # of one request
ROWS_IN_FLIGHT = 1024  # of the pinned buffer
POSITIONS_AT_ONCE = 64  # whose whole logits the reference holds

# Error of a position's logits: L2 norm of the difference over that of the reference; a request's mean may be this large, a
# single position's twice it. 16-bit: what rounding alone comes to, grown over the layers (plain torch in bfloat16 has a mean of
# 1.7e-2 at 28 layers, 1.8e-2 at 36; one block misread gives 0.1 to 1).
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
AT_ONE_POSITION = 2.0
LEAST_AGREEMENT = 0.99  # share of positions with the same token


@dataclass(frozen=True, slots=True)
class WatchedRows:
    """Rows of a round whose logits are kept."""

    yields: Int64Array  # indices among the round's yielding sequences
    requests: Int64Array
    positions: Int64Array  # of the token that these logits choose


class Watch:
    """Keeps logits of up to `num` requests of each kind, chosen by `seed` as they are admitted (reservoir sampling)."""

    def __init__(self, num: int, *, seed: int, vocab_size: int, everything: bool = False) -> None:
        self.num = num
        self.rng = np.random.default_rng([seed, 0x7665726966])
        self.everything = everything
        self.columns = np.arange(vocab_size)
        if vocab_size > MAX_COLUMNS:
            self.columns = np.sort(self.rng.choice(vocab_size, MAX_COLUMNS, replace=False))
        self.seen: set[int] = set()
        self.offered = dict.fromkeys(KINDS, 0)
        self.chosen: dict[str, list[int]] = {kind: [] for kind in KINDS}
        self.watched = np.zeros(0, dtype=np.int64)
        self.kept: dict[int, int] = {}  # request -> positions kept
        self.ids: dict[int, Int64Array] = {}  # request -> its tokens up to the last kept position
        self.rows_kept: list[tuple[WatchedRows, Int64Array]] = []
        self.pieces: list[Tensor] = []  # logits of the columns, in the order of rows_kept
        self._columns: Tensor | None = None
        self._pinned: tuple[Tensor, Tensor] | None = None
        self._filled = 0

    def rows(self, batch: ScheduledBatch) -> WatchedRows | None:
        """Which rows of a round to keep; None: none of them. Looks at admissions, and takes requests on."""
        admitted = np.flatnonzero(batch.cached_tokens >= 0)
        if len(admitted):
            self._offer(batch, admitted)
        if not len(self.watched):
            return None
        yielding = np.flatnonzero(batch.yields_token)
        requests = batch.request[yielding]
        mine = np.flatnonzero(np.isin(requests, self.watched))
        mine = np.array([i for i in mine.tolist() if self._room(int(requests[i]))], dtype=np.int64)
        if not len(mine):
            return None
        ends = (batch.start + batch.num_tokens)[yielding]
        for i in mine.tolist():
            request, end = int(requests[i]), int(ends[i])
            self.kept[request] = self.kept.get(request, 0) + 1
            self.ids[request] = np.array(batch.token_ids[int(yielding[i])][:end])
        return WatchedRows(mine, requests[mine].copy(), ends[mine])

    def _room(self, request: int) -> bool:
        return self.everything or self.kept.get(request, 0) < MAX_POSITIONS

    def _offer(self, batch: ScheduledBatch, admitted: Int64Array) -> None:
        changed = False
        for i in admitted.tolist():
            request = int(batch.request[i])
            if request < 0:  # a warm-up
                continue
            if request in self.seen:
                kind = "resumed"
            elif batch.cached_tokens[i] > 0:
                kind = "cached"
            else:
                kind = "plain" if batch.yields_token[i] else "chunked"
            self.seen.add(request)
            self.offered[kind] += 1
            members = self.chosen[kind]
            if request in members:
                continue
            if self.everything or len(members) < self.num:
                members.append(request)
                changed = True
            elif (place := int(self.rng.integers(self.offered[kind]))) < self.num:
                members[place] = request
                changed = True
        if changed:
            self.watched = np.array(sorted({r for members in self.chosen.values() for r in members}), dtype=np.int64)

    def keep(self, rows: WatchedRows, logits: Tensor, tokens: Tensor) -> None:
        """Start copying the rows' columns to the host. logits [yields, vocab], tokens [>= yields], of the round just launched."""
        device, n = logits.device, len(rows.yields)
        index = torch.from_numpy(rows.yields)
        if self._columns is None:
            self._columns = torch.from_numpy(self.columns).to(device)
        if device.type != "cuda":
            self.pieces.append(logits.index_select(0, index).index_select(1, self._columns).float())
            self.rows_kept.append((rows, tokens.index_select(0, index).numpy().astype(np.int64)))
            return
        if self._pinned is None:
            size = max(ROWS_IN_FLIGHT, n)
            self._pinned = (
                torch.empty(size, len(self.columns), dtype=logits.dtype, pin_memory=True),
                torch.empty(size, dtype=tokens.dtype, pin_memory=True),
            )
        if self._filled + n > len(self._pinned[0]):
            self.flush()
        index = index.pin_memory().to(device, non_blocking=True)
        here = slice(self._filled, self._filled + n)
        self._pinned[0][here].copy_(logits.index_select(0, index).index_select(1, self._columns), non_blocking=True)
        self._pinned[1][here].copy_(tokens.index_select(0, index), non_blocking=True)
        self.rows_kept.append((rows, self._pinned[1].numpy()[here]))  # read at the next flush
        self._filled += n

    def flush(self) -> None:
        """Wait for the copies under way, and take them out of the pinned buffer."""
        if self._pinned is None or not self._filled:
            return
        torch.cuda.synchronize()
        self.pieces.append(self._pinned[0][: self._filled].float())
        pinned = self._pinned[1].numpy()
        self.rows_kept = [
            (rows, tokens.astype(np.int64) if np.may_share_memory(tokens, pinned) else tokens)
            for rows, tokens in self.rows_kept
        ]
        self._filled = 0

    def choose(self) -> list[tuple[int, str]]:
        """(request, kind) of those to verify: of each kind in turn, the most telling first."""
        left = {kind: [r for r in self.chosen[kind] if self.kept.get(r)] for kind in KINDS}
        out: dict[int, str] = {}
        while any(left.values()) and (self.everything or len(out) < self.num):
            for kind in KINDS:
                if left[kind] and (self.everything or len(out) < self.num):
                    out.setdefault(left[kind].pop(0), kind)
        return list(out.items())

    def of_request(self, request: int) -> tuple[Int64Array, Int64Array, Tensor]:
        """(positions, tokens, logits [positions, columns]) kept of a request, in the order in which they came."""
        self.flush()
        requests = np.concatenate([rows.requests for rows, _ in self.rows_kept])
        mine = np.flatnonzero(requests == request)
        positions = np.concatenate([rows.positions for rows, _ in self.rows_kept])[mine]
        tokens = np.concatenate([tokens for _, tokens in self.rows_kept])[mine]
        self.pieces = [torch.cat(self.pieces)]
        return positions, tokens, self.pieces[0][torch.from_numpy(mine)]


# -- the reference


class WideLayers(Sequence[LayerWeights]):
    """A model's layers in float32, one at a time, so that no second model has to fit."""

    def __init__(self, layers: Sequence[LayerWeights]) -> None:
        self.layers = layers

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: Any) -> Any:
        layer = self.layers[index]
        wide = {name: getattr(layer, name) for name in LayerWeights.__slots__}
        return LayerWeights(**{name: None if x is None else x.float() for name, x in wide.items()})

    def __iter__(self) -> Iterator[LayerWeights]:
        return (self[i] for i in range(len(self)))


def widen(model: Model) -> Model:
    """The model computing in float32; itself where it does already."""
    if model.dtype == torch.float32:
        return model
    w = model.weights
    embedding = w.embedding.float()
    head = embedding if w.lm_head is w.embedding else w.lm_head.float()
    layers: Any = WideLayers(w.layers)
    return Model(model.name, model.config, Weights(embedding, layers, w.norm.float(), head), model.parallel)


def dense_attention(model: Model) -> Attention:
    """Causal attention of one whole sequence."""
    group = model.local.num_heads // model.local.num_kv_heads

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(group, dim=1).transpose(0, 1)[None] for x in (k, v))
        return F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, is_causal=True)[0].transpose(0, 1)

    return attend


@torch.inference_mode()
def reference_logits(wide: Model, ids: Int64Array, positions: Int64Array) -> Iterator[Tensor]:
    """float32 logits of the tokens at `positions`, each from all tokens before it: [up to 64, vocab] at a time."""
    device = wide.device
    tokens = torch.from_numpy(ids).to(device)
    hidden = wide.forward(tokens, torch.arange(len(ids), device=device), dense_attention(wide))
    rows = torch.from_numpy(positions - 1).to(device)
    for first in range(0, len(rows), POSITIONS_AT_ONCE):
        yield wide.logits(hidden.index_select(0, rows[first : first + POSITIONS_AT_ONCE]))


@dataclass(frozen=True, slots=True)
class RequestCheck:
    """One request: errors are relative, of a position's logits (L2)."""

    request: int
    kind: str
    positions: int
    max_error: float
    mean_error: float
    same_token: int
    within_rounding: int  # another token, whose logit in the reference is the best one's but for rounding


@dataclass(frozen=True, slots=True)
class Verification:
    """How far a run's logits were from the reference's."""

    requests: list[RequestCheck]
    dtype: str
    tolerance: float
    least_agreement: float
    columns: int
    vocab_size: int
    positions: int = field(init=False)
    max_error: float = field(init=False)
    mean_error: float = field(init=False)
    agreement: float = field(init=False)  # share of positions with the same token
    agreement_beyond_rounding: float = field(init=False)  # those within rounding counted as the same

    def __post_init__(self) -> None:
        n = sum(r.positions for r in self.requests)
        set_ = object.__setattr__
        set_(self, "positions", n)
        # `max` of several would pass a NaN over.
        set_(self, "max_error", float(np.max([r.max_error for r in self.requests])) if n else 0.0)
        set_(self, "mean_error", sum(r.mean_error * r.positions for r in self.requests) / n if n else 0.0)
        same, near = (sum(getattr(r, name) for r in self.requests) for name in ("same_token", "within_rounding"))
        set_(self, "agreement", same / n if n else 1.0)
        set_(self, "agreement_beyond_rounding", (same + near) / n if n else 1.0)

    @property
    def passed(self) -> bool:
        near = all(
            r.mean_error <= self.tolerance and r.max_error <= AT_ONE_POSITION * self.tolerance for r in self.requests
        )  # false for NaN too
        return near and self.agreement_beyond_rounding >= self.least_agreement

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"passed": self.passed}


class Follower(Protocol):
    """The other ranks of a model in parts: they compute their part of the reference too."""

    def reference(self, ids: Int64Array, positions: Int64Array) -> None: ...


@torch.inference_mode()
def verify(model: Model, watch: Watch, *, temperature: float, seed: int) -> Verification:
    """Compute anew what `watch` kept. Wants room for one layer, embedding and head in float32: close the engine before."""
    wide = widen(model)
    columns = torch.from_numpy(watch.columns).to(model.device)
    checks = []
    for request, kind in watch.choose():
        positions, tokens, kept = watch.of_request(request)
        ids = watch.ids[request]
        team: Follower | None = model.team
        if team is not None:
            team.reference(ids, positions)
        checks.append(
            _check(
                request, kind, positions, tokens, kept.to(model.device), reference_logits(wide, ids, positions), columns,
                temperature, seed, TOLERANCES[model.dtype],
            )
        )  # fmt: skip
    return Verification(
        requests=checks,
        dtype=str(model.dtype).removeprefix("torch."),
        tolerance=TOLERANCES[model.dtype],
        least_agreement=LEAST_AGREEMENT,
        columns=len(watch.columns),
        vocab_size=model.config.vocab_size,
    )


def _check(
    request: int,
    kind: str,
    positions: Int64Array,
    tokens: Int64Array,
    kept: Tensor,
    reference: Iterator[Tensor],
    columns: Tensor,
    temperature: float,
    seed: int,
    tolerance: float,
) -> RequestCheck:
    errors, same, near, first = [], 0, 0, 0
    for want in reference:
        part = slice(first, first + len(want))
        first += len(want)
        there = want.index_select(1, columns)
        errors.append((kept[part] - there).norm(dim=1) / there.norm(dim=1).clamp(min=1e-30))
        score = want
        if temperature > 0:
            keys = torch.from_numpy(row_keys(seed, np.full(len(want), request), positions[part])).to(want.device)
            score = want / temperature + gumbel_noise(keys, want.shape[1])
        token = torch.from_numpy(tokens[part]).to(want.device)
        best = score.max(dim=1)
        # Two logits off by the tolerance in opposite directions: what lies closer than that is decided by rounding.
        rounding = 2 * tolerance * want.square().mean(dim=1).sqrt() / (temperature if temperature > 0 else 1.0)
        equal = best.indices == token
        gap = best.values - score.gather(1, token[:, None])[:, 0]
        same += int(equal.sum())
        near += int((~equal & (gap <= rounding)).sum())
    error = torch.cat(errors)
    return RequestCheck(request, kind, len(error), float(error.max()), float(error.mean()), same, near)
