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
from kernelband.evaluate.transport import Outputs, Shared, Slot
from kernelband.evaluate.verify import Truth, Verdict
from kernelband.task import Case, Task

SAMPLE = 1 << 20
"""Elements of an output that are compared inside the clock; everything is compared outside of it."""

POISONS = (float("nan"), 7.25, -3.0e4)
DEVICE = "cuda"
MUTATED_SLOTS = 32
MEMORY_SHARE = 0.15
"""Of the free memory, at most this much for the slots of one case with what is right for them."""


class Wrong(Exception):
    """A checked call did not give the right result. `verdict` says how."""

    def __init__(self, verdict: Verdict):
        super().__init__(verdict.detail)
        self.verdict = verdict


class Bench:
    """Buffers for one case.

    slots: how many sets of inputs are used in turn; None for so many that inputs and outputs of all of them are three times
    the L2 cache (`l2_bytes`), within MEMORY_SHARE of `free_bytes`. An argument that the contract calls constant is drawn
    once and shared by all slots.
    """

    def __init__(self, task: Task, case: Case, slots: int | None, timeout_s: float, l2_bytes: int = 0, free_bytes: int = 0):
        self.task, self.case, self.timeout_s = task, case, timeout_s
        self.once = bool(task.contract.mutates)
        drawn = self._draw("drawn")
        right = verify.truth(task, case, drawn)
        if slots is None:
            slots = _slots(self.once, describe(drawn)[1], right.honest, l2_bytes, free_bytes)
        self.constant = {n: drawn[n] for n in task.contract.constant if isinstance(drawn.get(n), torch.Tensor)}
        self._constants = {n: Shared(v) for n, v in self.constant.items()}
        for name, shared in self._constants.items():
            shared.tensor.copy_(self.constant[name])
        self.slots = {f"{case.name}/{i}": Slot(drawn, self._constants) for i in range(slots)}
        self.truths: dict[str, Truth] = {}
        self.limits: dict[str, list[float]] = {}
        self.outputs = Outputs(verify.output_specs(task, right), right.honest)
        self.out_name = f"{case.name}/out"
        self.calls = slots
        self.overhead_us = 0.0

    def _draw(self, family: str) -> dict[str, Any]:
        return verify.draw(self.task, self.case, secrets.randbits(62), family, DEVICE)

    def bindings(self) -> dict[str, Any]:
        """What a child needs to open the buffers (payload of `bind`)."""
        return {"slots": {n: s.specs for n, s in self.slots.items()}, "outputs": {self.out_name: self.outputs.specs}}

    def refill(self, family: str = "drawn") -> None:
        """Fresh secret inputs in every slot, at the same addresses, and what is right for them."""
        for name, slot in self.slots.items():
            inputs = {**self._draw(family), **self.constant}
            slot.fill(inputs)
            self.truths[name] = verify.truth(self.task, self.case, inputs)
            self.limits[name] = self._limits(self.truths[name])
        _wait()

    def restore(self) -> None:
        """Undo what calls may do to mutated arguments."""
        for name, slot in self.slots.items():
            slot.fill(self.truths[name].inputs)
        _wait()

    def rotate(self) -> None:
        """Give every slot the contents of the next one: an address that was seen before holds other data now."""
        names = list(self.slots)
        for table in (self.truths, self.limits):
            moved = [table[n] for n in (*names[1:], names[0])]  # type: ignore[index]
            table.update(zip(names, moved, strict=True))  # type: ignore[arg-type]
        self.restore()

    def altered(self) -> str | None:
        """The first input, of any slot, that no longer holds what the trusted side wrote."""
        for name, slot in self.slots.items():
            changed = slot.altered(self.truths[name].inputs, self.task.contract.mutates)
            if changed:
                return changed[0]
        return None

    def check(self, child: Any, slot: str, poison: int = 0) -> Verdict:
        """One call, everything compared: result, and that inputs were left alone."""
        self.outputs.poison(POISONS[poison % len(POISONS)])
        _wait()
        reply = child.request("call", timeout_s=self.timeout_s, slot=slot, output=self.out_name)
        right = self.truths[slot]
        verdict = verify.judge(right, self.outputs.tensors, _said(reply), self.task.contract)
        changed = self.slots[slot].altered(right.inputs, self.task.contract.mutates)
        if changed:
            return Verdict(False, "tampered", f"the call changed its input {changed[0]!r}, which the contract does not "
                                              f"allow", math.inf)
        return verdict

    def _limits(self, right: Truth) -> list[float]:
        """Per output, the largest error of one element that a sample may show: 0 asks for equality; infinite: not sampled."""
        limits = []
        for out, exact, honest in zip(self.task.contract.outputs, right.exact, right.honest, strict=True):
            if out.compare in ("predicate", "permutation"):
                limits.append(math.inf)
                continue
            if out.compare == "exact" or not honest.is_floating_point() or not honest.numel():
                limits.append(0.0)
                continue
            tolerance = self.task.contract.tolerance
            gap = torch.nan_to_num(honest.double() - exact, posinf=0.0, neginf=0.0).abs().max()
            floor = torch.nan_to_num(exact, posinf=0.0, neginf=0.0).abs().max() * verify.floor_of(honest.dtype, tolerance)
            limits.append(float(tolerance.max_ratio * gap + 2 * floor))
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
                if bool(verify.differs(near, part).any()):
                    return False
                continue
            wanted = exact.reshape(-1)[begin:begin + SAMPLE]
            # NaN <= x is false, so poison and stray NaNs fail; what has no finite truth in the dtype is left to the full check.
            fine = (part - wanted).abs() <= limit
            if not bool(fine.all()) and not bool((fine | ~torch.isfinite(wanted.to(part.dtype))).all()):
                return False
        return True

    def slice(self, child: Any, calls: int | None = None) -> Slice:
        """One slice by this process's clock: from release to a checked sample of a slot chosen before, unknown to the child.

        Outside of the clock: contents move to other addresses, a few calls warm up, outputs are poisoned.
        Raises Wrong when the sample is not right.
        """
        names = list(self.slots)
        self.rotate()
        # One call more than there are slots: then the child's allocator holds every buffer that the slice will need.
        child.request("slice", timeout_s=self.timeout_s, slots=names, calls=min(4, len(names) + 1))
        if self.once:
            self.restore()
        self.outputs.poison(POISONS[secrets.randbelow(len(POISONS))])
        _wait()
        count = self.calls if calls is None else calls
        slot, at = names[secrets.randbelow(min(len(names), max(1, count)))], secrets.randbelow(1 << 20) / (1 << 20)
        begin = time.perf_counter_ns()
        said = child.request("slice", timeout_s=self.timeout_s, slots=names, calls=count)
        reply = child.request("deliver", timeout_s=self.timeout_s, slot=slot, output=self.out_name)
        right = self._sampled_right(slot, reply, at)
        wall = (time.perf_counter_ns() - begin) / 1e3
        if not right or math.inf in self.limits[slot]:
            verdict = verify.judge(self.truths[slot], self.outputs.tensors, _said(reply), self.task.contract)
            if not verdict.ok or not right:
                raise Wrong(verdict if not verdict.ok else Verdict(False, "wrong", "a timed call gave a wrong result"))
        event = said.get("event_us")
        event = float(event) if isinstance(event, (int, float)) and math.isfinite(event) and event >= 0 else math.inf
        per = max(0.05, (wall - self.overhead_us) / max(1, count))
        return Slice(per, event / max(1, count))

    def short(self, child: Any, times: int) -> list[float]:
        """Wall microseconds of slices in which every slot is used once, so that no call's result goes unkept."""
        count = len(self.slots)
        return [self.slice(child, count).us * count for _ in range(times)]

    def calibrate(self, baseline: Any) -> float:
        """Fix the calls in a slice and the cost of a hand-over from the baseline; returns its microseconds a call."""
        self.overhead_us, self.calls = 0.0, len(self.slots)
        few = max(1, len(self.slots) // 8) if self.once else len(self.slots)
        for _ in range(1 if self.once else 3):  # the first estimate holds the hand-over, the next ones hardly any of it
            us = min(self.slice(baseline).us for _ in range(2))
            self.calls = calls_for(us, len(self.slots), self.once)
        if self.calls >= 4 * few:
            # Slices of two lengths give the part that does not grow with the calls.
            short = sorted(self.slice(baseline, few).us * few for _ in range(9))[4]
            long = sorted(self.slice(baseline).us * self.calls for _ in range(5))[2]
            self.overhead_us = max(0.0, short - few * (long - short) / (self.calls - few))
        return sorted(self.slice(baseline).us for _ in range(3))[1]

    def done(self, child: Any) -> None:
        """Have a child give back the memory of the results that it kept."""
        child.request("drop", timeout_s=self.timeout_s)

    def close(self) -> None:
        for slot in self.slots.values():
            slot.close()
        for shared in self._constants.values():
            shared.close()
        self.outputs.close()


def _slots(once: bool, input_bytes: int, honest: list[torch.Tensor], l2_bytes: int, free_bytes: int) -> int:
    results = sum(h.numel() * h.element_size() for h in honest)
    kept = input_bytes + sum(h.numel() * (h.element_size() + 8) for h in honest)  # copies, honest run and fp64 truth
    room = int(MEMORY_SHARE * free_bytes / max(1, kept + input_bytes + results))
    wanted = MUTATED_SLOTS if once else min(64, math.ceil(3 * l2_bytes / max(1, input_bytes + results)))
    return max(2, min(wanted, room))


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _said(reply: dict[str, Any]) -> list[Any]:
    said = reply.get("outputs")
    return said if isinstance(said, list) else []
