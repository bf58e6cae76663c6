"""Matrix product, bias and exact GELU on five timed shapes of feed-forward layers. The kernel is that of the example, put
beside a copy of this file when the benchmark runs."""

import torch

from kernelband.task import Case, Contract, Task


def reference(a, b, bias):
    return torch.nn.functional.gelu(a @ b + bias)


def inputs(case, generator):
    m, n, k = (case.params[d] for d in ("m", "n", "k"))
    dtype, device = getattr(torch, case.dtype), generator.device

    def draw(*shape):
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32)

    return {"a": draw(m, k).to(dtype), "b": (draw(k, n) / k**0.5).to(dtype), "bias": draw(n).to(dtype)}


def work(case):
    m, n, k = (case.params[d] for d in ("m", "n", "k"))
    itemsize = {"float16": 2, "float32": 4}[case.dtype]
    return (m * k + k * n + n + m * n) * itemsize, 2 * m * n * k


def _case(name, role, dtype, m, n, k):
    return Case(name, role, dtype, {"m": m, "n": n, "k": k})


task = Task(
    name="matmul-five",
    entry="matmul_bias_gelu",
    reference=reference,
    inputs=inputs,
    cases=(
        _case("single-row", "check", "float16", 1, 33, 16),
        _case("ragged", "check", "float32", 65, 70, 75),
        _case("exact-tiles", "check", "float16", 64, 64, 64),
        _case("k-tail-of-one", "check", "float16", 16, 64, 129),
        _case("square-fp32", "check", "float32", 80, 48, 96),
        _case("ffn-1k", "timed", "float16", 1024, 4096, 1024),
        _case("ffn-2k", "timed", "float16", 2048, 2048, 2048),
        _case("ffn-4k", "timed", "float16", 4096, 4096, 4096),
        _case("ffn-few-rows", "timed", "float16", 512, 11008, 4096),
        _case("ffn-small-fp32", "timed", "float32", 2048, 3072, 768),
        _case("held-primes", "held_out", "float16", 67, 61, 131),
        _case("held-wide-fp32", "held_out", "float32", 17, 150, 40),
    ),
    contract=Contract(
        dtypes=("float16", "float32"),
        shapes={"m": (1, 1 << 16), "n": (1, 1 << 17), "k": (1, 1 << 16)},
    ),
    work=work,
)
