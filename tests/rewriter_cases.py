"""Kernels of the common shapes, as text, for the tests of the rewriter; calls of each on shapes at block edges; and sources
that somebody has mangled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[1]
SOFTMAX = (ROOT / "examples" / "softmax" / "kernel.py").read_text()
MATMUL = (ROOT / "examples" / "matmul_bias_gelu" / "kernel.py").read_text()
HEAD = "import torch\nimport triton\nimport triton.language as tl\n\n\n"

ADD = HEAD + '''
@triton.jit
def add_kernel(x_ptr, y_ptr, o_ptr, n, BLOCK: tl.constexpr):
    pid = tl.program_id(axis=0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    tl.store(o_ptr + offs, tl.load(x_ptr + offs, mask=mask) + tl.load(y_ptr + offs, mask=mask), mask=mask)


def add(x, y):
    o = torch.empty_like(x)
    n = x.numel()
    add_kernel[(triton.cdiv(n, 64),)](x, y, o, n, BLOCK=64)  # a comment that stays
    return o
'''

LAYER_NORM = HEAD + '''
@triton.jit
def norm_kernel(X, W, Y, stride, N, eps, BLOCK_SIZE: tl.constexpr):
    row = tl.program_id(0)
    X += row * stride
    Y += row * stride
    lanes = tl.arange(0, BLOCK_SIZE)
    _mean = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for off in range(0, N, BLOCK_SIZE):
        off = tl.multiple_of(off, BLOCK_SIZE)
        a = tl.load(X + off + lanes, off + lanes < N, 0.0)
        _mean += a
    mean = tl.sum(_mean, axis=0) / N
    _var = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for off in range(0, N, BLOCK_SIZE):
        cols = off + tl.arange(0, BLOCK_SIZE)
        x = tl.load(X + cols, mask=cols < N, other=0.0).to(tl.float32)
        x = 1.0 * tl.where(N > cols, x - mean, 0.0)
        _var += x * x
    rstd = 1 / tl.sqrt(tl.sum(_var, axis=0) / N + eps)
    for off in tl.range(0, N, BLOCK_SIZE):
        # the last pass writes
        cols = off + tl.arange(0, BLOCK_SIZE)
        mask = cols < N
        w = tl.load(W + cols, mask=mask)
        x = tl.load(X + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(
            Y + cols,
            (x - mean) * rstd * w,
            mask=mask,
        )


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, eps):
        y = torch.empty_like(x)
        rows, N = x.shape
        BLOCK_SIZE = 32
        norm_kernel[(rows,)](
            x, w, y,
            x.stride(0), N, eps,
            BLOCK_SIZE=BLOCK_SIZE,  # lanes
            num_warps=2,
        )
        return y


def norm(x, w, eps=1e-5):
    return Norm.apply(x, w, eps)
'''

GROUPED = HEAD + '''
@triton.jit
def grouped_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, sam, sak, sbk, sbn, scm, scn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_SIZE_M: "tl.constexpr",
):
    pid = tl.program_id(axis=0)
    num_pid_m = tl.cdiv(M, BLOCK_M)
    num_pid_n = tl.cdiv(N, BLOCK_N)
    in_group = GROUP_SIZE_M * num_pid_n
    first = (pid // in_group) * GROUP_SIZE_M
    size = min(num_pid_m - first, GROUP_SIZE_M)
    pid_m = first + ((pid % in_group) % size)
    pid_n = (pid % in_group) // size
    offs_am = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M)) % M
    offs_bn = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N)) % N
    offs_k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + offs_am[:, None] * sam + offs_k[None, :] * sak
    b_ptrs = b_ptr + offs_k[:, None] * sbk + offs_bn[None, :] * sbn
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BLOCK_K)):
        a = tl.load(a_ptrs, mask=offs_k[None, :] < K - k * BLOCK_K, other=0.0)
        b = tl.load(b_ptrs, mask=offs_k[:, None] < K - k * BLOCK_K, other=0.0)
        acc += tl.dot(a, b, input_precision="ieee")
        a_ptrs += BLOCK_K * sak
        b_ptrs += BLOCK_K * sbk
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    c_mask = (rows[:, None] < M) & (cols[None, :] < N)
    tl.store(c_ptr + rows[:, None] * scm + cols[None, :] * scn, acc, mask=c_mask)


def matmul(a, b):
    M, K = a.shape
    N = b.shape[1]
    c = torch.empty((M, N), dtype=a.dtype)
    grid = lambda META: (triton.cdiv(M, META["BLOCK_M"]) * triton.cdiv(N, META["BLOCK_N"]),)
    grouped_kernel[grid](
        a, b, c, M, N, K, a.stride(0), a.stride(1), b.stride(0), b.stride(1), c.stride(0), c.stride(1),
        BLOCK_M=16, BLOCK_N=16, BLOCK_K=16, GROUP_SIZE_M=2,
    )
    return c
'''

PLAIN_1D = (
    GROUPED.replace(', GROUP_SIZE_M: "tl.constexpr"', "")
    .replace(", GROUP_SIZE_M=2", "")
    .replace("    in_group = GROUP_SIZE_M * num_pid_n\n    first = (pid // in_group) * GROUP_SIZE_M\n", "")
    .replace("    size = min(num_pid_m - first, GROUP_SIZE_M)\n", "")
    .replace("first + ((pid % in_group) % size)", "pid // num_pid_n")
    .replace("(pid % in_group) // size", "pid % num_pid_n")
)

TILED_2D = MATMUL.replace("64, 64, 32", "16, 16, 16")

OFFSET_LOOP = HEAD + '''
@triton.jit
def tail_sum_kernel(x_ptr, o_ptr, lo, hi, w, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(lo, hi, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < hi
        mask = inside[None, :] & (rows[:, None] < w)
        total += tl.load(x_ptr + rows[:, None] * hi + cols[None, :], mask=mask, other=0.0)
    tl.store(o_ptr + rows, tl.sum(total, axis=1), mask=rows < w)


def tail_sum(x, lo, ROWS_DEFAULT=4):
    o = torch.empty(x.shape[0])
    BLOCK, ROWS = 16, 8
    grid = (triton.cdiv(x.shape[0], ROWS),)
    tail_sum_kernel[grid](x, o, lo, x.shape[1], x.shape[0], BLOCK, ROWS)
    return o
'''

HELPER = HEAD + '''
BLOCK = 32


@triton.jit
def load_block(ptr, pid, n, SIZE: tl.constexpr):
    offs = pid * SIZE + tl.arange(0, SIZE)
    return tl.load(ptr + offs, mask=offs < n, other=0.0)


@triton.jit
def double_kernel(x_ptr, o_ptr, n, SIZE: tl.constexpr = 32):
    pid = tl.program_id(0)
    x = load_block(x_ptr, pid, n, SIZE)
    offs = pid * SIZE + tl.arange(0, SIZE)
    tl.store(o_ptr + offs, 2 * x, mask=offs < n)


def double(x):
    o = torch.empty_like(x)
    double_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, o, x.numel(), BLOCK)
    return o
'''

AUTOTUNED = ADD.replace(
    "@triton.jit",
    '@triton.autotune(configs=[triton.Config({"BLOCK": 64}, num_warps=4)], key=["n"])\n@triton.jit',
).replace("BLOCK=64)", ")")

# source -> calls on edge shapes: no whole block, a whole number of blocks, and a part left over
CASES: dict[str, tuple[str, list[str]]] = {
    "softmax": (SOFTMAX, [f"softmax(torch.randn(2, {n}))" for n in (5, 256, 700)]),
    "matmul_bias_gelu": (
        TILED_2D,
        [f"matmul_bias_gelu(torch.randn({m}, {k}), torch.randn({k}, {n}), torch.randn({n}))"
         for m, n, k in ((5, 7, 3), (80, 48, 32), (83, 35, 41))],
    ),
    "add": (ADD, [f"add(torch.randn({n}), torch.randn({n}))" for n in (1, 64, 200)]),
    "layer_norm": (LAYER_NORM, [f"norm(torch.randn(3, {n}), torch.randn({n}))" for n in (5, 64, 75)]),
    "grouped": (GROUPED, [f"matmul(torch.randn({m}, {k}), torch.randn({k}, {n}))"
                          for m, n, k in ((5, 7, 3), (80, 48, 32), (83, 35, 41))]),
    "plain_1d": (PLAIN_1D, [f"matmul(torch.randn({m}, {k}), torch.randn({k}, {n}))"
                            for m, n, k in ((5, 7, 3), (160, 48, 16), (83, 35, 41))]),
    "offset_loop": (OFFSET_LOOP, [f"tail_sum(torch.randn(11, {n}), {lo})"
                                  for n, lo in ((5, 2), (36, 4), (50, 3), (9, 9))]),
    "helper": (HELPER, [f"double(torch.randn({n}))" for n in (1, 64, 100)]),
}  # fmt: skip

# Runs parents and children on the calls, in a process of its own with TRITON_INTERPRET=1, and prints what differs.
RUNNER = """
import importlib.util, json, sys, torch
jobs = json.load(open(sys.argv[1]))
def run(path, call):
    spec = importlib.util.spec_from_file_location("candidate", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    return eval(call, vars(module))
bad, wanted = [], {}
for job in jobs:
    for call in job["calls"]:
        key = (job["parent"], call)
        if key not in wanted:
            wanted[key] = run(job["parent"], call)
        try:
            got = run(job["child"], call)
            torch.testing.assert_close(got, wanted[key], rtol=1e-5, atol=1e-5, equal_nan=True)
            if job["exact"] and not torch.equal(got, wanted[key]):
                raise AssertionError("not bitwise equal")
        except Exception as error:
            bad.append([job["description"], call, repr(error)[:500]])
print("RESULT" + json.dumps({"bad": bad, "runs": len(jobs)}))
"""

# Before it: the interpreter of the evaluator, with a stand-in device of one SM so that programs have to stride, and the first
# configuration of an autotuned kernel.
PREPARE = f"""
import sys
sys.path.insert(0, {str(ROOT / "kernelband" / "evaluate" / "inside")!r})
import interpret
interpret.prepare({{'properties': {{'multi_processor_count': 1}}}}, [])
"""

SEEDS = [source for source, _ in CASES.values()] + [AUTOTUNED]
SCRAPS = [
    "",
    "    pass",
    "    x = 1",
    "        mask = None",
    "    return",
    "for i in range(0, N, BLOCK):",
    ")",
    "BLOCK = 16",
    "        n = n + 1",
    "    pid = tl.program_id(0)",
    "@triton.jit",
    "    y = 'text # not a comment'",
]


@st.composite
def mutated(draw) -> str:
    """An example source with a few lines deleted, doubled, swapped or replaced, or with two of its words exchanged."""
    lines = draw(st.sampled_from(SEEDS)).splitlines()
    for _ in range(draw(st.integers(1, 3))):
        at, to = draw(st.integers(0, len(lines) - 1)), draw(st.integers(0, len(lines) - 1))
        kind = draw(st.sampled_from(["delete", "double", "swap", "scrap", "word"]))
        if kind == "delete":
            lines[at] = ""
        elif kind == "double":
            lines.insert(at, lines[at])
        elif kind == "swap":
            lines[at], lines[to] = lines[to], lines[at]
        elif kind == "scrap":
            lines.insert(at, draw(st.sampled_from(SCRAPS)))
        else:
            words = ["BLOCK", "tl.load", "mask", "range", "64", "0", "pid", "tl.arange", "BLOCK_M", "N", "K", "cols"]
            old = draw(st.sampled_from(words))
            new = draw(st.sampled_from([*words, "-1", "(a, *b)", "lambda q: q", "x[0]"]))
            lines[at] = lines[at].replace(old, new)
    return "\n".join(lines) + "\n"


def compared(folder: Path, jobs: list[dict]) -> dict:
    """Run parents and children in one process with Triton's interpreter: {"bad": what differed, "runs": how many ran}."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    (folder / "runner.py").write_text(RUNNER)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(folder / "runner.py"), str(folder / "jobs.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert "RESULT" in done.stdout, done.stderr[-3000:]
    told: dict = json.loads(done.stdout.split("RESULT")[1])
    return told
