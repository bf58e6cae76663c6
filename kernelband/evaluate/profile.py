"""Profile: what a candidate's behaviour says about where its time goes, how certain that is, and who did the work.

The rungs of the signal ladder, best first: 'ncu' (hardware counters), 'cupti' (device time of the kernels alone against the
task's least work), 'timed' (the clock's time against the same), 'model' (terms of the modelled device), 'compiled' (nothing
but the binaries). Compiled facts are summarised on all of them. Owns no measurement.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kernelband.device import Peaks
from kernelband.evaluate.toollogs import Counters

Rung = Literal["ncu", "cupti", "timed", "compiled", "model"]
Work = Mapping[str, tuple[float, float, str]]
"""Case -> least work of a call: (bytes, flops, dtype)."""

HOST_BOUND = 0.7
"""Below this share of a call's time on the device, the host is what a call waits for."""


@dataclass(frozen=True)
class Profile:
    """load: share 0..1 of each resource's peak ("dram", "compute"; from ncu also "l2", "sm", "issue", "tensor").
    facts: compiled facts in one row, and what the rung adds. occupancy: achieved on 'ncu', else the most that
    registers and shared memory allow; 0 if not known. notes: in words, for people and writers."""

    rung: Rung
    load: Mapping[str, float]
    facts: Mapping[str, float] = field(default_factory=dict)
    occupancy: float = 0.0
    notes: tuple[str, ...] = ()


def ladder(peaks: Peaks, facts: Mapping[str, Sequence[Any]], *, counters: Counters | str | None = None,
           device_us: Mapping[str, float] | None = None, times: Mapping[str, float] | None = None, work: Work | None = None,
           modelled: Mapping[str, float] | None = None) -> Profile:
    """The profile from the best rung that there is something for.

    facts: case -> compiled launches. counters: of ncu, or why there are none. device_us and times: case -> microseconds a
    call, by CUPTI and by the clock; both need ``work``. modelled: the load on a modelled device.
    """
    row = summarise(facts, peaks)
    most = row.get("occupancy", 0.0)
    notes = [f"no counters: {counters}"] if isinstance(counters, str) and counters else []
    shares = [us / (times or {})[case] for case, us in (device_us or {}).items() if (times or {}).get(case)]
    if shares:
        row["device_share"] = min(1.0, *shares)
        if row["device_share"] < HOST_BOUND:
            notes.append(f"the device works for {row['device_share']:.0%} of a call: the rest is launching from the host")
    if isinstance(counters, Counters):
        row.update(local_bytes=counters.local_bytes, bank_conflicts=counters.bank_conflicts)
        if counters.stalls:
            notes.append("warps wait for " + ", ".join(f"{n} {part:.0%}" for n, part in list(counters.stalls.items())[:3]))
        return Profile("ncu", dict(counters.load), row, counters.occupancy, tuple(notes))
    for rung, measured in (("cupti", device_us), ("timed", times)):
        cases = [c for c in measured or {} if c in (work or {})]
        if cases:
            load = timed_load(peaks, [(measured[c], *work[c]) for c in cases])  # type: ignore[index]
            return Profile(rung, load, row, most, tuple(notes))  # type: ignore[arg-type]
    if modelled:
        return Profile("model", dict(modelled), row, most, tuple(notes))
    return Profile("compiled", {}, row, most, tuple(notes))


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


# -- what ran -----------------------------------------------------------------------------------------------------

OWN = 0.5
"""Least share of device time for those whom a contract allows."""

STRANGER = 0.1
"""Most that a library may take where the contract does not allow it. Below OWN alone, a fast library call and an own kernel that
idles as long would pass; torch's operations are held to OWN only, because honest wrappers sum partial results with them."""

_IDENTIFIER = re.compile(r"[A-Za-z_$][A-Za-z0-9_$]*")
_LIBRARY = re.compile(
    r"^(?:nvjet_|sm\d+_xmma_|cublas|cudnn|cask_|cutlass_\d+_|fmha_cutlass[FB]_|(?:volta|turing|ampere|maxwell)_\w*\d+x\d+)|"
    r"^(?:void )?(?:cutlass|cublas(?:Lt)?|cudnn|cusparse|cufft|cusolver|cask|pytorch_flash|flash|internal::gemvx)::|"
    r"^void (?:gem[mv]|splitKreduce|dot_kernel|reduce_1Block|axpy_|scal_|ger_|flash_|fmha_|cutlass)\w*<|"
    r"^nccl(?:Dev)?Kernel")
"""Names that a library's build made. Words that an author may choose (gemm_kernel, flash_fwd) count in C++ templates only."""

_TORCH = re.compile(r"\bat::|\bat_cuda_detail\b|\bc10::|\btorch::|\bcub::|\bthrust::|^triton_(?:poi|red|per|tem|mm)_")
_COPY = re.compile(r"copy_kernel|FillFunctor|CatArrayBatchedCopy|copy_device_to_device|direct_copy|\bmemcpy|\bmemset", re.I)


