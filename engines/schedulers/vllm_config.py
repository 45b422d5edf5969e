"""What vLLM refuses at its start, and what it could never schedule with.

Source: vllm 0.33.0, vllm/config/scheduler.py.
"""

from __future__ import annotations

from engines.interface import SchedulerConfig
from traces.errors import BenchctlError

NULL_BLOCKS = 1  # block 0 belongs to nobody


def check_config(config: SchedulerConfig) -> None:
    """vLLM's own checks at start, and those without which nothing could ever be scheduled."""
    usable = config.num_blocks - NULL_BLOCKS
    if usable < 1:
        raise BenchctlError(
            f"--num-blocks {config.num_blocks} leaves vllm no usable block",
            fix="give 2 or more: block 0 is its null block",
        )
    for flag, value in (
        ("--block-size", config.block_size),
        ("--max-num-seqs", config.max_num_seqs),
        ("--max-num-batched-tokens", config.max_num_batched_tokens),
    ):
        if value < 1:
            raise BenchctlError(f"{flag} is {value}", fix=f"give {flag} 1 or more")
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise BenchctlError(
            f"vllm needs --max-num-batched-tokens ({config.max_num_batched_tokens}) >= --max-num-seqs ({config.max_num_seqs})",
            fix=f"--max-num-seqs {config.max_num_batched_tokens}",
        )
    length = config.max_model_len
    if length is not None and length < 2:
        raise BenchctlError(f"--max-model-len is {length}", fix="give 2 or more: a prompt has to be shorter than it")
    if length is not None and config.long_prefill_token_threshold > length:
        raise BenchctlError(
            f"vllm needs --long-prefill-token-threshold ({config.long_prefill_token_threshold}) <= --max-model-len ({length})",
            fix=f"--long-prefill-token-threshold {length}, or 0 for none",
        )
    if length is not None and not config.enable_chunked_prefill and config.max_num_batched_tokens < length:
        raise BenchctlError(
            f"without chunked prefill vllm needs --max-num-batched-tokens ({config.max_num_batched_tokens}) >= --max-model-len ({length})",
            fix=f"--max-num-batched-tokens {length}, or --enable-chunked-prefill",
        )
    if config.long_prefill_token_threshold < 0:
        raise BenchctlError(
            f"--long-prefill-token-threshold is {config.long_prefill_token_threshold}",
            fix="0 for none, or a number of tokens",
        )
    if config.scheduling_policy not in ("fcfs", "priority"):
        raise BenchctlError(f"--scheduling-policy is {config.scheduling_policy!r}", fix="fcfs or priority")
    if not 0 <= config.watermark < 1:
        raise BenchctlError(
            f"--watermark is {config.watermark}", fix="a fraction of the pool, from 0 up to but not including 1"
        )
    if config.max_loras is not None and config.max_loras < 1:
        raise BenchctlError(f"--max-loras is {config.max_loras}", fix="give 1 or more, or leave it out for no limit")
