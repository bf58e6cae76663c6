"""Writers: whoever turns (parent, strategy) into new source. Types that all writers share.

A writer is asked for one child at a time and says what it did; it never compiles, runs or judges a source.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

WriteKind = Literal["written", "unchanged", "duplicate", "not_applicable", "write_failed"]

WriterName = Literal["rewriter", "tuner"]
"""The writers that a search can be given; `team.py` makes them."""

LEARNERS = frozenset({"tuner"})
"""Writers that use the history of a request. The others are not sent it: it grows with the run."""


@dataclass(frozen=True)
class Observation:
    """What is known of one source of the run: its hash, how it ended, and log(baseline time / its time) if it was right."""

    candidate: str
    kind: str
    log_speedup: float | None = None


@dataclass(frozen=True)
class Request:
    """One order for a writer: a child of `source` in the direction of `strategy`. history: what was found out about the
    sources of this run, the baseline first and then by pull, as far as the decision on this pull was allowed to see it."""

    pull: int
    parent: str
    source: str
    strategy: str
    history: tuple[Observation, ...] = ()


@dataclass(frozen=True)
class Written:
    """What a writer made of a request. identity: hash of the normal form. offers: how many children each strategy
    still has from this source (-1: no limit known). others: the same by the other writers of the search, by name."""

    pull: int
    kind: WriteKind
    source: str = ""
    identity: str = ""
    family: str = ""
    description: str = ""
    detail: str = ""
    offers: dict[str, int] | None = None
    others: dict[str, dict[str, int]] = field(default_factory=dict)
    seconds: float = 0.0


class Writer(Protocol):
    name: str

    def offers(self, source: str) -> dict[str, int]:
        """Strategy -> how many children this writer can make of the source; strategies without any are absent."""
        ...

    def write(self, request: Request) -> Written: ...
