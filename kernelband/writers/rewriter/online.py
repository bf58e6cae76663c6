"""Rule family `online`: two passes of reduction over the same data become one.

Owns: the joining of two neighbouring loops over one range. Loops that do not need each other are simply joined. Where the
second needs the maximum that the first finds, a sum of exponentials is rescaled as the maximum grows; where it needs the
mean, squares of deviations are gathered around running means and put right in the end (Welford; Chan by blocks), never as
E[x^2] - E[x]^2. Recognised by structure; whatever else a loop holds makes it stay. Two reductions of one block are the
business of `online_block.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import libcst as cst

from kernelband.writers.rewriter import online_block
from kernelband.writers.rewriter.kernels import Kernel, Source, bindings, called, code, names_in, normal, walk
from kernelband.writers.rewriter.passes import assigned, count_name, leaves_early, lines_of, needed, plain_lines
from kernelband.writers.rewriter.rule import Child, Rule
from kernelband.writers.rewriter.tree import Change, rebuild
from kernelband.writers.rewriter.values import Effects, Numbering, tidy

Line = tuple[cst.SimpleStatementLine, str, cst.BaseExpression, bool]


@dataclass(eq=False)
class Pair:
    """Two loops and the lines between them. `later`: those that need the first loop; the others may stand before it."""

    kernel: Kernel
    one: cst.For
    two: cst.For
    first: list[Line]
    second: list[Line]
    earlier: list[Line]
    later: list[Line]
    total: str  # what the second loop gathers, when it is one thing
    needs: str  # the result of the first loop that the second needs, or ""


@dataclass
class Joined:
    """What stands for the pair: lines before the loop, its body, and lines behind it."""

    how: str
    before: list[cst.BaseStatement]
    body: list[cst.BaseStatement]
    after: list[cst.BaseStatement]


def apply(source: Source) -> tuple[list[Child], list[str]]:
    """A child for each pair of loops that can be one, and words for the others."""
    made: list[Child] = []
    words: list[str] = []
    effects = Effects(source)
    for kernel in source.kernels.values():
        lines = list(kernel.node.body.body)
        loops = [index for index, line in enumerate(lines) if isinstance(line, cst.For)]
        if len(loops) < 2:
            words.append(f"{kernel.name} has no two loops one after the other")
        for a, b in pairwise(loops):
            pair = _pair(kernel, effects, lines, a, b)
            joined = _join(source, pair) if isinstance(pair, Pair) else pair
            if isinstance(pair, str) or isinstance(joined, str):
                words.append(f"{kernel.name}: {joined}")
                continue
            text = _write(source, pair, joined)
            if text is None:
                words.append(f"{kernel.name}: the two loops over {code(pair.one.target)} read different data")
            else:
                made.append((f"{joined.how} in one pass over {code(pair.one.target)} in {kernel.name}", text))
        made += online_block.apply(source, kernel)
    return made, words


def _pair(kernel: Kernel, effects: Effects, lines: Sequence[cst.CSTNode], a: int, b: int) -> Pair | str:
    one, two, between = lines[a], lines[b], plain_lines(lines[a + 1 : b])
    assert isinstance(one, cst.For) and isinstance(two, cst.For)
    names = f"the loops over {code(one.target)} and {code(two.target)}"
    if not isinstance(one.target, cst.Name) or normal(one.iter) != normal(two.iter) or code(one.target) != code(two.target):
        return f"{names} do not run over the same range"
    first, second = plain_lines(one.body.body), plain_lines(two.body.body)
    if first is None or second is None or between is None or one.orelse or two.orelse:
        return f"{names} hold, or have between them, more than plain assignments"
    if called(one.iter) != "range" or any(leaves_early(loop) or effects.writes(loop) for loop in (one, two)):
        return f"{names} may write or leave early"
    if any(effects.writes(line) for line, *_ in between):
        return f"a line between {names} may write"
    names_one, names_two = assigned(one.body), assigned(two.body)
    found: set[str] = names_one | {one.target.value}
    earlier: list[Line] = []
    later: list[Line] = []
    for entry in between:
        line, name, value, _ = entry
        reads = names_in(value) | (names_in(line) if isinstance(line.body[0], cst.AugAssign) else set())
        if reads & found:
            later.append(entry)
            found.add(name)
        else:
            earlier.append(entry)
    moved, stay = {name for _, name, *_ in earlier}, {name for _, name, *_ in later}
    needs_one, needs_two = needed(one.body.body), needed(two.body.body)
    totals = (needs_two & names_two) - {one.target.value}
    results = needs_two & found - {one.target.value}
    read_between = set().union(*(names_in(value) for _, _, value, _ in later)) if later else set()
    loose = (names_one - needs_one) | (names_two - needs_two)
    if (
        len(totals) != 1 or len(results) > 1 or totals & (names_one | stay | needs_one)
        or (names_two - totals) & (needs_one | stay | read_between | results)
        or moved & (names_one | needs_one | stay) or stay & (needs_one | names_one | names_two)
        or (names_in(one.iter) | {one.target.value}) & (names_one | names_two | moved | stay)
        or len({name for _, name, *_ in (*earlier, *later)}) != len(between)
        or loose & (needed(lines[b + 1 :]) | read_between)
    ):  # fmt: skip
        return f"{names} use names of each other in a way that is not understood"
    total = next(iter(totals))
    if sum(name == total for _, name, *_ in second) != 1:
        return f"{total} is gathered in more than one step"
    return Pair(kernel, one, two, first, second, earlier, later, total, next(iter(results), ""))


def _join(source: Source, pair: Pair) -> Joined | str:
    """How the pair becomes one loop, or words."""
    before: list[cst.BaseStatement] = [line for line, *_ in pair.earlier]
    after: list[cst.BaseStatement] = [line for line, *_ in pair.later]
    if not pair.needs:
        body = [*pair.one.body.body, *pair.two.body.body]
        return Joined("two reductions", before, list(body), after)  # type: ignore[arg-type]
    if count_name([pair.two.body], pair.needs) != 1:
        return f"{pair.needs} is used more than once in the second loop"
    entry = next(item for item in pair.second if count_name([item[2]], pair.needs))
    difference = next(
        (node for node in walk(entry[2]) if isinstance(node, cst.BinaryOperation)
         and isinstance(node.operator, cst.Subtract) and normal(node.right) == pair.needs), None
    )  # fmt: skip
    if difference is None:
        return f"the second loop does not take {pair.needs} off what it reads"
    power = next((node for node in walk(entry[2]) if isinstance(node, cst.Call) and called(node) in ("exp", "exp2")
                  and len(node.args) == 1 and node.args[0].value is difference), None)
    if power is not None:
        return _maximum(source, pair, difference, power, before, after)
    return _mean(source, pair, entry, difference, before, after)


# --- a sum of exponentials ----------------------------------------------------------------------------------------


def _maximum(source: Source, pair: Pair, difference: cst.BinaryOperation, power: cst.Call,
             before: list[cst.BaseStatement], after: list[cst.BaseStatement]) -> Joined | str:  # fmt: skip
    top = next((entry for entry in pair.first if called(entry[2]) in ("maximum", "max") and len(_args(entry[2])) == 2
                and not entry[3] and entry[1] in {normal(arg) for arg in _args(entry[2])}), None)  # fmt: skip
    if top is None or {name for _, name, *_ in pair.first} & needed(pair.one.body.body) != {top[1]}:
        return f"the first loop does more than find a maximum, or {pair.needs} is none"
    peak = top[1]
    if sum(name == peak for _, name, *_ in pair.first) != 1 or count_name([pair.one.body], peak) != 2:
        return f"{peak} is used in the first loop before it is known"
    if pair.needs != peak:
        rule = [value for _, name, value, _ in pair.later if name == pair.needs]
        args = _args(rule[0]) if rule else []
        if len(rule) != 1 or called(rule[0]) != "max" or not args or normal(args[0]) != peak:
            return f"{pair.needs} is not the maximum that the first loop finds"
    if not _linear(pair, power) or not _starts_at_zero(pair):
        return f"{pair.total} is not a plain sum of exponentials that starts at zero"
    best, base = source.fresh("new_max"), source.fresh("base")
    low = 'float("-inf")'
    final = next(entry for entry in pair.second if entry[1] == pair.total)
    added = final[2] if final[3] else _sides(final[2], pair.total)
    assert added is not None
    function = code(power.func)
    changes: dict[cst.CSTNode, Change] = {difference.right: cst.Name(base)}
    body: list[cst.BaseStatement] = []
    for line, name, value, _ in pair.first:
        if name != peak:
            body.append(line)
            continue
        body += lines_of(source, f"{best} = {_flat(value)}\n{base} = tl.where({best} == {low}, 0.0, {best})")
    for line, name, *_ in pair.second:
        if name != pair.total:
            body.append(rebuild(line, changes))  # type: ignore[arg-type]
            continue
        new = _flat(rebuild(added, changes))
        body += lines_of(source, f"{name} = {name} * {function}({peak} - {base}) + {new}")
    body += lines_of(source, f"{peak} = {best}")
    behind = list(after)
    if pair.needs != peak:
        scaled = f"{pair.total} * {function}({peak} - {pair.needs})"
        behind += lines_of(source, f"{pair.total} = tl.where({peak} == {pair.needs}, {pair.total}, {scaled})")
    # A row of nothing but -inf has no maximum to take off; the sum was, and stays, no number.
    empty = f'tl.where(({pair.needs} == {low}) & ({_runs(pair.one)}), float("nan"), {pair.total})'
    behind += lines_of(source, f"{pair.total} = {empty}")
    return Joined(f"maximum {pair.needs} and sum {pair.total} of exponentials", before, body, behind)


def _flat(node: cst.CSTNode) -> str:
    """The expression on one line, as written if it is on one."""
    return normal(node) if "\n" in code(node) else code(node)


def _args(node: cst.CSTNode) -> list[cst.BaseExpression]:
    return [arg.value for arg in node.args if arg.keyword is None] if isinstance(node, cst.Call) else []


def _runs(loop: cst.For) -> str:
    args = _args(loop.iter)
    return f"{normal(args[0]) if len(args) > 1 else 0} < {normal(args[1] if len(args) > 1 else args[0])}"


def _sides(value: cst.BaseExpression, name: str) -> cst.BaseExpression | None:
    """What `name + x` or `x + name` adds."""
    if isinstance(value, cst.BinaryOperation) and isinstance(value.operator, cst.Add):
        if normal(value.left) == name:
            return value.right
        if normal(value.right) == name:
            return value.left
    return None


def _linear(pair: Pair, power: cst.Call) -> bool:
    """Whether the total grows by the exponential itself: summed up, masked with zero, or as it is; and by nothing else."""
    names: set[str] = set()

    def plain(node: cst.CSTNode) -> bool:
        if node is power or (isinstance(node, cst.Name) and node.value in names):
            return True
        args = _args(node)
        if called(node) == "sum" and args and isinstance(node, cst.Call):
            return plain(args[0])
        if called(node) == "where" and len(args) == 3:
            return plain(args[1]) and normal(args[2]) in ("0", "0.0")
        return False

    for _, name, value, adds in pair.second:
        if name == pair.total:
            added = value if adds else _sides(value, name)
            return added is not None and plain(added)
        if plain(value) and not adds:
            names.add(name)
            if sum(other == name for _, other, *_ in pair.second) > 1 or count_name([pair.two.body], name) != 2:
                return False
    return False


def _starts_at_zero(pair: Pair) -> bool:
    found = [item for item in bindings(pair.kernel.node).get(pair.total, []) if item.node not in set(walk(pair.two))]
    value = found[0].value if found else None
    zero = value is not None and (called(value) == "zeros" or normal(value) in ("0", "0.0"))
    return zero and len(found) == 1


# --- squares of deviations ----------------------------------------------------------------------------------------


def _mean(source: Source, pair: Pair, entry: Line, difference: cst.BinaryOperation,
          before: list[cst.BaseStatement], after: list[cst.BaseStatement]) -> Joined | str:  # fmt: skip
    _, name, value, adds = entry
    args = _args(value)
    if called(value) == "where" and len(args) == 3 and args[1] is difference and normal(args[2]) in ("0", "0.0"):
        mask: str | None = _flat(args[0])
    elif value is difference:
        mask = None
    else:
        return f"{name} is more than a difference from {pair.needs}"
    final = next(item for item in pair.second if item[1] == pair.total)
    added = final[2] if final[3] else _sides(final[2], pair.total)
    summed = called(added) == "sum" if added is not None else False
    square = _args(added)[0] if summed and added is not None and _args(added) else added
    squared = square is not None and normal(square) in (f"{name} * {name}", f"{name} ** 2", f"{name} ** 2.0")
    last = pair.second[-1] is final and pair.second.index(entry) == len(pair.second) - 2
    if adds or not squared or not last:
        return f"{pair.total} is not a sum of squares of {name} alone"
    found = [item for item in bindings(pair.kernel.node).get(pair.total, []) if item.node not in set(walk(pair.two))]
    start = found[0].value if len(found) == 1 else None
    if start is None or (normal(start) not in ("0", "0.0") if summed else called(start) != "zeros"):
        return f"{pair.total} does not start as {'zero' if summed else 'a block of zeros'}"
    if summed and mask is None:
        return f"{name} is not masked, so the number of values in a block is not known"
    count, mean, gap = (source.fresh(word) for word in ("count", "running_mean", "gap"))
    x = normal(difference.left) if isinstance(difference.left, cst.Name) else f"({normal(difference.left)})"
    total, far = pair.total, f"({mean} - {pair.needs})"
    body = [*pair.one.body.body, *(line for line, *_ in pair.second[:-2])]
    if summed:
        part, near, both = (source.fresh(word) for word in ("block_count", "block_mean", "both"))
        sum_of = lambda text: f"tl.sum({text}, axis=0)"  # noqa: E731
        text = f"""
{part} = {sum_of(f"tl.where({mask}, 1.0, 0.0)")}
{near} = {sum_of(f"tl.where({mask}, {x}, 0.0)")} / tl.maximum({part}, 1.0)
{name} = tl.where({mask}, {x} - {near}, 0.0)
{both} = tl.maximum({count} + {part}, 1.0)
{gap} = {near} - {mean}
{total} += {sum_of(f"{name} * {name}")} + {gap} * {gap} * {count} * {part} / {both}
{mean} += {gap} * {part} / {both}
{count} += {part}"""
        zero = "0.0"
    else:
        some = f"tl.where({mask}, {{}}, 0.0)" if mask is not None else "{}"
        text = f"""
{count} += {some.format("1.0")}
{gap} = {x} - {mean}
{mean} += {some.format(f"{gap} / tl.maximum({count}, 1.0)")}
{total} += {some.format(f"{gap} * ({x} - {mean})")}"""
        zero = f"tl.zeros_like({total})"
    before = [*before, *lines_of(source, f"{count} = {zero}\n{mean} = {zero}")]
    behind = [*after, *lines_of(source, f"{total} += tl.where({count} > 0, {count} * {far} * {far}, 0.0)")]
    return Joined(f"mean {pair.needs} and squares {total} around it", before,
                  [*body, *lines_of(source, text)], behind)  # type: ignore[list-item]


def _write(source: Source, pair: Pair, joined: Joined) -> str | None:
    """The text with the pair joined, each load done once; None if the loops share no load, so that nothing is won."""
    gone = [line for line, *_ in (*pair.earlier, *pair.later)]
    loop = pair.one.with_changes(body=pair.one.body.with_changes(body=joined.body))
    head = [line.deep_clone() for line in joined.before]
    rest = [line.deep_clone() for line in joined.after]
    changes: dict[cst.CSTNode, Change] = {line: cst.RemoveFromParent() for line in gone}
    changes[pair.one] = cst.FlattenSentinel([*head, loop.deep_clone(), *rest])
    changes[pair.two] = cst.RemoveFromParent()
    text = source.edit(changes)
    copy = Source(text)
    won = _repeated(copy, copy.kernels[pair.kernel.name]) > _repeated(source, pair.kernel)
    return tidy(text, pair.kernel.name) if won else None


def _repeated(source: Source, kernel: Kernel) -> int:
    """How many loads of a kernel are done again for nothing."""
    found = Numbering(source, kernel)
    again = [line for line in found.idle if any(called(node) == "load" for node in walk(line))]
    return sum(len(repeat.later) for repeat in found.repeats) + len(again)


RULE = Rule(
    "online",
    "fusion",
    "two passes of reduction become one: rescaled sums of exponentials, Welford around a mean, joined loops",
    "two loops over one range, or two reductions of one block, the second of which needs a maximum or a mean, or nothing",
    apply,
)
