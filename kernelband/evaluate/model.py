"""The modelled latency of a call: from counted work and compiled facts to microseconds, without a GPU.

Owns: the formulas, their constants, the list of what they cannot see (`BLIND`), and the interval around a prediction.
Never: runs, compiles or imports candidate code; imports torch or Triton; mixes with measured times. Pure: the same
numbers in give the same numbers out.

How a launch is priced. Five times are computed as if each were the only limit: DRAM, L2, tensor cores, instruction
issue, and the latency of dependent loads. They overlap, but not perfectly, so they are joined by a p-norm, which is at
least the largest and at most a little more. Each time grows with its cause and never falls with another's, so a search
gains only by reducing something that is modelled. Launch cost is added; the host's time hides behind the device's or
the other way round. No prediction is below the roofline of its own bytes and flops.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

# --- constants: from the sources named; those marked "judged" are estimates until a calibration replaces them ---
RESIDUAL = 0.25  # half-width of the interval, multiplicative: not calibrated yet
RESIDUAL_NO_FACTS = 0.5  # the same where compiled facts are missing
OVERLAP_NORM = 4.0  # judged: two equal limits together cost 19 % more than one
DRAM_SUSTAINED = 0.90  # measured on an H200: copies reach 4300 of 4800 GB/s
L2_USABLE = 0.6  # judged: part of L2 that data in reuse can hold (two halves, other traffic)
MMA_SUSTAINED = 0.80  # judged: power and clock limits under full tensor load (dense libraries reach 70-80 % of peak)
MMA_SYNC = 0.62  # of peak on Hopper for tiles that cannot use warpgroup instructions (microbenchmark papers: 60-65 %)
DRAM_LATENCY_NS, L2_LATENCY_NS = 650.0, 270.0  # pointer chases on H100: 600-700 and 260-280 ns
STEP_CLOCKS = 120.0  # judged: barrier and wait of one step of a pipelined dot loop
REDUCTION_NS = 60.0  # judged: shuffles, one round through shared memory, a barrier
SPECIAL_PER_CLOCK = 16.0  # CUDA programming guide: special-function results a clock and SM
LANES_PER_CLOCK = 128.0  # the same for FP32
INTEGER_WEIGHT = 0.15  # judged: address and mask arithmetic is done once a vector of up to 8 lanes, at half rate
WARPS_TO_HIDE = 12.0  # judged: resident warps an SM that keep four schedulers busy
LOCAL_BYTES_PER_CLOCK = 64.0  # L1 bandwidth a clock and SM for spilled registers (half of 128: they miss at times)
ATOMICS_PER_CLOCK = 1.0  # judged: lanes of atomics a clock and SM that L2 takes
LIBRARY_DRAM, LIBRARY_MMA = 0.85, 0.70  # judged: what torch's own kernels reach
BLOCK_START_NS = 500.0  # judged: start, first addresses and end of one block

UNSEEN = frozenset({"program_order", "cache_hints", "hints", "autotune"})
"""Rule families of the rewriter whose children cost what their parent costs here, whatever a GPU would say: a search on a
modelled device does not ask for them."""

BLIND: dict[str, str] = {
    "cache modifiers": "Cache and eviction hints on loads and stores change nothing in the counted traffic.",
    "program order": "Grouping or swizzling programs, or letting a few stride over all tiles, is not seen: L2 reuse between "
                     "programs is assumed the same for every order.",
    "bank conflicts": "Conflicts in shared memory and the cost of layout conversions between operations are not counted.",
    "instruction selection": "Special instructions (packed math, TMA, warp specialisation, fast approximations) cost "
                             "what their generic form costs.",
    "values": "Tensors are traced as zeros, so work that depends on data is what zeros cause.",
    "clock and power": "One clock is assumed; throttling under load is part of the residual.",
    "load imbalance": "Programs are priced by their mean; a few long ones at the end of the grid are not seen.",
    "scheduling inside a program": "Which loads the compiler hoists or pipelines is guessed from num_stages and the "
                                   "order of operations; options of a single loop (tl.range) and reductions that wait for "
                                   "each other are not seen.",
}


class Peaks(Protocol):
    """What the model needs to know of a device: data-sheet figures and limits."""

    @property
    def name(self) -> str: ...
    @property
    def sms(self) -> int: ...
    @property
    def dram_gbs(self) -> float: ...
    @property
    def l2_gbs(self) -> float: ...
    @property
    def l2_bytes(self) -> float: ...
    @property
    def fp32_tflops(self) -> float: ...
    @property
    def tensor_tflops(self) -> Mapping[str, float]: ...  # dense, by dtype name: float16, bfloat16, tf32, float8, int8
    @property
    def smem_per_sm_bytes(self) -> int: ...
    @property
    def regs_per_sm(self) -> int: ...
    @property
    def max_warps_per_sm(self) -> int: ...
    @property
    def max_blocks_per_sm(self) -> int: ...
    @property
    def clock_ghz(self) -> float: ...
    @property
    def launch_us(self) -> float: ...  # device-side cost of one launch


@dataclass(frozen=True)
class Prediction:
    """Microseconds of one call with an interval; terms in µs, one mapping a launch; `bound` names the largest term.

    occupancy (resident warps of the maximum, 0-1) and waves (rounds of resident programs) are those of the launch that
    takes longest.
    """

    us: float
    low: float
    high: float
    terms: tuple[dict[str, float], ...]
    bound: str
    occupancy: float
    waves: float


@dataclass(frozen=True)
class Residency:
    """How the blocks of a launch lie on the device."""

    blocks: int  # that fit on one SM by registers, shared memory, warps
    active: float  # that are on one SM at a time, given the grid
    warps: int  # of one block
    waves: float
    occupancy: float


def peak_tflops(peaks: Peaks, dtype: str | None) -> float:
    """Dense peak for a dtype; what the tensor cores do not know (float32, float64) runs at the FP32 rate."""
    if dtype is None:
        return peaks.fp32_tflops
    if dtype == "float64":
        return peaks.tensor_tflops.get(dtype, peaks.fp32_tflops / 2)
    return peaks.fp32_tflops if dtype == "float32" else peaks.tensor_tflops.get(dtype, peaks.fp32_tflops)


def roofline_us(peaks: Peaks, bytes_moved: float, flops: float, dtype: str | None = None) -> float:
    """The least time for this many bytes of DRAM traffic and flops, at data-sheet peaks (µs)."""
    return max(bytes_moved / (peaks.dram_gbs * 1e3), flops / (peak_tflops(peaks, dtype) * 1e6))


def residency(peaks: Peaks, programs: float, facts: Mapping[str, Any]) -> Residency:
    """Blocks an SM by the three limits of the CUDA occupancy calculator.

    Registers are given out in units of 256 a warp, shared memory with 1 KiB a block for the system.
    """
    warps = max(1, int(facts.get("num_warps") or 4))
    registers = max(16, int(facts.get("registers") or 64))
    shared = int(facts.get("shared") or 0)
    per_block = warps * math.ceil(registers * 32 / 256) * 256
    blocks = min(
        peaks.max_blocks_per_sm, peaks.max_warps_per_sm // warps, peaks.regs_per_sm // per_block,
        int(peaks.smem_per_sm_bytes // (shared + 1024)),
    )
    blocks = max(1, blocks)  # a kernel that does not fit is the compiler's refusal, not a matter of speed
    active = min(float(blocks), max(1.0, programs / peaks.sms))
    return Residency(blocks, active, warps, programs / (peaks.sms * blocks), active * warps / peaks.max_warps_per_sm)


@dataclass(frozen=True)
class Traffic:
    """Bytes of one launch: through L2, from and to DRAM, and the distinct bytes by tensor number."""

    l2: float
    dram: float
    unique: dict[Any, float]


def traffic(peaks: Peaks, trace: Mapping[str, Any], active_programs: float, resident: Mapping[Any, float]) -> Traffic:
    """DRAM traffic by what L2 can hold; everything passes L2.

    A tensor's first reading comes from DRAM unless an earlier launch left it in L2 (`resident`: number -> bytes).
    Readings again by the same program hit as far as L2 holds the data of all programs that run at a time. Readings again
    by other programs hit as far as L2 holds the tensors so shared; of what misses, programs that run together still
    share: for a square arrangement of W of them each byte is fetched once by sqrt(W).
    """
    usable = L2_USABLE * peaks.l2_bytes
    rows = []
    for position, tensor in enumerate(trace.get("tensors", ())):
        size = float(tensor.get("bytes") or 0) or math.inf
        read = max(float(tensor.get("read_sectors") or 0), float(tensor.get("read") or 0))
        once = min(read, float(tensor["read_once"]) if tensor.get("read_once") is not None else read)
        written = max(float(tensor.get("written_sectors") or 0), float(tensor.get("written") or 0))
        # Sectors can overhang a small allocation; its size in whole sectors bounds what is distinct.
        size = math.ceil(size / 32) * 32 if math.isfinite(size) else size
        rows.append((tensor.get("id", f"arg{position}"), size, read, once, written))
    programs = max(1.0, float(trace.get("programs") or 1))
    private = active_programs * sum(once for *_, once, _ in rows) / programs
    shared = sum(min(once, size) for _, size, _, once, _ in rows if once > size)
    miss_private = max(0.0, 1 - usable / private) if private else 0.0
    miss_shared = max(0.0, 1 - usable / shared) / max(1.0, math.sqrt(active_programs)) if shared else 0.0
    l2 = dram = 0.0
    unique: dict[Any, float] = {}
    for number, size, read, once, written in rows:
        first, first_written = min(once, size), min(written, size)
        cold = max(0.0, first - resident.get(number, 0.0))
        dram += cold + (once - first) * miss_shared + (read - once) * miss_private
        dram += first_written + (written - first_written) * max(0.0, 1 - usable / first_written if written else 0.0)
        l2 += read + written
        unique[number] = max(unique.get(number, 0.0), first, first_written)
    return Traffic(l2, dram, unique)


def mma_efficiency(tile: Sequence[int], warps: int, active: float) -> float:
    """Part of the tensor peak that a tile can reach.

    Warpgroup instructions (m64nNk16) need 4 warps and 64 rows; otherwise the older instructions' rate. One such
    instruction reads (64 + N) x 16 operands from shared memory at 128 bytes a clock while it computes 64 x N x 16
    products at 2048 a clock: below N = 64 reading is the limit. Each step of the loop also waits once, hidden in
    part by the other blocks of the SM.
    """
    m, n, k = (max(1, int(side)) for side in (*tile, 1, 1, 1)[:3])
    warpgroups = m >= 64 and warps % 4 == 0
    operands = max(1.0, (64 + min(n, 256)) / (2 * min(n, 256)))
    clocks = m * n * k / 2048
    waiting = clocks / (clocks + STEP_CLOCKS / max(1.0, active))
    small = 1.0 if warpgroups else MMA_SYNC * min(1.0, m / 16) * min(1.0, n / 8)
    return MMA_SUSTAINED * small * waiting / operands


def _launch_terms(
    peaks: Peaks, trace: Mapping[str, Any], facts: Mapping[str, Any] | None, resident: Mapping[Any, float],
) -> tuple[dict[str, float], Residency, Traffic]:
    """Terms of one kernel launch in µs, before launch cost."""
    facts = facts or {}
    counts: Mapping[str, float] = trace.get("per_program", {})
    programs = max(1.0, float(trace.get("programs") or 1))
    where = residency(peaks, programs, facts)
    moved = traffic(peaks, trace, where.active * peaks.sms, resident)
    get = lambda name: float(counts.get(name) or 0.0)  # noqa: E731

    # The fullest SM decides for what an SM does by itself; memory is shared and does not wait for it.
    per_sm = programs / peaks.sms
    uneven = math.ceil(per_sm) / per_sm
    clocks_to_us = 1e-3 / peaks.clock_ghz
    dram_us = moved.dram / (peaks.dram_gbs * DRAM_SUSTAINED * 1e3)
    l2_us = moved.l2 / (peaks.l2_gbs * 1e3)
    l2_us += get("atomics") * programs / (peaks.sms * ATOMICS_PER_CLOCK) * clocks_to_us

    flops = get("dot_flops") * programs
    dot = trace.get("dot") or {}
    dtype = dot.get("dtype", "float16")
    lanes = get("lane_ops")
    mma_us = 0.0
    on_tensor_cores = flops > 0 and dtype in peaks.tensor_tflops and dtype not in ("float32", "float64")
    if on_tensor_cores:
        efficiency = mma_efficiency(dot.get("tile") or (), where.warps, where.active)
        mma_us = flops / (peak_tflops(peaks, dtype) * 1e6 * efficiency) * uneven
    elif flops:
        # One FMA lane is two flops; operands come from shared memory, about half of the issue slots.
        lanes += get("dot_flops") * (2.0 if dtype == "float64" else 1.0)

    busy = min(1.0, where.active * where.warps / WARPS_TO_HIDE)
    issue_clocks = (lanes + INTEGER_WEIGHT * get("int_ops")) / LANES_PER_CLOCK + get("special_ops") / SPECIAL_PER_CLOCK
    issue_us = issue_clocks * programs / peaks.sms * uneven / busy * clocks_to_us

    # A batch of loads waits once. Loops with dots are pipelined: num_stages - 1 batches are under way at a time.
    stages = max(1, int(facts.get("num_stages") or 1))
    ahead = max(1, stages - 1) if get("dots") else 1
    batches, cold = get("batches"), min(get("batches"), get("cold_batches") or get("batches"))
    waits_ns = (cold * DRAM_LATENCY_NS + (batches - cold) * L2_LATENCY_NS) / ahead + get("reductions") * REDUCTION_NS
    rounds = max(1.0, math.ceil(where.waves) if where.waves < 4 else where.waves + 0.5)
    latency_us = rounds * (waits_ns + BLOCK_START_NS) * 1e-3

    # A spilled register is stored and loaded again about once an iteration (batch).
    spilled = 2.0 * float(facts.get("spills") or 0) * where.warps * 32 * max(1.0, batches, get("dots"))
    spill_us = spilled * programs / peaks.sms * uneven / LOCAL_BYTES_PER_CLOCK * clocks_to_us
    terms = {
        "dram_us": dram_us, "l2_us": l2_us, "mma_us": mma_us, "issue_us": issue_us, "latency_us": latency_us,
        "spill_us": spill_us,
    }
    return terms, where, moved


def _torch_terms(
    peaks: Peaks, trace: Mapping[str, Any], resident: Mapping[Any, float],
) -> tuple[dict[str, float], Residency, Traffic]:
    """Terms of an operation that torch's own library kernels carry out: a roofline at what they usually reach."""
    counts: Mapping[str, float] = trace.get("per_program", {})
    moved = traffic(peaks, trace, 1.0, resident)
    flops = float(counts.get("dot_flops") or 0.0)
    dtype = (trace.get("dot") or {}).get("dtype")
    terms = {
        "dram_us": moved.dram / (peaks.dram_gbs * LIBRARY_DRAM * 1e3),
        "l2_us": moved.l2 / (peaks.l2_gbs * 1e3),
        "mma_us": flops / (peak_tflops(peaks, dtype) * LIBRARY_MMA * 1e6),
        "issue_us": 0.0, "latency_us": 2e-3 * DRAM_LATENCY_NS, "spill_us": 0.0,
    }
    return terms, Residency(1, 1.0, 8, 1.0, 1.0), moved


