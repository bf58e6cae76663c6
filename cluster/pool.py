"""Queues in front of actors: a pool hands each call to a free actor, and replaces an actor that died.

Owns waiting and retry, and knows nothing of what the calls mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import ray


class ActorLost(Exception):
    """The actor died, twice, while it worked on this call."""


class Pool:
    """`size` actors of one kind; `depth` calls may be with one actor at a time."""

    def __init__(self, make: Callable[[], Any], size: int, depth: int = 1,
                 on_new: Callable[[Any], Any] | None = None):
        self._make, self._on_new = make, on_new
        self.actors = [make() for _ in range(size)]
        self._free: asyncio.Queue[int] = asyncio.Queue()
        for _ in range(depth):
            for i in range(size):
                self._free.put_nowait(i)
        self.waiting = 0
        self.busy = 0

    async def call(self, method: str, *args: Any) -> Any:
        """The result of one call. A dead actor is replaced and the call made once more; then ActorLost."""
        self.waiting += 1
        index = await self._free.get()
        self.waiting -= 1
        self.busy += 1
        try:
            for attempt in (1, 2):
                actor = self.actors[index]
                try:
                    return await getattr(actor, method).remote(*args)
                except ray.exceptions.RayActorError as err:
                    if self.actors[index] is actor:
                        self.actors[index] = self._make()
                        if self._on_new is not None:
                            await self._on_new(self.actors[index])
                    if attempt == 2:
                        raise ActorLost(str(err).splitlines()[0]) from None
        finally:
            self.busy -= 1
            self._free.put_nowait(index)

    async def each(self, method: str, *args: Any) -> list[Any]:
        """Call every actor; for set-up and warnings."""
        return list(await asyncio.gather(*(getattr(a, method).remote(*args) for a in self.actors)))


class Batcher:
    """Collects single requests into calls of up to `limit`, one call at a time and in order."""

    def __init__(self, actor: Any, method: str, limit: int = 32):
        self.actor, self.method, self.limit = actor, method, limit
        self._queue: list[tuple[Any, asyncio.Future]] = []
        self._task: asyncio.Task | None = None

    @property
    def waiting(self) -> int:
        return len(self._queue)

    async def call(self, request: Any) -> Any:
        future: asyncio.Future = asyncio.get_running_loop().create_future()
        self._queue.append((request, future))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._drain())
        return await future

    async def _drain(self) -> None:
        while self._queue:
            await asyncio.sleep(0)  # let what is ready in this turn join the batch
            batch, self._queue = self._queue[:self.limit], self._queue[self.limit:]
            try:
                answers = await getattr(self.actor, self.method).remote([r for r, _ in batch])
                for (_, future), answer in zip(batch, answers, strict=True):
                    if not future.done():
                        future.set_result(answer)
            except Exception as err:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(err)
