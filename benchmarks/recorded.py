"""Recorded calls of other people's kernels (TritonBench-G): which can be made again, as source text, specs and drawn tensors.

Owns the form of the data (see benchmarks/rewriter.py) and the entry that is appended to a kernel's source so that the evaluator's
stages can make its calls. Never imports, compiles or runs a kernel.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from kernelband.evaluate.specs import CaseSpec

ENTRY = "recorded_call"
DTYPES = tuple(getattr(torch, n) for n in ("float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64",
                                           "uint8", "bool", "complex64"))
MOST_LEAVES, MOST_AXES = 12, 6
LITERAL = 64
"""Integers of a tensor up to which its values are written into the call: a wrapper that computes a grid from them must see
them."""


def source_of(record: dict[str, Any]) -> str | None:
    """The kernel's text: the mended one where the data say that the shipped one is broken; None where there is no copy."""
    mended = record.get("source_fixed")
    return mended if mended and (record.get("flags") or {}).get("use") == "fixed" else record.get("source")


def tensors_of(recorded: dict[str, Any]) -> list[dict[str, Any]]:
    """The tensors of a call in the order in which its entry takes them."""
    return list(_tensors([*recorded["args"], *recorded["kwargs"].values()]))


def _tensors(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, list):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict) and "shape" in value and not _literal(value):
        yield value


def size_of(recorded: dict[str, Any]) -> int:
    return sum(math.prod(t["shape"]) for t in tensors_of(recorded))


