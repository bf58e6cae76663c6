"""What a candidate reaches for and must not get: environments, other runs, the oracle's source, Ray, the network, the disk
outside of its folder, the trusted processes.

One probe tries it all, three times over: in the compiler's and in the judge's children of a real workshop in a real Ray
session, where every attempt must fail; and outside of any sandbox, where every attempt must succeed, so that none fails for a
reason of its own. `python tests/test_sandbox_reach.py WORLD` is the process in which that happens.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import KERNEL, ROOT, TASK
from sandbox_tools import load, need

from kernelband.evaluate.zygote import Zygote, protect_this_process

MARK = "kbsecret-reach"

# Runs when a candidate is imported. It uses nothing but the standard library and prints what it could reach.
PROBE = '''
import ctypes, glob, os, socket

def kb_holds(path, mark):
    with open(path, "rb") as file:
        return mark in file.read(1 << 22)

def kb_reach(plan):
    mark, reached = (plan["mark"][:4] + plan["mark"][4:]).encode(), []
    libc = ctypes.CDLL(None, use_errno=True)

    def attempt(what, call):
        try:
            if call():
                reached.append(what)
        except (OSError, ValueError):
            pass

    for path in glob.glob("/proc/[0-9]*/environ") + ["/proc/thread-self/environ"]:
        attempt("environment", lambda: kb_holds(path, mark))
    attempt("environment", lambda: mark in repr(dict(os.environ)).encode())
    for what, path in plan["files"]:
        attempt(what, lambda: kb_holds(path, mark))
        for pid in [1, os.getpid(), *plan["pids"]]:
            attempt(what, lambda: kb_holds(f"/proc/{pid}/root{path}", mark))
            attempt(what, lambda: kb_holds(f"/proc/{pid}/cwd/{os.path.relpath(path, plan['cwd'])}", mark))
    for what, path in plan["any"]:
        attempt(what, lambda: kb_holds(path, b""))
    for what, folder in plan["folders"]:
        attempt(what, lambda: [name for name in os.listdir(folder) if name in plan["names"]])
    for what, path in plan["sockets"]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(2)
            attempt(what, lambda: connection.connect(path) is None)
    for port in plan["ports"]:
        for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET, plan["host"]), (socket.AF_INET6, "::1")):
            with socket.socket(family) as connection:
                connection.settimeout(2)
                attempt("gcs port" if port == plan["gcs"] else "tcp port", lambda: connection.connect((host, port)) is None)
    for path in plan["private"]:  # may be written, if it is seen by nobody else
        attempt("private", lambda: open(path, "w").write("x") and None)
    for path in plan["writes"]:
        attempt("write", lambda: open(path, "w").write("x"))
        for pid in plan["pids"]:
            attempt("write", lambda: open(f"/proc/{pid}/root{path}", "w").write("x"))
    for pid in plan["pids"]:
        if pid in (os.getpid(), os.getppid()):  # the same number in another pid namespace
            continue
        attempt("signal", lambda: os.kill(pid, 0) is None)
        attempt("memory file", lambda: open(f"/proc/{pid}/mem", "rb").close() is None)
        attempt("descriptors", lambda: os.listdir(f"/proc/{pid}/fd"))
        attempt("pidfd_getfd", lambda: libc.syscall(438, os.pidfd_open(pid), 0, 0) >= 0)
        if pid in plan["trace"]:
            attempt("ptrace", lambda: libc.ptrace(0x4206, pid, None, None) == 0)
        if pid == plan["victim"]:
            into = ctypes.create_string_buffer(len(mark))
            here = (ctypes.c_void_p * 2)(ctypes.addressof(into), len(mark))
            there = (ctypes.c_void_p * 2)(plan["address"], len(mark))
            one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
            for number in (310, 311):
                attempt("process_vm", lambda: libc.syscall(number, pid, here, one, there, one, none) == len(mark))
    return sorted(set(reached))
'''

VICTIM = """
import ctypes, sys
text = ctypes.create_string_buffer(sys.argv[1].encode())
print(ctypes.addressof(text), flush=True)
sys.stdin.read()
"""

EVERYTHING = {"environment", "oracle as given", "oracle of the run", "own sources", "own run", "another run", "ray session",
              "ray folder", "object store", "ray token", "ray socket", "gcs port", "tcp port", "write", "signal", "memory file",
              "descriptors", "pidfd_getfd", "ptrace", "process_vm"}
ROOTS_ONLY = {"memory file", "descriptors", "pidfd_getfd", "ptrace", "process_vm"}
"""What the trusted side's own user may not do either, where it is not root: these processes are not dumpable."""


