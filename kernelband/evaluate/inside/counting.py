"""Counting hooks for Triton's interpreter: what one program moves and computes.

Owns: the counting of loads, stores, dots and lane operations while hooks are in place, and the attribution of memory
traffic to allocations by address. Which programs run is the business of `tracing.py`.
Never: decides anything about a candidate, reads or writes floating-point data (see below), knows of requests.

Why float data is not touched: counts do not depend on it, big timed shapes need not exist in memory, and a candidate
that reads out of bounds is counted instead of crashing. Loads of floats give zeros (or the mask's `other`), stores of
floats are dropped, dots give their accumulator. Integers are really loaded and stored: they may be addresses or bounds.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

SECTOR_SHIFT = 5  # 32-byte sectors: the unit in which L2 and DRAM move data
SECTOR = 1 << SECTOR_SHIFT
MAX_SECTORS = 4_000_000  # of one program and tensor, before they are collapsed to the unique ones

# Instructions a lane: (lane instructions, special-function instructions). Everything of INTEGER and FLOAT costs one.
# Divisions, roots and exponentials become a few FMAs around one special-function instruction; erf is a polynomial
# around one exponential; an integer division by a run-time value is some twenty instructions.
_SPECIAL = {
    "exp": (1, 1), "exp2": (0, 1), "log": (1, 1), "log2": (0, 1), "sin": (2, 1), "cos": (2, 1), "rsqrt": (0, 1),
    "sqrt": (2, 1), "precise_sqrt": (8, 1), "fdiv": (3, 1), "precise_divf": (8, 1), "frem": (20, 1), "erf": (20, 1),
}
_SLOW_INTEGER = ("sdiv", "udiv", "srem", "urem")
_INTEGER = (
    "add", "sub", "mul", "and", "or", "xor", "shl", "lshr", "ashr", "minsi", "minui", "maxsi", "maxui", "int_cast",
    "addptr", "umulhi", "iabs", "icmpEQ", "icmpNE",
    *(f"icmp{sign}{kind}" for sign in "SU" for kind in ("LE", "LT", "GE", "GT")),
)
_FLOAT = (
    "fadd", "fsub", "fmul", "fneg", "fma", "minimumf", "minnumf", "maximumf", "maxnumf", "clampf", "fabs", "floor",
    "ceil", "select", "si_to_fp", "ui_to_fp", "fp_to_si", "fp_to_ui", "fp_ext", "fp_trunc", "fp_to_fp",
    *(f"fcmp{order}{kind}" for order in "OU" for kind in ["LT", "GT", "LE", "GE", "EQ", "NE"]),
)
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}


@dataclass
class Counts:
    """What one program did. Bytes are those of active lanes; sector bytes are distinct 32-byte sectors an operation."""

    totals: dict[str, float] = field(default_factory=dict)
    tensors: dict[int, dict[str, float]] = field(default_factory=dict)

    def add(self, name: str, amount: float) -> None:
        self.totals[name] = self.totals.get(name, 0) + amount

    def add_tensor(self, index: int, name: str, amount: float) -> None:
        tensor = self.tensors.setdefault(index, {})
        tensor[name] = tensor.get(name, 0) + amount


@dataclass(frozen=True)
class Span:
    """One allocation: half-open address range, the name of the first argument that lies in it, its storage."""

    start: int
    end: int
    name: str
    owner: Any


def spans_of(names: list[str], values: list[Any]) -> list[Span]:
    """The distinct allocations behind tensor arguments (tensors, descriptors, tuples of them), by address."""
    found: dict[int, Span] = {}

    def visit(name: str, value: Any) -> None:
        if isinstance(value, (tuple, list)):
            for item in value:
                visit(name, item)
        elif isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            start = storage.data_ptr()
            if start and start not in found:
                found[start] = Span(start, start + storage.nbytes(), name, storage)
        elif hasattr(value, "base") and value.base is not value:
            visit(name, value.base)

    for name, value in zip(names, values, strict=True):
        visit(name, value)
    return sorted(found.values(), key=lambda span: span.start)


class Counter:
    """Counts what the running program does; `begin` and `end` bracket one program."""

    def __init__(self, spans: list[Span]) -> None:
        self.spans = spans
        self._starts = [span.start for span in spans]
        self.dot_result: Any = None
        self.dots: dict[tuple[str, tuple[int, ...]], float] = {}
        self.begin()

    def begin(self) -> None:
        self.counts = Counts()
        self._touched: dict[int, list[tuple[int, np.ndarray]]] = {}
        self._stored = 0
        self._batch = 0
        self._open = False  # may the next load join the current batch?

    def end(self) -> Counts:
        cold: set[int] = set()
        for index in self._touched:
            batches, sectors = self._collapse(index)
            self.counts.add_tensor(index, "read_once", len(sectors) * SECTOR)
            cold.update(np.unique(batches).tolist())
        self.counts.add("batches", self._batch)
        self.counts.add("cold_batches", len(cold))
        return self.counts

    def _collapse(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(batch of the first touch, sector) of each distinct sector of one tensor."""
        parts = self._touched[index]
        sectors, first = np.unique(np.concatenate([part for _, part in parts]), return_index=True)
        ends = np.cumsum([len(part) for _, part in parts])
        order = np.searchsorted(ends, first, side="right")
        return np.array([batch for batch, _ in parts])[order], sectors

    def consumed(self) -> None:
        """Something waited for the loads so far: the next load starts a new batch."""
        self._open = False

    def _active(self, ptrs: Any, mask: Any) -> np.ndarray:
        if mask is None or mask.data.all():
            return ptrs.data.ravel()
        return ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)]

    def memory(self, kind: str, ptrs: Any, mask: Any) -> None:
        """Count one load ("load"), store ("store") or atomic ("atomic": read and written)."""
        addresses = self._active(ptrs, mask)
        size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        loading = kind != "store"
        if loading and not self._open:
            self._batch += 1
            self._open = True
        if not loading:
            self.consumed()
        self.counts.add("atomics" if kind == "atomic" else kind + "s", len(addresses) if kind == "atomic" else 1)
        if kind == "load":
            self.counts.add("load_lanes", len(addresses))
        if not len(addresses):
            return
        for index, part in self._by_tensor(addresses):
            sectors = np.unique(part >> np.uint64(SECTOR_SHIFT))
            useful, moved = len(part) * size, len(sectors) * SECTOR
            if loading:
                self._count(index, "read", "load", useful, moved)
                parts = self._touched.setdefault(index, [])
                parts.append((self._batch, sectors))
                self._stored += len(sectors)
                if self._stored > MAX_SECTORS:
                    self._shrink()
            if kind != "load":
                self._count(index, "written", "store", useful, moved)
        if loading and not ptrs.get_element_ty().is_floating():
            self.consumed()  # an integer that was loaded may be the address of what is loaded next

    def _count(self, index: int, tensor_name: str, name: str, useful: int, moved: int) -> None:
        self.counts.add(f"{name}_bytes", useful)
        self.counts.add(f"{name}_sector_bytes", moved)
        self.counts.add_tensor(index, tensor_name, useful)
        self.counts.add_tensor(index, f"{tensor_name}_sectors", moved)

    def _shrink(self) -> None:
        for index in self._touched:
            batches, sectors = self._collapse(index)
            order = np.argsort(batches, kind="stable")
            cuts = np.flatnonzero(np.diff(batches[order])) + 1
            groups = np.split(sectors[order], cuts)
            firsts = [int(batches[order][0]), *(int(batches[order][cut]) for cut in cuts)]
            self._touched[index] = list(zip(firsts, groups, strict=True))
        # What is left is all distinct: allow as much again before the next attempt.
        self._stored = 0

    def _by_tensor(self, addresses: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """(index of the allocation, its addresses); index -1 gathers what lies in none of them."""
        low, high = self._index(int(addresses.min())), self._index(int(addresses.max()))
        if low == high:
            yield low, addresses
            return
        owners = np.searchsorted(np.array(self._starts, np.uint64), addresses, side="right").astype(np.int64) - 1
        ends = np.array([span.end for span in self.spans] or [0], np.uint64)
        owners[(owners >= 0) & (addresses >= ends[np.maximum(owners, 0)])] = -1
        for index in np.unique(owners):
            yield int(index), addresses[owners == index]

    def _index(self, address: int) -> int:
        index = bisect.bisect_right(self._starts, address) - 1
        return index if index >= 0 and address < self.spans[index].end else -1

    def dot(self, a: Any, b: Any, precision: str) -> None:
        *batch, m, k = a.data.shape
        n = b.data.shape[-1]
        flops = 2.0 * math.prod(batch) * m * n * k
        dtype = a.dtype.scalar.name
        name = _DTYPES.get(dtype, "float8" if dtype.startswith("fp8") else dtype)
        if name == "float32" and "IEEE" not in precision.upper():
            name = "tf32"
        self.counts.add("dots", 1)
        self.counts.add("dot_flops", flops)
        self.dots[(name, (m, n, k))] = self.dots.get((name, (m, n, k)), 0.0) + flops
        self.consumed()


@contextmanager
def hooks(current: Callable[[], Counter]) -> Iterator[None]:
    """Make the interpreter's builder report to the counter that `current()` gives, until the block ends."""
    builder = interpreter.interpreter_builder
    handle = interpreter.TensorHandle
    saved_options = builder.options
    reduce_impl, scan_impl = interpreter.ReduceOps.apply_impl, interpreter.ScanOps.apply_impl
    replaced: list[str] = []

    def replace(name: str, function: Callable[..., Any]) -> None:
        if hasattr(type(builder), name):
            setattr(builder, name, function)
            replaced.append(name)

    def lanes(name: str, lane_kind: str, lane_cost: int, special_cost: int) -> Callable[..., Any]:
        original = getattr(builder, name)

        def operation(*args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            counter = current()
            if name == "create_fadd" and any(arg is counter.dot_result for arg in args):
                return out  # `acc += dot(a, b)` is one instruction with the accumulator inside
            counts, size = counter.counts, out.data.size
            if lane_cost:
                counts.add(lane_kind, lane_cost * size)
            if special_cost:
                counts.add("special_ops", special_cost * size)
            return out

        return operation

    for short, (lane_cost, special_cost) in _SPECIAL.items():
        name = "create_" + short
        if hasattr(builder, name):
            replace(name, lanes(name, "lane_ops", lane_cost, special_cost))
    for group, kind, cost in ((_FLOAT, "lane_ops", 1), (_INTEGER, "int_ops", 1), (_SLOW_INTEGER, "int_ops", 20)):
        for short in group:
            name = "create_" + short
            if hasattr(builder, name):
                replace(name, lanes(name, kind, cost, 0))

    masked_load, masked_store = builder.create_masked_load, builder.create_masked_store

    def load(ptrs: Any, mask: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        current().memory("load", ptrs, mask)
        dtype = ptrs.get_element_ty()
        if not dtype.is_floating():
            return masked_load(ptrs, mask, other, *args, **kwargs)
        zeros = np.zeros(ptrs.data.shape, interpreter._get_np_dtype(dtype))
        if other is not None and mask is not None and not mask.data.all():
            zeros = np.where(mask.data, zeros, other.data).astype(zeros.dtype)
        return handle(zeros, dtype)

    def store(ptrs: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        current().memory("store", ptrs, mask)
        if not ptrs.get_element_ty().is_floating():
            return masked_store(ptrs, value, mask, *args, **kwargs)
        return None

    replace("create_masked_load", load)
    replace("create_masked_store", store)

    rmw, cas = builder.create_atomic_rmw, builder.create_atomic_cas

    def atomic_rmw(op: Any, ptr: Any, val: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        current().memory("atomic", ptr, mask)
        if ptr.get_element_ty().is_floating():
            return handle(np.zeros_like(val.data), val.dtype.scalar)
        return rmw(op, ptr, val, mask, *args, **kwargs)

    def atomic_cas(ptr: Any, *args: Any, **kwargs: Any) -> Any:
        current().memory("atomic", ptr, None)
        return cas(ptr, *args, **kwargs)

    replace("create_atomic_rmw", atomic_rmw)
    replace("create_atomic_cas", atomic_cas)

    def dot(a: Any, b: Any, d: Any, precision: Any, *args: Any, **kwargs: Any) -> Any:
        counter = current()
        counter.dot(a, b, str(precision))
        counter.dot_result = handle(d.data, d.dtype.scalar)
        return counter.dot_result

    replace("create_dot", dot)
    dot_scaled = getattr(builder, "create_dot_scaled", None)
    if dot_scaled is not None:

        def scaled(lhs: Any, lhs_scale: Any, lhs_format: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
            current().dot(lhs, rhs, "")
            return dot_scaled(lhs, lhs_scale, lhs_format, rhs, *args, **kwargs)

        replace("create_dot_scaled", scaled)

    def counting(original: Callable[..., Any], cost: int) -> Callable[..., Any]:
        def apply_impl(self: Any, values: Any) -> Any:
            counter = current()
            counter.consumed()
            counter.counts.add("reductions", 1)
            counter.counts.add("lane_ops", cost * sum(value.handle.data.size for value in values))
            return original(self, values)

        return apply_impl

    # A scan passes over its lanes about twice (within threads, then across them).
    interpreter.ReduceOps.apply_impl = counting(reduce_impl, 1)
    interpreter.ScanOps.apply_impl = counting(scan_impl, 2)
    try:
        # Overflow checks exist in debug builds only; here they would be counted as work.
        builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
        yield
    finally:
        builder.options = saved_options
        for name in replaced:
            delattr(builder, name)
        interpreter.ReduceOps.apply_impl, interpreter.ScanOps.apply_impl = reduce_impl, scan_impl
