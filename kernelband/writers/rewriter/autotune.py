"""Rule family `autotune`: configurations frozen, added and pruned; and a kernel without any given some.

Owns: which configurations stand near one that is there, and how few children show them. A frozen kernel loses its
decorator, and its launches pass what the configuration said. Larger tiles than any in the source are only tried where
every load and store has a mask. What a kernel without configurations needs for them is in `autotune_added.py`.
"""

from __future__ import annotations

from math import prod

import libcst as cst

from kernelband.writers.rewriter.autotune_added import added, all_masked, has_loop
from kernelband.writers.rewriter.configs import Config, Tuned, read, spelled
from kernelband.writers.rewriter.kernels import Kernel, Launch, Source, called, code, walk
from kernelband.writers.rewriter.launch_params import add_keyword
from kernelband.writers.rewriter.looped import Declined, name_nodes
from kernelband.writers.rewriter.rerun import unsafe
from kernelband.writers.rewriter.rule import Child, Rule
from kernelband.writers.rewriter.tiles import has_dot, roles
from kernelband.writers.rewriter.tree import Change

_FROZEN = 6
_SMALLEST, _SMALLEST_DOT = 8, 16
_MOST_ELEMENTS, _MOST_DOT_ELEMENTS, _LARGEST_DOT = 1 << 16, 1 << 15, 256


def apply(source: Source) -> tuple[list[Child], list[str]]:
    """Children with other configurations, and words for each kernel whose configurations stay."""
    children: list[Child] = []
    words: list[str] = []
    for kernel in source.kernels.values():
        launches = [launch for launch in source.launches if launch.kernel is kernel]
        if not kernel.autotuned:
            made, why = added(source, kernel, launches)
            children += made
            words += [f"{kernel.name} {text}" for text in why]
            continue
        try:
            tuned = read(source, kernel)
        except Declined as declined:
            words.append(f"{kernel.name} {declined}")
            continue
        for part in (_frozen, _grown, _pruned):
            try:
                children += part(source, kernel, launches, tuned)
            except Declined as declined:
                words.append(f"{kernel.name} {declined}")
    return children, words


def _spread(configs: tuple[Config, ...], count: int) -> list[Config]:
    """At most so many of the configurations, from all over the list, the first among them."""
    step = max(len(configs) / count, 1)
    return [configs[int(index * step)] for index in range(min(count, len(configs)))]


def _frozen(source: Source, kernel: Kernel, launches: list[Launch], tuned: Tuned) -> list[Child]:
    """One configuration each, passed by the launches; the decorator goes."""
    if tuned.hooks:
        raise Declined(f"has {min(tuned.hooks)}, which freezing one config would lose")
    if any(called(node) == "static_assert" for part in source.reach(kernel) for node in walk(part.node.body)):
        raise Declined("uses tl.static_assert, by which autotuning may pass over a config that does not fit a size")
    if not launches:
        raise Declined("is not launched in this source")
    ours = {launch.call.func.value for launch in launches}  # type: ignore[attr-defined]
    if any(node not in ours and node is not kernel.node.name for node in name_nodes(source.module, kernel.name)):
        raise Declined("is named elsewhere than at its launches")
    children: list[Child] = []
    for config in _spread(tuned.configs, _FROZEN):
        values = config.passed()
        changes: dict[cst.CSTNode, Change] = {tuned.decorator: cst.RemoveFromParent()}
        for launch in launches:
            if launch.opaque or values.keys() & launch.args.keys():
                raise Declined("has a launch that passes *args, **kwargs or what a config sets")
            if not dict(config.meta).keys() <= set(kernel.params):
                raise Declined("has a config that sets what is no parameter of it")
            call = launch.call
            for name, value in values.items():
                call = add_keyword(call, name, cst.parse_expression(repr(value)))
            changes[launch.call] = call
        children.append((f"{kernel.name} without autotuning, at {config.label}", source.edit(changes)))
    return children


