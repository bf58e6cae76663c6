"""Writers: whoever turns (parent, strategy) into new source. Types that all writers share.

A writer is asked for one child at a time and says what it did; it never compiles, runs or judges a source.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

WriteKind = Literal["written", "unchanged", "duplicate", "not_applicable", "write_failed"]


@dataclass(frozen=True)
class Request:
    """One order for a writer: a child of `source` in the direction of `strategy`."""

    pull: int
    parent: str
    source: str
    strategy: str


@dataclass(frozen=True)
class Written:
    """What a writer made of a request. identity: hash of the normal form. offers: how many children each strategy
    still has from this source (-1: no limit known)."""

    pull: int
    kind: WriteKind
    source: str = ""
    identity: str = ""
    family: str = ""
    description: str = ""
    detail: str = ""
    offers: dict[str, int] | None = None
    seconds: float = 0.0


class Writer(Protocol):
    name: str

    def offers(self, source: str) -> dict[str, int]:
        """Strategy -> how many children this writer can make of the source; strategies without any are absent."""
        ...

    def write(self, request: Request) -> Written: ...
