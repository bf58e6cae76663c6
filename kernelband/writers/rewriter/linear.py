"""Sums in a normal form, to see that a condition of a loop body is the bound of its loop.

Owns: the meaning of names inside one loop body, and the test "is this comparison true in every full block?". The test
only says yes when it can prove it from the text; anything it cannot read is taken as it stands.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping

import libcst as cst

from kernelband.writers.rewriter.kernels import Binding, as_ast, bindings, called, names_in, walk

Terms = Counter[tuple[str, ...]]
"""A sum: each term is a sorted tuple of factors, () for the constant, with an integer coefficient."""

# Hints to the compiler that do not change the value of their first argument.
_HINTS = {"multiple_of", "max_contiguous", "max_constancy", "assume"}
_TOO_DEEP = 12


class LoopScope:
    """What names mean inside one loop body of a kernel."""

    def __init__(self, kernel: cst.FunctionDef, loop: cst.For, variable: str) -> None:
        self.variable = variable
        self.outside: Mapping[str, list[Binding]] = bindings(kernel)
        inside = bindings(loop.body)
        # `v = tl.multiple_of(v, 16)` leaves the loop variable as it was.
        self.variable_changes = any(not _is_hint(binding, variable) for binding in inside.get(variable, []))
        self.inside = {name: found for name, found in inside.items() if name != variable}
        self._ready = _defined_first(loop, self.inside)
        self._earlier: set[cst.CSTNode] = set()
        for node in walk(kernel):
            if node is loop:
                break
            self._earlier.add(node)

    def definition(self, name: str) -> cst.CSTNode | None:
        """The expression a name stands for in the body, None if it has none or more than one."""
        if name in self.inside:
            return self.inside[name][0].value if name in self._ready else None
        found = self.outside.get(name)
        if name == self.variable or not found or len(found) > 1 or found[0].kind != "assign" or not found[0].value:
            return None
        if found[0].node not in self._earlier:
            return None
        # A definition before the loop holds in it only if nothing it is made of has changed since.
        for other in names_in(found[0].value):
            if other == name or other in self.inside or other == self.variable or len(self.outside.get(other, ())) > 1:
                return None
        return found[0].value

    def terms(self, node: ast.expr, depth: int = 0) -> Terms:
        """The expression as a sum, with names replaced by what they stand for."""
        if depth > _TOO_DEEP:
            return Counter({(ast.unparse(node),): 1})
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return Counter({(): node.value})
        if isinstance(node, ast.Name):
            value = self.definition(node.id)
            return self.terms(as_ast(value), depth + 1) if value is not None else Counter({(node.id,): 1})
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
            result = Counter(self.terms(node.left, depth + 1))
            sign = 1 if isinstance(node.op, ast.Add) else -1
            for term, count in self.terms(node.right, depth + 1).items():
                result[term] += sign * count
            return result
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            left, right = self.terms(node.left, depth + 1), self.terms(node.right, depth + 1)
            product: Terms = Counter()
            for a, count in left.items():
                for b, times in right.items():
                    product[tuple(sorted(a + b))] += count * times
            return product
        if isinstance(node, ast.Subscript) and _only_adds_axes(node.slice):
            return self.terms(node.value, depth + 1)
        if isinstance(node, ast.Call):
            name = _called(node)
            if name in _HINTS and node.args:
                return self.terms(node.args[0], depth + 1)
            # Call by its bare name, so that tl.arange and an imported arange agree; arguments in normal form.
            inner = ",".join(_spelled(self.terms(arg, depth + 1)) for arg in node.args)
            if name in ("arange", "cdiv") and not node.keywords:
                return Counter({(f"{name}({inner})",): 1})
        return Counter({(ast.unparse(node),): 1})

    def stale(self, terms: Terms) -> bool:
        """Whether a term names something that the loop body assigns, so that its value at the test is unknown."""
        for term in terms:
            for factor in term:
                names = {node.id for node in ast.walk(ast.parse(factor, mode="eval")) if isinstance(node, ast.Name)}
                if names & self.inside.keys() or (self.variable in names and factor != self.variable):
                    return True
        return False


def difference(left: Terms, right: Terms) -> Terms:
    """left - right without terms of count 0."""
    result = Counter(left)
    for term, count in right.items():
        result[term] -= count
    return Counter({term: count for term, count in result.items() if count})


def block_bound(scope: LoopScope, step: ast.expr, count: bool, bound: ast.expr) -> Terms:
    """The sum that is negative exactly for lanes within the bound: place of the lane minus the bound.

    `count` tells that the loop counts blocks (place = variable * step) rather than elements.
    """
    step_terms = scope.terms(step)
    variable: Terms = Counter({(scope.variable,): 1})
    if count:
        variable = Counter({tuple(sorted((scope.variable, *term))): times for term, times in step_terms.items()})
    place = Counter(variable)
    place[(f"arange(0,{_spelled(step_terms)})",)] += 1
    return difference(place, scope.terms(bound))


def holds_in_full_blocks(scope: LoopScope, test: cst.Comparison, wanted: Terms) -> bool:
    """Whether a comparison says "lane < bound" with lane and bound as in `wanted`."""
    if len(test.comparisons) != 1:
        return False
    target = test.comparisons[0]
    left, right = scope.terms(as_ast(test.left)), scope.terms(as_ast(target.comparator))
    if isinstance(target.operator, cst.GreaterThan):
        left, right = right, left
    elif not isinstance(target.operator, cst.LessThan):
        return False
    found = difference(left, right)
    return found == wanted and not scope.stale(found)


def _spelled(terms: Terms) -> str:
    parts = [f"{count}*{'*'.join(term)}" if term else str(count) for term, count in sorted(terms.items()) if count]
    return "+".join(parts) or "0"


def _called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _only_adds_axes(node: ast.expr) -> bool:
    parts = node.elts if isinstance(node, ast.Tuple) else [node]
    return all(
        (isinstance(part, ast.Constant) and part.value is None)
        or (isinstance(part, ast.Slice) and part.lower is None and part.upper is None and part.step is None)
        for part in parts
    )


def _is_hint(binding: Binding, name: str) -> bool:
    value = binding.value
    return (
        isinstance(value, cst.Call)
        and called(value) in _HINTS
        and bool(value.args)
        and isinstance(value.args[0].value, cst.Name)
        and value.args[0].value.value == name
    )


def _defined_first(loop: cst.For, inside: Mapping[str, list[Binding]]) -> set[str]:
    """Names that each pass of the loop assigns exactly once, unconditionally, before it reads them."""
    lines = list(loop.body.body)
    ready: set[str] = set()
    for name, found in inside.items():
        if len(found) != 1 or found[0].kind != "assign" or found[0].value is None:
            continue
        for line in lines:
            if isinstance(line, cst.SimpleStatementLine) and found[0].node in line.body:
                if name not in names_in(found[0].value):
                    ready.add(name)
                break
            if name in names_in(line):
                break
    return ready
