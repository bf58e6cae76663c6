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
from scipy.special import stdtrit

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
    """Median over pairs of log(time of A / time of B), with its 95 % interval and the s.d. of that median. pairs: how many;
    runs: fresh process pairs; freedom: degrees of freedom of `sd`."""

    log: float
    low: float
    high: float
    sd: float
    pairs: int
    runs: int = 1
    freedom: float = 1.0

    def bound(self, level: float) -> float:
        """One-sided lower confidence bound by Student's t: below it with probability `level`. Minus infinity without a
        degree of freedom."""
        return self.log + float(stdtrit(self.freedom, level)) * self.sd if self.freedom > 0 else -math.inf


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
    return Ratio(middle, low, high, sd, len(logs), freedom=len(logs) - 1)


def combine_runs(runs: Sequence[Ratio]) -> Ratio:
    """Ratios of fresh process pairs as one: the wider of the pooled within-run and the between-run interval.

    Between runs: mean and Student's t at 95 %.
    """
    middle = statistics.fmean(r.log for r in runs)
    inside, freedom = math.sqrt(sum(r.sd**2 for r in runs)) / len(runs), _satterthwaite(runs)
    half = statistics.fmean([(r.high - r.low) / 2 for r in runs]) / math.sqrt(len(runs))
    if len(runs) > 1:
        between = statistics.stdev(r.log for r in runs) / math.sqrt(len(runs))
        half = max(half, between * _t95(len(runs) - 1))
        inside = max(inside, between)
    return Ratio(middle, middle - half, middle + half, inside, sum(r.pairs for r in runs), len(runs), freedom)


def _t95(freedom: float) -> float:
    """Two-sided 95 % quantile of Student's t."""
    return float(stdtrit(freedom, 0.975)) if freedom > 0 else math.inf


def _satterthwaite(parts: Sequence[Ratio]) -> float:
    """Degrees of freedom of the mean of independent estimates. Source: Satterthwaite, Biometrics Bulletin 2(6), 1946."""
    total, weighted = sum(r.sd**2 for r in parts), sum(r.sd**4 / max(r.freedom, 1e-9) for r in parts)
    return total**2 / weighted if weighted > 0 else sum(r.freedom for r in parts)


def mean_over_cases(ratios: Sequence[Ratio]) -> Ratio:
    """Geometric mean over cases (mean of the logs); the half widths add as independent errors do."""
    n = len(ratios)
    middle = sum(r.log for r in ratios) / n
    low = math.sqrt(sum((r.log - r.low) ** 2 for r in ratios)) / n
    high = math.sqrt(sum((r.high - r.log) ** 2 for r in ratios)) / n
    sd = math.sqrt(sum(r.sd**2 for r in ratios)) / n
    return Ratio(middle, middle - low, middle + high, sd, sum(r.pairs for r in ratios), min(r.runs for r in ratios),
                 _satterthwaite(ratios))


LEAST_GAIN = 0.02
"""A gain of less than this is never one, however well it is resolved."""


def noise_floor(same: Sequence[Ratio]) -> float:
    """What identical code may seem to gain here (a share): from comparisons of two processes with the same source."""
    return math.expm1(max((abs(r.log) + 2.58 * r.sd for r in same), default=0.0))


def counts_as_gain(runs: Sequence[Ratio], screened: int, floor: float) -> tuple[bool, float]:
    """Whether the log ratios of fresh process pairs show a gain, and the lower bound on it that was used (log).

    The bound is one-sided at 99 %, corrected for `screened` candidates among which this one was picked (Bonferroni), and
    has to clear log(1 + max(floor, LEAST_GAIN)) in the mean of all runs and in at least two single runs.
    """
    if len(runs) < 2:
        return False, -math.inf
    level = 0.01 / max(1, screened)
    second = sorted((r.bound(level) for r in runs), reverse=True)[1]
    lower = min(second, combine_runs(runs).bound(level))
    return lower > math.log1p(max(floor, LEAST_GAIN)), lower


class Race:
    """Sequential screening: after each round, whether a candidate can still be within `margin` of the incumbent.

    Observations are log ratios (incumbent over candidate) of one round over all cases. The test is the normal-mixture confidence
    sequence, valid at every round at once, so that stopping early costs nothing of its level. Source: Robbins, Annals of
    Mathematical Statistics 41(5), 1970; Howard, Ramdas, McAuliffe and Sekhon, Annals of Statistics 49(2), 2021, section 3.2.

    sigma: s.d. of one observation, taken from the baseline against itself and doubled, at least SIGMA.
    """

    ALPHA = 0.01
    SIGMA = 0.01

    def __init__(self, margin: float, sigma: float):
        self.margin, self.variance = margin, max(self.SIGMA, 2 * sigma) ** 2
        self.seen: list[float] = []

    def lost(self, gain: float) -> bool:
        """Take one more observation; True when the upper bound on its mean has fallen below -margin."""
        self.seen.append(gain)
        return self.upper() < -self.margin

    def upper(self) -> float:
        """The upper end of the confidence sequence at level 1 - ALPHA, with the mixture's variance that of one observation."""
        n = len(self.seen)
        spent, prior = n * self.variance, self.variance
        radius = math.sqrt((spent + prior) * math.log((spent + prior) / (prior * self.ALPHA**2))) / n
        return statistics.fmean(self.seen) + radius


def disagreement(whole_a: Sequence[float], whole_b: Sequence[float], calls: int, a_us: float, b_us: float) -> str:
    """'' when slices that are checked whole agree with long ones about how much faster B is than A; else what does not.

    whole_*: wall microseconds of slices of `calls` calls, every result of which was delivered; a_us, b_us: microseconds a call
    from long slices. A side that leaves work undone where nobody looks shows a gain in long slices that these do not have.
    The allowance is what they can resolve: their spread, 30 us, and a tenth of the claim.
    """
    claimed = calls * (a_us - b_us)
    seen = statistics.median(whole_a) - statistics.median(whole_b)
    spread = sum(statistics.median([abs(x - statistics.median(c)) for x in c]) for c in (whole_a, whole_b))
    allowed = 30.0 + 3 * spread + 0.1 * abs(claimed)
    if claimed - seen > allowed:
        return (f"long slices show {claimed:.1f} us less for {calls} calls than the baseline, slices checked whole show "
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
