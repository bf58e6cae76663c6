"""What the judge without a GPU catches, by which layer, and that each layer is what catches it; honest twins pass."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from conftest import KERNEL

from kernelband.device import KNOWN
from kernelband.evaluate.compile import Compiler, Target
from kernelband.evaluate.judgement import LAYERS, Judgement
from kernelband.evaluate.layouts import arranged
from kernelband.evaluate.modelled import CAN_BE_OFF, ModelledJudge
from kernelband.evaluate.specs import shapes_only
from kernelband.evaluate.zygote import Zygote
from kernelband.task import LAYOUTS, Case, Contract, Output, Task

PEAKS = KNOWN["h200"]
HEAD = "import torch\nimport triton\nimport triton.language as tl\n"


def scale_inputs(case, generator):
    return {"x": torch.randn(case.params["n"], generator=generator), "s": 2.0}


SCALE = Task(
    "scale", "scale", lambda x, s: x * s + 1, scale_inputs,
    (Case("odd", "check", "float32", {"n": 133}), Case("exact", "check", "float32", {"n": 256}),
     Case("hidden", "held_out", "float32", {"n": 145}), Case("big", "timed", "float32", {"n": 1 << 22})),
    Contract(), work=lambda case: (8 * case.params["n"], 2 * case.params["n"]))


@functools.cache
def zygote() -> Zygote:
    return Zygote("interpret")


@pytest.fixture(scope="module", autouse=True)
def _closed():
    yield
    zygote().close()


def judged(source: str, task: Task = SCALE, off: frozenset[str] = frozenset(), facts=None, held_out: bool = False) -> Judgement:
    return ModelledJudge(task, PEAKS, timeout_s=20, off=off, zygote=zygote()).judge(source, facts or {}, held_out)


def wrapped(body: str, before: str = "") -> str:
    """The sound kernel as `sound`, and an entry point of another making."""
    lines = "".join(f"    {line}\n" for line in body.strip("\n").splitlines())
    return f"{KERNEL.replace('def scale(', 'def sound(')}\n{before}\ndef scale(x, s):\n{lines}"


BY_ADDRESS = wrapped("key = x.data_ptr(), x._version\nif key not in seen: seen[key] = sound(x, s)\nreturn seen[key]", "seen = {}")
BY_IDENTITY = wrapped("if id(x) not in seen: seen[id(x)] = x, sound(x, s)\nreturn seen[id(x)][1].clone()", "seen = {}")
BY_CONTENT = wrapped("key = tuple(x[:4].tolist()), x.numel()\nif key not in seen: seen[key] = sound(x, s)\nreturn seen[key]",
                     "seen = {}")
BY_SHAPE = wrapped("if x.shape not in seen: seen[x.shape] = sound(x, s)\nreturn seen[x.shape]", "seen = {}")
EVERY_OTHER = wrapped("calls.append(1)\nreturn sound(x, s) if len(calls) % 2 else torch.zeros_like(x)", "calls = []")
POSITIVE_ONLY = KERNEL.replace("x * s + 1", "tl.minimum(x * s + 1, 12.0)")
BESIDE = KERNEL.replace("x * s + 1, mask=offs < n", "x * s + 1, mask=offs < n + 1")
DIRTY = wrapped("y = sound(x, s)\nx.zero_()\nreturn y")
OTHER_FORM = wrapped("return sound(x, s).double()")
FOR_THE_SHOWN = wrapped("return sound(x, s) * (1 if x.numel() != 145 else 2)")
DECOY = wrapped("sound(x[:1], s)\nreturn x * s + 1")
FALLS_BACK = wrapped("try:\n    sound(x, s, 1)\nexcept TypeError:\n    return x * s + 1")
SMALL_IN_TORCH = wrapped("return sound(x, s) if x.numel() > 1000 else x * s + 1")
IN_NUMPY = wrapped("return torch.from_numpy(x.numpy() * s + 1)")
IN_A_HOOK = KERNEL + "\nscale_kernel.add_pre_run_hook(lambda x, y, *a, **k: y.copy_(x * 2.0 + 1))\n"


@pytest.mark.parametrize("source, kind, layer, off", [
    (KERNEL.replace("x * s + 1", "x * s + 1.1"), "wrong", "values", None),
    (BY_ADDRESS, "wrong", "fresh", "fresh"),
    (BY_IDENTITY, "wrong", "fresh", "fresh"),
    (BY_CONTENT, "wrong", "fresh", "fresh"),
    (BY_SHAPE, "wrong", None, None),  # families or fresh, whichever draws first
    (EVERY_OTHER, "wrong_nondeterministic", None, None),
    (POSITIVE_ONLY, "wrong", None, None),
    (BESIDE, "unsafe_memory", "guard", "guard"),
    (DIRTY, "tampered", "inputs", "inputs"),
    (OTHER_FORM, "wrong", "form", None),
    (FOR_THE_SHOWN, "wrong", "held_out", "held_out"),
    (DECOY, "not_a_kernel", "what_ran", "what_ran"),
    (FALLS_BACK, "not_a_kernel", "what_ran", "what_ran"),
    (SMALL_IN_TORCH, "not_a_kernel", "what_ran", "what_ran"),
    (IN_NUMPY, "not_a_kernel", "what_ran", "what_ran"),
    (IN_A_HOOK, "not_a_kernel", "what_ran", "what_ran"),
], ids=["wrong", "memo by address", "memo by identity", "memo by content", "memo by shape", "right every other time",
        "right near zero", "stores beside", "changes its input", "another dtype", "right where it is shown", "decoy",
        "falls back", "small in torch", "in numpy", "in a hook"])
def test_it_is_caught_by_that_layer_and_by_no_other(source, kind, layer, off):
    told = judged(source, held_out=True)
    assert told.kind == kind and told.detail and told.layer in LAYERS, told
    if layer:
        assert told.layer == layer, told
    if off:
        without = judged(source, off=frozenset({off}), held_out=True)
        assert without.kind == "measured", without


def test_without_its_first_look_at_values_what_is_wrong_falls_at_the_next_layer():
    wrong = KERNEL.replace("x * s + 1", "x * s + 1.1")
    assert judged(wrong, off=frozenset({"values"})).layer in ("families", "fresh")
    assert judged(wrong, off=frozenset({"values", "families", "fresh", "repeat"})).kind == "measured"


def test_families_and_fresh_contents_each_catch_a_memory_by_shape():
    assert judged(BY_SHAPE, off=frozenset({"fresh"})).layer == "families"
    assert judged(BY_SHAPE, off=frozenset({"families"})).layer == "fresh"
    assert judged(BY_SHAPE, off=frozenset({"families", "fresh"})).kind == "measured"


def test_without_families_a_clamp_far_out_is_not_seen():
    assert judged(POSITIVE_ONLY, off=frozenset({"families", "fresh"})).kind == "measured"
    assert judged(POSITIVE_ONLY, off=frozenset({"fresh"})).layer == "families"


def test_what_is_wrong_at_times_is_plainly_wrong_when_nothing_is_repeated():
    assert judged(EVERY_OTHER, off=frozenset({"repeat"})).kind == "wrong"


NOISY = KERNEL.replace("return y", "y[::7] = torch.nextafter(y[::7], y[::7] + torch.randint(-1, 2, y[::7].shape))\n    return y")


def test_bits_that_change_matter_only_to_a_contract_that_says_so():
    strict = dataclasses.replace(SCALE, contract=Contract(deterministic=True))
    assert judged(NOISY).kind == "measured"
    told = judged(NOISY, strict)
    assert (told.kind, told.layer) == ("wrong_nondeterministic", "repeat"), told
    assert judged(NOISY, strict, off=frozenset({"repeat"})).kind == "measured"
    assert judged(KERNEL, strict).kind == "measured"


KEEPS_A_WORKSPACE = wrapped("y = work.setdefault(x.shape, torch.empty_like(x))\nsound_into(x, y, s)\nreturn y", '''work = {}
def sound_into(x, y, s):
    scale_kernel[(triton.cdiv(x.numel(), 32),)](x, y, s, x.numel(), BLOCK=32)
''')
COPIES_FIRST = wrapped("return sound(x.clone(), s)")
ACCUMULATES = HEAD + '''
@triton.jit
def k(x, y, s, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.atomic_add(y + at, tl.load(x + at, mask=at < n) * s + 1, mask=at < n)

def scale(x, s):
    y = torch.zeros_like(x)
    k[lambda meta: (triton.cdiv(meta["n"], meta["B"]),)](x, y, s, x.numel(), B=64)
    return y
'''


@pytest.mark.parametrize("source", [KERNEL, KEEPS_A_WORKSPACE, COPIES_FIRST, ACCUMULATES],
                         ids=["plain", "keeps a workspace", "copies first", "accumulates into zeros"])
def test_honest_twins_pass(source):
    told = judged(source, held_out=True)
    assert told.kind == "measured", told
    assert all(v == "pass" for v in told.checks.values()) and any("same addresses" in name for name in told.checks)


def test_a_result_of_truth_values_or_in_place_is_no_sign_of_idleness():
    """Finite everywhere: all true. Positive everywhere: a ReLU in place has nothing to do."""
    k = HEAD + '''
@triton.jit
def k(x, y, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + at, mask=at < n)
    tl.store(y + at, OP, mask=at < n)
'''
    cases = (Case("one", "check", "float32", {"n": 133}),)
    finite = Task("finite", "f", torch.isfinite, lambda c, g: {"x": torch.randn(133, generator=g)}, cases, Contract())
    source = k.replace("OP", "v - v == 0") + '''
def f(x):
    y = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    k[(2,)](x, y, x.numel(), B=128)
    return y
'''
    assert judged(source, finite).kind == "measured"
    relu = Task("relu", "f", lambda x: x.clamp_(min=0), lambda c, g: {"x": torch.rand(133, generator=g)}, cases,
                Contract(outputs=(Output("x"),), mutates=("x",), families=("drawn",)))
    source = k.replace("OP", "tl.maximum(v, 0.0)") + "\ndef f(x):\n    k[(2,)](x, x, x.numel(), B=128)\n"
    assert judged(source, relu).kind == "measured"


def test_weights_that_the_contract_calls_constant_may_be_prepacked():
    def inputs(case, generator):
        return {"x": torch.randn(150, generator=generator), "w": torch.randn(150, generator=generator)}

    source = HEAD + '''
packed = {}
@triton.jit
def k(x, w, y, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + at, tl.load(x + at, mask=at < n) * tl.load(w + at, mask=at < n), mask=at < n)

def f(x, w):
    if w.data_ptr() not in packed:
        packed[w.data_ptr()] = w * 2
    y = torch.empty_like(x)
    k[(2,)](x, packed[w.data_ptr()], y, x.numel(), B=128)
    return y
'''
    task = Task("scaled", "f", lambda x, w: 2 * x * w, inputs, (Case("one", "check", "float32"),), Contract(constant=("w",)))
    assert judged(source, task).kind == "measured"
    assert judged(source, dataclasses.replace(task, contract=Contract())).layer == "fresh"


class TestLayouts:
    STRIDED = dataclasses.replace(SCALE, contract=Contract(layouts=LAYOUTS))

    def test_a_kernel_that_takes_rows_for_granted_is_caught(self):
        told = judged(KERNEL, self.STRIDED)
        assert (told.kind, told.layer) == ("wrong", "families") and "strided" in told.detail, told
        assert judged(KERNEL.replace("y = ", "x = x.contiguous()\n    y = "), self.STRIDED).kind == "measured"

    @pytest.mark.parametrize("shape", [(), (7,), (1,), (3, 5), (2, 3, 4), (2, 0)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_values_stay_and_strides_are_as_named(self, shape, dtype, layout):
        value = (torch.randn(shape) * 3).to(dtype)
        made = arranged(value, layout)
        assert made.shape == value.shape and made.dtype == dtype and torch.equal(made, value)
        assert not value.numel() or made.data_ptr() != value.data_ptr()
        if layout == "contiguous":
            assert made.is_contiguous()
        elif made.numel() > 1:
            assert not made.is_contiguous() and 1 not in made.stride()

    def test_an_expanded_tensor_gets_memory_of_its_own(self):
        made = arranged(torch.randn(1, 4).expand(3, 4), "strided")
        made[0] = 0
        assert bool((made[1] != 0).all())

    def test_an_unknown_name_is_refused_with_the_nearest(self):
        with pytest.raises(ValueError, match="did you mean 'strided'"):
            arranged(torch.ones(2), "stride")


def test_only_layers_that_are_there_can_be_left_out():
    assert set(LAYERS) >= CAN_BE_OFF and "deadline" not in CAN_BE_OFF
    with pytest.raises(ValueError, match="'familes' cannot be left out"):
        ModelledJudge(SCALE, PEAKS, off=frozenset({"familes"}))
    with pytest.raises(ValueError, match="'deadline' cannot be left out"):
        ModelledJudge(SCALE, PEAKS, off=frozenset({"deadline"}))


# -- at the timed shapes, with what the compiler says ---------------------------------------------------------------

@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Judge a source with its compiled facts: (source, task, off) -> judgement."""
    target = Target("cuda", PEAKS.arch, 32, PEAKS.max_shared_bytes, {"multi_processor_count": PEAKS.sms})
    with Compiler(tmp_path_factory.mktemp("cache")) as compiler:
        def told(source, task=SCALE, off=frozenset()):
            made = compiler.compile(source, task.entry, [shapes_only(task, c) for c in task.with_role("timed")], target)
            assert made.ok, made.error
            return judged(source, task, off, dict(made.facts))

        yield told


