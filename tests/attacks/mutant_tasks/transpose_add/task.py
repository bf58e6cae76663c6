"""alpha * a.T + b for matrices."""

import torch

from kernelband.task import Case, Contract, Task


def reference(a, b, alpha):
    return alpha * a.t() + b


def inputs(case, generator):
    m, n = case.params["m"], case.params["n"]
    dtype = getattr(torch, case.dtype)
    a = torch.randn((m, n), generator=generator, device=generator.device).to(dtype)
    return {"a": a, "b": torch.randn((n, m), generator=generator, device=generator.device).to(dtype), "alpha": 1.7}


def _case(name, role, dtype, m, n):
    return Case(name, role, dtype, {"m": m, "n": n})


task = Task(
    name="transpose_add",
    entry="transpose_add",
    reference=reference,
    inputs=inputs,
    cases=(
        _case("single-row", "check", "float32", 1, 40),
        _case("ragged", "check", "float32", 33, 70),
        _case("exact", "check", "float16", 64, 32),
        _case("tall", "check", "float16", 95, 31),
        _case("square", "timed", "float16", 8192, 8192),
        _case("odd", "timed", "float32", 4099, 8197),
        _case("held-primes", "held_out", "float32", 61, 37),
    ),
    contract=Contract(dtypes=("float16", "float32"), shapes={"m": (1, 1 << 16), "n": (1, 1 << 16)}),
)
