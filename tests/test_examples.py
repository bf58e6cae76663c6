"""The examples as tasks: what every one of them promises, and that the real stages pass its baseline again and again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import ROOT

from kernelband.device import KNOWN
from kernelband.evaluate import verify
from kernelband.evaluate.compile import Compiler, Target
from kernelband.evaluate.modelled import ModelledJudge
from kernelband.evaluate.specs import shapes_only
from kernelband.task import LoadedTask, load

NAMES = sorted(folder.name for folder in (ROOT / "examples").iterdir() if (folder / "task.py").is_file())
NEW = ("rmsnorm_residual", "cross_entropy", "swiglu")
PEAKS = KNOWN["h200"]


def example(name: str) -> LoadedTask:
    return load(ROOT / "examples" / name)


def judged(loaded: LoadedTask, source: str, times: int = 1) -> list[tuple[str, str, str]]:
    judge = ModelledJudge(loaded.task, PEAKS, timeout_s=60)
    try:
        told = [judge.judge(source, {}, held_out=True) for _ in range(times)]
    finally:
        judge.close()
    return [(t.kind, t.layer, t.detail) for t in told]


@pytest.mark.parametrize("name", NAMES)
def test_what_every_example_has(name):
    loaded = example(name)
    task = loaded.task
    assert task.name == name and task.work is not None
    assert len(task.with_role("check")) >= 5 and len(task.with_role("timed")) == 3 and len(task.with_role("held_out")) >= 2
    for role in ("check", "timed"):
        assert {c.dtype for c in task.with_role(role)} == set(task.contract.dtypes), role
    smallest = [c for c in task.with_role("check") if 1 in c.params.values()]
    assert smallest, "no check case with a length of one"
    for case in task.cases:
        assert all(low <= case.params[key] <= high for key, (low, high) in task.contract.shapes.items())
        assert set(task.contract.shapes) <= set(case.params)


@pytest.mark.parametrize("name", NAMES)
def test_the_least_work_is_no_more_than_what_lies_in_memory(name):
    """Bytes: every input once and every output once, as the specs of each case count them; never more."""
    task = example(name).task
    for case in task.with_role("check"):
        inputs = verify.draw(task, case, 1, "drawn", "cpu")
        made = verify.truth(task, case, inputs).honest
        whole = sum(t.numel() * t.element_size() for t in (*inputs.values(), *made) if isinstance(t, torch.Tensor))
        least, flops = task.work(case)
        assert least == whole and flops > 0, case.name


@pytest.mark.slow
@pytest.mark.parametrize("name", NEW)
def test_the_baseline_compiles_for_every_case_without_spilling(name, tmp_path):
    loaded = example(name)
    target = Target("cuda", PEAKS.arch, 32, PEAKS.max_shared_bytes, {"multi_processor_count": PEAKS.sms})
    with Compiler(tmp_path) as compiler:
        cases = [shapes_only(loaded.task, c) for c in loaded.task.cases]
        made = compiler.compile(loaded.baseline, loaded.task.entry, cases, target)
    assert made.ok, made.error
    assert set(made.launches.values()) == {1} and all(one.spills == 0 for facts in made.facts.values() for one in facts)


@pytest.mark.slow
@pytest.mark.parametrize("name", NEW)
def test_the_baseline_is_right_each_time(name):
    assert set(judged(example(name), example(name).baseline, 2)) == {("measured", "", "")}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_no_baseline_is_refused_in_twenty_judgements(name):
    assert set(judged(example(name), example(name).baseline, 20)) == {("measured", "", "")}


FAULTS = {
    "the sum is not stored": ("rmsnorm_residual", "tl.store(h_row + cols, h, mask=mask)", "pass"),
    "the norm of x alone": ("rmsnorm_residual", "h = tl.load(x_row + cols, mask=mask, other=0.0) + tl.load(residual_row + cols, "
                            "mask=mask, other=0.0)\n        weight", "h = tl.load(x_row + cols, mask=mask)\n        weight"),
    "no eps": ("rmsnorm_residual", "squares / n_cols + eps", "squares / n_cols"),
    "the mean of whole blocks": ("rmsnorm_residual", "squares / n_cols", "squares / (tl.cdiv(n_cols, BLOCK) * BLOCK)"),
    "no maximum": ("cross_entropy", "tl.exp(x - top)", "tl.exp(x)"),
    "a target one too high": ("cross_entropy", "cols == target", "cols == target + 1"),
    "a vocabulary of whole blocks": ("cross_entropy", "return loss", "return loss * (vocab % 1024 == 0)"),
    "the other one gated": ("swiglu", "gate, up, out, n,", "up, gate, out, n,"),
    "a range of float16": ("swiglu", "up = tl.load(up_ptr + offsets, mask=mask, other=0.0)",
                           "up = tl.load(up_ptr + offsets, mask=mask, other=0.0).to(tl.float16)"),
    "a whole number of blocks": ("swiglu", "triton.cdiv(n, BLOCK)", "max(1, n // BLOCK)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused_as_wrong(fault):
    name, old, new = FAULTS[fault]
    loaded = example(name)
    assert loaded.baseline.count(old) == 1
    told = judged(loaded, loaded.baseline.replace(old, new))[0]
    assert told[0] == "wrong", told


def test_the_residual_sum_is_an_output_of_its_own():
    task = example("rmsnorm_residual").task
    case = task.with_role("check")[1]
    inputs = verify.draw(task, case, 3, "drawn", "cpu")
    first, second = verify.truth(task, case, inputs).honest
    assert torch.equal(second, inputs["x"] + inputs["residual"]) and not torch.equal(first, second)
    assert first.dtype == second.dtype == torch.bfloat16


def test_a_target_lies_in_the_last_column_of_every_case():
    task = example("cross_entropy").task
    for case in (*task.with_role("check"), *task.with_role("held_out")):
        inputs = verify.draw(task, case, 5, "drawn", "cpu")
        assert int(inputs["targets"].max()) == case.params["vocab"] - 1 and inputs["targets"].dtype == torch.int64


def test_the_folders_hold_nothing_else():
    for name in NAMES:
        folder = Path(ROOT / "examples" / name)
        assert {p.name for p in folder.iterdir()} - {"__pycache__"} == {"task.py", "kernel.py"}
