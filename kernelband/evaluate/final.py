"""The final judgement on one GPU: the number to report, and the proofs that only a finalist has to give.

Works with the parts of a Supervisor. Fresh process pairs against the baseline; held-out cases; the same inputs several times;
slices checked whole; nothing right without the candidate's own kernels, and those had the device's time; compute-sanitizer
where it is installed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelband.evaluate import profile, tools, verify
from kernelband.evaluate.checks import guarded
from kernelband.evaluate.children import give
from kernelband.evaluate.judgement import Judgement, Refused
from kernelband.evaluate.measure import (
    Ratio,
    combine_runs,
    counts_as_gain,
    mean_over_cases,
    median_interval,
    noise_floor,
)
from kernelband.evaluate.zygote import CandidateError, Child, ChildDied

if TYPE_CHECKING:
    from kernelband.evaluate.supervisor import Supervisor

TRIES = 3
"""A run that a busy GPU spoilt is taken again this often."""

LIKELY = 256 << 20
"""Most bytes of inputs of a case whose counters are read."""

GATE_CASES, GATE_BYTES = 2, 64 << 20
"""Small cases that go through compute-sanitizer, and the most bytes of inputs of one."""

PROFILED = 4


class Final:
    """facts: compiled facts of all launches of the candidate (KernelFacts), of any case; without them it is not looked at who had
    the device's time."""

    def __init__(self, owner: Supervisor, name: str, source: str, cache: Path | None, facts: Sequence[Any]):
        self.owner, self.name, self.source, self.cache, self.facts = owner, name, source, cache, facts
        self.judgement = Judgement("measured", level="final")

    def run(self, screened: int, runs: int, pairs: int) -> Judgement:
        """Everything, what takes long and seldom finds anything last. See Supervisor.final."""
        started, owner, judgement = time.monotonic(), self.owner, self.judgement
        told: list[dict[str, Ratio]] = []
        times: dict[str, list[float]] = {}
        try:
            self.prove()
            for run in range(runs):
                for attempt in range(TRIES):
                    try:
                        one, us = self.pair(pairs, first=run == 0)
                        break
                    except Refused as no:
                        if no.kind != "infra" or attempt == TRIES - 1:
                            raise
                told.append(one)
                for case, values in us.items():
                    times.setdefault(case, []).extend(values)
            floor = self.floor(pairs)
            self.profiled()
            self.sanitized()
        except Refused as no:
            return no.judgement(judgement.checks)
        # Cases of one process pair share its luck: they are averaged first, and runs are what varies.
        means = [mean_over_cases(list(run.values())) for run in told]
        whole = combine_runs(means)
        for n, values in times.items():
            middle, low, high, _ = median_interval(values, 0)
            judgement.times[n] = (middle, low, high, len(values) * owner.benches[n].calls)
        judgement.log_speedup, judgement.low, judgement.high, judgement.sd = whole.log, whole.low, whole.high, whole.sd
        judgement.floor = floor
        judgement.gain, judgement.bound = counts_as_gain(means, screened, floor)
        judgement.costs["final"] = time.monotonic() - started
        return judgement

    def prove(self, spent: Child | None = None) -> None:
        """Nothing may be right when the candidate's kernels do nothing: in a child of its own, or first in `spent`, which has the
        small cases' buffers open and is not timed any more. What is right there is tried again in a child of its own, where
        kernels do nothing from the first call on: an honest CUDA graph still holds those that it captured before. Raises
        Refused."""
        owner = self.owner
        allow = owner.task.contract.allow
        if self.name in owner.proved or "what_ran" in owner.off or tuple(allow) != ("own",):
            return
        small = owner.names("check")
        if spent is not None:
            few = secrets.SystemRandom().sample(small, min(2, len(small)))
            if not owner.checks.without_kernels(spent, few):
                return
        child = guarded(owner.child_of, self.source, self.cache)
        try:
            for case in small:
                owner.benches[case].forget()
                guarded(owner.benches[case].bind, child)
            told = owner.checks.without_kernels(child, small)
        finally:
            child.kill()
        if told:
            raise Refused("not_a_kernel", f"{told}: the result is right without any kernel of the candidate's own; the contract "
                                          f"allows only {', '.join(allow)}", "what_ran")
        owner.proved.add(self.name)

    def profiled(self) -> None:
        """Those whom the contract allows must have had the device's time, on each timed case. Raises Refused."""
        owner = self.owner
        if not self.facts or "what_ran" in owner.off:
            return
        shares: list[profile.WhatRan] = []
        for bench, said in zip(owner.timed(), self._traced(self.source, self.cache), strict=True):
            what = profile.what_ran(said, self.facts)
            if not what.us:
                base, cache = owner.children.sources[owner.baseline]
                if not any(r.get("us") for told in self._traced(base, cache) for r in told if isinstance(r, dict)):
                    owner.warn("what ran on the device is not known: CUPTI gives no records here")
                    return
                raise Refused("not_a_kernel", f"{bench.case.name}: it left no trace on the device, where the baseline does",
                              "what_ran")
            shares.append(what)
            told = profile.allowed(what, owner.task.contract.allow)
            if told:
                raise Refused("not_a_kernel", f"{bench.case.name}: {told}", "what_ran")
        for who in ("own", "vendor", "torch", "copy"):
            self.judgement.ran[who] = round(min(getattr(w, f"{who}_share") for w in shares), 4)

    def _traced(self, source: str, cache: Path | None) -> list[list[Any]]:
        """Records of the device's activities, by timed case; empty ones where there are none."""
        owner, found = self.owner, []
        child = guarded(owner.child_of, source, cache)
        try:
            guarded(owner.bind_timed, child)
            for bench in owner.timed():
                bench.forget()
                bench.refill()
                said = guarded(child.request, "profile", timeout_s=owner.timeout_s, slots=list(bench.slots)[:2], calls=PROFILED)
                records = said.get("records")
                found.append(records if isinstance(records, list) else [])
        finally:
            child.kill()
        return found

    def sanitized(self) -> None:
        """compute-sanitizer on small cases, where it is installed. Raises Refused."""
        owner = self.owner
        tool = tools.find("compute-sanitizer")
        if tool is None or "sanitizer" in owner.off:
            return
        cases: list[tools.GateCase] = []
        for name in owner.names("check"):
            bench = owner.benches[name]
            bench.fill(next(iter(bench.slots)))
            right = bench.truth(next(iter(bench.slots)))
            size = sum(v.numel() * v.element_size() for v in right.inputs.values() if hasattr(v, "numel"))
            if size <= GATE_BYTES and len(cases) < GATE_CASES:
                cases.append(tools.GateCase(name, right.inputs, verify.output_specs(owner.task, right)))
        if not cases:
            return
        child = owner.children.plain()
        try:
            if self.cache is not None:
                give(self.cache, Path(child.workdir))
            report = tools.sanitize(child, tool, self.source, owner.task.entry, cases, timeout_s=max(60.0, owner.timeout_s))
        except (CandidateError, ChildDied, OSError, ValueError) as err:
            owner.warn(f"compute-sanitizer could not be used: {' '.join(str(err).split())[:300]}")
            return
        finally:
            child.kill()
        if not report.ran:
            owner.warn(f"compute-sanitizer gave nothing: {report.summary}")
            return
        self.judgement.checks["compute-sanitizer"] = "pass" if report.ok else report.kind
        if not report.ok:
            raise Refused("unsafe_memory", report.summary, "sanitizer")

    def floor(self, pairs: int) -> float:
        """What the baseline seems to gain over itself: two fresh processes with the same source (a share)."""
        owner = self.owner
        owner.children.settle()
        owner.children.end(*owner.children.sides)
        twin = guarded(owner.child_of, *owner.children.sources[owner.baseline])
        try:
            owner.bind_timed(twin)
            owner.children.side(owner.baseline)
            same = []
            for bench in owner.timed():
                bench.refill()
                bench.forget()
                same.append(owner.timer.pair(owner.baseline, twin, bench, pairs))
        finally:
            twin.kill()
        return noise_floor([mean_over_cases(same)])

    def pair(self, pairs: int, first: bool) -> tuple[dict[str, Ratio], dict[str, list[float]]]:
        """One fresh process pair: case -> log of baseline over candidate; case -> microseconds a call of the candidate.

        The baseline is timed alone before the candidate's process exists. first: also held-out cases, the same inputs several
        times, slices checked whole, graphs. Raises Refused.
        """
        owner, timer = self.owner, self.owner.timer
        owner.children.end(*owner.children.sides)
        base = owner.children.side(owner.baseline)
        alone: dict[str, float] = {}
        for bench in owner.timed():
            bench.forget()
            bench.refill()
            alone[bench.case.name] = median_interval([bench.slice(base).us for _ in range(5)], 0)[0]
            bench.done(base)
        child = guarded(owner.child_of, self.source, self.cache)
        try:
            roles = ("check", "held_out") if first and "held_out" not in owner.off else ("check",)
            owner.open(child, *roles)
            owner.check(child, self.judgement, *roles)
            if first:
                self.judgement.tuned, _ = guarded(owner.children.learn, child, self.source)
                owner.checks.repeat(child, self.judgement, owner.names("timed"))
            told, times = {}, {}
            for bench in owner.timed():
                case = bench.case.name
                told[case] = timer.pair(owner.baseline, child, bench, pairs, alone[case])
                times[case] = [guarded(bench.slice, child).us for _ in range(3)]
                middle = median_interval(times[case], 0)[0]
                timer.believable(bench, middle)
                if first and "whole" not in owner.off:
                    timer.whole(owner.baseline, child, bench, alone[case], middle)
                guarded(bench.done, child)
            if first:
                self.judgement.graph.update(timer.graphs(owner.baseline, child, owner.timed(), alone))
            return told, times
        finally:
            child.kill()


