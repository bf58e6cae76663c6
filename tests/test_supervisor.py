"""The supervisor's judgement, on a stand-in for the GPU: buffers in host memory, children in this process, a clock that
stands still unless a "kernel" or a request moves it. What is tested is who is blamed for what, and what the clock pays for;
the GPU itself is measured by the benchmarks.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from host_gpu import HostChild, host, wait  # noqa: F401  (host stands in for the GPU in every test of this file)

from kernelband.device import KNOWN
from kernelband.errors import Quarantined
from kernelband.evaluate import bench as bench_module
from kernelband.evaluate import measure
from kernelband.evaluate.judgement import Refused
from kernelband.evaluate.supervisor import Supervisor
from kernelband.evaluate.zygote import ChildDied
from kernelband.task import Case, Contract, Output, Task

HEAD = "import torch\n"
SLOW = HEAD + "def f(x, w):\n    wait(400)\n    return x * w\n"
FAST = HEAD + "def f(x, w):\n    wait(200)\n    return x * w\n"


def simple(contract=None, reference=lambda x, w: x * w, inputs=None) -> Task:
    draw = inputs or (lambda c, g: {"x": torch.randn(64, generator=g), "w": torch.randn(64, generator=g)})
    return Task("t", "f", reference, draw, (Case("small", "check", "float32"), Case("big", "timed", "float32"),
                                            Case("hid", "held_out", "float32")), contract or Contract())


def supervisor(task: Task, baseline: str = SLOW, off=("guard",)) -> Supervisor:
    made = Supervisor(task, None, timeout_s=10.0, off=off)
    told = made.set_baseline("base", baseline, None)
    assert told.kind == "measured", told.detail
    return made


def judged(source: str, task: Task | None = None, baseline: str = SLOW):
    made = supervisor(task or simple(), baseline)
    return made, made.judge("cand", source, None, "base", baseline, None)


def alive(made: Supervisor) -> int:
    return sum(not c.dead for c in made.children.zygote.children)


def test_a_candidate_twice_as_fast_is_measured_as_such_and_becomes_the_reference_side():
    made, told = judged(FAST)
    assert told.kind == "measured" and told.level == "paired" and 1.95 < math.exp(told.log_speedup) < 2.05, told
    assert told.low < told.log_speedup < told.high and set(made.children.sides) == {"base", "cand"} and alive(made) == 3


def test_a_slower_one_is_screened_only_and_leaves_nothing():
    made, told = judged(HEAD + "def f(x, w):\n    wait(900)\n    return x * w\n")
    assert told.kind == "measured" and told.level == "screened" and told.log_speedup < -0.3 and alive(made) == 2


def test_an_equal_one_does_not_move_the_reference():
    made, told = judged(SLOW + "# same\n")
    assert told.kind == "measured" and abs(told.log_speedup) < 0.01
    assert "cand" not in made.children.sides


def test_the_final_number_holds_what_is_true():
    made, _ = judged(FAST)
    told = made.final("cand", FAST, None, pairs=4)
    assert told.kind == "measured" and told.level == "final" and 1.95 < math.exp(told.log_speedup) < 2.05, told
    assert any(name.startswith("hid/") for name in told.checks)


CHEATS = {
    "remembers results by address": (
        HEAD + "seen = {}\ndef f(x, w):\n    key = x.data_ptr()\n    if key not in seen:\n        wait(400)\n"
        "        seen[key] = x * w\n    return seen[key]\n", "wrong"),
    "is wrong on the timed size only": (HEAD + "n = [0]\ndef f(x, w):\n    n[0] += 1\n    return x * w if n[0] < 4 else x + w\n",
                                        "wrong"),
    "writes to its input": (HEAD + "def f(x, w):\n    y = x * w\n    x.zero_()\n    return y\n", "tampered"),
    "returns less": (HEAD + "def f(x, w):\n    return (x * w)[:3]\n", "wrong"),
    "returns another dtype": (HEAD + "def f(x, w):\n    return (x * w).double()\n", "wrong"),
    "raises": (HEAD + "def f(x, w):\n    raise ValueError('no')\n", "crashed"),
    "dies": (HEAD + "def f(x, w):\n    raise ChildDied('signal', 'SIGSEGV')\n", "crashed"),
    "hangs": (HEAD + "def f(x, w):\n    raise ChildDied('timeout', 'no answer')\n", "timed_out"),
    "does not import": ("import nothing_of_that_name\n", "compile_failed"),
    "remembers results by a fingerprint of the contents": (
        HEAD + "seen = {}\ndef f(x, w):\n    key = tuple(x[:4].tolist())\n    if key not in seen:\n        wait(400)\n"
        "        seen[key] = x * w\n    return seen[key]\n", "wrong"),
    "is right every other time": (
        HEAD + "n = [0]\ndef f(x, w):\n    n[0] += 1\n    return x * w if n[0] % 2 else x + w\n", "wrong_nondeterministic"),
    "sniffs the scale of the data": (HEAD + "def f(x, w):\n    return x * w if x.abs().max() < 5 else x * w * 1.01\n", "wrong"),
    "leaves the answer of the last call": (HEAD + "def f(x, w):\n    return torch.empty_like(x)\n", "wrong"),
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_refused_and_the_next_candidate_is_judged_as_ever(name):
    source, kind = CHEATS[name]
    made, told = judged(source)
    if "fingerprint" in name and told.kind == "measured":  # the changed element was one that it looks at: then the final sees
        told = made.final("cand", source, None, runs=1, pairs=4)  # that it works once for a slot and slice only
        assert told.kind in ("timing_inconsistent", "wrong"), told
        return
    assert told.kind == kind and told.detail, (told.kind, told.detail)
    assert alive(made) == 2  # the baseline and the spare
    again = made.judge("next", FAST, None, "base", SLOW, None)
    assert again.kind == "measured" and again.log_speedup > 0.4


def test_one_that_remembers_by_the_whole_contents_falls_at_the_final_check():
    source = CHEATS["remembers results by a fingerprint of the contents"][0].replace("x[:4]", "x")
    made, told = judged(source)
    assert told.kind == "measured" and told.log_speedup > 0.5  # a slot's contents come several times in one slice
    told = made.final("cand", source, None, runs=1, pairs=4)
    assert told.kind == "timing_inconsistent" and "checked whole" in told.detail


def test_one_that_works_only_when_its_result_is_kept_falls_at_the_final_check():
    """It reads in its caller's frame which call of the slice this is, and works only at the last use of each slot."""
    source = HEAD + (
        "import sys\ndef f(x, w):\n    me = sys._getframe(1).f_locals.get('self')\n    i, n = getattr(me, 'i', 0), "
        "getattr(me, 'n', 1)\n    if n > 8 and i < n - 8:\n        return x\n    wait(400)\n    return x * w\n")
    made, told = judged(source)
    assert told.kind == "measured"  # screening does not see it
    told = made.final("cand", source, None, runs=1, pairs=4)
    assert told.kind == "timing_inconsistent" and "checked whole" in told.detail


