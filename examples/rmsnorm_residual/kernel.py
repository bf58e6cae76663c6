"""Residual add and RMSNorm: one program a row, a block loop in two passes (add and sum of squares, then scale)."""

import torch
import triton
import triton.language as tl


@triton.jit
def rmsnorm_residual_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, h_ptr,
    x_row_stride, residual_row_stride, y_row_stride, h_row_stride,
    n_cols, eps,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    x_row = x_ptr + row * x_row_stride
    residual_row = residual_ptr + row * residual_row_stride
    y_row = y_ptr + row * y_row_stride
    h_row = h_ptr + row * h_row_stride

    squares = 0.0
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < n_cols
        h = tl.load(x_row + cols, mask=mask, other=0.0) + tl.load(residual_row + cols, mask=mask, other=0.0)
        tl.store(h_row + cols, h, mask=mask)
        wide = h.to(tl.float32)
        squares += tl.sum(wide * wide, axis=0)
    scale = 1.0 / tl.sqrt(squares / n_cols + eps)

    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < n_cols
        h = tl.load(x_row + cols, mask=mask, other=0.0) + tl.load(residual_row + cols, mask=mask, other=0.0)
        weight = tl.load(weight_ptr + cols, mask=mask, other=0.0)
        y = h * scale * weight  # in float32, as scale is
        tl.store(y_row + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


def rmsnorm_residual(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(h) * weight, h) with h = x + residual, over the last axis of contiguous (rows, cols) matrices."""
    rows, cols = x.shape
    y = torch.empty_like(x)
    h = torch.empty_like(x)
    rmsnorm_residual_kernel[(rows,)](
        x, residual, weight, y, h,
        x.stride(0), residual.stride(0), y.stride(0), h.stride(0),
        cols, eps,
        BLOCK=512,
    )
    return y, h
