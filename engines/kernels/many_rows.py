"""Matrix products with many rows, in Triton: of a long prefill, with what follows them done on the tile that is there.

Such a product keeps the card's arithmetic units busy until its power is what limits it; time is saved by not writing a
result only to read it again. The merged gate/up product goes through SiLU at once, those that end a half of a layer are added to
the residual stream. Tiles come through the copy engine (tensor descriptors); one program a processor walks over its tiles,
column by column within a band of rows, so that what neighbours read is in the L2 cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl

from engines.kernels.activation import gated_silu
from engines.kernels.launch import launch


@triton.jit(do_not_specialize=["num_rows"])
def _many_rows_kernel(
    x_desc, w_desc, out_desc, num_rows, N: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OUT_N: tl.constexpr, BAND: tl.constexpr, PROGRAMS: tl.constexpr,
    EPILOGUE: tl.constexpr, DTYPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    for tile in range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS):
        first = tile // (BAND * tiles_n) * BAND
        height = tl.minimum(tiles_m - first, BAND)
        within = tile % (BAND * tiles_n)
        row = (first + within % height) * BLOCK_M
        col = within // height
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            acc = tl.dot(x_desc.load([row, k]), w_desc.load([col * BLOCK_N, k]).T, acc)
        if EPILOGUE == "silu":
            out_desc.store([row, col * OUT_N], gated_silu(acc, BLOCK_M, OUT_N, DTYPE))
        else:
            # In two halves, which take half the shared memory.
            left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, OUT_N)), (0, 2, 1)))
            at = col * BLOCK_N
            out_desc.store([row, at], left.to(DTYPE) + out_desc.load([row, at]))
            at += OUT_N
            out_desc.store([row, at], right.to(DTYPE) + out_desc.load([row, at]))


@dataclass(frozen=True, slots=True)
class ManyRowsConfig:
    """Shape of a launch: a tile's rows and columns, inputs of a step, rows of tiles in a band, warps, pipeline stages."""

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    band: int = 8
    num_warps: int = 8
    num_stages: int = 4


def described(tensor: torch.Tensor, rows: int, columns: int) -> Any:
    """A matrix as the copy engine reads or writes it, in tiles; made once for a buffer or a weight."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(tensor, [rows, columns])


class ManyRows:
    """One product's launch over fixed buffers, x @ weight.T of their first rows.

    x [T, K], weight [N, K], contiguous; `silu`: out [T, N / 2] = silu(gate) * up of the merged product; `add`: out [T, N] += the
    product. K and N need not be whole tiles. Rows up to the end of the last tile are computed: they may hold anything
    that is a number.
    """

    def __init__(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        n: int,
        epilogue: Literal["add", "silu"],
        config: ManyRowsConfig,
    ) -> None:
        self.n, self.k, self.epilogue, self.config, self.dtype = n, x.shape[1], epilogue, config, _TYPES[x.dtype]
        self.x = described(x, config.block_m, config.block_k)
        self.out = described(out, config.block_m, config.block_n // 2)
        self.programs = (
            torch.cuda.get_device_properties(x.device).multi_processor_count if x.device.type == "cuda" else 2
        )

    def weight(self, weight: torch.Tensor) -> Any:
        return described(weight, self.config.block_n, self.config.block_k)

    def __call__(self, weight: Any, num_rows: int) -> None:
        """`weight` as `self.weight` made it."""
        c = self.config
        launch(
            _many_rows_kernel, (self.programs,),
            self.x, weight, self.out, num_rows, N=self.n, K=self.k,
            BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_K=c.block_k, OUT_N=c.block_n // 2, BAND=c.band, PROGRAMS=self.programs,
            EPILOGUE=self.epilogue, DTYPE=self.dtype, num_warps=c.num_warps, num_stages=c.num_stages,
        )  # fmt: skip


_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
