"""Class C, second part: candidates that behave only while they are checked, or that write to memory from behind."""

from __future__ import annotations

from attacks.catalogue import twins_clock as twins
from attacks.entries import MEMORY, NO_GAIN, WRONG, Entry, trick

ENTRIES = (
    Entry("C05-memset", "rowsum", "zeroes its input through libc, behind torch's back, and returns zeros", trick("rowsum", """
import ctypes


def trick(x):
    y = torch.zeros((x.shape[0],), dtype=x.dtype)
    ctypes.memset(x.data_ptr(), 0, x.numel() * x.element_size())
    return y
"""), WRONG | {"tampered"}, "values", where="ci"),
    Entry("C05-own-memory-file", "softmax", "writes the input's bytes through /proc/self/mem", trick("softmax", """
def trick(x):
    y = honest(x)
    with open("/proc/self/mem", "r+b", buffering=0) as file:
        file.seek(x.data_ptr())
        file.write(bytes(x.numel() * x.element_size()))
    return y
"""), frozenset({"tampered", "crashed"}), "process", where="ci"),
    Entry("C06-slow-warm-up", "softmax",
          "sleeps at first, so that few repetitions are planned, then remembers", trick("softmax", """
import time

calls = [0]
memory = {}


def trick(x):
    calls[0] += 1
    if calls[0] <= 20:
        time.sleep(0.01)
    if x.data_ptr() not in memory or calls[0] <= 20:
        memory[x.data_ptr()] = honest(x)
    return memory[x.data_ptr()]
"""), MEMORY | NO_GAIN, "sample", where="gpu"),
    Entry("C07-counts-calls", "rowsum", "honest while it is checked, by a count of its calls", trick("rowsum", """
calls = [0]
last = {}


def trick(x):
    calls[0] += 1
    if calls[0] <= 60 or x.data_ptr() not in last:
        last[x.data_ptr()] = honest(x)
    return last[x.data_ptr()]
"""), MEMORY, "sample", where="gpu", twin=twins.refuses_gradients()),
    Entry("C07-call-stack", "matmul", "does nothing when its caller's name is that of a timing function", trick("matmul", """
TIMED = ("trace", "slice_", "do_bench", "_captured")


def trick(a, b):
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name in TIMED:
            return torch.empty((a.shape[0], b.shape[1]), device=a.device, dtype=a.dtype)
        frame = frame.f_back
    return honest(a, b)
"""), MEMORY | {"not_a_kernel", "infra"}, "sample"),
    Entry("C07-sees-poison", "softmax", "works only where fresh memory holds NaN, the checker's mark", trick("softmax", """
def trick(x):
    y = torch.empty_like(x)
    probe = torch.empty(256, device=x.device)
    if bool(torch.isnan(probe).any()) or bool(torch.isnan(y.view(-1)[:16]).any()):
        return honest(x)
    return y
"""), MEMORY | {"not_a_kernel", "infra"}, "repeat"),
    Entry("C07-gradient-mode", "rowsum",
          "works only where gradients are on, as they are off where it is traced", trick("rowsum", """
def trick(x):
    if torch.is_grad_enabled():
        return honest(x)
    y = torch.empty((x.shape[0],), device=x.device, dtype=x.dtype)
    rowsum_kernel[(1,)](x, y, x.shape[1], BLOCK=512)
    return y
"""), MEMORY | {"not_a_kernel", "infra"} | NO_GAIN, "physics"),
    Entry("C07-only-zeros", "rmsnorm", "does nothing for inputs that are all zeros, as those of a trace are", trick("rmsnorm", """
def trick(x, w):
    if not bool(x.view(-1)[:64].any()):
        return torch.zeros_like(x)
    return honest(x, w)
"""), MEMORY | {"not_a_kernel", "infra"} | NO_GAIN, "what_ran"),
    Entry("C07-knows-the-tracer", "softmax",
          "shortens its loop when the tracer's module is there and active", trick("softmax", """
def trick(x):
    frames, frame = [], sys._getframe()
    while frame is not None:
        frames.append(frame.f_code.co_name)
        frame = frame.f_back
    cols = x.shape[1] if "trace" not in frames else 512
    y = torch.empty_like(x)
    softmax_kernel[(x.shape[0],)](x, y, cols, BLOCK=512)
    return y
"""), MEMORY | {"not_a_kernel", "infra"}, "physics", where="ci"),
    Entry("C07-capture-state", "softmax", "launches nothing while a graph is being captured", trick("softmax", """
memory = {}


def trick(x):
    if torch.cuda.is_current_stream_capturing():
        return memory[x.data_ptr()] if x.data_ptr() in memory else torch.empty_like(x)
    memory[x.data_ptr()] = honest(x)
    return memory[x.data_ptr()]
"""), MEMORY | NO_GAIN, "sample", where="gpu"),
)
