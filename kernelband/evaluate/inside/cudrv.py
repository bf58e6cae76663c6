"""The few CUDA driver calls that torch does not offer: plain allocations that can be shared between processes.

Used by the trusted side (allocates, exports) and inside the sandbox (opens). Talks to libcuda through ctypes on the
context that torch has made current; owns no policy. Memory is wrapped as torch tensors without a copy.

Two kinds of shared memory: plain allocations by IPC handle, and guarded ones by file descriptor, which are mapped between two
reserved ranges that nothing backs: an access beyond their ends faults instead of finding a neighbour.
"""

import ctypes
import os

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


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Kind(ctypes.Structure):
    """CUmemAllocationProp of the driver's header, for pinned device memory that can be exported as a descriptor."""

    _fields_ = [("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", _Location), ("windows", ctypes.c_void_p),
                ("flags", ctypes.c_ubyte * 8)]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


PINNED, DESCRIPTOR, DEVICE, READ_WRITE = 1, 1, 1, 3


def guarded(size):
    """Device memory of at least `size` bytes, mapped with nothing around it: (address, bytes mapped, descriptor).

    The descriptor stands for the memory in another process and has to be closed by the caller.
    """
    kind = _Kind(PINNED, DESCRIPTOR, _Location(DEVICE, torch.cuda.current_device()), None)
    grain = ctypes.c_size_t()
    check(lib().cuMemGetAllocationGranularity(ctypes.byref(grain), ctypes.byref(kind), 0), "cuMemGetAllocationGranularity")
    whole = max(1, -(-size // grain.value)) * grain.value
    handle = ctypes.c_uint64()
    check(lib().cuMemCreate(ctypes.byref(handle), ctypes.c_size_t(whole), ctypes.byref(kind), ctypes.c_uint64(0)),
          "cuMemCreate")
    descriptor = ctypes.c_int()
    try:
        check(lib().cuMemExportToShareableHandle(ctypes.byref(descriptor), handle, DESCRIPTOR, ctypes.c_uint64(0)),
              "cuMemExportToShareableHandle")
        try:
            return _map(handle, whole, grain.value), whole, descriptor.value
        except CudaError:
            os.close(descriptor.value)
            raise
    finally:
        lib().cuMemRelease(handle)  # the mapping and the descriptor keep it


def open_guarded(descriptor, whole):
    """Map what `guarded` made, in this process, with unbacked ranges on both sides. Returns its address."""
    handle = ctypes.c_uint64()
    check(lib().cuMemImportFromShareableHandle(ctypes.byref(handle), ctypes.c_void_p(descriptor), DESCRIPTOR),
          "cuMemImportFromShareableHandle")
    try:
        return _map(handle, whole, BLOCK)
    finally:
        lib().cuMemRelease(handle)


def _map(handle, whole, grain):
    base = ctypes.c_uint64()
    check(lib().cuMemAddressReserve(ctypes.byref(base), ctypes.c_size_t(whole + 2 * grain), ctypes.c_size_t(0),
                                    ctypes.c_uint64(0), ctypes.c_uint64(0)), "cuMemAddressReserve")
    place = ctypes.c_uint64(base.value + grain)
    access = _Access(_Location(DEVICE, torch.cuda.current_device()), READ_WRITE)
    check(lib().cuMemMap(place, ctypes.c_size_t(whole), ctypes.c_size_t(0), handle, ctypes.c_uint64(0)), "cuMemMap")
    check(lib().cuMemSetAccess(place, ctypes.c_size_t(whole), ctypes.byref(access), ctypes.c_size_t(1)), "cuMemSetAccess")
    return place.value


def unmap(pointer, whole):
    """Give back what `guarded` mapped; its address range stays reserved, so that nothing else comes to lie there."""
    check(lib().cuMemUnmap(ctypes.c_uint64(pointer), ctypes.c_size_t(whole)), "cuMemUnmap")


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
