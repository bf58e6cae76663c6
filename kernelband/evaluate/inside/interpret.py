"""The interpreting child's operations: check a candidate's results on small cases, trace its work on big ones.

Owns: ops "prepare" (before "load": stand-ins for CUDA in place when the candidate is imported), "check" and "trace";
the tensors that the entry point is called with; the interpreter's repairs (bfloat16, several autotune configurations).
Never: decides a verdict. The trusted side compares the bytes in the output memory; everything in a reply is evidence,
because candidate code runs in the same process. TRITON_INTERPRET=1 was set before Triton was imported.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import bfloat
import repairs
import serve
import shims
import standin
import torch
import torchops
import tracing

DTYPES = {
    name: getattr(torch, name)
    for name in (
        "float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32",
        "uint64", "bool", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    )
    if hasattr(torch, name)
}
# Bytes before and after each input, all ones (NaN as floats, -1 as integers): what lies there must not be written, and
# what is read there spoils the result. A multiple of every alignment that a kernel may be promised.
GUARD = 4096
MAX_PROGRAMS, TRACE_SECONDS = 8, 20.0
_prepared = False


def prepare(request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
    """Make wrappers that ask for CUDA run on CPU tensors, and repair the interpreter. Call before "load".

    ``request["properties"]`` (optional): fields of ``torch.cuda.get_device_properties`` of the device stood in for.
    """
    global _prepared
    if not _prepared or "properties" in request:
        shims.install(request.get("properties"))
    if not _prepared:
        _prepared = True
        bfloat.install()
        repairs.install()
        # Wrappers ask the driver which target they run on; without a device Triton's own would look for libcuda.
        known = shims.PROPERTIES
        standin.describe(int(known["major"]) * 10 + int(known["minor"]), int(known["warp_size"]))
    return {"prepared": True}


def _properties(request: dict[str, Any]) -> dict[str, Any]:
    return {"properties": request["properties"]} if "properties" in request else {}


class _Input:
    """One tensor argument in private memory between two guards."""

    def __init__(self, spec: dict[str, Any], fd: int) -> None:
        self.name = spec["name"]
        dtype, shape = DTYPES[spec["dtype"]], [int(n) for n in spec["shape"]]
        stride = [int(s) for s in spec.get("stride") or _contiguous(shape)]
        extent = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        size = extent * torch.empty((), dtype=dtype).element_size()
        self.memory = torch.full((size + 2 * GUARD,), 0xFF, dtype=torch.uint8)
        body = self.memory[GUARD : GUARD + size]
        _read(fd, body.numpy().data, int(spec["offset"]))
        self.digest = self._digest(body)
        self.body = body
        # Its own storage of exactly its size would lose the guards, so the tensor is a view into the middle.
        self.tensor = body.view(dtype).as_strided(shape, stride) if extent else torch.empty(shape, dtype=dtype)

    @staticmethod
    def _digest(body: torch.Tensor) -> bytes:
        return hashlib.blake2b(body.numpy().data).digest()

    def changed(self) -> bool:
        return self._digest(self.body) != self.digest

    def overrun(self) -> bool:
        return bool((self.memory[:GUARD] != 0xFF).any() or (self.memory[GUARD + self.body.numel() :] != 0xFF).any())


def _contiguous(shape: list[int]) -> list[int]:
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def _read(fd: int, into: memoryview, offset: int) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(fd, [into[done:]], offset + done)
        if count <= 0:
            raise ValueError(f"the input memory ends at byte {offset + done}")
        done += count


def _write(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def _flatten(value: Any) -> Iterator[Any]:
    """Returned values in order: containers are walked, dictionaries by insertion."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _flatten(item)
    else:
        yield value


def _call(stack: ExitStack, arguments: list[Any]) -> Any:
    """Call the entry point; an exception leaves with the stage "run" attached."""
    entry = serve.SESSION.entry
    if entry is None:
        raise RuntimeError("no entry point: send op load first")
    with stack:
        try:
            return entry(*arguments)
        except BaseException as error:
            error.stage = "run"  # type: ignore[attr-defined]
            raise


