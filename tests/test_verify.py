"""The verdict: what is right, what is not, and on which inputs it is asked."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from conftest import TASK
from hypothesis import given
from hypothesis import strategies as st

from kernelband.errors import UserError
from kernelband.evaluate import verify
from kernelband.task import FAMILIES, Case, Contract, Output, Task, load

SAID = [{"written": True}]


def truths(dtype="float16", rows=8, cols=1000, scale=1.0, reference=lambda x: torch.softmax(x, -1)):


    task = Task("t", "f", reference, lambda c, g: {"x": (torch.randn(rows, cols, generator=g) * scale).to(getattr(torch, dtype))},
                (Case("c", "check", dtype),), Contract(dtypes=(dtype,)))
    case = task.cases[0]
    return task, verify.truth(task, case, verify.draw(task, case, 5, "drawn", "cpu"))


def verdict(task, right, got):
    return verify.judge(right, [got], SAID, task.contract)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_honest_work_passes_in_its_own_and_in_higher_precision(dtype):
    task, right = truths(dtype)
    assert verdict(task, right, right.honest[0]).ok
    assert verdict(task, right, right.exact[0].to(right.honest[0].dtype)).ok


def cheats(right):
    honest = right.honest[0]
    tail = honest.clone()
    tail[..., -1] = 0
    dropped = honest.clone()
    dropped[-1] = dropped[0]
    nan = honest.clone()
    nan[0, 0] = float("nan")
    return {"zeros": torch.zeros_like(honest), "mean": honest.mean(-1, keepdim=True).expand_as(honest).clone(),
            "input": right.inputs["x"].clone(), "tail": tail, "row": dropped, "nan": nan, "all nan": honest * float("nan"),
            "flipped": honest.flip(-1), "half as much": honest / 2, "one per cent more": honest * 1.01}


@pytest.mark.parametrize("cheat", cheats(truths()[1]))
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_is_not_the_answer_fails(cheat, dtype):
    task, right = truths(dtype)
    told = verdict(task, right, cheats(right)[cheat])
    assert not told.ok and told.kind == "wrong" and told.detail


def test_a_precision_below_the_contract_fails():
    task, right = truths("float32", 64, 64, reference=lambda x: x @ x.T)
    x = right.inputs["x"]
    assert not verdict(task, right, (x.half() @ x.half().T).float()).ok
    assert not verdict(task, right, (x.bfloat16() @ x.bfloat16().T).float()).ok
    assert verdict(task, right, (x.T.contiguous().T @ x.T)).ok


def test_the_worst_element_is_named():
    task, right = truths("float32", 4, 5, reference=lambda x: x * 2)
    wrong = right.honest[0].clone()
    wrong[2, 3] += 1
    told = verdict(task, right, wrong).detail
    assert "(2, 3)" in told and re.search(r"expected -?\d", told)


def test_another_shape_or_dtype_is_told_as_such():
    task, right = truths()
    told = verify.judge(right, right.honest, [{"shape": [8], "dtype": "float64", "written": False}], task.contract)
    assert not told.ok and "[8] float64" in told.detail
    assert not verify.judge(right, right.honest, [], task.contract).ok


def test_infinities_must_be_where_they_belong():
    task, right = truths("float32", 4, 8, reference=lambda x: 1 / torch.where(x > 0, x, torch.zeros_like(x)))
    assert torch.isinf(right.honest[0]).any() and verdict(task, right, right.honest[0]).ok
    assert not verdict(task, right, torch.nan_to_num(right.honest[0])).ok
    assert not verdict(task, right, -right.honest[0]).ok


def test_exact_permutation_and_predicate_outputs():
    x = torch.randn(3, 9)
    right = verify.Truth({"x": x}, [x.double()], [x])
    judge = lambda out, got: verify.judge(right, [got], SAID, Contract(outputs=(out,))).ok  # noqa: E731
    assert judge(Output(compare="exact"), x.clone()) and not judge(Output(compare="exact"), x + 1e-6)
    assert judge(Output(compare="permutation"), x.flip(-1)) and not judge(Output(compare="permutation"), x.flip(-1) * 2)
    assert judge(Output(compare="predicate", predicate=lambda i, o: bool((o > 5).all())), x.abs() + 6)
    assert not judge(Output(compare="predicate", predicate=lambda i, o: False), x)


def test_a_reference_that_is_not_deterministic_or_raises_is_told(task):
    noisy = load(task(task=TASK.replace("return x * s + 1", "return x * s + torch.rand_like(x)"))).task
    case = noisy.cases[0]
    with pytest.raises(UserError, match="not deterministic"):
        verify.check_deterministic(noisy, case, verify.draw(noisy, case, 1, "drawn", "cpu"))
    broken = load(task(task=TASK.replace("return x * s + 1", "return x.nothing"), name="b")).task
    with pytest.raises(UserError, match="the reference raised AttributeError"):
        verify.truth(broken, case, verify.draw(broken, case, 1, "drawn", "cpu"))


@pytest.mark.parametrize("family", ["drawn", "offset", "spike"])
def test_families_differ_and_secrets_do_too(family):
    task, _ = truths()
    case = task.cases[0]
    one, two, again = (verify.draw(task, case, seed, family, "cpu")["x"] for seed in (1, 2, 1))
    assert torch.equal(one, again) and not torch.equal(one, two)
    assert family == "drawn" or not torch.equal(one, verify.draw(task, case, 1, "drawn", "cpu")["x"])


def drawn(make, family, **contract):


    task = Task("t", "f", lambda x: x, lambda c, g: {"x": make(g)}, (Case("c", "check", "float32"),), Contract(**contract))
    return verify.draw(task, task.cases[0], 3, family, "cpu")["x"], make(torch.Generator().manual_seed(3))


@pytest.mark.parametrize("family", ["offset", "spike"])
@pytest.mark.parametrize("make", [
    lambda g: torch.randn(6, 10, generator=g)[:, ::2], lambda g: torch.randn(6, 5, generator=g).T,
    lambda g: torch.randn(4, 3, 5, generator=g).permute(2, 0, 1)[1:],
])
def test_other_families_keep_the_strides(family, make):
    changed, before = drawn(make, family)
    assert changed.stride() == before.stride() and changed.shape == before.shape
    differ = int((changed != before).sum())
    assert 1 <= differ <= 3 if family == "spike" else differ > 3
    if family == "spike":
        assert float(changed.abs().max()) == 64 * float(before.abs().max())


@pytest.mark.parametrize("family", ["offset", "spike"])
def test_a_tensor_whose_elements_share_memory_stays_as_drawn(family):
    for make in (lambda g: torch.randn(1, 5, generator=g).expand(4, 5),
                 lambda g: torch.randn(12, generator=g).as_strided((4, 3), (2, 1))):
        changed, before = drawn(make, family)
        assert changed.stride() == before.stride() and torch.equal(changed, before)


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_other_families_do_not_overflow_the_dtype(family):
    changed, _ = drawn(lambda g: (torch.randn(50, generator=g) * 2e4).half(), family)
    assert bool(torch.isfinite(changed).all())
    masked = lambda g: torch.where(torch.rand(50, generator=g) > 0.5, torch.ones(50), torch.tensor(-torch.inf))  # noqa: E731
    changed, before = drawn(masked, family)
    assert torch.equal(torch.isinf(changed), torch.isinf(before))
    assert float(changed[torch.isfinite(changed)].abs().max()) <= 129


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_what_was_never_negative_stays_so(family):
    changed, before = drawn(lambda g: torch.rand(4, 9, generator=g) + 0.01, family)
    assert float(changed.min()) >= 0 and not torch.equal(changed, before)


def test_families_that_faults_hide_from_nothing_else():
    """A spike at the very end of a row, rows far below zero, and values next to nothing."""
    make = lambda g: torch.randn(3, 40, generator=g)  # noqa: E731
    alone, before = drawn(lambda g: torch.randn(1, 40, generator=g), "spike")
    assert (alone != before).nonzero().tolist() == [[0, 39]]
    spiked, before = drawn(make, "spike")
    moved = spiked != before
    assert bool(moved[:, 0].any()) and bool(moved[:, -1].any())
    levels, _ = drawn(make, "levels")
    assert float(levels.mean(dim=1).abs().min()) > 120
    tiny, before = drawn(make, "tiny")
    assert torch.equal(tiny * 1024, before)


@given(count=st.integers(1, 12), chosen=st.sets(st.sampled_from(FAMILIES), min_size=1))
def test_every_family_is_met_by_each_candidate(count, chosen):
    contract = Contract(families=tuple(sorted(chosen)))
    met = [verify.families_for(contract, i, count) for i in range(count)]
    assert all(m[0] == "drawn" for m in met) and {f for m in met for f in m} == chosen | {"drawn"}


def test_garbage_where_only_the_honest_run_overflows_fails():
    task, right = truths("float16", 4, 64, scale=60.0, reference=lambda x: (x * x).sum(-1, keepdim=True) / x.abs().max() + x)
    honest, exact = right.honest[0].clone(), right.exact[0]
    honest[0] = torch.inf  # as an honest run in half precision gives where a sum overflows
    right = verify.Truth(right.inputs, [exact], [honest])
    good = exact.half()
    assert bool(torch.isfinite(good).all()) and verdict(task, right, good).ok
    for garbage in (0.0, 1.0, torch.inf, torch.nan):
        bad = good.clone()
        bad[0] = garbage
        assert not verdict(task, right, bad).ok, garbage


def test_at_the_brink_of_the_dtype_honest_work_falls_on_either_side():
    task, _ = truths("float16", 1, 4)
    exact = torch.tensor([[65503.0, 65600.0, 1.0, 2.0]], dtype=torch.float64)
    honest = torch.tensor([[torch.inf, 65504.0, 1.0, 2.0]]).half()
    right = verify.Truth({}, [exact], [honest])
    for row in ([torch.inf, torch.inf, 1.0, 2.0], [65504.0, 65504.0, 1.0, 2.0], [torch.inf, 65504.0, 1.0, 2.0]):
        assert verdict(task, right, torch.tensor([row]).half()).ok
    for row in ([-torch.inf, torch.inf, 1.0, 2.0], [65504.0, 0.0, 1.0, 2.0], [0.0, torch.inf, 1.0, 2.0]):
        assert not verdict(task, right, torch.tensor([row]).half()).ok


def test_another_order_of_summation_passes_in_float64_and_float32_work_does_not():


    k = 4096
    task = Task("t", "f", lambda a, b: a @ b,
                lambda c, g: {"a": torch.randn(32, k, generator=g).double(), "b": torch.randn(k, 32, generator=g).double()},
                (Case("c", "check", "float64"),), Contract(dtypes=("float64",)))
    right = verify.truth(task, task.cases[0], verify.draw(task, task.cases[0], 1, "drawn", "cpu"))
    a, b = right.inputs["a"], right.inputs["b"]
    blocked = sum(a[:, i:i + 16] @ b[i:i + 16] for i in range(0, k, 16))
    assert not torch.equal(blocked, right.exact[0]) and verdict(task, right, blocked).ok
    assert not verdict(task, right, (a.float() @ b.float()).double()).ok
    assert not verdict(task, right, blocked * (1 + 1e-12)).ok


def scan_task() -> tuple[Task, Case]:
    case = Case("c", "check", "float32")
    return Task("t", "f", lambda x: x.cumsum(-1), lambda c, g: {"x": torch.randn(3, 331, generator=g)}, (case,), Contract()), case


@pytest.mark.parametrize("family", ["drawn", *FAMILIES])
def test_a_running_sum_in_float32_is_right_though_the_oracle_here_sums_in_double(family):
    task, case = scan_task()
    for seed in range(30):
        right = verify.truth(task, case, verify.draw(task, case, seed, family, "cpu"))
        one_by_one = np.cumsum(right.inputs["x"].numpy(), axis=-1, dtype=np.float32)  # the honest run itself adds in double
        assert verdict(task, right, torch.from_numpy(one_by_one)).ok, (family, seed)


def test_yards_for_rounding_errors_leave_lower_precision_outside():
    task, case = scan_task()
    for seed in range(10):
        right = verify.truth(task, case, verify.draw(task, case, seed, "drawn", "cpu"))
        assert not verdict(task, right, right.inputs["x"].half().float().cumsum(-1)).ok
    for k in (16, 1024, 65536):
        case = Case("c", "check", "float32")
        task = Task("t", "f", lambda a, b: a @ b,
                    lambda c, g, k=k: {"a": torch.randn(16, k, generator=g), "b": torch.randn(k, 16, generator=g)}, (case,),
                    Contract())
        right = verify.truth(task, case, verify.draw(task, case, 0, "drawn", "cpu"))
        tf32 = [(t.view(torch.int32) + (1 << 12) & ~((1 << 13) - 1)).view(torch.float32) for t in right.inputs.values()]
        assert not verdict(task, right, tf32[0] @ tf32[1]).ok, k
        assert verdict(task, right, sum(right.inputs["a"][:, i:i + 8] @ right.inputs["b"][i:i + 8] for i in range(0, k, 8))).ok


def test_exact_outputs_may_hold_nan_where_the_oracle_does():
    x = torch.tensor([[1.0, torch.nan, -0.0]])
    right = verify.Truth({"x": x}, [x.double()], [x])
    judge = lambda got: verify.judge(right, [got], SAID, Contract(outputs=(Output(compare="exact"),)))  # noqa: E731
    assert judge(x.clone()).ok and judge(torch.tensor([[1.0, -torch.nan, -0.0]])).ok
    assert "(0, 0)" in judge(torch.tensor([[torch.nan, torch.nan, -0.0]])).detail
    assert not judge(torch.tensor([[1.0, 0.0, -0.0]])).ok and not judge(torch.tensor([[1.0, torch.nan, 0.0]])).ok


def test_the_oracle_runs_without_shortcuts_in_precision_and_leaves_the_switches_as_they_were():
    matmul, seen = torch.backends.cuda.matmul, []
    names = ("allow_tf32", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    before = [getattr(matmul, n) for n in names]
    truths(reference=lambda x: seen.append([getattr(matmul, n) for n in names]) or x * 2)
    assert seen and all(s == [False] * 3 for s in seen) and [getattr(matmul, n) for n in names] == before


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_other_honest_ways_of_computing_always_pass(dtype):
    """The verdict may not depend on luck: exponentials as a GPU takes them, blocked sums, reciprocals; many draws."""
    def like_a_gpu(x):
        x = x.float()
        top = x.max(-1, keepdim=True).values
        raised = torch.exp2((x - top) * 1.4426950408889634)
        raised = raised * (1 + 1.2e-7 * torch.randint(-2, 3, raised.shape))  # ex2.approx: two units in the last place
        total = sum(part.sum(-1, keepdim=True) for part in raised.split(64, -1))
        return (raised * (1 / total)).to(getattr(torch, dtype))

    worst = 0.0
    for seed in range(40):
        task, _ = truths(dtype, 4, 700)
        case = task.cases[0]
        for family in ("drawn", "offset", "spike"):
            right = verify.truth(task, case, verify.draw(task, case, seed, family, "cpu"))
            told = verdict(task, right, like_a_gpu(right.inputs["x"]))
            assert told.ok, told.detail
            worst = max(worst, told.error)
    assert worst < 0.8  # with room to spare
