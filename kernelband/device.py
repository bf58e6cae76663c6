"""Devices: the peaks of GPU kinds, the roofline, and what `--device` means.

Owns the table of peaks, the reading of device names and of a driver's GPU names. Never opens a GPU: detection asks the
driver's own tool, so that the process which calls it stays free of a CUDA context. Measures nothing; `overridden` takes
rates that somebody else measured.
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kernelband.errors import UserError, nearest

ACC16 = "float16_acc16"
"""Key of tensor_tflops: float16 products added up in float16. GeForce cards do that at twice the rate of `float16`, which
stands for sums in float32, the way of `tl.dot`."""


@dataclass(frozen=True)
class Peaks:
    """What one GPU of a kind can do at most. Dense rates without sparsity, at the boost clock.

    A GPU is what the driver shows as one device: of an MI250X that is one of its two dies.
    sms: streaming multiprocessors (AMD: compute units); dram_gbs, l2_gbs: GB/s (1e9 bytes); *_tflops: 1e12 operations a
    second; *_bytes: bytes; regs_per_sm: 32-bit registers; arch: 90 for sm_90, the LLVM name ("gfx942") for AMD; warp: lanes;
    launch_us: microseconds between the start of two dependent empty kernels. l2_gbs and launch_us stand in no datasheet:
    they are rounded microbenchmark figures for H200, H100 and A100 and estimates for all others, and nothing is refused
    because of them.
    """

    name: str
    sms: int
    clock_ghz: float
    dram_gbs: float
    l2_gbs: float
    l2_bytes: int
    fp32_tflops: float
    tensor_tflops: dict[str, float] = field(hash=False)
    smem_per_sm_bytes: int
    max_shared_bytes: int
    regs_per_sm: int
    max_warps_per_sm: int
    max_blocks_per_sm: int
    arch: int | str
    launch_us: float
    source: str
    warp: int = 32

    @property
    def backend(self) -> str:
        """Triton's name of the compiler backend: "cuda" or "hip"."""
        return "cuda" if isinstance(self.arch, int) else "hip"

    @property
    def capability(self) -> tuple[int, int]:
        """CUDA compute capability (major, minor). Raises UserError for a GPU that has none."""
        if not isinstance(self.arch, int):
            raise UserError(f"{self.name} ({self.arch}) is an AMD GPU and has no CUDA compute capability; choose a CUDA kind: "
                            f"{', '.join(modelled())}.")
        return divmod(self.arch, 10)


MIB = 2**20


def _tensor(half: float, tf32: float, fp32: float, int8: float, **more: float) -> dict[str, float]:
    return {"float16": half, "bfloat16": half, "tf32": tf32, "float32": fp32, "int8": int8, **more}


def _limits(arch: int | str, smem_kib: int, shared_kib: int, warps: int, blocks: int) -> dict[str, Any]:
    """What all GPUs of an architecture share: CUDA programming guide, "Technical specifications per compute capability"."""
    return {"arch": arch, "smem_per_sm_bytes": smem_kib << 10, "max_shared_bytes": shared_kib << 10, "regs_per_sm": 65536,
            "max_warps_per_sm": warps, "max_blocks_per_sm": blocks}


SM80, SM86, SM89 = _limits(80, 164, 163, 64, 32), _limits(86, 100, 99, 48, 16), _limits(89, 100, 99, 48, 24)
SM90, SM100, SM120 = _limits(90, 228, 227, 64, 32), _limits(100, 228, 227, 64, 32), _limits(120, 100, 99, 48, 24)
# AMD: 512 KiB of vector registers and 64 KiB of LDS a compute unit (AMD GPU specifications, ROCm documentation), 8 waves on
# each of 4 SIMDs.
CDNA: dict[str, Any] = {"smem_per_sm_bytes": 65536, "max_shared_bytes": 65536, "regs_per_sm": 131072, "max_warps_per_sm": 32,
                        "max_blocks_per_sm": 32, "warp": 64}

_H100 = Peaks("h100", 132, 1.98, 3350, 7000, 50 * MIB, 66.9, _tensor(989, 494, 66.9, 1979), launch_us=2.5, **SM90,
              source="NVIDIA H100 SXM datasheet (2023); H100 tuning guide, CUDA 12")
_A100 = Peaks("a100", 108, 1.41, 2039, 4500, 40 * MIB, 19.5, _tensor(312, 156, 19.5, 624), launch_us=3.0, **SM80,
              source="NVIDIA A100 80GB SXM datasheet (2021); Ampere tuning guide, CUDA 11")

