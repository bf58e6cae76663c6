"""The two ways in which a command ends badly. Owns exit codes and near-name hints; prints nothing itself."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """What was asked for cannot be done as asked (exit code 2). The text is one paragraph: value, place, way out."""

    exit_code = 2


class RunFailed(Exception):
    """The request was sound but the run could not be finished (exit code 1)."""

    exit_code = 1


class Quarantined(RunFailed):
    """A GPU failed its health check and must not be used any more; others may go on."""


class Interrupted(RunFailed):
    """The user asked to leave (exit code 130). What was journalled is kept."""

    exit_code = 130


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint that ends an error message: the nearest known name, or all of them when none is near."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}."
