"""The live view: what a person sees while a search runs. Draws; decides nothing.

On a terminal a panel that is redrawn; without one, a plain line for every outcome.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kernelband.report import summary
from kernelband.search import State


@dataclass
class Status:
    """What the driver knows beside the state: queues (stage -> waiting), arms (strategy -> weight, reason), notes."""

    stage: str = "starting"
    queues: dict[str, int] = field(default_factory=dict)
    arms: dict[str, tuple[float, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    seconds: float | None = None
    spent: float = 0.0

    def elapsed(self) -> float:
        return self.spent + time.monotonic() - self.started


class View:
    """Use as a context manager. quiet: nothing at all (for --json); else a panel on a terminal, lines without one."""

    def __init__(self, console: Console, quiet: bool):
        self.console, self.quiet = console, quiet
        self.live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal and not quiet else None

    def __enter__(self) -> View:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.live:
            self.live.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        if not self.quiet:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def ended(self, state: State, pull: int) -> None:
        """An outcome arrived: a line for each without a terminal, for each new best above the panel on one."""
        out, order = state.outcomes[pull], state.orders[pull]
        if self.quiet or (self.live and state.ranking()[0] != out.candidate):
            return
        speed = f"{math.exp(out.result.log_speedup):6.2f}x" if out.result else "       "
        what = " ".join((out.description or out.detail).split())
        by = f"{order.writer:8s} " if summary.several_writers(state) else ""
        self.say(f"pull {pull:4d}  {summary.told(state, out.kind):15s} {speed}  {by}{order.strategy:13s} {what[:100]}  "
                 f"(of {order.parent[:6]})")

    def refresh(self, state: State, status: Status) -> None:
        if self.live:
            self.live.update(panel(state, status), refresh=True)


def panel(state: State, status: Status) -> Panel:
    """The whole view as one renderable; pure, so that it can be tested."""
    if state.start is None:
        return Panel(Text(status.stage), title="kernelband", title_align="left")
    stage = Text(status.stage, style="bold")
    start = state.start
    kind = "measured" if start.measured else "modelled"
    best = summary.best_of(state)
    result = state.result_of(best) if best else None
    top = Table.grid(padding=(0, 2))
    done = len(state.outcomes)
    top.add_row("incumbent", f"{best or '-'}  {math.exp(result.log_speedup):.2f}x ({kind})" if result else "-")
    top.add_row("pulls", ProgressBar(total=start.pulls, completed=min(done, start.pulls), width=30),
                f"{done} of {start.pulls}, {len(state.pending)} in flight")
    left = f", {max(0.0, status.seconds - status.elapsed()):.0f} s left" if status.seconds else ""
    top.add_row("time", f"{status.elapsed():.0f} s{left}")
    top.add_row("outcomes", ", ".join(f"{k} {v}" for k, v in summary.outcomes(state).items()) or "-")
    if summary.several_writers(state):
        made = {w: sum(o.writer == w for o in state.orders.values()) for w in start.writers}
        top.add_row("writers", ", ".join(f"{w} {n}" for w, n in made.items()))
    top.add_row("queues", ", ".join(f"{k} {v}" for k, v in status.queues.items()) or "-")
    arms = Table(box=None, pad_edge=False)
    for head in ("strategy", "weight", "pulls", "held back because"):
        arms.add_column(head)
    pulls: dict[str, int] = {}
    for order in state.orders.values():
        pulls[order.strategy] = pulls.get(order.strategy, 0) + 1
    for name in sorted({*status.arms, *pulls}):
        weight, reason = status.arms.get(name, (0.0, "nothing left to try"))
        arms.add_row(name, f"{weight:.2f}", str(pulls.get(name, 0)), reason)
    parts: list[Any] = [stage, top, Text(), arms] if status.arms or pulls else [stage, top]
    if status.notes:
        parts += [Text(), Text("\n".join(status.notes[-3:]), style="yellow")]
    return Panel(Group(*parts), title=escape(f"kernelband · {start.task} · {start.device}"), title_align="left")
