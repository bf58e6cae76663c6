"""The supervisor of one GPU: judges candidates in disposable children, keeps the clock, and trusts none of them.

A plain class; an actor only wraps it. It imports the (trusted) task, owns the GPU's buffers and oracle results, and
never imports candidate code. The baseline and the incumbent have long-lived children of their own; every candidate gets
a fresh one. One thing happens on the GPU at a time: no child is started, checked or ended while another is timed.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kernelband.device import Peaks, roofline_us
from kernelband.errors import RunFailed
from kernelband.evaluate import verify
from kernelband.evaluate.bench import Bench, Wrong
from kernelband.evaluate.binaries import deliver_cache
from kernelband.evaluate.judgement import Judgement, Refused, refusal
from kernelband.evaluate.measure import (
    Ratio,
    Slice,
    alternate,
    combine_runs,
    disagreement,
    mean_over_cases,
    median_interval,
    ratio,
    untimely,
)
from kernelband.evaluate.zygote import CandidateError, Child, ChildDied, SandboxError, Zygote
from kernelband.task import Task

CONTENDER = 0.03
"""A candidate whose screening is within 3 % of the incumbent is paired with it."""

PHYSICS = 0.9
"""Below this share of the roofline of the least work a time is not believed (peaks are known to about 10 %)."""

BAND = 0.10
"""How much slower than alone, in the same process, the baseline may be beside a candidate. A candidate that slows it on purpose
can win at most this; unlocked clocks and two resident contexts account for a few per cent."""

TRIES = 3
"""A run of the final check that a busy GPU spoilt is taken again this often."""


def _give(cache: Path, workdir: Path) -> None:
    """Put compiled files where the child's Triton looks first, owned by the child: its own copy, never the run's."""
    home = workdir / "triton"
    deliver_cache(cache, home)
    owner = os.stat(workdir)
    for path in (home, *home.rglob("*")):
        os.chown(path, owner.st_uid, owner.st_gid)


def _alive(child: Child) -> bool:
    try:
        child.request("ping", timeout_s=10)
    except (ChildDied, CandidateError):
        return False
    return True


class Supervisor:
    """Owns one GPU for one task.

    peaks may be None for a GPU that is not in the table: the test against physics is then left out, with a warning.
    Raises RunFailed if the GPU cannot be used, UserError if the oracle cannot.
    """

    def __init__(self, task: Task, peaks: Peaks | None, *, timeout_s: float = 60.0, hide: Sequence[str] = (),
                 warn: Callable[[str], None] = lambda text: None):
        self.task, self.peaks, self.warn, self.timeout_s = task, peaks, warn, timeout_s
        torch.cuda.init()
        properties = torch.cuda.get_device_properties(0)
        self.gpu, self.l2 = properties.name, properties.L2_cache_size
        if peaks is None:
            warn(f"no datasheet peaks for {self.gpu}: results are not tested against the roofline")
        self.zygote = Zygote("cuda", warn=warn, hide=hide)
        self.benches: dict[str, Bench] = {}
        self.sides: dict[str, Child] = {}
        self.known: dict[str, tuple[float, float]] = {}
        """Version -> (log speed-up over the baseline, its s.d.), of those that may stand beside a candidate."""
        self.sources: dict[str, tuple[str, Path | None]] = {}
        self.baseline = ""
        self.alone: dict[str, float] = {}

    # -- children -----------------------------------------------------------------------------------------------

    def child_of(self, source: str, cache: Path | None) -> Child:
        """A fresh child that has a context and has loaded the source. Raises Refused("infra") when ours is the fault."""
        try:
            child = self.zygote.spawn()
        except (ChildDied, SandboxError) as err:
            raise Refused("infra", f"no child could be started: {err}", "process") from None
        try:
            try:
                if cache is not None:
                    _give(cache, Path(child.workdir))
                child.request("start", timeout_s=self.timeout_s)
            except (ChildDied, CandidateError) as err:  # nothing of the candidate was loaded yet
                raise Refused("infra", f"a fresh process could not use the GPU: {err}", "process") from None
            child.request("load", timeout_s=self.timeout_s, source=source, entry=self.task.entry)
        except BaseException:
            child.kill()
            raise
        return child

    def bind_timed(self, child: Child) -> None:
        """Open the buffers of all timed cases in a child."""
        self._bind(child, self.timed())

    def _bind(self, child: Child, benches: list[Bench]) -> None:
        for bench in benches:
            child.request("bind", timeout_s=self.timeout_s, **bench.bindings())

    def timed(self) -> list[Bench]:
        """The benches of the timed cases, in the task's order."""
        return [self.benches[c.name] for c in self.task.with_role("timed")]

    # -- baseline -----------------------------------------------------------------------------------------------

    def set_baseline(self, name: str, source: str, cache: Path | None) -> Judgement:
        """Judge the baseline, and fix from it the calls in a slice and the band in which it must stay."""
        started = time.monotonic()
        self.baseline, self.sources[name] = name, (source, cache)
        for case in self.task.with_role("check", "held_out"):
            self.benches[case.name] = Bench(self.task, case, 1, self.timeout_s)
        for case in self.task.with_role("timed"):
            self.benches[case.name] = Bench(self.task, case, None, self.timeout_s, self.l2, torch.cuda.mem_get_info()[0])
        judgement = Judgement("measured", level="baseline")
        try:
            child = self._guard(judgement, self.child_of, source, cache)
            self.sides[name] = child
            self._check(child, judgement, with_held_out=True)
            for bench in self.timed():
                self._guard(judgement, bench.calibrate, child)
                slices = [self._guard(judgement, bench.slice, child).us for _ in range(7)]
                middle, low, high, _ = median_interval(slices, 0)
                self.alone[bench.case.name] = middle
                self._guard(judgement, bench.done, child)
                judgement.times[bench.case.name] = (middle, low, high, len(slices) * bench.calls)
        except Refused as no:
            return no.judgement(judgement.checks)
        self.known[name] = (0.0, 0.0)
        judgement.costs["judge"] = time.monotonic() - started
        return judgement

    def _side(self, name: str) -> Child:
        """The long-lived child of the baseline or the incumbent; a new one if it died."""
        child = self.sides.get(name)
        if child is None or not _alive(child):
            source, cache = self.sources[name]
            try:
                child = self.child_of(source, cache)
                self._bind(child, self.timed())
            except (ChildDied, CandidateError, Refused) as err:
                raise RunFailed(f"the child of {name}, which ran before, cannot be started again: {err}. The GPU may be "
                                f"in a bad state; see nvidia-smi.") from None
            self.sides[name] = child
        return child

    # -- stages -------------------------------------------------------------------------------------------------

    def _guard(self, judgement: Judgement, what: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a step on a candidate's child; its failures become a refusal with the right kind."""
        try:
            return what(*args, **kwargs)
        except Wrong as no:
            raise Refused(no.verdict.kind, no.verdict.detail, "sample") from None
        except (CandidateError, ChildDied) as err:
            raise refusal(err) from None

    def _check(self, child: Child, judgement: Judgement, with_held_out: bool) -> None:
        """All check cases in two input families, then one call on a slot of each timed case. Raises Refused."""
        roles = ("check", "held_out") if with_held_out else ("check",)
        small = [self.benches[c.name] for c in self.task.with_role(*roles)]  # type: ignore[arg-type]
        self._guard(judgement, self._bind, child, small + self.timed())
        for i, bench in enumerate(small):
            slot = next(iter(bench.slots))
            for family in verify.families_for(self.task.contract, i, len(small)):
                bench.refill(family)
                self._one(child, judgement, bench, slot, family, i)
        for i, bench in enumerate(self.timed()):
            bench.refill()
            names = list(bench.slots)
            self._one(child, judgement, bench, names[secrets.randbelow(len(names))], "drawn", i)

    def _one(self, child: Child, judgement: Judgement, bench: Bench, slot: str, family: str, poison: int) -> None:
        where = bench.case.name if bench.case.role != "held_out" else "a held-out case"
        verdict = self._guard(judgement, bench.check, child, slot, poison)
        judgement.checks[f"{bench.case.name}/{family}"] = "pass" if verdict.ok else verdict.kind
        if not verdict.ok:
            raise Refused(verdict.kind, f"{where} ({family} inputs): {verdict.detail}", "values")
        if self.task.contract.deterministic:
            first = [t.clone() for t in bench.outputs.tensors]
            if bench.once:
                bench.restore()
            self._guard(judgement, bench.check, child, slot, poison + 1)
            if not all(torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
                       for a, b in zip(first, bench.outputs.tensors, strict=True)):
                raise Refused("wrong", f"{where}: two calls on the same inputs differ, and the contract asks for "
                                        f"determinism", "repeat")

    def _believable(self, bench: Bench, us: float) -> None:
        if self.peaks is None or self.task.work is None:
            return
        moved, flops = self.task.work(bench.case)
        floor = roofline_us(self.peaks, moved, flops, bench.case.dtype)
        if us < PHYSICS * floor:
            raise Refused("faster_than_physics", f"{bench.case.name}: {us:.1f} us is faster than physics: the least work "
                                                 f"takes {floor:.1f} us at the peaks of {self.peaks.name}", "physics")

    def _screen(self, child: Child, judgement: Judgement) -> dict[str, float]:
        times = {}
        for bench in self.timed():
            slices = [self._guard(judgement, bench.slice, child) for _ in range(3)]
            self._guard(judgement, bench.done, child)
            middle, low, high, _ = median_interval([s.us for s in slices], 0)
            self._timely(bench, slices)
            self._believable(bench, middle)
            times[bench.case.name] = middle
            judgement.times[bench.case.name] = (middle, low, high, len(slices) * bench.calls)
        return times

    def _timely(self, bench: Bench, slices: list[Slice]) -> None:
        if bench.calls * slices[0].us > 5_000:  # shorter slices are mostly hand-over
            told = untimely(slices)
            if told:
                raise Refused("timing_inconsistent", f"{bench.case.name}: {told}", "events")

    def _pair(self, name: str, child: Child, judgement: Judgement, bench: Bench, pairs: int,
              alone: float | None = None) -> Ratio:
        """Paired slices of the side `name` (A) and a candidate (B). alone: microseconds of A by itself; beside B it must
        stay within BAND of that."""

        def side_a() -> Slice:
            try:
                return bench.slice(self._side(name))
            except (Wrong, CandidateError, ChildDied) as err:
                raise self._blame(name, child, bench, err) from None

        done = alternate(side_a, lambda: self._guard(judgement, bench.slice, child), pairs, bool(secrets.randbelow(2)))
        for side in (self._side(name), child):
            self._guard(judgement, bench.done, side)
        self._timely(bench, [b for _, b in done])
        if alone is not None:
            beside = median_interval([a.us for a, _ in done], 0)[0]
            if beside > (1 + BAND) * alone:
                raise Refused("infra", f"{bench.case.name}: the baseline took {beside:.1f} us beside the candidate, "
                                       f"{alone:.1f} us alone", "band")
        return ratio(done)

    def _blame(self, name: str, child: Child, bench: Bench, err: Exception) -> Exception:
        """The reference side failed beside a candidate: whose fault was it? RunFailed only if it fails by itself too."""
        child.kill()
        changed = bench.altered()
        side = self.sides.pop(name, None)
        if side is not None:
            side.kill()
        bench.refill()
        try:
            bench.slice(self._side(name))
        except (Wrong, CandidateError, ChildDied) as again:
            return RunFailed(f"{bench.case.name}: {name}, which ran before, fails by itself now: {again}. The GPU may be in "
                             f"a bad state; see nvidia-smi.")
        if changed:
            return Refused("tampered", f"{bench.case.name}: input {changed!r} was written to beside the reference side", "inputs")
        return Refused("infra", f"{bench.case.name}: the reference side failed beside the candidate and runs without it: {err}",
                       "band")

    # -- the doors ----------------------------------------------------------------------------------------------

    def judge(self, name: str, source: str, cache: Path | None, incumbent: str, incumbent_source: str,
              incumbent_cache: Path | None, incumbent_log: float = 0.0) -> Judgement:
        """Check and time one candidate in a fresh child: screening, and if it contends, pairs with the incumbent.

        incumbent_log: log speed-up of the incumbent over the baseline, for one that this GPU has not judged itself.
        """
        judgement, clock = Judgement("measured", level="screened"), time.monotonic()
        child: Child | None = None
        keep = False

        def lap(stage: str) -> None:
            nonlocal clock
            judgement.costs[stage] = round(time.monotonic() - clock, 4)
            clock = time.monotonic()

        try:
            child = self._guard(judgement, self.child_of, source, cache)
            lap("start")
            self._check(child, judgement, with_held_out=False)
            lap("verify")
            times = self._screen(child, judgement)
            lap("screen")
            judgement.log_speedup = sum(math.log(self.alone[n] / us) for n, us in times.items()) / len(times)
            judgement.sd = 0.02
            self.sources.setdefault(incumbent, (incumbent_source, incumbent_cache))
            best, best_sd = self.known.setdefault(incumbent, (incumbent_log, 0.02))
            if judgement.log_speedup > best - CONTENDER:
                gain = mean_over_cases([self._pair(incumbent, child, judgement, b, 6) for b in self.timed()])
                judgement.log_speedup = best + gain.log
                judgement.sd, judgement.level = max(math.hypot(gain.sd, best_sd), 0.002), "paired"
                lap("pair")
                if gain.low > 0:  # only a gain that is one: noise must not move the reference
                    self._promote(name, source, cache, child, (judgement.log_speedup, judgement.sd))
                    keep = True
            judgement.low = judgement.log_speedup - 1.96 * judgement.sd
            judgement.high = judgement.log_speedup + 1.96 * judgement.sd
        except Refused as no:
            judgement = no.judgement(judgement.checks, judgement.costs)
        finally:
            if child is not None and not keep:
                child.kill()
        return judgement

    def _promote(self, name: str, source: str, cache: Path | None, child: Child, known: tuple[float, float]) -> None:
        for other in [n for n in self.sides if n != self.baseline]:
            self.sides.pop(other).kill()
        self.sides[name], self.sources[name], self.known[name] = child, (source, cache), known

    def final(self, name: str, source: str, cache: Path | None, runs: int = 3, pairs: int = 8) -> Judgement:
        """The number to report: fresh process pairs against the baseline, held-out cases, short checked slices.

        In every run the baseline is timed alone before the candidate's process exists, and must stay near that beside it.
        Kind 'infra' means that the GPU was too unsteady for a number, and says nothing of the candidate.
        """
        judgement, started = Judgement("measured", level="final"), time.monotonic()
        cases: dict[str, list[Ratio]] = {}
        times: dict[str, list[float]] = {}
        try:
            for run in range(runs):
                for attempt in range(TRIES):
                    try:
                        told = self._final_run(source, cache, judgement, pairs, first=run == 0)
                        break
                    except Refused as no:
                        if no.kind != "infra" or attempt == TRIES - 1:
                            raise
                for case, (pair, us) in told.items():
                    cases.setdefault(case, []).append(pair)
                    times.setdefault(case, []).extend(us)
        except Refused as no:
            return no.judgement(judgement.checks)
        # Cases of one process pair share its luck: they are averaged first, and runs are what varies.
        whole = combine_runs([mean_over_cases([cases[c][run] for c in cases]) for run in range(runs)])
        for n, values in times.items():
            middle, low, high, _ = median_interval(values, 0)
            judgement.times[n] = (middle, low, high, len(values) * self.benches[n].calls)
        judgement.log_speedup, judgement.low, judgement.high, judgement.sd = whole.log, whole.low, whole.high, whole.sd
        judgement.costs["final"] = time.monotonic() - started
        return judgement

    def _final_run(self, source: str, cache: Path | None, judgement: Judgement, pairs: int,
                   first: bool) -> dict[str, tuple[Ratio, list[float]]]:
        """One fresh process pair: case -> (log of baseline over candidate, microseconds a call of the candidate)."""
        for side in list(self.sides):
            self.sides.pop(side).kill()
        base = self._side(self.baseline)
        alone: dict[str, float] = {}
        for bench in self.timed():
            bench.refill()
            alone[bench.case.name] = median_interval([bench.slice(base).us for _ in range(5)], 0)[0]
            bench.done(base)
        child = self._guard(judgement, self.child_of, source, cache)
        try:
            self._check(child, judgement, with_held_out=first)
            told = {}
            for bench in self.timed():
                case = bench.case.name
                pair = self._pair(self.baseline, child, judgement, bench, pairs, alone[case])
                seen = [self._guard(judgement, bench.slice, child).us for _ in range(3)]
                middle = median_interval(seen, 0)[0]
                self._believable(bench, middle)
                if first and not bench.once:
                    ours = self._guard(judgement, bench.short, child, 9)
                    theirs = bench.short(self._side(self.baseline), 9)
                    odd = disagreement(theirs, ours, len(bench.slots), alone[case], middle)
                    if odd:
                        raise Refused("timing_inconsistent", f"{case}: {odd}", "whole")
                self._guard(judgement, bench.done, child)
                told[case] = (pair, seen)
            return told
        finally:
            child.kill()

    def close(self) -> None:
        for child in self.sides.values():
            with contextlib.suppress(Exception):
                child.kill()
        for bench in self.benches.values():
            with contextlib.suppress(Exception):
                bench.close()
        self.zygote.close()
