"""What the interpreting child promises: right outputs of small cases, exact counts of known kernels, honest evidence."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernelband.evaluate.zygote import CandidateError, Child, ChildDied, Zygote

HEAD = "import torch\nimport triton\nimport triton.language as tl\n"
ADD = HEAD + '''
@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)

def add(x, y):
    assert x.is_cuda and x.device.type == "cuda"
    out = torch.empty_like(x)
    n = x.numel()
    add_kernel[(triton.cdiv(n, 256),)](x, y, out, n, BLOCK=256, num_warps=2)
    return out
'''
EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote("interpret")
    yield zygote
    zygote.close()


@pytest.fixture
def child(zygote: Zygote) -> Iterator[Child]:
    child = zygote.spawn()
    yield child
    child.kill()


def load(child: Child, source: str, entry: str) -> None:
    child.request("prepare", timeout_s=60)
    child.request("load", timeout_s=60, source=source, entry=entry)


def tensor(name: str, *shape: int, dtype: str = "float32") -> dict:
    return {"name": name, "kind": "tensor", "shape": list(shape), "dtype": dtype}


def memory(size: int, content: bytes = b"") -> int:
    fd = os.memfd_create("test")
    os.ftruncate(fd, size)
    os.pwrite(fd, content, 0)
    return fd


def check(child: Child, args: list, outputs: list[tuple[dict, list[int], torch.dtype]], **payload) -> tuple[dict, list]:
    """Send a check of named tensors and scalars; gives the reply and the tensors that arrived in the output memory."""
    arena, specs = bytearray(), []
    for name, value in args:
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            stride = list(value.stride())
            data = torch.as_strided(value, (value.untyped_storage().nbytes() // value.element_size(),), (1,), 0)
            specs.append({**tensor(name, *value.shape, dtype=dtype), "stride": stride, "offset": len(arena)})
            arena += data.view(torch.uint8).numpy().tobytes()
            arena += bytes(-len(arena) % 256)
        else:
            specs.append({"name": name, "kind": "scalar", "value": value})
    wanted, size = [], 0
    for source, shape, dtype in outputs:
        wanted.append({**source, "shape": shape, "dtype": str(dtype).removeprefix("torch."), "offset": size})
        size += -(-math.prod(shape) * dtype.itemsize // 256) * 256
    fds = [memory(max(1, len(arena)), bytes(arena)), memory(max(1, size))]
    try:
        reply = child.request("check", timeout_s=60, fds=fds, args=specs, outputs=wanted, **payload)
        found = []
        for spec, (_, shape, dtype) in zip(wanted, outputs, strict=True):
            raw = bytearray(os.pread(fds[1], math.prod(shape) * dtype.itemsize, spec["offset"]))
            found.append(torch.frombuffer(raw, dtype=dtype).reshape(shape))
        return reply, found
    finally:
        for fd in fds:
            os.close(fd)


def trace(child: Child, *args: dict, **payload) -> list[dict]:
    reply = child.request("trace", timeout_s=60, args=list(args), **payload)
    assert reply["dropped"] == 0
    return reply["launches"]


RETURNED = {"from": "return", "index": 0}


class TestCheck:
    def test_result_of_a_wrapper_that_asks_for_cuda_arrives_as_bytes(self, child: Child) -> None:
        load(child, ADD, "add")
        x, y = torch.randn(1000), torch.randn(1000)
        reply, (out,) = check(child, [("x", x), ("y", y)], [(RETURNED, [1000], torch.float32)])
        assert torch.equal(out, x + y)
        assert reply["outputs"] == [{"shape": [1000], "dtype": "float32", "stride": [1], "written": True}]
        assert reply["inputs_changed"] == [] and reply["out_of_bounds"] == [] and reply["lifted"] is False

    def test_strided_input_and_mutated_argument(self, child: Child) -> None:
        load(child, HEAD + "def f(x, a):\n    x.mul_(a)\n", "f")
        x = torch.randn(6, 4).T
        reply, (out,) = check(child, [("x", x), ("a", 2.0)], [({"from": "arg", "name": "x"}, [4, 6], torch.float32)])
        assert torch.equal(out, x * 2)
        assert reply["inputs_changed"] == ["x"] and reply["outputs"][0]["stride"] == [1, 4]

    def test_nested_outputs_are_counted_in_order(self, child: Child) -> None:
        load(child, HEAD + "def f(x):\n    return {'a': (x + 1, None), 'b': [x + 2]}\n", "f")
        _, (out,) = check(child, [("x", torch.zeros(3))], [({"from": "return", "index": 2}, [3], torch.float32)])
        assert out.tolist() == [2, 2, 2]

    def test_wrong_shape_and_missing_output_are_reported_and_not_written(self, child: Child) -> None:
        load(child, HEAD + "def f(x):\n    return x + 1\n", "f")
        outputs = [(RETURNED, [4], torch.float32), ({"from": "return", "index": 1}, [3], torch.float32)]
        reply, found = check(child, [("x", torch.ones(3))], outputs)
        assert [out["written"] for out in reply["outputs"]] == [False, False]
        assert reply["outputs"][0]["shape"] == [3] and reply["outputs"][1]["missing"]
        assert all((t == 0).all() for t in found)

    @pytest.mark.parametrize("poison", ["nan", 12345.0])
    def test_memory_that_no_kernel_writes_is_poisoned(self, child: Child, poison: object) -> None:
        load(child, HEAD + "def f(x):\n    return torch.empty_like(x), x.new_empty(2), torch.empty(2, device='cuda')\n", "f")
        wanted = [({"from": "return", "index": k}, [2], torch.float32) for k in range(3)]
        _, found = check(child, [("x", torch.ones(2))], wanted, poison=poison)
        for out in found:
            assert out.isnan().all() if poison == "nan" else (out == poison).all()

    def test_a_store_outside_an_input_is_seen(self, child: Child) -> None:
        source = ADD.replace("mask=inside)\n\n", "mask=at < n + 1)\n\n").replace("out = torch.empty_like(x)", "out = x")
        load(child, source, "add")
        reply, _ = check(child, [("x", torch.ones(300)), ("y", torch.ones(300))], [(RETURNED, [300], torch.float32)])
        assert reply["out_of_bounds"] == ["x"]

    @pytest.mark.parametrize("maker", ["empty_like(x)", "zeros_like(x)", "empty(301)[1:]", "zeros(x.shape)"])
    @pytest.mark.parametrize("at", ["at < n + 1", "at < n", "at > -2"])
    def test_a_store_beside_what_was_allocated_is_seen(self, child: Child, maker: str, at: str) -> None:
        source = ADD.replace("mask=inside)\n\n", f"mask={at})\n\n").replace("empty_like(x)", maker)
        load(child, source.replace("inside = at < n", "at -= 1 if n == 0 else 0\n    inside = at < n"), "add")
        x = torch.randn(300)
        reply, (out,) = check(child, [("x", x), ("y", x)], [(RETURNED, [300], torch.float32)])
        assert reply["out_of_bounds"] == ([] if at == "at < n" else [""]) and torch.equal(out, x + x)

    def test_allocations_between_guards_look_as_always(self, child: Child) -> None:
        load(child, HEAD + """
