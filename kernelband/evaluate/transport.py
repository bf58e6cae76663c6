"""Buffers that the trusted side owns and a child may open: one dedicated allocation per exported tensor.

CUDA IPC exports whole allocations, hence one each; the oracle's buffers are ordinary torch tensors and are never
exported. Closing frees the memory; a child that still has it open keeps its mapping only, which dies with it.
"""

from __future__ import annotations

from typing import Any

import torch

from kernelband.evaluate.inside import cudrv
from kernelband.evaluate.specs import describe, extent


class Shared:
    """One exported tensor on the GPU, with the handle (hex) by which a child opens it."""

    def __init__(self, like: torch.Tensor):
        self.pointer = cudrv.allocate(extent(like))
        self.handle = cudrv.export(self.pointer)
        self.tensor = cudrv.tensor(self.pointer, like.shape, like.stride(), like.dtype)

    def close(self) -> None:
        del self.tensor
        cudrv.free(self.pointer)


class Slot:
    """One set of arguments in shared buffers. constants: buffers of arguments that all slots of a case share."""

    def __init__(self, inputs: dict[str, Any], constants: dict[str, Shared]):
        specs, _ = describe(inputs)
        self.constants = constants
        self.own = {n: Shared(v) for n, v in inputs.items() if isinstance(v, torch.Tensor) and n not in constants}
        self.buffers = {**self.own, **constants}
        self.specs = [
            {**spec, "offset": 0, "handle": self.buffers[spec["name"]].handle} if spec["kind"] == "tensor" else spec
            for spec in specs
        ]
        self.fill(inputs)

    def fill(self, inputs: dict[str, Any]) -> None:
        """Copy fresh contents to the same addresses; constants stay."""
        for name, shared in self.own.items():
            shared.tensor.copy_(inputs[name])

    def altered(self, inputs: dict[str, Any], but: tuple[str, ...]) -> list[str]:
        """Arguments whose bytes are no longer those of `inputs`, except those named in `but`."""
        return [n for n, s in self.buffers.items() if n not in but and not _same_bits(s.tensor, inputs[n])]

    def close(self) -> None:
        for shared in self.own.values():
            shared.close()


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_floating_point():
        width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        a, b = a.view(width), b.view(width)
    return torch.equal(a, b)


class Outputs:
    """Blank buffers for the results of one case, poisoned before each checked call."""

    def __init__(self, specs: list[dict[str, Any]], honest: list[torch.Tensor]):
        self.buffers = [Shared(torch.empty(h.shape, dtype=h.dtype, device="meta")) for h in honest]
        self.specs = [{**s, "handle": b.handle} for s, b in zip(specs, self.buffers, strict=True)]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [b.tensor for b in self.buffers]

    def poison(self, value: float) -> None:
        for tensor in self.tensors:
            if tensor.is_floating_point():
                tensor.fill_(value)
            else:  # a pattern that no counter or mask is likely to hold
                tensor.fill_(tensor.dtype == torch.bool or torch.iinfo(tensor.dtype).max // 3)

    def close(self) -> None:
        for shared in self.buffers:
            shared.close()
