"""Whether a kernel may run twice on the same arguments, as autotuning makes it do.

Owns: which arguments a kernel writes to, whether they are made fresh beside the launch, and whether anything else that
the kernel is given may share their memory. Pure reading; what it cannot follow counts as unsafe.
"""

from __future__ import annotations

import libcst as cst

from kernelband.writers.rewriter.kernels import Kernel, Launch, Source, argument, called, dotted, names_in, walk

_FRESH = {"empty", "empty_like", "zeros", "zeros_like", "ones", "ones_like", "full", "full_like",
          "new_empty", "new_zeros", "new_ones", "new_full"}  # fmt: skip
_COUNTS = {"stride", "size", "numel", "dim", "cdiv", "next_power_of_2", "len", "min", "max", "nelement", "int"}


def unsafe(source: Source, kernel: Kernel, launch: Launch) -> str | None:
    """Why the kernel may not run twice on the same arguments, None if it may."""
    written: set[str] = set()
    read: set[str] = set()
    for part in source.reach(kernel):
        for node in walk(part.node.body):
            name = called(node)
            if name.startswith("atomic_") or name == "inline_asm_elementwise":
                return f"uses {name}, so running it twice may not be the same as running it once"
            if ("store" in name or "load" in name) and name not in ("load", "store") and name not in source.kernels:
                return f"uses {name}, whose memory cannot be read off the text"
            if name not in ("load", "store") or not isinstance(node, cst.Call):
                continue
            if part is not kernel:
                if name == "store":
                    return "has a helper that stores"
                continue
            pointer = argument(node, 0, "pointer")
            place = pointer.value if pointer else None
            if isinstance(node.func, cst.Attribute) and dotted(node.func.value) not in ("tl", "triton.language"):
                place = node.func.value  # a descriptor's own method
            if place is None:
                return "has a store whose pointer cannot be read off the text"
            (written if name == "store" else read).update(_roots(source, kernel, place))
    helped = {name for node in walk(kernel.node.body) if called(node) in source.kernels and isinstance(node, cst.Call)
              for arg in node.args for name in _roots(source, kernel, arg.value)}
    if not written:
        return "stores nothing that can be followed to an argument"
    fresh: set[str] = set()
    for param in sorted(written - kernel.constexprs):
        arg = launch.args.get(param)
        if arg is None:
            return f"gets {param} in a way that cannot be read off the text"
        if counts(source, launch, arg.value):
            continue
        if not isinstance(arg.value, cst.Name) or not _made_here(source, launch, arg.value.value):
            return f"writes to {param}, which is not a tensor made fresh beside the launch"
        if param in read | helped:
            return f"reads {param}, which it writes"
        fresh.add(arg.value.value)
    shared = _views(source, launch, fresh)
    for param, arg in launch.args.items():
        own = isinstance(arg.value, cst.Name) and arg.value.value in fresh and param in written
        if not own and names_in(arg.value) & shared and not counts(source, launch, arg.value):
            return f"may be given what it writes as {param} too"
    return None


def _views(source: Source, launch: Launch, names: set[str]) -> set[str]:
    """The names, and all that are computed from them and are no numbers: they may be views of the same memory."""
    found = set(names)
    local = source.bindings(launch.scopes[0])
    while True:
        new = {
            name
            for name, all_ in local.items()
            for binding in all_
            if name not in found and names_in(binding.value or _origin(binding.node)) & found
            and not (binding.value is not None and counts(source, launch, binding.value))
            and not _unpacks_sizes(binding.node) and binding.kind in ("assign", "other")
        }
        if not new:
            return found
        found |= new


def _roots(source: Source, kernel: Kernel, place: cst.CSTNode) -> set[str]:
    """The parameters that an expression of the kernel is made of."""
    found: set[str] = set()
    todo = list(names_in(place))
    local = source.bindings(kernel.node)
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        for binding in local.get(name, ()):
            if binding.kind != "parameter":
                todo += names_in(binding.value if binding.value is not None else _origin(binding.node))
    return found & set(kernel.params)


def _origin(node: cst.CSTNode) -> cst.CSTNode:
    """The part of a statement that the value of the name it binds comes from."""
    if isinstance(node, cst.For):
        return node.iter
    return node.value if isinstance(node, (cst.Assign, cst.AugAssign, cst.NamedExpr)) else node


def counts(source: Source, launch: Launch, value: cst.CSTNode, depth: int = 0) -> bool:
    """Whether an argument is certainly a number: a size, a stride, or arithmetic on them."""
    if isinstance(value, (cst.Integer, cst.Float)):
        return True
    if isinstance(value, cst.Call):
        return called(value) in _COUNTS
    if isinstance(value, cst.Subscript):
        return isinstance(value.value, cst.Attribute) and value.value.attr.value == "shape"
    if isinstance(value, cst.BinaryOperation):
        return all(counts(source, launch, side, depth + 1) for side in (value.left, value.right))
    if isinstance(value, cst.Attribute):
        return value.attr.value in ("ndim", "itemsize")
    if isinstance(value, cst.Name) and depth < 8:
        found = source.bindings(launch.scopes[0]).get(value.value, [])
        if not found:
            return False
        return all(_unpacks_sizes(b.node) or (b.kind == "assign" and b.value is not None
                   and counts(source, launch, b.value, depth + 1)) for b in found)
    return False


def _unpacks_sizes(node: cst.CSTNode) -> bool:
    """`M, K = a.shape`."""
    if not isinstance(node, cst.Assign) or not isinstance(node.targets[0].target, cst.Tuple):
        return False
    value = node.value.value if isinstance(node.value, cst.Subscript) else node.value
    return (isinstance(value, cst.Attribute) and value.attr.value == "shape") or called(value) in ("size", "stride")


def _made_here(source: Source, launch: Launch, name: str) -> bool:
    found = source.bindings(launch.scopes[0]).get(name, [])
    call = found[0].value if len(found) == 1 and found[0].kind == "assign" else None
    if not isinstance(call, cst.Call) or called(call) not in _FRESH:
        return False
    return dotted(call.func).startswith("torch.") or called(call).startswith("new_")
