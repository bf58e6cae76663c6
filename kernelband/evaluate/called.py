"""One call of a candidate in the interpreter's child: inputs and results cross as bytes in memory files of their own.

Trusted side. The child writes results; what they are worth is judged here.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kernelband.evaluate import verify
from kernelband.evaluate.compare import Verdict
from kernelband.evaluate.specs import describe, extent
from kernelband.evaluate.verify import Truth
from kernelband.evaluate.zygote import Child
from kernelband.task import Task

POISONS = (math.nan, 7.25, -3.0e4)
"""What results hold before a call, in turn."""


@dataclass(frozen=True)
class Called:
    """What came of one call. written: every output had the expected form. changed, beyond: names of arguments that were written
    to, or beside which was written ('' for what the candidate allocated)."""

    verdict: Verdict
    outputs: list[torch.Tensor]
    written: bool
    changed: list[str]
    beyond: list[str]


def call(child: Child, task: Task, right: Truth, slot: str, poison: float, timeout_s: float) -> Called:
    """Call the entry point on the inputs of `right` in the child's tensors of that slot, and judge the bytes that it left.

    Raises CandidateError and ChildDied, as Child.request does.
    """
    args, size = describe(right.inputs)
    outputs, offset = [], 0
    for spec, honest in zip(verify.output_specs(task, right), right.honest, strict=True):
        outputs.append({**spec, "offset": offset})
        offset += -(-max(1, honest.numel() * honest.element_size()) // 256) * 256
    with _memfd("in", max(1, size)) as arena, _memfd("out", max(1, offset)) as results:
        for spec in args:
            if spec["kind"] == "tensor":
                os.pwrite(arena, _bytes_of(right.inputs[spec["name"]]), spec["offset"])
        os.pwrite(results, os.urandom(min(offset, 1 << 20)) if offset else b"", 0)
        reply = child.request("check", timeout_s=timeout_s, fds=(arena, results), args=args, outputs=outputs, slot=slot,
                              poison=poison if math.isfinite(poison) else "nan")
        got = [_read(results, spec["offset"], honest) for spec, honest in zip(outputs, right.honest, strict=True)]
    told = reply.get("outputs")
    said = told if isinstance(told, list) else []
    written = len(said) >= len(outputs) and all(isinstance(s, dict) and s.get("written") is True for s in said[:len(outputs)])
    changed = [n for n in _names(reply, "inputs_changed") if n not in task.contract.mutates]
    return Called(verify.judge(right, got, said, task.contract), got, written, changed, _names(reply, "out_of_bounds"))


def _names(reply: dict[str, Any], key: str) -> list[str]:
    said = reply.get(key)
    return [n for n in said if isinstance(n, str)] if isinstance(said, list) else []


@contextlib.contextmanager
def _memfd(name: str, size: int) -> Iterator[int]:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        yield fd
    finally:
        os.close(fd)


def _bytes_of(value: torch.Tensor) -> bytes:
    size = extent(value)
    flat = value.as_strided((size // value.element_size(),), (1,)) if size else value.reshape(-1)
    return flat.contiguous().view(torch.uint8).numpy().tobytes()


def _read(fd: int, offset: int, like: torch.Tensor) -> torch.Tensor:
    raw = bytearray(os.pread(fd, like.numel() * like.element_size(), offset))
    if len(raw) != like.numel() * like.element_size():
        return torch.full_like(like, float("nan")) if like.is_floating_point() else torch.zeros_like(like)
    return torch.frombuffer(raw, dtype=like.dtype).reshape(like.shape) if raw else torch.empty_like(like)
