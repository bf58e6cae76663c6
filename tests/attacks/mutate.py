"""Automatic mutants of an honest kernel: each differs from it by one small fault of a kind that people and models make.

Owns: one mutator a kind (MUTATORS), over the libcst tree of a candidate's source. Reads text only: it never imports, compiles or
judges anything, and does not know which mutants happen to be harmless; see benchmarks/mutants.py for that.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeGuard

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from kernelband.writers.rewriter.kernels import argument, called, code, dotted, names_in
from kernelband.writers.rewriter.tree import Change, rebuild, walk

# call -> (position of mask, position of other)
_MASKED: dict[str, tuple[int, int | None]] = {"load": (1, 2), "store": (2, None), "atomic_add": (2, None)}
_WRITES = ("store", "atomic_add", "atomic_max", "atomic_min")
_REDUCTIONS = {"sum", "max", "min", "argmax", "argmin", "cumsum", "reduce", "associative_scan"}
_OPPOSITE = {"max": "min", "min": "max", "maximum": "minimum", "minimum": "maximum", "argmax": "argmin", "argmin": "argmax",
             "sum": "max", "atomic_max": "atomic_min", "atomic_min": "atomic_max"}
_SHIFTED: dict[type, cst.BaseCompOp] = {cst.LessThan: cst.LessThanEqual(), cst.LessThanEqual: cst.LessThan(),
                                        cst.GreaterThan: cst.GreaterThanEqual(), cst.GreaterThanEqual: cst.GreaterThan()}


@dataclass(frozen=True)
class Mutant:
    """One faulty source. line: of the original, from 1. description: old text and new. in_kernel: whether the fault lies in a jit
    function, so that equal machine code means an equal program; a fault in the wrapper changes what is launched instead."""

    kind: str
    line: int
    description: str
    source: str
    in_kernel: bool


@dataclass(frozen=True, eq=False)
class Edit:
    """A node of the tree and what becomes of it."""

    node: cst.CSTNode
    becomes: Change
    description: str


class Function:
    """One function of the module, as the mutators need it."""

    def __init__(self, node: cst.FunctionDef):
        self.node = node
        self.nodes = list(walk(node.body))
        self.jit = any(dotted(d.decorator).split(".")[-1] == "jit" or called(d.decorator) == "jit" for d in node.decorators)
        self.params = {p.name.value for p in node.params.params}

    @cached_property
    def address(self) -> set[str]:
        """Names that flow into a pointer: rows, strides, loop counters. Arithmetic on them is the business of other kinds."""
        found: set[str] = set()
        for call in self.calls("load", *_WRITES):
            found |= names_in(call.args[0].value)
        assigned = [(t.target, n.value) for n in self.nodes if isinstance(n, cst.Assign) for t in n.targets]
        while True:
            more: set[str] = set()
            for target, value in assigned:
                if names_in(target) & found and called(value) != "load":
                    more |= names_in(value)
            for loop in self.loops():
                if names_in(loop.target) & found:
                    more |= names_in(loop.iter)
            if more <= found:
                return found - {"tl", "range"}
            found |= more

    def calls(self, *names: str) -> Iterator[cst.Call]:
        return (n for n in self.nodes if isinstance(n, cst.Call) and called(n) in names)

    def loops(self) -> Iterator[cst.For]:
        return (n for n in self.nodes if isinstance(n, cst.For))

    def reduced(self, load: cst.Call) -> bool:
        """Whether the loaded value reaches a reduction, by a pass over the text that follows (loops are not unrolled)."""
        statements = [n for n in self.nodes if isinstance(n, cst.SimpleStatementLine)]
        tainted: set[str] = set()
        begun = False
        for statement in statements:
            here = any(n is load for n in walk(statement))
            begun |= here
            if not begun:
                continue
            for call in walk(statement):
                if called(call) in _REDUCTIONS and (names_in(call) & tainted or any(n is load for n in walk(call))):
                    return True
            for part in statement.body:
                if isinstance(part, cst.Assign):
                    targets = {name for t in part.targets for name in names_in(t.target)}
                    tainted = tainted | targets if here or names_in(part.value) & tainted else tainted - targets
                elif isinstance(part, cst.AugAssign) and (here or names_in(part.value) & tainted):
                    tainted |= names_in(part.target)
        return False

    def arithmetic(self, *operators: type) -> Iterator[cst.BinaryOperation]:
        """Binary operations on values, not on addresses, that Triton does not work out while it compiles."""
        for node in self.nodes:
            if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, operators):
                names = names_in(node) - {"tl"}
                if names and not names & self.address:
                    yield node


def _is(node: cst.CSTNode, operator: type) -> TypeGuard[cst.BinaryOperation]:
    return isinstance(node, cst.BinaryOperation) and isinstance(node.operator, operator)


def _adds(node: cst.CSTNode) -> TypeGuard[cst.AugAssign]:
    return isinstance(node, cst.AugAssign) and isinstance(node.operator, cst.AddAssign)


def _new(text: str) -> cst.BaseExpression:
    return cst.parse_expression(f"({text})")


def _edit(node: cst.CSTNode, text: str) -> Edit:
    return Edit(node, _new(text), f"{_short(node)} -> {' '.join(text.split())}")


def _short(node: cst.CSTNode) -> str:
    return " ".join(code(node).split())


def _with_args(call: cst.Call, args: list[cst.Arg]) -> cst.Call:
    return call.with_changes(args=[*args[:-1], args[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)])


def _set_arg(call: cst.Call, arg: cst.Arg, text: str, what: str) -> Edit:
    args = [a.with_changes(value=cst.parse_expression(text)) if a is arg else a for a in call.args]
    return Edit(call, call.with_changes(args=args), f"{what} {_short(arg.value)} -> {text} in {_short(call)}")


def _infinite(node: cst.CSTNode) -> bool:
    text = _short(node).replace("'", '"')
    return text.endswith(('float("inf")', 'float("-inf")')) or text.endswith("math.inf")


def mask_dropped(f: Function) -> Iterator[Edit]:
    """A load, store or atomic without its mask (and `other`), a mask without one of its conditions, tl.where without choice."""
    if not f.jit:
        return
    for call in f.calls(*_MASKED):
        mask_at, other_at = _MASKED[called(call)]
        gone = [a for a in (argument(call, mask_at, "mask"), argument(call, other_at, "other")) if a is not None]
        if gone:
            bare = _with_args(call, [a for a in call.args if not any(a is g for g in gone)])
            yield Edit(call, bare, f"{_short(call)} -> {_short(bare)}")
    for node in f.nodes:
        if _is(node, cst.BitAnd):
            yield _edit(node, code(node.left))
            yield _edit(node, code(node.right))
    for call in f.calls("where"):
        yield _edit(call, code(call.args[1].value))


def off_by_one(f: Function) -> Iterator[Edit]:
    """`<` for `<=`, a bound, a block or a grid that is one too small, lanes that are one too far."""
    if not f.jit:
        yield from _smaller_grid(f)
        return
    for node in f.nodes:
        if isinstance(node, cst.Comparison) and len(node.comparisons) == 1:
            (part,) = node.comparisons
            if type(part.operator) in _SHIFTED:
                other = node.with_changes(comparisons=[part.with_changes(operator=_SHIFTED[type(part.operator)])])
                yield Edit(node, other, f"{_short(node)} -> {_short(other)}")
                less = part.with_changes(comparator=_new(f"{code(part.comparator)} - 1"))
                other = node.with_changes(comparisons=[less])
                yield Edit(node, other, f"{_short(node)} -> {_short(other)}")
    for call in f.calls("arange"):
        yield _edit(call, f"{code(call)} + 1")
    for loop in f.loops():
        if (bounds := _bounds(loop)) is not None:
            start, end, step = bounds
            yield _edit(loop.iter, _range(loop, start, f"{end} - 1", step))
            yield _edit(loop.iter, _range(loop, f"{start} + {step}", end, step))


def tail_dropped(f: Function) -> Iterator[Edit]:
    """The last, partial block of a loop or of a grid is left out, or the last block whatever its size."""
    if not f.jit:
        for call in f.calls("cdiv"):
            if len(call.args) == 2:
                yield _edit(call, f"max(1, {code(call.args[0].value)} // {code(call.args[1].value)})")
        return
    for loop in f.loops():
        if (bounds := _bounds(loop)) is not None and bounds[2] != "1":
            start, end, step = bounds
            yield _edit(loop.iter, _range(loop, start, f"({end}) - {step}", step))
            yield _edit(loop.iter, _range(loop, start, f"({end}) // {step} * {step}", step))
    for call in f.calls("cdiv"):
        yield _edit(call, f"{code(call.args[0].value)} // {code(call.args[1].value)}")


def dtype_lowered(f: Function) -> Iterator[Edit]:
    """Half precision where the kernel works in float32, and TF32 where it asks for IEEE products."""
    if not f.jit:
        return
    for node in f.nodes:
        if isinstance(node, cst.Call):
            if called(node) == "to" and isinstance(node.func, cst.Attribute) and node.args:
                if _short(node.args[0].value) == "tl.float32":
                    yield _edit(node, code(node.func.value))
                    yield _edit(node, f"{code(node)}.to(tl.float16).to(tl.float32)")
                continue
            for arg in node.args:
                if _short(arg.value) == "tl.float32":
                    yield _set_arg(node, arg, "tl.float16", "dtype")
                elif arg.keyword is not None and arg.keyword.value == "input_precision":
                    yield _set_arg(node, arg, '"tf32"', "precision")
        elif _adds(node) and not names_in(node.target) & f.address:
            yield Edit(node.value, _new(f"({code(node.value)}).to(tl.float16)"), f"{_short(node)} -> added in float16")


def atomic_dropped(f: Function) -> Iterator[Edit]:
    """An atomic addition that only stores."""
    for call in f.calls("atomic_add"):
        args = [a for a in call.args if a.keyword is None or a.keyword.value not in ("sem", "scope")]
        plain = _with_args(call.with_changes(func=cst.parse_expression("tl.store")), args)
        yield Edit(call, plain, f"{_short(call)} -> {_short(plain)}")


def barrier_dropped(f: Function) -> Iterator[Edit]:
    """No barrier between a store and the loads of what other threads stored."""
    for node in f.nodes:
        alone = node.body[0] if isinstance(node, cst.SimpleStatementLine) and len(node.body) == 1 else None
        if isinstance(alone, cst.Expr) and called(alone.value) == "debug_barrier":
            yield Edit(node, cst.RemoveFromParent(), f"{_short(node)} -> nothing")


def wrong_scale(f: Function) -> Iterator[Edit]:
    """A constant doubled, a factor or a divisor forgotten, a division by one less."""
    for node in f.nodes:
        if isinstance(node, cst.Float) and float(node.value) != 0.0:
            yield _edit(node, repr(2 * float(node.value)))
    if not f.jit:
        return
    for operation in f.arithmetic(cst.Multiply, cst.Divide):
        yield _edit(operation, code(operation.left))
        if isinstance(operation.operator, cst.Multiply):
            yield _edit(operation, code(operation.right))
    for node in f.nodes:  # what is divided by is often a length, and so an address name too
        if _is(node, cst.Divide) and isinstance(node.right, cst.Name) and node.right.value in f.params:
            yield _edit(node.right, f"{node.right.value} - 1")


def swapped_index(f: Function) -> Iterator[Edit]:
    """Rows for columns: program ids, strides, broadcast axes, reduced axes, bounds, shapes, grid axes."""
    for call in f.calls("program_id", "num_programs"):
        if call.args and _short(call.args[0].value) in "01":
            yield _set_arg(call, call.args[0], "1" if _short(call.args[0].value) == "0" else "0", "axis")
    for call in f.calls(*_REDUCTIONS):
        arg = argument(call, 1, "axis")
        if arg is not None and _short(arg.value) in "01":
            yield _set_arg(call, arg, "1" if _short(arg.value) == "0" else "0", "axis")
    for call in f.calls("trans"):
        yield _edit(call, code(call.args[0].value))
    if not f.jit:
        for call in f.calls("stride"):
            if call.args and _short(call.args[0].value) in "01":
                yield _set_arg(call, call.args[0], "1" if _short(call.args[0].value) == "0" else "0", "axis")
        for node in f.nodes:
            if isinstance(node, cst.Assign) and isinstance(node.value, cst.Attribute) and node.value.attr.value == "shape":
                target = node.targets[0].target
                if isinstance(target, cst.Tuple) and len(target.elements) == 2:
                    yield _swapped(target)
        for grid in _grids(f):
            if isinstance(grid, cst.Tuple) and len(grid.elements) == 2:
                yield _swapped(grid)
        return
    for node in f.nodes:
        if isinstance(node, cst.Subscript) and _short(node).endswith("[:, None]"):
            yield _edit(node, f"{code(node.value)}[None, :]")
        elif isinstance(node, cst.Subscript) and _short(node).endswith("[None, :]"):
            yield _edit(node, f"{code(node.value)}[:, None]")
        if not isinstance(node, cst.BinaryOperation):
            continue
        left, right = node.left, node.right
        if isinstance(node.operator, cst.Add):
            if _is(left, cst.Add):
                left = left.right  # a + b * s + c * t is (a + b * s) + c * t
            if _is(left, cst.Multiply) and _is(right, cst.Multiply) and names_in(node) & f.address:
                yield _exchanged(node, left.right, right.right)
        elif isinstance(node.operator, cst.BitAnd) and isinstance(left, cst.Comparison) and isinstance(right, cst.Comparison):
            yield _exchanged(node, left.comparisons[0].comparator, right.comparisons[0].comparator)


def wrong_identity(f: Function) -> Iterator[Edit]:
    """A start value or a filler of masked lanes that changes what a reduction gives."""
    if not f.jit:
        return
    for call in f.calls("load"):
        arg = argument(call, 2, "other")
        if arg is not None and f.reduced(call):
            yield _set_arg(call, arg, "1.0" if _short(arg.value) in ("0", "0.0") else "0.0", "other")
    for call in f.calls("where"):
        arg = call.args[2]
        if _infinite(arg.value) or _short(arg.value) in ("0", "0.0"):
            yield _set_arg(call, arg, "0.0" if _infinite(arg.value) else "1.0", "other")
    for node in f.nodes:
        if isinstance(node, cst.Assign):
            if _infinite(node.value):
                yield _edit(node.value, "0.0")
            elif _short(node.value) in ("0.0", "0") or called(node.value) == "zeros":
                yield _edit(node.value, f"{code(node.value)} + 1.0")
            elif called(node.value) == "full":
                yield _edit(node.value, f"tl.zeros_like({code(node.value)})")


def max_min_swapped(f: Function) -> Iterator[Edit]:
    """A maximum for a minimum or the reverse, and a maximum for a sum."""
    for call in f.calls(*_OPPOSITE):
        if f.jit and isinstance(call.func, cst.Attribute):
            other = call.with_changes(func=call.func.with_changes(attr=cst.Name(_OPPOSITE[called(call)])))
            yield Edit(call, other, f"{_short(call)} -> {_short(other)}")


def sign_flipped(f: Function) -> Iterator[Edit]:
    """A sum for a difference or the reverse, a negation forgotten, an accumulator that subtracts."""
    if not f.jit:
        return
    for value in f.arithmetic(cst.Add, cst.Subtract):
        other = value.with_changes(operator=cst.Subtract() if isinstance(value.operator, cst.Add) else cst.Add())
        yield Edit(value, other, f"{_short(value)} -> {_short(other)}")
    for node in f.nodes:
        if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Minus) and not _infinite(node):
            if not names_in(node) & f.address:
                yield _edit(node, code(node.expression))
        elif _adds(node) and not names_in(node.target) & f.address:
            minus = node.with_changes(operator=cst.SubtractAssign())
            yield Edit(node, minus, f"{_short(node)} -> {_short(minus)}")


def neighbour(f: Function) -> Iterator[Edit]:
    """Reads from, or writes to, the element beside the right one."""
    for call in f.calls("load", *_WRITES):
        if f.jit:
            yield _set_arg(call, call.args[0], f"{code(call.args[0].value)} + 1", "pointer")


MUTATORS: dict[str, Callable[[Function], Iterator[Edit]]] = {
    "mask": mask_dropped, "off-by-one": off_by_one, "tail": tail_dropped, "dtype": dtype_lowered, "atomic": atomic_dropped,
    "barrier": barrier_dropped, "scale": wrong_scale, "index": swapped_index, "identity": wrong_identity,
    "max-min": max_min_swapped, "sign": sign_flipped, "neighbour": neighbour,
}
"""By kind. Each takes a function of the module and gives the edits that make one mutant each."""


def mutants(source: str) -> Iterator[Mutant]:
    """Every mutant of a source, by kind, then in the order of the text; none twice, none that Python cannot parse.

    Raises libcst.ParserSyntaxError on a source that is not Python.
    """
    wrapper = MetadataWrapper(cst.parse_module(source))
    module, places = wrapper.module, wrapper.resolve(PositionProvider)
    functions = [Function(n) for n in module.body if isinstance(n, cst.FunctionDef)]
    seen = {source}
    for kind, mutator in MUTATORS.items():
        found = [(places[e.node].start.line, e, f.jit) for f in functions for e in mutator(f)]
        for line, edit, jit in sorted(found, key=lambda item: item[0]):
            changed = rebuild(module, {edit.node: edit.becomes})
            assert isinstance(changed, cst.Module)
            if changed.code not in seen and _parses(changed.code):
                seen.add(changed.code)
                yield Mutant(kind, line, edit.description, changed.code, jit)


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def _bounds(loop: cst.For) -> tuple[str, str, str] | None:
    """Start, end and step of a loop over a range, as text; None for another loop."""
    if called(loop.iter) not in ("range", "static_range") or not isinstance(loop.iter, cst.Call):
        return None
    args = [code(a.value) for a in loop.iter.args if a.keyword is None]
    if len(args) == 1:
        args = ["0", *args]
    return (args[0], args[1], args[2] if len(args) > 2 else "1") if len(args) >= 2 else None


def _range(loop: cst.For, start: str, end: str, step: str) -> str:
    assert isinstance(loop.iter, cst.Call)
    return f"{code(loop.iter.func)}({start}, {end}, {step})"


def _grids(f: Function) -> Iterator[cst.BaseExpression]:
    """Grids of launches as tuples, whether written at the launch or assigned to a name that a launch uses."""
    for node in f.nodes:
        if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Subscript):
            continue
        (element,) = node.func.slice
        grid = element.slice.value if isinstance(element.slice, cst.Index) else None
        if isinstance(grid, cst.Name):
            values = [n.value for n in f.nodes if isinstance(n, cst.Assign) and names_in(n.targets[0].target) == {grid.value}]
            grid = values[0] if values else None
        if grid is not None:
            yield grid


def _smaller_grid(f: Function) -> Iterator[Edit]:
    for grid in _grids(f):
        for element in grid.elements if isinstance(grid, cst.Tuple) else ():
            yield _edit(element.value, f"max(1, {code(element.value)} - 1)")


def _swapped(pair: cst.Tuple) -> Edit:
    first, second = pair.elements
    other = pair.with_changes(elements=[first.with_changes(value=second.value), second.with_changes(value=first.value)])
    return Edit(pair, other, f"{_short(pair)} -> {_short(other)}")


def _exchanged(whole: cst.CSTNode, a: cst.CSTNode, b: cst.CSTNode) -> Edit:
    other = rebuild(whole, {a: b.deep_clone(), b: a.deep_clone()})
    return Edit(whole, other, f"{_short(whole)} -> {_short(other)}")
