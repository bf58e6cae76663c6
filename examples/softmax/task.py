"""Row softmax. Shapes: attention scores of a 32-head model, and language-model logits."""

import torch

from kernelband.task import Case, Contract, Task


def reference(x):
    return torch.softmax(x, dim=-1)


def inputs(case, generator):
    shape = (case.params["rows"], case.params["cols"])
    x = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)
    if case.params.get("steep"):  # rows at levels far apart, each with a peak at an end: any other maximum overflows
        x += torch.linspace(-1e5, 1e5, shape[0], device=generator.device)[:, None]
        x[::2, 0] += 300
        x[1::2, -1] += 300
    return {"x": x.to(getattr(torch, case.dtype))}


def work(case):
    elements = case.params["rows"] * case.params["cols"]
    itemsize = {"float16": 2, "float32": 4}[case.dtype]
    return 2 * elements * itemsize, 5 * elements


def _case(name, role, dtype, rows, cols, **more):
    return Case(name, role, dtype, {"rows": rows, "cols": cols, **more})


task = Task(
    name="softmax",
    entry="softmax",
    reference=reference,
    inputs=inputs,
    cases=(
        _case("one-column", "check", "float32", 3, 1),
        _case("short-row", "check", "float16", 2, 77),
        _case("exact-blocks", "check", "float32", 2, 512),
        _case("tail-of-one", "check", "float16", 2, 1025),
        _case("odd-long", "check", "float32", 2, 2999),
        _case("steep", "check", "float32", 4, 257, steep=1),
        _case("attention-2k", "timed", "float16", 16384, 2048),
        _case("attention-4k-fp32", "timed", "float32", 8192, 4096),
        _case("logits-32k", "timed", "float16", 2048, 32000),
        _case("held-prime", "held_out", "float16", 3, 1531),
        _case("held-block-less-one", "held_out", "float32", 2, 1023),
    ),
    contract=Contract(
        dtypes=("float16", "float32"),
        shapes={"rows": (1, 1 << 20), "cols": (1, 1 << 17)},
    ),
    work=work,
)
