"""Judging without a GPU: correctness in Triton's interpreter, latency by the modelled device.

Trusted side of a machine without a GPU. Check cases run in a disposable child; their bytes are judged here. Timed cases
are not run: a few programs of each launch are traced, and the model turns counts and compiled facts into
microseconds. Every number from here is modelled; what is drawn at random only picks what is checked.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from kernelband.device import Peaks, roofline_us
from kernelband.evaluate import compare, model, verify
from kernelband.evaluate.called import POISONS, Called, call
from kernelband.evaluate.judgement import Judgement, Refused, refusal
from kernelband.evaluate.layouts import arranged_inputs
from kernelband.evaluate.specs import shapes_only
from kernelband.evaluate.verify import Truth
from kernelband.evaluate.zygote import CandidateError, Child, ChildDied, SandboxError, Zygote
from kernelband.task import Case, Task

CAN_BE_OFF = frozenset({"values", "families", "fresh", "inputs", "guard", "repeat", "held_out", "what_ran", "physics"})
"""Layers of judgement.LAYERS that this judge has and can work without."""

FRESH_PLACES = 3
"""Checks after which the same tensors are given other contents: the last one, the others drawn."""

IDLE_S = 10.0
IDLE_LEAST = 64
"""Elements of inputs and outputs together below which a case says nothing of whether kernels do the work, if there is another."""

MOST_TORCH, MOST_MOVING = 0.5, 0.75
"""Shares of the least time of all work: what torch may compute beside kernels, and what it may move before that counts too."""

FILLING = frozenset({"zeros", "zeros_like", "new_zeros", "zero_", "ones", "ones_like", "new_ones", "full", "full_like",
                     "new_full", "fill_", "arange", "scalar_tensor"})
MOVING = frozenset({"copy_", "clone", "_to_copy", "contiguous", "cat", "stack", "constant_pad_nd", "repeat", "expand_copy",
                    "permute_copy", "transpose_copy", "slice_copy", "view_copy"})
VENDOR = frozenset({"mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "_scaled_mm", "_int_mm", "convolution"})
"""Operations as torch's dispatcher names them, whatever a candidate calls them."""

Traced = list[tuple[Mapping[str, Any], Mapping[str, Any] | None]]
"""Launches of one call as `model.predict` takes them: (trace, compiled facts or None)."""


