"""Half the sum of squares of each column, in float32."""

import torch

from kernelband.task import Case, Contract, Task


def reference(x):
    wide = x if x.dtype == torch.float64 else x.float()
    return 0.5 * (wide * wide).sum(dim=0)


def inputs(case, generator):
    x = torch.randn((case.params["m"], case.params["n"]), generator=generator, device=generator.device)
    return {"x": x.to(getattr(torch, case.dtype))}


def _case(name, role, dtype, m, n):
    return Case(name, role, dtype, {"m": m, "n": n})


task = Task(
    name="column_sum",
    entry="column_sum",
    reference=reference,
    inputs=inputs,
    cases=(
        _case("one-row", "check", "float32", 1, 40),
        _case("ragged", "check", "float16", 33, 45),
        _case("exact", "check", "float32", 48, 64),
        _case("tails-of-one", "check", "float32", 17, 65),
        _case("tall", "timed", "float32", 65536, 1024),
        _case("ragged-tall", "timed", "float16", 65531, 1027),
        _case("held-primes", "held_out", "float32", 61, 37),
    ),
    contract=Contract(dtypes=("float16", "float32"), shapes={"m": (1, 1 << 20), "n": (1, 1 << 16)}),
)
