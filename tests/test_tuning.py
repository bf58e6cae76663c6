"""Autotuned candidates: what they chose is told once, and chosen again in later processes."""

from __future__ import annotations

import importlib
import os
import types

import pytest
import triton
from host_gpu import HostChild, host  # noqa: F401  (host stands in for the GPU)
from test_supervisor import FAST, SLOW, simple, supervisor

from kernelband.evaluate import children
from kernelband.evaluate.inside import serve


def kernel_module() -> types.ModuleType:
    @triton.autotune([triton.Config({"BLOCK": b}, num_warps=w) for b in (64, 128) for w in (2, 4)], key=["n"])
    @triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
    @triton.jit
    def copy_kernel(x_ptr, y_ptr, n, BLOCK: triton.language.constexpr, EVEN: triton.language.constexpr):
        pass

    module = types.ModuleType("candidate")
    module.copy_kernel, module.other = copy_kernel, object()
    return module


@pytest.fixture
def tuning(monkeypatch):
    """The module as it lies beside candidates, where its siblings are found by their bare names."""
    monkeypatch.syspath_prepend(os.path.dirname(serve.__file__))
    made = importlib.import_module("tuning")
    monkeypatch.setattr(made.Autotuner, "do_bench", made.Autotuner.do_bench)
    return made


def test_choices_are_told_and_taken_over_by_another_process(tuning, monkeypatch):
    first = kernel_module()
    monkeypatch.setattr(tuning.serve.SESSION, "module", first)
    first.copy_kernel.cache[(4096, "torch.float16", "torch.float16")] = first.copy_kernel.configs[2]
    first.copy_kernel.cache[(object(),)] = first.copy_kernel.configs[0]  # no key that could be sent
    first.copy_kernel.cache[(1,)] = triton.Config({"BLOCK": 7})  # none of the source's own
    first.copy_kernel.bench_time = 1.5
    told = tuning.tuned({}, [])
    [one] = told["tuned"]
    assert one["kernel"] == "copy_kernel" and one["config"] == 2 and "BLOCK: 128" in one["text"] and told["seconds"] == 1.5
    second = kernel_module()
    monkeypatch.setattr(tuning.serve.SESSION, "module", second)
    tuning.choose({"tuned": [one, {**one, "kernel": "gone"}, {**one, "config": 99, "key": [2]}]}, [])
    assert second.copy_kernel.cache == {(4096, "torch.float16", "torch.float16"): second.copy_kernel.configs[2]}


def test_timing_a_configuration_is_brief_whatever_the_source_asks_for(tuning, monkeypatch):
    asked = []
    monkeypatch.setattr("triton.testing.do_bench", lambda call, **how: asked.append(how) or [1.0, 1.0, 1.0])
    tuning.start()
    module = kernel_module()
    module.copy_kernel.do_bench = None  # as some versions of Triton do when a tuner is made
    module.copy_kernel.do_bench(lambda: None, quantiles=(0.5, 0.2, 0.8))
    assert asked == [{"warmup": 2, "rep": 10, "quantiles": (0.5, 0.2, 0.8)}]


CHOICE = {"kernel": "k", "key": [64, "torch.float32"], "config": 1, "text": "BLOCK: 64, num_warps: 4"}


def test_a_candidate_is_tuned_once_and_its_final_children_choose_the_same(monkeypatch):
    asked = []

    def op_tuned(self):
        return {"tuned": [CHOICE, {"kernel": 3}, "rubbish"], "seconds": 0.25}

    def op_choose(self, tuned):
        asked.append(tuned)
        return {}

    monkeypatch.setattr(HostChild, "op_tuned", op_tuned, raising=False)
    monkeypatch.setattr(HostChild, "op_choose", op_choose, raising=False)
    made, source = supervisor(simple()), FAST + "# autotune\n"
    told = made.judge("cand", source, None, "base", SLOW, None)
    assert told.kind == "measured" and told.costs["tune"] == 0.25
    assert told.tuned == {"k[64, 'torch.float32']": "BLOCK: 64, num_warps: 4"}
    final = made.final("cand", source, None, pairs=2)
    assert final.kind == "measured" and final.tuned == told.tuned
    assert len(asked) >= 3 and all(sent == [CHOICE] for sent in asked)


@pytest.mark.parametrize("said", [{"tuned": "no"}, {}, {"tuned": [{"kernel": "k", "key": [[]], "config": 0}], "seconds": "long"},
                                  {"tuned": [{"kernel": "k" * 999, "key": [], "config": 0}]},
                                  {"tuned": [{"kernel": "k", "key": [], "config": -1}], "seconds": float("inf")}])
def test_what_a_child_says_of_its_choices_is_taken_only_in_the_right_form(said):
    made = supervisor(simple())
    child = made.children.side("base")
    child.op_tuned = lambda: said
    assert made.children.learn(child, f"# {children.TUNES}") == ({}, 0.0) and made.children.tuned[f"# {children.TUNES}"] == []
