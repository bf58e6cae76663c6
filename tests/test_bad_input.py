"""Bad input gets one clear paragraph, exit code 2, no traceback, and no run folder left behind."""

import os
import subprocess
import sys

import pytest
from conftest import KERNEL, TASK, command

from kernelband import api, journal
from kernelband.config import load
from kernelband.errors import RunFailed, UserError


def refuse(folder, tmp_path, told, sets=(), **flags):
    out = tmp_path / "run"
    with pytest.raises(UserError, match=told) as caught:
        api.optimize(folder, load(None, list(sets), {"device": "model:h200", **flags}), out)
    assert not out.exists() and "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_unknown_is_told_before_anything_starts(task, tmp_path):
    folder = task()
    refuse(tmp_path / "nowhere", tmp_path, "no such task")
    refuse(folder, tmp_path, "unknown policy 'kernelbnd'; did you mean 'kernelband'", policy="kernelbnd")
    refuse(folder, tmp_path, "unknown device 'model:h20'; did you mean 'model:h200'", device="model:h20")
    refuse(folder, tmp_path, "unknown strategy 'tilling'; did you mean 'tiling'", sets=["strategies=[tilling]"])
    refuse(folder, tmp_path, "strategies", sets=["strategies=[]"])


def test_a_task_that_raises_or_wobbles_is_told(task, tmp_path):
    refuse(task(task="import nothing_of_that_name\n"), tmp_path, "ModuleNotFoundError")
    refuse(task(task=TASK.replace("return x * s + 1", "return x * s + torch.rand_like(x)")), tmp_path, "not deterministic")
    refuse(task(task=TASK.replace('{"x": x.to', '{"y": x.to')), tmp_path, "names and order must agree")


@pytest.mark.parametrize("work, told", [
    ("8 * case.params['n']", "two finite numbers"), ("(0, 5)", "bytes above 0"), ("(8, -1)", "flops not below"),
    ("(float('nan'), 1)", "two finite numbers"), ("('8', 1)", "two finite numbers"), ("(1, 2, 3)", "two finite numbers"),
    ("(case.params['m'], 1)", r"work\(\) raised KeyError"),
])
def test_work_that_is_not_two_numbers_is_told(task, tmp_path, work, told):
    text = TASK.replace("(8 * case.params[\"n\"], 2 * case.params[\"n\"])", work)
    assert text != TASK
    refuse(task(task=text), tmp_path, told)


def test_an_oracle_that_fails_on_another_family_is_told_before_ray_starts(task, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    text = TASK.replace("    return x * s + 1", "    if x.abs().max() > 12: raise ValueError('too large')\n    return x * s + 1")
    refuse(task(task=text), tmp_path, "the reference raised ValueError: too large")


def test_a_decorated_oracle_passes_the_checks(task, tmp_path, monkeypatch):
    """It gets as far as Ray, which is not there."""
    monkeypatch.setattr("ray.init", lambda **options: (_ for _ in ()).throw(ConnectionError()))
    text = TASK.replace("def reference", "@torch.no_grad()\ndef reference")
    with pytest.raises(RunFailed, match=r"Ray could not be .*ConnectionError"):
        api.optimize(task(task=text), load(None, [], {"device": "model:h200"}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_gpu_that_is_not_there_is_told(task, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    refuse(task(), tmp_path, "--device cuda: no GPU.*model:h200", device="cuda")


def test_a_folder_that_cannot_be_written_is_told(task, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--out"):
        api.optimize(task(), load(None, [], {"device": "model:h200"}), tmp_path / "file" / "run")
    full = tmp_path / "full"
    full.mkdir()
    (full / "something").touch()
    with pytest.raises(UserError, match="not an empty folder"):
        api.optimize(task(), load(None, [], {"device": "model:h200"}), full)
    assert (full / "something").exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_resume_and_verify_of_what_is_no_run(tmp_path):
    for door in (api.resume, api.verify):
        with pytest.raises(UserError, match="not a run folder"):
            door(tmp_path)


def test_a_run_of_a_newer_version_is_told(tmp_path):
    (tmp_path / journal.NAME).write_text('{"chain":"x","t":1,"event":"run_started","format":99}\n')
    for door in (api.resume, api.verify):
        with pytest.raises(UserError, match="newer version"):
            door(tmp_path)


@pytest.mark.parametrize("arguments, told", [
    (["optimize", "nowhere"], "no such task"),
    (["optimize", "examples/softmax", "--pulls", "0"], "pulls"),
    (["optimize", "examples/softmax", "--set", "budget.pull=3"], "budget.pulls"),
    (["optimize", "examples/softmax", "--config", "none.yaml"], "none.yaml"),
    (["optimize", "examples/softmax", "--polcy", "random"], "--policy"),
    (["optimise", "examples/softmax"], "optimize"),
    (["resume", "nowhere"], "not a run folder"),
    (["optimize"], "TASK"),
])
def test_the_command_exits_2_without_a_traceback(arguments, told, tmp_path):
    done = command(*arguments)
    assert done.returncode == 2, done.stderr
    assert told in done.stderr and "Traceback" not in done.stderr + done.stdout


def test_a_shadowed_package_is_told(tmp_path):
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "__init__.py").touch()
    code = "from cluster.local import check_imports; check_imports()"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert "another package of that name hides ours" in done.stderr


@pytest.mark.ray
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("kernel, told", [
    (KERNEL.replace("x * s + 1", "x * s"), "wrong.*odd.*worst element.*expected"),
    (KERNEL.replace("mask=offs < n)", "mask=offs < n, other=undefined)", 1), "does not compile.*undefined"),
    (KERNEL.replace("    y = torch.empty_like(x)", "    import os; os._exit(3)"), "exit code 3|crash"),
])
def test_a_baseline_that_is_not_right_is_told(task, tmp_path, kernel, told, ray_address, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", ray_address)
    refuse(task(kernel=kernel), tmp_path, told)


def test_a_full_disk_at_the_start_leaves_nothing(task, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(disk)], capture_output=True)
    if mount.returncode:
        pytest.skip("may not mount a small disk here")
    try:
        (disk / "filler").write_bytes(bytes(24 << 10))
        with pytest.raises(UserError, match="cannot be written"):
            api.optimize(task(), load(None, [], {"device": "model:h200"}), disk / "run")
        assert not (disk / "run").exists()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("name", ["cluster", "policies"])
def test_a_package_of_the_same_name_in_the_current_folder_is_told(name, tmp_path):
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    code = "from kernelband.api import optimize; from kernelband.config import Config; optimize('nowhere', Config())"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert "UserError" in done.stderr and "hides ours" in done.stderr, done.stderr
