"""Rule family `tail_mask`: whole blocks load and store without a mask; only the last, partial block keeps it.

Owns: the split of a block loop into a main loop over full blocks and a tail with the original body. It drops a mask
only where `linear.py` proves from the text that the condition is true in every full block.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
    walk,
)
from kernelband.writers.rewriter.linear import LoopScope, Terms, block_bound, holds_in_full_blocks
from kernelband.writers.rewriter.rule import Child, Rule
from kernelband.writers.rewriter.tree import Change, children, rebuild

# call -> (position of mask, position of other)
_MASKED: dict[str, tuple[int, int | None]] = {"load": (1, 2), "store": (2, None)}


@dataclass
class Loop:
    """A `for` over blocks: where it starts and ends, and whether it counts blocks or elements. All as written."""

    node: cst.For
    variable: str
    start: cst.BaseExpression | None  # None: from zero
    end: cst.BaseExpression
    bound: cst.BaseExpression  # number of elements
    step: cst.BaseExpression
    counts: bool


@dataclass
class Main:
    """How the body of the main loop differs from the original: an action for each node that changes."""

    actions: dict[cst.CSTNode, Change] = field(default_factory=dict)
    unmasked: int = 0


def apply(source: Source) -> tuple[list[Child], list[str]]:
    """Children with one loop split, one with all loops of a kernel split, and words for each loop left alone."""
    children: list[Child] = []
    words: list[str] = []
    for kernel in source.kernels.values():
        loops: list[tuple[Loop, Main]] = []
        for node, before in _loops(kernel):
            result = _plan(kernel, node, before)
            if isinstance(result, str):
                words.append(f"{kernel.name}: {result}")
            else:
                loops.append(result)
        if not any(isinstance(node, cst.For) for node in walk(kernel.node.body)):
            words.append(f"{kernel.name} has no loop")
        for number, (loop, main) in enumerate(loops, 1):
            which = f"the loop over {loop.variable}" + (f" ({number} of {len(loops)})" if len(loops) > 1 else "")
            changes = _split(source, loop, main, 1)
            children.append((f"mask only in the tail of {which} in {kernel.name}", source.edit(changes)))
        inner = {node for loop, _ in loops for node in walk(loop.node.body)}
        outermost = [(loop, main) for loop, main in loops if loop.node not in inner]
        if len(outermost) > 1:
            together: dict[cst.CSTNode, Change] = {}
            for number, (loop, main) in enumerate(outermost, 1):
                together |= _split(source, loop, main, number)
            text = f"mask only in the tail of {len(outermost)} loops in {kernel.name}"
            children.append((text, source.edit(together)))
    return children, words


def _loops(kernel: Kernel) -> list[tuple[cst.For, cst.CSTNode | None]]:
    """Every loop of a kernel with the statement before it, in source order."""
    found: list[tuple[cst.For, cst.CSTNode | None]] = []
    for block in walk(kernel.node.body):
        if isinstance(block, cst.IndentedBlock):
            lines = list(block.body)
            found += [
                (line, lines[index - 1] if index else None)
                for index, line in enumerate(lines)
                if isinstance(line, cst.For)
            ]
    return found


def _plan(kernel: Kernel, node: cst.For, before: cst.CSTNode | None) -> tuple[Loop, Main] | str:
    """The loop and what its main part becomes, or why it stays as it is."""
    variable = node.target.value if isinstance(node.target, cst.Name) else None
    where = f"the loop over {variable or code(node.target)}"
    if variable is None or node.orelse is not None or not isinstance(node.body, cst.IndentedBlock):
        return f"{where} is not a plain block loop"
    if any(isinstance(part, (cst.Break, cst.Continue, cst.Return, cst.AnnAssign)) for part in own_nodes(node.body)):
        return f"{where} leaves early or declares constants, so its body cannot stand twice"
    scope = LoopScope(kernel.node, node, variable)
    loop = _range(scope, node, variable)
    if loop is None:
        return f"{where} does not run over blocks of a range"
    fixed = names_in(loop.bound) | names_in(loop.step) | names_in(loop.end)
    fixed |= names_in(loop.start) if loop.start is not None else set()
    if scope.variable_changes or variable in fixed or fixed & scope.inside.keys():
        return f"{where} changes its own bounds"
    if loop.start is not None and "max" in bindings(kernel.node):
        return f"{where} needs max, which a local name hides"
    if isinstance(before, cst.For) and called(before.iter) and loop.start is not None:
        ends = before.iter.args[:2][-1:] if isinstance(before.iter, cst.Call) else []
        if any(normal(arg.value) == normal(loop.start) for arg in ends):
            return f"{where} is a tail already"
    if loop.counts and isinstance(before, cst.For) and isinstance(before.iter, cst.Call) and _has_start(node):
        return f"{where} is a tail already"
    main = _main_body(kernel, scope, loop)
    return main if isinstance(main, str) else (loop, main)


def _has_start(node: cst.For) -> bool:
    return isinstance(node.iter, cst.Call) and len(node.iter.args) > 1 and normal(node.iter.args[0].value) != "0"


def _range(scope: LoopScope, node: cst.For, variable: str) -> Loop | None:
    """`range(a, N, STEP)` or `range(0, cdiv(N, STEP))`, also through tl.range and through a name for the count."""
    if called(node.iter) != "range" or not isinstance(node.iter, cst.Call):
        return None
    args = [arg for arg in node.iter.args if arg.keyword is None]
    if any(arg.star for arg in node.iter.args) or any(
        arg.keyword is not None and arg.keyword.value in ("arg1", "arg2", "step") for arg in node.iter.args
    ):
        return None
    values = [arg.value for arg in args]
    start = None
    if len(values) > 1 and not (isinstance(values[0], cst.Integer) and values[0].evaluated_value == 0):
        start = values[0]
    if len(values) == 3:
        if isinstance(values[2], cst.UnaryOperation):
            return None
        return Loop(node, variable, start, values[1], values[1], values[2], False)
    if start is not None or not values:
        return None
    end = values[-1]
    count: cst.CSTNode | None = scope.definition(end.value) if isinstance(end, cst.Name) else end
    if isinstance(count, cst.Call) and called(count) == "cdiv" and len(count.args) == 2:
        bound, step = (arg.value for arg in count.args)
        return Loop(node, variable, None, end, bound, step, True)
    return None


def _main_body(kernel: Kernel, scope: LoopScope, loop: Loop) -> Main | str:
    """What changes in the body when every lane is known to be within the bound, or why nothing can."""
    wanted = block_bound(scope, as_ast(loop.step), loop.counts, as_ast(loop.bound))
    main = Main()
    kept: set[str] = set()
    reduced: dict[str, cst.BaseExpression] = {}
    definitions: dict[str, cst.Assign] = {}

    def visit(node: cst.CSTNode) -> None:
        skip: cst.CSTNode | None = None
        if isinstance(node, cst.Call) and called(node) in _MASKED:
            skip = unmask(node)
        elif isinstance(node, cst.Call) and called(node) == "where" and len(node.args) == 3:
            skip = choose(node)
        elif isinstance(node, cst.Assign) and len(node.targets) == 1 and isinstance(node.targets[0].target, cst.Name):
            name = node.targets[0].target.value
            if scope.definition(name) is node.value and name in scope.inside:
                folded = _fold(scope, wanted, node.value)
                if folded is not node.value:
                    definitions[name] = node
                    if folded is not None:
                        reduced[name] = folded
                    return
        elif isinstance(node, cst.Name):
            kept.add(node.value)
        for child in _read(node):
            if child is not skip:
                visit(child)

    def unmask(call: cst.Call) -> cst.CSTNode | None:
        place, other_place = _MASKED[called(call)]
        positional = [index for index, arg in enumerate(call.args) if arg.keyword is None]
        mask = next((i for i, a in enumerate(call.args) if a.keyword is not None and a.keyword.value == "mask"), None)
        if mask is None and place in positional:
            mask = place
        if mask is None or any(arg.star for arg in call.args):
            return None
        value = call.args[mask].value
        folded = _fold(scope, wanted, value)
        if folded is value and not mentions_reducible(value):
            return None
        if folded is None:
            drop = {mask} | {i for i, a in enumerate(call.args) if a.keyword is not None and a.keyword.value == "other"}
            if other_place in positional:
                drop.add(other_place)  # type: ignore[arg-type]
            if any(index > min(drop) and index not in drop for index in positional):
                return None
            main.actions[call] = lambda updated: _without(updated, drop)
        elif folded is not value:
            main.actions[call.args[mask].value] = lambda _: _bare(folded)
        main.unmasked += 1
        return call.args[mask]

    def mentions_reducible(value: cst.CSTNode) -> bool:
        """Whether a mask is made of names whose definitions get shorter."""
        parts = [value]
        for part in parts:
            if isinstance(part, cst.BinaryOperation) and isinstance(part.operator, cst.BitAnd):
                parts += [part.left, part.right]
            elif isinstance(part, cst.Subscript):
                parts.append(part.value)
        names = [part.value for part in parts if isinstance(part, cst.Name)]
        values = [scope.definition(name) for name in names if name in scope.inside]
        return any(value is not None and _fold(scope, wanted, value) is not value for value in values)

    def choose(call: cst.Call) -> cst.CSTNode | None:
        if any(arg.keyword is not None or arg.star for arg in call.args):
            return None
        if _fold(scope, wanted, call.args[0].value) is not None:
            return None
        if not names_in(call.args[1].value) - {"tl", "float"}:  # a bare number would lose the shape of the tile
            return None
        main.actions[call] = lambda updated: _grouped(updated.args[1].value)  # type: ignore[attr-defined]
        return call.args[0]

    visit(loop.node.body)
    lines = {
        line.body[0]: line
        for line in loop.node.body.body
        if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1
    }
    stays: set[str] = set()
    for name, assign in reversed(definitions.items()):  # users come after what they use
        if name in kept or assign not in lines or _read_elsewhere(kernel, loop.node, name):
            if name in reduced:  # a shorter mask may have another shape where it is used otherwise
                return f"{name} of the loop over {loop.variable} is used as more than a mask"
            stays.add(name)
            kept |= names_in(assign.value)
    for name, assign in definitions.items():
        if name in reduced:
            main.actions[assign.value] = lambda _, new=reduced[name]: _bare(new)  # type: ignore[misc]
        elif name not in stays:
            main.actions[lines[assign]] = lambda _: cst.RemoveFromParent()
    return main if main.unmasked else f"no load or store in the loop over {loop.variable} is masked by its bound"


def _fold(scope: LoopScope, wanted: Terms, node: cst.CSTNode) -> cst.BaseExpression | None:
    """The condition given that `wanted` is negative: None if it is true, the node itself if it says nothing."""
    if isinstance(node, cst.Comparison):
        return None if holds_in_full_blocks(scope, node, wanted) else node
    if isinstance(node, cst.Name) and node.value in scope.inside:
        value = scope.definition(node.value)
        return None if value is not None and _fold(scope, wanted, value) is None else node
    if isinstance(node, cst.Subscript):
        axes = all(
            normal(part.slice.value) == "None" if isinstance(part.slice, cst.Index) else code(part.slice).strip() == ":"
            for part in node.slice
        )
        return None if axes and _fold(scope, wanted, node.value) is None else node
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.BitAnd):
        left, right = _fold(scope, wanted, node.left), _fold(scope, wanted, node.right)
        if left is None or right is None:
            return right if left is None else left
        if left is node.left and right is node.right:
            return node
        return node.with_changes(left=left, right=right)
    return node  # type: ignore[return-value]


def _read_elsewhere(kernel: Kernel, loop: cst.For, name: str) -> bool:
    """Whether a name of the loop body is read outside it, where no loop of its own assigns it first."""
    stack: list[cst.CSTNode] = [kernel.node.body]
    while stack:
        node = stack.pop()
        if node is loop:
            continue
        if isinstance(node, cst.For) and loop not in set(walk(node)):
            found = bindings(node.body).get(name)
            if found and all(binding.kind == "assign" for binding in found):
                continue
        if isinstance(node, cst.Name) and node.value == name:
            return True
        stack.extend(_read(node))
    return False


def _read(node: cst.CSTNode) -> list[cst.CSTNode]:
    """What is below a node, without the names that name no value: attributes and keywords."""
    return [node.value] if isinstance(node, (cst.Attribute, cst.Arg)) else children(node)


def _split(source: Source, loop: Loop, main: Main, number: int) -> dict[cst.CSTNode, Change]:
    """The change that puts a main loop and a tail in place of the loop."""
    full = "full_blocks" if loop.counts else "full_end"
    full = source.fresh(full if number == 1 else f"{full}_{number}")
    bound, step = _in_brackets(loop.bound), _in_brackets(loop.step)
    if loop.counts:
        text = f"{full} = {bound} // {step}"
    elif loop.start is None:
        text = f"{full} = {bound} - {bound} % {step}"
    else:
        start = _in_brackets(loop.start)
        text = f"{full} = {start} + max({bound} - {start}, 0) // {step} * {step}"
    line = cst.parse_statement(text, source.module.config_for_parsing)
    line = line.with_changes(leading_lines=loop.node.leading_lines)
    call = loop.node.iter
    assert isinstance(call, cst.Call)
    name = cst.Name(full)
    end = next(index for index, arg in enumerate(call.args) if arg.value is loop.end)
    head = [arg.with_changes(value=name) if index == end else arg for index, arg in enumerate(call.args)]
    if end == 0:
        rest = [cst.Arg(name, comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))), *call.args]
    else:
        rest = [call.args[0].with_changes(value=name), *call.args[1:]]
    body = rebuild(loop.node.body, main.actions)
    first = loop.node.with_changes(iter=call.with_changes(args=head), body=body, leading_lines=[])
    second = loop.node.with_changes(iter=call.with_changes(args=rest), leading_lines=[]).deep_clone()
    return {loop.node: cst.FlattenSentinel([line, first, second])}


def _without(call: cst.CSTNode, drop: set[int]) -> cst.CSTNode:
    """The call without some arguments; the last one left ends the way the last one did."""
    assert isinstance(call, cst.Call)
    args = [arg for index, arg in enumerate(call.args) if index not in drop]
    if len(call.args) - 1 in drop and args:
        old = call.args[-1]
        args[-1] = args[-1].with_changes(comma=old.comma, whitespace_after_arg=old.whitespace_after_arg)
    return call.with_changes(args=args)


def _bare(node: cst.BaseExpression) -> cst.BaseExpression:
    """The expression on one line, without its own brackets."""
    return cst.parse_expression(normal(node)) if "\n" in code(node) else node.with_changes(lpar=[], rpar=[])


def _grouped(node: cst.BaseExpression) -> cst.BaseExpression:
    """The expression in brackets unless it binds tightly anyway."""
    simple = isinstance(node, (cst.Name, cst.Call, cst.Attribute, cst.Subscript)) or node.lpar
    return node if simple else node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


def _in_brackets(node: cst.BaseExpression) -> str:
    text = normal(node)
    return text if isinstance(node, (cst.Name, cst.Integer, cst.Call, cst.Attribute)) else f"({text})"


RULE = Rule(
    "tail_mask",
    "vectorization",
    "a loop without masks over full blocks, and a masked tail",
    "a loop over blocks whose loads or stores are masked by the loop's bound",
    apply,
)
