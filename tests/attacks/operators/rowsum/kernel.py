"""Sums of rows: one program a row, accumulated in float32 block by block."""

import torch
import triton
import triton.language as tl


@triton.jit
def rowsum_kernel(x_ptr, y_ptr, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = 0.0
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        total += tl.sum(x, axis=0)
    tl.store(y_ptr + row, total)


def rowsum(x: torch.Tensor) -> torch.Tensor:
    """Sums over the last axis of a contiguous (rows, cols) matrix."""
    rows, cols = x.shape
    y = torch.empty((rows,), device=x.device, dtype=x.dtype)
    rowsum_kernel[(rows,)](x, y, cols, BLOCK=512)
    return y
