"""What an attack is, and the few templates that its source is built from.

Owns the form of the catalogue. Never judges, and never runs a candidate: sources are text.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path

OPERATORS = Path(__file__).parent / "operators"
ARGUMENTS = {"softmax": "x", "matmul": "a, b", "linear": "x, w", "rmsnorm": "x, w", "rowsum": "x", "accumulate": "x, y"}
"""Operator, which is also the entry point -> its parameters."""

WRONG = frozenset({"wrong"})
MEMORY = frozenset({"wrong", "wrong_nondeterministic", "tampered", "timing_inconsistent", "faster_than_physics"})
"""What may become of an answer that is remembered, or of one that is not there in time."""
DEAD = frozenset({"crashed", "timed_out", "tampered"})
NO_GAIN = frozenset({"measured"})
"""Judged right, and timed without a gain: the trick bought nothing. A gain is never acceptable."""


@dataclass(frozen=True)
class Entry:
    """One attack. id: class of the public catalogue of exploits (A01..D15) and a name. source: a whole candidate file.

    expected: acceptable outcome kinds; "measured" only ever without a gain. layer: of judgement.LAYERS, which should catch it.
    where: "ci" (the interpreter shows it), "gpu", or "both". twin: source of a benign relative, or None; twin_where and
    twin_operator: likewise, the attack's own operator if empty.
    violent: it may harm what runs beside it, so it is never run outside of the sandbox, and a sound candidate is judged after it.
    hangs: it is meant to meet its deadline, which may then be short.
    """

    id: str
    operator: str
    what: str
    source: str
    expected: frozenset[str]
    layer: str
    where: str = "both"
    twin: str | None = None
    twin_where: str = "both"
    twin_operator: str = ""
    violent: bool = False
    hangs: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "twin_operator", self.twin_operator or self.operator)

    @property
    def family(self) -> str:
        return self.id[:3]


def baseline(operator: str) -> str:
    """The honest kernel.py of an operator, as text."""
    return (OPERATORS / operator / "kernel.py").read_text()


def edited(operator: str, *changes: tuple[str, str]) -> str:
    """The baseline with every `old` replaced by `new`. Raises ValueError for an `old` that is not there."""
    text = baseline(operator)
    for old, new in changes:
        if old not in text:
            raise ValueError(f"the baseline of {operator} does not hold {old!r}: mend the entry or the baseline")
        text = text.replace(old, new)
    return text


def honest(operator: str) -> str:
    """The baseline with its entry point renamed `honest`."""
    return edited(operator, (f"def {operator}(", "def honest("))


def whole(operator: str, body: str) -> str:
    """The baseline's kernel and `honest`, then a body that defines the entry point itself."""
    return f"{honest(operator)}\n\n{textwrap.dedent(body).strip()}\n"


def trick(operator: str, body: str) -> str:
    """A candidate whose entry point calls `trick` of the body, but `honest` where it is only compiled.

    So a fault at the compile stage never stands in for what should catch it where it is judged.
    """
    arguments = ARGUMENTS[operator]
    return whole(operator, f"""
import sys

JUDGED = "compiling" not in sys.modules


{textwrap.dedent(body).strip()}


def {operator}({arguments}):
    return trick({arguments}) if JUDGED else honest({arguments})
""")


def before(operator: str, body: str) -> str:
    """Where it is judged, the body (statements) runs at the start of every call, and then the honest kernel."""
    arguments = ARGUMENTS[operator]
    lines = textwrap.indent(textwrap.dedent(body).strip(), "    ")
    return trick(operator, f"import ctypes, os, signal, socket, sys, threading, time\n\n\ndef trick({arguments}):\n{lines}\n"
                           f"    return honest({arguments})")
