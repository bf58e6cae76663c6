"""The actors: thin wraps around plain classes of `kernelband`. Each says in its name what it may touch.

No actor imports candidate code: compile, interpreter and GPU work happens in sandboxed children of these processes.
Arguments and results are plain data.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray

from kernelband.folder import RunFolder
from kernelband.writers import Request, Written
from kernelband.writers.team import Team

remote: Any = ray.remote  # its type stubs know neither max_concurrency nor keywords that depend on others


class _Judging:
    """Collects warnings of the plain class inside, for the driver to show."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.inner: Any = None

    def warnings(self) -> list[str]:
        return self.texts

    def close(self) -> None:
        """End the children and remove their folders. The actor is of no use afterwards."""
        self.inner.close()


@remote(num_cpus=0, max_concurrency=1)
class WriterActor:
    """All writers of a run in one process: they share the memory of what was tried."""

    def __init__(self, names: list[str], seed: int, tried: list[str], run: str, without: list[str]):
        self.team = Team(names, seed, tried, RunFolder(Path(run)).source, without)

    def offers(self, source: str) -> dict[str, dict[str, int]]:
        return self.team.offers(source)

    def reasons(self, source: str) -> dict[str, str]:
        return self.team.reasons(source)

    def write(self, batch: list[tuple[str, Request]]) -> list[Written]:
        return [self.team.write(name, request) for name, request in batch]


@remote(num_cpus=0, max_concurrency=1)
class CompilerActor(_Judging):
    def __init__(self, cache: str, entry: str, cases: list, target: Any, timeout_s: float, hide: list[str]):
        super().__init__()
        from kernelband.evaluate.compile import Compiler
        from kernelband.evaluate.zygote import protect_this_process

        protect_this_process()
        self.entry, self.cases, self.target = entry, cases, target
        self.inner = Compiler(Path(cache), timeout_s=timeout_s, warn=self.texts.append, hide=hide)

    def compile(self, source: str, timeout_s: float) -> Any:
        return self.inner.compile(source, self.entry, self.cases, self.target, timeout_s)


@remote(num_cpus=0, max_concurrency=1)
class ModelActor(_Judging):
    """Judges without a GPU: the interpreter for correctness, the modelled device for latency."""

    def __init__(self, task_folder: str, peaks: Any, timeout_s: float, hide: list[str]):
        super().__init__()
        import torch

        from kernelband.evaluate.modelled import ModelledJudge
        from kernelband.evaluate.zygote import protect_this_process
        from kernelband.task import load

        protect_this_process()
        torch.set_num_threads(1)
        self.inner = ModelledJudge(load(task_folder).task, peaks, timeout_s=timeout_s, hide=hide,
                                    warn=self.texts.append)

    def judge(self, source: str, facts: dict, held_out: bool) -> dict[str, Any]:
        return asdict(self.inner.judge(source, facts, held_out))


@remote(num_cpus=1, num_gpus=1, max_concurrency=1)
class GpuActor(_Judging):
    """Owns one GPU: checks and times candidates there."""

    def __init__(self, task_folder: str, peaks: Any, timeout_s: float, hide: list[str]):
        super().__init__()
        from kernelband.evaluate.supervisor import Supervisor
        from kernelband.evaluate.zygote import protect_this_process
        from kernelband.task import load

        protect_this_process()
        self.inner = Supervisor(load(task_folder).task, peaks, timeout_s=timeout_s, hide=hide,
                                     warn=self.texts.append)

    def baseline(self, name: str, source: str, cache: str | None) -> dict[str, Any]:
        return asdict(self.inner.set_baseline(name, source, _path(cache), profile=True))

    def judge(self, name: str, source: str, cache: str | None, incumbent: str, incumbent_source: str,
              incumbent_cache: str | None, incumbent_log: float) -> dict[str, Any]:
        return asdict(self.inner.judge(name, source, _path(cache), incumbent, incumbent_source, _path(incumbent_cache),
                                            incumbent_log))

    def final(self, name: str, source: str, cache: str | None, screened: int, facts: list) -> dict[str, Any]:
        return asdict(self.inner.final(name, source, _path(cache), screened, facts=facts, profile=True))


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None
