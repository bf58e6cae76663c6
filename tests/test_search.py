"""The pure core: folding, deciding, budgets, lag, replay and resume, without Ray, torch or files."""

import random

import pytest
import runs
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelband import search
from kernelband.events import PullEnded, PullOrdered, Resumed, Revised, RunEnded
from kernelband.search import State, fold
from policies import MAKERS, make

NAMES = sorted(MAKERS)


def orders(events):
    return [e for e in events if isinstance(e, PullOrdered)]


def state_of(events):
    state = State()
    for event in events:
        fold(state, event)
    return state


@given(policy=st.sampled_from(NAMES), seed=st.integers(0, 2**40), world=st.integers(0, 50), pulls=st.integers(1, 25),
       lag=st.sampled_from([0, 1, 4]), in_flight=st.integers(1, 6), shuffle=st.integers(0, 99), batch=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_a_search_keeps_its_invariants(policy, seed, world, pulls, lag, in_flight, shuffle, batch):
    events = runs.play(make(policy), runs.start(pulls, lag, seed), world=world, in_flight=in_flight, shuffle=shuffle,
                       batch=batch)
    state = state_of(events)
    assert [o.pull for o in orders(events)] == list(range(1, len(state.orders) + 1))
    assert set(state.outcomes) == set(state.orders)
    assert state.counted() <= pulls
    assert all(o.parent == "base" or o.parent in state.made_by for o in orders(events))
    assert state.counted() == pulls or not search.look(state, len(state.orders) + 1, everything=True)[0].arms
    assert search.contradiction(events, make(policy)) is None


@given(policy=st.sampled_from(NAMES), seed=st.integers(0, 1000), lag=st.integers(1, 5), a=st.integers(0, 99),
       b=st.integers(0, 99), batch=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_with_a_lag_the_same_seed_gives_the_same_pulls_whatever_arrives_when(policy, seed, lag, a, b, batch):
    one = runs.play(make(policy), runs.start(15, lag, seed), in_flight=lag, shuffle=a, batch=1)
    two = runs.play(make(policy), runs.start(15, lag, seed), in_flight=lag, shuffle=b, batch=batch)
    assert orders(one) == orders(two)


def test_different_seeds_give_different_searches():
    found = {tuple(o.strategy for o in orders(runs.play(make("kernelband"), runs.start(12, 4, seed)))) for seed in range(8)}
    assert len(found) > 3


@given(policy=st.sampled_from(NAMES), lag=st.sampled_from([0, 3]), cut=st.integers(2, 60), shuffle=st.integers(0, 50))
@settings(max_examples=50, deadline=None)
def test_a_run_cut_anywhere_and_continued_contradicts_nothing(policy, lag, cut, shuffle):
    whole = runs.play(make(policy), runs.start(15, lag), shuffle=shuffle)
    kept = whole[:max(2, min(cut, len(whole)))]
    state, rng = state_of(kept), random.Random(shuffle + 1)
    events, waiting, policy_again = list(kept), list(state.pending), make(policy)
    while True:
        for order in search.decide(state, policy_again, 4):
            events.append(order)
            waiting.append(order)
        if not waiting:
            break
        ended = runs.answer(waiting.pop(rng.randrange(len(waiting))))
        events.append(ended)
        fold(state, ended)
    assert search.contradiction(events, make(policy)) is None
    ended = [e.pull for e in events if isinstance(e, PullEnded)]
    assert sorted(ended) == sorted(state.orders) and len(ended) == len(set(ended))
    if lag:
        assert orders(events) == orders(whole)


def test_the_first_outcome_of_a_pull_wins():
    state = state_of([runs.start(), runs.baseline(), PullOrdered(pull=1, parent="base", strategy="tiling", writer="rewriter")])
    fold(state, PullEnded(pull=1, kind="wrong"))
    fold(state, PullEnded(pull=1, kind="measured", candidate="x", result=runs.result(9.0)))
    assert state.outcomes[1].kind == "wrong" and state.ranking() == ["base"]


def test_an_outcome_without_an_order_is_ignored():
    state = state_of([runs.start(), runs.baseline(), PullEnded(pull=7, kind="measured", candidate="x",
                                                               result=runs.result(1.0))])
    assert state.outcomes == {} and state.ranking() == ["base"]


def test_a_revision_replaces_the_result_and_a_fall_removes_it():
    state = state_of([runs.start(), runs.baseline()])
    for n, log in ((1, 0.5), (2, 0.4)):
        fold(state, PullOrdered(pull=n, parent="base", strategy="tiling", writer="rewriter"))
        fold(state, PullEnded(pull=n, kind="measured", candidate=f"c{n}", result=runs.result(log)))
    assert state.ranking() == ["c1", "c2", "base"]
    fold(state, Revised(candidate="c1", ok=True, result=runs.result(0.1)))
    assert state.ranking() == ["c2", "c1", "base"]
    fold(state, Revised(candidate="c2", ok=False, detail="held-out case"))
    assert state.ranking() == ["c1", "base"]


def test_an_arm_with_nothing_left_is_not_offered():
    state = state_of([runs.start(), runs.baseline(moves=1)])
    fold(state, PullOrdered(pull=1, parent="base", strategy="tiling", writer="rewriter"))
    assert {a.strategy for a in search.look(state, 2)[0].arms} == {"pipeline", "vectorization"}
    fold(state, PullOrdered(pull=2, parent="base", strategy="pipeline", writer="rewriter"))
    fold(state, PullOrdered(pull=3, parent="base", strategy="vectorization", writer="rewriter"))
    assert search.decide(state, make("random"), 10) == []


def test_not_applicable_costs_no_pull():
    state = state_of([runs.start(pulls=1), runs.baseline()])
    first = search.decide(state, make("random"), 5)
    assert len(first) == 1
    fold(state, PullEnded(pull=1, kind="not_applicable"))
    assert len(search.decide(state, make("random"), 5)) == 1
    assert state.counted() == 1


def test_pulls_in_flight_are_known_to_the_decision():
    """Ten orders at once must not all go to one arm."""
    state = state_of([runs.start(pulls=10), runs.baseline(moves=10)])
    given_ = search.decide(state, make("kernelband"), 10)
    assert len({o.strategy for o in given_}) > 1


def test_contradiction_names_the_first_order_that_does_not_follow():
    events = runs.play(make("round-robin"), runs.start(8, 4))
    at = next(i for i, e in enumerate(events) if isinstance(e, PullOrdered) and e.pull == 5)
    other = next(s for s in runs.STRATEGIES if s != events[at].strategy)
    events[at] = events[at].model_copy(update={"strategy": other})
    assert "pull 5" in (search.contradiction(events, make("round-robin")) or "")


@pytest.mark.parametrize("policy", NAMES)
def test_telling_twice_or_in_another_order_changes_nothing(policy):
    state = state_of(runs.play(make(policy), runs.start(12)))
    sight, records = search.look(state, 13)
    if not sight.arms:
        pytest.skip("no arm left in this world")
    one, two = make(policy), make(policy)
    for record in records:
        one.tell(record)
    for record in [*reversed(records), *records]:
        two.tell(record)
    assert one.ask(sight) == two.ask(sight)


def test_a_lag_ends_no_search_while_a_late_child_can_still_be_rewritten():
    """The only arm's child is not visible to the next decision; the search waits for it and goes on, whatever arrives when."""
    events = [runs.start(pulls=4, lag=3), runs.baseline(moves=0).model_copy(update={"moves": {"rewriter": {"tiling": 1}}})]
    state = state_of(events)
    for n in range(1, 5):
        given_ = search.decide(state, make("random"), 3)
        assert [o.pull for o in given_] == [n]
        events += given_
        ended = PullEnded(pull=n, kind="measured", candidate=f"c{n}", identity=f"c{n}", result=runs.result(0.1 * n),
                          moves={"rewriter": {"tiling": 1}})
        events.append(ended)
        fold(state, ended)
    assert search.contradiction(events, make("random")) is None
    early = [events[0], events[1], events[2], events[4], events[3]]  # the second order before the first outcome
    assert "no arm was left" in (search.contradiction(early, make("random")) or "")


def test_a_run_that_was_interrupted_goes_on_when_it_is_resumed():
    state = state_of([runs.start(pulls=5), runs.baseline(), RunEnded(best="base", reason="interrupted", seconds=1.0)])
    assert search.decide(state, make("random"), 2) == []
    fold(state, Resumed(versions={}))
    assert state.ended is None and len(search.decide(state, make("random"), 2)) == 2
