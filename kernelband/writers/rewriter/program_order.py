"""Rule family `program_order`: walk the grid in groups, so that neighbouring programs share what the cache holds.

Owns: the regrouping of two program ids (a 2-D grid, or one id split by // and %), and the group size of kernels that
are grouped already. The inserted lines permute the programs of the grid, so each tile is still computed exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from kernelband.writers.rewriter.kernels import (
    Kernel,
    Source,
    argument,
    bindings,
    called,
    dotted,
    names_in,
    normal,
    walk,
)
from kernelband.writers.rewriter.rule import Child, Rule
from kernelband.writers.rewriter.tiles import has_dot, program_axis
from kernelband.writers.rewriter.tunables import group_sizes

_GROUPS = (8, 4, 16)
_REGROUPS = (8, 4, 16, 1)


@dataclass(frozen=True)
class Ids:
    """Two program ids of a kernel, and what to write to regroup them (source text).

    `grouped` is the id that stays within a group while `other` runs over its whole range; the counts are the sizes of
    the grid along both. `linear` is a program's place in launch order. `guard` limits the change to whole rows.
    """

    grouped: str
    other: str
    linear: str
    grouped_count: str
    other_count: str
    guard: str | None
    after: cst.CSTNode  # the statement line behind which both are known


def apply(source: Source) -> tuple[list[Child], list[str]]:
    """Children with a grouped program order or another group size, and words for each kernel without."""
    children: list[Child] = []
    words: list[str] = []
    for kernel in source.kernels.values():
        sizes = group_sizes(source, kernel)
        if sizes:
            for name, knob in sizes:
                for size in _REGROUPS:
                    if size != knob.value:
                        child = source.edit({knob.node: cst.Integer(str(size))})
                        children.append((f"{name} {knob.value} -> {size} in {kernel.name}", child))
            continue
        ids = _ids(source, kernel)
        if isinstance(ids, str):
            words.append(f"{kernel.name}: {ids}")
            continue
        for size in _GROUPS:
            lines = [ids.after, *_lines(source, kernel, ids, size)]
            text = f"programs of {kernel.name} in groups of {size} along {ids.grouped}"
            children.append((text, source.edit({ids.after: cst.FlattenSentinel(lines)})))
    return children, words


def _ids(source: Source, kernel: Kernel) -> Ids | str:
    """The two program ids to regroup, or why not."""
    local = bindings(kernel.node)
    asked = [node for part in source.reach(kernel) for node in walk(part.node.body) if called(node) == "program_id"]
    own = {node for node in walk(kernel.node.body) if called(node) == "program_id"}
    if not own:
        return "asks for no program id"
    if any(node not in own for node in asked):
        return "a helper asks for the program id itself"
    if any(called(node) == "num_programs" for part in source.reach(kernel) for node in walk(part.node.body)):
        return "uses tl.num_programs for something else"
    if "min" in local:
        return "a local name hides min"
    if _order_matters(source, kernel):
        return "locks or atomics may depend on the order of programs"
    axes = [program_axis(node) for node in own]
    if None in axes or axes.count("0") > 1 or axes.count("1") > 1:
        return "a program id is asked for more than once or for an axis that is not a literal"
    named = {axis: _named(local, axis) for axis in ("0", "1")}
    if "1" not in axes:
        return _split_ids(source, kernel, named["0"])
    fast, slow = named["0"], named["1"]
    if fast is None or slow is None:
        return "the two program ids are not each assigned once to a name"
    lines = _top_lines(kernel)
    at = {name: [i for i, line in enumerate(lines) if _holds(line, local[name][0].node)] for name in (fast, slow)}
    if not at[fast] or not at[slow]:
        return "the program ids are assigned under a condition"
    early, late = (fast, slow) if at[fast] < at[slow] else (slow, fast)
    first, last = at[early][0], at[late][0]
    if any(early in names_in(line) for line in lines[first + 1 : last + 1]):
        return f"{early} is used before both program ids are known"
    if not _pays(source, kernel, fast, slow):
        return "no two programs read the same data in a way that their order could serve (no tl.dot in a loop)"
    return Ids(
        grouped=fast,
        other=slow,
        linear=f"{slow} * tl.num_programs(0) + {fast}",
        grouped_count="tl.num_programs(0)",
        other_count="tl.num_programs(1)",
        guard=None,
        after=lines[last],
    )


def _split_ids(source: Source, kernel: Kernel, pid: str | None) -> Ids | str:
    """The ids `pid // count` and `pid % count` of a 1-D grid."""
    local = bindings(kernel.node)
    if pid is None:
        return "the program id is not assigned once to a name"
    lines = _top_lines(kernel)
    parts: dict[type, tuple[str, cst.BaseExpression, int]] = {}
    uses = 0
    for index, line in enumerate(lines):
        uses += sum(1 for node in walk(line) if isinstance(node, cst.Name) and node.value == pid)
        for name, all_ in local.items():
            value = all_[0].value
            if len(all_) != 1 or not _holds(line, all_[0].node) or not isinstance(value, cst.BinaryOperation):
                continue
            divides = isinstance(value.operator, (cst.FloorDivide, cst.Modulo))
            if divides and isinstance(value.left, cst.Name) and value.left.value == pid:
                parts[type(value.operator)] = (name, value.right, index)
    if len(parts) < 2:
        return "has a 1-D grid that is not split into two program ids with // and %"
    if uses != 3:
        return f"{pid} is used for more than its two parts"
    slow, divisor, at_slow = parts[cst.FloorDivide]
    fast, modulus, at_fast = parts[cst.Modulo]
    count = normal(divisor)
    if count != normal(modulus):
        return f"{slow} and {fast} divide {pid} by different counts"
    first, last = min(at_slow, at_fast), max(at_slow, at_fast)
    early = slow if at_slow < at_fast else fast
    if any(early in names_in(line) for line in lines[first + 1 : last + 1]):
        return f"{early} is used before both program ids are known"
    if any(name in local and len(local[name]) > 1 for name in names_in(divisor)):
        return f"{count} is assigned more than once"
    if not _pays(source, kernel, slow, fast):
        return "no two programs read the same data in a way that their order could serve (no tl.dot in a loop)"
    rows = f"tl.num_programs(0) // ({count})" if not count.isidentifier() else f"tl.num_programs(0) // {count}"
    # A grid that is not a whole number of rows keeps its last programs where they are.
    return Ids(slow, fast, pid, rows, count, f"{pid} < {{rows}} * {{columns}}", lines[last])


def _lines(source: Source, kernel: Kernel, ids: Ids, size: int) -> list[cst.BaseStatement]:
    """The statements that recompute the two ids, group by group."""
    fresh = source.fresh
    group, rows, columns = fresh("GROUP_ROWS"), fresh("group_rows_total"), fresh("group_columns")
    linear, width = fresh("linear_pid"), fresh("group_width")
    first, height = fresh("group_first"), fresh("group_height")
    head = [
        f"{group}: tl.constexpr = {size}",
        f"{rows} = {ids.grouped_count}",
        f"{columns} = {ids.other_count}",
        f"{linear} = {ids.linear}",
    ]
    tail = [
        f"{width} = {group} * {columns}",
        f"{first} = ({linear} // {width}) * {group}",
        f"{height} = min({rows} - {first}, {group})",
        f"{ids.grouped} = {first} + ({linear} % {width}) % {height}",
        f"{ids.other} = ({linear} % {width}) // {height}",
    ]
    texts = head + tail
    if ids.guard is not None:
        indented = "".join(f"{source.module.default_indent}{line}\n" for line in tail)
        texts = [*head, f"if {ids.guard.format(rows=rows, columns=columns)}:\n{indented}"]
    language = _language(kernel)
    return [
        cst.parse_statement(text.replace("tl.", f"{language}."), source.module.config_for_parsing) for text in texts
    ]


def _language(kernel: Kernel) -> str:
    """How this kernel spells triton.language, read off its tl.program_id."""
    for node in walk(kernel.node.body):
        if isinstance(node, cst.Call) and called(node) == "program_id" and isinstance(node.func, cst.Attribute):
            return dotted(node.func.value)
    return "tl"


def _named(local: dict, axis: str) -> str | None:
    """The name that holds the program id of an axis and nothing else."""
    for name, all_ in local.items():
        if len(all_) == 1 and all_[0].kind == "assign":
            value = all_[0].value
            if called(value) == "to" and isinstance(value.func, cst.Attribute):  # tl.program_id(0).to(tl.int64)
                value = value.func.value
            if called(value) == "program_id" and program_axis(value) == axis:
                return name
    return None


def _top_lines(kernel: Kernel) -> list[cst.CSTNode]:
    return list(kernel.node.body.body) if isinstance(kernel.node.body, cst.IndentedBlock) else []


def _holds(line: cst.CSTNode, statement: cst.CSTNode) -> bool:
    return isinstance(line, cst.SimpleStatementLine) and statement in line.body


def _order_matters(source: Source, kernel: Kernel) -> bool:
    """Whether a lock, or the result of an atomic, may depend on which program comes first."""
    for part in source.reach(kernel):
        plain = {node.value for node in walk(part.node.body) if isinstance(node, cst.Expr)}
        for node in walk(part.node.body):
            name = called(node)
            if name in ("atomic_cas", "atomic_xchg") or (name.startswith("atomic_") and node not in plain):
                return True
    return False


def _pays(source: Source, kernel: Kernel, first: str, second: str) -> bool:
    """Whether programs share data along both ids: a product in a loop, or loads that follow one id only."""
    loops = [node for part in source.reach(kernel) for node in walk(part.node.body) if isinstance(node, cst.For)]
    if loops and has_dot(source, kernel):
        return True
    depends = {first: {first}, second: {second}}
    plain = [(name, b.value) for name, all_ in bindings(kernel.node).items() for b in all_ if b.value is not None]
    for known in depends.values():
        while new := {name for name, value in plain if name not in known and names_in(value) & known}:
            known |= new
    kinds = set()
    for node in walk(kernel.node.body):
        pointer = argument(node, 0, "pointer") if isinstance(node, cst.Call) and called(node) == "load" else None
        if pointer is not None:
            used = names_in(pointer)
            kinds.add((bool(used & depends[first]), bool(used & depends[second])))
    return {(True, False), (False, True)} <= kinds


RULE = Rule(
    "program_order",
    "reordering",
    "programs walk the grid in groups, or in groups of another size",
    "two program ids whose programs share data, or a group size that one integer literal fixes",
    apply,
)
