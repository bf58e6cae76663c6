"""Reads and writes beside a buffer, seen as they happen in the interpreter.

Owns: the zones around buffers (guards) and the accesses of kernels that fall into them. What is read there may never reach a
result (its lane is dropped later), so that values alone do not tell; on a GPU such a read may fault or hand out other data.
Never: changes what an access does, or judges it.
"""

from __future__ import annotations

import bisect
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

_starts: list[int] = []
_zones: dict[int, tuple[int, str]] = {}  # start -> (end, name)
touched: dict[str, None] = {}
"""Names of buffers beside which a kernel read or wrote since `begin`."""


def begin() -> None:
    """Forget all zones and what was touched."""
    _starts.clear()
    _zones.clear()
    touched.clear()


def guard(memory: torch.Tensor, size: int, name: str) -> None:
    """The first and last `size` bytes of a buffer's memory must not be touched; name: what to call the buffer."""
    first, last = memory.data_ptr(), memory.data_ptr() + memory.numel() * memory.element_size()
    for start, end in ((first, first + size), (last - size, last)):
        _zones[start] = (end, name)
        bisect.insort(_starts, start)


def _see(ptrs: Any, mask: Any) -> None:
    addresses = np.asarray(ptrs.data)
    if mask is not None:
        addresses = addresses[np.broadcast_to(mask.data, addresses.shape).astype(bool)]
    if not addresses.size or not _starts:
        return
    low, high = int(addresses.min()), int(addresses.max())
    # No zone between the lowest and the highest address: the usual case, and cheap.
    for at in range(max(0, bisect.bisect_right(_starts, low) - 1), bisect.bisect_right(_starts, high)):
        start = _starts[at]
        end, name = _zones[start]
        if name not in touched and bool(((addresses >= start) & (addresses < end)).any()):
            touched[name] = None


def install() -> None:
    """Watch every load, store and atomic operation from now on. Call once, after other changes to the interpreter."""
    builder = interpreter.InterpreterBuilder

    def watched(name: str, pointer: int, mask: int | None) -> Any:
        original = getattr(builder, name)

        def operation(self: Any, *args: Any, **kwargs: Any) -> Any:
            _see(args[pointer], None if mask is None else args[mask])
            return original(self, *args, **kwargs)

        return operation

    for name, pointer, mask in (("create_masked_load", 0, 1), ("create_masked_store", 0, 2), ("create_atomic_rmw", 1, 3),
                                ("create_atomic_cas", 0, None)):
        setattr(builder, name, watched(name, pointer, mask))
