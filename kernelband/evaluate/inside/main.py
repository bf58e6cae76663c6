"""The zygote: a warm process that has imported torch and Triton, and forks one sandboxed child a request.

Started as ``python -I -B main.py MODE FD ROOT [FOLDER...]``: FD is a SOCK_SEQPACKET control socket to the trusted side,
ROOT the private folder below which all children's folders lie, FOLDERs are added to the import path.
Owns: the process tree zygote → supervisor (one a child, outside its namespaces) → init (pid 1 of the pid namespace) →
candidate's process, and its end: when the trusted side ends, however it ends, everything here ends and ROOT is removed.
Never: runs a torch operation or touches CUDA before the last fork; imports candidate code in any process but the last.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import struct
import sys
import time
import traceback
from typing import Any, NoReturn

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import sandbox
import serve

POLL_MS = 500


class Ended(BaseException):
    """Raised by the signal that says that this process's parent has ended."""


def main() -> None:
    mode, control_fd, root, *folders = sys.argv[1:]
    os.umask(0o022)
    sandbox.set_dumpable(False)
    sandbox.adopt_orphans()
    trusted = os.getppid()
    control = socket.socket(fileno=int(control_fd))
    control.set_inheritable(False)
    sys.path += [folder for folder in folders if folder not in sys.path]
    import torch
    import triton  # noqa: F401
    from triton.runtime import cache

    serve.register(mode)
    if hasattr(cache, "triton_key"):  # hashes all of Triton's files and keeps the answer: 0.3 s that every child would pay
        cache.triton_key()
    gc.collect()
    gc.freeze()
    threads = len(os.listdir("/proc/self/task"))
    ready = {"ready": True, "threads": threads, "cuda": torch.cuda.is_initialized()}
    control.send(json.dumps(ready).encode())
    supervisors: set[int] = set()
    while os.getppid() == trusted:
        if _readable(control, POLL_MS if not supervisors else 100):
            message, fds = _receive(control)
            if not message:
                break
            pid = os.fork()
            if pid == 0:
                control.close()
                _supervise_and_exit(message, fds)
            supervisors.add(pid)
            for fd in fds:
                os.close(fd)
        _reap(supervisors)
    _end(supervisors, root)
    os._exit(0)  # without the interpreter's own end, which takes a second with torch loaded


def _readable(connection: socket.socket, wait_ms: int) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(wait_ms))


