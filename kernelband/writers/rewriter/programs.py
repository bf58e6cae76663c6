"""How many programs a launch starts, and launches that start another number of them.

Owns: reading the grid of a launch off the text, handing the number of programs to the kernel (as an argument, or
computed inside where an autotuned tile size decides it), and the changed launch. It never decides how many programs
there should be: the rule families do. What cannot be read off the text raises `Declined`, in words.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import libcst as cst

from kernelband.writers.rewriter.kernels import (
    Kernel,
    Launch,
    Source,
    as_ast,
    called,
    code,
    dotted,
    names_in,
    normal,
    walk,
)
from kernelband.writers.rewriter.launch_params import add_keyword
from kernelband.writers.rewriter.looped import Declined, check_returns, is_text, name_nodes
from kernelband.writers.rewriter.tiles import program_axis
from kernelband.writers.rewriter.tree import Change, children, rebuild

_ATOM = (cst.Name, cst.Integer, cst.Attribute, cst.Call, cst.Subscript)
_AROUND_A_LAUNCH = (cst.Expr, cst.Assign, cst.AnnAssign, cst.Return)
_LOCKS = ("atomic_cas", "atomic_xchg", "inline_asm_elementwise", "grid_sync", "gdc_wait")


@dataclass(frozen=True)
class Grid:
    """How many programs a launch starts along each axis: source text, which may read the dictionary named `meta`."""

    sizes: tuple[str, ...]
    meta: str | None


def read_grid(source: Source, launch: Launch) -> Grid:
    """The grid of a launch without axes at its end that are literally 1."""
    parts, meta = [part.value if isinstance(part, cst.Index) else part for part in launch.grid], None
    if len(parts) == 1:
        value = parts[0]
        if isinstance(value, cst.Name):
            found = source.bindings(launch.scopes[0]).get(value.value, [])
            values = [binding.value if binding.kind in ("assign", "function") else None for binding in found]
            if values and all(isinstance(item, (cst.Tuple, cst.List)) for item in values):
                lengths = {len(item.elements) for item in values}  # type: ignore[union-attr]
                if len(lengths) != 1 or _starred(values[0]):
                    raise Declined(f"the grid {value.value} has no fixed number of axes")
                sizes = [f"{value.value}[{axis}]" for axis in range(lengths.pop())]
                last = values[0].elements if len(values) == 1 else ()  # type: ignore[union-attr]
                while len(sizes) > 1 and last and code(last[len(sizes) - 1].value) == "1":
                    sizes.pop()
                return Grid(tuple(sizes), None)
            if len(found) != 1 or values[0] is None:
                raise Declined(f"the grid {value.value} is not defined once, beside the launch")
            value = values[0]
        if isinstance(value, (cst.Lambda, cst.FunctionDef)):
            value, meta = _of_function(value)
        if not isinstance(value, (cst.Tuple, cst.List)) or _starred(value):
            raise Declined(f"the grid of {launch.where} is not spelled as a tuple")
        parts = [element.value for element in value.elements]
    sizes = [_bracketed(part) for part in parts]
    while len(sizes) > 1 and sizes[-1] == "1":
        sizes.pop()
    return Grid(tuple(sizes), meta)


def _starred(value: cst.CSTNode | None) -> bool:
    return any(isinstance(item, cst.StarredElement) for item in getattr(value, "elements", ()))


def _of_function(function: cst.Lambda | cst.FunctionDef) -> tuple[cst.CSTNode, str]:
    """What a grid function returns, and the name of its one parameter."""
    params = function.params.params
    if len(params) != 1 or params[0].default is not None or function.params.kwonly_params:
        raise Declined("the grid is a function of more than the meta-parameters")
    value: cst.CSTNode | None = function.body
    if isinstance(function, cst.FunctionDef):
        lines = [line for line in function.body.body if not is_text(line)]
        inner = lines[0].body if len(lines) == 1 and isinstance(lines[0], cst.SimpleStatementLine) else lines
        value = inner[0].value if len(inner) == 1 and isinstance(inner[0], cst.Return) else None
    if value is None:
        raise Declined("the grid is a function that does more than return a tuple")
    return value, params[0].name.value


def _bracketed(node: cst.CSTNode) -> str:
    text = " ".join(line.split("#")[0].strip() for line in code(node).splitlines())
    return text if isinstance(node, _ATOM) or list(getattr(node, "lpar", [])) else f"({text})"


def product(sizes: Sequence[str]) -> str:
    """Text of the number of programs in all."""
    return " * ".join(sizes)


def _at_launch(launch: Launch, grid: Grid, text: str) -> str:
    """A size as it reads beside the launch, with the meta-parameters replaced by what the launch passes."""
    if grid.meta is None:
        return text
    tree = cst.parse_expression(text)
    changes: dict[cst.CSTNode, Change] = {}
    for node in walk(tree):
        key = _meta_key(as_ast(node), grid.meta) if isinstance(node, cst.Subscript) else None
        if key is not None:
            arg = launch.args.get(key)
            value = arg.value if arg is not None else launch.kernel.defaults.get(key)
            decided = launch.kernel.autotuned or launch.kernel.heuristics  # a default gives way to these
            if value is None or (arg is None and (decided or not isinstance(value, cst.Integer))):
                raise Declined(f"the grid reads {key}, which the launch does not pass")
            changes[node] = cst.parse_expression(_bracketed(value))
    result = code(rebuild(tree, changes))
    if grid.meta in names_in(cst.parse_expression(result)):
        raise Declined("the grid uses its meta-parameters as more than a dictionary")
    return result


def _meta_key(node: ast.expr, meta: str | None) -> str | None:
    """X of `META["X"]`."""
    if (
        meta is not None
        and isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Name)
        and node.value.id == meta
        and isinstance(node.slice, ast.Constant)
        and isinstance(node.slice.value, str)
    ):
        return node.slice.value
    return None


def _in_kernel(source: Source, launch: Launch, grid: Grid, text: str) -> str:
    """A size in terms of the kernel's own parameters."""
    local = source.bindings(launch.scopes[0])
    inside = source.bindings(launch.kernel.node)
    language = spelled_language(launch.kernel)
    passed = {
        normal(arg.value): name
        for name, arg in launch.args.items()
        if name in launch.kernel.params and len(inside[name]) == 1 and not isinstance(arg.value, cst.Integer)
    }

    def settled(node: ast.expr) -> bool:
        names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        return all(len(local.get(name, ())) == 1 for name in names)

    def spell(node: ast.expr, depth: int) -> str:
        key = _meta_key(node, grid.meta)
        if key is not None and key in launch.kernel.params and len(inside[key]) == 1:
            return key
        plain = ast.unparse(node)
        if plain in passed and settled(node):
            return passed[plain]
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return plain
        if isinstance(node, ast.Name) and settled(node) and depth < 8:
            value = local[node.id][0].value
            if value is not None and local[node.id][0].kind == "assign":
                return spell(as_ast(value), depth + 1)
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv)):
            sign = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//"}[type(node.op)]
            return f"({spell(node.left, depth)} {sign} {spell(node.right, depth)})"
        if isinstance(node, ast.Call) and len(node.args) == 2 and not node.keywords:
            name = ast.unparse(node.func).split(".")[-1]
            if name in ("cdiv", "min", "max"):
                name = f"{language}.cdiv" if name == "cdiv" else name
                return f"{name}({spell(node.args[0], depth)}, {spell(node.args[1], depth)})"
        raise Declined(f"the grid depends on {plain}, which the kernel does not know")

    return spell(ast.parse(text, mode="eval").body, 0)


