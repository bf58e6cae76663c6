"""The built-in rewriter: a writer that needs no LLM, no key and no network.

Owns: the list of rule families and the public functions `moves` and `reasons`. Each family is a rule
over the syntax tree, tied to one strategy; each child differs from its parent in one thing that a line can describe.
It never imports or runs a source, never changes a public signature, and never judges a child: the evaluator does.
The analysis that the rules share is in `kernels.py`; each rule is in a file of its own.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

import libcst as cst

from kernelband.candidate import normal_form
from kernelband.writers.rewriter import block_sizes, launch_params, program_order, tail_mask
from kernelband.writers.rewriter.kernels import Source

FAMILIES = (block_sizes.RULE, launch_params.RULE, program_order.RULE, tail_mask.RULE)
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
    parsed = _parse(source)
    if isinstance(parsed, str):
        return []
    found: list[Move] = []
    seen = {normal_form(source)}
    for rule in FAMILIES:
        if strategy is not None and rule.strategy != strategy:
            continue
        for description, child in rule.apply(parsed)[0]:
            form = normal_form(child)
            if form not in seen:
                seen.add(form)
                found.append(Move(rule.name, rule.strategy, description, child))
    return found


def reasons(source: str) -> dict[str, str]:
    """Family name -> why it makes no child of this source, in words. Families that apply are absent. Never raises."""
    parsed = _parse(source)
    if isinstance(parsed, str):
        return {rule.name: parsed for rule in FAMILIES}
    found = {}
    for rule in FAMILIES:
        children, words = rule.apply(parsed)
        if not children:
            found[rule.name] = "; ".join(dict.fromkeys(words)) or f"needs {rule.precondition}"
    return found


def _parse(source: str) -> Source | str:
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
