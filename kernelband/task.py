"""Tasks: what must be computed and how we know. Types, and the loading of a task folder.

A task folder holds `task.py` (trusted: oracle, inputs, cases, contract) and `kernel.py` (the baseline: untrusted, like
any candidate; it is read here as text and never imported). This file runs no kernel and judges nothing.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kernelband.errors import UserError, nearest

Role = Literal["check", "timed", "held_out"]
Compare = Literal["allclose", "exact", "permutation", "predicate"]
FAMILIES = ("drawn", "offset", "scaled", "tiny", "spike", "levels", "integers", "ties", "cancelling", "uneven")
LAYOUTS = ("contiguous", "strided")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
MOST_TEXT = 500_000
"""Characters of a source: it travels in one message of at most 1 MiB."""

DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")


@dataclass(frozen=True)
class Case:
    """One named workload. `params` are the task's own numbers (rows, cols, ...), given to its input generator."""

    name: str
    role: Role
    dtype: str
    params: Mapping[str, int | float | str | bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Output:
    """One result of the entry point.

    source: 'return' (its index-th tensor, nested results counted in order), or the name of a mutated argument.
    compare: allclose (error relative to an honest run of the oracle in the case's dtype), exact (bit equality),
        permutation (equal after sorting the last axis), predicate (`predicate(inputs, output) -> bool`).
    """

    source: str = "return"
    index: int = 0
    compare: Compare = "allclose"
    predicate: Callable[[Mapping[str, Any], Any], bool] | None = None


@dataclass(frozen=True)
class Tolerance:
    """Limits on the error against the fp64 oracle, relative to an honest run in the case's dtype.

    rmse_ratio: RMS error over the honest RMS error. max_ratio: largest error over the honest largest error.
    centred: RMS error over the standard deviation of a row, asked only where the honest run itself is below a fifth
        of it. floor_ulp: error that is always allowed, in units in the last place of the output's largest magnitude
        (float64: 64 times that, see compare.FLOORS).
    """

    rmse_ratio: float = 3.0
    max_ratio: float = 4.0
    centred: float = 0.05
    floor_ulp: float = 1.0


@dataclass(frozen=True)
class Contract:
    """What every right kernel promises.

    mutates: arguments that the entry point may write. constant: arguments that stay the same between calls (weights:
    may be prepacked once). deterministic: equal bits for equal inputs. layouts: memory layouts of tensor arguments that must
    be accepted. shapes: inclusive range of each of the cases' integer parameters. allow: who may do the work
    ('own' kernels, 'vendor' libraries, 'torch' operations). direction: 'forward' is supported.
    families: ways in which evaluators may redraw floating inputs beside the drawn ones.
    """

    outputs: tuple[Output, ...] = (Output(),)
    mutates: tuple[str, ...] = ()
    constant: tuple[str, ...] = ()
    deterministic: bool = False
    dtypes: tuple[str, ...] = ("float32",)
    layouts: tuple[str, ...] = ("contiguous",)
    shapes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    tolerance: Tolerance = field(default_factory=Tolerance)
    allow: tuple[str, ...] = ("own",)
    direction: Literal["forward", "backward", "both"] = "forward"
    families: tuple[str, ...] = FAMILIES


@dataclass(frozen=True)
class Task:
    """A task as its author writes it.

    entry: name of the function in kernel.py; its parameters are the keys of what `inputs` returns, in order.
    reference: the oracle, called with the same arguments; works in any floating dtype (it is called in fp64).
    inputs: (case, generator) -> arguments by name; tensors are made on `generator.device` with that generator.
    work: case -> (bytes, flops), the least that any right kernel must move and compute.
    peers: other implementations to stand beside the winner, by name, besides eager and torch.compile of the reference;
        called like the reference, in the case's dtype.
    """

    name: str
    entry: str
    reference: Callable[..., Any]
    inputs: Callable[[Case, Any], dict[str, Any]]
    cases: tuple[Case, ...]
    contract: Contract
    work: Callable[[Case], tuple[float, float]] | None = None
    peers: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    def with_role(self, *roles: Role) -> tuple[Case, ...]:
        return tuple(c for c in self.cases if c.role in roles)


@dataclass(frozen=True)
class LoadedTask:
    """A task with its baseline source (text) and a hash over both files, which names it in a journal. parameters: names of the
    entry point's parameters in order, which are those of the reference and of inputs()."""

    task: Task
    baseline: str
    folder: Path
    digest: str
    parameters: tuple[str, ...]


def load(folder: str | Path) -> LoadedTask:
    """Load and check a task folder. Imports task.py (trusted); only parses kernel.py.

    Raises UserError: no such folder or file, task.py raises, no Task in it, a contract that is not supported or
    contradicts itself, no such entry point in kernel.py, or an entry point with another signature.
    """
    root = Path(folder)
    try:
        there = root.is_dir()
    except OSError:  # a name that no file system takes
        there = False
    if not there:
        raise UserError(f"no such task: {str(folder)!r} is not a folder. A task is a folder with task.py and kernel.py; "
                        f"see examples/ and docs/tasks.md.")
    texts = {}
    for name in ("task.py", "kernel.py"):
        path = root / name
        if not path.is_file():
            raise UserError(f"{path} is missing: a task folder holds task.py (oracle, cases, contract) and kernel.py "
                            f"(the baseline).")
        try:
            texts[name] = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as err:
            raise UserError(f"{path} cannot be read as UTF-8 text: {err}.") from None
        if len(texts[name]) > MOST_TEXT:
            raise UserError(f"{path} has {len(texts[name])} characters; at most {MOST_TEXT} are taken. Keep data in files of "
                            f"its own.")
    task = _import_task(root / "task.py")
    _check_shape(task, root / "task.py")
    _check_contract(task, root / "task.py")
    names = _check_entry(task, texts["kernel.py"], root / "kernel.py")
    _check_names(task, names, root / "task.py")
    digest = hashlib.sha256("\0".join(texts[n] for n in sorted(texts)).encode()).hexdigest()[:16]
    return LoadedTask(task, texts["kernel.py"], root.resolve(), digest, tuple(names))


def _import_task(path: Path) -> Task:
    name = "kernelband_task_" + hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as err:
        line = next((f" (line {t.tb_lineno})" for t in _frames(err.__traceback__) if t.tb_frame.f_code.co_filename
                     == str(path)), "")
        raise UserError(f"{path}{line} raised {type(err).__name__} while it was imported: {err}. Mend the task file; what it "
                        f"imports must be installed, for it is imported by workers in other folders too.") from None
    found = [v for v in vars(module).values() if isinstance(v, Task)]
    if len(found) != 1:
        raise UserError(f"{path} must define exactly one kernelband.task.Task, usually named `task`; "
                        f"it defines {len(found)}.")
    return found[0]


def _frames(tb):
    frames = []
    while tb:
        frames.append(tb)
        tb = tb.tb_next
    return reversed(frames)


def _check_shape(task: Task, path: Path) -> None:
    """That every field holds what its annotation says: a task file is written by hand, and dataclasses check nothing."""

    def demand(fine: bool, field_: str, value: Any, wanted: str) -> None:
        if not fine:
            raise UserError(f"{path}: {field_} must be {wanted}, not {value!r:.80}.")

    contract = task.contract
    demand(isinstance(task.name, str) and bool(NAME.fullmatch(task.name)), "Task.name", task.name,
           "a name of letters, digits, '-', '_' and '.' (it names files)")
    demand(isinstance(task.entry, str) and task.entry.isidentifier(), "Task.entry", task.entry, "the name of a function")
    for field_ in ("reference", "inputs"):
        demand(callable(getattr(task, field_)), f"Task.{field_}", getattr(task, field_), "a function")
    demand(task.work is None or callable(task.work), "Task.work", task.work, "a function or None")
    demand(isinstance(contract, Contract), "Task.contract", contract, "a Contract")
    demand(isinstance(task.cases, (tuple, list)) and all(isinstance(c, Case) for c in task.cases), "Task.cases", task.cases,
           "a tuple of Case")
    for case in task.cases:
        demand(isinstance(case.name, str) and case.name.isprintable() and case.name.strip() != "", "Case.name", case.name,
               "a printable name")
        demand(isinstance(case.params, Mapping), f"params of case {case.name!r}", case.params, "a mapping")
    outputs = contract.outputs
    demand(isinstance(outputs, (tuple, list)) and len(outputs) > 0 and all(isinstance(o, Output) for o in outputs),
           "Contract.outputs", outputs, "a tuple of at least one Output: without one any kernel would be right")
    for out in outputs:
        demand(isinstance(out.index, int) and out.index >= 0, "Output.index", out.index, "a number from 0 on")
    for field_ in ("mutates", "constant", "dtypes", "layouts", "allow", "families"):
        value = getattr(contract, field_)
        demand(isinstance(value, (tuple, list)) and all(isinstance(v, str) for v in value), f"Contract.{field_}", value,
               "a tuple of names, such as ('x',)")
    demand(isinstance(contract.tolerance, Tolerance) and all(
        isinstance(v, (int, float)) and v >= 0 for v in vars(contract.tolerance).values()), "Contract.tolerance",
        contract.tolerance, "a Tolerance of numbers that are not negative")
    demand(isinstance(contract.shapes, Mapping) and all(
        isinstance(v, (tuple, list)) and len(v) == 2 and all(isinstance(n, int) for n in v) for v in contract.shapes.values()),
        "Contract.shapes", contract.shapes, "a mapping of a parameter to (least, most)")


def _check_contract(task: Task, path: Path) -> None:
    where, contract = f"{path}:", task.contract
    if contract.direction != "forward":
        raise UserError(f"{where} direction={contract.direction!r} is not supported yet: only 'forward' is, because "
                        f"gradients need an oracle and outputs of their own. Make the backward pass a task.")
    names = [c.name for c in task.cases]
    if len(set(names)) != len(names):
        raise UserError(f"{where} case names must differ; twice: {sorted({n for n in names if names.count(n) > 1})}.")
    for case in task.cases:
        if case.role not in ("check", "timed", "held_out"):
            raise UserError(f"{where} case {case.name!r} has role {case.role!r}; "
                            f"{nearest(str(case.role), ('check', 'timed', 'held_out'))}")
    for role in ("check", "timed"):
        if not task.with_role(role):  # type: ignore[arg-type]
            raise UserError(f"{where} there is no case with role {role!r}; a task needs at least one 'check' case "
                            f"(small, edge shapes) and one 'timed' case.")
    for case in task.cases:
        if case.dtype not in contract.dtypes:
            raise UserError(f"{where} case {case.name!r} has dtype {case.dtype!r}, which is not in the contract's "
                            f"dtypes {list(contract.dtypes)}.")
        for key, (low, high) in contract.shapes.items():
            value = case.params.get(key)
            if isinstance(value, int) and not low <= value <= high:
                raise UserError(f"{where} case {case.name!r} has {key}={value}, outside of the contract's range "
                                f"[{low}, {high}].")
    for dtype in contract.dtypes:
        if dtype not in DTYPES:
            raise UserError(f"{where} unknown dtype {dtype!r}; {nearest(dtype, DTYPES)}")
    for out in contract.outputs:
        if out.compare not in ("allclose", "exact", "permutation", "predicate"):
            raise UserError(f"{where} unknown comparison {out.compare!r}; "
                            f"{nearest(out.compare, ('allclose', 'exact', 'permutation', 'predicate'))}")
        if out.source != "return" and out.source not in contract.mutates:
            raise UserError(f"{where} output {out.source!r} is not 'return' and not among mutates="
                            f"{list(contract.mutates)}.")
        if (out.compare == "predicate") != (out.predicate is not None):
            raise UserError(f"{where} an output with compare='predicate' needs a predicate, and only such an output "
                            f"has one.")
    for what, given, known in (("allow", contract.allow, ("own", "vendor", "torch")),
                               ("families", contract.families, FAMILIES), ("layouts", contract.layouts, LAYOUTS)):
        if isinstance(given, str):
            raise UserError(f"{where} {what} is the text {given!r}; it must be a tuple of names, such as ({given!r},).")
        for name in given:
            if name not in known:
                raise UserError(f"{where} {what} names {name!r}; {nearest(str(name), known)}")


def _check_names(task: Task, names: list[str], path: Path) -> None:
    for what, given in (("mutates", task.contract.mutates), ("constant", task.contract.constant)):
        if isinstance(given, str):
            raise UserError(f"{path}: {what} is the text {given!r}; it must be a tuple of names, such as ({given!r},).")
        for name in given:
            if name not in names:
                raise UserError(f"{path}: {what} names {name!r}, which is no argument of {task.entry}(); "
                                f"{nearest(str(name), names)}")


def _check_entry(task: Task, source: str, path: Path) -> list[str]:
    """Names of the entry point's parameters."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as err:
        where = f"{path}, line {err.lineno}: {err.msg}" if isinstance(err, SyntaxError) and err.lineno else f"{path}: {err}"
        raise UserError(f"{where}. The baseline must be valid Python.") from None
    functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    if task.entry not in functions:
        raise UserError(f"{path} has no function {task.entry!r}, which task.py names as the entry point; "
                        f"{nearest(task.entry, functions) if functions else 'it defines no function at all.'}")
    got = parameters(functions[task.entry])
    wanted = oracle_parameters(task.reference)
    if wanted is not None and got != wanted:
        raise UserError(f"{path}: the entry point is {task.entry}({', '.join(got)}), but the reference in task.py takes "
                        f"({', '.join(wanted)}). Both must have the same parameters in the same order.")
    return got


def oracle_parameters(reference: Callable[..., Any]) -> list[str] | None:
    """Names of an oracle's parameters in order, decorators seen through; None where Python cannot tell (a builtin, or a
    wrapper that takes anything)."""
    try:
        found = inspect.signature(reference, follow_wrapped=True).parameters.values()
    except (ValueError, TypeError):
        return None
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in found):
        return None
    return [p.name for p in found]


def parameters(function: ast.FunctionDef) -> list[str]:
    """Names of the positional parameters of a parsed function, in order."""
    return [a.arg for a in [*function.args.posonlyargs, *function.args.args]]
