"""The benchmark of the rewriter: recorded calls made again by the real compiler and interpreter, and what becomes of children."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from conftest import KERNEL, ROOT

from benchmarks import recorded, rewriter
from kernelband.writers.rewriter import FAMILIES

pytestmark = pytest.mark.slow  # a benchmark that a person starts

X = {"shape": [300], "dtype": "float32", "src": "randn"}
SCALE = {"id": "scale", "source": KERNEL, "source_fixed": None, "flags": {"use": "original"},
         "test_calls": [{"fn": "scale", "args": [X, 2.0], "kwargs": {}}, {"fn": "scale", "args": [X], "kwargs": {"s": 0.5}},
                        {"fn": "jit:scale_kernel", "args": [X], "kwargs": {}},
                        {"fn": "scale", "args": [{"object": "Config"}], "kwargs": {}}]}
RANDOM = KERNEL.replace("y = torch.empty_like(x)", "x = torch.randn_like(x)\n    y = torch.empty_like(x)")
IN_PLACE = KERNEL.replace("y = torch.empty_like(x)", "y = x").replace("    return y\n", "")
HALF = KERNEL.replace("mask=offs < n)\n\ndef", "mask=(offs < n) & (offs % 8 < 5))\n\ndef")


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    opened = rewriter.Bench(rewriter.Settings(0, 2, 20.0, 300.0, str(tmp_path_factory.mktemp("cache"))))
    yield opened
    opened.close()


def judged(bench, parent: str, child: str) -> tuple[str, str]:
    """What is said of a child beside its parent, on the first recorded call."""
    calls = recorded.usable(SCALE)[:1]
    text = recorded.entry_text(calls)
    parents, why = bench._parents(parent + text, calls, "scale")
    verdict, detail, _ = bench._judge(child + text, calls, parents)
    return verdict, detail or why


# -- recorded calls -------------------------------------------------------------------------------------------------------


def test_calls_that_cannot_be_made_again_are_left_out():
    assert [c["kwargs"] for c in recorded.usable(SCALE)] == [{}, {"s": 0.5}]
    assert recorded.usable({"test_calls": None}) == []


def test_the_smallest_call_of_each_function_comes_first():
    big = {"shape": [4, 300], "dtype": "float32"}
    calls = [{"fn": fn, "args": [tensor], "kwargs": {}} for fn, tensor in (("a", big), ("a", X), ("a", X), ("B.apply", big))]
    assert [(c["fn"], recorded.size_of(c)) for c in recorded.usable({"test_calls": calls})] == [
        ("a", 300), ("B.apply", 1200), ("a", 1200)]


def test_values_are_written_as_they_were_recorded():
    lengths = {"shape": [2], "dtype": "int32", "min": 0, "max": 9, "values": [0, 9], "src": "tensor"}
    one = {"fn": "f", "args": [X, float("inf"), "torch.float16", [1, X], lengths], "kwargs": {"k": None, "t": X}}
    text = recorded.entry_text([one])
    assert ("made = f(tensors[0], float('inf'), recorded_torch.float16, [1, tensors[1]], recorded_torch.tensor([0, 9], "
            "dtype=recorded_torch.int32, device='cuda'), k=None, t=tensors[2])" in text)
    assert len(recorded.tensors_of(one)) == 3 and "t2" in recorded.inputs_of([one], 0, "seed")
    compile(text, "entry", "exec")


def test_tensors_are_drawn_as_their_specs_say():
    specs = [{"shape": [4, 6], "dtype": "float16", "src": "randn", "stride": [1, 4]},
             {"shape": [2, 5], "dtype": "float32", "src": "ones.expand", "stride": [0, 0]},
             {"shape": [100], "dtype": "int64", "src": "randint", "min": -3, "max": 3},
             {"shape": [100], "dtype": "float32", "src": "rand"}, {"shape": [5], "dtype": "bool", "src": "gt"}]
    one = {"fn": "f", "args": specs, "kwargs": {}}
    made = recorded.inputs_of([one], 0, "seed")
    for j, spec in enumerate(specs):
        value = made[f"t{j}"]
        assert list(value.shape) == spec["shape"] and value.dtype == getattr(torch, spec["dtype"])
        assert "stride" not in spec or list(value.stride()) == spec["stride"]
    assert bool((made["t1"] == 1).all()) and int(made["t2"].min()) == -3 and int(made["t2"].max()) == 3
    assert float(made["t3"].min()) >= 0 and len(set(made["t0"].flatten().tolist())) > 12
    again = recorded.inputs_of([one], 0, "seed")
    assert all(torch.equal(made[k], again[k]) for k in made if k.startswith("t"))
    assert [a["shape"] for a in recorded.case_of([one], 0).args[2:]] == [s["shape"] for s in specs]


def test_the_mended_source_is_taken_only_where_the_shipped_one_is_broken():
    both = {"source": "a", "source_fixed": "b"}
    assert recorded.source_of({**both, "flags": {"use": "original"}}) == "a"
    assert recorded.source_of({**both, "flags": {"use": "fixed"}}) == "b"
    assert recorded.source_of({"source": None, "source_fixed": None, "flags": {}}) is None


# -- judging --------------------------------------------------------------------------------------------------------------


def test_a_row_of_a_kernel(bench):
    row = bench.row(SCALE)
    assert (row["parent"], row["calls"], row["interpreted"]) == ("compiled", 2, 2), row
    assert set(row["families"]) <= {rule.name for rule in FAMILIES} and "launch_params" in row["families"]
    for name, told in row["families"].items():
        assert told["offered"] >= told["made"] >= told["compiled"] == told["agreed"] > 0, (name, told, row["problems"])
    assert row["distinct"] >= 3 and row["programs"] >= 2 and row["problems"] == []


@pytest.mark.parametrize(("source", "kind"), [
    ("import nothing_of_that_name\n" + KERNEL, "load"),
    (KERNEL.replace("tl.store", "tl.store_all"), "compile"),
    (KERNEL.replace("y = torch.empty_like(x)", "raise ValueError(3)"), "wrapper"),
    ("def scale(x, s):\n    return x\n", "no launch"),
])
def test_a_parent_that_does_not_compile_is_told_and_has_no_children(bench, source, kind):
    row = bench.row({**SCALE, "source": source})
    assert row["parent"] == kind and row["detail"] and row["families"] == {}, row
    assert bench.row({**SCALE, "test_calls": []})["parent"] == "no call"


def test_children_that_differ_or_do_not(bench):
    wrong = KERNEL.replace("x * s + 1", "x * s + 1.001")
    assert judged(bench, KERNEL, KERNEL)[0] == "agreed"
    assert judged(bench, KERNEL, wrong)[0] == "disagreed"
    assert judged(bench, KERNEL, KERNEL.replace("triton.cdiv(n, BLOCK)", "n // BLOCK"))[0] == "disagreed"
    assert judged(bench, KERNEL, KERNEL.replace("return y", "return y[:5]"))[0] == "disagreed"
    told = judged(bench, KERNEL, KERNEL.replace("y_ptr + offs, x * s + 1, mask=offs < n", "y_ptr + offs, x * s + 1"))
    assert told[0] == "disagreed" and "memory" in told[1]
    assert judged(bench, KERNEL, KERNEL.replace("tl.store", "tl.store_all"))[0] == ""


def test_what_is_written_in_place_is_compared(bench):
    assert judged(bench, IN_PLACE, IN_PLACE)[0] == "agreed"
    verdict, detail = judged(bench, IN_PLACE, IN_PLACE.replace("x * s + 1", "x * s + 2"))
    assert verdict == "disagreed" and "t0" in detail


def test_random_results_are_not_compared_and_unwritten_elements_are_left_out(bench):
    verdict, detail = judged(bench, RANDOM, RANDOM)
    assert verdict == "not_runnable" and "something else each time" in detail
    assert HALF != KERNEL and judged(bench, HALF, HALF)[0] == "agreed"
    assert judged(bench, HALF, HALF.replace("x * s + 1", "x * s"))[0] == "disagreed"


# -- the whole ------------------------------------------------------------------------------------------------------------


def _row(name: str, compiled: int, **families: tuple[int, int, int]) -> dict:
    told = {f: {"offered": 9, "made": c, "compiled": c, "agreed": a, "disagreed": d, "not_runnable": c - a - d}
            for f, (c, a, d) in families.items()}
    return {"kernel": name, "parent": "compiled", "distinct": compiled, "programs": compiled, "interpreted": 1, "families": told}


def test_the_summary_counts_kernels_that_compile():
    first, second = FAMILIES[0].name, FAMILIES[1].name
    found = [_row("a", 3, **{first: (2, 1, 1), second: (1, 1, 0)}), _row("b", 2, **{first: (2, 2, 0)}),
             {**_row("c", 0), "parent": "load"}]
    told = rewriter.summary_of(found)
    assert (told["kernels"], told["kernels_with_source"], told["share_3_children"]) == (2, 3, 0.5)
    assert (told["rarest_family"], told["share_agreed"], told["children_ran"]) == (0, 0.8, 5)
    lines = {line["family"]: line for line in rewriter.by_family(found)}
    assert list(lines) == [rule.name for rule in FAMILIES] and lines[first]["kernels"] == 2 and lines[second]["kernels"] == 1


def test_families_take_turns_and_a_seed_fixes_the_draw(bench):
    found = rewriter.moves(KERNEL)
    drawn = list(bench._drawn(found, "scale"))
    names = {m.family for m in found}
    assert {m.family for m, _ in drawn[:len(names)]} == names and not any(extra for _, extra in drawn[:len(names)])
    assert len(drawn) == len(found) and drawn == list(bench._drawn(found, "scale"))
    assert [extra for _, extra in drawn] == sorted(extra for _, extra in drawn)
    other = rewriter.Bench.__new__(rewriter.Bench)
    other.settings = replace(bench.settings, seed=1)
    assert list(other._drawn(found, "scale")) != drawn


def test_the_command_writes_a_result_and_goes_on_from_its_rows(tmp_path):
    data = tmp_path / "kernels.jsonl"
    data.write_text("\n".join(json.dumps(r) for r in (SCALE, {**SCALE, "id": "withheld", "source": None})))

    def start(*more: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, str(ROOT / "benchmarks" / "rewriter.py"), "--data", str(data), "--jobs", "1",
                               "--out", str(tmp_path / "r.json"), "--cache", str(tmp_path / "cache"), *more], cwd=ROOT,
                              env={**os.environ, "KERNELBAND_COMMIT": "test"}, capture_output=True, text=True, timeout=280)

    first = start()
    assert first.returncode == 0, first.stderr
    told = json.loads((tmp_path / "r.json").read_text())
    assert told["benchmark"] == "rewriter" and not told["measured"] and told["summary"]["kernels"] == 1
    assert told["summary"]["share_3_children"] == 1.0 and {f["family"] for f in told["families"]} == {r.name for r in FAMILIES}
    assert "--resume" in start().stderr
    again = start("--resume")
    assert again.returncode == 0 and "scale:" not in again.stdout, again.stdout + again.stderr
    assert json.loads((tmp_path / "r.json").read_text())["rows"] == told["rows"]
    assert "no kernel 'other'" in start("--resume", "--kernels", "other").stderr
    data.write_text("[1, 2]\n")
    assert "not a file of kernels" in start("--resume").stderr
