"""Soft pruning: what the profile of a parent says about a strategy, as a weight between 0 and 1 and a reason.

A strategy that relieves a resource that is not under load can gain little. A strategy that raises throughput on a
saturated resource can gain little too, but one that cuts traffic is favoured there. The less certain the rung of the
signal ladder that the load comes from, the closer the weight stays to 1.
"""

from __future__ import annotations

from kernelband.search import Parent
from kernelband.strategies import CATALOGUE

CERTAINTY = {"ncu": 0.9, "cupti": 0.75, "timed": 0.6, "model": 0.6, "compiled": 0.4, "source": 0.2}
"""How far each rung may move a weight away from 1. First values by judgement."""

IDLE = 0.35
"""Below this share of its peak a resource is not what the kernel waits for."""

SATURATED = 0.85


def weigh(parent: Parent, strategy: str) -> tuple[float, str]:
    """(weight in (0, 1], reason in words or ''). A strategy or a load that is not known weighs 1."""
    known = CATALOGUE.get(strategy)
    trust = CERTAINTY.get(parent.rung, 0.0)
    loads = {r: parent.load[r] for r in (known.relieves if known else ()) if r in parent.load}
    if not known or not loads or trust == 0.0:
        return 1.0, ""
    resource, load = max(loads.items(), key=lambda item: item[1])
    # Idle only counts when every resource that the strategy relieves is known: a kernel that waits for what nobody measured
    # looks idle everywhere else, and its remedy must not be held back for that.
    if load < IDLE and len(loads) == len(known.relieves):
        pull = load / IDLE
        reason = f"{resource} is at {load:.0%} of its peak: little to relieve"
    elif load > SATURATED and not known.cuts_traffic and resource in ("dram", "l2"):
        pull = 0.5
        reason = f"{resource} is saturated ({load:.0%}) and {strategy} moves no byte less"
    else:
        return 1.0, ""
    return 1.0 - trust * (1.0 - pull), f"{reason} (seen by: {parent.rung})"
