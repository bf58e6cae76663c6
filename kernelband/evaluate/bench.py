"""A case on the GPU, ready to be called: shared inputs in several slots, blank outputs, and what is right for each.

Trusted side. Owns buffers and oracle results of one case; knows how to release one slice of calls to a child and to
check what came back. It keeps the clock (`time.perf_counter_ns` of this process).
"""

from __future__ import annotations

import contextlib
import math
import random
import secrets
import statistics
import time
import weakref
from collections.abc import Collection, Iterator
from dataclasses import astuple
from typing import Any

import torch

from kernelband.evaluate import sample, verify
from kernelband.evaluate.compare import Verdict
from kernelband.evaluate.layouts import arranged_inputs
from kernelband.evaluate.measure import Slice, calls_for
from kernelband.evaluate.specs import describe
from kernelband.evaluate.transport import Change, Guarded, Inputs, Outputs, Shared, Slot, changes
from kernelband.evaluate.verify import Truth
from kernelband.task import Case, Task

WARM_UP = 4
"""Calls before the clock starts, once a child has its buffers."""

FOOTPRINT = 2 << 30
"""Bytes that the slots of one case touch together, at most (but for two slots): many more are as many pages that no cache of
addresses holds, which no user's loop would see."""

DOUBT = 0.2
"""Share of the cost of a hand-over by which one may be cheaper than those that it was measured from."""

LOOKED_AT = 3
"""Slots whose results are compared in a slice that is delivered whole."""

POISONS = (float("nan"), 7.25, -3.0e4, None)
DEVICE = "cuda"
MUTATED_SLOTS = 32

SHORTEST_US, MOST_REPEATS = 10_000.0, 5
"""Slices of a call that changes its arguments are as short as there are slots; the median of several of them stands for one, so
many that they come to SHORTEST_US together."""

MEMORY_SHARE = 0.15
"""Of the free memory, at most this much for the slots of one case with what is right for them."""


class Wrong(Exception):
    """A checked call did not give the right result. `verdict` says how, `layer` what noticed."""

    def __init__(self, verdict: Verdict, layer: str):
        super().__init__(verdict.detail)
        self.verdict, self.layer = verdict, layer