class Checks:
    """Every check of one candidate in its child. Refused is raised at the first that fails; `judgement.checks` names them all.

    drawn: what is right for the drawn inputs of each case.
    """

    def __init__(self, task: Task, child: Child, judgement: Judgement, off: Collection[str], timeout_s: float):
        self.task, self.child, self.judgement, self.off, self.timeout_s = task, child, judgement, off, timeout_s
        self.drawn: dict[str, Truth] = {}
        self._constant: dict[str, dict[str, Any]] = {}
        self._slots = 0

    def run(self, cases: Sequence[Case]) -> None:
        """All cases in their families and layouts; a few of them again on the same tensors with other contents."""
        contract = self.task.contract
        plan = [(i, case, family) for i, case in enumerate(cases)
                for family in verify.families_for(contract, i, len(cases)) if family == "drawn" or "families" not in self.off]
        if not plan:
            return
        fresh = {len(plan) - 1}
        while len(fresh) < min(FRESH_PLACES, len(plan)):
            fresh.add(secrets.randbelow(len(plan)))
        twice = secrets.randbelow(len(plan))
        for at, (i, case, family) in enumerate(plan):
            right = self._truth(case, family)
            slot = self._slot(case)
            first = self._check(case, f"{family} inputs", right, slot, i, "values" if family == "drawn" else "families",
                                f"{case.name}/{family}")
            if "repeat" not in self.off and (at == twice or (contract.deterministic and family == "drawn")):
                self._again(case, right, slot, i + 1, first)
            if "fresh" not in self.off and at in fresh:
                near = self._near(case, right)
                if near is not None:
                    self._check(case, f"{family} inputs, one element of which was changed in place", near, slot, i + 2, "fresh",
                                f"{case.name}/{family}/one element")
                self._check(case, f"other {family} inputs at the same addresses", self._truth(case, family), slot, i + 1,
                            "fresh", f"{case.name}/{family}/same addresses")
            if family == "drawn":
                self.drawn[case.name] = right
                for layout in contract.layouts:
                    if layout != "contiguous" and "families" not in self.off:
                        arranged = replace(right, inputs=arranged_inputs(right.inputs, layout))
                        self._check(case, f"{layout} inputs", arranged, self._slot(case), i, "families", f"{case.name}/{layout}")

    def _slot(self, case: Case) -> str:
        """A name that was not used before: tensors at addresses of their own."""
        self._slots += 1
        return f"{case.name}/{self._slots}"

    def _truth(self, case: Case, family: str) -> Truth:
        """Fresh secret inputs, but for what the contract calls constant, and what is right for them."""
        inputs = verify.draw(self.task, case, secrets.randbits(62), family, "cpu")
        constant = self._constant.setdefault(case.name, {n: inputs[n] for n in self.task.contract.constant if n in inputs})
        return verify.truth(self.task, case, {**inputs, **constant})

    def _near(self, case: Case, right: Truth) -> Truth | None:
        """The same inputs but for one element; where a few tries find one, an element that the result depends on."""
        names = [n for n, v in right.inputs.items() if isinstance(v, torch.Tensor) and n not in self.task.contract.constant]
        generator = torch.Generator().manual_seed(secrets.randbits(62))
        said = [{"written": True}] * len(right.honest)
        found = None
        for _ in range(4 if names else 0):
            name = names[secrets.randbelow(len(names))]
            old = right.inputs[name]
            new = verify.disturbed(old, generator)
            if new is None:
                continue
            if bool((torch.nan_to_num(old) >= 0).all()):  # what must not be negative stays so
                new = new.abs()
            found = verify.truth(self.task, case, {**right.inputs, name: new})
            if not verify.judge(found, right.honest, said, self.task.contract).ok:
                break
        return found

    def _where(self, case: Case) -> str:
        return case.name if case.role != "held_out" else "a held-out case"

    def _call(self, right: Truth, slot: str, poison: int) -> Called:
        return call(self.child, self.task, right, slot, POISONS[poison % len(POISONS)], self.timeout_s)

    def _check(self, case: Case, what: str, right: Truth, slot: str, poison: int, layer: str, key: str) -> Called:
        """One call that must be right, and leave alone what is not its own. Raises Refused."""
        where, done = f"{self._where(case)} ({what})", self._call(right, slot, poison)
        verdict = done.verdict
        self.judgement.checks[key] = "pass" if verdict.ok else verdict.kind
        if done.beyond and "guard" not in self.off:
            name = done.beyond[0]
            beside = f"argument {name!r}" if name else "what it allocated"
            raise Refused("unsafe_memory", f"{where}: touched memory beside {beside}", "guard")
        if not verdict.ok:
            if not done.written:
                layer = "form"
            elif case.role == "held_out" and layer in ("values", "families"):
                layer = "held_out"
            if layer == "values" and layer in self.off:
                return done
            if "repeat" not in self.off and self._call(right, slot, poison).verdict.ok:
                raise Refused("wrong_nondeterministic", f"{where}: wrong, and right when called again on the same inputs: "
                                                        f"{verdict.detail}", layer)
            raise Refused(verdict.kind, f"{where}: {verdict.detail}", layer)
        if done.changed and "inputs" not in self.off:
            raise Refused("tampered", f"{where}: the call changed its input {done.changed[0]!r}, which the contract does not "
                                      f"allow", "inputs")
        return done

    def _again(self, case: Case, right: Truth, slot: str, poison: int, first: Called) -> None:
        """A second call on the same inputs, on other poison, must be right too, and the same where the contract says so."""
        second = self._call(right, slot, poison)
        if not second.verdict.ok:
            raise Refused("wrong_nondeterministic", f"{self._where(case)}: right once, and wrong when called again on the same "
                                                    f"inputs: {second.verdict.detail}", "repeat")
        if self.task.contract.deterministic and any(bool(compare.differs(a, b).any())
                                                    for a, b in zip(first.outputs, second.outputs, strict=True)):
            raise Refused("wrong_nondeterministic", f"{self._where(case)}: two calls on the same inputs differ, and the contract "
                                                    f"asks for determinism", "repeat")