def _norm(values: Sequence[float]) -> float:
    top = max(values)
    return top * sum((value / top) ** OVERLAP_NORM for value in values) ** (1 / OVERLAP_NORM) if top > 0 else 0.0


def predict(
    peaks: Peaks, launches: Sequence[tuple[Mapping[str, Any], Mapping[str, Any] | None]], *, host_us: float = 0.0,
) -> Prediction:
    """Model one call: launches in order, each (trace, compiled facts or None), forms as in the evaluator's contract.

    host_us: time that Python needs to issue one call; calls are issued back to back, so the slower side decides.
    Raises ValueError when there is neither a launch nor host time, or an input is not finite or negative.
    """
    if not launches and host_us <= 0:
        raise ValueError("nothing to model: no launch and no host time")
    resident: dict[Any, float] = {}  # tensor number -> bytes that earlier launches left in L2, oldest first
    unique: dict[Any, float] = {}
    flops: dict[str | None, float] = {}
    all_terms: list[dict[str, float]] = []
    device_us, longest, missing = 0.0, (-1.0, 0.0, 0.0), False
    for trace, facts in launches:
        _refuse_bad(trace)
        is_torch = bool(trace.get("torch"))
        missing = missing or (not is_torch and not (facts or {}).get("registers"))
        terms, where, moved = (
            _torch_terms(peaks, trace, resident) if is_torch else _launch_terms(peaks, trace, facts, resident)
        )
        spill = terms["spill_us"]  # spilled values are on the way of every instruction: they add
        body = _norm([value for name, value in terms.items() if name != "spill_us"]) + spill
        terms["launch_us"] = peaks.launch_us
        terms["total_us"] = body + peaks.launch_us
        device_us += terms["total_us"]
        all_terms.append(terms)
        if terms["total_us"] > longest[0]:
            longest = (terms["total_us"], where.occupancy, where.waves)
        _keep(resident, moved.unique, L2_USABLE * peaks.l2_bytes)
        for number, size in moved.unique.items():
            unique[number] = max(unique.get(number, 0.0), size)
        dtype = (trace.get("dot") or {}).get("dtype")
        work = float(trace.get("per_program", {}).get("dot_flops") or 0) * float(trace.get("programs") or 1)
        flops[dtype] = flops.get(dtype, 0.0) + work
    floor = max([roofline_us(peaks, sum(unique.values()), 0.0), *(roofline_us(peaks, 0.0, n, d) for d, n in flops.items())])
    us = max(device_us, host_us, floor)
    width = 1 + (RESIDUAL_NO_FACTS if missing else RESIDUAL)
    return Prediction(
        us, max(us / width, floor), us * width, tuple(all_terms), _bound(all_terms, device_us, host_us), *longest[1:]
    )


