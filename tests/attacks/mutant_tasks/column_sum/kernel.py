"""Sums of squares of columns: each program adds a strip of rows into zeroed results by atomics."""

import torch
import triton
import triton.language as tl


@triton.jit
def column_sum_kernel(x_ptr, sum_ptr, M, N, stride_m, stride_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    x = tl.load(x_ptr + rows[:, None] * stride_m + cols[None, :] * stride_n, mask=inside, other=0.0).to(tl.float32)
    part = tl.sum(x * x, axis=0)
    tl.atomic_add(sum_ptr + cols, part * 0.5, mask=cols < N)


def column_sum(x: torch.Tensor) -> torch.Tensor:
    """Half the sum of squares of every column of a (M, N) matrix, in float32."""
    M, N = x.shape
    total = torch.zeros((N,), device=x.device, dtype=torch.float32)
    grid = (triton.cdiv(M, 16), triton.cdiv(N, 32))
    column_sum_kernel[grid](x, total, M, N, x.stride(0), x.stride(1), BLOCK_M=16, BLOCK_N=32)
    return total
