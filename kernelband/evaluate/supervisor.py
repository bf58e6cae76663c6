"""The supervisor of one GPU: judges candidates in disposable children, keeps the clock, and trusts none of them.

A plain class; an actor only wraps it. It imports the (trusted) task, owns the GPU's buffers and oracle results, and
never imports candidate code. The baseline and the incumbent have long-lived children of their own; every candidate gets
a fresh one. One thing happens on the GPU at a time: no child is started, checked or ended while another is timed.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch

from kernelband.device import Peaks, roofline_us
from kernelband.errors import Quarantined, RunFailed
from kernelband.evaluate import rates
from kernelband.evaluate.bench import Bench, Wrong
from kernelband.evaluate.checks import Checks, guarded
from kernelband.evaluate.children import Children
from kernelband.evaluate.inside.cudrv import CudaError
from kernelband.evaluate.judgement import LAYERS, Judgement, Refused
from kernelband.evaluate.measure import (
    Race,
    Ratio,
    Slice,
    alternate,
    combine_runs,
    counts_as_gain,
    disagreement,
    mean_over_cases,
    median_interval,
    noise_floor,
    ratio,
    untimely,
)
from kernelband.evaluate.zygote import CandidateError, Child, ChildDied
from kernelband.task import Task

CONTENDER = 0.03
"""A candidate whose screening is within 3 % of the incumbent is paired with it."""

ROUNDS = 3
"""Most rounds of screening, one slice of each timed case a round."""

PHYSICS = 0.9
"""Below this share of the roofline of the least work a time is not believed (peaks are known to about 10 %)."""

BAND = 0.10
"""How much slower than alone, in the same process, the baseline may be beside a candidate. A candidate that slows it on purpose
can win at most this; unlocked clocks and two resident contexts account for a few per cent."""

HEALTHY = 0.25
"""After a candidate's violent end the baseline must take no more than this share longer than alone."""

TRIES = 3
"""A run of the final check that a busy GPU spoilt is taken again this often."""

WHOLE = 7
"""Slices that are checked whole, of each side and case, in the final check."""

