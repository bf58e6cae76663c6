"""Profile: what a candidate's behaviour says about where its time goes, and how certain that is.

Two rungs of the signal ladder so far: 'timed' (measured time against the task's own least work) and 'model' (terms of
the modelled device). Compiled facts are summarised on both. Owns no measurement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kernelband.device import Peaks


def occupancy(peaks: Peaks, registers: int, shared: int, num_warps: int) -> float:
    """Resident warps of one multiprocessor over its maximum, as limited by registers, shared memory and block slots.

    Registers are given out in units of 256 a warp (CUDA occupancy calculator, compute capability 8.0 and 9.0).
    """
    per_warp = max(1, math.ceil(max(1, registers) * 32 / 256)) * 256
    blocks = min(
        peaks.max_blocks_per_sm,
        peaks.max_warps_per_sm // max(1, num_warps),
        peaks.regs_per_sm // (per_warp * max(1, num_warps)),
        peaks.smem_per_sm_bytes // (shared + 1024) if shared else peaks.max_blocks_per_sm,
    )
    return blocks * num_warps / peaks.max_warps_per_sm


def summarise(facts: Mapping[str, Sequence[Any]], peaks: Peaks) -> dict[str, float]:
    """Compiled facts of all launches of all timed cases as one row: the largest of each resource, the least occupancy.

    facts: case -> launches, each with registers, spills, shared, num_warps, num_stages, mma.
    """
    launches = [f for case in facts.values() for f in case]
    if not launches:
        return {}
    return {
        "registers": float(max(f.registers for f in launches)),
        "spills": float(max(f.spills for f in launches)),
        "shared": float(max(f.shared for f in launches)),
        "num_warps": float(max(f.num_warps for f in launches)),
        "num_stages": float(max(f.num_stages for f in launches)),
        "mma": float(max(f.mma for f in launches)),
        "launches": float(max(len(case) for case in facts.values())),
        "occupancy": min(occupancy(peaks, f.registers, f.shared, f.num_warps) for f in launches),
    }


def timed_load(peaks: Peaks, rows: Sequence[tuple[float, float, float, str]]) -> dict[str, float]:
    """Share of peak that the least work explains: rows of (microseconds, bytes, flops, dtype), averaged over cases."""
    dram = [b / (us * 1e3 * peaks.dram_gbs) for us, b, _, _ in rows]
    compute = [f / (us * 1e6 * peaks.tensor_tflops.get(d, peaks.fp32_tflops)) for us, _, f, d in rows]
    if not rows:
        return {}
    return {"dram": min(1.0, sum(dram) / len(dram)), "compute": min(1.0, sum(compute) / len(compute))}