KNOWN: dict[str, Peaks] = {
    p.name: p
    for p in (
        replace(_H100, name="h200", dram_gbs=4800, l2_bytes=60 * MIB,
                source="NVIDIA H200 datasheet (2024); H100 tuning guide, CUDA 12"),
        _H100,
        Peaks("h100-pcie", 114, 1.755, 2039, 5000, 50 * MIB, 51.2, _tensor(756, 378, 51.2, 1513), launch_us=2.5, **SM90,
              source="NVIDIA H100 PCIe datasheet (2023), rates halved from those with sparsity"),
        Peaks("h100-nvl", 132, 1.785, 3938, 6500, 50 * MIB, 60.3, _tensor(835, 418, 60.3, 1671), launch_us=2.5, **SM90,
              source="NVIDIA H100 NVL product brief (2024), rates halved from those with sparsity"),
        _A100,
        replace(_A100, name="a100-40gb", dram_gbs=1555, source="NVIDIA A100 40GB datasheet (2020); Ampere tuning guide, CUDA 11"),
        Peaks("a10", 72, 1.695, 600, 2000, 6 * MIB, 31.2, _tensor(125, 62.5, 31.2, 250), launch_us=3.0, **SM86,
              source="NVIDIA A10 datasheet (2021); L2 from the Ampere GA102 whitepaper"),
        Peaks("l4", 58, 2.04, 300, 1800, 48 * MIB, 30.3, _tensor(121, 60, 30.3, 242), launch_us=3.0, **SM89,
              source="NVIDIA L4 datasheet (2023), rates halved from those with sparsity; L2 from the Ada whitepaper 2.1"),
        Peaks("l40s", 142, 2.52, 864, 5500, 96 * MIB, 91.6, _tensor(366, 183, 91.6, 733), launch_us=3.0, **SM89,
              source="NVIDIA L40S datasheet (2023); 366 is half of its 733 with sparsity; L2 from the Ada whitepaper 2.1"),
        Peaks("rtx3090", 82, 1.695, 936, 2300, 6 * MIB, 35.6, _tensor(71, 35.6, 35.6, 285, **{ACC16: 142}), launch_us=3.0,
              **SM86, source="NVIDIA Ampere GA102 whitepaper 2.0 (2021), appendix A"),
        Peaks("rtx4090", 128, 2.52, 1008, 5000, 72 * MIB, 82.6, _tensor(165.2, 82.6, 82.6, 660.6, **{ACC16: 330.3}),
              launch_us=3.0, **SM89, source="NVIDIA Ada GPU architecture whitepaper 2.1 (2023), appendix A"),
        Peaks("rtx5090", 170, 2.407, 1792, 6500, 96 * MIB, 104.8, _tensor(209.5, 104.8, 104.8, 838, **{ACC16: 419}),
              launch_us=2.5, **SM120, source="NVIDIA RTX Blackwell GPU architecture whitepaper 1.1 (2025), appendix A"),
        Peaks("b200", 148, 1.965, 8000, 14000, 126 * MIB, 75, _tensor(2250, 1125, 75, 4500), launch_us=2.5, **SM100,
              source="NVIDIA DGX B200 and HGX B200 datasheets (2024), rates halved from those with sparsity; SMs and L2 as the "
                     "driver reports them"),
        Peaks("mi250x", 110, 1.7, 1638, 6900, 8 * MIB, 23.9, _tensor(191.5, 47.9, 47.9, 191.5), launch_us=5.0, arch="gfx90a",
              **CDNA, source="AMD Instinct MI250X data sheet (2021), one of two dies; AMD GPU specifications (ROCm). It has no "
                             "TF32: the rate is that of FP32 matrices"),
        Peaks("mi300x", 304, 2.1, 5325, 17200, 32 * MIB, 163.4, _tensor(1307.4, 653.7, 163.4, 2614.9), launch_us=5.0,
              arch="gfx942", **CDNA, source="AMD Instinct MI300X data sheet (2023); AMD GPU specifications (ROCm). Behind L2 is "
                                            "an Infinity Cache of 256 MiB, whose rate stands as that of L2"),
    )
}


def modelled() -> list[str]:
    """Kinds that `model:KIND` takes: those that candidates can be compiled for, which is CUDA's."""
    return [name for name, peaks in KNOWN.items() if peaks.backend == "cuda"]


def roofline_us(peaks: Peaks, bytes_moved: float, flops: float, dtype: str) -> float:
    """The least time in microseconds: max(bytes / DRAM bandwidth, flops / peak of the unit for dtype).

    The peak of float16 is the faster way of adding up, where there are two: an honest kernel may use it.
    Source: Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009.
    """
    rate = peaks.tensor_tflops.get(dtype, peaks.fp32_tflops)
    if dtype == "float16":
        rate = max(rate, peaks.tensor_tflops.get(ACC16, 0.0))
    return max(bytes_moved / (peaks.dram_gbs * 1e3), flops / (rate * 1e6))


