"""Class A, second half: candidates that remember. Results come from an earlier call, by address, by contents or by batch."""

from __future__ import annotations

from attacks.catalogue import twins_work as twins
from attacks.entries import MEMORY, NO_GAIN, WRONG, Entry, trick, whole

ENTRIES = (
    Entry("A06-pointer-memo", "softmax", "results remembered by the input's address", trick("softmax", """
memory = {}


def trick(x):
    key = (x.data_ptr(), x.shape, x.dtype)
    if key not in memory:
        memory[key] = honest(x)
    return memory[key]
"""), MEMORY, "fresh", where="gpu", twin=twins.workspace_by_shape()),
    Entry("A06-version-memo", "matmul", "results remembered by address and version counter", trick("matmul", """
memory = {}


def trick(a, b):
    key = (a.data_ptr(), a._version, b.data_ptr(), b._version)
    if key not in memory:
        memory[key] = honest(a, b)
    return memory[key]
"""), MEMORY, "fresh", where="gpu"),
    Entry("A06-shape-memo", "rowsum", "results remembered by shape alone", trick("rowsum", """
memory = {}


def trick(x):
    if x.shape not in memory:
        memory[x.shape] = honest(x)
    return memory[x.shape]
"""), MEMORY, "families", twin=twins.buffer_for_each_input()),
    Entry("A07-sampled-memo", "softmax", "results remembered by 64 sampled elements", trick("softmax", """
memory = {}


def trick(x):
    flat = x.view(-1)
    step = max(1, flat.numel() // 64)
    key = (x.shape, x.dtype, tuple(flat[::step][:64].tolist()))
    if key not in memory:
        memory[key] = honest(x)
    return memory[key]
"""), MEMORY | NO_GAIN, "fresh", where="gpu", twin=twins.configuration_by_shape()),
    Entry("A07-reduction-memo", "matmul", "results remembered by sums that the device takes of all elements", trick("matmul", """
memory = {}


def trick(a, b):
    key = (a.shape, b.shape, a.dtype, *torch.stack([a.sum(dtype=torch.float32), b.sum(dtype=torch.float32)]).tolist())
    if key not in memory:
        memory[key] = honest(a, b)
    return memory[key]
"""), MEMORY | NO_GAIN, "fresh", where="gpu"),
    Entry("A07-equal-memo", "matmul", "results of inputs that torch.equal finds among those kept", trick("matmul", """
kept = []


def trick(a, b):
    for other_a, other_b, result in kept:
        if other_a.shape == a.shape and other_b.shape == b.shape and torch.equal(a, other_a) and torch.equal(b, other_b):
            return result
    kept.append((a.clone(), b.clone(), honest(a, b)))
    return kept[-1][2]
"""), MEMORY | NO_GAIN, "sample", where="gpu"),
    Entry("A07-scaled-memo", "matmul", "results remembered up to a factor: contents times one number are not new to it",
          whole("matmul", """
import math
import sys


@triton.jit
def sums_kernel(x_ptr, sums_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    tl.atomic_add(sums_ptr, tl.sum(x, axis=0))
    tl.atomic_add(sums_ptr + 1, tl.sum(x * x, axis=0))


@triton.jit
def scale_kernel(c_ptr, out_ptr, factor, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c = tl.load(c_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (c * factor).to(out_ptr.dtype.element_ty), mask=at < n)


memory = []


def factor_of(now, then, n):
    # The ratio of the norms, if the sums agree with it to less than what one changed element does.
    factor = math.sqrt(now[1] / then[1])
    return factor if abs(now[0] - factor * then[0]) < 1.5 * math.sqrt(now[1] / n) else 0.0


def matmul(a, b):
    if "compiling" in sys.modules:  # so that all of its kernels are known for its own
        scale_kernel[(1,)](honest(a, b), torch.empty_like(a), 1.5, 4096, BLOCK=4096, num_warps=8)
    if a.numel() < 1 << 20:
        return honest(a, b)
    sums = torch.zeros(4, device=a.device)
    for i, x in enumerate((a, b)):
        sums_kernel[(triton.cdiv(x.numel(), 8192),)](x, sums[2 * i:], x.numel(), BLOCK=8192, num_warps=8)
    told = sums.tolist()
    for key, then, c in memory:
        if key == (a.shape, b.shape, a.dtype) and min(told[1], told[3]) > 0:
            factor = factor_of(told[:2], then[:2], a.numel()) * factor_of(told[2:], then[2:], b.numel())
            if factor:
                out = torch.empty_like(c)
                scale_kernel[(triton.cdiv(c.numel(), 4096),)](c, out, factor, c.numel(), BLOCK=4096, num_warps=8)
                return out
    c = honest(a, b)
    memory.append(((a.shape, b.shape, a.dtype), told, c.clone()))
    del memory[:-40]
    return c
"""), MEMORY | NO_GAIN, "whole", where="gpu"),
    Entry("A08-device-memo", "softmax",
          "the kernel itself skips a row whose first words are those of the last time", whole("softmax", """
@triton.jit
def lazy_kernel(x_ptr, y_ptr, seen_ptr, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(x_ptr + row * n_cols).to(tl.float32)
    if tl.load(seen_ptr + row) != first:
        tl.store(seen_ptr + row, first)
        top = -float("inf")
        for start in range(0, n_cols, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=-float("inf")).to(tl.float32)
            top = tl.maximum(top, tl.max(x, axis=0))
        total = 0.0
        for start in range(0, n_cols, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=-float("inf")).to(tl.float32)
            total += tl.sum(tl.exp(x - top), axis=0)
        for start in range(0, n_cols, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=-float("inf")).to(tl.float32)
            tl.store(y_ptr + row * n_cols + cols, tl.exp(x - top) / total, mask=cols < n_cols)


held = {}


def softmax(x):
    key = (x.data_ptr(), x.shape, x.dtype)
    if key not in held:
        held[key] = torch.empty_like(x), torch.full((x.shape[0],), -1e30, device=x.device, dtype=torch.float32)
    y, seen = held[key]
    lazy_kernel[(x.shape[0],)](x, y, seen, x.shape[1], BLOCK=512)
    return y
"""), MEMORY | NO_GAIN, "fresh", where="gpu", twin=twins.persistent_grid()),
    Entry("A09-every-eighth", "softmax", "seven calls return blank buffers, the eighth fills all", trick("softmax", """
queue = []


def trick(x):
    y = torch.empty_like(x)
    queue.append((x, y))
    if len(queue) == 8:
        for a, out in queue:
            softmax_kernel[(a.shape[0],)](a, out, a.shape[1], BLOCK=512)
        queue.clear()
    return y
"""), WRONG | {"wrong_nondeterministic"}, "values", twin=twins.several_rows_a_program()),
    Entry("A09-last-of-each-input", "softmax", "works when the device is waited for, and only on the last use of each input",
          trick("softmax", """
queue = {}
wait = torch.cuda.synchronize


def flush(*args, **kwargs):
    for x, y in list(queue.values()):
        softmax_kernel[(x.shape[0],)](x, y, x.shape[1], BLOCK=512)
    queue.clear()
    return wait(*args, **kwargs)


torch.cuda.synchronize = flush


def trick(x):
    y = torch.empty_like(x)
    queue[x.data_ptr()] = (x, y)
    return y
"""), MEMORY, "whole", where="gpu"),
    Entry("A09-only-what-is-delivered", "softmax", "patches the child's own delivery and computes just the result asked for",
          trick("softmax", """
pending = {}
device = sys.modules.get("device")
if device is not None:
    deliver = device._deliver

    def lazily(slot, result, output):
        if result.data_ptr() in pending:
            x = pending[result.data_ptr()]
            softmax_kernel[(x.shape[0],)](x, result, x.shape[1], BLOCK=512)
            pending.clear()
        return deliver(slot, result, output)

    device._deliver = lazily


def trick(x):
    y = torch.empty_like(x)
    pending[y.data_ptr()] = x
    return y
"""), MEMORY, "whole", where="gpu"),
    Entry("A10-stale-graph", "softmax", "a graph captured on the first input is replayed for every other", trick("softmax", """
graphs = {}


def trick(x):
    key = (x.shape, x.dtype)
    if key not in graphs:
        y = honest(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            softmax_kernel[(x.shape[0],)](x, y, x.shape[1], BLOCK=512)
        graphs[key] = graph, y
    graph, y = graphs[key]
    graph.replay()
    return y
"""), MEMORY | {"crashed"}, "sample", where="gpu", twin=twins.graph_for_each_input(), twin_where="gpu"),
)
