"""A case on the GPU, ready to be called: shared inputs in several slots, blank outputs, and what is right for each.

Trusted side. Owns buffers and oracle results of one case; knows how to release one slice of calls to a child and to
check what came back. It keeps the clock (`time.perf_counter_ns` of this process).
"""

from __future__ import annotations

import math
import secrets
import time
from typing import Any

import torch

from kernelband.evaluate import verify
from kernelband.evaluate.measure import Slice, calls_for
from kernelband.evaluate.specs import describe
from kernelband.evaluate.transport import Outputs, Slot
from kernelband.evaluate.verify import Truth, Verdict
from kernelband.task import Case, Task

SAMPLE = 1 << 20
"""Elements of an output that are compared inside the clock; everything is compared outside of it."""

POISONS = (float("nan"), 7.25, -3.0e4)


class Wrong(Exception):
    """A checked call did not give the right result. `verdict` says how."""

    def __init__(self, verdict: Verdict):
        super().__init__(verdict.detail)
        self.verdict = verdict


class Bench:
    """Buffers for one case.

    slots: how many sets of inputs are used in turn, so that together they do not fit in the L2 cache.
    """

    def __init__(self, task: Task, case: Case, slots: int, timeout_s: float):
        self.task, self.case, self.timeout_s = task, case, timeout_s
        self.once = bool(task.contract.mutates)
        drawn = self._draw("drawn")
        self.slots = {f"{case.name}/{i}": Slot(drawn) for i in range(slots)}
        self.truths: dict[str, Truth] = {}
        self.limits: dict[str, list[float]] = {}
        right = verify.truth(task, case, drawn)
        self.outputs = Outputs(verify.output_specs(task, right), right.honest)
        self.out_name = f"{case.name}/out"
        self.calls = slots
        self.overhead_us = 0.0

    @staticmethod
    def slots_for(task: Task, case: Case, l2_bytes: int) -> int:
        """Enough slots that inputs and outputs of all of them are three times the L2 cache; between 2 and 64."""
        generator = torch.Generator(device="cuda")
        size = describe(task.inputs(case, generator))[1]
        if task.contract.mutates:
            return 32
        return max(2, min(64, math.ceil(3 * l2_bytes / max(1, size))))

    def _draw(self, family: str) -> dict[str, Any]:
        return verify.draw(self.task, self.case, secrets.randbits(62), family, "cuda")

    def bindings(self) -> dict[str, Any]:
        """What a child needs to open the buffers (payload of `bind`)."""
        return {"slots": {n: s.specs for n, s in self.slots.items()}, "outputs": {self.out_name: self.outputs.specs}}

    def refill(self, family: str = "drawn") -> None:
        """Fresh secret inputs in every slot, at the same addresses, and what is right for them."""
        for name, slot in self.slots.items():
            inputs = self._draw(family)
            slot.fill(inputs)
            self.truths[name] = verify.truth(self.task, self.case, inputs)
            self.limits[name] = self._limits(self.truths[name])
        torch.cuda.synchronize()

    def restore(self) -> None:
        """Undo what calls may do to mutated arguments."""
        for name, slot in self.slots.items():
            slot.fill(self.truths[name].inputs)
        torch.cuda.synchronize()

    def check(self, child: Any, slot: str, poison: int = 0) -> Verdict:
        """One call, everything compared: result, and that inputs were left alone."""
        self.outputs.poison(POISONS[poison % len(POISONS)])
        torch.cuda.synchronize()
        reply = child.request("call", timeout_s=self.timeout_s, slot=slot, output=self.out_name)
        right = self.truths[slot]
        verdict = verify.judge(right, self.outputs.tensors, _said(reply), self.task.contract)
        changed = self.slots[slot].altered(right.inputs, self.task.contract.mutates)
        if changed:
            return Verdict(False, "tampered", f"the call changed its input {changed[0]!r}, which the contract does not "
                                              f"allow", math.inf)
        return verdict

    def _limits(self, right: Truth) -> list[float]:
        """Per output, the largest error of one element that a sample may show; infinite where none is defined."""
        limits = []
        for out, exact, honest in zip(self.task.contract.outputs, right.exact, right.honest, strict=True):
            if out.compare in ("predicate", "permutation") or not honest.is_floating_point() or not honest.numel():
                limits.append(0.0 if out.compare == "exact" or not honest.is_floating_point() else math.inf)
                continue
            tolerance = self.task.contract.tolerance
            gap = torch.nan_to_num(honest.double() - exact, posinf=0.0, neginf=0.0).abs().max()
            ulp = torch.nan_to_num(exact, posinf=0.0, neginf=0.0).abs().max() * torch.finfo(honest.dtype).eps
            limits.append(float(tolerance.max_ratio * gap + 2 * tolerance.floor_ulp * ulp))
        return limits

    def _sampled_right(self, slot: str, reply: dict[str, Any], at: float) -> bool:
        """Whether a stretch of every output, beginning at the share `at` of what is possible, is right. Inside the clock:
        as few operations as can be."""
        if not all(isinstance(s, dict) and s.get("written") is True for s in _said(reply)):
            return False
        right = self.truths[slot]
        for limit, exact, honest, got in zip(self.limits[slot], right.exact, right.honest, self.outputs.tensors, strict=True):
            if limit == math.inf:
                continue
            begin = int(at * max(1, got.numel() - SAMPLE + 1))
            part, near = (t.reshape(-1)[begin:begin + SAMPLE] for t in (got, honest))
            if limit == 0.0:
                if not torch.equal(part, near):
                    return False
                continue
            wanted = exact.reshape(-1)[begin:begin + SAMPLE]
            # A non-finite element that is right compares by class with the honest run; NaN <= x is false.
            fine = (part - wanted).abs() <= limit
            if not bool(fine.all()) and not bool((fine | ~torch.isfinite(near)).all()):
                return False
        return True

    def slice(self, child: Any, calls: int | None = None, warm: bool = True) -> Slice:
        """One slice by this process's clock: from release to a checked sample of a slot chosen after the calls.

        Raises Wrong when the sample is not right.
        """
        names = list(self.slots)
        if self.once:
            self.restore()
        elif warm:
            child.request("slice", timeout_s=self.timeout_s, slots=names, calls=min(3, len(names)))
        count = self.calls if calls is None else calls
        slot, at = names[secrets.randbelow(min(len(names), max(1, count)))], secrets.randbelow(1 << 20) / (1 << 20)
        begin = time.perf_counter_ns()
        said = child.request("slice", timeout_s=self.timeout_s, slots=names, calls=count)
        reply = child.request("deliver", timeout_s=self.timeout_s, slot=slot, output=self.out_name)
        right = self._sampled_right(slot, reply, at)
        wall = (time.perf_counter_ns() - begin) / 1e3
        if not right:
            verdict = verify.judge(self.truths[slot], self.outputs.tensors, _said(reply), self.task.contract)
            raise Wrong(verdict if not verdict.ok else Verdict(False, "wrong", "a timed call gave a wrong result"))
        event = said.get("event_us")
        event = float(event) if isinstance(event, (int, float)) and math.isfinite(event) and event >= 0 else math.inf
        per = max(0.05, (wall - self.overhead_us) / max(1, count))
        return Slice(per, event / max(1, count))

    def chained(self, child: Any, calls: int) -> list[float]:
        """Wall microseconds of single calls on slots in random order, each released and checked on its own."""
        walls = []
        names = list(self.slots)
        for i in range(calls):
            slot = names[secrets.randbelow(len(names))]
            if self.once:
                self.restore()
            at = secrets.randbelow(1 << 20) / (1 << 20)
            begin = time.perf_counter_ns()
            reply = child.request("call", timeout_s=self.timeout_s, slot=slot, output=self.out_name)
            right = self._sampled_right(slot, reply, at)
            if i:  # the first one warms up
                walls.append((time.perf_counter_ns() - begin) / 1e3)
            if not right:
                raise Wrong(Verdict(False, "wrong", "a single checked call gave a wrong result"))
        return walls

    def calibrate(self, baseline: Any) -> float:
        """Fix the calls in a slice and the cost of a hand-over from the baseline; returns its microseconds a call."""
        self.overhead_us, self.calls = 0.0, len(self.slots)
        few = len(self.slots)
        for _ in range(1 if self.once else 3):  # the first estimate holds the hand-over, the next ones hardly any of it
            us = min(self.slice(baseline).us for _ in range(2))
            self.calls = calls_for(us, few, self.once)
        if self.calls > 4 * few:
            # Slices of two lengths give the part that does not grow with the calls.
            short = sorted(self.slice(baseline, few).us * few for _ in range(9))[4]
            long = sorted(self.slice(baseline).us * self.calls for _ in range(5))[2]
            self.overhead_us = max(0.0, short - few * (long - short) / (self.calls - few))
        return sorted(self.slice(baseline).us for _ in range(3))[1]

    def close(self) -> None:
        for slot in self.slots.values():
            slot.close()
        self.outputs.close()


def _said(reply: dict[str, Any]) -> list[Any]:
    said = reply.get("outputs")
    return said if isinstance(said, list) else []
