"""RMS normalisation of rows with a weight, as an operator to attack: on normal data it is close to x * w."""

import torch

from kernelband.task import Case, Contract, Task

EPS = 1e-6


def reference(x, w):
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + EPS) * w


def inputs(case, generator):
    rows, cols = case.params["rows"], case.params["cols"]
    x, w = (torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)
            for shape in ((rows, cols), (cols,)))
    return {"x": x.to(getattr(torch, case.dtype)), "w": (1 + w / 10).to(getattr(torch, case.dtype))}


def work(case):
    elements = case.params["rows"] * case.params["cols"]
    return (2 * elements + case.params["cols"]) * {"float16": 2, "float32": 4}[case.dtype], 4 * elements


task = Task(
    name="attacked-rmsnorm", entry="rmsnorm", reference=reference, inputs=inputs, work=work,
    cases=(
        Case("short", "check", "float32", {"rows": 3, "cols": 97}),
        Case("exact", "check", "float32", {"rows": 2, "cols": 1024}),
        Case("tail", "check", "float32", {"rows": 2, "cols": 1025}),
        Case("wide-fp32", "timed", "float32", {"rows": 16384, "cols": 4096}),
        Case("tall-fp32", "timed", "float32", {"rows": 32768, "cols": 2048}),
        Case("held-prime", "held_out", "float32", {"rows": 3, "cols": 601}),
    ),
    contract=Contract(dtypes=("float32",), shapes={"rows": (1, 1 << 20), "cols": (1, 1 << 16)}),
)
