"""Accesses beside a buffer are seen in the interpreter, also where the value goes nowhere; TF32 products lose precision there."""

import pytest
from conftest import KERNEL, ROOT, TASK

from kernelband.device import KNOWN
from kernelband.evaluate.modelled import ModelledJudge
from kernelband.task import load


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bounds")
    (folder / "task.py").write_text(TASK)
    (folder / "kernel.py").write_text(KERNEL)
    made = ModelledJudge(load(folder).task, KNOWN["h200"], timeout_s=20)
    yield made
    made.close()


@pytest.mark.parametrize(("old", "new", "what"), [
    ("x = tl.load(x_ptr + offs, mask=offs < n)", "x = tl.load(x_ptr + offs)", "argument 'x'"),  # lanes past n are never stored
    ("x = tl.load(x_ptr + offs, mask=offs < n)", "x = tl.load(x_ptr + offs, mask=offs <= n)", "argument 'x'"),
    ("x * s + 1, mask=offs < n)", "x * s + 1)", "what it allocated"),
    ("tl.store(", "before = tl.load(y_ptr + offs)\n    tl.store(", "what it allocated"),
    ("tl.store(", "tl.atomic_add(y_ptr + offs, 0.0)\n    tl.store(", "what it allocated"),
])
def test_what_lies_beside_a_buffer_must_be_left_alone(judge, old, new, what):
    assert old in KERNEL
    told = judge.judge(KERNEL.replace(old, new), {})
    assert (told.kind, told.layer) == ("unsafe_memory", "guard") and what in told.detail, told.detail


def test_lanes_that_a_mask_shuts_may_point_anywhere(judge):
    far = KERNEL.replace("x_ptr + offs, mask=offs < n", "x_ptr + tl.where(offs < n, offs, 1 << 24), mask=offs < n")
    assert judge.judge(far, {}).kind == "measured"


def test_products_that_do_not_ask_for_ieee_see_ten_bits_of_mantissa():
    loaded = load(ROOT / "examples" / "matmul_bias_gelu")
    made = ModelledJudge(loaded.task, KNOWN["h200"], timeout_s=20)
    try:
        for precision in ('input_precision="tf32"', ""):
            told = made.judge(loaded.baseline.replace('input_precision="ieee"', precision), {})
            assert (told.kind, told.layer) == ("wrong", "values"), told.detail
    finally:
        made.close()
