"""The configurations of an autotuned kernel, read off its decorator and spelled again.

Owns: `triton.Config` calls in a list, in a comprehension over literals, in a module constant or returned by a function
of the module, as plain values; and the text of a list of them. It never decides which configurations are worth trying.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import libcst as cst

from kernelband.writers.rewriter.kernels import Kernel, Source, argument, as_ast, code, dotted
from kernelband.writers.rewriter.looped import Declined
from kernelband.writers.rewriter.tunables import DEFAULTS

_POSITIONAL = ("kwargs", "num_warps", "num_stages", "num_ctas", "maxnreg")
_MOST = 200


@dataclass(frozen=True)
class Config:
    """One configuration: the meta-parameters, and the launch options that it sets (num_warps ...)."""

    meta: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]

    def option(self, name: str) -> int:
        """A launch option, or what Triton takes when the configuration does not say."""
        return int(dict(self.options).get(name, DEFAULTS[name]))

    def replaced(self, meta: Mapping[str, Any], options: Mapping[str, Any]) -> Config:
        """The configuration with other values."""
        return Config(tuple({**dict(self.meta), **meta}.items()), tuple({**dict(self.options), **options}.items()))

    def passed(self) -> dict[str, Any]:
        """What a launch has to pass to get the same kernel."""
        return {**dict(self.meta), **{name: self.option(name) for name in DEFAULTS}, **dict(self.options)}

    @property
    def label(self) -> str:
        """The configuration in a few words."""
        return ", ".join(f"{name} {value}" for name, value in self.passed().items())


@dataclass(frozen=True)
class Tuned:
    """An autotune decorator: its configurations, the argument that lists them, and whether it has hooks."""

    decorator: cst.Decorator
    configs: tuple[Config, ...]
    listed: cst.BaseExpression
    maker: str  # how the source spells triton.Config
    hooks: frozenset[str]


def read(source: Source, kernel: Kernel) -> Tuned:
    """The autotune decorator of a kernel. Raises Declined for configurations that cannot be read off the text."""
    decorator = next(item for item in kernel.node.decorators if _is_autotune(item))
    call = decorator.decorator
    assert isinstance(call, cst.Call)
    given = argument(call, 0, "configs")
    if given is None or any(arg.star for arg in call.args):
        raise Declined("has configs that are not an argument of its triton.autotune")
    calls = _calls(source, as_ast(_followed(source, given.value)))
    found = [_config(item) for item in calls]
    if not found:
        raise Declined("has no configs")
    hooks = {
        arg.keyword.value
        for arg in call.args
        if arg.keyword is not None and not (isinstance(arg.value, cst.Name) and arg.value.value == "None")
    } & {"prune_configs_by", "reset_to_zero", "pre_hook", "post_hook"}
    return Tuned(decorator, tuple(dict.fromkeys(found)), given.value, ast.unparse(calls[0].func), frozenset(hooks))


def _is_autotune(item: cst.Decorator) -> bool:
    return isinstance(item.decorator, cst.Call) and dotted(item.decorator.func).split(".")[-1] == "autotune"


def _followed(source: Source, value: cst.CSTNode) -> cst.CSTNode:
    """The list behind a module constant, or behind a function of the module that only returns one."""
    called_name = value.func if isinstance(value, cst.Call) and not value.args else value
    if not isinstance(called_name, cst.Name):
        return value
    found = source.bindings(source.module).get(called_name.value, [])
    inner = found[0].value if len(found) == 1 else None
    if isinstance(value, cst.Call):
        lines = list(inner.body.body) if isinstance(inner, cst.FunctionDef) else []
        only = lines[0].body[0] if len(lines) == 1 and isinstance(lines[0], cst.SimpleStatementLine) else None
        inner = only.value if isinstance(only, cst.Return) else None
    if inner is None:
        raise Declined(f"has configs that come from {code(value)}")
    return inner


def _calls(source: Source, listed: ast.expr) -> list[ast.Call]:
    """The calls of triton.Config in a list or in a comprehension over literals."""
    if isinstance(listed, ast.List):
        calls = list(listed.elts)
    elif isinstance(listed, ast.ListComp):
        calls = []
        for names in _passes(listed.generators):
            text = ast.unparse(listed.elt)
            calls.append(_Filled(names).visit(ast.parse(text, mode="eval").body))
    elif isinstance(listed, ast.BinOp) and isinstance(listed.op, ast.Add):
        calls = [*_calls(source, listed.left), *_calls(source, listed.right)]
    else:
        raise Declined(f"has configs that are computed ({ast.unparse(listed)[:40]})")
    if len(calls) > _MOST or not all(isinstance(item, ast.Call) for item in calls):
        raise Declined("has configs that are not all calls of triton.Config")
    return calls  # type: ignore[return-value]


class _Filled(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self._names[node.id]) if node.id in self._names else node


def _passes(generators: Sequence[ast.comprehension]) -> list[dict[str, Any]]:
    """The names of each pass of a comprehension."""
    axes = []
    for part in generators:
        values = _literal(part.iter)
        if part.ifs or not isinstance(part.target, ast.Name) or not isinstance(values, (list, tuple)):
            raise Declined("has configs that a comprehension chooses by a condition")
        axes.append([(part.target.id, value) for value in values])
    return [dict(names) for names in itertools.islice(itertools.product(*axes), _MOST + 1)]


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise Declined(f"has configs that are not literals ({ast.unparse(node)[:40]})") from None


def _config(call: ast.Call) -> Config:
    if ast.unparse(call.func).split(".")[-1] != "Config" or len(call.args) > len(_POSITIONAL):
        raise Declined("has configs that are not all calls of triton.Config")
    given = dict(zip(_POSITIONAL, call.args, strict=False))
    given.update({item.arg: item.value for item in call.keywords if item.arg is not None})
    if any(item.arg is None for item in call.keywords):
        raise Declined("has configs with ** in them")
    values = {name: _literal(value) for name, value in given.items()}
    values = {name: value for name, value in values.items() if value is not None}
    meta = values.pop("kwargs", {})
    if "pre_hook" in values or not isinstance(meta, dict):
        raise Declined("has a config with a hook")
    return Config(tuple(meta.items()), tuple(values.items()))


def spelled(configs: Sequence[Config], maker: str = "triton.Config") -> str:
    """The text of a list of configurations."""
    lines = []
    for config in configs:
        meta = "{" + ", ".join(f'"{name}": {value!r}' for name, value in config.meta) + "}"
        options = "".join(f", {name}={value!r}" for name, value in config.options)
        lines.append(f"        {maker}({meta}{options}),\n")
    return "[\n" + "".join(lines) + "    ]"
