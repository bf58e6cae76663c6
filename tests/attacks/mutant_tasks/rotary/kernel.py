"""Rotary position embedding in place: one program for a position and a head, halves rotated against each other."""

import torch
import triton
import triton.language as tl


@triton.jit
def rotary_kernel(x_ptr, cos_ptr, sin_ptr, stride_t, stride_h, stride_c, half, BLOCK: tl.constexpr):
    t = tl.program_id(0)
    h = tl.program_id(1)
    i = tl.arange(0, BLOCK)
    inside = i < half
    low_ptr = x_ptr + t * stride_t + h * stride_h + i
    high_ptr = low_ptr + half
    low = tl.load(low_ptr, mask=inside, other=0.0)
    high = tl.load(high_ptr, mask=inside, other=0.0)
    c = tl.load(cos_ptr + t * stride_c + i, mask=inside, other=0.0)
    s = tl.load(sin_ptr + t * stride_c + i, mask=inside, other=0.0)
    tl.store(low_ptr, low * c - high * s, mask=inside)
    tl.store(high_ptr, high * c + low * s, mask=inside)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates x (positions, heads, 2 * half) in place by the angles in cos and sin (positions, half), float32."""
    positions, heads, width = x.shape
    half = width // 2
    rotary_kernel[(positions, heads)](
        x, cos, sin, x.stride(0), x.stride(1), cos.stride(0), half, BLOCK=max(64, triton.next_power_of_2(half)),
    )