def f(x):
    a, b = torch.empty(3, 4, device="cuda"), torch.zeros_like(x.t())
    c = torch.empty(2, 3, 4, 5, dtype=torch.bfloat16, memory_format=torch.channels_last)
    d = torch.empty(0)
    d.resize_(4)
    for t, stride in ((a, (4, 1)), (b, (1, 4)), (c, (60, 1, 15, 3)), (d, (1,))):
        assert t.stride() == stride and t.storage_offset() == 0 and type(t) is torch.Tensor, (t.stride(), stride)
        assert t.data_ptr() % 16 == 0 and not t.requires_grad
    assert b.sum() == 0 and a.untyped_storage().nbytes() == 48
    p = torch.zeros(3, requires_grad=True)
    assert p.requires_grad and p.is_leaf
    return x + 0
""", "f")
        x = torch.randn(3, 4)
        reply, (out,) = check(child, [("x", x)], [(RETURNED, [3, 4], torch.float32)])
        assert torch.equal(out, x) and reply["out_of_bounds"] == []

    @pytest.mark.parametrize("value, poison", [("bool", 1), ("bool", -1), ("int8", 1), ("int8", -1), ("uint8", -1)])
    def test_poison_of_whole_numbers_and_truth_values_depends_on_its_sign(self, child: Child, value: str, poison: int) -> None:
        load(child, HEAD + f"def f(x):\n    return torch.empty(4, dtype=torch.{value})\n", "f")
        dtype = getattr(torch, value)
        _, (out,) = check(child, [("x", torch.ones(1))], [(RETURNED, [4], dtype)], poison=poison)
        expected = poison > 0 if dtype == torch.bool else torch.iinfo(dtype).max // (3 if poison > 0 else 5)
        assert out.tolist() == [expected] * 4

    def test_tensors_of_a_slot_come_back_with_other_contents_and_nothing_tells(self, child: Child) -> None:
        load(child, HEAD + """
