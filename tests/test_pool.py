"""Pools and batches in front of actors: who is replaced, who is not, and what an error from there looks like."""

import asyncio

import pytest
from conftest import KERNEL, command
from ray.exceptions import ActorDiedError, RayTaskError

from cluster import local, pool
from cluster.faults import ActorLost, Unexpected, first_line, plain
from cluster.pool import Batcher, Pool
from cluster.workshop import Workshop
from kernelband.errors import Quarantined, RunFailed, UserError
from kernelband.writers import Request, Written
from kernelband.writers.mechanical import Rewriter


def crossed(cause):
    """An exception as Ray hands it over."""
    return RayTaskError("ray::GpuActor.judge()", f"Traceback ...\n{cause!r}", cause, "p", 1, "h").as_instanceof_cause()


class Actor:
    """Stands in for a Ray actor: `answers` are given in turn, exceptions raised."""

    def __init__(self, *answers):
        self.answers, self.killed, self.calls = list(answers), False, []

    def __getattr__(self, method):
        class Method:
            @staticmethod
            async def remote(*args):
                self.calls.append((method, args))
                await asyncio.sleep(0)
                answer = self.answers.pop(0)
                if isinstance(answer, Exception):
                    raise answer
                return answer

        return Method


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch):
    monkeypatch.setattr(pool.ray, "kill", lambda actor: setattr(actor, "killed", True))


def test_an_error_from_an_actor_arrives_as_it_was_raised():
    for cause in (UserError("the oracle raised"), RunFailed("the GPU is gone")):
        actor = Actor(crossed(cause), 7)
        p = Pool(lambda actor=actor: actor, 1)
        with pytest.raises(type(cause)) as caught:
            asyncio.run(p.call("judge"))
        assert str(caught.value) == str(cause) and type(caught.value) is type(cause) and not actor.killed
        assert asyncio.run(p.call("judge")) == 7


def test_an_actor_that_raises_the_unexpected_is_not_trusted_again():
    old, new = Actor(crossed(KeyError("c"))), Actor(7)
    makers = iter([old, new])
    p = Pool(lambda: next(makers), 1)
    with pytest.raises(Unexpected, match="a worker process failed: KeyError: 'c'") as caught:
        asyncio.run(p.call("judge"))
    assert "\n" not in str(caught.value) and old.killed
    assert asyncio.run(p.call("judge")) == 7


def test_a_dead_actor_is_replaced_once_and_then_given_up():
    died = ActorDiedError()
    made = [Actor(died), Actor(7)]
    p = Pool(lambda: made.pop(0), 1)
    assert asyncio.run(p.call("judge")) == 7
    made = [Actor(died), Actor(died)]
    p = Pool(lambda: made.pop(0), 1)
    with pytest.raises(ActorLost):
        asyncio.run(p.call("judge"))


def test_a_replacement_that_cannot_be_set_up_does_not_enter_the_pool():
    made = [Actor(ActorDiedError()), Actor(), Actor(7)]
    all_of_them, ready = list(made), []

    async def on_new(actor):
        if len(ready) == 0:
            ready.append(None)
            raise RunFailed("a new GPU actor could not judge the baseline")
        ready.append(actor)

    p = Pool(lambda: made.pop(0), 1, on_new)
    with pytest.raises(RunFailed, match="could not judge the baseline"):
        asyncio.run(p.call("judge"))
    assert all_of_them[1].killed and all_of_them[1].calls == []
    assert asyncio.run(p.call("judge")) == 7 and ready[-1] is all_of_them[2]


def test_a_constructor_that_raises_is_told_in_one_line():
    cause = RayTaskError("ray::GpuActor.__init__()", "Traceback ...\nSandboxError: no gcc here", RuntimeError("x"), "p", 1, "h")
    told = plain(ActorDiedError(cause))
    assert isinstance(told, RunFailed) and "SandboxError: no gcc here" in str(told) and "\n" not in str(told)


def test_an_error_without_text_has_a_line_all_the_same():
    assert first_line(ValueError()) == "ValueError" and first_line(ValueError("\n\n b \n c")) == "b"


def test_a_call_that_is_given_up_while_it_waits_is_not_counted_as_waiting():
    async def main():
        p = Pool(lambda: Actor(1, 2), 1)
        await p._free.get()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(p.call("judge"), 0.01)
        assert p.waiting == 0

    asyncio.run(main())


def test_batches_keep_the_order_and_hand_an_error_to_all_of_a_batch():
    async def main():
        seen = []

        async def work(batch):
            seen.append(batch)
            if 5 in batch:
                raise RunFailed("the rewriter is gone")
            return [x * 2 for x in batch]

        b = Batcher(work, limit=2)
        got = await asyncio.gather(*(b.call(x) for x in range(6)), return_exceptions=True)
        assert got[:4] == [0, 2, 4, 6] and all(isinstance(g, RunFailed) for g in got[4:]) and seen == [[0, 1], [2, 3], [4, 5]]

    asyncio.run(main())


def test_a_rule_that_raises_fails_its_own_request_only(monkeypatch):
    from kernelband.writers import mechanical

    real = mechanical.moves

    def moves(source, strategy=None):
        if strategy == "tiling":
            raise RecursionError("too deep")
        return real(source, strategy)

    monkeypatch.setattr(mechanical, "moves", moves)
    writer = Rewriter(0)
    assert writer.write(Request(1, "p", KERNEL, "tiling")).kind == "write_failed"
    assert "RecursionError: too deep" in writer.write(Request(2, "p", KERNEL, "tiling")).detail
    assert writer.write(Request(3, "p", KERNEL, "pipeline")).kind == "written"


