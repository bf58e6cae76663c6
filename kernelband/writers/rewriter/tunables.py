"""What of a source is a number that can be set: tile sizes, group sizes of programs, and options of a launch.

Owns: which literals these are, why another cannot be set, in words, and the bounds of a block. The families that change one
of them, and the tuner, which changes several at once, all read it here. Changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import libcst as cst

from kernelband.writers.rewriter.kernels import Kernel, Knob, Launch, Source, bindings, called, names_in, walk
from kernelband.writers.rewriter.tiles import Role, has_dot, program_names, roles

SMALLEST, SMALLEST_DOT = 8, 16
LARGEST, LARGEST_DOT = 1 << 16, 256
# Elements of one block: beyond this the registers of an SM cannot hold it, with tl.dot's accumulator in float32.
MOST_ELEMENTS, MOST_DOT_ELEMENTS = 1 << 17, 1 << 15
DEFAULTS = {"num_warps": 4, "num_stages": 3}
"""The options of a launch, and what Triton takes when the launch does not say."""


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


def tiles(source: Source) -> tuple[list[Tile], list[str]]:
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
    if value < SMALLEST or value & (value - 1):
        return f"{param} = {value} is not a power of two of at least {SMALLEST}"
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


def bounds(tile: Tile) -> tuple[int, int]:
    """The smallest and the largest size that a tile may have."""
    return (SMALLEST_DOT, LARGEST_DOT) if tile.dot else (SMALLEST, LARGEST)


def most_elements(dot: bool) -> int:
    """Elements of the largest block, or of the largest accumulator of a product."""
    return MOST_DOT_ELEMENTS if dot else MOST_ELEMENTS


def group_sizes(source: Source, kernel: Kernel) -> list[tuple[str, Knob]]:
    """Constants of a kernel that group programs: no tile, but used as `min(..., G)` and as a factor."""
    local = bindings(kernel.node)
    known = roles(source, kernel)
    found: list[tuple[str, Knob]] = []
    for name in [*kernel.params, *local]:
        constant = name in known and not known[name].shape
        inner = [
            b.value
            for b in local.get(name, [])
            if isinstance(b.node, cst.AnnAssign) and isinstance(b.value, cst.Integer) and b.kind == "assign"
        ]
        if not (constant or inner) or not _groups(kernel, name):
            continue
        if inner and isinstance(inner[0], cst.Integer):
            knobs: list[Knob | str] = [Knob(inner[0], inner[0].evaluated_value, ())]
        else:
            knobs = [source.resolve(launch, name) for launch in source.launches if launch.kernel is kernel]
        for knob in knobs:
            if isinstance(knob, Knob) and all(knob.node is not other.node for _, other in found):
                found.append((name, knob))
    return found


def _groups(kernel: Kernel, name: str) -> bool:
    limit = factor = False
    for node in walk(kernel.node.body):
        if called(node) in ("min", "minimum") and isinstance(node, cst.Call):
            limit |= any(isinstance(arg.value, cst.Name) and arg.value.value == name for arg in node.args)
        elif isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Multiply):
            factor |= any(isinstance(side, cst.Name) and side.value == name for side in (node.left, node.right))
    return limit and factor and bool(program_names(kernel))


def option_obstacle(source: Source, launch: Launch, option: str) -> str | None:
    """Why an option of a launch cannot be set, None if it can."""
    kernel = launch.kernel
    if kernel.autotuned:
        return f"{kernel.name} is autotuned, so its configs own num_warps and num_stages"
    if option in kernel.params:
        return f"{option} is a parameter of {kernel.name} itself"
    if option not in launch.args and launch.opaque:
        return f"{option} of {kernel.name} may come through *args or **kwargs"
    if option == "num_stages" and not any(
        isinstance(node, (cst.For, cst.While)) for part in source.reach(kernel) for node in walk(part.node.body)
    ):
        return f"{kernel.name} has no loop to pipeline"
    return None
