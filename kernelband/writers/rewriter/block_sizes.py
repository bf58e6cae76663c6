"""Rule family `block_sizes`: other tile sizes, one at a time and in the joint steps that matrix products gain from.

Owns: which constexpr integers are tile sizes, which other sizes make sense, and the consistent change of the literal
that fixes them. It changes a size only where the rest follows: a grid that neither names the size nor spells the same
number in a way that can be read, or a tile that covers a whole axis, is declined in words.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

import libcst as cst

from kernelband.writers.rewriter.kernels import Knob, Launch, Source, called, names_in, walk
from kernelband.writers.rewriter.rule import Child, Rule
from kernelband.writers.rewriter.tiles import Role, has_dot, roles

_SINGLE = (2.0, 0.5, 4.0, 0.25, 8.0)
_SMALLEST, _SMALLEST_DOT = 8, 16
_LARGEST, _LARGEST_DOT = 1 << 16, 256
# Elements of one block: beyond this the registers of an SM cannot hold it, with tl.dot's accumulator in float32.
_MOST_ELEMENTS, _MOST_DOT_ELEMENTS = 1 << 17, 1 << 15


@dataclass
class Tile:
    """One literal that fixes tile sizes: the places it feeds, and grid literals that must move with it."""

    knob: Knob
    places: list[tuple[Launch, str, Role]] = field(default_factory=list)
    grid_literals: list[cst.Integer] = field(default_factory=list)
    dot: bool = False

    @property
    def label(self) -> str:
        """The parameter names it feeds, without repetition."""
        return "/".join(dict.fromkeys(param for _, param, _ in self.places))

    @property
    def kernels(self) -> list[str]:
        """The launches it feeds, by name, without repetition."""
        return list(dict.fromkeys(launch.where for launch, _, _ in self.places))


def apply(source: Source) -> tuple[list[Child], list[str]]:
    """Children with other tile sizes, and words for each constexpr that could not be changed."""
    tiles, words = _tiles(source)
    children: list[Child] = []
    for tile in tiles:
        for factor in _SINGLE:
            _propose(source, tiles, {tile.knob: factor}, children)
    groups: dict[str, list[Tile]] = {}
    for tile in tiles:
        groups.setdefault(tile.kernels[0], []).append(tile)
    for group in groups.values():
        if len(group) in (2, 3):
            for plan in _joint(group):
                _propose(source, tiles, plan, children)
    if tiles and not children:
        words.append("every other size is out of bounds")
    return children, words


def _tiles(source: Source) -> tuple[list[Tile], list[str]]:
    """The tile sizes that can be changed, in source order, and words about the rest."""
    found: dict[cst.CSTNode, Tile] = {}
    refused: dict[cst.CSTNode, str] = {}
    words: list[str] = []
    if not source.launches:
        words.append("no launch of a kernel is in the source")
    for launch in source.launches:
        kernel, known = launch.kernel, roles(source, launch.kernel)
        tiled = [param for param in kernel.params if param in known and known[param].shape]
        if not tiled:
            words.append(f"{kernel.name} has no constexpr tile size")
        for param in tiled:
            knob = source.resolve(launch, param)
            if isinstance(knob, str):
                words.append(f"{knob} in {kernel.name}")
                continue
            tile = found.setdefault(knob.node, Tile(knob))
            tile.places.append((launch, param, known[param]))
            tile.dot |= has_dot(source, kernel)
            why = _obstacle(source, launch, param, knob, known[param], tile, tiled)
            if why:
                refused.setdefault(knob.node, f"{why} in {kernel.name}")
    words.extend(refused.values())
    return [tile for node, tile in found.items() if node not in refused], words


def _obstacle(
    source: Source, launch: Launch, param: str, knob: Knob, role: Role, tile: Tile, tiled: list[str]
) -> str | None:
    """Why a tile size must stay as it is at this launch, if it must. Notes grid literals that follow it in `tile`."""
    value = knob.value
    if value < _SMALLEST or value & (value - 1):
        return f"{param} = {value} is not a power of two of at least {_SMALLEST}"
    if not role.stride:
        return f"{param} covers a whole axis with one block, so another size would change what is computed"
    closure = source.grid_closure(launch)
    if any(names_in(node) & set(knob.names) for node in closure) or any(_reads_key(node, param) for node in closure):
        return None
    same = [node for part in closure for node in walk(part) if isinstance(node, cst.Integer)]
    if role.grid and any(node.evaluated_value == value - 1 for node in same):
        return f"the grid spells {param} as {value - 1}, which cannot be changed safely"
    spelled = [node for node in same if node.evaluated_value == value]
    if not spelled:
        return f"the grid does not follow {param}" if role.grid and not role.step else None
    if not role.grid:
        return None
    others = [source.resolve(launch, other) for other in tiled if other != param]
    if any(isinstance(other, Knob) and other.value == value and other.node is not knob.node for other in others):
        return f"the grid spells {value}, and more than one tile has this size"
    divisors = {node for part in closure for node in _divisors(part)}
    if not set(spelled) <= divisors or knob.names:
        return f"the grid spells {value} in a way that cannot be tied to {param}"
    tile.grid_literals.extend(node for node in dict.fromkeys(spelled) if node not in tile.grid_literals)
    return None


def _reads_key(node: cst.CSTNode, key: str) -> bool:
    """Whether the expression reads `meta["KEY"]`."""
    return any(isinstance(part, cst.SimpleString) and part.evaluated_value == key for part in walk(node))


def _divisors(node: cst.CSTNode) -> list[cst.CSTNode]:
    """The integers by which an expression divides: in cdiv(x, 64), x // 64 and (x + 64 - 1) // 64."""
    found: list[cst.CSTNode] = []
    for part in walk(node):
        if isinstance(part, cst.Call) and called(part) == "cdiv" and len(part.args) == 2:
            found.append(part.args[1].value)
        elif isinstance(part, cst.BinaryOperation):
            if isinstance(part.operator, cst.FloorDivide):
                found.append(part.right)
            elif (
                isinstance(part.operator, cst.Subtract)
                and isinstance(part.right, cst.Integer)
                and part.right.value == "1"
                and isinstance(part.left, cst.BinaryOperation)
                and isinstance(part.left.operator, cst.Add)
            ):
                found.append(part.left.right)
    return found


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


def _propose(source: Source, tiles: list[Tile], factors: dict[Knob, float], children: list[Child]) -> None:
    """Add the child with these sizes if each size, and each block they span, is within bounds."""
    changed = [tile for tile in tiles if tile.knob in factors]
    changes: dict[cst.CSTNode, cst.CSTNode] = {}
    for tile in changed:
        size = tile.knob.value * factors[tile.knob]
        low, high = (_SMALLEST_DOT, _LARGEST_DOT) if tile.dot else (_SMALLEST, _LARGEST)
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
                for tile in tiles
                for launch, _, _ in tile.places
                if launch.where == where
            ),
            reverse=True,
        )
        dot = any(tile.dot for tile in tiles if where in tile.kernels)
        grows = any(factor > 1 for factor in factors.values())
        if grows and prod(sizes[:2] if dot else sizes) > (_MOST_DOT_ELEMENTS if dot else _MOST_ELEMENTS):
            return
    text = ", ".join(f"{t.label} {t.knob.value} -> {int(t.knob.value * factors[t.knob])}" for t in changed)
    where = " and ".join(dict.fromkeys(name for tile in changed for name in tile.kernels))
    children.append((f"{text} in {where}", source.edit(changes)))


RULE = Rule("block_sizes", "tiling", "a constexpr tile size that one integer literal fixes", apply)
