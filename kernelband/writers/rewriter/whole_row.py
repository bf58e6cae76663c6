"""Rule family `whole_row`: a row that fits is one block, so that its passes share what they load.

Owns: a copy of a kernel in which block loops over a row run once, and the choice between it and the old kernel at the
launch. The old path stays for rows that are empty or too long. Only kernels qualify in which the block size is used for
nothing but the loops over the row, and in which each access in these loops is masked by the row's length.
"""

from __future__ import annotations

import libcst as cst

from kernelband.writers.rewriter.kernels import Kernel, Launch, Source, argument, called, code, names_in, normal, walk
from kernelband.writers.rewriter.launch_params import add_keyword
from kernelband.writers.rewriter.passes import (
    BlockLoop,
    assigned,
    block_loop,
    bounded,
    count_name,
    leaves_early,
    lines_of,
    needed,
)
from kernelband.writers.rewriter.rule import Child, Rule
from kernelband.writers.rewriter.tree import Change, children, rebuild
from kernelband.writers.rewriter.values import Effects, tidy

LIMIT = 65536
"""Elements of the largest block that is tried: 128 a thread with 16 warps."""
_SHAPED = {"zeros", "full"}
_TO_SCALAR = {"sum", "max", "min", "reduce", "xor_sum", "argmax", "argmin"}


def apply(source: Source) -> tuple[list[Child], list[str]]:
    """A child for each launch whose kernel loops over the blocks of a row, and words for the others."""
    made: list[Child] = []
    words: list[str] = []
    lines = {
        line.body[0].value: line
        for line in walk(source.module)
        if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1 and isinstance(line.body[0], cst.Expr)
    }
    for launch in source.launches:
        kernel = launch.kernel
        loops = [found for node in walk(kernel.node.body) if isinstance(node, cst.For)
                 if (found := block_loop(kernel, node)) is not None and found.step in kernel.constexprs]
        if not loops:
            words.append(f"{kernel.name} has no loop over the blocks of a row")
        for step in dict.fromkeys(loop.step for loop in loops):
            those = [loop for loop in loops if loop.step == step]
            limit: int | str = 0
            why = _obstacle(source, launch, those)
            if why is None:
                limit = _limit(source, launch, those)
                why = limit if isinstance(limit, str) else None
            line = lines.get(launch.call)
            if why is None and line is None:
                why = "its launch is part of a larger statement"
            if why is not None or line is None or isinstance(limit, str):
                words.append(f"{kernel.name}: {why}")
                continue
            made.append(_child(source, launch, those, line, limit))
    if not source.launches:
        words.append("no launch of a kernel is in the source")
    return made, words


def _limit(source: Source, launch: Launch, loops: list[BlockLoop]) -> int | str:
    """The longest row, given the other sides of the block."""
    limit = LIMIT
    step, kernel = loops[0].step, launch.kernel
    for size in {normal(call.args[1].value): call.args[1].value for call in walk(kernel.node.body)
                 if isinstance(call, cst.Call) and called(call) == "arange" and len(call.args) == 2}.values():
        if normal(size) == step:
            continue
        knob = source.resolve(launch, size.value) if isinstance(size, cst.Name) else None
        if knob is None or isinstance(knob, str):
            return f"the block has another side, {normal(size)}, of unknown size"
        limit //= max(knob.value, 1)
    return limit if limit >= 64 else "the other sides of the block leave no room for a whole row"


