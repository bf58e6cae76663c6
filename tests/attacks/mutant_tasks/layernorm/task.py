"""Layer normalisation with weight and bias over the last axis."""

import torch

from kernelband.task import Case, Contract, Task


def reference(x, weight, bias):
    return torch.nn.functional.layer_norm(x, (x.shape[-1],), weight, bias, 1e-5)


def inputs(case, generator):
    rows, n = case.params["rows"], case.params["n"]
    dtype, device = getattr(torch, case.dtype), generator.device

    def draw(*shape):
        return torch.randn(shape, generator=generator, device=device)

    x = draw(rows, n) + case.params["level"]
    return {"x": x.to(dtype), "weight": (1 + 0.2 * draw(n)).to(dtype), "bias": draw(n).to(dtype)}


def _case(name, role, dtype, rows, n, level=0.25):
    return Case(name, role, dtype, {"rows": rows, "n": n, "level": level})


task = Task(
    name="layernorm",
    entry="layernorm",
    reference=reference,
    inputs=inputs,
    cases=(
        _case("two-columns", "check", "float32", 3, 2),
        _case("ragged", "check", "float16", 3, 77),
        _case("exact", "check", "float32", 2, 256),
        _case("tail-of-one", "check", "float32", 2, 385),
        _case("far-mean", "check", "float16", 2, 300, 40.0),
        _case("hidden-4096", "timed", "float16", 8192, 4096),
        _case("hidden-1023", "timed", "float32", 8192, 1023),
        _case("held-prime", "held_out", "float16", 3, 331),
    ),
    contract=Contract(dtypes=("float16", "float32"), shapes={"rows": (1, 1 << 20), "n": (2, 1 << 16)}),
)
