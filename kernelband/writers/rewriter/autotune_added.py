"""The other half of rule family `autotune`: a kernel without configurations gets a decorator with a few.

Owns: whether a kernel may run several times on the same arguments (autotuning does that), the tile sizes that leave
the launch for the configurations, and the grid that then has to follow them. It adds nothing where outputs are not
made fresh beside the launch, where a kernel reads what it writes, or where it uses atomics.
"""

from __future__ import annotations

from math import prod

import libcst as cst

from kernelband.writers.rewriter.configs import Config, spelled
from kernelband.writers.rewriter.kernels import (
    Kernel,
    Knob,
    Launch,
    Source,
    argument,
    called,
    names_in,
    walk,
)
from kernelband.writers.rewriter.looped import Declined, name_nodes
from kernelband.writers.rewriter.rerun import counts, unsafe
from kernelband.writers.rewriter.rule import Child
from kernelband.writers.rewriter.tiles import has_dot
from kernelband.writers.rewriter.tree import Change, children
from kernelband.writers.rewriter.tunables import DEFAULTS, Tile, tiles

_SMALLEST, _SMALLEST_DOT, _LARGEST_DOT = 16, 16, 256
_MOST_ELEMENTS, _MOST_DOT_ELEMENTS = 1 << 14, 1 << 15


def has_loop(source: Source, kernel: Kernel) -> bool:
    """Whether there is a loop to pipeline."""
    return any(isinstance(n, (cst.For, cst.While)) for part in source.reach(kernel) for n in walk(part.node.body))


def all_masked(source: Source, kernel: Kernel) -> bool:
    """Whether every load and store is masked or checks its bounds, so that a larger tile may overhang."""
    for part in source.reach(kernel):
        for node in walk(part.node.body):
            if called(node) in ("load", "store") and isinstance(node, cst.Call):
                place = 1 if called(node) == "load" else 2
                if argument(node, place, "mask") is None and argument(node, None, "boundary_check") is None:
                    return False
    return True


# --- the children ---------------------------------------------------------------------------------------------------


def added(source: Source, kernel: Kernel, launches: list[Launch]) -> tuple[list[Child], list[str]]:
    """A kernel without configurations, with a few around what it is launched with."""
    words: list[str] = []
    found: list[Child] = []
    try:
        if len(launches) != 1:
            raise Declined("is not launched exactly once in this source")
        launch = launches[0]
        _check(source, kernel, launch)
        base = Config((), tuple((name, _option(source, launch, name)) for name in DEFAULTS))
        key = [name for name in kernel.params if name not in kernel.constexprs and name in launch.args
               and counts(source, launch, launch.args[name].value) and called(launch.args[name].value) != "stride"
               and not isinstance(launch.args[name].value, cst.Float)]
        plain = _options(source, kernel, base)
        changes = _decorated(source, kernel, plain, key)
        changes[launch.call] = lambda node: _without(kernel, launch, node, set(DEFAULTS))
        found.append((f"{kernel.name} autotuned over {len(plain)} numbers of warps and stages", source.edit(changes)))
    except Declined as declined:
        return [], [str(declined)]
    try:
        tiles = _free_tiles(source, kernel, launch)
        configs = _around(source, kernel, tiles, base)
        changes = _decorated(source, kernel, configs, key)
        changes.update(_freed(source, kernel, launch, tiles))
        names = ", ".join(tile.label for tile in tiles)
        found.append((f"{kernel.name} autotuned over {len(configs)} sizes of {names}", source.edit(changes)))
    except Declined as declined:
        words.append(str(declined))
    return found, words


def _check(source: Source, kernel: Kernel, launch: Launch) -> None:
    if kernel.heuristics:
        raise Declined("has triton.heuristics, whose values may depend on the sizes")
    if launch.opaque:
        raise Declined("is launched with *args or **kwargs")
    if any(arg.keyword is None for arg in launch.call.args[len(kernel.params) :]):
        raise Declined("is launched with more arguments than it takes")
    if "triton" not in source.bindings(source.module):
        raise Declined("is in a module that does not import triton by its name")
    own = {launch.call.func.value, kernel.node.name}  # type: ignore[attr-defined]
    if any(node not in own for node in name_nodes(source.module, kernel.name)):
        raise Declined("is named elsewhere than at its launch")
    if set(DEFAULTS) & set(kernel.params):
        raise Declined("has num_warps or num_stages as a parameter of its own")
    why = unsafe(source, kernel, launch)
    if why:
        raise Declined(why)


