"""Cross entropy of each token over a large vocabulary: the last step of a language model's training, without reduction."""

import torch

from kernelband.task import Case, Contract, Task


def reference(logits, targets):
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none")


def inputs(case, generator):
    tokens, vocab = case.params["tokens"], case.params["vocab"]
    logits = 2 * torch.randn((tokens, vocab), generator=generator, device=generator.device, dtype=torch.float32)
    targets = torch.randint(vocab, (tokens,), generator=generator, device=generator.device)
    targets[0] = vocab - 1  # the last column lies in the last block's tail
    return {"logits": logits.to(getattr(torch, case.dtype)), "targets": targets}


def work(case):
    tokens, vocab = case.params["tokens"], case.params["vocab"]
    itemsize = {"bfloat16": 2, "float32": 4}[case.dtype]
    return tokens * ((vocab + 1) * itemsize + 8), 3 * tokens * vocab


def _case(name, role, dtype, tokens, vocab):
    return Case(name, role, dtype, {"tokens": tokens, "vocab": vocab})


task = Task(
    name="cross_entropy",
    entry="cross_entropy",
    reference=reference,
    inputs=inputs,
    cases=(
        _case("one-column", "check", "float32", 3, 1),
        _case("short-row", "check", "bfloat16", 5, 77),
        _case("block-less-one", "check", "float32", 4, 1023),
        _case("block-and-one", "check", "bfloat16", 4, 1025),
        _case("exact-blocks", "check", "float32", 4, 2048),
        _case("prime", "check", "float32", 5, 2999),
        _case("llama2-32k", "timed", "bfloat16", 8192, 32000),
        _case("llama3-128k", "timed", "bfloat16", 2048, 128256),
        _case("llama2-32k-fp32", "timed", "float32", 4096, 32000),
        _case("held-prime", "held_out", "bfloat16", 3, 3001),
        _case("held-two-blocks-and-one", "held_out", "float32", 5, 2049),
    ),
    contract=Contract(
        dtypes=("bfloat16", "float32"),
        shapes={"tokens": (1, 8192), "vocab": (1, 1 << 17)},  # an offset fits in 32 bits
    ),
    work=work,
)
