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

NOTHING_LEARNT = frozenset({"infra", "not_applicable", "unchanged", "duplicate"})
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
        arms, told = view.arms, self.told()
        settled = [r for r in told if r.kind is not None and r.kind not in NOTHING_LEARNT]
        waiting = [r for r in told if r.kind is None]
        stale = [r for r in told if r.kind in ("duplicate", "unchanged")]
        right = np.array([float(r.kind == "measured" and r.gain is not None) for r in settled])
        gain = np.array([r.gain or 0.0 for r in settled])
        noise = np.array([r.sd for r in settled])
        post = posterior.update(
            [posterior.PRIORS.get(a.strategy, posterior.DEFAULT) for a in arms],
            sharing.weights(view, arms, settled), right, gain, noise,
            sharing.weights(view, arms, waiting).sum(axis=1),
        )
        prune = np.array([pruning.weigh(view.parents[a.parent], a.strategy)[0] for a in arms])
        for i, arm in enumerate(arms):
            again = sum(1 for r in stale if (r.parent, r.strategy, r.writer) == (arm.parent, arm.strategy, arm.writer))
            prune[i] *= SEEN_BEFORE**again
        return post, prune
