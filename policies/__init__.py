"""Policies: which pull next. Names to makers; nothing here knows Ray, torch or files."""

from __future__ import annotations

from collections.abc import Callable

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
