"""Mutants of honest kernels: what each mutator makes of a text, and that the real stages tell mutants from the original."""

import ast

import pytest
from attacks.mutate import MUTATORS, Mutant, mutants

from benchmarks import mutants as bench

HEAD = "import triton\nimport triton.language as tl\n\n@triton.jit\ndef kernel(x_ptr, y_ptr, n, m, s, t, BLOCK: tl.constexpr):\n"


def changed(kind: str, body: str) -> list[str]:
    """What mutants of one kind make of a kernel body: the lines that differ, stripped, in order ("" for a line that went)."""
    source = HEAD + "".join(f"    {line}\n" for line in body.strip().splitlines())
    made = []
    for mutant in mutants(source):
        if mutant.kind == kind:
            before, after = source.splitlines(), mutant.source.splitlines()
            if len(after) < len(before):
                after.insert(mutant.line - 1, "")
            (differs,) = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
            assert mutant.line == differs + 1 and mutant.in_kernel
            made.append(after[differs].strip())
    return made


SPECIFIED = [
    ("mask", "x = tl.load(x_ptr + i, mask=i < n, other=0.0)", ["x = tl.load(x_ptr + i)"]),
    ("mask", "x = tl.load(x_ptr + i, i < n, 0.0)", ["x = tl.load(x_ptr + i)"]),
    ("mask", "tl.store(y_ptr + i, x, mask=i < n)", ["tl.store(y_ptr + i, x)"]),
    ("mask", "inside = (i < n) & (j < m)", ["inside = ((i < n))", "inside = ((j < m))"]),
    ("mask", "x = tl.where(i < n, x - 1.0, 0.0)", ["x = (x - 1.0)"]),
    ("off-by-one", "inside = i < n", ["inside = i <= n", "inside = i < (n - 1)"]),
    ("off-by-one", "i = tl.arange(0, BLOCK)", ["i = (tl.arange(0, BLOCK) + 1)"]),
    ("off-by-one", "for start in range(0, n, BLOCK): pass",
     ["for start in (range(0, n - 1, BLOCK)): pass", "for start in (range(0 + BLOCK, n, BLOCK)): pass"]),
    ("tail", "for start in range(0, n, BLOCK): pass",
     ["for start in (range(0, (n) - BLOCK, BLOCK)): pass", "for start in (range(0, (n) // BLOCK * BLOCK, BLOCK)): pass"]),
    ("tail", "blocks = tl.cdiv(n, BLOCK)", ["blocks = (n // BLOCK)"]),
    ("dtype", "acc = tl.zeros((BLOCK,), dtype=tl.float32)", ["acc = tl.zeros((BLOCK,), dtype=tl.float16)"]),
    ("dtype", "x = x.to(tl.float32)", ["x = (x)", "x = (x.to(tl.float32).to(tl.float16).to(tl.float32))"]),
    ("dtype", "acc += tl.sum(x)", ["acc += ((tl.sum(x)).to(tl.float16))"]),
    ("dtype", 'y = tl.dot(a, b, input_precision="ieee")', ['y = tl.dot(a, b, input_precision="tf32")']),
    ("atomic", 'tl.atomic_add(y_ptr + i, x, mask=i < n, sem="relaxed")', ["tl.store(y_ptr + i, x, mask=i < n)"]),
    ("barrier", "tl.debug_barrier()\nx = 1", [""]),
    ("scale", "y = x * 0.5", ["y = x * (1.0)", "y = (x)", "y = (0.5)"]),
    ("scale", "y = x / n", ["y = (x)", "y = x / (n - 1)"]),
    ("index", "row = tl.program_id(0)", ["row = tl.program_id(1)"]),
    ("index", "y = tl.sum(x, axis=0)", ["y = tl.sum(x, axis=1)"]),
    ("index", "x = tl.load(x_ptr + i * s + j * t)", ["x = tl.load(x_ptr + i * t + j * s)"]),
    ("index", "y = x[:, None]", ["y = (x[None, :])"]),
    ("index", "y = tl.trans(x)", ["y = (x)"]),
    ("identity", 'top = -float("inf")', ["top = (0.0)"]),
    ("identity", "total = 0.0", ["total = (0.0 + 1.0)"]),
    ("identity", 'x = tl.where(i < n, x, -float("inf"))', ["x = tl.where(i < n, x, 0.0)"]),
    ("max-min", "y = tl.maximum(y, tl.max(x, axis=0))",
     ["y = tl.minimum(y, tl.max(x, axis=0))", "y = tl.maximum(y, tl.min(x, axis=0))"]),
    ("sign", "y = x - mean", ["y = x + mean"]),
    ("sign", "y = -x", ["y = (x)"]),
    ("sign", "total += tl.sum(x)", ["total -= tl.sum(x)"]),
    ("neighbour", "tl.store(y_ptr + i, x)", ["tl.store(y_ptr + i + 1, x)"]),
]


