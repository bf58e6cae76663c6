"""The workshop: the actors of one run and their queues, behind one method for each stage of a pull.

Owns which actors exist and how a candidate passes through them, with a GPU or without. Knows nothing of the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster import actors as _actors
from cluster import local
from cluster.pool import Batcher, Pool
from kernelband.device import Device, Peaks, overridden
from kernelband.errors import RunFailed
from kernelband.evaluate import profile
from kernelband.evaluate.compile import Compiled, Target
from kernelband.evaluate.judgement import Judgement
from kernelband.evaluate.model import UNSEEN
from kernelband.evaluate.specs import in_other_layouts, shapes_only
from kernelband.folder import RunFolder
from kernelband.journal import NAME as JOURNAL
from kernelband.task import LoadedTask
from kernelband.writers import Request, Written

actors: Any = _actors  # Ray adds .remote to the classes, which no type checker sees

CLOSE_S = 15.0
SLOW_COMPILE, LEAST_COMPILE_S = 8.0, 30.0
"""How many times the baseline's compilation a candidate's may take, and what it may always take: nobody waits minutes at the end
for tiles that spill."""
PATIENCE_S = 60.0
"""Seconds after which a wait for actors is spoken of."""


def target_of(device: Device, peaks: Peaks | None) -> Target:
    """What candidates are compiled for. Raises RunFailed when a GPU that is not in the table does not answer."""
    if peaks is not None:
        return Target(peaks.backend, peaks.arch, peaks.warp, peaks.max_shared_bytes,
                      {"multi_processor_count": peaks.sms, "name": device.name})
    # A GPU that is not in the table: ask the driver, in a process of its own so that this one stays without a context.
    code = ("import torch,json;p=torch.cuda.get_device_properties(0);"
            "print(json.dumps([p.major*10+p.minor,p.multi_processor_count,"
            "getattr(p,'shared_memory_per_block_optin',49152)]))")
    try:
        done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, check=False)
        arch, sms, shared = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise RunFailed(f"the GPU {device.name!r} did not answer within 120 s; see nvidia-smi.") from None
    except ValueError:
        raise RunFailed(f"the GPU {device.name!r} did not answer: {' '.join(done.stderr[-300:].split())}") from None
    return Target("cuda", arch, 32, shared, {"multi_processor_count": sms, "name": device.name})


def _beside(run: Path) -> list[Path]:
    """The folder of runs around this one, so that later ones are meant too; the runs in it, where it holds other things."""
    try:
        around = list(run.parent.iterdir())
    except OSError:
        return []
    runs = [p for p in around if os.path.isfile(p / JOURNAL)]
    return [run.parent] if len(runs) == len(around) else runs


class Workshop:
    """Everything that works for one run. Make it inside a Ray session; call `open` before the rest.

    tried: identities of all sources tried before. hide: folders, beside the run's own, that candidates may not see.
    """

    def __init__(self, folder: RunFolder, task: LoadedTask, device: Device, peaks: Peaks | None, *,
                 seed: int, tried: Sequence[str], strategies: list[str] | None, compilers: int, judges: int,
                 compile_s: float, check_s: float, hide: Sequence[Path] = (), writers: Sequence[str] = ("rewriter",)):
        self.device, self.peaks, self.task, self.strategies = device, peaks, task, strategies
        self.measured, self.label = device.measured, device.label
        target = target_of(device, peaks)
        roles = ("check", "timed", "held_out") if device.measured else ("timed",)
        cases = [shapes_only(task.task, c) for c in task.task.with_role(*roles)]  # type: ignore[arg-type]
        if device.measured:
            cases += [spec for c in task.task.with_role("check", "held_out") for spec in in_other_layouts(task.task, c)]
        # Candidates see no file of this run or one beside it: not the oracle, not each other. Nor the task where the user has
        # it. Workers may stand in another folder.
        private = [p.resolve() for p in (folder.path, *hide)]
        hidden = [str(p) for p in (*private, *(p for run in private for p in _beside(run)), task.folder.resolve())]
        cache, oracle = str(folder.cache.resolve()), str(folder.task.resolve())
        self.tried = list(tried)
        names, run = list(writers), str(folder.path.resolve())
        without = [] if device.measured else sorted(UNSEEN)
        self.writers = Pool(lambda: actors.WriterActor.remote(names, seed, list(self.tried), run, without), 1)
        self.writing = Batcher(self._write)
        self.compilers = Pool(lambda: actors.CompilerActor.remote(
            cache, task.task.entry, cases, target, compile_s, hidden), compilers)
        maker = actors.GpuActor if device.measured else actors.ModelActor
        self.compile_s = compile_s
        self._baseline: tuple[str, str, str | None] | None = None
        self._base_us: dict[str, float] = {}
        self._caches: dict[str, str | None] = {}
        self.judges = Pool(lambda: maker.remote(oracle, peaks, check_s, hidden), judges,
                           on_new=self._restore_baseline if device.measured else None)

    async def open(self, say: Callable[[str], None] = lambda text: None) -> list[str]:
        """Wait until every actor is up; returns their warnings, each once. A long wait is spoken of through `say`."""
        groups = {"compile": self.compilers, "judge": self.judges}
        waits = {asyncio.ensure_future(pool.each("warnings")): name for name, pool in groups.items()}
        try:
            done, late = await asyncio.wait(waits, timeout=PATIENCE_S, return_when=asyncio.FIRST_EXCEPTION)
            if late and not any(w.exception() for w in done):
                say(self._waited_for([waits[w] for w in late]))
            told = await asyncio.gather(*waits)
        finally:
            for wait in waits:
                wait.cancel()
        return sorted({text for group in told for texts in group for text in texts})

    def _waited_for(self, stages: list[str]) -> str:
        wanted = {"compile": f"{len(self.compilers.actors)} compile actors",
                  "judge": f"{len(self.judges.actors)} " + ("GPU actors with a GPU each" if self.measured else "judges")}
        free = ", ".join(f"{n:g} {what}" for what, n in local.free().items())
        return (f"still waiting after {PATIENCE_S:.0f} s for {' and '.join(wanted[s] for s in sorted(stages))}; free in this "
                f"Ray cluster: {free}. Others may be using it: ask for fewer with workers.gpus, or wait.")

    def queues(self) -> dict[str, int]:
        """Calls that wait, by stage."""
        return {"write": self.writing.waiting, "compile": self.compilers.waiting, "judge": self.judges.waiting}

    def allowed(self, offers: Mapping[str, int]) -> dict[str, int]:
        """Offers of the strategies that this run uses."""
        return {s: n for s, n in offers.items() if self.strategies is None or s in self.strategies}

    async def close(self) -> None:
        """End the actors' children and remove their folders: Ray would only kill the actors."""
        with contextlib.suppress(Exception):
            await asyncio.wait_for(asyncio.gather(self.compilers.each("close"), self.judges.each("close"),
                                                  return_exceptions=True), CLOSE_S)

    async def reasons(self, source: str) -> str:
        """Why the writers make nothing of a source, in one line."""
        told: dict[str, str] = await self.writers.call("reasons", source)
        return "; ".join(f"{family}: {why}" for family, why in told.items())

    async def offers(self, source: str) -> dict[str, dict[str, int]]:
        told: dict[str, dict[str, int]] = await self.writers.call("offers", source)
        return told

    async def write(self, writer: str, request: Request) -> Written:
        return await self.writing.call((writer, request))

    async def _write(self, batch: list[tuple[str, Request]]) -> list[Written]:
        answers: list[Written] = await self.writers.call("write", batch)
        self.tried += [w.identity for w in answers if w.identity]  # for a writer actor that takes the place of a lost one
        return answers

    async def compile(self, source: str) -> Compiled:
        return await self.compilers.call("compile", source, self.compile_s)

    def know_compile_time(self, seconds: float) -> None:
        """What the baseline took. With a GPU, from now on candidates get a deadline from it; without one a search must not depend
        on how busy the machine is."""
        if self.measured:
            self.compile_s = min(self.compile_s, max(LEAST_COMPILE_S, SLOW_COMPILE * seconds))

    def without_kernel(self, compiled: Compiled) -> str:
        """The first timed case that launches no kernel of its own where the contract allows nothing else, or ''."""
        if tuple(self.task.task.contract.allow) != ("own",):
            return ""
        return next((c.name for c in self.task.task.with_role("timed") if not compiled.launches.get(c.name, 0)), "")

    async def baseline(self, name: str, source: str, compiled: Compiled) -> Judgement:
        """Judge the baseline on every judge (each GPU needs its own times). Returns the first failure, or the first."""
        if not self.measured:
            judgement = await self._model(source, compiled, False)
            self._base_us = {c: t[0] for c, t in judgement.times.items()}
            return judgement
        self._baseline = (name, source, self._remember(name, compiled))
        told = [Judgement(**j) for j in await self.judges.each("baseline", *self._baseline)]
        self._know_rates(told[0].rates)
        return next((j for j in told if j.kind != "measured"), told[0])

    def _know_rates(self, rates: Mapping[str, float]) -> None:
        """Headroom is judged against what this GPU does, not against its datasheet."""
        if self.peaks is not None and rates:
            half = rates.get("float16_tflops")
            tensor = {"float16": half, "bfloat16": half} if half else None
            self.peaks = overridden(self.peaks, rates.get("dram_gbs"), tensor)

    async def _restore_baseline(self, actor: Any) -> None:
        """A GPU actor that takes the place of a lost one has to time the baseline first. Raises RunFailed if it cannot."""
        if self._baseline:
            judgement = Judgement(**await actor.baseline.remote(*self._baseline))
            if judgement.kind != "measured":
                raise RunFailed(f"a new GPU actor could not judge the baseline: {judgement.kind}: {judgement.detail}")

    def know_baseline(self, times: Mapping[str, float]) -> None:
        """A resumed modelled run: microseconds of the baseline by case, from the journal."""
        self._base_us = dict(times)

    async def judge(self, name: str, source: str, compiled: Compiled, incumbent: str, incumbent_source: str,
                    incumbent_log: float) -> Judgement:
        """incumbent_log: its log speed-up over the baseline; the judge that gets this call may never have seen it."""
        if not self.measured:
            return await self._model(source, compiled, False)
        if incumbent not in self._caches:  # a resumed run; the compiler's own cache makes this cheap
            self._remember(incumbent, await self.compile(incumbent_source))
        return Judgement(**await self.judges.call("judge", name, source, self._remember(name, compiled), incumbent,
                                                  incumbent_source, self._caches[incumbent], incumbent_log))

    def _remember(self, name: str, compiled: Compiled) -> str | None:
        self._caches[name] = str(compiled.cache) if compiled.cache else None
        return self._caches[name]

    async def final(self, name: str, source: str, compiled: Compiled, screened: int) -> Judgement:
        """screened: how many candidates were judged, of which this one was picked."""
        if self.measured:
            facts = [fact for launches in compiled.facts.values() for fact in launches]
            return Judgement(**await self.judges.call("final", name, source, self._remember(name, compiled), screened, facts))
        return await self._model(source, compiled, True)

    async def _model(self, source: str, compiled: Compiled, held_out: bool) -> Judgement:
        judgement = Judgement(**await self.judges.call("judge", source, dict(compiled.facts), held_out))
        if judgement.kind == "measured" and self._base_us:
            logs = [math.log(self._base_us[c] / t[0]) for c, t in judgement.times.items()]
            judgement.log_speedup = sum(logs) / len(logs)
            # The residual of one prediction stands for that of the ratio: errors of parent and child partly cancel.
            judgement.sd = max(math.log(t[2] / t[1]) / 3.92 for t in judgement.times.values()) if logs else 0.0
            judgement.low = judgement.log_speedup - 1.96 * judgement.sd
            judgement.high = judgement.log_speedup + 1.96 * judgement.sd
        return judgement

    def profile(self, compiled: Compiled, judgement: Judgement) -> tuple[dict[str, float], dict[str, float], str]:
        """(compiled facts in one row, share of each resource's peak, rung that the share comes from)."""
        if self.peaks is None:
            return {}, {}, ""
        timed = {c.name: compiled.facts[c.name] for c in self.task.task.with_role("timed") if c.name in compiled.facts}
        facts = profile.summarise(timed, self.peaks)
        if not self.measured:
            return facts, judgement.load, "model"
        if judgement.rung == "ncu":
            return {**facts, **judgement.counters}, judgement.load, "ncu"
        if self.task.task.work is None:
            return facts, {}, "compiled"
        rows = [(judgement.times[c.name][0], *self.task.task.work(c), c.dtype)
                for c in self.task.task.with_role("timed") if c.name in judgement.times]
        return facts, profile.timed_load(self.peaks, rows), "timed"
