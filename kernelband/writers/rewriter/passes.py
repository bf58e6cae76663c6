"""Passes of a kernel over one range: what a loop body needs from before it, and which loops run over blocks of a row.

Owns: the reading of simple loops for the families that join passes or make one block of a row. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import libcst as cst

from kernelband.writers.rewriter.kernels import (
    Kernel,
    Source,
    as_ast,
    bindings,
    called,
    code,
    names_in,
    normal,
    own_nodes,
)
from kernelband.writers.rewriter.linear import LoopScope, Terms, block_bound, holds_in_full_blocks
from kernelband.writers.rewriter.tree import children


@dataclass(eq=False)
class BlockLoop:
    """A `for` over the blocks of a row from zero: `bound` elements, `step` at a time, both names. `wanted`: see linear."""

    node: cst.For
    variable: str
    bound: str
    step: str
    scope: LoopScope
    wanted: Terms


def block_loop(kernel: Kernel, node: cst.For) -> BlockLoop | None:
    """The loop as one over blocks of a row: `range(0, N, STEP)` or `range(cdiv(N, STEP))`; None for any other."""
    if not isinstance(node.target, cst.Name) or node.orelse is not None or called(node.iter) != "range":
        return None
    variable = node.target.value
    scope = LoopScope(kernel.node, node, variable)
    args = [arg.value for arg in node.iter.args if arg.keyword is None and not arg.star]  # type: ignore[attr-defined]
    if len(args) > 1 and normal(args[0]) != "0":
        return None
    if len(args) == 3:
        bound, step, counts = args[1], args[2], False
    elif args:
        end: cst.CSTNode | None = args[-1]
        if isinstance(end, cst.Name):
            end = scope.definition(end.value)
        if not isinstance(end, cst.Call) or called(end) != "cdiv" or len(end.args) != 2:
            return None
        bound, step, counts = end.args[0].value, end.args[1].value, True
    else:
        return None
    if not isinstance(bound, cst.Name) or not isinstance(step, cst.Name) or scope.variable_changes:
        return None
    wanted = block_bound(scope, as_ast(step), counts, as_ast(bound))
    return BlockLoop(node, variable, bound.value, step.value, scope, wanted)


def bounded(loop: BlockLoop, mask: cst.CSTNode) -> bool:
    """Whether a mask says, among other things, that a lane is within the bound of the loop."""
    if isinstance(mask, cst.Comparison):
        return holds_in_full_blocks(loop.scope, mask, loop.wanted)
    if isinstance(mask, cst.BinaryOperation) and isinstance(mask.operator, cst.BitAnd):
        return bounded(loop, mask.left) or bounded(loop, mask.right)
    if isinstance(mask, cst.BooleanOperation) and isinstance(mask.operator, cst.And):
        return bounded(loop, mask.left) or bounded(loop, mask.right)
    if isinstance(mask, cst.Subscript):
        axes = all(code(part.slice).strip() in (":", "None") for part in mask.slice)
        return axes and bounded(loop, mask.value)
    if isinstance(mask, cst.Name) and mask.value in loop.scope.inside:
        value = loop.scope.definition(mask.value)
        return value is not None and bounded(loop, value)
    return False


def leaves_early(node: cst.For) -> bool:
    """Whether the body ends a pass before its end, or declares what may be declared once only."""
    early = (cst.Break, cst.Continue, cst.Return, cst.AnnAssign, cst.While, cst.FunctionDef, cst.NamedExpr)
    return any(isinstance(part, early) for part in own_nodes(node.body))


def plain_lines(lines: Iterable[cst.CSTNode]) -> list[tuple[cst.SimpleStatementLine, str, cst.BaseExpression, bool]] | None:
    """(line, name, value, adds) of lines that each set a name or add to it; None if one does something else."""
    found = []
    for line in lines:
        if not isinstance(line, cst.SimpleStatementLine) or len(line.body) != 1:
            return None
        small = line.body[0]
        if isinstance(small, cst.Assign) and len(small.targets) == 1 and isinstance(small.targets[0].target, cst.Name):
            found.append((line, small.targets[0].target.value, small.value, False))
        elif (isinstance(small, cst.AugAssign) and isinstance(small.target, cst.Name)
              and isinstance(small.operator, cst.AddAssign)):  # fmt: skip
            found.append((line, small.target.value, small.value, True))
        else:
            return None
    return found


def needed(lines: Iterable[cst.CSTNode]) -> set[str]:
    """Names that lines read before they surely assign them."""
    found: set[str] = set()
    ready: set[str] = set()
    for line in lines:
        small = line.body[0] if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1 else line
        if isinstance(small, cst.Assign):
            found |= names_in(small.value) - ready
            for target in small.targets:
                if isinstance(target.target, cst.Name):
                    ready.add(target.target.value)
                elif isinstance(target.target, (cst.Tuple, cst.List)):
                    ready |= names_in(target.target)
                else:
                    found |= names_in(target.target) - ready
        elif isinstance(small, cst.For):
            own = names_in(small.target)
            found |= (names_in(small.iter) | (needed(small.body.body) - own)) - ready
        elif isinstance(small, (cst.AugAssign, cst.Expr)) or not isinstance(small, cst.If):
            found |= names_in(small) - ready
        else:
            found |= (names_in(small.test) | needed(small.body.body)) - ready
            if small.orelse is not None:
                other = [small.orelse] if isinstance(small.orelse, cst.If) else list(small.orelse.body.body)
                found |= needed(other) - ready
    return found


def assigned(node: cst.BaseSuite | cst.CSTNode) -> set[str]:
    """Names that a block or statement assigns."""
    block = node if isinstance(node, cst.BaseSuite) else cst.IndentedBlock(body=[node])  # type: ignore[list-item]
    return set(bindings(block))


def count_name(nodes: Iterable[cst.CSTNode], name: str) -> int:
    """How often a name is mentioned, keywords and attributes aside."""
    total = 0
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if isinstance(node, cst.Name):
            total += node.value == name
        elif isinstance(node, (cst.Attribute, cst.Arg)):
            stack.append(node.value)
        else:
            stack.extend(children(node))
    return total


def lines_of(source: Source, text: str) -> list[cst.BaseStatement]:
    """Statements from text, in the layout of the module."""
    config = source.module.config_for_parsing
    return [cst.parse_statement(line, config) for line in text.strip("\n").split("\n") if line]  # type: ignore[misc]
