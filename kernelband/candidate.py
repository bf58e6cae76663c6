"""Candidates: versions of the source, addressed by content, and where each came from.

Owns the hash and the normal form by which two sources count as the same. Never runs a source.
"""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass


def content_hash(source: str) -> str:
    """The first 16 hex digits of the SHA-256 of the source text: the candidate's name in journals and folders."""
    return hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()[:16]


class _DropDocstrings(ast.NodeTransformer):
    def _strip(self, node):
        self.generic_visit(node)
        body = node.body
        if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) and isinstance(
                body[0].value.value, str):
            node.body = body[1:] or [ast.Pass()]
        return node

    visit_Module = visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _strip


def normal_form(source: str) -> str:
    """The source without comments, doc-strings and formatting; a source that does not parse is its own normal form."""
    try:
        return ast.unparse(_DropDocstrings().visit(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return source


def identity(source: str) -> str:
    """Hash of the normal form: equal for sources that differ in comments and formatting only."""
    return content_hash(normal_form(source))


@dataclass(frozen=True)
class Origin:
    """Where a candidate came from; the baseline has none of it."""

    parent: str
    strategy: str
    writer: str
    family: str = ""
    description: str = ""
