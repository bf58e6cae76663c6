"""Queues in front of actors: a pool hands each call to a free actor, and replaces an actor that died.

Owns waiting and retry, and knows nothing of what the calls mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import ray

from cluster.faults import ActorLost, Unexpected, plain
from kernelband.errors import Quarantined


class Pool:
    """`size` actors of one kind, one call at a time with each.

    An actor that raises Quarantined gets no more calls, and stays alive so that nobody is given its GPU; its call is made by
    another. When none is left the last one's Quarantined is raised.

    on_new: sets up an actor that takes the place of a lost one; it enters the pool only when that is done.
    """

    def __init__(self, make: Callable[[], Any], size: int, on_new: Callable[[Any], Awaitable[None]] | None = None):
        self._make, self._on_new = make, on_new
        self.actors: list[Any | None] = [make() for _ in range(size)]
        self._free: asyncio.Queue[int] = asyncio.Queue()
        for i in range(size):
            self._free.put_nowait(i)
        self.waiting = 0
        self.retired: dict[int, Quarantined] = {}

    async def call(self, method: str, *args: Any) -> Any:
        """The result of one call. A dead actor is replaced and the call made once more; then ActorLost.

        Raises UserError and RunFailed as the actor did, and Unexpected for all else that it raised; an actor that did so
        is not trusted again.
        """
        while True:
            index = await self._take()
            try:
                try:
                    return await self._once(index, method, args)
                except ActorLost:
                    return await self._once(index, method, args)
            except Quarantined as err:
                self.retired[index] = err
                if len(self.retired) == len(self.actors):
                    self._free.put_nowait(index)  # others that wait have to learn it too
                    raise
            finally:
                if index not in self.retired:
                    self._free.put_nowait(index)

    async def _take(self) -> int:
        self.waiting += 1
        try:
            index = await self._free.get()
        finally:
            self.waiting -= 1
        if index in self.retired:
            self._free.put_nowait(index)
            raise self.retired[index]
        return index

    async def each(self, method: str, *args: Any) -> list[Any]:
        """Call every actor; for set-up and warnings. Raises as `call` does, without a second attempt."""
        return list(await asyncio.gather(*(self._once(i, method, args) for i in range(len(self.actors)))))

    async def _once(self, index: int, method: str, args: Sequence[Any]) -> Any:
        try:
            actor = await self._ready(index)
            return await getattr(actor, method).remote(*args)
        except Exception as err:
            fault = plain(err)
            if isinstance(fault, (ActorLost, Unexpected)):
                self._drop(index)
            raise fault from None

    async def _ready(self, index: int) -> Any:
        actor = self.actors[index]
        if actor is None:
            actor = self._make()
            if self._on_new is not None:
                try:
                    await self._on_new(actor)
                except BaseException:
                    ray.kill(actor)
                    raise
            self.actors[index] = actor
        return actor

    def _drop(self, index: int) -> None:
        actor, self.actors[index] = self.actors[index], None
        if actor is not None:
            ray.kill(actor)  # it may live still, and hold a GPU that its successor needs


class Batcher:
    """Collects single requests into calls of up to `limit`, one call at a time and in order.

    work: answers a list of requests with a list of equal length, in order.
    """

    def __init__(self, work: Callable[[list[Any]], Awaitable[Sequence[Any]]], limit: int = 32):
        self._work, self._limit = work, limit
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
            batch, self._queue = self._queue[:self._limit], self._queue[self._limit:]
            try:
                answers = await self._work([r for r, _ in batch])
                for (_, future), answer in zip(batch, answers, strict=True):
                    if not future.done():
                        future.set_result(answer)
            except Exception as err:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(err)
