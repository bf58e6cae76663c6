"""Rule family `launch_params`: another num_warps or num_stages at one launch.

Owns: the change of one launch option by a literal at one launch site. It never touches the kernel, and it leaves
autotuned kernels alone, because there a `triton.Config` owns both options.
"""

from __future__ import annotations

import libcst as cst

from kernelband.writers.rewriter.kernels import Knob, Launch, Source
from kernelband.writers.rewriter.rule import Child, Rule
from kernelband.writers.rewriter.tunables import DEFAULTS, option_obstacle

_VALUES = {"num_warps": (8, 2, 16, 1, 4), "num_stages": (4, 2, 5, 1, 3)}  # neighbours of the default first


def apply(source: Source) -> tuple[list[Child], list[str]]:
    """Children, one per launch, option and value; and words for each launch option that cannot be set."""
    children: list[Child] = []
    words: list[str] = []
    if not source.launches:
        words.append("no launch of a kernel is in the source")
    for launch in source.launches:
        for option, default in DEFAULTS.items():
            why = option_obstacle(source, launch, option)
            if why:
                words.append(why)
                continue
            arg = launch.args.get(option)
            before: int | str = default
            if arg is not None:
                knob = source.trace(arg.value, launch.scopes, option)
                before = knob.value if isinstance(knob, Knob) else "computed"
            for value in _VALUES[option]:
                if value != before:
                    children.append(
                        (f"{option} {before} -> {value} in {launch.where}", source.edit(_set(launch, option, value)))
                    )
    return children, words


def _set(launch: Launch, option: str, value: int) -> dict[cst.CSTNode, cst.CSTNode]:
    """The change that gives the option a literal value at this launch."""
    literal = cst.Integer(str(value))
    arg = launch.args.get(option)
    if arg is not None:
        return {arg.value: literal}
    return {launch.call: add_keyword(launch.call, option, literal)}


def add_keyword(call: cst.Call, keyword: str, value: cst.BaseExpression) -> cst.Call:
    """A copy of the call with one more keyword argument at its end, laid out like the arguments before it."""
    new = cst.Arg(
        value,
        keyword=cst.Name(keyword),
        equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")),
    )
    if not call.args:
        return call.with_changes(args=[new])
    *head, last = call.args
    space: cst.BaseParenthesizableWhitespace = cst.SimpleWhitespace(" ")
    if isinstance(last.comma, cst.Comma):
        # The trailing comma, and the way to the closing bracket behind it, go to the new last argument; a comment
        # behind the comma is about the old one and stays with it.
        after = last.comma.whitespace_after
        new = new.with_changes(comma=last.comma)
        before = head[-1].comma.whitespace_after if head and isinstance(head[-1].comma, cst.Comma) else None
        if isinstance(after, cst.ParenthesizedWhitespace):
            if isinstance(before, cst.ParenthesizedWhitespace):
                space = before.with_changes(first_line=after.first_line, empty_lines=[])
            elif after.first_line.comment is not None:
                space = after
            plain = after.with_changes(first_line=cst.TrailingWhitespace(), empty_lines=after.empty_lines)
            if space is not after and isinstance(space, cst.ParenthesizedWhitespace):
                new = new.with_changes(comma=last.comma.with_changes(whitespace_after=plain))
    else:
        new = new.with_changes(whitespace_after_arg=last.whitespace_after_arg)
        last = last.with_changes(whitespace_after_arg=cst.SimpleWhitespace(""))
    last = last.with_changes(comma=cst.Comma(whitespace_after=space))
    return call.with_changes(args=[*head, last, new])


RULE = Rule(
    "launch_params",
    "pipeline",
    "another `num_warps` or `num_stages`",
    "a launch of a kernel that is not autotuned",
    apply,
)
