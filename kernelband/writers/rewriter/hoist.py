"""Rule family `hoist`: what is the same in every pass of a loop is computed once, before the loop.

Owns: which expressions of a `for` in a kernel are invariant, and the move of them to the front of the loop. Arithmetic
moves as it is. A load moves only when nothing in the loop writes, and keeps a guard: it is masked off when the loop has
no pass at all, because then its address may be no address.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import libcst as cst

from kernelband.writers.rewriter.kernels import (
    Kernel,
    Source,
    argument,
    bindings,
    called,
    code,
    names_in,
    normal,
    own_nodes,
    walk,
)
from kernelband.writers.rewriter.rule import Child, Rule
from kernelband.writers.rewriter.tree import Change, children
from kernelband.writers.rewriter.values import Effects

# Cheap to make anew and dear to keep: blocks that start an accumulator, and hints that belong to the loop variable.
_STAYS = {"zeros", "full", "zeros_like", "full_like", "range", "static_range", "multiple_of", "max_contiguous", "assume"}
_DEPENDS = (cst.FloorDivide, cst.Modulo, cst.Divide)  # by zero, should the loop never run


@dataclass
class _Loop:
    """What one loop gives up: whole lines that move, and expressions that get a name; in source order."""

    node: cst.For
    known: set[str]  # names that differ from pass to pass
    changes: dict[cst.CSTNode, Change] = field(default_factory=dict)
    front: list[cst.SimpleStatementLine] = field(default_factory=list)
    named: dict[str, str] = field(default_factory=dict)  # normal text of an expression -> its new name
    taken: set[str] = field(default_factory=set)
    loads: int = 0


def apply(source: Source) -> tuple[list[Child], list[str]]:
    """A child for each loop with something invariant in it, and words for the others."""
    made: list[Child] = []
    words: list[str] = []
    effects = Effects(source)
    for kernel in source.kernels.values():
        loops = [node for node in walk(kernel.node.body) if isinstance(node, cst.For)]
        if not loops:
            words.append(f"{kernel.name} has no for loop")
        for number, node in enumerate(loops, 1):
            variable = node.target.value if isinstance(node.target, cst.Name) else code(node.target)
            where = f"the loop over {variable}" + (f" ({number} of {len(loops)})" if len(loops) > 1 else "")
            for with_loads in (False, True):
                found = _collect(source, kernel, effects, node, with_loads)
                if found is None or (with_loads and not found.loads):
                    if not with_loads:
                        words.append(f"{kernel.name}: {where} computes nothing that is the same in every pass")
                    continue
                what = f"{len(found.front)} invariant{'s' if len(found.front) > 1 else ''}"
                what += f" ({found.loads} of them loads)" if found.loads else ""
                front, changes = found.front, found.changes
                changes[node] = lambda updated, front=tuple(front): _ahead(front, updated)  # type: ignore[misc]
                made.append((f"{what} out of {where} in {kernel.name}", source.edit(changes)))
    return made, words


def _ahead(front: tuple[cst.SimpleStatementLine, ...], loop: cst.CSTNode) -> cst.FlattenSentinel:
    assert isinstance(loop, cst.For)
    body = loop.body if loop.body.body else loop.body.with_changes(body=[cst.parse_statement("pass")])
    head = [front[0].with_changes(leading_lines=[*loop.leading_lines, *front[0].leading_lines]), *front[1:]]
    return cst.FlattenSentinel([*head, loop.with_changes(leading_lines=[], body=body)])


def _collect(source: Source, kernel: Kernel, effects: Effects, node: cst.For, with_loads: bool) -> _Loop | None:
    """Everything that can leave the loop, or None. Lines under an `if` stay: they may not even compile when it is off."""
    if node.orelse is not None or not isinstance(node.body, cst.IndentedBlock):
        return None
    inside = bindings(node.body)
    everywhere = bindings(kernel.node)
    variable = {part.value for part in walk(node.target) if isinstance(part, cst.Name)}
    loop = _Loop(node, set(inside) | variable)
    guard = _guard(kernel, node) if with_loads and not effects.writes(node.body) else None
    if with_loads and guard is None:
        return None
    pure = _Pure(source, kernel, effects, guard)
    lines = list(node.body.body)
    for index, line in enumerate(lines):
        if not isinstance(line, cst.SimpleStatementLine):
            continue
        for small in line.body:
            if not isinstance(small, (cst.Assign, cst.AugAssign, cst.Expr)):
                continue
            if isinstance(small, cst.Assign) and len(small.targets) == 1 and len(line.body) == 1:
                target = small.targets[0].target
                name = target.value if isinstance(target, cst.Name) else None
                alone = name is not None and len(everywhere[name]) == 1 and name not in _read(lines[: index + 1], small)
                if alone and name and pure.worth(small.value, loop.known):
                    loop.loads += pure.loads(small.value)
                    loop.front.append(
                        cst.SimpleStatementLine([small.with_changes(value=pure.guarded(small.value))],
                                                leading_lines=line.leading_lines)
                    )
                    loop.changes[line] = cst.RemoveFromParent()
                    loop.known.discard(name)
                    continue
            _expressions(source, loop, pure, small)
    return loop if loop.front else None


def _read(lines: list[cst.BaseStatement], but: cst.CSTNode) -> set[str]:
    """Names that the lines read, the target of the one assignment aside."""
    found: set[str] = set()
    for line in lines:
        for small in line.body if isinstance(line, cst.SimpleStatementLine) else [line]:
            found |= names_in(small.value) if small is but and isinstance(small, cst.Assign) else names_in(small)
    return found


def _expressions(source: Source, loop: _Loop, pure: _Pure, small: cst.CSTNode) -> None:
    """Give a name in front of the loop to each largest invariant expression of a line."""
    assert isinstance(small, (cst.Assign, cst.AugAssign, cst.Expr))
    stack: list[cst.CSTNode] = [small.value]
    while stack:
        node = stack.pop()
        if isinstance(node, (cst.Lambda, cst.GeneratorExp, cst.ListComp, cst.IfExp, cst.BooleanOperation, cst.NamedExpr)):
            continue
        if isinstance(node, cst.BaseExpression) and pure.worth(node, loop.known):
            text = normal(node)
            if text not in loop.named:
                name = source.fresh("invariant" if not loop.named else f"invariant_{len(loop.named) + 1}")
                loop.named[text] = name
                loop.loads += pure.loads(node)
                value = pure.guarded(node)
                value = cst.parse_expression(normal(value)) if "\n" in code(value) else value.with_changes(lpar=[], rpar=[])
                assign = cst.Assign([cst.AssignTarget(cst.Name(name))], value)
                loop.front.append(cst.SimpleStatementLine([assign]))
            loop.changes[node] = cst.Name(loop.named[text])
            continue
        if isinstance(node, cst.Call):
            stack.extend(reversed([arg.value for arg in node.args if not arg.star]))
            if isinstance(node.func, cst.Attribute):
                stack.append(node.func.value)
        elif not isinstance(node, cst.Attribute):
            stack.extend(reversed(children(node)))


class _Pure:
    """Whether an expression may be computed earlier and once, and is worth a register."""

    def __init__(self, source: Source, kernel: Kernel, effects: Effects, guard: str | None) -> None:
        self._kernel, self._effects, self._guard = kernel, effects, guard
        self._launched = {launch.kernel for launch in source.launches}
        self._fixed = kernel.constexprs | {"tl", "triton"}
        self._locals = bindings(kernel.node)

    def worth(self, node: cst.BaseExpression, varying: set[str]) -> bool:
        """An operation on values of the run, none of them varying. What the compiler knows must stay in its place."""
        if not isinstance(node, (cst.BinaryOperation, cst.Comparison, cst.Call, cst.Subscript)):
            return False
        if isinstance(node, cst.Call) and called(node) in _STAYS:
            return False
        if isinstance(node, cst.Subscript) and isinstance(node.value, cst.Name):  # one more axis costs nothing
            return False
        names = {name for name in names_in(node) if name in self._locals}
        return bool(names - self._fixed) and not names & varying and self._allowed(node)

    def _allowed(self, node: cst.CSTNode) -> bool:
        for part in walk(node):
            if isinstance(part, cst.Call):
                effect = self._effects.of(part)
                if effect != "pure" and not (effect == "load" and self._guard is not None and self._plain(part)):
                    return False
                if dotted_head(part) in self._locals and isinstance(part.func, cst.Attribute) and called(part) != "to":
                    return False
            elif isinstance(part, cst.BinaryOperation) and isinstance(part.operator, _DEPENDS):
                if names_in(part.right) - self._fixed:
                    return False
            elif isinstance(part, cst.ComparisonTarget):
                if isinstance(part.operator, (cst.Is, cst.IsNot, cst.In, cst.NotIn)):
                    return False
            elif isinstance(part, cst.Subscript):
                if any(":" not in code(item) and normal(item.slice.value) != "None"
                       for item in part.slice if isinstance(item.slice, cst.Index)):
                    return False
            elif isinstance(part, cst.Attribute):
                if part.attr.value in ("shape", "dtype", "type", "element_ty", "value", "T") and not _in_cast(node, part):
                    return False
            elif isinstance(part, (cst.Lambda, cst.ListComp, cst.GeneratorExp, cst.IfExp, cst.BooleanOperation,
                                   cst.NamedExpr, cst.Dict, cst.Set, cst.List)):
                return False
        return True

    def _plain(self, load: cst.Call) -> bool:
        """Whether the load's pointer is made by adding, so that it may carry a mask (a block pointer may not)."""
        pointer = argument(load, 0, "pointer")
        if pointer is None or any(arg.keyword is not None and "boundary" in arg.keyword.value for arg in load.args):
            return False
        if isinstance(pointer.value, cst.BinaryOperation):
            return True
        if not isinstance(pointer.value, cst.Name) or self._kernel not in self._launched:
            return False
        return all(
            isinstance(binding.node, (cst.AugAssign, cst.Param)) or isinstance(binding.value, cst.BinaryOperation)
            for binding in self._locals.get(pointer.value.value, [])
        )

    def loads(self, node: cst.CSTNode) -> int:
        """How many loads are in the expression."""
        return sum(1 for part in walk(node) if isinstance(part, cst.Call) and self._effects.of(part) == "load")

    def guarded(self, node: cst.BaseExpression) -> cst.BaseExpression:
        """The expression with every load of it masked off when the loop has no pass."""
        found = [part for part in walk(node) if isinstance(part, cst.Call) and self._effects.of(part) == "load"]
        if not found or self._guard is None:
            return node
        text = normal(node)
        for call in found:
            text = text.replace(normal(call), self._with_mask(call))
        return cst.parse_expression(text)

    def _with_mask(self, call: cst.Call) -> str:
        mask = argument(call, 1, "mask")
        args = [normal(call.args[0].value)]
        given = "None" if mask is None else normal(mask.value)
        args.append(f"mask={self._guard}" if given == "None" else f"mask=({given}) & ({self._guard})")
        other = argument(call, 2, "other")
        if other is not None:
            args.append(f"other={normal(other.value)}")
        for arg in call.args[1:]:
            if arg.keyword is not None and arg.keyword.value not in ("mask", "other", "pointer"):
                args.append(f"{arg.keyword.value}={normal(arg.value)}")
        return f"{normal(call.func)}({', '.join(args)})"


