"""The life of a sandboxed child under hostile candidates: real processes, real attacks; the trusted side survives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from sandbox_tools import FULL, NONE, ROOT, eventually, load, need, running

from kernelband.evaluate.zygote import CandidateError, ChildDied, SandboxError, Zygote

pytest_plugins = ["sandbox_tools"]


# --- the ordinary case


def test_a_child_loads_a_candidate_and_answers_within_milliseconds(child):
    assert load(child, "print('hello', __name__); print('loaded.')").startswith("hello candidate")
    started = time.monotonic()
    child.request("ping", timeout_s=5)
    assert time.monotonic() - started < 0.1


def test_a_spawn_takes_less_than_150_ms(zygote):
    seconds = []
    for _ in range(5):
        started = time.monotonic()
        made = zygote.spawn()
        seconds.append(time.monotonic() - started)
        made.kill()
    assert min(seconds) < 0.15, seconds


def test_features_are_reported_and_what_is_off_is_warned_of(zygote, child):
    assert set(child.features.values()) and all(s.startswith(("on", "off: ")) for s in child.features.values())
    for feature, state in child.features.items():
        wanted = state != "off: not asked for" and "by design" not in state
        if state.startswith("off") and wanted:
            assert any(f"'{feature}'" in warning for warning in zygote.warnings)
    if os.geteuid() == 0 and child.features["hidden folders"] == "on":
        assert child.features["user id"] == "on"
    assert child.request("ping", timeout_s=5)["uid"] not in ({0} if child.features["user id"] == "on" else set())


def test_modules_that_are_imported_late_still_load(child):
    assert "loaded." in load(child, "import ensurepip, sqlite3, torch.fx, numpy.polynomial; print('loaded.')")


def test_random_generators_of_siblings_differ(zygote):
    source = """
        import random, numpy, torch
        print(random.random()); print(numpy.random.rand()); print(torch.rand(1, dtype=torch.float64).item())
        print('loaded.')
    """
    first, second = zygote.spawn(), zygote.spawn()
    lines = [load(made, source).splitlines() for made in (first, second)]
    assert len(lines[0]) == 4
    assert all(a != b for a, b in zip(lines[0][:3], lines[1][:3], strict=True))
    first.kill()
    second.kill()


def test_two_children_work_side_by_side_and_one_end_leaves_the_other(zygote):
    first, second = zygote.spawn(), zygote.spawn()
    with pytest.raises(ChildDied):
        load(first, "os._exit(1)")
    assert second.request("ping", timeout_s=5)["ok"]
    second.kill()


# --- errors and ends


@pytest.mark.parametrize("code, kind", [
    ("raise ValueError('no good')", "ValueError"),
    ("sys.exit(3)", "SystemExit"),
    ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ("def f(): f()\nf()", "RecursionError"),
    ("class E(Exception):\n    def __str__(self): raise SystemExit\nraise E", "E"),
    ("x = )", "SyntaxError"),
])
def test_what_a_candidate_raises_is_its_error_and_the_child_lives(child, code, kind):
    with pytest.raises(CandidateError) as caught:
        load(child, code)
    assert (caught.value.kind, caught.value.stage) == (kind, "load")
    assert len(caught.value.message) <= 2048 and len(caught.value.traceback) <= 4096
    assert child.request("ping", timeout_s=5)["ok"]


def test_a_missing_entry_point_is_named(child):
    with pytest.raises(CandidateError, match="no such entry point: elsewhere"):
        load(child, "", entry="elsewhere")


@pytest.mark.parametrize("code, kind, detail", [
    ("os._exit(0)", "exit", "exit code 0"),
    ("os._exit(3)", "exit", "exit code 3"),
    ("ctypes.string_at(8)", "signal", "SIGSEGV"),
    ("os.abort()", "signal", "SIGABRT"),
    ("os.kill(os.getpid(), 9)", "signal", "SIGKILL"),
])
def test_a_child_that_ends_says_how(child, code, kind, detail):
    with pytest.raises(ChildDied) as caught:
        load(child, "print('last words', flush=True)\n" + code)
    assert (caught.value.kind, caught.value.detail) == (kind, detail)
    assert "last words" in caught.value.output_tail
    with pytest.raises(ChildDied):
        child.request("ping", timeout_s=5)


@pytest.mark.parametrize("code", ["time.sleep(1000)", "while True: pass",
                                  "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass"])
def test_a_child_that_hangs_is_killed_at_the_deadline(child, code):
    started = time.monotonic()
    with pytest.raises(ChildDied) as caught:
        load(child, code, timeout_s=0.5)
    assert caught.value.kind == "timeout"
    assert time.monotonic() - started < 3


def test_a_child_that_does_not_read_is_killed_at_the_deadline(child):
    load(child, "threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGSTOP)).start()")
    with pytest.raises(ChildDied) as caught:
        for _ in range(20):
            child.request("ping", timeout_s=0.5, padding="x" * 500_000)
            time.sleep(0.05)
    assert caught.value.kind == "timeout"


def test_a_gigabyte_of_output_ends_the_child_and_costs_no_memory(child):
    with pytest.raises(ChildDied) as caught:
        load(child, "for _ in range(1024): os.write(1, b'y' * (1 << 20))")
    assert caught.value.kind == "flood"
    assert len(caught.value.output_tail) <= 8192


def test_a_terminal_does_not_obey_what_a_candidate_prints(child):
    assert "\x1b" not in load(child, "print('\\x1b[2J\\x1b]0;title\\x07 loaded.')")


def test_kill_reaches_processes_that_left_session_and_group(child):
    marker = f"98765.{uuid.uuid4().int % 10**9}"
    load(child, f"""
        for _ in range(3):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    os.setsid()
                    os.execvp("sleep", ["sleep", "{marker}"])
                os._exit(0)
        print('loaded.')
    """)
    assert eventually(lambda: len(running(marker)) == 3)
    child.kill()
    child.kill()
    assert running(marker) == []


def test_the_end_of_the_candidate_is_the_end_of_what_it_started(child):
    marker = f"98765.{uuid.uuid4().int % 10**9}"
    with pytest.raises(ChildDied):
        load(child, f"""
            if os.fork() == 0:
                os.setsid()
                os.execvp("sleep", ["sleep", "{marker}"])
            time.sleep(0.3)
            os._exit(0)
        """)
    assert eventually(lambda: running(marker) == [])


def test_a_fork_bomb_is_bounded_and_ends(child):
    need(child, "process limit")
    uid = child.request("ping", timeout_s=5)["uid"]

    def alive() -> int:
        return sum(1 for entry in Path("/proc").iterdir() if entry.name.isdigit() and owner(entry) == uid)

    def owner(entry: Path) -> int:
        try:
            return int((entry / "status").read_text().split("Uid:")[1].split()[0])
        except (OSError, IndexError):
            return -1

    with pytest.raises(ChildDied):
        load(child, """
            end = time.time() + 60
            while time.time() < end:
                try:
                    os.fork()
                except OSError:
                    time.sleep(0.05)
        """, timeout_s=2)
    assert eventually(lambda: alive() == 0)
    after = child.output_tail
    assert len(after) <= 8192


def test_the_number_of_processes_is_limited(child):
    need(child, "process limit")
    text = load(child, """
        made = 0
        try:
            while made < 2000:
                if os.fork() == 0:
                    time.sleep(30)
                    os._exit(0)
                made += 1
        except OSError:
            pass
        print(made, 'loaded.')
    """)
    assert 1 < int(text.split()[0]) <= 256


def test_memory_is_limited(child):
    need(child, "memory limit")
    with pytest.raises(CandidateError) as caught:
        load(child, "bytearray(20 << 30)")
    assert caught.value.kind == "MemoryError"


def test_a_child_that_fills_the_disk_is_killed():
    with Zygote("bare", disk_bytes=64 << 20, warn=lambda text: None) as zygote:
        child = zygote.spawn()
        load(child, "open('small', 'wb').write(b'x' * (8 << 20))")
        with pytest.raises(ChildDied, match="more than 64 MiB on disk"):
            load(child, """
                for number in range(30):
                    with open(str(number), "wb") as file:
                        file.write(os.urandom(1 << 20) * 8)
                        os.fsync(file.fileno())
                time.sleep(20)
            """)
        assert not os.path.exists(child.workdir)


def test_a_folder_that_is_hard_to_remove_is_removed(child):
    load(child, """
        here = os.getcwd()
        for _ in range(1500):
            os.mkdir("d" * 200); os.symlink("/", "link"); os.chdir("d" * 200)
        os.chdir(here); os.mkdir("locked"); open("locked/file", "w").close(); os.chmod("locked", 0)
        print('loaded.')
    """)
    workdir = child.workdir
    child.kill()
    assert not os.path.exists(workdir) and os.path.isdir("/usr")


# --- hostile replies


def frame(body: str) -> str:
    return f"(lambda b: len(b).to_bytes(4, 'little') + b)({body})"


@pytest.mark.parametrize("data", [
    "b'\\xff\\xff\\xff\\xff' + b'x' * 100",
    frame("b'{not json'"),
    frame("b'\\xff\\xfe'"),
    frame("b'{\"ok\": true, \"x\": NaN}'"),
    frame("b'{\"ok\": true, \"x\": 1e999}'"),
    frame("b'{\"ok\": true, \"x\": \"\\\\ud800\"}'"),
    frame("b'[' * 500000"),
    frame("b'{\"ok\": true, \"x\": ' + b'9' * 5000 + b'}'"),
    frame("b'[1, 2]'"),
    frame("b'{\"ok\": 1}'"),
    frame("b'{\"ok\": false, \"kind\": 3}'"),
    frame("b'{\"ok\": true, \"id\": \"0\"}'"),
    frame("b'{\"ok\": true}'") + " * 1000",
], ids=["length", "json", "utf8", "nan", "infinite", "surrogate", "deep", "digits", "list", "ok", "kind", "id", "many"])
def test_a_malformed_reply_ends_the_child(child, data):
    with pytest.raises(ChildDied) as caught:
        load(child, f"threading.Thread(target=lambda: os.write(3, {data}), daemon=True).start(); time.sleep(0.5)")
    assert caught.value.kind == "protocol"


def test_a_reply_that_nobody_asked_for_ends_the_child(child):
    data = frame("b'{}'")
    load(child, f"threading.Timer(0.2, lambda: os.write(3, {data})).start(); print('loaded.')")
    time.sleep(0.5)
    with pytest.raises(ChildDied) as caught:
        child.request("ping", timeout_s=5)
    assert caught.value.kind == "protocol"


def test_a_reply_that_stops_half_way_runs_into_the_deadline(child):
    with pytest.raises(ChildDied) as caught:
        load(child, "os.write(3, b'\\x10\\0\\0\\0{'); time.sleep(100)", timeout_s=0.5)
    assert caught.value.kind == "timeout"


def test_a_child_that_closes_its_connection_is_killed(child):
    marker = f"98765.{uuid.uuid4().int % 10**9}"
    with pytest.raises(ChildDied) as caught:
        load(child, f"os.close(3); os.execvp('sleep', ['sleep', '{marker}'])")
    assert caught.value.kind == "protocol"
    assert running(marker) == []


# --- the zygote's own end


def test_a_killed_zygote_is_replaced_with_a_warning():
    warnings: list[str] = []
    with Zygote("bare", warn=warnings.append) as zygote:
        first = zygote.spawn()
        os.kill(zygote.pid, signal.SIGKILL)
        assert eventually(lambda: zygote._process.poll() is not None)
        with pytest.raises(ChildDied):
            for _ in range(100):
                first.request("ping", timeout_s=5)
                time.sleep(0.05)
        assert zygote.spawn().request("ping", timeout_s=5)["ok"]
    assert any("starting another" in warning for warning in warnings)


def test_a_pid_namespace_without_its_own_proc_is_refused():
    with pytest.raises(ValueError, match="mount namespace"):
        Zygote("bare", namespaces=("pid", "net"))


def test_a_mode_that_does_not_exist_is_an_error_of_the_installation():
    with pytest.raises(SandboxError, match="did not start"):
        Zygote("no such mode")


HOLDER = """
import sys, time
from kernelband.evaluate.zygote import Zygote
zygote = Zygote("bare", namespaces={namespaces!r}, warn=lambda text: None)
child = zygote.spawn()
source = '''
import os
for _ in range(2):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvp("sleep", ["sleep", "{marker}"])
        os._exit(0)
def entry(): pass
'''
child.request("load", source=source, entry="entry", timeout_s=20)
print(zygote.pid, child.pid, child.workdir, flush=True)
{end}
"""


@pytest.mark.parametrize("namespaces", [FULL, NONE], ids=["namespaces", "no-namespaces"])
@pytest.mark.parametrize("end", ["time.sleep(1000)", "zygote.close(); time.sleep(1000)"], ids=["SIGKILL", "close"])
def test_nothing_is_left_after_close_or_after_the_trusted_process_was_killed(namespaces, end):
    marker = f"98765.{uuid.uuid4().int % 10**9}"
    script = HOLDER.format(namespaces=namespaces, marker=marker, end=end)
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        try:
            zygote_pid, child_pid, workdir = holder.stdout.readline().split()
            if end.startswith("time"):
                assert eventually(lambda: len([p for p in running(marker) if p != holder.pid]) == 2)
                holder.kill()
                holder.wait()
            sleepers = lambda: [p for p in running(marker) if p != holder.pid]  # noqa: E731 (its script names it too)
            assert eventually(lambda: not sleepers() and not os.path.exists(f"/proc/{child_pid}")
                              and not running(os.path.dirname(workdir)))
            assert eventually(lambda: not os.path.exists(os.path.dirname(workdir)))
            assert eventually(lambda: not os.path.exists(f"/proc/{zygote_pid}"))
        finally:
            holder.kill()
