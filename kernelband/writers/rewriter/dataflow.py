"""Where the values inside a kernel come from: program axes, loops, pointers, scalars and types of numbers.

Owns: following names through the assignments of one kernel, without regard to their order, so that an answer holds
wherever the name is read. Pure reading; it changes nothing and knows no rule. What cannot be followed is answered on
the safe side: may depend on anything, is not surely a scalar, has an unknown type.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import libcst as cst

from kernelband.writers.rewriter.kernels import Kernel, Source, argument, called, code, dotted, names_in, own_nodes
from kernelband.writers.rewriter.tiles import program_axis
from kernelband.writers.rewriter.tree import children, walk

Loop = cst.For | cst.While
RANGES = ("range", "static_range")
_MOST_STEPS = 100_000
ANY = "?"
"""The axis of what may depend on every axis, and the type of what may have any type."""

_SCALARS = {"program_id", "num_programs", "cdiv", "min", "max", "minimum", "maximum", "multiple_of", "load", "abs", "exp",
            "exp2", "log", "log2", "sqrt", "rsqrt"}  # fmt: skip
# Calls whose result is as wide as their widest argument, and calls of which only these arguments count for that.
_AS_WIDE = {"sum", "max", "min", "exp", "exp2", "log", "log2", "sqrt", "sqrt_rn", "rsqrt", "abs", "sigmoid", "maximum",
            "minimum", "fma", "trans", "softmax", "erf", "cos", "sin", "tanh", "floor", "ceil", "cumsum"}  # fmt: skip
_SOME = {"where": (1, 2), "broadcast_to": (0,), "reshape": (0,), "expand_dims": (0,), "view": (0,), "permute": (0,)}
_UNTYPED = {"program_id", "num_programs", "arange", "cdiv", "float", "int"}
_ON_A_BASE = {"make_block_ptr", "advance", "multiple_of", "max_contiguous"}
_MODULES = {"tl", "triton", "libdevice", "math", "language"}
_DTYPE_AT = {"zeros": 1, "full": 2, "cast": 1}
_AT_MOST_FP32 = {"float32", "float16", "bfloat16", "int1", "int8", "int16", "int32", "int64"}


@dataclass(frozen=True, eq=False)
class Write:
    """One place that gives a name a value: the value, None if it cannot be told, and whether the old one goes in too."""

    value: cst.CSTNode | None
    node: cst.CSTNode
    updates: bool = False


def language(source: Source) -> str | None:
    """The name under which the module imports triton.language ("tl"), None if it gives it no name of its own."""
    for node in walk(source.module):
        if not isinstance(node, (cst.Import, cst.ImportFrom)) or isinstance(node.names, cst.ImportStar):
            continue
        package = f"{dotted(node.module)}." if isinstance(node, cst.ImportFrom) and node.module is not None else ""
        for alias in node.names:
            if f"{package}{dotted(alias.name)}" == "triton.language" and (alias.asname or package):
                name = alias.asname.name if alias.asname else alias.name
                return name.value if isinstance(name, cst.Name) else None
    return None


def helpers(source: Source) -> set[str]:
    """The jit functions that another jit function calls: what their arguments are depends on the caller."""
    return {other.name for kernel in source.kernels.values() for other in source.reach(kernel)[1:]}


def writes(node: cst.FunctionDef) -> dict[str, list[Write]]:
    """Every place of a function that gives each name a value; parameters are not listed."""
    found: dict[str, list[Write]] = {}

    def bind(target: cst.CSTNode, value: cst.CSTNode | None, at: cst.CSTNode, updates: bool = False) -> None:
        if isinstance(target, cst.Name):
            found.setdefault(target.value, []).append(Write(value, at, updates))
        elif isinstance(target, (cst.Tuple, cst.List)):
            paired = isinstance(value, (cst.Tuple, cst.List)) and len(value.elements) == len(target.elements)
            values = [part.value for part in value.elements] if paired else [None] * len(target.elements)  # type: ignore
            for part, item in zip(target.elements, values, strict=True):
                bind(part.value, item, at)

    for inner in own_nodes(node):
        if isinstance(inner, cst.Assign):
            for target in inner.targets:
                bind(target.target, inner.value, inner)
        elif isinstance(inner, (cst.AnnAssign, cst.NamedExpr)) and inner.value is not None:
            bind(inner.target, inner.value, inner)
        elif isinstance(inner, cst.AugAssign):
            bind(inner.target, inner.value, inner, True)
        elif isinstance(inner, cst.For):
            bind(inner.target, None, inner)
    return found


class Flow:
    """Where the values of one kernel come from."""

    def __init__(self, source: Source, kernel: Kernel) -> None:
        self.source, self.kernel = source, kernel
        self.is_helper = kernel.name in helpers(source)
        self.writes = writes(kernel.node)
        self.loops: dict[cst.CSTNode, tuple[Loop, ...]] = {}
        """Node -> the loops around it, outermost first. The bounds of a loop are not inside it."""
        stack: list[tuple[cst.CSTNode, tuple[Loop, ...]]] = [(kernel.node.body, ())]
        while stack:
            node, around = stack.pop()
            self.loops[node] = around
            for child in children(node):
                inside = (isinstance(node, cst.For) and child is node.body) or isinstance(node, cst.While)
                stack.append((child, (*around, node) if inside else around))  # type: ignore[arg-type]
        self._asking = {
            name
            for name, other in source.kernels.items()
            if any(called(node) == "program_id" for part in source.reach(other) for node in walk(part.node.body))
        }
        self._depends: dict[str, set[object]] | None = None
        self._steps = 0

    def tired(self) -> bool:
        """Whether more ways were followed than a kernel needs; all questions are then answered on the safe side.

        The ways through names that are each read twice double from line to line.
        """
        self._steps += 1
        return self._steps > _MOST_STEPS

    def depends(self, node: cst.CSTNode) -> set[object]:
        """The program axes and the loops that an expression may depend on: "0" or ANY, "0/" or "0%" of a part of it."""
        if self._depends is None:
            self._depends = {name: set() for name in self.writes}
            grown = True
            while grown:
                grown = False
                for name, all_ in self.writes.items():
                    new: set[object] = set()
                    for write in all_:
                        if write.value is not None:
                            new |= self._tokens(write.value)
                        else:
                            new |= self._tokens(write.node.iter if isinstance(write.node, cst.For) else write.node)
                        if isinstance(write.node, cst.For):
                            new.add(write.node)
                        elif write.updates or (write.value is not None and name in names_in(write.value)):
                            new |= set(self.loops.get(write.node, ())[-1:])
                    grown |= not new <= self._depends[name]
                    self._depends[name] |= new
        return self._tokens(node)

    def _tokens(self, node: cst.CSTNode) -> set[object]:
        assert self._depends is not None
        if isinstance(node, cst.Name):
            return set(self._depends.get(node.value, ()))
        if called(node) == "program_id":
            return {program_axis(node) or ANY}
        found: set[object] = {ANY} if called(node) in self._asking else set()
        for part in children(node):
            found |= self._tokens(part)
        if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, (cst.FloorDivide, cst.Modulo)):
            mark = "/" if isinstance(node.operator, cst.FloorDivide) else "%"
            return {f"{token[0]}{mark}" if isinstance(token, str) else token for token in found}
        return found

    def root(self, node: cst.CSTNode, _seen: frozenset[str] = frozenset()) -> str | None:
        """The pointer parameter on which a pointer expression is built, None if there is not surely one."""
        if self.tired():
            return None
        if isinstance(node, cst.Name):
            name = node.value
            found = {name} if name in self.kernel.params else set()
            if name not in _seen:
                for write in self.writes.get(name, []):
                    if not write.updates:
                        found.add(self.root(write.value, _seen | {name}) if write.value is not None else None)  # type: ignore
                found.discard("")
                return found.pop() if len(found) == 1 else None
            return ""  # on the way round a loop: what the other writes say
        if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, (cst.Add, cst.Subtract)):
            left = self.root(node.left, _seen)
            return left if left is not None else self.root(node.right, _seen)
        if isinstance(node, cst.Subscript):
            return self.root(node.value, _seen)
        if isinstance(node, cst.Call) and called(node) in _ON_A_BASE:
            base = argument(node, 0, "base")
            return self.root(base.value, _seen) if base is not None else None
        return None

    def scalar(self, node: cst.CSTNode | None, _seen: frozenset[str] = frozenset()) -> bool:
        """Whether an expression is surely one number (or pointer) and no tile."""
        if self.tired():
            return False
        if isinstance(node, (cst.Integer, cst.Float)):
            return True
        if isinstance(node, cst.Name):
            name = node.value
            if name in _seen:
                return True
            if name in self.kernel.params and self.is_helper and name not in self.kernel.constexprs:
                return False
            return all(
                called(write.node.iter) in RANGES
                if isinstance(write.node, cst.For)
                else self.scalar(write.value, _seen | {name})
                for write in self.writes.get(name, [])
            )
        if isinstance(node, cst.BinaryOperation):
            return self.scalar(node.left, _seen) and self.scalar(node.right, _seen)
        if isinstance(node, cst.UnaryOperation):
            return self.scalar(node.expression, _seen)
        if isinstance(node, cst.IfExp):
            return self.scalar(node.body, _seen) and self.scalar(node.orelse, _seen)
        if isinstance(node, cst.Call):
            if called(node) == "to" and isinstance(node.func, cst.Attribute):
                return self.scalar(node.func.value, _seen)
            return called(node) in _SCALARS and all(self.scalar(arg.value, _seen) for arg in node.args)
        return False

    def small(self, node: cst.CSTNode | None, _seen: frozenset[str] = frozenset()) -> bool:
        """Whether an expression looks smaller than the tiles of the kernel: a number, a sum, or a row spread over one."""
        if self.tired():
            return False
        if isinstance(node, cst.Subscript):
            return "None" in code(node)
        if isinstance(node, cst.Name) and node.value in self.writes:
            seen = _seen | {node.value}
            return node.value in _seen or all(self.small(write.value, seen) for write in self.writes[node.value])
        if isinstance(node, cst.BinaryOperation):
            return self.small(node.left, _seen) and self.small(node.right, _seen)
        if isinstance(node, cst.Call) and called(node) in ("sum", "max", "min"):
            return True
        if isinstance(node, cst.Call) and called(node) in ("sqrt", "rsqrt", "exp", "maximum", "minimum", "to"):
            inner = [arg.value for arg in node.args]
            inner += [node.func.value] if called(node) == "to" and isinstance(node.func, cst.Attribute) else []
            return all(self.small(part, _seen) or isinstance(part, cst.Attribute) for part in inner)
        return self.scalar(node, _seen)

    def wider(self, node: cst.CSTNode) -> frozenset[str]:
        """Types beyond float32 that an expression may have: names of pointers whose element type is not known, ANY."""
        return self._types(node, False, frozenset(), self.loops.get(node, ())) - self._narrow

    def surely(self, node: cst.CSTNode) -> frozenset[str]:
        """Pointers whose element type an expression is surely at least as wide as."""
        return self._types(node, True, frozenset(), self.loops.get(node, ())) - {ANY}

    def fits(self, node: cst.CSTNode, other: cst.CSTNode) -> bool:
        """Whether float32, or the type of `other`, is surely wide enough for `node`."""
        return self.wider(node) <= self.surely(other)

    @cached_property
    def _narrow(self) -> frozenset[str]:
        """Pointers whose elements must be narrow, because they go into a float32 value that a loop carries on.

        Triton compiles no loop that changes the type of a name from before it, so an accumulator in float32 bounds
        all that is added to it.
        """
        place = {
            node: index
            for index, line in enumerate(self.kernel.node.body.body)
            for node in (walk(line) if isinstance(line, cst.For | cst.While) else children(line))
        }
        # a branch on a constant may not be compiled at all, and then it bounds nothing
        branches = {node for part in place if isinstance(part, cst.If) for node in walk(part)}
        found: set[str] = set()
        for name, all_ in self.writes.items():
            outside = [write for write in all_ if not self._carrying(write)]
            inside = [write for write in all_ if self._carrying(write)]
            first = min((place[write.node] for write in outside if write.node in place), default=None)
            if name in self.kernel.params or first is None or any(self._wide_start(write) for write in outside):
                continue
            if any(place.get(write.node, -1) <= first or write.value is None for write in inside):
                continue
            types = [self._types(w.value, True, frozenset({name}), self.loops[w.node]) for w in inside if w.value]
            if len(inside) == 1 or all(
                write.updates or f"loop {name}" in one for write, one in zip(inside, types, strict=True)
            ):
                sure = [one for write, one in zip(inside, types, strict=True) if self._always(write, branches)]
                found.update(*sure)
        return frozenset(found)

    def _always(self, write: Write, branches: set[cst.CSTNode]) -> bool:
        return write.node not in branches and len(self._carrying(write)) == len(self.loops[write.node])

    def _carrying(self, write: Write) -> list[Loop]:
        """The loops around a write that run on the device: what they carry round keeps its type."""
        around = self.loops.get(write.node, ())
        return [loop for loop in around if isinstance(loop, cst.While) or called(loop.iter) == "range"]

    def _wide_start(self, write: Write) -> bool:
        return write.value is None or bool(self._types(write.value, False, frozenset(), ()))

    def _types(self, node: cst.CSTNode, sure: bool, seen: frozenset[str], around: tuple[Loop, ...]) -> frozenset[str]:
        """The types of an expression in these loops: all that may be in it, or (`sure`) that are in it on every way."""
        nothing: frozenset[str] = frozenset()
        unknown = nothing if sure else frozenset({ANY})
        if self.tired():
            return unknown
        if isinstance(node, (cst.Integer, cst.Float, cst.Comparison, cst.BooleanOperation)):
            return nothing
        if isinstance(node, cst.Name):
            return self._name_types(node.value, sure, seen, around, unknown)
        if isinstance(node, cst.BinaryOperation):
            return self._types(node.left, sure, seen, around) | self._types(node.right, sure, seen, around)
        if isinstance(node, cst.UnaryOperation):
            return self._types(node.expression, sure, seen, around)
        if isinstance(node, cst.IfExp):
            one, two = (self._types(part, sure, seen, around) for part in (node.body, node.orelse))
            return one & two if sure else one | two
        if isinstance(node, cst.Subscript):
            return self._types(node.value, sure, seen, around)
        if isinstance(node, cst.Call):
            return self._call_types(node, sure, seen, around, unknown)
        return unknown

    def _name_types(
        self, name: str, sure: bool, seen: frozenset[str], around: tuple[Loop, ...], unknown: frozenset[str]
    ) -> frozenset[str]:
        written, nothing = self.writes.get(name, []), frozenset[str]()
        if name in self.kernel.params and not written:
            # a number given to a launch is an integer or float32; a helper's argument may be a tile of any type
            given = self.is_helper and name not in self.kernel.constexprs
            return frozenset({f"argument {name}"}) if given else nothing
        if name in seen:
            return frozenset({f"loop {name}"}) if sure else nothing
        found: list[frozenset[str]] = [unknown] if name in self.kernel.params else []
        for write in written:
            if not set(self._carrying(write)) <= set(around):
                continue  # after a loop a name still has the type that it had before
            if isinstance(write.node, cst.For):
                found.append(nothing if called(write.node.iter) in RANGES else unknown)
            elif write.value is None:
                found.append(unknown)
            elif not (sure and write.updates):  # an update only widens
                found.append(self._types(write.value, sure, seen | {name}, self.loops.get(write.node, ())))
        if not sure:
            return nothing.union(*found)
        # a write that keeps the value itself is as wide as the others
        own = [types for types in found if f"loop {name}" not in types]
        return frozenset.intersection(*own) if own else nothing

    def _call_types(
        self, node: cst.Call, sure: bool, seen: frozenset[str], around: tuple[Loop, ...], unknown: frozenset[str]
    ) -> frozenset[str]:
        name, values = called(node), [arg.value for arg in node.args]
        if name in self.source.kernels or any(arg.star for arg in node.args):
            return unknown
        if name == "to" and isinstance(node.func, cst.Attribute) and values:
            return self._dtype(values[0], unknown)
        if name in _DTYPE_AT:
            arg = argument(node, _DTYPE_AT[name], "dtype")
            return self._dtype(arg.value, unknown) if arg is not None else unknown
        if name == "load" and values:
            root = self.root(values[0])
            return frozenset({root}) if root else unknown
        if name in _UNTYPED:
            return frozenset()
        if name in ("dot", "zeros_like", *_SOME, *_AS_WIDE):
            chosen = _SOME.get(name, range(3 if name == "dot" else 1 if name == "zeros_like" else len(values)))
            parts = [values[index] for index in chosen if index < len(values)]
            if isinstance(node.func, cst.Attribute) and dotted(node.func.value).split(".")[0] not in _MODULES:
                parts.append(node.func.value)  # x.sum(0)
            found: frozenset[str] = frozenset()
            for part in parts:
                found |= self._types(part, sure, seen, around)
            return found
        return unknown

    def _dtype(self, node: cst.CSTNode, unknown: frozenset[str]) -> frozenset[str]:
        """What a dtype expression stands for: `tl.float32`, or `x_ptr.dtype.element_ty`."""
        text = dotted(node)
        if text.split(".")[-1] in _AT_MOST_FP32:
            return frozenset()
        if text.endswith((".dtype.element_ty", ".type.element_ty")):
            root = self.root(cst.Name(text.split(".")[0]))
            return frozenset({root}) if root else unknown
        return unknown
