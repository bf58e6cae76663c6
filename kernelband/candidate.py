"""Candidates: versions of the source, addressed by content.

Owns the hash and the normal form by which two sources count as the same. Never runs a source. Where a candidate came
from (parent, strategy, writer) is what the journal says of the pull that made it.
"""

from __future__ import annotations

import ast
import functools
import hashlib


def content_hash(source: str) -> str:
    """The first 16 hex digits of the SHA-256 of the source text: the candidate's name in journals and folders."""
    return hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()[:16]


@functools.lru_cache(1024)
def normal_form(source: str) -> str:
    """The source without comments, doc-strings and formatting: equal forms mean equal programs.

    Text that Python cannot parse has no such form; it is returned without the white space around it, so that two
    broken sources still compare.
    """
    try:
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if (isinstance(node, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
                    and ast.get_docstring(node, clean=False) is not None):
                node.body = node.body[1:] or [ast.Pass()]
        return ast.unparse(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return source.strip()


def identity(source: str) -> str:
    """Hash of the normal form: equal for sources that differ in comments and formatting only."""
    return content_hash(normal_form(source))