class ModelledJudge:
    """Judges candidates of one task on a modelled device, in children of one interpreter zygote.

    zygote: a running one that outlives this judge and keeps its own `hide` and `warn`; without it the judge has one of its own.
    off: layers that are left out, to show what they are worth; never in a search. Raises ValueError for one that is not in
    CAN_BE_OFF.
    """

    def __init__(self, task: Task, peaks: Peaks, *, timeout_s: float = 60.0, hide: Sequence[str] = (),
                 warn: Callable[[str], None] = lambda text: None, off: frozenset[str] = frozenset(),
                 zygote: Zygote | None = None):
        unknown = sorted(set(off) - CAN_BE_OFF)
        if unknown:
            raise ValueError(f"layer {unknown[0]!r} cannot be left out of a modelled judge; only {', '.join(sorted(CAN_BE_OFF))}")
        self.task, self.peaks, self.timeout_s, self.off = task, peaks, timeout_s, frozenset(off)
        self._own_zygote = zygote is None
        self.zygote = zygote or Zygote("interpret", warn=warn, hide=hide)
        self.specs = {c.name: shapes_only(task, c) for c in task.with_role("timed")}
        self.properties = _properties(peaks)

    def judge(self, source: str, facts: Mapping[str, Sequence[Any]], held_out: bool = False) -> Judgement:
        """Verdict over check cases (and held-out ones), then predicted microseconds of each timed case.

        facts: compiled launches by timed case name. log_speedup is left at 0: the caller knows the baseline.
        """
        judgement = Judgement("measured", level="modelled")
        clock = time.monotonic()

        def lap(stage: str) -> None:
            nonlocal clock
            now = time.monotonic()
            judgement.costs[stage], clock = now - clock, now

        roles = ("check", "held_out") if held_out and "held_out" not in self.off else ("check",)
        cases = self.task.with_role(*roles)  # type: ignore[arg-type]
        try:
            with self._child(source) as child:
                checks = Checks(self.task, child, judgement, self.off, self.timeout_s)
                checks.run(cases)
                lap("verify")
                if self._judges_work():
                    self._without_kernels(source, cases, checks.drawn)
                    lap("what_ran")
                for name, launches in facts.items():
                    if name in self.specs:
                        self._time(child, judgement, name, launches)
                lap("model")
        except Refused as no:
            return no.judgement(judgement.checks)
        except (CandidateError, ChildDied) as err:
            return refusal(err).judgement(judgement.checks)
        return judgement

    @contextlib.contextmanager
    def _child(self, source: str, timeout_s: float | None = None, idle: bool = False) -> Iterator[Child]:
        """A child that has imported the candidate, killed at the end. idle: its launches do nothing."""
        try:
            child = self.zygote.spawn()
        except (ChildDied, SandboxError) as err:
            raise Refused("infra", f"no child could be started: {err}", "process") from None
        try:
            child.request("prepare", timeout_s=self.timeout_s, properties=self.properties, idle=idle)
            child.request("load", timeout_s=timeout_s or self.timeout_s, source=source, entry=self.task.entry)
            yield child
        finally:
            child.kill()

    # -- what ran -------------------------------------------------------------------------------------------------

    def _judges_work(self, *others: str) -> bool:
        """Whether it matters who does the work: not left out, and the contract allows nobody else (but `others`)."""
        return "what_ran" not in self.off and set(self.task.contract.allow) <= {"own", *others}

    def _without_kernels(self, source: str, cases: Sequence[Case], drawn: Mapping[str, Truth]) -> None:
        """In a fresh process whose launches do nothing no result may be right. Raises Refused for one that is.

        Whatever else happens there (an exception, the end of the process, a loop without end) is as it should be. Cases where
        doing nothing is right, and the smallest ones, say nothing and are left out.
        """
        def size(case: Case) -> int:
            return sum(t.numel() for t in (*drawn[case.name].honest, *drawn[case.name].inputs.values())
                       if isinstance(t, torch.Tensor))

        least = min(IDLE_LEAST, max(map(size, cases), default=0))
        limit = min(self.timeout_s, IDLE_S)
        with contextlib.suppress(CandidateError, ChildDied), self._child(source, limit, idle=True) as child:
            for i, case in enumerate(cases):
                right = drawn[case.name]
                if size(case) < least or self._nothing_is_right(right):
                    continue
                try:
                    if all(call(child, self.task, right, f"{case.name}/{i}", poison, limit).verdict.ok
                           for poison in (POISONS[0], POISONS[2])):
                        where = case.name if case.role != "held_out" else "a held-out case"
                        raise Refused("not_a_kernel", f"{where}: the result is right without its kernels: when their launches do "
                                                      f"nothing, it stays the same", "what_ran")
                except CandidateError:
                    continue

    def _nothing_is_right(self, right: Truth) -> bool:
        """Whether outputs of zeros, with arguments as they were, would pass."""
        idle = [torch.zeros_like(honest) if out.source == "return" else right.inputs[out.source].to(honest.dtype)
                for out, honest in zip(self.task.contract.outputs, right.honest, strict=True)]
        return verify.judge(right, idle, [{"written": True}] * len(idle), self.task.contract).ok

    def _own_work(self, name: str, launches: Sequence[Mapping[str, Any]]) -> None:
        share, names = torch_share(self.peaks, launches, "vendor" in self.task.contract.allow)
        if share > MOST_TORCH:
            raise Refused("not_a_kernel", f"{name}: torch does {share:.0%} of the work ({', '.join(names[:4])}), and the "
                                          f"contract asks for kernels of one's own", "what_ran")

    # -- time -----------------------------------------------------------------------------------------------------

    def predict(self, source: str, facts: Mapping[str, Sequence[Any]]) -> dict[str, tuple[model.Prediction, Traced] | Refused]:
        """What the model says of each timed case that has compiled launches, and of which launches; nothing is verified here.

        Each case is traced in a process of its own; for one that cannot be traced the Refused says why.
        """
        told: dict[str, tuple[model.Prediction, Traced] | Refused] = {}
        for name, launches in facts.items():
            if name not in self.specs:
                continue
            try:
                with self._child(source) as child:
                    told[name] = self._said(child, name, launches)
            except Refused as no:
                told[name] = no
            except (CandidateError, ChildDied) as err:
                told[name] = refusal(err)
        return told

    def _said(self, child: Child, name: str, launches: Sequence[Any], own_work: bool = False) -> tuple[model.Prediction, Traced]:
        """Trace one timed case and price it. own_work: refuse a call whose work torch does."""
        reply = child.request("trace", timeout_s=self.timeout_s, args=self.specs[name].args, max_programs=8)
        try:
            if own_work:
                self._own_work(name, reply["launches"])
            pairs = model.pair(reply["launches"], [f.to_json() for f in launches])
            return model.predict(self.peaks, pairs), pairs
        except (AttributeError, KeyError, TypeError, ValueError) as err:
            raise Refused("timing_inconsistent", f"{name}: what was traced and what was compiled do not fit together: {err}",
                          "events") from None

    def _time(self, child: Child, judgement: Judgement, name: str, launches: Sequence[Any]) -> None:
        if not launches and self._judges_work():
            raise Refused("not_a_kernel", f"{name}: no kernel of its own was launched", "what_ran")
        said, _ = self._said(child, name, launches, own_work=self._judges_work("vendor"))
        if "physics" not in self.off:
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
        if self._own_zygote:
            self.zygote.close()


