"""Rule family `loop_range`: how the compiler treats a loop: how many rounds of loads it keeps in flight, how far it
unrolls, whether it flattens a nest.

Owns: the iterator of a `for` in a kernel. Loads are only let ahead where no round can read what an earlier one
wrote: a loop with atomics, barriers or helpers that store, or that reads and writes through one pointer, stays as it
is. `tl.static_range` replaces only few rounds between constants, and only where a constant behaves like a number.
"""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from kernelband.writers.rewriter.dataflow import RANGES, Flow, language
from kernelband.writers.rewriter.kernels import Kernel, Knob, Source, called, dotted, names_in, normal, own_nodes, walk
from kernelband.writers.rewriter.launch_params import add_keyword
from kernelband.writers.rewriter.rule import Child, Rule
from kernelband.writers.rewriter.tree import Change, children

_STAGES, _UNROLL = (2, 3, 4), (2, 4)
_MOST_ROUNDS = 16
_DIVISIONS = (cst.FloorDivide, cst.Modulo, cst.Divide)
_ORDERED = ("debug_barrier", "inline_asm_elementwise")


@dataclass(frozen=True, eq=False)
class Plan:
    """One loop, how to name it, and which changes are allowed: keyword and values, or the words against it."""

    node: cst.For
    label: str
    options: tuple[tuple[str, tuple[int | bool, ...]], ...]


def apply(source: Source) -> tuple[list[Child], list[str]]:
    """Children with another iterator for one loop or for all of a kernel, and words for loops that stay."""
    found: list[Child] = []
    words: list[str] = []
    name = language(source)
    if name is None or "range" in source.bindings(source.module):
        return [], ["the module gives triton.language no name, or range another meaning"]
    for kernel in source.kernels.values():
        flow = Flow(source, kernel)
        plans = _plans(source, kernel, flow, name, words)
        for plan in plans:
            for option, values in plan.options:
                for value in values:
                    text = f"{option}={value} for {plan.label} in {kernel.name}"
                    found.append((text, source.edit(_with(plan, name, option, value))))
        for option, values in (("num_stages", _STAGES), ("loop_unroll_factor", _UNROLL)):
            able = [plan for plan in plans if option in dict(plan.options)]
            for value in values if len(able) > 1 else ():
                changes: dict[cst.CSTNode, Change] = {}
                for plan in able:
                    changes |= _with(plan, name, option, value)
                found.append((f"{option}={value} for {len(able)} loops in {kernel.name}", source.edit(changes)))
        for node, label in _loops(kernel):
            rounds = _few_rounds(source, kernel, flow, node)
            if isinstance(rounds, int):
                text = f"static_range of {rounds} rounds for {label} in {kernel.name}"
                static = cst.parse_expression(f"{name}.static_range")
                found.append((text, source.edit({node.iter.func: static})))  # type: ignore[attr-defined]
            elif rounds:
                words.append(f"{kernel.name}: {label} {rounds}")
        if not any(isinstance(node, cst.For) for node in walk(kernel.node.body)):
            words.append(f"{kernel.name} has no for loop")
    return found, words


def _loops(kernel: Kernel) -> list[tuple[cst.For, str]]:
    """The loops of a kernel over a range, each with how to name it."""
    nodes = [node for node in own_nodes(kernel.node) if isinstance(node, cst.For) and called(node.iter) == "range"]
    total: dict[str, int] = {}
    for node in nodes:
        total[normal(node.target)] = total.get(normal(node.target), 0) + 1
    seen: dict[str, int] = {}
    found = []
    for node in nodes:
        target = normal(node.target)
        seen[target] = seen.get(target, 0) + 1
        which = f" ({seen[target]} of {total[target]})" if total[target] > 1 else ""
        found.append((node, f"the loop over {target}{which}"))
    return found