def _grown(source: Source, kernel: Kernel, launches: list[Launch], tuned: Tuned) -> list[Child]:
    """The configurations with neighbours of one of them."""
    if len(tuned.configs) == 1:  # with one configuration nothing was timed, so the kernel never ran twice
        why = next((text for launch in launches if (text := unsafe(source, kernel, launch))), None)
        if why:
            raise Declined(why)
    children: list[Child] = []
    bases = dict.fromkeys((tuned.configs[0], tuned.configs[len(tuned.configs) // 2]))
    for number, base in enumerate(bases):
        for kind, near in (("options", _near_options(source, kernel, base)),
                           ("tiles", _near_tiles(source, kernel, launches, tuned, base))):
            new = [config for config in dict.fromkeys(near) if config not in tuned.configs]
            if new:
                text = spelled([*tuned.configs, *new], tuned.maker)
                which = f"config {1 if number == 0 else len(tuned.configs) // 2 + 1}"
                more = f"{len(new)} more {'config' if len(new) == 1 else 'configs'}"
                words = f"{more} of {kernel.name} near {which}, other {kind}"
                children.append((words, source.edit({tuned.listed: cst.parse_expression(text)})))
    return children


def _near_options(source: Source, kernel: Kernel, base: Config) -> list[Config]:
    warps, stages = base.option("num_warps"), base.option("num_stages")
    found = [base.replaced({}, {"num_warps": other}) for other in (warps * 2, warps // 2) if 1 <= other <= 16]
    if has_loop(source, kernel):
        found += [base.replaced({}, {"num_stages": other}) for other in (stages + 1, stages - 1) if 1 <= other <= 6]
    return found


def _near_tiles(source: Source, kernel: Kernel, launches: list[Launch], tuned: Tuned, base: Config) -> list[Config]:
    """The base with one tile size doubled or halved, where the grid and the masks follow."""
    known, dot = roles(source, kernel), has_dot(source, kernel)
    sizes = {name: value for name, value in base.meta if name in known and known[name].shape}
    closures = [[code(node) for node in source.grid_closure(launch)] for launch in launches]
    found = []
    for name, value in sizes.items():
        if type(value) is not int or value < 1 or value & (value - 1):
            continue
        seen = {dict(config.meta).get(name) for config in tuned.configs}
        reads = all(any(f'"{name}"' in text or f"'{name}'" in text for text in texts) for texts in closures)
        role = known[name]
        follows = role.stride and ((reads and bool(launches)) or (role.step and not role.grid))
        for other in (value * 2, value // 2):
            grown = [other if key == name else size for key, size in sizes.items() if type(size) is int]
            largest = prod(sorted(grown)[-2:]) if dot else prod(grown)
            if other < (_SMALLEST_DOT if dot else _SMALLEST) or (dot and other > _LARGEST_DOT):
                continue
            if other > value and largest > (_MOST_DOT_ELEMENTS if dot else _MOST_ELEMENTS):
                continue
            masked = other < min(size for size in seen if type(size) is int) or all_masked(source, kernel)
            if other in seen or (follows and masked):
                found.append(base.replaced({name: other}, {}))
    return found


def _pruned(source: Source, kernel: Kernel, launches: list[Launch], tuned: Tuned) -> list[Child]:
    """Half of the configurations, so that a first call takes half the time."""
    if len(tuned.configs) < 4:
        raise Declined(f"has {len(tuned.configs)} configs, too few to prune")
    children: list[Child] = []
    for start, words in ((0, "odd"), (1, "even")):
        text = spelled(tuned.configs[start::2], tuned.maker)
        child = source.edit({tuned.listed: cst.parse_expression(text)})
        children.append((f"{kernel.name} tuned over the {words} half of its {len(tuned.configs)} configs", child))
    return children


RULE = Rule(
    "autotune",
    "pipeline",
    "one config frozen, configs added near one that is there, half of them left out; a few configs for a kernel without any",
    "configs that can be read off the text, or a kernel that may run twice on the same arguments",
    apply,
)
