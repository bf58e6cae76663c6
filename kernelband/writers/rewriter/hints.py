"""Rule family `hints`: tell the compiler that a block of offsets starts at a multiple and runs without gaps.

Owns: `tl.multiple_of` and `tl.max_contiguous` around `start + tl.arange(0, BLOCK)`, and `tl.multiple_of` of loop
variables. A promise that is false for any input makes a kernel wrong, so only what follows from the text is promised:
the start must be one number, made of multiples of BLOCK alone, and `tl.arange` makes BLOCK a power of two, so that
not even an overflow of the integer falsifies it.
"""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from kernelband.writers.rewriter.dataflow import RANGES, Flow, Write, language
from kernelband.writers.rewriter.kernels import Kernel, Source, called, code, dotted, normal, own_nodes, walk
from kernelband.writers.rewriter.rule import Child, Rule
from kernelband.writers.rewriter.tree import Change, children

_PROMISES = ("multiple_of", "max_contiguous")


@dataclass(frozen=True, eq=False)
class Block:
    """One expression `start + tl.arange(0, size)` of which the promise holds."""

    node: cst.BaseExpression
    size: str
    label: str  # the name that it is assigned to, or the expression


def apply(source: Source) -> tuple[list[Child], list[str]]:
    """One child a kernel, with all that can be promised about its offsets and loop variables.

    One only: what the text proves, Triton's own analysis mostly finds as well, and a promise that it knew changes nothing.
    """
    found: list[Child] = []
    words: list[str] = []
    name = language(source)
    for kernel in source.kernels.values():
        if name is None:
            words.append("the module gives triton.language no name")
            continue
        facts = Facts(source, kernel, name)
        blocks, why = facts.blocks()
        words += why
        said = [f"{block.label} is contiguous from a multiple of {block.size}" for block in blocks]
        changes = _promise(name, blocks)
        for loop, size in facts.loops():
            assert isinstance(loop.target, cst.Name)
            variable = loop.target.value
            line = cst.parse_statement(f"{variable} = {name}.multiple_of({variable}, {size})")
            changes[loop.body] = lambda body, line=line: body.with_changes(body=[line, *body.body])  # type: ignore
            said.append(f"{variable} is a multiple of {size}")
        if said:
            found.append((f"promise that {' and '.join(dict.fromkeys(said))} in {kernel.name}", source.edit(changes)))
        elif not why:
            words.append(f"{kernel.name} has no block of offsets that starts at a multiple of its size")
    return found, words


