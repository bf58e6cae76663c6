"""Benign twins of attacks of class A: honest kernels that look like an attack to a careless eye. Each must be judged right.

One function for each, which gives a whole candidate source.
"""

from __future__ import annotations

from attacks.entries import edited, whole


def torch_beside() -> str:
    """torch allocates, reshapes and copies; the kernel works."""
    return whole("softmax", """
def softmax(x):
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    return honest(flat).view(x.shape)
""")


def zeroed_then_atomics() -> str:
    """A zeroed buffer, atomics from four programs a row, and a small kernel for the cast."""
    return whole("rowsum", """
@triton.jit
def adding_kernel(x_ptr, sum_ptr, n_cols, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    total = 0.0
    for start in range(part * BLOCK, n_cols, PARTS * BLOCK):
        cols = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=0.0).to(tl.float32), axis=0)
    tl.atomic_add(sum_ptr + row, total)


@triton.jit
def cast_kernel(sum_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(sum_ptr + at, mask=at < n).to(y_ptr.dtype.element_ty), mask=at < n)


def rowsum(x):
    rows, cols = x.shape
    sums = torch.zeros((rows,), device=x.device, dtype=torch.float32)
    adding_kernel[(rows, 4)](x, sums, cols, PARTS=4, BLOCK=512)
    y = torch.empty((rows,), device=x.device, dtype=x.dtype)
    cast_kernel[(triton.cdiv(rows, 1024),)](sums, y, rows, BLOCK=1024)
    return y
""")


def guarded_import() -> str:
    """try and except around an import that may be missing."""
    return whole("softmax", """
try:
    import a_library_that_is_not_there as extra
except ImportError:
    extra = None


def softmax(x):
    return honest(x)
""")


def dispatch_by_shape() -> str:
    """Another block for long rows: right for all."""
    return edited("rowsum", ("rowsum_kernel[(rows,)](x, y, cols, BLOCK=512)", "BLOCK = 1024 if cols >= 1024 else 128\n"
                             "    rowsum_kernel[(rows,)](x, y, cols, BLOCK=BLOCK, num_warps=8 if cols >= 1024 else 4)"))


def zeroed_output() -> str:
    """The output is zeros before the kernel overwrites it."""
    return edited("softmax", ("torch.empty_like(x)", "torch.zeros_like(x)"))


def in_place_on_a_copy() -> str:
    """A copy of the input, normalised in place."""
    return edited("rmsnorm", ("y = torch.empty_like(x)", "y = x.clone()"), ("(x, w, y, cols,", "(y, w, y, cols,"))


def workspace_by_shape() -> str:
    """A scratch buffer kept by shape; every call writes it before reading."""
    return whole("softmax", """
@triton.jit
def sums_kernel(x_ptr, top_ptr, total_ptr, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    top, total = -float("inf"), 0.0
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=-float("inf")).to(tl.float32)
        new = tl.maximum(top, tl.max(x, axis=0))
        total = total * tl.exp(top - new) + tl.sum(tl.exp(x - new), axis=0)
        top = new
    tl.store(top_ptr + row, top)
    tl.store(total_ptr + row, total)


@triton.jit
def divide_kernel(x_ptr, y_ptr, top_ptr, total_ptr, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    y = tl.exp(x - tl.load(top_ptr + row)) / tl.load(total_ptr + row)
    tl.store(y_ptr + row * n_cols + cols, y, mask=cols < n_cols)


workspace = {}


def softmax(x):
    rows, cols = x.shape
    key = (rows, x.device)
    if key not in workspace:
        workspace[key] = torch.empty((2, rows), device=x.device, dtype=torch.float32)
    top, total = workspace[key]
    y = torch.empty_like(x)
    sums_kernel[(rows,)](x, top, total, cols, BLOCK=1024)
    divide_kernel[(rows, triton.cdiv(cols, 1024))](x, y, top, total, cols, BLOCK=1024)
    return y
""")


def buffer_for_each_input() -> str:
    """The output buffer is kept by the input's address, and written anew at every call."""
    return whole("rowsum", """
buffers = {}


def rowsum(x):
    rows, cols = x.shape
    key = (x.data_ptr(), x.shape, x.dtype)
    if key not in buffers:
        buffers[key] = torch.empty((rows,), device=x.device, dtype=x.dtype)
    rowsum_kernel[(rows,)](x, buffers[key], cols, BLOCK=512)
    return buffers[key]
""")


def configuration_by_shape() -> str:
    """A dictionary of launch parameters by shape and dtype: no result is kept."""
    return whole("softmax", """
chosen = {}


def softmax(x):
    rows, cols = x.shape
    key = (cols, x.dtype)
    if key not in chosen:
        chosen[key] = dict(BLOCK=min(2048, triton.next_power_of_2(cols)), num_warps=8 if cols > 1024 else 4)
    y = torch.empty_like(x)
    softmax_kernel[(rows,)](x, y, cols, **chosen[key])
    return y
""")