@pytest.mark.parametrize(("kind", "before", "after"), SPECIFIED)
def test_what_a_mutator_does(kind, before, after):
    assert changed(kind, before) == after


def test_every_kind_is_specified():
    assert {kind for kind, _, _ in SPECIFIED} == set(MUTATORS)


def test_a_filler_is_an_identity_only_where_a_reduction_sees_it():
    body = "x = tl.load(x_ptr + i, mask=i < n, other=0.0)\n{}"
    assert changed("identity", body.format("y = tl.sum(x * x, axis=0)")) == ["x = tl.load(x_ptr + i, mask=i < n, other=1.0)"]
    assert changed("identity", body.format("tl.store(y_ptr + i, x, mask=i < n)")) == []


def test_arithmetic_on_addresses_keeps_its_sign_and_its_factors():
    body = "i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\nx = tl.load(x_ptr + i * s)\ntl.store(y_ptr + i, x + 1.0)"
    assert changed("sign", body) == ["tl.store(y_ptr + i, x - 1.0)"]
    assert changed("scale", body) == ["tl.store(y_ptr + i, x + (2.0))"]


def test_the_wrapper_is_mutated_too_and_says_so():
    source = HEAD + "    pass\n\ndef entry(x):\n    M, N = x.shape\n    kernel[(triton.cdiv(M, 8), N)](x, x.stride(0))\n"
    made = [m for m in mutants(source) if not m.in_kernel]
    assert {m.kind for m in made} == {"off-by-one", "tail", "index"}
    text = "\n".join(m.source for m in made)
    for expected in ("(max(1, M // 8))", "(max(1, N - 1))", "x.stride(1)", "N, M = x.shape", "[(N, triton.cdiv(M, 8))]"):
        assert expected in text, expected


@pytest.mark.parametrize("name", bench.TASKS)
def test_mutants_of_a_kernel_are_many_different_valid_and_always_the_same(name):
    source = (bench.TASKS[name] / "kernel.py").read_text()
    made = list(mutants(source))
    assert len(made) >= 20 and len({m.kind for m in made}) >= 6
    assert len({m.source for m in made} | {source}) == len(made) + 1
    assert len({bench.name_of(m) for m in made}) == len(made)
    for mutant in made:
        ast.parse(mutant.source)
    assert made == list(mutants(source))


@pytest.fixture(scope="module")
def column_sum(tmp_path_factory):
    opened = bench.Bench(bench.TASKS["column_sum"], tmp_path_factory.mktemp("cache"))
    yield opened
    opened.close()


@pytest.mark.parametrize(("kind", "text", "outcome", "layer"), [
    ("max-min", "tl.sum(x * x, axis=0) -> tl.max", "wrong", "values"),
    ("atomic", "-> tl.store", "wrong", "values"),
    ("identity", "other 0.0 -> 1.0", "wrong", "values"),
    ("scale", "0.5 -> 1.0", "wrong", "values"),
    ("tail", "M // 16", "wrong", "values"),
    ("index", "x.stride(1)", "unsafe_memory", "guard"),
    ("index", "rows[:, None] -> rows[None, :]", "not compiling", "load"),
])
def test_what_the_real_stages_say(column_sum, kind, text, outcome, layer):
    mutant = next(m for m in mutants(column_sum.loaded.baseline) if m.kind == kind and text in m.description)
    row = column_sum.row(mutant)
    assert (row["outcome"], row["layer"]) == (outcome, layer), row


def test_the_same_program_in_other_words_is_no_mutant_and_a_right_wrapper_survives(column_sum):
    other = column_sum.loaded.baseline.replace("part * 0.5", "part * (1.0 / 2.0)")
    assert column_sum.row(Mutant("scale", 1, "0.5 in other words", other, True))["outcome"] == "same code"
    wrapper = column_sum.loaded.baseline.replace("M, N = x.shape", "M, N = x.size()")
    row = column_sum.row(Mutant("index", 1, "the shape in other words", wrapper, False))
    assert row["outcome"] == "survived", row  # a fault in a wrapper leaves the machine code as it is, so that does not count


def test_the_summary_counts_what_compiles_to_another_program():
    outcomes = ("wrong", "crashed", "survived", "same code", "not compiling")
    rows = [{"task": "a", "kind": "mask", "detail": "", "outcome": outcome} for outcome in outcomes]
    told = bench.summary_of(rows)
    assert (told["mutants"], told["mutants_killed"], told["survivors"]) == (3, 0.6667, 1)
    assert (told["equivalent_ptx"], told["not_compiling"]) == (1, 1)
