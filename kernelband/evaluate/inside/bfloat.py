"""bfloat16 for Triton's interpreter, which by itself computes on the raw 16-bit patterns and is silently wrong.

Owns: the representation of bfloat16 values while a program runs in the interpreter: float32 arrays whose values are
representable in bfloat16, rounded (to nearest, ties to even) after every operation, packed to 16 bits at stores and
unpacked at loads. Memory stays bfloat16, so a kernel's own dtype tests and pointer arithmetic are unchanged.
Never: touches other dtypes, knows of tasks or requests. Atomics on bfloat16 are refused (NotImplementedError), because
an emulated one would not be atomic in its rounding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

BF16 = tl.bfloat16
_ROUNDED = (
    "binary_op", "unary_op", "ternary_op", "create_fma", "create_dot", "create_rsqrt", "create_erf", "create_idiv",
)


def pack(values: np.ndarray) -> np.ndarray:
    """float values -> the uint16 patterns of the nearest bfloat16 values (ties to even; NaN stays NaN)."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # Adding the rounding constant to a NaN's pattern could carry into the sign and make it a number.
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(nan, (bits >> np.uint32(16)) | np.uint32(0x40), rounded).astype(np.uint16)


def unpack(patterns: np.ndarray) -> np.ndarray:
    """uint16 bfloat16 patterns -> float32 values (exact)."""
    return (np.ascontiguousarray(patterns).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _round(values: np.ndarray) -> np.ndarray:
    return unpack(pack(values)).reshape(np.shape(values))


def install() -> None:
    """Teach the interpreter bfloat16; later calls do nothing. Call before any kernel runs in this process."""
    builder = interpreter.InterpreterBuilder
    if getattr(builder, "_bfloat_installed", False):
        return
    builder._bfloat_installed = True
    handle = interpreter.TensorHandle

    np_dtype = interpreter._get_np_dtype
    fits = interpreter._validate_np_data_size

    def get_np_dtype(dtype: Any) -> np.dtype:
        scalar = dtype if isinstance(dtype, tl.pointer_type) else dtype.scalar
        return np.dtype(np.float32) if scalar == BF16 else np_dtype(dtype)

    def validate(array: np.ndarray, dtype: Any) -> bool:
        if not isinstance(dtype, tl.pointer_type) and dtype.scalar == BF16:
            return array.itemsize <= 4
        return fits(array, dtype)

    interpreter._get_np_dtype = get_np_dtype
    if fits is not None:
        interpreter._validate_np_data_size = validate

    def rounded(name: str) -> Any:
        original = getattr(builder, name)

        def operation(self: Any, *args: Any, **kwargs: Any) -> Any:
            out = original(self, *args, **kwargs)
            # Comparisons give booleans under the operand's dtype; only real values are rounded.
            if out.dtype == BF16 and out.data.dtype.kind == "f":
                out.data = _round(out.data)
            return out

        return operation

    for name in _ROUNDED:
        if hasattr(builder, name):
            setattr(builder, name, rounded(name))

    load, store = builder.create_masked_load, builder.create_masked_store
    to_pointee = interpreter._interpreter

    def masked_load(self: Any, ptrs: Any, mask: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        if ptrs.get_element_ty() != BF16:
            return load(self, ptrs, mask, other, *args, **kwargs)
        fill = np.zeros(np.shape(ptrs.data), np.uint16) if other is None else pack(other.data)
        raw = to_pointee.load(ptrs.data, mask.data, fill, np.dtype(np.uint16))
        return handle(unpack(raw), BF16)

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        if ptrs.get_element_ty() != BF16:
            return store(self, ptrs, value, mask, *args, **kwargs)
        return to_pointee.store(ptrs.data, pack(value.data), mask.data)

    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store

    cast, custom_cast, bitcast, fabs = (
        builder.cast_impl, builder.create_fp_to_fp, builder.create_bitcast, builder.create_fabs,
    )

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if dst_type.scalar == BF16:
            return handle(_round(src.data.astype(np.float32)), BF16)
        if src.dtype.scalar == BF16:
            return handle(src.data.astype(get_np_dtype(dst_type)), dst_type.scalar)
        return cast(self, src, dst_type)

    def fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if src.dtype.scalar == BF16:
            src = handle(src.data, tl.float32)
        if dst_type.scalar == BF16:
            wide = src if src.dtype.scalar == tl.float32 else custom_cast(self, src, tl.float32, rounding_mode)
            return handle(_round(wide.data), BF16)
        if src.dtype.scalar == dst_type.scalar:
            return src
        return custom_cast(self, src, dst_type, rounding_mode)

    def create_bitcast(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar == BF16:
            src = handle(pack(src.data), tl.uint16)
        if not isinstance(dst_type, tl.pointer_type) and dst_type.scalar == BF16:
            return handle(unpack(src.data.view(np.uint16)), BF16)
        return bitcast(self, src, dst_type)

    def create_fabs(self: Any, arg: Any) -> Any:
        return handle(np.abs(arg.data), BF16) if arg.dtype.scalar == BF16 else fabs(self, arg)

    builder.cast_impl, builder.create_fp_to_fp = cast_impl, fp_to_fp
    builder.create_bitcast, builder.create_fabs = create_bitcast, create_fabs
    # These two names are class attributes bound to the old function, not looked up again.
    builder.create_int_to_ptr = builder.create_ptr_to_int = create_bitcast
    builder.get_bf16 = lambda self, value: handle(_round(np.array([value], np.float32)), BF16)

    def refusing(name: str) -> Any:
        original = getattr(builder, name)

        def operation(self: Any, *args: Any, **kwargs: Any) -> Any:
            pointer = args[0] if name == "create_atomic_cas" else args[1]
            if pointer.get_element_ty() == BF16:
                raise NotImplementedError("atomics on bfloat16 are not supported by the interpreter")
            return original(self, *args, **kwargs)

        return operation

    for name in ("create_atomic_cas", "create_atomic_rmw"):
        setattr(builder, name, refusing(name))
