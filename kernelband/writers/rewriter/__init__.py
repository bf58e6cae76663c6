"""The built-in rewriter: a writer that needs no LLM, no key and no network.

Owns: the list of rule families and the public functions `moves` and `reasons`. Each family is a rule
over the syntax tree, tied to one strategy; each child differs from its parent in one thing that a line can describe.
It never imports or runs a source, never changes a public signature, and never judges a child: the evaluator does.
The analysis that the rules share is in `kernels.py`; each rule is in a file of its own.
"""

from __future__ import annotations

import ast
import functools
import io
from dataclasses import dataclass
from itertools import pairwise

import libcst as cst

from kernelband.candidate import normal_form
from kernelband.writers.rewriter import (
    autotune,
    block_sizes,
    cache_hints,
    hints,
    hoist,
    launch_params,
    loop_range,
    math,
    online,
    persistent,
    program_order,
    rows_per_program,
    tail_mask,
    whole_row,
)
from kernelband.writers.rewriter.kernels import Source
from kernelband.writers.rewriter.rule import Child, Rule

FAMILIES = (
    block_sizes.RULE,
    whole_row.RULE,
    rows_per_program.RULE,
    launch_params.RULE,
    autotune.RULE,
    loop_range.RULE,
    program_order.RULE,
    persistent.RULE,
    tail_mask.RULE,
    online.RULE,
    math.RULE,
    hoist.RULE,
    cache_hints.RULE,
    hints.RULE,
)
"""The rule families in the order in which `moves` lists their children; each has a name, strategy and precondition."""


@dataclass(frozen=True)
class Move:
    """One child of a source.

    `family` and `strategy` say which rule made it, `description` is one line such as
    "BLOCK 256 -> 1024 in softmax_kernel", and `source` is the child's full text.
    """

    family: str
    strategy: str
    description: str
    source: str


def moves(source: str, strategy: str | None = None) -> list[Move]:
    """Every child the rules can make of a source, optionally of one strategy only.

    The order is a function of the source. Children are distinct, and differ from the parent, by `normal_form`.
    A source that cannot be parsed, or to which no rule applies, has none (`reasons` says why). Never raises.
    """
    read = _read(source)
    if isinstance(read, str):
        return []
    found: list[Move] = []
    seen = {_form(source)}
    for rule in FAMILIES:
        if strategy is not None and rule.strategy != strategy:
            continue
        for description, child in read.of(rule)[0]:
            form = _form(child)
            if form not in seen:
                seen.add(form)
                found.append(Move(rule.name, rule.strategy, description, child))
    return found


def reasons(source: str) -> dict[str, str]:
    """Family name -> why it makes no child of this source, in words. Families that apply are absent. Never raises."""
    read = _read(source)
    if isinstance(read, str):
        return {rule.name: read for rule in FAMILIES}
    found = {}
    for rule in FAMILIES:
        children, words = read.of(rule)
        if not children:
            found[rule.name] = "; ".join(dict.fromkeys(words)) or f"needs {rule.precondition}"
    return found


class _Read:
    """A source and what the rules made of it, each asked once; the tree is let go when all were asked."""

    def __init__(self, parsed: Source) -> None:
        self._parsed: Source | None = parsed
        self._made: dict[str, tuple[list[Child], list[str]]] = {}

    def of(self, rule: Rule) -> tuple[list[Child], list[str]]:
        """The children and words of a rule."""
        parsed = self._parsed  # gone only once everything is made, by whichever thread
        if parsed is not None and rule.name not in self._made:
            self._made[rule.name] = rule.apply(parsed)
            if len(self._made) == len(FAMILIES):
                self._parsed = None
        return self._made[rule.name]


@functools.lru_cache(64)  # a search asks for the same parents again and again, one strategy at a time
def _read(source: str) -> _Read | str:
    parsed = parse(source)
    return parsed if isinstance(parsed, str) else _Read(parsed)


@functools.lru_cache(4096)
def _statement_form(lines: str) -> str:
    return normal_form(lines)


def _form(source: str) -> tuple[str, ...]:
    """What is equal for sources of equal `normal_form`: the form of each statement of the module.

    Children differ from their parent in few statements, and writing out the others each time took most of a search's time.
    """
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return (source.strip(),)
    spans = [(min([node.lineno, *(mark.lineno for mark in getattr(node, "decorator_list", ()))]), node) for node in body]
    if any(one.end_lineno >= start for (_, one), (start, _) in pairwise(spans)):  # two statements on a line
        return (normal_form(source),)
    lines = io.StringIO(source, newline=None).readlines()  # ends lines where Python does; splitlines ends more
    forms = (_statement_form("".join(lines[start - 1 : node.end_lineno])) for start, node in spans)
    return tuple(form for form in forms if form != "pass")  # what is left of a doc-string


def parse(source: str) -> Source | str:
    """The parsed source, or in words why no rule can apply."""
    try:
        ast.parse(source)
        parsed = Source(source)
    except (SyntaxError, ValueError, cst.ParserSyntaxError) as error:
        return f"the source cannot be parsed: {str(error).splitlines()[0]}"
    except (RecursionError, MemoryError):
        return "the source cannot be parsed: it is nested too deeply"
    if parsed.kernels:
        return parsed
    if parsed.repeated:
        return f"the kernel {min(parsed.repeated)} is defined more than once, so a launch cannot be told apart"
    return "the source has no function decorated with triton.jit"
