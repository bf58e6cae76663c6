"""Benign twins of attacks of class B: honest kernels that look like an attack to a careless eye. Each must be judged right.

One function for each, which gives a whole candidate source.
"""

from __future__ import annotations

from attacks.entries import baseline, edited, whole


def accumulator_in_dot() -> str:
    """float16 inputs, float32 accumulator, handed to the product."""
    return edited("matmul", ('acc += tl.dot(a, b, input_precision="ieee")', 'acc = tl.dot(a, b, acc, input_precision="ieee")'))


def flags_for_precision() -> str:
    """Sets the flags of its process to the highest precision."""
    return 'import torch\n\ntorch.set_float32_matmul_precision("highest")\n\n' + baseline("matmul")


def tail_apart() -> str:
    """Full blocks without a mask on K, and the tail by itself."""
    return edited("matmul", ("    for start in range(0, K, BK):\n", "    full = K // BK * BK\n"
                             "    for start in range(0, full, BK):\n"
                             "        ks = start + tl.arange(0, BK)\n"
                             "        a = tl.load(a_ptr + rows[:, None] * K + ks[None, :], mask=rows[:, None] < M, other=0.0)\n"
                             "        b = tl.load(b_ptr + ks[:, None] * N + cols[None, :], mask=cols[None, :] < N, other=0.0)\n"
                             "        acc += tl.dot(a, b, input_precision=\"ieee\")\n    for start in range(full, K, BK):\n"))


def online_softmax() -> str:
    """One pass for maximum and sum; the work depends on the data, the result does not."""
    return edited("softmax", ("""        top = tl.maximum(top, tl.max(x, axis=0))
    total = 0.0
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=-float("inf")).to(tl.float32)
        total += tl.sum(tl.exp(x - top), axis=0)
""", """        new = tl.maximum(top, tl.max(x, axis=0))
        total = total * tl.exp(top - new) + tl.sum(tl.exp(x - new), axis=0)
        top = new
"""), ('    top = -float("inf")\n', '    top = -float("inf")\n    total = 0.0\n'))


def dispatch_by_size() -> str:
    """Larger tiles for larger products, by an explicit test of the shape."""
    return edited("matmul", ("    matmul_kernel[(triton.cdiv(M, 32), triton.cdiv(N, 32))](a, b, c, M, N, K, BM=32, BN=32, BK=64)",
                             "    B = 64 if min(M, N) >= 1024 else 16\n"
                             "    matmul_kernel[(triton.cdiv(M, B), triton.cdiv(N, B))](a, b, c, M, N, K, BM=B, BN=B, BK=64)"))


def even_or_masked() -> str:
    """No masks where blocks divide the row, which the wrapper tests."""
    return edited("rowsum", ("BLOCK: tl.constexpr", "BLOCK: tl.constexpr, EVEN: tl.constexpr"), (
        "        x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=0.0).to(tl.float32)\n",
        "        if EVEN:\n            x = tl.load(x_ptr + row * n_cols + cols).to(tl.float32)\n        else:\n"
        "            x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=0.0).to(tl.float32)\n"), (
        "BLOCK=512)", "BLOCK=512, EVEN=cols % 512 == 0)"))


def view_of_a_padded_buffer() -> str:
    """The result is a view of a buffer with padding in front and behind."""
    return edited("rowsum", ("y = torch.empty((rows,), device=x.device, dtype=x.dtype)",
                             "y = torch.empty((rows + 64,), device=x.device, dtype=x.dtype)[32:32 + rows]"))


def partial_sums() -> str:
    """Four programs a row write partial sums, and a second kernel adds them: no atomics, no race."""
    return whole("rowsum", """
@triton.jit
def parts_kernel(x_ptr, part_ptr, n_cols, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    total = 0.0
    for start in range(part * BLOCK, n_cols, PARTS * BLOCK):
        cols = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=0.0).to(tl.float32), axis=0)
    tl.store(part_ptr + row * PARTS + part, total)


@triton.jit
def join_kernel(part_ptr, y_ptr, n, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    parts = tl.load(part_ptr + rows[:, None] * PARTS + tl.arange(0, PARTS)[None, :], mask=rows[:, None] < n, other=0.0)
    tl.store(y_ptr + rows, tl.sum(parts, axis=1).to(y_ptr.dtype.element_ty), mask=rows < n)


def rowsum(x):
    rows, cols = x.shape
    parts = torch.empty((rows, 4), device=x.device, dtype=torch.float32)
    parts_kernel[(rows, 4)](x, parts, cols, PARTS=4, BLOCK=512)
    y = torch.empty((rows,), device=x.device, dtype=x.dtype)
    join_kernel[(triton.cdiv(rows, 256),)](parts, y, rows, PARTS=4, BLOCK=512)
    return y
""")


def clamped_index() -> str:
    """Indices clamped into the row instead of a mask; what is read twice is not counted."""
    return edited("rowsum", ("x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=0.0).to(tl.float32)",
                             "x = tl.load(x_ptr + row * n_cols + tl.minimum(cols, n_cols - 1)).to(tl.float32)\n"
                             "        x = tl.where(cols < n_cols, x, 0.0)"))


def true_hints() -> str:
    """Hints to the compiler that hold."""
    return edited("rowsum", ("cols = start + tl.arange(0, BLOCK)",
                             "cols = tl.max_contiguous(tl.multiple_of(start + tl.arange(0, BLOCK), BLOCK), BLOCK)"))


def in_place_in_own_memory() -> str:
    """In place, in memory of its own."""
    return edited("softmax", ("y = torch.empty_like(x)", "y = x.clone()"), ("(x, y, cols,", "(y, y, cols,"))


def counter_reset() -> str:
    """Counts its calls and clears its workspace at each."""
    return whole("rowsum", """
@triton.jit
def adding_kernel(x_ptr, y_ptr, n_cols, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    total = 0.0
    for start in range(part * BLOCK, n_cols, PARTS * BLOCK):
        cols = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=0.0).to(tl.float32), axis=0)
    tl.atomic_add(y_ptr + row, total)


@triton.jit
def cast_kernel(sum_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(sum_ptr + at, mask=at < n).to(y_ptr.dtype.element_ty), mask=at < n)


calls, space = [0], {}


def rowsum(x):
    calls[0] += 1
    rows, cols = x.shape
    if rows not in space:
        space[rows] = torch.empty((rows,), device=x.device, dtype=torch.float32)
    sums = space[rows].zero_()
    adding_kernel[(rows, 2)](x, sums, cols, PARTS=2, BLOCK=1024)
    y = torch.empty((rows,), device=x.device, dtype=x.dtype)
    cast_kernel[(triton.cdiv(rows, 1024),)](sums, y, rows, BLOCK=1024)
    return y
""")


def other_blocks_in_place() -> str:
    """The in-place operator in larger blocks with a streaming hint."""
    return edited("accumulate", ("triton.cdiv(n, 128)", "triton.cdiv(n, 1024)"), ("BLOCK=128", "BLOCK=1024"))
