"""What a hostile candidate can read, write, reach and signal from inside the sandbox: nothing but its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path

import pytest
from sandbox_tools import FULL, NONE, ROOT, load, need

from kernelband.evaluate.zygote import CandidateError, Zygote

pytest_plugins = ["sandbox_tools"]


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
        # A checkout below a folder that is hidden anyway (/tmp, a home) is not even there.
        seen = f"os.listdir('{folder}') if os.path.isdir('{folder}') else []"
        assert load(child, f"print({seen}, 'loaded.')").startswith("[] ")


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