def test_work_left_undone_at_the_timed_shape_is_faster_than_physics(compiled):
    source = KERNEL.replace("n = x.numel()", "n = min(x.numel(), 1000)")
    told = compiled(source)
    assert (told.kind, told.layer) == ("faster_than_physics", "physics"), told
    assert compiled(source, off=frozenset({"physics"})).kind == "measured"


def mm_inputs(case, generator):
    m = case.params["m"]
    return {"a": torch.randn(m, m, generator=generator), "b": torch.randn(m, m, generator=generator)}


MM = Task("mm_relu", "f", lambda a, b: torch.relu(a @ b), mm_inputs,
          (Case("small", "check", "float32", {"m": 32}), Case("big", "timed", "float32", {"m": 512})), Contract(),
          work=lambda case: (12 * case.params["m"] ** 2, 2 * case.params["m"] ** 3))
EPILOGUE = HEAD + '''
@triton.jit
def relu_kernel(x, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + at, tl.maximum(tl.load(x + at, mask=at < n), 0.0), mask=at < n)

def f(a, b):
    c = torch.mm(a, b)
    relu_kernel[(triton.cdiv(c.numel(), 1024),)](c, c.numel(), B=1024)
    return c
'''


def allowing(*who: str) -> Task:
    return dataclasses.replace(MM, contract=Contract(allow=who))


