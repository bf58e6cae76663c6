"""Buffers that the trusted side owns and a child may open.

CUDA IPC exports whole allocations. Hence an exported tensor has one of its own, or shares one with nothing but other inputs of
the same case, which the child may read as well; the oracle's buffers are ordinary torch tensors and are never exported.
Closing frees the memory; a child that still has it open keeps its mapping only, which dies with it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernelband.evaluate.inside import cudrv
from kernelband.evaluate.specs import describe, extent

ALIGNED = 16
"""Bytes to which a guarded tensor is aligned at least: what Triton's own specialisation of pointers asks for."""


class Shared:
    """One exported tensor on the GPU, with the handle (hex) by which a child opens it."""

    def __init__(self, like: torch.Tensor):
        self.pointer = cudrv.allocate(extent(like))
        self.handle = cudrv.export(self.pointer)
        self.tensor = cudrv.tensor(self.pointer, like.shape, like.stride(), like.dtype)

    @property
    def spec(self) -> dict[str, Any]:
        return {"handle": self.handle, "offset": 0}

    def overrun(self) -> bool:
        return False

    def close(self) -> None:
        del self.tensor
        cudrv.free(self.pointer)


class Inputs:
    """The inputs of all slots of a case in one allocation, so that a child opens one handle instead of hundreds.

    tensors: those of one slot. Each lies on blocks of its own, as a dedicated allocation would.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], slots: int):
        self.pointer = cudrv.allocate(slots * sum(_blocks(t) for t in tensors))
        self.handle, self.used = cudrv.export(self.pointer), 0

    def share(self, like: torch.Tensor) -> Part:
        """The next tensor."""
        at, self.used = self.used, self.used + _blocks(like)
        return Part(cudrv.tensor(self.pointer, like.shape, like.stride(), like.dtype, at), {"handle": self.handle, "offset": at})

    def close(self) -> None:
        """Its tensors must be out of use."""
        cudrv.free(self.pointer)


@dataclass
class Part:
    """A tensor in the allocation of a case's inputs; spec: how a child finds it."""

    tensor: torch.Tensor
    spec: dict[str, Any]

    def overrun(self) -> bool:
        return False

    def close(self) -> None:
        del self.tensor


