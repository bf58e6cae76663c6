"""Row softmax, as an operator to attack: three passes over a row in the baseline."""

import torch

from kernelband.task import Case, Contract, Task


def reference(x):
    return torch.softmax(x, dim=-1)


def inputs(case, generator):
    shape = (case.params["rows"], case.params["cols"])
    x = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)
    return {"x": x.to(getattr(torch, case.dtype))}


def work(case):
    elements = case.params["rows"] * case.params["cols"]
    return 2 * elements * {"float16": 2, "float32": 4}[case.dtype], 5 * elements


task = Task(
    name="attacked-softmax", entry="softmax", reference=reference, inputs=inputs, work=work,
    cases=(
        Case("short-row", "check", "float16", {"rows": 2, "cols": 77}),
        Case("two-blocks", "check", "float32", {"rows": 3, "cols": 1024}),
        Case("tail-of-one", "check", "float32", {"rows": 2, "cols": 1025}),
        Case("wide-fp16", "timed", "float16", {"rows": 32768, "cols": 4096}),
        Case("tall-fp32", "timed", "float32", {"rows": 16384, "cols": 2048}),
        Case("held-prime", "held_out", "float32", {"rows": 3, "cols": 809}),
    ),
    contract=Contract(dtypes=("float16", "float32"), shapes={"rows": (1, 1 << 20), "cols": (1, 1 << 16)}),
)
