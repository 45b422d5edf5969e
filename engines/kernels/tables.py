"""Changes of block tables applied on the device: the tables stay there, the host sends what is new."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engines.kernels.launch import launch


@triton.jit
def _update_tables_kernel(
    tables_ptr,
    rows_ptr,
    columns_ptr,
    blocks_ptr,
    num_updates_ptr,
    stride_table,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < tl.load(num_updates_ptr)
    row = tl.load(rows_ptr + offs, mask=mask, other=0).to(tl.int64)
    column = tl.load(columns_ptr + offs, mask=mask, other=0)
    tl.store(tables_ptr + row * stride_table + column, tl.load(blocks_ptr + offs, mask=mask, other=0), mask=mask)


def update_tables(
    tables: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, blocks: torch.Tensor, num_updates: torch.Tensor
) -> None:
    """tables[rows[i], columns[i]] = blocks[i] for i < num_updates. All int32; no (row, column) twice."""
    if len(rows):
        launch(
            _update_tables_kernel,
            (triton.cdiv(len(rows), 256),),
            tables,
            rows,
            columns,
            blocks,
            num_updates,
            tables.stride(0),
            BLOCK=256,
            num_warps=2,
        )
