"""Judging without a GPU: correctness in Triton's interpreter, latency by the modelled device.

Trusted side of a machine without a GPU. Check cases run in a disposable child; their bytes are judged here. Timed cases
are not run: a few programs of each launch are traced, and the model turns counts and compiled facts into
microseconds. Every number from here is modelled.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kernelband.device import Peaks, roofline_us
from kernelband.evaluate import model, verify
from kernelband.evaluate.judgement import Judgement, Refused, refusal
from kernelband.evaluate.specs import describe, extent, shapes_only
from kernelband.evaluate.zygote import CandidateError, ChildDied, SandboxError, Zygote
from kernelband.task import Case, Task


class ModelledJudge:
    """Judges candidates of one task on a modelled device. Owns one interpreter zygote."""

    def __init__(self, task: Task, peaks: Peaks, *, timeout_s: float = 60.0, hide: Sequence[str] = (),
                 warn: Callable[[str], None] = lambda text: None):
        self.task, self.peaks, self.timeout_s = task, peaks, timeout_s
        self.zygote = Zygote("interpret", warn=warn, hide=hide)
        self.specs = {c.name: shapes_only(task, c) for c in task.with_role("timed")}
        self.properties = {"multi_processor_count": peaks.sms, "name": peaks.name, "major": peaks.arch // 10,
                           "minor": peaks.arch % 10, "shared_memory_per_block_optin": peaks.max_shared_bytes}

    def judge(self, source: str, facts: Mapping[str, Sequence[Any]], held_out: bool = False) -> Judgement:
        """Verdict over check cases (and held-out ones), then predicted microseconds of each timed case.

        facts: compiled launches by timed case name. log_speedup is left at 0: the caller knows the baseline.
        """
        judgement = Judgement("measured", level="modelled")
        started = time.monotonic()
        try:
            child = self.zygote.spawn()
        except (ChildDied, SandboxError) as err:
            return Judgement("infra", f"no child could be started: {err}")
        try:
            child.request("prepare", timeout_s=self.timeout_s, properties=self.properties)
            child.request("load", timeout_s=self.timeout_s, source=source, entry=self.task.entry)
            roles = ("check", "held_out") if held_out else ("check",)
            cases = self.task.with_role(*roles)  # type: ignore[arg-type]
            for i, case in enumerate(cases):
                for family in verify.families_for(self.task.contract, i, len(cases)):
                    self._check(child, judgement, case, family, i)
            judgement.costs["verify"] = time.monotonic() - started
            for name, launches in facts.items():
                if name in self.specs:
                    self._time(child, judgement, name, launches)
            judgement.costs["model"] = time.monotonic() - started - judgement.costs["verify"]
        except Refused as no:
            return no.judgement(judgement.checks)
        except (CandidateError, ChildDied) as err:
            return refusal(err).judgement(judgement.checks)
        finally:
            child.kill()
        return judgement

    def _check(self, child: Any, judgement: Judgement, case: Case, family: str, index: int) -> None:
        inputs = verify.draw(self.task, case, secrets.randbits(62), family, "cpu")
        right = verify.truth(self.task, case, inputs)
        args, size = describe(inputs)
        outputs, offset = [], 0
        for spec, honest in zip(verify.output_specs(self.task, right), right.honest, strict=True):
            outputs.append({**spec, "offset": offset})
            offset += -(-max(1, honest.numel() * honest.element_size()) // 256) * 256
        with _memfd("in", max(1, size)) as arena, _memfd("out", max(1, offset)) as results:
            for spec in args:
                if spec["kind"] == "tensor":
                    os.pwrite(arena, _bytes_of(inputs[spec["name"]]), spec["offset"])
            poison = (float("nan"), 7.25, -3.0e4)[index % 3]
            os.pwrite(results, os.urandom(min(offset, 1 << 20)) if offset else b"", 0)
            reply = child.request("check", timeout_s=self.timeout_s, fds=(arena, results), args=args, outputs=outputs,
                                  poison=poison if math.isfinite(poison) else "nan")
            got = [_read(results, spec["offset"], honest)
                   for spec, honest in zip(outputs, right.honest, strict=True)]
            said = reply.get("outputs")
            allowed = self.task.contract.mutates
            changed = [n for n in _names(reply, "inputs_changed") if n not in allowed]
            beyond = _names(reply, "out_of_bounds")
        verdict = verify.judge(right, got, said if isinstance(said, list) else [], self.task.contract)
        judgement.checks[f"{case.name}/{family}"] = "pass" if verdict.ok else verdict.kind
        where = "a held-out case" if case.role == "held_out" else case.name
        if beyond:
            raise Refused("unsafe_memory", f"{where}: wrote outside of argument {beyond[0]!r}", "guard")
        if not verdict.ok:
            raise Refused(verdict.kind, f"{where} ({family} inputs): {verdict.detail}",
                          "values" if family == "drawn" else "families")
        if changed:
            raise Refused("tampered", f"{where}: the call changed its input {changed[0]!r}, which the contract does "
                                      f"not allow", "inputs")

    def _time(self, child: Any, judgement: Judgement, name: str, launches: Sequence[Any]) -> None:
        if not launches:
            raise Refused("not_a_kernel", f"{name}: no kernel of its own was launched", "what_ran")
        reply = child.request("trace", timeout_s=self.timeout_s, args=self.specs[name].args, max_programs=8)
        try:
            said = model.predict(self.peaks, model.pair(reply["launches"], [f.to_json() for f in launches]))
        except (AttributeError, KeyError, TypeError, ValueError) as err:
            raise Refused("infra", f"{name}: the trace and the compiled launches do not fit together: {err}",
                          "process") from None
        self._believable(name, said.us)
        judgement.times[name] = (said.us, said.low, said.high, 1)
        for resource, share in model.load(said).items():
            judgement.load[resource] = judgement.load.get(resource, 0.0) + share / len(self.specs)

    def _believable(self, name: str, us: float) -> None:
        """A candidate that does less under the tracer than the task needs has found the tracer, not a gain."""
        case = next(c for c in self.task.cases if c.name == name)
        if self.task.work is not None:
            floor = roofline_us(self.peaks, *self.task.work(case), case.dtype)
            if us < 0.9 * floor:
                raise Refused("faster_than_physics", f"{name}: {us:.1f} us is less than the {floor:.1f} us that the least "
                                                     f"work takes at the peaks of {self.peaks.name}", "physics")

    def close(self) -> None:
        self.zygote.close()


def _names(reply: dict[str, Any], key: str) -> list[str]:
    said = reply.get(key)
    return [n for n in said if isinstance(n, str)] if isinstance(said, list) else []


@contextlib.contextmanager
def _memfd(name: str, size: int):
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
