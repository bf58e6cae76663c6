"""The pure core of a search: state = fold(events), and decide(state) -> orders.

No clock, no file, no network, no Ray, no torch. Randomness is counted: a policy draws from a generator keyed by
(seed, pull), so that the size of batches and the arrival of outcomes cannot change a replay.

Invariants: every pull has one order and at most one outcome (the first wins); an order names a parent that was judged
right before it; the number of orders that cost something never exceeds the budget; a decision depends only on the
outcomes that it was allowed to see. With lag L > 0 the decision on pull i sees exactly the outcomes of pulls up to i - L,
whatever else has arrived: the same seed gives the same pulls. When these leave no arm to pull, the decision waits until
nothing is in flight and then sees all outcomes, which is as independent of their order. With lag 0 it sees all that has
arrived.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kernelband.events import (
    FREE,
    BaselineJudged,
    PullEnded,
    PullOrdered,
    Result,
    Resumed,
    Revised,
    RunEnded,
    RunStarted,
)


@dataclass(frozen=True)
class Parent:
    """A candidate that was judged right and can be rewritten.

    log_speedup: over the baseline. features: numbers that describe its behaviour (see `features_of`). load: share of
    each resource's peak. pull: the pull that made it, 0 for the baseline.
    """

    candidate: str
    log_speedup: float
    sd: float
    features: tuple[float, ...]
    load: dict[str, float]
    rung: str
    pull: int
    depth: int


@dataclass(frozen=True)
class Arm:
    """What a policy chooses among. left: children that this writer can still make here (None: no limit known)."""

    parent: str
    strategy: str
    writer: str
    left: int | None


@dataclass(frozen=True)
class Record:
    """All that is known of one pull: the order, and its outcome once it may be seen (kind None: pending).

    gain: log(parent time / child time), only for right children.
    """

    pull: int
    parent: str
    strategy: str
    writer: str
    kind: str | None = None
    child: str | None = None
    gain: float | None = None
    sd: float = 0.0


@dataclass(frozen=True)
class View:
    """What a policy sees when it decides on one pull."""

    pull: int
    seed: int
    parents: dict[str, Parent]
    arms: Sequence[Arm]
    incumbent: str


class Policy(Protocol):
    """Which pull next, by ask and tell.

    tell() takes the record of a pull, first as pending and later with its outcome: one record a pull, the latest
    stands, and the order in which they come does not matter. ask() chooses one of view.arms (never empty) and must be
    a function of the view and of what was told.
    """

    name: str

    def tell(self, record: Record) -> None: ...

    def ask(self, view: View) -> Arm: ...

    def explain(self, view: View) -> dict[str, tuple[float, str]]:
        """Strategy -> (weight between 0 and 1, reason in words or ''), for the live view and the report."""
        ...


def features_of(result: Result) -> tuple[float, ...]:
    """Behaviour of a candidate as five numbers of order one: log time, registers, shared memory, warps, occupancy.

    The choice follows the behaviour vector of the KernelBand paper (arXiv 2511.18868), with compiled facts in place
    of guesses from the source.
    """
    facts = result.facts
    time = sum(math.log(t.us) for t in result.times.values()) / max(1, len(result.times))
    return (
        time,
        facts.get("registers", 0.0) / 64.0,
        math.log2(1.0 + facts.get("shared", 0.0) / 1024.0) / 3.0,
        math.log2(max(1.0, facts.get("num_warps", 4.0))) / 2.0,
        2.0 * facts.get("occupancy", 0.5),
    )


@dataclass
class State:
    """Everything that the events say, as tables. Changed by `fold` only."""

    start: RunStarted | None = None
    baseline: BaselineJudged | None = None
    orders: dict[int, PullOrdered] = field(default_factory=dict)
    outcomes: dict[int, PullEnded] = field(default_factory=dict)
    made_by: dict[str, int] = field(default_factory=dict)
    revised: dict[str, Revised] = field(default_factory=dict)
    ended: RunEnded | None = None

    @property
    def pending(self) -> list[PullOrdered]:
        """Orders without an outcome, in order."""
        return [o for n, o in sorted(self.orders.items()) if n not in self.outcomes]

    def result_of(self, candidate: str) -> Result | None:
        """The latest result of a candidate that stands, or None if it was never right or fell later."""
        later = self.revised.get(candidate)
        if later is not None:
            if not later.ok:
                return None
            if later.result is not None:
                return later.result
        if self.baseline and candidate == self.baseline.candidate:
            return self.baseline.result
        pull = self.made_by.get(candidate)
        return self.outcomes[pull].result if pull is not None else None

    def ranking(self) -> list[str]:
        """Right candidates, fastest first; the baseline among them. Ties go to the earlier pull."""
        names = [*([self.baseline.candidate] if self.baseline else []), *self.made_by]
        scored = [(-r.log_speedup, self.made_by.get(n, 0), n) for n in names if (r := self.result_of(n)) is not None]
        return [n for _, _, n in sorted(scored)]

    def counted(self) -> int:
        """Pulls that cost something, with those in flight."""
        return sum(1 for n in self.orders if n not in self.outcomes or self.outcomes[n].kind not in FREE)


def fold(state: State, event: Any) -> State:
    """Apply one event; returns the same state object. The first outcome of a pull wins; later ones are ignored."""
    match event:
        case RunStarted():
            state.start = event
        case BaselineJudged():
            state.baseline = event
        case PullOrdered():
            state.orders.setdefault(event.pull, event)
        case PullEnded():
            if event.pull in state.orders and event.pull not in state.outcomes:
                state.outcomes[event.pull] = event
                if event.kind == "measured" and event.candidate and event.result:
                    state.made_by.setdefault(event.candidate, event.pull)
        case Revised():
            state.revised[event.candidate] = event
        case RunEnded():
            state.ended = event
        case Resumed():
            state.ended = None
    return state


def screened(state: State) -> int:
    """How many candidates were timed so far: among so many the fastest was picked, which a final interval has to allow for."""
    return sum(o.kind == "measured" for o in state.outcomes.values())


def visible(state: State, pull: int) -> dict[int, PullEnded]:
    """The outcomes that the decision on `pull` may see."""
    lag = state.start.lag if state.start else 0
    if lag == 0:
        return state.outcomes
    return {n: o for n, o in state.outcomes.items() if n <= pull - lag}


def look(state: State, pull: int, everything: bool = False) -> tuple[View, list[Record]]:
    """What a policy sees, and is told, for its decision on `pull`; with `everything`, whatever the lag.

    RunStarted and BaselineJudged must be folded.
    """
    assert state.start and state.baseline
    seen = state.outcomes if everything else visible(state, pull)
    base = state.baseline
    parents = {base.candidate: _parent(base.candidate, base.result, 0, 0)}
    moves = {base.candidate: base.moves}
    for n in sorted(seen):
        out = seen[n]
        if out.kind == "measured" and out.candidate and out.result and out.candidate not in parents:
            depth = parents[state.orders[n].parent].depth + 1 if state.orders[n].parent in parents else 1
            parents[out.candidate] = _parent(out.candidate, out.result, n, depth)
            moves[out.candidate] = out.moves
    pulled: dict[tuple[str, str, str], int] = {}
    records, dead = [], set()
    for n, order in sorted(state.orders.items()):
        if n >= pull:
            continue
        key = (order.parent, order.strategy, order.writer)
        pulled[key] = pulled.get(key, 0) + 1
        ended = seen.get(n)
        if ended is None:
            records.append(Record(n, *key))
            continue
        if ended.kind == "not_applicable":
            dead.add(key)
        gain = None
        if ended.kind == "measured" and ended.result and order.parent in parents:
            gain = ended.result.log_speedup - parents[order.parent].log_speedup
        records.append(Record(n, *key, kind=ended.kind, child=ended.candidate, gain=gain,
                              sd=ended.result.sd if ended.result else 0.0))
    arms = []
    for name in parents:
        for writer in state.start.writers:
            for strategy, count in sorted(moves[name].get(writer, {}).items()):
                key = (name, strategy, writer)
                left = None if count < 0 else count - pulled.get(key, 0)
                if key not in dead and (left is None or left > 0):
                    arms.append(Arm(*key, left))
    incumbent = max(parents.values(), key=lambda p: (p.log_speedup, -p.pull)).candidate
    return View(pull, state.start.seed, parents, arms, incumbent), records


def _parent(name: str, result: Result, pull: int, depth: int) -> Parent:
    return Parent(name, result.log_speedup, result.sd, features_of(result), result.load, result.rung, pull, depth)


def consult(state: State, policy: Policy, pull: int) -> Arm | None:
    """Tell the policy all that it may know for this decision, then ask it. None when there is no arm left (yet)."""
    sight, records = look(state, pull)
    if not sight.arms and not state.pending:
        sight, records = look(state, pull, everything=True)
    if not sight.arms:
        return None
    for record in records:
        policy.tell(record)
    return policy.ask(sight)


def decide(state: State, policy: Policy, in_flight: int) -> list[PullOrdered]:
    """The orders to give now, so that at most `in_flight` pulls are pending. Folds each order into `state`.

    Stops at the budget, when a decision would have to wait for an outcome that it must see (lag), or when there is
    no arm left to pull.
    """
    start = state.start
    if start is None or state.baseline is None or state.ended is not None:
        return []
    orders: list[PullOrdered] = []
    pending = len(state.pending)
    while pending < in_flight:
        pull = len(state.orders) + 1
        seen = visible(state, pull)
        if start.lag and any(n not in seen for n in range(1, pull - start.lag + 1)):
            break
        known = seen if pending else state.outcomes  # nothing in flight: what is free is free, whatever the lag
        if sum(1 for n in state.orders if n not in known or known[n].kind not in FREE) >= start.pulls:
            break
        arm = consult(state, policy, pull)
        if arm is None:
            break
        order = PullOrdered(pull=pull, parent=arm.parent, strategy=arm.strategy, writer=arm.writer)
        fold(state, order)
        orders.append(order)
        pending += 1
    return orders


def contradiction(history: Sequence[Any], policy: Policy) -> str | None:
    """Re-decide every order of a run from what it saw. None when all agree, else the first that does not, in words."""
    state = State()
    for event in history:
        if isinstance(event, PullOrdered):
            arm = consult(state, policy, event.pull)
            if arm is None:
                return f"pull {event.pull} was ordered when no arm was left"
            if (arm.parent, arm.strategy, arm.writer) != (event.parent, event.strategy, event.writer):
                return (f"pull {event.pull} was ({event.parent}, {event.strategy}, {event.writer}), but its history "
                        f"leads to ({arm.parent}, {arm.strategy}, {arm.writer})")
        fold(state, event)
    return None
