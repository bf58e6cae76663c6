"""External tools in the sandbox: what a run means, what a hostile child can leave in a log's place, and the gate."""

from __future__ import annotations

import os
import stat
import time

import pytest
import torch
from test_toollogs import CLEAN, INITCHECK, MEMCHECK, NO_START, PERMISSION, UNITS, launch, wide

from kernelband.evaluate import toollogs, tools, verify
from kernelband.evaluate.tools import GateCase
from kernelband.evaluate.zygote import Zygote
from kernelband.task import Case, Contract, Output, Task


@pytest.mark.parametrize("text, code, why, ran, ok, said", [
    (CLEAN, 0, "", True, True, "no errors"),
    (MEMCHECK, tools.FOUND, "", True, False, "Invalid __global__ read of size 16 bytes in scale_kernel"),
    (MEMCHECK, 3, "the candidate did not get through: call: RuntimeError", True, False, "1769 errors in all"),
    (CLEAN, tools.FOUND, "", True, False, "errors that its log does not tell"),
    (CLEAN, 3, "the candidate did not get through: call: OutOfMemoryError", False, False, "OutOfMemoryError"),
    (NO_START, 1, "", False, False, "terminated before"), ("", 0, "", False, False, "empty log")])
def test_a_tool_that_could_not_run_says_nothing_of_the_candidate(text, code, why, ran, ok, said):
    report = tools.judge_log("memcheck", text, code, why)
    assert (report.ran, report.ok) == (ran, ok) and said in report.summary
    assert report.kind == ("unsafe_memory" if ran and not ok else "")


def test_the_drivers_settings_say_at_once_that_counters_are_closed(tmp_path):
    params = tmp_path / "params"
    params.write_text("ResmanDebugLevel: 4294967295\nRmProfilingAdminOnly: 1\n")
    assert "NVreg_RestrictProfilingToAdminUsers" in tools.counters_forbidden(params)
    params.write_text("RmProfilingAdminOnly: 0\n")
    assert tools.counters_forbidden(params) == tools.counters_forbidden(tmp_path / "none") == ""


# --- the gate in a real sandbox

REGISTER = "import serve, toolrun\nserve.OPS['tool'] = toolrun.tool\ndef entry(): pass\n"
CPU = {"TRITON_INTERPRET": "1"}

KERNEL = '''
import torch, triton, triton.language as tl

@triton.jit
def add_kernel(x, y, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, i < n) + tl.load(y + i, i < n), i < n)

def entry(x, y, s):
    out = torch.empty_like(x)
    flat = y.contiguous()
    add_kernel[(triton.cdiv(x.numel(), 32),)](x, flat, out, x.numel(), B=32)
    y += s
    return {"sum": out}
'''


@pytest.fixture(scope="module")
def bare():
    with Zygote("bare", warn=lambda text: None) as zygote:
        yield zygote


@pytest.fixture
def child(bare):
    made = bare.spawn()
    made.request("load", source=REGISTER, entry="entry", timeout_s=30)
    yield made
    made.kill()


def reference(x, y, s):
    total = x + y
    y += s
    return total


ADD = Task("add", "entry", reference, lambda case, generator: {
    "x": torch.randn(4, 25, generator=generator), "y": torch.randn(25, 4, generator=generator).t(), "s": 2.0},
    (Case("odd", "check", "float32", {}),), Contract(outputs=(Output(), Output("y")), mutates=("y",)))


def add_case():
    right = verify.truth(ADD, ADD.cases[0], verify.draw(ADD, ADD.cases[0], 7, "drawn", "cpu"))
    return right, GateCase("odd", right.inputs, verify.output_specs(ADD, right))


def test_the_gate_gives_bytes_that_can_be_judged(child):
    right, case = add_case()
    run = tools.run_gate(child, [], "", KERNEL, "entry", [case, case], device="cpu", warmup=1, calls=2, env=CPU, timeout_s=60)
    assert run.reason == "" and run.told["ok"] is True and run.told["calls"] == 6 and run.code == 0
    result = run.results["odd"]
    assert verify.judge(right, result.tensors, result.said, ADD.contract).ok
    wrong = tools.run_gate(child, [], "", KERNEL.replace("+ tl.load(y", "- tl.load(y"), "entry", [case], device="cpu", env=CPU)
    verdict = verify.judge(right, wrong.results["odd"].tensors, wrong.results["odd"].said, ADD.contract)
    assert (verdict.ok, verdict.kind) == (False, "wrong")


