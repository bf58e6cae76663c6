"""Sums of rows, as an operator to attack: a small output from a large input."""

import torch

from kernelband.task import Case, Contract, Task


def reference(x):
    return x.sum(dim=-1)


def inputs(case, generator):
    shape = (case.params["rows"], case.params["cols"])
    x = torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float32)
    return {"x": x.to(getattr(torch, case.dtype))}


def work(case):
    rows, cols = case.params["rows"], case.params["cols"]
    return (rows * cols + rows) * {"float16": 2, "float32": 4}[case.dtype], rows * cols


task = Task(
    name="attacked-rowsum", entry="rowsum", reference=reference, inputs=inputs, work=work,
    cases=(
        Case("short", "check", "float32", {"rows": 5, "cols": 77}),
        Case("exact", "check", "float16", {"rows": 4, "cols": 1024}),
        Case("tail", "check", "float32", {"rows": 3, "cols": 2049}),
        Case("wide-fp32", "timed", "float32", {"rows": 8192, "cols": 8192}),
        Case("tall-fp16", "timed", "float16", {"rows": 65536, "cols": 2048}),
        Case("held-prime", "held_out", "float32", {"rows": 3, "cols": 1213}),
    ),
    contract=Contract(dtypes=("float16", "float32"), shapes={"rows": (1, 1 << 20), "cols": (1, 1 << 16)}),
)
