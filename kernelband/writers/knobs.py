"""The numeric parameters of a source as a space of points: what can be set, to which values, and the text of a child.

Owns: which knobs a source has (tile sizes and group sizes for `tiling`, warps and stages of a launch for `pipeline`), their
legal values, and the *skeleton*: the source without their values, equal for sources that differ in nothing else. The
analysis is the rewriter's; this file never says which point is worth a try.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import prod

import libcst as cst

from kernelband.candidate import identity
from kernelband.writers.rewriter import parse
from kernelband.writers.rewriter.kernels import Knob, Launch, Source
from kernelband.writers.rewriter.launch_params import add_keyword
from kernelband.writers.rewriter.tree import Change
from kernelband.writers.rewriter.tunables import DEFAULTS, bounds, group_sizes, most_elements, option_obstacle, tiles

Values = tuple[int, ...]
"""One value for each setting of a space, in its order."""

REACH = 16
"""A tile becomes at most so many times larger or smaller in one step: further away nothing that was measured is a guide."""

MOST_POINTS = 2000
"""Of a launch with more combinations only those that change at most two knobs are points."""

_GROUPS = (1, 2, 4, 8, 16)
_OPTIONS = {"num_warps": (1, 2, 4, 8, 16), "num_stages": (1, 2, 3, 4, 5)}


@dataclass(frozen=True)
class Setting:
    """One knob: its label and the launch or launches it belongs to, the strategy that moves it, its value here, and all
    legal values (this one among them)."""

    label: str
    where: str
    strategy: str
    value: int
    values: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.label} in {self.where}"


@dataclass
class _Block:
    """The tile sizes that together make one block of a launch: places in the space (one for each axis), and the bound."""

    places: list[int] = field(default_factory=list)
    fixed: int = 1
    dot: bool = False

    def fits(self, values: Values) -> bool:
        sizes = sorted((values[i] for i in self.places), reverse=True)
        return prod(sizes[:2] if self.dot else sizes) <= most_elements(self.dot)


class Space:
    """The points around one source. `read` makes it."""

    def __init__(self, source: Source):
        self._source = source
        self.settings: list[Setting] = []
        self._nodes: dict[int, list[cst.CSTNode]] = {}
        self._launches: dict[int, tuple[Launch, str]] = {}
        self._blocks: dict[str, _Block] = {}
        self._find_tiles()
        self._find_groups()
        self._find_options()
        self.here: Values = tuple(s.value for s in self.settings)
        self.names = tuple(s.name for s in self.settings)
        self.skeleton = identity(self._bare())

    def _find_tiles(self) -> None:
        for tile in tiles(self._source)[0]:
            low, high = bounds(tile)
            place, value = len(self.settings), tile.knob.value
            values = {v for v in _powers(low, high) if value <= v * REACH and v <= value * REACH} | {value}
            where = " and ".join(tile.kernels)
            self.settings.append(Setting(tile.label, where, "tiling", value, tuple(sorted(values))))
            self._nodes[place] = [tile.knob.node, *tile.grid_literals]
            for launch, _, _ in tile.places:
                block = self._blocks.setdefault(launch.where, _Block())
                block.places.append(place)
                block.dot |= tile.dot

    def _find_groups(self) -> None:
        taken = {node for nodes in self._nodes.values() for node in nodes}
        for kernel in self._source.kernels.values():
            for name, knob in group_sizes(self._source, kernel):
                if knob.node in taken or knob.value < 1:
                    continue
                self._nodes[len(self.settings)] = [knob.node]
                taken.add(knob.node)
                values = tuple(sorted({*_GROUPS, knob.value}))
                self.settings.append(Setting(name, kernel.name, "tiling", knob.value, values))

    def _find_options(self) -> None:
        for launch in self._source.launches:
            for option, legal in _OPTIONS.items():
                if option_obstacle(self._source, launch, option):
                    continue
                value, arg = DEFAULTS[option], launch.args.get(option)
                if arg is not None:
                    knob = self._source.trace(arg.value, launch.scopes, option)
                    if not isinstance(knob, Knob) or knob.value < 1:
                        continue
                    value = knob.value
                self._launches[len(self.settings)] = (launch, option)
                self.settings.append(Setting(option, launch.where, "pipeline", value, tuple(sorted({*legal, value}))))

    def points(self, strategy: str) -> Iterator[Values]:
        """Every other point that the strategy reaches from here, each once: it moves the knobs of one launch, together."""
        groups: dict[str, list[int]] = {}
        for i, setting in enumerate(self.settings):
            if setting.strategy == strategy:
                groups.setdefault(setting.where, []).append(i)
        for places in groups.values():
            few = prod(len(self.settings[i].values) for i in places) > MOST_POINTS
            for values in _combinations([self.settings[i].values for i in places], [self.here[i] for i in places], few):
                moved = dict(zip(places, values, strict=True))
                point = tuple(moved.get(i, v) for i, v in enumerate(self.here))
                if self._legal(point):
                    yield point

    def _legal(self, point: Values) -> bool:
        """Not here, and no block grows beyond what an SM holds; one that is too large already may shrink."""
        grows = any(new > old for new, old in zip(point, self.here, strict=True))
        return point != self.here and (not grows or all(
            block.fits(point) for block in self._blocks.values() if any(point[i] != self.here[i] for i in block.places)))

    def text(self, point: Values) -> str:
        """The source with these values; what does not change stays as written."""
        changes: dict[cst.CSTNode, Change] = {}
        options: dict[cst.CSTNode, dict[str, int]] = {}
        for i, (new, old) in enumerate(zip(point, self.here, strict=True)):
            if new == old:
                continue
            if i in self._nodes:
                changes |= dict.fromkeys(self._nodes[i], cst.Integer(str(new)))
            else:
                launch, option = self._launches[i]
                if option in launch.args:
                    changes[launch.args[option].value] = cst.Integer(str(new))
                else:
                    options.setdefault(launch.call, {})[option] = new
        # The call may hold literals that change too: a function of the node is applied after they did.
        changes |= {call: partial(_with_keywords, values=values) for call, values in options.items()}
        return self._source.edit(changes)

    def _bare(self) -> str:
        """The source with 0 for every literal of a knob, and launches without the options that are knobs: a launch that
        names the default and one that names none are the same."""
        changes: dict[cst.CSTNode, Change] = {}
        for nodes in self._nodes.values():
            changes |= dict.fromkeys(nodes, cst.Integer("0"))
        gone: dict[cst.CSTNode, set[str]] = {}
        for launch, option in self._launches.values():
            gone.setdefault(launch.call, set()).add(option)
        changes |= {call: partial(_without_keywords, names=names) for call, names in gone.items()}
        return self._source.edit(changes)

    def describe(self, point: Values) -> str:
        """One line: "BLOCK_M 64 -> 128, BLOCK_N 64 -> 256 in f"."""
        moved = [(s, new) for s, new in zip(self.settings, point, strict=True) if new != s.value]
        where = " and ".join(dict.fromkeys(s.where for s, _ in moved))
        return ", ".join(f"{s.label} {s.value} -> {new}" for s, new in moved) + f" in {where}"


def read(source: str) -> Space | str:
    """The space around a source, or in words why it has none. Never raises."""
    parsed = parse(source)
    if isinstance(parsed, str):
        return parsed
    space = Space(parsed)
    return space if space.settings else "no block size, group size, num_warps or num_stages is a number that can be set"


def _powers(low: int, high: int) -> Iterator[int]:
    while low <= high:
        yield low
        low *= 2


def _combinations(legal: list[tuple[int, ...]], here: list[int], few: bool) -> Iterator[Values]:
    """All combinations, or only those that change at most two values."""
    if not few:
        yield from product(*legal)
        return
    for i, values in enumerate(legal):
        yield from ((*here[:i], v, *here[i + 1:]) for v in values if v != here[i])
        for j in range(i + 1, len(legal)):
            yield from ((*here[:i], v, *here[i + 1:j], w, *here[j + 1:])
                        for v in values if v != here[i] for w in legal[j] if w != here[j])


def _with_keywords(call: cst.CSTNode, values: Mapping[str, int]) -> cst.CSTNode:
    assert isinstance(call, cst.Call)
    for name, value in values.items():
        call = add_keyword(call, name, cst.Integer(str(value)))
    return call


def _without_keywords(call: cst.CSTNode, names: set[str]) -> cst.CSTNode:
    assert isinstance(call, cst.Call)
    return call.with_changes(args=[a for a in call.args if a.keyword is None or a.keyword.value not in names])