def test_every_dtype_shape_and_stride_comes_through_unchanged(child):
    cases = []
    for dtype in ("float32", "bfloat16", "int64", "bool", "float16"):
        whole = (torch.randn(6, 9, 5) * 3).to(getattr(torch, dtype))
        given = {"a": whole[::2, 1:7].transpose(0, 2), "b": whole[0, 0, 0], "c": whole[:0], "d": None, "e": "text"}
        outputs = [{"from": "return", "index": i, "shape": list(given[n].shape), "dtype": dtype} for i, n in enumerate("abc")]
        cases.append(GateCase(dtype, given, outputs))
    source = (f"def entry(a, b, c, d, e):\n    assert d is None and e == 'text' and a.stride() == {given['a'].stride()}\n"
              f"    return a, [b, (c,)]")
    run = tools.run_gate(child, [], "", source, "entry", cases, device="cpu")
    assert run.told.get("ok") is True, run.told
    for case in cases:
        for name, got in zip("abc", run.results[case.name].tensors, strict=True):
            assert torch.equal(got, case.inputs[name]) and got.dtype == case.inputs[name].dtype, (case.name, name)


@pytest.mark.parametrize("source, said", [
    ("def entry(x, y, s): raise ValueError('odd rows')", "call: ValueError: odd rows"),
    ("import nothing_at_all", "load: ModuleNotFoundError"),
    ("def entry(x, y, s):\n    import os\n    os._exit(0)", "without an account"),
    ("def entry(x, y, s):\n    while True: pass", "did not end within 8 s")])
def test_a_candidate_that_does_not_get_through_is_no_clean_run(child, source, said):
    run = tools.run_gate(child, [], "", source, "entry", [add_case()[1]], device="cpu", timeout_s=8)
    assert said in tools._why(run, "no tool")
    assert not any(claim["written"] for claim in run.results["odd"].said)
    assert child.request("ping", timeout_s=10)["ok"]


FORGED = '''
import json, os, sys
import torch
folder = os.path.dirname(os.path.abspath(__file__))
def entry(x, y, s):
    for name, make in (("out-0-0.bin", lambda p: os.symlink("/etc/hostname", p)), ("out-0-1.bin", lambda p: os.mkfifo(p))):
        make(os.path.join(folder, name))
    with open(os.path.join(folder, "result.json"), "w") as file:
        json.dump({"ok": True, "stage": "done", "calls": 1,
                   "cases": [[{"shape": [4, 25], "dtype": "float32", "written": True}] * 2]}, file)
    sys.stdout.flush()
    os._exit(0)
'''


@pytest.mark.parametrize("source", [
    FORGED, FORGED.replace('os.symlink("/etc/hostname", p)', 'open(p, "wb").truncate(1 << 20)'),
    FORGED.replace('os.symlink("/etc/hostname", p)', 'os.link(folder + "/spec.json", p)')])
def test_forged_results_are_not_followed(child, source):
    run = tools.run_gate(child, [], "", source, "entry", [add_case()[1]], device="cpu", timeout_s=60)
    assert [claim["written"] for claim in run.results["odd"].said] == [False, False]
    assert all("cannot be used" in claim["dtype"] for claim in run.results["odd"].said), run.results["odd"].said
    assert not any(bool(t.any()) for t in run.results["odd"].tensors)


def test_an_account_of_another_form_is_passed_over(child):
    for text in ("[" * 100_000, '{"ok": true, "cases": [[{"shape": "' + "x" * 5000 + '", "written": 1}], 7]}'):
        source = ("import os\ndef entry(x, y, s):\n    place = os.path.dirname(os.path.abspath(__file__))\n"
                  f"    open(place + '/result.json', 'w').write({text!r})\n    os._exit(0)")
        run = tools.run_gate(child, [], "", source, "entry", [add_case()[1]], device="cpu", timeout_s=60)
        assert [claim["written"] for claim in run.results["odd"].said] == [False, False]
        assert all(len(str(claim)) < 200 for claim in run.results["odd"].said)


