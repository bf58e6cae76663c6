"""Argument specifications: how inputs are described to a child (plain JSON, see the wire contract in ARCHITECTURE.md).

Owns the mapping from tensors to specs and arenas. Candidate code never runs here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernelband.errors import UserError
from kernelband.evaluate.layouts import arranged_inputs
from kernelband.evaluate.verify import draw
from kernelband.task import Case, Task

ALIGN = 256


@dataclass(frozen=True)
class CaseSpec:
    """A case as the compile and trace stages need it: its name and argument specs without contents."""

    name: str
    args: list[dict[str, Any]]


def extent(value: torch.Tensor) -> int:
    """Bytes from a tensor's first to its last element, inclusive."""
    if value.numel() == 0:
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))) * value.element_size()


def describe(inputs: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """(argument specs, arena bytes): every tensor gets an aligned offset of its own."""
    specs: list[dict[str, Any]] = []
    offset = 0
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            specs.append({"name": name, "kind": "tensor", "shape": list(value.shape), "stride": list(value.stride()),
                          "dtype": str(value.dtype).removeprefix("torch."), "offset": offset})
            offset += -(-extent(value) // ALIGN) * ALIGN
        elif value is None or isinstance(value, (bool, int, float, str)):
            specs.append({"name": name, "kind": "scalar", "value": value})
        else:
            raise UserError(f"argument {name!r} is a {type(value).__name__}; inputs() may return tensors, numbers, "
                            f"strings and None.")
    return specs, offset


def in_other_layouts(task: Task, case: Case) -> list[CaseSpec]:
    """The specs of a case in each memory layout but the contiguous one that the contract asks for, named `case/layout`."""
    others = [layout for layout in task.contract.layouts if layout != "contiguous"]
    return [CaseSpec(f"{case.name}/{layout}", describe(arranged_inputs(draw(task, case, 0, "drawn", "cpu"), layout))[0])
            for layout in others]


def shapes_only(task: Task, case: Case) -> CaseSpec:
    """The specs of a case without drawing its data (fake tensors); draws it when the generator looks at values."""
    try:
        with FakeTensorMode():
            made = task.inputs(case, torch.Generator())
            return CaseSpec(case.name, describe(made)[0])
    except UserError:
        raise
    except Exception:  # a generator that reads values (lengths, tables) cannot run on fakes
        return CaseSpec(case.name, describe(draw(task, case, 0, "drawn", "cpu"))[0])
