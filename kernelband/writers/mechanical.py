"""The rewriter as a writer: chooses one of its moves for a request, and remembers what was tried.

Which move: the untried one that comes first in an order fixed by (seed, parent, strategy), so that the same search gets
the same children whatever arrives when. Rule families take turns: one with many children does not crowd out the others.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Iterable

from kernelband.candidate import identity
from kernelband.writers import Request, Written
from kernelband.writers.rewriter import FAMILIES, Move, moves, reasons


class Rewriter:
    """Holds the identities of all sources tried in this run; feed it every one that it did not write itself. without: rule
    families that are not asked."""

    name = "rewriter"

    def __init__(self, seed: int, tried: Iterable[str] = (), without: Collection[str] = ()):
        self.seed = seed
        self.tried = set(tried)
        self.without = frozenset(without)

    def _moves(self, source: str, strategy: str | None = None) -> list[Move]:
        return [move for move in moves(source, strategy) if move.family not in self.without]

    def offers(self, source: str) -> dict[str, int]:
        counts: dict[str, int] = {}
        for move in self._moves(source):
            if identity(move.source) not in self.tried:
                counts[move.strategy] = counts.get(move.strategy, 0) + 1
        return counts

    def write(self, request: Request) -> Written:
        """A child for the request. A rule that raises fails this request only, and says so."""
        started = time.monotonic()
        try:
            return self._write(request, started)
        except Exception as err:
            return Written(request.pull, "write_failed", detail=f"a rule raised {type(err).__name__}: {err}"[:500],
                           seconds=time.monotonic() - started)

    def _write(self, request: Request, started: float) -> Written:
        known = self._moves(request.source, request.strategy)
        for move in self._in_turn(request, known):
            name = identity(move.source)
            if name not in self.tried:
                self.tried.add(name)
                return Written(request.pull, "written", move.source, name, move.family, move.description,
                               offers=self.offers(move.source), seconds=time.monotonic() - started)
        why = "every move was tried before" if known else "; ".join(
            f"{family}: {reason}" for family, reason in sorted(reasons(request.source).items()))
        return Written(request.pull, "not_applicable", detail=why or "no rule for this strategy",
                       seconds=time.monotonic() - started)

    def _in_turn(self, request: Request, known: list[Move]) -> list[Move]:
        """One move of each family, in the order of FAMILIES, then the second of each, and so on."""
        order = [rule.name for rule in FAMILIES]
        ranked = sorted((self._rank(request, move.description), move.family, i) for i, move in enumerate(known))
        place: dict[str, int] = {}
        turns = []
        for _, family, i in ranked:
            place[family] = place.get(family, 0) + 1
            turns.append((place[family], order.index(family), i))
        return [known[i] for _, _, i in sorted(turns)]

    def _rank(self, request: Request, what: str) -> str:
        return hashlib.sha256(f"{self.seed}:{request.parent}:{request.strategy}:{what}".encode()).hexdigest()