@dataclass(frozen=True)
class Device:
    """Where candidates are judged. kind 'cuda' is measured; kind 'model' is modelled, and every number says so."""

    kind: str
    name: str

    @property
    def measured(self) -> bool:
        return self.kind == "cuda"

    @property
    def label(self) -> str:
        return self.name if self.measured else f"model:{self.name}"


def gpus() -> list[str]:
    """Names of the NVIDIA GPUs that the driver shows, in its order; empty without a driver."""
    tool = shutil.which("nvidia-smi")
    if not tool:
        return []
    try:
        done = subprocess.run([tool, "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True,
                              timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def parse(text: str | None) -> Device:
    """`cuda`, `model:KIND` or nothing (the GPU if there is one, else the modelled H200).

    Raises UserError for an unknown name, or when a GPU is asked for and there is none.
    """
    if text is None:
        found = gpus()
        return Device("cuda", found[0]) if found else Device("model", "h200")
    if text == "cuda":
        found = gpus()
        if not found:
            raise UserError("--device cuda: no GPU is visible here (nvidia-smi shows none). Use --device model:h200 "
                            "for a modelled search without a GPU, or run on a machine with an NVIDIA driver.")
        return Device("cuda", found[0])
    kind, _, name = text.partition(":")
    if kind == "model" and name in modelled():
        return Device("model", name)
    if kind == "model" and name in KNOWN:
        raise UserError(f"--device {text}: AMD GPUs ({KNOWN[name].arch}) can be neither modelled nor measured in this version, "
                        f"because candidates are compiled for CUDA only. Known: {', '.join(f'model:{n}' for n in modelled())}.")
    choices = ["cuda", *(f"model:{n}" for n in modelled())]
    raise UserError(f"unknown device {text!r}; {nearest(text, choices)}")


_OTHER = re.compile(r"ti|d|super|laptop|mobile|max|q|mig|grid|vgpu|\d+[abcq]")
"""Words that make another, usually smaller GPU of a known name: RTX 4090 D, RTX 3090 Ti, a MIG slice, a vGPU (A10-24Q)."""

_WORDS = {"h100-pcie": {"h100", "pcie"}, "h100-nvl": {"h100", "nvl"}, "a100-40gb": {"a100", "40gb"},
          "rtx3090": {"rtx", "3090"}, "rtx4090": {"rtx", "4090"}, "rtx5090": {"rtx", "5090"}}


def peaks_of(gpu_name: str) -> Peaks | None:
    """The peaks of the kind that a driver's GPU name means, else None: 'NVIDIA A100-SXM4-40GB' -> a100-40gb.

    Names are compared by whole words, so that an A10G is no A10 and a GH200 no H200; of two kinds that fit the one that
    says more about the name wins.
    """
    words = set(re.split(r"[\s/_-]+", gpu_name.lower()))
    if any(_OTHER.fullmatch(word) for word in words):
        return None
    fitting = [name for name in KNOWN if _WORDS.get(name, {name}) <= words]
    return KNOWN[max(fitting, key=lambda name: len(_WORDS.get(name, {name})))] if fitting else None


def overridden(peaks: Peaks, dram_gbs: float | None = None, tensor_tflops: Mapping[str, float] | None = None) -> Peaks:
    """A copy with rates measured on the GPU at hand: GB/s of a large copy, 1e12 operations a second of a matmul by dtype.

    What is not given stays as in the table; `source` says what was replaced. For headroom and shares of what this GPU
    reaches. Not for the test against physics: a copy is slower than the memory, and a kernel that only reads may beat it.
    Raises ValueError for a rate that is not a positive number or a dtype that the kind has no rate for.
    """
    given = {"DRAM copy": dram_gbs, **(tensor_tflops or {})}
    for what, rate in given.items():
        if rate is not None and not (math.isfinite(rate) and rate > 0):
            raise ValueError(f"{what}: {rate!r} is no rate; it must be a positive number.")
    unknown = set(tensor_tflops or {}) - set(peaks.tensor_tflops)
    if unknown:
        raise ValueError(f"{peaks.name} has no rate for {min(unknown)!r}; {nearest(min(unknown), peaks.tensor_tflops)}")
    told = [f"DRAM copy {dram_gbs:g} GB/s"] if dram_gbs is not None else []
    told += [f"{dtype} matmul {rate:g} TFLOPS" for dtype, rate in (tensor_tflops or {}).items()]
    if not told:
        return peaks
    return replace(peaks, dram_gbs=peaks.dram_gbs if dram_gbs is None else dram_gbs,
                   tensor_tflops={**peaks.tensor_tflops, **(tensor_tflops or {})},
                   source=f"measured on this GPU: {', '.join(told)}; the rest: {peaks.source}")