seen = []
def f(x):
    seen.append((id(x), x.data_ptr(), x._version))
    return x + 0, torch.tensor([len(set(seen)), x._version])
""", "f")
        wanted = [(RETURNED, [5], torch.float32), ({"from": "return", "index": 1}, [2], torch.int64)]
        for slot, forms in (("a", 1), ("a", 1), ("b", 2), ("a", 2), ("b", 2), (None, 3)):
            x = torch.randn(5)
            more = {"slot": slot} if slot else {}
            _, (out, count) = check(child, [("x", x)], wanted, **more)
            assert torch.equal(out, x) and count.tolist() == [forms, 0]
        x = torch.randn(5, 2).t()[0]  # another form under a known name is another tensor
        _, (out, count) = check(child, [("x", x)], wanted, slot="a")
        assert torch.equal(out, x) and count.tolist() == [4, 0]

    def test_a_slot_is_whole_again_after_it_was_written_beside_and_into(self, child: Child) -> None:
        source = ADD.replace("mask=inside)\n\n", "mask=at < n + 1)\n\n").replace("out = torch.empty_like(x)", "out = x")
        load(child, source, "add")
        for _ in range(2):
            x, y = torch.randn(300), torch.randn(300)
            reply, (out,) = check(child, [("x", x), ("y", y)], [(RETURNED, [300], torch.float32)], slot="a")
            assert reply["out_of_bounds"] == ["x"] and reply["inputs_changed"] == ["x"] and torch.equal(out, x + y)

    def test_idle_launches_leave_everything_to_the_host(self, child: Child) -> None:
        child.request("prepare", timeout_s=60, idle=True)
        source = ADD + """
hooked = []
add_kernel.add_pre_run_hook(lambda *a, **k: hooked.append(1))
def f(x, y):
    out = torch.zeros_like(x)
    add_kernel[lambda meta: (hooked.append(1), triton.cdiv(meta["n"], meta["BLOCK"]))[1:]](x, y, out, x.numel(), BLOCK=256)
    return out, torch.tensor([len(hooked)])
"""
        load(child, source, "f")
        x = torch.ones(300)
        wanted = [(RETURNED, [300], torch.float32), ({"from": "return", "index": 1}, [1], torch.int64)]
        _, (out, hooked) = check(child, [("x", x), ("y", x)], wanted)
        assert not out.any() and hooked.tolist() == [2]

    @pytest.mark.parametrize("body", ["return x.as_subclass(Late)", "y = x * 2\n    y.detach = lambda: x + 1\n    return y"])
    def test_a_result_that_would_do_its_work_later_is_not_taken_for_one(self, child: Child, body: str) -> None:
        load(child, HEAD + """
