"""What the latency model promises: it is monotone, finite, never below the roofline, and orders known kernels rightly."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelband.evaluate import model
from kernelband.evaluate.model import Prediction, predict, roofline_us


@dataclass(frozen=True)
class H200:
    name: str = "H200"
    sms: int = 132
    dram_gbs: float = 4800
    l2_gbs: float = 7000
    l2_bytes: float = 60e6
    fp32_tflops: float = 67
    tensor_tflops: dict[str, float] = field(
        default_factory=lambda: {"float16": 989.0, "bfloat16": 989.0, "tf32": 494.0, "float32": 67.0, "float8": 1979.0}
    )
    smem_per_sm_bytes: int = 228 * 1024
    regs_per_sm: int = 65536
    max_warps_per_sm: int = 64
    max_blocks_per_sm: int = 32
    clock_ghz: float = 1.98
    launch_us: float = 2.5


PEAKS = H200()
ROWS, COLS = 4096, 8192


def softmax(block: int, passes: int = 3) -> dict[str, Any]:
    """The trace of examples/softmax with another BLOCK; one pass keeps the row in registers."""
    size, steps = ROWS * COLS * 2, COLS // block
    return {
        "kernel": "softmax", "grid": [ROWS, 1, 1], "programs": ROWS,
        "per_program": {
            "load_bytes": passes * COLS * 2, "store_bytes": COLS * 2, "loads": passes * steps, "stores": steps,
            "lane_ops": COLS * (4 + 4 * passes), "int_ops": 10 * COLS, "special_ops": COLS * min(passes, 2) + COLS,
            "reductions": 2 * steps, "batches": passes * steps, "cold_batches": steps,
        },
        "tensors": [
            {"arg": "x", "id": 0, "bytes": size, "read": passes * size, "read_once": size, "written": 0},
            {"arg": "y", "id": 1, "bytes": size, "read": 0, "written": size},
        ],
    }


def matmul(m: int, n: int, k: int, side: int = 4096) -> dict[str, Any]:
    programs, steps, size = (side // m) * (side // n), side // k, side * side * 2
    return {
        "kernel": "matmul", "programs": programs,
        "per_program": {
            "load_bytes": (m + n) * side * 2, "store_bytes": m * n * 2, "loads": 2 * steps, "stores": 1, "dots": steps,
            "dot_flops": 2 * m * n * side, "lane_ops": 30 * m * n, "int_ops": 3 * (m + n) * side, "special_ops": m * n,
            "batches": steps, "cold_batches": steps,
        },
        "tensors": [
            {"arg": "a", "id": 0, "bytes": size, "read": size * side // n, "read_once": size * side // n, "written": 0},
            {"arg": "b", "id": 1, "bytes": size, "read": size * side // m, "read_once": size * side // m, "written": 0},
            {"arg": "c", "id": 2, "bytes": size, "read": 0, "written": size},
        ],
        "dot": {"dtype": "float16", "tile": [m, n, k]},
    }


def facts(warps: int, registers: int, shared: int = 0, stages: int = 3, spills: int = 0) -> dict[str, Any]:
    return {"num_warps": warps, "num_stages": stages, "shared": shared, "registers": registers, "spills": spills}


def one(trace: dict[str, Any], compiled: dict[str, Any] | None) -> Prediction:
    return predict(PEAKS, [(trace, compiled)])


class TestKnownKernels:
    def test_softmax_gains_from_larger_blocks_until_dram_or_issue_is_the_limit(self) -> None:
        times = [one(softmax(block), facts(4, 24 + block // 64, 64)).us for block in (256, 512, 1024, 2048, 4096)]
        assert times == sorted(times, reverse=True)
        assert times[0] > 1.4 * times[2], "a block of 256 waits for memory most of the time"

    def test_softmax_gains_from_fewer_passes(self) -> None:
        times = [one(softmax(8192, passes), facts(8, 90, 64)).us for passes in (3, 2, 1)]
        assert times == sorted(times, reverse=True) and times[2] < 0.8 * times[0]

    def test_a_single_pass_softmax_is_near_the_memory_roofline(self) -> None:
        prediction = one(softmax(8192, 1), facts(8, 90, 64))
        floor = roofline_us(PEAKS, 2 * ROWS * COLS * 2, 0)
        assert floor <= prediction.us < 1.6 * floor and prediction.bound == "dram"

    def test_matmul_gains_from_larger_tiles_until_registers_spill(self) -> None:
        small = one(matmul(64, 64, 32), facts(4, 90, 24 << 10))
        large = one(matmul(128, 128, 64), facts(8, 113, 96 << 10))
        spilled = one(matmul(256, 256, 64), facts(8, 255, 192 << 10, spills=900))
        assert large.us < 0.7 * small.us
        assert spilled.us > 1.3 * large.us
        assert large.us > roofline_us(PEAKS, 0, 2 * 4096**3, "float16")

    def test_occupancy_and_waves_follow_the_occupancy_calculator(self) -> None:
        # 113 registers round to 3,840 a warp: two blocks of 8 warps; 97 KiB of shared memory a block: two as well.
        prediction = one(matmul(128, 128, 64), facts(8, 113, 96 << 10))
        assert prediction.occupancy == 2 * 8 / 64
        assert prediction.waves == pytest.approx(1024 / (2 * 132))

    def test_few_programs_leave_the_device_idle(self) -> None:
        whole, part = matmul(128, 128, 64), matmul(128, 128, 64)
        part["programs"] = 133  # one more than there are SMs
        whole["programs"] = 132
        compiled = facts(8, 200, 96 << 10)
        assert one(part, compiled).terms[0]["mma_us"] == pytest.approx(2 * one(whole, compiled).terms[0]["mma_us"])

    def test_two_kernels_cost_more_than_one_that_fuses_them(self) -> None:
        size = ROWS * COLS * 2
        pointwise = {
            "programs": 8192, "per_program": {"load_bytes": 8192, "store_bytes": 8192, "lane_ops": 8192, "batches": 1},
            "tensors": [{"id": "t", "bytes": size, "read": size, "written": 0},
                        {"id": "o", "bytes": size, "read": 0, "written": size}],
        }
        first, second = copy.deepcopy(pointwise), copy.deepcopy(pointwise)
        first["tensors"][0]["id"] = "x"
        first["tensors"][1]["id"] = "t"
        unfused = predict(PEAKS, [(first, facts(4, 32)), (second, facts(4, 32))])
        assert unfused.us > 1.8 * one(pointwise, facts(4, 32)).us

    def test_what_an_earlier_launch_left_in_l2_is_not_fetched_again(self) -> None:
        def launch(read: str, write: str, size: int) -> dict[str, Any]:
            return {"programs": 1024, "per_program": {"load_bytes": size / 1024, "batches": 1},
                    "tensors": [{"id": read, "bytes": size, "read": size, "written": 0},
                                {"id": write, "bytes": size, "read": 0, "written": size}]}

        for size, warm in ((8 << 20, True), (256 << 20, False)):
            chain = predict(PEAKS, [(launch("x", "t", size), facts(4, 32)), (launch("t", "y", size), facts(4, 32))])
            first, second = (terms["dram_us"] for terms in chain.terms)
            assert (second < 0.6 * first) is warm

    def test_work_given_to_torch_is_not_free(self) -> None:
        trace = {"torch": True, "programs": 1, "per_program": {"dot_flops": 2 * 4096**3}, "tensors": [],
                 "dot": {"dtype": "float16", "tile": [128, 128, 64]}}
        assert one(trace, None).us > roofline_us(PEAKS, 0, 2 * 4096**3, "float16")

    def test_the_slower_of_host_and_device_decides(self) -> None:
        launch = (softmax(1024), facts(4, 40))
        device = predict(PEAKS, [launch])
        assert predict(PEAKS, [launch], host_us=5).us == device.us
        slow = predict(PEAKS, [launch], host_us=500)
        assert slow.us == 500 and slow.bound == "host"

    def test_missing_facts_widen_the_interval(self) -> None:
        known, unknown = one(softmax(1024), facts(4, 40)), one(softmax(1024), None)
        assert known.high / known.us == pytest.approx(1 + model.RESIDUAL)
        assert unknown.high / unknown.us > known.high / known.us


TILES = st.sampled_from([(16, 16, 16), (64, 64, 32), (128, 128, 64), (128, 256, 64), (32, 256, 32)])
COMPILED = st.builds(
    facts, warps=st.sampled_from([1, 2, 4, 8, 16]), registers=st.integers(16, 255), shared=st.integers(0, 227 << 10),
    stages=st.integers(1, 7), spills=st.integers(0, 2000),
)
COUNT = st.floats(0, 1e7)


@st.composite
def traces(draw: st.DrawFn) -> dict[str, Any]:
    tensors = []
    for number in range(draw(st.integers(1, 3))):
        size = draw(st.integers(1, 1 << 32))
        read = draw(st.floats(0, 1e11))
        tensors.append({
            "arg": f"t{number}", "id": number, "bytes": size, "read": read, "written": draw(st.floats(0, 1e11)),
            "read_once": draw(st.floats(0, 1)) * read,
        })
    names = ("lane_ops", "int_ops", "special_ops", "atomics", "dot_flops", "dots", "reductions")
    counts = {name: draw(COUNT) for name in names}
    counts["batches"] = draw(st.integers(0, 2000))
    counts["cold_batches"] = draw(st.floats(0, 1)) * counts["batches"]
    dtype = draw(st.sampled_from(["float16", "tf32", "float32", "float64"]))
    return {"programs": draw(st.integers(1, 1 << 22)), "per_program": counts, "tensors": tensors,
            "dot": {"dtype": dtype, "tile": list(draw(TILES))}}


def scaled(trace: dict[str, Any], factor: float, *names: str) -> dict[str, Any]:
    out = copy.deepcopy(trace)
    for name in names:
        if name in out["per_program"]:
            out["per_program"][name] *= factor
        for tensor in out["tensors"]:
            if name in tensor:
                tensor[name] *= factor
    return out


GROW = st.floats(1.0, 50.0)
ROUNDING = 1 - 1e-9


class TestProperties:
    @settings(max_examples=200, deadline=None)
    @given(traces(), COMPILED)
    def test_finite_deterministic_and_never_below_the_roofline(self, trace: dict, compiled: dict) -> None:
        first, again = one(trace, compiled), one(copy.deepcopy(trace), dict(compiled))
        assert first == again
        assert math.isfinite(first.us) and 0 < first.low <= first.us <= first.high
        unique = sum(max(min(t["read_once"], t["bytes"]), min(t["written"], t["bytes"])) for t in trace["tensors"])
        flops = trace["per_program"]["dot_flops"] * trace["programs"]
        floor = roofline_us(PEAKS, unique, flops, trace["dot"]["dtype"])
        assert first.low >= floor * ROUNDING
        assert all(value >= 0 and math.isfinite(value) for terms in first.terms for value in terms.values())

    @settings(max_examples=200, deadline=None)
    @given(traces(), COMPILED, GROW, st.sampled_from([("read",), ("written",), ("read", "written", "read_once")]))
    def test_more_bytes_are_never_faster(self, trace: dict, compiled: dict, factor: float, names: tuple) -> None:
        assert one(scaled(trace, factor, *names), compiled).us >= one(trace, compiled).us * ROUNDING

    @settings(max_examples=200, deadline=None)
    @given(traces(), COMPILED, GROW, st.sampled_from(
        ["dot_flops", "lane_ops", "int_ops", "special_ops", "atomics", "reductions"]))
    def test_more_work_is_never_faster(self, trace: dict, compiled: dict, factor: float, name: str) -> None:
        assert one(scaled(trace, factor, name), compiled).us >= one(trace, compiled).us * ROUNDING

    @settings(max_examples=100, deadline=None)
    @given(traces(), COMPILED, st.integers(0, 5000))
    def test_more_spills_are_never_faster(self, trace: dict, compiled: dict, spills: int) -> None:
        more = {**compiled, "spills": compiled["spills"] + spills}
        assert one(trace, more).us >= one(trace, compiled).us * ROUNDING

    @settings(max_examples=100, deadline=None)
    @given(traces(), COMPILED, st.floats(1, 4))
    def test_a_device_with_more_bandwidth_is_never_slower(self, trace: dict, compiled: dict, factor: float) -> None:
        faster = replace(PEAKS, dram_gbs=PEAKS.dram_gbs * factor, l2_gbs=PEAKS.l2_gbs * factor)
        assert predict(faster, [(trace, compiled)]).us <= one(trace, compiled).us / ROUNDING


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("where", ["programs", "per_program", "tensors"])
def test_numbers_that_cannot_be_are_refused(bad: float, where: str) -> None:
    trace = softmax(1024)
    if where == "programs":
        trace["programs"] = bad
    elif where == "per_program":
        trace["per_program"]["lane_ops"] = bad
    else:
        trace["tensors"][0]["read"] = bad
    with pytest.raises(ValueError, match="not finite"):
        one(trace, None)


class TestPairing:
    TRACES = ({"kernel": "a", "grid": [4, 1, 1]}, {"kernel": "aten.mm", "torch": True}, {"kernel": "b", "grid": [2, 1, 1]})
    FACTS = ({"kernel": "a", "grid": [4, 1, 1], "registers": 1}, {"kernel": "b", "grid": [2, 1, 1], "registers": 2})

    def test_kernels_meet_their_facts_and_torch_has_none(self) -> None:
        assert model.pair(self.TRACES, self.FACTS) == [
            (self.TRACES[0], self.FACTS[0]), (self.TRACES[1], None), (self.TRACES[2], self.FACTS[1])]

    def test_launches_beyond_the_recorded_facts_take_those_of_their_kernel(self) -> None:
        assert model.pair([*self.TRACES, self.TRACES[0]], self.FACTS)[3] == (self.TRACES[0], self.FACTS[0])

    @pytest.mark.parametrize(("traces", "facts"), [
        (TRACES[:2], FACTS), (TRACES, FACTS[:1]), (TRACES, FACTS[::-1]),
        ([{**TRACES[0], "grid": [1, 1, 1]}, *TRACES[1:]], FACTS),
    ])
    def test_a_call_that_differs_between_interpreter_and_compiler_is_refused(self, traces: Any, facts: Any) -> None:
        with pytest.raises(ValueError, match=r"traced"):
            model.pair(traces, facts)


def test_load_names_the_limiting_resource() -> None:
    shares = model.load(one(softmax(8192, 1), facts(8, 90, 64)))
    assert set(shares) == {"dram", "l2", "compute", "issue", "latency"}
    assert max(shares, key=lambda name: shares[name]) == "dram" and 0.5 < shares["dram"] <= 1
    assert shares["compute"] == 0


def test_nothing_to_model_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to model"):
        predict(PEAKS, [])


def test_every_blind_spot_is_explained() -> None:
    assert {"cache modifiers", "program order", "bank conflicts"} <= set(model.BLIND)
    assert all(text.endswith(".") and len(text) > 30 for text in model.BLIND.values())