class Facts:
    """What is surely true of the integers of one kernel."""

    def __init__(self, source: Source, kernel: Kernel, name: str) -> None:
        self.kernel, self.name = kernel, name
        self.flow = Flow(source, kernel)
        self.sizes = {size for node in walk(kernel.node.body) if (size := self._arange(node)) is not None}
        """Lengths of tl.arange: constants, and powers of two."""

    def _arange(self, node: cst.CSTNode | None) -> str | None:
        """BLOCK of `tl.arange(0, BLOCK)`, where BLOCK is a literal, a constexpr parameter or a constant of the module."""
        if isinstance(node, cst.Name):
            all_ = self.flow.writes.get(node.value, [])
            plain = len(all_) == 1 and not all_[0].updates and node.value not in self.kernel.params
            return self._arange(all_[0].value) if plain and isinstance(all_[0].value, cst.Call) else None
        if not isinstance(node, cst.Call) or dotted(node.func) != f"{self.name}.arange" or len(node.args) != 2:
            return None
        start, end = node.args
        if any(arg.keyword is not None or arg.star for arg in node.args) or normal(start.value) != "0":
            return None
        size = end.value
        if isinstance(size, cst.Name):
            fixed = size.value in self.kernel.constexprs or size.value not in self.kernel.params
            return size.value if fixed and size.value not in self.flow.writes else None
        return str(size.evaluated_value) if isinstance(size, cst.Integer) else None

    def blocks(self) -> tuple[list[Block], list[str]]:
        """The offsets about which something can be promised, and words about those about which nothing can."""
        found: list[Block] = []
        words: list[str] = []
        labels = {write.value: name for name, all_ in self.flow.writes.items() for write in all_ if not write.updates}
        stack: list[cst.CSTNode] = [self.kernel.node.body]
        while stack:
            node = stack.pop()
            if called(node) in _PROMISES:
                continue
            if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, (cst.Add, cst.Subtract)):
                terms = _terms(node)
                sizes = [(part, size) for sign, part in terms if sign > 0 and (size := self._arange(part)) is not None]
                if len(sizes) == 1:
                    part, size = sizes[0]
                    rest = _without_rests([term for term in terms if term[1] is not part], size)
                    short = labels.get(node) or normal(node)
                    if all(self.multiple(other, size) and self.flow.scalar(other) for other in rest):
                        found.append(Block(node, size, short))
                        continue
                    if all(self.flow.scalar(other) for other in rest):
                        words.append(f"{short} of {self.kernel.name} need not start at a multiple of {size}")
            stack.extend(reversed(children(node)))
        return found, words

    def loops(self) -> list[tuple[cst.For, str]]:
        """Loops over numbers whose variable is a multiple of the length of a tile in every round."""
        found = []
        for node in own_nodes(self.kernel.node):
            if not (isinstance(node, cst.For) and isinstance(node.target, cst.Name)):
                continue
            if called(node.iter) != "range" or not isinstance(node.body, cst.IndentedBlock):
                continue
            assert isinstance(node.iter, cst.Call)
            variable = node.target.value
            if len([write for write in self.flow.writes[variable] if write.node is not node]):
                continue  # other loops may use the name too, but then it takes more than one look at each
            steps = [arg.value for arg in node.iter.args if arg.keyword is None and not arg.star]
            size = normal(steps[2]) if len(steps) == 3 else ""
            if size in self.sizes and self.multiple(node.target, size):
                found.append((node, size))
        return found

    def multiple(self, node: cst.CSTNode | None, size: str, _seen: frozenset[str] = frozenset()) -> bool:
        """Whether an expression is surely a multiple of a length of `tl.arange`, whatever the input."""

        def also(part: cst.CSTNode | None) -> bool:
            return self.multiple(part, size, _seen)

        if node is None or isinstance(node, cst.Float) or self.flow.tired():
            return False
        if isinstance(node, cst.Integer):
            return node.evaluated_value == 0 or (size.isdigit() and node.evaluated_value % int(size) == 0)
        if isinstance(node, cst.Name):
            name = node.value
            if name == size or name in _seen:  # round a loop: as long as every write keeps it
                return True
            if name in self.kernel.params or name not in self.flow.writes:
                return False
            return all(self._keeps(write, size, _seen | {name}) for write in self.flow.writes[name])
        if isinstance(node, cst.BinaryOperation):
            if isinstance(node.operator, cst.Multiply):
                whole = not any(isinstance(part, (cst.Float, cst.Divide)) for part in walk(node))
                return whole and (also(node.left) or also(node.right))
            if isinstance(node.operator, cst.Subtract) and _rest(node.right, node.left, size):
                return True
            return isinstance(node.operator, (cst.Add, cst.Subtract)) and also(node.left) and also(node.right)
        if isinstance(node, cst.UnaryOperation):
            return isinstance(node.operator, cst.Minus) and also(node.expression)
        if isinstance(node, cst.IfExp):
            return also(node.body) and also(node.orelse)
        if isinstance(node, cst.Call) and not any(arg.keyword is not None or arg.star for arg in node.args):
            values = [arg.value for arg in node.args]
            if called(node) in ("minimum", "maximum", "min", "max") and len(values) == 2:
                return all(also(value) for value in values)
            if called(node) == "to" and isinstance(node.func, cst.Attribute) and len(values) == 1:
                # a cast of a float would round what was a multiple of nothing
                cast = dotted(values[0]).split(".")[-1] in ("int32", "int64") and self.integer(node.func.value)
                return cast and also(node.func.value)
            if called(node) == "multiple_of" and len(values) == 2:
                return normal(values[1]) == size  # the author's own promise
        return False

    def integer(self, node: cst.CSTNode | None, _seen: frozenset[str] = frozenset()) -> bool:
        """Whether an expression is surely an integer: made of program ids, counts and literals."""
        if self.flow.tired():
            return False
        if isinstance(node, cst.Name):
            if node.value in _seen or node.value in self.sizes:
                return True
            known = self.flow.writes.get(node.value, []) if node.value not in self.kernel.params else []
            return bool(known) and all(
                called(write.node.iter) in RANGES
                if isinstance(write.node, cst.For)
                else self.integer(write.value, _seen | {node.value}) and not _divides(write.node)
                for write in known
            )
        if isinstance(node, cst.BinaryOperation):
            kept = isinstance(node.operator, (cst.Add, cst.Subtract, cst.Multiply, cst.FloorDivide, cst.Modulo))
            return kept and self.integer(node.left, _seen) and self.integer(node.right, _seen)
        return isinstance(node, cst.Integer) or called(node) in ("program_id", "num_programs") if node else False

    def _keeps(self, write: Write, size: str, seen: frozenset[str]) -> bool:
        """Whether one write leaves a multiple in a name that was one before."""
        node = write.node
        if isinstance(node, cst.For):
            if called(node.iter) not in RANGES or not isinstance(node.iter, cst.Call):
                return False
            if any(
                arg.star or (arg.keyword and arg.keyword.value in ("arg1", "arg2", "step")) for arg in node.iter.args
            ):
                return False
            values = [arg.value for arg in node.iter.args if arg.keyword is None]
            if len(values) != 3:
                return False
            return self.multiple(values[0], size, seen) and self.multiple(values[2], size, seen)
        if isinstance(node, cst.AugAssign):
            if isinstance(node.operator, cst.MultiplyAssign):
                return self.integer(node.value)
            additive = isinstance(node.operator, (cst.AddAssign, cst.SubtractAssign))
            return additive and self.multiple(write.value, size, seen)
        return self.multiple(write.value, size, seen)


