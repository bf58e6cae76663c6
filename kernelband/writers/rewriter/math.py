"""Rule family `math`: the same mathematics with cheaper instructions.

Owns: exp by exp2, one reciprocal and products in place of divisions, rsqrt in place of a division by a
square root, a product in place of a power of two. Constants are written to float64's precision and take the type of
what they multiply. A division changes only where the types say that the reciprocal is as exact as the quotient was:
results differ by the rounding of one more operation. (Below 2**-126 a reciprocal overflows, as Triton's own division,
which is approximate there too, may.)
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from kernelband.writers.rewriter.dataflow import Flow, Loop, language
from kernelband.writers.rewriter.kernels import Kernel, Source, called, code, dotted, normal, walk
from kernelband.writers.rewriter.rule import Child, Rule
from kernelband.writers.rewriter.tree import Change, children, rebuild

_LOG2_E = "1.4426950408889634"
_ROUNDED = "{} in {} goes into an integer, where the last bit decides which"
_TO_INTEGER = {"floor", "ceil", "round", "rint", "nearbyint", "trunc", "llrint", "argmax", "argmin"}
Changes = dict[cst.CSTNode, Change]


def apply(source: Source) -> tuple[list[Child], list[str]]:
    """Children, one a kernel and kind of replacement (and one a divisor), and words about what has to stay."""
    found: list[Child] = []
    words: list[str] = []
    name = language(source)
    for kernel in source.kernels.values():
        if name is None:
            words.append("the module gives triton.language no name")
            continue
        flow = Flow(source, kernel)
        before = len(found)
        for text, changes in (
            ("exp -> exp2", _exponentials(kernel, flow, name, words)),
            ("pow(x, 2) -> x * x", _squares(source, kernel, flow)),
            ("division by a square root -> rsqrt", _roots(kernel, flow, name, words)),
        ):
            if changes and _rounds(source, kernel, flow, set(changes)):
                words.append(_ROUNDED.format(text, kernel.name))
            elif changes:
                found.append((f"{text} in {kernel.name}", source.edit(changes)))
        found += _reciprocals(source, kernel, flow, words)
        if len(found) == before:
            words.append(f"{kernel.name} has no exp, power or division that a cheaper one can replace")
    return found, words


def _functions(kernel: Kernel, name: str, function: str) -> Iterator[cst.Call]:
    """Calls of `tl.FUNCTION` or `tl.math.FUNCTION` with one argument. They take float32 and float64 only."""
    for node in walk(kernel.node.body):
        if not isinstance(node, cst.Call) or len(node.args) != 1:
            continue
        plain = node.args[0].keyword is None and not node.args[0].star
        if plain and dotted(node.func) in (f"{name}.{function}", f"{name}.math.{function}"):
            yield node


def _exponentials(kernel: Kernel, flow: Flow, name: str, words: list[str]) -> Changes:
    """Triton's exp of float32 is this product and exp2, but for results below 2**-126, which become zero.

    In float64 the rounding of the product would be amplified by the size of the argument.
    """

    def change(node: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(node, cst.Call)
        product = _binary(node.args[0].value, cst.Multiply, cst.Float(_LOG2_E), bare=True)
        return _renamed(node, "exp2").with_changes(args=[node.args[0].with_changes(value=product)])

    found: Changes = {}
    for call in _functions(kernel, name, "exp"):
        if flow.wider(call.args[0].value):
            words.append(f"{_short(call)} in {kernel.name} may be wider than float32, where exp2 is less exact")
        else:
            found[call] = change
    return found


def _renamed(call: cst.Call, function: str) -> cst.Call:
    assert isinstance(call.func, cst.Attribute)
    return call.with_changes(func=call.func.with_changes(attr=cst.Name(function)))


def _squares(source: Source, kernel: Kernel, flow: Flow) -> Changes:
    """`pow(x, 2)` of a plain name; Triton has no `**` for tiles."""
    found: Changes = {}
    for node in walk(kernel.node.body):
        if isinstance(node, cst.Call) and called(node) in ("pow", "_pow") and len(node.args) == 2:
            base, power = (arg.value for arg in node.args)
            plain = not any(arg.keyword or arg.star for arg in node.args) and called(node) not in source.kernels
            if plain and isinstance(base, cst.Name) and base.value in flow.writes and code(power) in ("2", "2.0"):
                found[node] = _binary(base, cst.Multiply, base)
    return found


def _roots(kernel: Kernel, flow: Flow, name: str, words: list[str]) -> Changes:
    """`x / tl.sqrt(y)`, also where the root has a name of its own that stands for nothing else."""
    found: Changes = {}
    roots = set(_functions(kernel, name, "sqrt"))
    for node in walk(kernel.node.body):
        if not (isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Divide)):
            continue
        if node.right not in roots:
            continue
        if not flow.fits(node.left, node.right):
            words.append(_too_wide(node, kernel))
            continue
        one = isinstance(node.left, (cst.Integer, cst.Float)) and code(node.left) in ("1", "1.0", "1.")

        def change(new: cst.CSTNode, one: bool = one) -> cst.CSTNode:
            assert isinstance(new, cst.BinaryOperation) and isinstance(new.right, cst.Call)
            inverse = _renamed(new.right, "rsqrt")
            return inverse if one else new.with_changes(operator=_spaced(cst.Multiply), right=inverse)

        found[node] = change
    return found


def _reciprocals(source: Source, kernel: Kernel, flow: Flow, words: list[str]) -> list[Child]:
    """Children in which the divisions by one small or loop-invariant value become products with its reciprocal."""
    groups: dict[tuple[str, cst.CSTNode], list[cst.BinaryOperation]] = {}
    divisors: dict[tuple[str, cst.CSTNode], cst.BaseExpression] = {}
    lines = {part: line for line in _lines(kernel.node.body) for part in _of_line(line)}
    for node in walk(kernel.node.body):
        if not (isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Divide)):
            continue
        divisor = node.right.value if _spread(node.right) else node.right  # type: ignore[attr-defined]
        if not isinstance(divisor, cst.Name) or divisor.value in kernel.constexprs or node not in lines:
            continue
        if divisor.value not in kernel.params and divisor.value not in flow.writes:
            continue
        if isinstance(node.left, (cst.Integer, cst.Float)) or (flow.small(node.left) and not flow.loops[node]):
            continue  # that is a reciprocal already, or a single division
        loop = _invariant(flow, node, divisor.value)
        if loop is None and not (flow.small(divisor) or _spread(node.right)):
            continue
        if not flow.fits(node.left, divisor):
            words.append(_too_wide(node, kernel))
            continue
        place = loop if loop is not None else lines[node]
        if place not in lines.values():
            continue
        groups.setdefault((divisor.value, place), []).append(node)
        divisors[divisor.value, place] = divisor
    found = []
    for (name, place), nodes in groups.items():
        if _rounds(source, kernel, flow, set(nodes)):
            words.append(_ROUNDED.format(f"the division by {name}", kernel.name))
            continue
        fresh = source.fresh(f"inv_{name}")
        statement = cst.parse_statement(f"{fresh} = 1.0 / {name}", source.module.config_for_parsing)
        products: Changes = {}
        for node in nodes:
            inverse = node.right.with_changes(value=cst.Name(fresh)) if _spread(node.right) else cst.Name(fresh)

            def change(new: cst.CSTNode, inverse: cst.BaseExpression = inverse) -> cst.CSTNode:
                return new.with_changes(operator=_spaced(cst.Multiply), right=inverse)

            products[node] = change
        new = rebuild(place, products)
        above = place.leading_lines  # type: ignore[attr-defined]
        both = [statement.with_changes(leading_lines=above), new.with_changes(leading_lines=[])]
        where = f"{len(nodes)} divisions" if len(nodes) > 1 else "the division"
        text = f"{where} by {name} -> products with one reciprocal in {kernel.name}"
        found.append((text, source.edit({place: cst.FlattenSentinel(both)})))
    return found


def _rounds(source: Source, kernel: Kernel, flow: Flow, changed: set[cst.CSTNode]) -> bool:
    """Whether a changed value goes into a rounding to integers, as when numbers are quantized.

    x / scale may be 127 exactly where x * (1 / scale) is just below, and then a cast makes 126 of it.
    """
    tainted: set[str] = set()

    def touched(node: cst.CSTNode) -> bool:
        return any(part in changed or (isinstance(part, cst.Name) and part.value in tainted) for part in walk(node))

    while new := {
        name
        for name, all_ in flow.writes.items()
        if name not in tainted and any(write.value is not None and touched(write.value) for write in all_)
    }:
        tainted |= new
    if any(_to_integer(node) and touched(node) for node in walk(kernel.node.body)):
        return True
    others = source.kernels.values() if flow.is_helper else source.reach(kernel)
    return any(_to_integer(node) for other in others if other is not kernel for node in walk(other.node.body))


def _to_integer(node: cst.CSTNode) -> bool:
    if called(node) in ("to", "cast") and isinstance(node, cst.Call):
        return any(dotted(arg.value).split(".")[-1].lstrip("u").startswith("int") for arg in node.args)
    return called(node) in _TO_INTEGER


def _spread(node: cst.CSTNode) -> bool:
    """Whether the expression is `name[:, None]` or the like."""
    return (
        isinstance(node, cst.Subscript)
        and isinstance(node.value, cst.Name)
        and all(
            normal(part.slice.value) == "None" if isinstance(part.slice, cst.Index) else code(part.slice).strip() == ":"
            for part in node.slice
        )
    )


def _lines(body: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Every statement of a kernel that stands on lines of its own."""
    for block in walk(body):
        if isinstance(block, cst.IndentedBlock):
            yield from block.body


