"""Memory layouts that a contract may ask for: the same values, lying otherwise in memory.

Owns the meaning of each name in task.LAYOUTS. Trusted side, for CPU and GPU alike; never decides which tensors are asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kernelband.errors import nearest
from kernelband.task import LAYOUTS


def arranged(value: torch.Tensor, layout: str) -> torch.Tensor:
    """A tensor of equal values, shape, dtype and device whose strides are those of `layout`.

    'contiguous': row after row without gaps. 'strided': the last two axes change places in memory and only every second element
    belongs to the tensor, so that no stride is 1 and no two axes can be walked as one; what lies between is NaN (floats), True
    or the largest number. Neither shares memory with `value`. A tensor without elements has no layout and comes back as a copy.

    Raises ValueError for an unknown name.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; {nearest(layout, LAYOUTS)}")
    if layout == "contiguous" or value.numel() == 0 or value.ndim == 0:
        return value.clone(memory_format=torch.contiguous_format)
    shape = list(value.shape)
    if len(shape) > 1:
        shape[-1], shape[-2] = shape[-2], shape[-1]
    spread = torch.full((*shape, 2), _between(value.dtype), dtype=value.dtype, device=value.device)[..., 0]
    made = spread.transpose(-1, -2) if len(shape) > 1 else spread
    made.copy_(value)
    return made


def _between(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def arranged_inputs(inputs: Mapping[str, Any], layout: str) -> dict[str, Any]:
    """Arguments with every floating tensor in `layout`; the rest as it is."""
    return {n: arranged(v, layout) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for n, v in inputs.items()}
