"""Measure: the clock, paired slices, and what may be said from them.

The clock is the trusted side's: a slice of calls is timed from the moment it is released until a sample of its results
has been read and found right here. What the child's own events say is compared, never believed. Nothing in this file
talks to a GPU: it works on anything that can run a slice.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

SLICE_US = 20_000.0
"""Length of a slice in microseconds: long enough that a hand-over of some 0.3 ms is a small, equal part of both sides."""

MAX_CALLS = 4000


@dataclass(frozen=True)
class Slice:
    """One slice: microseconds a call by the trusted side's clock (hand-over taken off), and by the child's events."""

    us: float
    event_us: float


@dataclass(frozen=True)
class Ratio:
    """Median over pairs of log(time of A / time of B), with its interval. pairs: how many; runs: fresh process pairs."""

    log: float
    low: float
    high: float
    sd: float
    pairs: int
    runs: int = 1


def calls_for(us: float, slots: int, once: bool) -> int:
    """Calls in a slice, fixed from the baseline's microseconds a call. once: each slot may be used only once."""
    return slots if once else min(MAX_CALLS, max(slots, math.ceil(SLICE_US / max(us, 0.5))))


def alternate(a: Callable[[], Slice], b: Callable[[], Slice], pairs: int, start: bool) -> list[tuple[Slice, Slice]]:
    """Interleaved slices in ABBA order, `start` choosing who begins: [(slice of A, slice of B)], in pairs."""
    done: list[tuple[Slice, Slice]] = []
    for i in range(pairs):
        if (i % 2 == 0) == start:
            first = a()
            done.append((first, b()))
        else:
            first = b()
            done.append((a(), first))
    return done


def median_interval(values: Sequence[float], seed: int) -> tuple[float, float, float, float]:
    """(median, low and high of its 95 % interval, its s.d.) by the percentile bootstrap over `values`, 2000 resamples.

    Source: Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, ch. 13.
    """
    data = np.asarray(values, dtype=float)
    rng = np.random.Generator(np.random.Philox(key=[seed, len(data)]))
    medians = np.median(data[rng.integers(len(data), size=(2000, len(data)))], axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    middle = float(np.median(data))
    return middle, min(middle, float(low)), max(middle, float(high)), float(medians.std())


def ratio(pairs: Sequence[tuple[Slice, Slice]], seed: int = 0) -> Ratio:
    """log(A / B) from paired slices: the median, with the wider of the bootstrap's and Student's interval.

    Student's, around the median, because the bootstrap of so few pairs covers too little.
    """
    logs = [math.log(a.us / b.us) for a, b in pairs]
    middle, low, high, sd = median_interval(logs, seed)
    if len(logs) > 1:
        error = statistics.stdev(logs) / math.sqrt(len(logs))
        half = _t95(len(logs) - 1) * error
        low, high, sd = min(low, middle - half), max(high, middle + half), max(sd, error)
    return Ratio(middle, low, high, sd, len(logs))


def combine_runs(runs: Sequence[Ratio]) -> Ratio:
    """Ratios of fresh process pairs as one: the wider of the pooled within-run and the between-run interval.

    Between runs: mean and Student's t at 95 %.
    """
    middle = statistics.fmean(r.log for r in runs)
    inside = math.sqrt(sum(r.sd**2 for r in runs)) / len(runs)
    half = statistics.fmean([(r.high - r.low) / 2 for r in runs]) / math.sqrt(len(runs))
    if len(runs) > 1:
        between = statistics.stdev(r.log for r in runs) / math.sqrt(len(runs))
        inside = max(inside, between)
        half = max(half, between * _t95(len(runs) - 1))
    return Ratio(middle, middle - half, middle + half, inside, sum(r.pairs for r in runs), len(runs))


_T95 = (math.inf, 12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


def _t95(freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t; beyond the table its last value, which is a little too wide."""
    return _T95[min(freedom, len(_T95) - 1)]


def mean_over_cases(ratios: Sequence[Ratio]) -> Ratio:
    """Geometric mean over cases (mean of the logs); the half widths add as independent errors do."""
    n = len(ratios)
    middle = sum(r.log for r in ratios) / n
    low = math.sqrt(sum((r.log - r.low) ** 2 for r in ratios)) / n
    high = math.sqrt(sum((r.high - r.log) ** 2 for r in ratios)) / n
    sd = math.sqrt(sum(r.sd**2 for r in ratios)) / n
    return Ratio(middle, middle - low, middle + high, sd, sum(r.pairs for r in ratios), min(r.runs for r in ratios))


def disagreement(short_a: Sequence[float], short_b: Sequence[float], calls: int, a_us: float, b_us: float) -> str:
    """'' when short checked slices agree with long ones about how much faster B is than A; else what does not.

    short_*: wall microseconds of slices of `calls` calls, one a slot; a_us, b_us: microseconds a call from long slices. A
    side that works only on the last use of each slot, the only one that is sampled, shows a gain in long slices that
    short ones do not have. The allowance is what short slices can resolve: their spread, 30 us, and a quarter of the claim.
    """
    claimed = calls * (a_us - b_us)
    seen = statistics.median(short_a) - statistics.median(short_b)
    spread = sum(statistics.median([abs(x - statistics.median(c)) for x in c]) for c in (short_a, short_b))
    allowed = 30.0 + 3 * spread + 0.25 * abs(claimed)
    if claimed - seen > allowed:
        return (f"long slices show {claimed:.1f} us less for {calls} calls than the baseline, short checked slices show "
                f"{seen:.1f} us (allowance {allowed:.1f} us)")
    return ""


def untimely(slices: Sequence[Slice]) -> str:
    """'' when the child's own events tell about the time that the trusted clock saw; else what does not agree.

    Events are evidence, not the clock: work on a side stream or after the last event is time that they do not have.
    """
    wall, event = (statistics.median([getattr(s, name) for s in slices]) for name in ("us", "event_us"))
    if 0.7 * wall <= event <= 1.2 * wall:
        return ""
    return f"the clock says {wall:.1f} us a call, the process's own events say {event:.1f} us"
