"""Devices: the peaks of GPU kinds, the roofline, and what `--device` means.

Owns the table of peaks and the parsing of device names. Never opens a GPU: detection asks the driver's own tool, so
that the process which calls it stays free of a CUDA context.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field

from kernelband.errors import UserError, nearest


@dataclass(frozen=True)
class Peaks:
    """What one GPU of a kind can do at most. Dense rates without sparsity.

    dram_gbs, l2_gbs: GB/s (1e9 bytes); *_tflops: 1e12 operations a second; *_bytes: bytes; launch_us: microseconds
    between the start of two dependent empty kernels. l2_gbs and launch_us are microbenchmark figures (no datasheet
    gives them).
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
    arch: int
    launch_us: float
    source: str


def _tensor(half: float, tf32: float, fp32: float, int8: float) -> dict[str, float]:
    return {"float16": half, "bfloat16": half, "tf32": tf32, "float32": fp32, "int8": int8}


KNOWN: dict[str, Peaks] = {
    p.name: p
    for p in (
        Peaks("h200", 132, 1.98, 4800, 7000, 60 * 2**20, 66.9, _tensor(989, 494, 66.9, 1979), 233472, 232448, 65536,
              64, 32, 90, 2.5, "NVIDIA H200 datasheet (2024); H100 tuning guide, CUDA 12"),
        Peaks("h100", 132, 1.98, 3350, 7000, 50 * 2**20, 66.9, _tensor(989, 494, 66.9, 1979), 233472, 232448, 65536,
              64, 32, 90, 2.5, "NVIDIA H100 SXM datasheet (2023); H100 tuning guide, CUDA 12"),
        Peaks("a100", 108, 1.41, 2039, 4500, 40 * 2**20, 19.5, _tensor(312, 156, 19.5, 624), 167936, 166912, 65536,
              64, 32, 80, 3.0, "NVIDIA A100 80GB SXM datasheet (2021); Ampere tuning guide, CUDA 11"),
    )
}


def roofline_us(peaks: Peaks, bytes_moved: float, flops: float, dtype: str) -> float:
    """The least time in microseconds: max(bytes / DRAM bandwidth, flops / peak of the unit for dtype).

    Source: Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009.
    """
    rate = peaks.tensor_tflops.get(dtype, peaks.fp32_tflops)
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
    if kind == "model" and name in KNOWN:
        return Device("model", name)
    choices = ["cuda", *(f"model:{n}" for n in KNOWN)]
    raise UserError(f"unknown device {text!r}; {nearest(text, choices)}")


def peaks_of(gpu_name: str) -> Peaks | None:
    """The peaks whose kind is named in a driver's GPU name as a whole word ('NVIDIA H200' -> h200), else None."""
    words = gpu_name.lower().replace("-", " ").split()
    return next((p for name, p in KNOWN.items() if name in words), None)
