"""The body of a kernel put into a loop, so that one program does the work of several.

Owns: the loop around the body, with its early returns turned into branches, its reassigned parameters copied for each
pass, and its program ids replaced. It never touches a launch: `programs.py` counts the programs and changes the grid.
What cannot be put into a loop raises `Declined`, in words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import libcst as cst

from kernelband.writers.rewriter.kernels import Kernel, Source, called, dotted, walk
from kernelband.writers.rewriter.tiles import program_axis, program_names
from kernelband.writers.rewriter.tree import Change, children


class Declined(Exception):
    """A place to which a rule does not apply; the message says why."""


def is_text(line: cst.CSTNode) -> bool:
    """Whether a line is a string only, as a doc-string is."""
    return (
        isinstance(line, cst.SimpleStatementLine)
        and len(line.body) == 1
        and isinstance(line.body[0], cst.Expr)
        and isinstance(line.body[0].value, cst.SimpleString)
    )


def name_nodes(node: cst.CSTNode, name: str) -> Iterator[cst.Name]:
    """Every place where the name stands for a value; attributes and keywords of that name do not count."""
    stack = [node]
    while stack:
        current = stack.pop()
        if isinstance(current, cst.Name):
            if current.value == name:
                yield current
        elif isinstance(current, (cst.Attribute, cst.Arg)):
            stack.append(current.value)
        else:
            stack.extend(children(current))


def _guard(line: cst.CSTNode) -> list[cst.BaseStatement] | None:
    """What `if ...: ...; return` does before it returns, None for another statement."""
    if not isinstance(line, cst.If) or line.orelse is not None or not isinstance(line.body, cst.IndentedBlock):
        return _short_guard(line)
    *before, last = line.body.body
    if _leaves(last):
        return list(before)  # type: ignore[arg-type]
    return None


def _short_guard(line: cst.CSTNode) -> list[cst.BaseStatement] | None:
    if isinstance(line, cst.If) and line.orelse is None and isinstance(line.body, cst.SimpleStatementSuite):
        return [] if len(line.body.body) == 1 and _bare_return(line.body.body[0]) else None
    return None


def _leaves(line: cst.CSTNode) -> bool:
    """Whether a line is `return` and nothing else."""
    return isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1 and _bare_return(line.body[0])


def _bare_return(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Return) and node.value is None


def check_returns(kernel: Kernel) -> None:
    """A return inside a loop does not compile: each must be the last line, or a guard that a branch replaces."""
    lines = list(kernel.node.body.body)
    allowed = {node for node in walk(lines[-1]) if isinstance(node, cst.Return)} if _leaves(lines[-1]) else set()
    for index, line in enumerate(lines):
        if _guard(line) is None:
            continue
        allowed.add([node for node in walk(line) if isinstance(node, cst.Return)][-1])
        rest = cst.IndentedBlock(body=[*lines[index + 1 :], *_guard(line)])  # type: ignore[misc, list-item]
        before = cst.IndentedBlock(body=lines[:index])  # type: ignore[arg-type]
        twice = _assigned(rest) & _assigned(before)
        if twice:
            raise Declined(f"returns early, and assigns {min(twice)} before and after")
    if any(isinstance(node, cst.Return) and node not in allowed for node in walk(kernel.node.body)):
        raise Declined("returns from inside a condition or a loop, which a loop around it does not allow")


def _assigned(block: cst.IndentedBlock) -> set[str]:
    found: set[str] = set()
    for node in walk(block):
        if isinstance(node, (cst.AssignTarget, cst.AnnAssign, cst.AugAssign, cst.For)):
            found |= {part.value for part in walk(node.target) if isinstance(part, cst.Name)}
    return found


def _without_returns(lines: Sequence[cst.BaseStatement]) -> list[cst.BaseStatement]:
    if lines and _leaves(lines[-1]):
        lines = lines[:-1]
    for index, line in enumerate(lines):
        before = _guard(line)
        if before is None or not isinstance(line, cst.If):
            continue
        rest = cst.IndentedBlock(body=_without_returns(lines[index + 1 :]) or [cst.SimpleStatementLine([cst.Pass()])])
        test = line.test
        if before or not isinstance(test, cst.Comparison):
            block = cst.IndentedBlock(body=before or [cst.SimpleStatementLine([cst.Pass()])])
            space = cst.SimpleWhitespace(" ")
            new = line.with_changes(body=block, orelse=cst.Else(body=rest), whitespace_before_test=space)
        else:
            inner = test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
            new = line.with_changes(test=cst.UnaryOperation(cst.Not(), inner), body=rest)
        return [*lines[:index], new]
    return list(lines)


def looped(
    source: Source, kernel: Kernel, before: Sequence[str], header: str, programs: Mapping[str, str], first: Sequence[str]
) -> dict[cst.CSTNode, Change]:
    """The change that puts the body of a kernel into a loop.

    `before`: statements before the loop; `header`: the loop's first line; `programs`: axis -> what takes the place of
    its program id; `first`: statements at the start of each pass.
    """
    changes: dict[cst.CSTNode, Change] = {}
    for node in walk(kernel.node.body):
        axis = program_axis(node) if called(node) == "program_id" else None
        if axis is not None and axis in programs:
            changes[node] = cst.parse_expression(programs[axis])
    copies = []
    for name in kernel.params:
        if len(source.bindings(kernel.node)[name]) > 1:  # each pass starts from what the launch passed
            copy = source.fresh(f"{name}_here")
            copies.append(f"{copy} = {name}")
            for place in name_nodes(kernel.node.body, name):
                changes[place] = cst.Name(copy)
    config = source.module.config_for_parsing

    def wrap(node: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(node, cst.IndentedBlock)
        lines = list(node.body)
        text = [lines.pop(0)] if lines and is_text(lines[0]) else []
        start = [cst.parse_statement(line, config) for line in (*first, *copies)]
        body = cst.IndentedBlock(body=[*start, *_without_returns(lines)])
        loop = cst.parse_statement(f"{header}\n{source.module.default_indent}pass\n", config)
        head = [cst.parse_statement(line, config) for line in before]
        return node.with_changes(body=[*text, *head, loop.with_changes(body=body)])  # type: ignore[call-arg]

    changes[kernel.node.body] = wrap
    return changes


def needs_tensor(kernel: Kernel) -> bool:
    """Whether the kernel asks something of its program id that only a tensor has, such as `.to(tl.int64)`."""
    holders = program_names(kernel)
    return any(
        isinstance(node, cst.Attribute) and (called(node.value) == "program_id" or dotted(node.value) in holders)
        for node in walk(kernel.node.body)
    )
