"""Sharing evidence between parents that behave alike, by similarity and never by a cluster's label.

First form: a Gaussian kernel of fixed length scale over the behaviour features of parents. What was seen at one parent counts,
for the same strategy and writer, at every other parent in proportion to their similarity.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from policies.posterior import Array

LENGTH = 0.8
"""Distance in feature space (numbers of order one) at which evidence counts exp(-1/2) = 0.61 of a pull."""

ELSEWHERE = 0.7
"""What the closest possible other parent's evidence is worth: two different sources are never the same kernel."""


def similarity(features: Sequence[Sequence[float]]) -> Array:
    """(parents, parents), each in [0, 1]: 1 on the diagonal, symmetric, falling with Euclidean distance.

    features: (parents, dimensions).
    """
    points = np.asarray(features, dtype=float)
    square = (points**2).sum(axis=1)
    distance = np.maximum(0.0, square[:, None] + square[None, :] - 2 * points @ points.T)
    table = ELSEWHERE * np.exp(-distance / (2 * LENGTH**2))
    np.fill_diagonal(table, 1.0)
    return table
