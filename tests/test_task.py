"""Task folders: what is loaded, and that every mistake is told with its file and the way out."""


import pytest
import torch
from conftest import KERNEL, TASK

from kernelband.errors import UserError
from kernelband.evaluate.specs import describe, extent, shapes_only
from kernelband.task import load, oracle_parameters


def test_a_sound_task_loads_without_importing_its_kernel(task):
    loaded = load(task(kernel="raise SystemExit\ndef scale(x, s): pass\n"))
    assert loaded.task.name == "scale" and loaded.baseline.startswith("raise")
    assert [c.name for c in loaded.task.with_role("timed")] == ["big"]


def test_the_digest_follows_both_files(task):
    one = load(task()).digest
    assert load(task(kernel=KERNEL + "\n# more\n")).digest != one
    assert load(task(task=TASK + "\n")).digest != one == load(task()).digest


@pytest.mark.parametrize("change, told", [
    (("task = Task(", "raise RuntimeError('no data')\ntask = Task("), r"task\.py \(line \d+\) raised RuntimeError.*no data"),
    (("task = Task(", "thing = dict("), "exactly one"),
    (('entry="scale"', 'entry="scael"'), "no function 'scael'.*did you mean 'scale'"),
    (("def reference(x, s)", "def reference(x, factor)"), "same parameters"),
    (('"timed", "float32"', '"held_out", "float32"'), "role 'timed'"),
    (('"check", "float32"', '"chek", "float32"'), "did you mean 'check'"),
    (('"big", "timed", "float32"', '"big", "timed", "float16"'), "not in the contract"),
    (('Case("exact"', 'Case("odd"'), "must differ"),
    (("1 << 24", "1 << 10"), "outside of the contract's range"),
    (("contract=Contract(", "contract=Contract(direction='backward', "), "not supported yet"),
    (("contract=Contract(", "contract=Contract(allow=('cuda',), "), "allow names 'cuda'"),
    (('dtypes=("float32",)', 'dtypes=("float32", "fp16")'), "unknown dtype 'fp16'"),
    (("contract=Contract(", "contract=Contract(families=('drawn', 'spikes'), "), "families names 'spikes'; did you mean 'spike'"),
    (("contract=Contract(", "contract=Contract(layouts=('contigous',), "), "did you mean 'contiguous'"),
    (("contract=Contract(", "contract=Contract(constant=('weight',), "), "constant names 'weight', which is no argument"),
    (("contract=Contract(", "contract=Contract(mutates=('y',), "), "mutates names 'y', which is no argument"),
    (("contract=Contract(", "contract=Contract(constant='x', "), "must be a tuple"),
])
def test_a_bad_task_file_is_told(task, change, told):
    with pytest.raises(UserError, match=told) as caught:
        load(task(task=TASK.replace(*change)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kernel, told", [
    ("def scale(x, s:\n", "line 1"), ("x = 1\n", "no function at all"), ("def scale(x): pass\n", "same parameters"),
])
def test_a_bad_kernel_file_is_told(task, kernel, told):
    with pytest.raises(UserError, match=told):
        load(task(kernel=kernel))


def test_missing_folders_and_files_are_told(task, tmp_path):
    with pytest.raises(UserError, match="no such task"):
        load(tmp_path / "nowhere")
    folder = task()
    (folder / "kernel.py").unlink()
    with pytest.raises(UserError, match=r"kernel\.py is missing"):
        load(folder)


def test_an_output_that_is_not_mutated_is_told(task):
    text = TASK.replace("contract=Contract(", "contract=Contract(outputs=(Output('x'),), ").replace(
        "import Case,", "import Case, Output,")
    with pytest.raises(UserError, match="not among mutates"):
        load(task(task=text))


@pytest.mark.parametrize("reference, names", [
    ("@torch.no_grad()\ndef reference(x, s):\n    y = x * s\n    return y + 1\n", ["x", "s"]),
    ("def anything(*args):\n    return args[0] * args[1] + 1\nreference = anything\n", None),
    ("reference = torch.mul\n", None),
])
def test_an_oracle_may_be_decorated_or_a_builtin(task, reference, names):
    text = TASK.replace("def reference(x, s):\n    return x * s + 1\n", reference)
    assert text != TASK
    loaded = load(task(task=text))
    assert loaded.parameters == ("x", "s") and oracle_parameters(loaded.task.reference) == names


def test_shapes_are_known_without_drawing_the_data(task):
    loaded = load(task(task=TASK.replace("1 << 20", "1 << 23"))).task
    spec = shapes_only(loaded, loaded.with_role("timed")[0])
    assert spec.args == [
        {"name": "x", "kind": "tensor", "shape": [1 << 23], "stride": [1], "dtype": "float32", "offset": 0},
        {"name": "s", "kind": "scalar", "value": 2.0},
    ]


def test_strided_tensors_are_described_by_what_they_span():
    base = torch.arange(24.0).reshape(4, 6)
    view = base[:, ::2]
    assert extent(view) == (3 * 6 + 2 * 2 + 1) * 4
    specs, size = describe({"v": view, "flag": True, "nothing": None})
    assert specs[0]["stride"] == [6, 2] and size == 256 and specs[1]["value"] is True
    with pytest.raises(UserError, match="'o' is a object"):
        describe({"o": object()})


# -- the verdict ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("change, told", [
    (("contract=Contract(", "contract=Contract(outputs=(), "), "at least one Output"),
    (("contract=Contract(", "contract=Contract(mutates='x', "), "a tuple of names"),
    (('name="scale"', 'name="a\\nimport os"'), "a name of letters"),
    (('name="scale"', 'name="../../evil"'), "a name of letters"),
    (('Case("odd"', 'Case("o\\ndd"'), "printable"),
    (("entry=\"scale\"", "entry=5"), "name of a function"),
    (("reference=reference", "reference='torch.add'"), "a function"),
    (("cases=(", "cases=None, peers=dict(a="), None),
    (('shapes={"n": (1, 1 << 24)}', 'shapes={"n": 5}'), "a mapping of a parameter"),
    (("contract=Contract(dtypes", "contract=None, peers=dict(a=Contract)(dtypes"), None),
    (('{"n": 33}', "[33]"), "a mapping"),
])
def test_a_field_of_another_kind_is_told(task, change, told):
    with pytest.raises(UserError, match=told or "task.py"):
        load(task(task=TASK.replace(*change)))


def test_a_kernel_file_that_breaks_the_parser_is_told(task):
    for text in ("x = " + "-" * 100_000 + "1\n", "\0", "def scale(x, s): pass\n" + "#" * 600_000):
        with pytest.raises(UserError, match=r"kernel\.py"):
            load(task(kernel=text))
