"""Which expressions of a kernel have the same value, by numbering values along the text.

Owns: what a call may do to memory, value numbers of expressions, loads that repeat an earlier one, and assignments that
give a name the value that it has already. Two equal numbers mean equal values in every run; different numbers mean
nothing. Never edits a source, and takes what it cannot read for a write.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import libcst as cst

from kernelband.writers.rewriter.kernels import Kernel, Source, bindings, code, dotted
from kernelband.writers.rewriter.tree import Change, children, walk

_METHODS = {"to", "broadcast_to", "trans", "reshape", "view", "expand_dims", "permute", "split", "is_fp8", "is_ptr"}
_BUILTIN = {"range", "min", "max", "float", "int", "abs", "len", "bool"}
_TOUCHES = {"store", "debug_barrier", "device_print", "device_assert", "inline_asm_elementwise", "map_elementwise"}
_LOAD_ORDER = ("pointer", "mask", "other")
_LEAVES = (cst.Integer, cst.Float, cst.Imaginary, cst.SimpleString, cst.Ellipsis)
# What is numbered by its kind, its operator and its parts; anything else is a value of its own.
_PLAIN = (
    cst.BinaryOperation, cst.UnaryOperation, cst.Comparison, cst.ComparisonTarget, cst.Call, cst.Arg, cst.Subscript,
    cst.SubscriptElement, cst.Index, cst.Tuple, cst.List, cst.Element, cst.IfExp, cst.BooleanOperation,
)  # fmt: skip
_OPAQUE = (cst.Lambda, cst.GeneratorExp, cst.ListComp, cst.SetComp, cst.DictComp, cst.NamedExpr)


class Effects:
    """What a call in a kernel may do: nothing ("pure"), read one block ("load"), read ("read"), or "write"."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._roots: dict[str, str] = {}  # local name -> what was imported from triton under it
        self._known: dict[str, str] = {}
        for node in walk(source.module):
            if not isinstance(node, (cst.Import, cst.ImportFrom)) or isinstance(node.names, cst.ImportStar):
                continue
            origin = dotted(node.module) if isinstance(node, cst.ImportFrom) and node.module else ""
            for alias in node.names:
                full = f"{origin}.{dotted(alias.name)}" if origin else dotted(alias.name)
                if full.split(".")[0] == "triton":
                    local = alias.asname.name if alias.asname else None
                    name = dotted(local) if local else full.split(".")[-1] if origin else "triton"
                    self._roots[name] = full

    def of(self, call: cst.Call) -> str:
        """What this call may do, its arguments aside."""
        path = dotted(call.func)
        root, _, last = path.partition(".")
        last = last.split(".")[-1]
        if path and "." not in path:
            if path in self._source.kernels:
                return self._helper(path)
            if path in _BUILTIN:
                return "pure"
            last = self._roots.get(path, "").split(".")[-1]
        elif root not in self._roots:
            pure = isinstance(call.func, cst.Attribute) and call.func.attr.value in _METHODS
            return "pure" if pure else "write"
        if not last or last in _TOUCHES or last.startswith("atomic") or "descriptor" in last:
            return "write"
        return _load_kind(call) if last == "load" else "pure"

    def _helper(self, name: str) -> str:
        if name not in self._known:
            self._known[name] = "write"  # of a function that calls itself
            kinds = {self.of(node) for node in walk(self._source.kernels[name].node.body) if isinstance(node, cst.Call)}
            self._known[name] = "write" if "write" in kinds else "read" if kinds & {"load", "read"} else "pure"
        return self._known[name]

    def writes(self, node: cst.CSTNode) -> bool:
        """Whether anything below the node may write memory or wait for others that do."""
        return any(isinstance(part, cst.Call) and self.of(part) == "write" for part in walk(node))


def _load_kind(call: cst.Call) -> str:
    """A load that must be done each time is a read, whose value is never known."""
    words = {arg.keyword.value: arg for arg in call.args if arg.keyword is not None}
    again = "volatile" in words or ("cache_modifier" in words and "cv" in code(words["cache_modifier"].value))
    return "read" if again or len(call.args) > 3 + len(words) or any(arg.star for arg in call.args) else "load"