def counters(owner: Supervisor, judgement: Judgement, source: str, cache: Path | None) -> None:
    """Hardware counters of one call of a timed case, by ncu in a sandboxed child: fills load, rung and counters of a judgement,
    or leaves them as they are, with a warning. Some ten seconds."""
    tool = tools.find("ncu")
    if tool is None:
        return
    for bench in owner.timed():
        slot = next(iter(bench.slots))
        bench.forget()
        bench.fill(slot)
        right = bench.truth(slot)
        if sum(v.numel() * v.element_size() for v in right.inputs.values() if hasattr(v, "numel")) <= LIKELY:
            break
    else:
        return
    child = owner.children.plain()
    try:
        if cache is not None:
            give(cache, Path(child.workdir))
        case = tools.GateCase(bench.case.name, right.inputs, verify.output_specs(owner.task, right))
        told = tools.counters(child, tool, source, owner.task.entry, case)
    except (CandidateError, ChildDied, OSError, ValueError) as err:
        told = f"ncu could not be used: {err}"
    finally:
        child.kill()
    if isinstance(told, str):
        owner.warn(f"no hardware counters: {' '.join(told.split())[:300]}")
        return
    judgement.load, judgement.rung = dict(told.load), "ncu"
    judgement.counters = {"occupancy_achieved": told.occupancy, "local_bytes": told.local_bytes,
                          "bank_conflicts": told.bank_conflicts, **{f"stall_{n}": part for n, part in told.stalls.items()}}
