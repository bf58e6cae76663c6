"""What every rule needs to know about a module: its jit kernels, its launches, and where an integer comes from.

Owns: the syntax tree (libcst) of one source, its kernels and launch sites, the *knobs* (the single literal in the
source that fixes a constexpr) and the text of an edited copy. Reads text only: it never imports, compiles or runs the
source, and it decides nothing about which change is worth making; that is the rule families' business.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import libcst as cst

from kernelband.writers.rewriter.tree import Change, children, rebuild, remembered, walk

Scope = cst.FunctionDef | cst.Module
_NESTED = (cst.FunctionDef, cst.ClassDef, cst.Lambda, cst.GeneratorExp, cst.ListComp, cst.SetComp, cst.DictComp)
_PRINTER = cst.Module(body=[])
# jit decorators of other projects, which a triton module may well use on its wrappers.
_FOREIGN_JIT = {"torch", "numba", "jax", "nb"}


def own_nodes(scope: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Descendants in source order, without the inside of nested functions, classes, lambdas and comprehensions."""
    stack = list(reversed(children(scope.body if isinstance(scope, cst.FunctionDef) else scope)))
    while stack:
        current = stack.pop()
        yield current
        if not isinstance(current, _NESTED):
            stack.extend(reversed(children(current)))


def code(node: cst.CSTNode) -> str:
    """Source text of a node as written."""
    return remembered(node, "code", _PRINTER.code_for_node)


def as_ast(node: cst.CSTNode) -> ast.expr:
    """The expression as an `ast` node; parentheses, line breaks and comments vanish."""
    # An expression taken out of its brackets may hold line breaks and a last comment, hence brackets and a new line.
    return ast.parse(f"({code(node)}\n)", mode="eval").body


def normal(node: cst.CSTNode) -> str:
    """Source text of an expression in one normal spelling, for comparison."""
    return remembered(node, "normal", lambda one: ast.unparse(as_ast(one)))


