"""The two-part posterior of an arm: how likely a pull is right, and how large its gain is if it is.

Right: Beta(a, b). Gain g = log(parent time / child time) of right children: normal with unknown mean; the mean has a
normal posterior with known predictive spread. Both are conjugate updates with fractional counts, so that evidence
from a similar parent counts as a part of a pull. Source: Gelman et al., "Bayesian Data
Analysis", 3rd ed., 2.4 and 2.5.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Prior:
    """What is believed of a strategy before any pull. right: Beta counts. gain: mean, how many pulls it is worth, and
    the spread (s.d.) of single gains around the mean."""

    right: float
    broken: float
    gain: float
    worth: float
    spread: float


# Shipped belief: written down before any run of this program. A mechanical rewrite is usually right and usually
# changes little either way; tiling and pipelining move time the most. Learnt priors replace it (see docs).
DEFAULT = Prior(3.0, 1.0, 0.0, 1.0, 0.15)
PRIORS: dict[str, Prior] = {
    "tiling": Prior(3.0, 1.5, 0.02, 1.0, 0.30),
    "pipeline": Prior(4.0, 1.0, 0.01, 1.0, 0.20),
    "fusion": Prior(2.0, 1.0, 0.05, 1.0, 0.25),
    "reordering": Prior(4.0, 1.0, 0.01, 1.0, 0.10),
    "vectorization": Prior(3.0, 1.0, 0.01, 1.0, 0.12),
    "access_layout": Prior(2.0, 1.0, 0.02, 1.0, 0.20),
}


@dataclass(frozen=True)
class Posterior:
    """Parameters for a vector of arms; every field has shape (arms,)."""

    a: Array
    b: Array
    mean: Array
    se: Array
    spread: Array


def update(prior: list[Prior], right: Array, broken: Array, clean: Array, gain: Array, pending: Array) -> Posterior:
    """Posterior of each arm; every array has shape (arms,), and counts are fractional.

    prior: one an arm. right, broken: settled pulls that gave a right child, and that did not. clean: right pulls, each
    weighted by `cleanness`. gain: sum of their log gains, with the same weights. pending: pulls in flight; each
    counts as half a failure and as one more look at the mean (the "believer" heuristic of batch Bayesian optimisation,
    Ginsbourger et al. 2010), so that an arm is not pulled over and over before its first outcome.
    """
    spread = np.array([p.spread for p in prior])
    worth = np.array([p.worth for p in prior])
    mean = (worth * np.array([p.gain for p in prior]) + gain) / (worth + clean)
    return Posterior(
        a=np.array([p.right for p in prior]) + right,
        b=np.array([p.broken for p in prior]) + broken + 0.5 * pending,
        mean=mean, se=spread / np.sqrt(worth + clean + pending), spread=spread,
    )


def cleanness(prior: Prior, noise: float) -> float:
    """What a measured gain is worth beside one without noise (s.d. of its log): the ratio of their variances."""
    return prior.spread**2 / (prior.spread**2 + noise**2)


def expected_improvement(headstart: Array, mean: Array, spread: Array) -> Array:
    """E[max(0, headstart + G)] for G ~ N(mean, spread^2): the expected gain over the incumbent.

    headstart: log(incumbent time / parent time) <= 0.
    Source: Jones, Schonlau and Welch, J. Global Optimization 13, 1998.
    """
    mu = headstart + mean
    z = mu / spread
    density = np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi)
    # The two terms cancel far below the incumbent, and the error of the distribution function then shows as a loss.
    return np.maximum(0.0, mu * _normal_cdf(z) + spread * density)


def _normal_cdf(z: Array) -> Array:
    # Abramowitz and Stegun 26.2.17 (error < 7.5e-8): scipy is not a dependency of the pure core.
    t = 1.0 / (1.0 + 0.2316419 * np.abs(z))
    poly = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    upper = np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi) * poly
    return np.where(z >= 0, 1.0 - upper, upper)