def listening() -> list[int]:
    """TCP ports of this machine that somebody listens at."""
    lines = [line for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return sorted({int(line.split()[1].rpartition(":")[2], 16) for line in lines if line.split()[3] == "0A"})


def descendants(root: int) -> list[int]:
    """Process ids below ``root``: with Ray its daemons, the actors' workers and their zygotes."""
    parents = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def probing(plan: dict[str, Any]) -> str:
    """The sound kernel, which fails to load when it could reach anything."""
    return f"{KERNEL}\n{PROBE}\nif got := kb_reach({plan!r}):\n    raise RuntimeError(f'reached: {{got}}')\n"


async def scene(world: Path) -> dict[str, Any]:
    """A run beside another one, in Ray, whose workshop compiles and judges the probing candidate."""
    import socket

    import ray

    from cluster import local
    from cluster.workshop import Workshop
    from kernelband.device import KNOWN, Device
    from kernelband.folder import RunFolder
    from kernelband.task import load as load_task

    project, mark = world / "project", uuid.uuid4().hex
    task = load_task(project / "tasks" / "scale")
    folder, log = RunFolder.create(project / "runs" / "this", task)
    (folder.path / "sources" / "secret.py").write_text(MARK)
    shared = Path(f"/dev/shm/kernelband-{mark}")
    with local.session(None), socket.create_server(("127.0.0.1", 0)) as server, log:
        node: Any = ray._private.worker._global_node
        session, gcs = Path(node.get_session_dir_path()), int(node.gcs_address.rpartition(":")[2])
        for path in (session / mark, session.parent / mark, shared):
            path.write_text(MARK)
        victim = subprocess.Popen([sys.executable, "-c", VICTIM, MARK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert victim.stdin and victim.stdout
        shop = Workshop(folder, task, Device("model", "h200"), KNOWN["h200"], seed=0, tried=[], strategies=None, compilers=1,
                        judges=1, compile_s=120, check_s=120)
        try:
            told: dict[str, Any] = {"warnings": await shop.open()}
            token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray" / "auth_token"))
            plan = {
                "mark": MARK, "cwd": str(Path.cwd()), "names": [MARK, shared.name, "journal.jsonl", "kernel.py"], "gcs": gcs,
                "files": [("oracle as given", str(task.folder / "task.py")), ("oracle of the run", str(folder.task / "task.py")),
                          ("own sources", str(folder.path / "sources" / "secret.py")), ("object store", str(shared)),
                          ("another run", str(project / "runs" / "other" / "sources" / "secret.py")),
                          ("ray session", str(session / mark)), ("ray folder", str(session.parent / mark))],
                "any": [("ray token", str(token))],
                "folders": [("oracle as given", str(task.folder)), ("another run", str(project / "runs" / "other")),
                            ("object store", "/dev/shm"), ("own run", str(folder.path))],
                "sockets": [("ray socket", str(path)) for path in (session / "sockets").iterdir()],
                "ports": listening(), "host": node.node_ip_address, "pids": [*descendants(os.getpid()), os.getpid()],
                "victim": victim.pid, "address": int(victim.stdout.readline()), "trace": [victim.pid],
            }
            assert {gcs, server.getsockname()[1]} <= set(plan["ports"]) and victim.pid in plan["pids"]
            near = [f"{place}/{mark}" for place in (world, project, folder.path, folder.cache, task.folder, session)]
            far = [f"{place}/{mark}" for place in (ROOT, ROOT / "kernelband", "/etc", "/usr/lib", Path.home(), "/var/lib", "/dev",
                                                   Path(os.__file__).parent, sys.prefix)]
            private = [f"{place}/{mark}-private" for place in ("/tmp", "/dev/shm", "/var/tmp")]
            bare = f"import json\n{PROBE}\nprint(json.dumps(kb_reach({ {**plan, 'writes': near, 'private': []}!r})))"
            done = subprocess.run([sys.executable, "-c", bare], capture_output=True, text=True, timeout=120,
                                  env={"PATH": os.environ["PATH"]})
            told["control"] = json.loads(done.stdout) if done.returncode == 0 else done.stderr
            for written in near:
                Path(written).unlink(missing_ok=True)
            hostile = probing({**plan, "writes": [*near, *far], "private": private, "trace": plan["pids"]})
            sound = await shop.compile(KERNEL)
            first = await shop.baseline("sound", KERNEL, sound)
            told["sound"] = f"{sound.error or first.kind}{first.detail}"
            told["compile"] = (await shop.compile(hostile)).error or "nothing"
            judged = await shop.baseline("hostile", hostile, sound)
            told["interpret"] = "nothing" if judged.kind == "measured" else f"{judged.kind}: {judged.detail}"
            told["left"] = [path for path in (*near, *far, *private) if os.path.exists(path)]
            told["alive"] = victim.poll() is None
        finally:
            victim.kill()
            shared.unlink(missing_ok=True)
            (session.parent / mark).unlink(missing_ok=True)
            await shop.close()
    return told


@pytest.fixture
def world() -> Iterator[Path]:
    """A folder that everybody may read, neither below a home nor with temporary files (where the checkout is not)."""
    made = Path(tempfile.mkdtemp(prefix=".reach-", dir=ROOT))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.mark.ray
@pytest.mark.xdist_group("ray")
def test_a_candidate_reaches_nothing_but_its_own_folder(world):
    files = {"tasks/scale/task.py": f"# {MARK}\n{TASK}", "tasks/scale/kernel.py": KERNEL,
             "runs/other/sources/secret.py": MARK, "runs/other/journal.jsonl": "{}\n"}
    for name, text in files.items():
        path = world / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    environment = {**os.environ, "SOME_API_KEY": MARK, "RAY_AUTH_MODE": "token", "PYTHONPATH": str(ROOT)}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run([sys.executable, __file__, str(world)], capture_output=True, text=True, timeout=280, cwd=world,
                          env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    walls = [text for text in told["warnings"] if "sandbox feature" in text]
    if walls:
        pytest.skip(f"this machine does not allow the whole sandbox: {walls}")
    expected = EVERYTHING if os.geteuid() == 0 else EVERYTHING - ROOTS_ONLY
    assert expected <= set(told["control"]), f"the probe itself is broken: {told['control']}"
    assert told["sound"] == "measured"
    assert told["compile"] == "nothing"
    assert told["interpret"] == "nothing"
    assert told["left"] == [] and told["alive"]


def seen(path: Path) -> str:
    """Source that prints "visible" when a file can be read."""
    return f"""
        try:
            print("visible" if {MARK!r} in open({str(path)!r}).read() else "empty")
        except OSError:
            print("absent")
        print("loaded.")
    """


def test_places_that_the_environment_names_are_out_of_sight(world, monkeypatch):
    """A Ray whose folder and token lie elsewhere, and temporary files that are not in /tmp."""
    places = {"RAY_TMPDIR": world / "ray" / "session" / "log", "TMPDIR": world / "tmp" / "file",
              "RAY_AUTH_TOKEN_PATH": world / "token"}
    for path in places.values():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(MARK)
    with Zygote("bare", warn=lambda text: None) as zygote:
        child = zygote.spawn()
        need(child, "hidden folders")
        if "visible" not in load(child, seen(places["RAY_TMPDIR"])):
            pytest.skip("the checkout lies in a home, which is hidden anyway")
    for name, path in places.items():
        monkeypatch.setenv(name, str(path if name == "RAY_AUTH_TOKEN_PATH" else world / path.relative_to(world).parts[0]))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with Zygote("bare", warn=lambda text: None) as zygote:
        for path in places.values():
            child = zygote.spawn()
            assert child.workdir.startswith(str(world / "tmp"))
            assert "visible" not in load(child, f"open('own', 'w').write('x')\n{textwrap.dedent(seen(path))}"), path
            child.kill()
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_a_folder_inside_of_what_the_interpreter_needs_is_hidden():
    folder = Path(tempfile.mkdtemp(prefix="reach-", dir=sys.prefix))
    folder.chmod(0o755)
    try:
        (folder / "secret").write_text(MARK)
        for hide, expected in (([], "visible"), ([str(folder)], "absent")):
            with Zygote("bare", hide=hide, warn=lambda text: None) as zygote:
                child = zygote.spawn()
                need(child, "hidden folders")
                assert load(child, f"import torch.fx\n{textwrap.dedent(seen(folder / 'secret'))}").startswith(expected)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    os.environ["RAY_AUTH_MODE"] = "token"  # as a user's command has it; conftest turns it off
    protect_this_process()
    print(json.dumps(asyncio.run(scene(Path(sys.argv[1])))), flush=True)