def test_work_that_its_own_events_do_not_have_is_told(monkeypatch):
    honest = HostChild.op_slice
    monkeypatch.setattr(HostChild, "op_slice", lambda self, slots, calls, graph=False: {
        "event_us": honest(self, slots, calls)["event_us"] * (0.01 if "side" in self.entry.__code__.co_names else 1.0)})
    _, told = judged(HEAD + "side = 0\ndef f(x, w):\n    side\n    wait(300)\n    return x * w\n")
    assert told.kind == "timing_inconsistent" and "own events" in told.detail


def test_a_reference_side_that_fails_beside_a_candidate_is_not_the_end():
    made = supervisor(simple())
    real, broken = HostChild.op_slice, made.children.sides["base"]

    def op_slice(self, slots, calls, graph=False):
        if self is broken and any(not c.dead and c is not broken for c in made.children.zygote.children):
            raise RuntimeError("CUDA out of memory")
        return real(self, slots, calls)

    HostChild.op_slice = op_slice
    try:
        told = made.judge("cand", FAST, None, "base", SLOW, None)
    finally:
        HostChild.op_slice = real
    assert told.kind == "infra" and "runs without it" in told.detail
    assert made.judge("next", FAST, None, "base", SLOW, None).kind == "measured"


def test_one_that_slows_the_baseline_gets_no_number():
    made, _ = judged(FAST)
    real = HostChild.op_slice

    def op_slice(self, slots, calls, graph=False):
        told = real(self, slots, calls)
        beside = [c for c in made.children.zygote.children if not c.dead and c is not self]
        if self is made.children.sides.get("base") and beside:
            wait(4000)
        return told

    HostChild.op_slice = op_slice
    try:
        told = made.final("cand", FAST, None, runs=1, pairs=3)
    finally:
        HostChild.op_slice = real
    assert told.kind == "infra" and "alone" in told.detail