def _obstacle(source: Source, launch: Launch, loops: list[BlockLoop]) -> str | None:
    kernel, step, bound = launch.kernel, loops[0].step, loops[0].bound
    effects = Effects(source)
    if kernel.autotuned or kernel.heuristics:
        return f"{step} is chosen by its decorators"
    if f"{kernel.name}_row" in source.names or kernel.name.endswith("_row"):
        return "it has a form for whole rows already"
    if any(loop.bound != bound for loop in loops):
        return f"its loops over blocks of {step} have several bounds"
    if bound not in kernel.params or bound in assigned(kernel.node.body):
        return f"{bound} is no argument of the kernel, so the wrapper does not know it"
    param = next(part for part in walk(kernel.node.params) if isinstance(part, cst.Param) and part.name.value == bound)
    if param.annotation is not None and bound not in kernel.constexprs:
        return f"{bound} has a type of its own"
    if step not in launch.args or bound not in launch.args or launch.args[step].star:
        return f"its launch does not name {step} and {bound}"
    if not _simple(launch.args[bound].value):
        return f"{bound} is computed in the launch ({normal(launch.args[bound].value)})"
    if any(f'"{step}"' in code(node) or f"'{step}'" in code(node) for node in source.grid_closure(launch)):
        return f"its grid depends on {step}"
    if any(called(node) in ("dot", "dot_scaled") for part in source.reach(kernel) for node in walk(part.node.body)):
        return "it multiplies matrices, and a whole row of those is no tile"
    if _other_uses(kernel, loops):
        return f"{step} is used for more than the loops over {bound}"
    return _outside(kernel, loops) or next(filter(None, (_inside(kernel, effects, loop) for loop in loops)), None)


def _simple(node: cst.CSTNode) -> bool:
    """An expression that may be read twice: names, attributes, items and sizes."""
    if isinstance(node, cst.Call):
        sized = isinstance(node.func, cst.Attribute) and node.func.attr.value in ("numel", "size", "dim")
        return sized and all(isinstance(arg.value, (cst.Integer, cst.UnaryOperation)) for arg in node.args)
    return isinstance(node, (cst.Name, cst.Attribute, cst.Subscript)) and not any(
        isinstance(part, cst.Call) for part in walk(node)
    )


def _other_uses(kernel: Kernel, loops: list[BlockLoop]) -> bool:
    """Whether the block size does anything but give the loops their blocks."""
    step = loops[0].step
    fine = 0
    for node in walk(kernel.node.body):
        if isinstance(node, cst.Call):
            name = called(node)
            values = [arg.value for arg in node.args]
            if name == "arange" and len(values) == 2 and normal(values[0]) == "0":
                fine += normal(values[1]) == step
            elif name in _SHAPED and values:
                fine += count_name([values[0]], step)
            elif name == "multiple_of" and len(values) == 2:
                fine += normal(values[1]) == step
        elif isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Multiply):
            sides = {normal(node.left), normal(node.right)}
            fine += any(sides == {step, loop.variable} and node in set(walk(loop.node.body)) for loop in loops)
    fine += sum(count_name([loop.node.iter], step) for loop in loops)
    counts = [node for node in walk(kernel.node.body) if isinstance(node, cst.Assign) and called(node.value) == "cdiv"]
    fine += sum(count_name([node.value], step) for node in counts
                if any(isinstance(t.target, cst.Name) and _only_a_count(kernel, loops, t.target.value) for t in node.targets))
    return fine != count_name([kernel.node.body], step)


def _only_a_count(kernel: Kernel, loops: list[BlockLoop], name: str) -> bool:
    """Whether a name is used as the number of passes only."""
    return count_name([kernel.node.body], name) - 1 == sum(count_name([loop.node.iter], name) for loop in loops)


def _outside(kernel: Kernel, loops: list[BlockLoop]) -> str | None:
    """Words if a load or store outside of the loops touches a block of the size that would change."""
    within = {node for loop in loops for node in walk(loop.node)}
    marked = {loops[0].step}
    for _ in range(3):  # through names of names
        for node in walk(kernel.node.body):
            if isinstance(node, (cst.Assign, cst.AugAssign)) and _mentions(node.value, marked):
                marked |= names_in(node.targets[0].target if isinstance(node, cst.Assign) else node.target)
    for node in walk(kernel.node.body):
        access = isinstance(node, cst.Call) and node not in within and called(node) in ("load", "store")
        if access and any(_mentions(arg.value, marked) for arg in node.args):  # type: ignore[attr-defined]
            return f"it touches a block of {loops[0].step} outside of its loops"
    return None


def _mentions(node: cst.CSTNode, marked: set[str]) -> bool:
    """Whether the value is a block of the marked size: what is summed up is none."""
    if isinstance(node, cst.Name):
        return node.value in marked
    if isinstance(node, cst.Call) and called(node) in _TO_SCALAR:
        return False
    return any(_mentions(child, marked) for child in children(node))


