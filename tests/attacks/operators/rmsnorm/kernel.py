"""RMS normalisation: one program a row, two passes over the row in blocks."""

import torch
import triton
import triton.language as tl


@triton.jit
def rmsnorm_kernel(x_ptr, w_ptr, y_ptr, n_cols, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = 0.0
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        total += tl.sum(x * x, axis=0)
    scale = 1.0 / tl.sqrt(total / n_cols + eps)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * n_cols + cols, x * scale * w, mask=cols < n_cols)


def rmsnorm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x / sqrt(mean(x^2) + 1e-6) * w over the last axis of a contiguous (rows, cols) matrix; w (cols,)."""
    rows, cols = x.shape
    y = torch.empty_like(x)
    rmsnorm_kernel[(rows,)](x, w, y, cols, 1e-6, BLOCK=512)
    return y