def test_large_inputs_are_refused_with_the_way_out(child, monkeypatch):
    monkeypatch.setattr(tools, "INPUT_BYTES", 100)
    run = tools.run_gate(child, [], "", KERNEL, "entry", [add_case()[1]], device="cpu")
    assert "smaller" in run.reason and "odd" in run.reason


# --- tools in the sandbox: a shell script in a tool's place shows the plumbing, never what a tool would say


def script(child, text):
    path = os.path.join(child.workdir, "tool.sh")
    with open(path, "w") as file:
        file.write("#!/bin/sh\n" + text)
    os.chmod(path, 0o755)
    return path


LOGGING = '''while [ "$1" != -- ]; do if [ "$1" = --log-file ]; then log="$2"; fi; shift; done; shift
printf '%s' "$LOG" > "$log"
"$@"
'''


@pytest.mark.parametrize("log, ran, said", [
    (CLEAN, False, "did not get through under compute-sanitizer memcheck: start"),  # there is no GPU here
    (INITCHECK, True, "Uninitialized __global__ memory read of size 4 bytes in tail_kernel"),
    ("", False, "did not get through")])
def test_sanitize_asks_for_the_tool_and_reads_its_log(child, log, ran, said):
    if torch.cuda.is_available():
        pytest.skip("needs a machine on which the gate cannot start")
    path = script(child, f"LOG={chr(39)}{log}{chr(39)}\n" + LOGGING)
    report = tools.sanitize(child, path, KERNEL, "entry", [add_case()[1]], timeout_s=60)
    assert (report.ran, report.ok, report.checks) == (ran, False, ("memcheck",)) and said in report.summary, report
    assert report.seconds > 0 and set(report.results) == {"odd"}


def test_the_gate_runs_under_a_tool_with_the_environment_that_the_tool_needs(child):
    argv = ["/bin/sh", "-c", 'env > "$0"; "$@"', "{log}"]
    right, case = add_case()
    run = tools.run_gate(child, argv, "log.txt", KERNEL, "entry", [case], device="cpu", env={**CPU, "MARKER": "7"})
    assert run.told["ok"] is True and verify.judge(right, run.results["odd"].tensors, run.results["odd"].said, ADD.contract).ok
    seen = dict(line.split("=", 1) for line in run.log.splitlines() if "=" in line)
    assert seen["MARKER"] == "7" and seen["LC_ALL"] == "C" and seen["TRITON_CACHE_DIR"] == child.workdir + "/triton"
    assert len(seen["TMPDIR"]) < 70 and not [name for name in seen if "KEY" in name or "TOKEN" in name]


@pytest.mark.parametrize("make, said", [
    ('ln -s /etc/hostname "$0"', "symbolic links"), ('mkfifo "$0"', "not a plain file"), ("true", "No such file"),
    ('head -c 5000000 /dev/zero > "$0"', "larger than"), ('mkdir "$0"', "not a plain file")])
def test_what_lies_in_a_logs_place_is_not_followed(child, make, said):
    begun = time.monotonic()
    run = tools.run_gate(child, ["/bin/sh", "-c", f"{make}; echo told >&2; exit 5", "{log}"], "log.txt", KERNEL, "entry",
                         [add_case()[1]], device="cpu", timeout_s=20)
    assert run.log == "" and said in run.reason and "told" in run.reason and run.code == 5
    assert time.monotonic() - begun < 15


def test_a_tool_that_is_not_there_or_hangs_is_a_reason(child):
    missing = tools.sanitize(child, "/nowhere/compute-sanitizer", KERNEL, "entry", [add_case()[1]])
    assert not missing.ran and "could not be started" in missing.summary and missing.kind == ""
    hanging = tools.sanitize(child, script(child, "sleep 600"), KERNEL, "entry", [add_case()[1]], timeout_s=1)
    assert not hanging.ran and "did not end within 1 s" in hanging.summary
    assert child.request("ping", timeout_s=10)["ok"]