@dataclass(eq=False)
class Repeat:
    """A load and the later ones that give the same. `name` holds it at all of them, or None."""

    line: cst.SimpleStatementLine
    first: cst.Call
    name: str | None
    later: list[cst.Call] = field(default_factory=list)


class Numbering:
    """One pass over a kernel. `repeats`: loads done twice. `idle`: lines that assign what the name holds already."""

    def __init__(self, source: Source, kernel: Kernel) -> None:
        self.effects = Effects(source)
        self.repeats: list[Repeat] = []
        self.idle: list[cst.SimpleStatementLine] = []
        self._table: dict[Hashable, int] = {}
        self._names: dict[str, int] = {}
        self._fresh = 0
        self._epoch = 0
        self._known: dict[int, Repeat] = {}
        self._line: cst.SimpleStatementLine | None = None
        self._target: tuple[cst.CSTNode, str] | None = None
        self._start = 0
        self._sometimes = 0
        self._block(kernel.node.body.body)
        self.repeats = [found for found in self.repeats if found.later]

    def _number(self, key: Hashable) -> int:
        return self._table.setdefault(key, len(self._table))

    def _unique(self) -> int:
        self._fresh += 1
        return self._number(("new", self._fresh))

    # --- statements -----------------------------------------------------------------------------------------------

    def _block(self, lines: Sequence[cst.CSTNode]) -> None:
        for line in lines:
            if isinstance(line, cst.SimpleStatementLine):
                self._start = self._epoch
                self._line = line if len(line.body) == 1 else None
                for small in line.body:
                    self._small(small)
                self._line = None
            elif isinstance(line, (cst.For, cst.While)):
                if isinstance(line, cst.For):
                    self._value(line.iter)
                self._forget(line)
                if isinstance(line, cst.While):
                    self._sometimes += 1
                    self._value(line.test)
                    self._sometimes -= 1
                self._inside(line.body)
                self._forget(line)
                if line.orelse is not None:
                    self._inside(line.orelse.body)
                    self._forget(line)
            elif isinstance(line, cst.If):
                self._value(line.test)
                self._inside(line.body)
                if isinstance(line.orelse, cst.If):
                    self._nested([line.orelse])
                elif line.orelse is not None:
                    self._inside(line.orelse.body)
                self._forget(line)
            else:
                self._forget(line)
                self._epoch += 1

    def _inside(self, body: cst.BaseSuite) -> None:
        self._nested(body.body)

    def _nested(self, lines: Sequence[cst.CSTNode]) -> None:
        """A block that may not run: what it learns is forgotten behind it, what it writes is not."""
        names, known, epoch = dict(self._names), dict(self._known), self._epoch
        self._block(lines)
        self._names, self._known = names, known
        if self._epoch != epoch:
            self._fresh += 1
            self._epoch = epoch + self._fresh + 1_000_000  # never an epoch that was seen before

    def _forget(self, node: cst.CSTNode) -> None:
        """Every name that the statement assigns may now hold anything, and so may memory if it writes."""
        block = cst.IndentedBlock(body=[node])  # type: ignore[list-item]
        for name in bindings(block):
            self._names[name] = self._unique()
        if self.effects.writes(node):
            self._fresh += 1
            self._epoch += self._fresh + 1_000_000

    def _small(self, small: cst.CSTNode) -> None:
        if isinstance(small, cst.Assign) and len(small.targets) == 1:
            target = small.targets[0].target
            name = target.value if isinstance(target, cst.Name) else None
            self._target = (small.value, name) if name else None
            number = self._value(small.value)
            self._target = None
            if name is None:
                self._bind(target)
                return
            if self._line is not None and self._names.get(name) == number:
                self.idle.append(self._line)
            self._names[name] = number
        elif isinstance(small, cst.AugAssign) and isinstance(small.target, cst.Name):
            left, right = self._value(small.target), self._value(small.value)
            operator = type(small.operator).__name__.removesuffix("Assign")
            self._names[small.target.value] = self._number(("BinaryOperation", operator, left, right))
        else:
            for child in children(small):
                if not isinstance(child, cst.AssignTarget):
                    self._value(child)
            self._forget(cst.SimpleStatementLine(body=[small]))  # type: ignore[list-item]

    def _bind(self, target: cst.CSTNode) -> None:
        for node in walk(target):
            if isinstance(node, cst.Name):
                self._names[node.value] = self._unique()

    # --- expressions ----------------------------------------------------------------------------------------------

    def _value(self, node: cst.CSTNode) -> int:
        if isinstance(node, cst.Name):
            return self._names.get(node.value, self._number(("name", node.value)))
        if isinstance(node, _LEAVES):
            return self._number(("leaf", code(node)))
        if isinstance(node, cst.Attribute):
            return self._number(("attribute", self._value(node.value), node.attr.value))
        if isinstance(node, cst.Slice):
            parts = (node.lower, node.upper, node.step)
            return self._number(("slice", *(None if part is None else self._value(part) for part in parts)))
        if isinstance(node, _OPAQUE):
            self._epoch += 1 + self._fresh
            for part in walk(node):
                if isinstance(part, cst.NamedExpr):
                    self._bind(part.target)
            return self._unique()
        if isinstance(node, cst.Call):
            return self._call(node)
        maybe = isinstance(node, (cst.IfExp, cst.BooleanOperation))
        self._sometimes += maybe
        parts_of = [self._value(child) for child in children(node)]
        self._sometimes -= maybe
        if not isinstance(node, _PLAIN):
            return self._unique()
        operator = type(getattr(node, "operator", None)).__name__
        return self._number((type(node).__name__, operator, *parts_of))

    def _call(self, call: cst.Call) -> int:
        effect = self.effects.of(call)
        parts: list[Hashable] = [self._value(call.func)]
        for index, arg in enumerate(call.args):
            word = arg.keyword.value if arg.keyword is not None else str(index)
            if effect == "load" and arg.keyword is None:
                word = _LOAD_ORDER[index]
            parts.append((word, arg.star, self._value(arg.value)))
        if effect == "write":
            self._fresh += 1
            self._epoch += self._fresh + 1_000_000
        if effect in ("write", "read"):
            return self._unique()
        if effect == "pure":
            return self._number(("call", *parts))
        number = self._number(("load", self._epoch, frozenset(parts[1:])))
        if self._sometimes:
            return number
        found = self._known.get(number)
        if found is not None:
            found.later.append(call)
            if found.name is not None and self._names.get(found.name) != number:
                found.name = None
        elif self._line is not None and self._start == self._epoch:
            whole = self._target is not None and self._target[0] is call
            found = Repeat(self._line, call, self._target[1] if whole and self._target else None)
            self._known[number] = found
            self.repeats.append(found)
        return number