def dotted(node: cst.CSTNode) -> str:
    """`a.b.c` of a name or attribute chain, "" for anything else."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        root = dotted(node.value)
        return f"{root}.{node.attr.value}" if root else ""
    return ""


def called(node: cst.CSTNode) -> str:
    """Last part of the name of what a call calls ("load" of `tl.load(...)`), "" for another node or callee."""
    if not isinstance(node, cst.Call):
        return ""
    if isinstance(node.func, cst.Attribute):
        return node.func.attr.value
    return node.func.value if isinstance(node.func, cst.Name) else ""


def names_in(node: cst.CSTNode) -> set[str]:
    """Every name read or written in the node; attribute names and keywords are not names."""
    found: set[str] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if isinstance(current, cst.Name):
            found.add(current.value)
        elif isinstance(current, (cst.Attribute, cst.Arg)):
            stack.append(current.value)
        else:
            stack.extend(children(current))
    return found


def argument(call: cst.Call, position: int | None, keyword: str) -> cst.Arg | None:
    """The argument of a call given by keyword, or by position when there is no star before it."""
    for arg in call.args:
        if arg.keyword is not None and arg.keyword.value == keyword:
            return arg
    if position is not None and position < len(call.args):
        head = call.args[: position + 1]
        if all(arg.keyword is None and not arg.star for arg in head):
            return head[position]
    return None


@dataclass(frozen=True, eq=False)
class Binding:
    """One place that gives a name its value. `value` is the expression of a plain assignment, else None."""

    kind: str  # "assign", "parameter", "function" or "other"
    value: cst.CSTNode | None
    node: cst.CSTNode


def bindings(scope: Scope | cst.BaseSuite) -> dict[str, list[Binding]]:
    """All bindings of each name in one scope (or one block of it), in source order; not to be changed."""
    return remembered(scope, "bindings", _bindings)


def _bindings(scope: cst.CSTNode) -> dict[str, list[Binding]]:
    found: dict[str, list[Binding]] = {}

    def bind(target: cst.CSTNode, value: cst.CSTNode | None, node: cst.CSTNode) -> None:
        if isinstance(target, cst.Name):
            found.setdefault(target.value, []).append(Binding("assign" if value else "other", value, node))
        elif isinstance(target, (cst.Tuple, cst.List)):
            values: Sequence[cst.CSTNode | None] = [None] * len(target.elements)
            if isinstance(value, (cst.Tuple, cst.List)) and len(value.elements) == len(target.elements):
                pairs = [*value.elements, *target.elements]
                if not any(isinstance(element, cst.StarredElement) for element in pairs):
                    values = [element.value for element in value.elements]
            for element, part in zip(target.elements, values, strict=True):
                bind(element.value, part, node)

    if isinstance(scope, cst.FunctionDef):
        for param in walk(scope.params):
            if isinstance(param, cst.Param):
                found.setdefault(param.name.value, []).append(Binding("parameter", param.default, param))
    for node in own_nodes(scope):
        if isinstance(node, cst.Assign):
            for target in node.targets:
                bind(target.target, node.value, node)
        elif isinstance(node, cst.AnnAssign):
            if node.value is not None:
                bind(node.target, node.value, node)
        elif isinstance(node, (cst.AugAssign, cst.For, cst.NamedExpr)):
            bind(node.target, None, node)
        elif isinstance(node, cst.AsName):
            bind(node.name, None, node)
        elif isinstance(node, cst.ImportAlias) and node.asname is None:
            found.setdefault(dotted(node.name).split(".")[0], []).append(Binding("other", None, node))
        elif isinstance(node, (cst.FunctionDef, cst.ClassDef)):
            found.setdefault(node.name.value, []).append(Binding("function", node, node))
        elif isinstance(node, (cst.Global, cst.Nonlocal)):
            for item in node.names:
                bind(item.name, None, node)
    return found


@dataclass(frozen=True, eq=False)
class Kernel:
    """One jit function: something that is launched, or a helper that other jit functions call."""

    name: str
    node: cst.FunctionDef
    params: tuple[str, ...]
    constexprs: frozenset[str]
    defaults: Mapping[str, cst.BaseExpression]
    autotuned: bool
    heuristics: bool


@dataclass(frozen=True, eq=False)
class Launch:
    """One `kernel[grid](...)`. `args` maps kernel parameters and launch options (num_warps ...) to arguments."""

    kernel: Kernel
    call: cst.Call
    grid: tuple[cst.CSTNode, ...]
    scopes: tuple[Scope, ...]  # innermost first, the module last
    args: Mapping[str, cst.Arg]
    opaque: bool  # has *args or **kwargs, so a missing keyword may still be given
    where: str  # how to name it: the kernel, and which launch when there are several


@dataclass(frozen=True, eq=False)
class Knob:
    """The one integer literal that fixes a value, and the names it passes through on its way to the launch."""

    node: cst.Integer
    value: int
    names: tuple[str, ...]


class Source:
    """A parsed module. Raises `libcst.ParserSyntaxError` for text that libcst cannot parse."""

    def __init__(self, text: str) -> None:
        self.module = cst.parse_module(text)
        self.kernels: dict[str, Kernel] = {}
        self.repeated: set[str] = set()
        self._reach: dict[Kernel, list[Kernel]] = {}
        self._global_names = {
            item.name.value for node in walk(self.module) if isinstance(node, cst.Global) for item in node.names
        }
        for node in walk(self.module):
            if isinstance(node, cst.FunctionDef) and (kernel := _kernel(node)):
                if kernel.name in self.kernels:
                    self.repeated.add(kernel.name)
                self.kernels[kernel.name] = kernel
        for name in self.repeated:  # which of two definitions a launch means cannot be read off the text
            del self.kernels[name]

    def edit(self, changes: Mapping[cst.CSTNode, Change]) -> str:
        """Text of a copy of the module in which each given node is replaced; all else stays as written."""
        module = rebuild(self.module, changes)
        assert isinstance(module, cst.Module)
        # Only a few of a module's statements change, and writing out a tree is slow: the others were written before.
        if not module.has_trailing_newline or not module.body:
            return module.code
        parts = [*module.header, *module.body, *module.footer]
        return "".join(remembered(part, "text", module.code_for_node) for part in parts)

    def bindings(self, scope: Scope) -> dict[str, list[Binding]]:
        """`bindings` of a scope."""
        return bindings(scope)

    @cached_property
    def names(self) -> set[str]:
        """Every name in the module, attributes and keywords too: what a new name must differ from."""
        return {node.value for node in walk(self.module) if isinstance(node, cst.Name)}

    def fresh(self, name: str) -> str:
        """The name, with underscores behind it until it is new to the module."""
        while name in self.names:
            name += "_"
        return name

    @cached_property
    def launches(self) -> list[Launch]:
        """Every launch of a known kernel, in source order."""
        sites: list[tuple[Kernel, cst.Call, tuple[Scope, ...]]] = []
        stack: list[tuple[cst.CSTNode, tuple[Scope, ...]]] = [(self.module, (self.module,))]
        while stack:
            node, scopes = stack.pop()
            if isinstance(node, cst.FunctionDef):
                if _kernel(node):
                    continue
                scopes = (node, *scopes)
            if isinstance(node, cst.Call) and isinstance(node.func, cst.Subscript):
                kernel = self.kernels.get(dotted(node.func.value))
                if kernel:
                    sites.append((kernel, node, scopes))
            stack.extend((child, scopes) for child in reversed(children(node)))
        total = {kernel: sum(1 for other, _, _ in sites if other is kernel) for kernel, _, _ in sites}
        seen: dict[Kernel, int] = {}
        found = []
        for kernel, call, scopes in sites:
            seen[kernel] = seen.get(kernel, 0) + 1
            where = kernel.name if total[kernel] == 1 else f"{kernel.name} (launch {seen[kernel]} of {total[kernel]})"
            args, opaque = _arguments(kernel, call)
            grid = tuple(element.slice for element in call.func.slice)  # type: ignore[attr-defined]
            found.append(Launch(kernel, call, grid, scopes, args, opaque, where))
        return found

    def reach(self, kernel: Kernel) -> list[Kernel]:
        """The kernel and every jit function of the module that it calls, directly or not; not to be changed."""
        if kernel in self._reach:
            return self._reach[kernel]
        found = self._reach[kernel] = [kernel]
        for current in found:
            for node in walk(current.node.body):
                helper = self.kernels.get(node.func.value) if _calls_a_name(node) else None  # type: ignore
                if helper and helper not in found:
                    found.append(helper)
        return found

    def resolve(self, launch: Launch, param: str) -> Knob | str:
        """The knob of a constexpr parameter at a launch, or in words why there is none."""
        arg = launch.args.get(param)
        if arg is not None:
            return self.trace(arg.value, launch.scopes, param)
        if launch.opaque:
            return f"{param} may come through *args or **kwargs"
        if launch.kernel.autotuned:
            return f"{param} belongs to a triton.autotune config"
        if launch.kernel.heuristics:
            return f"{param} comes from triton.heuristics"
        if any(other.kernel is launch.kernel and param in other.args for other in self.launches):
            return f"{param} is passed by another launch only"
        default = launch.kernel.defaults.get(param)
        return self.trace(default, (self.module,), param) if default is not None else f"{param} gets no value"

    def trace(self, value: cst.CSTNode, scopes: Sequence[Scope], label: str) -> Knob | str:
        """Follow names from an expression to an integer literal; words if the way is not a single one."""
        names: list[str] = []
        while not isinstance(value, cst.Integer):
            if not isinstance(value, cst.Name):
                return f"{label} is computed ({_short(value)})"
            name = value.value
            if name in names or name in self._global_names:
                return f"{label} comes from {name}, which other code assigns"
            names.append(name)
            while scopes and name not in self.bindings(scopes[0]):
                scopes = scopes[1:]
            if not scopes:
                return f"{label} comes from {name}, which this module does not define"
            found = self.bindings(scopes[0])[name]
            if found[0].kind == "parameter":
                return f"{label} comes from {name}, an argument of a function whose signature is frozen"
            if len(found) > 1:
                return f"{label} comes from {name}, which is assigned more than once"
            if found[0].kind != "assign" or found[0].value is None:
                return f"{label} comes from {name}, which is not a plain assignment"
            value = found[0].value
        return Knob(value, value.evaluated_value, tuple(names))

    def grid_closure(self, launch: Launch) -> list[cst.CSTNode]:
        """The expressions that make the launch's grid: its subscript and the definitions of the names in it."""
        found = list(launch.grid)
        seen: set[str] = set()
        for node in found:
            for name in sorted(names_in(node) - seen):
                seen.add(name)
                for scope in launch.scopes[:-1] or launch.scopes:
                    for binding in self.bindings(scope).get(name, []):
                        if binding.value is not None and binding.kind in ("assign", "function"):
                            found.append(binding.value)
        return found


