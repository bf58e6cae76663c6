"""The rule families `cache_hints`, `hints`, `math` and `loop_range`: what they write, where they must not, what it computes.

The rewriter reads the sources as text. Only `semantics` runs them, parents and children together in one process with
Triton's interpreter, and only `compiler` compiles them, for sm_90.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from rewriter_cases import ADD, GROUPED, HEAD, HELPER, LAYER_NORM, MATMUL, OFFSET_LOOP, SOFTMAX, compared
from rules_hints_cases import ALL, ATTEND, CARRIED, NESTED, RULES, RUNNING, change, children, words

from kernelband.candidate import normal_form
from kernelband.evaluate.compile import Compiled, Compiler, Target
from kernelband.strategies import CATALOGUE

EXACT = {"cache_hints", "hints", "loop_range"}

@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("rule", RULES)
def test_children_are_distinct_parse_and_leave_signatures_alone(rule, name):
    source = ALL[name][0]
    found = children(rule, source)
    assert found == children(rule, source)
    forms = [normal_form(text) for _, text in found]
    assert len({normal_form(source), *forms}) == len(forms) + 1 or rule == "cache_hints"
    assert normal_form(source) not in forms
    assert len({said for said, _ in found}) == len(found)
    heads = [ast.unparse(node.args) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    for said, text in found:
        assert "\n" not in said
        assert heads == [ast.unparse(n.args) for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
    if not found:
        assert " " in words(rule, source)


def test_each_rule_serves_a_strategy_of_the_catalogue():
    assert {rule.name: rule.strategy for rule in RULES.values()} == {
        "cache_hints": "access_layout", "hints": "vectorization", "math": "vectorization", "loop_range": "pipeline",
    }  # fmt: skip
    assert {rule.strategy for rule in RULES.values()} <= CATALOGUE.keys()


@pytest.mark.parametrize("rule", RULES)
def test_a_module_without_a_name_for_the_language_is_declined(rule):
    source = ADD.replace("import triton.language as tl", "import triton.language")
    assert children(rule, source) == [] and "no name" in words(rule, source)
    other = ADD.replace("import triton.language as tl", "from triton import language as lang").replace("tl.", "lang.")
    assert all("tl." not in text for _, text in children(rule, other))


@pytest.mark.parametrize("rule", RULES)
def test_names_that_double_from_line_to_line_are_given_up_on(rule):
    lines = "".join(f"    a{i + 1} = a{i} + a{i}\n    q{i + 1} = q{i} + q{i}\n" for i in range(60))
    source = HEAD + (
        "@triton.jit\ndef k(x_ptr, n, B: tl.constexpr):\n    a0 = tl.load(x_ptr)\n    q0 = tl.program_id(0) * B\n"
        f"{lines}    tl.store(x_ptr + q60 + tl.arange(0, B), tl.exp(a60.to(tl.float32)) / a60)\n"
    )
    found = children(rule, source)  # 2**60 ways would not end
    assert [said for said, _ in found] == (["exp -> exp2 in k"] if rule == "math" else [])


# --- cache hints --------------------------------------------------------------------------------------------------


def test_data_read_once_again_and_by_several_programs_is_told_apart():
    said = [text for text, _ in children("cache_hints", SOFTMAX)]
    assert said == [
        "evict_first on the load of data read once in softmax_kernel",
        ".cg on the load of data read once in softmax_kernel",
        "evict_last on 2 loads of data read again later in softmax_kernel",
        "evict_first on the store of results in softmax_kernel",
        ".cs on the store of results in softmax_kernel",
    ]
    for source in (MATMUL, GROUPED):
        said = [text for text, _ in children("cache_hints", source)]
        assert not any("once" in text for text in said)
        assert any(text.startswith("evict_last on the load of shared data (a_ptr)") for text in said)


def test_a_hint_is_added_behind_what_a_call_has():
    line = 'tl.store(y_row + cols, y, mask=mask, cache_modifier=".cs")'
    assert change("cache_hints", SOFTMAX, ".cs on the store of results in softmax_kernel") == [line]
    lines = change("cache_hints", LAYER_NORM, "evict_first on the store of results in norm_kernel")
    assert lines == ['eviction_policy="evict_first",']


def test_sites_with_hints_in_place_results_and_helpers_are_left_alone():
    hinted = ADD.replace("mask=mask)", 'mask=mask, cache_modifier=".ca")')
    assert "no load or store without" in words("cache_hints", hinted)
    assert children("cache_hints", hinted) == []
    assert children("cache_hints", RUNNING) == []
    assert "load_block is called by other kernels" in words("cache_hints", HELPER)


# --- promises -------------------------------------------------------------------------------------------------------


def test_offsets_from_a_multiple_are_promised():
    wrapped = "tl.max_contiguous(tl.multiple_of(pid * BLOCK + tl.arange(0, BLOCK), BLOCK), BLOCK)"
    said = "promise that offs is contiguous from a multiple of BLOCK in add_kernel"
    assert change("hints", ADD, said) == [f"offs = {wrapped}"]
    ((said, child),) = children("hints", NESTED)
    assert "cols is contiguous from a multiple of BLOCK" in said  # a loop by hand
    assert "start is a multiple of BLOCK" in said and "start = tl.multiple_of(start, BLOCK)" in child
    rest = ADD.replace("pid * BLOCK + tl", "(n - n % BLOCK) + tl")
    assert "tl.multiple_of((n - n % BLOCK) + tl.arange(0, BLOCK), BLOCK)" in children("hints", rest)[0][1]


@pytest.mark.parametrize(
    "start",
    [
        "pid * n + tl.arange(0, BLOCK)",
        "pid * BLOCK + n + tl.arange(0, BLOCK)",
        "pid * BLOCK + 1 + tl.arange(0, BLOCK)",
        "pid + tl.arange(0, BLOCK)",
        "pid * BLOCK + tl.arange(1, BLOCK)",
        "pid * BLOCK - tl.arange(0, BLOCK)",
        "tl.arange(0, BLOCK) * BLOCK + tl.arange(0, BLOCK)",  # no single start
        "pid * BLOCK // 2 + tl.arange(0, BLOCK)",
        "(n * 0.5 * BLOCK).to(tl.int32) + tl.arange(0, BLOCK)",
        "tl.load(x_ptr) + tl.arange(0, BLOCK)",
        "tl.minimum(pid * BLOCK, n - BLOCK) + tl.arange(0, BLOCK)",
        "(pid * BLOCK + tl.arange(0, BLOCK)) % n + tl.arange(0, 2 * BLOCK)",
    ],
)
def test_nothing_that_may_be_false_is_promised(start):
    source = ADD.replace("pid * BLOCK + tl.arange(0, BLOCK)", start)
    found = [text for said, text in children("hints", source)]
    # within the last one, the sum under the modulo is promised, and never what comes out of it
    assert all("tl.max_contiguous(tl.multiple_of(pid * BLOCK + tl.arange(0, BLOCK), BLOCK), BLOCK) % n" in t for t in found)
    assert bool(found) == ("% n" in start)


def test_a_start_that_another_assignment_shifts_is_not_promised():
    assert "need not start" in words("hints", OFFSET_LOOP)  # its loop starts anywhere
    shifted = NESTED.replace("at += BLOCK", "at += BLOCK - 1")
    assert not any("cols" in text for text, _ in children("hints", shifted))
    tile = ADD.replace("    offs = pid", "    pid = pid + tl.arange(0, BLOCK)\n    offs = pid")
    assert children("hints", tile) == []
    assert [said for said, _ in children("hints", HELPER)] == [
        "promise that offs is contiguous from a multiple of SIZE in double_kernel"
    ]  # what a helper gets for pid may be a tile


# --- arithmetic -----------------------------------------------------------------------------------------------------


def test_exponentials_and_roots():
    assert change("math", SOFTMAX, "exp -> exp2 in softmax_kernel") == [
        "row_sum += tl.sum(tl.exp2((x - row_max) * 1.4426950408889634), axis=0)",
        "y = tl.exp2((x - row_max) * 1.4426950408889634) / row_sum",
    ]
    assert not any("log" in said for said, _ in children("math", ATTEND))  # tl.log is log2 and a product already
    line = "rstd = tl.rsqrt(tl.sum(_var, axis=0) / N + eps)"
    assert change("math", LAYER_NORM, "division by a square root -> rsqrt in norm_kernel") == [line]
    line = "total = total * tl.rsqrt(1.0 + tl.load(x_ptr + cols, mask=cols < n, other=0.0))"
    told = words("math", NESTED)  # total is float32, but what the root is of may be wider, which does no harm
    assert change("math", NESTED, "division by a square root -> rsqrt in nested_kernel") == [line], told


def test_a_power_of_two_is_a_product():
    source = ADD.replace("    tl.store(", "    y = tl.load(y_ptr + offs)\n    y = libdevice.pow(y, 2.0)\n    tl.store(")
    assert change("math", source, "pow(x, 2) -> x * x in add_kernel") == ["y = (y * y)"]
    assert children("math", source.replace("2.0", "3.0")) == []
    assert children("math", source.replace("pow(y, 2.0)", "pow(y + 1, 2.0)")) == []  # would stand twice


def test_divisions_by_one_value_share_a_reciprocal_before_the_loop_or_the_statement():
    said = "the division by row_sum -> products with one reciprocal in softmax_kernel"
    assert change("math", SOFTMAX, said) == ["inv_row_sum = 1.0 / row_sum", "y = tl.exp(x - row_max) * inv_row_sum"]
    said = "the division by temperature -> products with one reciprocal in attend_kernel"
    (child,) = (text for told, text in children("math", ATTEND) if told == said)
    assert "    inv_temperature = 1.0 / temperature\n    for start in range(0, N, BN):\n" in child
    said = "the division by l_i -> products with one reciprocal in attend_kernel"
    (child,) = (text for told, text in children("math", ATTEND) if told == said)
    assert "    # the quotient comes last\n    inv_l_i = 1.0 / l_i\n    acc = acc * inv_l_i[:, None]\n" in child


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("other=-1e30).to(tl.float32)", "other=-1e30).to(tl.float64)"),
        ("s = s / temperature", "s = s.to(tl.float64) / temperature"),
        ("s = s / temperature", "temperature = temperature + 0.1\n        s = s / temperature"),
    ],
)
def test_a_quotient_that_a_reciprocal_would_coarsen_or_that_varies_stays(old, new):
    source = ATTEND.replace(old, new)
    assert source != ATTEND
    assert not any("temperature" in said for said, _ in children("math", source))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("        total += e", "        if ADD:\n            total += e"),  # perhaps not compiled
        ("in range(", "in tl.static_range("),  # carries nothing
        ("total = tl.zeros((BLOCK,), dtype=tl.float32)", "total = tl.zeros((BLOCK,), dtype=tl.float64)"),
        ("        total += e", "        total = (total + e).to(tl.float32)"),
        ("        total += e", "        total = total * e\n        total = tl.zeros((BLOCK,), dtype=tl.float32)"),
        ("        total += e", "        total += 1.0"),
    ],
)
def test_what_a_loop_carries_in_float32_bounds_what_goes_into_it(old, new):
    # with x in float64, total would change its type in the loop, which Triton does not compile
    assert [said for said, _ in children("math", CARRIED)] == ["exp -> exp2 in carried_kernel"]
    source = CARRIED.replace(old, new)
    assert source != CARRIED
    assert children("math", source) == []
    assert "tl.exp(x) in carried_kernel may be wider than float32" in words("math", source)


def test_what_is_rounded_to_an_integer_keeps_its_last_bit():
    whole = CARRIED.replace("tl.store(o_ptr + tl.arange(0, BLOCK), total)", "tl.store(o_ptr + n, total.to(tl.int8))")
    assert whole != CARRIED and children("math", whole) == []
    assert "goes into an integer" in words("math", whole)
    assert children("math", CARRIED.replace("start + tl.arange", "start.to(tl.int64) + tl.arange"))


def test_types_of_the_same_pointer_fit_each_other_and_others_do_not():
    row = HEAD + '''
@triton.jit
def row_kernel(x_ptr, z_ptr, o_ptr, n, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + cols, mask=cols < n, other=0.0)
    z = tl.load(z_ptr + cols, mask=cols < n, other=0.0)
    total = tl.sum(x, axis=0)
    tl.store(o_ptr + cols, x / total, mask=cols < n)
'''
    assert len(children("math", row)) == 1
    assert children("math", row.replace("x / total", "z / total")) == []
    assert "z / total in row_kernel may be wider than float32" in words("math", row.replace("x / total", "z / total"))
    assert children("math", row.replace("total = tl.sum(x, axis=0)", "total = tl.sum(x, axis=0).to(tl.float32)")) == []
    assert children("math", row.replace("total = tl.sum(x, axis=0)", "total = tl.sum(x, axis=0)\n    x = x / z")) == []


# --- loops ------------------------------------------------------------------------------------------------------------


def test_loops_get_stages_unrolling_and_flattening():
    said = "num_stages=3 for the loop over start in matmul_bias_gelu_kernel"
    assert change("loop_range", MATMUL, said) == ["for start in tl.range(0, K, BLOCK_K, num_stages=3):"]
    said = "loop_unroll_factor=4 for 3 loops in norm_kernel"
    assert change("loop_range", LAYER_NORM, said) == ["for off in tl.range(0, N, BLOCK_SIZE, loop_unroll_factor=4):"] * 3
    said = "flatten=True for the loop over row in nested_kernel"
    assert change("loop_range", NESTED, said) == ["for row in tl.range(pid, rows, tl.num_programs(0), flatten=True):"]
    assert change("loop_range", NESTED, "static_range of 3 rounds for the loop over part in nested_kernel") == [
        "for part in tl.static_range(PARTS):"
    ]
    staged = MATMUL.replace("range(0, K, BLOCK_K)", "tl.range(0, K, BLOCK_K, num_stages=2)")
    assert [told.split(" for ")[0] for told, _ in children("loop_range", staged)] == ["num_stages=3", "num_stages=4"]


def test_loads_do_not_overtake_stores_that_they_may_read():
    assert [said.split("=")[0] for said, _ in children("loop_range", RUNNING)] == ["loop_unroll_factor"] * 2
    assert "reads and writes x_ptr" in words("loop_range", RUNNING)
    aliased = LAYER_NORM.replace("x, w, y,\n", "y, w, y,\n")
    assert "(3 of 3) reads and writes y" in words("loop_range", aliased)
    atomic = SOFTMAX.replace("        tl.store(y_row", "        tl.atomic_add(y_row, 1)\n        tl.store(y_row")
    assert "(3 of 3) has atomic_add" in words("loop_range", atomic)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("PARTS=3", "PARTS=100", "100 rounds"),
        ("PARTS=3", "PARTS=x.shape[0]", "cannot be told"),
        ("part * n", "part.to(tl.int64) * n", "for an attribute"),
        ("part * n", "part // 2 * n", None),
        ("part * n", "(part - 2) // 2 * n", "rounds otherwise"),
        ("part * n", "tl.abs(part) * n", "may need a number"),
        ("range(PARTS)", "range(pid, PARTS)", ""),
        ("range(PARTS)", "range(-1, PARTS)", ""),
    ],
)
def test_only_few_rounds_between_constants_are_static(old, new, why):
    source = NESTED.replace(old, new, 1)
    assert source != NESTED
    assert any("static_range" in said for said, _ in children("loop_range", source)) == (why is None)
    assert (why or "") in words("loop_range", source)


# --- what children compute, and that they compile ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def semantics(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("rules")
    jobs = []
    for name, (source, calls) in ALL.items():
        (folder / f"{name}.py").write_text(source)
        for rule in RULES:
            for index, (said, text) in enumerate(children(rule, source)):
                # the interpreter ignores cache hints and the options of a range; some of each run at all
                if rule in ("cache_hints", "loop_range") and index % 6 and "static" not in said:
                    continue
                child = folder / f"{name}_{rule}_{index}.py"
                child.write_text(text)
                job = {"parent": str(folder / f"{name}.py"), "child": str(child), "calls": calls, "exact": rule in EXACT}
                jobs.append({**job, "description": f"{name}: {said}"})
    return compared(folder, jobs)


def test_every_child_computes_what_its_parent_computes(semantics):
    assert semantics["runs"] > 40
    assert semantics["bad"] == []


@dataclass(frozen=True)
class Case:
    name: str
    args: tuple[dict, ...]


def tensor(name: str, *shape: int) -> dict:
    stride = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        stride[axis] = stride[axis + 1] * shape[axis + 1]
    return {"name": name, "kind": "tensor", "shape": list(shape), "dtype": "float32", "stride": stride, "offset": 0}


EXAMPLES = {
    "softmax": (SOFTMAX, "softmax", (tensor("x", 64, 1000),)),
    "matmul": (MATMUL, "matmul_bias_gelu", (tensor("a", 128, 100), tensor("b", 100, 128), tensor("bias", 128))),
    "attend": (ATTEND, "attend", (tensor("s", 32, 100), tensor("v", 100, 16))),
    "nested": (NESTED, "nested", (tensor("x", 4, 100),)),
}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory) -> Iterator[Compiler]:
    with Compiler(tmp_path_factory.mktemp("compiled"), timeout_s=60) as made:
        yield made


def compiled(compiler: Compiler, name: str, source: str) -> Compiled:
    _, entry, args = EXAMPLES[name]
    result = compiler.compile(source, entry, [Case("main", args)], Target())
    assert result.ok, result.error
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_children_compile_for_a_gpu(compiler, name):
    source = EXAMPLES[name][0]
    parent = compiled(compiler, name, source)
    for rule in RULES:
        codes = {}
        for said, text in children(rule, source):
            # one of several alike, and not every number of stages
            if "the loop over start (" in said or "num_stages=3" in said or "factor=4" in said or "(" in said.split(" in ")[0]:
                continue
            (launch,) = compiled(compiler, name, text).facts["main"]
            codes[said] = launch.cubin_sha
            assert launch.spills <= parent.facts["main"][0].spills + 64, said
        if rule in ("cache_hints", "loop_range"):  # in others the compiler may have known as much
            assert set(codes.values()) - {parent.facts["main"][0].cubin_sha}, codes
