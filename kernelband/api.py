"""The doors: optimize, resume and verify as functions. With cli.py the only files here that import `cluster`.

Owns the order of checks (cheap and certain first, so that bad input leaves nothing behind) and the making of a run from
its settings. Prints through the view only.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import platform
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from kernelband import __version__, device, journal, strategies
from kernelband.config import Config
from kernelband.errors import Interrupted, RunFailed, UserError
from kernelband.events import Resumed, RunStarted
from kernelband.folder import RunFolder
from kernelband.report import summary
from kernelband.report.live import Status, View
from kernelband.report.table import export
from kernelband.search import State, fold
from kernelband.task import Case, LoadedTask, Task, load

if TYPE_CHECKING:
    from cluster.cold import Check

LAG = 4
"""Pulls in flight of an ordered run: the same on every machine, for it is a part of what a seed means."""


INTERRUPTED = "interrupted"
"""The reason of an end that `resume` takes for none."""


@dataclass
class Run:
    """A finished (or interrupted) run."""

    state: State
    folder: Path
    seconds: float
    interrupted: bool = False

    def as_json(self) -> dict[str, Any]:
        return summary.as_json(self.state, self.folder, self.seconds)


def versions() -> dict[str, str]:
    """Versions of what a result depends on."""
    from policies import rules

    found = {"python": platform.python_version(), "kernelband": __version__, "rules": rules()}
    for name in ("torch", "triton", "ray", "numpy", "scikit-learn"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def optimize(task_folder: str | Path, config: Config, out: Path | None = None, *, quiet: bool = True,
             console: Console | None = None) -> Run:
    """Search for a faster kernel. Returns the run; its folder holds best.py, results.parquet and the journal.

    Raises UserError for bad input (nothing is left behind), RunFailed when the run cannot be finished.
    """
    _ours()
    from policies import make

    make(config.policy)
    for name in config.strategies or []:
        strategies.get(name)
    where = device.parse(config.device)
    task = load(task_folder)
    folder, log = RunFolder.create(out or _default_folder(task), task)
    with log:
        try:
            _check_oracle(task)
            ordered = config.ordered if config.ordered is not None else not where.measured
            lag = (config.workers.in_flight or LAG) if ordered else 0
            started = RunStarted(
                task=task.task.name, task_digest=task.digest, device=where.label, measured=where.measured,
                policy=config.policy, seed=config.seed, pulls=config.budget.pulls, seconds=config.budget.seconds, lag=lag,
                writers=list(config.writers), config=config.model_dump(mode="json"), versions=versions(),
            )
            try:
                log.append(started, time.time())
            except RunFailed as err:
                raise UserError(f"run folder {folder.path} cannot be written: {err}") from None
            state = fold(State(), started)
            return _drive(folder, task, where, config, log, state, 0.0, quiet, console)
        except BaseException:
            # The entries in memory say what there is to lose; the lock says that it is ours.
            if not any(entry.event.event == "baseline_judged" for entry in log.entries):
                folder.remove()
            raise


def resume(path: Path, *, quiet: bool = True, console: Console | None = None) -> Run:
    """Continue a run that was interrupted or killed; a finished run is returned as it is, without a device or Ray.

    Raises UserError: no run there, driven by another process, newer format, another task or device than it began with.
    """
    entries = journal.read(path)
    folder = RunFolder(path)
    if not isinstance(entries[0].event, RunStarted):
        raise RunFailed(f"{path}: the journal does not begin with the start of a run.")
    start = entries[0].event
    state = State()
    for entry in entries:
        fold(state, entry.event)
    if state.ended is not None and state.ended.reason != INTERRUPTED:
        _write_results(folder, state)
        return Run(state, path, state.ended.seconds)
    _ours()
    config = Config.model_validate(start.config)
    task = load(folder.task)
    if task.digest != start.task_digest:
        raise UserError(f"{folder.task} was altered since the run began (its hash is {task.digest}, the journal says "
                        f"{start.task_digest}). Start a new run with `kernelband optimize`.")
    where = device.parse("cuda" if start.measured else start.device)
    if where.label != start.device:
        raise UserError(f"{path} was measured on {start.device}, and this machine has {where.label}: times of two kinds of "
                        f"GPU do not mix. Start a new run here.")
    with journal.Journal(path) as log:
        state = State()
        for entry in log:  # read again under the lock: another process may have gone on meanwhile
            fold(state, entry.event)
        if state.ended is not None and state.ended.reason != INTERRUPTED:
            return Run(state, path, state.ended.seconds)
        spent = _spent(log.entries)
        again = Resumed(versions=versions())
        log.append(again, time.time())
        return _drive(folder, task, where, config, log, fold(state, again), spent, quiet, console)


def verify(path: Path, *, say: Callable[[str], None] = lambda text: None) -> Check:
    """Re-check and re-time the winner of a run, cold; see `cluster.cold.verify`."""
    _ours()
    from cluster import cold

    return cold.verify(path, say=say)


def _ours() -> None:
    """Raises UserError when another package named `cluster` or `policies` hides ours."""
    import cluster

    if Path(cluster.__file__ or "").parents[1] != Path(__file__).parents[1]:
        raise UserError(f"the package 'cluster' was imported from {Path(cluster.__file__ or '').parent}, which hides ours. Run "
                        f"from another folder, or take that one off PYTHONPATH.")
    from cluster import local

    local.check_imports()


def _spent(entries: list[journal.Entry]) -> float:
    """Seconds that earlier processes worked: the spans between a start or resumption and the last event after it."""
    total, begin, last = 0.0, entries[0].time, entries[0].time
    for entry in entries[1:]:
        if isinstance(entry.event, Resumed):
            total, begin = total + last - begin, entry.time
        last = entry.time
    return total + last - begin


def _default_folder(task: LoadedTask) -> Path:
    return Path("runs") / f"{task.task.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def _check_oracle(task: LoadedTask) -> None:
    """Draw every small case on the CPU in every family, and run the oracle on it; ask for the work of every timed case.

    Raises UserError: whatever is wrong with the task is told before anything is started.
    """
    import torch

    from kernelband.evaluate import verify

    torch.set_num_threads(min(4, torch.get_num_threads()))
    wanted = list(task.parameters)
    for case in task.task.with_role("check", "held_out"):
        for family in dict.fromkeys(("drawn", *task.task.contract.families)):
            inputs = verify.draw(task.task, case, 1, family, "cpu")
            if list(inputs) != wanted:
                raise UserError(f"task {task.task.name!r}, case {case.name!r}: inputs() returns ({', '.join(inputs)}), but the "
                                f"reference takes ({', '.join(wanted)}); names and order must agree.")
            if family == "drawn":
                verify.check_deterministic(task.task, case, inputs)
            verify.truth(task.task, case, inputs)
    for case in task.task.with_role("timed") if task.task.work is not None else ():
        _check_work(task.task, case)


def _check_work(task: Task, case: Case) -> None:
    assert task.work is not None
    try:
        said: Any = task.work(case)
    except Exception as err:
        raise UserError(f"task {task.name!r}, case {case.name!r}: work() raised {type(err).__name__}: {err}. It must "
                        f"return (least bytes, least flops) for every timed case.") from None
    numbers = isinstance(said, (tuple, list)) and len(said) == 2 and all(
        isinstance(n, (int, float)) and not isinstance(n, bool) and math.isfinite(n) for n in said)
    if not numbers or said[0] <= 0 or said[1] < 0:
        raise UserError(f"task {task.name!r}, case {case.name!r}: work() returned {said!r}; it must return two finite numbers, "
                        f"(least bytes, least flops), bytes above 0 and flops not below.")


def _workers(config: Config, measured: bool) -> tuple[int, int]:
    """(compile actors, interpreter workers): one for two cores, at most 8, at least 2 compilers on a GPU machine."""
    half = max(1, min(8, (os.cpu_count() or 2) // 2))
    return config.workers.compilers or max(half, 2 if measured else 1), config.workers.judges or half


def _drive(folder: RunFolder, task: LoadedTask, where: device.Device, config: Config, log: journal.Journal, state: State,
           spent: float, quiet: bool, console: Console | None) -> Run:
    from cluster import flow, local
    from cluster.driver import Driver
    from cluster.faults import one_line_errors
    from cluster.workshop import Workshop
    from kernelband.candidate import identity
    from kernelband.evaluate.model import UNSEEN
    from policies import make

    assert state.start
    status = Status(seconds=config.budget.seconds, spent=spent)
    peaks = device.peaks_of(where.name) if where.measured else device.KNOWN[where.name]
    compilers, judges = _workers(config, where.measured)
    tried = [o.identity for _, o in sorted(state.outcomes.items()) if o.identity]
    tried.append(identity(task.baseline))
    with View(console or Console(stderr=True), quiet) as view:
        view.refresh(state, status)
        if not where.measured:
            view.say(f"No GPU is used: every time for {where.label} is modelled, and says so. Left out, because the model cannot "
                     f"see what they do: {', '.join(sorted(UNSEEN))}.")
        with local.session(config.address), one_line_errors():
            gpus = local.gpu_count()
            if where.measured:
                if gpus == 0:
                    raise UserError("--device cuda: Ray shows no GPU in its cluster. Check nvidia-smi, or use --device "
                                    "model:h200.")
                judges = min(gpus, config.workers.gpus or gpus)
            shop = Workshop(folder, task, where, peaks, seed=config.seed, tried=tried,
                            strategies=config.strategies, compilers=compilers, judges=judges,
                            compile_s=config.limits.compile_seconds, check_s=config.limits.check_seconds,
                            hide=folder.origin, writers=state.start.writers)
            fixed, pulls = state.start.lag or config.workers.in_flight, state.start.pulls

            def in_flight(known: State) -> int:
                return fixed or flow.wanted(known.outcomes.values(), judges, compilers, pulls)

            driver = Driver(folder, log, state, make(config.policy), shop, view, status, in_flight)
            interrupted = asyncio.run(_live(driver, shop, task, view, status, state))
    if state.ended is None:
        raise RunFailed(f"{folder.path}: the run did not end; continue it with `kernelband resume {folder.path}`.")
    _write_results(folder, state)
    return Run(state, folder.path, state.ended.seconds if state.ended else status.elapsed(), interrupted)


async def _live(driver: Any, shop: Any, task: LoadedTask, view: View, status: Status, state: State) -> bool:
    """The whole life of a run inside one event loop. Returns whether it was interrupted."""
    loop = asyncio.get_running_loop()
    me = asyncio.current_task()
    hits = 0

    def interrupt() -> None:
        nonlocal hits
        hits += 1
        if hits == 1:
            driver.stop(INTERRUPTED)
            status.stage = "stopping: finishing what is in flight (Ctrl-C again to leave at once)"
            view.say("Stopping: what is in flight is finished. Ctrl-C again leaves at once.")
        elif me is not None:
            me.cancel()

    def waiting(text: str) -> None:
        status.stage = text
        view.say(text)
        view.refresh(state, status)

    ticker = asyncio.create_task(driver.tick())
    with _signals(loop, interrupt):
        try:
            status.stage = "starting the workers (they import torch and Triton)"
            for note in await shop.open(waiting):
                status.notes.append(note)
                view.say(f"warning: {note}")
            if state.baseline is None:
                await driver.judge_baseline(task.baseline)
            else:
                await driver.restore_baseline()
            await driver.search()
            await driver.finish()
        except asyncio.CancelledError:
            kept = (f"Nothing journalled is lost; continue with `kernelband resume {driver.folder.path}`." if state.baseline
                    else "The baseline was not judged yet, so there is nothing to keep.")
            raise Interrupted(f"{driver.folder.path}: left at once. {kept}") from None
        finally:
            ticker.cancel()
            if hits < 2:
                status.stage = "ending"
                await shop.close()
    return hits > 0


@contextlib.contextmanager
def _signals(loop: asyncio.AbstractEventLoop, handler: Any) -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):  # not in the main thread
            loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in numbers:
            with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
                loop.remove_signal_handler(number)


def _write_results(folder: RunFolder, state: State) -> None:
    assert state.ended and state.start
    best = state.ended.best
    if best is not None:
        folder.write(folder.best, summary.header(state, best) + "\n" + folder.source(best))
    try:
        export(state, folder.path / "results.parquet")
    except OSError as err:
        raise RunFailed(f"{folder.path / 'results.parquet'} cannot be written: {err.strerror or err}. The journal is "
                        f"whole; `kernelband resume {folder.path}` writes the table anew.") from None
    _write_report(folder)
    shutil.rmtree(folder.cache, ignore_errors=True)


def _write_report(folder: RunFolder) -> None:
    """report.html, if it can be made: it is derived from what is there and costs nobody a result."""
    from policies import make, rules

    try:
        from kernelband.report import html

        html.write(folder.path, make, rules())
    except ImportError as err:
        warnings.warn(f"report.html was not written: {err.name} is not installed. `kernelband report {folder.path}` writes it "
                      f"where it is.", stacklevel=2)
    except (UserError, RunFailed, OSError, ValueError, KeyError) as err:
        warnings.warn(f"report.html was not written: {err}", stacklevel=2)
