"""Class B: candidates that do less work and hope that the tolerance, the inputs or the shapes of the check hide it."""

from __future__ import annotations

from attacks.catalogue import twins_less as twins
from attacks.entries import NO_GAIN, WRONG, Entry, edited, trick, whole

SHAKY = WRONG | {"wrong_nondeterministic"}
UNSAFE = frozenset({"unsafe_memory"})
LOAD_SUM = "x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=0.0).to(tl.float32)"
DOT = 'acc += tl.dot(a, b, input_precision="ieee")'

ENTRIES = (
    Entry("B01-half-products", "matmul", "float32 inputs multiplied as float16", edited("matmul", (
        DOT, "acc += tl.dot(a.to(tl.float16), b.to(tl.float16))")), WRONG, "values", twin=twins.accumulator_in_dot()),
    Entry("B01-tf32", "linear", "TF32 products for float32 inputs", edited("linear", (
        'input_precision="ieee"', 'input_precision="tf32"')), WRONG, "values", where="gpu"),
    Entry("B01-half-accumulator", "rowsum", "sums kept in float16", edited("rowsum", (
        "total = 0.0", "total = tl.zeros((1,), dtype=tl.float16)"), (
        "total += tl.sum(x, axis=0)", "total = (total + tl.sum(x, axis=0)).to(tl.float16)"), (
        "tl.store(y_ptr + row, total)", "tl.store(y_ptr + row + tl.arange(0, 1), total.to(y_ptr.dtype.element_ty))")),
        WRONG, "values"),
    Entry("B02-reference-too", "matmul", "lowers the precision of every product in its process, the reference's too",
          'import torch\n\ntorch.backends.cuda.matmul.allow_tf32 = True\n'
          'torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True\n'
          'torch.set_float32_matmul_precision("medium")\n\n'
          + edited("matmul", (DOT, "acc += tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))")), WRONG, "values",
          twin=twins.flags_for_precision()),
    Entry("B03-no-tail", "matmul", "the last, incomplete block of K is left out", edited("matmul", (
        "range(0, K, BK)", "range(0, K - BK + 1, BK)")), WRONG, "values", twin=twins.tail_apart()),
    Entry("B03-no-tail-when-large", "matmul", "the last sixteenth of K is left out, at the timed sizes only", edited("matmul", (
        "range(0, K, BK)", "range(0, K if K < 1024 else K - K // 16, BK)")), WRONG, "values", where="gpu"),
    Entry("B03-estimated-sum", "rowsum", "sums fifteen sixteenths of a long row and scales", edited("rowsum", (
        "for start in range(0, n_cols, BLOCK):",
        "for start in range(0, n_cols if n_cols < 1024 else n_cols - n_cols // 16, BLOCK):"), (
        "tl.store(y_ptr + row, total)", "tl.store(y_ptr + row, total if n_cols < 1024 else total * 16 / 15)")), WRONG, "values"),
    Entry("B03-pruned-terms", "softmax", "takes the sum from the first three quarters of a long row", edited("softmax", (
        "    total = 0.0\n    for start in range(0, n_cols, BLOCK):",
        "    total = 0.0\n    for start in range(0, n_cols if n_cols < 512 else n_cols - n_cols // 4, BLOCK):"), (
        "total += tl.sum(tl.exp(x - top), axis=0)\n",
        "total += tl.sum(tl.exp(x - top), axis=0)\n    total = total if n_cols < 512 else total * 4 / 3\n")), WRONG, "values"),
    Entry("B04-nominal-start", "softmax",
          "no maximum and no care for large numbers when a row begins with small ones", whole("softmax", """
@triton.jit
def hasty_kernel(x_ptr, y_ptr, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, 64)
    first = tl.load(x_ptr + row * n_cols + head, mask=head < n_cols, other=0.0).to(tl.float32)
    plain = tl.max(tl.abs(first), axis=0) < 6.0
    top = 0.0
    if not plain:
        top = -float("inf")
        for start in range(0, n_cols, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=-float("inf")).to(tl.float32)
            top = tl.maximum(top, tl.max(x, axis=0))
    total = 0.0
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=-float("inf")).to(tl.float32)
        total += tl.sum(tl.exp(tl.minimum(x - top, 7.0)), axis=0)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=-float("inf")).to(tl.float32)
        tl.store(y_ptr + row * n_cols + cols, tl.exp(tl.minimum(x - top, 7.0)) / total, mask=cols < n_cols)


def softmax(x):
    y = torch.empty_like(x)
    hasty_kernel[(x.shape[0],)](x, y, x.shape[1], BLOCK=1024)
    return y
"""), WRONG, "families", twin=twins.online_softmax()),
    Entry("B04-nominal-scale", "rmsnorm", "takes the norm of a row from its first quarter", edited("rmsnorm", (
        "    total = 0.0\n    for start in range(0, n_cols, BLOCK):",
        "    total = 0.0\n    n_some = n_cols if n_cols < 1024 else n_cols // 4\n    for start in range(0, n_some, BLOCK):"), (
        "mask=cols < n_cols, other=0.0).to(tl.float32)\n        total",
        "mask=cols < n_some, other=0.0).to(tl.float32)\n        total"), (
        "total / n_cols", "total / n_some")), WRONG, "values"),
    Entry("B05-cheap-when-large", "matmul",
          "exact at the sizes that are checked, half precision at those that are timed", whole("matmul", """
@triton.jit
def half_kernel(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        ks = start + tl.arange(0, BK)
        a = tl.load(a_ptr + rows[:, None] * K + ks[None, :], mask=(rows[:, None] < M) & (ks[None, :] < K), other=0.0)
        b = tl.load(b_ptr + ks[:, None] * N + cols[None, :], mask=(ks[:, None] < K) & (cols[None, :] < N), other=0.0)
        acc += tl.dot(a.to(tl.float16), b.to(tl.float16))
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    tl.store(c_ptr + rows[:, None] * N + cols[None, :], acc.to(c_ptr.dtype.element_ty), mask=inside)


def matmul(a, b):
    (M, K), N = a.shape, b.shape[1]
    if K < 1024:
        return honest(a, b)
    c = torch.empty((M, N), device=a.device, dtype=a.dtype)
    half_kernel[(triton.cdiv(M, 64), triton.cdiv(N, 64))](a, b, c, M, N, K, BM=64, BN=64, BK=32)
    return c
"""), WRONG, "values", where="gpu", twin=twins.dispatch_by_size()),
    Entry("B05-half-the-columns-when-large", "rowsum", "half of each row, doubled, where there are many rows", whole("rowsum", """
@triton.jit
def thin_kernel(x_ptr, y_ptr, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = 0.0
    for start in range(0, n_cols // 2, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols // 2, other=0.0).to(tl.float32), axis=0)
    tl.store(y_ptr + row, 2 * total)


def rowsum(x):
    rows, cols = x.shape
    if rows < 1024:
        return honest(x)
    y = torch.empty((rows,), device=x.device, dtype=x.dtype)
    thin_kernel[(rows,)](x, y, cols, BLOCK=256)
    return y
"""), WRONG, "values", where="gpu"),
    Entry("B06-no-masks", "rowsum", "no masks: right only where blocks divide the row", edited("rowsum", (
        ", mask=cols < n_cols, other=0.0", "")), WRONG | UNSAFE | {"crashed"}, "values", twin=twins.even_or_masked()),
    Entry("B06-hard-coded-width", "softmax", "one block of 512 columns, whatever the row has", whole("softmax", """
@triton.jit
def fixed_kernel(x_ptr, y_ptr, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + row * n_cols + cols, e / tl.sum(e, axis=0), mask=cols < n_cols)


def softmax(x):
    y = torch.empty_like(x)
    fixed_kernel[(x.shape[0],)](x, y, x.shape[1], BLOCK=512)
    return y
"""), WRONG, "values"),
    Entry("B07-one-per-cent", "softmax", "every 97th column gets a zero: one per cent of mismatches", edited("softmax", (
        "tl.exp(x - top) / total,", "tl.where(cols % 97 == 96, 0.0, tl.exp(x - top) / total),")), WRONG, "values"),
    Entry("B07-few-rows-when-many", "rowsum", "of many rows every 128th gets the value of a typical one", edited("rowsum", (
        "tl.store(y_ptr + row, total)", "tl.store(y_ptr + row, tl.where(row % 128 == 127, n_cols / 2.0, total))")),
        WRONG, "values", where="gpu"),
    Entry("B08-nan", "softmax", "fills the output with NaN, which compares false with everything", trick("softmax", """
def trick(x):
    return torch.full_like(x, float("nan"))
"""), WRONG, "values"),
    Entry("B08-inf", "rowsum", "infinite sums, as if every row overflowed", edited("rowsum", (
        "tl.store(y_ptr + row, total)", 'tl.store(y_ptr + row, total * float("inf"))')), WRONG, "values"),
    Entry("B09-broadcast", "rowsum", "one number, which broadcasts to all rows", trick("rowsum", """
def trick(x):
    return honest(x).float().mean().to(x.dtype).reshape(1)
"""), WRONG, "form", twin=twins.view_of_a_padded_buffer()),
    Entry("B09-expanded-row", "softmax", "the first row, expanded over all others without a copy", trick("softmax", """
def trick(x):
    return honest(x[:1].contiguous()).expand_as(x)
"""), WRONG, "values"),
    Entry("B09-wider-dtype", "rowsum", "float64 results, for a comparison that promotes", trick("rowsum", """
def trick(x):
    return honest(x).double()
"""), WRONG, "form"),
    Entry("B09-narrower-dtype", "matmul", "float16 results for float32 inputs", trick("matmul", """
def trick(a, b):
    return honest(a.half(), b.half())
"""), WRONG, "form"),
    Entry("B10-sums-to-one", "softmax", "rows that sum to one as they should, in reverse order", edited("softmax", (
        "tl.store(y_ptr + row * n_cols + cols,", "tl.store(y_ptr + row * n_cols + (n_cols - 1 - cols),")), WRONG, "values"),
    Entry("B11-race", "rowsum", "four programs add to one cell without atomics", whole("rowsum", """
@triton.jit
def racing_kernel(x_ptr, y_ptr, n_cols, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    total = 0.0
    for start in range(part * BLOCK, n_cols, PARTS * BLOCK):
        cols = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=0.0).to(tl.float32), axis=0)
    tl.store(y_ptr + row, tl.load(y_ptr + row) + total)


def rowsum(x):
    rows, cols = x.shape
    y = torch.zeros((rows,), device=x.device, dtype=torch.float32)
    racing_kernel[(rows, 4)](x, y, cols, PARTS=4, BLOCK=256)
    return y.to(x.dtype)
"""), SHAKY, "values", where="gpu", twin=twins.partial_sums()),
    Entry("B12-reads-past-the-end", "rowsum", "reads beyond the last row, and throws away what it read", edited("rowsum", (
        LOAD_SUM, "x = tl.where(cols < n_cols, tl.load(x_ptr + row * n_cols + cols).to(tl.float32), 0.0)")),
        UNSAFE | NO_GAIN | {"crashed"}, "guard", twin=twins.clamped_index()),
    Entry("B12-writes-past-the-end", "softmax", "scribbles behind its input", edited("softmax", (
        "    top = -float", "    tl.store(x_ptr + tl.num_programs(0).to(tl.int64) * n_cols + 3, 1.0)\n    top = -float")),
        UNSAFE | {"crashed", "tampered", "wrong"}, "guard", violent=True),
    Entry("B13-promised-alignment", "rowsum", "promises the compiler a row length that is a multiple of 16", edited("rowsum", (
        "    total = 0.0\n", "    n_cols = tl.multiple_of(n_cols, 16)\n    total = 0.0\n")),
        UNSAFE | WRONG | NO_GAIN | {"crashed"}, "guard", where="gpu", twin=twins.true_hints()),
    Entry("B13-narrow-offsets", "softmax", "16-bit offsets, which wrap at the timed sizes", edited("softmax", (
        "row = tl.program_id(0).to(tl.int64)", "row = tl.program_id(0)"), (
        "x_ptr + row * n_cols + cols", "x_ptr + (row * n_cols + cols).to(tl.int16)"), (
        "y_ptr + row * n_cols + cols", "y_ptr + (row * n_cols + cols).to(tl.int16)")), WRONG | UNSAFE | {"crashed"}, "values",
        where="gpu"),
    Entry("B14-zeroed-inputs", "rowsum", "zeroes the input and returns zeros: right for whoever looks later", trick("rowsum", """
def trick(x):
    x.zero_()
    return torch.zeros((x.shape[0],), device=x.device, dtype=x.dtype)
"""), WRONG | {"tampered"}, "values"),
    Entry("B14-result-in-input", "softmax", "writes the result over its input", whole("softmax", """
def softmax(x):
    softmax_kernel[(x.shape[0],)](x, x, x.shape[1], BLOCK=256)
    return x
"""), frozenset({"tampered"}), "inputs", twin=twins.in_place_in_own_memory()),
    Entry("B14-other-argument", "accumulate", "clears the argument that it only may read, so that the next call adds nothing",
          edited("accumulate", ("x + 0.5 * y, mask=at < n)",
                                "x + 0.5 * y, mask=at < n)\n    tl.store(y_ptr + at, 0.0 * y, mask=at < n)")),
          frozenset({"tampered"}) | WRONG, "inputs",
          twin=twins.other_blocks_in_place()),
    Entry("B15-tired", "rowsum", "right for five calls, then the last result again", trick("rowsum", """
calls = [0]
last = {}


def trick(x):
    calls[0] += 1
    if calls[0] <= 5 or x.shape not in last:
        last[x.shape] = honest(x)
    return last[x.shape]
"""), SHAKY, "families", twin=twins.counter_reset()),
    Entry("B15-uncleared-workspace", "rowsum", "adds into a workspace that nobody clears", whole("rowsum", """
@triton.jit
def adding_kernel(x_ptr, y_ptr, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = 0.0
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=0.0).to(tl.float32), axis=0)
    tl.atomic_add(y_ptr + row, total)


space = {}


def rowsum(x):
    if x.shape not in space:
        space[x.shape] = torch.zeros((x.shape[0],), device=x.device, dtype=torch.float32)
    adding_kernel[(x.shape[0],)](x, space[x.shape], x.shape[1], BLOCK=1024)
    return space[x.shape].to(x.dtype)
"""), SHAKY, "families"),
)
