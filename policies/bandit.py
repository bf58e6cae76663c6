"""The policy `kernelband`: posterior sampling over (parent, strategy, writer), for the best kernel at the end.

For each arm it draws a chance of being right and a mean gain from the two-part posterior, and scores the arm by the
expected improvement over the incumbent, times the soft pruning weight. Parents that are slow, or whose strategy shows
no headroom, drop out by their score and need no rule of their own. Thompson, Biometrika 25, 1933, with expected
improvement inside the draw.
"""

from __future__ import annotations

import numpy as np

from kernelband.search import Arm, View
from policies import posterior, pruning, sharing
from policies.draws import Table, generator
from policies.posterior import Array

NOTHING_LEARNT = frozenset({"infra", "not_applicable"})
"""Outcomes that say nothing about whether the strategy works here."""

SEEN_BEFORE = 0.6
"""A duplicate lowers the worth of its arm: what is left there was mostly tried."""


class KernelBand(Table):
    name = "kernelband"

    def ask(self, view: View) -> Arm:
        post, prune = self._believe(view)
        rng = generator(view.seed, view.pull)
        right = rng.beta(post.a, post.b)
        mean = post.mean + post.se * rng.standard_normal(len(view.arms))
        score = right * posterior.expected_improvement(self._headstart(view), mean, post.spread) * prune
        return view.arms[int(np.argmax(score))]

    def explain(self, view: View) -> dict[str, tuple[float, str]]:
        """Strategy -> (weight of its best arm relative to the best of all, why it is held back or '')."""
        if not view.arms:
            return {}
        post, prune = self._believe(view)
        value = (post.a / (post.a + post.b)) * posterior.expected_improvement(
            self._headstart(view), post.mean, np.hypot(post.spread, post.se)) * prune
        best = float(value.max()) or 1.0
        told: dict[str, tuple[float, str]] = {}
        for i in np.argsort(-value, kind="stable"):
            arm = view.arms[int(i)]
            if arm.strategy not in told:
                reason = pruning.weigh(view.parents[arm.parent], arm.strategy)[1]
                told[arm.strategy] = (float(value[i]) / best, reason)
        return dict(sorted(told.items()))

    def _headstart(self, view: View) -> Array:
        top = view.parents[view.incumbent].log_speedup
        return np.array([view.parents[a.parent].log_speedup - top for a in view.arms])

    def _believe(self, view: View) -> tuple[posterior.Posterior, Array]:
        """The posterior of every arm, and its pruning weight.

        Evidence is summed by (parent, strategy, writer) first and then spread over similar parents, so the cost grows with
        the square of the parents and not with arms times pulls.
        """
        places = {name: i for i, name in enumerate(view.parents)}
        alike = sharing.similarity([p.features for p in view.parents.values()])
        seen = {(a.strategy, a.writer): np.zeros((5, len(places))) for a in view.arms}
        again: dict[tuple[str, str, str], int] = {}
        for r in self.told():
            counts = seen.get((r.strategy, r.writer))
            if counts is None or r.parent not in places:
                continue
            at = places[r.parent]
            if r.kind is None:
                counts[4, at] += 1
            elif r.kind in ("duplicate", "unchanged"):
                again[r.parent, r.strategy, r.writer] = again.get((r.parent, r.strategy, r.writer), 0) + 1
            elif r.kind in NOTHING_LEARNT:
                continue
            elif r.gain is None:
                counts[1, at] += 1
            else:
                clean = posterior.cleanness(_prior(r.strategy), r.sd)
                counts[:4, at] += (1, 0, clean, clean * r.gain)
        shared = {key: counts @ alike for key, counts in seen.items()}
        rows = np.array([shared[a.strategy, a.writer][:, places[a.parent]] for a in view.arms])
        post = posterior.update([_prior(a.strategy) for a in view.arms], *rows.T)
        prune = np.array([
            pruning.weigh(view.parents[a.parent], a.strategy)[0]
            * SEEN_BEFORE ** again.get((a.parent, a.strategy, a.writer), 0) for a in view.arms
        ])
        return post, prune


def _prior(strategy: str) -> posterior.Prior:
    return posterior.PRIORS.get(strategy, posterior.DEFAULT)
