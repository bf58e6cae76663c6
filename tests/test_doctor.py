"""`kernelband doctor`: a real examination of this machine, and machines that lack something."""

import json
import os
import re
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, command

from kernelband import doctor
from kernelband.evaluate.zygote import NAMESPACES, Zygote

FIELDS = {"name", "state", "detail", "meaning", "mend"}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """(what `kernelband doctor --json` says in a folder of its own, seconds that it took, that folder)."""
    folder = tmp_path_factory.mktemp("doctor")
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "kernelband", "doctor", "--json"], capture_output=True, text=True, timeout=120,
                          cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), time.monotonic() - begin, folder


def by_name(report) -> dict:
    return {check["name"]: check for check in report["checks"]}


def test_the_report_has_the_agreed_form_and_leaves_nothing_behind(told):
    report, seconds, folder = told
    assert set(report) == {"ok", "checks"} and report["ok"] is True
    assert seconds < 15 and list(folder.iterdir()) == []
    assert len(by_name(report)) == len(report["checks"])
    for check in report["checks"]:
        assert set(check) == FIELDS and check["state"] in ("ok", "degraded", "off") and check["name"] and check["detail"]
        if check["state"] != "ok":
            assert check["meaning"] and check["mend"], check
        assert "\n" not in check["mend"] + check["meaning"] + check["detail"]
    assert {"python", "torch", "triton", "ray", "gpu", "sandbox: compile", "sandbox: interpret", "ncu", "compute-sanitizer",
            "run folder", "temporary files"} - ({"gpu"} if "driver" in by_name(report) else set()) <= set(by_name(report))


def test_every_wall_that_a_child_reports_is_in_the_report(told):
    report = by_name(told[0])
    with Zygote("interpret", warn=lambda text: None) as zygote:
        features = zygote.spawn().features
    assert features
    for feature, state in features.items():
        check = report[feature]
        assert (check["state"] == "ok") == (state == "on"), (feature, state, check)
        assert state in check["detail"] and "compile" in check["detail"]
        assert feature in doctor.WALLS, "without a meaning"


def test_a_wall_that_is_not_built_is_off_with_what_it_means():
    """Real children again, this time without namespaces."""
    with Zygote("bare", namespaces=(), warn=lambda text: None) as zygote:
        features = zygote.spawn().features
    for name in (*(f"{space} namespace" for space in NAMESPACES), "hidden folders"):
        check = doctor.wall(name, {"bare": features[name]}, covered=False)
        assert check.state == "off" and check.meaning and check.mend, check


@pytest.mark.parametrize("states, covered, expected", [
    ({"compile": "on", "cuda": "on"}, True, "ok"),
    ({"compile": "on", "cuda": "off: by design, CUDA reserves large address ranges"}, True, "ok"),
    ({"compile": "on", "cuda": "off: no"}, True, "degraded"),
    ({"compile": "off: no", "cuda": "off: no"}, True, "off"),
    ({"compile": "on (version 3: without TCP and signals)"}, True, "ok"),
    ({"compile": "on (version 3: without TCP and signals)"}, False, "degraded"),
])
def test_the_state_of_a_wall_over_all_modes(states, covered, expected):
    check = doctor.wall("landlock", states, covered)
    assert check.state == expected and all(state in check.detail for state in states.values())


def test_it_loads_neither_torch_nor_ray_into_its_own_process(tmp_path):
    code = ("import sys; from kernelband import doctor; doctor.examine();"
            "heavy = {'torch', 'ray', 'triton'} & set(sys.modules); sys.exit(f'loaded {heavy}' if heavy else 0)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr


def test_a_person_gets_a_table_with_the_way_to_mend_things():
    done = command("doctor", PATH=str(Path(sys.executable).parent), COLUMNS="200")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^gpu +off", done.stdout, re.M) and "→ install the driver" in done.stdout
    assert re.search(r"^c compiler +off", done.stdout, re.M) and "Candidates can be judged here" in done.stdout
    assert "\x1b" not in done.stdout


def tool(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_tools_are_found_on_path_and_below_cuda_home(tmp_path, monkeypatch):
    below = tool(tmp_path / "cuda" / "bin", "ncu", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert doctor.find_tool("ncu") != str(below)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert doctor.find_tool("ncu") == str(below)
    first = tool(tmp_path, "ncu", "")
    assert doctor.find_tool("ncu") == str(first)


SMI = 'case "$1" in *name*) printf "{names}";; *) printf "{rows}";; esac'


def test_a_gpu_that_cannot_be_used_is_told_and_the_rest_still_works(tmp_path):
    """The driver's tool shows four GPUs, of which one is as it should be; no GPU is behind it, so the child says why."""
    tool(tmp_path, "nvidia-smi", SMI.format(
        names=r"NVIDIA H200\nNVIDIA H200\nNVIDIA H200\nNVIDIA Z9\n",
        rows=r"580.1, Default, Disabled\n580.1, Exclusive_Process, Disabled\n580.1, Default, Enabled\n580.1, Default, [N/A]\n"))
    done = command("doctor", "--json", PATH=f"{tmp_path}:{os.environ['PATH']}", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    checks = by_name(json.loads(done.stdout))
    assert [checks[f"gpu {i}"]["state"] for i in range(4)] == ["ok", "degraded", "degraded", "degraded"]
    assert "580.1" in checks["driver"]["detail"] and "-c DEFAULT" in checks["gpu 1"]["mend"]
    assert "MIG" in checks["gpu 2"]["detail"] and "table of peaks" in checks["gpu 3"]["meaning"]
    assert checks["sandbox: cuda"]["state"] == "off" and "measured" in checks["sandbox: cuda"]["meaning"]
    assert checks["sandbox: interpret"]["state"] == "ok"


def test_without_a_sandbox_nothing_can_be_judged_and_the_exit_code_says_so(tmp_path):
    """An interpreter whose torch does not import: every zygote ends at once."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('broken on purpose')\n")
    code = ("import sys; sys.argv = ['kernelband', 'doctor', '--json']\n"
            "import kernelband.evaluate.zygote as z\n"
            f"z.INSIDE = __import__('pathlib').Path({str(tmp_path)!r})\n"
            "from kernelband import cli; cli.main()")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] is False and by_name(report)["sandbox: compile"]["state"] == "off"


def test_a_folder_that_cannot_be_written_is_off(tmp_path):
    (tmp_path / "file").touch()
    checks = {check.name: check for check in doctor._folders(tmp_path / "file")}
    assert checks["run folder"].state == "off" and "--out" in checks["run folder"].mend
    checks = {check.name: check for check in doctor._folders(tmp_path / "new" / "runs")}
    assert str(tmp_path) in checks["run folder"].detail and not (tmp_path / "new").exists()


def test_the_least_versions_are_those_of_the_package():
    wanted = (ROOT / "pyproject.toml").read_text()
    for name, least in doctor.LEAST.items():
        assert f'"{name}>={".".join(map(str, least))}' in wanted


def test_an_unknown_option_is_bad_usage():
    done = command("doctor", "--jsn")
    assert done.returncode == 2 and "--json" in done.stderr
