"""The cold check: a finished run's winner judged and timed again, in fresh processes. Behind `kernelband.verify`.

Takes nothing from the run but its journal and its sources, and writes nothing that stays. Finds out by itself whether
they agree with each other before it asks a device.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import local
from cluster.faults import one_line_errors
from cluster.workshop import Workshop
from kernelband import device, journal
from kernelband.config import Config
from kernelband.errors import RunFailed, UserError
from kernelband.evaluate.judgement import Judgement
from kernelband.events import Resumed, RunEnded, RunStarted
from kernelband.folder import RunFolder
from kernelband.report import summary
from kernelband.report.table import altered
from kernelband.search import State, contradiction, fold, screened
from kernelband.task import LoadedTask, load
from policies import MAKERS, rules


@dataclass(frozen=True)
class Check:
    """What a cold verification found. ok: everything agrees. findings: one line each."""

    ok: bool
    findings: list[str]
    speedup: float | None = None
    interval: tuple[float, float] | None = None
    measured: bool = False


def verify(path: Path, *, say: Callable[[str], None] = lambda text: None) -> Check:
    """Re-check and re-time the winner of a run, cold: fresh processes, nothing taken from the run but its sources.

    A long wait for workers is spoken of through `say`.

    Raises UserError: no run there, not finished, or another device than it was measured on.
    """
    folder = RunFolder(path)
    try:
        entries = journal.read(path)
    except RunFailed as err:
        return Check(False, [str(err)])
    state = State()
    for entry in entries:
        fold(state, entry.event)
    if folder.best.exists() and not any(isinstance(entry.event, RunEnded) for entry in entries):
        return Check(False, [f"{path / journal.NAME} was altered: its end is missing, though {folder.best} says that the run "
                             f"ended"])
    if state.start is None or state.ended is None or state.ended.best is None or state.baseline is None:
        raise UserError(f"{path} is not finished; continue it with `kernelband resume {path}` first.")
    findings = _on_paper(folder, state, [entry.event for entry in entries])
    if findings:
        return Check(False, findings)
    where = device.parse("cuda" if state.start.measured else state.start.device)
    if where.label != state.start.device:
        raise UserError(f"{path} was measured on {state.start.device}; this machine has {where.label}. Verify it there.")
    with _scratch(path) as cold:
        shutil.copytree(folder.task, cold.task)
        cold.cache.mkdir()
        with local.session(Config.model_validate(state.start.config).address), one_line_errors():
            judged = asyncio.run(_again(folder, cold, load(cold.task), where, state, say))
    if isinstance(judged, str):
        return Check(False, [judged])
    if judged.kind != "measured":
        return Check(False, [f"the winner fell: {judged.kind}: {judged.detail}"])
    told = state.result_of(state.ended.best)
    assert told
    interval = (math.exp(judged.low), math.exp(judged.high))
    findings = [f"{len(judged.checks)} checks pass, held-out cases among them"]
    if judged.high < told.low or judged.low > told.high:
        findings.append(f"the intervals do not meet: the run says {math.exp(told.low):.3f} to {math.exp(told.high):.3f}, "
                        f"the cold check {interval[0]:.3f} to {interval[1]:.3f}")
    return Check(not (judged.high < told.low), findings, math.exp(judged.log_speedup), interval, state.start.measured)


def _on_paper(folder: RunFolder, state: State, events: list) -> list[str]:
    """What does not agree in the folder itself: sources, best.py, the task, and whether each order follows from what it saw."""
    assert state.start and state.ended and state.ended.best and state.baseline
    best, findings = state.ended.best, []
    try:
        source = folder.source(best)
        folder.source(state.baseline.candidate)
    except RunFailed as err:
        return [str(err)]
    findings += [f"{place} was altered: its content does not have the hash that is its name" for place in folder.altered()]
    if not folder.best.is_file():
        findings.append(f"{folder.best} is missing")
    elif folder.best.read_bytes() != (summary.header(state, best) + "\n" + source).encode():
        findings.append(f"{folder.best} was altered: it is not the source {best} with its header")
    if altered(state, folder.path / "results.parquet"):
        findings.append(f"{folder.path / 'results.parquet'} is missing or was altered: it is not what the journal leads to")
    digest = load(folder.task).digest
    if digest != state.start.task_digest:
        findings.append(f"{folder.task} was altered: its hash is {digest}, the journal says {state.start.task_digest}")
    # Other rules may well decide otherwise; that is no finding.
    told_by = [event.versions.get("rules") for event in events if isinstance(event, (RunStarted, Resumed))]
    if state.start.policy in MAKERS and all(r == rules() for r in told_by):
        told = contradiction(events, MAKERS[state.start.policy]())
        if told:
            findings.append(f"the journal contradicts itself: {told}")
    return findings


@contextlib.contextmanager
def _scratch(path: Path) -> Iterator[RunFolder]:
    """A folder for the length of a `with`: in the run, where a cluster's machines see it too, else with temporary files."""
    try:
        made = tempfile.TemporaryDirectory(prefix=".cold-", dir=path, ignore_cleanup_errors=True)
    except OSError:
        made = tempfile.TemporaryDirectory(prefix="kernelband-cold-", ignore_cleanup_errors=True)
    with made as name:
        yield RunFolder(Path(name))


async def _again(run: RunFolder, cold: RunFolder, task: LoadedTask, where: device.Device, state: State,
                 say: Callable[[str], None]) -> Judgement | str:
    """The final judgement on the winner against the baseline, or why it came to none."""
    assert state.start and state.ended and state.ended.best and state.baseline
    best, base = state.ended.best, state.baseline.candidate
    limits = Config.model_validate(state.start.config).limits
    peaks = device.peaks_of(where.name) if where.measured else device.KNOWN[where.name]
    shop = Workshop(cold, task, where, peaks, seed=state.start.seed, tried=[], strategies=None, compilers=1, judges=1,
                    compile_s=limits.compile_seconds, check_s=limits.check_seconds,
                    hide=[run.path, *run.origin])
    try:
        await shop.open(say)
        return await _judged(shop, run, best, base, screened(state))
    finally:
        await shop.close()


async def _judged(shop: Any, run: RunFolder, best: str, base: str, among: int) -> Judgement | str:
    sources = {"baseline": run.source(base), "winner": run.source(best)}
    compiled = {}
    for what, source in sources.items():
        compiled[what] = await shop.compile(source)
        if not compiled[what].ok:
            return f"the {what} does not compile: {compiled[what].error}"
        idle = shop.without_kernel(compiled[what])
        if idle:
            return f"the {what} launches no kernel of its own in case {idle!r}"
    first = await shop.baseline(base, sources["baseline"], compiled["baseline"])
    if first.kind != "measured":
        return f"the baseline fell: {first.kind}: {first.detail}"
    return await shop.final(best, sources["winner"], compiled["winner"], among)
