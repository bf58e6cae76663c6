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
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console

from kernelband import __version__, device, journal, strategies
from kernelband.config import Config
from kernelband.errors import RunFailed, UserError
from kernelband.events import Resumed, RunStarted
from kernelband.folder import RunFolder
from kernelband.report import summary
from kernelband.report.live import Status, View
from kernelband.report.table import export
from kernelband.search import State, fold
from kernelband.task import LoadedTask, load

LAG = 4
"""Pulls in flight of an ordered run: the same on every machine, for it is a part of what a seed means."""


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
    found = {"python": platform.python_version(), "kernelband": __version__}
    for name in ("torch", "triton", "ray", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def optimize(task_folder: str | Path, config: Config, out: Path | None = None, *, quiet: bool = True,
             console: Console | None = None) -> Run:
    """Search for a faster kernel. Returns the run; its folder holds best.py, results.parquet and the journal.

    Raises UserError for bad input (nothing is left behind), RunFailed when the run cannot be finished.
    """
    from cluster import local
    from policies import make

    local.check_imports()
    make(config.policy)
    for name in config.strategies or []:
        strategies.get(name)
    where = device.parse(config.device)
    task = load(task_folder)
    folder = RunFolder.create(out or _default_folder(task), task)
    try:
        _check_oracle(task)
        ordered = config.ordered if config.ordered is not None else not where.measured
        lag = (config.workers.in_flight or LAG) if ordered else 0
        started = RunStarted(
            task=task.task.name, task_digest=task.digest, device=where.label, measured=where.measured,
            policy=config.policy, seed=config.seed, pulls=config.budget.pulls, seconds=config.budget.seconds, lag=lag,
            writers=["rewriter"], config=config.model_dump(mode="json"), versions=versions(),
        )
        with journal.Journal(folder.path) as log:
            try:
                log.append(started, time.time())
            except RunFailed as err:
                raise UserError(f"run folder {folder.path} cannot be written: {err}") from None
            state = fold(State(), started)
            return _drive(folder, task, where, config, log, state, 0.0, quiet, console)
    except BaseException:
        if not _worth_keeping(folder):
            folder.remove()
        raise


def resume(path: Path, *, quiet: bool = True, console: Console | None = None) -> Run:
    """Continue a run that was stopped or killed; a finished run is returned as it is.

    Raises UserError: no run there, driven by another process, newer format, another task or device than it began with.
    """
    from cluster import local

    local.check_imports()
    entries = journal.read(path)
    folder = RunFolder(path)
    if not isinstance(entries[0].event, RunStarted):
        raise RunFailed(f"{path}: the journal does not begin with the start of a run.")
    start = entries[0].event
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
        for entry in log:
            fold(state, entry.event)
        spent = _spent(log.entries)
        if state.ended is not None:
            _write_results(folder, state)
            return Run(state, path, state.ended.seconds)
        log.append(Resumed(versions=versions()), time.time())
        return _drive(folder, task, where, config, log, state, spent, quiet, console)


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


def _worth_keeping(folder: RunFolder) -> bool:
    with contextlib.suppress(UserError, RunFailed):
        return any(e.event.event == "baseline_judged" for e in journal.read(folder.path))
    return False


def _check_oracle(task: LoadedTask) -> None:
    """Draw every small case on the CPU and run the oracle twice. Raises UserError."""
    import torch

    from kernelband.evaluate import verify

    torch.set_num_threads(min(4, torch.get_num_threads()))
    for case in task.task.with_role("check", "held_out"):
        inputs = verify.draw(task.task, case, 1, "drawn", "cpu")
        wanted = task.task.reference.__code__.co_varnames[:len(inputs)]
        if list(inputs) != list(wanted):
            raise UserError(f"task {task.task.name!r}, case {case.name!r}: inputs() returns ({', '.join(inputs)}), but the "
                            f"reference takes ({', '.join(wanted)}); names and order must agree.")
        verify.check_deterministic(task.task, case, inputs)
        verify.truth(task.task, case, inputs)


def _workers(config: Config, measured: bool) -> tuple[int, int]:
    """(compile actors, interpreter workers): one for two cores, at most 8, at least 2 compilers on a GPU machine."""
    half = max(1, min(8, (os.cpu_count() or 2) // 2))
    return config.workers.compilers or max(half, 2 if measured else 1), config.workers.judges or half


def _drive(folder: RunFolder, task: LoadedTask, where: device.Device, config: Config, log: journal.Journal, state: State,
           spent: float, quiet: bool, console: Console | None) -> Run:
    from cluster import local
    from cluster.driver import Driver
    from cluster.workshop import Workshop
    from kernelband.candidate import identity
    from policies import make

    assert state.start
    status = Status(seconds=config.budget.seconds, spent=spent)
    peaks = device.peaks_of(where.name) if where.measured else device.KNOWN[where.name]
    target = _target(where, peaks)
    compilers, judges = _workers(config, where.measured)
    tried = [o.identity for _, o in sorted(state.outcomes.items()) if o.identity]
    tried.append(identity(task.baseline))
    with View(console or Console(stderr=True), quiet) as view:
        view.refresh(state, status)
        if not where.measured:
            view.say(f"No GPU is used: every time for {where.label} is modelled, and says so.")
        with local.session(config.address):
            gpus = local.gpu_count()
            if where.measured:
                if gpus == 0:
                    raise UserError("--device cuda: Ray shows no GPU in its cluster. Check nvidia-smi, or use --device "
                                    "model:h200.")
                judges = min(gpus, config.workers.gpus or gpus)
            shop = Workshop(folder, task, where, peaks, target, seed=config.seed, tried=tried,
                            strategies=config.strategies, compilers=compilers, judges=judges,
                            compile_s=config.limits.compile_seconds, check_s=config.limits.check_seconds)
            in_flight = state.start.lag or config.workers.in_flight or 3 * judges + 3
            driver = Driver(folder, log, state, make(config.policy), shop, view, status, in_flight)
            interrupted = asyncio.run(_live(driver, shop, task, view, status, state))
    if state.ended is None:
        raise RunFailed(f"{folder.path}: the run did not end; continue it with `kernelband resume {folder.path}`.")
    _write_results(folder, state)
    return Run(state, folder.path, status.elapsed(), interrupted)


def _target(where: device.Device, peaks: device.Peaks | None) -> Any:
    from kernelband.evaluate.compile import Target

    if peaks is not None:
        return Target("cuda", peaks.arch, 32, peaks.max_shared_bytes,
                      {"multi_processor_count": peaks.sms, "name": where.name})
    # A GPU that is not in the table: ask the driver, in a process of its own so that this one stays without a context.
    import json
    import subprocess
    import sys

    code = ("import torch,json;p=torch.cuda.get_device_properties(0);"
            "print(json.dumps([p.major*10+p.minor,p.multi_processor_count,"
            "getattr(p,'shared_memory_per_block_optin',49152)]))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    try:
        arch, sms, shared = json.loads(done.stdout)
    except ValueError:
        raise RunFailed(f"the GPU {where.name!r} did not answer: {done.stderr.strip()[-300:]}") from None
    return Target("cuda", arch, 32, shared, {"multi_processor_count": sms, "name": where.name})


async def _live(driver: Any, shop: Any, task: LoadedTask, view: View, status: Status, state: State) -> bool:
    """The whole life of a run inside one event loop. Returns whether it was interrupted."""
    loop = asyncio.get_running_loop()
    me = asyncio.current_task()
    hits = 0

    def interrupt() -> None:
        nonlocal hits
        hits += 1
        if hits == 1:
            driver.stop("interrupted")
            status.stage = "stopping: finishing what is in flight (Ctrl-C again to leave at once)"
            view.say("Stopping: what is in flight is finished. Ctrl-C again leaves at once.")
        elif me is not None:
            me.cancel()

    with _signals(loop, interrupt):
        try:
            for note in await shop.open():
                status.notes.append(note)
                view.say(f"warning: {note}")
            if state.baseline is None:
                await driver.judge_baseline(task.baseline)
            elif shop.measured:
                compiled = await shop.compile(task.baseline)
                await shop.baseline(state.baseline.candidate, task.baseline, compiled)
            else:
                shop.know_baseline({c: t.us for c, t in state.baseline.result.times.items()})
            await driver.search()
            await driver.finish()
        except asyncio.CancelledError:
            raise RunFailed(f"{driver.folder.path}: left at once. Nothing journalled is lost; continue with `kernelband "
                            f"resume {driver.folder.path}`.") from None
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
    shutil.rmtree(folder.cache, ignore_errors=True)


@dataclass(frozen=True)
class Check:
    """What a cold verification found. ok: everything agrees. findings: one line each."""

    ok: bool
    findings: list[str]
    speedup: float | None = None
    interval: tuple[float, float] | None = None
    measured: bool = False


def verify(path: Path, *, quiet: bool = True) -> Check:
    """Re-check and re-time the winner of a run, cold: fresh processes, nothing taken from the run but its sources.

    Raises UserError: no run there, not finished, or another device than it was measured on.
    """
    from cluster import local
    from cluster.workshop import Workshop

    local.check_imports()
    folder = RunFolder(path)
    try:
        entries = journal.read(path)
    except RunFailed as err:
        return Check(False, [str(err)])
    state = State()
    for entry in entries:
        fold(state, entry.event)
    if state.start is None or state.ended is None or state.ended.best is None or state.baseline is None:
        raise UserError(f"{path} is not finished; continue it with `kernelband resume {path}` first.")
    start, best = state.start, state.ended.best
    findings: list[str] = []
    try:
        source = folder.source(best)
        written = folder.best.read_text(encoding="utf-8") if folder.best.is_file() else None
        if written is None:
            findings.append(f"{folder.best} is missing")
        elif written != summary.header(state, best) + "\n" + source:
            findings.append(f"{folder.best} was altered: it is not the source {best} with its header")
        baseline = folder.source(state.baseline.candidate)
    except RunFailed as err:
        return Check(False, [*findings, str(err)])
    task = load(folder.task)
    if task.digest != start.task_digest:
        findings.append(f"{folder.task} was altered: its hash is {task.digest}, the journal says {start.task_digest}")
    if findings:
        return Check(False, findings)
    where = device.parse("cuda" if start.measured else start.device)
    if where.label != start.device:
        raise UserError(f"{path} was measured on {start.device}; this machine has {where.label}. Verify it there.")
    peaks = device.peaks_of(where.name) if where.measured else device.KNOWN[where.name]
    config = Config.model_validate(start.config)
    cold = path / "proof" / "cold"

    async def again() -> Any:
        shop = Workshop(RunFolder(cold), task, where, peaks, _target(where, peaks), seed=start.seed, tried=[],
                        strategies=None, compilers=1, judges=1, compile_s=config.limits.compile_seconds,
                        check_s=config.limits.check_seconds)
        await shop.open()
        compiled = [await shop.compile(s) for s in (baseline, source)]
        for what, made in zip(("baseline", "winner"), compiled, strict=True):
            if not made.ok:
                return f"the {what} does not compile: {made.error}"
        assert state.baseline
        first = await shop.baseline(state.baseline.candidate, baseline, compiled[0])
        if first.kind != "measured":
            return f"the baseline fell: {first.kind}: {first.detail}"
        return await shop.final(best, source, compiled[1])

    try:
        for part in (cold / "cache", cold / "proof"):
            part.mkdir(parents=True, exist_ok=True)
        shutil.copytree(folder.task, cold / "proof" / "task", dirs_exist_ok=True)
        with local.session(config.address):
            judged = asyncio.run(again())
    finally:
        shutil.rmtree(cold, ignore_errors=True)
    if isinstance(judged, str):
        return Check(False, [judged])
    if judged.kind != "measured":
        return Check(False, [f"the winner fell: {judged.kind}: {judged.detail}"])
    told = state.result_of(best)
    assert told
    interval = (math.exp(judged.low), math.exp(judged.high))
    findings = [f"{len(judged.checks)} checks pass, held-out cases among them"]
    apart = judged.high < told.low or judged.low > told.high
    if apart:
        findings.append(f"the intervals do not meet: the run says {math.exp(told.low):.3f} to {math.exp(told.high):.3f}, "
                        f"the cold check {interval[0]:.3f} to {interval[1]:.3f}")
    return Check(not (judged.high < told.low), findings, math.exp(judged.log_speedup), interval, start.measured)


