"""The few CUDA driver calls that torch does not offer: plain allocations that can be shared between processes.

Used by the trusted side (allocates, exports) and inside the sandbox (opens). Talks to libcuda through ctypes on the
context that torch has made current; owns no policy. Memory is wrapped as torch tensors without a copy.
"""

import ctypes

import torch

_lib = None
BLOCK = 2 << 20


class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_byte * 64)]


class CudaError(RuntimeError):
    """A driver call failed; the text names the call and the driver's error."""


def lib():
    global _lib
    if _lib is None:
        torch.cuda.init()
        torch.cuda.current_stream().synchronize()  # makes the primary context current in this thread
        _lib = ctypes.CDLL("libcuda.so.1")
    return _lib


def check(code, call):
    if code:
        name = ctypes.c_char_p()
        lib().cuGetErrorString(code, ctypes.byref(name))
        raise CudaError(f"{call}: {(name.value or b'error %d' % code).decode()}")


def allocate(size):
    """A dedicated device allocation of at least `size` bytes. Returns its address.

    Rounded up to 2 MiB: the driver puts smaller ones into a common block, and sharing one would share its neighbours.
    """
    pointer = ctypes.c_uint64()
    check(lib().cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(max(1, -(-size // BLOCK)) * BLOCK)), "cuMemAlloc")
    return pointer.value


def free(pointer):
    check(lib().cuMemFree_v2(ctypes.c_uint64(pointer)), "cuMemFree")


def export(pointer):
    """The 64-byte handle, in hex, by which another process can open the allocation."""
    handle = Handle()
    check(lib().cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(pointer)), "cuIpcGetMemHandle")
    return bytes(handle.bytes).hex()


def open_handle(text):
    handle = Handle()
    ctypes.memmove(ctypes.byref(handle), bytes.fromhex(text), 64)
    pointer = ctypes.c_uint64()
    lib().cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, Handle, ctypes.c_uint]
    check(lib().cuIpcOpenMemHandle_v2(ctypes.byref(pointer), handle, 1), "cuIpcOpenMemHandle")
    return pointer.value


class _Array:
    def __init__(self, pointer, size):
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (pointer, False), "version": 3}


def tensor(pointer, shape, stride, dtype, offset=0):
    """The memory at `pointer + offset` bytes as a torch tensor of that shape, stride (elements) and dtype."""
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if all(shape) else 0
    size = max(1, extent) * dtype.itemsize
    flat = torch.as_tensor(_Array(pointer + offset, size), device="cuda").view(dtype)
    return flat.as_strided(tuple(shape), tuple(stride))