def test_integer_and_boolean_outputs():
    task = simple(Contract(outputs=(Output(index=0, compare="exact"), Output(index=1)), dtypes=("float32",)),
                  reference=lambda x, w: (x > w, (x * 100).int()))
    base = HEAD + "def f(x, w):\n    wait(300)\n    return x > w, (x * 100).int()\n"
    # Integers of the fp64 oracle and of the dtype may differ at a boundary; what counts is equality with the honest run.
    made = supervisor(task, base)
    told = made.judge("c", base.replace("300", "150"), None, "base", base, None)
    assert told.kind == "measured" and told.log_speedup > 0.3
    assert made.judge("d", base.replace("x > w", "x >= w + 1"), None, "base", base, None).kind == "wrong"


def test_a_permuted_result_is_right_where_the_contract_says_so():
    task = simple(Contract(outputs=(Output(compare="permutation"),)))
    base = HEAD + "def f(x, w):\n    wait(300)\n    return (x * w).flip(0)\n"
    _, told = judged(base.replace("300", "100"), task, base)
    assert told.kind == "measured"
    _, told = judged(base.replace("x * w", "x + w"), task, base)
    assert told.kind == "wrong"


def test_a_mutated_argument_is_restored_before_every_slice():
    task = simple(Contract(outputs=(Output("x"),), mutates=("x",)), reference=lambda x, w: x.mul_(w))
    base = HEAD + "def f(x, w):\n    wait(300)\n    x.mul_(w)\n    return x\n"
    _, told = judged(base.replace("300", "150"), task, base)
    assert told.kind == "measured" and 0.4 < told.log_speedup < 1.0
    _, told = judged(base.replace("x.mul_(w)", "x.mul_(w).mul_(w)"), task, base)
    assert told.kind == "wrong"
    _, told = judged(base.replace("x.mul_(w)", "x.mul_(w); w.zero_()"), task, base)
    assert told.kind == "tampered"


def test_a_short_slice_of_a_mutating_call_is_the_median_of_several():
    task = simple(Contract(outputs=(Output("x"),), mutates=("x",)), reference=lambda x, w: x.mul_(w))
    made = supervisor(task, HEAD + "def f(x, w):\n    wait(100)\n    x.mul_(w)\n    return x\n")
    bench, told = made.timed()[0], []
    assert bench.repeats == min(bench_module.MOST_REPEATS, math.ceil(bench_module.SHORTEST_US / (100 * bench.calls))) > 1
    bench._slice = lambda *_: told.append(len(told)) or measure.Slice([50.0, 90.0, 100.0, 110.0, 900.0][len(told) - 1], 100.0)
    assert bench.slice(made.children.side("base")).us == 100.0 and len(told) == bench.repeats


def test_a_hand_over_that_may_be_misjudged_makes_nothing_faster_than_physics():
    made = supervisor(simple())
    bench, timer = made.timed()[0], made.timer
    timer.peaks, timer.task = KNOWN["h200"], replace(made.task, work=lambda case: (4.8e6, 1.0))  # 1 us
    bench.overhead_us, bench.calls = 1000.0, 1000
    timer.believable(bench, 0.75)
    with pytest.raises(Refused, match="faster than physics"):
        timer.believable(bench, 0.65)


def test_a_constant_argument_may_be_prepared_once():
    task = simple(Contract(constant=("w",)))
    per_case = HEAD + ("ready = {}\ndef f(x, w):\n    wait(100)\n    if w.data_ptr() not in ready:\n        wait(300)\n"
                       "        ready[w.data_ptr()] = w * 1\n    return x * ready[w.data_ptr()]\n")
    _, told = judged(per_case, task)
    assert told.kind == "measured" and told.log_speedup > 0.5
    _, told = judged(per_case, simple())  # without the promise it is a stale answer
    assert told.kind == "wrong"


def test_a_result_written_to_after_it_was_read_is_tampering():
    made = supervisor(simple())
    bench = made.timed()[0]
    bench.slice(made.children.side("base"))
    bench.outputs.tensors[0].add_(1)  # a kernel that nobody waited for
    with pytest.raises(bench_module.Wrong, match="after it had been read"):
        bench.slice(made.children.side("base"))


