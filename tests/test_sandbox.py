"""The sandbox as hostile candidates meet it: real processes, real attacks; the trusted side must survive each one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import pytest

from kernelband.evaluate.zygote import NAMESPACES, CandidateError, Child, ChildDied, SandboxError, Zygote

ROOT = Path(__file__).resolve().parent.parent
FULL, NONE = NAMESPACES, ()


@pytest.fixture(scope="module", params=[FULL, NONE], ids=["namespaces", "no-namespaces"])
def zygote(request):
    warnings: list[str] = []
    with Zygote("bare", namespaces=request.param, warn=warnings.append) as made:
        made.warnings = warnings
        made.full = request.param == FULL
        yield made


@pytest.fixture
def child(zygote):
    made = zygote.spawn()
    yield made
    made.kill()
    assert not os.path.exists(made.workdir)
    after = zygote.spawn()  # whatever the candidate did, the next one finds a working zygote
    assert after.request("ping", timeout_s=10)["ok"]
    after.kill()


def load(child: Child, source: str, timeout_s: float = 20.0, entry: str = "entry") -> str:
    """Import ``source`` in the child; what it printed."""
    source = "import os, sys, time, ctypes, socket, signal, threading\n" + textwrap.dedent(source)
    source += "" if "loaded." in source else "\nprint('loaded.')"
    child.request("load", source=source + "\ndef entry(): pass\n", entry=entry, timeout_s=timeout_s)
    deadline = time.monotonic() + 5
    while "loaded." not in child.output_tail and time.monotonic() < deadline:
        time.sleep(0.01)
    return child.output_tail


def need(child: Child, *features: str) -> None:
    for feature in features:
        if not child.features.get(feature, "off: unknown").startswith("on"):
            pytest.skip(f"{feature} is {child.features.get(feature)}")


def running(marker: str) -> list[int]:
    """Processes of the whole machine that have ``marker`` in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and marker in (entry / "cmdline").read_text() and int(entry.name) != os.getpid():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def eventually(condition, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


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


# --- what a candidate can reach


def test_a_child_holds_no_descriptor_but_its_own(child):
    text = load(child, "print(sorted(int(f) for f in os.listdir('/proc/self/fd'))[:-1], 'loaded.')")
    assert text.startswith("[0, 1, 2, 3] ")


SPY = '''
import os
found, seen = [], 0
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in NAMES:
        try:
            data = open(f"/proc/{pid}/{name}", "rb").read()
        except OSError:
            continue
        seen += 1
        if b"kbsec" + b"ret" in data:
            found.append(f"{pid}/{name}")
print("seen", seen, "found", found, flush=True)
def entry(): pass
'''


@pytest.mark.parametrize("namespaces, names", [(FULL, ["environ", "cmdline", "maps"]), (NONE, ["environ"])])
def test_secrets_of_the_trusted_process_cannot_be_read(namespaces, names):
    script = f"""
        import sys, time
        from kernelband.evaluate.zygote import Zygote, protect_this_process
        assert b"kbsecret" in open("/proc/self/environ", "rb").read()
        protect_this_process()
        with Zygote("bare", namespaces={namespaces!r}, warn=lambda text: None) as zygote:
            child = zygote.spawn()
            child.request("load", source={SPY.replace("NAMES", repr(names))!r}, entry="entry", timeout_s=20)
            child.kill()
            print(child.features["user id"], child.features["pid namespace"])
            print(child.output_tail)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), "kbsecret-in-argv"], cwd=ROOT, text=True,
                          capture_output=True, env={**os.environ, "KEY": "kbsecret-in-environment"}, timeout=120)
    assert done.returncode == 0, done.stderr
    if "on" not in done.stdout.split():
        pytest.skip("neither a user id nor a pid namespace of its own")
    assert "found []" in done.stdout and "seen 0" not in done.stdout, done.stdout


def test_nothing_can_be_written_outside_the_own_folder(child, tmp_path):
    need(child, "landlock")
    tmp_path.chmod(0o777)
    public = f"/tmp/kernelband-test-{uuid.uuid4()}"
    places = [f"{tmp_path}/file", public, f"{ROOT}/tests/file", "/etc/file", "/usr/file", f"{Path.home()}/file",
              str(Path(os.__file__).parent / "file"), "/dev/shm/kernelband-test"]
    text = load(child, f"""
        for place in {places}:
            try:
                open(place, "w").write("x")
            except OSError:
                print("refused", place)
        open("own", "w").write("x")
        print('loaded.')
    """)
    assert not any(os.path.exists(place) for place in places)
    assert text.count("refused") >= len(places) - 3  # /tmp and /dev/shm may be private ones
    assert os.path.exists(f"{child.workdir}/own")


def test_home_and_other_temporary_files_are_out_of_sight(child, tmp_path):
    need(child, "hidden folders", "private /tmp")
    (tmp_path / "note").write_text("x")
    (tmp_path / "note").chmod(0o666)
    text = load(child, f"""
        print(os.path.exists("{tmp_path}/note"), os.listdir("/home"), os.path.exists("{Path.home()}/.bashrc"), "loaded.")
    """)
    assert text.startswith("False [] False")


def test_a_folder_named_by_the_caller_is_hidden(tmp_path_factory):
    folder = ROOT / "tests"
    with Zygote("bare", hide=[str(folder)], warn=lambda text: None) as zygote:
        child = zygote.spawn()
        need(child, "hidden folders")
        assert load(child, f"print(os.listdir('{folder}'), 'loaded.')").startswith("[] ")


def test_another_childs_folder_cannot_be_read(zygote, child):
    need(child, *(["private /tmp"] if zygote.full else ["user id"]))
    other = zygote.spawn()
    load(other, "open('plan', 'w').write('secret'); os.chmod('plan', 0o666); print('loaded.')")
    assert Path(other.workdir, "plan").exists()
    with pytest.raises(CandidateError) as caught:
        load(child, f"print(open('{other.workdir}/plan').read())")
    assert caught.value.kind in ("PermissionError", "FileNotFoundError")
    other.kill()


def test_no_socket_of_this_machine_can_be_reached(zygote, child):
    need(child, "net namespace" if zygote.full else "landlock")
    name = f"\0kernelband-{uuid.uuid4()}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(name)
        abstract.listen()
        text = load(child, f"""
            for family, address in ((socket.AF_INET, {tcp.getsockname()!r}), (socket.AF_UNIX, {name!r})):
                try:
                    with socket.socket(family) as connection:
                        connection.settimeout(1)
                        connection.connect(address)
                    print("reached", address)
                except OSError as error:
                    print("refused", error.errno)
            print('loaded.')
        """)
    assert text.count("refused") == 2 and "reached" not in text


def test_the_zygote_can_neither_be_killed_nor_traced_nor_given_new_namespaces(zygote, child):
    need(child, *(["pid namespace"] if zygote.full else ["user id"]))
    text = load(child, f"""
        libc = ctypes.CDLL(None, use_errno=True)
        for target in ({zygote.pid}, {os.getpid()}, {child.pid if zygote.full else 1}, os.getppid()):
            for number in (9, 19):
                try:
                    os.kill(target, number)
                    print("sent", target)
                except OSError:
                    pass
            if target and libc.ptrace(16, target, None, None) == 0:
                print("traced", target)
        for flags in (0x10000000, 0x20000, 0x40000000):
            if libc.unshare(flags) == 0:
                print("unshared", flags)
        print('loaded.')
    """)
    # pid 0 (the parent is outside) is the candidate's own group; init ignores what comes from inside
    assert "traced" not in text and f"sent {zygote.pid}" not in text and f"sent {os.getpid()}" not in text
    if child.features["seccomp"] == "on":
        assert "unshared" not in text
    assert child.request("ping", timeout_s=5)["ok"]


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


def test_a_mode_that_does_not_exist_is_an_error_of_the_installation():
    with pytest.raises(SandboxError, match="did not start"):
        Zygote("no such mode")


def test_an_ordinary_user_gets_the_same_walls_through_a_user_namespace():
    """As root, so that this runs in a container: the interpreter is made reachable, then the user id is changed."""
    if os.geteuid() != 0:
        pytest.skip("the other tests run as an ordinary user already")
    script = f"""
import os, tempfile
from kernelband.evaluate.zygote import Zygote
assert os.getuid() == 12345
with Zygote("bare", warn=print) as zygote:
    child = zygote.spawn()
    child.request("load", source={SPY.replace("NAMES", "['cmdline']")!r}, entry="entry", timeout_s=20)
    child.kill()
    print(child.features)
    print(child.output_tail, os.path.exists(child.workdir))
"""
    home = f"/{Path(sys.base_prefix).parts[1]}"
    reach = f"""
        set -e
        mount --make-rprivate /
        if ! setpriv --reuid 12345 --regid 12345 --clear-groups test -r {os.__file__}; then
            mount --bind {sys.base_prefix} /mnt; mount -t tmpfs -o mode=755 tmpfs {home}; mkdir -p {sys.base_prefix}
            mount --bind /mnt {sys.base_prefix}
        fi
        export PYTHONPATH={ROOT}
        exec setpriv --reuid 12345 --regid 12345 --clear-groups {sys.executable} - kbsecret
    """
    done = subprocess.run(["unshare", "--mount", "sh", "-c", reach], input=script, text=True, capture_output=True,
                          timeout=120, cwd="/", env={**os.environ, "HOME": "/nonexistent"})
    if "unshare failed" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    if "'user namespace': 'on'" not in done.stdout:
        pytest.skip(f"user namespaces are not allowed: {done.stdout}")
    for feature in ("pid namespace", "net namespace", "mount namespace", "hidden folders", "read-only files", "landlock"):
        assert f"'{feature}': 'on'" in done.stdout, done.stdout
    assert "found []" in done.stdout and done.stdout.rstrip().endswith("False"), done.stdout


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