def _plans(source: Source, kernel: Kernel, flow: Flow, name: str, words: list[str]) -> list[Plan]:
    """What may be said to the compiler about each loop of a kernel."""
    found = []
    for node, label in _loops(kernel):
        assert isinstance(node.iter, cst.Call)
        if dotted(node.iter.func) not in ("range", f"{name}.range") or "range" in flow.writes:
            words.append(f"{kernel.name}: {label} does not run over a range that is known")
            continue
        if any(arg.star for arg in node.iter.args) or not node.iter.args:
            words.append(f"{kernel.name}: {label} has a range with hidden arguments")
            continue
        if any(isinstance(part, (cst.Break, cst.Continue, cst.Return)) for part in own_nodes(node.body)):
            words.append(f"{kernel.name}: {label} leaves early")
            continue
        given = {arg.keyword.value: arg.value for arg in node.iter.args if arg.keyword is not None}
        inner = [part for part in walk(node.body) if isinstance(part, (cst.For, cst.While))]
        options: list[tuple[str, tuple[int | bool, ...]]] = []
        obstacle = _order_matters(source, kernel, flow, node)
        if inner:
            dynamic = len(inner) == 1 and isinstance(inner[0], cst.For) and called(inner[0].iter) == "range"
            if not dynamic:
                words.append(f"{kernel.name}: {label} holds no single loop that it could be flattened with")
            elif obstacle:
                words.append(f"{kernel.name}: {label} {obstacle}")
            elif "flatten" not in given:
                options.append(("flatten", (True,)))
        else:
            if obstacle:
                words.append(f"{kernel.name}: {label} {obstacle}")
            elif not any(called(part) == "load" for part in _reached(source, node.body)):
                words.append(f"{kernel.name}: {label} loads nothing that could come ahead")
            elif "loop_unroll_factor" not in given and _free(given, "num_stages"):
                old = given.get("num_stages")
                stages = tuple(value for value in _STAGES if old is None or normal(old) != str(value))
                options.append(("num_stages", stages))
            if "num_stages" not in given and _free(given, "loop_unroll_factor"):
                old = given.get("loop_unroll_factor")
                factors = tuple(value for value in _UNROLL if old is None or normal(old) != str(value))
                options.append(("loop_unroll_factor", factors))
        if options:
            found.append(Plan(node, label, tuple(options)))
    return found


def _free(given: dict[str, cst.BaseExpression], option: str) -> bool:
    """Whether an option is not given, or as a literal."""
    return option not in given or isinstance(given[option], cst.Integer)


def _reached(source: Source, body: cst.CSTNode) -> list[cst.CSTNode]:
    """The nodes of a body and of all jit helpers that it calls."""
    found = list(walk(body))
    names = {called(node) for node in found if called(node) in source.kernels}
    for other in {part for name in names for part in source.reach(source.kernels[name])}:
        found += walk(other.node.body)
    return found


def _order_matters(source: Source, kernel: Kernel, flow: Flow, loop: cst.For) -> str | None:
    """Why loads of a later round must not come before stores of an earlier one, if so."""
    own = set(walk(loop.body))
    reads: set[str | None] = set()
    written: set[str | None] = set()
    for node in _reached(source, loop.body):
        what = called(node)
        if not isinstance(node, cst.Call):
            continue
        if what.startswith("atomic_") or what in _ORDERED:
            return f"has {what}, so its rounds stay in order"
        if what in ("load", "store") and node.args:
            root = flow.root(node.args[0].value) if node in own else None
            (reads if what == "load" else written).add(root)
        elif (what in ("gather", "scatter") and isinstance(node.func, cst.Attribute)) or what == "store":
            (reads if what == "gather" else written).add(None)
    if not written or not reads:
        return None
    if None in reads or None in written:
        return "loads and stores through pointers that cannot be told apart"
    both = {root for root in reads & written if root is not None}
    if both:
        return f"reads and writes {min(both)}, so its rounds stay in order"
    for launch in source.launches:
        if launch.kernel is not kernel:
            continue
        given = {param: normal(arg.value) for param, arg in launch.args.items() if param in reads | written}
        clash = {given.get(param or "") for param in reads} & {given[param] for param in written if param in given}
        if clash:
            return f"reads and writes {clash.pop()}, so its rounds stay in order"
    return None


def _with(plan: Plan, name: str, option: str, value: int | bool) -> dict[cst.CSTNode, Change]:
    """The change that gives the loop's range one option."""
    call = plan.node.iter
    assert isinstance(call, cst.Call)
    literal = cst.Name("True") if value is True else cst.Integer(str(value))
    for arg in call.args:
        if arg.keyword is not None and arg.keyword.value == option:
            return {arg.value: literal}
    new = call.with_changes(func=cst.parse_expression(f"{name}.range"))
    return {call: add_keyword(new, option, literal)}


