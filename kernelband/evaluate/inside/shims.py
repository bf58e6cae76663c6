"""Makes CPU tensors pass for CUDA tensors, so that a candidate's public wrapper runs where there is no GPU.

Owns: a torch-function mode (``x.is_cuda``, ``x.device``, ``.cuda()``, ``device="cuda"`` in factories) and stand-ins for
the functions of ``torch.cuda`` that wrappers call. Used by the interpreter and by the compiler's child.
Never: launches, compiles, times or checks anything; never touches a real CUDA driver, even where there is one.

The mode belongs to the thread that called ``install``; a thread that the candidate starts sees plain CPU tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

DEVICE = torch.device("cuda", 0)
CPU = torch.device("cpu")

# What torch.cuda.get_device_properties() answers unless the caller of install() says otherwise (an H100-like device).
DEFAULTS: dict[str, Any] = {
    "name": "stand-in CUDA device", "major": 9, "minor": 0, "multi_processor_count": 132,
    "total_memory": 80 << 30, "L2_cache_size": 50 << 20, "warp_size": 32,
    "max_threads_per_block": 1024, "max_threads_per_multi_processor": 2048,
    "regs_per_multiprocessor": 65536, "shared_memory_per_block": 49152,
    "shared_memory_per_block_optin": 232448, "shared_memory_per_multiprocessor": 233472,
    "gcnArchName": "", "is_integrated": 0, "is_multi_gpu_board": 0, "uuid": "0",
}
PROPERTIES: dict[str, Any] = dict(DEFAULTS)

_active: list[TorchFunctionMode] = []


def install(properties: dict[str, Any] | None = None) -> None:
    """Turn the stand-ins on for this process, for good. A second call only replaces the properties.

    ``properties``: fields of ``torch.cuda.get_device_properties`` (names as in torch; bytes, counts) that override
    ``DEFAULTS``; unknown names are kept, so a caller may add what a newer torch has.
    """
    PROPERTIES.clear()
    PROPERTIES.update(DEFAULTS)
    PROPERTIES.update(properties or {})
    if _active:
        return
    _patch_cuda_module()
    mode = _CpuActsAsCuda()
    mode.__enter__()
    _active.append(mode)


def plain() -> contextlib.AbstractContextManager[Any]:
    """Within this context torch is as it always was: a CPU tensor says that it is one."""
    return torch._C.DisableTorchFunction()


def _is_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))


def _itself(tensor: Any, *_: Any, **__: Any) -> Any:
    return tensor


def _getter(name: str) -> Any:
    """What a mode is given for ``tensor.name``: the bound ``__get__``, which compares by what it is bound to."""
    return getattr(torch.Tensor, name).__get__


_ANSWERS: dict[Any, Any] = {
    _getter("is_cuda"): lambda *_, **__: True,
    _getter("is_cpu"): lambda *_, **__: False,
    _getter("device"): lambda *_, **__: DEVICE,
    torch.Tensor.get_device: lambda *_, **__: 0,
    torch.Tensor.cuda: _itself,
    torch.Tensor.pin_memory: _itself,
    torch.Tensor.is_pinned: lambda *_, **__: False,
    torch.Tensor.record_stream: lambda *_, **__: None,
}


class _CpuActsAsCuda(TorchFunctionMode):
    """Answers questions about the device as a CUDA tensor would and sends every CUDA allocation to the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = _ANSWERS.get(func)
        if answer is not None:
            return answer(*args, **(kwargs or {}))
        kwargs = dict(kwargs) if kwargs else {}
        if func is torch.device:  # a description, not an allocation
            return func(*args, **kwargs)
        if any(_is_cuda(arg) for arg in args):
            args = tuple(CPU if _is_cuda(arg) else arg for arg in args)
        if "device" in kwargs and (_is_cuda(kwargs["device"]) or isinstance(kwargs["device"], int)):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


class _Stream:
    """One stream on which everything has already happened."""

    cuda_stream = 0
    stream_id = 0
    device_index = 0
    device = DEVICE
    priority = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True


class _Event:
    """An event without time: any two are one millisecond apart, so that loops which divide by it still end."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 1.0


class _Device(contextlib.ContextDecorator):
    """Stands for ``torch.cuda.device(...)``, ``device_of`` and ``stream(...)``: a context that changes nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.idx = 0
        self.prev_idx = 0

    def __enter__(self) -> _Device:
        return self

    def __exit__(self, *_: Any) -> None: ...


def _properties(*_: Any, **__: Any) -> SimpleNamespace:
    return SimpleNamespace(**PROPERTIES)


_RealGenerator = torch.Generator


class _GeneratorType(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, _RealGenerator)

    def __call__(cls, *_: Any, **__: Any) -> torch.Generator:
        return _RealGenerator(device="cpu")


class _Generator(metaclass=_GeneratorType):
    """``torch.Generator``, always on the CPU: a generator "on CUDA" must be one that CPU factories accept."""


class _DefaultGenerator:
    """``torch.cuda.default_generators[0]``: its state is a seed and an offset, as on CUDA."""

    device = DEVICE

    def get_state(self) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def set_state(self, _: Any) -> None: ...

    def manual_seed(self, _: int) -> _DefaultGenerator:
        return self

    def initial_seed(self) -> int:
        return 0


def _answering(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _patch_cuda_module() -> None:
    """Every name gets an object of its own: torch._dynamo refuses to import when two names share one function."""
    cuda: Any = torch.cuda
    nothing = (
        "init", "_lazy_init", "synchronize", "set_device", "empty_cache", "ipc_collect", "manual_seed",
        "manual_seed_all", "seed", "seed_all", "reset_peak_memory_stats", "reset_max_memory_allocated",
        "set_stream", "set_per_process_memory_fraction", "_set_device",
    )
    zero = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "current_device",
            "utilization", "initial_seed")
    true = ("is_available", "is_initialized", "is_bf16_supported", "is_tf32_supported")
    contexts = ("device", "device_of", "_DeviceGuard", "stream", "StreamContext")
    for names, value in ((nothing, None), (zero, 0), (true, True)):
        for name in names:
            setattr(cuda, name, _answering(value))
    for name in contexts:
        setattr(cuda, name, type(name, (_Device,), {}))
    cuda.device_count = _answering(1)
    cuda.mem_get_info = lambda *_, **__: (PROPERTIES["total_memory"], PROPERTIES["total_memory"])
    cuda.get_device_properties = _properties
    cuda.get_device_name = lambda *_, **__: PROPERTIES["name"]
    cuda.get_device_capability = lambda *_, **__: (PROPERTIES["major"], PROPERTIES["minor"])
    cuda.Stream, cuda.ExternalStream, cuda.Event = _Stream, type("ExternalStream", (_Stream,), {}), _Event
    cuda.current_stream, cuda.default_stream = _answering(_Stream()), _answering(_Stream())
    cuda.default_generators = (_DefaultGenerator(),)
    torch._C._cuda_getCurrentRawStream = _answering(0)  # type: ignore[attr-defined]  # wrappers import it by name
    guards: Any = torch._C._dynamo.guards  # code written by inductor allocates through this
    guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)
    if torch.version.cuda is None and not PROPERTIES.get("gcnArchName"):
        torch.version.cuda = "13.0"  # the CPU build has none, and wrappers compare it
    torch.Generator = _Generator  # type: ignore[misc,assignment]
