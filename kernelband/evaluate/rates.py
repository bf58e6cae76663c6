"""What the present GPU does at most, measured: copying and multiplying. Trusted process only; overrides datasheet peaks where
headroom is judged, never where physics is."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

COPY_BYTES = 1 << 29
SIDE = 8192
TIMES = 7


def measure() -> dict[str, float]:
    """'dram_gbs': GB/s (1e9 bytes) of a device copy of 512 MiB, read and written bytes together; 'float16_tflops': 1e12
    operations a second of an 8192-cubed matrix product. Medians of 7 by CUDA events.

    Keys are missing where memory does not suffice.
    """
    found: dict[str, float] = {}
    free = torch.cuda.mem_get_info()[0]
    if free > 4 * COPY_BYTES:
        a, b = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
        found["dram_gbs"] = 2 * COPY_BYTES / _median_us(lambda: b.copy_(a)) / 1e3
        del a, b
    if free > 8 * SIDE * SIDE * 2:
        x, y = (torch.randn(SIDE, SIDE, dtype=torch.float16, device="cuda") for _ in range(2))
        z = torch.empty_like(x)
        found["float16_tflops"] = 2 * SIDE**3 / _median_us(lambda: torch.mm(x, y, out=z)) / 1e6
        del x, y, z
    torch.cuda.empty_cache()
    return {name: round(value, 1) for name, value in found.items()}


def _median_us(work: Callable[[], object]) -> float:
    work()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(TIMES)]
    for begin, end in pairs:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs) * 1e3