def spelled_language(kernel: Kernel) -> str:
    """How this kernel spells triton.language, read off its tl.program_id."""
    for node in walk(kernel.node.body):
        if isinstance(node, cst.Call) and called(node) == "program_id" and isinstance(node.func, cst.Attribute):
            return dotted(node.func.value)
    raise Declined("does not ask for its program id through triton.language")


@dataclass(frozen=True)
class Site:
    """One launch of the kernel that is changed: its grid, and the statement line that it stands in."""

    launch: Launch
    grid: Grid
    line: cst.SimpleStatementLine


@dataclass(frozen=True)
class Plan:
    """Where a kernel and all its launches can be changed, and the text of each program count inside the kernel.

    `argument`: the counts are handed to the kernel, and `counts` of a site are their texts beside the launch;
    else the kernel computes them itself, from the texts in `inside`.
    """

    kernel: Kernel
    sites: tuple[Site, ...]
    argument: bool
    inside: tuple[str, ...]
    counts: Mapping[cst.CSTNode, tuple[str, ...]]


def plan(source: Source, kernel: Kernel) -> Plan:
    """What is needed to change the number of programs of a kernel, at all of its launches."""
    launches = [launch for launch in source.launches if launch.kernel is kernel]
    if not launches:
        raise Declined("is not launched in this source")
    _check_kernel(source, kernel, launches)
    parents = {child: node for node in walk(source.module) for child in children(node)}
    sites = []
    for launch in launches:
        if any(arg.star for arg in launch.call.args):
            raise Declined("is launched with *args or **kwargs")
        sites.append(Site(launch, read_grid(source, launch), _line_of(launch, parents)))
    if len({site.line for site in sites}) != len(sites):
        raise Declined("is launched twice in one line")
    if len({len(site.grid.sizes) for site in sites}) != 1 or len(sites[0].grid.sizes) > 3:
        raise Declined("is launched with grids of unlike numbers of axes")
    try:
        counts: dict[cst.CSTNode, tuple[str, ...]] = {
            site.launch.call: tuple(_at_launch(site.launch, site.grid, size) for size in site.grid.sizes)
            for site in sites
        }
        return Plan(kernel, tuple(sites), True, (), counts)
    except Declined:
        if not kernel.autotuned and not kernel.heuristics:
            raise
    texts = {tuple(_in_kernel(source, site.launch, site.grid, size) for size in site.grid.sizes) for site in sites}
    if len(texts) != 1:
        raise Declined("is launched with grids that read differently inside the kernel")
    return Plan(kernel, tuple(sites), False, texts.pop(), {})