def test_a_product_by_torch_with_an_epilogue_of_its_own(compiled):
    told = compiled(EPILOGUE, MM)
    assert (told.kind, told.layer) == ("not_a_kernel", "what_ran") and "(mm)" in told.detail, told
    for task, off in ((MM, {"what_ran"}), (allowing("own", "vendor"), ()), (allowing("own", "torch"), ())):
        assert compiled(EPILOGUE, task, frozenset(off)).kind == "measured"


def test_vendor_means_products_only(compiled):
    source = EPILOGUE.replace("torch.mm(a, b)", "torch.mm(a, b).exp().log().sin().asin().exp().log()")
    source = source.replace("relu_kernel[(triton.cdiv(c.numel(), 1024),)](c, c.numel(), B=1024)",
                            "c = torch.mm(a, b)\n    c = c.abs() + c.abs().neg() + c.sign() * c.abs()\n"
                            "    relu_kernel[(triton.cdiv(c.numel(), 1024),)](c, c.numel(), B=1024)")
    small = dataclasses.replace(allowing("own", "vendor"), cases=(
        Case("small", "check", "float32", {"m": 32}), Case("big", "timed", "float32", {"m": 64})))
    told = compiled(source, small)
    assert (told.kind, told.layer) == ("not_a_kernel", "what_ran") and "mm" not in told.detail, told


def test_torch_alone_is_a_result_where_the_contract_allows_it(compiled):
    source = HEAD + "def f(a, b):\n    return torch.relu(a @ b)\n"
    assert compiled(source, allowing("own", "torch")).kind == "measured"
    assert compiled(source, MM).kind == "not_a_kernel"


def test_a_copy_and_a_cast_before_the_kernel_are_its_own_business(compiled):
    assert compiled(COPIES_FIRST).kind == "measured"
    told = compiled(wrapped("return sound(x.neg().neg().neg().neg(), s)"))
    assert told.kind == "not_a_kernel" and "of the work" in told.detail, told