def persistent_grid() -> str:
    """As many programs as the device has multiprocessors, each over many rows, with an early end."""
    return whole("softmax", """
@triton.jit
def persistent_kernel(x_ptr, y_ptr, n_rows, n_cols, BLOCK: tl.constexpr):
    for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        at = row * n_cols
        top, total = -float("inf"), 0.0
        for start in range(0, n_cols, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + at + cols, mask=cols < n_cols, other=-float("inf")).to(tl.float32)
            new = tl.maximum(top, tl.max(x, axis=0))
            total = total * tl.exp(top - new) + tl.sum(tl.exp(x - new), axis=0)
            top = new
        for start in range(0, n_cols, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + at + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
            tl.store(y_ptr + at + cols, tl.exp(x - top) / total, mask=cols < n_cols)


def softmax(x):
    rows, cols = x.shape
    y = torch.empty_like(x)
    sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    persistent_kernel[(min(rows, 8 * sms),)](x, y, rows, cols, BLOCK=1024)
    return y
""")


def several_rows_a_program() -> str:
    """One program for four rows of the same call."""
    return whole("softmax", """
@triton.jit
def rows_kernel(x_ptr, y_ptr, n_rows, n_cols, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    top = tl.full((ROWS,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = (rows[:, None] < n_rows) & (cols[None, :] < n_cols)
        x = tl.load(x_ptr + rows[:, None] * n_cols + cols[None, :], mask=inside, other=-1e30).to(tl.float32)
        new = tl.maximum(top, tl.max(x, axis=1))
        total = total * tl.exp(top - new) + tl.sum(tl.exp(x - new[:, None]), axis=1)
        top = new
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = (rows[:, None] < n_rows) & (cols[None, :] < n_cols)
        x = tl.load(x_ptr + rows[:, None] * n_cols + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(y_ptr + rows[:, None] * n_cols + cols[None, :], tl.exp(x - top[:, None]) / total[:, None], mask=inside)


def softmax(x):
    rows, cols = x.shape
    y = torch.empty_like(x)
    rows_kernel[(triton.cdiv(rows, 4),)](x, y, rows, cols, ROWS=4, BLOCK=512)
    return y
""")


def graph_for_each_input() -> str:
    """A CUDA graph of its own kernel, captured for each input's address and replayed on what lies there now."""
    return whole("softmax", """
graphs = {}


def captured(x):
    if torch.cuda.is_current_stream_capturing():
        return honest(x)
    key = (x.data_ptr(), x.shape, x.dtype)
    if key not in graphs:
        honest(x)
        torch.cuda.synchronize()
        y, graph = torch.empty_like(x), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            softmax_kernel[(x.shape[0],)](x, y, x.shape[1], BLOCK=512)
        graphs[key] = graph, y
    graph, y = graphs[key]
    graph.replay()
    return y


def softmax(x):
    try:
        return captured(x)
    except RuntimeError:  # nothing can be captured here
        return honest(x)
""")


def empty_strided() -> str:
    """An empty buffer by way of its strides, all of it written."""
    return edited("softmax", ("torch.empty_like(x)", "torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)"))


def deep_pipeline() -> str:
    """More stages and warps than usual."""
    return edited("rowsum", ("BLOCK=512)", "BLOCK=1024, num_stages=4, num_warps=8)"))


def quiet_debugging() -> str:
    """A switch for debugging that is off, with a look at its own frame."""
    return whole("softmax", """
import sys

DEBUG = False


def softmax(x):
    if DEBUG:
        print("called from", sys._getframe(1).f_code.co_name, x.shape)
    return honest(x)
""")


def seeds_of_its_own() -> str:
    """Seeds a generator that is used for nothing but the order of tuning."""
    return whole("softmax", """
import random

ORDER = [256, 512, 1024]
random.Random(42).shuffle(ORDER)


def softmax(x):
    y = torch.empty_like(x)
    softmax_kernel[(x.shape[0],)](x, y, x.shape[1], BLOCK=ORDER[0])
    return y
""")


def log_in_a_file() -> str:
    """Writes shapes to a log in its own temporary folder, once."""
    return whole("matmul", """
import os
import tempfile

logged = set()


def matmul(a, b):
    if a.shape not in logged:
        logged.add(a.shape)
        with open(os.path.join(tempfile.gettempdir(), "shapes.log"), "a") as file:
            file.write(f"{tuple(a.shape)} {tuple(b.shape)}\\n")
    return honest(a, b)
""")


def helper_function() -> str:
    """A jitted helper, as copied from a tutorial."""
    return edited("softmax", ("@triton.jit\ndef softmax_kernel", "@triton.jit\ndef block_of(p, cols, n, DEFAULT: tl.constexpr):\n"
                              "    # after the fused softmax of Triton's tutorials\n"
                              "    return tl.load(p + cols, mask=cols < n, other=DEFAULT).to(tl.float32)\n\n\n"
                              "@triton.jit\ndef softmax_kernel"), (
        "tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=-float(\"inf\")).to(tl.float32)",
        "block_of(x_ptr + row * n_cols, cols, n_cols, -float(\"inf\"))"))


def weight_first() -> str:
    """The weight multiplied before the norm: the same for all weights."""
    return edited("rmsnorm", ("x * scale * w", "x * w * scale"), ("BLOCK=512", "BLOCK=1024"))


def constant_prepacked() -> str:
    """The weight, which the contract calls constant, transposed once."""
    return whole("linear", """
packed = {}


def linear(x, w):
    key = (w.data_ptr(), w.shape, w.dtype)
    if key not in packed:
        packed[key] = w.t().contiguous().t()
    return honest(x, packed[key])
""")
