"""Cross entropy with label smoothing, one loss a row, in float32."""

import torch

from kernelband.task import Case, Contract, Task


def reference(x, labels):
    wide = x if x.dtype == torch.float64 else x.float()
    return torch.nn.functional.cross_entropy(wide, labels, reduction="none", label_smoothing=0.1)


def inputs(case, generator):
    rows, n = case.params["rows"], case.params["n"]
    x = torch.randn((rows, n), generator=generator, device=generator.device) * 3
    if case.params["steep"]:  # rows at levels far apart, each with a peak at an end: any other maximum overflows
        x += torch.linspace(-1e5, 1e5, rows, device=generator.device)[:, None]
        x[::2, 0] += 300
        x[1::2, -1] += 300
    labels = torch.randint(0, n, (rows,), generator=generator, device=generator.device)
    return {"x": x.to(getattr(torch, case.dtype)), "labels": labels}


def _case(name, role, dtype, rows, n, steep=0):
    return Case(name, role, dtype, {"rows": rows, "n": n, "steep": steep})


task = Task(
    name="cross_entropy",
    entry="cross_entropy",
    reference=reference,
    inputs=inputs,
    cases=(
        _case("two-classes", "check", "float32", 5, 2),
        _case("ragged", "check", "float16", 7, 133),
        _case("exact", "check", "float32", 7, 256),
        _case("steep", "check", "float32", 7, 129, 1),
        _case("vocabulary", "timed", "float16", 4096, 32000),
        _case("vocabulary-odd", "timed", "float32", 4096, 50257),
        _case("held-prime", "held_out", "float32", 5, 211),
    ),
    contract=Contract(dtypes=("float16", "float32"), shapes={"rows": (1, 1 << 20), "n": (2, 1 << 18)}),
)
