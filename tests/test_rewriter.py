"""The built-in rewriter: every family on the examples and on kernels of the common shapes, and what must never happen.

The sources in `rewriter_cases.py` are read as text by the rewriter. Only `semantics` runs them: parents and children
together, in one process with Triton's interpreter, on shapes at the edges of a block.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rewriter_cases import (
    ADD,
    AUTOTUNED,
    CASES,
    GROUPED,
    HELPER,
    LAYER_NORM,
    MATMUL,
    OFFSET_LOOP,
    PLAIN_1D,
    PREPARE,
    ROOT,
    RUNNER,
    SOFTMAX,
    mutated,
)

from kernelband.candidate import normal_form
from kernelband.strategies import CATALOGUE
from kernelband.writers import rewriter
from kernelband.writers.rewriter import FAMILIES, Move, moves, reasons

# The families that this file is about; the others have files of their own (test_rules_*.py).
HERE = {"block_sizes", "launch_params", "program_order", "tail_mask"}


def tails(source: str) -> list[Move]:
    return [move for move in moves(source, "vectorization") if move.family == "tail_mask"]


def descriptions(source: str, family: str) -> list[str]:
    return [move.description for move in moves(source) if move.family == family]


def added(parent: str, child: str) -> set[str]:
    return {line.strip() for line in child.splitlines()} - {line.strip() for line in parent.splitlines()}


def signatures(source: str) -> list[str]:
    """Every function that is no kernel, with its arguments and defaults."""
    return [
        f"{node.name}({ast.unparse(node.args)})"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and not any("jit" in ast.unparse(mark) for mark in node.decorator_list)
    ]


def check_children(source: str, strategy: str | None = None) -> list[Move]:
    """What holds for the children of any source whatever."""
    found = moves(source, strategy)
    forms = [normal_form(move.source) for move in found]
    assert len(set(forms)) == len(forms)
    assert normal_form(source) not in forms
    for move in found:
        assert signatures(move.source) == signatures(source)
        assert "\n" not in move.description
        assert strategy in (None, move.strategy)
    return found


# --- the contract -----------------------------------------------------------------------------------------------


def test_families_have_a_name_a_strategy_and_a_precondition_in_words():
    assert {(rule.name, rule.strategy) for rule in FAMILIES} == {
        ("block_sizes", "tiling"),
        ("whole_row", "tiling"),
        ("rows_per_program", "tiling"),
        ("launch_params", "pipeline"),
        ("autotune", "pipeline"),
        ("loop_range", "pipeline"),
        ("program_order", "reordering"),
        ("persistent", "reordering"),
        ("tail_mask", "vectorization"),
        ("online", "fusion"),
        ("math", "vectorization"),
        ("hoist", "vectorization"),
        ("cache_hints", "access_layout"),
        ("hints", "vectorization"),
    }
    assert {rule.strategy for rule in FAMILIES} <= CATALOGUE.keys()
    assert all(" " in rule.precondition for rule in FAMILIES)


@pytest.mark.parametrize("name", CASES)
def test_a_family_either_makes_children_or_says_why_not(name):
    source = CASES[name][0]
    found = check_children(source)
    rewriter._read.cache_clear()
    assert found == moves(source)
    applied = {move.family for move in found}
    refused = reasons(source)
    assert applied | refused.keys() == {rule.name for rule in FAMILIES}
    assert not applied & refused.keys()
    assert all(" " in words for words in refused.values())


def test_a_strategy_restricts_the_moves():
    for strategy in CATALOGUE:
        assert moves(MATMUL, strategy) == [move for move in moves(MATMUL) if move.strategy == strategy]
    assert {move.family for move in check_children(MATMUL, "tiling")} == {"block_sizes"}
    assert moves(MATMUL, "fusion") == []


@pytest.mark.parametrize("source", ["def f(:\n", "x = (", "\x00", "if True:\n\tx\n        y\n", "(" * 500 + ")" * 500])
def test_a_source_that_cannot_be_parsed_has_no_moves_and_that_reason(source):
    assert moves(source) == []
    assert all("cannot be parsed" in words for words in reasons(source).values())
    normal_form(source)


def test_a_module_without_kernels_has_no_moves():
    assert moves("import torch\n\ndef f(x):\n    return x\n") == []
    assert "no function decorated with triton.jit" in reasons("x = 1\n")["tail_mask"]
    assert moves(ADD.replace("@triton.jit", "@torch.jit.script")) == []


def test_the_source_is_never_executed(tmp_path):
    trap = tmp_path / "trap"
    source = f"open({str(trap)!r}, 'w').write('ran')\n" + ADD
    assert moves(source) and not trap.exists()


def test_normal_form_ignores_layout_comments_and_doc_strings_only():
    one = 'def f(x):\n    """Doc."""\n    return (x +  1)  # add\n'
    assert normal_form(one) == normal_form("def f(x): return x + 1")
    assert normal_form(one) != normal_form("def f(x): return x + 2")
    assert normal_form('def f():\n    """only"""\n') == normal_form("def f(): pass")


def test_untouched_code_keeps_its_layout_and_comments():
    for move in moves(LAYER_NORM) + moves(MATMUL):
        if move.family not in HERE:
            continue
        parent = LAYER_NORM if "norm_kernel" in move.source else MATMUL
        gone = set(parent.splitlines()) - set(move.source.splitlines())
        assert len(gone) <= 2, (move.description, gone)


# --- block sizes --------------------------------------------------------------------------------------------------


def test_tile_sizes_change_alone_and_for_products_jointly():
    assert descriptions(SOFTMAX, "block_sizes") == [
        f"BLOCK 256 -> {size} in softmax_kernel" for size in (512, 128, 1024, 64, 2048)
    ]
    found = descriptions(MATMUL, "block_sizes")
    assert "BLOCK_K 32 -> 64 in matmul_bias_gelu_kernel" in found
    assert "BLOCK_M 64 -> 128, BLOCK_N 64 -> 128 in matmul_bias_gelu_kernel" in found
    assert "BLOCK_M 64 -> 128, BLOCK_N 64 -> 256, BLOCK_K 32 -> 64 in matmul_bias_gelu_kernel" in found
    assert not any(f"-> {size}" in text for text in found for size in (8, 512, 1024))
    one_for_both = MATMUL.replace("BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N", "BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_M")
    found = descriptions(one_for_both, "block_sizes")
    assert "BLOCK_M/BLOCK_N 64 -> 128 in matmul_bias_gelu_kernel" in found
    assert not any("BLOCK_M/BLOCK_N 64 -> 256" in text for text in found)  # a block of 256 x 256 does not fit


def test_a_tuple_assignment_is_changed_in_place():
    child = next(m for m in moves(MATMUL) if m.description.startswith("BLOCK_N 64 -> 128 in"))
    assert added(MATMUL, child.source) == {"BLOCK_M, BLOCK_N, BLOCK_K = 64, 128, 32"}


def test_a_literal_in_the_grid_moves_with_the_launch_when_it_is_the_only_one():
    child = next(m for m in moves(ADD) if m.description == "BLOCK 64 -> 128 in add_kernel")
    line = "add_kernel[(triton.cdiv(n, 128),)](x, y, o, n, BLOCK=128)  # a comment that stays"
    assert added(ADD, child.source) == {line}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("triton.cdiv(n, 64)", "(n + 63) // 64", "spells BLOCK as 63"),
        ("triton.cdiv(n, 64)", "blocks(n)", "does not follow BLOCK"),
        ("triton.cdiv(n, 64)", "n * 64", "cannot be tied"),
        ("BLOCK=64", "BLOCK=triton.next_power_of_2(n)", "computed"),
        ("BLOCK=64", "BLOCK=48", "not a power of two"),
        ("BLOCK=64", "**options", "**kwargs"),
        ("pid * BLOCK + tl.arange", "pid * n + tl.arange", "covers a whole axis"),
        ("def add(x, y):", "def add(x, y, BLOCK=64):", "signature is frozen"),
    ],
)
def test_a_tile_size_that_cannot_follow_is_declined_in_words(old, new, words):
    source = ADD.replace(old, new)
    if old.startswith("def"):
        source = source.replace("BLOCK=64)  #", "BLOCK=BLOCK)  #")
    assert source != ADD
    assert words in reasons(source)["block_sizes"]


def test_two_tiles_of_one_size_in_a_spelled_grid_are_ambiguous():
    source = MATMUL.replace("    BLOCK_M, BLOCK_N, BLOCK_K = 64, 64, 32\n", "")
    source = source.replace("BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K", "BLOCK_M=64, BLOCK_N=64, BLOCK_K=32")
    source = source.replace("(M, BLOCK_M), triton.cdiv(N, BLOCK_N)", "(M, 64), triton.cdiv(N, 64)")
    found = descriptions(source, "block_sizes")
    assert found and all(text.startswith("BLOCK_K") for text in found)


def test_a_module_constant_and_a_kernel_default_are_knobs():
    assert "SIZE 32 -> 64 in double_kernel" in descriptions(HELPER, "block_sizes")
    by_default = HELPER.replace(", x.numel(), BLOCK)", ", x.numel())").replace("x.numel(), BLOCK)", "x.numel(), 32)")
    child = next(m for m in moves(by_default) if m.description == "SIZE 32 -> 64 in double_kernel")
    assert "def double_kernel(x_ptr, o_ptr, n, SIZE: tl.constexpr = 64):" in child.source
    assert "triton.cdiv(x.numel(), 64)" in child.source


def test_autotuned_kernels_are_left_to_their_configs():
    why = reasons(AUTOTUNED)
    assert "triton.autotune config" in why["block_sizes"]
    assert "is autotuned" in why["launch_params"]


# --- launch parameters --------------------------------------------------------------------------------------------


def test_launch_options_are_replaced_or_added():
    assert "num_warps 2 -> 8 in norm_kernel" in descriptions(LAYER_NORM, "launch_params")
    assert "num_stages 3 -> 4 in norm_kernel" in descriptions(LAYER_NORM, "launch_params")
    stages = next(m for m in moves(LAYER_NORM) if m.description.startswith("num_stages 3 -> 4"))
    assert "            num_warps=2,\n            num_stages=4,\n        )" in stages.source
    child = next(m for m in moves(ADD) if m.description == "num_warps 4 -> 8 in add_kernel")
    assert "BLOCK=64, num_warps=8)  # a comment that stays" in child.source
    without = LAYER_NORM.replace("            num_warps=2,\n", "")
    child = next(m for m in moves(without) if m.description.startswith("num_warps 4 -> 8"))
    assert "BLOCK_SIZE=BLOCK_SIZE,  # lanes\n            num_warps=8,\n        )" in child.source


def test_stages_need_a_loop_and_each_launch_stands_alone():
    assert not any("num_stages" in text for text in descriptions(ADD, "launch_params"))
    twice = ADD + "\n\ndef again(x, o, n):\n    add_kernel[(triton.cdiv(n, 32),)](x, x, o, n, BLOCK=32, num_warps=1)\n"
    found = descriptions(twice, "launch_params")
    assert "num_warps 4 -> 8 in add_kernel (launch 1 of 2)" in found
    assert "num_warps 1 -> 8 in add_kernel (launch 2 of 2)" in found


# --- program order ------------------------------------------------------------------------------------------------


def test_a_two_dimensional_grid_is_grouped():
    found = descriptions(MATMUL, "program_order")
    assert found == [f"programs of matmul_bias_gelu_kernel in groups of {n} along pid_m" for n in (8, 4, 16)]
    child = moves(MATMUL, "reordering")[0].source
    regrouped = descriptions(child, "program_order")
    assert regrouped == [f"GROUP_ROWS 8 -> {n} in matmul_bias_gelu_kernel" for n in (4, 16, 1)]


def test_a_split_one_dimensional_grid_is_grouped_and_a_group_size_is_changed():
    assert len(descriptions(PLAIN_1D, "program_order")) == 3
    assert descriptions(GROUPED, "program_order") == [f"GROUP_SIZE_M 2 -> {n} in grouped_kernel" for n in (8, 4, 16, 1)]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("    rows = pid_m", "    count = tl.num_programs(1)\n    rows = pid_m", "num_programs"),
        ("    rows = pid_m", "    old = tl.atomic_add(c_ptr, 1)\n    rows = pid_m", "atomics"),
        ("    pid_n = tl.program_id(1)", "    x = pid_m + 1\n    pid_n = tl.program_id(1)", "before both"),
        ("    pid_n = tl.program_id(1)", "    pid_n = tl.program_id(1)\n    pid_n += 0", "each assigned once"),
    ],
)
def test_an_order_that_may_matter_is_kept(old, new, words):
    assert words in reasons(MATMUL.replace(old, new))["program_order"]


def test_an_elementwise_kernel_gains_nothing_from_order():
    assert "program_order" in reasons(ADD)
    two = ADD.replace("pid = tl.program_id(axis=0)", "pid = tl.program_id(0)\n    other = tl.program_id(axis=1)")
    assert "no tl.dot" in reasons(two)["program_order"]


# --- mask only in the tail ----------------------------------------------------------------------------------------


def test_each_loop_alone_and_all_together():
    assert descriptions(SOFTMAX, "tail_mask") == [
        *(f"mask only in the tail of the loop over start ({n} of 3) in softmax_kernel" for n in (1, 2, 3)),
        "mask only in the tail of 3 loops in softmax_kernel",
    ]
    child = tails(SOFTMAX)[-1].source
    assert child.count("tl.load(x_row + cols)") == 3
    assert child.count("mask = cols < n_cols") == 3
    assert "tl.store(y_row + cols, y)\n" in child


def test_other_conditions_stay_and_true_branches_are_taken():
    child = tails(MATMUL)[0].source
    assert "a = tl.load(a_ptrs, mask=rows[:, None] < M, other=0.0)" in child
    child = tails(LAYER_NORM)[-1].source
    assert "x = 1.0 * (x - mean)\n" in child
    assert "a = tl.load(X + off + lanes)\n" in child
    child = tails(OFFSET_LOOP)[0].source
    assert "mask = rows[:, None] < w\n" in child
    assert "full_end = lo + max(hi - lo, 0) // BLOCK * BLOCK" in child


def test_a_split_loop_is_not_split_again():
    for source in (SOFTMAX, LAYER_NORM, GROUPED, OFFSET_LOOP):
        child = tails(source)[-1].source
        assert tails(child) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("cols < hi", "cols <= hi"),
        ("cols < hi", "cols + 1 < hi"),
        ("cols < hi", "cols < w"),
        ("start + tl.arange(0, BLOCK)", "start + tl.arange(0, ROWS)"),
        ("start + tl.arange(0, BLOCK)", "start * 2 + tl.arange(0, BLOCK)"),
        ("        inside = cols < hi\n", "        cols += 1\n        inside = cols < hi\n"),
        ("        inside = cols < hi\n", "        inside = cols < hi\n        hi += 0\n"),
        ("        inside = cols < hi\n", "        start += 1\n        inside = cols < hi\n"),
        ("range(lo, hi, BLOCK)", "tl.static_range(lo, hi, BLOCK)"),
        ("range(lo, hi, BLOCK)", "range(hi, lo, -BLOCK)"),
    ],
)
def test_a_condition_that_is_not_the_bound_is_left_alone(old, new):
    source = OFFSET_LOOP.replace(old, new)
    assert source != OFFSET_LOOP
    assert tails(source) == []
    assert "tail_mask" in reasons(source)


def test_a_mask_with_another_use_keeps_its_definition():
    source = SOFTMAX.replace("y = tl.exp(x - row_max) / row_sum", "y = tl.exp(x - row_max) / row_sum * mask")
    child = tails(source)[2].source
    assert child.count("mask = cols < n_cols") == source.count("mask = cols < n_cols") + 1


# --- children compute what their parents compute --------------------------------------------------------------------

@pytest.fixture(scope="module")
def semantics(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("rewriter")
    jobs = []
    for name, (source, calls) in CASES.items():
        parent = folder / f"{name}.py"
        parent.write_text(source)
        every = moves(source)
        found = [move for move in every if move.family in HERE]
        count = len(found)
        # children of children: the second step starts from what the first wrote
        first = {move.family: move for move in every if move.family not in ("launch_params", "cache_hints", "loop_range")}
        found += [m for i, other in enumerate(first.values()) for m in moves(other.source)[i % 7 :: 29]]
        for index, move in enumerate(found):
            if move.family == "launch_params" and index % 4:  # the interpreter ignores these; a sample runs at all
                continue
            child = folder / f"{name}_{index}.py"
            child.write_text(move.source)
            exact = move.family != "block_sizes" and index < count
            # of grandchildren the call with a part left over says most
            job = {"parent": str(parent), "child": str(child), "calls": calls if index < count else calls[-1:], "exact": exact}
            jobs.append({**job, "description": f"{name}: {move.description}"})
    (folder / "jobs.json").write_text(json.dumps(jobs))
    (folder / "runner.py").write_text(PREPARE + RUNNER)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(folder / "runner.py"), str(folder / "jobs.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert "RESULT" in done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout.split("RESULT")[1])


def test_every_child_computes_what_its_parent_computes(semantics):
    assert semantics["runs"] > 80
    assert semantics["bad"] == []


# --- whatever the source ------------------------------------------------------------------------------------------

@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(mutated(), st.sampled_from(sorted({rule.strategy for rule in FAMILIES})))
def test_moves_never_raise_and_children_are_always_well_formed(source, strategy):
    for move in check_children(source, strategy):
        ast.parse(move.source)
    assert set(reasons(source)) <= {rule.name for rule in FAMILIES}
