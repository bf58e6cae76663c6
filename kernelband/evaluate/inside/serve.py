"""The request loop of one sandboxed child, and the state that its operations share.

Owns: the wire format on the child's side, ``SESSION`` (the loaded candidate), the operations "load" and "ping", and
the child's private environment (folders, random generators).
Never: decides anything. Candidate code runs in this very process and can forge every reply; the trusted side treats
replies as evidence only.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import random
import socket
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

MODES = {"interpret": "interpret", "compile": "compiling", "cuda": "device", "bare": None}
MAX_MESSAGE_BYTES = 1 << 20
MAX_FDS = 16
Op = Callable[[dict[str, Any], list[int]], dict[str, Any]]


class Session:
    """What a child holds between requests. ``stage`` names the step that an error is blamed on; operations may set it."""

    def __init__(self) -> None:
        self.module: ModuleType | None = None
        self.entry: Callable[..., Any] | None = None
        self.workdir = ""
        self.stage = ""


SESSION = Session()


def load(request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
    """Import ``request["source"]`` as module "candidate" and keep its callable ``request["entry"]``."""
    path = os.path.join(SESSION.workdir or os.getcwd(), "candidate.py")
    with open(path, "w", encoding="utf-8") as file:
        file.write(request["source"])
    spec = importlib.util.spec_from_file_location("candidate", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    SESSION.module, SESSION.entry = module, None
    sys.modules["candidate"] = module
    spec.loader.exec_module(module)
    entry = getattr(module, request["entry"], None)
    if entry is None:
        raise LookupError(f"no such entry point: {request['entry']}")
    if not callable(entry):
        raise TypeError(f"the entry point {request['entry']} is a {type(entry).__name__}, not a function")
    SESSION.entry = entry
    return {"ok": True}


def ping(request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
    """Answer at once: the process lives. The ids are those seen from inside."""
    return {"ok": True, "pid": os.getpid(), "uid": os.getuid()}


OPS: dict[str, Op] = {"load": load, "ping": ping}


def register(mode: str) -> None:
    """Add the operations of ``mode``. Called once, in the zygote; an unknown mode or absent module is an error."""
    name = MODES[mode]
    if name is not None:
        OPS.update(importlib.import_module(name).OPS)


def prepare(workdir: str) -> None:
    """Make the child's process its own: folders, environment, random generators (a fork copies its parent's)."""
    SESSION.workdir = workdir
    folders = {"TMPDIR": "tmp", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor",
               "CUDA_CACHE_PATH": "nv", "XDG_CACHE_HOME": "cache"}
    for variable, folder in folders.items():
        os.environ[variable] = os.path.join(workdir, folder)
        os.makedirs(os.environ[variable], mode=0o700, exist_ok=True)
    os.environ["HOME"] = os.environ["TRITON_HOME"] = workdir
    tempfile.tempdir = None
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    random.seed(os.urandom(32))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(list(os.urandom(32)))
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(int.from_bytes(os.urandom(7), "little"))


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next request and its descriptors; None when the trusted side has closed the connection."""
    data, fds = b"", []
    needed = 4
    while len(data) < needed:
        space = socket.CMSG_SPACE(MAX_FDS * 4)
        chunk, ancillary, _, _ = connection.recvmsg(min(needed - len(data), 1 << 16), space, socket.MSG_CMSG_CLOEXEC)
        if not chunk:
            return None
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds += list(struct.unpack(f"{len(payload) // 4}i", payload[: len(payload) // 4 * 4]))
        data += chunk
        if needed == 4 and len(data) == 4:
            needed += struct.unpack("<I", data)[0]
    return json.loads(data[4:]), fds


def send(connection: socket.socket, reply: dict[str, Any]) -> None:
    """Send one message. Raises ValueError for one that is too long or holds a number that is not finite."""
    body = json.dumps(reply, allow_nan=False).encode()
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"the reply has {len(body)} bytes, more than {MAX_MESSAGE_BYTES}")
    connection.sendall(struct.pack("<I", len(body)) + body)


def describe(error: BaseException) -> dict[str, Any]:
    """An error as a reply. Whatever the candidate's exception class does in ``__str__`` is contained."""
    try:
        message = str(error)
    except BaseException:
        message = "(its text could not be made)"
    try:
        text = "".join(traceback.format_exception(error))
    except BaseException:
        text = ""
    kind = type(error).__name__
    return {"ok": False, "kind": kind[:200], "message": message[:2000], "traceback": text[-4000:],
            "stage": str(getattr(error, "stage", SESSION.stage))[:200]}


def answer(request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
    """Run one operation. Everything that it raises, SystemExit and KeyboardInterrupt too, becomes an error reply."""
    try:
        SESSION.stage = request["op"]
        operation = OPS.get(request["op"])
        if operation is None:
            raise LookupError(f"no such operation: {request['op']}")
        reply = {"ok": True, **operation(request, fds)}
    except BaseException as error:
        reply = describe(error)
    finally:
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)
    return reply


def run(connection: socket.socket, features: dict[str, str], workdir: str) -> None:
    """Serve until the trusted side closes the connection."""
    prepare(workdir)
    send(connection, {"ok": True, "id": "hello", "features": features})
    while (received := receive(connection)) is not None:
        request, fds = received
        identity = request.get("id")
        reply = answer(request, fds)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        try:
            send(connection, {**reply, "id": identity})
        except (TypeError, ValueError, RecursionError) as error:
            SESSION.stage = "reply"
            send(connection, {**describe(error), "id": identity})