def _rest(node: cst.CSTNode, of: cst.CSTNode, size: str) -> bool:
    """Whether the node is `of % size`: what is left without it is a multiple, which Triton itself does not see."""
    whole = isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Modulo)
    return whole and normal(node.left) == normal(of) and normal(node.right) == size  # type: ignore[attr-defined]


def _divides(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.AugAssign) and isinstance(node.operator, cst.DivideAssign)


def _terms(node: cst.BaseExpression, sign: int = 1) -> list[tuple[int, cst.BaseExpression]]:
    """The signed terms of a sum."""
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, (cst.Add, cst.Subtract)):
        other = -sign if isinstance(node.operator, cst.Subtract) else sign
        return [*_terms(node.left, sign), *_terms(node.right, other)]
    return [(sign, node)]


def _without_rests(terms: list[tuple[int, cst.BaseExpression]], size: str) -> list[cst.BaseExpression]:
    """The terms of a sum without each pair `n` and `- n % size`, which together are a multiple."""
    left = [value for sign, value in terms if sign > 0]
    for value in (value for sign, value in terms if sign < 0):
        whole = next((other for other in left if _rest(value, other, size)), None)
        if whole is None:
            left.append(value)
        else:
            left = [other for other in left if other is not whole]
    return left


def _promise(name: str, blocks: list[Block]) -> dict[cst.CSTNode, Change]:
    """The change that wraps each block of offsets in both promises."""

    def wrap(node: cst.CSTNode, size: str) -> cst.CSTNode:
        assert isinstance(node, cst.BaseExpression)
        bare = node.with_changes(lpar=[], rpar=[]) if node.lpar and "\n" not in code(node) else node
        inner = _call(f"{name}.multiple_of", bare, size)
        return _call(f"{name}.max_contiguous", inner, size)

    return {block.node: lambda node, size=block.size: wrap(node, size) for block in blocks}  # type: ignore[misc]


def _call(function: str, value: cst.BaseExpression, size: str) -> cst.Call:
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    return cst.Call(cst.parse_expression(function), [cst.Arg(value, comma=comma), cst.Arg(cst.parse_expression(size))])


RULE = Rule(
    "hints",
    "vectorization",
    "`tl.multiple_of` and `tl.max_contiguous` wherever they are surely true",
    "a block of offsets, or a loop variable, that surely starts at a multiple of its length",
    apply,
)
