"""The controls: random, round-robin and greedy. What a bandit must beat at equal budget."""

from __future__ import annotations

from kernelband.search import Arm, View
from policies.draws import Table, generator


class Random(Table):
    """Any arm with equal probability."""

    name = "random"

    def ask(self, view: View) -> Arm:
        return view.arms[int(generator(view.seed, view.pull).integers(len(view.arms)))]


class RoundRobin(Table):
    """Strategies in turn (by number of pulls so far), always from the fastest parent that has the strategy left."""

    name = "round-robin"

    def ask(self, view: View) -> Arm:
        pulls: dict[str, int] = {}
        for record in self.told():
            pulls[record.strategy] = pulls.get(record.strategy, 0) + 1
        return min(view.arms, key=lambda a: (pulls.get(a.strategy, 0), a.strategy, *_fastest(view, a)))


class Greedy(Table):
    """Always the fastest parent; its strategies in the order of the mean gain that each has shown so far."""

    name = "greedy"

    def ask(self, view: View) -> Arm:
        gains: dict[str, list[float]] = {}
        for record in self.told():
            shown = gains.setdefault(record.strategy, [])
            if record.kind is not None:
                shown.append(max(0.0, record.gain or 0.0))
        # An untried strategy counts as better than any tried one: otherwise the first success would end the search. One
        # that is only in flight has shown nothing yet, good or bad, and comes after the untried ones.
        mean = {s: sum(g) / len(g) if g else 1e8 for s, g in gains.items()}
        return min(view.arms, key=lambda a: (*_fastest(view, a)[:2], -mean.get(a.strategy, 1e9), a.strategy))


def _fastest(view: View, arm: Arm) -> tuple[float, int, str]:
    parent = view.parents[arm.parent]
    return (-parent.log_speedup, parent.pull, arm.writer)