def _receive(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """One spawn request with its three descriptors (requests, status, output); an empty one at the end."""
    try:
        data, ancillary, _, _ = control.recvmsg(1 << 16, socket.CMSG_SPACE(16), socket.MSG_CMSG_CLOEXEC)
    except ConnectionError:
        return {}, []
    fds: list[int] = []
    for _, _, payload in ancillary:
        fds += struct.unpack(f"{len(payload) // 4}i", payload)
    return (json.loads(data) if data else {}), fds


def _reap(supervisors: set[int]) -> None:
    """Collect ended supervisors; whatever they could not clean up was handed to this process and is killed."""
    ended = False
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid == 0:
            break
        ended = True
        supervisors.discard(pid)
    if ended:
        for pid in _children():
            if pid not in supervisors:
                _kill(pid)


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:  # a kernel without that file
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{name}/stat") as file:
                    if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                        found.append(int(name))
            except OSError:
                continue
        return found


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _sweep(patience_s: float) -> None:
    """Kill and reap all children, and theirs as they are handed up, until none is left."""
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        for pid in _children():
            _kill(pid)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def _kill_all_of(uid: int) -> None:
    """Kill every process of an id that only one child has, at once: a fork bomb outruns a kill of one after another."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def _end(supervisors: set[int], root: str) -> None:
    """The trusted side has ended or closed: supervisors see it too and end their children; then the folder goes."""
    until = time.monotonic() + 3
    while supervisors and time.monotonic() < until:
        _reap(supervisors)
        time.sleep(0.005)
    _sweep(10)
    sandbox.remove_tree(root)


def _supervise_and_exit(message: dict[str, Any], fds: list[int]) -> NoReturn:
    """Body of the supervisor: never returns into the zygote's loop, whatever happens."""
    status = socket.socket(fileno=fds[1])
    try:
        _supervise(message, fds[0], status, fds[2])
    except Ended:
        if message["uid"] is not None:
            _kill_all_of(message["uid"])
        _sweep(10)
    except BaseException as error:
        _report(status, {"error": f"{type(error).__name__}: {error}"[:2000]})
    finally:
        os._exit(0)


def _report(status: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the trusted side has gone; this process ends next
        status.send(json.dumps(message).encode())


def _supervise(message: dict[str, Any], requests_fd: int, status: socket.socket, output_fd: int) -> None:
    def ended(number: int, frame: Any) -> None:
        raise Ended

    signal.signal(signal.SIGTERM, ended)
    zygote = os.getppid()
    sandbox.die_with_parent(signal.SIGTERM)
    if os.getppid() != zygote:
        raise Ended
    plan = sandbox.Plan(mode=message["mode"], workdir=message["workdir"], uid=message["uid"],
                        namespaces=tuple(message["namespaces"]), hide=tuple(message["hide"]), keep=tuple(message["keep"]))
    features: dict[str, str] = {}
    sandbox.enter_namespaces(plan, features)
    contained = features.get("pid namespace") == "on"
    if not contained:
        sandbox.adopt_orphans()
    alive, held = os.pipe()  # held by this process only: its end shows as EOF
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(held)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # when memory runs out, this tree ends first
        (_init if contained else _candidate_and_exit)(plan, features, requests_fd, status, output_fd, alive)
    os.close(alive)
    os.close(requests_fd)
    os.close(output_fd)
    _report(status, {"supervisor": os.getpid(), "init": child})
    result = _wait_for(child, status, plan.workdir, message["disk_bytes"])
    if not contained and plan.uid is not None:
        _kill_all_of(plan.uid)
    _sweep(10)
    if not contained or os.WIFSIGNALED(result):  # else init has said how the candidate's process ended
        _report(status, {"exit": os.waitstatus_to_exitcode(result)})


def _wait_for(child: int, status: socket.socket, workdir: str, disk_bytes: int) -> int:
    """Wait status of ``child``; it is killed when the trusted side says so or has ended, or when it fills the disk."""
    poll = select.poll()
    poll.register(status, select.POLLIN)
    wait_ms = 20
    with contextlib.suppress(OSError):  # an old kernel: look every 20 ms instead
        poll.register(os.pidfd_open(child), select.POLLIN)
        wait_ms = 500
    free = _free(workdir)
    while True:
        ready = poll.poll(wait_ms)
        pid, result = os.waitpid(child, os.WNOHANG)
        if pid:
            return result
        # walking the folder would disturb what is timed, so only when the whole disk has lost as much
        full = free - _free(workdir) > disk_bytes // 2 and _used(workdir) > disk_bytes
        if full:
            _report(status, {"error": f"more than {disk_bytes >> 20} MiB on disk"})
        if full or any(fd == status.fileno() for fd, _ in ready):
            _kill(child)
            return os.waitpid(child, 0)[1]


def _free(folder: str) -> int:
    try:
        state = os.statvfs(folder)
    except OSError:  # removed already: the end is near
        return 0
    return state.f_bfree * state.f_frsize


def _used(folder: str) -> int:
    """Bytes on disk below ``folder``; a tree of more than 200,000 entries counts as endless."""
    used = entries = 0
    for place, _, names in os.walk(folder):
        entries += 1 + len(names)
        if entries > 200_000:
            return 1 << 62
        for name in names:
            with contextlib.suppress(OSError):
                used += os.lstat(os.path.join(place, name)).st_blocks * 512
    return used


def _orphaned(alive: int) -> bool:
    poll = select.poll()
    poll.register(alive, select.POLLIN)
    return bool(poll.poll(0))


def _init(plan: sandbox.Plan, features: dict[str, str], requests_fd: int, status: socket.socket, output_fd: int,
          alive: int) -> NoReturn:
    """Pid 1 of the namespace: prepare the mounts, start the candidate's process, end with it; the kernel ends the rest."""
    try:
        sandbox.die_with_parent(signal.SIGKILL)
        if _orphaned(alive):
            os._exit(0)
        sandbox.arrange_mounts(plan, features)
        child = os.fork()
        if child == 0:
            _candidate_and_exit(plan, features, requests_fd, status, output_fd, None)
        os.close(requests_fd)
        os.close(output_fd)
        sandbox.drop_capabilities(None)
        while True:
            pid, result = os.wait()
            if pid == child:
                _report(status, {"exit": os.waitstatus_to_exitcode(result)})
                break
    except BaseException as error:
        _report(status, {"error": f"{type(error).__name__}: {error}"[:2000]})
    finally:
        os._exit(0)


def _candidate_and_exit(plan: sandbox.Plan, features: dict[str, str], requests_fd: int, status: socket.socket,
                        output_fd: int, alive: int | None) -> NoReturn:
    """The process in which candidate code runs: only its own descriptors, all rights dropped, then the request loop."""
    code = 70
    try:
        os.setsid()
        if alive is not None:  # no pid namespace: the mounts could not be made by an init
            sandbox.arrange_mounts(plan, features)
        sandbox.lock_down(plan, features)
        sandbox.die_with_parent(signal.SIGKILL)  # after the change of user id, which clears it
        if alive is not None and _orphaned(alive):
            os._exit(0)
        own = os.dup(requests_fd)
        os.dup2(output_fd, 1)
        os.dup2(output_fd, 2)
        status.detach()
        os.dup2(own, 3, inheritable=False)
        os.closerange(4, 1 << 20)
        serve.run(socket.socket(fileno=3), features, plan.workdir)
        code = 0
    except BaseException as error:
        if status.fileno() < 0:
            traceback.print_exc()
        else:
            _report(status, {"error": f"{type(error).__name__}: {error}"[:2000]})
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
