"""The interpreting child's operations: check a candidate's results on small cases, trace its work on big ones.

Owns: ops "prepare" (before "load": stand-ins for CUDA in place when the candidate is imported), "check" and "trace";
the tensors that the entry point is called with, and those of them that are kept and filled again in place; launches that do
nothing; the interpreter's repairs (bfloat16, several autotune configurations).
Never: decides a verdict. The trusted side compares the bytes in the output memory; everything in a reply is evidence,
because candidate code runs in the same process. TRITON_INTERPRET=1 was set before Triton was imported.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import bfloat
import bounds
import repairs
import serve
import shims
import standin
import torch
import torchops
import tracing
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, interpreter

DTYPES = {
    name: getattr(torch, name)
    for name in (
        "float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32",
        "uint64", "bool", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    )
    if hasattr(torch, name)
}
GUARD = torchops.GUARD
_PLAIN, _detach = (torch.Tensor, torch.nn.Parameter), torch.Tensor.detach
KEPT_BYTES = 256 << 20  # of inputs that are kept; beyond it the oldest go
MAX_PROGRAMS, TRACE_SECONDS = 8, 20.0
_prepared = False


def prepare(request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
    """Make wrappers that ask for CUDA run on CPU tensors, and repair the interpreter. Call before "load".

    ``request["properties"]`` (optional): fields of ``torch.cuda.get_device_properties`` of the device stood in for.
    ``request["idle"]`` (optional): true makes every launch in this process do nothing, from before the candidate is imported.
    """
    global _prepared
    if not _prepared or "properties" in request:
        shims.install(request.get("properties"))
    if not _prepared:
        _prepared = True
        bfloat.install()
        repairs.install()
        bounds.install()
        # Wrappers ask the driver which target they run on; without a device Triton's own would look for libcuda.
        known = shims.PROPERTIES
        if known["gcnArchName"]:
            target = GPUTarget("hip", str(known["gcnArchName"]), int(known["warp_size"]))
            driver.set_active(standin.StandInDriver(target, int(known["shared_memory_per_block_optin"])))
        else:
            standin.describe(int(known["major"]) * 10 + int(known["minor"]), int(known["warp_size"]))
    if request.get("idle"):
        interpreter.GridExecutor.__call__ = _idle
    return {"prepared": True}


def _idle(executor: Any, *args: Any, **kwargs: Any) -> None:
    """A launch of which only the host's part happens: hooks, and a grid that is a function. Their work is no kernel's."""
    known = inspect.getfullargspec(executor.fn).args
    kwargs = {name: value for name, value in kwargs.items() if name in known}
    for hook in executor.pre_run_hooks:
        hook(*args, **kwargs)
    if callable(executor.grid):
        executor.grid(inspect.getcallargs(executor.fn, *args, **kwargs))


def _properties(request: dict[str, Any]) -> dict[str, Any]:
    return {"properties": request["properties"]} if "properties" in request else {}


class _Input:
    """One tensor argument in private memory between two guards. It can be filled again, which its tensor does not tell."""

    def __init__(self, spec: dict[str, Any], fd: int) -> None:
        self.name = spec["name"]
        dtype, shape = DTYPES[spec["dtype"]], [int(n) for n in spec["shape"]]
        stride = [int(s) for s in spec.get("stride") or _contiguous(shape)]
        extent = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        size = extent * torch.empty((), dtype=dtype).element_size()
        self.memory = torch.full((size + 2 * GUARD,), 0xFF, dtype=torch.uint8)
        self.body = self.memory[GUARD : GUARD + size]
        # Its own storage of exactly its size would lose the guards, so the tensor is a view into the middle.
        self.tensor = self.body.view(dtype).as_strided(shape, stride) if extent else torch.empty(shape, dtype=dtype)
        self.fill(spec, fd)

    def fill(self, spec: dict[str, Any], fd: int) -> None:
        """Contents from the arena, written past torch: its count of a tensor's versions stays as it is."""
        self.memory.numpy()[:] = 0xFF
        _read(fd, self.body.numpy().data, int(spec["offset"]))
        self.digest = self._digest(self.body)

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


_kept: dict[str, tuple[Any, dict[str, _Input]]] = {}


def _inputs(request: dict[str, Any], arena: int) -> dict[str, _Input]:
    """The tensor arguments by name. Those of a slot are kept: the same tensors come back with the contents of the arena."""
    specs = [spec for spec in request["args"] if spec["kind"] == "tensor"]
    slot = request.get("slot")
    form = [(s["name"], s["shape"], s["dtype"], s.get("stride")) for s in specs]
    if slot in _kept and _kept[slot][0] == form:
        inputs = _kept[slot][1]
        for spec in specs:
            inputs[spec["name"]].fill(spec, arena)
        return inputs
    inputs = {spec["name"]: _Input(spec, arena) for spec in specs}
    if slot is not None:
        _kept[slot] = (form, inputs)
        while len(_kept) > 1 and sum(i.memory.numel() for _, kept in _kept.values() for i in kept.values()) > KEPT_BYTES:
            del _kept[next(iter(_kept))]
    return inputs


def check(request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
    """Run the entry point on the arena's inputs (fds[0]) and write its outputs into fds[1].

    Payload: args, outputs (see the evaluator's contract), poison ("nan" or a number, default "nan"), slot (optional: the name
    under which the tensors are kept; a later call of that name gets the very same ones, filled again). Reply: outputs
    [{shape, dtype, stride, written} or {missing}], inputs_changed and out_of_bounds [argument names, "" for what the candidate
    allocated], lifted (bfloat16 was computed in float32 and rounded after each operation).
    """
    prepare(_properties(request), [])
    arena, results = fds[0], fds[1]
    with shims.plain():
        inputs = _inputs(request, arena)
        bounds.begin()
        for name, item in inputs.items():
            bounds.guard(item.memory, GUARD, name)
        arguments = [
            inputs[spec["name"]].tensor if spec["kind"] == "tensor" else spec["value"] for spec in request["args"]
        ]
    os.close(arena)  # what is left of the trusted side's memory here is the memory for results
    fds[0] = -1
    poison = request.get("poison", "nan")
    fresh = torchops.Poison(math.nan if poison in ("nan", None) else float(poison))
    stack = ExitStack()
    stack.enter_context(fresh)
    returned = _call(stack, arguments)
    with shims.plain(), torch.no_grad():
        flat = list(_flatten(returned))
        outputs = [_deliver(spec, flat, inputs, results) for spec in request["outputs"]]
        dtypes = {spec.get("dtype") for spec in (*request["args"], *request["outputs"])}
        return {
            "outputs": outputs,
            "inputs_changed": [name for name, item in inputs.items() if item.changed()],
            "out_of_bounds": [name for name, item in inputs.items() if item.overrun() or name in bounds.touched]
            + [""] * (fresh.overrun() or "" in bounds.touched),
            "lifted": "bfloat16" in dtypes,
        }


def _deliver(spec: dict[str, Any], flat: list[Any], inputs: dict[str, _Input], fd: int) -> dict[str, Any]:
    if spec["from"] == "arg":
        value = inputs[spec["name"]].tensor if spec["name"] in inputs else None
    else:
        index = int(spec.get("index", 0))
        value = flat[index] if index < len(flat) else None
    if value is None or type(value) not in _PLAIN:  # a subclass could put off its work until it is looked at
        return {"missing": True, "type": type(value).__name__, "written": False}
    value = _detach(value)  # an attribute of the tensor's own could do so too
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
    _kept.clear()
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
