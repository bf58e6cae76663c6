"""Sharing evidence between parents that behave alike, by similarity and never by a cluster's label.

First form: a Gaussian kernel over the behaviour features, of fixed length scale, between the parent of an arm and the
parent of each settled pull with the same strategy and writer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kernelband.search import Arm, Record, View
from policies.posterior import Array

LENGTH = 0.8
"""Distance in feature space (numbers of order one) at which evidence counts exp(-1/2) = 0.61 of a pull."""

ELSEWHERE = 0.7
"""What the closest possible other parent's evidence is worth: two different sources are never the same kernel."""


def similarity(left: Sequence[float], right: Sequence[float]) -> float:
    """Between 0 and 1; 1 for equal features, symmetric, falls with Euclidean distance."""
    distance = float(np.sum((np.asarray(left) - np.asarray(right)) ** 2))
    return float(np.exp(-distance / (2 * LENGTH**2)))


def weights(view: View, arms: Sequence[Arm], records: Sequence[Record]) -> Array:
    """(arms, records): how much each record says about each arm."""
    table = np.zeros((len(arms), len(records)))
    cache: dict[tuple[str, str], float] = {}
    for i, arm in enumerate(arms):
        for j, record in enumerate(records):
            if record.strategy != arm.strategy or record.writer != arm.writer:
                continue
            if record.parent == arm.parent:
                table[i, j] = 1.0
            elif record.parent in view.parents:
                key = (arm.parent, record.parent)
                if key not in cache:
                    cache[key] = ELSEWHERE * similarity(view.parents[key[0]].features, view.parents[key[1]].features)
                table[i, j] = cache[key]
    return table
