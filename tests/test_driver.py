"""The driver with a made-up workshop: what a fault of ours becomes, and that it is never held against a candidate. No Ray."""

import asyncio
from types import SimpleNamespace

import pytest
import runs
from conftest import KERNEL
from rich.console import Console

from cluster.driver import FINAL_TRIES, MOST_INFRA, Driver
from cluster.faults import ActorLost, Unexpected
from kernelband import journal
from kernelband.errors import RunFailed, UserError
from kernelband.evaluate.compile import Compiled
from kernelband.evaluate.judgement import Judgement
from kernelband.folder import RunFolder
from kernelband.report import summary
from kernelband.report.live import Status, View
from kernelband.search import State, fold
from kernelband.task import Contract
from kernelband.writers import Written
from policies import make


def right(log=0.1, level="modelled"):
    return Judgement("measured", level=level, times={"c": (90.0, 89.0, 91.0, 3)}, log_speedup=log, low=log - 0.01,
                     high=log + 0.01, sd=0.01, gain=log > 0.03 if level == "final" else None, bound=log - 0.02)


class Shop:
    """Answers every stage; `judged` and `finals` are what judge() and final() give in turn (the last one for ever)."""

    measured, label = True, "gpu"

    def __init__(self, judged=(), finals=(), base=None, idle=()):
        self.judged, self.finals, self.base, self.idle = list(judged), list(finals), base or right(0.0), set(idle)
        self.task = SimpleNamespace(task=SimpleNamespace(contract=Contract()))
        self.asked: list[str] = []
        self.beside: list[tuple] = []

    def _next(self, what):
        answer = what.pop(0) if len(what) > 1 else what[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def compile(self, source):
        self.asked.append("compile")
        return Compiled(True, {}, launches={"c": 1})

    def know_compile_time(self, seconds):
        self.compile_time = seconds

    def without_kernel(self, compiled):
        return "c" if len(self.asked) in self.idle else ""

    async def write(self, writer, request):
        name = f"p{request.pull}"
        return Written(request.pull, "written", f"# {name}\n{KERNEL}x = {request.pull}\n", name, offers={"tiling": 2})

    async def baseline(self, *args):
        if isinstance(self.base, Exception):
            raise self.base
        return self.base

    async def judge(self, *args):
        self.beside.append(args[3:])
        return self._next(self.judged)

    async def final(self, *args):
        self.asked.append("final")
        return self._next(self.finals)

    async def offers(self, source):
        return {"rewriter": dict.fromkeys(runs.STRATEGIES, 9)}

    def allowed(self, offers):
        return dict(offers)

    def profile(self, compiled, judgement):
        return {}, {}, ""

    def queues(self):
        return {}


@pytest.fixture
def driver(tmp_path):
    logs = []

    def of(shop, pulls=8, begun=True, in_flight=2):
        (tmp_path / "sources").mkdir()
        log = journal.Journal(tmp_path)
        logs.append(log)
        state = State()
        made = Driver(RunFolder(tmp_path), log, state, make("random"), shop, View(Console(quiet=True), True), Status(),
                      lambda known: in_flight)
        made.record(runs.start(pulls))
        if begun:
            asyncio.run(made.judge_baseline(KERNEL))
        return made

    yield of
    for log in logs:
        log.close()


def kinds(driver):
    return [o.kind for _, o in sorted(driver.state.outcomes.items())]


@pytest.mark.parametrize("err", [UserError("the oracle raised"), RunFailed("the GPU is gone"), ActorLost("died"),
                                 ValueError("a bug")])
def test_what_an_actor_raises_costs_one_pull_and_not_the_search(driver, err):
    d = driver(Shop(judged=[right(), err, right()]), in_flight=1)
    asyncio.run(d.search())
    assert sorted(kinds(d)) == ["infra"] + ["measured"] * 7
    assert any(str(err) in o.detail for o in d.state.outcomes.values())


def test_five_faults_of_ours_in_a_row_end_the_run_and_say_how_to_go_on(driver):
    d = driver(Shop(judged=[right(), right(), RunFailed("the GPU is gone")]), pulls=40, in_flight=1)
    with pytest.raises(RunFailed, match=r"the GPU is gone.*kernelband resume") as caught:
        asyncio.run(d.search())
    assert "\n" not in str(caught.value) and kinds(d).count("infra") == MOST_INFRA
    state = State()
    for entry in journal.read(d.folder.path):
        fold(state, entry.event)
    assert len(state.outcomes) == 2 + MOST_INFRA


def test_faults_with_successes_between_them_do_not_add_up(driver):
    d = driver(Shop(judged=[Judgement("infra", "noise") if i % 2 else right() for i in range(20)] + [right()]), pulls=20,
               in_flight=1)
    asyncio.run(d.search())
    assert kinds(d).count("infra") == 10


def test_a_full_disk_still_ends_the_run(driver, monkeypatch):
    d = driver(Shop(judged=[right()]))
    monkeypatch.setattr(RunFolder, "save_source", lambda *a: (_ for _ in ()).throw(RunFailed("no space left")))
    with pytest.raises(RunFailed, match="no space left"):
        asyncio.run(d.search())


def finished(driver, finals):
    d = driver(Shop(judged=[right(0.3), right(0.2), right(0.1)], finals=finals), pulls=3, in_flight=1)
    asyncio.run(d.search())
    return d


@pytest.mark.parametrize("trouble", [Judgement("infra", "the baseline was slow"), UserError("oracle"), ActorLost("died"),
                                     Unexpected("KeyError")])
def test_a_fault_in_the_final_check_is_tried_again(driver, trouble):
    d = finished(driver, [trouble, trouble, right(0.25, "final")])
    asyncio.run(d.finish())
    assert all(r.ok for r in d.state.revised.values()) and d.state.ended.best == d.state.ranking()[0]
    assert d.state.result_of(d.state.ended.best).level == "final"


@pytest.mark.parametrize("trouble", [Judgement("infra", "the baseline was slow"), RunFailed("oracle"), ActorLost("died")])
def test_a_fault_that_stays_is_no_fall_and_the_run_can_be_resumed(driver, trouble):
    d = finished(driver, [trouble])
    with pytest.raises(RunFailed, match=rf"{FINAL_TRIES} attempts.*kernelband resume"):
        asyncio.run(d.finish())
    assert d.state.revised == {} and d.state.ended is None
    d.shop.finals = [right(0.25, "final")]
    asyncio.run(d.finish())
    assert d.state.ended is not None


@pytest.mark.parametrize("trouble", [Unexpected("the judge failed: KeyError: 'c'"), KeyError("c")])
def test_what_breaks_a_fresh_judge_each_time_is_passed_over(driver, trouble):
    d = finished(driver, [trouble, trouble, trouble, right(0.2, "final")])
    first = d.state.ranking()[0]
    asyncio.run(d.finish())
    assert not d.state.revised[first].ok and d.state.ended.best not in (first, d.state.baseline.candidate)


def test_a_candidate_without_a_kernel_of_its_own_is_not_judged(driver):
    shop = Shop(judged=[right()], idle={3})  # the baseline's is the first compilation
    d = driver(shop, pulls=3, in_flight=1)
    asyncio.run(d.search())
    assert kinds(d) == ["measured", "not_a_kernel", "measured"]


def test_a_baseline_without_a_kernel_of_its_own_is_told(driver):
    with pytest.raises(UserError, match=r"case 'c'.*allow"):
        driver(Shop(idle={1}))


@pytest.mark.parametrize("base, kind", [(Judgement("infra", "the GPU was busy"), RunFailed),
                                        (Judgement("wrong", "x"), UserError)])
def test_a_baseline_that_could_not_be_judged_is_not_called_wrong(driver, base, kind):
    with pytest.raises(kind):
        driver(Shop(base=base))


def test_a_resumed_run_checks_that_its_baseline_still_passes(driver):
    d = driver(Shop(judged=[right()]))
    asyncio.run(d.restore_baseline())
    d.shop.base = Judgement("crashed", "illegal memory access")
    with pytest.raises(RunFailed, match=r"does not pass any more \(crashed\): illegal memory access.*resume"):
        asyncio.run(d.restore_baseline())


def test_what_a_pull_costs_is_counted_once(driver):
    judged = right()
    judged.costs = {"start": 1.0, "verify": 2.0, "screen": 3.0}
    d = driver(Shop(judged=[judged]), pulls=1, in_flight=1)
    asyncio.run(d.search())
    assert sum(s for k, s in d.state.outcomes[1].costs.items() if k not in ("write", "compile", "waited")) == 6.0


def test_a_judge_is_told_all_about_the_incumbent(driver):
    d = driver(Shop(judged=[right(0.3), right(0.1)]), pulls=2, in_flight=1)
    asyncio.run(d.search())
    first = d.state.outcomes[1].candidate
    assert d.shop.beside == [(d.state.baseline.candidate, KERNEL, 0.0), (first, d.folder.source(first), 0.3)]


def test_a_fastest_without_a_gain_that_counts_is_not_handed_over_and_the_sentence_says_so(driver):
    d = finished(driver, [right(0.02, "final")])
    asyncio.run(d.finish())
    assert d.state.ended.best == d.state.baseline.candidate
    assert "does not count as a gain" in summary.sentence(d.state)