def _calls_a_name(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Call) and isinstance(node.func, cst.Name)


def _short(node: cst.CSTNode) -> str:
    text = " ".join(code(node).split())
    return text if len(text) <= 40 else text[:37] + "..."


def _kernel(node: cst.FunctionDef) -> Kernel | None:
    """The function as a kernel if a decorator of it says jit."""
    marks = []
    for decorator in node.decorators:
        inner = decorator.decorator
        marks.append(dotted(inner.func if isinstance(inner, cst.Call) else inner).split("."))
    if not any(mark[-1] == "jit" and mark[0] not in _FOREIGN_JIT for mark in marks):
        return None
    params = [*node.params.posonly_params, *node.params.params, *node.params.kwonly_params]
    constexprs = set()
    for param in params:
        if param.annotation is not None:
            text = code(param.annotation.annotation).strip("\"' ")
            if text.split(".")[-1] == "constexpr":
                constexprs.add(param.name.value)
    return Kernel(
        name=node.name.value,
        node=node,
        params=tuple(param.name.value for param in params),
        constexprs=frozenset(constexprs),
        defaults={param.name.value: param.default for param in params if param.default is not None},
        autotuned=any(mark[-1] == "autotune" for mark in marks),
        heuristics=any(mark[-1] == "heuristics" for mark in marks),
    )


def _arguments(kernel: Kernel, call: cst.Call) -> tuple[dict[str, cst.Arg], bool]:
    """Arguments of a call by parameter name, and whether a star hides some."""
    found: dict[str, cst.Arg] = {}
    opaque = positional_lost = False
    for index, arg in enumerate(call.args):
        if arg.star:
            opaque = True
            positional_lost |= arg.star == "*"
        elif arg.keyword is not None:
            found[arg.keyword.value] = arg
        elif index < len(kernel.params) and not positional_lost:
            found[kernel.params[index]] = arg
    return found, opaque


def helper_arguments(kernel: Kernel, call: cst.Call) -> dict[str, cst.Arg]:
    """Arguments of a call of a jit helper by parameter name."""
    return _arguments(kernel, call)[0]
