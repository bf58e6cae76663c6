"""Rule family `cache_hints`: tell the caches which data comes once and which will be wanted again.

Owns: `eviction_policy` and `cache_modifier` of loads and stores that have neither. These are hints: no value depends
on them, so a wrong guess about reuse costs time and never a result. What is guessed from the text: a load whose
address depends on every program axis and on every loop around it is read once; one that does not is shared.
"""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from kernelband.writers.rewriter.dataflow import ANY, Flow, language
from kernelband.writers.rewriter.kernels import Kernel, Source, argument, called, dotted, normal, walk
from kernelband.writers.rewriter.launch_params import add_keyword
from kernelband.writers.rewriter.rule import Child, Rule
from kernelband.writers.rewriter.tree import Change

# call -> how many positional arguments may stand before the two hints
_ROOM = {"load": 5, "store": 4}
_HINTS = ("cache_modifier", "eviction_policy", "volatile")


@dataclass(frozen=True, eq=False)
class Site:
    """One load or store without a hint."""

    call: cst.Call
    pointer: str  # the parameter that it reads or writes, "" if that cannot be told
    use: str  # "once", "shared" (between programs or rounds of a loop), "again" (the same address later) or "written"


def apply(source: Source) -> tuple[list[Child], list[str]]:
    """Children with one kind of hint on one group of sites, and words about kernels that have no such group."""
    children: list[Child] = []
    words: list[str] = []
    name = language(source)
    for kernel in source.kernels.values():
        if name is None:
            words.append("the module gives triton.language no name")
            continue
        flow = Flow(source, kernel)
        if flow.is_helper:
            words.append(f"{kernel.name} is called by other kernels, and who shares its data depends on them")
            continue
        sites = _sites(kernel, flow, name)
        if not sites:
            words.append(f"{kernel.name} has no load or store without a cache hint")
        for use, hints in _KINDS.items():
            group = [site for site in sites if site.use == use]
            pointers = list(dict.fromkeys(site.pointer for site in group if site.pointer))
            for keyword, value in hints:
                if group:
                    children.append(_child(source, kernel, group, keyword, value, _WHAT[use]))
                if len(pointers) > 1 and keyword == "eviction_policy":
                    for pointer in pointers:
                        part = [site for site in group if site.pointer == pointer]
                        children.append(_child(source, kernel, part, keyword, value, f"{_WHAT[use]} ({pointer})"))
    return children, words


_KINDS: dict[str, tuple[tuple[str, str], ...]] = {
    "once": (("eviction_policy", "evict_first"), ("cache_modifier", ".cg")),
    "shared": (("eviction_policy", "evict_last"),),
    "again": (("eviction_policy", "evict_last"),),
    "written": (("eviction_policy", "evict_first"), ("cache_modifier", ".cs")),
}
_WHAT = {"once": "data read once", "shared": "shared data", "again": "data read again later", "written": "results"}


def _sites(kernel: Kernel, flow: Flow, name: str) -> list[Site]:
    """The loads and stores of a kernel that have no hint yet, in source order."""
    calls = [
        node
        for node in walk(kernel.node.body)
        if isinstance(node, cst.Call) and dotted(node.func) in (f"{name}.load", f"{name}.store")
    ]
    axes = {token for node in walk(kernel.node.body) if called(node) == "program_id" for token in flow.depends(node)}
    dot = any(called(node) == "dot" for part in flow.source.reach(kernel) for node in walk(part.node.body))
    loads = [call for call in calls if called(call) == "load" and call.args]
    addresses = [normal(call.args[0].value) for call in loads]
    stored = {flow.root(call.args[0].value) for call in calls if called(call) == "store" and call.args}
    found = []
    for call in calls:
        positional = [arg for arg in call.args if arg.keyword is None]
        hinted = any(arg.keyword is not None and arg.keyword.value in _HINTS for arg in call.args)
        pointer = argument(call, 0, "pointer")
        if pointer is None or hinted or len(positional) > _ROOM[called(call)] or any(arg.star for arg in call.args):
            continue
        root = flow.root(pointer.value) or ""
        if called(call) == "store":
            read = {flow.root(other.args[0].value) for other in loads}
            if root and root not in read:  # what the kernel itself reads back should stay near
                found.append(Site(call, root, "written"))
            continue
        tokens = flow.depends(pointer.value)
        if (
            not dot
        ):  # quotient and rest of a program id tell programs apart; a tile of a matrix product is shared anyway
            tokens |= {axis for axis in axes if {f"{axis}/", f"{axis}%"} <= tokens}
        around = set(flow.loops.get(call, ()))
        if root and root in stored:
            continue
        if normal(pointer.value) in addresses[loads.index(call) + 1 :]:
            found.append(Site(call, root, "again"))
        elif (ANY in tokens or axes <= tokens) and around <= tokens:
            found.append(Site(call, root, "once"))
        else:
            found.append(Site(call, root, "shared"))
    return found


def _child(source: Source, kernel: Kernel, group: list[Site], keyword: str, value: str, what: str) -> Child:
    """The child in which each site of a group has the hint."""
    literal = cst.SimpleString(f'"{value}"')

    def hint(call: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(call, cst.Call)
        return add_keyword(call, keyword, literal)

    changes: dict[cst.CSTNode, Change] = {site.call: hint for site in group}
    kind = "store" if group[0].use == "written" else "load"
    count = f"{len(group)} {kind}s" if len(group) > 1 else f"the {kind}"
    return f"{value} on {count} of {what} in {kernel.name}", source.edit(changes)


RULE = Rule(
    "cache_hints",
    "access_layout",
    "an eviction policy or cache modifier for data that is read once, shared, read again or written",
    "a load or store without a cache hint, in a kernel that no other calls",
    apply,
)
