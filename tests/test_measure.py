"""What may be said from slices: medians, intervals, pairs. No clock is read here; slices are made up."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelband.evaluate.measure import (
    Ratio,
    Slice,
    alternate,
    calls_for,
    combine_runs,
    disagreement,
    mean_over_cases,
    median_interval,
    ratio,
    untimely,
)


def slices(times):
    source = iter(times)
    return lambda: Slice(next(source), 0.0)


@given(pairs=st.integers(1, 20), start=st.booleans())
def test_slices_alternate_abba(pairs, start):
    order = []
    alternate(lambda: order.append("a") or Slice(1, 1), lambda: order.append("b") or Slice(1, 1), pairs, start)
    assert order.count("a") == order.count("b") == pairs
    blocks = [tuple(order[i:i + 2]) for i in range(0, len(order), 2)]
    assert all(x != y for x, y in itertools.pairwise(blocks))
    assert (blocks[0] == ("a", "b")) == start


@given(us=st.floats(0.1, 1e6), slots=st.integers(1, 64))
def test_a_slice_is_long_enough_and_uses_every_slot(us, slots):
    n = calls_for(us, slots, False)
    assert n >= slots and (n * max(us, 0.5) >= 20_000 or n == 4000)
    assert calls_for(us, slots, True) == slots


def test_a_linear_drift_does_not_make_equal_kernels_differ():
    clock = iter(range(1000))

    def drifting():
        return Slice(100 * (1 + 0.001 * next(clock)), 0)

    told = ratio(alternate(drifting, drifting, 20, True))
    assert abs(told.log) < 0.0015 and told.low <= 0.001 and told.high >= -0.001


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=40))
def test_the_interval_holds_the_median(values):
    middle, low, high, sd = median_interval(values, 0)
    assert low <= middle <= high and sd >= 0 and math.isclose(middle, np.median(values), abs_tol=1e-12)


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    rng = np.random.default_rng(1)
    inside = 0
    for i in range(200):
        told = median_interval(0.02 + 0.01 * rng.standard_normal(16), i)
        inside += told[1] <= 0.02 <= told[2]
    assert inside / 200 >= 0.9


def test_runs_that_disagree_widen_the_interval():
    agree = [Ratio(0.10 + d, 0.09 + d, 0.11 + d, 0.005, 8) for d in (0, 0.001, -0.001)]
    apart = [Ratio(0.10 + d, 0.09 + d, 0.11 + d, 0.005, 8) for d in (0, 0.05, -0.05)]
    wide, tight = combine_runs(apart), combine_runs(agree)
    assert wide.high - wide.low > 3 * (tight.high - tight.low) and wide.runs == 3 and wide.pairs == 24
    assert wide.log == pytest.approx(0.10)


def test_cases_are_averaged_in_the_log():
    told = mean_over_cases([Ratio(math.log(4), 1.3, 1.5, 0.05, 8), Ratio(0.0, -0.1, 0.1, 0.05, 8)])
    assert math.exp(told.log) == pytest.approx(2.0)
    assert told.low < told.log < told.high


def test_a_kernel_that_works_only_when_watched_is_told():
    honest = disagreement([600.0] * 9, [450.0] * 9, 3, 100.0, 50.0)
    cheat = disagreement([600.0] * 9, [600.0] * 9, 3, 100.0, 1.0)
    assert honest == "" and "short checked slices" in cheat


def test_events_that_miss_the_work_are_told():
    assert untimely([Slice(100, 97)] * 3) == ""
    assert "own events" in untimely([Slice(100, 3)] * 3)
    assert "own events" in untimely([Slice(100, math.inf)] * 3)


def test_intervals_of_few_pairs_cover_the_truth():
    rng, inside = np.random.default_rng(2), 0
    for i in range(400):
        noise = 0.02 + 0.01 * rng.standard_normal(8)
        told = ratio([(Slice(100 * math.exp(x), 0), Slice(100, 0)) for x in noise], i)
        inside += told.low <= 0.02 <= told.high
    assert inside / 400 >= 0.93