def dotted_head(call: cst.Call) -> str:
    """The name on which a method is called, "" if it is not called on a name."""
    func = call.func
    return func.value.value if isinstance(func, cst.Attribute) and isinstance(func.value, cst.Name) else ""


def _in_cast(node: cst.CSTNode, attribute: cst.Attribute) -> bool:
    """Whether an attribute stands in the arguments of a cast, where a type is wanted and nothing is computed."""
    casts = (part for part in walk(node) if isinstance(part, cst.Call) and called(part) == "to")
    return any(attribute in set(walk(arg)) for part in casts for arg in part.args)


def _guard(kernel: Kernel, node: cst.For) -> str | None:
    """"The loop has a pass" as an expression, or None when the text does not say that its step is positive."""
    call = node.iter
    if not isinstance(call, cst.Call) or called(call) != "range" or any(
        isinstance(part, (cst.Break, cst.Continue, cst.Return)) for part in own_nodes(node.body)
    ):
        return None
    args = [arg.value for arg in call.args if arg.keyword is None and not arg.star]
    if len(args) != len([arg for arg in call.args if arg.keyword is None]) or not 1 <= len(args) <= 3:
        return None
    if len(args) == 3:
        tiles = {
            normal(part.args[1].value)
            for part in walk(kernel.node.body)
            if isinstance(part, cst.Call) and called(part) == "arange" and len(part.args) == 2
        }
        literal = isinstance(args[2], cst.Integer) and args[2].evaluated_value > 0
        if not literal and normal(args[2]) not in tiles:
            return None
    start = normal(args[0]) if len(args) > 1 else "0"
    return f"{start} < {normal(args[1] if len(args) > 1 else args[0])}"


RULE = Rule(
    "hoist",
    "vectorization",
    "what is the same in each round of a loop is computed before it, loads too",
    "a for loop with an expression that is the same in every pass; for loads, no write in the loop",
    apply,
)