def _inside(kernel: Kernel, effects: Effects, loop: BlockLoop) -> str | None:
    """Words if a loop may not become a straight line over the whole row."""
    where = f"the loop over {loop.variable}"
    if leaves_early(loop.node):
        return f"{where} leaves early or holds what may not stand alone"
    if loop.bound in loop.scope.inside or loop.step in loop.scope.inside:
        return f"{where} changes its own bounds"
    moving = {loop.variable}
    carries = bool(needed(loop.node.body.body) & loop.scope.inside.keys())
    for _ in range(3):
        for node in walk(loop.node.body):
            if isinstance(node, (cst.Assign, cst.AugAssign)) and names_in(node.value) & moving:
                moving |= names_in(node.targets[0].target if isinstance(node, cst.Assign) else node.target)
    for node in walk(loop.node.body):
        if not isinstance(node, cst.Call):
            continue
        kind, name = effects.of(node), called(node)
        if name not in ("load", "store"):
            if kind != "pure":
                return f"{where} calls {name or 'something'}, which may touch memory"
            continue
        if name == "load" and not names_in(node) & moving:
            continue
        mask = argument(node, 1 if name == "load" else 2, "mask")
        if mask is None or not bounded(loop, mask.value):
            return f"a {name} in {where} is not masked by {loop.bound}"
        if name == "load" and carries and argument(node, 2, "other") is None:
            return f"a load in {where} leaves the lanes beyond the row undefined"
    return None


def _child(source: Source, launch: Launch, loops: list[BlockLoop], line: cst.SimpleStatementLine, limit: int) -> Child:
    kernel, step = launch.kernel, loops[0].step
    name = source.fresh(f"{kernel.name}_row")
    straight: dict[cst.CSTNode, Change] = {
        loop.node: lambda updated, variable=loop.variable: _once(source, variable, updated)  # type: ignore[misc]
        for loop in loops
    }
    copy = rebuild(kernel.node, straight)
    assert isinstance(copy, cst.FunctionDef)
    copy = copy.with_changes(name=cst.Name(name), leading_lines=[cst.EmptyLine(indent=False)] * 2).deep_clone()
    length = normal(launch.args[loops[0].bound].value)
    block = f"triton.next_power_of_2({length})"
    call = rebuild(launch.call, {launch.args[step].value: cst.parse_expression(block)})
    assert isinstance(call, cst.Call) and isinstance(call.func, cst.Subscript)
    call = call.with_changes(func=call.func.with_changes(value=cst.Name(name)))
    warps = cst.parse_expression(f"4 if {length} <= 2048 else 8 if {length} <= 8192 else 16")
    given = next((arg for arg in call.args if arg.keyword is not None and arg.keyword.value == "num_warps"), None)
    if given is not None and isinstance(given.value, cst.Integer):
        call = call.with_changes(args=[arg.with_changes(value=warps) if arg is given else arg for arg in call.args])
    elif given is None and not launch.opaque and "num_warps" not in kernel.params:
        call = add_keyword(call, "num_warps", warps)
    new = cst.SimpleStatementLine([cst.Expr(call)]).deep_clone()
    test = cst.parse_expression(f"0 < {length} <= {limit}")
    chosen = cst.If(test, cst.IndentedBlock([new]), cst.Else(cst.IndentedBlock([line.with_changes(leading_lines=[])])),
                    leading_lines=line.leading_lines)
    changes: dict[cst.CSTNode, Change] = {line: chosen, kernel.node: cst.FlattenSentinel([kernel.node, copy])}
    text = tidy(source.edit(changes), name)
    return f"rows of up to {limit} as one block of {step} = next_power_of_2({length}) in {launch.where}", text


def _once(source: Source, variable: str, loop: cst.CSTNode) -> cst.FlattenSentinel:
    """The body of a loop that runs once."""
    assert isinstance(loop, cst.For)
    first, *_ = lines_of(source, f"{variable} = 0")
    first = first.with_changes(leading_lines=loop.leading_lines)
    return cst.FlattenSentinel([first, *loop.body.body])


RULE = Rule(
    "whole_row",
    "tiling",
    "a row that fits is one block and loaded once; the loops stay for longer rows",
    "a launch of a kernel whose loops run over the blocks of one row, each access in them masked by the length of the row",
    apply,
)
