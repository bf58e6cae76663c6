"""The end of a run in numbers: the object of `--json`, the short table, and the header of best.py."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from kernelband.search import State

NO_DIFFERENCE = 0.10
"""A modelled gain under 10 % is shown as none: the model is not that good."""


def outcomes(state: State) -> dict[str, int]:
    """How many pulls ended how; those still in flight as 'pending'."""
    counts: Counter[str] = Counter(told(state, o.kind) for o in state.outcomes.values())
    if state.pending:
        counts["pending"] = len(state.pending)
    return dict(sorted(counts.items()))


def told(state: State, kind: str) -> str:
    """An outcome's kind in the words of this run: what was not measured is not called so."""
    return "modelled" if kind == "measured" and state.start and not state.start.measured else kind


def best_of(state: State) -> str | None:
    """The candidate that the run stands for: the one it ended with, else the fastest so far."""
    if state.ended is not None and state.ended.best is not None:
        return state.ended.best
    ranking = state.ranking()
    return ranking[0] if ranking else None


def as_json(state: State, folder: Path, seconds: float) -> dict[str, Any]:
    """The object that `--json` prints last. speedup: geometric mean over timed cases against the baseline."""
    assert state.start
    name = best_of(state)
    result = state.result_of(name) if name else None
    best = None
    if name and result:
        best = {"hash": name, "speedup": round(math.exp(result.log_speedup), 4),
                "interval": [round(math.exp(result.low), 4), round(math.exp(result.high), 4)],
                "path": str(folder / "best.py")}
    return {"task": state.start.task, "device": state.start.device, "measured": state.start.measured, "best": best,
            "pulls": state.counted(), "outcomes": outcomes(state),
            "seconds": round(state.ended.seconds if state.ended else seconds, 1), "run": str(folder)}


def several_writers(state: State) -> bool:
    """Whether it has to be said who wrote a candidate."""
    return state.start is not None and len(state.start.writers) > 1


def lineage(state: State, name: str) -> list[str]:
    """What was done to the baseline to get this candidate, one line a step."""
    steps: list[str] = []
    while name in state.made_by:
        pull = state.made_by[name]
        order = state.orders[pull]
        by = f" (by {order.writer})" if several_writers(state) else ""
        steps.append(f"{order.strategy}: {state.outcomes[pull].description}{by}")
        name = order.parent
    return steps[::-1]


def sentence(state: State) -> str:
    """One sentence that may be quoted: speed-up, interval, device, and whether it was measured."""
    assert state.start
    name = best_of(state)
    result = state.result_of(name) if name else None
    if not name or not result or (state.baseline and name == state.baseline.candidate):
        reason = state.ended.reason if state.ended else ""
        why = f" The search {'was ' if reason == 'interrupted' else 'ended because '}{reason}." if reason else ""
        return (f"No version faster than the baseline was found for {state.start.task} on {state.start.device}."
                f"{_too_small(state)}{why}")
    how = "measured on" if state.start.measured else "modelled for"
    text = (f"{state.start.task}: {math.exp(result.log_speedup):.2f}x over the baseline "
            f"(95 % interval {math.exp(result.low):.2f} to {math.exp(result.high):.2f}), {how} {state.start.device}.")
    if result.gain:
        text += f" It counts as a gain: at least {math.exp(result.bound):.2f}x at 99 %, corrected for the number screened."
    if not state.start.measured and result.log_speedup < math.log1p(NO_DIFFERENCE):
        text += " Under 10 % a modelled gain counts as no difference."
    return text


def _too_small(state: State) -> str:
    """The fastest that passed the final check without a gain that counts, in a sentence; '' if there was none."""
    passed = [(r.result, name) for name, r in state.revised.items() if r.ok and r.result and r.result.gain is False]
    if not passed:
        return ""
    result, name = max(passed, key=lambda pair: pair[0].log_speedup)
    return (f" The fastest, {name}, shows {math.exp(result.log_speedup):.3f}x; its 99 % lower bound, corrected for the number "
            f"screened, is {math.exp(result.bound):.3f}x, and identical code shows up to {1 + result.floor:.3f}x here: that "
            f"does not count as a gain.")


def table(state: State) -> Table:
    """Per timed case: baseline and best, microseconds a call."""
    assert state.start and state.baseline
    unit = "us" if state.start.measured else "us, modelled"
    view = Table(box=None, pad_edge=False)
    for head, side in (("case", "left"), (f"baseline ({unit})", "right"), (f"best ({unit})", "right"), ("x", "right")):
        view.add_column(head, justify=side)  # type: ignore[arg-type]
    name = best_of(state)
    result = state.result_of(name) if name else None
    for case, base in sorted(state.baseline.result.times.items()):
        if result and case in result.times:
            own = result.times[case]
            view.add_row(escape(case), f"{base.us:.1f}", f"{own.us:.1f}", f"{base.us / own.us:.2f}")
    return view


def header(state: State, name: str) -> str:
    """The comment at the top of best.py."""
    assert state.start
    lines = [sentence(state)]
    lines += [f"Task {state.start.task} ({state.start.task_digest}), candidate {name}, seed {state.start.seed}, "
              f"policy {state.start.policy}."]
    result = state.result_of(name)
    if result:
        lines += [f"  {case}: {t.us:.1f} us a call ({'measured' if state.start.measured else 'modelled'})"
                  for case, t in sorted(result.times.items())]
        lines += [f"  {case}: {own:.1f} us in a CUDA graph, the baseline {base:.1f} us"
                  for case, (base, own) in sorted(result.graph.items())]
        lines += [" ".join(f"  {where} was timed with {chosen}, which it chose itself".split())
                  for where, chosen in sorted(result.tuned.items())]
    lines += [f"  {step}" for step in lineage(state, name)]
    lines += ["Versions: " + ", ".join(f"{k} {v}" for k, v in sorted(state.start.versions.items())) + "."]
    return "".join(f"# {line}\n" for line in lines)