def pair(
    traces: Sequence[Mapping[str, Any]], facts: Sequence[Mapping[str, Any]],
) -> list[tuple[Mapping[str, Any], Mapping[str, Any] | None]]:
    """Join the launches of a trace with the compiled launches of the same call, in order, for `predict`.

    Torch's own operations have no compiled facts. Compiled facts may stop early (they are capped); later launches then
    take those of the last launch of the same kernel. Raises ValueError when names, grids or numbers of launches do not
    agree: then the candidate did something else when interpreted than when compiled.
    """
    waiting = list(facts)
    last: dict[str, Mapping[str, Any]] = {}
    pairs: list[tuple[Mapping[str, Any], Mapping[str, Any] | None]] = []
    for trace in traces:
        name = str(trace.get("kernel"))
        if trace.get("torch"):
            pairs.append((trace, None))
            continue
        if waiting:
            found = waiting.pop(0)
            if found["kernel"] != name:
                raise ValueError(f"kernel {name} was traced where {found['kernel']} was compiled")
            if not found.get("autotuned") and list(found["grid"]) != list(trace["grid"]):
                raise ValueError(f"kernel {name} was traced on the grid {trace['grid']}, compiled on {found['grid']}")
            last[name] = found
        if name not in last:
            raise ValueError(f"kernel {name} was traced but not compiled")
        pairs.append((trace, last[name]))
    if waiting:
        raise ValueError(f"{len(waiting)} compiled launches were not traced")
    return pairs


