"""What a round cannot do without, counted from its batch: the roofline's operations and bytes.

Operations: two a matrix parameter and token, of the head and of what follows the last layer's attention for yielding tokens
only, and four a query head, dimension and (query, key) pair. Bytes: every weight once, the embedding by row, K and V of each sequence once, what is written of them. Left
out: activations, norms, RoPE, sampling, the second reading of keys by further tiles of a chunk. Of a model in parts: one rank's.
"""

from __future__ import annotations

from engines.model.transformer import Model


class Work:
    """Counts the rounds of one model."""

    def __init__(self, model: Model) -> None:
        c, self.size = model.local, model.dtype.itemsize
        self.head = c.vocab_size * c.hidden_size
        self.matrices = float(c.num_parameters - self.head * (1 if c.tie_word_embeddings else 2))
        # What follows the last layer's attention: output product and MLP.
        self.last = float(c.hidden_size * (c.num_heads * c.head_dim + 3 * c.intermediate_size))
        self.weight_bytes = (self.matrices + self.head) * self.size
        self.pair_flops = 4.0 * c.num_layers * c.num_heads * c.head_dim
        self.kv_bytes = 2 * c.num_layers * c.num_kv_heads * c.head_dim * self.size
        self.hidden_size = c.hidden_size

    def of_round(
        self, num_tokens: int, num_yields: int, context_pairs: int, context_tokens: int
    ) -> tuple[float, float]:
        """(operations, bytes). `context_pairs`: keys that each fed token attends to, summed; `context_tokens`: keys read."""
        flops = 2.0 * (self.matrices - self.last) * num_tokens + 2.0 * (self.last + self.head) * num_yields
        flops += self.pair_flops * context_pairs
        num_bytes = self.weight_bytes + self.size * self.hidden_size * num_tokens
        return flops, num_bytes + self.kv_bytes * (context_tokens + num_tokens)
