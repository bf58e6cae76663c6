"""Who did the work on the device, however kernels are named, and the rungs of the ladder of signals."""

from __future__ import annotations

import importlib
import os

import pytest

from kernelband.device import KNOWN
from kernelband.evaluate import profile, toollogs
from kernelband.evaluate.compile import KernelFacts
from kernelband.evaluate.inside import serve
from kernelband.evaluate.profile import allowed, ladder, what_ran


def fact(kernel="gemm_kernel", num_warps=4, registers=128, configs=()):
    return KernelFacts(kernel, (64, 1, 1), num_warps, 3, 49152, registers, 0, 8, "sha", {}, len(configs), configs)


def record(name, us, block=(128, 1, 1), registers=128, kind="kernel"):
    return {"kind": kind, "name": name, "us": us, "count": 1, "grid": [64, 1, 1], "block": list(block),
            "registers": registers, "shared": 49152}


NVJET = "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNN"


def test_honest_kernels_are_own_whatever_word_is_in_their_names():
    for name in ("gemm_kernel", "flash_fwd_kernel", "matmul", "_softmax", "cutlass_like_gemm", "reduce_kernel", "dot_kernel"):
        what = what_ran([record(name, 90), record("Memset (Device)", 10, kind="copy")], [fact(name)])
        assert (what.own_share, what.copy_share, what.odd) == (0.9, pytest.approx(0.1), ()), name
        assert allowed(what, ("own",)) == ""


@pytest.mark.parametrize("name, group", [
    (NVJET, "vendor"), ("sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_warpgroupsize1x1x1", "vendor"),
    ("ampere_h16816gemm_128x128_ldg8_stages_32x5_tn", "vendor"),
    ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x64>(Params)", "vendor"),
    ("void gemv2T_kernel_val<int, int, float>(cublasGemvParams)", "vendor"),
    ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>(Flash_fwd_params)", "vendor"),
    ("fmha_cutlassF_f16_aligned_64x64_rf_sm80", "vendor"),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)", "torch"),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)", "copy"),
    ("void at::native::elementwise_kernel<128, 2, at::native::direct_copy_kernel_cuda(TensorIterator&)>(int)", "copy"),
    ("void at_cuda_detail::cub::DeviceScanKernel<Policy>(float*)", "torch"), ("triton_poi_fused_add_0", "torch"),
    ("my_inline_cuda(float*)", "other"), ("somebodys_kernel", "other")])
def test_kernels_of_others_are_told_apart(name, group):
    what = what_ran([record(name, 5.0)], [fact()])
    assert what.names == ((group, name, 1.0),) and what.own_share == 0


def test_a_chosen_name_does_not_make_a_library_kernel_own():
    decoy = fact(NVJET, 4, 128)  # a decoy that really was compiled, under a library's name
    what = what_ran([record(NVJET, 95, (384, 1, 1), 168), record(NVJET, 5)], [decoy])
    assert what.own_share == 0 and what.vendor_share == 1 and what.odd == (NVJET,)
    assert "own had 0%" in allowed(what, ("own",))


@pytest.mark.parametrize("block, registers", [((256, 1, 1), 128), ((128, 1, 1), 255), ((0, 0, 0), 128), ((128,), 128)])
def test_the_same_name_on_another_kernel_is_not_own(block, registers):
    what = what_ran([record("gemm_kernel", 100, block, registers)], [fact()])
    assert what.own_share == 0 and what.odd == ("gemm_kernel",)
    assert "not the one that was compiled" in allowed(what, ("own",))


def test_any_shape_of_block_with_the_compiled_number_of_threads_is_own():
    assert what_ran([record("gemm_kernel", 1, (32, 4, 1))], [fact()]).own_share == 1


def test_each_configuration_of_a_tuned_kernel_is_own_but_none_that_failed():
    tuned = fact(configs=({"num_warps": 4, "error": None}, {"num_warps": 8, "error": None}, {"num_warps": 16, "error": "no"}))
    records = [record("gemm_kernel", 1, (256, 1, 1), 90), record("gemm_kernel", 1, (512, 1, 1), 90)]
    assert what_ran(records, [tuned]).own_share == 0.5


@pytest.mark.parametrize("records", [[], [None, 3, {}], [{"name": "x", "us": float("nan")}], [{"us": -5, "block": "x"}],
                                     [{"kind": "copy", "us": "12"}]])
