"""Kernels with several passes or loops, as text, and calls of each, for the tests of the families about them."""

from __future__ import annotations

from rewriter_cases import CASES, HEAD, SOFTMAX, TILED_2D

# Two passes for mean and variance, by lanes; a third writes.
MOMENTS = HEAD + '''
@triton.jit
def moments_kernel(X, Y, V, stride, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    X += row * stride
    _mean = tl.zeros([BLOCK], dtype=tl.float32)
    for off in range(0, N, BLOCK):
        cols = off + tl.arange(0, BLOCK)
        a = tl.load(X + cols, mask=cols < N, other=0.0).to(tl.float32)
        _mean += a
    mean = tl.sum(_mean, axis=0) / N
    _var = tl.zeros([BLOCK], dtype=tl.float32)
    for off in range(0, N, BLOCK):
        cols = off + tl.arange(0, BLOCK)
        x = tl.load(X + cols, mask=cols < N, other=0.0).to(tl.float32)
        d = tl.where(cols < N, x - mean, 0.0)
        _var += d * d
    var = tl.sum(_var, axis=0) / N
    tl.store(Y + row, mean)
    tl.store(V + row, var)


def moments(x):
    rows, n = x.shape
    y = torch.zeros(rows)
    v = torch.zeros(rows)
    moments_kernel[(rows,)](x, y, v, x.stride(0), n, BLOCK=16)
    return torch.stack([y, v])
'''

MOMENTS_SCALAR = (
    MOMENTS.replace("_var = tl.zeros([BLOCK], dtype=tl.float32)", "_var = 0.0")
    .replace("_var += d * d", "_var += tl.sum(d * d, axis=0)")
    .replace("tl.sum(_var, axis=0) / N", "_var / N")
)

# The maximum and the sum of exponentials by lanes, for a log-sum-exp.
LOGSUMEXP = HEAD + '''
@triton.jit
def lse_kernel(x_ptr, o_ptr, stride, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, n, BLOCK):
        x = tl.load(x_ptr + row * stride + start + lanes, mask=start + lanes < n, other=float("-inf"))
        best = tl.maximum(best, x)
    top = tl.max(best, 0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        x = tl.load(x_ptr + row * stride + start + lanes, mask=start + lanes < n, other=float("-inf"))
        e = tl.exp(x - top)
        total = total + tl.where(start + lanes < n, e, 0.0)
    tl.store(o_ptr + row, top + tl.log(tl.sum(total, 0)))


def lse(x):
    o = torch.zeros(x.shape[0])
    lse_kernel[(x.shape[0],)](x, o, x.stride(0), x.shape[1], BLOCK=16)
    return o
'''

# A row in one block: the second reduction waits for the first.
NORM_BLOCK = HEAD + '''
@triton.jit
def norm_block_kernel(X, Y, V, stride, N, CENTRED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(X + row * stride + cols, mask=cols < N, other=0.0).to(tl.float32)
    if CENTRED:
        mean = tl.sum(x, axis=0) / N
        tl.store(Y + row, mean)
        xbar = tl.where(cols < N, x - mean, 0.0)
        var = tl.sum(xbar * xbar, axis=0) / N
    else:
        var = tl.sum(x * x, axis=0) / N
    tl.store(V + row, var)


def norm_block(x):
    rows, n = x.shape
    y = torch.zeros(rows)
    v = torch.zeros(rows)
    norm_block_kernel[(rows,)](x, y, v, x.stride(0), n, True, BLOCK=triton.next_power_of_2(n))
    return torch.stack([y, v])
'''

# The same without a mask: lanes beyond the row count too, in the parent and so in the child.
NORM_LANES = NORM_BLOCK.replace("        xbar = tl.where(cols < N, x - mean, 0.0)\n", "").replace(
    "tl.sum(xbar * xbar, axis=0)", "tl.sum((x - mean) * (x - mean), axis=0)"
)

LSE_BLOCK = HEAD + '''
@triton.jit
def lse_block_kernel(x_ptr, o_ptr, stride, n, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + cols, mask=cols < n, other=-float("inf")).to(tl.float32) * scale
    top = tl.max(x, 0)
    total = tl.log(tl.sum(tl.exp(x - top), 0)) + top
    tl.store(o_ptr + row, total)


def lse_block(x):
    o = torch.zeros(x.shape[0])
    lse_block_kernel[(x.shape[0],)](x, o, x.stride(0), x.shape[1], 1.0, BLOCK=triton.next_power_of_2(x.shape[1]))
    return o
'''

