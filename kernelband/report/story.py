"""What a report tells, as plain values: read from a run folder's journal and sources, without a page or a chart in sight.

Owns the reading of a run for people: its events, its sources as far as they are there, what each failure means in words,
and how a policy weighed the strategies over time. Never decides what a result is; that is the journal's.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernelband import journal
from kernelband.candidate import content_hash
from kernelband.errors import RunFailed, UserError
from kernelband.events import PullEnded, PullOrdered, Result, Resumed, RunStarted
from kernelband.report import summary
from kernelband.search import Policy, State, fold, look

MEANING = {
    "measured": "right, and timed",
    "modelled": "right, and its time modelled",
    "wrong": "disagrees with the oracle",
    "wrong_nondeterministic": "disagrees with the oracle, or with itself, in some calls on the same inputs",
    "tampered": "changed what it must not touch, or broke the protocol of its process",
    "unsafe_memory": "read or wrote outside of its buffers",
    "not_a_kernel": "right, but no kernel of its own did the work",
    "timing_inconsistent": "its times contradict each other",
    "faster_than_physics": "a time below what the least work takes at the device's peaks",
    "compile_failed": "does not import or compile, or asks for more than the device has",
    "crashed": "its process died, or it raised",
    "out_of_memory": "ran out of memory",
    "gpu_fault": "the GPU failed its health check after it",
    "timed_out": "no answer in time",
    "unchanged": "the writer returned the parent",
    "duplicate": "the writer returned a source that was tried before",
    "not_applicable": "the writer has nothing to offer there; costs no pull",
    "write_failed": "the writer failed",
    "infra": "a fault of ours, not of the candidate",
    "fell_later": "was right while screened and fell at a later, stricter check",
    "pending": "in flight: no outcome yet",
}

MOMENTS = 40
"""At how many pulls the weights of the strategies are recomputed: enough for a curve, and quick for long runs."""

_NUMBER = re.compile(r"\b[0-9a-f]{16}\b|\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Weight:
    """How the policy saw one strategy just before it decided on one pull. None: no arm was left there."""

    pull: int
    strategy: str
    weight: float | None
    reason: str


@dataclass
class Story:
    """A run as a report needs it. chain: hash of the journal's last line; last: when it was written (Unix seconds)."""

    folder: Path
    state: State
    start: RunStarted
    resumed: list[Resumed]
    chain: str
    first: float
    last: float
    weights: list[Weight]
    same_rules: bool
    sources: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The word that stands beside every time."""
        return "measured" if self.start.measured else "modelled"

    @property
    def best(self) -> str | None:
        return summary.best_of(self.state)

    @property
    def found(self) -> Result | None:
        """The result of the best candidate, if that is not the baseline."""
        base = self.state.baseline
        return self.state.result_of(self.best) if self.best and base and self.best != base.candidate else None


def read(folder: Path, make: Callable[[str], Policy], rules: str) -> Story:
    """The story of a run folder. make: a fresh policy by its name, to recompute the run's weights (they are left out when it
    raises UserError, as for a policy of another version); rules: the hash of the rules that it goes by.

    Raises UserError if there is no run, RunFailed if its journal is damaged.
    """
    entries = journal.read(folder)
    start = entries[0].event
    if not isinstance(start, RunStarted):
        raise RunFailed(f"{folder}: the journal does not begin with the start of a run.")
    state = State()
    for entry in entries:
        fold(state, entry.event)
    events = [entry.event for entry in entries]
    weights: list[Weight] = []
    with contextlib.suppress(UserError):
        weights = weigh(events, make(start.policy))
    story = Story(Path(folder), state, start, [e for e in events if isinstance(e, Resumed)], entries[-1].chain, entries[0].time,
                  entries[-1].time, weights, start.versions.get("rules") == rules)
    names = [state.baseline.candidate] if state.baseline else []
    for name in [*names, *(o.candidate for o in state.outcomes.values() if o.candidate)]:
        if name not in story.sources and name not in story.lost:
            _source(story, name)
    return story


def _source(story: Story, name: str) -> None:
    """One source, or why it cannot be shown. A hash in a journal from elsewhere is no path to read files by."""
    path = story.folder / "sources" / f"{name}.py"
    if not re.fullmatch(r"[0-9a-f]{8,64}", name):
        story.lost[name] = "the journal's name for it is no hash"
        return
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        story.lost[name] = f"sources/{name}.py is missing from the run folder"
        return
    except (OSError, UnicodeDecodeError) as err:
        story.lost[name] = f"sources/{name}.py cannot be read: {getattr(err, 'strerror', None) or err}"
        return
    if content_hash(text) == name:
        story.sources[name] = text
    else:
        story.lost[name] = f"sources/{name}.py was altered: its content has another hash"


def weigh(events: Sequence[Any], policy: Policy, most: int = MOMENTS) -> list[Weight]:
    """Weights and reasons of every strategy before up to `most` decisions, each from what that decision saw."""
    pulls = [e.pull for e in events if isinstance(e, PullOrdered)]
    if not pulls:
        return []
    step = max(1, math.ceil(len(pulls) / most))
    chosen = {*pulls[::step], pulls[-1]}
    state, made = State(), []
    strategies: set[str] = set()
    for event in events:
        if isinstance(event, PullOrdered) and event.pull in chosen and event.pull not in state.orders:
            view, records = look(state, event.pull)
            for record in records:
                policy.tell(record)
            told = policy.explain(view)
            strategies |= set(told)
            made += [Weight(event.pull, name, *told.get(name, (None, "nothing is left to try"))) for name in sorted(strategies)]
        fold(state, event)
    return made


def fate(state: State, pull: int) -> str:
    """What became of a pull in the end: its outcome's kind, 'pending', or 'fell_later'."""
    ended = state.outcomes.get(pull)
    if ended is None:
        return "pending"
    later = state.revised.get(ended.candidate or "")
    if ended.kind == "measured" and later is not None and not later.ok and state.made_by.get(ended.candidate or "") == pull:
        return "fell_later"
    return summary.told(state, ended.kind)


