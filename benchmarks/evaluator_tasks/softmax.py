"""Row softmax on five timed shapes: attention scores, rows of one block, and language-model logits. The kernel is that of the
example of the same name, put beside a copy of this file when the benchmark runs."""

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
    itemsize = {"float16": 2, "float32": 4}[case.dtype]
    return 2 * elements * itemsize, 5 * elements


def _case(name, role, dtype, rows, cols):
    return Case(name, role, dtype, {"rows": rows, "cols": cols})


task = Task(
    name="softmax-five",
    entry="softmax",
    reference=reference,
    inputs=inputs,
    cases=(
        _case("one-column", "check", "float32", 3, 1),
        _case("short-row", "check", "float16", 2, 77),
        _case("exact-blocks", "check", "float32", 2, 512),
        _case("tail-of-one", "check", "float16", 2, 1025),
        _case("odd-long", "check", "float32", 2, 2999),
        _case("attention-1k", "timed", "float16", 32768, 1024),
        _case("attention-2k", "timed", "float16", 16384, 2048),
        _case("attention-4k-fp32", "timed", "float32", 8192, 4096),
        _case("attention-odd", "timed", "float16", 8192, 3000),
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
