"""What may be said from slices: medians, intervals, pairs. No clock is read here; slices are made up."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelband.evaluate.measure import (
    Race,
    Ratio,
    Slice,
    alternate,
    calls_for,
    combine_runs,
    counts_as_gain,
    disagreement,
    mean_over_cases,
    median_interval,
    noise_floor,
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
    assert honest == "" and "checked whole" in cheat


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


def compared(rng, truth, pairs=8, noise=0.011):
    return ratio([(Slice(100 * math.exp(truth + noise * x), 0), Slice(100, 0)) for x in rng.standard_normal(pairs)])


def test_identical_code_is_all_but_never_a_gain_even_when_picked_from_many():
    """The winner's curse: of 40 equal candidates the luckiest is taken to the final, where fresh samples decide."""
    rng = np.random.default_rng(3)
    assert not any(counts_as_gain([compared(rng, 0.0) for _ in range(3)], 40, 0.0)[0] for _ in range(300))


def test_a_gain_counts_when_its_corrected_bound_clears_two_per_cent_and_the_floor():
    rng = np.random.default_rng(4)
    runs = [compared(rng, math.log(1.10)) for _ in range(3)]
    fine, bound = counts_as_gain(runs, 40, 0.0)
    assert fine and math.log(1.02) < bound < math.log(1.10)
    assert not counts_as_gain(runs, 40, 0.12)[0]
    assert not counts_as_gain(runs[:1], 40, 0.0)[0]  # one process pair is none


def test_two_process_pairs_have_to_show_a_gain():
    good, none = Ratio(0.3, 0.29, 0.31, 0.003, 8, freedom=7), Ratio(0.0, -0.01, 0.01, 0.003, 8, freedom=7)
    assert counts_as_gain([good, good, good], 1, 0.0)[0]
    assert not counts_as_gain([good, none, none], 1, 0.0)[0]


@given(screened=st.integers(1, 10_000))
def test_the_more_were_screened_the_lower_the_bound(screened):
    runs = [Ratio(0.1, 0.09, 0.11, 0.004, 8, freedom=7)] * 3
    assert counts_as_gain(runs, screened + 1, 0.0)[1] <= counts_as_gain(runs, screened, 0.0)[1] < 0.1


def test_the_noise_floor_is_what_identical_code_may_seem_to_gain():
    assert noise_floor([Ratio(-0.01, -0.02, 0.0, 0.005, 8)]) == pytest.approx(math.expm1(0.01 + 2.58 * 0.005))
    assert noise_floor([]) == 0.0


def test_a_race_ends_at_once_for_what_is_far_behind_and_not_for_what_is_close():
    assert Race(0.03, 0.01).lost(-0.5)
    near = Race(0.03, 0.01)
    assert not any(near.lost(-0.02) for _ in range(50))


def test_a_race_hardly_ever_drops_an_equal_whatever_the_round_at_which_it_is_looked_at():
    rng, dropped = np.random.default_rng(5), 0
    for _ in range(500):
        race = Race(0.0, 0.005)  # sigma 0.01 after doubling
        dropped += any(race.lost(0.01 * x) for x in rng.standard_normal(40))
    assert dropped / 500 <= 0.02