def usable(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Calls of a public function (or of an autograd function's `apply`) that can be made again: the smallest of each function
    first."""
    found = [c for c in record.get("test_calls") or []
             if re.fullmatch(r"\w+(\.apply)?", c["fn"]) and not any(map(_opaque, (*c["args"], *c["kwargs"].values())))]
    different = {json.dumps(c, sort_keys=True): c for c in sorted(found, key=size_of)}
    seen: Counter[str] = Counter()
    ranked = []
    for at, recorded in enumerate(different.values()):
        ranked.append((seen[recorded["fn"]], at))
        seen[recorded["fn"]] += 1
    whole = list(different.values())
    return [whole[at] for _, at in sorted(ranked)]


def _opaque(value: Any) -> bool:
    """Whether a value was recorded without what it takes to make it again."""
    if isinstance(value, list):
        return any(map(_opaque, value))
    if not isinstance(value, dict):
        return False
    return "shape" not in value or not hasattr(torch, value["dtype"]) or getattr(torch, value["dtype"]) not in DTYPES


def _literal(tensor: dict[str, Any]) -> bool:
    return tensor.get("values") is not None and math.prod(tensor["shape"]) <= LITERAL and "int" in tensor["dtype"]


def entry_text(calls: Sequence[dict[str, Any]]) -> str:
    """Text to append to a source: a function that makes the call of a number on tensors, or says what that call returned.

    With describe=True it returns, for each returned value, (a tensor or not, number of its dtype, axes, sizes).
    """
    lines = ["", "", "import torch as recorded_torch", "", "", f"def {ENTRY}(call, describe, *tensors):", "    made = None"]
    for i, recorded in enumerate(calls):
        place = iter(range(len(tensors_of(recorded))))
        given = [_expression(v, place) for v in recorded["args"]]
        given += [f"{name}={_expression(v, place)}" for name, v in recorded["kwargs"].items()]
        lines += [f"    if call == {i}:", f"        made = {recorded['fn']}({', '.join(given)})"]
    lines += [
        "    if not describe:", "        return made",
        f"    dtypes = ({', '.join(f'recorded_torch.{str(d)[6:]}' for d in DTYPES)},)",
        f"    told = recorded_torch.zeros({MOST_LEAVES}, {MOST_AXES + 3}, dtype=recorded_torch.int64)",
        "    todo, leaves = [made], []",
        "    while todo:",
        "        one = todo.pop(0)",
        "        one = list(one.values()) if isinstance(one, dict) else one",
        "        if isinstance(one, (tuple, list)):",
        "            todo = [*one, *todo]",
        "        else:",
        "            leaves.append(one)",
        f"    for i, one in enumerate(leaves[:{MOST_LEAVES}]):",
        f"        if isinstance(one, recorded_torch.Tensor) and one.ndim <= {MOST_AXES} and one.dtype in dtypes:",
        "            for j, number in enumerate((1, dtypes.index(one.dtype), one.ndim, *one.shape)):",
        "                told[i, j] = number",
        "    return told", ""]
    return "\n".join(lines)


def _expression(value: Any, place: Iterator[int]) -> str:
    if isinstance(value, dict) and _literal(value):
        return f"recorded_torch.tensor({value['values']!r}, dtype=recorded_torch.{value['dtype']}, device='cuda')"
    if isinstance(value, dict):
        return f"tensors[{next(place)}]"
    if isinstance(value, list):
        return f"[{', '.join(_expression(v, place) for v in value)}]"
    if isinstance(value, str) and re.fullmatch(r"torch\.\w+", value):  # how a dtype was recorded
        return f"recorded_{value}"
    return f"float({str(value)!r})" if isinstance(value, float) and not math.isfinite(value) else repr(value)


def case_of(calls: Sequence[dict[str, Any]], i: int) -> CaseSpec:
    """A call as the compiler takes it: nothing is drawn."""
    args: list[dict[str, Any]] = [{"name": "call", "kind": "scalar", "value": i},
                                  {"name": "describe", "kind": "scalar", "value": False}]
    for j, tensor in enumerate(tensors_of(calls[i])):
        stride = tensor.get("stride") or list(torch.empty(tensor["shape"], device="meta").stride())
        args.append({"name": f"t{j}", "kind": "tensor", "shape": tensor["shape"], "dtype": tensor["dtype"], "stride": stride,
                     "offset": 0})
    return CaseSpec(f"call-{i}", args)


def inputs_of(calls: Sequence[dict[str, Any]], i: int, seed: str) -> dict[str, Any]:
    """Arguments of a call, drawn as its test drew them as far as that was recorded."""
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(f"{seed}:{i}".encode()).digest()[:6], "big"))
    made = {f"t{j}": _draw(tensor, generator) for j, tensor in enumerate(tensors_of(calls[i]))}
    return {"call": i, "describe": False, **made}


def _draw(tensor: dict[str, Any], generator: torch.Generator) -> torch.Tensor:
    shape, dtype = tensor["shape"], getattr(torch, tensor["dtype"])
    origin = str(tensor.get("src", ""))
    if dtype.is_floating_point or dtype.is_complex:
        if origin.startswith(("zeros", "ones")):
            value = torch.full(shape, float(origin.startswith("ones")))
        elif re.match(r"rand(\.|$)", origin) or "log" in origin:
            value = torch.rand(shape, generator=generator)
            value = -value if "log" in origin else value
        else:
            value = torch.randn(shape, generator=generator)
    elif tensor.get("values") is not None:
        value = torch.tensor(tensor["values"])
    elif dtype == torch.bool:
        value = torch.randint(2, shape, generator=generator)
    elif origin.startswith("arange"):
        value = torch.arange(math.prod(shape)).reshape(shape)
    else:
        low, high = int(tensor.get("min") or 0), int(tensor.get("max") or 0)
        value = torch.randint(low, max(low, high) + 1, shape, generator=generator)
    value = value.reshape(shape).to(dtype)
    if tensor.get("stride") is None:
        return value
    laid = torch.empty_strided(shape, tensor["stride"], dtype=dtype)
    if 0 in tensor["stride"]:  # expanded: all of an axis is one element
        one = tuple(slice(0, 1) if s == 0 else slice(None) for s in tensor["stride"])
        laid[one].copy_(value[one])
        return laid
    return laid.copy_(value)


def chosen(path: Path, seed: int) -> list[dict[str, Any]]:
    """Records with a source, in an order that the seed fixes. Raises SystemExit for a file of another form."""
    try:
        records = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        found = [r for r in records if source_of(r)]
        random.Random(seed).shuffle(found)
        return found
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise SystemExit(f"{path} is not a file of kernels with recorded calls ({type(error).__name__}: {error}); see the head "
                         f"of benchmarks/rewriter.py for what it must hold") from None
