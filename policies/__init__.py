"""Policies: which pull next. Names to makers; nothing here knows Ray, torch or files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kernelband import search, strategies
from kernelband.candidate import content_hash
from kernelband.errors import UserError, nearest
from kernelband.search import Policy
from policies.bandit import KernelBand
from policies.baselines import Greedy, Random, RoundRobin

MAKERS: dict[str, Callable[[], Policy]] = {
    "kernelband": KernelBand, "random": Random, "round-robin": RoundRobin, "greedy": Greedy,
}


def make(name: str) -> Policy:
    """The policy of that name. Raises UserError with the nearest name."""
    if name not in MAKERS:
        raise UserError(f"unknown policy {name!r}; {nearest(name, MAKERS)}")
    return MAKERS[name]()


def rules() -> str:
    """A hash of the files that decide: only under the same ones does a history lead to the same orders."""
    files = [Path(m.__file__ or "") for m in (search, strategies)] + sorted(Path(__file__).parent.glob("*.py"))
    return content_hash("\0".join(path.read_text(encoding="utf-8") for path in files))
