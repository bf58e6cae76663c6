"""Residual add and RMSNorm, both results returned: what stands before every block of Llama-like models."""

import torch

from kernelband.task import Case, Contract, Output, Task


def reference(x, residual, weight, eps):
    h = x + residual
    return torch.nn.functional.rms_norm(h, (h.shape[-1],), weight, eps), h


def inputs(case, generator):
    rows, cols = case.params["rows"], case.params["cols"]
    dtype, device = getattr(torch, case.dtype), generator.device

    def draw(*shape):
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32)

    return {"x": draw(rows, cols).to(dtype), "residual": draw(rows, cols).to(dtype),
            "weight": (1 + 0.2 * draw(cols)).to(dtype), "eps": case.params["eps"]}


def work(case):
    rows, cols = case.params["rows"], case.params["cols"]
    itemsize = {"bfloat16": 2, "float32": 4}[case.dtype]
    return (4 * rows * cols + cols) * itemsize, 5 * rows * cols


def _case(name, role, dtype, rows, cols, eps=1e-5):
    return Case(name, role, dtype, {"rows": rows, "cols": cols, "eps": eps})


task = Task(
    name="rmsnorm_residual",
    entry="rmsnorm_residual",
    reference=reference,
    inputs=inputs,
    cases=(
        _case("one-column", "check", "float32", 5, 1),
        _case("block-less-one", "check", "bfloat16", 2, 511),
        _case("block-and-one", "check", "float32", 3, 513),
        _case("exact-blocks", "check", "bfloat16", 2, 1024, eps=1e-6),
        _case("prime", "check", "float32", 3, 1531, eps=1e-6),
        _case("short-row", "check", "bfloat16", 7, 77),
        _case("llama-8b", "timed", "bfloat16", 8192, 4096),
        _case("llama-70b", "timed", "bfloat16", 4096, 8192),
        _case("qwen-0.5b-fp32", "timed", "float32", 16384, 896, eps=1e-6),
        _case("held-prime", "held_out", "bfloat16", 3, 1021),
        _case("held-two-blocks-and-one", "held_out", "float32", 2, 1025),
    ),
    contract=Contract(
        outputs=(Output("return", 0), Output("return", 1)),
        dtypes=("bfloat16", "float32"),
        shapes={"rows": (1, 1 << 17), "cols": (1, 1 << 14)},
    ),
    work=work,
)
