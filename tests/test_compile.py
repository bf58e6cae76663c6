"""The compile stage: what a candidate launches is compiled for a described device, on a machine that has none."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kernelband.evaluate import binaries
from kernelband.evaluate.compile import Compiled, Compiler, KernelFacts, Target, cache_key

EXAMPLES = Path(__file__).parent.parent / "examples"
H200 = Target(backend="cuda", arch=90, warp_size=32, max_shared=232448, properties={"multi_processor_count": 132})
A100 = Target(backend="cuda", arch=80, warp_size=32, max_shared=166912, properties={"multi_processor_count": 108})
HEAD = "import torch\nimport triton\nimport triton.language as tl\n"
COPY = HEAD + '''
@triton.jit
def copy_kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)

def entry(x):
    y = torch.empty_like(x)
    copy_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel(), BLOCK=1024, num_warps=8)
    return y
'''
TILE = HEAD + '''
@triton.jit
def tile_kernel(a, b, c, K, SIZE: tl.constexpr, STEP: tl.constexpr):
    at, ks = tl.arange(0, SIZE), tl.arange(0, STEP)
    acc = tl.zeros((SIZE, SIZE), tl.float32)
    for k in range(0, K, STEP):
        left = tl.load(a + at[:, None] * K + k + ks[None, :])
        acc += tl.dot(left, tl.load(b + (k + ks)[:, None] * SIZE + at[None, :]))
    tl.store(c + at[:, None] * SIZE + at[None, :], acc)

def entry(a, b):
    size = a.shape[0]
    c = torch.empty((size, size), device="cuda", dtype=torch.float32)
    tile_kernel[(1,)](a, b, c, a.shape[1], SIZE=size, STEP=STEP, num_warps=WARPS, num_stages=STAGES)
    return c
'''


@dataclass(frozen=True)
class Case:
    name: str
    args: list[dict]


def tensor(*shape: int, dtype: str = "float16", stride: list[int] | None = None) -> dict:
    spec = {"name": "x", "kind": "tensor", "shape": list(shape), "dtype": dtype, "offset": 0}
    return spec if stride is None else {**spec, "stride": stride}


def scalar(value: object) -> dict:
    return {"name": "s", "kind": "scalar", "value": value}


def tile(step: int, warps: int, stages: int) -> str:
    return f"STEP, WARPS, STAGES = {step}, {warps}, {stages}\n" + TILE


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiler]:
    with Compiler(tmp_path_factory.mktemp("compiled"), timeout_s=60) as made:
        yield made


def one(compiler: Compiler, source: str, *args: dict, entry: str = "entry", target: Target = H200) -> Compiled:
    return compiler.compile(source, entry, [Case("main", list(args))], target)


def only_launch(result: Compiled) -> KernelFacts:
    assert result.ok, result.error
    (launch,) = result.facts["main"]
    return launch


# What is reported of a launch


def test_a_launch_is_described_by_its_grid_its_options_and_its_binary(compiler: Compiler) -> None:
    launch = only_launch(one(compiler, COPY, tensor(1000, 1000)))
    assert (launch.kernel, launch.grid, launch.num_warps) == ("copy_kernel", (977, 1, 1), 8)
    assert launch.constexprs == {"BLOCK": 1024}
    assert launch.shared == 0 and launch.mma == 0 and launch.spills == 0
    assert 4 <= launch.registers <= 64
    assert len(bytes.fromhex(launch.cubin_sha)) == 32


@pytest.mark.parametrize(("dtype", "uses_tensor_cores"), [("float16", True), ("float32", False)])
def test_the_matmul_example_at_full_size(compiler: Compiler, dtype: str, uses_tensor_cores: bool) -> None:
    source = (EXAMPLES / "matmul_bias_gelu" / "kernel.py").read_text()
    args = [tensor(4096, 4096, dtype=dtype), tensor(4096, 4096, dtype=dtype), tensor(4096, dtype=dtype)]
    launch = only_launch(one(compiler, source, *args, entry="matmul_bias_gelu"))
    assert launch.grid == (64, 64, 1)
    assert launch.shared > 8192 and launch.registers > 40
    assert (launch.mma > 0) is uses_tensor_cores  # its dot asks for "ieee", so fp32 stays on the ordinary units


def test_every_case_of_a_candidate_has_its_own_facts(compiler: Compiler) -> None:
    source = (EXAMPLES / "softmax" / "kernel.py").read_text()
    cases = [Case("small", [tensor(64, 128, dtype="float32")]), Case("large", [tensor(4096, 4096, dtype="bfloat16")])]
    result = compiler.compile(source, "softmax", cases, H200)
    assert result.ok, result.error
    assert [result.facts[name][0].grid for name in ("small", "large")] == [(64, 1, 1), (4096, 1, 1)]
    assert result.facts["small"][0].cubin_sha != result.facts["large"][0].cubin_sha


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float64", "int8", "bool", "int64"])
def test_every_dtype_compiles(compiler: Compiler, dtype: str) -> None:
    assert one(compiler, COPY, tensor(512, dtype=dtype)).ok


def test_inputs_of_many_gigabytes_cost_no_memory(compiler: Compiler) -> None:
    launch = only_launch(one(compiler, COPY.replace("torch.empty_like(x)", "x"), tensor(1 << 17, 1 << 17)))
    assert launch.grid == ((1 << 34) // 1024, 1, 1)


def test_strides_and_scalars_reach_the_entry_point(compiler: Compiler) -> None:
    source = COPY.replace("def entry(x):", "def entry(x, flag, none, scale):\n"
                          "    assert x.stride() == (1, 64) and flag is True and none is None and scale == 0.5")
    assert one(compiler, source, tensor(64, 64, stride=[1, 64]), scalar(True), scalar(None), scalar(0.5)).ok


def test_a_spilling_kernel_is_not_a_failure_and_its_spills_are_seen(compiler: Compiler) -> None:
    source = HEAD + '''
@triton.jit
def wide(x, y, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    held = tl.load(x + at)
    tl.debug_barrier()
    tl.store(y + at, tl.sort(held))

def entry(x):
    y = torch.empty_like(x)
    wide[(1,)](x, y, SIZE=4096, num_warps=8, maxnreg=24)
'''
    launch = only_launch(one(compiler, source, tensor(4096, dtype="float32")))
    assert launch.registers <= 24
    assert launch.spills > 0


def test_an_autotuned_kernel_is_compiled_in_every_configuration_and_not_timed(compiler: Compiler) -> None:
    source = HEAD + '''
CONFIGS = [triton.Config({"BLOCK": 1 << 22}), triton.Config({"BLOCK": 256}, num_warps=2), triton.Config({"BLOCK": 512})]

@triton.autotune(configs=CONFIGS, key=["n"])
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def tuned(x, y, n, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK <= 4096)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at) if EVEN else tl.load(x + at, mask=at < n), mask=at < n)

def entry(x):
    y = torch.zeros_like(x)
    tuned[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel())
    tuned[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel())
'''
    result = one(compiler, source, tensor(2048))
    assert result.ok, result.error
    first, second = result.facts["main"]
    assert first == second and result.launches["main"] == 2
    assert (first.autotuned, first.num_warps, first.grid) == (3, 2, (8, 1, 1))  # the first that compiles
    assert first.constexprs == {"BLOCK": 256, "EVEN": True}
    assert [config["error"] is None for config in first.configs] == [False, True, True]


def test_only_the_first_launches_are_kept_but_all_are_counted(compiler: Compiler) -> None:
    source = COPY.replace("    copy_kernel[", "    for _ in range(100):\n        copy_kernel[")
    result = one(compiler, source, tensor(512))
    assert len(result.facts["main"]) == 64 and result.launches["main"] == 100


def test_an_entry_that_launches_nothing_has_no_facts(compiler: Compiler) -> None:
    result = one(compiler, "def entry(x):\n    return x + 1\n", tensor(16))
    assert result.ok and result.facts["main"] == () and result.launches["main"] == 0


def test_wrappers_see_a_cuda_device(compiler: Compiler) -> None:
    source = COPY.replace("def entry(x):", '''
SMS = torch.cuda.get_device_properties(0).multi_processor_count
STREAM = torch.cuda.Stream()

def entry(x):
    assert x.is_cuda and x.device == torch.device("cuda", 0) and torch.cuda.is_available()
    assert torch.cuda.get_device_capability() == (9, 0) and SMS == 132 and torch.cuda.current_device() == 0
    with torch.cuda.device(x.device), torch.cuda.stream(STREAM):
        x = x.cuda().to("cuda:0", torch.float32) + torch.zeros(1, device=x.device)
        with torch.device("cuda"):
            assert torch.arange(4).is_cuda
        torch.randn(4, device="cuda", generator=torch.Generator(device="cuda").manual_seed(1))
    torch.cuda.synchronize()
    compiled = copy_kernel.warmup(x, x, x.numel(), BLOCK=1024, grid=(1,))
    compiled._init_handles()
    assert compiled.n_regs > 0
    compiled[(SMS, 1, 1)](x, x, x.numel(), 1024)''')
    result = one(compiler, source, tensor(512))
    assert result.ok, result.error
    assert [launch.grid[0] for launch in result.facts["main"]] == [132, 1]


def test_targets_other_than_the_newest_nvidia_ones(compiler: Compiler) -> None:
    args = tensor(64, 256), tensor(256, 64)
    for target in (A100, Target("hip", "gfx942", 64, 65536)):
        launch = only_launch(one(compiler, tile(32, 4, 2), *args, target=target))
        assert launch.mma > 0 and launch.registers > 16 and 0 < launch.shared <= target.max_shared


# What goes wrong


def test_a_compilation_error_names_the_line_in_the_file_and_no_path(compiler: Compiler) -> None:
    source = COPY.replace("tl.load(x + at, mask", "tl.lod(x + at, mask")
    result = one(compiler, source, tensor(512))
    line = 1 + source[:source.index("tl.lod")].count("\n")
    assert not result.ok and result.error_kind == "compile" and result.error is not None
    assert f"line {line} (in copy_kernel)" in result.error and "no attribute 'lod'" in result.error
    assert "/" not in result.error.replace("x + at", "")


def test_an_error_in_a_called_function_names_both_lines(compiler: Compiler) -> None:
    helper = "@triton.jit\ndef helper(v):\n    return v + nowhere\n\n"
    source = COPY.replace("@triton.jit", helper + "@triton.jit", 1).replace("tl.load(x + at, mask=at < n)", "helper(at)")
    result = one(compiler, source, tensor(512))
    assert result.error_kind == "compile" and result.error is not None
    assert "line 7 (in helper): CompilationError: NameError('nowhere is not defined')" in result.error
    assert "called from line 12 (in copy_kernel)" in result.error


def test_too_much_shared_memory_is_a_failure_that_names_both_numbers(compiler: Compiler) -> None:
    result = one(compiler, tile(128, 8, 5), tensor(128, 1024), tensor(1024, 128))
    assert not result.ok and result.error_kind == "shared memory" and result.error is not None
    assert "327680" in result.error and "232448" in result.error


def test_the_limit_is_that_of_the_target(compiler: Compiler) -> None:
    source, args = tile(64, 8, 7), [tensor(128, 1024), tensor(1024, 128)]  # 7 stages of 32 KiB, or one less
    assert one(compiler, source, *args, target=H200).ok
    assert one(compiler, source, *args, target=A100).error_kind == "shared memory"


@pytest.mark.parametrize(("source", "kind", "says"), [
    ("import torch\nx = nowhere\n", "load", "line 2: NameError: name 'nowhere' is not defined"),
    ("def entry(:\n", "load", "SyntaxError"),
    ("def other(x):\n    return x\n", "load", "no such entry point: entry"),
    ("def entry(x):\n    raise ValueError('odd shape')\n", "wrapper", "line 2"),
    (COPY.replace("triton.cdiv(x.numel(), meta[\"BLOCK\"])", "x.numel() / 1024"), "wrapper", "'float' object"),
    (COPY.replace("triton.cdiv(x.numel(), meta[\"BLOCK\"])", "1, 70000"), "wrapper", "invalid argument"),
    ("import os\ndef entry(x):\n    os._exit(3)\n", "crash", "exit"),
    ("import torch\ndef entry(x):\n    return torch.ones(1 << 46)\n", "crash", "memory"),
    ("import ctypes\ndef entry(x):\n    ctypes.string_at(1)\n", "crash", "signal"),
])
def test_failures_are_results_with_a_kind_and_a_reason(compiler: Compiler, source: str, kind: str, says: str) -> None:
    result = one(compiler, source, tensor(512))
    assert (result.ok, result.error_kind, result.cache) == (False, kind, None)
    assert result.error is not None and says in result.error


def test_a_candidate_that_never_ends_is_timed_out_and_not_remembered(tmp_path: Path) -> None:
    with Compiler(tmp_path, timeout_s=2) as compiler:
        source = "def entry(x):\n    while True:\n        pass\n"
        for own in (None, 1.0):
            result = compiler.compile(source, "entry", [Case("main", [tensor(512)])], H200, own)
            assert result.error_kind == "timeout" and not result.cached and result.seconds < 20
            assert f"within {own or 2:g} s" in str(result.error)
    assert list(tmp_path.iterdir()) == []


# A hostile candidate

FORGED = '''
import os, serve
def entry(x):
    os.makedirs("out/cache/A", exist_ok=True)
    %s
    launch = {"kernel": "k", "grid": [1, 1, 1], "num_warps": 4, "num_stages": 2, "shared": 0, "constexprs": {},
              "autotuned": 0, "cubin": NAME}
    serve.OPS["compile"] = lambda request, fds: {"ok": True, "launches": [launch], "total": 1, "cache": [NAME],
                                                 "failure": None}
'''
RUBBISH = 'NAME = "cache/A/k.cubin"; open("out/" + NAME, "w").write("rubbish")'
FIRST_AND_FORGED = [Case("first", [tensor(16)]), Case("forged", [tensor(16)])]


@pytest.mark.parametrize("act", [
    'NAME = "../../../../etc/passwd"',
    'NAME = "/etc/passwd"',
    'NAME = "cache/A/k.cubin"; os.symlink("/etc/passwd", "out/" + NAME)',
    'NAME = "cache/B/passwd"; os.symlink("/etc", "out/cache/B")',
    'NAME = "cache/A/k.cubin"; os.mkfifo("out/" + NAME)',
    'NAME = "cache/A/k.cubin"; open("out/" + NAME, "w").close(); os.truncate("out/" + NAME, 65 << 20)',
    'NAME = "cache/A/k.cubin"; open("out/kept", "w").close(); os.link("out/kept", "out/" + NAME)',
])
def test_nothing_but_plain_files_of_its_own_folder_is_taken_from_a_child(compiler: Compiler, act: str) -> None:
    for _ in range(2):  # and it is not remembered
        result = compiler.compile(FORGED % act, "entry", FIRST_AND_FORGED, H200)
        assert not result.ok and result.error_kind == "crash" and result.cache is None and not result.cached
        assert "root:" not in (result.error or "")


def test_a_forged_reply_with_odd_types_is_a_crash(compiler: Compiler) -> None:
    odd = (FORGED % RUBBISH).replace('"grid": [1, 1, 1]', '"grid": ["a"]')
    assert compiler.compile(odd, "entry", FIRST_AND_FORGED, H200).error_kind == "crash"


def test_rubbish_for_a_binary_has_unknown_resources(compiler: Compiler) -> None:
    result = compiler.compile(FORGED % RUBBISH, "entry", FIRST_AND_FORGED, H200)
    assert result.ok and result.facts["forged"][0].registers == 0


def test_the_shared_memory_limit_does_not_depend_on_the_childs_own_check(compiler: Compiler) -> None:
    source = (FORGED % RUBBISH).replace('"shared": 0', '"shared": 300000')
    result = compiler.compile(source, "entry", FIRST_AND_FORGED, H200)
    assert result.error_kind == "shared memory" and "300000" in (result.error or "")


# The disk cache


def test_a_result_is_kept_by_content_and_found_by_another_compiler(tmp_path: Path) -> None:
    with Compiler(tmp_path) as first:
        made = one(first, COPY, tensor(512))
        assert made.ok and not made.cached
        bad = one(first, "def entry(x):\n    raise ValueError\n", tensor(512))
        assert not bad.cached
    with Compiler(tmp_path) as second:
        again = one(second, COPY, {**tensor(512), "offset": 4096})  # where the input lies does not matter
        assert again.cached and dataclasses.replace(again, cached=False) == made
        assert one(second, "def entry(x):\n    raise ValueError\n", tensor(512)).cached
        assert second._zygote is None  # nothing had to be started


def test_the_key_depends_on_all_that_the_result_depends_on() -> None:
    case = Case("main", [tensor(512)])
    base = cache_key(COPY, "entry", [case], H200)
    assert base == cache_key(COPY, "entry", [Case("main", [tensor(512)])], dataclasses.replace(H200))
    others = [
        cache_key(COPY + "\n", "entry", [case], H200), cache_key(COPY, "other", [case], H200),
        cache_key(COPY, "entry", [Case("main", [tensor(513)])], H200), cache_key(COPY, "entry", [case], A100),
        cache_key(COPY, "entry", [Case("main", [tensor(512, dtype="float32")])], H200),
        cache_key(COPY, "entry", [case], dataclasses.replace(H200, properties={})),
    ]
    assert len({base, *others}) == 7


@pytest.mark.parametrize("harm", ["cut json", "wrong format", "lost file", "changed file"])
def test_a_torn_or_corrupt_entry_is_ignored_and_made_anew(compiler: Compiler, harm: str) -> None:
    made = one(compiler, COPY, tensor(512, dtype="float64"))
    assert made.cache is not None
    folder = made.cache.parent
    stored, cubin = folder / "result.json", next(folder.rglob("*.cubin"))
    if harm == "cut json":
        stored.write_text(stored.read_text()[:100])
    elif harm == "wrong format":
        stored.write_text(json.dumps({**json.loads(stored.read_text()), "format": -1}))
    elif harm == "lost file":
        cubin.unlink()
    else:
        cubin.write_bytes(cubin.read_bytes() + b"\0")
    again = one(compiler, COPY, tensor(512, dtype="float64"))
    assert again.ok and not again.cached and again.facts == made.facts
    assert one(compiler, COPY, tensor(512, dtype="float64")).cached
    assert not [path.name for path in folder.parent.iterdir() if path.name.startswith(".")]


def test_sources_that_compile_to_the_same_code_share_a_digest(compiler: Compiler) -> None:
    moved = "# a comment\n\n" + COPY.replace("at = tl.program", "begin = 0\n    at = tl.program")
    wider = COPY.replace("num_warps=8", "num_warps=4")
    first, second, other = (only_launch(one(compiler, source, tensor(512))) for source in (COPY, moved, wider))
    assert first.cubin_sha == second.cubin_sha != other.cubin_sha


def test_facts_survive_json(compiler: Compiler) -> None:
    launch = only_launch(one(compiler, COPY, tensor(1000, 1000)))
    assert KernelFacts.from_json(json.loads(json.dumps(launch.to_json()))) == launch


# Handing the cache on


def test_another_process_hits_the_cache_that_is_delivered_to_it(compiler: Compiler) -> None:
    made = one(compiler, COPY, tensor(512))
    assert made.cache is not None and compiler._zygote is not None
    child = compiler._zygote.spawn()
    try:
        child.request("prepare", timeout_s=20, target=H200.to_json())
        folder = Path(child.workdir) / "out" / "cache"
        assert binaries.deliver_cache(made.cache, folder) >= 3  # metadata, binary, assembly; C modules where libcuda is
        (cubin,) = folder.rglob("*.cubin")
        cubin.write_bytes(cubin.read_bytes() + b"mark")  # a process that compiles would replace the file
        child.request("load", timeout_s=20, source="\n\n" + COPY, entry="entry")
        child.request("compile", timeout_s=60, args=[tensor(512)])
        assert len(list(folder.rglob("*.cubin"))) == 2  # moved source lines are another kernel: no hit
        child.request("load", timeout_s=20, source=COPY, entry="entry")
        child.request("compile", timeout_s=60, args=[tensor(512)])
        assert cubin.read_bytes().endswith(b"mark") and len(list(folder.rglob("*.cubin"))) == 2
    finally:
        child.kill()


def test_resource_usage_is_read_from_what_cuobjdump_prints() -> None:
    text = ("\nResource usage:\n Common:\n  GLOBAL:0\n Function a:\n  REG:15 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:5\n"
            " Function b:\n  REG:255 STACK:96 SHARED:0 LOCAL:8 CONSTANT[0]:5\n")
    assert binaries.parse_resource_usage(text, "b") == binaries.Resources(255, 104, 0)
    assert binaries.parse_resource_usage(text, "c") == binaries.Resources()  # two functions, neither is it
    assert binaries.parse_resource_usage("", "a") == binaries.Resources()


def test_read_below_stays_below(tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "deep" / "file").write_bytes(b"good")
    (tmp_path / "secret").write_bytes(b"bad")
    os.symlink(tmp_path, tmp_path / "in" / "up")
    assert binaries.read_below(tmp_path / "in", "deep/file") == b"good"
    for name in ("../secret", "up/secret", "deep/../../secret", "deep", "", ".", "deep//file", "gone", "deep/file\0"):
        with pytest.raises(binaries.UnsafeFile):
            binaries.read_below(tmp_path / "in", name)
    with pytest.raises(binaries.UnsafeFile):
        binaries.read_below(tmp_path / "in", "deep/file", limit=3)
