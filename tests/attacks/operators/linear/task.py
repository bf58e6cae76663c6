"""Linear layer x @ w.T with a constant weight, as an operator to attack: w may be prepacked once."""

import torch

from kernelband.task import Case, Contract, Task


def reference(x, w):
    return x @ w.t()


def inputs(case, generator):
    m, n, k = (case.params[d] for d in ("m", "n", "k"))
    x, w = (torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)
            for shape in ((m, k), (n, k)))
    return {"x": x.to(getattr(torch, case.dtype)), "w": (w / k**0.5).to(getattr(torch, case.dtype))}


def work(case):
    m, n, k = (case.params[d] for d in ("m", "n", "k"))
    return (m * k + k * n + m * n) * {"float16": 2, "float32": 4}[case.dtype], 2 * m * n * k


task = Task(
    name="attacked-linear", entry="linear", reference=reference, inputs=inputs, work=work,
    cases=(
        Case("ragged", "check", "float32", {"m": 17, "n": 33, "k": 40}),
        Case("exact-tiles", "check", "float16", {"m": 32, "n": 32, "k": 64}),
        Case("k-tail-of-one", "check", "float16", {"m": 40, "n": 33, "k": 129}),
        Case("one-row", "check", "float16", {"m": 1, "n": 35, "k": 97}),
        Case("square-fp16", "timed", "float16", {"m": 2048, "n": 2048, "k": 1024}),
        Case("small-fp32", "timed", "float32", {"m": 1024, "n": 1024, "k": 1024}),
        Case("held-primes", "held_out", "float32", {"m": 13, "n": 37, "k": 41}),
    ),
    contract=Contract(dtypes=("float16", "float32"), constant=("w",), shapes=dict.fromkeys(("m", "n", "k"), (1, 1 << 16))),
)
