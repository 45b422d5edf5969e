"""Tensor parallelism: which part of every weight a rank holds, and the two collectives that put results together.

Products that widen (q, k, v; gate, up) are split by outputs, those that narrow (attention's output, down) by inputs, and
the partial results of the latter are summed over the ranks; embedding and head are split by vocabulary. A rank has whole
heads. Must not know a process, a batch or a cache.
Source: Megatron-LM (Shoeybi et al. 2019), as in vLLM's ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engines.model.config import ModelConfig
from traces.errors import BenchctlError


@dataclass(frozen=True, slots=True)
class Parallel:
    """Rank `rank` of `size`. With more than one, torch.distributed's default group has to be there before a collective."""

    rank: int = 0
    size: int = 1

    def share(self, n: int) -> slice:
        """This rank's part of `n` heads, channels or features; `n` is a multiple of the size."""
        each = n // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def vocab_share(self, vocab_size: int) -> tuple[int, int]:
        """[first, last) of the vocabulary. All shares but the last ones are equally long."""
        each = -(-vocab_size // self.size)
        return min(self.rank * each, vocab_size), min((self.rank + 1) * each, vocab_size)

    def local(self, config: ModelConfig) -> ModelConfig:
        """The shape of what a rank holds; the vocabulary is rounded up, so that it is equal in all of them."""
        if self.size == 1:
            return config
        return replace(
            config,
            vocab_size=-(-config.vocab_size // self.size),
            num_heads=config.num_heads // self.size,
            num_kv_heads=config.num_kv_heads // self.size,
            intermediate_size=config.intermediate_size // self.size,
        )

    # -- weights

    def qkv_rows(self, config: ModelConfig) -> list[slice]:
        """Rows of the whole q, k, v matrix (or entries of its bias) that lie here, in order."""
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        own_q, own_kv = self.share(q), self.share(kv)
        return [own_q, *(slice(first + own_kv.start, first + own_kv.stop) for first in (q, q + kv))]

    def gate_up_rows(self, config: ModelConfig) -> list[slice]:
        own, inner = self.share(config.intermediate_size), config.intermediate_size
        return [own, slice(inner + own.start, inner + own.stop)]

    def part_of_tensor(self, name: str, config: ModelConfig) -> tuple[int, slice, int] | None:
        """(axis, part of it that lies here, its whole length) of a checkpoint's tensor; None: it lies here whole."""
        if self.size == 1:
            return None
        kind = name.rsplit(".", 2)[-2]
        if kind in ("embed_tokens", "lm_head"):
            return 0, slice(*self.vocab_share(config.vocab_size)), config.vocab_size
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        lengths = {
            "q_proj": (0, q),
            "k_proj": (0, kv),
            "v_proj": (0, kv),
            "o_proj": (1, q),
            "gate_proj": (0, config.intermediate_size),
            "up_proj": (0, config.intermediate_size),
            "down_proj": (1, config.intermediate_size),
        }
        if kind not in lengths:
            return None
        axis, length = lengths[kind]
        return axis, self.share(length), length

    # -- collectives

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in place; every rank gets it. On a card it is one more kernel of the current stream."""
        if self.size > 1:
            torch.distributed.all_reduce(x)
        return x

    def gather(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[size, *x.shape]: every rank's x, in every rank."""
        if out is None:
            out = x.new_empty(self.size, *x.shape)
        if self.size == 1:
            return out.copy_(x[None])
        # all_gather_into_tensor's name from torch 2.13 on.
        gather = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
        gather(out.view(-1), x.contiguous().view(-1))
        return out

    def gather_vocab(self, x: Tensor, vocab_size: int) -> Tensor:
        """[n, local vocabulary] of each rank -> [n, vocab_size] in all of them."""
        if self.size == 1:
            return x
        return self.gather(x).transpose(0, 1).reshape(len(x), -1)[:, :vocab_size]


SINGLE = Parallel()


def check_divides(config: ModelConfig, size: int, name: str) -> None:
    """Raises BenchctlError where the model cannot be split over `size` ranks, naming the sizes that can."""
    lengths = (config.num_heads, config.num_kv_heads, config.intermediate_size)
    if any(length % size for length in lengths):
        fits = [n for n in range(1, config.num_kv_heads + 1) if not any(length % n for length in lengths)]
        raise BenchctlError(
            f"{name} cannot be split over {size} ranks: it has {config.num_heads} query heads, {config.num_kv_heads} KV heads "
            f"and {config.intermediate_size} inner features",
            where="--tensor-parallel-size",
            fix=f"use one of {', '.join(map(str, fits))}",
        )


def take_rows(whole: Tensor, parts: list[slice]) -> Tensor:
    return whole[parts[0]] if len(parts) == 1 else torch.cat([whole[part] for part in parts])
