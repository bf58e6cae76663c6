"""Timing beside a reference side: pairs, slices checked whole, graphs, and what makes a time unbelievable.

Works on children and benches that others own. A candidate that is at fault leaves as a Refused that names the layer; a GPU that
is, as a RunFailed.
"""

from __future__ import annotations

import secrets
import statistics
from collections.abc import Collection, Mapping, Sequence

from kernelband.device import Peaks, roofline_us
from kernelband.errors import RunFailed
from kernelband.evaluate.bench import Bench, Wrong
from kernelband.evaluate.checks import guarded
from kernelband.evaluate.children import Children
from kernelband.evaluate.judgement import Refused
from kernelband.evaluate.measure import Ratio, Slice, alternate, disagreement, median_interval, ratio, untimely
from kernelband.evaluate.zygote import CandidateError, Child, ChildDied
from kernelband.task import Task

PHYSICS = 0.9
"""Below this share of the roofline of the least work a time is not believed (peaks are known to about 10 %)."""

BAND = 0.10
"""How much slower than alone, in the same process, the baseline may be beside a candidate. A candidate that slows it on purpose
can win at most this; unlocked clocks and two resident contexts account for a few per cent."""

WHOLE = 7
"""Slices that are checked whole, of each side and case."""

LAUNCH_BOUND_US = 60.0
"""Calls shorter than this are mostly their launch from Python; they are timed in a CUDA graph as well."""


class Timer:
    """off: layers that are left out."""

    def __init__(self, task: Task, peaks: Peaks | None, children: Children, off: Collection[str]):
        self.task, self.peaks, self.children, self.off = task, peaks, children, off

    def believable(self, bench: Bench, us: float) -> None:
        if self.peaks is None or self.task.work is None or "physics" in self.off:
            return
        moved, flops = self.task.work(bench.case)
        floor = roofline_us(self.peaks, moved, flops, bench.case.dtype)
        if us + bench.doubt_us < PHYSICS * floor:
            raise Refused("faster_than_physics", f"{bench.case.name}: {us:.1f} us is faster than physics: the least work "
                                                 f"takes {floor:.1f} us at the peaks of {self.peaks.name}", "physics")

    def timely(self, bench: Bench, slices: list[Slice]) -> None:
        if "events" not in self.off and bench.calls * slices[0].us > 5_000:  # shorter slices are mostly hand-over
            told = untimely(slices)
            if told:
                raise Refused("timing_inconsistent", f"{bench.case.name}: {told}", "events")

    def pair(self, name: str, child: Child, bench: Bench, pairs: int, alone: float | None = None) -> Ratio:
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
        self.timely(bench, [b for _, b in done])
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

    def whole(self, name: str, child: Child, bench: Bench, base_us: float, us: float) -> None:
        """Slices of which every result is delivered must show the gain that long ones claim. Raises Refused."""
        base = self.children.side(name)
        ours, theirs = [], []
        for _ in range(WHOLE):
            theirs.append(bench.whole(base))
            ours.append(guarded(bench.whole, child))
        odd = disagreement(theirs, ours, len(bench.slots), base_us, us)
        if odd:
            raise Refused("timing_inconsistent", f"{bench.case.name}: {odd}", "whole")

    def graphs(self, name: str, child: Child, benches: Sequence[Bench],
               alone: Mapping[str, float]) -> dict[str, tuple[float, float]]:
        """Short calls once more in a CUDA graph: case -> microseconds of (side `name`, candidate), without the launch from
        Python. Last in both children's lives, for a capture that fails may spoil them; then there is no such number."""
        found: dict[str, tuple[float, float]] = {}
        for bench in benches:
            case = bench.case.name
            if bench.once or alone[case] > LAUNCH_BOUND_US:
                continue
            times = []
            for side in (self.children.side(name), child):
                try:
                    times.append(statistics.median(bench.slice(side, graph=True).us for _ in range(5)))
                    bench.done(side)
                except (Wrong, CandidateError, ChildDied):
                    bench.forget()
                    return found
            found[case] = (times[0], times[1])
        return found