SUMS = HEAD + '''
@triton.jit
def sums_kernel(x_ptr, o_ptr, n, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + cols, mask=cols < n, other=0.0)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < n, other=0.0)
        squares += x * x
    tl.store(o_ptr, tl.sum(total, 0))
    tl.store(o_ptr + 1, tl.sum(squares, 0))


def sums(x):
    o = torch.zeros(2)
    sums_kernel[(1,)](x, o, x.numel(), BLOCK=16)
    return o
'''

REPEAT = HEAD + '''
@triton.jit
def repeat_kernel(x_ptr, w_ptr, o_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.exp(tl.load(x_ptr + offs, mask=offs < n, other=0.0))
    places = x_ptr + offs
    z = tl.load(places, offs < n, 0.0) * 2
    w = tl.load(w_ptr + offs, mask=offs < n)
    tl.store(o_ptr + offs, y + z + w + tl.load(w_ptr + offs, mask=offs < n), mask=offs < n)
    tl.store(o_ptr + n + offs, tl.load(w_ptr + offs, mask=offs < n), mask=offs < n)


def repeat(x, w):
    o = torch.zeros(2 * x.numel())
    repeat_kernel[(triton.cdiv(x.numel(), 16),)](x, w, o, x.numel(), BLOCK=16)
    return o
'''

SCALED = HEAD + '''
@triton.jit
def scaled_kernel(x_ptr, s_ptr, o_ptr, stride, n, rows, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        place = x_ptr + row * stride
        scale = tl.load(s_ptr + row, mask=row < rows, other=1.0).to(tl.float32)
        cols = start + lanes
        total += tl.load(place + cols, mask=cols < n, other=0.0) * scale
    tl.store(o_ptr + row, tl.sum(total, 0))


def scaled(x, s):
    o = torch.zeros(x.shape[0])
    scaled_kernel[(x.shape[0],)](x, s, o, x.stride(0), x.shape[1], x.shape[0], BLOCK=16)
    return o
'''

_WIDE = "torch.randn(3, {n}) + 1000 * torch.arange(3.)[:, None]"
_HARD = (
    "torch.full((2, 40), float('-inf'))",
    "torch.cat([torch.full((2, 20), float('-inf')), torch.randn(2, 20)], 1)",
    "torch.cat([torch.randn(2, 20), torch.full((2, 20), float('-inf'))], 1)",
    "torch.cat([torch.randn(2, 20), torch.full((2, 3), float('inf')), torch.randn(2, 20)], 1)",
    "torch.cat([torch.randn(2, 20), torch.full((2, 3), float('nan')), torch.randn(2, 20)], 1)",
    "torch.randn(2, 40).sort(1).values * 300",
)
_ROWS = [_WIDE.format(n=n) for n in (0, 1, 15, 16, 17, 48, 50)] + list(_HARD)
# Around the point from which a row is summed up the parent's way, and far beyond it.
_FAR = [f"torch.randn(3, 33) + {far}" for far in (0, 1.9, 2.1, 7, 9)] + ["torch.zeros(2, 9)", "torch.full((2, 9), 3e18)"]
_PLAIN = [f"torch.randn(2, {n})" for n in (0, 1, 255, 256, 257, 700)]
CALLS: dict[str, tuple[str, list[str]]] = {
    **{name: CASES[name] for name in ("layer_norm", "grouped", "offset_loop", "helper", "add")},
    "softmax": (SOFTMAX, [f"softmax({x})" for x in (*_PLAIN, *_HARD)]),
    "matmul_bias_gelu": (TILED_2D, CASES["matmul_bias_gelu"][1]),
    "moments": (MOMENTS, [f"moments({x})" for x in _ROWS]),
    "moments_scalar": (MOMENTS_SCALAR, [f"moments({x})" for x in _ROWS]),
    "logsumexp": (LOGSUMEXP, [f"lse({x})" for x in _ROWS]),
    "norm_block": (NORM_BLOCK, [f"norm_block({x})" for x in (*_ROWS[1:], *_FAR)]),
    "norm_lanes": (NORM_LANES, [f"norm_block({x})" for x in (*_ROWS[1:7], *_FAR)]),
    "lse_block": (LSE_BLOCK, [f"lse_block({x})" for x in (*_ROWS[1:], *_FAR, "torch.randn(2, 40) - 20")]),
    "sums": (SUMS, [f"sums(torch.randn({n}))" for n in (0, 1, 16, 50)]),
    "repeat": (REPEAT, [f"repeat(torch.randn({n}), torch.randn({n}))" for n in (1, 16, 50)]),
    "scaled": (SCALED, [f"scaled(torch.randn(3, {n}), torch.randn(3))" for n in (0, 1, 16, 50)]),
}
