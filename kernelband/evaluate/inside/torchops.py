"""What a wrapper does in torch itself, beside its kernels: counted for a trace, poisoned for a check.

Owns: two dispatch modes. `Recorder` turns every torch operation of a traced call into a launch of its own (bytes, flops),
so that work moved from a kernel into torch is not free, and skips the arithmetic of large ones: their results are lazily
mapped zeros. `Poison` fills what torch.empty and its kin return, so that an output that no kernel writes is seen, and puts it
and what torch.zeros returns between guards, so that a store beside it is.
Never: changes what small operations or integer operations compute.
"""

from __future__ import annotations

import mmap
from typing import Any

import bounds
import shims
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry
from tracing import Tracer

HEAVY_BYTES = 1 << 20  # operations that touch more are not carried out in a trace
POISON_BYTES = 64 << 20  # allocations beyond this are left as they are
# Bytes before and after a tensor, all ones (NaN as floats, -1 as integers): what lies there must not be written, and what is
# read there spoils the result. A multiple of every alignment that a kernel may be promised.
GUARD = 4096
_EMPTY = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided",
          "aten::empty_permuted")
_ZEROS = ("aten::zeros", "aten::new_zeros", "aten::zeros_like")
_FREE = (*_EMPTY, "aten::_local_scalar_dense", "aten::lift_fresh", "aten::_unsafe_view", "aten::resize_",
         "aten::set_", "aten::_reshape_alias", "aten::is_pinned", "aten::item", "aten::record_stream")


