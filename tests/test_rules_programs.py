"""The families autotune, persistent and rows_per_program: what they make, what they leave alone, and that it is right.

Sources are read as text. `semantics` runs parents and children together in Triton's interpreter, as a device of one SM
so that every program has to stride, and an example's children are compiled for sm_90.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from rewriter_cases import (
    ADD,
    GROUPED,
    HELPER,
    MATMUL,
    OFFSET_LOOP,
    PREPARE,
    ROOT,
    RUNNER,
    SOFTMAX,
)
from rules_programs_cases import EARLY, MINE, TUNED

from kernelband.candidate import normal_form
from kernelband.evaluate.compile import Compiler, Target
from kernelband.writers.rewriter import autotune, persistent, rows_per_program
from kernelband.writers.rewriter.kernels import Source
from kernelband.writers.rewriter.rule import Child, Rule

RULES = (autotune.RULE, persistent.RULE, rows_per_program.RULE)

def made(rule: Rule, text: str) -> list[Child]:
    """The children of a source, each with what holds for any child."""
    found = rule.apply(Source(text))[0]
    assert found == rule.apply(Source(text))[0]
    forms = [normal_form(child) for _, child in found]
    assert len({*forms, normal_form(text)}) == len(forms) + 1
    for words, child in found:
        assert "\n" not in words
        assert public(child) == public(text)
    return found


def public(text: str) -> list[str]:
    """Signatures of all functions that are no kernels."""
    return [f"{node.name}({ast.unparse(node.args)})" for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef) and not any("jit" in ast.unparse(m) for m in node.decorator_list)]


def words(rule: Rule, text: str) -> str:
    children, why = rule.apply(Source(text))
    assert not children
    return "; ".join(why)


def new_lines(parent: str, child: str) -> list[str]:
    before = {line.strip() for line in parent.splitlines()}
    return [line.strip() for line in child.splitlines() if line.strip() not in before]


# --- persistent ---------------------------------------------------------------------------------------------------


def test_a_one_dimensional_grid_becomes_a_loop_over_tiles():
    children = made(persistent.RULE, SOFTMAX)
    assert [text for text, _ in children] == [
        f"softmax_kernel strides over its tiles with {each} programs an SM" for each in (4, 1, 8, 2)
    ]
    assert new_lines(SOFTMAX, children[0][1]) == [
        "def softmax_kernel(x_ptr, y_ptr, x_row_stride, y_row_stride, n_cols, BLOCK: tl.constexpr, n_tiles):",
        "for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):",
        "row = tile",
        "n_tiles = rows",
        "sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count",
        "softmax_kernel[(min(n_tiles, sms * 4),)](x, y, x.stride(0), y.stride(0), cols, BLOCK=256, n_tiles=n_tiles)",
    ]


def test_two_axes_are_taken_apart_with_the_first_fastest():
    child = made(persistent.RULE, MATMUL)[1][1]
    assert "        pid_m = (tile % grid_0)\n        pid_n = (tile // grid_0)\n" in child
    assert "    grid_0 = grid[0]\n    n_tiles = grid_0 * grid[1]\n" in child
    assert "matmul_bias_gelu_kernel[(min(n_tiles, sms),)](" in child


def test_an_autotuned_kernel_counts_its_tiles_itself():
    child = made(persistent.RULE, TUNED)[0][1]
    assert "n_tiles = (tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N))" in child
    assert "(min((triton.cdiv(M, META[\"BLOCK_M\"]) * triton.cdiv(N, META[\"BLOCK_N\"])), sms * 4),)" in child
    assert "scm, scn,\n    BLOCK_M: tl.constexpr" in child  # no new parameter


def test_a_default_gives_way_to_the_configs():
    by_default = TUNED.replace("BLOCK_M: tl.constexpr,", "").replace(', GROUP_SIZE_M: "tl.constexpr"',
                               ', GROUP_SIZE_M: "tl.constexpr", BLOCK_M: tl.constexpr = 16')  # fmt: skip
    assert "tl.cdiv(M, BLOCK_M)" in made(persistent.RULE, by_default)[0][1].split("for tile")[0]


def test_early_returns_become_branches_and_changed_parameters_start_anew():
    child = made(persistent.RULE, EARLY)[0][1]
    kernel = child[child.index("def gather_kernel") : child.index("def gather(")]
    assert "return" not in kernel
    assert kernel.index('"""Row') < kernel.index("for tile in")
    assert "        Y_here = Y\n" in kernel
    assert "        else:\n            if not (head * BLOCK >= n_cols):\n                width: tl.constexpr" in kernel
    assert "n_tiles, grid_0, MORE: tl.constexpr = 1):" in kernel
    assert "    # one program a row and block\n    grid_0 = idx.shape[0]\n" in child


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("    mask = offs < n", "    count = tl.num_programs(0)\n    mask = offs < n", "num_programs"),
        ("    mask = offs < n", "    tl.atomic_cas(o_ptr, 0, 1)\n    mask = offs < n", "atomic_cas"),
        ("    mask = offs < n", "    seen = tl.atomic_add(o_ptr, 1)\n    mask = offs < n", "atomic_add"),
        ("    mask = offs < n", "    for i in range(n):\n        if i:\n            return\n    mask = offs < n", "returns"),
        ("    mask = offs < n", "    if n < 0:\n        return\n    pid = pid + 1\n    mask = offs < n", "assigns pid"),
        ("    mask = offs < n", "    BLOCK = 2 * BLOCK\n    mask = offs < n", "assigns its constexpr BLOCK"),
        ("tl.program_id(axis=0)", "tl.program_id(axis=AXIS)", "axis that is not a literal"),
        ("BLOCK=64)  #", "**options)  #", "**kwargs"),
        ("[(triton.cdiv(n, 64),)]", "[blocks(n)]", "not spelled as a tuple"),
        ("[(triton.cdiv(n, 64),)]", '[lambda m: (m["other"],)]', "does not pass"),
        ("    return o", "    later = add_kernel\n    return o", "named elsewhere"),
        ("import torch\n", "from torch import empty_like\n", "needs torch"),
        ("    n = x.numel()", "    n = x.numel()\n    min = max", "hides min"),
        ("    add_kernel[", "    return o, add_kernel[", "middle of an expression"),
    ],
)
def test_a_kernel_that_may_not_stride_is_left_in_words(old, new, why):
    source = ADD.replace(old, new)
    assert source != ADD
    assert why in words(persistent.RULE, source)


