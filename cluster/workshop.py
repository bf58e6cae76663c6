"""The workshop: the actors of one run and their queues, behind one method for each stage of a pull.

Owns which actors exist and how a candidate passes through them, with a GPU or without. Knows nothing of the journal.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

from cluster import actors as _actors
from cluster.pool import Batcher, Pool
from kernelband.device import Device, Peaks
from kernelband.evaluate import profile
from kernelband.evaluate.compile import Compiled, Target
from kernelband.evaluate.judgement import Judgement
from kernelband.evaluate.specs import shapes_only
from kernelband.folder import RunFolder
from kernelband.task import LoadedTask
from kernelband.writers import Request, Written

actors: Any = _actors  # Ray adds .remote to the classes, which no type checker sees


class Workshop:
    """Everything that works for one run. Make it inside a Ray session; call `open` before the rest."""

    def __init__(self, folder: RunFolder, task: LoadedTask, device: Device, peaks: Peaks | None, target: Target, *,
                 seed: int, tried: list[str], strategies: list[str] | None, compilers: int, judges: int,
                 compile_s: float, check_s: float):
        self.device, self.peaks, self.task, self.strategies = device, peaks, task, strategies
        self.measured, self.label = device.measured, device.label
        roles = ("check", "timed", "held_out") if device.measured else ("timed",)
        cases = [shapes_only(task.task, c) for c in task.task.with_role(*roles)]  # type: ignore[arg-type]
        hidden = str(folder.path.resolve())  # candidates see no file of the run: not the oracle, not each other
        self.rewriter = actors.RewriterActor.remote(seed, tried)
        self.writing = Batcher(self.rewriter, "write")
        self.compilers = Pool(lambda: actors.CompilerActor.remote(
            str(folder.cache), task.task.entry, cases, target, compile_s, hidden), compilers)
        maker = actors.GpuActor if device.measured else actors.ModelActor
        self._baseline: tuple[str, str, str | None] | None = None
        self._base_us: dict[str, float] = {}
        self.judges = Pool(lambda: maker.remote(str(folder.task), peaks, check_s, hidden), judges,
                           on_new=self._restore_baseline if device.measured else None)

    async def open(self) -> list[str]:
        """Wait until every actor is up; returns their warnings, each once."""
        told = await asyncio.gather(self.compilers.each("warnings"), self.judges.each("warnings"))
        return sorted({text for group in told for texts in group for text in texts})

    def queues(self) -> dict[str, int]:
        """Calls that wait, by stage."""
        return {"write": self.writing.waiting, "compile": self.compilers.waiting, "judge": self.judges.waiting}

    def allowed(self, offers: Mapping[str, int]) -> dict[str, int]:
        """Offers of the strategies that this run uses."""
        return {s: n for s, n in offers.items() if self.strategies is None or s in self.strategies}

    async def offers(self, source: str) -> dict[str, dict[str, int]]:
        return {"rewriter": await self.rewriter.offers.remote(source)}

    async def write(self, writer: str, request: Request) -> Written:
        return await self.writing.call(request)

    async def compile(self, source: str) -> Compiled:
        return await self.compilers.call("compile", source)

    async def baseline(self, name: str, source: str, compiled: Compiled) -> Judgement:
        """Judge the baseline on every judge (each GPU needs its own times). Returns the first failure, or the first."""
        if not self.measured:
            judgement = await self._model(source, compiled, False)
            self._base_us = {c: t[0] for c, t in judgement.times.items()}
            return judgement
        self._baseline = (name, source, _text(compiled))
        told = [Judgement(**j) for j in await self.judges.each("baseline", *self._baseline)]
        return next((j for j in told if j.kind != "measured"), told[0])

    async def _restore_baseline(self, actor: Any) -> None:
        if self._baseline:
            await actor.baseline.remote(*self._baseline)

    def know_baseline(self, times: Mapping[str, float]) -> None:
        """A resumed modelled run: microseconds of the baseline by case, from the journal."""
        self._base_us = dict(times)

    async def judge(self, name: str, source: str, compiled: Compiled, incumbent: str, incumbent_source: str) -> Judgement:
        if self.measured:
            return Judgement(**await self.judges.call("judge", name, source, _text(compiled), incumbent))
        return await self._model(source, compiled, False)

    async def final(self, name: str, source: str, compiled: Compiled) -> Judgement:
        if self.measured:
            return Judgement(**await self.judges.call("final", name, source, _text(compiled)))
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
        if self.task.task.work is None:
            return facts, {}, "compiled"
        rows = [(judgement.times[c.name][0], *self.task.task.work(c), c.dtype)
                for c in self.task.task.with_role("timed") if c.name in judgement.times]
        return facts, profile.timed_load(self.peaks, rows), "timed"


def _text(compiled: Compiled) -> str | None:
    return str(compiled.cache) if compiled.cache else None
