"""Running sums along rows, scaled by the range of the row, in float32."""

import torch

from kernelband.task import Case, Contract, Task


def reference(x):
    wide = x if x.dtype == torch.float64 else x.float()
    running = wide.cumsum(dim=-1)
    low, high = running.amin(dim=-1, keepdim=True), running.amax(dim=-1, keepdim=True)
    return running / (high - low + 1.0)


def inputs(case, generator):
    x = torch.randn((case.params["rows"], case.params["n"]), generator=generator, device=generator.device)
    return {"x": (x + case.params["level"]).to(getattr(torch, case.dtype))}


def _case(name, role, dtype, rows, n, level=0.0):
    return Case(name, role, dtype, {"rows": rows, "n": n, "level": level})


task = Task(
    name="row_scan",
    entry="row_scan",
    reference=reference,
    inputs=inputs,
    cases=(
        _case("one-column", "check", "float32", 3, 1),
        _case("ragged", "check", "float16", 3, 77, 1.0),
        _case("exact", "check", "float32", 2, 256, -1.0),
        _case("tail-of-one", "check", "float32", 2, 385),
        _case("long", "timed", "float16", 8192, 4096),
        _case("odd", "timed", "float32", 8192, 4095),
        _case("held-prime", "held_out", "float32", 3, 331),
    ),
    contract=Contract(dtypes=("float16", "float32"), shapes={"rows": (1, 1 << 20), "n": (1, 1 << 16)}),
)
