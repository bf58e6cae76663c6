"""The other half of rule family `online`: two reductions of one block, the second of which waits for the first, become
reductions that wait for nothing.

Owns: squares around a mean, and sums of exponentials below a maximum, of a block with one axis. Both are gathered without
the mean or the maximum and put right by it afterwards. That is exact enough only where little cancels and nothing
overflows, so a branch tests that for each row and falls back to the parent's own expression: a row of any values gets
what the parent gave, to within a few units in the last place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import libcst as cst

from kernelband.writers.rewriter.dataflow import Flow, language
from kernelband.writers.rewriter.kernels import Kernel, Source, bindings, called, code, names_in, normal, walk
from kernelband.writers.rewriter.passes import lines_of
from kernelband.writers.rewriter.rule import Child
from kernelband.writers.rewriter.tree import Change, rebuild

_NEAR = "4.0"
"""Squares may lose at most this much and one to what is taken off them: some three bits."""
_LOW = "8.0"
"""Exponentials of at most this exponent are off by a few units in the last place (their argument is rounded)."""
# What may give a value more than one axis, or hide what it is made of.
_MORE_AXES = {"broadcast_to", "reshape", "view", "expand_dims", "permute", "trans", "dot", "dot_scaled", "zeros", "full",
              "make_block_ptr", "make_tensor_descriptor", "join", "cat", "broadcast", "ravel", "gather"}  # fmt: skip


def apply(source: Source, kernel: Kernel) -> list[Child]:
    """A child for each reduction of a kernel that need not wait for the one before it."""
    name = language(source)
    flow = Flow(source, kernel)
    if name is None or flow.is_helper:  # what a helper is given may have any number of axes
        return []
    found: list[Child] = []
    for block in walk(kernel.node.body):
        if isinstance(block, cst.IndentedBlock):
            for index in range(len(block.body)):
                found += _squares(source, flow, name, block.body, index)
                found += _powers(source, flow, name, block.body, index)
    return found


def _reduced(node: cst.CSTNode, name: str, function: str) -> cst.BaseExpression | None:
    """X of `tl.FUNCTION(X, axis=0)`."""
    if not isinstance(node, cst.Call) or code(node.func) != f"{name}.{function}" or not 1 <= len(node.args) <= 2:
        return None
    first, *rest = node.args
    if first.keyword is not None or first.star or any(arg.star or normal(arg.value) != "0" for arg in rest):
        return None
    if any(arg.keyword is not None and arg.keyword.value != "axis" for arg in rest):
        return None
    return first.value


def _assign(line: cst.CSTNode) -> tuple[str, cst.BaseExpression] | None:
    """Name and value of a line that is one plain assignment."""
    small = line.body[0] if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1 else None
    if isinstance(small, cst.Assign) and len(small.targets) == 1 and isinstance(small.targets[0].target, cst.Name):
        return small.targets[0].target.value, small.value
    return None


def _before(lines: Sequence[cst.CSTNode], index: int, name: str) -> Iterator[tuple[int, cst.BaseExpression]]:
    """The plain assignment of a name that stands last before a line of a block, if nothing else set it since."""
    for at in range(index - 1, -1, -1):
        if name in bindings(cst.IndentedBlock(body=[lines[at]])):  # type: ignore[list-item]
            made = _assign(lines[at])
            if made is not None:
                yield at, made[1]
            return


def _kept(lines: Sequence[cst.CSTNode], start: int, end: int, names: set[str]) -> bool:
    """Whether no line between the two sets any of the names."""
    return not any(names & bindings(cst.IndentedBlock(body=[line])).keys() for line in lines[start + 1 : end])  # type: ignore[list-item]


def _one_axis(flow: Flow, name: str) -> bool:
    """Whether a name surely stands for a block with one axis: all that it is made of has at most one."""
    todo, seen, blocks = [name], set[str](), False
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        for write in flow.writes.get(current, []):
            if write.value is None:
                if not isinstance(write.node, cst.For):
                    return False
                continue
            for node in walk(write.value):
                if isinstance(node, cst.Subscript) or called(node) in _MORE_AXES | flow.source.kernels.keys():
                    return False
                blocks |= called(node) == "arange"
            todo += names_in(write.value)
    return blocks and name in flow.writes


def _difference(node: cst.CSTNode) -> tuple[str, str] | None:
    """The names of `a - b`."""
    if not isinstance(node, cst.BinaryOperation) or not isinstance(node.operator, cst.Subtract):
        return None
    left, right = node.left, node.right
    return (left.value, right.value) if isinstance(left, cst.Name) and isinstance(right, cst.Name) else None


def _squares(source: Source, flow: Flow, name: str, lines: Sequence[cst.CSTNode], index: int) -> list[Child]:
    """`var = tl.sum(d * d, axis=0) / N` with `d` a masked or plain difference from `mean = tl.sum(x, axis=0) / N`."""
    made = _assign(lines[index])
    if made is None:
        return []
    variance, value = made
    total = value.left if isinstance(value, cst.BinaryOperation) and isinstance(value.operator, cst.Divide) else value
    inside = _reduced(total, name, "sum")
    if not isinstance(inside, cst.BinaryOperation) or not isinstance(inside.operator, cst.Multiply):
        return []
    if normal(inside.left) != normal(inside.right):
        return []
    part, mask, start = inside.left, None, index
    if isinstance(part, cst.Name):
        start, part = next(_before(lines, index, part.value), (index, part))
    if called(part) == "where" and isinstance(part, cst.Call) and len(part.args) == 3:
        if normal(part.args[2].value) not in ("0", "0.0") or any(arg.keyword or arg.star for arg in part.args):
            return []
        mask, part = part.args[0].value, part.args[1].value
    two = _difference(part)
    if two is None:
        return []
    x, mean = two
    at, average = next(_before(lines, index, mean), (index, part))
    divided = isinstance(average, cst.BinaryOperation) and isinstance(average.operator, cst.Divide)
    summed = _reduced(average.left, name, "sum") if divided and isinstance(average, cst.BinaryOperation) else None
    if summed is None or normal(summed) != x or at > start or not _one_axis(flow, x):
        return []
    used = {x, mean} | (names_in(mask) if mask is not None else set())
    if not _kept(lines, at, index, used) or not _kept(lines, start, index, names_in(inside)):
        return []
    if any(isinstance(node, (cst.Call, cst.Subscript)) for node in (walk(mask) if mask is not None else ())):
        return []
    kept, count, squares = (source.fresh(word) for word in ("kept", "kept_count", "squares"))
    one = f"{name}.zeros_like({x}) + 1.0"
    text = f"""
{kept} = {x if mask is None else f"{name}.where({normal(mask)}, {x}, 0.0)"}
{count} = {name}.sum({one if mask is None else f"{name}.where({normal(mask)}, {one}, 0.0)"}, axis=0)
{squares} = {name}.sum({kept} * {kept}, axis=0)
{squares} = {squares} - {mean} * (2.0 * {name}.sum({kept}, axis=0) - {mean} * {count})"""
    test = f"if not ({mean} * {mean} * {count} <= {_NEAR} * {squares}):"
    words = f"squares {variance} in one pass with the mean {mean} in {flow.kernel.name}"
    return [_written(source, flow, lines[index], total, text, test, squares, words)]


def _powers(source: Source, flow: Flow, name: str, lines: Sequence[cst.CSTNode], index: int) -> list[Child]:
    """`tl.sum(tl.exp(x - m), 0)` with `m = tl.max(x, 0)`."""
    line = lines[index]
    if not isinstance(line, cst.SimpleStatementLine) or len(line.body) != 1:
        return []
    found = []
    for total in walk(line):
        power = _reduced(total, name, "sum")
        if not isinstance(power, cst.Call) or code(power.func) not in (f"{name}.exp", f"{name}.math.exp"):
            continue
        two = _difference(power.args[0].value) if len(power.args) == 1 else None
        if two is None or not isinstance(total, cst.Call):
            continue
        x, top = two
        at, value = next(_before(lines, index, top), (index, power))
        best = _reduced(value, name, "max")
        if best is None or normal(best) != x or not _kept(lines, at, index, {x, top}) or not _one_axis(flow, x):
            continue
        powers = source.fresh("powers")
        exp = code(power.func)
        text = f"{powers} = {name}.sum({exp}({x}), axis=0) * {exp}(0.0 - {top})"
        test = f"if not ({name}.abs({top}) <= {_LOW}):"
        words = f"sum of exponentials in one pass with the maximum {top} in {flow.kernel.name}"
        found.append(_written(source, flow, line, total, text, test, powers, words))
    return found


def _written(
    source: Source, flow: Flow, line: cst.CSTNode, total: cst.CSTNode, text: str, test: str, name: str, words: str
) -> Child:
    """The line with a sum named before it, and the sum done the parent's way where the test says so."""
    assert isinstance(line, cst.SimpleStatementLine) and isinstance(total, cst.BaseExpression)
    config = source.module.config_for_parsing
    again = f"{test}\n{source.module.default_indent}{name} = {normal(total)}.to({name}.dtype)\n"
    head = [*lines_of(source, text), cst.parse_statement(again, config)]
    head[0] = head[0].with_changes(leading_lines=line.leading_lines)
    new = rebuild(line, {total: cst.Name(name)}).with_changes(leading_lines=[])
    changes: dict[cst.CSTNode, Change] = {line: cst.FlattenSentinel([*head, new])}
    return words, source.edit(changes)
