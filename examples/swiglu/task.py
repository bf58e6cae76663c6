"""SwiGLU: the gated activation between the projections of Llama-like feed-forward layers."""

import torch

from kernelband.task import Case, Contract, Task


def reference(gate, up):
    return torch.nn.functional.silu(gate) * up


def inputs(case, generator):
    shape = (case.params["tokens"], case.params["width"])

    def draw():
        made = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)
        if case.params.get("loud"):  # beyond the range of float16, which bfloat16 is there for
            made *= 1e6
        return made.to(getattr(torch, case.dtype))

    return {"gate": draw(), "up": draw()}


def work(case):
    elements = case.params["tokens"] * case.params["width"]
    itemsize = {"bfloat16": 2, "float16": 2}[case.dtype]
    return 3 * elements * itemsize, 5 * elements


def _case(name, role, dtype, tokens, width, **more):
    return Case(name, role, dtype, {"tokens": tokens, "width": width, **more})


task = Task(
    name="swiglu",
    entry="swiglu",
    reference=reference,
    inputs=inputs,
    cases=(
        _case("one-column", "check", "bfloat16", 3, 1),
        _case("block-less-one", "check", "float16", 3, 85),
        _case("block-and-one", "check", "bfloat16", 1, 257),
        _case("exact-blocks", "check", "float16", 4, 192),
        _case("primes", "check", "bfloat16", 7, 211),
        _case("odd-long", "check", "float16", 5, 1023),
        _case("loud", "check", "bfloat16", 3, 101, loud=1),
        _case("llama3-8b", "timed", "bfloat16", 4096, 14336),
        _case("llama2-7b", "timed", "float16", 4096, 11008),
        _case("qwen2.5-7b", "timed", "bfloat16", 2048, 18944),
        _case("held-prime", "held_out", "float16", 3, 509),
        _case("held-two-blocks-and-one", "held_out", "bfloat16", 27, 19),
    ),
    contract=Contract(
        dtypes=("bfloat16", "float16"),
        shapes={"tokens": (1, 1 << 16), "width": (1, 1 << 15)},
    ),
    work=work,
)