def _few_rounds(source: Source, kernel: Kernel, flow: Flow, node: cst.For) -> int | str | None:
    """How many rounds a loop between constants makes; words if it could not be static, None if it is not constant."""
    assert isinstance(node.iter, cst.Call)
    args = node.iter.args
    if any(arg.keyword is not None or arg.star for arg in args) or not 1 <= len(args) <= 3:
        return None
    if dotted(node.iter.func) != "range" or "range" in flow.writes or not isinstance(node.target, cst.Name):
        return None
    used = set().union(*(names_in(arg.value) for arg in args))
    if not used <= kernel.constexprs or used & flow.writes.keys():
        return None
    variants: list[dict[str, int]] = [{}]
    if used:
        variants = []
        for launch in source.launches:
            if launch.kernel is kernel:
                knobs = {param: source.resolve(launch, param) for param in used}
                if not all(isinstance(knob, Knob) for knob in knobs.values()):
                    return "runs between constants whose values cannot be told"
                variants.append({param: knob.value for param, knob in knobs.items() if isinstance(knob, Knob)})
        if not variants or flow.is_helper:
            return "runs between constants whose values cannot be told"
    counts = []
    for values in variants:
        bounds = [_value(arg.value, values) for arg in args]
        if any(bound is None for bound in bounds):
            return None
        whole = [bound for bound in bounds if bound is not None]
        if (len(whole) == 3 and whole[2] <= 0) or (len(whole) > 1 and whole[0] < 0):
            return "does not count upwards from zero or more"
        counts.append(len(range(*whole)))
    if max(counts) > _MOST_ROUNDS or max(counts) < 2:
        return f"makes {max(counts)} rounds, which is not worth unrolling whole"
    if any(isinstance(part, (cst.Break, cst.Continue, cst.Return)) for part in own_nodes(node.body)):
        return "leaves early"
    return _like_a_number(source, flow, node) or max(counts)


def _value(node: cst.CSTNode, values: dict[str, int]) -> int | None:
    """The value of an expression of constants, None if it takes more than the four rules of whole numbers."""
    if isinstance(node, cst.Integer):
        return node.evaluated_value
    if isinstance(node, cst.Name):
        return values.get(node.value)
    if isinstance(node, cst.BinaryOperation):
        left, right = _value(node.left, values), _value(node.right, values)
        if left is None or right is None:
            return None
        if isinstance(node.operator, cst.Add):
            return left + right
        if isinstance(node.operator, cst.Subtract):
            return left - right
        if isinstance(node.operator, cst.Multiply):
            return left * right
        if isinstance(node.operator, cst.FloorDivide) and right > 0 and left >= 0:
            return left // right
    return None


def _like_a_number(source: Source, flow: Flow, loop: cst.For) -> str | None:
    """Why a constant cannot stand for the loop's variable, if it cannot."""
    assert isinstance(loop.target, cst.Name)
    variable = loop.target.value
    outside = [write for write in flow.writes[variable] if write.node is not loop]
    if outside:
        return f"shares {variable} with other assignments"
    stack: list[cst.CSTNode] = [loop.body]
    while stack:
        node = stack.pop()
        if isinstance(node, cst.Attribute) and variable in names_in(node.value):
            return f"asks {variable} for an attribute"
        if isinstance(node, cst.Call) and any(
            isinstance(arg.value, cst.Name) and arg.value.value == variable for arg in node.args
        ):
            return f"passes {variable} to {called(node) or 'a function'}, which may need a number and no constant"
        if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, _DIVISIONS):
            sides = [side for side in (node.left, node.right) if variable in names_in(side)]
            if any(not isinstance(side, cst.Name) for side in sides) or (
                isinstance(node.operator, cst.Divide) and sides
            ):
                return f"divides by way of {variable}, which rounds otherwise among constants"
        stack.extend(children(node))
    if any(isinstance(part, (cst.For, cst.While)) and part is not loop for part in walk(loop.body)):
        return "holds a loop of its own"
    if any(called(part) in RANGES and variable in names_in(part) for part in walk(loop.body)):
        return f"bounds another loop by {variable}"
    return None


RULE = Rule(
    "loop_range",
    "pipeline",
    "`num_stages`, `loop_unroll_factor` or `flatten` of a loop by `tl.range`, few constant rounds by `tl.static_range`",
    "a for loop over a range whose rounds do not read what earlier ones wrote",
    apply,
)