def test_counters_without_a_table_say_why(child):
    log = '\nfor a in "$@"; do if [ "$last" = --log-file ]; then printf "%s" "$LOG" > "$a"; fi; last="$a"; done\n'
    said = tools.counters(child, script(child, f"LOG='{PERMISSION}'" + log), KERNEL, "entry", add_case()[1], timeout_s=30)
    assert isinstance(said, str) and "NVreg_RestrictProfilingToAdminUsers" in said
    text = wide(UNITS, ("add_kernel", launch("2,000", "55")))
    found = tools.counters(child, script(child, f"LOG='{text}'" + log), KERNEL, "entry", add_case()[1], timeout_s=30)
    assert isinstance(found, toollogs.Counters) and found.load["dram"] == pytest.approx(0.55)


def test_a_metric_that_ncu_does_not_know_is_left_out_of_the_next_run(child):
    """The script knows all stall reasons but one, and ends as ncu does when it meets that."""
    code = ('for a in "$@"; do [ "$last" = --metrics ] && metrics="$a"; [ "$last" = --log-file ] && log="$a"; last="$a"; done\n'
            'echo "$metrics" >> "$HOME/../asked"\n'
            'case "$metrics" in *stalled_gmma*) echo "==ERROR== Failed to find metric regex:^smsp__average_warps_issue_stalled_'
            'gmma_per_issue_active(\\..*)?$" > "$log"; exit 1;; esac\n'
            'printf "%s" "$LOG" > "$log"\n')
    text = wide(UNITS, ("add_kernel", launch("2,000", "55")))
    found = tools.counters(child, script(child, f"LOG='{text}'\n{code}"), KERNEL, "entry", add_case()[1], timeout_s=30)
    assert isinstance(found, toollogs.Counters) and found.stalls["long_scoreboard"] == 0.75
    with open(os.path.join(child.workdir, "asked")) as file:
        first, second = file.read().splitlines()
    assert first.replace(",smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio", "") == second


def ask(child, code, seconds=20.0, **more):
    return child.request("tool", timeout_s=60, argv=["/bin/sh", "-c", code], seconds=seconds, **more)


def test_the_tool_op_ends_what_it_started_and_keeps_little_of_what_it_says(child):
    reply = ask(child, "echo out; echo err >&2; exit 3")
    assert (reply["code"], reply["late"], reply["written"]) == (3, False, 8)
    with open(os.path.join(child.workdir, "tool.out")) as file:
        assert sorted(file.read().split()) == ["err", "out"]
    reply = ask(child, "head -c 30000000 /dev/zero", output="flood.out")
    assert reply["code"] == 0 and reply["written"] == 30_000_000
    assert os.path.getsize(os.path.join(child.workdir, "flood.out")) == 1 << 20
    begun = time.monotonic()
    late = ask(child, "sleep 300 & sleep 300", seconds=0.5)
    assert late["late"] is True and late["code"] == -9 and time.monotonic() - begun < 10
    left = ask(child, "sleep 300 & exit 0")
    assert left["code"] == 0 and left["late"] is False and left["seconds"] < 5
    big = ask(child, f"head -c {700 << 20} /dev/zero > big")
    assert big["code"] != 0 and os.path.getsize(os.path.join(child.workdir, "big")) <= 512 << 20


def test_files_are_handed_over_as_the_childs_own_and_to_no_other_place(child, tmp_path):
    name = tools.hand_over(child.workdir, {"a.bin": b"1" * 10})
    place = os.path.join(child.workdir, name)
    owner, folder = os.stat(child.workdir), os.lstat(place)
    assert stat.S_ISDIR(folder.st_mode) and stat.S_IMODE(folder.st_mode) == 0o700 and folder.st_uid == owner.st_uid
    assert os.lstat(os.path.join(place, "a.bin")).st_uid == owner.st_uid
    link = tmp_path / "workdir"
    link.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(OSError):
        tools.hand_over(link, {"a.bin": b"1"})
    assert not list((tmp_path / "elsewhere").iterdir())


def test_tools_are_found_on_the_path_and_in_the_toolkit(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert tools.find("kernelband-no-such-tool") is None
    for folder in ("cuda/bin", "bin"):
        (tmp_path / folder).mkdir(parents=True)
        made = tmp_path / folder / "some-tool"
        made.write_text("#!/bin/sh\n")
        assert tools.find("some-tool") != made
        made.chmod(0o755)
        assert tools.find("some-tool") == made
