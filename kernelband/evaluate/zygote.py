"""Sandboxed children for candidate code, from the trusted side: start, ask with a deadline, kill.

Owns: the zygote's start with an all but empty environment, each child's private folder and user id, the deadline and
the size of every message, and the classification of a child's end.
Never: imports torch, Triton or candidate code; believes a reply. A reply is checked for form only (length, JSON, finite
numbers, identity): candidate code can forge its content, so callers judge bytes that they compute on themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import logging
import os
import pwd
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from kernelband.evaluate.inside.sandbox import NOT_ASKED, remove_tree
from kernelband.evaluate.wire import MAX_FDS, Late, Malformed, clean, receive, send

INSIDE = Path(__file__).parent / "inside"
NAMESPACES = ("pid", "net", "ipc", "mount")
PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "LANG", "TRITON_PTXAS_PATH",
             "TRITON_LIBCUDA_PATH")
TAIL_BYTES, FLOOD_BYTES = 8 << 10, 64 << 20
_log = logging.getLogger(__name__)
START_S, SPAWN_S, KILL_S = 180.0, 60.0, 20.0


class SandboxError(RuntimeError):
    """The sandbox itself could not be started: a fault of the installation or the machine, never of a candidate."""


class ChildDied(Exception):
    """A child has ended. ``kind``: "exit", "signal", "timeout", "protocol" or "flood"; ``detail`` says more."""

    def __init__(self, kind: str, detail: str, output_tail: str = "") -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail, self.output_tail = kind, detail, output_tail


class CandidateError(Exception):
    """The candidate raised; its child lives on. ``kind`` is the exception class's name, ``stage`` the step it was in."""

    def __init__(self, kind: str, message: str, traceback: str, stage: str) -> None:
        super().__init__(f"{stage}: {kind}: {message}")
        self.kind, self.message, self.traceback, self.stage = kind, message, traceback, stage