def _option(source: Source, launch: Launch, name: str) -> int:
    arg = launch.args.get(name)
    if arg is None:
        return DEFAULTS[name]
    knob = source.trace(arg.value, launch.scopes, name)
    if not isinstance(knob, Knob):
        raise Declined(f"has a launch where {knob}")
    return knob.value


def _options(source: Source, kernel: Kernel, base: Config) -> list[Config]:
    warps, stages = base.option("num_warps"), base.option("num_stages")
    found = [base, *(base.replaced({}, {"num_warps": n}) for n in (warps * 2, warps // 2, warps * 4) if 1 <= n <= 16)]
    if has_loop(source, kernel):
        found += [base.replaced({}, {"num_stages": n}) for n in (stages + 1, stages - 1) if 1 <= n <= 6]
    return found


def _decorated(source: Source, kernel: Kernel, configs: list[Config], key: list[str]) -> dict[cst.CSTNode, Change]:
    """The decorator before the first of the kernel's own."""
    keys = ", ".join(f'"{name}"' for name in key)
    text = f"@triton.autotune(\n    configs={spelled(configs)},\n    key=[{keys}],\n)\ndef f(): pass\n"
    made = cst.parse_module(text).body[0]
    assert isinstance(made, cst.FunctionDef)
    first = kernel.node.decorators[0]
    return {first: cst.FlattenSentinel([made.decorators[0].with_changes(leading_lines=first.leading_lines),
                                        first.with_changes(leading_lines=[])])}


def _free_tiles(source: Source, kernel: Kernel, launch: Launch) -> list[Tile]:
    """Tile sizes of this launch that nothing but the launch and its grid depends on."""
    known, _ = tiles(source)
    grid = _grid_value(source, launch)
    knobs = {tile.knob.node for tile in known}
    scope = launch.scopes[0]
    found = []
    for tile in known:
        if len(tile.places) != 1 or tile.places[0][0] is not launch:
            continue
        param = tile.places[0][1]
        arg = launch.args.get(param)
        allowed = set(walk(grid)) | ({*walk(arg.value)} if arg is not None else set())
        uses = [node for name in tile.knob.names for node in _outside(source, name)]
        defined = {part for node in walk(source.module) if isinstance(node, cst.AssignTarget) for part in walk(node)}
        between = {node for node in uses if isinstance(node, cst.Name) and node in defined}
        value = tile.knob.value
        same = {node for node in walk(scope.body if isinstance(scope, cst.FunctionDef) else scope)
                if isinstance(node, cst.Integer) and node.evaluated_value in (value, value - 1) and value > 16}
        if len(tile.knob.names) > 1 or any(node not in allowed | between for node in uses):
            continue
        if same - knobs - set(tile.grid_literals) - {a.value for n, a in launch.args.items() if n in DEFAULTS}:
            continue
        found.append(tile)
    if not found:
        raise Declined("has no tile size that only its launch and its grid depend on")
    return found


def _outside(source: Source, name: str) -> list[cst.Name]:
    """The places of a name that are not in a kernel with a parameter or local of the same name."""
    hidden: set[cst.CSTNode] = set()
    for node in walk(source.module):
        if isinstance(node, cst.FunctionDef) and any(kernel.node is node for kernel in source.kernels.values()):
            hidden |= set(walk(node)) if name in source.bindings(node) else set()
    return [node for node in name_nodes(source.module, name) if node not in hidden]


def _grid_value(source: Source, launch: Launch) -> cst.CSTNode:
    """The expression of the grid, which has to stand at the launch or be a name that only the launch uses."""
    if len(launch.grid) != 1:
        raise Declined("has a grid that is not one tuple")
    value = launch.grid[0].value if isinstance(launch.grid[0], cst.Index) else launch.grid[0]
    if isinstance(value, cst.Name):
        found = source.bindings(launch.scopes[0]).get(value.value, [])
        uses = [node for node in name_nodes(launch.scopes[0], value.value) if node is not value]
        if len(found) != 1 or found[0].value is None or len(uses) != 1:
            raise Declined(f"has a grid {value.value} that is used elsewhere, or assigned more than once")
        value = found[0].value
    if isinstance(value, (cst.Lambda, cst.FunctionDef)):
        return value
    if not isinstance(value, (cst.Tuple, cst.List)):
        raise Declined("has a grid that is not spelled as a tuple")
    local = source.bindings(launch.scopes[0])
    if any(len(local.get(name, ())) > 1 for name in names_in(value)):
        raise Declined("has a grid of names that change")  # a lambda would read them later
    return value


def _around(source: Source, kernel: Kernel, tiles: list[Tile], base: Config) -> list[Config]:
    """The present sizes and four or five around them."""
    sizes = {tile.label: tile.knob.value for tile in tiles}
    base = base.replaced(sizes, {})
    dot, masked, warps = has_dot(source, kernel), all_masked(source, kernel), base.option("num_warps")
    names = list(sizes)
    steps: list[tuple[dict[str, float], int]] = [({name: 2.0}, 1) for name in names]
    steps += [({names[0]: 2.0}, 2), (dict.fromkeys(names[:2], 2.0), 2), ({names[0]: 0.5}, 1), ({}, 2)]
    if len(names) == 1:
        steps += [({names[0]: 4.0}, 2), ({names[0]: 0.25}, 1)]
    else:
        steps += [({names[1]: 0.5}, 1)]
    found = [base]
    for step, times in steps:
        new = {name: int(sizes[name] * factor) for name, factor in step.items()}
        every = sorted({**sizes, **new}.values())
        room = prod(every[-2:]) <= _MOST_DOT_ELEMENTS if dot else prod(every) <= _MOST_ELEMENTS
        low, high = (_SMALLEST_DOT, _LARGEST_DOT) if dot else (_SMALLEST, _MOST_ELEMENTS)
        grows = any(factor > 1 for factor in step.values())
        if (grows and not (masked and room)) or warps * times > 16 or any(not low <= n <= high for n in new.values()):
            continue
        found.append(base.replaced(new, {"num_warps": warps * times}))
    found = list(dict.fromkeys(found))[:6]
    if len(found) < 3:
        raise Declined("has no other tile sizes within bounds")
    return found


def _freed(source: Source, kernel: Kernel, launch: Launch, tiles: list[Tile]) -> dict[cst.CSTNode, Change]:
    """The changes that take the tile sizes out of the launch and make its grid a function of them."""
    grid = _grid_value(source, launch)
    function = grid if isinstance(grid, (cst.Lambda, cst.FunctionDef)) else None
    meta = function.params.params[0].name.value if function and function.params.params else source.fresh("META")
    changes: dict[cst.CSTNode, Change] = {}
    for tile in tiles:
        read = cst.parse_expression(f'{meta}["{tile.label}"]')
        for name in tile.knob.names:
            changes.update(dict.fromkeys(name_nodes(grid, name), read))
        for literal in tile.grid_literals:
            changes[literal] = read
    tuned = {tile.label for tile in tiles}
    if function is None:
        def as_function(node: cst.CSTNode) -> cst.CSTNode:
            made = cst.parse_expression(f"lambda {meta}: x")
            assert isinstance(made, cst.Lambda)
            assert isinstance(node, (cst.Tuple, cst.List))
            if not node.lpar and isinstance(node, cst.Tuple):
                node = node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
            return made.with_changes(body=node)

        changes[grid] = as_function
    changes[launch.call] = lambda node: _without(kernel, launch, node, tuned | set(DEFAULTS))
    gone = {name for tile in tiles for name in tile.knob.names}
    parents = {child: node for node in walk(source.module) for child in children(node)}
    for node in walk(launch.scopes[0]):
        if isinstance(node, cst.Assign) and len(node.targets) == 1 and isinstance(parents[node], cst.SimpleStatementLine):
            names = names_in(node.targets[0].target)
            if names and names <= gone and len(parents[node].body) == 1:  # type: ignore[attr-defined]
                changes[parents[node]] = cst.RemoveFromParent()
    return changes


def _without(kernel: Kernel, launch: Launch, node: cst.CSTNode, names: set[str]) -> cst.CSTNode:
    """The call without these arguments; positional ones behind them get their keyword."""
    assert isinstance(node, cst.Call)
    kept: list[cst.Arg] = []
    shifted = False
    for index, (old, arg) in enumerate(zip(launch.call.args, node.args, strict=True)):
        name = old.keyword.value if old.keyword is not None else kernel.params[index]
        if name in names:
            shifted = True
        elif shifted and arg.keyword is None:
            equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
            kept.append(arg.with_changes(keyword=cst.Name(name), equal=equal))
        else:
            kept.append(arg)
    if kept and node.args:
        last = node.args[-1]
        kept[-1] = kept[-1].with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
    return node.with_changes(args=kept)