def detail(state: State, pull: int) -> str:
    """Why a pull failed, in the evaluator's words; '' if it did not or no words were kept."""
    ended = state.outcomes.get(pull)
    if ended is None:
        return ""
    return state.revised[ended.candidate or ""].detail if fate(state, pull) == "fell_later" else ended.detail


@dataclass(frozen=True)
class Failure:
    """Pulls that failed alike: same kind, and the same words but for numbers. words: those of the first."""

    kind: str
    words: str
    pulls: list[int]
    strategies: dict[str, int]


def failures(state: State) -> list[Failure]:
    """All failures in groups, the commonest kind first and within it the commonest words."""
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for pull in sorted(state.outcomes):
        kind = fate(state, pull)
        if kind not in ("measured", "modelled", "not_applicable"):
            groups[kind, _NUMBER.sub("#", detail(state, pull))].append(pull)
    kinds = Counter({kind: 0 for kind, _ in groups})
    for (kind, _), pulls in groups.items():
        kinds[kind] += len(pulls)
    ordered = sorted(groups.items(), key=lambda g: (-kinds[g[0][0]], g[0][0], -len(g[1]), g[1][0]))
    return [Failure(kind, detail(state, pulls[0]), pulls, dict(Counter(state.orders[n].strategy for n in pulls)))
            for (kind, _), pulls in ordered]


def spend(outcomes: Sequence[PullEnded]) -> dict[str, float]:
    """Everything that the outcomes cost, by name, largest first."""
    total: Counter[str] = Counter()
    for out in outcomes:
        total.update(out.costs)
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def headline(story: Story) -> str:
    """The sentence to quote. A number of the search that no final check confirmed is never worded as a result."""
    state, found = story.state, story.found
    if state.baseline is None:
        return f"{story.start.task} on {story.start.device}: the baseline was not judged yet, so there is nothing to report."
    if found is None or found.level == "final" or (state.ended is not None and not story.start.measured):
        return summary.sentence(state)
    what = (f"{math.exp(found.log_speedup):.2f}x over the baseline (95 % interval {math.exp(found.low):.2f} to "
            f"{math.exp(found.high):.2f})")
    if not story.start.measured:
        return f"{story.start.task}: {what} so far, modelled for {story.start.device}; the search has not ended."
    return (f"{story.start.task} on {story.start.device}: no result yet. While screening, the fastest candidate showed {what}; "
            f"the fastest of many is picked by luck too, and only the final check makes it a result.")


def standing(story: Story) -> str:
    """Whether the run ended, in words."""
    ended = story.state.ended
    if ended is None:
        return (f"The run had not ended when this was written: it is still going on, or its process was killed. After a kill, "
                f"`kernelband resume {story.folder}` goes on.")
    if ended.reason == "interrupted":
        return f"The run was interrupted; `kernelband resume {story.folder}` goes on."
    return f"The run ended: {ended.reason}."
