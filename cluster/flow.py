"""How many pulls to keep under way, from what their stages have cost so far."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

from kernelband.events import PullEnded

RECENT, ENOUGH = 16, 4
"""Of so many outcomes the costs are averaged, and how many there must be."""

BEFORE = frozenset({"write", "compile"})
"""Stages before a judge; all others but these and PARTS are a judge's."""

PARTS = frozenset({"waited", "kernels", "tune"})
"""Costs that are parts of others, or of nobody's work."""


def least(judges: int) -> int:
    """Pulls under way before anything is known: a few more than there are judges."""
    return 3 * judges + 3


def wanted(outcomes: Iterable[PullEnded], judges: int, compilers: int, pulls: int) -> int:
    """Pulls under way so that no judge waits for a candidate: Little's law (Little, "A Proof for the Queuing Formula L = lambda
    W", 1961) with the mean seconds of writing and compiling per second of judging.

    No more than all workers together can serve, and no more than a quarter of the budget: what is decided while much is under way
    is decided knowing little.
    """
    judged = [o.costs for o in outcomes if o.costs.get("verify")][-RECENT:]
    few = least(judges)
    if len(judged) < ENOUGH:
        return few
    before = statistics.fmean(sum(v for k, v in one.items() if k in BEFORE) for one in judged)
    at = statistics.fmean(sum(v for k, v in one.items() if k not in BEFORE | PARTS) for one in judged)
    ideal = math.ceil(judges * (1 + before / max(at, 1e-3))) + 2
    return max(few, min(ideal, compilers + 2 * judges + 1, max(few, pulls // 4)))
