"""Matrix product, as an operator to attack. Neither side is constant."""

import torch

from kernelband.task import Case, Contract, Task


def reference(a, b):
    return a @ b


def inputs(case, generator):
    m, n, k = (case.params[d] for d in ("m", "n", "k"))
    a, b = (torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)
            for shape in ((m, k), (k, n)))
    return {"a": a.to(getattr(torch, case.dtype)), "b": (b / k**0.5).to(getattr(torch, case.dtype))}


def work(case):
    m, n, k = (case.params[d] for d in ("m", "n", "k"))
    return (m * k + k * n + m * n) * {"float16": 2, "float32": 4}[case.dtype], 2 * m * n * k


task = Task(
    name="attacked-matmul", entry="matmul", reference=reference, inputs=inputs, work=work,
    cases=(
        Case("ragged-fp32", "check", "float32", {"m": 33, "n": 34, "k": 70}),
        Case("exact-tiles", "check", "float16", {"m": 32, "n": 32, "k": 64}),
        Case("k-tail-of-one", "check", "float16", {"m": 5, "n": 40, "k": 129}),
        Case("square-fp16", "timed", "float16", {"m": 2048, "n": 2048, "k": 2048}),
        Case("square-fp32", "timed", "float32", {"m": 1024, "n": 1024, "k": 1024}),
        Case("held-primes", "held_out", "float32", {"m": 31, "n": 37, "k": 67}),
    ),
    contract=Contract(dtypes=("float16", "float32"), shapes=dict.fromkeys(("m", "n", "k"), (1, 1 << 16))),
)
