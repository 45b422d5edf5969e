"""The transformer as a row of fused kernels over fixed buffers: what a CUDA graph can hold.

The same computation as engines/model/transformer.py, whose weights it reads. A layer takes nine launches: product of q, k, v
· norm, RoPE, KV write · attention (· combine) · output product · residual and norm · product of gate, up · SiLU · down
product · residual and norm. All K and V of a layer are written before its attention. Beside chunks, what follows the last
layer's attention is computed for the rows that yield a token alone: nothing reads the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engines.kernels import sampling
from engines.kernels.activation import silu_mul
from engines.kernels.attention import Config, paged_attention
from engines.kernels.chunk_attention import chunk_attention, own_rows
from engines.kernels.linear import few_rows_linear
from engines.kernels.norms import add_norm, embed_norm
from engines.kernels.rope import rope_and_store
from engines.kernels.rows import take_rows
from engines.kernels.tables import update_tables
from engines.model.config import ModelConfig
from engines.model.transformer import Model
from engines.torch_engine import tuning
from engines.torch_engine.round_inputs import CHUNKS, SINGLES, TOKENS, UPDATES, YIELDS, DeviceInputs, Shape

MANY_ROWS = 2049  # from here on a product that adds costs less than a kernel that reads both again


def buffer_bytes(config: ModelConfig, dtype: torch.dtype, max_tokens: int, max_seqs: int, max_model_len: int) -> int:
    """Bytes of a `FusedForward`'s buffers, the small ones rounded up."""
    c, size = config, dtype.itemsize
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    per_token = 3 * c.hidden_size + (q + 2 * kv) + 2 * q + 3 * c.intermediate_size
    per_seq = (q + 2 * c.hidden_size + c.vocab_size) * size + 8 * sampling.num_blocks(c.vocab_size)
    sums = tuning.partial_sums(_products(c), dtype)  # as on a card that can do all
    splits = 32 * 512 * c.head_dim * 8 + 4 * sums
    return max_tokens * per_token * size + max_seqs * per_seq + max_model_len * c.head_dim * 4 + splits + (64 << 20)


def _products(config: ModelConfig) -> list[tuple[int, int]]:
    """(outputs, inputs) of a layer's products."""
    c = config
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    return [
        (q + 2 * kv, c.hidden_size), (c.hidden_size, q), (2 * c.intermediate_size, c.hidden_size), (c.hidden_size, c.intermediate_size),
    ]  # fmt: skip