def _properties(peaks: Peaks) -> dict[str, Any]:
    """What the stand-in device answers, in the names of torch.cuda.get_device_properties."""
    known: dict[str, Any] = {"multi_processor_count": peaks.sms, "name": peaks.name, "warp_size": peaks.warp,
                             "shared_memory_per_block_optin": peaks.max_shared_bytes}
    if isinstance(peaks.arch, int):
        return {**known, "major": peaks.arch // 10, "minor": peaks.arch % 10}
    return {**known, "major": int(peaks.arch[3:-2]), "minor": int(peaks.arch[-2], 16), "gcnArchName": peaks.arch}  # gfx942: 9.4


def torch_share(peaks: Peaks, launches: Sequence[Mapping[str, Any]], vendor: bool) -> tuple[float, list[str]]:
    """(share of torch's operations in the work of a traced call, their names, the largest first).

    Work is the least time (roofline) of what a launch has to move once and to compute, so that reading something again and
    again makes no kernel more important. Filling memory is free; moving it (copies, casts, padding) counts as work but not as
    torch's, unless it is nearly all there is. vendor: matrix products and convolutions are not torch's either.
    """
    computed: dict[str, float] = {}
    moved: dict[str, float] = {}
    own = 0.0
    for launch in launches:
        counts, programs = launch["per_program"], float(launch["programs"])
        size = sum(min(float(t[kind]), float(t["bytes"])) for t in launch["tensors"] for kind in ("read", "written"))
        dots = model.roofline_us(peaks, 0.0, float(counts["dot_flops"]) * programs, (launch.get("dot") or {}).get("dtype"))
        least = max(model.roofline_us(peaks, size, float(counts["lane_ops"]) * programs), dots)
        name = str(launch["kernel"])
        operation = name.split(".")[1] if launch.get("torch") and name.count(".") else name
        if not launch.get("torch") or (vendor and operation in VENDOR):
            own += least
        elif operation in MOVING:
            moved[operation] = moved.get(operation, 0.0) + least
        elif operation not in FILLING:
            computed[operation] = computed.get(operation, 0.0) + least
    whole = own + sum(moved.values()) + sum(computed.values())
    if whole <= 0:
        return 0.0, []
    if sum(moved.values()) > MOST_MOVING * whole:
        computed = {**moved, **computed}
    return sum(computed.values()) / whole, sorted(computed, key=lambda n: -computed[n])