class Late(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return torch.zeros(3) if func.__name__ == "detach" else super().__torch_function__(func, types, args, kwargs)

""" + f"def f(x):\n    {body}\n", "f")
        reply, (out,) = check(child, [("x", torch.ones(3))], [(RETURNED, [3], torch.float32)])
        assert out.tolist() == ([2, 2, 2] if "lambda" in body else [0, 0, 0])
        assert reply["outputs"][0]["written"] is ("lambda" in body)

    def test_an_error_of_the_candidate_leaves_the_child_alive(self, child: Child) -> None:
        load(child, HEAD + "def f(x):\n    raise ZeroDivisionError('no')\n", "f")
        with pytest.raises(CandidateError) as caught:
            check(child, [("x", torch.ones(1))], [(RETURNED, [1], torch.float32)])
        assert caught.value.kind == "ZeroDivisionError" and caught.value.stage == "run"
        assert child.request("ping", timeout_s=10)["ok"]

    def test_a_wild_address_ends_the_child_and_nothing_else(self, child: Child, zygote: Zygote) -> None:
        load(child, ADD.replace("tl.load(x + at, mask=inside)", "tl.load(x + at + (1 << 42))"), "add")
        with pytest.raises(ChildDied) as caught:
            check(child, [("x", torch.ones(8)), ("y", torch.ones(8))], [(RETURNED, [8], torch.float32)])
        assert caught.value.kind == "signal"
        zygote.spawn().kill()

    def test_first_autotune_configuration_and_heuristics(self, child: Child) -> None:
        source = HEAD + '''
@triton.autotune([triton.Config({"A": 3}), triton.Config({"A": 5})], key=["n"])
@triton.heuristics({"B": lambda args: args["A"] * 10})
@triton.jit
def k(out, n, A: tl.constexpr, B: tl.constexpr):
    tl.store(out, A)
    tl.store(out + 1, B)

def f(x):
    out = torch.empty_like(x)
    k[(1,)](out, 2)
    return out
'''
        load(child, source, "f")
        _, (out,) = check(child, [("x", torch.ones(2))], [(RETURNED, [2], torch.float32)])
        assert out.tolist() == [3, 30]


    def test_a_reduction_with_the_kernels_own_function(self, child: Child) -> None:
        source = HEAD + '''
@triton.jit
def merge(mean_a, n_a, mean_b, n_b):
    return mean_a + (mean_b - mean_a) * n_b / (n_a + n_b), n_a + n_b

@triton.jit
def k(x, out, M: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    mean, n = tl.reduce((tl.load(x + at), tl.full((M, N), 1.0, tl.float32)), 1, merge)
    tl.store(out + tl.arange(0, M), mean)

def f(x):
    out = torch.empty(x.shape[0], device=x.device)
    k[(1,)](x, out, M=x.shape[0], N=x.shape[1])
    return out
'''
        load(child, source, "f")
        x = torch.randn(4, 64)
        _, (out,) = check(child, [("x", x)], [(RETURNED, [4], torch.float32)])
        assert torch.allclose(out, x.mean(1), atol=1e-6)


class TestBfloat16:
    def test_arithmetic_rounds_as_torch_does(self, child: Child) -> None:
        load(child, ADD, "add")
        x, y = torch.randn(500).bfloat16(), torch.randn(500).bfloat16()
        x[:3] = torch.tensor([math.inf, math.nan, -0.0])
        reply, (out,) = check(child, [("x", x), ("y", y)], [(RETURNED, [500], torch.bfloat16)])
        assert reply["lifted"] is True
        assert torch.equal(out.isnan(), (x + y).isnan())
        assert torch.equal(out.nan_to_num(), (x + y).nan_to_num())

    def test_dot_casts_constants_and_softmax(self, child: Child) -> None:
        source = HEAD + '''
@triton.jit
def k(a, b, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tile = i[:, None] * N + i[None, :]
    x = tl.dot(tl.load(a + tile), tl.load(b + tile))
    x = x.to(tl.bfloat16) * tl.full((1, 1), 0.5, tl.bfloat16)
    x = tl.abs(tl.where(x > 0, x, -x)).to(tl.float32)
    e = tl.exp(x - tl.max(x, axis=1)[:, None])
    tl.store(out + tile, e / tl.sum(e, axis=1)[:, None])

def f(a, b):
    out = torch.empty(a.shape, device=a.device, dtype=torch.bfloat16)
    k[(1,)](a, b, out, N=16)
    return out
'''
        load(child, source, "f")
        a, b = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).bfloat16()
        _, (out,) = check(child, [("a", a), ("b", b)], [(RETURNED, [16, 16], torch.bfloat16)])
        expected = torch.softmax((((a.float() @ b.float()).bfloat16() * 0.5).abs()).float(), 1).bfloat16()
        assert torch.allclose(out.float(), expected.float(), rtol=1e-2, atol=1e-4)


class TestTrace:
    def test_counts_of_a_masked_vector_add_are_exact(self, child: Child) -> None:
        load(child, ADD, "add")
        (launch,) = trace(child, tensor("x", 1000), tensor("y", 1000))
        assert (launch["kernel"], launch["grid"], launch["programs"], launch["sampled"]) == ("add_kernel", [4, 1, 1], 4, 4)
        assert launch["constexprs"] == {"BLOCK": 256} and launch["options"] == {"num_warps": 2}
        mean = launch["per_program"]
        assert (mean["load_bytes"], mean["store_bytes"]) == (2 * 4000 / 4, 4000 / 4)
        assert (mean["loads"], mean["stores"], mean["batches"]) == (2, 1, 1)
        assert mean["lane_ops"] == 256 and mean["dot_flops"] == 0
        by_name = {t["arg"]: t for t in launch["tensors"]}
        assert by_name["x"]["read"] == by_name["y"]["read"] == by_name["out"]["written"] == 4000
        assert by_name["x"]["bytes"] == 4000 and by_name["out"]["read"] == 0

    def test_large_grids_are_extrapolated_and_the_ragged_end_stands_for_itself(self, child: Child) -> None:
        load(child, ADD, "add")
        n = 256 * 5000 + 8
        (launch,) = trace(child, tensor("x", n), tensor("y", n))
        assert launch["programs"] == 5001 and launch["sampled"] == 8
        assert sum(t["read"] for t in launch["tensors"]) == pytest.approx(2 * 4 * n, rel=1e-9)

    def test_the_mean_of_a_causal_grid_is_exact_along_its_axis(self, child: Child) -> None:
        source = HEAD + '''
@triton.jit
def k(x, out, N: tl.constexpr):
    for start in range(0, tl.program_id(0) + 1):
        tl.load(x + start * N + tl.arange(0, N))

def f(x):
    k[(24, 50)](x, x, N=16)
    return x
'''
        load(child, source, "f")
        (launch,) = trace(child, tensor("x", 24 * 16))
        exact = 50 * 16 * 4 * 24 * 25 / 2
        assert launch["sampled"] == 8
        assert sum(t["read"] for t in launch["tensors"]) == pytest.approx(exact, rel=0.05)

    def test_strided_reading_moves_whole_sectors(self, child: Child) -> None:
        load(child, ADD.replace("x + at,", "x + at * 16,"), "add")
        (launch,) = trace(child, tensor("x", 16 * 1024), tensor("y", 1024))
        tensors = {t["arg"]: t for t in launch["tensors"]}
        per_lane = tensors["x"]["read_sectors"] / tensors["x"]["read"]
        assert per_lane == 8 and tensors["y"]["read_sectors"] == tensors["y"]["read"]

    def test_softmax_reads_its_rows_three_times(self, child: Child) -> None:
        load(child, (EXAMPLES / "softmax/kernel.py").read_text(), "softmax")
        (launch,) = trace(child, tensor("x", 4096, 8192, dtype="float16"))
        size = 4096 * 8192 * 2
        tensors = {t["arg"]: t for t in launch["tensors"]}
        assert tensors["x_ptr"]["read"] == 3 * size and tensors["x_ptr"]["read_once"] == size
        assert tensors["y_ptr"]["written"] == size
        mean = launch["per_program"]
        assert (mean["batches"], mean["cold_batches"], mean["reductions"]) == (96, 32, 64)
        assert mean["special_ops"] == 3 * 8192  # two exponentials and a division an element

    def test_matmul_of_4096_is_counted_exactly_within_seconds(self, child: Child) -> None:
        load(child, (EXAMPLES / "matmul_bias_gelu/kernel.py").read_text(), "matmul_bias_gelu")
        args = [tensor("a", 4096, 4096, dtype="float16"), tensor("b", 4096, 4096, dtype="float16"),
                tensor("bias", 4096, dtype="float16")]
        begun = time.monotonic()
        (launch,) = trace(child, *args)
        seconds = time.monotonic() - begun
        assert launch["per_program"]["dot_flops"] * launch["programs"] == 2 * 4096**3
        assert launch["dot"] == {"dtype": "float16", "tile": [64, 64, 32]}
        read = {t["arg"]: t["read"] for t in launch["tensors"]}
        assert read["a_ptr"] == read["b_ptr"] == 4096 * 4096 * 2 * 64
        assert launch["per_program"]["batches"] == 128 + 1
        assert seconds < 15, "the aim is 3 s on an idle machine; this bound allows for a busy one"

    def test_bfloat16_counts_two_bytes(self, child: Child) -> None:
        load(child, ADD, "add")
        (launch,) = trace(child, tensor("x", 512, dtype="bfloat16"), tensor("y", 512, dtype="bfloat16"))
        assert launch["per_program"]["load_bytes"] == 2 * 512

    def test_work_done_by_torch_is_a_launch_of_its_own(self, child: Child) -> None:
        load(child, HEAD + "def f(a, b):\n    return torch.relu(a.t() @ b)\n", "f")
        product, relu = trace(child, tensor("a", 2048, 2048, dtype="float16"), tensor("b", 2048, 2048, dtype="float16"))
        assert product["torch"] and product["kernel"].startswith("aten.mm")
        assert product["per_program"]["dot_flops"] == 2 * 2048**3
        assert relu["per_program"]["load_bytes"] == relu["per_program"]["store_bytes"] == 2048 * 2048 * 2
        written = [t["id"] for t in product["tensors"] if t["written"]]
        assert written == [t["id"] for t in relu["tensors"] if t["read"]], "the second reads what the first wrote"

    def test_reading_far_out_of_bounds_is_counted_not_fatal(self, child: Child) -> None:
        load(child, ADD.replace("tl.load(x + at, mask=inside)", "tl.load(x + at + (1 << 42))"), "add")
        (launch,) = trace(child, tensor("x", 256), tensor("y", 256))
        assert {t["arg"]: t["read"] for t in launch["tensors"]}["unknown"] == 1024

    def test_a_chain_of_loads_is_as_many_batches(self, child: Child) -> None:
        source = HEAD + '''
@triton.jit
def k(table, x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + tl.load(table + i)))

def f(table, x):
    out = torch.empty_like(x)
    k[(1,)](table, x, out, N=64)
    return out
'''
        load(child, source, "f")
        (launch,) = trace(child, tensor("table", 64, dtype="int32"), tensor("x", 64))
        assert launch["per_program"]["batches"] == 2

    def test_lengths_come_from_the_arena_when_there_is_one(self, child: Child) -> None:
        source = HEAD + '''
@triton.jit
def k(lengths, x, out, N: tl.constexpr):
    total = 0.0
    for start in range(0, tl.load(lengths), N):
        total += tl.sum(tl.load(x + start + tl.arange(0, N)))
    tl.store(out, total)

def f(lengths, x):
    out = torch.empty(1, device=x.device)
    k[(1,)](lengths, x, out, N=64)
    return out
'''
        load(child, source, "f")
        args = [{**tensor("lengths", 1, dtype="int32"), "offset": 0}, tensor("x", 1024)]
        (without,) = trace(child, *args)
        fd = memory(4, (640).to_bytes(4, "little"))
        (given,) = child.request("trace", timeout_s=60, args=args, fds=[fd])["launches"]
        os.close(fd)
        assert without["per_program"]["loads"] == 1 and given["per_program"]["loads"] == 11

    def test_a_budget_of_time_cuts_the_sample_short(self, child: Child) -> None:
        load(child, (EXAMPLES / "matmul_bias_gelu/kernel.py").read_text(), "matmul_bias_gelu")
        args = [tensor("a", 1024, 1024, dtype="float16"), tensor("b", 1024, 1024, dtype="float16"),
                tensor("bias", 1024, dtype="float16")]
        (launch,) = trace(child, *args, seconds=0)
        assert launch["sampled"] == 1 and launch["per_program"]["dot_flops"] * launch["programs"] == 2 * 1024**3
