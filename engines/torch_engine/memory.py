"""How many tokens of KV cache fit a device, and what to say when something does not."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence

import numpy as np
import torch

from engines.interface import ScheduledBatch
from engines.model.config import ModelConfig
from engines.model.memory import available_bytes, card_memory, gib, ways_to_fit
from engines.model.transformer import Model
from engines.torch_engine.reference_attention import MAX_GATHERED_VALUES, MAX_SCORES
from engines.torch_engine.sampling import MAX_NOISE_VALUES
from traces.errors import BenchctlError

# A few long contexts fill it: on a machine without a card the point is that a pool is felt, not that it is large.
DEFAULT_CPU_KV_TOKENS = 8192
# A multiple of both policies' default block sizes, so that each gets exactly as many tokens as the other.
KV_TOKENS_MULTIPLE = 256
# On top of what was measured: for fragmentation, for kernels loaded later, and for what the estimate of graphs misses.
RESERVED_BYTES = 256 << 20
# CUDA graphs and the workspaces of the library's products, where an error has to name what fits before they were seen: under
# 600 MiB for 8 B parameters on an H200. Pools are sized from what they take.
GRAPH_BYTES = 1 << 30


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of K and V that one token takes over all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def estimate_forward_bytes(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, *, num_tokens: int, num_seqs: int, max_context: int
) -> int:
    """Most bytes that a pass of `num_tokens` tokens allocates for a while, `num_seqs` of which yield a token.

    An upper estimate, summed from the tensors of `transformer`, `reference_attention` and `sampling` that live at once.
    """
    size = dtype.itemsize
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    residual = config.hidden_size * (3 * size + 8)  # the stream, its norm in both widths
    attention = (q + kv) * (3 * size + 12) + kv * size  # q, k, v; normed, turned in float32, turned back
    mlp = config.intermediate_size * 5 * size  # gate and up, the activation, the product
    per_token = residual + max(attention, mlp)
    gathered = 4 * max(min(num_seqs * max_context * kv, MAX_GATHERED_VALUES[device.type]), max_context * q) * size
    scores = MAX_SCORES[device.type] * (4 + 1)  # a tile's mask and scores, where a backend writes them out
    logits = num_seqs * config.vocab_size * (size + 4)
    noise = min(num_seqs * config.vocab_size, MAX_NOISE_VALUES[device.type]) * (3 * 8 + 3 * 4)
    return num_tokens * per_token + max(gathered + scores, logits + noise)


def max_kv_tokens(
    model: Model,
    *,
    gpu_memory_utilization: float = 0.9,
    max_num_batched_tokens: int = 16384,
    max_num_seqs: int = 512,
    max_model_len: int | None = None,
    attention: str = "reference",
    block_size: int = 16,
    temperature: float = 0.0,
    enforce_eager: bool = False,
) -> int:
    """Tokens of KV cache that fit beside the model, a multiple of 256.

    On a card: `gpu_memory_utilization` of its memory, less all that is in use with a pass of `max_num_batched_tokens` new tokens
    and one of `max_num_seqs` decodes run, which is measured, less `RESERVED_BYTES`. `block_size` is the smallest that will be
    used. On the CPU: `DEFAULT_CPU_KV_TOKENS`, or what fits half of the memory left. Raises BenchctlError where less than one
    multiple is left.
    """
    config, device = model.local, model.device
    max_len = min(max_model_len or config.max_position_embeddings, config.max_position_embeddings)
    per_token = kv_bytes_per_token(config, model.dtype)
    if device.type != "cuda":
        tokens = min(DEFAULT_CPU_KV_TOKENS, available_bytes(device) // 2 // per_token)
        tokens = tokens // KV_TOKENS_MULTIPLE * KV_TOKENS_MULTIPLE
        if tokens == 0:
            raise _no_room(model, _smaller_model(model))
        return int(tokens)
    if not 0 < gpu_memory_utilization <= 1:
        raise BenchctlError(
            f"--gpu-memory-utilization is {gpu_memory_utilization}", fix="give a share of the card: 0.9"
        )
    if attention == "triton":
        cards, beside = measure_engine(
            model, max_num_batched_tokens, max_num_seqs, max_len, block_size, temperature, enforce_eager
        )
    else:
        beside = _measure_forward_bytes(model, max_num_batched_tokens, max_num_seqs, max_len)
        gc.collect()
        torch.cuda.empty_cache()
        cards = _cards(model)
    spare = spare_bytes(cards, gpu_memory_utilization, beside)
    tokens = max(spare, 0) // per_token // KV_TOKENS_MULTIPLE * KV_TOKENS_MULTIPLE
    if tokens == 0:
        missing = KV_TOKENS_MULTIPLE * per_token - spare
        fix = _way_to_room(
            model, missing, min(total for _, total in cards), gpu_memory_utilization, max_num_batched_tokens,
            max_num_seqs, max_len, attention,
        )  # fmt: skip
        raise _no_room(model, fix)
    return int(tokens)


def spare_bytes(cards: Sequence[tuple[int, int]], gpu_memory_utilization: float, beside: int) -> int:
    """Bytes for the KV cache on the fullest of `cards`, (free, in all) each: the pool is the same in every rank.

    `beside`: what will be in use besides and is not yet; negative where something in use will be given back.
    """
    spare = min(int(total * gpu_memory_utilization) - (total - free) for free, total in cards)
    return spare - beside - RESERVED_BYTES


def measure_engine(
    model: Model,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_len: int,
    block_size: int,
    temperature: float,
    enforce_eager: bool,
) -> tuple[list[tuple[int, int]], int]:
    """Run the largest rounds of a Triton engine; -> the cards, (free, in all) each, with all of it in use, and `beside`.

    Read from the driver, so that kernels' code, the library's workspaces and CUDA graphs count. What is compiled and loaded
    meanwhile stays for the engines that follow.
    """
    from engines.torch_engine.triton_engine import TritonEngine  # it imports this module

    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    engine = TritonEngine(
        model,
        num_blocks=-(-max_len // block_size),
        block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_len,
        temperature=temperature,
        enforce_eager=enforce_eager,
        measuring=True,
    )
    try:
        lengths = _largest_prefill(max_num_batched_tokens, max_num_seqs, max_len)
        # All in block 0: memory does not depend on what is read and written.
        tables = [[0] * -(-length // block_size) for length in lengths]
        engine.collect(engine.launch(_batch_of_zeros([0] * len(lengths), lengths, tables)))
        decodes = min(max_num_seqs, max_num_batched_tokens)
        engine.collect(engine.launch(_batch_of_zeros([0] * decodes, [1] * decodes, [[0]] * decodes)))
        return _cards(model), engine.graph_bytes_left - engine.k_cache.nbytes - engine.v_cache.nbytes
    finally:
        engine.close()
        del engine
        gc.collect()
        if model.device.type == "cuda":
            torch.cuda.empty_cache()


def _cards(model: Model) -> list[tuple[int, int]]:
    return [card_memory(model.device), *([] if model.team is None else model.team.memory())]


def _no_room(model: Model, fix: str) -> BenchctlError:
    size = gib(KV_TOKENS_MULTIPLE * kv_bytes_per_token(model.local, model.dtype))
    return BenchctlError(
        f"no room for {KV_TOKENS_MULTIPLE} tokens of KV cache ({size}) beside {model.name} on {model.device}", fix=fix
    )


def _way_to_room(
    model: Model,
    missing: int,
    total: int,
    gpu_memory_utilization: float,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_len: int,
    attention: str,
) -> str:
    """What would leave `missing` bytes more."""
    ways = []
    share = math.ceil((gpu_memory_utilization + missing / total) * 100) / 100
    if share < 1:
        ways.append(f"--gpu-memory-utilization {share:g}")

    def takes(budget: int) -> int:
        return _round_bytes(model, budget, max_num_seqs, max_len, attention)

    budget = _power_of_two_below(max_num_batched_tokens)
    while budget >= 16 and takes(max_num_batched_tokens) - takes(budget) < missing:
        budget //= 2
    if budget >= 16:
        ways.append(f"--max-num-batched-tokens {budget}")
    return ", or ".join(ways) or _smaller_model(model)


def _smaller_model(model: Model) -> str:
    return ways_to_fit(model.local, model.dtype, model.device, num_ranks=model.parallel.size)


def _round_bytes(model: Model, budget: int, max_num_seqs: int, max_len: int, attention: str) -> int:
    """About what rounds of up to `budget` tokens take beside the cache."""
    seqs = min(max_num_seqs, budget)
    if attention == "triton":
        from engines.torch_engine.fused_forward import buffer_bytes

        return buffer_bytes(model.local, model.dtype, budget, seqs, max_len)
    return estimate_forward_bytes(
        model.local, model.dtype, model.device, num_tokens=budget, num_seqs=seqs, max_context=max_len
    )


def _power_of_two_below(number: int) -> int:
    return 1 << max(number - 1, 1).bit_length() - 1


def buffers_out_of_memory(
    model: Model, max_num_batched_tokens: int, max_num_seqs: int, max_len: int, graph_bytes: int
) -> BenchctlError:
    """The buffers of a Triton engine do not fit, whatever its cache: names the largest budget whose buffers do."""
    if model.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    available = available_bytes(model.device)
    multiple = KV_TOKENS_MULTIPLE * kv_bytes_per_token(model.local, model.dtype)

    def takes(budget: int) -> int:
        return _round_bytes(model, budget, max_num_seqs, max_len, "triton") + graph_bytes + RESERVED_BYTES + multiple

    budget = _power_of_two_below(max_num_batched_tokens)
    while budget >= 16 and takes(budget) > available:
        budget //= 2
    return BenchctlError(
        f"rounds of {max_num_batched_tokens} tokens and {max_num_seqs} sequences need "
        f"{gib(takes(max_num_batched_tokens))} of buffers and graphs beside {model.name}; {model.device} has {gib(available)} free",
        where="--max-num-batched-tokens, --max-num-seqs",
        fix=f"--max-num-batched-tokens {budget}" if budget >= 16 else _smaller_model(model),
    )


def cache_out_of_memory(
    model: Model, num_blocks: int, block_size: int, limits: tuple[int, int, int, int] | None = None
) -> BenchctlError:
    """The KV cache of an engine does not fit: names what would, with a tenth of what is free left.

    `limits`, of an engine with buffers of its own: most tokens and sequences of a round, longest context, bytes of graphs.
    """
    if model.device.type == "cuda":
        gc.collect()  # what was half built
        torch.cuda.empty_cache()
    per_token = kv_bytes_per_token(model.local, model.dtype)
    available = available_bytes(model.device)
    multiple = max(block_size, KV_TOKENS_MULTIPLE)

    def beside(budget: int) -> int:
        if limits is None:
            return 0
        return _round_bytes(model, budget, limits[1], limits[2], "triton") + limits[3]

    def fits(budget: int) -> int:
        return max(int(available * 0.9) - beside(budget), 0) // per_token // multiple * multiple

    budget = 0 if limits is None else limits[0]
    tokens, here = fits(budget), beside(budget)
    if tokens:
        fix = f"--kv-cache-tokens {tokens} ({tokens // block_size} blocks) or less"
    else:
        while budget >= 16 and not fits(budget):
            budget = _power_of_two_below(budget)
        tokens = fits(budget) if budget >= 16 else 0
        fix = f"--max-num-batched-tokens {budget} --kv-cache-tokens {tokens}" if tokens else _smaller_model(model)
    what = f" beside {gib(here)} of buffers and graphs" if here else ""
    return BenchctlError(
        f"a KV cache of {num_blocks} blocks of {block_size} tokens needs {gib(num_blocks * block_size * per_token)}{what}; "
        f"{model.device} has {gib(available)} free",
        where="--num-blocks, --kv-cache-tokens",
        fix=fix,
    )


def forward_out_of_memory(
    model: Model, num_tokens: int, num_seqs: int, max_context: int, *, cache_tokens: int, has_buffers: bool = False
) -> BenchctlError:
    """A pass did not fit beside a KV cache of `cache_tokens`: names the largest token budget that the estimate says does, and a
    cache that leaves room. `has_buffers`: its own are there, so that it needed little more, whatever its size."""
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    available = available_bytes(model.device)

    def needs(budget: int) -> int:
        return _round_bytes(model, budget, num_seqs, max_context, "reference")

    missing = GRAPH_BYTES if has_buffers else max(needs(num_tokens) - available, RESERVED_BYTES)
    tokens = cache_tokens - -(-missing // kv_bytes_per_token(model.local, model.dtype))
    tokens = max(tokens, 0) // KV_TOKENS_MULTIPLE * KV_TOKENS_MULTIPLE
    budget = 0 if has_buffers else _power_of_two_below(num_tokens)
    while budget >= 16 and needs(budget) > available:
        budget //= 2
    ways = [f"--max-num-batched-tokens {budget}"] if budget >= 16 else []
    if tokens:
        ways.append(f"--kv-cache-tokens {tokens}")
    return BenchctlError(
        f"out of memory in a round of {num_tokens} tokens and {num_seqs} sequences; {model.device} has {gib(available)} free",
        fix=", or ".join(ways) or _smaller_model(model),
        exit_code=1,
    )


def _measure_forward_bytes(model: Model, max_num_batched_tokens: int, max_num_seqs: int, max_len: int) -> int:
    """Peak bytes of the two worst rounds on the card, beyond weights and KV cache."""
    from engines.torch_engine.engine import TorchEngine  # it imports this module

    block_size = 16
    lengths = _largest_prefill(max_num_batched_tokens, max_num_seqs, max_len)
    num_blocks = sum(-(-length // block_size) for length in lengths)
    try:
        # Some temperature, so that the noise is measured too.
        engine = TorchEngine(
            model, num_blocks=num_blocks, block_size=block_size, max_model_len=max_len, temperature=1.0
        )
        torch.cuda.reset_peak_memory_stats(model.device)
        before = torch.cuda.memory_allocated(model.device)
        tables, first = [], 0
        for length in lengths:
            tables.append(list(range(first, first + -(-length // block_size))))
            first += len(tables[-1])
        engine.collect(engine.launch(_batch_of_zeros([0] * len(lengths), lengths, tables)))
        # Decodes over blocks of the longest prompt, shared by all: what is read counts, not whose it is.
        decodes = min(max_num_seqs, max_num_batched_tokens)
        longest = max(lengths)
        engine.collect(engine.launch(_batch_of_zeros([longest - 1] * decodes, [1] * decodes, [tables[0]] * decodes)))
        peak = torch.cuda.max_memory_allocated(model.device) - before
        engine.close()
    except torch.OutOfMemoryError:
        raise forward_out_of_memory(
            model, sum(lengths), max_num_seqs, max_len, cache_tokens=num_blocks * block_size
        ) from None
    return peak + peak // 20


def _largest_prefill(max_num_batched_tokens: int, max_num_seqs: int, max_len: int) -> list[int]:
    """Lengths of the prompts that fill a round, as long as they can be."""
    tokens = max(min(max_num_batched_tokens, max_len * max_num_seqs), 1)
    return [max_len] * (tokens // max_len) + ([tokens % max_len] if tokens % max_len else [])


def _batch_of_zeros(start: list[int], num_tokens: list[int], tables: list[list[int]]) -> ScheduledBatch:
    n = len(start)
    ids = [np.zeros(s + k, dtype=np.int64) for s, k in zip(start, num_tokens, strict=True)]
    return ScheduledBatch(
        request=np.arange(n),
        start=np.array(start, dtype=np.int64),
        num_tokens=np.array(num_tokens, dtype=np.int64),
        is_decode=np.array(num_tokens) == 1,
        yields_token=np.ones(n, dtype=bool),
        cached_tokens=np.full(n, -1),
        num_blocks=np.array([len(table) for table in tables], dtype=np.int64),
        block_tables=tables,
        token_ids=ids,
    )
