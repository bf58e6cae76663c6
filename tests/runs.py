"""A whole search without Ray, torch or files: a made-up world that answers orders, for tests of the pure core."""

from __future__ import annotations

import hashlib
import random

from kernelband import search
from kernelband.events import BaselineJudged, CaseTime, PullEnded, PullOrdered, Result, RunStarted

STRATEGIES = ("pipeline", "tiling", "vectorization")


def result(log: float, sd: float = 0.01) -> Result:
    us = 100.0 * 2.718281828 ** -log
    return Result(times={"c": CaseTime(us=us, low=us, high=us, samples=1)}, log_speedup=log, low=log - sd, high=log + sd,
                  sd=sd, level="modelled", facts={"registers": 32.0, "num_warps": 4.0},
                  load={"dram": 0.5, "l2": 0.5, "compute": 0.1, "issue": 0.5, "latency": 0.5}, rung="model")


def start(pulls: int = 20, lag: int = 0, seed: int = 0, policy: str = "kernelband") -> RunStarted:
    return RunStarted(task="t", task_digest="d", device="model:h200", measured=False, policy=policy, seed=seed, pulls=pulls,
                      seconds=None, lag=lag, writers=["rewriter"], config={}, versions={})


def baseline(moves: int = 6) -> BaselineJudged:
    return BaselineJudged(candidate="base", result=result(0.0), moves={"rewriter": dict.fromkeys(STRATEGIES, moves)})


def answer(order: PullOrdered, world: int = 0, moves: int = 4) -> PullEnded:
    """What becomes of an order: a function of the order and the world alone."""
    key = f"{world}:{order.pull}:{order.parent}:{order.strategy}"
    rng = random.Random(hashlib.sha256(key.encode()).digest())
    roll = rng.random()
    if roll < 0.1:
        return PullEnded(pull=order.pull, kind="not_applicable")
    if roll < 0.3:
        return PullEnded(pull=order.pull, kind=rng.choice(["wrong", "compile_failed", "crashed", "timed_out", "duplicate"]))
    name = hashlib.sha256(key.encode()).hexdigest()[:8]
    log = rng.gauss({"tiling": 0.2, "pipeline": 0.05, "vectorization": 0.0}[order.strategy], 0.2)
    return PullEnded(pull=order.pull, kind="measured", candidate=name, identity=name, result=result(log),
                     moves={"rewriter": {s: rng.randrange(moves) for s in STRATEGIES}})


def play(policy: search.Policy, begin: RunStarted, *, world: int = 0, in_flight: int = 4, shuffle: int = 0,
         batch: int = 4) -> list:
    """Run a search to its end; returns the events as a journal would hold them.

    shuffle seeds the order in which outcomes arrive; batch is how many arrive before the next decision.
    """
    rng = random.Random(shuffle)
    state, events = search.State(), [begin, baseline()]
    for event in events:
        search.fold(state, event)
    waiting: list[PullOrdered] = []
    while True:
        for order in search.decide(state, policy, in_flight):
            events.append(order)
            waiting.append(order)
        if not waiting:
            return events
        for _ in range(min(batch, len(waiting))):
            ended = answer(waiting.pop(rng.randrange(len(waiting))), world)
            events.append(ended)
            search.fold(state, ended)
