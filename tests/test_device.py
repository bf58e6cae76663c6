"""The table of peaks against what datasheets imply of each other, driver names, `--device`, and measured rates."""

import dataclasses
import math
import string

import pytest
from conftest import KERNEL, TASK
from hypothesis import given
from hypothesis import strategies as st

from cluster.workshop import target_of
from kernelband.device import ACC16, KNOWN, Device, Peaks, modelled, overridden, parse, peaks_of, roofline_us
from kernelband.errors import UserError
from kernelband.evaluate.compile import Compiler
from kernelband.evaluate.specs import shapes_only
from kernelband.task import load

ASKED = {"h200", "h100", "a100", "a10", "l4", "l40s", "rtx3090", "rtx4090", "rtx5090", "b200", "mi250x", "mi300x"}
LANES = {80: 64, "gfx90a": 64}  # fp32 multiply-adds a clock and SM; 128 on all others


def test_the_kinds_that_were_asked_for_are_there():
    assert set(KNOWN) >= ASKED and all(peaks.name == name for name, peaks in KNOWN.items())


@pytest.mark.parametrize("peaks", KNOWN.values(), ids=KNOWN)
def test_a_row_agrees_with_itself(peaks: Peaks):
    for value in dataclasses.astuple(peaks):
        assert not isinstance(value, (int, float)) or (value > 0 and math.isfinite(value))
    rates = peaks.tensor_tflops
    assert math.isclose(peaks.fp32_tflops, peaks.sms * LANES.get(peaks.arch, 128) * 2 * peaks.clock_ghz / 1e3, rel_tol=0.02)
    assert rates["bfloat16"] == rates["float16"] and rates["float32"] <= rates["tf32"] <= rates["float16"] <= rates["int8"]
    assert rates.get(ACC16, rates["float16"]) >= rates["float16"]
    assert peaks.dram_gbs < peaks.l2_gbs
    assert any(word in peaks.source for word in ("datasheet", "data sheet", "whitepaper", "product brief"))
    if peaks.backend == "cuda":
        assert peaks.warp == 32 and peaks.capability == (peaks.arch // 10, peaks.arch % 10)
        assert peaks.smem_per_sm_bytes - peaks.max_shared_bytes == 1024  # what the driver keeps of each block
    else:
        assert peaks.warp == 64 and str(peaks.arch).startswith("gfx")
        with pytest.raises(UserError, match=f"{peaks.name}.*AMD.*h200"):
            _ = peaks.capability


@pytest.mark.parametrize("name, kind", [
    ("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie"),
    ("NVIDIA H100 NVL", "h100-nvl"), ("NVIDIA A100-SXM4-80GB", "a100"),
    ("NVIDIA A100 80GB PCIe", "a100"), ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
    ("NVIDIA A10", "a10"), ("NVIDIA L4", "l4"), ("NVIDIA L40S", "l40s"), ("NVIDIA GeForce RTX 3090", "rtx3090"),
    ("NVIDIA GeForce RTX 4090", "rtx4090"), ("NVIDIA GeForce RTX 5090", "rtx5090"), ("NVIDIA B200", "b200"),
    ("AMD Instinct MI300X", "mi300x"), ("AMD Instinct MI250X/MI250", "mi250x"),
])
def test_a_drivers_name_finds_its_kind(name, kind):
    assert peaks_of(name) is KNOWN[kind] and peaks_of(name.upper()) is KNOWN[kind]


@pytest.mark.parametrize("name", [
    "", "NVIDIA GH200 480GB", "NVIDIA GB200", "NVIDIA A10G", "NVIDIA L40", "NVIDIA H20", "NVIDIA H800", "NVIDIA RTX A4000",
    "NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3080",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA A10-24Q", "GRID A100-40C", "AMD Instinct MI300A", "NVIDIA TITAN RTX", "4090",
])
def test_a_relative_of_a_known_kind_is_not_taken_for_it(name):
    assert peaks_of(name) is None


@given(st.sampled_from(["H200", "H100", "A100", "A10", "L4", "L40S", "B200", "MI300X"]),
       st.text(string.ascii_letters + string.digits, min_size=1, max_size=3), st.booleans())
def test_a_longer_word_is_another_gpu(kind, more, before):
    word = more + kind if before else kind + more
    found = peaks_of(f"NVIDIA {word}")
    assert found is None or found.name == word.lower()


def test_amd_is_refused_as_a_device_with_the_reason():
    for name in ("mi250x", "mi300x"):
        with pytest.raises(UserError, match=rf"model:{name}: AMD.*CUDA only.*model:h200") as caught:
            parse(f"model:{name}")
        assert "model:mi" not in str(caught.value).partition("Known")[2]
    with pytest.raises(UserError, match="did you mean 'model:rtx4090'"):
        parse("model:rtx409")
    for name in modelled():
        assert parse(f"model:{name}") == Device("model", name)


def test_a_target_carries_backend_architecture_and_warp():
    for kind, expected in (("rtx5090", ("cuda", 120, 32, 101376)), ("mi300x", ("hip", "gfx942", 64, 65536))):
        target = target_of(Device("model", kind), KNOWN[kind])
        assert (target.backend, target.arch, target.warp_size, target.max_shared) == expected


def test_every_kind_that_can_be_modelled_can_be_compiled_for(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "kernel.py").write_text(KERNEL)
    task = load(tmp_path).task
    cases = [shapes_only(task, case) for case in task.with_role("timed")]
    kinds = {KNOWN[name].arch: name for name in modelled()}
    assert set(kinds) == {80, 86, 89, 90, 100, 120}
    with Compiler(tmp_path / "cache") as compiler:
        for name in kinds.values():
            compiled = compiler.compile(KERNEL, task.entry, cases, target_of(Device("model", name), KNOWN[name]))
            assert compiled.ok, (name, compiled.error)
            assert compiled.facts["big"][0].registers > 0, name


rates = st.floats(0.1, 1e5)


@given(st.sampled_from(sorted(KNOWN)), st.none() | rates, st.dictionaries(st.sampled_from(["float16", "tf32", "int8"]), rates))
def test_measured_rates_take_the_place_of_the_tables(name, dram, tensor):
    before = KNOWN[name]
    copy = dict(before.tensor_tflops)
    after = overridden(before, dram, tensor or None)
    assert before.tensor_tflops == copy, "the table itself was changed"
    if dram is None and not tensor:
        assert after is before
        return
    assert after.dram_gbs == (before.dram_gbs if dram is None else dram)
    assert after.tensor_tflops == {**before.tensor_tflops, **tensor}
    assert "measured on this GPU" in after.source and before.source in after.source
    assert all(dtype in after.source for dtype in tensor) and ("DRAM copy" in after.source) == (dram is not None)
    same = {f.name for f in dataclasses.fields(Peaks)} - {"dram_gbs", "tensor_tflops", "source"}
    assert all(getattr(after, field) == getattr(before, field) for field in same)


@pytest.mark.parametrize("dram, tensor", [(0.0, None), (-1.0, None), (math.nan, None), (math.inf, None),
                                          (None, {"float16": 0.0})])
def test_a_rate_that_is_none_is_refused(dram, tensor):
    with pytest.raises(ValueError, match="must be a positive number"):
        overridden(KNOWN["h200"], dram, tensor)


def test_a_rate_of_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="h200 has no rate for 'float61'; did you mean 'float16'"):
        overridden(KNOWN["h200"], None, {"float61": 3.0})


@given(st.sampled_from(sorted(KNOWN)), st.floats(1, 1e12), st.floats(0, 1e15), st.sampled_from(["float16", "float32", "float64"]))
def test_the_roofline_is_the_greater_of_two_and_grows_with_either(name, moved, flops, dtype):
    peaks = KNOWN[name]
    least = roofline_us(peaks, moved, flops, dtype)
    assert least >= moved / (peaks.dram_gbs * 1e3)
    assert roofline_us(peaks, 2 * moved, flops, dtype) >= least and roofline_us(peaks, moved, 2 * flops, dtype) >= least
    assert roofline_us(peaks, 2 * moved, 2 * flops, dtype) == pytest.approx(2 * least)


def test_sums_in_float16_are_not_faster_than_physics_on_a_geforce():
    """A 4090 adds up float16 products in float16 at twice the rate of the default; an honest kernel may do that."""
    assert roofline_us(KNOWN["rtx4090"], 1, 330.3e12, "float16") == pytest.approx(1e6)
    assert roofline_us(KNOWN["rtx4090"], 1, 165.2e12, "bfloat16") == pytest.approx(1e6)
    assert roofline_us(KNOWN["h200"], 1, 989e12, "float16") == pytest.approx(1e6)
