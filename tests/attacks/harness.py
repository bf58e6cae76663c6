"""Judges entries of the catalogue with the product's own judges, and says whether one was scored as a gain.

Owns one compiler and one judge for each operator. Never decides what is right: that is what is under test.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attacks.entries import OPERATORS, Entry
from kernelband.device import KNOWN, Peaks
from kernelband.evaluate import modelled
from kernelband.evaluate.compile import Compiled, Compiler, Target
from kernelband.evaluate.modelled import ModelledJudge
from kernelband.evaluate.specs import CaseSpec, shapes_only
from kernelband.evaluate.supervisor import Supervisor
from kernelband.evaluate.zygote import Zygote
from kernelband.task import LoadedTask, load

GAIN = math.log(1.02)
"""From two per cent on a candidate would be taken for faster."""

OFF_CI = modelled.CAN_BE_OFF
OFF_GPU = frozenset({"values", "families", "fresh", "inputs", "guard", "repeat", "held_out", "sample", "whole", "events",
                     "physics", "band", "late", "what_ran", "sanitizer"})
"""Layers that a judge can leave out; the others are how candidates are run at all."""

COMPILE_S = 60.0

COMPILE_KINDS = {"load": "compile_failed", "compile": "compile_failed", "shared memory": "compile_failed", "wrapper": "crashed",
                 "crash": "crashed", "timeout": "timed_out"}
"""Compiled.error_kind -> outcome kind, as the search journals it."""


@dataclass(frozen=True)
class Assessment:
    """kind, layer, detail: as in Judgement. gain: it would have been scored as faster. log: of the speed-up, 0 when not timed."""

    kind: str
    layer: str
    detail: str
    gain: bool
    log: float = 0.0
    seconds: float = 0.0
    costs: dict[str, float] = field(default_factory=dict)


def operators() -> list[str]:
    return sorted(p.name for p in OPERATORS.iterdir() if (p / "task.py").is_file())


def target(peaks: Peaks, name: str = "") -> Target:
    """What candidates are compiled for."""
    properties: dict[str, Any] = {"multi_processor_count": peaks.sms}
    return Target("cuda", peaks.arch, 32, peaks.max_shared_bytes, {**properties, "name": name} if name else properties)


def accepts(entry: Entry, told: Assessment) -> bool:
    """Whether an attack ended as it should: one of the expected outcomes, and no gain."""
    return told.kind in entry.expected and not told.gain


def refused(compiled: Compiled, seconds: float) -> Assessment:
    """What becomes of a candidate that did not compile."""
    kind = COMPILE_KINDS.get(str(compiled.error_kind), "crashed")
    return Assessment(kind, "deadline" if kind == "timed_out" else "load", str(compiled.error)[:400], False, seconds=seconds)


class Modelled:
    """Judges in the interpreter and times by the model: one compiler and one zygote for the candidates of all operators."""

    def __init__(self, folder: Path, *, timeout_s: float = 30.0, hasty_s: float = 3.0):
        self.folder, self.timeout_s, self.hasty_s = folder, timeout_s, hasty_s
        self.peaks = KNOWN["h200"]
        self.target = target(self.peaks)
        self.zygote = Zygote("interpret", hide=[str(OPERATORS)])
        self.compilers = {False: Compiler(folder, timeout_s=2 * timeout_s, hide=[str(OPERATORS)])}
        self.tasks: dict[str, LoadedTask] = {}
        self.judges: dict[str, ModelledJudge] = {}
        self.cases: dict[str, list[CaseSpec]] = {}
        self.base: dict[str, dict[str, float]] = {}

    def compile(self, operator: str, source: str, hasty: bool = False) -> Compiled:
        if hasty not in self.compilers:
            self.compilers[hasty] = Compiler(self.folder, timeout_s=2 * self.hasty_s, hide=[str(OPERATORS)])
        self._task(operator)
        return self.compilers[hasty].compile(source, operator, self.cases[operator], self.target)

    def _task(self, operator: str) -> LoadedTask:
        if operator not in self.tasks:
            loaded = self.tasks[operator] = load(OPERATORS / operator)
            self.cases[operator] = [shapes_only(loaded.task, c) for c in loaded.task.with_role("timed")]
            self.judges[operator] = ModelledJudge(loaded.task, self.peaks, timeout_s=self.timeout_s, zygote=self.zygote)
        return self.tasks[operator]

    def baseline(self, operator: str) -> dict[str, float]:
        """Modelled microseconds of the baseline by timed case. Raises AssertionError when it is not judged right."""
        if operator not in self.base:
            source = self._task(operator).baseline
            told = self.judges[operator].judge(source, dict(self.compile(operator, source).facts), held_out=True)
            if told.kind != "measured":
                raise AssertionError(f"the baseline of {operator} is not judged right in the interpreter: {told}")
            self.base[operator] = {case: us[0] for case, us in told.times.items()}
        return self.base[operator]

    def assess(self, operator: str, source: str, off: frozenset[str] = frozenset(), hasty: bool = False) -> Assessment:
        """Compile, check and model one candidate, held-out cases too. hasty: with a short deadline.
        Raises ValueError for a layer that this judge cannot leave out."""
        base = self.baseline(operator)
        begin = time.monotonic()
        compiled = self.compile(operator, source, hasty)
        if not compiled.ok:
            return refused(compiled, time.monotonic() - begin)
        judge = self.judges[operator]
        if off or hasty:
            judge = ModelledJudge(self.tasks[operator].task, self.peaks, timeout_s=self.hasty_s if hasty else self.timeout_s,
                                  zygote=self.zygote, off=off)
        told = judge.judge(source, dict(compiled.facts), held_out=True)
        log = 0.0
        if told.kind == "measured":
            log = sum(math.log(base[c] / told.times[c][0]) for c in base) / len(base)
        # A modelled gain of under 10 % is shown as none, but the search would steer by it.
        return Assessment(told.kind, told.layer, told.detail[:400], log > GAIN, log, time.monotonic() - begin, dict(told.costs))

    def close(self) -> None:
        for compiler in self.compilers.values():
            compiler.close()
        self.zygote.close()


def assess_ci(entry: Entry, bench: Modelled, off: frozenset[str] = frozenset()) -> Assessment:
    """An attack without a GPU: compiler, then interpreter and model."""
    return bench.assess(entry.operator, entry.source, off, entry.hangs)


class Gpu:
    """One operator on the GPU, judged and timed as a search does, beside its baseline.

    off: layers that are left out. hasty_s: deadline of a candidate that is meant to meet it. Raises AssertionError when the
    baseline falls, and what Supervisor raises.
    """

    def __init__(self, operator: str, folder: Path, peaks: Peaks, gpu: str, *, timeout_s: float = 20.0, hasty_s: float = 5.0,
                 off: frozenset[str] = frozenset(), warn: Callable[[str], None] = print):
        self.operator, self.loaded, self.target, self.hasty_s = operator, load(OPERATORS / operator), target(peaks, gpu), hasty_s
        self.cases = gpu_cases(self.loaded)
        self.compilers = {hasty: Compiler(folder, timeout_s=2 * hasty_s if hasty else COMPILE_S, hide=[str(OPERATORS)])
                          for hasty in (False, True)}
        self.cache = self.compile(self.loaded.baseline).cache
        self.supervisor = Supervisor(self.loaded.task, peaks, timeout_s=timeout_s, warn=warn, hide=[str(OPERATORS)], off=off)
        told = self.supervisor.set_baseline("baseline", self.loaded.baseline, self.cache)
        if told.kind != "measured":
            self.close()
            raise AssertionError(f"the baseline of {operator} fell on the GPU: {told.kind}: {told.detail}")

    def compile(self, source: str, hasty: bool = False) -> Compiled:
        return self.compilers[hasty].compile(source, self.operator, self.cases, self.target)

    def assess(self, name: str, source: str, off: frozenset[str] = frozenset(), *, hasty: bool = False,
               runs: int = 3) -> Assessment:
        """Judge, and when that showed a gain take the final too, of so many fresh process pairs. A candidate that was promoted
        is put away again. With one run a gain is one whose 95 % interval lies above two per cent."""
        begin = time.monotonic()
        compiled = self.compile(source, hasty)
        if not compiled.ok:
            return refused(compiled, time.monotonic() - begin)
        gain = False
        facts = [fact for launches in compiled.facts.values() for fact in launches]
        with without(self.supervisor, off), self._deadline(hasty):
            try:
                told = self.supervisor.judge(name, source, compiled.cache, "baseline", self.loaded.baseline, self.cache)
                costs = dict(told.costs)
                if told.kind == "measured" and told.log_speedup > GAIN:
                    told = self.supervisor.final(name, source, compiled.cache, runs=runs, facts=facts)
                    gain = told.kind == "measured" and (bool(told.gain) or (runs == 1 and told.low > GAIN))
                    costs |= told.costs
            finally:
                self.forget(name)
        return Assessment(told.kind, told.layer, told.detail[:400], gain, told.log_speedup, time.monotonic() - begin, costs)

    @contextlib.contextmanager
    def _deadline(self, hasty: bool) -> Iterator[None]:
        owners: list[Any] = [self.supervisor, self.supervisor.children, *self.supervisor.benches.values()] if hasty else []
        before = [owner.timeout_s for owner in owners]
        for owner in owners:
            owner.timeout_s = self.hasty_s
        try:
            yield
        finally:
            for owner, old in zip(owners, before, strict=True):
                owner.timeout_s = old

    def forget(self, name: str) -> None:
        """A candidate must not stay as the side that later ones are paired with, nor count as proved."""
        self.supervisor.children.end(name)
        self.supervisor.children.sources.pop(name, None)
        self.supervisor.known.pop(name, None)
        self.supervisor.proved.discard(name)

    def close(self) -> None:
        for compiler in self.compilers.values():
            compiler.close()
        self.supervisor.close()


def gpu_cases(loaded: LoadedTask) -> list[CaseSpec]:
    """All cases: on a GPU each of them is run."""
    return [shapes_only(loaded.task, c) for c in loaded.task.cases]


def assess_gpu(bench: Gpu, entry: Entry, off: frozenset[str] = frozenset()) -> Assessment:
    """An attack on the GPU."""
    return bench.assess(entry.id, entry.source, off, hasty=entry.hangs)


@contextlib.contextmanager
def without(supervisor: Supervisor, off: frozenset[str]) -> Iterator[None]:
    """Leave layers out of a supervisor that stands, for the length of a `with`: much cheaper than another one.

    Not for "guard", which is a matter of how buffers are made: `Gpu(..., off={"guard"})`. Raises ValueError for it.
    """
    if "guard" in off:
        raise ValueError("guarded buffers are made with the supervisor: pass off={'guard'} to Gpu")
    owners: list[Any] = [supervisor, supervisor.checks, supervisor.timer, *supervisor.benches.values()]
    before = [owner.off for owner in owners]
    for owner in owners:
        owner.off = frozenset(owner.off) | off
    try:
        yield
    finally:
        for owner, old in zip(owners, before, strict=True):
            owner.off = old
