"""x += y / 2 in place, as an operator to attack: the one output is an argument that the call changes."""

import torch

from kernelband.task import Case, Contract, Output, Task


def reference(x, y):
    x.add_(y, alpha=0.5)


def inputs(case, generator):
    shape = (case.params["rows"], case.params["cols"])
    x, y = (torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32) for _ in range(2))
    return {"x": x.to(getattr(torch, case.dtype)), "y": y.to(getattr(torch, case.dtype))}


def work(case):
    elements = case.params["rows"] * case.params["cols"]
    return 3 * elements * {"float16": 2, "float32": 4}[case.dtype], 2 * elements


task = Task(
    name="attacked-accumulate", entry="accumulate", reference=reference, inputs=inputs, work=work,
    cases=(
        Case("short", "check", "float32", {"rows": 3, "cols": 77}),
        Case("exact", "check", "float16", {"rows": 4, "cols": 512}),
        Case("tail", "check", "float32", {"rows": 3, "cols": 1025}),
        Case("wide-fp32", "timed", "float32", {"rows": 4096, "cols": 4096}),
        Case("wide-fp16", "timed", "float16", {"rows": 8192, "cols": 4096}),
        Case("held-prime", "held_out", "float32", {"rows": 3, "cols": 701}),
    ),
    contract=Contract(outputs=(Output("x"),), mutates=("x",), dtypes=("float16", "float32"),
                      shapes={"rows": (1, 1 << 20), "cols": (1, 1 << 16)}),
)
