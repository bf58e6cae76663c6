"""The family tree of a run: its order, and what a click on a candidate shows.

Owns how much of it fits into one file: nodes are filled in the order of their interest (the fastest, its ancestors, then
by speed, then the rest) until the room is used, and a node that did not fit says where to look instead.
"""

from __future__ import annotations

import difflib
import math
from typing import Any

from kernelband.events import Result
from kernelband.report import markup, summary
from kernelband.report import story as told
from kernelband.report.story import Story

ROOM = 2_000_000
"""Bytes that sources, changes and facts of all candidates may take together."""

LONGEST = 200_000
"""Characters of one source that is shown."""

KINDS = {" ": 0, "-": 1, "+": 2, "@": 3}


def order(story: Story) -> list[tuple[int, int]]:
    """(pull, depth) from the baseline (pull 0) down, children behind their parent; pulls that were free are left out."""
    state = story.state
    children: dict[str, list[int]] = {}
    for pull, ordered in sorted(state.orders.items()):
        ended = state.outcomes.get(pull)
        if ended is None or ended.kind != "not_applicable":
            children.setdefault(ordered.parent, []).append(pull)
    walked: list[tuple[int, int]] = []
    waiting = [(0, 0)] if state.baseline else []
    while waiting:
        pull, depth = waiting.pop()
        walked.append((pull, depth))
        name = name_of(story, pull)
        if pull == 0 or (name is not None and state.made_by.get(name) == pull):
            waiting += [(child, depth + 1) for child in reversed(children.get(name or "", []))]
    return walked


def name_of(story: Story, pull: int) -> str | None:
    """The candidate that a pull made; the baseline for 0."""
    if pull == 0:
        return story.state.baseline.candidate if story.state.baseline else None
    ended = story.state.outcomes.get(pull)
    return ended.candidate if ended else None


def ancestors(story: Story, name: str | None) -> list[int]:
    """The pulls from the baseline to a candidate, first step first."""
    steps: list[int] = []
    while name in story.state.made_by:
        steps.append(story.state.made_by[name])
        name = story.state.orders[steps[-1]].parent
    return steps[::-1]


def difference(story: Story, pull: int) -> list[str] | None:
    """What a pull changed in its parent, as lines of a unified diff; None when a source is not at hand."""
    name, ordered = name_of(story, pull), story.state.orders.get(pull)
    texts = [story.sources.get(n or "") for n in (ordered.parent if ordered else None, name)]
    if texts[0] is None or texts[1] is None or max(map(len, (texts[0], texts[1]))) > LONGEST:
        return None
    return list(difflib.unified_diff(texts[0].split("\n"), texts[1].split("\n"), lineterm="", n=3))[2:]


