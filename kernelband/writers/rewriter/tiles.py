"""What a constexpr parameter means inside a kernel: a tile size, a stride of a loop or of the grid, or neither.

Owns: the roles of constexprs, followed through local names and into jit helpers. Pure reading; changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import libcst as cst

from kernelband.writers.rewriter.kernels import (
    Kernel,
    Source,
    argument,
    bindings,
    called,
    helper_arguments,
    names_in,
    walk,
)

# calls whose arguments (from this position on) are shapes of tiles
_SHAPED = {"zeros": 0, "full": 0, "ones": 0, "empty": 0, "broadcast_to": 1, "reshape": 1, "view": 0}
_BLOCKS = {"make_block_ptr": 4, "make_tensor_descriptor": 3, "advance": None}
_RANGES = ("range", "static_range")


@dataclass
class Role:
    """How a kernel uses one constexpr. A tile that is never a stride covers a whole axis with one block."""

    shape: bool = False  # the length of a tile: tl.arange, tl.zeros, a block shape
    stride: bool = False  # the distance between neighbouring tiles
    step: bool = False  # the step of a loop over tiles
    grid: bool = False  # the distance between neighbouring programs

    def merge(self, other: Role) -> None:
        """Take over what another use of the same value says."""
        self.shape |= other.shape
        self.stride |= other.stride
        self.step |= other.step
        self.grid |= other.grid


def roles(source: Source, kernel: Kernel, _seen: tuple[Kernel, ...] = ()) -> dict[str, Role]:
    """The role of each constexpr parameter of a kernel, its jit helpers included."""
    known = _aliases(kernel)
    programs = program_names(kernel)
    local = bindings(kernel.node)
    found = {name: Role() for name in kernel.constexprs}

    def mark(nodes: Iterable[cst.CSTNode | None], **facts: bool) -> None:
        for node in nodes:
            for name in names_in(node) if node is not None else ():
                for param in known.get(name, ()):
                    found[param].merge(Role(**facts))

    for node in walk(kernel.node.body):
        name = called(node)
        if isinstance(node, cst.Call):
            values = [arg.value for arg in node.args]
            if name == "arange":
                mark(values[1:2] + [arg.value for arg in node.args if arg.keyword], shape=True)
            elif name in _SHAPED:
                mark(values[_SHAPED[name] :], shape=True)
            elif name in _BLOCKS:
                shape = argument(node, _BLOCKS[name], "block_shape")
                mark([shape.value if shape else None], shape=True)
                if name == "advance":
                    mark(values[1:], stride=True, step=True)
            elif name == "cdiv":
                mark(values[1:2], stride=True)
            helper = source.kernels.get(node.func.value) if isinstance(node.func, cst.Name) else None
            if helper and helper not in _seen and helper is not kernel:
                inner = roles(source, helper, (*_seen, kernel))
                for param, arg in helper_arguments(helper, node).items():
                    if param in inner:
                        role = inner[param]
                        mark([arg.value], shape=role.shape, stride=role.stride, step=role.step, grid=role.grid)
        elif isinstance(node, cst.For) and called(node.iter) in _RANGES:
            values = [arg.value for arg in node.iter.args if not arg.keyword]  # type: ignore[attr-defined]
            mark(values[2:3], stride=True, step=True)
            for bound in values[:2]:
                named = local.get(bound.value, []) if isinstance(bound, cst.Name) else []
                value = named[0].value if len(named) == 1 and named[0].value is not None else bound
                counts = [inner for inner in walk(value) if called(inner) == "cdiv"]
                mark([arg.value for count in counts for arg in count.args[1:2]], step=True)  # type: ignore
        elif isinstance(node, cst.AugAssign) and isinstance(node.operator, (cst.AddAssign, cst.SubtractAssign)):
            mark([node.value], stride=True)
        elif isinstance(node, cst.BinaryOperation):
            if isinstance(node.operator, cst.Multiply):
                both = names_in(node.left) | names_in(node.right)
                mark([node.left, node.right], stride=True, grid=bool(both & programs) or _asks_program(node))
            elif isinstance(node.operator, cst.FloorDivide):
                mark([node.right], stride=True)
    return found


def has_dot(source: Source, kernel: Kernel) -> bool:
    """Whether the kernel or a helper of it multiplies matrices with tl.dot."""
    return any(called(node) in ("dot", "dot_scaled") for part in source.reach(kernel) for node in walk(part.node.body))


def program_names(kernel: Kernel, axis: str | None = None) -> set[str]:
    """Names computed from tl.program_id without loading anything; of one axis if it is given ("0", "1")."""
    found: set[str] = set()
    plain = [(name, binding.value) for name, all_ in bindings(kernel.node).items() for binding in all_ if binding.value]
    while True:
        new = {
            name
            for name, value in plain
            if name not in found
            and (_asks_program(value, axis) or names_in(value) & found)
            and not any(called(node) == "load" for node in walk(value))
        }
        if not new:
            return found
        found |= new


def _asks_program(node: cst.CSTNode, axis: str | None = None) -> bool:
    return any(axis in (None, program_axis(inner)) for inner in walk(node) if called(inner) == "program_id")


def program_axis(node: cst.CSTNode) -> str | None:
    """The axis ("0", "1", "2") that a tl.program_id call asks for, None if it is not a literal."""
    arg = argument(node, 0, "axis") if isinstance(node, cst.Call) else None
    return arg.value.value if arg is not None and isinstance(arg.value, cst.Integer) else None


def _aliases(kernel: Kernel) -> dict[str, frozenset[str]]:
    """Name in the kernel -> the constexpr parameters that it stands for; a parameter stands for itself.

    A local name counts when it is assigned once, from constexprs and literals alone (`HALF = BLOCK // 2`).
    """
    found = {name: frozenset({name}) for name in kernel.constexprs}
    for name, all_ in bindings(kernel.node).items():
        value = all_[0].value
        if len(all_) == 1 and all_[0].kind == "assign" and value is not None:
            used = names_in(value) - {"tl", "triton", "min", "max"}
            if used and used <= found.keys():
                found[name] = frozenset().union(*(found[other] for other in used))
    return found
