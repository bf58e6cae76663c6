"""Transpose plus add: alpha * a.T + b in one pass over 32x32 tiles."""

import torch
import triton
import triton.language as tl


@triton.jit
def transpose_add_kernel(
    a_ptr, b_ptr, c_ptr, alpha, M, N, stride_am, stride_an, stride_bn, stride_bm, stride_cn, stride_cm, BLOCK: tl.constexpr,
):
    ms = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a_mask = (ms[:, None] < M) & (ns[None, :] < N)
    c_mask = (ns[:, None] < N) & (ms[None, :] < M)
    a = tl.load(a_ptr + ms[:, None] * stride_am + ns[None, :] * stride_an, mask=a_mask, other=0.0)
    b = tl.load(b_ptr + ns[:, None] * stride_bn + ms[None, :] * stride_bm, mask=c_mask, other=0.0)
    c = alpha * tl.trans(a).to(tl.float32) + b
    tl.store(c_ptr + ns[:, None] * stride_cn + ms[None, :] * stride_cm, c, mask=c_mask)


def transpose_add(a: torch.Tensor, b: torch.Tensor, alpha: float) -> torch.Tensor:
    """alpha * a.T + b for a (M, N) and b (N, M)."""
    M, N = a.shape
    c = torch.empty((N, M), device=a.device, dtype=a.dtype)
    grid = (triton.cdiv(M, 32), triton.cdiv(N, 32))
    transpose_add_kernel[grid](
        a, b, c, alpha, M, N, a.stride(0), a.stride(1), b.stride(0), b.stride(1), c.stride(0), c.stride(1), BLOCK=32,
    )
    return c