class Lines:
    """Every line once: sources of one family share nearly all of theirs."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.places: dict[str, int] = {}
        self.bytes = 0

    def place(self, line: str) -> int:
        if line not in self.places:
            self.places[line] = len(self.texts)
            self.texts.append(line)
            self.bytes += len(markup.island(line)) + 1
        return self.places[line]


def nodes(story: Story, room: int = ROOM) -> dict[str, Any]:
    """The data behind the tree: `lines`, and by pull what its details show."""
    walk = [pull for pull, _ in order(story)]
    first = [*ancestors(story, story.best)[::-1], 0]
    speed = {p: r.log_speedup for p in walk if (r := story.state.result_of(name_of(story, p) or "")) is not None}
    wanted = [*first, *sorted((p for p in walk if p not in first), key=lambda p: (-speed.get(p, -math.inf), p))]
    lines, made, used = Lines(), {}, 0
    known = set(walk)
    for pull in [p for p in wanted if p in known]:
        node = {"facts": facts(story, pull), "times": times(story, pull), "diff": [], "source": [], "note": ""}
        if used + lines.bytes < room:
            _texts(story, pull, lines, node, room - used - lines.bytes)
        else:
            node |= {"facts": node["facts"][:1], "times": node["times"][:1],
                     "note": "The rest is left out to keep this file small; it is in the journal and in "
                             f"sources/{name_of(story, pull)}.py of the run folder."}
        used += len(markup.island(node))
        made[str(pull)] = node
    return {"lines": lines.texts, "nodes": made}


def _texts(story: Story, pull: int, lines: Lines, node: dict[str, Any], left: int) -> None:
    name = name_of(story, pull)
    source = story.sources.get(name or "")
    if name is None:
        node["note"] = "No source was written."
    elif source is None:
        node["note"] = f"The source cannot be shown: {story.lost.get(name, 'it was not kept')}."
    elif len(source) > LONGEST or len(markup.island(source)) > left:
        node["note"] = f"The source has {len(source):,} characters and is left out: sources/{name}.py in the run folder."
    else:
        node["source"] = [lines.place(line) for line in source.split("\n")]
        for line in difference(story, pull) or []:
            kind = KINDS[line[0]]
            node["diff"] += [kind, lines.place(line if kind == 3 else line[1:])]


def speed_of(result: Result) -> str:
    """A speed-up with its interval and how carefully it was found."""
    return (f"{math.exp(result.log_speedup):.3f}x ({math.exp(result.low):.3f} to {math.exp(result.high):.3f}), "
            f"{careful(result)}")


def careful(result: Result) -> str:
    return {"screened": "screened: no result", "paired": "paired while screening: no result", "final": "final check"}.get(
        result.level, result.level)


def facts(story: Story, pull: int) -> list[list[str]]:
    """Verdict, origin and compiled facts of one candidate as rows of name and value."""
    state, name = story.state, name_of(story, pull)
    ended, ordered = state.outcomes.get(pull), state.orders.get(pull)
    kind = told.fate(state, pull) if pull else summary.told(state, "measured")
    rows = [["verdict", f"{kind}: {told.MEANING.get(kind, kind)}"]]
    if why := told.detail(state, pull):
        rows.append(["why", why[:2000]])
    if ordered:
        rows.append(["made by", f"{ordered.strategy}, {ordered.writer}{f' ({ended.family})' if ended and ended.family else ''}"])
    if ended and ended.description:
        rows.append(["change", ended.description[:1000]])
    result = (state.result_of(name) if name else None) or (ended.result if ended else None)
    if name:
        rows.append(["candidate", name])
    if result:
        rows.append([f"speed-up ({story.kind})", speed_of(result)])
        if result.facts:
            rows.append(["compiled", ", ".join(f"{k} {v:g}" for k, v in sorted(result.facts.items()))])
        if result.load:
            rows.append(["share of peak", ", ".join(f"{k} {v:.1%}" for k, v in sorted(result.load.items()))
                         + (f" (seen by: {result.rung})" if result.rung else "")])
        if result.ran:
            rows.append(["device time", ", ".join(f"{k} {v:.0%}" for k, v in sorted(result.ran.items()))])
        rows += [[f"tuned {where}", chosen] for where, chosen in sorted(result.tuned.items())]
        if result.checks:
            odd = {k: v for k, v in sorted(result.checks.items()) if v != "pass"}
            rows.append(["checks", f"{len(result.checks) - len(odd)} passed" + "".join(f"; {k}: {v}" for k, v in odd.items())])
    if ended and any(ended.costs.values()):
        rows.append(["cost", ", ".join(f"{k} {v:.2f}" for k, v in sorted(ended.costs.items()) if v)])
    return rows


def times(story: Story, pull: int) -> list[list[str]]:
    """The times of one candidate by case, with a head; nothing but the head when it was never timed."""
    ended, name = story.state.outcomes.get(pull), name_of(story, pull)
    result = (story.state.result_of(name) if name else None) or (ended.result if ended else None)
    rows = [["case", f"us a call ({story.kind})", "interval", "samples"]]
    if result:
        rows += [[case, f"{t.us:.2f}", f"{t.low:.2f} to {t.high:.2f}", f"{t.samples}"]
                 for case, t in sorted(result.times.items())]
    return rows