def once(source: Source, repeats: Sequence[Repeat]) -> dict[cst.CSTNode, Change]:
    """The edit after which each of these loads is done once."""
    changes: dict[cst.CSTNode, Change] = {}
    before: dict[cst.SimpleStatementLine, list[cst.SimpleStatementLine]] = {}
    for number, found in enumerate(repeats, 1):
        name = found.name
        if name is None:
            name = source.fresh("loaded" if number == 1 else f"loaded_{number}")
            new = cst.Assign([cst.AssignTarget(cst.Name(name))], found.first.with_changes(lpar=[], rpar=[]))
            before.setdefault(found.line, []).append(cst.SimpleStatementLine([new]))
            changes[found.first] = cst.Name(name)
        for call in found.later:
            changes[call] = cst.Name(name)
    for line, new_lines in before.items():
        changes[line] = lambda updated, lines=tuple(new_lines): _after(lines, updated)  # type: ignore[misc]
    return changes


def _after(lines: tuple[cst.SimpleStatementLine, ...], line: cst.CSTNode) -> cst.FlattenSentinel:
    assert isinstance(line, cst.SimpleStatementLine)
    head = [lines[0].with_changes(leading_lines=line.leading_lines), *lines[1:]]
    return cst.FlattenSentinel([*head, line.with_changes(leading_lines=[])])


def tidy(text: str, kernel: str, lines_too: bool = True) -> str:
    """The text with every repeated load of a kernel done once, and assignments that change nothing left out."""
    for _ in range(8):
        source = Source(text)
        found = Numbering(source, source.kernels[kernel])
        if lines_too and found.idle:
            text = source.edit({line: cst.RemoveFromParent() for line in found.idle})
            continue
        if not found.repeats:
            break
        text = source.edit(once(source, found.repeats[:1]))
    return text