def _check_kernel(source: Source, kernel: Kernel, launches: Sequence[Launch]) -> None:
    """Raises Declined where the body of a kernel may not be run several times in one program."""
    ours = {launch.call.func.value for launch in launches}  # type: ignore[attr-defined]
    others = [node for node in name_nodes(source.module, kernel.name) if node not in ours and node is not kernel.node.name]
    if others:
        raise Declined("is named elsewhere than at its launches")
    own = [node for node in walk(kernel.node.body) if called(node) == "program_id"]
    reach = source.reach(kernel)
    if kernel in reach[1:] or any(called(n) == "program_id" for part in reach[1:] for n in walk(part.node.body)):
        raise Declined("has a helper that asks for the program id itself")
    if not own:
        raise Declined("asks for no program id")
    if any(program_axis(node) not in ("0", "1", "2") for node in own):
        raise Declined("asks for the program id of an axis that is not a literal")
    for part in reach:
        plain = {node.value for node in walk(part.node.body) if isinstance(node, cst.Expr)}
        for node in walk(part.node.body):
            name = called(node)
            if name == "num_programs":
                raise Declined("uses tl.num_programs, so it may stride over its work already")
            if name in _LOCKS or (name.startswith("atomic_") and node not in plain):
                raise Declined(f"uses {name}, which may depend on all programs running at once")
    if not isinstance(kernel.node.body, cst.IndentedBlock):
        raise Declined("has its body in the line of its name")
    check_returns(kernel)
    for name, found in source.bindings(kernel.node).items():
        if name in kernel.constexprs and len(found) > 1:
            raise Declined(f"assigns its constexpr {name}")
        if name in ("range", "min", "max"):
            raise Declined(f"has a local name that hides {name}")


def _line_of(launch: Launch, parents: Mapping[cst.CSTNode, cst.CSTNode]) -> cst.SimpleStatementLine:
    node = parents[launch.call]
    while isinstance(node, _AROUND_A_LAUNCH):
        node = parents[node]
    if not isinstance(node, cst.SimpleStatementLine):
        raise Declined("is launched in the middle of an expression or of a one-line block")
    return node


def with_parameters(source: Source, work: Plan, names: Sequence[str]) -> dict[cst.CSTNode, Change]:
    """The change that gives the kernel parameters of these names, before the first that has a default."""
    kernel = work.kernel
    params = list(kernel.node.params.params)
    place = next((index for index, param in enumerate(params) if param.default is not None), len(params))
    if not isinstance(kernel.node.params.star_arg, cst.MaybeSentinel) or kernel.node.params.posonly_params:
        raise Declined("has parameters behind a star or a slash")
    for site in work.sites:
        if place < len(params) and sum(1 for arg in site.launch.call.args if arg.keyword is None) > place:
            raise Declined("is launched with a value for a default by position")

    def add(node: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(node, cst.Parameters)
        kept = list(node.params)
        spaced = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        new = [cst.Param(cst.Name(name), comma=spaced) for name in names]
        if place == len(kept) and kept:
            last, ending = kept[-1], kept[-1].comma
            if isinstance(ending, cst.Comma):
                new[-1] = new[-1].with_changes(comma=ending)
            else:
                new[-1] = new[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
                new[-1] = new[-1].with_changes(whitespace_after_param=last.whitespace_after_param)
                last = last.with_changes(whitespace_after_param=cst.SimpleWhitespace(""))
            kept[-1] = last.with_changes(comma=spaced)
        return node.with_changes(params=[*kept[:place], *new, *kept[place:]])

    return {kernel.node.params: add} if names else {}


def relaunched(
    source: Source, site: Site, lines: Sequence[str], grid: str, arguments: Mapping[str, str]
) -> dict[cst.CSTNode, Change]:
    """The change of one launch: statements before its line, another grid, more arguments."""
    config = source.module.config_for_parsing
    subscript = [cst.SubscriptElement(cst.Index(cst.parse_expression(grid)))]

    def call(node: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(node, cst.Call)
        new = node.with_changes(func=node.func.with_changes(slice=subscript))
        for name, value in arguments.items():
            new = add_keyword(new, name, cst.parse_expression(value))
        return new

    def line(node: cst.CSTNode) -> cst.FlattenSentinel:
        head = [cst.parse_statement(text, config) for text in lines]
        if head:
            head[0] = head[0].with_changes(leading_lines=node.leading_lines)  # type: ignore[attr-defined, call-arg]
            node = node.with_changes(leading_lines=[])
        return cst.FlattenSentinel([*head, node])

    return {site.launch.call: call, site.line: line}


def require(source: Source, launch: Launch, name: str) -> None:
    """Raises Declined unless the module binds the name and the launch's functions do not hide it."""
    hidden = any(name in source.bindings(scope) for scope in launch.scopes[:-1])
    if hidden or name not in source.bindings(launch.scopes[-1]):
        raise Declined(f"needs {name}, which is not imported for the launch")
