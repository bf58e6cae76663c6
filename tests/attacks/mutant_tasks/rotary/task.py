"""Rotary position embedding in place."""

import torch

from kernelband.task import Case, Contract, Output, Task


def reference(x, cos, sin):
    half = x.shape[-1] // 2
    wide = x if x.dtype == torch.float64 else x.float()
    low, high = wide[..., :half], wide[..., half:]
    c, s = cos[:, None, :], sin[:, None, :]
    x.copy_(torch.cat([low * c - high * s, high * c + low * s], dim=-1))


def inputs(case, generator):
    positions, heads, half = (case.params[p] for p in ("positions", "heads", "half"))
    x = torch.randn((positions, heads, 2 * half), generator=generator, device=generator.device)
    angles = 6.28 * torch.rand((positions, half), generator=generator, device=generator.device)
    return {"x": x.to(getattr(torch, case.dtype)), "cos": angles.cos(), "sin": angles.sin()}


def _case(name, role, dtype, positions, heads, half):
    return Case(name, role, dtype, {"positions": positions, "heads": heads, "half": half})


task = Task(
    name="rotary",
    entry="rotary",
    reference=reference,
    inputs=inputs,
    cases=(
        _case("single", "check", "float32", 1, 1, 8),
        _case("ragged", "check", "float16", 3, 2, 20),
        _case("exact", "check", "float32", 2, 3, 32),
        _case("odd", "check", "float32", 5, 3, 33),
        _case("llama", "timed", "float16", 8192, 32, 64),
        _case("wide", "timed", "float32", 8192, 16, 80),
        _case("held", "held_out", "float16", 4, 5, 24),
    ),
    contract=Contract(outputs=(Output("x"),), mutates=("x",), dtypes=("float16", "float32"),
                      shapes={"positions": (1, 1 << 20), "heads": (1, 128), "half": (1, 256)}),
)