def lazy_zeros(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor of zeros whose pages come into being when written (reads share one zero page)."""
    extent = 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if not extent:
        return torch.empty(tuple(size), dtype=dtype)
    length = extent * torch.empty((), dtype=dtype, device="meta").element_size()
    # A mapping starts on a page, as a GPU allocation starts on at least 512 bytes: sectors are counted as they lie there.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    pages = torch.frombuffer(mmap.mmap(-1, length, flags=flags), dtype=torch.uint8)
    return pages.view(dtype).as_strided(tuple(size), tuple(stride))


def _schema_is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes of the distinct elements: an expanded dimension costs nothing."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else min(size, 1)
    return count * tensor.element_size()


class _Mode(TorchDispatchMode):
    """A dispatch mode that does not bring in torch's compiler: importing it takes seconds and fails under stand-ins."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Recorder(_Mode):
    """Adds a launch to the tracer for each torch operation that moves data."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.tracer.depth:
            return func(*args, **(kwargs or {}))
        with shims.plain():  # else every tensor here would claim to be on a CUDA device
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name
        if name in _EMPTY:
            # The allocator may hand out what an earlier tensor left behind, which a kernel could take for an address.
            shape = self._meta(func, args, kwargs)
            if shape is None:
                return func(*args, **kwargs)
            return lazy_zeros(shape.shape, shape.stride(), shape.dtype)
        if name in _FREE or not name.startswith("aten::") or _schema_is_view(func):
            return func(*args, **kwargs)
        return self._count(func, args, kwargs)

    def _meta(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the operation would return, without data; None where torch cannot say."""
        def to_meta(t: torch.Tensor) -> torch.Tensor:
            return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="meta")

        try:
            with torch.no_grad():
                kwargs = {**tree_map_only(torch.Tensor, to_meta, kwargs)}
                if kwargs.get("device") is not None or not _tensors(args):
                    kwargs["device"] = torch.device("meta")
                kwargs.pop("pin_memory", None)
                return func(*tree_map_only(torch.Tensor, to_meta, args), **kwargs)
        except Exception:
            return None

    def _count(self, func: Any, args: Any, kwargs: Any) -> Any:
        schema = func._schema
        inputs: list[torch.Tensor] = []
        written: list[torch.Tensor] = []
        for position, parameter in enumerate(schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(parameter.name)
            writes = parameter.alias_info is not None and parameter.alias_info.is_write
            (written if writes else inputs).extend(_tensors(value))
        # add_(x) reads what it writes; fill_, copy_ and out= do not.
        if schema.is_mutable and not schema.name.endswith(("fill_", "copy_", "zero_")) and "out" not in kwargs:
            inputs.extend(written)
        touched = sum(_bytes(t) for t in inputs) + sum(_bytes(t) for t in written)
        out: Any = None
        if schema.is_mutable:
            # Large in-place operations on floats are not carried out: counts do not depend on their values.
            if touched > HEAVY_BYTES and all(t.is_floating_point() for t in written):
                out = kwargs.get("out", args[0])
            else:
                out = func(*args, **kwargs)
        else:
            shape = None
            if touched > HEAVY_BYTES or not inputs:
                shape = self._meta(func, args, kwargs)
                results = _tensors(shape)
                large = touched > HEAVY_BYTES or sum(map(_bytes, results)) > HEAVY_BYTES
                if not results or not large or any(not t.is_floating_point() for t in results):
                    shape = None
            if shape is None:
                out = func(*args, **kwargs)
            else:
                out = tree_map_only(torch.Tensor, lambda t: lazy_zeros(t.size(), t.stride(), t.dtype), shape)
            written = [t for t in _tensors(out) if all(t is not source for source in inputs)]
        self._add(func, args, kwargs, inputs, written, out)
        return out

    def _add(self, func: Any, args: Any, kwargs: Any, inputs: list[Any], written: list[Any], out: Any) -> None:
        count = flop_registry.get(func._overloadpacket)
        flops = 0.0
        if count is not None:
            try:
                flops = float(count(*args, **kwargs, out_val=out))
            except Exception:  # an unusual overload: its bytes still count
                flops = 0.0
        read, wrote = float(sum(map(_bytes, inputs))), float(sum(map(_bytes, written)))
        if not read and not wrote:
            return
        tensors: dict[int, dict[str, Any]] = {}
        for kind, group in (("read", inputs), ("written", written)):
            for tensor in group:
                storage = tensor.untyped_storage()
                start = storage.data_ptr()
                entry = tensors.setdefault(start, {
                    "arg": f"torch{len(tensors)}", "id": self.tracer.tensor_id(start, storage),
                    "bytes": storage.nbytes(), "read": 0.0, "written": 0.0,
                })
                entry[kind] += float(_bytes(tensor))
        lanes = float(sum(t.numel() for t in (*inputs, *written)))
        launch: dict[str, Any] = {
            "kernel": str(func), "torch": True, "grid": [1, 1, 1], "programs": 1, "sampled": 1,
            "per_program": {"load_bytes": read, "store_bytes": wrote, "dot_flops": flops, "lane_ops": lanes},
            "tensors": list(tensors.values()),
        }
        if flops:
            dtype = str(inputs[0].dtype).removeprefix("torch.") if inputs else "float32"
            launch["dot"] = {"dtype": dtype, "tile": [128, 128, 64]}
        self.tracer.add(launch)


class Poison(_Mode):
    """Fills fresh uninitialised memory with `value` (floats), a large odd number (integers) or a truth value (booleans), of which
    NaN and positive values choose others than negative ones. That memory, and fresh zeros, lie between guards."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value
        self.guarded: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in _EMPTY or name in _ZEROS:
            with shims.plain():
                if isinstance(out, torch.Tensor) and out.device.type == "cpu" and out.layout == torch.strided:
                    out = self._between_guards(out)
                    if name in _EMPTY:
                        self.fill(out)
                    else:
                        out.zero_()
        return out

    def _between_guards(self, tensor: torch.Tensor) -> torch.Tensor:
        """Other memory of the same form; a tensor of nothing, or of more than 64 MiB, as it is."""
        extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        size = extent * tensor.element_size()
        if not tensor.numel() or size > POISON_BYTES:
            return tensor
        memory = torch.full((size + 2 * GUARD,), 0xFF, dtype=torch.uint8)
        self.guarded.append(memory)
        bounds.guard(memory, GUARD, "")
        # A storage that begins at the tensor: code that reads a storage, or asks for its offset, finds what it expects.
        body = torch.frombuffer(memory.numpy().data, dtype=torch.uint8, count=size, offset=GUARD)
        return body.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def overrun(self) -> bool:
        """Whether something was written beside what was allocated under this mode."""
        return any(bool((m[:GUARD] != 0xFF).any() or (m[-GUARD:] != 0xFF).any()) for m in self.guarded)

    def fill(self, tensor: torch.Tensor) -> None:
        """Overwrite a tensor of at most 64 MiB with the poison of its dtype."""
        if not 0 < tensor.numel() * tensor.element_size() <= POISON_BYTES:
            return
        if tensor.is_floating_point():
            tensor.fill_(self.value)
        elif tensor.dtype == torch.bool:
            tensor.fill_(not self.value < 0)
        elif not tensor.is_complex():
            tensor.fill_(torch.iinfo(tensor.dtype).max // (5 if self.value < 0 else 3))