class FusedForward:
    """Buffers for up to `max_tokens` tokens and `max_seqs` sequences, and the launches over them."""

    def __init__(
        self,
        model: Model,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        *,
        max_tokens: int,
        max_seqs: int,
        max_model_len: int,
        temperature: float,
    ) -> None:
        c = model.local
        self.model, self.k_cache, self.v_cache, self.block_tables = model, k_cache, v_cache, block_tables
        self.temperature = temperature
        device, dtype = model.device, model.dtype
        self.group = c.num_heads // c.num_kv_heads
        self.card = tuning.card_of(device)
        self.chunk_config = tuning.chunk_attention(
            c.num_heads, c.num_kv_heads, c.head_dim, k_cache.shape[2], dtype, self.card
        )
        # One for all rounds with chunks, so that no round meets a kernel that is not compiled yet.
        self.single_config = replace(self._decode_config(512), num_splits=1)
        # Chunks whose keys are mostly older than the round read them as decodes do, with larger tiles.
        self.own_config = tuning.own_chunk_attention(c.num_heads, c.num_kv_heads, c.head_dim, dtype, self.card)
        self.tokens_per_tile = (self.own_config or self.chunk_config).block_m // self.group
        self.tokens_per_paged_tile = self.chunk_config.block_m // self.group

        def buffer(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            # Zeros: rows of padding are computed with too, and have to be numbers.
            return torch.zeros(shape, dtype=dtype, device=device)

        q_size = c.num_heads * c.head_dim
        self.residual = buffer(max_tokens, c.hidden_size)
        self.x = buffer(max_tokens, c.hidden_size)
        self.qkv = buffer(max_tokens, q_size + 2 * c.num_kv_heads * c.head_dim)
        self.own = own_rows(self.qkv, c.head_dim, self.own_config) if self.own_config else None
        self.q = buffer(max_tokens, c.num_heads, c.head_dim)
        self.attended = buffer(max_tokens, q_size)
        self.added = buffer(max_tokens, c.hidden_size)
        self.gate_up = buffer(max_tokens, 2 * c.intermediate_size)
        self.activated = buffer(max_tokens, c.intermediate_size)
        # Of the rows that yield a token: what the last layer attended to, the residual stream, the head's input.
        self.last_attended = buffer(max_seqs, q_size)
        self.last_residual = buffer(max_seqs, c.hidden_size)
        self.last = buffer(max_seqs, c.hidden_size)
        self.logits = buffer(max_seqs, c.vocab_size)
        blocks = sampling.num_blocks(c.vocab_size)
        self.best = buffer(max_seqs, blocks, dtype=torch.float32)
        self.best_token = buffer(max_seqs, blocks, dtype=torch.int32)
        self.tokens = buffer(max_seqs, dtype=torch.int32)
        # Attention's partial results and the partial sums of products; both are small, as few rows are split.
        configs = [(n, self._decode_config(n)) for n in range(1, max_seqs + 1)]
        most = max(n * config.num_splits for n, config in configs)
        self.partial = buffer(most * c.num_heads * c.head_dim, dtype=torch.float32)
        self.lse = buffer(most * c.num_heads, dtype=torch.float32)
        self.sums = buffer(tuning.partial_sums(_products(c), dtype, self.card), dtype=torch.float32)

        angles = torch.arange(max_model_len, device=device, dtype=torch.float32)[:, None] * model.inv_freq
        self.cos, self.sin = angles.cos(), angles.sin()
        self.ones = torch.ones(max_seqs, dtype=torch.int32, device=device)

    def _decode_config(self, num_seqs: int) -> Config:
        c = self.model.local
        return tuning.decode_attention(num_seqs, c.num_heads, c.num_kv_heads, c.head_dim, self.model.dtype)

    def _sum_linear(self, x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        """A product whose inputs lie in several ranks: each one's sum is rounded, then they are summed."""
        result = self._linear(x, weight, out)
        if self.model.parallel.size == 1:
            return result
        if result.dim() == 3:
            out.copy_(result.sum(0))
        return self.model.parallel.all_reduce(out)

    def _embed(self, inputs: DeviceInputs, residual: Tensor, x: Tensor, num_tokens: Tensor) -> None:
        w, eps, parallel = self.model.weights, self.model.config.rms_norm_eps, self.model.parallel
        norm, rows = w.layers[0].input_norm, len(x)
        if parallel.size == 1:
            embed_norm(inputs["token_ids"], w.embedding, norm, residual, x, num_tokens, eps)
            return
        first, last = parallel.vocab_share(self.model.config.vocab_size)
        own = self.added[:rows]
        embed_norm(inputs["token_ids"], w.embedding[: last - first], norm, own, x, num_tokens, eps, first)
        parallel.all_reduce(own)
        residual.zero_()
        add_norm(own, residual, norm, x, num_tokens, eps)

    def _linear(self, x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        """x @ weight.T: in `out`, or as partial sums [splits, rows, N] where a product of few rows is split."""
        config = tuning.few_rows(x.shape[0], *weight.shape, x.dtype, self.card)
        rows, n = x.shape[0], weight.shape[0]
        # Buffers go on beyond the slice; what such rows hold is a number, and nobody reads what comes of it.
        if config is None:
            padded = tuning.product_rows(rows, *weight.shape)
            more = _up_to(padded, x)
            torch.mm(more, weight.t(), out=_up_to(len(more), out))
            return out
        x = _up_to(config.block_m, x)
        if config.splits == 1:
            few_rows_linear(x, weight, out[None], config)
            return out
        parts = self.sums[: config.splits * rows * n].view(config.splits, rows, n)
        few_rows_linear(x, weight, parts, config)
        return parts

    def _add_linear(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor | None:
        """What a layer adds to the residual stream; None: it has been added, by the product itself where rows are many."""
        rows = len(x)
        if rows >= MANY_ROWS and self.model.parallel.size == 1:
            residual.addmm_(x, weight.t())
            return None
        return self._sum_linear(x, weight, self.added[:rows])

    def run(self, inputs: DeviceInputs, layers: Sequence[int] | None = None) -> None:
        """Launch a round of `inputs.shape`; its tokens end up in `self.tokens`, its logits in `self.logits`.

        `layers`: these alone (to have every kernel compiled or loaded).
        """
        c, w, shape = self.model.local, self.model.weights, inputs.shape
        eps, rows, seqs = c.rms_norm_eps, shape.num_tokens, shape.num_seqs
        num_tokens, num_yields = inputs.count(TOKENS), inputs.count(YIELDS)
        update_tables(
            self.block_tables,
            inputs["update_row"],
            inputs["update_column"],
            inputs["update_block"],
            inputs.count(UPDATES),
        )
        residual, x, q, attended = self.residual[:rows], self.x[:rows], self.q[:rows], self.attended[:rows]
        self._embed(inputs, residual, x, num_tokens)
        added: Tensor | None = None
        picked = False  # only rows that yield a token are left, in their order
        for i in range(c.num_layers) if layers is None else layers:
            layer = w.layers[i]
            qkv = self._linear(x, layer.qkv, self.qkv[:rows])
            rope_and_store(
                qkv, layer.qkv_bias, q, self.k_cache[i], self.v_cache[i], layer.q_norm, layer.k_norm, self.cos, self.sin,
                inputs["positions"], inputs["table_rows"], self.block_tables, num_tokens, eps,
                self.qkv[:rows] if self._reads_own(shape) else None,
            )  # fmt: skip
            self._attend(i, inputs, q, attended.view(rows, c.num_heads, c.head_dim))
            if i + 1 == c.num_layers and seqs < rows:
                take_rows(
                    attended, self.last_attended[:seqs], residual, self.last_residual[:seqs], inputs["yield_rows"], num_yields
                )  # fmt: skip
                attended, residual, x = self.last_attended[:seqs], self.last_residual[:seqs], self.x[:seqs]
                rows, num_tokens, picked = seqs, num_yields, True
            added = self._add_linear(attended, layer.out, residual)
            add_norm(added, residual, layer.post_attention_norm, x, num_tokens, eps)
            gate_up = self._linear(x, layer.gate_up, self.gate_up[:rows])
            silu_mul(gate_up, self.activated[:rows], num_tokens)
            added = self._add_linear(self.activated[:rows], layer.down, residual)
            if i + 1 < c.num_layers:
                add_norm(added, residual, w.layers[i + 1].input_norm, x, num_tokens, eps)
        last = self.last[:seqs]
        add_norm(added, residual, w.norm, last, num_yields, eps, rows=None if picked else inputs["yield_rows"])
        torch.mm(last, w.lm_head.t(), out=self.logits[:seqs])
        keys = inputs["keys"] if self.temperature > 0 else None
        parallel = self.model.parallel
        first, last = parallel.vocab_share(self.model.config.vocab_size)
        sampling.sample(
            self.logits[:seqs, : last - first],
            keys,
            self.best[:seqs],
            self.best_token[:seqs],
            self.tokens[:seqs],
            num_yields,
            self.temperature,
            first,
            parallel.gather if parallel.size > 1 else None,
        )

    def _reads_own(self, shape: Shape) -> bool:
        return self.own is not None and not shape.decodes_only and shape.chunk_keys != "blocks"

    def _attend(self, layer: int, inputs: DeviceInputs, q: Tensor, out: Tensor) -> None:
        """Sequences that feed one token, the longest first, then the tiles of those that feed several."""
        shape, c = inputs.shape, self.model.local
        scale = c.head_dim**-0.5
        k_cache, v_cache, tables = self.k_cache[layer], self.v_cache[layer], self.block_tables
        if shape.singles:
            config = self._decode_config(shape.num_seqs) if shape.decodes_only else self.single_config
            splits = config.num_splits  # partial results lie by row of q: beside chunks the rows are too many for that
            paged_attention(
                q, k_cache, v_cache, out, tables,
                inputs["single_row"], inputs["single_query"], inputs["single_pos"], self.ones,
                inputs.count(SINGLES), shape.num_seqs, scale, config,
                self.partial[: shape.num_tokens * splits * c.num_heads * c.head_dim] if splits > 1 else None,
                self.lse[: shape.num_tokens * splits * c.num_heads] if splits > 1 else None,
            )  # fmt: skip
        if shape.decodes_only:
            return
        tiles = (inputs["chunk_row"], inputs["chunk_query"], inputs["chunk_pos"], inputs["chunk_len"])
        count, most = inputs.count(CHUNKS), shape.chunk_tiles
        if self._reads_own(shape):
            assert self.own_config is not None
            chunk_attention(
                q, self.own, k_cache, v_cache, out, tables, *tiles, inputs["chunk_base"], count, most, scale, self.own_config,
                shape.chunk_keys == "fresh",
            )  # fmt: skip
        else:
            paged_attention(q, k_cache, v_cache, out, tables, *tiles, count, most, scale, self.chunk_config)


def _up_to(num_rows: int, tensor: Tensor) -> Tensor:
    """The first rows of the buffer of which `tensor` is the beginning, as far as it goes."""
    held = tensor.untyped_storage().nbytes() // tensor.itemsize // tensor.stride(0)
    return tensor.as_strided((max(len(tensor), min(num_rows, held)), tensor.shape[1]), tensor.stride())