def protect_this_process() -> None:
    """Let no process without CAP_SYS_PTRACE read this one's memory or /proc environment. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(4, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_DUMPABLE")


class Child:
    """One disposable sandboxed process. Made by ``Zygote.spawn``; one request at a time; ``kill`` from any thread."""

    def __init__(self, workdir: str, requests: socket.socket, status: socket.socket, output: int,
                 warn: Callable[[str], None]) -> None:
        self.workdir = workdir
        self.features: dict[str, str] = {}
        self.pid = 0  # of the child's first process, as seen here
        self._requests, self._status, self._output, self._warn = requests, status, output, warn
        self._lock = threading.RLock()
        self._tail = b""
        self._supervisor = 0
        self._exit: int | None = None
        self._error = ""
        self._flooded = self._killed = self._closed = False
        self._death: ChildDied | None = None
        self._gone = threading.Event()  # every process of this child has ended
        self._monitor = threading.Thread(target=self._watch, name="kernelband-child", daemon=True)
        self._monitor.start()

    @property
    def output_tail(self) -> str:
        """The last 8 KB of standard output and error, printable."""
        return clean(self._tail.decode(errors="replace"), TAIL_BYTES)

    def request(self, op: str, *, timeout_s: float, fds: Sequence[int] = (), **payload: Any) -> dict[str, Any]:
        """Run ``op`` in the child and return its reply.

        Raises CandidateError when it raised (the child can be asked again), ChildDied when it ended, broke the protocol
        or took longer than ``timeout_s`` seconds (it is killed), ValueError for a request over 1 MiB.
        """
        if len(fds) > MAX_FDS:
            raise ValueError(f"{len(fds)} descriptors, more than {MAX_FDS}")
        deadline = time.monotonic() + timeout_s
        identity = secrets.token_hex(8)
        with self._lock:
            if self._death is not None:
                raise ChildDied(self._death.kind, self._death.detail, self._death.output_tail)
            if self._closed:
                raise ChildDied("signal", "the child was killed before", self.output_tail)
            try:
                self._refuse_unasked()
                send(self._requests, {**payload, "op": op, "id": identity}, fds, deadline)
                reply = receive(self._requests, deadline)
                if reply is not None and reply.pop("id", None) != identity:
                    raise Malformed("the message answers another request")
            except Late:
                self._die("timeout", f"no answer to {op} within {timeout_s:g} s")
            except Malformed as error:
                self._die("protocol", str(error))
            except OSError:
                reply = None
            if reply is None:
                self._die(*self._reason())
        if not reply["ok"]:
            raise CandidateError(clean(reply["kind"][:200], 200), clean(reply["message"][:2000], 2000),
                                 clean(reply["traceback"], 4000), clean(reply["stage"][:200], 200))
        return reply

    def kill(self) -> None:
        """End everything that the child started, and remove its folder. Idempotent; warns when the end is not seen."""
        if not self._gone.is_set():
            self._killed = True
            self._ask_to_end()
            if not self._gone.wait(KILL_S / 2):
                if self._supervisor:  # it answers at once unless something stopped it
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(self._supervisor, signal.SIGKILL)
                if not self._gone.wait(KILL_S / 2):
                    self._warn(f"processes of a sandboxed child still run {KILL_S:g} s after the kill ({self.pid})")
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._monitor.join(5)
            self._requests.close()
            self._status.close()
            remove_tree(self.workdir)

    def _ask_to_end(self) -> None:
        with contextlib.suppress(OSError):
            self._status.send(b"K", socket.MSG_DONTWAIT)

    def _refuse_unasked(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if self._requests.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                raise Malformed("a message came that nobody asked for")

    def _reason(self) -> tuple[str, str]:
        """Why the stream ended, once the supervisor has said so."""
        if not self._gone.wait(2):
            return "protocol", "the child closed its connection and ran on"
        if self._flooded:
            return "flood", f"more than {FLOOD_BYTES >> 20} MiB of output"
        if self._exit is None or self._error:
            ended = self._error or "without a report: its supervisor or zygote was killed"
            return ("signal", "SIGKILL, from the trusted side") if self._killed else ("exit", ended)
        if self._exit < 0:
            with contextlib.suppress(ValueError):
                return "signal", signal.Signals(-self._exit).name
            return "signal", f"signal {-self._exit}"
        return "exit", f"exit code {self._exit}"

    def _die(self, kind: str, detail: str) -> NoReturn:
        self.kill()
        if self._flooded:  # the flood is the cause, whatever was noticed first
            kind, detail = "flood", f"more than {FLOOD_BYTES >> 20} MiB of output"
        self._death = ChildDied(kind, detail, self.output_tail)
        raise self._death

    def _watch(self) -> None:
        """Drain output and status until both end; runs in its own thread, so a full pipe never blocks the child."""
        poll = select.poll()
        status_fd, seen = self._status.fileno(), 0
        open_ends = {self._output, status_fd}
        for fd in open_ends:
            poll.register(fd, select.POLLIN)
        while open_ends:
            for fd, _ in poll.poll():
                try:
                    chunk = self._status.recv(1 << 14) if fd == status_fd else os.read(fd, 1 << 16)
                except ConnectionResetError:  # the other end closed without reading a "K"; what it sent comes next
                    continue
                if not chunk:
                    poll.unregister(fd)
                    open_ends.discard(fd)
                    if fd == status_fd:
                        self._gone.set()
                elif fd == status_fd:
                    self._note(json.loads(chunk))
                else:
                    seen += len(chunk)
                    self._tail = (self._tail + chunk)[-TAIL_BYTES:]
                    if seen > FLOOD_BYTES and not self._flooded:
                        self._flooded = True
                        self._ask_to_end()
        os.close(self._output)

    def _note(self, message: dict[str, Any]) -> None:
        """One line of the supervisor or init, which run no candidate code."""
        self._supervisor = message.get("supervisor", self._supervisor)
        self.pid = message.get("init", self.pid)
        if self._exit is None:
            self._exit = message.get("exit")
        self._error = message.get("error", self._error)


class Zygote:
    """Forks sandboxed children from one warm process. ``close`` (or the end of this process) ends all of them.

    ``mode``: "interpret", "compile", "cuda", or "bare" (only the operations load and ping).
    ``namespaces``: which to unshare. ``drop_uid``: as root, give each child an id of its own.
    ``hide``: folders and files that children must not see, beside home, /tmp and the like (a run folder, say).
    ``disk_bytes``: a child whose folder grows beyond it is killed (looked at twice a second).
    ``warn``: called once for each sandbox feature that is off though it was asked for.
    Raises SandboxError when the zygote cannot start; nothing of a candidate is involved then.
    """

    def __init__(self, mode: str, *, namespaces: Sequence[str] = NAMESPACES, drop_uid: bool = True,
                 hide: Sequence[str] = (), disk_bytes: int = 8 << 30,
                 warn: Callable[[str], None] = _log.warning) -> None:
        unknown = set(namespaces) - set(NAMESPACES)
        if unknown:
            raise ValueError(f"no such namespace: {', '.join(sorted(unknown))}")
        if "pid" in namespaces and "mount" not in namespaces:
            raise ValueError("a pid namespace needs a mount namespace, for a /proc that matches it")
        self.mode = mode
        self._namespaces, self._warn = list(namespaces), warn
        self._hide = [os.path.abspath(path) for path in (*hide, tempfile.gettempdir(), *_of_ray())]
        self._disk_bytes = disk_bytes
        self._drop_uid = drop_uid and os.geteuid() == 0
        self._lock = threading.Lock()
        self._children: list[Child] = []
        self._warned: set[str] = set()
        self._serial = 0
        self._closed = False
        self._start()

    @property
    def pid(self) -> int:
        """The zygote's process id."""
        return self._process.pid

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        packages = []
        for name in ("torch", "triton", "numpy"):
            spec = importlib.util.find_spec(name)
            if spec is None or spec.origin is None:
                raise SandboxError(f"{name} is not installed for {sys.executable}")
            packages.append(str(Path(spec.origin).parent.parent))
        packages = list(dict.fromkeys(packages))
        self._root = os.path.realpath(tempfile.mkdtemp(prefix="kernelband-"))
        environment = _environment(self.mode, self._root)
        self._keep = [sys.prefix, sys.base_prefix, *packages, str(INSIDE), *_libraries(environment)]
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, tempfile.TemporaryFile() as errors:
            command = [sys.executable, "-I", "-B", str(INSIDE / "main.py"), self.mode, str(theirs.fileno()), self._root]
            # own session: an interrupt at the terminal is for the trusted process, which then closes this one
            self._process = subprocess.Popen([*command, *packages], env=environment, cwd="/", stdin=subprocess.DEVNULL,
                                             stdout=errors, stderr=errors, pass_fds=[theirs.fileno()],
                                             start_new_session=True)
            theirs.close()
            self._control.settimeout(START_S)
            try:
                ready = self._control.recv(1 << 12)
            except OSError as error:
                ready, reason = b"", str(error)
            else:
                reason = "it ended"
            if not ready:
                self._stop()
                errors.seek(0)
                raise SandboxError(f"the {self.mode} zygote did not start ({reason}): "
                                   + clean(errors.read().decode(errors="replace"), 2000).strip())
            self._control.settimeout(SPAWN_S)

    def spawn(self) -> Child:
        """Fork a fresh child and wait until it can take requests. Raises SandboxError when it cannot be set up."""
        with self._lock:
            if self._closed:
                raise SandboxError("the zygote is closed")
            if self._process.poll() is not None:
                self._warn(f"the {self.mode} zygote ended ({self._process.returncode}); starting another")
                self._stop()
                self._start()
            child = self._fork()
            self._children = [*(c for c in self._children if not c._closed), child]
        try:
            hello = receive(child._requests, time.monotonic() + SPAWN_S)
        except (Malformed, Late, OSError) as error:
            hello, child._error = None, child._error or type(error).__name__
        if hello is None:
            child.kill()
            raise SandboxError(f"a child could not be set up: {child._error or 'it ended'}\n{child.output_tail}".strip())
        child.features = {str(name): str(state) for name, state in hello["features"].items()}
        for name, state in child.features.items():
            if state.startswith("off") and state != NOT_ASKED and "by design" not in state and name not in self._warned:
                self._warned.add(name)
                self._warn(f"sandbox feature '{name}' is {state}")
        return child

    def _fork(self) -> Child:
        self._serial += 1
        uid = _fresh_uid() if self._drop_uid else None
        workdir = os.path.join(self._root, f"child-{self._serial}")
        os.mkdir(workdir, 0o700)
        if uid is not None:
            os.chown(workdir, uid, uid)
        requests, their_requests = socket.socketpair()
        status, their_status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        output, their_output = os.pipe()
        message = {"mode": self.mode, "workdir": workdir, "uid": uid, "namespaces": self._namespaces,
                   "hide": self._hide, "keep": self._keep, "disk_bytes": self._disk_bytes}
        with their_requests, their_status:
            try:
                socket.send_fds(self._control, [json.dumps(message).encode()],
                                [their_requests.fileno(), their_status.fileno(), their_output])
            except OSError as error:
                requests.close()
                status.close()
                os.close(output)
                remove_tree(workdir)
                raise SandboxError(f"the zygote takes no request: {error}") from error
            finally:
                os.close(their_output)
        return Child(workdir, requests, status, output, self._warn)

    def close(self) -> None:
        """Kill all children, end the zygote, remove its folder. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for child in self._children:
                child.kill()
            self._stop()

    def _stop(self) -> None:
        self._control.close()
        try:
            self._process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        remove_tree(self._root)


def _environment(mode: str, home: str) -> dict[str, str]:
    """All that a zygote knows of this process's environment: a short list of names, so never a key."""
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    environment.setdefault("PATH", os.defpath)
    environment.update(HOME=home, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
    if mode == "interpret":
        environment["TRITON_INTERPRET"] = "1"
    if mode != "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = ""  # nothing but a measuring child may use the GPU
    else:
        # A context with two hardware queues is made faster than one with eight, which every candidate pays; two
        # still let two streams run beside each other.
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "2"
    return environment


def _of_ray() -> list[str]:
    """Where Ray was told to keep its sockets and its token, if not below /tmp and home, which are hidden anyway."""
    return [os.environ[name] for name in ("RAY_TMPDIR", "RAY_AUTH_TOKEN_PATH") if os.environ.get(name)]


def _libraries(environment: dict[str, str]) -> list[str]:
    """Folders named by the environment that must stay visible when they lie below a hidden one, but never a home."""
    named = environment.get("LD_LIBRARY_PATH", "").split(":")
    named += [environment.get(name, "") for name in ("CUDA_HOME", "TRITON_LIBCUDA_PATH")]
    named.append(os.path.dirname(environment.get("TRITON_PTXAS_PATH", "")))
    home = os.path.realpath(os.path.expanduser("~"))
    return [path for path in named if path and not (home + "/").startswith(os.path.realpath(path).rstrip("/") + "/")]


def _fresh_uid() -> int:
    """An id that nobody else uses: from a high, unassigned range where this user namespace has one."""
    with open("/proc/self/uid_map") as file:
        ranges = [[int(number) for number in line.split()] for line in file]
    wide = any(first <= 0x60000000 < first + count - (1 << 24) for first, _, count in ranges)
    uid = 0x60000000 + secrets.randbelow(1 << 24) if wide else 60000 + secrets.randbelow(1000)
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return uid
    return _fresh_uid()
