"""Idioms of public kernels that Triton's interpreter, or a machine without a GPU, would trip over."""

import pytest
import torch

from kernelband.device import KNOWN
from kernelband.evaluate.modelled import ModelledJudge
from kernelband.task import Case, Contract, Task

HEAD = "import torch\nimport triton\nimport triton.language as tl\n"

BLOCK_LOGIC = HEAD + '''
@triton.jit
def k(x_ptr, y_ptr, M, N, B: tl.constexpr, FLAG: tl.constexpr):
    r = tl.arange(0, B)
    c = tl.arange(0, B)
    m = r[:, None] < M and c[None, :] < N
    x = tl.load(x_ptr + r[:, None] * N + c[None, :], mask=m, other=0.0)
    if FLAG and M > 0:
        x = x + 1
    if not FLAG:
        x = x * 100
    rest = not (r[:, None] < 1)
    x = tl.where(rest or c[None, :] > 2, x, 5.0)
    tl.store(y_ptr + r[:, None] * N + c[None, :], x, mask=m)

def f(x):
    y = torch.empty_like(x)
    k[(1,)](x, y, x.shape[0], x.shape[1], B=16, FLAG=True)
    return y
'''

ASKS_THE_DRIVER = HEAD + '''
def is_cuda():
    return triton.runtime.driver.active.get_current_target().backend == "cuda"

BLOCK = 16 if is_cuda() and triton.runtime.driver.active.get_current_target().arch == 90 else 1

@triton.jit
def k(x_ptr, y_ptr, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) * 2, mask=at < n)

def f(x):
    assert BLOCK == 16
    y = torch.empty_like(x)
    properties = triton.runtime.driver.active.utils.get_device_properties(0)
    assert properties["multiprocessor_count"] == 132
    k[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), B=BLOCK)
    return y
'''


def logic(x):
    r, c = torch.arange(x.shape[0])[:, None], torch.arange(x.shape[1])[None]
    return torch.where((r >= 1) | (c > 2), x + 1, torch.full_like(x, 5.0))


@pytest.mark.parametrize("source, reference", [(BLOCK_LOGIC, logic), (ASKS_THE_DRIVER, lambda x: x * 2)],
                         ids=["and, or, not on blocks", "asks the driver for its target"])
def test_it_is_judged_right(source, reference):
    task = Task("t", "f", reference, lambda c, g: {"x": torch.randn(5, 7, generator=g)},
                (Case("small", "check", "float32"), Case("big", "timed", "float32")), Contract())
    judge = ModelledJudge(task, KNOWN["h200"], timeout_s=30)
    try:
        told = judge.judge(source, {})
    finally:
        judge.close()
    assert told.kind == "measured", told.detail
