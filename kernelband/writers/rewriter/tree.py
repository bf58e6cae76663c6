"""Reading and rebuilding libcst trees quickly.

Owns: walking a tree without its white space, copying it with a few nodes replaced, and remembering what was read off a
node (a node never changes, so what is a function of the node alone need not be computed twice). libcst's own `children` and
`visit` do both too, but build visitor state for each white-space node; over the hundreds of walks that the rules make
of one module that was a hundred times slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import TypeVar

import libcst as cst

Replacement = cst.CSTNode | cst.RemovalSentinel | cst.FlattenSentinel
Change = Replacement | Callable[[cst.CSTNode], Replacement]
"""What becomes of a node: another node (or several, or none), or a function of the node with its inside changed."""

_LAYOUT = {
    "lpar", "rpar", "lbracket", "rbracket", "lbrace", "rbrace", "comma", "semicolon", "colon", "equal", "dot",
    "first_colon", "second_colon", "operator", "leading_lines", "lines_after_decorators", "trailing_whitespace",
    "header", "footer", "indent", "newline", "first_line", "last_line", "empty_lines",
}  # fmt: skip
_FIELDS: dict[type, tuple[str, ...]] = {}
_Value = TypeVar("_Value")


_KNOWN: dict[str, dict[cst.CSTNode, object]] = {}
_MOST = 50_000


def remembered(node: cst.CSTNode, name: str, make: Callable[[cst.CSTNode], _Value]) -> _Value:
    """`make(node)`, computed once for the node. The value is shared by all who ask, so nobody may change it.

    A node has no room for it (libcst gives its nodes slots), so that it is kept here, until there are too many.
    """
    known = _KNOWN.setdefault(name, {})
    if node not in known:
        if len(known) >= _MOST:
            known = _KNOWN[name] = {}
        known[node] = make(node)
    return known[node]  # type: ignore[return-value]


def _fields(kind: type) -> tuple[str, ...]:
    if kind not in _FIELDS:
        names = [item.name for item in fields(kind)]
        _FIELDS[kind] = tuple(name for name in names if name not in _LAYOUT and not name.startswith("whitespace"))
    return _FIELDS[kind]


def children(node: cst.CSTNode) -> list[cst.CSTNode]:
    """The nodes directly below a node, without white space, comments, brackets, commas and operators; not to be changed."""
    return remembered(node, "children", _children)


def _children(node: cst.CSTNode) -> list[cst.CSTNode]:
    found: list[cst.CSTNode] = []
    for name in _fields(type(node)):
        value = getattr(node, name)
        if isinstance(value, cst.CSTNode):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(item for item in value if isinstance(item, cst.CSTNode))
    return found


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """The node and all below it, parents first."""
    stack = [node]
    while stack:
        current = stack.pop()
        yield current
        stack.extend(reversed(children(current)))


def parents_of(root: cst.CSTNode) -> dict[cst.CSTNode, cst.CSTNode]:
    """Each node below the root with the one above it; not to be changed."""
    return remembered(root, "parents", lambda top: {child: node for node in walk(top) for child in children(node)})


def rebuild(root: cst.CSTNode, changes: Mapping[cst.CSTNode, Change]) -> cst.CSTNode:
    """A copy of the tree in which the given nodes (compared by identity) are changed; the rest is shared."""
    parents = parents_of(root)
    path: set[cst.CSTNode] = set()
    for node in changes:
        current: cst.CSTNode | None = node
        while current is not None and current not in path:
            path.add(current)
            current = parents.get(current)

    def copy(node: cst.CSTNode) -> Replacement:
        if node not in path:
            return node
        change = changes.get(node)
        if change is not None and not callable(change):
            return change
        new: dict[str, object] = {}
        for name in _fields(type(node)):
            value = getattr(node, name)
            if isinstance(value, cst.CSTNode) and value in path:
                new[name] = copy(value)
            elif isinstance(value, (list, tuple)) and any(item in path for item in value):
                items: list[cst.CSTNode] = []
                for item in value:
                    result = copy(item)
                    if isinstance(result, cst.FlattenSentinel):
                        items.extend(result)
                    elif isinstance(result, cst.CSTNode):
                        items.append(result)
                new[name] = items
        updated = node.with_changes(**new) if new else node
        return change(updated) if change is not None else updated

    result = copy(root)
    assert isinstance(result, cst.CSTNode)
    return result
