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
)
from kernelband.evaluate.zygote import CandidateError, Child, ChildDied, Zygote
from kernelband.task import Task

CONTENDER = 0.03
"""A candidate whose screening is within 3 % of the incumbent is paired with it."""

PHYSICS = 0.9
"""Below this share of the roofline of the least work a time is not believed (peaks are known to about 10 %)."""


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
        self.logs: dict[str, float] = {}
        self.sources: dict[str, tuple[str, Path | None]] = {}
        self.baseline = ""
        self.alone: dict[str, float] = {}

    # -- children -----------------------------------------------------------------------------------------------

    def child_of(self, source: str, cache: Path | None) -> Child:
        child = self.zygote.spawn()
        try:
            if cache is not None:
                _give(cache, Path(child.workdir))
            child.request("start", timeout_s=self.timeout_s)
            child.request("load", timeout_s=self.timeout_s, source=source, entry=self.task.entry)
        except BaseException:
            child.kill()
            raise
        return child

    def bind_timed(self, child: Child) -> None:
        """Open the buffers of all timed cases in a child."""
        self._bind(child, self._timed())

    def _bind(self, child: Child, benches: list[Bench]) -> None:
        for bench in benches:
            child.request("bind", timeout_s=self.timeout_s, **bench.bindings())

    def _timed(self) -> list[Bench]:
        return [self.benches[c.name] for c in self.task.with_role("timed")]

    # -- baseline -----------------------------------------------------------------------------------------------

    def set_baseline(self, name: str, source: str, cache: Path | None) -> Judgement:
        """Judge the baseline, and fix from it the calls in a slice and the band in which it must stay."""
        started = time.monotonic()
        self.baseline, self.sources[name] = name, (source, cache)
        for case in self.task.with_role("check", "held_out"):
            self.benches[case.name] = Bench(self.task, case, 1, self.timeout_s)
        for case in self.task.with_role("timed"):
            self.benches[case.name] = Bench(self.task, case, Bench.slots_for(self.task, case, self.l2), self.timeout_s)
        judgement = Judgement("measured", level="baseline")
        try:
            child = self._guard(judgement, self.child_of, source, cache)
            self.sides[name] = child
            self._check(child, judgement, with_held_out=True)
            for bench in self._timed():
                self._guard(judgement, bench.calibrate, child)
                slices = [self._guard(judgement, bench.slice, child).us for _ in range(7)]
                middle, low, high, _ = median_interval(slices, 0)
                self.alone[bench.case.name] = middle
                judgement.times[bench.case.name] = (middle, low, high, len(slices) * bench.calls)
        except Refused as no:
            return Judgement(no.kind, no.detail, checks=judgement.checks)
        self.logs[name] = 0.0
        judgement.costs["judge"] = time.monotonic() - started
        return judgement

    def _side(self, name: str) -> Child:
        """The long-lived child of the baseline or the incumbent; a new one if it died."""
        child = self.sides.get(name)
        if child is None or not _alive(child):
            source, cache = self.sources[name]
            try:
                child = self.child_of(source, cache)
                self._bind(child, self._timed())
            except (ChildDied, CandidateError) as err:
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
            raise Refused(no.verdict.kind, no.verdict.detail) from None
        except (CandidateError, ChildDied) as err:
            raise Refused(*refusal(err)) from None

    def _check(self, child: Child, judgement: Judgement, with_held_out: bool) -> None:
        """All check cases in two input families, then one call on a slot of each timed case. Raises Refused."""
        roles = ("check", "held_out") if with_held_out else ("check",)
        small = [self.benches[c.name] for c in self.task.with_role(*roles)]  # type: ignore[arg-type]
        self._guard(judgement, self._bind, child, small + self._timed())
        for i, bench in enumerate(small):
            slot = next(iter(bench.slots))
            for family in verify.family_for(self.task.contract, i):
                bench.refill(family)
                self._one(child, judgement, bench, slot, family, i)
        for i, bench in enumerate(self._timed()):
            bench.refill()
            names = list(bench.slots)
            self._one(child, judgement, bench, names[secrets.randbelow(len(names))], "drawn", i)

    def _one(self, child: Child, judgement: Judgement, bench: Bench, slot: str, family: str, poison: int) -> None:
        where = bench.case.name if bench.case.role != "held_out" else "a held-out case"
        verdict = self._guard(judgement, bench.check, child, slot, poison)
        judgement.checks[f"{bench.case.name}/{family}"] = "pass" if verdict.ok else verdict.kind
        if not verdict.ok:
            raise Refused(verdict.kind, f"{where} ({family} inputs): {verdict.detail}")
        if self.task.contract.deterministic:
            first = [t.clone() for t in bench.outputs.tensors]
            if bench.once:
                bench.restore()
            self._guard(judgement, bench.check, child, slot, poison + 1)
            if not all(torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
                       for a, b in zip(first, bench.outputs.tensors, strict=True)):
                raise Refused("wrong", f"{where}: two calls on the same inputs differ, and the contract asks for "
                                        f"determinism")

    def _believable(self, bench: Bench, us: float) -> None:
        if self.peaks is None or self.task.work is None:
            return
        moved, flops = self.task.work(bench.case)
        floor = roofline_us(self.peaks, moved, flops, bench.case.dtype)
        if us < PHYSICS * floor:
            raise Refused("faster_than_physics", f"{bench.case.name}: {us:.1f} us is faster than physics: the least work "
                                                 f"takes {floor:.1f} us at the peaks of {self.peaks.name}")

    def _screen(self, child: Child, judgement: Judgement) -> dict[str, float]:
        times = {}
        for bench in self._timed():
            slices = [self._guard(judgement, bench.slice, child) for _ in range(3)]
            middle, low, high, _ = median_interval([s.us for s in slices], 0)
            self._believable(bench, middle)
            times[bench.case.name] = middle
            judgement.times[bench.case.name] = (middle, low, high, len(slices) * bench.calls)
        return times

    def _pair(self, a: Child, b: Child, judgement: Judgement, bench: Bench, pairs: int, hold: bool) -> Ratio:
        """Paired slices of a trusted-by-habit side A and a candidate B. hold: A must stay in the baseline's band."""

        def side_a() -> Slice:
            try:
                return bench.slice(a)
            except (Wrong, CandidateError, ChildDied) as err:
                raise RunFailed(f"the reference side of a paired measurement failed: {err}") from None

        done = alternate(side_a, lambda: self._guard(judgement, bench.slice, b), pairs, bool(secrets.randbelow(2)))
        if hold:
            beside = sorted(s.us for s, _ in done)[len(done) // 2]
            alone = self.alone[bench.case.name]
            if beside > 1.15 * alone:
                raise Refused("infra", f"{bench.case.name}: the baseline took {beside:.1f} us beside the candidate, "
                                        f"{alone:.1f} us alone")
        return ratio(done)

    # -- the doors ----------------------------------------------------------------------------------------------

    def judge(self, name: str, source: str, cache: Path | None, incumbent: str) -> Judgement:
        """Check and time one candidate in a fresh child: screening, and if it contends, pairs with the incumbent."""
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
            logs = [math.log(self.alone[n] / us) for n, us in times.items()]
            judgement.log_speedup = sum(logs) / len(logs)
            judgement.sd = 0.02
            if incumbent not in self.sources:
                incumbent = self.baseline
            if judgement.log_speedup > self.logs[incumbent] - CONTENDER:
                other = self._side(incumbent)
                gain = mean_over_cases([self._pair(other, child, judgement, b, 6, False) for b in self._timed()])
                judgement.log_speedup = self.logs[incumbent] + gain.log
                judgement.sd, judgement.level = max(gain.sd, 0.002), "paired"
                lap("pair")
                if gain.log > 0:
                    self._promote(name, source, cache, child, judgement.log_speedup)
                    keep = True
            judgement.low = judgement.log_speedup - 1.96 * judgement.sd
            judgement.high = judgement.log_speedup + 1.96 * judgement.sd
        except Refused as no:
            judgement = Judgement(no.kind, no.detail, checks=judgement.checks, costs=judgement.costs)
        finally:
            if child is not None and not keep:
                child.kill()
        return judgement

    def _promote(self, name: str, source: str, cache: Path | None, child: Child, log: float) -> None:
        for other in [n for n in self.sides if n != self.baseline]:
            self.sides.pop(other).kill()
        self.sides[name], self.sources[name], self.logs[name] = child, (source, cache), log

    def final(self, name: str, source: str, cache: Path | None, runs: int = 3, pairs: int = 8) -> Judgement:
        """The number to report: fresh process pairs against the baseline, held-out cases, single checked calls."""
        judgement, started = Judgement("measured", level="final"), time.monotonic()
        ratios: dict[str, list[Ratio]] = {}
        times: dict[str, list[float]] = {}
        try:
            for run in range(runs):
                for side in list(self.sides):
                    self.sides.pop(side).kill()
                base = self._side(self.baseline)
                child = self._guard(judgement, self.child_of, source, cache)
                try:
                    self._check(child, judgement, with_held_out=run == 0)
                    for bench in self._timed():
                        seen: list[Slice] = []
                        result = self._pair(base, child, judgement, bench, pairs, True)
                        seen = [self._guard(judgement, bench.slice, child) for _ in range(3)]
                        times.setdefault(bench.case.name, []).extend(s.us for s in seen)
                        ratios.setdefault(bench.case.name, []).append(result)
                        self._believable(bench, min(s.us for s in seen))
                        if run == 0:
                            self._watch(base, child, judgement, bench)
                finally:
                    child.kill()
        except Refused as no:
            return Judgement(no.kind, no.detail, checks=judgement.checks)
        cases = {n: combine_runs(r) for n, r in ratios.items()}
        whole = mean_over_cases(list(cases.values()))
        for n, values in times.items():
            middle, low, high, _ = median_interval(values, 0)
            judgement.times[n] = (middle, low, high, len(values) * self.benches[n].calls)
        judgement.log_speedup, judgement.low, judgement.high, judgement.sd = whole.log, whole.low, whole.high, whole.sd
        judgement.costs["final"] = time.monotonic() - started
        return judgement

    def _watch(self, base: Child, child: Child, judgement: Judgement, bench: Bench) -> None:
        ours = self._guard(judgement, bench.chained, child, 21)
        theirs = bench.chained(base, 21)
        told = disagreement(theirs, ours, self.alone[bench.case.name],
                            judgement.times.get(bench.case.name, (bench.slice(child).us,))[0])
        if told:
            raise Refused("timing_inconsistent", f"{bench.case.name}: {told}")

    def race(self, a: Child, b: Child, pairs: int) -> dict[str, tuple[Ratio, float, float]]:
        """Paired slices of two bound children on every timed case: case -> (log of A's time over B's, us of A, us of B).

        For comparing versions outside of a search (benchmarks); neither side is checked beyond its sampled results.
        """
        told = {}
        for bench in self._timed():
            bench.refill()
            done = alternate(lambda b_=bench: b_.slice(a), lambda b_=bench: b_.slice(b), pairs,  # type: ignore[misc]
                             bool(secrets.randbelow(2)))
            us_a, us_b = (median_interval([pair[i].us for pair in done], 0)[0] for i in (0, 1))
            told[bench.case.name] = (ratio(done), us_a, us_b)
        return told

    def close(self) -> None:
        for child in self.sides.values():
            with contextlib.suppress(Exception):
                child.kill()
        for bench in self.benches.values():
            with contextlib.suppress(Exception):
                bench.close()
        self.zygote.close()