def test_a_helper_that_asks_for_the_program_is_left():
    asks = HELPER.replace("    offs = pid * SIZE", "    pid = tl.program_id(0)\n    offs = pid * SIZE", 1)
    assert "helper that asks" in words(persistent.RULE, asks)
    assert "asks for no program id" in words(persistent.RULE, HELPER.replace("tl.program_id(0)", "0"))
    # a new parameter goes before the defaults, which these arguments already reach
    assert "default by position" in words(persistent.RULE, HELPER)
    assert len(made(persistent.RULE, HELPER.replace("SIZE: tl.constexpr = 32", "SIZE: tl.constexpr"))) == 4


# --- rows per program ---------------------------------------------------------------------------------------------


def test_several_rows_a_program():
    children = made(rows_per_program.RULE, SOFTMAX)
    assert [text for text, _ in children] == [f"{n} rows a program in softmax_kernel" for n in (4, 2, 8)]
    assert new_lines(SOFTMAX, children[1][1])[1:] == [
        "row_first = tl.program_id(0) * 2",
        "for row_index in range(row_first, min(row_first + 2, rows_total)):",
        "row = row_index",
        "rows_total = rows",
        "softmax_kernel[(triton.cdiv(rows_total, 2),)]"
        "(x, y, x.stride(0), y.stride(0), cols, BLOCK=256, rows_total=rows_total)",
    ]
    assert "several rows" in words(rows_per_program.RULE, children[0][1])


def test_the_axis_of_the_rows_is_found_and_the_other_stays():
    child = made(rows_per_program.RULE, EARLY)[0][1]
    assert "gather_kernel[(triton.cdiv(rows_total, 4), (triton.cdiv(x.shape[1], 16) + 1))](" in child
    assert "head, batch = tl.program_id(1), tl.cast(row_index, tl.int32)" in child


@pytest.mark.parametrize("source", [ADD, MATMUL, GROUPED, OFFSET_LOOP])
def test_a_tile_is_no_row(source):
    assert "index of rows" in words(rows_per_program.RULE, source)


# --- autotune -----------------------------------------------------------------------------------------------------


def test_a_config_is_frozen_at_the_launch():
    children = dict(made(autotune.RULE, TUNED))
    frozen = [text for text in children if "without autotuning" in text]
    assert len(frozen) == 4
    last = "grouped_kernel without autotuning, at BLOCK_M 32, BLOCK_N 16, BLOCK_K 32, GROUP_SIZE_M 2, num_warps 4, num_stages 2"
    assert frozen[-1] == last
    assert "@triton.autotune" not in children[last]
    call = "BLOCK_M=32,BLOCK_N=16,BLOCK_K=32,GROUP_SIZE_M=2,num_warps=4,num_stages=2"
    assert call in "".join(children[last].split())