def _of_line(line: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """What a statement holds, without the blocks below it (whose statements hold their own parts)."""
    yield line
    if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1:
        for part in children(line):
            yield from walk(part)


def _invariant(flow: Flow, node: cst.CSTNode, name: str) -> Loop | None:
    """The outermost loop around a division in which nothing writes the divisor, and that may run often."""
    writes = flow.writes.get(name, [])
    for loop in flow.loops[node]:
        inside = any(loop in flow.loops[write.node] or write.node is loop for write in writes)
        if not inside:
            return loop
    return None


def _binary(
    left: cst.BaseExpression, operator: type[cst.Multiply], right: cst.BaseExpression, bare: bool = False
) -> cst.BinaryOperation:
    """The product in brackets (or `bare`), its left side in brackets of its own unless it binds tightly anyway."""
    tight = isinstance(left, (cst.Name, cst.Call, cst.Attribute, cst.Subscript)) or left.lpar
    first = left if tight else left.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    brackets = {} if bare else {"lpar": [cst.LeftParen()], "rpar": [cst.RightParen()]}
    return cst.BinaryOperation(first, _spaced(operator), right, **brackets)  # type: ignore[arg-type]


def _spaced(operator: type[cst.Multiply]) -> cst.Multiply:
    return operator()


def _too_wide(node: cst.BinaryOperation, kernel: Kernel) -> str:
    return f"{_short(node)} in {kernel.name} may be wider than float32, and a reciprocal of the divisor is not"


def _short(node: cst.CSTNode) -> str:
    text = " ".join(code(node).split())
    return text if len(text) <= 60 else text[:57] + "..."


RULE = Rule(
    "math",
    "vectorization",
    "`exp2` for `exp`, one reciprocal for divisions, `rsqrt` for a division by a root, a product for a square",
    "an exp, power of two or division in a kernel that float32 is wide enough for and that no rounding to integers follows",
    apply,
)
