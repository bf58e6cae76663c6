"""The little HTML that a report is made of. Owns escaping: every function here takes plain text and gives markup in which
nothing of that text can be markup itself. What is markup already is of type Markup, and only this file and the sections
make such values.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

LONG = 600
"""Most characters of one message in a table; whole texts lie in the journal."""


class Markup(str):
    """Text that is HTML and safe."""


def esc(value: object, most: int = LONG) -> Markup:
    """Anything as text: control characters and what reverses the reading direction made visible, too long ones cut."""
    if isinstance(value, Markup):
        return value
    text = str(value)
    if len(text) > most:
        text = f"{text[:most]} … ({len(text) - most} more characters)"
    return Markup(html.escape(visible(text)))


def visible(text: str) -> str:
    """Characters that hide or reorder others, as their escapes; tabs and line ends stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def tag(name: str, *inside: object, **attributes: object) -> Markup:
    """An element; `cls` stands for class, and an underscore in a name for a hyphen."""
    said = "".join(f' {"class" if k == "cls" else k.replace("_", "-")}="{html.escape(str(v))}"' for k, v in attributes.items())
    return Markup(f"<{name}{said}>{''.join(map(esc, inside))}</{name}>")


def table(heads: Sequence[object], rows: Iterable[Sequence[object]], numbers: Sequence[int] = (),
          long: Sequence[int] = ()) -> Markup:
    """A table that scrolls inside of itself when the page is narrow. numbers, long: columns aligned right, kept wide."""
    kinds = {**dict.fromkeys(numbers, "n"), **dict.fromkeys(long, "long")}

    def row(cells: Sequence[object], name: str) -> Markup:
        return tag("tr", *(tag(name, c, **({"cls": kinds[i]} if i in kinds else {})) for i, c in enumerate(cells)))

    head = tag("thead", row(heads, "th")) if heads else Markup("")
    return tag("div", tag("table", head, tag("tbody", *(row(r, "td") for r in rows))), cls="wide")


def pairs(rows: Iterable[tuple[object, object]]) -> Markup:
    """A table of names and values."""
    return tag("div", tag("table", tag("tbody", *(tag("tr", tag("th", k), tag("td", v)) for k, v in rows))), cls="wide")


def clean(value: Any) -> Any:
    """Plain data with every text in it, names of fields too, as `visible` shows it."""
    if isinstance(value, dict):
        return {visible(str(k)): clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(v) for v in value]
    return visible(value) if isinstance(value, str) else value


def island(value: Any) -> str:
    """JSON for a <script> that is data: no character in it can end the element or begin a comment, and none hides another."""
    text = json.dumps(clean(value), separators=(",", ":"), allow_nan=False)  # ASCII: line separators are escaped by that
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
