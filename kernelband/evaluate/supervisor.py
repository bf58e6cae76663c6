"""The supervisor of one GPU: judges candidates in disposable children, keeps the clock, and trusts none of them.

A plain class; an actor only wraps it. It imports the (trusted) task, owns the GPU's buffers and oracle results, and
never imports candidate code. The baseline and the incumbent have long-lived children of their own; every candidate gets
a fresh one. One thing happens on the GPU at a time: no child is started, checked or ended while another is timed.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from kernelband.device import Peaks
from kernelband.errors import Quarantined, RunFailed
from kernelband.evaluate import rates
from kernelband.evaluate.bench import Bench, Wrong
from kernelband.evaluate.checks import Checks, guarded
from kernelband.evaluate.children import Children
from kernelband.evaluate.final import Final, counters
from kernelband.evaluate.inside.cudrv import CudaError
from kernelband.evaluate.judgement import LAYERS, Judgement, Refused
from kernelband.evaluate.measure import (
    Race,
    Slice,
    mean_over_cases,
    median_interval,
)
from kernelband.evaluate.timer import Timer
from kernelband.evaluate.zygote import CandidateError, Child, ChildDied
from kernelband.task import Task

CONTENDER = 0.03
"""A candidate whose screening is within 3 % of the incumbent is paired with it."""

ROUNDS = 3
"""Most rounds of screening, one slice of each timed case a round."""

HEALTHY = 0.25
"""After a candidate's violent end the baseline must take no more than this share longer than alone."""

VIOLENT = frozenset({"crashed", "timed_out", "unsafe_memory", "out_of_memory"})