@dataclass(frozen=True)
class WhatRan:
    """Who did the work on the device. Shares of device time, 0..1, that add up to 1 (to 0 if nothing ran): own kernels of the
    candidate, vendor libraries, torch's operations, copies and fills (torch's too), and other kernels. own_us, us:
    microseconds of own kernels and of all, over all traced calls. names: kernels by (group, name, share), longest first.
    odd: names of the candidate's kernels on kernels that are not its own."""

    own_share: float
    vendor_share: float
    torch_share: float
    copy_share: float
    other: float
    own_us: float
    us: float = 0.0
    names: tuple[tuple[str, str, float], ...] = ()
    odd: tuple[str, ...] = ()


def what_ran(records: Iterable[Any], facts: Iterable[Any]) -> WhatRan:
    """Sort the device's activities by who wrote them.

    records: of a child's op "profile" (see inside/toolrun.py); malformed ones count as other. facts: `KernelFacts` of the
    compiled launches of the case. A name proves nothing, because a candidate chooses it: a kernel is own only if a compiled
    launch has its name, its threads a block (32 a warp) and its registers, as read from the binary by this side; one that is
    named like a library's is never own. Of an auto-tuned kernel the registers are known for one configuration only, so that
    the threads of each are enough. The records themselves come from the candidate's process, and native code could forge
    them.
    """
    exact: set[tuple[str, int, int]] = set()
    loose: set[tuple[str, int]] = set()
    for fact in facts:
        threads = 32 * fact.num_warps
        exact.add((fact.kernel, threads, fact.registers))
        if not fact.registers:
            loose.add((fact.kernel, threads))
        loose |= {(fact.kernel, 32 * int(config["num_warps"])) for config in fact.configs
                  if not config.get("error") and config.get("num_warps")}
    named = {kernel for kernel, _, _ in exact}
    sums: dict[tuple[str, str], float] = {}
    odd: dict[str, None] = {}
    for record in records:
        group, name, us = _group(record, exact, loose)
        sums[group, name] = sums.get((group, name), 0.0) + us
        if name in named and group != "own":
            odd[name] = None
    total = sum(sums.values())

    def share(group: str) -> float:
        return sum(us for (g, _), us in sums.items() if g == group) / total if total else 0.0

    ranked = sorted(((g, name, us / total) for (g, name), us in sums.items()), key=lambda item: -item[2]) if total else []
    own_us = sum(us for (g, _), us in sums.items() if g == "own")
    return WhatRan(share("own"), share("vendor"), share("torch"), share("copy"), share("other"), own_us,
                   total, tuple(ranked[:40]), tuple(odd)[:10])


def _group(record: Any, exact: set[tuple[str, int, int]], loose: set[tuple[str, int]]) -> tuple[str, str, float]:
    """(group, name, microseconds) of one record."""
    record = record if isinstance(record, Mapping) else {}
    name, us = str(record.get("name", ""))[:300], record.get("us")
    us = float(us) if isinstance(us, (int, float)) and math.isfinite(us) and us > 0 else 0.0
    if record.get("kind") == "copy":
        return "copy", name, us
    block = record.get("block")
    block = block if isinstance(block, list) and len(block) == 3 and all(type(n) is int for n in block) else [0]
    threads, registers = math.prod(block), record.get("registers")
    if _LIBRARY.search(name):
        return "vendor", name, us
    if _IDENTIFIER.fullmatch(name) and ((name, threads, registers) in exact or (name, threads) in loose):
        return "own", name, us
    if _TORCH.search(name):
        return ("copy" if _COPY.search(name) else "torch"), name, us
    return "other", name, us


def allowed(what: WhatRan, allow: Sequence[str]) -> str:
    """'' if those whom the contract allows ("own", "vendor", "torch") did the work, else why not, in one line.

    They must have had OWN of the device's time. Copies and fills are torch's and may have the rest; a library that is not
    allowed may have STRANGER.
    """
    shares = {"own": what.own_share, "vendor": what.vendor_share, "torch": what.torch_share}
    if not what.us:
        return "nothing ran on the device"
    got = sum(shares[who] for who in allow)
    if "torch" in allow:
        got += what.copy_share
    who = " and ".join(allow)
    others = ", ".join(f"{name} ({group}) {part:.0%}" for group, name, part in what.names if group not in allow)[:300]
    if what.odd:
        others += f"; named like a kernel of the candidate but not the one that was compiled: {', '.join(what.odd)[:200]}"
    if got < OWN:
        return f"{who} had {got:.0%} of the device's time, {OWN:.0%} is the least; the rest: {others}"
    if "vendor" not in allow and what.vendor_share > STRANGER:
        return f"a library had {what.vendor_share:.0%} of the device's time, which the contract does not allow: {others}"
    return ""
