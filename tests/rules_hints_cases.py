"""Kernels for the tests of the families `cache_hints`, `hints`, `math` and `loop_range`, with calls of each, and what
the tests ask of a rule."""

from __future__ import annotations

from rewriter_cases import CASES, HEAD

from kernelband.writers.rewriter import cache_hints, hints, loop_range, math
from kernelband.writers.rewriter.kernels import Source
from kernelband.writers.rewriter.rule import Child

RULES = {rule.name: rule for rule in (cache_hints.RULE, hints.RULE, math.RULE, loop_range.RULE)}

# Softmax of a row times a matrix, in one pass: quotients of two shapes, and exponentials in a loop.
ATTEND = HEAD + '''
@triton.jit
def attend_kernel(s_ptr, v_ptr, o_ptr, lse_ptr, M, N, D, temperature, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    ds = tl.arange(0, BD)
    m_i = tl.full((BM,), -1e30, dtype=tl.float32)
    l_i = tl.zeros((BM,), dtype=tl.float32)
    acc = tl.zeros((BM, BD), dtype=tl.float32)
    for start in range(0, N, BN):
        cols = start + tl.arange(0, BN)
        mask = (rows[:, None] < M) & (cols[None, :] < N)
        s = tl.load(s_ptr + rows[:, None] * N + cols[None, :], mask=mask, other=-1e30).to(tl.float32)
        s = s / temperature
        m_new = tl.maximum(m_i, tl.max(s, 1))
        alpha = tl.exp(m_i - m_new)
        p = tl.exp(s - m_new[:, None])
        l_i = l_i * alpha + tl.sum(p, 1)
        v = tl.load(v_ptr + cols[:, None] * D + ds[None, :], mask=(cols[:, None] < N) & (ds[None, :] < D), other=0.0)
        acc = acc * alpha[:, None] + tl.sum(p[:, :, None] * v[None, :, :].to(tl.float32), 1)
        m_i = m_new
    # the quotient comes last
    acc = acc / l_i[:, None]
    tl.store(lse_ptr + rows, m_i + tl.log(l_i), mask=rows < M)
    tl.store(o_ptr + rows[:, None] * D + ds[None, :], acc, mask=(rows[:, None] < M) & (ds[None, :] < D))


def attend(s, v):
    M, N = s.shape
    D = v.shape[1]
    o, lse = torch.empty((M, D)), torch.empty(M)
    attend_kernel[(triton.cdiv(M, 16),)](s, v, o, lse, M, N, D, 1.7, BM=16, BN=32, BD=triton.next_power_of_2(D))
    return torch.cat([o, lse[:, None]], 1)
'''

# A loop in a loop, a loop between constants, a loop that counts by hand, and a root in a quotient.
NESTED = HEAD + '''
@triton.jit
def nested_kernel(x_ptr, o_ptr, rows, n, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    pid = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in range(pid, rows, tl.num_programs(0)):
        for start in range(0, n, BLOCK):
            offs = start + lanes
            total += tl.load(x_ptr + row * n + offs, mask=offs < n, other=0.0)
    for part in range(PARTS):
        total += part * tl.load(x_ptr + part * n + lanes, mask=lanes < n, other=0.0)
    at = 0
    while at < n:
        cols = at + tl.arange(0, BLOCK)
        total = total / tl.sqrt(1.0 + tl.load(x_ptr + cols, mask=cols < n, other=0.0))
        at += BLOCK
    tl.store(o_ptr + pid * BLOCK + lanes, total)


def nested(x):
    o = torch.empty((2, 16))
    nested_kernel[(2,)](x, o, x.shape[0], x.shape[1], BLOCK=16, PARTS=3)
    return o
'''

# A running sum through memory: each round reads what the one before it wrote.
RUNNING = HEAD + '''
@triton.jit
def running_kernel(x_ptr, n):
    for i in range(1, n):
        before = tl.load(x_ptr + i - 1)
        tl.store(x_ptr + i, before + tl.load(x_ptr + i))


def running(x):
    x = x.clone()
    running_kernel[(1,)](x, x.numel())
    return x
'''

# A sum that a loop carries: what its type says about what goes into it.
CARRIED = HEAD + '''
@triton.jit
def carried_kernel(x_ptr, o_ptr, n, BLOCK: tl.constexpr, ADD: tl.constexpr):
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, n, BLOCK):
        x = tl.load(x_ptr + start + tl.arange(0, BLOCK))
        e = tl.exp(x)
        total += e
    tl.store(o_ptr + tl.arange(0, BLOCK), total)
'''

ALL: dict[str, tuple[str, list[str]]] = {
    **CASES,
    "attend": (ATTEND, [f"attend(torch.randn({m}, {n}), torch.randn({n}, {d}))"
                        for m, n, d in ((16, 32, 16), (1, 1, 1), (19, 71, 5))]),
    "nested": (NESTED, [f"nested(torch.rand({m}, {n}))" for m, n in ((3, 16), (5, 40), (3, 1))]),
    "running": (RUNNING, [f"running(torch.randn({n}))" for n in (1, 2, 9)]),
}  # fmt: skip


def children(rule: str, source: str) -> list[Child]:
    return RULES[rule].apply(Source(source))[0]


def words(rule: str, source: str) -> str:
    return "; ".join(RULES[rule].apply(Source(source))[1])


def added(parent: str, child: str) -> list[str]:
    """The lines of a child that its parent does not have."""
    return [line.strip() for line in child.splitlines() if line not in parent.splitlines()]


def change(rule: str, source: str, description: str) -> list[str]:
    """The new lines of the one child with this description."""
    (child,) = (text for said, text in children(rule, source) if said == description)
    return added(source, child)
