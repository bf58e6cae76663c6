"""The driver: decide -> dispatch -> event -> journal -> decide, until the budget is spent.

Owns the loop, the actors' queues and the order of writing: an order is in the journal before anything is sent, a source
is on disk before the event that names it. Decides nothing (`kernelband.search` does) and judges nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from cluster.faults import Unexpected, first_line
from cluster.flow import PARTS
from cluster.workshop import Workshop
from kernelband import search
from kernelband.candidate import identity
from kernelband.errors import RunFailed, UserError
from kernelband.evaluate.judgement import Judgement
from kernelband.events import BaselineJudged, CaseTime, PullEnded, Result, Revised, RunEnded
from kernelband.folder import RunFolder
from kernelband.journal import Journal
from kernelband.report.live import Status, View
from kernelband.search import State
from kernelband.writers import LEARNERS, Observation, Request

MOST_FINALS = 5

MOST_INFRA = 5
"""Pulls in a row that may end by a fault of ours before the run does: the next ones would too."""

FINAL_TRIES = 3

ASIDE = frozenset({"not_applicable", "duplicate", "unchanged", "write_failed", "compile_failed"})
"""Outcomes that no judge saw: they do not show that the judges work again."""

T = TypeVar("T")


class Fault(Exception):
    """A stage of one pull failed for a reason that is not the candidate's."""


async def _stage(work: Awaitable[T]) -> T:
    """The result of a stage; whatever an actor raised becomes a Fault, so that it is never taken for one of the run's own
    errors (a full disk), which end it."""
    try:
        return await work
    except (UserError, RunFailed) as err:
        raise Fault(str(err)) from None
    except Exception as err:
        raise Fault(f"{type(err).__name__}: {first_line(err)}") from None


def result_from(judgement: Judgement, facts: dict[str, float], load: dict[str, float], rung: str) -> Result:
    """A judgement as the journal records it."""
    return Result(
        times={c: CaseTime(us=t[0], low=t[1], high=t[2], samples=t[3]) for c, t in judgement.times.items()},
        log_speedup=judgement.log_speedup, low=judgement.low, high=judgement.high, sd=judgement.sd,
        level=judgement.level, facts=facts, load=load, rung=rung, checks=judgement.checks,  # type: ignore[arg-type]
        gain=judgement.gain, bound=judgement.bound if math.isfinite(judgement.bound) else 0.0, floor=judgement.floor,
        graph=judgement.graph, ran=judgement.ran, tuned=judgement.tuned,
    )


def _line(text: str | None) -> str:
    return " ".join((text or "").split()).rstrip(".")