def check(request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
    """Run the entry point on the arena's inputs (fds[0]) and write its outputs into fds[1].

    Payload: args, outputs (see the evaluator's contract), poison ("nan" or a number, default "nan"). Reply: outputs
    [{shape, dtype, stride, written} or {missing}], inputs_changed and out_of_bounds [argument names], lifted (bfloat16
    was computed in float32 and rounded after each operation).
    """
    prepare(_properties(request), [])
    arena, results = fds[0], fds[1]
    with shims.plain():
        inputs = {spec["name"]: _Input(spec, arena) for spec in request["args"] if spec["kind"] == "tensor"}
        arguments = [
            inputs[spec["name"]].tensor if spec["kind"] == "tensor" else spec["value"] for spec in request["args"]
        ]
    os.close(arena)  # what is left of the trusted side's memory here is the memory for results
    fds[0] = -1
    poison = request.get("poison", "nan")
    stack = ExitStack()
    stack.enter_context(torchops.Poison(math.nan if poison in ("nan", None) else float(poison)))
    returned = _call(stack, arguments)
    with shims.plain(), torch.no_grad():
        flat = list(_flatten(returned))
        outputs = [_deliver(spec, flat, inputs, results) for spec in request["outputs"]]
        dtypes = {spec.get("dtype") for spec in (*request["args"], *request["outputs"])}
        return {
            "outputs": outputs,
            "inputs_changed": [name for name, item in inputs.items() if item.changed()],
            "out_of_bounds": [name for name, item in inputs.items() if item.overrun()],
            "lifted": "bfloat16" in dtypes,
        }


def _deliver(spec: dict[str, Any], flat: list[Any], inputs: dict[str, _Input], fd: int) -> dict[str, Any]:
    if spec["from"] == "arg":
        value = inputs[spec["name"]].tensor if spec["name"] in inputs else None
    else:
        index = int(spec.get("index", 0))
        value = flat[index] if index < len(flat) else None
    if not isinstance(value, torch.Tensor):
        return {"missing": True, "type": type(value).__name__, "written": False}
    value = value.detach()
    dtype = str(value.dtype).removeprefix("torch.")
    found: dict[str, Any] = {"shape": list(value.shape), "dtype": dtype, "written": False}
    if value.layout != torch.strided or value.device.type != "cpu":
        return found
    found["stride"] = list(value.stride())
    if found["shape"] == list(spec["shape"]) and dtype == spec["dtype"]:
        data = value.resolve_conj().resolve_neg().contiguous().reshape(-1)
        if data.numel():
            _write(fd, data.view(torch.uint8).numpy().data, int(spec["offset"]))
        found["written"] = True
    return found


def trace(request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
    """Run a few programs of each launch at the timed shapes and count what they move and compute.

    Payload: args; max_programs (a launch, default 8); seconds (default 20; sampling stops early to keep to it). Tensors
    are zeros in lazily mapped memory. If an arena comes as fds[0], integer and boolean tensors whose spec has an
    "offset" are read from it: lengths and indices decide how much work there is. Reply: launches (kernels and torch
    operations in order), dropped (launches beyond the first 400).
    """
    prepare(_properties(request), [])
    tracer = tracing.Tracer(int(request.get("max_programs", MAX_PROGRAMS)), float(request.get("seconds", TRACE_SECONDS)))
    arguments: list[Any] = []
    with shims.plain():
        for spec in request["args"]:
            if spec["kind"] != "tensor":
                arguments.append(spec["value"])
                continue
            dtype = DTYPES[spec["dtype"]]
            if fds and spec.get("offset") is not None and not (dtype.is_floating_point or dtype.is_complex):
                arguments.append(_Input(spec, fds[0]).tensor)
                continue
            shape = [int(n) for n in spec["shape"]]
            arguments.append(torchops.lazy_zeros(shape, spec.get("stride") or _contiguous(shape), dtype))
    stack = ExitStack()
    stack.enter_context(tracer.active())
    stack.enter_context(torchops.Recorder(tracer))
    stack.enter_context(torch.no_grad())
    _call(stack, arguments)
    return {"launches": tracer.launches, "dropped": tracer.dropped}


OPS = {"prepare": prepare, "check": check, "trace": trace}
