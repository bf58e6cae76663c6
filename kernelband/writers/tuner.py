"""The tuner: a writer that sets the numeric parameters of a source, several at once, by what was measured so far.

Candidates of a run that differ in nothing but these numbers are points of one space (`knobs.py`). A Gaussian process over the
base-2 logarithms of the values (scikit-learn) learns log speed-up from all that the request's history knows of them, and the
untried point of the largest expected improvement is written. Sources of another skeleton with the same knobs count too, as
points some way off; failures count as bad values. With too little history it spreads its points instead.

Owns the choice of values. Never measures, and keeps no result: the same requests in the same order give the same children.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelband.candidate import content_hash, identity
from kernelband.writers import Request, Written
from kernelband.writers.knobs import Space, Values, read

Array = NDArray[np.float64]

MOST_OFFERS = 12
"""Children it speaks of for one strategy of one parent: there may be hundreds, and a policy needs not know how many."""

ENOUGH = 3
"""Observations of the space before the surrogate is asked."""

NEAR = 2.0
"""Without a surrogate no knob moves further than this many doublings: the ends of a range are mostly its worst points."""

APART = 1.5
"""Doublings between two skeletons with the same knobs: what one shows is a hint for the other, and no more."""

MOST_KNOWN = 200
"""Observations that the surrogate is given, the nearest of the own skeleton first: its cost grows with their cube."""

SCALES = (1.0, 2.0, 4.0, 8.0)
"""Length scales of the surrogate to choose from, in doublings."""

NOISE = 0.02
"""Variance of an observation beside that of the landscape: timing noise, and what the logarithms do not say."""

SILENT = frozenset({"infra", "not_applicable", "unchanged", "duplicate", "write_failed"})
"""Outcomes that say nothing about the values of a source."""

_SPACES = 32


@dataclass(frozen=True)
class Point:
    """A source as a point: which space, which knobs, and their values."""

    skeleton: str
    names: tuple[str, ...]
    values: Values


@dataclass(frozen=True)
class Known:
    """A point that was tried. score: log speed-up, None for a failure. pending: nothing is known of it yet."""

    skeleton: str
    values: Values
    score: float | None
    pending: bool = False


class Tuner:
    """Holds the identities of all sources tried in this run: `tried`, which the writers of one search share.

    source_of: the text of a candidate in the history, by its hash.
    """

    name = "tuner"

    def __init__(self, seed: int, tried: set[str], source_of: Callable[[str], str]):
        self.seed, self.tried, self._source_of = seed, tried, source_of
        self._spaces: OrderedDict[str, Space | str] = OrderedDict()
        self._points: dict[str, Point | None] = {}

    def offers(self, source: str) -> dict[str, int]:
        space = self._space(source)
        counts: dict[str, int] = {}
        if isinstance(space, str):
            return counts
        for strategy in dict.fromkeys(s.strategy for s in space.settings):
            for point in space.points(strategy):
                if identity(space.text(point)) not in self.tried:
                    counts[strategy] = counts.get(strategy, 0) + 1
                    if counts[strategy] == MOST_OFFERS:
                        break
        return counts

    def reason(self, source: str) -> str:
        """Why it can make nothing of a source, in words; '' if it can."""
        space = self._space(source)
        return space if isinstance(space, str) else ""

    def write(self, request: Request) -> Written:
        """A child for the request. What raises fails this request only, and says so."""
        started = time.monotonic()
        try:
            return self._write(request, started)
        except Exception as err:
            return Written(request.pull, "write_failed", detail=f"the tuner raised {type(err).__name__}: {err}"[:500],
                           seconds=time.monotonic() - started)

    def _write(self, request: Request, started: float) -> Written:
        space = self._space(request.source)
        why = space if isinstance(space, str) else f"the source has no knob for {request.strategy}"
        if not isinstance(space, str):
            points = list(space.points(request.strategy))
            for point in self._ranked(space, points, request):
                why = "every setting was tried before"
                text = space.text(point)
                name = identity(text)
                if name not in self.tried:
                    self.tried.add(name)
                    return Written(request.pull, "written", text, name, self.name, space.describe(point),
                                   offers=self.offers(text), seconds=time.monotonic() - started)
        return Written(request.pull, "not_applicable", detail=why, seconds=time.monotonic() - started)

    def _ranked(self, space: Space, points: list[Values], request: Request) -> list[Values]:
        """The points, the most promising first. Ties fall by a hash of seed, pull and values."""
        if not points:
            return []
        known = self._known(space, request)
        scores = (promise(points, known, space.skeleton) if sum(not k.pending for k in known) >= ENOUGH
                  else spread(points, [k.values for k in known], space.here))
        ties = [hashlib.sha256(f"{self.seed}:{request.pull}:{p}".encode()).hexdigest() for p in points]
        order = sorted(range(len(points)), key=lambda i: (-scores[i], ties[i]))
        return [points[i] for i in order]

    def _known(self, space: Space, request: Request) -> list[Known]:
        """What the history says about this space, and about others with the same knobs; and what was written in this space
        and is not judged yet, or was judged too late for this request to know."""
        found = []
        for seen in request.history:
            if seen.kind in SILENT or (seen.kind == "measured" and seen.log_speedup is None):
                continue
            point = self._point(seen.candidate)
            if point is not None and point.names == space.names:
                score = seen.log_speedup if seen.kind == "measured" else None
                found.append(Known(point.skeleton, point.values, score))
        told = {seen.candidate for seen in request.history}
        for name, point in list(self._points.items()):
            if point is not None and point.skeleton == space.skeleton and point.names == space.names and name not in told:
                found.append(Known(point.skeleton, point.values, None, pending=True))
        return sorted(found, key=lambda k: (k.skeleton != space.skeleton, _apart(k.values, space.here)))[:MOST_KNOWN]

    def _point(self, candidate: str) -> Point | None:
        if candidate not in self._points:
            self._space(self._source_of(candidate))
        return self._points.get(candidate)

    def _space(self, source: str) -> Space | str:
        """The space around a source; the last few are kept, and the point of each for good."""
        key = content_hash(source)
        if key not in self._spaces:
            space = read(source)
            self._points[key] = None if isinstance(space, str) else Point(space.skeleton, space.names, space.here)
            self._spaces[key] = space
            if len(self._spaces) > _SPACES:
                self._spaces.popitem(last=False)
        self._spaces.move_to_end(key)
        return self._spaces[key]


def _apart(one: Values, other: Values) -> float:
    return round(math.dist([math.log2(v) for v in one], [math.log2(v) for v in other]), 9)


def spread(points: Sequence[Values], known: Sequence[Values], here: Values) -> Array:
    """(points,): distance to the nearest known point, in doublings; those with a far move come last."""
    at, origin = np.log2(np.array(points, float)), np.log2(np.array(here, float))
    seen = np.log2(np.array([here, *known], float))
    gap = np.sqrt(((at[:, None, :] - seen[None, :, :]) ** 2).sum(-1)).min(1)
    far = np.abs(at - origin).max(1)
    return np.round(np.where(far <= NEAR, gap, -far), 9)


def promise(points: Sequence[Values], known: Sequence[Known], skeleton: str) -> Array:
    """(points,): expected improvement over the best known point of the skeleton, in standard deviations of what is known.

    Rounded, so that the last bits of another machine's arithmetic decide nothing.
    """
    from sklearn.base import clone

    waiting = [k for k in known if k.pending]
    known = [k for k in known if not k.pending]
    right = np.array([k.score for k in known if k.score is not None])
    # A failure is worse than all that ran, by as much as these differ: a gap that is far larger would be all that is learnt.
    bad = (right.min() if right.size else 0.0) - max(0.1, float(right.std()) if right.size else 0.0)
    scores = np.array([bad if k.score is None else k.score for k in known])
    middle, width = scores.mean(), max(float(scores.std()), 1e-6)
    others = sorted({k.skeleton for k in known} - {skeleton})
    where = np.array([_place(k.values, k.skeleton, others) for k in known])
    model = _fit(where, (scores - middle) / width, len(known[0].values))
    if waiting:  # as good as expected until it is known (Ginsbourger et al. 2010), so that two pulls do not ask the same thing
        there = np.array([_place(k.values, k.skeleton, others) for k in waiting])
        believed = np.concatenate([model.y_train_, model.predict(there)])
        model = clone(model).fit(np.concatenate([where, there]), believed)
    mean, sd = model.predict(np.array([_place(p, skeleton, others) for p in points]), return_std=True)
    own = [s for k, s in zip(known, scores, strict=True) if k.skeleton == skeleton]
    best = ((max(own) if own else middle) - middle) / width
    return np.round(_expected_improvement(mean - best, np.maximum(sd, 1e-9)), 6)


def _place(values: Values, skeleton: str, others: list[str]) -> list[float]:
    """Coordinates: the logarithms, and one more for each other skeleton that sets it apart from the rest."""
    apart = [APART / 2**0.5 if skeleton == name else 0.0 for name in others]
    return [*np.log2(np.array(values, float)), *apart]


def _fit(where: Array, scores: Array, knobs: int) -> Any:
    """The Gaussian process whose length scales, one for each knob and chosen in turn, make the observations most likely.

    A search on a grid, and not by gradient: with few observations the gradient runs to the bounds of the scales.
    """
    from sklearn.gaussian_process import GaussianProcessRegressor  # a second to import, and only a tuner pays it
    from sklearn.gaussian_process.kernels import Matern

    def at(scales: list[float]) -> Any:
        lengths = np.array([*scales, *[1.0] * (where.shape[1] - knobs)])
        return GaussianProcessRegressor(Matern(lengths, nu=2.5), alpha=NOISE, optimizer=None).fit(where, scores)

    scales = [2.0] * knobs
    model = at(scales)
    for i in range(knobs):
        if np.ptp(where[:, i]) == 0:
            continue  # nothing is known of this knob
        for scale in SCALES:
            other = at([*scales[:i], scale, *scales[i + 1:]])
            if other.log_marginal_likelihood_value_ > model.log_marginal_likelihood_value_ + 1e-6:
                model, scales[i] = other, scale
    return model


def _expected_improvement(lead: Array, sd: Array) -> Array:
    """E[max(0, lead + sd Z)], Z standard normal."""
    from scipy.special import ndtr

    z = lead / sd
    return np.maximum(0.0, lead * ndtr(z) + sd * np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi))