def _blocks(tensor: torch.Tensor) -> int:
    return max(1, -(-extent(tensor) // cudrv.BLOCK)) * cudrv.BLOCK


class Guarded:
    """One exported tensor between unbacked addresses: at the end of its mapping (`at_end`) or at its beginning.

    The rest of the mapping holds ones (NaN as floats, -1 as integers): what is read there spoils a result, and what is written
    there is seen by `overrun`. Raises cudrv.CudaError where the driver cannot do it.
    """

    def __init__(self, like: torch.Tensor, at_end: bool):
        size = extent(like)
        self.pointer, self.whole, self.descriptor = cudrv.guarded(size)
        self.offset = (self.whole - size) // ALIGNED * ALIGNED if at_end else 0
        self.tensor = cudrv.tensor(self.pointer, like.shape, like.stride(), like.dtype, self.offset)
        memory = cudrv.tensor(self.pointer, (self.whole,), (1,), torch.uint8)
        self.around = [part for part in (memory[:self.offset], memory[self.offset + size:]) if part.numel()]
        for part in self.around:
            part.fill_(255)

    @property
    def spec(self) -> dict[str, Any]:
        """What a child needs beside the descriptor, which travels with the request."""
        return {"guarded": self.whole, "offset": self.offset}

    def overrun(self) -> bool:
        """Whether something was written beside the tensor; mends it."""
        hit = any(bool((part != 255).any()) for part in self.around)
        if hit:
            for part in self.around:
                part.fill_(255)
        return hit

    def close(self) -> None:
        self.around = []
        del self.tensor
        os.close(self.descriptor)
        cudrv.unmap(self.pointer, self.whole)


class Slot:
    """One set of arguments in shared buffers, made by `share`. constants: buffers of arguments that all slots of a case share."""

    def __init__(self, inputs: Mapping[str, Any], constants: Mapping[str, Any], share: Callable[[torch.Tensor], Any]):
        specs, _ = describe(dict(inputs))
        self.constants = constants
        self.own: dict[str, Any] = {n: share(v) for n, v in inputs.items() if isinstance(v, torch.Tensor) and n not in constants}
        self.buffers: dict[str, Any] = {**self.own, **constants}
        self.specs = [{**spec, **self.buffers[spec["name"]].spec} if spec["kind"] == "tensor" else spec for spec in specs]
        self.fill(inputs)

    @property
    def descriptors(self) -> list[int]:
        """Descriptors of guarded buffers, in the order of the specs that have 'guarded'."""
        return [self.buffers[s["name"]].descriptor for s in self.specs if "guarded" in s]

    def fill(self, inputs: Mapping[str, Any], change: Change | None = None) -> None:
        """Copy contents to the same addresses, changed on the way; constants stay."""
        for name, shared in self.own.items():
            if change is None or not changes(inputs[name]):
                shared.tensor.copy_(inputs[name])
            else:
                torch.mul(inputs[name], change.factor, out=shared.tensor)
                change.mix(shared.tensor)

    def altered(self, inputs: Mapping[str, Any], but: tuple[str, ...]) -> list[str]:
        """Arguments whose bytes are no longer those of `inputs`, except those named in `but`."""
        return [n for n, s in self.buffers.items() if n not in but and not _same_bits(s.tensor, inputs[n])]

    def overrun(self) -> list[str]:
        """Arguments beside which something was written (guarded buffers only)."""
        return [n for n, s in self.own.items() if s.overrun()]

    def close(self) -> None:
        for shared in self.own.values():
            shared.close()


@dataclass(frozen=True)
class Change:
    """Other contents from the same ones, cheaply: everything times `factor`, and every STEP-th element from `start` on moved to
    the place of the next of them. What keys its answers by a fingerprint either sees the change or gives an old answer, and no
    old answer is right times a number."""

    factor: float
    start: int

    STEP = 4096

    def mix(self, tensor: torch.Tensor) -> None:
        """Move the elements, in place. Those of short tensors too: the step is at most a third of the length."""
        flat = tensor.as_strided((extent(tensor) // tensor.element_size(),), (1,))
        part = flat[self.start % max(1, min(self.STEP, flat.numel() // 3))::max(1, min(self.STEP, flat.numel() // 3))]
        part.copy_(part.roll(1))

    def of(self, value: torch.Tensor) -> torch.Tensor:
        """The changed contents in a tensor of its own, bit for bit what `Slot.fill` writes."""
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        torch.mul(value, self.factor, out=made)
        self.mix(made)
        return made


def scales(value: torch.Tensor) -> bool:
    """Whether torch multiplies this dtype by a number."""
    return value.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def changes(value: torch.Tensor) -> bool:
    """Whether contents of this tensor can be changed by `Change`: floats, each at an address of its own, without gaps."""
    return scales(value) and value.numel() > 0 and value.numel() * value.element_size() == extent(value)


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

    def poison(self, value: float | None) -> None:
        """value: what floats are filled with; None for normal random numbers, which look like results."""
        for tensor in self.tensors:
            if not tensor.is_floating_point():  # a pattern that no counter or mask is likely to hold
                tensor.fill_(tensor.dtype == torch.bool or torch.iinfo(tensor.dtype).max // 3)
            elif value is None and scales(tensor):
                tensor.normal_()
            else:
                tensor.fill_(7.25 if value is None else value)

    def fingerprint(self) -> list[torch.Tensor]:
        """A sum over the bits of each output, on the GPU."""
        sums = []
        for tensor in self.tensors:
            width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
            sums.append(tensor.view(width).sum(dtype=torch.int64))
        return sums

    def close(self) -> None:
        for buffer in self.buffers:
            buffer.close()
