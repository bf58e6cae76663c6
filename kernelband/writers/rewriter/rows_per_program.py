"""Rule family `rows_per_program`: a program that handled one row of a matrix handles several, one after the other.

Owns: which axis of the grid counts rows (its id is multiplied by a stride and by no tile size), the loop over the rows
of a program with its bound, and the shorter grid. What is done for a row stays the parent's code.
"""

from __future__ import annotations

import libcst as cst

from kernelband.writers.rewriter.kernels import Kernel, Source, bindings, called, names_in, walk
from kernelband.writers.rewriter.looped import Declined, looped, needs_tensor
from kernelband.writers.rewriter.programs import (
    Plan,
    plan,
    relaunched,
    require,
    spelled_language,
    with_parameters,
)
from kernelband.writers.rewriter.rule import Child, Rule
from kernelband.writers.rewriter.tiles import program_axis, program_names, roles
from kernelband.writers.rewriter.tree import Change

_ROWS = (4, 2, 8)


def apply(source: Source) -> tuple[list[Child], list[str]]:
    """Children, one per kernel and number of rows, and words for each kernel without."""
    children: list[Child] = []
    words: list[str] = []
    for kernel in source.kernels.values():
        try:
            work = plan(source, kernel)
            axis = _row_axis(source, kernel, len(work.sites[0].grid.sizes))
            for site in work.sites:
                require(source, site.launch, "triton")
            along = "" if len(work.sites[0].grid.sizes) == 1 else f" of axis {axis}"
            made = [(f"{rows} rows{along} a program in {kernel.name}", _child(source, work, axis, rows))
                    for rows in _ROWS]
        except Declined as why:
            words.append(f"{kernel.name} {why}")
            continue
        children += made
    return children, words


def _row_axis(source: Source, kernel: Kernel, axes: int) -> int:
    """The first axis whose program id is an index of rows in pointer arithmetic."""
    local = bindings(kernel.node)
    tiled = {name for name, role in roles(source, kernel).items() if role.shape}
    if any(name.endswith("_first") and name.startswith("row") for name in local):
        raise Declined("handles several rows a program already")
    for axis in range(axes):
        own = _holders(kernel, str(axis))
        if own is None:
            continue
        products = []
        for node in walk(kernel.node.body):
            if not isinstance(node, cst.BinaryOperation) or not isinstance(node.operator, cst.Multiply):
                continue
            if _reads(node.left, own, axis) != _reads(node.right, own, axis):
                products.append(node.right if _reads(node.left, own, axis) else node.left)
        if not products or any(names_in(factor) & tiled for factor in products):
            continue
        if any(not isinstance(factor, cst.Integer) for factor in products):
            return axis
    raise Declined("has no program id that is multiplied by a stride only, as an index of rows is")


def _holders(kernel: Kernel, axis: str) -> set[str] | None:
    """Names computed from the program id of this axis, None if the kernel does not ask for it."""
    if not any(called(node) == "program_id" and program_axis(node) == axis for node in walk(kernel.node.body)):
        return None
    return program_names(kernel, axis)


def _reads(node: cst.CSTNode, names: set[str], axis: int) -> bool:
    return bool(names_in(node) & names) or any(
        called(inner) == "program_id" and program_axis(inner) == str(axis) for inner in walk(node)
    )


def _child(source: Source, work: Plan, axis: int, rows: int) -> str:
    kernel, language = work.kernel, spelled_language(work.kernel)
    count, first, row = (source.fresh(name) for name in ("rows_total", "row_first", "row_index"))
    before = [f"{first} = {language}.program_id({axis}) * {rows}"]
    if not work.argument:
        before.append(f"{count} = {work.inside[axis]}")
    header = f"for {row} in range({first}, min({first} + {rows}, {count})):"
    # Triton's interpreter counts loops in Python's integers, which have no `.to`.
    text = f"{language}.cast({row}, {language}.int32)" if needs_tensor(kernel) else row
    changes: dict[cst.CSTNode, Change] = {}
    changes.update(looped(source, kernel, before, header, {str(axis): text}, ()))
    if work.argument:
        changes.update(with_parameters(source, work, [count]))
    for site in work.sites:
        sizes = list(site.grid.sizes) if not work.argument else list(work.counts[site.launch.call])
        whole, sizes[axis] = sizes[axis], f"triton.cdiv({sizes[axis] if not work.argument else count}, {rows})"
        head = f"lambda {site.grid.meta}: " if not work.argument and site.grid.meta is not None else ""
        grid = f"{head}({', '.join(sizes)},)" if len(sizes) == 1 else f"{head}({', '.join(sizes)})"
        if work.argument:
            changes.update(relaunched(source, site, [f"{count} = {whole}"], grid, {count: count}))
        else:
            changes.update(relaunched(source, site, [], grid, {}))
    return source.edit(changes)


RULE = Rule(
    "rows_per_program",
    "tiling",
    "a program takes 2, 4 or 8 rows, one after the other",
    "a program id that is an index of rows in pointer arithmetic, and a grid that can be counted",
    apply,
)
