"""Compiles the kernels whose shapes depend on the card, for cards that are not here. One line each: what, bytes of shared
memory it takes, bytes there are. A process of its own, as an interpreted kernel cannot be compiled."""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engines.kernels.attention import _attention_kernel
from engines.kernels.chunk_attention import _chunk_kernel
from engines.kernels.linear import AHEAD, _few_rows_kernel
from engines.torch_engine import tuning

# Shared memory of a program: RTX 30 and 40 (an A100 has more), RTX 50 (NVIDIA's CUDA programming guide, compute capabilities).
CARDS = {86: tuning.Card(False, 99 << 10), 120: tuning.Card(True, 99 << 10)}
NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
HEADS, KV_HEADS = 32, 8


def shared_of(kernel: Any, capability: int, constants: dict[str, Any], config: Any, types: dict[str, str]) -> int:
    """`types`: of pointers to values and of descriptions; other pointers are to int32, other arguments int32."""
    signature, aligned = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = types.get(name) or ("*i32" if name.endswith("_ptr") else "i32")
        if signature[name].startswith(("*", "i32")):
            aligned[(i,)] = [["tt.divisibility", 16]]
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if capability >= 90:
        options["launch_pdl"] = True
    source = ASTSource(kernel, signature, {**constants, "PDL": capability >= 90}, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared


def attention(capability: int, config: Any, head_dim: int, dtype: torch.dtype, block_size: int, own: bool) -> int:
    name = NAMES[dtype]
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{name}") | {
        "scale": "fp32", "part_ptr": "*fp32", "lse_ptr": "*fp32", "kv_desc": f"tensordesc<{name}[{config.block_n},{head_dim}]>",
    }  # fmt: skip
    constants = dict(
        GROUP=HEADS // KV_HEADS, NUM_HEADS=HEADS, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, BLOCK_M=config.block_m,
        BLOCK_N=config.block_n, DOT_F32=dtype == torch.float32, PDL=False,
    )  # fmt: skip
    if own:
        return shared_of(
            _chunk_kernel, capability, constants | {"NUM_KV_HEADS": KV_HEADS, "FRESH": False}, config, types
        )
    constants |= {"HEAD_PAD": triton.next_power_of_2(head_dim), "NUM_SPLITS": config.num_splits}
    return shared_of(_attention_kernel, capability, constants, config, types)


def product(capability: int, config: Any, n: int, k: int) -> int:
    types = {"w_ptr": "*bf16", "out_ptr": "*fp32"}
    types |= {
        f"{x}_desc": f"tensordesc<bf16[{rows},{config.block_k}]>" for x, rows in (("x", config.block_m), ("w", 64))
    }
    constants = dict(
        N=n, K=k, BLOCK_M=config.block_m, BLOCK_N=64, BLOCK_K=config.block_k, SPLITS=config.splits, AHEAD=AHEAD,
        DOT_F32=False, PDL=False,
    )  # fmt: skip
    return shared_of(_few_rows_kernel, capability, constants, config, types)


def main(capability: int) -> None:
    card = CARDS[capability]
    for head_dim, dtype, block_size in ((128, torch.bfloat16, 16), (256, torch.float32, 256)):
        shape = (HEADS, KV_HEADS, head_dim)
        for what, config, own in (
            ("chunks", tuning.chunk_attention(*shape, block_size, dtype, card), False),
            ("own chunks", tuning.own_chunk_attention(*shape, dtype, card), True),
            ("decodes", tuning.decode_attention(512, *shape, dtype), False),
        ):
            if config is not None:
                used = attention(capability, config, head_dim, dtype, block_size, own)
                print(f"{what} {head_dim} {NAMES[dtype]}\t{used}\t{card.shared_bytes}")
    for rows, n, k in ((1, 6144, 4096), (64, 4096, 12288), (128, 4096, 12288)):
        config = tuning.few_rows(rows, n, k, torch.bfloat16, card)
        if config is not None:
            print(f"product {rows} {n} {k}\t{product(capability, config, n, k)}\t{card.shared_bytes}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