def test_malformed_records_prove_nothing(records):
    what = what_ran(records, [fact()])
    assert what.own_share == what.own_us == 0
    assert allowed(what, ("own",)) == "nothing ran on the device"


def shares(own=0.0, vendor=0.0, torch=0.0, copy=0.0):
    return what_ran([record("gemm_kernel", own), record(NVJET, vendor), record("void at::native::f<1>()", torch),
                     record("Memcpy DtoD (Device -> Device)", copy, kind="copy")], [fact()])


@pytest.mark.parametrize("what, allow, fine", [
    (shares(own=100), ("own",), True), (shares(own=55, copy=45), ("own",), True), (shares(own=60, torch=40), ("own",), True),
    (shares(own=45, copy=55), ("own",), False), (shares(own=45, torch=55), ("own",), False),
    (shares(own=95, vendor=5), ("own",), True), (shares(own=60, vendor=40), ("own",), False),  # an own kernel that idles
    (shares(own=20, vendor=80), ("own", "vendor"), True), (shares(own=20, torch=80), ("own", "vendor"), False),
    (shares(torch=60, copy=40), ("own", "torch"), True), (shares(vendor=100), ("vendor",), True)])
def test_who_may_do_the_work(what, allow, fine):
    assert (allowed(what, allow) == "") is fine, allowed(what, allow)


TRACE = [
    {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    *({"ph": "X", "cat": "kernel", "name": "scale_kernel", "pid": 0, "tid": 7, "ts": t, "dur": 3.5,
       "args": {"queued": 0, "device": 0, "stream": 7, "registers per thread": 40, "shared memory": 512,
                "blocks per SM": 1.5, "grid": [16, 1, 1], "block": [128, 1, 1], "est. achieved occupancy %": 9}}
      for t in range(4)),
    {"ph": "X", "cat": "kernel", "name": "scale_kernel", "dur": 1, "args": {"grid": [1, 1, 1], "block": [256, 1, 1]}},
    {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)", "dur": 20.0, "args": {"bytes": 64}},
    {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "dur": 900, "args": {}}]


@pytest.fixture
def toolrun(monkeypatch):
    """The module as it lies beside candidates, where its siblings are found by their bare names."""
    monkeypatch.syspath_prepend(os.path.dirname(serve.__file__))
    return importlib.import_module("toolrun")


def test_a_trace_becomes_a_bounded_table(toolrun):
    copy, scale, odd = toolrun.aggregate(TRACE)
    assert (copy["kind"], copy["us"]) == ("copy", 20.0)
    assert (scale["us"], scale["count"], scale["registers"], scale["shared"]) == (14.0, 4, 40, 512)
    assert scale["block"] == [128, 1, 1] and odd["block"] == [256, 1, 1]
    many = toolrun.aggregate([{**TRACE[1], "name": f"k{i}"} for i in range(1000)])
    assert len(many) == toolrun.MAX_RECORDS + 1 and sum(r["us"] for r in many) == pytest.approx(3500)


# --- the ladder

WORK = {"big": (4.8e9, 0.0, "float32")}


def test_the_best_rung_that_there_is_something_for():
    peaks = KNOWN["h200"]
    facts = {"big": [fact()]}
    counted = toollogs.Counters(10.0, {"dram": 0.9, "sm": 0.2}, 0.4, 128, 0, 0.0, 0.0, {"barrier": 0.8})
    full = {"device_us": {"big": 1000.0}, "times": {"big": 2000.0}, "work": WORK, "modelled": {"dram": 0.3}}
    best = ladder(peaks, facts, counters=counted, **full)
    assert (best.rung, best.load["dram"], best.occupancy) == ("ncu", 0.9, 0.4) and "barrier 80%" in " ".join(best.notes)
    traced = ladder(peaks, facts, counters="no right", **full)
    assert (traced.rung, traced.load["dram"]) == ("cupti", 1.0) and traced.facts["device_share"] == 0.5
    assert "no counters: no right" in traced.notes and any("launching from the host" in note for note in traced.notes)
    assert traced.occupancy == profile.occupancy(peaks, 128, 49152, 4)
    timed = ladder(peaks, facts, times={"big": 2000.0}, work=WORK)
    assert (timed.rung, timed.load["dram"]) == ("timed", 0.5)
    assert ladder(peaks, facts, modelled={"dram": 0.3}).rung == "model"
    assert ladder(peaks, facts, times={"big": 2000.0}).rung == ladder(peaks, {}).rung == "compiled"
