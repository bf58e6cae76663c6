"""The processes of one GPU: a warm spare for the next candidate, and long-lived ones of the baseline and the incumbent.

Owns their start and end. A spare is started beside a verification, never beside something that is timed: `prepare` begins it,
`settle` waits until it stands.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kernelband.errors import RunFailed
from kernelband.evaluate.binaries import deliver_cache
from kernelband.evaluate.judgement import Refused
from kernelband.evaluate.zygote import CandidateError, Child, ChildDied, SandboxError, Zygote


def give(cache: Path, workdir: Path) -> None:
    """Put compiled files where the child's Triton looks first, owned by the child: its own copy, never the run's."""
    home = workdir / "triton"
    deliver_cache(cache, home)
    owner = os.stat(workdir)
    for path in (home, *home.rglob("*")):
        os.chown(path, owner.st_uid, owner.st_gid)


def alive(child: Child) -> bool:
    try:
        child.request("ping", timeout_s=10)
    except (ChildDied, CandidateError):
        return False
    return True


TUNES = "autotune"
"""What a source that tunes itself has in its text."""

MOST_CHOICES, LONGEST = 200, 200
"""Choices of one source that are kept, and characters of a text in them: they are a candidate's own words."""


def _choice(one: Any) -> bool:
    """Whether a child's word on one choice has the form that it should have."""
    return (isinstance(one, dict) and isinstance(one.get("kernel"), str) and isinstance(one.get("key"), list)
            and len(one["kernel"]) + sum(len(part) for part in one["key"] if isinstance(part, str)) <= LONGEST
            and isinstance(one.get("config"), int) and one["config"] >= 0
            and all(part is None or isinstance(part, (bool, int, float, str)) for part in one["key"]))


class Children:
    """entry: name of the entry point. bind: opens the buffers of the timed cases in a child."""

    def __init__(self, entry: str, bind: Callable[[Child], None], *, timeout_s: float, hide: Sequence[str],
                 warn: Callable[[str], None]):
        self.entry, self.bind, self.timeout_s = entry, bind, timeout_s
        self.zygote = Zygote("cuda", warn=warn, hide=hide)
        self.reserve = 0
        """Bytes of GPU memory that each child takes at its start, for results."""
        self.sides: dict[str, Child] = {}
        self.sources: dict[str, tuple[str, Path | None]] = {}
        self.tuned: dict[str, list[dict[str, Any]]] = {}
        """Source -> what its autotuned kernels chose in the child that was checked; later children take the same."""
        self._spare: Child | None = None
        self._starting: threading.Thread | None = None
        self._ending: list[threading.Thread] = []

    def _start(self) -> Child:
        """A child that has a context. Raises Refused("infra"): nothing of a candidate was involved."""
        child = self.plain()
        try:
            child.request("start", timeout_s=self.timeout_s, reserve=self.reserve)
        except (ChildDied, CandidateError) as err:
            child.kill()
            raise Refused("infra", f"a fresh process could not use the GPU: {err}", "process") from None
        return child

    def prepare(self) -> None:
        """Begin to start a spare, in a thread of its own, unless there is one."""
        if self._spare is None and self._starting is None:
            self._starting = threading.Thread(target=self._make_spare, name="kernelband-spare", daemon=True)
            self._starting.start()

    def _make_spare(self) -> None:
        with contextlib.suppress(Refused):  # whoever needs a child next will say what is wrong
            self._spare = self._start()

    def settle(self) -> None:
        """Wait until nothing is being started or ended on this GPU."""
        if self._starting is not None:
            self._starting.join()
            self._starting = None
        while self._ending:
            self._ending.pop().join()

    def discard(self, child: Child) -> None:
        """Have a candidate's child end, beside what comes next."""
        thread = threading.Thread(target=child.kill, name="kernelband-end", daemon=True)
        thread.start()
        self._ending.append(thread)

    def fresh(self, source: str, cache: Path | None) -> Child:
        """A child that has loaded the source. Raises Refused("infra") when ours is the fault, CandidateError or ChildDied when
        the source's."""
        if self._starting is not None:
            self._starting.join()
            self._starting = None
        child, self._spare = self._spare, None
        if child is None or not alive(child):
            child = self._start()
        try:
            if cache is not None:
                give(cache, Path(child.workdir))
            child.request("load", timeout_s=self.timeout_s, source=source, entry=self.entry)
            if self.tuned.get(source):
                child.request("choose", timeout_s=self.timeout_s, tuned=self.tuned[source])
        except BaseException:
            child.kill()
            raise
        return child

    def learn(self, child: Child, source: str) -> tuple[dict[str, str], float]:
        """Ask a child that has been through all cases what its autotuned kernels chose: (kernel and key -> configuration,
        seconds). Raises CandidateError or ChildDied."""
        if TUNES not in source:
            return {}, 0.0
        said = child.request("tuned", timeout_s=self.timeout_s)
        found = [one for one in said["tuned"] if _choice(one)][:MOST_CHOICES] if isinstance(said.get("tuned"), list) else []
        self.tuned.setdefault(source, found)
        seconds = said.get("seconds")
        spent = float(seconds) if isinstance(seconds, (int, float)) and 0 <= seconds < 1e6 else 0.0
        return {f"{one['kernel']}{one['key']}": str(one.get("text", ""))[:LONGEST] for one in found}, spent

    def plain(self) -> Child:
        """A child without a context, for a tool that makes its own. Raises Refused("infra")."""
        try:
            return self.zygote.spawn()
        except (ChildDied, SandboxError) as err:
            raise Refused("infra", f"no child could be started: {err}", "process") from None

    def know(self, name: str, source: str, cache: Path | None) -> None:
        """Remember what a side is made of, for when it is needed."""
        self.sources.setdefault(name, (source, cache))

    def side(self, name: str) -> Child:
        """The long-lived child of the baseline or the incumbent; a new one if it died. Raises RunFailed."""
        child = self.sides.get(name)
        if child is None or not alive(child):
            source, cache = self.sources[name]
            try:
                child = self.fresh(source, cache)
                self.bind(child)
            except (ChildDied, CandidateError, Refused) as err:
                raise RunFailed(f"the child of {name}, which ran before, cannot be started again: {err}. The GPU may be "
                                f"in a bad state; see nvidia-smi.") from None
            self.sides[name] = child
        return child

    def adopt(self, name: str, child: Child, source: str, cache: Path | None, but: str) -> None:
        """A candidate's child becomes the incumbent's; all other sides but one end."""
        self.end(*(n for n in self.sides if n != but))
        self.sides[name], self.sources[name] = child, (source, cache)

    def end(self, *names: str) -> None:
        for name in names:
            child = self.sides.pop(name, None)
            if child is not None:
                child.kill()

    def close(self) -> None:
        self.settle()
        for child in (*self.sides.values(), self._spare):
            if child is not None:
                with contextlib.suppress(Exception):
                    child.kill()
        self.zygote.close()