def load(prediction: Prediction) -> dict[str, float]:
    """Share of the predicted time that each resource would need by itself (0-1), over all launches of the call."""
    groups = {"dram": ("dram_us",), "l2": ("l2_us",), "compute": ("mma_us",), "issue": ("issue_us", "spill_us"),
              "latency": ("latency_us", "launch_us")}
    return {
        resource: min(1.0, sum(terms[name] for terms in prediction.terms for name in names) / prediction.us)
        for resource, names in groups.items()
    }


def _keep(resident: dict[Any, float], touched: Mapping[Any, float], usable: float) -> None:
    """Least recently used: what this launch touched is newest; the oldest leave until the rest fits."""
    for number, size in touched.items():
        resident.pop(number, None)
        resident[number] = size
    while resident and sum(resident.values()) > usable:
        del resident[next(iter(resident))]


def _bound(terms: Sequence[Mapping[str, float]], device_us: float, host_us: float) -> str:
    if host_us > device_us or not terms:
        return "host"
    sums = {name: sum(t[name] for t in terms) for name in terms[0] if name != "total_us"}
    return max(sums, key=lambda name: sums[name]).removesuffix("_us")


def _refuse_bad(trace: Mapping[str, Any]) -> None:
    numbers = [trace.get("programs", 1), *trace.get("per_program", {}).values()]
    numbers += [v for t in trace.get("tensors", ()) for k, v in t.items() if k not in ("arg", "id")]
    if any(not isinstance(n, (int, float)) or not math.isfinite(n) or n < 0 for n in numbers):
        raise ValueError("a trace holds a number that is negative or not finite")