def test_configs_are_added_and_pruned():
    children = dict(made(autotune.RULE, TUNED))
    assert [text for text in children if "without" not in text] == [
        "4 more configs of grouped_kernel near config 1, other options",
        "1 more config of grouped_kernel near config 1, other tiles",
        "4 more configs of grouped_kernel near config 3, other options",
        "2 more configs of grouped_kernel near config 3, other tiles",
        "grouped_kernel tuned over the odd half of its 4 configs",
        "grouped_kernel tuned over the even half of its 4 configs",
    ]
    pruned = children["grouped_kernel tuned over the even half of its 4 configs"]
    assert pruned.count("        triton.Config({") == 2 and '"BLOCK_M": 32, "BLOCK_N": 16, "BLOCK_K": 32' in pruned


def test_a_larger_tile_than_any_needs_masks():
    free = TUNED.replace(", mask=offs_k[None, :] < K - k * BLOCK_K, other=0.0", "")
    assert free != TUNED
    texts = "".join(child for text, child in made(autotune.RULE, free) if "other tiles" in text)
    assert '"BLOCK_N": 32' not in texts and '"BLOCK_M": 64' not in texts
    assert '"BLOCK_M": 64' in "".join(child for _, child in made(autotune.RULE, TUNED))


def test_a_kernel_without_configs_gets_some():
    options, tiles = made(autotune.RULE, MATMUL)
    assert options[0] == "matmul_bias_gelu_kernel autotuned over 6 numbers of warps and stages"
    assert tiles[0] == "matmul_bias_gelu_kernel autotuned over 6 sizes of BLOCK_M, BLOCK_N, BLOCK_K"
    assert 'grid = lambda META: (triton.cdiv(M, META["BLOCK_M"]), triton.cdiv(N, META["BLOCK_N"]))' in tiles[1]
    assert "64, 64, 32" not in tiles[1] and 'key=["M", "N", "K"]' in tiles[1]
    child = dict(made(autotune.RULE, ADD))["add_kernel autotuned over 6 sizes of BLOCK"]
    assert 'add_kernel[lambda META: (triton.cdiv(n, META["BLOCK"]),)](x, y, o, n)  # a comment that stays' in child
    by_place = made(autotune.RULE, HELPER.replace("SIZE: tl.constexpr = 32", "SIZE: tl.constexpr, m"
                                                  ).replace("x.numel(), BLOCK)", "x.numel(), BLOCK, 5)"))[1][1]
    assert "(x, o, x.numel(), m=5)" in by_place


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("o = torch.empty_like(x)", "o = x", "not a tensor made fresh"),
        ("def add(x, y):\n    o = torch.empty_like(x)", "def add(x, y, o):", "not a tensor made fresh"),
        ("tl.load(x_ptr + offs, mask=mask)", "tl.load(o_ptr + offs, mask=mask)", "reads o_ptr, which it writes"),
        ("(x, y, o, n", "(x, o.view(-1), o, n", "as y_ptr too"),
        ("    n = x.numel()", "    n, v = x.numel(), o.view(-1)\n    y = v", "as y_ptr too"),
        ("    mask = offs < n", "    tl.atomic_add(o_ptr + offs, 1)\n    mask = offs < n", "atomic_add"),
        ("BLOCK=64)", "BLOCK=64, num_warps=2 * n)", "num_warps is computed"),
        ("@triton.jit", '@triton.heuristics({"EVEN": lambda a: a["n"] % 64 == 0})\n@triton.jit', "heuristics"),
    ],
)
def test_a_kernel_that_may_not_run_twice_is_not_autotuned(old, new, why):
    source = ADD.replace(old, new)
    assert source != ADD
    assert why in words(autotune.RULE, source)