def test_no_contents_come_twice_at_an_address_or_by_value():
    made = supervisor(simple())
    bench, seen = made.timed()[0], set()
    for _ in range(4):
        bench.slice(made.children.side("base"))
        now = [(i, tuple(s.buffers["x"].tensor.tolist())) for i, s in enumerate(bench.slots.values())]
        assert not seen & {c for _, c in now} and len({c for _, c in now}) == len(now)
        seen |= {c for _, c in now}


def test_what_is_right_without_its_kernels_is_no_kernel(monkeypatch):
    monkeypatch.setattr(HostChild, "op_ablate", lambda self: {})  # launches that do nothing change nothing here
    _, told = judged(FAST)
    assert told.kind == "not_a_kernel" and told.layer == "what_ran" and "without any kernel" in told.detail


def test_kernels_captured_in_a_graph_before_are_no_reason_to_refuse(monkeypatch):
    def op_ablate(self):  # what the spent child captured goes on working; a fresh one captures nothing
        if not self.kept and not self.calls:
            self.entry = lambda *args: None
        return {}

    def op_call(self, slot, output, inner=HostChild.op_call):
        self.calls += 1
        return inner(self, slot, output)

    monkeypatch.setattr(HostChild, "calls", 0, raising=False)
    monkeypatch.setattr(HostChild, "op_ablate", op_ablate)
    monkeypatch.setattr(HostChild, "op_call", op_call)
    made, told = judged(SLOW.replace("400", "401"))
    assert told.kind == "measured" and "cand" in made.proved


def test_a_contract_that_allows_torch_asks_for_no_kernel_of_its_own(monkeypatch):
    monkeypatch.setattr(HostChild, "op_ablate", lambda self: {})
    _, told = judged(FAST, simple(Contract(allow=("own", "torch"))))
    assert told.kind == "measured"


def test_a_layer_can_be_left_out_to_see_what_it_is_worth():
    source = CHEATS["sniffs the scale of the data"][0]
    made = supervisor(simple(), off=("guard", "families", "fresh"))
    assert made.judge("cand", source, None, "base", SLOW, None).kind == "measured"
    with pytest.raises(ValueError, match="no such layer: familes"):
        Supervisor(simple(), None, off=("familes",))


def test_a_gpu_that_fails_its_health_check_twice_is_left_out(monkeypatch):
    made = supervisor(simple())
    crash = HEAD + "def f(x, w):\n    raise ChildDied('signal', 'SIGSEGV')\n"
    assert made.judge("cand", crash, None, "base", SLOW, None).kind == "crashed"  # the GPU is well: the next is judged
    assert made.judge("next", FAST, None, "base", SLOW, None).kind == "measured"

    def ill(self, slots, calls, graph=False):
        raise ChildDied("exit", "uncorrectable error")

    monkeypatch.setattr(HostChild, "op_slice", ill)
    told = made.judge("cand", crash, None, "base", SLOW, None)
    assert told.kind == "gpu_fault" and "health check" in told.detail
    for door in (lambda: made.judge("next", FAST, None, "base", SLOW, None), lambda: made.final("next", FAST, None)):
        with pytest.raises(Quarantined, match="left out"):
            door()


def test_the_final_judgement_says_whether_it_counts_as_a_gain():
    made, _ = judged(FAST)
    told = made.final("cand", FAST, None, screened=40)
    assert told.gain is True and math.log(1.02) < told.bound < told.log_speedup
    same = made.final("same", SLOW + "# same\n", None, screened=40)
    assert same.kind == "measured" and same.gain is False


def test_short_calls_are_timed_in_a_graph_as_well():
    base = SLOW.replace("400", "40")
    made = supervisor(simple(), base)
    told = made.final("cand", base.replace("40)", "20)"), None)
    assert told.graph == {"big": (pytest.approx(40, rel=0.1), pytest.approx(20, rel=0.1))}


def test_a_hopeless_candidate_is_dropped_after_one_round():
    made = supervisor(simple())
    told = made.judge("cand", SLOW.replace("400", "4000"), None, "base", SLOW, None)
    assert told.level == "screened" and told.times["big"][3] == made.timed()[0].calls  # one slice
