"""The shape of a rule family: a name, the strategy it serves, its precondition in words, and the function itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kernelband.writers.rewriter.kernels import Source

Child = tuple[str, str]
"""One-line description of a change, and the full text of the changed source."""


@dataclass(frozen=True)
class Rule:
    """One rule family: what it does, and where it may, in words. `apply` gives its children, and words about each place
    to which it does not apply."""

    name: str
    strategy: str
    does: str
    precondition: str
    apply: Callable[[Source], tuple[list[Child], list[str]]]
