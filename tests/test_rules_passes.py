"""The families about passes and loops: whole_row, online, hoist.

Before and after as text, words where a family must not apply, and what the children compute: parents and children run
together in Triton's interpreter on shapes at the edges of a block, empty rows and values that no sum survives included.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from rewriter_cases import AUTOTUNED, GROUPED, LAYER_NORM, MATMUL, OFFSET_LOOP, SOFTMAX, compared
from rules_passes_cases import (
    CALLS,
    LOGSUMEXP,
    LSE_BLOCK,
    MOMENTS,
    MOMENTS_SCALAR,
    NORM_BLOCK,
    NORM_LANES,
    SCALED,
    SUMS,
)

from kernelband.evaluate.compile import Compiler, Target
from kernelband.writers.rewriter import hoist, online, whole_row
from kernelband.writers.rewriter.kernels import Source
from kernelband.writers.rewriter.rule import Rule

RULES = (whole_row.RULE, online.RULE, hoist.RULE)


def made(rule: Rule, source: str) -> list[tuple[str, str]]:
    children, words = rule.apply(Source(source))
    assert children or words
    assert rule.apply(Source(source)) == (children, words)
    for description, child in children:
        ast.parse(child)
        assert child != source and "\n" not in description
    return children


def only(rule: Rule, source: str) -> str:
    ((_, child),) = made(rule, source)
    return child


def words(rule: Rule, source: str) -> str:
    children, found = rule.apply(Source(source))
    assert children == []
    return "; ".join(found)


def added(parent: str, child: str) -> list[str]:
    old = {line.strip() for line in parent.splitlines()}
    return [line.strip() for line in child.splitlines() if line.strip() not in old]


# --- whole_row ----------------------------------------------------------------------------------------------------


def test_a_row_that_fits_becomes_one_block_and_is_loaded_once():
    ((description, child),) = made(whole_row.RULE, SOFTMAX)
    assert description == "rows of up to 65536 as one block of BLOCK = next_power_of_2(cols) in softmax_kernel"
    new = child.split("def softmax_kernel_row")[1].split("def softmax(")[0]
    assert new.count("tl.load") == 1 and "for " not in new
    assert child.split("def softmax_kernel_row")[0].strip().startswith(SOFTMAX.split("def softmax(")[0].strip())
    assert "    if 0 < cols <= 65536:\n        softmax_kernel_row[(rows,)](" in child
    assert "    else:\n        softmax_kernel[(rows,)](x, y, x.stride(0), y.stride(0), cols, BLOCK=256)" in child
    assert "already" in words(whole_row.RULE, child)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("x_ptr + row * x_row_stride", "x_ptr + row * BLOCK", "used for more than the loops"),
        ("tl.load(x_row + cols, mask=mask, other", "tl.load(x_row + cols, mask=cols <= n_cols, other", "not masked by"),
        ("tl.store(y_row + cols, y, mask=mask)", "tl.store(y_row + cols, y)", "not masked by"),
        ("tl.store(y_row + cols, y, mask=mask)", "tl.atomic_add(y_row + cols, y, mask=mask)", "may touch memory"),
        ('mask=mask, other=-float("inf")', "mask=mask", "undefined"),
        ("range(0, n_cols, BLOCK)", "range(BLOCK, n_cols, BLOCK)", "no loop over the blocks"),
        ("    row_max = -float", "    n_cols += 0\n    row_max = -float", "no argument of the kernel"),
        ("n_cols, BLOCK:", "n_cols: tl.int64, BLOCK:", "type of its own"),
        (", cols, BLOCK=256)", ", cols * 1, BLOCK=256)", "is computed in the launch"),
        ("    softmax_kernel[(rows,)](x", "    k = softmax_kernel[(rows,)](x", "larger statement"),
        ("softmax_kernel[(rows,)]", 'softmax_kernel[lambda m: (rows * 256 // m["BLOCK"],)]', "grid depends"),
        ("    row_sum = 0.0", "    tl.store(y_row + tl.arange(0, BLOCK), 0.0)\n    row_sum = 0.0", "outside of its loops"),
        ("@triton.jit", "@triton.heuristics({})\n@triton.jit", "chosen by its decorators"),
    ],
)
def test_a_row_stays_in_blocks(old, new, why):
    source = SOFTMAX.replace(old, new)
    assert source != SOFTMAX
    assert why in words(whole_row.RULE, source)


def test_a_product_and_an_autotuned_kernel_have_no_whole_rows():
    assert "multiplies matrices" in words(whole_row.RULE, MATMUL)
    assert "no loop" in words(whole_row.RULE, AUTOTUNED)


# --- online -------------------------------------------------------------------------------------------------------


def test_maximum_and_sum_of_exponentials_in_one_pass():
    ((description, child),) = made(online.RULE, SOFTMAX)
    assert description == "maximum row_max and sum row_sum of exponentials in one pass over start in softmax_kernel"
    assert child.count("for start in") == 2 and child.count("tl.load") == 2
    assert added(SOFTMAX, child) == [
        "new_max = tl.maximum(row_max, tl.max(x, axis=0))",
        'base = tl.where(new_max == float("-inf"), 0.0, new_max)',
        "row_sum = row_sum * tl.exp(row_max - base) + tl.sum(tl.exp(x - base), axis=0)",
        "row_max = new_max",
        'row_sum = tl.where((row_max == float("-inf")) & (0 < n_cols), float("nan"), row_sum)',
    ]
    assert online.RULE.apply(Source(child))[0] == []


def test_maximum_by_lanes():
    child = only(online.RULE, LOGSUMEXP)
    assert child.count("for start in") == 1 and child.count("tl.load") == 1
    assert "total = tl.where(best == top, total, total * tl.exp(best - top))" in child


def test_mean_and_squares_in_one_pass_by_lanes_and_by_blocks():
    child = only(online.RULE, MOMENTS)
    assert child.count("for off in") == 1 and child.count("tl.load") == 1
    assert "_var += tl.where(cols < N, gap * (x - running_mean), 0.0)" in child
    child = only(online.RULE, MOMENTS_SCALAR)
    assert child.count("for off in") == 1 and child.count("tl.load") == 1
    assert "running_mean += gap * block_count / both" in child


def test_two_reductions_of_one_block_wait_for_each_other_no_more():
    ((description, child),) = made(online.RULE, NORM_BLOCK)
    assert description == "squares var in one pass with the mean mean in norm_block_kernel"
    assert added(NORM_BLOCK, child) == [
        "kept = tl.where(cols < N, x, 0.0)",
        "kept_count = tl.sum(tl.where(cols < N, tl.zeros_like(x) + 1.0, 0.0), axis=0)",
        "squares = tl.sum(kept * kept, axis=0)",
        "squares = squares - mean * (2.0 * tl.sum(kept, axis=0) - mean * kept_count)",
        "if not (mean * mean * kept_count <= 4.0 * squares):",
        "squares = tl.sum(xbar * xbar, axis=0).to(squares.dtype)",
        "var = squares / N",
    ]
    assert "kept = x\n" in only(online.RULE, NORM_LANES)
    child = only(online.RULE, LSE_BLOCK)
    assert added(LSE_BLOCK, child) == [
        "powers = tl.sum(tl.exp(x), axis=0) * tl.exp(0.0 - top)",
        "if not (tl.abs(top) <= 8.0):",
        "powers = tl.sum(tl.exp(x - top), 0).to(powers.dtype)",
        "total = tl.log(powers) + top",
    ]
    for source in (NORM_BLOCK, NORM_LANES, LSE_BLOCK):
        assert online.RULE.apply(Source(only(online.RULE, source)))[0] == []


@pytest.mark.parametrize(
    ("source", "old", "new"),
    [
        (NORM_BLOCK, "        tl.store(Y + row, mean)\n", "        x = x + 1.0\n"),
        (NORM_BLOCK, "        tl.store(Y + row, mean)\n", "        mean = mean + 1.0\n"),
        (NORM_BLOCK, "        tl.store(Y + row, mean)\n", "        if N > 5:\n            mean = 0.0\n"),
        (NORM_BLOCK, "x - mean, 0.0)", "x - mean, 1.0)"),
        (NORM_BLOCK, "xbar * xbar", "xbar * x"),
        (NORM_BLOCK, "tl.sum(x, axis=0) / N", "tl.sum(x + 1.0, axis=0) / N"),
        (NORM_BLOCK, "tl.sum(x, axis=0) / N", "tl.max(x, axis=0) / N"),
        (NORM_BLOCK, "cols = tl.arange(0, BLOCK)", "cols = tl.arange(0, BLOCK)[:, None]"),
        (NORM_BLOCK, "xbar * xbar, axis=0", "xbar * xbar, axis=1"),
        (LSE_BLOCK, "tl.max(x, 0)", "tl.min(x, 0)"),
        (LSE_BLOCK, "tl.exp(x - top), 0", "tl.exp(x + top), 0"),
        (LSE_BLOCK, "tl.exp(x - top), 0", "tl.exp(x - top), 1"),
        (LSE_BLOCK, "top = tl.max(x, 0)\n", "top = tl.max(x, 0)\n    x = x * 2.0\n"),
    ],
)
def test_reductions_of_one_block_that_stay(source, old, new):
    changed = source.replace(old, new)
    assert changed != source
    assert online.RULE.apply(Source(changed))[0] == []


def test_reductions_that_do_not_need_each_other_are_joined():
    ((description, child),) = made(online.RULE, SUMS)
    assert description.startswith("two reductions in one pass")
    assert child.count("for start in") == 1 and child.count("tl.load") == 1


@pytest.mark.parametrize(
    ("source", "old", "new", "why"),
    [
        (SOFTMAX, "row_sum = 0.0", "row_sum = 1.0", "starts at zero"),
        (SOFTMAX, "tl.sum(tl.exp(x - row_max), axis=0)", "tl.sum(tl.exp(x - row_max) + 1, axis=0)", "plain sum"),
        (SOFTMAX, "tl.sum(tl.exp(x - row_max), axis=0)", "tl.sum(tl.exp(x * row_max), axis=0)", "does not take"),
        (SOFTMAX, "tl.sum(tl.exp(x - row_max), axis=0)", "tl.sum(tl.exp(x - row_max) * row_max, axis=0)", "more than once"),
        (SOFTMAX, "row_max = tl.maximum(row_max", "row_max = tl.minimum(row_max", "find a maximum"),
        (SOFTMAX, "    row_sum = 0.0", "    tl.store(y_row, row_max)\n    row_sum = 0.0", "more than plain assignments"),
        (SUMS, "squares += x * x", "squares += x * x + 0 * tl.sum(total, 0) + cols", None),
        (SUMS, "x = tl.load(x_ptr + cols", "x = tl.load(o_ptr + cols", "different data"),
        (MOMENTS, "_var += d * d", "_var += d * d * d", "not a sum of squares"),
        (MOMENTS, "tl.where(cols < N, x - mean, 0.0)", "tl.where(cols < N, x - mean, 1.0)", "more than a difference"),
        (MOMENTS, "mean = tl.sum(_mean, axis=0) / N", "mean = tl.sum(_mean, axis=0) / N\n    X += 1", "not understood"),
        (MOMENTS_SCALAR, "tl.where(cols < N, x - mean, 0.0)", "x - mean", "not masked"),
    ],
)
def test_passes_that_stay_apart(source, old, new, why):
    changed = source.replace(old, new)
    assert changed != source
    assert (why or "") in words(online.RULE, changed)


# --- hoist --------------------------------------------------------------------------------------------------------


def test_invariant_arithmetic_moves_before_the_loop():
    ((description, child),) = made(hoist.RULE, MATMUL)
    assert description == "4 invariants out of the loop over start in matmul_bias_gelu_kernel"
    assert added(MATMUL, child)[:4] == [
        "invariant = a_ptr + rows[:, None] * stride_am",
        "invariant_2 = cols[None, :] * stride_bn",
        "invariant_3 = rows[:, None] < M",
        "invariant_4 = cols[None, :] < N",
    ]
    assert "a_ptrs = invariant + ks[None, :] * stride_ak" in child
    assert hoist.RULE.apply(Source(child))[0] == []


def test_an_invariant_load_is_masked_off_when_the_loop_has_no_pass():
    first, second = (child for _, child in made(hoist.RULE, SCALED))
    assert "scale = tl.load" in first.split("for start")[1] and "place = " in first.split("for start")[0]
    guarded = "scale = tl.load(s_ptr + row, mask=(row < rows) & (0 < n), other=1.0).to(tl.float32)"
    assert guarded in second.split("for start")[0]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("        cols = start + lanes\n", "        cols = start + lanes\n        tl.store(o_ptr + row, 0.0)\n"),
        ("tl.load(s_ptr + row, mask", "tl.load(s_ptr + start, mask"),
        ("tl.load(s_ptr + row, mask", "tl.load(s_ptr + row, volatile=True, mask"),
        ("range(0, n, BLOCK)", "range(n, 0, -BLOCK)"),
        ("range(0, n, BLOCK)", "range(0, n, stride)"),
    ],
)
def test_a_load_that_may_change_or_a_loop_of_unknown_direction_stays(old, new):
    source = SCALED.replace(old, new)
    assert source != SCALED
    assert all("loads)" not in text for text, _ in made(hoist.RULE, source))


def test_what_the_compiler_must_see_and_what_changes_stays():
    assert "nothing that is the same" in words(hoist.RULE, SOFTMAX)
    inner = SCALED.replace("place = x_ptr + row * stride", "place = x_ptr + row * stride if n > 5 else x_ptr")
    kept = [child for _, child in made(hoist.RULE, inner)]
    assert all("if n > 5" in child.split("for start")[1] for child in kept)


# --- children compute what their parents compute --------------------------------------------------------------------


@pytest.fixture(scope="module")
def semantics(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("passes")
    jobs = []
    for name, (source, calls) in CALLS.items():
        parent = folder / f"{name}.py"
        parent.write_text(source)
        found = [(rule, *child) for rule in RULES for child in made(rule, source)]
        first = len(found)
        # each family on what another one wrote
        found += [(b, *child) for a, _, text in list(found) for b in RULES if b is not a for child in made(b, text)]
        for index, (rule, text, child_text) in enumerate(found):
            child = folder / f"{name}_{index}.py"
            child.write_text(child_text)
            # the same arithmetic in the same order, but NaN is not equal to itself
            exact = rule is hoist.RULE and index < first and not any("inf" in call for call in calls)
            some = calls if index < first else calls[::3]
            job = {"parent": str(parent), "child": str(child), "calls": some, "exact": exact}
            jobs.append({**job, "description": f"{name}: {text}"})
    return compared(folder, jobs)


def test_every_child_computes_what_its_parent_computes(semantics):
    assert semantics["runs"] >= 20
    assert semantics["bad"] == []


# --- and compile --------------------------------------------------------------------------------------------------


@dataclass
class _Case:
    name: str
    args: list[dict]


def _tensor(*shape: int, dtype: str = "float16") -> dict:
    return {"name": "x", "kind": "tensor", "shape": list(shape), "dtype": dtype, "offset": 0}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory) -> Iterator[Compiler]:
    with Compiler(tmp_path_factory.mktemp("compiled"), timeout_s=60) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "entry", "args", "families"),
    [
        (SOFTMAX, "softmax", [[_tensor(64, 700)], [_tensor(8, 70000, dtype="float32")]], {"whole_row", "online"}),
        (MATMUL, "matmul_bias_gelu", [[_tensor(256, 96), _tensor(96, 128), _tensor(128)]], {"hoist"}),
        (MOMENTS, "moments", [[_tensor(8, 100)], [_tensor(8, 100, dtype="float32")]], {"whole_row", "online"}),
        (MOMENTS_SCALAR, "moments", [[_tensor(8, 100)]], {"whole_row", "online"}),
        (LOGSUMEXP, "lse", [[_tensor(8, 100, dtype="float32")]], {"online", "hoist"}),
        (NORM_BLOCK, "norm_block", [[_tensor(8, 100)]], {"online"}),
        (LSE_BLOCK, "lse_block", [[_tensor(8, 100)]], {"online"}),
        (LAYER_NORM, "norm", [[_tensor(8, 75, dtype="float32"), _tensor(75, dtype="float32"),
                               {"name": "eps", "kind": "scalar", "value": 1e-5}]], set()),
        (SCALED, "scaled", [[_tensor(8, 100, dtype="float32"), _tensor(8, dtype="float32")]], {"hoist"}),
    ],
    ids=["softmax", "matmul", "moments", "moments_scalar", "logsumexp", "norm_block", "lse_block", "layer_norm", "scaled"],
)  # fmt: skip
def test_children_compile_for_hopper(compiler, source, entry, args, families):
    applied = set()
    cases = [_Case(f"case{index}", values) for index, values in enumerate(args)]
    for rule in RULES:
        for text, child in made(rule, source):
            applied.add(rule.name)
            result = compiler.compile(child, entry, cases, Target(arch=90))
            assert result.ok, f"{text}: {result.error}"
    assert families <= applied


def test_what_no_family_knows_is_left_alone():
    for rule in (whole_row.RULE, online.RULE):
        for source in (OFFSET_LOOP, GROUPED):
            assert " " in words(rule, source)
