"""The strategy catalogue: named directions of rewriting, the resource that each relieves, and the words a writer gets.

Owns names and meaning only. Which strategy to pull next is the policy's business; how a rule carries one out is the
rewriter's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kernelband.errors import UserError, nearest

Resource = Literal["dram", "l2", "compute", "issue", "latency"]


@dataclass(frozen=True)
class Strategy:
    """One direction of rewriting.

    relieves: the hardware resources whose load falls, or whose idle time shrinks, when the strategy works.
    cuts_traffic: True when it works by moving fewer bytes, so that a saturated memory speaks *for* it and not
        against it.
    """

    name: str
    relieves: tuple[Resource, ...]
    cuts_traffic: bool
    guidance: str


CATALOGUE: dict[str, Strategy] = {
    s.name: s
    for s in (
        Strategy(
            "tiling", ("l2", "compute", "latency"), True,
            "Change tile shapes so that each loaded byte is reused more often, or so that more bytes are in flight.",
        ),
        Strategy(
            "vectorization", ("issue", "dram"), False,
            "Make loads and stores wide and unconditional: contiguous accesses, alignment hints, no mask where none "
            "is needed.",
        ),
        Strategy(
            "fusion", ("dram", "l2"), True,
            "Do more with each byte while it is on the chip: fewer passes, fewer intermediate tensors, fewer launches.",
        ),
        Strategy(
            "pipeline", ("latency", "compute"), False,
            "Overlap loads with arithmetic: number of warps and stages, unrolling, independent work in flight.",
        ),
        Strategy(
            "reordering", ("l2",), True,
            "Change the order in which programs visit tiles so that neighbours find each other's data in L2.",
        ),
        Strategy(
            "access_layout", ("dram", "l2"), True,
            "Change strides, index order or padding so that neighbouring lanes touch neighbouring bytes.",
        ),
    )
}


def get(name: str) -> Strategy:
    """The strategy of that name. Raises UserError with the nearest name."""
    if name not in CATALOGUE:
        raise UserError(f"unknown strategy {name!r}; {nearest(name, CATALOGUE)}")
    return CATALOGUE[name]