LAUNCH_BOUND_US = 60.0
"""Calls shorter than this are mostly their launch from Python; they are timed in a CUDA graph as well."""

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
        self.known: dict[str, tuple[float, float]] = {}
        """Version -> (log speed-up over the baseline, its s.d.), of those that may stand beside a candidate."""
        self.baseline = ""
        self.alone: dict[str, float] = {}
        self.sigma = Race.SIGMA
        self.proved: set[str] = set()
        self.quarantine = ""

    # -- names of cases, buffers ----------------------------------------------------------------------------------

    def _names(self, *roles: str) -> list[str]:
        return [c.name for c in self.task.with_role(*roles)]  # type: ignore[arg-type]

    def timed(self) -> list[Bench]:
        """The benches of the timed cases, in the task's order."""
        return [self.benches[n] for n in self._names("timed")]

    def bind_timed(self, child: Child) -> None:
        """Open the buffers of all timed cases in a child."""
        for bench in self.timed():
            bench.bind(child)

    def child_of(self, source: str, cache: Path | None) -> Child:
        """A fresh child that has loaded the source. Raises Refused, CandidateError, ChildDied."""
        return self.children.fresh(source, cache)

    def _make_benches(self) -> None:
        guards: tuple[bool | None, ...] = (True, False) if "guard" not in self.off else (None,)
        for i, case in enumerate(self.task.with_role("check", "held_out")):
            try:
                made = Bench(self.task, case, 1, self.timeout_s, guard=guards[i % len(guards)], off=self.off)
            except CudaError as err:
                self.warn(f"guarded buffers are off: {err}")
                guards = (None,)
                made = Bench(self.task, case, 1, self.timeout_s, off=self.off)
            self.benches[case.name] = made
        for case in self.task.with_role("timed"):
            self.benches[case.name] = Bench(self.task, case, None, self.timeout_s, self.l2, torch.cuda.mem_get_info()[0],
                                            off=self.off)

    # -- baseline -----------------------------------------------------------------------------------------------

    def set_baseline(self, name: str, source: str, cache: Path | None) -> Judgement:
        """Judge the baseline, and fix from it the calls in a slice, the band in which it must stay, and the spread of a slice.
        The judgement's rates are what this GPU copies and multiplies, by measurement."""
        started = time.monotonic()
        self.baseline = name
        self.children.know(name, source, cache)
        judgement = Judgement("measured", level="baseline", rates=rates.measure())
        self._make_benches()
        spreads = []
        try:
            child = guarded(self.child_of, source, cache)
            self.children.sides[name] = child
            self._check(child, judgement, "check", "held_out")
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
        judgement.costs["judge"] = time.monotonic() - started
        return judgement

    # -- stages -------------------------------------------------------------------------------------------------

    def _check(self, child: Child, judgement: Judgement, *roles: str) -> None:
        small = self._names(*roles)
        for bench in (*(self.benches[n] for n in small), *self.timed()):
            bench.forget()
            guarded(bench.bind, child)
        self.checks.run(child, judgement, small, self._names("timed"))

    def _believable(self, bench: Bench, us: float) -> None:
        if self.peaks is None or self.task.work is None or "physics" in self.off:
            return
        moved, flops = self.task.work(bench.case)
        floor = roofline_us(self.peaks, moved, flops, bench.case.dtype)
        if us < PHYSICS * floor:
            raise Refused("faster_than_physics", f"{bench.case.name}: {us:.1f} us is faster than physics: the least work "
                                                 f"takes {floor:.1f} us at the peaks of {self.peaks.name}", "physics")

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
            self._timely(bench, seen)
            self._believable(bench, middle)
            judgement.times[name] = (middle, low, high, len(seen) * bench.calls)
            logs.append(math.log(self.alone[name] / middle))
        return statistics.fmean(logs)

    def _timely(self, bench: Bench, slices: list[Slice]) -> None:
        if "events" not in self.off and bench.calls * slices[0].us > 5_000:  # shorter slices are mostly hand-over
            told = untimely(slices)
            if told:
                raise Refused("timing_inconsistent", f"{bench.case.name}: {told}", "events")

    def _pair(self, name: str, child: Child, bench: Bench, pairs: int, alone: float | None = None) -> Ratio:
        """Paired slices of the side `name` (A) and a candidate (B). alone: microseconds of A by itself; beside B it must
        stay within BAND of that."""

        def side_a() -> Slice:
            try:
                return bench.slice(self.children.side(name))
            except (Wrong, CandidateError, ChildDied) as err:
                raise self._blame(name, child, bench, err) from None

        done = alternate(side_a, lambda: guarded(bench.slice, child), pairs, bool(secrets.randbelow(2)))
        for side in (self.children.side(name), child):
            guarded(bench.done, side)
        self._timely(bench, [b for _, b in done])
        if alone is not None and "band" not in self.off:
            beside = median_interval([a.us for a, _ in done], 0)[0]
            if beside > (1 + BAND) * alone:
                raise Refused("infra", f"{bench.case.name}: the baseline took {beside:.1f} us beside the candidate, "
                                       f"{alone:.1f} us alone", "band")
        return ratio(done)

    def _blame(self, name: str, child: Child, bench: Bench, err: Exception) -> Exception:
        """The reference side failed beside a candidate: whose fault was it? RunFailed only if it fails by itself too."""
        child.kill()
        changed = bench.altered()
        self.children.end(name)
        bench.refill()
        bench.forget()
        try:
            bench.slice(self.children.side(name))
        except (Wrong, CandidateError, ChildDied) as again:
            return RunFailed(f"{bench.case.name}: {name}, which ran before, fails by itself now: {again}. The GPU may be in "
                             f"a bad state; see nvidia-smi.")
        if changed:
            return Refused("tampered", f"{bench.case.name}: input {changed!r} was written to beside the reference side", "inputs")
        if isinstance(err, Wrong) and err.layer == "late":
            return Refused("tampered", f"{bench.case.name}: {err.verdict.detail}", "late")
        return Refused("infra", f"{bench.case.name}: the reference side failed beside the candidate and runs without it: {err}",
                       "band")

    def _prove(self, name: str, source: str, cache: Path | None) -> None:
        """Nothing may be right when the candidate's kernels do nothing, in a child of its own. Raises Refused."""
        if name in self.proved or "what_ran" in self.off or tuple(self.task.contract.allow) != ("own",):
            return
        child = guarded(self.child_of, source, cache)
        try:
            small = self._names("check")
            for case in small:
                self.benches[case].forget()
                guarded(self.benches[case].bind, child)
            told = self.checks.without_kernels(child, small)
        finally:
            child.kill()
        if told:
            raise Refused("not_a_kernel", f"{told}: the result is right without any kernel of the candidate's own; the contract "
                                          f"allows only {', '.join(self.task.contract.allow)}", "what_ran")
        self.proved.add(name)

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
            self.children.prepare()
            self._check(child, judgement, "check")
            lap("verify")
            self.children.settle()
            self.children.know(incumbent, incumbent_source, incumbent_cache)
            best, best_sd = self.known.setdefault(incumbent, (incumbent_log, 0.02))
            judgement.log_speedup, judgement.sd = self._screen(child, judgement, best), 0.02
            lap("screen")
            if judgement.log_speedup > best - CONTENDER:
                gain = mean_over_cases([self._pair(incumbent, child, b, 6) for b in self.timed()])
                judgement.log_speedup = best + gain.log
                judgement.sd, judgement.level = max(math.hypot(gain.sd, best_sd), 0.002), "paired"
                lap("pair")
                if gain.low > 0:  # only a gain that is one: noise must not move the reference
                    self._prove(name, source, cache)
                    self.children.adopt(name, child, source, cache, but=self.baseline)
                    self.known[name] = (judgement.log_speedup, judgement.sd)
                    keep = True
                    lap("prove")
            judgement.low = judgement.log_speedup - 1.96 * judgement.sd
            judgement.high = judgement.log_speedup + 1.96 * judgement.sd
        except Refused as no:
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

    def final(self, name: str, source: str, cache: Path | None, screened: int = 1, runs: int = 3, pairs: int = 8) -> Judgement:
        """The number to report: fresh process pairs against the baseline, held-out cases, slices checked whole.

        In every run the baseline is timed alone before the candidate's process exists, and must stay near that beside it.
        screened: candidates among which this one was picked. The judgement's `gain` says whether the result counts as a gain
        beyond what identical code shows here (`floor`); `bound` is the lower bound of its log that was used.
        Kind 'infra' means that the GPU was too unsteady for a number, and says nothing of the candidate.
        Raises Quarantined when the GPU may no longer be used.
        """
        if self.quarantine:
            raise Quarantined(f"{self.quarantine}. It is left out; see nvidia-smi.")
        judgement, started = Judgement("measured", level="final"), time.monotonic()
        told: list[dict[str, Ratio]] = []
        times: dict[str, list[float]] = {}
        try:
            self._prove(name, source, cache)
            floor = self._floor(pairs)
            for run in range(runs):
                for attempt in range(TRIES):
                    try:
                        one, us = self._final_run(source, cache, judgement, pairs, first=run == 0)
                        break
                    except Refused as no:
                        if no.kind != "infra" or attempt == TRIES - 1:
                            raise
                told.append(one)
                for case, values in us.items():
                    times.setdefault(case, []).extend(values)
        except Refused as no:
            judgement = no.judgement(judgement.checks)
            if judgement.kind in VIOLENT:
                self._healthy()
            return judgement
        # Cases of one process pair share its luck: they are averaged first, and runs are what varies.
        means = [mean_over_cases(list(run.values())) for run in told]
        whole = combine_runs(means)
        for n, values in times.items():
            middle, low, high, _ = median_interval(values, 0)
            judgement.times[n] = (middle, low, high, len(values) * self.benches[n].calls)
        judgement.log_speedup, judgement.low, judgement.high, judgement.sd = whole.log, whole.low, whole.high, whole.sd
        judgement.floor = floor
        judgement.gain, judgement.bound = counts_as_gain(means, screened, floor)
        judgement.costs["final"] = time.monotonic() - started
        return judgement

    def _floor(self, pairs: int) -> float:
        """What the baseline seems to gain over itself: two fresh processes with the same source (a share)."""
        self.children.settle()
        self.children.end(*self.children.sides)
        source, cache = self.children.sources[self.baseline]
        twin = guarded(self.child_of, source, cache)
        try:
            self.bind_timed(twin)
            self.children.side(self.baseline)
            same = []
            for bench in self.timed():
                bench.refill()
                bench.forget()
                same.append(self._pair(self.baseline, twin, bench, pairs))
        finally:
            twin.kill()
        return noise_floor([mean_over_cases(same)])

    def _final_run(self, source: str, cache: Path | None, judgement: Judgement, pairs: int,
                   first: bool) -> tuple[dict[str, Ratio], dict[str, list[float]]]:
        """One fresh process pair: case -> log of baseline over candidate; case -> microseconds a call of the candidate."""
        self.children.end(*self.children.sides)
        base = self.children.side(self.baseline)
        alone: dict[str, float] = {}
        for bench in self.timed():
            bench.forget()
            bench.refill()
            alone[bench.case.name] = median_interval([bench.slice(base).us for _ in range(5)], 0)[0]
            bench.done(base)
        child = guarded(self.child_of, source, cache)
        try:
            roles = ("check", "held_out") if first and "held_out" not in self.off else ("check",)
            self._check(child, judgement, *roles)
            if first:
                self.checks.repeat(child, judgement, self._names("timed"))
            told, times = {}, {}
            for bench in self.timed():
                case = bench.case.name
                told[case] = self._pair(self.baseline, child, bench, pairs, alone[case])
                times[case] = [guarded(bench.slice, child).us for _ in range(3)]
                middle = median_interval(times[case], 0)[0]
                self._believable(bench, middle)
                if first and "whole" not in self.off:
                    self._whole(child, bench, alone[case], middle)
                guarded(bench.done, child)
            if first:
                self._graphs(child, judgement, alone)
            return told, times
        finally:
            child.kill()

    def _whole(self, child: Child, bench: Bench, base_us: float, us: float) -> None:
        """Slices of which every result is delivered must show the gain that long ones claim. Raises Refused."""
        base = self.children.side(self.baseline)
        ours, theirs = [], []
        for _ in range(WHOLE):
            theirs.append(bench.whole(base))
            ours.append(guarded(bench.whole, child))
        odd = disagreement(theirs, ours, len(bench.slots), base_us, us)
        if odd:
            raise Refused("timing_inconsistent", f"{bench.case.name}: {odd}", "whole")

    def _graphs(self, child: Child, judgement: Judgement, alone: dict[str, float]) -> None:
        """Short calls once more in a CUDA graph, on both sides: what is left without the launch from Python. Last in a child's
        life, for a capture that fails may spoil it; then there is no such number."""
        for bench in self.timed():
            case = bench.case.name
            if bench.once or alone[case] > LAUNCH_BOUND_US:
                continue
            times = []
            for side in (self.children.side(self.baseline), child):
                try:
                    times.append(statistics.median(bench.slice(side, graph=True).us for _ in range(5)))
                    bench.done(side)
                except (Wrong, CandidateError, ChildDied):
                    bench.forget()
                    break
            if len(times) == 2:
                judgement.graph[case] = (times[0], times[1])
            else:
                return

    def close(self) -> None:
        self.children.close()
        for bench in self.benches.values():
            with contextlib.suppress(Exception):
                bench.close()