class Bench:
    """Buffers for one case.

    slots: how many sets of inputs are used in turn; None for so many that inputs and outputs of all of them are three times
    the L2 cache (`l2_bytes`), within MEMORY_SHARE of `free_bytes`. An argument that the contract calls constant is drawn
    once and shared by all slots. guard: None for plain buffers, else whether guarded ones lie at the end of their mappings.
    off: layers (judgement.LAYERS) that are left out. layout: how floating inputs lie in memory; `name` tells it.

    Contents of a slot are its drawn inputs with a Change that is new in every slice (floating tensors only), so that no
    contents come twice, by address or by value. What is right for them is worked out when it is asked for.
    """

    def __init__(self, task: Task, case: Case, slots: int | None, timeout_s: float, l2_bytes: int = 0, free_bytes: int = 0,
                 guard: bool | None = None, off: Collection[str] = (), layout: str = "contiguous"):
        self.task, self.case, self.timeout_s, self.off, self.layout = task, case, timeout_s, off, layout
        self.name = case.name if layout == "contiguous" else f"{case.name}/{layout}"
        self.once = bool(task.contract.mutates)
        drawn = self._draw("drawn")
        right = verify.truth(task, case, drawn)
        if slots is None:
            slots = _slots(self.once, describe(drawn)[1], right.honest, l2_bytes, free_bytes)
        self.constant = {n: drawn[n] for n in task.contract.constant if isinstance(drawn.get(n), torch.Tensor)}
        self._constants = {n: Shared(v) for n, v in self.constant.items()}
        for name, shared in self._constants.items():
            shared.tensor.copy_(self.constant[name])
        own = [v for n, v in drawn.items() if isinstance(v, torch.Tensor) and n not in self.constant]
        self._inputs = Inputs(own, slots) if guard is None and own else None
        share = self._inputs.share if self._inputs else lambda tensor: Guarded(tensor, bool(guard))
        self.slots = {f"{self.name}/{i}": Slot(drawn, self._constants, share) for i in range(slots)}
        self.drawn: dict[str, dict[str, Any]] = dict.fromkeys(self.slots, drawn)
        self.changes: dict[str, Change | None] = dict.fromkeys(self.slots)
        self._truths: dict[str, Truth] = {}
        self.limits: dict[str, list[float]] = {}
        self.outputs = Outputs(verify.output_specs(task, right), right.honest)
        self.out_name = f"{self.name}/out"
        self.calls = slots
        self.overhead_us = 0.0
        self.repeats = 1
        self.seconds = 0.0
        """Seconds of slices (hand-over taken off), their warm-up and the oracle on a timed case, by this process's clock, since
        somebody set it to 0."""
        self._read: list[torch.Tensor] | None = None
        self._warm: weakref.WeakSet[Any] = weakref.WeakSet()

    def _draw(self, family: str) -> dict[str, Any]:
        drawn = verify.draw(self.task, self.case, secrets.randbits(62), family, DEVICE)
        return drawn if self.layout == "contiguous" else arranged_inputs(drawn, self.layout)

    @property
    def result_bytes(self) -> int:
        """Bytes of the results that a child keeps in one slice."""
        return len(self.slots) * sum(t.numel() * t.element_size() for t in self.outputs.tensors)

    def bind(self, child: Any) -> None:
        """Open the buffers in a child."""
        outputs: dict[str, Any] = {self.out_name: self.outputs.specs}
        for name, slot in self.slots.items():
            child.request("bind", timeout_s=self.timeout_s, fds=slot.descriptors, slots={name: slot.specs}, outputs=outputs)
            outputs = {}

    # -- contents -----------------------------------------------------------------------------------------------

    def fill(self, name: str, family: str = "drawn") -> None:
        """Fresh secret inputs in one slot, at the same addresses."""
        self._show(name, {**self._draw(family), **self.constant})
        _wait()

    def refill(self) -> None:
        """Fresh secret inputs in every slot."""
        for name in self.slots:
            self._show(name, {**self._draw("drawn"), **self.constant})
        _wait()

    def disturb(self, name: str) -> bool:
        """Change one element of each floating input of a slot; False if it has none."""
        generator = torch.Generator(device=DEVICE)
        generator.manual_seed(secrets.randbits(62))
        changed = {}
        for argument, value in self.drawn[name].items():
            if isinstance(value, torch.Tensor) and argument not in self.constant:
                other = verify.disturbed(value, generator)
                if other is not None:
                    changed[argument] = other
        if changed:
            self._show(name, {**self.drawn[name], **changed}, self.changes[name])
            _wait()
        return bool(changed)

    def renew(self) -> None:
        """Other contents at the same addresses in every slot: see Change; drawn anew where no input can be changed so."""
        chance = random.SystemRandom()
        for name, drawn in self.drawn.items():
            if "fresh" in self.off:
                self._show(name, drawn, self.changes[name])
            elif any(isinstance(v, torch.Tensor) and n not in self.constant and changes(v) for n, v in drawn.items()):
                self._show(name, drawn, Change(chance.uniform(0.75, 1.25), chance.randrange(Change.STEP)))
            else:
                self._show(name, {**self._draw("drawn"), **self.constant})
        _wait()

    def restore(self, name: str | None = None) -> None:
        """Undo what calls may do to mutated arguments, in one slot or in all."""
        for slot in self.slots if name is None else (name,):
            self.slots[slot].fill(self.drawn[slot], self.changes[slot])
        _wait()

    def _show(self, name: str, drawn: dict[str, Any], change: Change | None = None) -> None:
        self.drawn[name], self.changes[name] = drawn, change
        self.slots[name].fill(drawn, change)
        self._truths.pop(name, None)

    def inputs(self, name: str) -> dict[str, Any]:
        """What the trusted side wrote into a slot, worked out again: the buffer itself may have been written to since."""
        change = self.changes[name]
        if change is None:
            return dict(self.drawn[name])
        return {n: change.of(v) if n in self.slots[name].own and changes(v) else v for n, v in self.drawn[name].items()}

    def truth(self, name: str) -> Truth:
        """What is right for the contents of a slot."""
        if name not in self._truths:
            with self._spent():
                self._truths[name] = verify.truth(self.task, self.case, self.inputs(name))
                self.limits[name] = sample.limits(self.task.contract, self._truths[name])
                _wait()
        return self._truths[name]

    def altered(self) -> str | None:
        """The first input, of any slot, that no longer holds what the trusted side wrote."""
        for name, slot in self.slots.items():
            changed = slot.altered(self.inputs(name), self.task.contract.mutates)
            if changed:
                return changed[0]
        return None

    @contextlib.contextmanager
    def _spent(self) -> Iterator[None]:
        begin = time.perf_counter_ns()
        yield
        if self.case.role == "timed":  # elsewhere it is the host's work more than the GPU's
            self.seconds += (time.perf_counter_ns() - begin) / 1e9

    def forget(self) -> None:
        """Results that were read before are nobody's concern any more: their child has ended."""
        self._read = None

    # -- calls --------------------------------------------------------------------------------------------------

    def _blank(self, which: int | None = None) -> None:
        """Poison the outputs; before that, see whether somebody wrote to them after they were read. Raises Wrong."""
        late, self._read = self._read, None
        if late is not None and "late" not in self.off:
            now = self.outputs.fingerprint()
            if not all(bool(a == b) for a, b in zip(late, now, strict=True)):
                raise Wrong(Verdict(False, "tampered", "a result was written to after it had been read", math.inf), "late")
        self.outputs.poison(POISONS[secrets.randbelow(len(POISONS)) if which is None else which % len(POISONS)])

    def check(self, child: Any, slot: str, poison: int = 0) -> Verdict:
        """One call, everything compared: result, that inputs were left alone, and what lies around them. Raises Wrong."""
        right = self.truth(slot)
        self._blank(poison)
        _wait()
        reply = child.request("call", timeout_s=self.timeout_s, slot=slot, output=self.out_name)
        said = _said(reply)
        verdict = verify.judge(right, self.outputs.tensors, said, self.task.contract)
        self._read = self.outputs.fingerprint()
        beyond = self.slots[slot].overrun() if "guard" not in self.off else []
        if beyond:
            raise Wrong(Verdict(False, "unsafe_memory", f"the call wrote outside of argument {beyond[0]!r}", math.inf), "guard")
        changed = [] if "inputs" in self.off else self.slots[slot].altered(right.inputs, self.task.contract.mutates)
        if changed:
            raise Wrong(Verdict(False, "tampered", f"the call changed its input {changed[0]!r}, which the contract does not "
                                                   f"allow", math.inf), "inputs")
        if not verdict.ok and any(not isinstance(s, dict) or s.get("written") is not True for s in said or [None]):
            raise Wrong(verdict, "form")
        return verdict

    def _wanted(self, slot: str, at: float) -> list[sample.Wanted]:
        """What a sample must be, of the stretch of every output that begins at the share `at` of what is possible."""
        right = self.truth(slot)
        return [sample.wanted(*output, at) for output in zip(self.limits[slot], right.exact, right.honest, strict=True)]

    def _sampled_right(self, wanted: list[sample.Wanted], reply: dict[str, Any]) -> bool:
        """Whether a stretch of every output was written and is right. Inside the clock: as few operations as can be."""
        if not all(isinstance(s, dict) and s.get("written") is True for s in _said(reply)):
            return False
        return all(one.right(got) for one, got in zip(wanted, self.outputs.tensors, strict=True))

    def _ready(self, child: Any, count: int, graph: bool) -> list[str]:
        """Before the clock starts: other contents in every slot, a few calls to warm up, blank outputs."""
        names = list(self.slots)
        self.renew()
        # One call more than there are slots, the first time: then the child's allocator holds every buffer that it will need.
        few = min(WARM_UP, len(names) + 1) if child in self._warm else len(names) + 1
        with self._spent():
            child.request("slice", timeout_s=self.timeout_s, slots=names, calls=count if graph else few, graph=graph)
        self._warm.add(child)
        if self.once:
            self.restore()
        return names

    def slice(self, child: Any, calls: int | None = None, graph: bool = False) -> Slice:
        """One slice by this process's clock: from release to a checked sample of a slot chosen before, unknown to the child.

        Outside of the clock: every slot gets other contents, a few calls warm up, outputs are poisoned. graph: the calls are
        captured in a CUDA graph before and replayed. calls: other than those fixed from the baseline; once, then.
        Raises Wrong when the sample is not right, or when the inputs of that slot were written to.
        """
        several = [self._slice(child, calls, graph) for _ in range(self.repeats if calls is None and not graph else 1)]
        return Slice(*(statistics.median(values) for values in zip(*map(astuple, several), strict=True)))

    def _slice(self, child: Any, calls: int | None, graph: bool) -> Slice:
        count = self.calls if calls is None else calls
        names = self._ready(child, count, graph)
        slot, at = names[secrets.randbelow(min(len(names), max(1, count)))], secrets.randbelow(1 << 20) / (1 << 20)
        wanted = self._wanted(slot, at)
        self._blank()
        _wait()
        begin = time.perf_counter_ns()
        said = child.request("slice", timeout_s=self.timeout_s, slots=names, calls=count, graph=graph)
        reply = child.request("deliver", timeout_s=self.timeout_s, slot=slot, output=self.out_name)
        right = "sample" in self.off or self._sampled_right(wanted, reply)
        wall = (time.perf_counter_ns() - begin) / 1e3
        self.seconds += max(0.0, wall - self.overhead_us) / 1e6
        self._read = self.outputs.fingerprint()
        if not right or (math.inf in self.limits[slot] and "sample" not in self.off):
            verdict = verify.judge(self.truth(slot), self.outputs.tensors, _said(reply), self.task.contract)
            if not verdict.ok or not right:
                raise Wrong(verdict if not verdict.ok else Verdict(False, "wrong", "a timed call gave a wrong result"), "sample")
        changed = [] if "inputs" in self.off else self.slots[slot].altered(self.inputs(slot), self.task.contract.mutates)
        if changed:
            raise Wrong(Verdict(False, "tampered", f"a timed call changed its input {changed[0]!r}", math.inf), "inputs")
        event = said.get("event_us")
        event = float(event) if isinstance(event, (int, float)) and math.isfinite(event) and event >= 0 else math.inf
        per = max(0.05, (wall - self.overhead_us) / max(1, count))
        return Slice(per, event / max(1, count))

    def whole(self, child: Any) -> float:
        """Wall microseconds of a slice in which every slot is used once and every result delivered inside the clock; a few of
        them, nobody knows which, are compared.

        Whatever a child leaves undone in slices of many calls, of which one result is asked for, it has to do here.
        Raises Wrong.
        """
        names = self._ready(child, len(self.slots), False)
        chance = random.SystemRandom()
        wanted = {name: self._wanted(name, chance.random()) for name in chance.sample(names, min(LOOKED_AT, len(names)))}
        chance.shuffle(names)
        self._blank()
        _wait()
        begin = time.perf_counter_ns()
        child.request("slice", timeout_s=self.timeout_s, slots=names, calls=len(names), graph=False)
        for name in names:
            reply = child.request("deliver", timeout_s=self.timeout_s, slot=name, output=self.out_name)
            if name in wanted and not self._sampled_right(wanted[name], reply):
                raise Wrong(Verdict(False, "wrong", "a timed call gave a wrong result"), "sample")
        wall = (time.perf_counter_ns() - begin) / 1e3
        self.seconds += wall / 1e6
        return wall

    def calibrate(self, baseline: Any) -> float:
        """Fix the calls in a slice and the cost of a hand-over from the baseline; returns its microseconds a call."""
        self.overhead_us, self.calls, self.repeats = 0.0, len(self.slots), 1
        few = max(1, len(self.slots) // 8)
        for _ in range(1 if self.once else 3):  # the first estimate holds the hand-over, the next ones hardly any of it
            us = min(self.slice(baseline).us for _ in range(2))
            self.calls = calls_for(us, len(self.slots), self.once)
        if self.calls >= 4 * few:
            # Slices of two lengths give the part that does not grow with the calls.
            short = sorted(self.slice(baseline, few).us * few for _ in range(9))[4]
            long = sorted(self.slice(baseline).us * self.calls for _ in range(5))[2]
            self.overhead_us = max(0.0, short - few * (long - short) / (self.calls - few))
        us = sorted(self.slice(baseline).us for _ in range(3))[1]
        if self.once:
            self.repeats = max(1, min(MOST_REPEATS, math.ceil(SHORTEST_US / (us * self.calls))))
        return us

    @property
    def doubt_us(self) -> float:
        """By how much the hand-over may be misjudged, in microseconds of one call."""
        return DOUBT * self.overhead_us / max(1, self.calls)

    def done(self, child: Any) -> None:
        """Have a child forget the results that it kept."""
        self._warm.discard(child)
        child.request("drop", timeout_s=self.timeout_s)

    def close(self) -> None:
        for slot in self.slots.values():
            slot.close()
        if self._inputs is not None:
            self._inputs.close()
        for shared in self._constants.values():
            shared.close()
        self.outputs.close()


def _slots(once: bool, input_bytes: int, honest: list[torch.Tensor], l2_bytes: int, free_bytes: int) -> int:
    """So many that together they are several times the L2 cache, within FOOTPRINT and the memory that is free."""
    results = sum(h.numel() * h.element_size() for h in honest)
    touched = max(1, input_bytes + results)
    room = int(MEMORY_SHARE * free_bytes / (touched + input_bytes))  # copies, inputs and results kept by a child
    wanted = MUTATED_SLOTS if once else min(64, math.ceil(max(3 * l2_bytes, FOOTPRINT) / touched))
    return max(2, min(wanted, room))


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _said(reply: dict[str, Any]) -> list[Any]:
    said = reply.get("outputs")
    return said if isinstance(said, list) else []