def test_rule_families_take_turns_and_some_are_not_asked():
    from rewriter_cases import SOFTMAX

    from kernelband.evaluate.model import UNSEEN
    from kernelband.writers.rewriter import FAMILIES

    names = [rule.name for rule in FAMILIES]
    assert set(names) > UNSEEN
    writer = Rewriter(0, without=UNSEEN)
    made = [writer.write(Request(i, "p", SOFTMAX, "vectorization")) for i in range(12)]
    families = [one.family for one in made if one.kind == "written"]
    first = families[:len(set(families))]
    assert first == sorted(set(families), key=names.index) and len(first) > 1 and not UNSEEN & set(families)
    offered = Rewriter(0).offers(SOFTMAX)
    assert sum(Rewriter(0, without=UNSEEN).offers(SOFTMAX).values()) < sum(offered.values()) and "access_layout" in offered


def workshop(**fields):
    shop = object.__new__(Workshop)
    for name, value in fields.items():
        setattr(shop, name, value)
    return shop


def test_a_rewriter_that_died_is_rebuilt_with_all_that_was_tried():
    made = []

    def make():
        made.append((Actor([Written(1, "written", "s", "one")], ActorDiedError()) if not made
                     else Actor([Written(2, "written", "t", "two")]), list(shop.tried)))
        return made[-1][0]

    shop = workshop(tried=["base"])
    shop.writers = Pool(make, 1)
    asyncio.run(shop._write([Request(1, "p", "s", "tiling")]))
    asyncio.run(shop._write([Request(2, "p", "s", "tiling")]))
    assert [tried for _, tried in made] == [["base"], ["base", "one"]] and shop.tried == ["base", "one", "two"]


def test_a_judge_on_a_gpu_is_told_the_source_of_the_incumbent():
    from pathlib import Path

    from kernelband.evaluate.compile import Compiled
    from kernelband.evaluate.judgement import Judgement

    judge = Actor(*[{"kind": "wrong"}] * 2)
    compiler = Actor(Compiled(True, {}, cache=Path("/cache/inc")))
    shop = workshop(measured=True, _caches={}, judges=Pool(lambda: judge, 1), compilers=Pool(lambda: compiler, 1),
                    compile_s=77.0)
    new = Compiled(True, {}, cache=Path("/cache/new"))
    for _ in range(2):  # the second time the incumbent's cache is known
        assert asyncio.run(shop.judge("n", "new", new, "i", "old", 0.5)) == Judgement("wrong")
    assert judge.calls == [("judge", ("n", "new", "/cache/new", "i", "old", "/cache/inc", 0.5))] * 2
    assert compiler.calls == [("compile", ("old", 77.0))]


def test_with_a_gpu_a_candidate_may_compile_eight_times_as_long_as_the_baseline():
    for measured, took, given in ((True, 2.0, 30.0), (True, 7.5, 60.0), (True, 90.0, 120.0), (False, 7.5, 120.0)):
        shop = workshop(measured=measured, compile_s=120.0)
        shop.know_compile_time(took)
        assert shop.compile_s == given


def test_a_gpu_actor_whose_baseline_fails_is_refused():
    shop = workshop(_baseline=("b", "s", None))
    with pytest.raises(RunFailed, match="wrong: too much"):
        asyncio.run(shop._restore_baseline(Actor({"kind": "wrong", "detail": "too much"})))


def test_a_long_wait_for_actors_is_spoken_of(monkeypatch):
    from cluster import workshop as module

    class Slow(Actor):
        def __getattr__(self, method):
            class Method:
                @staticmethod
                async def remote():
                    await asyncio.sleep(0.2)
                    return ["a warning"]

            return Method

    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    monkeypatch.setattr(local, "free", lambda: {"CPU": 3.0, "GPU": 0.0})
    shop = workshop(measured=True, compilers=Pool(lambda: Actor([]), 1), judges=Pool(lambda: Slow(), 2))
    said = []
    assert asyncio.run(shop.open(said.append)) == ["a warning"]
    assert len(said) == 1 and "2 GPU actors with a GPU each" in said[0] and "0 GPU" in said[0]


@pytest.mark.ray
@pytest.mark.xdist_group("ray")
def test_an_actor_that_cannot_start_ends_the_command_in_one_line(task, tmp_path, ray_address):
    """The task loads in the driver and not in the judge: nothing was provided for that."""
    from conftest import TASK

    text = TASK.replace("import torch\n", "import os, torch\nif 'ray::' in open('/proc/self/cmdline').read():\n"
                                          "    raise OSError('only here')\n", 1)
    done = command("optimize", task(task=text), "--device", "model:h200", "--pulls", 2, "--out", tmp_path / "run",
                   address=ray_address)
    assert done.returncode in (1, 2) and "only here" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and len([x for x in done.stderr.splitlines() if x.startswith("kernelband:")]) == 1
    assert not (tmp_path / "run").exists()


def test_a_quarantined_gpu_gets_no_more_calls_and_its_call_goes_to_another():
    bad, good = Actor(crossed(Quarantined("GPU 0 failed twice"))), Actor(1, 2, 3)
    made = iter([bad, good])
    p = Pool(lambda: next(made), 2)
    assert [asyncio.run(p.call("judge")) for _ in range(3)] == [1, 2, 3]
    assert len(bad.calls) == 1 and not bad.killed  # alive: else somebody would be given its GPU


def test_when_every_gpu_is_quarantined_the_run_says_so():
    made = iter([Actor(crossed(Quarantined("GPU 0 failed twice"))), Actor(crossed(Quarantined("GPU 1 failed twice")))])
    p = Pool(lambda: next(made), 2)
    for _ in range(2):
        with pytest.raises(Quarantined, match="failed twice"):
            asyncio.run(p.call("judge"))
