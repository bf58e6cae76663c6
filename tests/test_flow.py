"""How many pulls are kept under way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster import flow
from kernelband.events import PullEnded


def ended(pull: int, **costs: float) -> PullEnded:
    return PullEnded(pull=pull, kind="measured" if "verify" in costs else "compile_failed", costs=costs)


def history(count: int, **costs: float) -> list[PullEnded]:
    return [ended(i, **costs) for i in range(count)]


def test_nothing_is_concluded_from_few_outcomes_or_from_such_as_no_judge_saw():
    assert flow.wanted(history(3, compile=50.0, verify=0.1), 1, 8, 400) == flow.least(1)
    assert flow.wanted(history(30, compile=50.0), 1, 8, 400) == flow.least(1)


def test_slow_compilation_asks_for_more_and_waiting_for_a_judge_does_not():
    slow = history(8, write=0.5, compile=9.5, verify=0.5, screen=0.5)
    assert flow.wanted(slow, 1, 32, 400) == 1 + 10 + 2
    assert flow.wanted([ended(i, **o.costs, waited=60.0, kernels=60.0) for i, o in enumerate(slow)], 1, 32, 400) == 13


def test_only_recent_outcomes_count():
    assert flow.wanted([*history(50, compile=90.0, verify=1.0), *history(flow.RECENT, compile=1.0, verify=1.0)], 1, 32, 400) == 6


@given(compile_s=st.floats(0, 1e4), judge_s=st.floats(1e-6, 1e4), judges=st.integers(1, 64), compilers=st.integers(1, 256),
       pulls=st.integers(1, 10_000))
def test_it_stays_between_the_least_and_what_workers_and_budget_allow(compile_s, judge_s, judges, compilers, pulls):
    many = flow.wanted(history(9, compile=compile_s, verify=judge_s), judges, compilers, pulls)
    assert flow.least(judges) <= many <= max(flow.least(judges), min(compilers + 2 * judges + 1, pulls // 4))
