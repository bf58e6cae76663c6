"""Rule family `persistent`: as many programs as the device runs at once, each striding over the tiles.

Owns: the grid of min(tiles, SMs x k), the loop over tiles, and the way from a tile's number back to the program ids
of a grid of two or three axes (axis 0 fastest, as the device starts them). Each tile is still computed exactly once,
by code that is the parent's. It declines kernels in which one program may wait for another.
"""

from __future__ import annotations

import libcst as cst

from kernelband.writers.rewriter.kernels import Kernel, Source
from kernelband.writers.rewriter.looped import Declined, looped, needs_tensor
from kernelband.writers.rewriter.programs import (
    Plan,
    Site,
    plan,
    product,
    relaunched,
    require,
    spelled_language,
    with_parameters,
)
from kernelband.writers.rewriter.rule import Child, Rule
from kernelband.writers.rewriter.tree import Change

_PER_SM = (4, 1, 8, 2)
_SMS = "torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count"


def apply(source: Source) -> tuple[list[Child], list[str]]:
    """Children, one per kernel and number of programs per SM, and words for each kernel without."""
    children: list[Child] = []
    words: list[str] = []
    for kernel in source.kernels.values():
        try:
            work = plan(source, kernel)
            for site in work.sites:
                require(source, site.launch, "torch")
                if any("min" in source.bindings(scope) for scope in site.launch.scopes):
                    raise Declined("is launched where another name hides min")
            made = [(f"{kernel.name} strides over its tiles with {each} programs an SM", _child(source, work, each))
                    for each in _PER_SM]
        except Declined as why:
            words.append(f"{kernel.name} {why}")
            continue
        children += made
    return children, words


def _child(source: Source, work: Plan, each: int) -> str:
    kernel, language = work.kernel, spelled_language(work.kernel)
    axes = len(work.sites[0].grid.sizes)
    total, tile = source.fresh("n_tiles"), source.fresh("tile")
    # The size of the last axis is not needed to take a tile's number apart.
    names = [source.fresh(f"grid_{axis}") for axis in range(axes - 1)]
    before = []
    if not work.argument:
        before = [f"{name} = {size}" for name, size in zip(names, work.inside, strict=False)]
        before.append(f"{total} = {product([*names, work.inside[-1]])}")
    header = f"for {tile} in range({language}.program_id(0), {total}, {language}.num_programs(0)):"
    changes: dict[cst.CSTNode, Change] = {}
    changes.update(looped(source, kernel, before, header, _programs(kernel, tile, names, language), ()))
    if work.argument:
        changes.update(with_parameters(source, work, [total, *names]))
    for site in work.sites:
        changes.update(_launch(source, work, site, each, total, names))
    return source.edit(changes)


def _programs(kernel: Kernel, tile: str, names: list[str], language: str) -> dict[str, str]:
    """What takes the place of each program id: an expression in the number of the tile."""
    if not names:
        texts = [tile]
    elif len(names) == 1:
        texts = [f"({tile} % {names[0]})", f"({tile} // {names[0]})"]
    else:
        first, second = names
        texts = [f"({tile} % {first})", f"({tile} // {first} % {second})", f"({tile} // ({first} * {second}))"]
    if needs_tensor(kernel):
        # Triton's interpreter counts loops in Python's integers, which have no `.to`. No axis has more than 2^31 programs.
        texts = [f"{language}.cast({text}, {language}.int32)" for text in texts]
    return {str(axis): text for axis, text in enumerate(texts)}


def _launch(
    source: Source, work: Plan, site: Site, each: int, total: str, names: list[str]
) -> dict[cst.CSTNode, Change]:
    sms = source.fresh("sms")
    lines = [f"{sms} = {_SMS}"]
    programs = sms if each == 1 else f"{sms} * {each}"
    if not work.argument:
        count = product(site.grid.sizes)
        head = f"lambda {site.grid.meta}: " if site.grid.meta is not None else ""
        return relaunched(source, site, lines, f"{head}(min({count}, {programs}),)", {})
    counts = work.counts[site.launch.call]
    given = dict(zip(names, counts, strict=False))
    lines = [*(f"{name} = {count}" for name, count in given.items()), *lines]
    lines.insert(len(given), f"{total} = {product([*names, counts[-1]])}")
    arguments = {total: total, **{name: name for name in names}}
    return relaunched(source, site, lines, f"(min({total}, {programs}),)", arguments)


RULE = Rule(
    "persistent",
    "reordering",
    "as many programs as run at once stride over the tiles",
    "a kernel whose grid can be counted at its launch, or inside it, and whose programs do not wait for each other",
    apply,
)
