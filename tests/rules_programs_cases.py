"""Kernels for the tests of autotune, persistent and rows_per_program, as text; and calls of each at the edges."""

from __future__ import annotations

from rewriter_cases import ADD, AUTOTUNED, CASES, GROUPED, HEAD, HELPER, LAYER_NORM, OFFSET_LOOP, SOFTMAX, TILED_2D

TUNED = GROUPED.replace(
    "@triton.jit",
    """CONFIGS = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": 16, "BLOCK_K": k, "GROUP_SIZE_M": 2}, num_warps=4, num_stages=2)
    for m in (16, 32) for k in (16, 32)
]


@triton.autotune(CONFIGS, key=["M", "N", "K"])
@triton.jit""",
).replace("c.stride(0), c.stride(1),\n        BLOCK_M=16, BLOCK_N=16, BLOCK_K=16, GROUP_SIZE_M=2,", "*c.stride(),")
TUNED = TUNED.replace("*c.stride(),", "c.stride(0), c.stride(1),")

EARLY = HEAD + '''
@triton.jit
def gather_kernel(X, IDX, Y, n_cols, sx, sy, BLOCK: tl.constexpr, MORE: tl.constexpr = 1):
    """Row IDX[b] of X, zeros where it is negative."""
    head, batch = tl.program_id(1), tl.program_id(axis=0)
    at = tl.load(IDX + batch)
    cols = tl.arange(0, BLOCK)
    Y += batch.to(tl.int64) * sy + head * BLOCK
    inside = head * BLOCK + cols < n_cols
    if at < 0:
        tl.store(Y + cols, tl.zeros((BLOCK,), dtype=tl.float32), mask=inside)
        return
    if head * BLOCK >= n_cols:
        return
    width: tl.constexpr = BLOCK * MORE
    lanes = tl.arange(0, width)
    x = tl.load(X + at * sx + head * BLOCK + lanes, mask=inside)
    tl.store(Y + lanes, x, mask=inside)
    return


def gather(x, idx):
    y = torch.empty((idx.shape[0], x.shape[1]), dtype=x.dtype)
    if idx.shape[0] == 0:
        return y
    # one program a row and block
    gather_kernel[idx.shape[0], triton.cdiv(x.shape[1], 16) + 1](x, idx, y, x.shape[1], x.stride(0), y.stride(0), 16)
    return y
'''

CUBE = HEAD + '''
@triton.jit
def cube_kernel(x, y, A, B, C):
    k = tl.program_id(2)
    at = (tl.program_id(0) * B + tl.program_id(1)) * C + k
    tl.store(y + at, tl.load(x + at) + 100 * tl.program_id(0) + 10 * tl.program_id(1) + k)


def cube(x):
    y = torch.zeros_like(x)
    a, b, c = x.shape

    def grid(meta):
        return (a, b, c)

    cube_kernel[grid](x, y, a, b, c)
    return y
'''

MINE: dict[str, tuple[str, list[str]]] = {
    "layer_norm": (LAYER_NORM, CASES["layer_norm"][1][1:]),
    "offset_loop": (OFFSET_LOOP, CASES["offset_loop"][1][1:3]),
    "helper": (HELPER.replace("SIZE: tl.constexpr = 32", "SIZE: tl.constexpr"), CASES["helper"][1]),
    "matmul_bias_gelu": (TILED_2D, CASES["matmul_bias_gelu"][1][::2]),
    "add": (ADD, [*CASES["add"][1], "add(torch.randn(0), torch.randn(0))"]),
    "softmax": (SOFTMAX, [f"softmax(torch.randn({m}, {n}))" for m, n in ((1, 5), (9, 260), (3, 0), (0, 4))]),
    "tuned": (TUNED, CASES["grouped"][1][::2]),
    "autotuned": (AUTOTUNED, CASES["add"][1]),
    "early": (EARLY, [f"gather(torch.randn(7, {n}), torch.tensor({rows}))"
                      for n, rows in ((16, "[3, -1, 6]"), (37, "[0, 5, -2, 1, 1]"), (5, "[2]"), (4, "[]"))]),
    "cube": (CUBE, [f"cube(torch.randn({shape}))" for shape in ("1, 1, 1", "3, 4, 5", "2, 0, 3")]),
}  # fmt: skip
