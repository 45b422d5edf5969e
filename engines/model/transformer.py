"""The transformer in plain torch: tokens and positions to hidden states, hidden states to logits.

Attention is passed in: the model computes queries, keys and values of a layer and takes back its output. So it knows no
block, no batch, no cache, and every attention backend runs the very same model.
Source: the modelling code of transformers 5 (`models/{llama,qwen2,qwen3}`), with q, k, v and gate, up each merged in one
product. Differs from it where the model is 16-bit: RoPE is applied in float32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engines.model.config import ModelConfig
from engines.model.parallel import SINGLE, Parallel

# (layer, q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim]) -> [T, num_heads, head_dim].
# It stores all of k and v before it attends, since a sequence may read what another computes in the same pass.
Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Matrices are [out, in], as torch's linear takes them."""

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden]: q, then k, then v
    qkv_bias: Tensor | None  # [(num_heads + 2 * num_kv_heads) * head_dim]
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    out: Tensor  # [hidden, num_heads * head_dim]
    post_attention_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]: gate, then up
    down: Tensor  # [hidden, intermediate]


@dataclass(frozen=True, slots=True)
class Weights:
    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    lm_head: Tensor  # [vocab, hidden]; the embedding itself where the two are tied


class Model:
    """A loaded model, or one rank's part of it. Holds no state of any request, so engines of different block sizes can share it.

    `config` describes the whole model, `local` what lies here: heads, inner features, rows of the vocabulary. `team` is set by
    whoever started other ranks (engines/torch_engine/parallel.py); None elsewhere.
    """

    def __init__(self, name: str, config: ModelConfig, weights: Weights, parallel: Parallel = SINGLE) -> None:
        self.name = name
        self.config = config
        self.weights = weights
        self.parallel = parallel
        self.local = parallel.local(config)
        self.team: Any = None
        self.kernels_ready: set[tuple[Any, ...]] = set()  # kinds of engines whose kernels are compiled and loaded here
        self.inv_freq = rope_inverse_frequencies(config).to(weights.embedding.device)  # [head_dim / 2], float32
        # One norm over all query and key heads: a row of weights for each of them.
        self._qk_norms = [stack_qk_norm(layer, self.local) for layer in weights.layers]

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """token_ids and positions int64 [T] -> hidden states [T, hidden] after the last norm."""
        config, parallel = self.local, self.parallel
        eps = config.rms_norm_eps
        num_tokens = token_ids.shape[0]
        num_qk_heads = config.num_heads + config.num_kv_heads
        angles = positions[:, None].to(torch.float32) * self.inv_freq  # [T, head_dim / 2]
        cos, sin = (
            angles.cos()[:, None],
            angles.sin()[:, None],
        )  # [T, 1, head_dim / 2], the same for every head and layer

        hidden = self.embed(token_ids)
        for index, layer in enumerate(self.weights.layers):
            x = rms_norm(hidden, layer.input_norm, eps)
            qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(num_tokens, -1, config.head_dim)
            qk, v = qkv[:, :num_qk_heads], qkv[:, num_qk_heads:]
            qk_norm = self._qk_norms[index]
            if qk_norm is not None:
                qk = rms_norm(qk, qk_norm, eps)
            qk = apply_rope(qk, cos, sin)
            attended = attention(index, qk[:, : config.num_heads], qk[:, config.num_heads :], v)
            hidden = hidden + parallel.all_reduce(F.linear(attended.reshape(num_tokens, -1), layer.out))
            x = rms_norm(hidden, layer.post_attention_norm, eps)
            gate, up = F.linear(x, layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + parallel.all_reduce(F.linear(F.silu(gate) * up, layer.down))
        return rms_norm(hidden, self.weights.norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [n, hidden] of the positions that yield a token -> float32 [n, vocab]."""
        local = F.linear(hidden, self.weights.lm_head)
        return self.parallel.gather_vocab(local, self.config.vocab_size).float()

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden]."""
        table = self.weights.embedding
        if self.parallel.size == 1:
            return F.embedding(token_ids, table)
        first, last = self.parallel.vocab_share(self.config.vocab_size)
        rows = F.embedding((token_ids - first).clamp(0, len(table) - 1), table)
        elsewhere = (token_ids < first) | (token_ids >= last)
        return self.parallel.all_reduce(rows.masked_fill(elsewhere[:, None], 0))


def stack_qk_norm(layer: LayerWeights, config: ModelConfig) -> Tensor | None:
    """[num_heads + num_kv_heads, head_dim]: the norm's weights of every query head, then of every key head."""
    if layer.q_norm is None or layer.k_norm is None:
        return None
    return torch.cat([layer.q_norm.expand(config.num_heads, -1), layer.k_norm.expand(config.num_kv_heads, -1)])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis: the quotient in float32, rounded, then the product."""
    wide = x.float()
    wide = wide * torch.rsqrt(torch.mean(wide * wide, -1, keepdim=True).add_(eps))
    return wide.to(x.dtype) * weight


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x_i, x_{i + d/2}) of x [T, heads, d] by its angle; cos and sin [T, 1, d/2] in float32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def rope_inverse_frequencies(config: ModelConfig) -> Tensor:
    """float32 [head_dim / 2]: radians a position for each pair, Llama 3's scaling applied."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inv_freq = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return inv_freq
    # Turns of each pair over the original context: under low_freq_factor of them a pair is stretched by `factor`, over
    # high_freq_factor it is left alone, and between the two blended linearly in the number of turns.
    turns = scaling.original_max_position_embeddings * inv_freq / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return inv_freq * (blend + (1.0 - blend) / scaling.factor)