def test_a_size_that_something_else_depends_on_stays():
    for old, new in (("BLOCK=64)", "BLOCK=B)"), ("(triton.cdiv(n, 64),)", "(triton.cdiv(n, B),)")):
        source = ADD.replace("    n = x.numel()", "    n = x.numel()\n    B = 64\n    note = [B]").replace(old, new)
        children, why = autotune.RULE.apply(Source(source))
        assert len(children) == 1 and "only its launch and its grid" in "; ".join(why)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("CONFIGS, key", "make(3), key", "computed (make(3))"),
        ("for m in (16, 32)", "for m in (16, 32) if m", "by a condition"),
        ("num_stages=2)", "num_stages=2, pre_hook=None)", ""),
        ("num_stages=2)", "num_stages=STAGES)", "not literals"),
        ('key=["M", "N", "K"]', 'key=["M"], reset_to_zero=["c_ptr"]', "reset_to_zero"),
        ("    pid_m = first", "    tl.static_assert(BLOCK_K < 32)\n    pid_m = first", "static_assert"),
        ("        a, b, c, M", "        *more, M", "*args"),
    ],
)
def test_configs_that_cannot_be_read_are_left_in_words(old, new, why):
    source = TUNED.replace(old, new)
    assert source != TUNED
    children, found = autotune.RULE.apply(Source(source))
    assert why in "; ".join(found)
    assert bool(why) != any("without autotuning" in text for text, _ in children)


# --- children compute what their parents compute --------------------------------------------------------------------

def step(rule: Rule, text: str) -> list[Child]:
    """Children; of autotuned ones, each configuration in turn, as only the first would run."""
    found = list(made(rule, text))
    if rule is autotune.RULE:
        more = [child for words, child in found if "without" not in words]
        kept = [child for child in found if "without" in child[0]]
        for child in more:
            frozen = [item for item in made(rule, child) if "without" in item[0]]
            kept += frozen or [("an autotuned kernel", child)]
        unique = {"".join(child.split()).replace("num_warps", ""): (words, child) for words, child in kept}
        return list(unique.values())[-6:]
    return found[-1:] if rule is persistent.RULE else found[1:]


@pytest.fixture(scope="module")
def semantics(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("programs")
    jobs = []
    for name, (source, calls) in MINE.items():
        parent = folder / f"{name}.py"
        parent.write_text(source)
        found = [(child, rule is not autotune.RULE) for rule in RULES for child in step(rule, source)]
        # a child of one family as the parent of another
        for first, second in ((rows_per_program, persistent), (persistent, autotune), (autotune, persistent)):
            children = first.RULE.apply(Source(source))[0]
            found += [(child, False) for child in second.RULE.apply(Source(children[-1][1]))[0][:1] if children]\
                if children else []
        for index, ((text, changed), exact) in enumerate(found):
            child = folder / f"{name}_{index}.py"
            child.write_text(changed)
            job = {"parent": str(parent), "child": str(child), "calls": calls, "exact": exact}
            jobs.append({**job, "description": f"{name}: {text}"})
    (folder / "jobs.json").write_text(json.dumps(jobs))
    (folder / "runner.py").write_text(PREPARE + RUNNER)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(folder / "runner.py"), str(folder / "jobs.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert "RESULT" in done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout.split("RESULT")[1])


def test_every_child_computes_what_its_parent_computes(semantics):
    assert semantics["bad"] == []
    assert semantics["runs"] > 45


# --- children compile -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    name: str
    args: list[dict]


def tensor(*shape: int) -> dict:
    return {"name": "x", "kind": "tensor", "shape": list(shape), "dtype": "float16", "offset": 0}


H200 = Target(arch=90, properties={"multi_processor_count": 132})
EXAMPLES = {
    "softmax": (SOFTMAX, [tensor(300, 1000)], "softmax"),
    "matmul_bias_gelu": (MATMUL, [tensor(512, 256), tensor(256, 384), tensor(384)], "matmul_bias_gelu"),
    "gather": (EARLY.replace("Y + cols, tl.zeros((BLOCK,), dtype=tl.float32)", "Y + cols, 0.0"),
               [tensor(9, 70), {**tensor(5), "dtype": "int64"}], "gather"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_children_of_the_examples_compile_for_sm_90(name: str, tmp_path: Path):
    source, args, entry = EXAMPLES[name]
    with Compiler(tmp_path, timeout_s=110) as compiler:
        parent = compiler.compile(source, entry, [Case("main", args)], H200)
        assert parent.ok, parent.error
        programs = 1
        for axis in parent.facts["main"][0].grid:
            programs *= axis
        for rule in RULES:
            for text, child in made(rule, source)[:2]:
                result = compiler.compile(child, entry, [Case("main", args)], H200)
                assert result.ok, (text, result.error)
                (fact,) = result.facts["main"]
                assert fact.mma == 0 or rule is not rows_per_program.RULE
                if rule is persistent.RULE:
                    each = int(text.split()[-4])
                    assert fact.grid == (min(programs, 132 * each), 1, 1)
                if rule is autotune.RULE:
                    assert fact.autotuned >= 4 and all(not config.get("error") for config in fact.configs)