class Driver:
    """Runs one search to its end. `shop` does the work; `state` is the fold of `journal`. in_flight: how many pulls to keep under
    way, from what is known so far."""

    def __init__(self, folder: RunFolder, journal: Journal, state: State, policy: search.Policy, shop: Workshop,
                 view: View, status: Status, in_flight: Callable[[State], int],
                 clock: Callable[[], float] = time.time):
        self.folder, self.journal, self.state, self.policy = folder, journal, state, policy
        self.shop, self.view, self.status, self.in_flight, self.clock = shop, view, status, in_flight, clock
        self.tasks: dict[int, asyncio.Task] = {}
        self.stopping = ""
        self.dry = ""
        self.sources: dict[str, str] = {}
        self.infra = 0

    def record(self, event: Any) -> None:
        """Journal an event, then fold it."""
        self.journal.append(event, self.clock())
        search.fold(self.state, event)

    def stop(self, reason: str) -> None:
        """Order nothing more; what is in flight is finished."""
        self.stopping = self.stopping or reason

    # -- baseline -----------------------------------------------------------------------------------------------

    async def judge_baseline(self, source: str) -> None:
        """Judge and record the baseline. Raises UserError when it does not compile or is wrong: a bad task."""
        name = self.folder.save_source(source)
        self.sources[name] = source
        self.status.stage = "judging the baseline"
        compiled = await self.shop.compile(source)
        if not compiled.ok:
            raise UserError(f"the baseline does not compile for {self.shop.label}: {_line(compiled.error)}. Mend kernel.py.")
        self.shop.know_compile_time(compiled.seconds)
        idle = self.shop.without_kernel(compiled)
        if idle:
            raise UserError(f"the baseline launches no kernel of its own in case {idle!r}, and the contract allows nothing else "
                            f"(allow={list(self.shop.task.task.contract.allow)}). Mend kernel.py, or add 'vendor' or 'torch' "
                            f"to the contract's allow.")
        judgement = await self.shop.baseline(name, source, compiled)
        if judgement.kind == "infra":
            raise RunFailed(f"the baseline could not be judged: {_line(judgement.detail)}.")
        if judgement.kind != "measured":
            raise UserError(f"the baseline is not right against the oracle ({judgement.kind}): {_line(judgement.detail)}. Mend "
                            f"kernel.py or the oracle; a search needs a correct start.")
        judgement.level = "baseline"
        facts, load, rung = self.shop.profile(compiled, judgement)
        offers = {w: self.shop.allowed(o) for w, o in (await self.shop.offers(source)).items()}
        if not any(offers.values()):
            self.dry = "no rule applies: " + _line(await self.shop.reasons(source))
            self.view.say(f"Nothing to try: {self.dry}")
        self.record(BaselineJudged(candidate=name, result=result_from(judgement, facts, load, rung), moves=offers,
                                   rates=judgement.rates))

    async def restore_baseline(self) -> None:
        """A resumed run: make the judges know the baseline again. Raises RunFailed when it no longer holds here."""
        base = self.state.baseline
        assert base
        if not self.shop.measured:
            self.shop.know_baseline({case: t.us for case, t in base.result.times.items()})
            return
        self.status.stage = "timing the baseline again"
        source = self._source(base.candidate)
        compiled = await self.shop.compile(source)
        if not compiled.ok:
            raise RunFailed(f"the baseline, which compiled before, does not any more: {_line(compiled.error)}.")
        self.shop.know_compile_time(compiled.seconds)
        judgement = await self.shop.baseline(base.candidate, source, compiled)
        if judgement.kind != "measured":
            raise RunFailed(f"the baseline, which was right before, does not pass any more ({judgement.kind}): "
                            f"{_line(judgement.detail)}. See nvidia-smi; then continue with `kernelband resume "
                            f"{self.folder.path}`.")

    # -- one pull -----------------------------------------------------------------------------------------------

    async def _pull(self, order: search.PullOrdered) -> PullEnded:
        started = time.monotonic()
        parent = self._source(order.parent)
        request = Request(order.pull, order.parent, parent, order.strategy, self._history(order))
        written = await _stage(self.shop.write(order.writer, request))
        said: dict[str, Any] = {"pull": order.pull, "family": written.family, "description": written.description}
        costs = {"write": self._cost(written.seconds)}
        if written.kind != "written":
            return PullEnded(**said, kind=written.kind, detail=written.detail, costs=costs)
        name = self.folder.save_source(written.source)
        self.sources[name] = written.source
        said |= {"candidate": name, "identity": written.identity}
        if written.identity == identity(parent):
            return PullEnded(**said, kind="unchanged", costs=costs)
        compiled = await _stage(self.shop.compile(written.source))
        costs["compile"] = self._cost(compiled.seconds)
        if not compiled.ok:
            kind = {"timeout": "timed_out", "crash": "crashed"}.get(compiled.error_kind or "", "compile_failed")
            return PullEnded(**said, kind=kind, detail=compiled.error or "", costs=costs)  # type: ignore[arg-type]
        idle = self.shop.without_kernel(compiled)
        if idle:
            return PullEnded(**said, kind="not_a_kernel", detail=f"{idle}: no kernel of its own was launched", costs=costs)
        incumbent = self.state.ranking()[0]
        result, incumbent_source = self.state.result_of(incumbent), self._source(incumbent)
        assert result
        judgement = await _stage(self.shop.judge(name, written.source, compiled, incumbent, incumbent_source,
                                                 result.log_speedup))
        costs |= {stage: self._cost(seconds) for stage, seconds in judgement.costs.items()}
        costs["waited"] = self._cost(max(0.0, time.monotonic() - started - sum(v for k, v in costs.items() if k not in PARTS)))
        if judgement.kind != "measured":
            return PullEnded(**said, kind=judgement.kind, detail=judgement.detail, costs=costs)  # type: ignore[arg-type]
        facts, load, rung = self.shop.profile(compiled, judgement)
        moves = {w: self.shop.allowed(o) for w, o in {order.writer: written.offers or {}, **written.others}.items()}
        return PullEnded(**said, kind="measured", result=result_from(judgement, facts, load, rung), moves=moves, costs=costs)

    def _history(self, order: search.PullOrdered) -> tuple[Observation, ...]:
        """What a writer that learns may know for this order: what the decision on it was allowed to see."""
        base = self.state.baseline
        if base is None or order.writer not in LEARNERS:
            return ()
        seen = sorted(search.visible(self.state, order.pull).items())
        ended = [Observation(o.candidate, o.kind, o.result.log_speedup if o.result else None) for _, o in seen if o.candidate]
        return (Observation(base.candidate, "measured", 0.0), *ended)

    def _cost(self, seconds: float) -> float:
        # On a modelled device a run must be the same twice, so its seconds are not facts of the search.
        return round(seconds, 3) if self.shop.measured else 0.0

    def _source(self, name: str) -> str:
        if name not in self.sources:
            self.sources[name] = self.folder.source(name)
        return self.sources[name]

    async def _perform(self, order: search.PullOrdered) -> None:
        try:
            ended = await self._pull(order)
        except (RunFailed, UserError):
            raise
        except Fault as err:
            ended = PullEnded(pull=order.pull, kind="infra", detail=str(err)[:500])
        except Exception as err:
            ended = PullEnded(pull=order.pull, kind="infra", detail=f"{type(err).__name__}: {str(err)[:500]}")
        self.record(ended)
        self.view.ended(self.state, order.pull)
        if ended.kind == "infra":
            self.infra += 1
        elif ended.kind not in ASIDE:
            self.infra = 0
        if self.infra >= MOST_INFRA:
            raise RunFailed(f"{self.infra} pulls in a row ended by a fault that is not the candidates': {_line(ended.detail)}. "
                            f"Mend that, then continue with `kernelband resume {self.folder.path}`.")

    # -- the loop -----------------------------------------------------------------------------------------------

    async def search(self) -> None:
        """Run until nothing is left to order and nothing is in flight."""
        self.status.stage = "searching"
        for order in self.state.pending:  # a resumed run: ordered before, and without an outcome
            self.tasks[order.pull] = asyncio.create_task(self._perform(order))
        try:
            while True:
                self._order()
                if not self.tasks:
                    break
                done, _ = await asyncio.wait(self.tasks.values(), return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # a fault of the run itself ends it
                self.tasks = {n: t for n, t in self.tasks.items() if not t.done()}
        finally:
            for task in self.tasks.values():
                task.cancel()
            await asyncio.gather(*self.tasks.values(), return_exceptions=True)

    def _order(self) -> None:
        if self.status.seconds is not None and self.status.elapsed() > self.status.seconds:
            self.stop("the time budget is spent")
        if self.stopping:
            return
        # decide() folds each order at once; it is journalled before it is dispatched.
        for order in search.decide(self.state, self.policy, self.in_flight(self.state)):
            self.journal.append(order, self.clock())
            self.tasks[order.pull] = asyncio.create_task(self._perform(order))

    async def tick(self) -> None:
        """Refresh the view a few times a second and make the journal durable once a second, until cancelled."""
        beat = 0
        while True:
            await asyncio.sleep(0.25)
            beat += 1
            if beat % 4 == 0:
                with contextlib.suppress(OSError):  # the next write will say so
                    self.journal.sync()
                with contextlib.suppress(AssertionError):  # before the baseline is judged there is nothing to look at
                    sight, records = search.look(self.state, len(self.state.orders) + 1)
                    for record in records:
                        self.policy.tell(record)
                    self.status.arms = self.policy.explain(sight)
            self.status.queues = self.shop.queues()
            self.view.refresh(self.state, self.status)

    def _gain(self, result: Result) -> bool:
        """Whether a final result is one to hand over: rewritten code that is not surely faster is only other code."""
        return bool(result.gain) if self.shop.measured else result.log_speedup > 0.01

    # -- the end ------------------------------------------------------------------------------------------------

    async def _final(self, name: str) -> Judgement:
        """The final judgement on one candidate. A fault of ours is tried again, and is never the candidate's fall.

        Raises RunFailed when it stays. What an actor raises unexpectedly each time, in a fresh process each time, is taken to
        be the candidate's doing: otherwise it could never be passed over.
        """
        source, why, unexpected = self._source(name), "", False
        for _ in range(FINAL_TRIES):
            try:
                compiled = await self.shop.compile(source)
                judgement = await self.shop.final(name, source, compiled, search.screened(self.state))
            except (UserError, RunFailed) as err:
                why, unexpected = str(err), isinstance(err, Unexpected)
                continue
            except Exception as err:
                why, unexpected = f"{type(err).__name__}: {first_line(err)}", True
                continue
            if judgement.kind != "infra":
                return judgement
            why, unexpected = judgement.detail, False
        if unexpected:
            return Judgement("crashed", f"the final check could not be made: {_line(why)}")
        raise RunFailed(f"the final check of {name} could not be made in {FINAL_TRIES} attempts: {_line(why)}. All results are "
                        f"kept; try again with `kernelband resume {self.folder.path}`.")

    async def finish(self) -> None:
        """Put the fastest through the final gate (the next if it falls), and record the end."""
        assert self.state.baseline
        self.status.stage = "final check of the fastest"
        best = self.state.baseline.candidate
        for _ in range(MOST_FINALS):
            best = self.state.ranking()[0]
            if best == self.state.baseline.candidate or best in self.state.revised:
                break
            self.view.refresh(self.state, self.status)
            judgement = await self._final(best)
            if judgement.kind == "measured":
                before = self.state.result_of(best)
                assert before
                seen = judgement if judgement.rung else None
                self.record(Revised(candidate=best, ok=True, result=result_from(
                    judgement, {**before.facts, **judgement.counters}, seen.load if seen else before.load,
                    seen.rung if seen else before.rung)))
            else:
                self.record(Revised(candidate=best, ok=False, detail=f"{judgement.kind}: {judgement.detail}"))
        else:
            best = next((n for n in self.state.ranking() if n in self.state.revised), self.state.baseline.candidate)
        result = self.state.result_of(best)
        if result is None or not self._gain(result):
            best = self.state.baseline.candidate
        assert self.state.start
        if self.state.counted() >= self.state.start.pulls and not self.state.pending:
            reason = "the budget is spent"
        else:
            reason = self.stopping or "nothing is left to try" + (f" ({self.dry})" if self.dry else "")
        self.record(RunEnded(best=best, reason=reason, seconds=round(self.status.elapsed(), 3)))
        self.journal.sync()
