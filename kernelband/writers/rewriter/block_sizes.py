"""Rule family `block_sizes`: other tile sizes, one at a time and in the joint steps that matrix products gain from.

Owns: which other sizes make sense, and the consistent change of the literal that fixes them (`tunables.py` knows which
literals those are). It changes a size only where the rest follows: a grid that neither names the size nor spells the same
number in a way that can be read, or a tile that covers a whole axis, is declined in words.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod

import libcst as cst

from kernelband.writers.rewriter.kernels import Knob, Source
from kernelband.writers.rewriter.rule import Child, Rule
from kernelband.writers.rewriter.tunables import Tile, bounds, most_elements, tiles

_SINGLE = (2.0, 0.5, 4.0, 0.25, 8.0)


def apply(source: Source) -> tuple[list[Child], list[str]]:
    """Children with other tile sizes, and words for each constexpr that could not be changed."""
    found, words = tiles(source)
    children: list[Child] = []
    for tile in found:
        for factor in _SINGLE:
            _propose(source, found, {tile.knob: factor}, children)
    groups: dict[str, list[Tile]] = {}
    for tile in found:
        groups.setdefault(tile.kernels[0], []).append(tile)
    for group in groups.values():
        if len(group) in (2, 3):
            for plan in _joint(group):
                _propose(source, found, plan, children)
    if found and not children:
        words.append("every other size is out of bounds")
    return children, words


def _joint(group: list[Tile]) -> list[dict[Knob, float]]:
    """Joint steps for the two or three tile sizes of one kernel."""
    knobs = [tile.knob for tile in group]
    loops = [tile.knob for tile in group if any(role.step for _, _, role in tile.places)]
    outer = [knob for knob in knobs if knob not in loops]
    plans: list[dict[Knob, float]] = []
    if len(outer) == 2:
        first, second = outer
        plans.append({first: 2, second: 2})
        for inner in loops:
            plans += [
                {first: 2, second: 2, inner: 2},
                {first: 2, second: 4, inner: 2},
                {first: 4, second: 2, inner: 2},
                {first: 2, inner: 2},
                {second: 2, inner: 2},
            ]
        plans += [{first: 2, second: 0.5}, {first: 0.5, second: 2}, {first: 0.5, second: 0.5}]
    else:
        for first, second in pairwise(knobs):
            for one, other in ((2.0, 2.0), (2.0, 0.5), (0.5, 2.0), (0.5, 0.5)):
                plans.append({first: one, second: other})
    return plans


def _propose(source: Source, known: list[Tile], factors: dict[Knob, float], children: list[Child]) -> None:
    """Add the child with these sizes if each size, and each block they span, is within bounds."""
    changed = [tile for tile in known if tile.knob in factors]
    changes: dict[cst.CSTNode, cst.CSTNode] = {}
    for tile in changed:
        size = tile.knob.value * factors[tile.knob]
        low, high = bounds(tile)
        if size != int(size) or not low <= size <= high:
            return
        literal = cst.Integer(str(int(size)))
        for node in (tile.knob.node, *tile.grid_literals):
            if node in changes:  # two tiles claim the same grid literal
                return
            changes[node] = literal
    for where in {name for tile in changed for name in tile.kernels}:
        # One literal may feed several tiles of a launch, and each spans an axis of its own.
        sizes = sorted(
            (
                int(tile.knob.value * factors.get(tile.knob, 1))
                for tile in known
                for launch, _, _ in tile.places
                if launch.where == where
            ),
            reverse=True,
        )
        dot = any(tile.dot for tile in known if where in tile.kernels)
        grows = any(factor > 1 for factor in factors.values())
        if grows and prod(sizes[:2] if dot else sizes) > most_elements(dot):
            return
    text = ", ".join(f"{t.label} {t.knob.value} -> {int(t.knob.value * factors[t.knob])}" for t in changed)
    where = " and ".join(dict.fromkeys(name for tile in changed for name in tile.kernels))
    children.append((f"{text} in {where}", source.edit(changes)))


RULE = Rule(
    "block_sizes",
    "tiling",
    "another tile size, or two or three of one kernel together",
    "a constexpr tile size that one integer literal fixes, with a grid that follows it",
    apply,
)