class Supervisor:
    """Owns one GPU for one task.

    peaks may be None for a GPU that is not in the table: the test against physics is then left out, with a warning. off: layers
    of judgement.LAYERS to leave out, to show what each is worth; never in a search.
    Raises RunFailed if the GPU cannot be used, UserError if the oracle cannot, ValueError for an unknown layer.
    """

    def __init__(self, task: Task, peaks: Peaks | None, *, timeout_s: float = 60.0, hide: Sequence[str] = (),
                 warn: Callable[[str], None] = lambda text: None, off: Collection[str] = ()):
        unknown = set(off) - set(LAYERS)
        if unknown:
            raise ValueError(f"no such layer: {', '.join(sorted(unknown))}; known: {', '.join(LAYERS)}")
        self.task, self.peaks, self.warn, self.timeout_s, self.off = task, peaks, warn, timeout_s, frozenset(off)
        torch.cuda.init()
        properties = torch.cuda.get_device_properties(0)
        self.gpu, self.l2 = properties.name, properties.L2_cache_size
        if peaks is None:
            warn(f"no datasheet peaks for {self.gpu}: results are not tested against the roofline")
        self.children = Children(task.entry, self.bind_timed, timeout_s=timeout_s, hide=hide, warn=warn)
        self.benches: dict[str, Bench] = {}
        self.checks = Checks(task.contract, self.benches, self.off)
        self.timer = Timer(task, peaks, self.children, self.off)
        self.known: dict[str, tuple[float, float]] = {}
        """Version -> (log speed-up over the baseline, its s.d.), of those that may stand beside a candidate."""
        self.baseline = ""
        self.alone: dict[str, float] = {}
        self.sigma = Race.SIGMA
        self.proved: set[str] = set()
        self.quarantine = ""

    # -- names of cases, buffers ----------------------------------------------------------------------------------

    def names(self, *roles: str) -> list[str]:
        return [c.name for c in self.task.with_role(*roles)]  # type: ignore[arg-type]

    def small(self, *roles: str) -> list[str]:
        """Names of the benches of check and held-out cases, first those of contiguous inputs, then other layouts."""
        cases = self.names(*roles)
        layouts = [x for x in self.task.contract.layouts if x != "contiguous"] if "families" not in self.off else []
        return [*cases, *(f"{case}/{layout}" for layout in layouts for case in cases)]

    def timed(self) -> list[Bench]:
        """The benches of the timed cases, in the task's order."""
        return [self.benches[n] for n in self.names("timed")]

    def bind_timed(self, child: Child) -> None:
        """Open the buffers of all timed cases in a child."""
        for bench in self.timed():
            bench.bind(child)

    def child_of(self, source: str, cache: Path | None) -> Child:
        """A fresh child that has loaded the source. Raises Refused, CandidateError, ChildDied."""
        return self.children.fresh(source, cache)

    def _make_benches(self) -> None:
        guards: tuple[bool | None, ...] = (True, False) if "guard" not in self.off else (None,)
        cases = {c.name: c for c in self.task.cases}
        for i, name in enumerate(self.small("check", "held_out")):
            known, _, layout = name.rpartition("/") if name not in cases else (name, "", "contiguous")
            case = cases[known]
            try:
                made = Bench(self.task, case, 1, self.timeout_s, guard=guards[i % len(guards)], off=self.off, layout=layout)
            except CudaError as err:
                self.warn(f"guarded buffers are off: {err}")
                guards = (None,)
                made = Bench(self.task, case, 1, self.timeout_s, off=self.off, layout=layout)
            self.benches[name] = made
        for case in self.task.with_role("timed"):
            self.benches[case.name] = Bench(self.task, case, None, self.timeout_s, self.l2, torch.cuda.mem_get_info()[0],
                                            off=self.off)
        self.children.reserve = max(b.result_bytes for b in self.timed())

    # -- baseline -----------------------------------------------------------------------------------------------

    def set_baseline(self, name: str, source: str, cache: Path | None, profile: bool = False) -> Judgement:
        """Judge the baseline, and fix from it the calls in a slice, the band in which it must stay, and the spread of a slice.
        The judgement's rates are what this GPU copies and multiplies, by measurement. profile: read hardware counters too."""
        started = time.monotonic()
        self.baseline = name
        self.children.know(name, source, cache)
        judgement = Judgement("measured", level="baseline", rates=rates.measure())
        self._make_benches()
        spreads = []
        try:
            child = guarded(self.child_of, source, cache)
            self.children.sides[name] = child
            self.open(child, "check", "held_out")
            self.check(child, judgement, "check", "held_out")
            judgement.tuned, _ = guarded(self.children.learn, child, source)
            for bench in self.timed():
                bench.refill()
                guarded(bench.calibrate, child)
                slices = [guarded(bench.slice, child).us for _ in range(7)]
                middle, low, high, _ = median_interval(slices, 0)
                spreads.append(statistics.stdev([math.log(us) for us in slices]))
                self.alone[bench.case.name] = middle
                guarded(bench.done, child)
                judgement.times[bench.case.name] = (middle, low, high, len(slices) * bench.calls)
        except Refused as no:
            return no.judgement(judgement.checks)
        self.sigma = math.sqrt(sum(s**2 for s in spreads)) / len(spreads)
        self.known[name] = (0.0, 0.0)
        if profile:
            counters(self, judgement, source, cache)
        judgement.costs["judge"] = time.monotonic() - started
        return judgement

    # -- stages -------------------------------------------------------------------------------------------------

    def open(self, child: Child, *roles: str) -> None:
        """Open the buffers of the cases of these roles, and of the timed ones, in a child."""
        for bench in (*(self.benches[n] for n in self.small(*roles)), *self.timed()):
            bench.forget()
            guarded(bench.bind, child)

    def check(self, child: Child, judgement: Judgement, *roles: str) -> None:
        """The verdict, on buffers that are open."""
        self.checks.run(child, judgement, self.small(*roles), self.names("timed"))

    def _screen(self, child: Child, judgement: Judgement, best: float) -> float:
        """Rounds of one slice of each timed case, as few as it takes to see that a candidate lost: its mean log speed-up."""
        race = Race(CONTENDER, self.sigma)
        slices: dict[str, list[Slice]] = {b.case.name: [] for b in self.timed()}
        for _ in range(ROUNDS):
            round_: list[float] = []
            for bench in self.timed():
                one = guarded(bench.slice, child)
                slices[bench.case.name].append(one)
                round_.append(math.log(self.alone[bench.case.name] / one.us))
            if race.lost(statistics.fmean(round_) - best):
                break
        logs = []
        for bench in self.timed():
            name, seen = bench.case.name, slices[bench.case.name]
            guarded(bench.done, child)
            middle, low, high, _ = median_interval([s.us for s in seen], 0)
            self.timer.timely(bench, seen)
            self.timer.believable(bench, middle)
            judgement.times[name] = (middle, low, high, len(seen) * bench.calls)
            logs.append(math.log(self.alone[name] / middle))
        return statistics.fmean(logs)

    def _healthy(self) -> None:
        """A known kernel, right and about as fast as ever, before the next candidate. Raises Quarantined when that fails twice.

        A GPU is never reset: it is left out.
        """
        bench = self.timed()[0]
        why = ""
        for _ in range(2):
            try:
                bench.forget()
                bench.refill()
                us = min(bench.slice(self.children.side(self.baseline)).us for _ in range(2))
                if us <= (1 + HEALTHY) * self.alone[bench.case.name]:
                    return
                why = f"the baseline takes {us:.1f} us, {self.alone[bench.case.name]:.1f} us before"
            except (Wrong, CandidateError, ChildDied, RunFailed, RuntimeError) as err:  # torch's own errors are RuntimeErrors
                why = str(err)
            self.children.end(self.baseline)
        self.quarantine = f"{self.gpu} failed its health check twice after a candidate's violent end: {why}"
        raise Quarantined(f"{self.quarantine}. It is left out; see nvidia-smi.")

    # -- the doors ----------------------------------------------------------------------------------------------

    def judge(self, name: str, source: str, cache: Path | None, incumbent: str, incumbent_source: str,
              incumbent_cache: Path | None, incumbent_log: float = 0.0) -> Judgement:
        """Check and time one candidate in a fresh child: screening, and if it contends, pairs with the incumbent.

        incumbent_log: log speed-up of the incumbent over the baseline, for one that this GPU has not judged itself.
        Raises Quarantined when the GPU may no longer be used.
        """
        if self.quarantine:
            raise Quarantined(f"{self.quarantine}. It is left out; see nvidia-smi.")
        judgement, clock = Judgement("measured", level="screened"), time.monotonic()
        for bench in self.benches.values():
            bench.seconds = 0.0
        child: Child | None = None
        keep = False

        def lap(stage: str) -> None:
            nonlocal clock
            judgement.costs[stage] = round(time.monotonic() - clock, 4)
            clock = time.monotonic()

        try:
            child = guarded(self.child_of, source, cache)
            lap("start")
            self.open(child, "check")
            lap("open")
            self.children.prepare()  # not before the buffers are open: the driver does one such thing at a time
            self.check(child, judgement, "check")
            judgement.tuned, spent = guarded(self.children.learn, child, source)
            lap("verify")
            if spent:
                judgement.costs["tune"] = round(spent, 4)
            self.children.settle()
            self.children.know(incumbent, incumbent_source, incumbent_cache)
            best, best_sd = self.known.setdefault(incumbent, (incumbent_log, 0.02))
            judgement.log_speedup, judgement.sd = self._screen(child, judgement, best), 0.02
            lap("screen")
            if judgement.log_speedup > best - CONTENDER:
                gain = mean_over_cases([self.timer.pair(incumbent, child, b, 6) for b in self.timed()])
                judgement.log_speedup = best + gain.log
                judgement.sd, judgement.level = max(math.hypot(gain.sd, best_sd), 0.002), "paired"
                lap("pair")
                keep = gain.low > 0  # only a gain that is one: noise must not move the reference
            Final(self, name, source, cache, ()).prove(None if keep else child)
            lap("prove")
            if keep:
                self.children.adopt(name, child, source, cache, but=self.baseline)
                self.known[name] = (judgement.log_speedup, judgement.sd)
            judgement.low = judgement.log_speedup - 1.96 * judgement.sd
            judgement.high = judgement.log_speedup + 1.96 * judgement.sd
        except Refused as no:
            keep = False
            judgement = no.judgement(judgement.checks, judgement.costs)
        finally:
            clock = time.monotonic()
            if child is not None and not keep:
                self.children.discard(child)
        if judgement.kind in VIOLENT:
            self.children.settle()
            with contextlib.suppress(Quarantined):  # this candidate has its outcome; the next call says what became of the GPU
                self._healthy()
            if self.quarantine:
                judgement.kind, judgement.detail = "gpu_fault", f"{judgement.detail}; {self.quarantine}"
        lap("end")
        self.children.prepare()
        judgement.costs["kernels"] = round(sum(b.seconds for b in self.benches.values()), 4)
        return judgement

    def final(self, name: str, source: str, cache: Path | None, screened: int = 1, runs: int = 3, pairs: int = 8,
              facts: Sequence[Any] = (), profile: bool = False) -> Judgement:
        """The number to report: fresh process pairs against the baseline, held-out cases, slices checked whole.

        In every run the baseline is timed alone before the candidate's process exists, and must stay near that beside it.
        screened: candidates among which this one was picked. facts: compiled facts of its launches (KernelFacts); profile:
        read hardware counters too. The
        judgement's `gain` says whether the result counts as a gain beyond what identical code shows here (`floor`); `bound` is
        the lower bound of its log that was used.
        Kind 'infra' means that the GPU was too unsteady for a number, and says nothing of the candidate.
        Raises Quarantined when the GPU may no longer be used.
        """
        if self.quarantine:
            raise Quarantined(f"{self.quarantine}. It is left out; see nvidia-smi.")
        judgement = Final(self, name, source, cache, facts).run(screened, runs, pairs)
        if profile and judgement.kind == "measured":
            counters(self, judgement, source, cache)
        if judgement.kind in VIOLENT:
            self._healthy()
        return judgement

    def close(self) -> None:
        self.children.close()
        for bench in self.benches.values():
            with contextlib.suppress(Exception):
                bench.close()
